//! `fulmen-run` with real processes: local ranks, and "hosts" that are this machine behind a stub of ssh.

mod bench;
mod direct;
mod tree;

use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::bench::{Bench, HANG, SLEEP, all_gone, parent, signal_to, when};

#[test]
fn ranks_get_their_numbers_input_and_output() {
    let bench = Bench::new();
    let ended = bench.run(&[
        "-n",
        "3",
        "-x",
        "A=b c",
        "--tag-output",
        "sh",
        "-c",
        "echo $FULMEN_RANK $FULMEN_SIZE $FULMEN_LOCAL_RANK $FULMEN_LOCAL_SIZE \"$A\"; echo err >&2",
    ]);
    ended.expect(0, &["[0] err", "[1] err", "[2] err"]);
    assert_eq!(ended.sorted(), ["[0] 0 3 0 3 b c", "[1] 1 3 1 3 b c", "[2] 2 3 2 3 b c"]);
    let mut started = bench.start(&["-n", "2", "sh", "-c", "cat; pwd"]);
    // More than anything on the way holds.
    let sent = "a line of input\n".repeat(20_000);
    let mut stdin = started.0.stdin.take().unwrap();
    let feeder = std::thread::spawn({
        let sent = sent.clone();
        move || stdin.write_all(sent.as_bytes()).unwrap()
    });
    let mut out = started.0.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).unwrap();
        text
    });
    feeder.join().unwrap();
    started.end().expect(0, &[]);
    let out = reader.join().unwrap();
    let here = bench.0.path().canonicalize().unwrap().display().to_string();
    assert_eq!(out.matches("a line of input\n").count(), 20_000);
    assert_eq!(
        out.lines().filter(|l| Path::new(l).canonicalize().is_ok_and(|p| p == Path::new(&here))).count(),
        2
    );
}

#[test]
fn hosts_behind_ssh() {
    let bench = Bench::new();
    let ssh = bench.ssh();
    let args = ["--ssh", &ssh, "--host", "a:2,b", "--map-by", "node", "--tag-output", "sh", "-c"];
    let ended = bench.run(&[&args[..], &["echo $FULMEN_LOCAL_RANK/$FULMEN_LOCAL_SIZE"]].concat());
    ended.expect(0, &[]);
    assert_eq!(ended.sorted(), ["[0] 0/2", "[1] 0/1", "[2] 1/2"]);
    // To files.
    let ended = bench.run(&[
        "--ssh",
        &ssh,
        "--host",
        "a,b",
        "--output-dir",
        "o",
        "--output",
        "0",
        "sh",
        "-c",
        "echo $FULMEN_RANK",
    ]);
    ended.expect(0, &[]);
    assert_eq!(ended.out, "0\n");
    assert_eq!(std::fs::read_to_string(bench.path("o/rank.1.out")).unwrap(), "1\n");
    // With fewer ranks, and a file that does not take what is written.
    let fewer = ["--output-dir", "o", "-n", "1", "echo", "x"];
    bench.run(&fewer).expect(0, &["o has files of an earlier job with more ranks: rank.1.out and on"]);
    if cfg!(target_os = "linux") {
        std::fs::remove_file(bench.path("o/rank.0.out")).unwrap();
        std::os::unix::fs::symlink("/dev/full", bench.path("o/rank.0.out")).unwrap();
        bench.run(&fewer).expect(3, &["cannot be written: o/rank.0.out: No space left"]);
    }
}

/// mlx.launch sets a hostfile's variables; a login that ends no line is no harm.
#[test]
fn variables_of_a_hostfile_and_a_login_that_talks() {
    let bench = Bench::new();
    let ssh = bench.script("stub", "host=$1; shift; printf '\\033]0;%s' $host; exec sh -c \"$*\"");
    let hosts =
        r#"{"backend": "any", "envs": ["A=of file", "B=too"], "hosts": [{"ssh": "a"}, {"ssh": "b"}]}"#;
    std::fs::write(bench.path("hosts.json"), hosts).unwrap();
    let job = ["--ssh", &ssh, "--hostfile", "hosts.json", "-x", "B=of mine", "sh", "-c", "echo $A, $B"];
    let ended = bench.run(&job);
    ended.expect(0, &[]);
    assert_eq!(ended.out, "of file, of mine\n".repeat(2), "{ended:?}");
}

/// What ranks say is not to be lost.
#[cfg(target_os = "linux")]
#[test]
fn a_closed_stdout_is_told() {
    for args in ["-n 2 true", "-n 1 $0 doctor"] {
        let script = format!("exec {} {args} >&-", env!("CARGO_BIN_EXE_fulmen-run"));
        let mut command = Command::new("sh");
        let output = command.args(["-c", &script, env!("CARGO_BIN_EXE_hpl-run")]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("stdout is closed") && said.contains(">/dev/null"), "{said}");
    }
}

