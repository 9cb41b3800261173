//! Jobs that others than `fulmen-run` have started: no agent watches over their ranks.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::bench::{Bench, HANG};

/// A rank on this host, as torchrun starts it. Jobs are told apart by a name.
fn rank(bench: &Bench, job: &str, (rank, size): (usize, usize), program: &str, args: &[&str]) -> Child {
    let mut command = Command::new(program);
    command.args(args).current_dir(bench.0.path()).env("XDG_RUNTIME_DIR", bench.0.path());
    for name in ["RANK", "LOCAL_RANK"] {
        command.env(name, rank.to_string());
    }
    for name in ["WORLD_SIZE", "LOCAL_WORLD_SIZE"] {
        command.env(name, size.to_string());
    }
    command.env("MASTER_ADDR", job).env("MASTER_PORT", "1").env("BENCH_RANK", "busy");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The rest is not waited for: it takes a minute.
#[test]
fn who_waits_says_for_whom() {
    let bench = Bench::new();
    let start = |job, n| rank(&bench, job, (n, 3), env!("CARGO_BIN_EXE_hpl-run"), &["-N", "10"]);
    // Rank 1 of one job has nobody to meet, rank 0 of the other misses one.
    let mut ranks = [start("first", 1), start("second", 0), start("second", 2)];
    for (at, who, whom) in [(0, "fulmen: rank 1 (", "rank 0 of 3"), (1, "fulmen: rank 0 (", "rank 1 of 3")] {
        let mut line = String::new();
        BufReader::new(ranks[at].stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with(who) && line.contains(&format!(") waits for {whom} at ")), "{line}");
        assert!(line.contains(", and gives up in 5"), "{line}");
    }
    for rank in &mut ranks {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
}

/// One rank is killed while the other computes: it does not hear of that, and is ended, after its last words.
#[test]
fn a_rank_that_computes_ends_with_its_job() {
    let bench = Bench::new();
    let me = std::env::current_exe().unwrap().display().to_string();
    let start = |n| rank(&bench, "busy", (n, 2), &me, &["--exact", "as_rank", "--nocapture"]);
    let (mut zero, mut one) = (start(0), start(1));
    bench.pids(2);
    one.kill().unwrap();
    one.wait().unwrap();
    let until = Instant::now() + HANG;
    let code = loop {
        if let Some(status) = zero.try_wait().unwrap() {
            break status.code();
        }
        if Instant::now() > until {
            zero.kill().unwrap();
            panic!("it goes on");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let (mut out, mut err) = (String::new(), String::new());
    zero.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    zero.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(code, Some(4), "{out}{err}");
    assert!(
        err.contains("fulmen: rank 0 (") && err.contains("was still busy 1.8 s after the job's end"),
        "{err}"
    );
    assert!(err.contains("rank 1 (") && err.contains("is gone"), "{err}");
    assert!(out.contains("last words: rank 1 ("), "{out}");
}

/// The environment says that there are others, and not where: nobody computes alone then as if that were all. A script in a Slurm
/// allocation may, and is told.
#[test]
fn nobody_is_alone_without_a_word() {
    let run = |vars: &[(&str, &str)], args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpl-run"));
        command.args(args).envs(vars.iter().copied()).stdin(Stdio::null());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (name, rank) in [("WORLD_SIZE", "RANK"), ("FULMEN_SIZE", "FULMEN_RANK"), ("PMI_SIZE", "PMI_RANK")] {
        let (code, err) = run(&[(name, "2")], &["-N", "10", "--check"]);
        let said = format!("{name}: 2: says that this is a rank of a job, but {rank} is not set");
        assert!(
            code == Some(2) && err.contains(&said) && err.contains(&format!("unset {name}")),
            "{code:?} {err}"
        );
    }
    let allocation =
        [("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "4"), ("SLURM_NNODES", "2"), ("SLURM_PROCID", "0")];
    let (code, err) = run(&allocation, &["-N", "10", "--check"]);
    let said = "fulmen: the Slurm allocation 7 has 4 tasks on 2 nodes, and this process is none of them: it runs alone";
    assert!(
        code == Some(0) && err.matches(said).count() == 1 && err.contains("`srun PROGRAM`"),
        "{code:?} {err}"
    );
}

/// A script between launcher and rank (`mpirun -n 2 sh -c 'hpl-run; ...'`): the ranks meet all the same.
#[cfg(target_os = "linux")]
#[test]
fn ranks_behind_scripts_meet() {
    let bench = Bench::new();
    let start = |rank: &str| {
        let mut command = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_hpl-run");
        command.args([
            "-c",
            "sh -c '\"$0\" -N 100 -P 1 -Q 2 --threads 1 -q --output -; exit $?' \"$0\"; exit $?",
            program,
        ]);
        for (name, value) in
            [("PMI_RANK", rank), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", rank), ("MPI_LOCALNRANKS", "2")]
        {
            command.env(name, value);
        }
        command.env("XDG_RUNTIME_DIR", bench.0.path()).current_dir(bench.0.path()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start("0"), start("1")].map(|rank| rank.wait_with_output().unwrap());
    assert!(ranks.iter().all(|r| r.status.code() == Some(0)), "{ranks:?}");
    assert!(String::from_utf8_lossy(&ranks[0].stdout).contains("PASSED"), "{ranks:?}");
}

/// `mpirun -n 2 fulmen-run -n 2 ...` would be two jobs on the same cores.
#[test]
fn a_launcher_that_is_a_rank_is_refused() {
    let bench = Bench::new();
    for (size, code) in [("2", 2), ("1", 0)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fulmen-run"));
        command.args(["-n", "1", "true"]).current_dir(bench.0.path()).stdin(Stdio::null());
        command.env("OMPI_COMM_WORLD_RANK", "0").env("OMPI_COMM_WORLD_SIZE", size);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(code == 0 || said.contains("is itself rank 0 of 2, started by Open MPI"), "{said}");
    }
}