#[test]
fn copies_are_private_and_removed() {
    let bench = Bench::new();
    let far = bench.path("far");
    std::fs::create_dir(&far).unwrap();
    let ssh = bench.script("stub", "echo Welcome to $1; host=$1; shift; TMPDIR=$BENCH/far exec sh -c \"$*\"");
    let program = bench.script("prog", "ls -ld $0 $BENCH/far/*; echo $0 $1");
    let ended = bench.run(&["--ssh", &ssh, "--host", "a", "--copy", &program, "x"]);
    ended.expect(0, &[]);
    let at = far.display().to_string();
    assert!(ended.out.lines().any(|l| l.starts_with(&at) && l.ends_with("/program x")), "{ended:?}");
    assert_eq!(std::fs::read_dir(&far).unwrap().count(), 0, "{ended:?}");
}

#[test]
fn the_first_failing_rank_is_named_and_gives_its_code() {
    let bench = Bench::new();
    let ssh = bench.ssh();
    let args = ["--ssh", &ssh, "--host", "a:2,b:2", "sh", "-c"];
    let ended = bench.run(
        &[&args[..], &[&format!("[ $FULMEN_RANK = 2 ] && {{ {}; exit 7; }}; {SLEEP}", when(6))]].concat(),
    );
    ended.expect(7, &["rank 2 (b, pid ", "ended with exit code 7"]);
    let pids = bench.pids(6);
    all_gone(&pids);
    // One that does not listen to SIGTERM.
    let bench = Bench::new();
    let ended = bench.run(&[
        "-n",
        "2",
        "--silence",
        "6",
        "sh",
        "-c",
        &format!("trap '' TERM; [ $FULMEN_RANK = 1 ] && {{ {}; exit 3; }}; {SLEEP}", when(2)),
    ]);
    ended.expect(3, &["rank 1 (localhost, pid ", "ended with exit code 3"]);
    all_gone(&bench.pids(2));
}

#[test]
fn a_killed_rank() {
    let bench = Bench::new();
    let started = bench.start(&["-n", "3", "sh", "-c", SLEEP]);
    bench.pids(6);
    let one: u32 = std::fs::read_to_string(bench.path("pid.1")).unwrap().trim().parse().unwrap();
    signal_to(one, libc::SIGKILL);
    started.end().expect(4, &["rank 1 (localhost, pid ", "was killed by signal 9 (SIGKILL)"]);
    all_gone(&bench.pids(6));
}

/// What has left its rank's process group, and has no parent but the system, ends with the last rank; not before, for the others
/// may need it.
#[test]
#[cfg(target_os = "linux")]
fn what_a_rank_leaves_behind_ends_with_it() {
    let bench = Bench::new();
    let left = "(setsid sh -c 'echo $$ >$BENCH/pid.left.$FULMEN_RANK; exec sleep 300' &)";
    let until_rank_0_goes = "while [ ! -e $BENCH/go ]; do sleep 0.05; done";
    let started = bench.start(&[
        "-n",
        "2",
        "sh",
        "-c",
        &format!("{left}; [ $FULMEN_RANK = 1 ] && exit 0; {until_rank_0_goes}"),
    ]);
    let pids = bench.pids(2);
    std::thread::sleep(Duration::from_millis(200));
    // SAFETY: asks whether they are there.
    assert!(pids.iter().all(|pid| unsafe { libc::kill(*pid as i32, 0) } == 0), "gone with the first rank");
    std::fs::write(bench.path("go"), "").unwrap();
    let began = Instant::now();
    started.end().expect(0, &[]);
    assert!(began.elapsed() < bench::HANG);
    all_gone(&pids);
}

/// A file may not grow beyond the limit: that is told, and the launcher itself does not die of it.
#[test]
fn a_limit_of_files_sizes_is_told() {
    let bench = Bench::new();
    let fulmen_run = env!("CARGO_BIN_EXE_fulmen-run");
    let line = format!("ulimit -f 1; exec {fulmen_run} --output-dir o sh -c 'head -c 100000 /dev/zero'");
    let output = Command::new("sh").args(["-c", &line]).current_dir(bench.0.path()).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(err.contains("the ranks' output cannot be written: o/rank.0.out: File too large"), "{err}");
}

#[test]
fn a_stopped_rank() {
    let bench = Bench::new();
    let started = bench.start(&["-n", "2", "--silence", "6", "sh", "-c", SLEEP]);
    bench.pids(4);
    let one: u32 = std::fs::read_to_string(bench.path("pid.1")).unwrap().trim().parse().unwrap();
    signal_to(one, libc::SIGSTOP);
    let ended = started.end();
    ended.expect(4, &["rank 1 (localhost, pid ", "was stopped for "]);
    let told =
        ended.err.split("was stopped for ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
    assert!(told >= Some(3.0), "sooner than half of the silence: {ended:?}");
    all_gone(&bench.pids(4));
}

/// The agent is the ranks' parent.
#[test]
fn a_killed_or_stopped_agent() {
    let cases =
        [(libc::SIGKILL, "the connection to its agent ended"), (libc::SIGSTOP, "its agent fell silent")];
    for (signal, how) in cases {
        let bench = Bench::new();
        let ssh = bench.ssh();
        let started = bench.start(&["--ssh", &ssh, "--host", "a,b", "--silence", "6", "sh", "-c", SLEEP]);
        let pids = bench.pids(4);
        let one: u32 = std::fs::read_to_string(bench.path("pid.1")).unwrap().trim().parse().unwrap();
        signal_to(parent(one), signal);
        started.end().expect(4, &[&format!("b: {how}, and with it rank 1")]);
        all_gone(&pids);
    }
}

#[test]
fn a_killed_or_stopped_launcher() {
    for signal in [libc::SIGKILL, libc::SIGSTOP] {
        let bench = Bench::new();
        let ssh = bench.ssh();
        let mut started = bench.start(&["--ssh", &ssh, "--host", "a,b", "--silence", "6", "sh", "-c", SLEEP]);
        let mut pids = bench.pids(4);
        let one: u32 = std::fs::read_to_string(bench.path("pid.1")).unwrap().trim().parse().unwrap();
        pids.push(parent(one));
        started.signal(signal);
        all_gone(&pids);
        started.signal(libc::SIGCONT);
        if signal == libc::SIGSTOP {
            started.end().expect(4, &["the launcher was silent for "]);
        } else {
            started.0.wait().unwrap();
        }
    }
}

/// ssh itself is killed while the ranks run.
#[test]
fn an_ssh_that_dies() {
    let bench = Bench::new();
    // The agent is a child of this ssh, as sshd's would be of another machine's.
    let ssh = bench.script("stub", "host=$1; shift; echo $$ >$BENCH/ssh.$host; sh -c \"$*\"; exit 255");
    let started = bench.start(&["--ssh", &ssh, "--host", "a,b", "--silence", "6", "sh", "-c", SLEEP]);
    let pids = bench.pids(4);
    let ssh: u32 = std::fs::read_to_string(bench.path("ssh.b")).unwrap().trim().parse().unwrap();
    signal_to(ssh, libc::SIGKILL);
    let ended = started.end();
    ended.expect(4, &["b: the connection to its agent ended, and with it rank 1"]);
    all_gone(&pids);
}

#[test]
fn k7_04_hosts_that_do_not_let_us_in() {
    let bench = Bench::new();
    let ssh = bench.script(
        "stub",
        "case $1 in\n\
         a) shift; exec sh -c \"$*\";;\n\
         b) echo 'u@b: Permission denied (publickey,password).' >&2; exit 255;;\n\
         c) echo '@@@@@@' >&2; echo '@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @' >&2; \
            echo 'Host key verification failed.' >&2; exit 255;;\n\
         d) echo 'ssh: Could not resolve hostname d: Name or service not known' >&2; exit 255;;\n\
         e) echo 'sh: 1: exec: /x/fulmen-run: not found' >&2; exit 127;;\n\
         f) exec sleep 300;;\n\
         g) echo 'fulmen job 0 0.0.0'; sleep 1;;\n\
         esac",
    );
    for (host, words) in [
        (
            "b",
            &[
                "b: no agent could be started",
                "Permission denied (publickey,password).",
                "stub b true` works",
            ][..],
        ),
        (
            "c",
            &["REMOTE HOST IDENTIFICATION HAS CHANGED!", "Host key verification failed.", "ssh-keygen -R c"],
        ),
        ("d", &["Could not resolve hostname d", "exit status 255"]),
        ("e", &["not found", "--agent-path", "--copy"]),
        ("f", &["f: no answer from its agent within 1.0 s"]),
        ("g", &["g: no agent could be started", "another version"]),
    ] {
        let hosts = format!("a,{host}");
        let ended = bench.run(&[
            "--ssh",
            &ssh,
            "--start-timeout",
            if host == "f" { "1" } else { "30" },
            "--host",
            &hosts,
            "sh",
            "-c",
            "echo started",
        ]);
        ended.expect(4, words);
        assert_eq!(ended.out, "", "a rank was started: {ended:?}");
    }
    let ended = bench.run(&["--ssh", "/nonexistent/ssh", "--host", "a", "true"]);
    ended.expect(3, &["a: /nonexistent/ssh could not be started"]);
}

#[test]
fn signals_to_the_launcher() {
    for (signal, twice) in [(libc::SIGINT, false), (libc::SIGTERM, false), (libc::SIGINT, true)] {
        let bench = Bench::new();
        let program = if twice { format!("trap '' TERM; {SLEEP}") } else { SLEEP.to_string() };
        let ssh = bench.ssh();
        let started = bench.start(&["--ssh", &ssh, "--host", "localhost,b", "sh", "-c", &program]);
        let pids = bench.pids(4);
        started.signal(signal);
        if twice {
            std::thread::sleep(Duration::from_millis(200));
            started.signal(signal);
        }
        started.end().expect(5, &["fulmen-run: interrupted by SIG"]);
        all_gone(&pids);
    }
}

#[test]
fn what_cannot_be_started_is_said_before_anything_is() {
    let bench = Bench::new();
    let ssh = bench.ssh();
    bench.run(&["-n", "2", "no-such-program"]).expect(2, &["PROGRAM: no-such-program: is neither in PATH"]);
    bench.run(&["--hostfile", "none", "true"]).expect(2, &["--hostfile: none: cannot be read"]);
    bench.run(&["-n", "0", "true"]).expect(2, &["-n: 0: a job has at least one rank"]);
    bench.run(&["-x", "NO_SUCH_VARIABLE", "true"]).expect(2, &["is not set here"]);
    for owned in ["FULMEN_SIZE=1", "FULMEN_LOCAL_RANK=0", "FULMEN_SHM=1"] {
        bench.run(&["-x", owned, "true"]).expect(2, &[owned, "is set for each rank by fulmen-run itself"]);
    }
    bench.run(&["-x", "A B=x", "true"]).expect(2, &["-x: A B=x: is no name of a variable"]);
    bench.run(&["-n", "100000", "true"]).expect(2, &["-n: 100000: a job has 65536 ranks at most"]);
    bench.run(&["-n", "5000", "true"]).expect(2, &["puts 5000 ranks on localhost, and a host takes 1024"]);
    bench.run(&["--host", "", "true"]).expect(2, &["--host: '': is empty"]);
    // Who refuses has said why; nobody else is to blame, nor ssh.
    let ended = bench.run(&["--ssh", &ssh, "--host", "a,b", "--wdir", "/nonexistent", "true"]);
    ended.expect(2, &["--wdir: /nonexistent"]);
    assert!(!ended.err.contains("no agent") && !ended.err.contains("exit status"), "{ended:?}");
    // Nothing of ours at the other end.
    bench
        .run(&["--ssh", "true", "--host", "a", "true"])
        .expect(4, &["without having started", "`true a true` works"]);
    // An ssh with a blank in an argument.
    let blank = bench.script("blank", "[ \"$2\" = 'x y' ] || exit 9; shift 3; exec sh -c \"$*\"");
    let ended = bench.run(&["--ssh", &format!("{blank} -o 'x y'"), "--host", "a", "echo", "here"]);
    ended.expect(0, &[]);
    assert_eq!(ended.out, "here\n");
    // Another build on the other host: the stub's host has an older file.
    let program = bench.script("prog", "echo new");
    let ssh = bench.script("other", "shift; echo '#!/bin/sh' >$BENCH/prog; exec sh -c \"$*\"");
    let ended = bench.run(&["--ssh", &ssh, "--host", "a", &program]);
    ended.expect(2, &["a: ", "prog is of another build here", "--copy", "--any-build"]);
    std::fs::write(bench.path("hosts"), "# two\r\nlocalhost slots=1\r\nlocalhost").unwrap();
    let ended = bench.run(&["--hostfile", "hosts", "sh", "-c", "echo $FULMEN_SIZE"]);
    ended.expect(0, &[]);
    assert_eq!(ended.out, "2\n2\n");
}

#[test]
fn a_time_limit() {
    // It counts from the start of the launcher: a machine that is too busy for all ranks to begin in it gets more.
    let all_had_begun = ["1", "8", "30"].iter().any(|limit| {
        let bench = Bench::new();
        let started = bench.start(&["-n", "2", "--timeout", limit, "sh", "-c", SLEEP]);
        started.end().expect(4, &["as long as --timeout lets it"]);
        let pids = bench.pids(0);
        all_gone(&pids);
        pids.len() == 4
    });
    assert!(all_had_begun);
}

#[test]
fn nobody_reads_the_output() {
    let bench = Bench::new();
    let mut started = bench.start(&["-n", "2", "sh", "-c", "while :; do echo y; done"]);
    drop(started.0.stdout.take());
    started.end().expect(3, &["the ranks' output cannot be written: "]);
}

/// What the ranks of `ranks_of_the_library` and of others run: this test program, as a rank. Otherwise there is nothing to do.
#[test]
fn as_rank() {
    let Ok(what) = std::env::var("BENCH_RANK") else { return };
    let result = (|| {
        let world = fulmen::World::from_env(&fulmen::Setup { threads: 1, ..Default::default() })?;
        let job = world.job().expect("a launcher has started this");
        let group = fulmen::comm::Group::all(world.fabric().clone())?;
        let mut sum = [1.0 + world.rank() as f64];
        group.all_sum(&mut sum)?;
        println!("sum {} on {} {:?}", sum[0], job.host(world.rank()), job.local());
        if what == "cores" {
            println!("cores {:?}", fulmen::kernels::allowed_cores());
        }
        if what == "busy" {
            job.last_words(|e| println!("last words: {e}"));
            std::fs::write(format!("pid.{}", world.rank()), std::process::id().to_string()).unwrap();
            std::thread::sleep(2 * bench::HANG); // "computes"
        }
        if what == "wait" {
            std::fs::write(format!("pid.{}", world.rank()), std::process::id().to_string()).unwrap();
            loop {
                group.barrier()?;
            }
        }
        Ok::<(), fulmen::Error>(())
    })();
    std::process::exit(result.map_or_else(|e| e.exit_code().into(), |()| 0));
}

#[test]
fn ranks_of_the_library() {
    let bench = Bench::new();
    let ssh = bench.ssh();
    let me = std::env::current_exe().unwrap().display().to_string();
    let args = |what: &'static str| {
        let all = [
            "--ssh",
            &ssh,
            "--host",
            "a:2,b",
            "--silence",
            "6",
            "-x",
            what,
            &me,
            "--exact",
            "as_rank",
            "--nocapture",
        ];
        all.map(str::to_string)
    };
    let as_strs = |v: &[String]| v.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
    let run = as_strs(&args("BENCH_RANK=sum"));
    let ended = bench.run(&run.split('\n').collect::<Vec<_>>());
    ended.expect(0, &[]);
    let mut told: Vec<&str> = ended.out.lines().filter_map(|l| l.find("sum ").map(|at| &l[at..])).collect();
    told.sort_unstable();
    assert_eq!(told, ["sum 6 on a (0, 2)", "sum 6 on a (1, 2)", "sum 6 on b (0, 1)"]);
    // One is killed, or the launcher interrupted, within a collective.
    for signal in [libc::SIGKILL, libc::SIGINT] {
        let bench = Bench::new();
        let wait = as_strs(&args("BENCH_RANK=wait"));
        let started = bench.start(&wait.split('\n').collect::<Vec<_>>());
        let pids = bench.pids(3);
        if signal == libc::SIGINT {
            started.signal(signal);
            started.end().expect(5, &["interrupted"]);
        } else {
            let two = std::fs::read_to_string(bench.path("pid.2")).unwrap();
            signal_to(two.trim().parse().unwrap(), signal);
            started.end().expect(4, &["rank 2 (b, pid ", "was killed by signal 9 (SIGKILL)"]);
        }
        all_gone(&pids);
    }
}

/// `--bind`: the threads of the ranks of a host are on disjoint cores, or where the system puts them.
#[test]
fn bound_ranks() {
    let bench = Bench::new();
    let all = fulmen::kernels::allowed_cores();
    if all.len() < 2 {
        return println!("skipped: no two cores, or the system does not tell them");
    }
    let me = std::env::current_exe().unwrap().display().to_string();
    let program = [&me, "--exact", "as_rank", "--nocapture"];
    for (bind, expected) in
        [("core", [all[..1].to_vec(), all[1..2].to_vec()]), ("none", [all.clone(), all.clone()])]
    {
        let args = ["-n", "2", "--bind", bind, "-x", "BENCH_RANK=cores"];
        let ended = bench.run(&[&args[..], &program[..]].concat());
        ended.expect(0, &[]);
        let mut cores: Vec<&str> =
            ended.out.lines().filter_map(|l| l.find("cores ").map(|at| &l[at + 6..])).collect();
        cores.sort_unstable();
        assert_eq!(cores, expected.map(|cores| format!("{cores:?}")), "--bind {bind}: {ended:?}");
    }
    let args = ["-x", "BENCH_RANK=sum", "-x", "FULMEN_BIND=maybe"];
    bench.run(&[&args[..], &program[..]].concat()).expect(2, &[]);
}

/// Each two ranks by the best that joins them, or by what was asked for, or an error.
#[test]
fn what_joins_the_ranks() {
    let bench = Bench::new();
    let ssh = bench.ssh();
    let program = env!("CARGO_BIN_EXE_hpl-run");
    let work = ["-N", "100", "--nb", "16", "-P", "1", "-Q", "3", "--threads", "1"];
    let run = |launcher: &[&str], flags: &[&str]| {
        let hosts = ["--ssh", ssh.as_str(), "--host", "a:2,b"];
        bench.run(&[&hosts[..], launcher, &[program], &work, flags].concat())
    };
    let ended = run(&[], &["--verbose"]);
    ended.expect(
        0,
        &[
            "fabric mixed",
            "  a: ranks 0 1\n  b: rank 2\n",
            "  rank 0 (a) and rank 1 (a): shm\n",
            "  rank 0 (a) and rank 2 (b): tcp over lo (",
            "  rank 1 (a) and rank 2 (b): tcp over lo (",
        ],
    );
    for ended in [run(&["--fabric", "tcp"], &[]), run(&[], &["--fabric", "tcp"])] {
        ended.expect(0, &["PASSED", "fabric tcp"]);
        assert!(!ended.err.contains("rank 0 (a)"), "told without being asked: {ended:?}");
    }
    run(&[], &["--fabric", "shm"]).expect(2, &["fabric: shm: ", "they are on different hosts"]);
    run(&[], &["--fabric", "mem"]).expect(2, &["--fabric: mem: is for ranks of this program's own"]);
    run(&["--interfaces", "lo"], &[]).expect(0, &["PASSED"]);
    run(&[], &["--interfaces", "no_such_interface"]).expect(2, &["no_such_interface"]);
    // What only a launcher's ranks have is refused without one.
    let alone = |flags: &[&str]| {
        let output =
            Command::new(program).args(["-N", "10"]).args(flags).current_dir(bench.0.path()).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for flags in [["--fabric", "tcp"], ["--interfaces", "lo"]] {
        let (code, said) = alone(&flags);
        assert!(code == Some(2) && said.contains("is for ranks that a launcher has started"), "{said}");
    }
}

/// Two emulated hosts with a cable between them, and what makes ranks use them.
#[cfg(target_os = "linux")]
fn cabled() -> (fulmen_emu_verbs::Installed, [String; 2]) {
    use fulmen_emu_verbs::{Profile, World};
    let world = World::cabled(Profile::Apple, 2, &[(0, 1)]).install().unwrap();
    let vars = [
        format!("FULMEN_VERBS_LIB={}", world.library().display()),
        format!("FULMEN_EMU={}", world.folder().display()),
    ];
    (world, vars)
}

/// A hostfile of mlx.launch for them, where a's end of the cable is `device`.
#[cfg(target_os = "linux")]
fn hosts_with(device: &str) -> String {
    format!(
        r#"[{{"ssh": "a", "ips": [], "rdma": [null, "{device}"]}}, {{"ssh": "b", "ips": [], "rdma": ["rdma_en10", null]}}]"#
    )
}

/// The device matrix of mlx.launch's hostfile reaches the ranks; a device that is not there costs a step, with its reason.
#[test]
#[cfg(target_os = "linux")]
fn cables_of_a_hostfile() {
    use fulmen_emu_verbs::{Call, Kind, Profile, Trap, World};
    let bench = Bench::new();
    let ssh = bench.ssh();
    let (world, vars) = cabled();
    let run = |device: &str, launcher: &[&str]| {
        let hosts = hosts_with(device);
        // A pipe, as the shell's <(...): it can be read once.
        let pipe = bench.path("hosts.json");
        let _ = std::fs::remove_file(&pipe);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::thread::spawn(move || std::fs::write(pipe, hosts));
        let args = ["--ssh", &ssh, "--hostfile", "hosts.json", "-x", &vars[0], "-x", &vars[1]];
        let program = [env!("CARGO_BIN_EXE_hpl-run"), "-N", "100", "--nb", "16", "-P", "1", "-Q", "2"];
        bench.run(&[&args[..], launcher, &program, &["--threads", "1", "--verbose"]].concat())
    };
    let cable = "  rank 0 (a) and rank 1 (b): verbs, uc posted over rdma_en01\n";
    run("rdma_en01", &[]).expect(0, &["PASSED", "fabric verbs", cable]);
    run("rdma_en01", &["--fabric", "verbs"]).expect(0, &["PASSED", "fabric verbs", cable]);
    assert_eq!(world.counters().qps, 0, "{:?}", world.counters());
    let missing = "rank 0 (a) and rank 1 (b): rdma: rank 0 (a): ";
    let ended = run("rdma_en99", &[]);
    ended.expect(0, &["PASSED", "fabric tcp", missing, "rdma_en99", "; using tcp over lo ("]);
    run("rdma_en99", &["--fabric", "verbs"]).expect(2, &["fabric: verbs: does not join", "rdma_en99"]);
    run("rdma_en01", &["--fabric", "verbs:no_such_device"])
        .expect(2, &["fabric: verbs:no_such_device: does not join"]);
    // A device that refuses is no fault of the command line; its host is named first.
    let refused = Trap::always(Kind::Fail { call: Call::ToRtr, errno: 96 }).on("rdma_en10");
    world.change(&World::cabled(Profile::Apple, 2, &[(0, 1)]).trap(refused)).unwrap();
    let ended = run("rdma_en01", &["--fabric", "verbs"]);
    ended.expect(
        3,
        &["fulmen-run: rank 1 (b, pid ", "rank 1 (b): rdma_en10: ", "restart this machine", "hpl-run doctor"],
    );
    assert!(!ended.err.contains("noticed by"), "{ended:?}");
    // A driver that never comes back costs a step too, and not the time in which ranks must meet.
    for (call, at) in [
        (Call::OpenDevice, "rank 1 (b): opening rdma_en10"),
        (Call::GetDeviceList, "listing the RDMA devices"),
    ] {
        let stuck = Trap::always(Kind::Stuck { call }).on("rdma_en10");
        world.change(&World::cabled(Profile::Apple, 2, &[(0, 1)]).trap(stuck)).unwrap();
        let why = format!("{at} does not come back for");
        run("rdma_en01", &["--silence", "4"]).expect(0, &["PASSED", "fabric tcp", &why]);
        run("rdma_en01", &["--silence", "4", "--fabric", "verbs"]).expect(3, &[at, "restart this machine"]);
    }
}

/// A signal to one rank only, or a stop: the others hear of it, and RDMA devices are given back by whoever has them. (A Mac
/// that misses its domains has to be restarted.)
#[cfg(target_os = "linux")]
#[test]
fn ranks_with_devices_give_them_back_when_signalled() {
    for (rank, signal) in [(0, libc::SIGTERM), (1, libc::SIGTERM), (1, libc::SIGINT), (1, libc::SIGSTOP)] {
        let bench = Bench::new();
        let ssh = bench.ssh();
        let (world, vars) = cabled();
        std::fs::write(bench.path("hosts.json"), hosts_with("rdma_en01")).unwrap();
        let program = bench.script(
            "program",
            &format!(
                "echo $$ >$BENCH/part.$FULMEN_RANK && mv $BENCH/part.$FULMEN_RANK $BENCH/pid.$FULMEN_RANK\nexec {} \"$@\"",
                env!("CARGO_BIN_EXE_hpl-run")
            ),
        );
        let launcher = [
            "--ssh",
            &ssh,
            "--hostfile",
            "hosts.json",
            "-x",
            &vars[0],
            "-x",
            &vars[1],
            "-x",
            "BENCH",
            "--fabric",
            "verbs",
        ];
        let sizes = ["3000"; 40].join(",");
        let args = [&program, "-N", &sizes, "--nb", "32", "-P", "1", "-Q", "2", "--threads", "1", "-q"];
        let started = bench.start(&[&launcher[..], &args[..]].concat());
        let pids = bench.pids(2);
        let until = Instant::now() + HANG;
        while world.counters().messages < 1000 {
            assert!(Instant::now() < until, "they do not work: {:?}", world.counters());
            std::thread::sleep(Duration::from_millis(20));
        }
        let one =
            std::fs::read_to_string(bench.path(&format!("pid.{rank}"))).unwrap().trim().parse().unwrap();
        signal_to(one, signal);
        let ended = started.end();
        let code = if signal == libc::SIGSTOP { 4 } else { 5 };
        assert_eq!(ended.code, Some(code), "{signal} to rank {rank}: {ended:?}");
        all_gone(&pids);
        let c = world.counters();
        assert_eq!((c.pds, c.qps, c.mrs), (0, 0, 0), "{signal} to rank {rank}: {c:?} {ended:?}");
    }
}

/// As above, while the ranks connect: each has opened its device, and setting up a queue takes its time.
#[cfg(target_os = "linux")]
#[test]
fn devices_are_given_back_by_ranks_that_still_connect() {
    use fulmen_emu_verbs::{Call, Kind, Profile, Trap, World};
    let slow = Trap::always(Kind::Slow { call: Call::ToRtr, ms: 1000 });
    // A batch system signals ranks and their agents, which signal the ranks again.
    let both = [0, 1, 0, 1];
    let cases: [(&[usize], _); 4] =
        [(&[0], libc::SIGTERM), (&[1], libc::SIGINT), (&[], libc::SIGINT), (&both, libc::SIGTERM)];
    for (to, signal) in cases {
        let bench = Bench::new();
        let ssh = bench.ssh();
        let (world, vars) = cabled();
        world.change(&World::cabled(Profile::Apple, 2, &[(0, 1)]).trap(slow.clone())).unwrap();
        std::fs::write(bench.path("hosts.json"), hosts_with("rdma_en01")).unwrap();
        let noted =
            "echo $$ >$BENCH/part.$FULMEN_RANK && mv $BENCH/part.$FULMEN_RANK $BENCH/pid.$FULMEN_RANK";
        let program =
            bench.script("program", &format!("{noted}\nexec {} \"$@\"", env!("CARGO_BIN_EXE_hpl-run")));
        let cables =
            ["--ssh", &ssh, "--hostfile", "hosts.json", "-x", &vars[0], "-x", &vars[1], "-x", "BENCH"];
        let args = [&program, "-N", "1000", "-P", "1", "-Q", "2", "--threads", "1", "-q"];
        let started = bench.start(&[&cables[..], &args[..]].concat());
        let pids = bench.pids(2);
        let until = Instant::now() + HANG;
        while world.counters().pds < 2 {
            assert!(Instant::now() < until, "they open nothing: {:?}", world.counters());
            std::thread::sleep(Duration::from_millis(5));
        }
        for (i, rank) in to.iter().enumerate() {
            if i == 2 {
                std::thread::sleep(Duration::from_millis(700));
            }
            let pid = std::fs::read_to_string(bench.path(&format!("pid.{rank}"))).unwrap();
            signal_to(pid.trim().parse().unwrap(), signal);
        }
        if to.is_empty() {
            started.signal(signal);
        }
        let ended = started.end();
        assert_eq!(ended.code, Some(5), "{signal} to {to:?}: {ended:?}");
        all_gone(&pids);
        let c = world.counters();
        assert_eq!((c.pds, c.qps, c.mrs), (0, 0, 0), "{signal} to {to:?}: {c:?} {ended:?}");
    }
}

#[test]
fn hpl_run_as_ranks() {
    let bench = Bench::new();
    let ssh = bench.ssh();
    let program = env!("CARGO_BIN_EXE_hpl-run");
    let alone = Command::new(program)
        .args(["-N", "200", "--nb", "16", "-P", "1", "-Q", "1", "--threads", "1", "--hash"])
        .current_dir(bench.0.path())
        .output()
        .unwrap();
    let hash = |text: &str| text.lines().find_map(|l| l.split("   x ").nth(1).map(str::to_string));
    let wanted = hash(&String::from_utf8_lossy(&alone.stderr)).expect("a hash");
    let hosts = ["--ssh", &ssh, "--host", "a:2,b:2", program];
    let args =
        ["-N", "200", "--nb", "16", "-P", "2", "-Q", "2", "--threads", "1", "--hash", "--json", "j.json"];
    let ended = bench.run(&[&hosts[..], &args[..]].concat());
    ended.expect(0, &["PASSED", "fabric mixed"]);
    assert_eq!(hash(&ended.err), Some(wanted), "{ended:?}");
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(bench.path("j.json")).unwrap()).unwrap();
    assert_eq!((&report["places"][3]["host"], &report["ranks"]), (&"b".into(), &4.into()));
    let joined: Vec<(u64, u64, &str)> = (report["links"].as_array().unwrap().iter())
        .map(|l| {
            (
                l["ranks"][0].as_u64().unwrap(),
                l["ranks"][1].as_u64().unwrap(),
                l["transport"].as_str().unwrap(),
            )
        })
        .collect();
    let expected = [(0, 1, "shm"), (0, 2, "tcp"), (0, 3, "tcp"), (1, 2, "tcp"), (1, 3, "tcp"), (2, 3, "shm")];
    assert_eq!(joined, expected);
    // What cannot be run is said once, by rank 0, and ends all.
    let ended = bench.run(&[&hosts[..], &["-N", "200", "-P", "3", "-Q", "2"][..]].concat());
    ended.expect(2, &["grid: 3 x 2: needs 6 ranks, and this job has 4 by fulmen-run", "rank 0 (a, pid "]);
    assert_eq!(ended.err.matches("3 x 2: needs 6 ranks").count(), 1, "{ended:?}");
    // So is a report that cannot be written, whoever hears of it first.
    if cfg!(target_os = "linux") {
        let full =
            ["-N", "200", "--nb", "16", "-P", "2", "-Q", "2", "--threads", "1", "--output", "/dev/full"];
        for _ in 0..3 {
            bench
                .run(&[&hosts[..], &full].concat())
                .expect(3, &["No space left on device", "rank 0 (a, pid "]);
        }
    }
    let ended = bench.run(&[&hosts[..], &["-N", "ten"][..]].concat());
    ended.expect(2, &["write digits only"]);
    let ended = bench.run(&[&hosts[..], &["--help"][..]].concat());
    ended.expect(0, &[]);
}
