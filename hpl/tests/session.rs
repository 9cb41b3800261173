//! Whole calls of `hpl-run` with a plain serial solver in the place of the machine room.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use clap::Parser;
use fulmen::Error;
use fulmen_hpl::cli::Cli;
use fulmen_hpl::driver::Driver;
use fulmen_hpl::exit::Status;
use fulmen_hpl::generator::Generator;
use fulmen_hpl::hash::Hash;
use fulmen_hpl::machine::Host;
use fulmen_hpl::params::Run;
use fulmen_hpl::progress::Progress;
use fulmen_hpl::report::{Check, Job, Outcome, Phases};
use fulmen_hpl::session;
use fulmen_hpl::settings::Settings;
use serde_json::Value;

/// Solves by the textbook; gives up after some runs if told to.
#[derive(Default)]
struct Textbook {
    solved: usize,
    lost_after: Option<usize>,
    /// A folder that somebody makes meanwhile.
    in_the_way: Option<PathBuf>,
    started: bool,
    /// What dgemm is measured at first, and later, in Gflop/s.
    dgemm: Option<[f64; 2]>,
}

impl Driver for Textbook {
    fn calibrate(&mut self, kernels: &str, ranks: usize, threads: usize) -> Result<Job, Error> {
        Ok(Job {
            ranks,
            threads,
            fabric: String::new(),
            kernels: kernels.into(),
            self_test: "ok".into(),
            gemm_gflops: Some(self.dgemm.map_or(10.0, |dgemm| dgemm[0])),
            crowded: false,
            places: vec![],
            cables: None,
            links: vec![],
        })
    }

    fn measure_again(&mut self) -> Option<f64> {
        self.dgemm.map(|dgemm| dgemm[1])
    }

    fn start(&mut self, _settings: &Settings) -> Result<(), Error> {
        self.started = true;
        Ok(())
    }

    fn solve(&mut self, run: &Run, progress: &Progress) -> Result<Outcome, Error> {
        if self.lost_after == Some(self.solved) {
            return Err(Error::PeerLost {
                rank: 1,
                host: "mac-c".into(),
                link: "en5".into(),
                loss: fulmen::error::Loss::Gone,
                after: std::time::Duration::from_secs(1),
                waiting_for: "in panel 3".into(),
                by: 0,
                by_host: "mac-a".into(),
            });
        }
        self.solved += 1;
        self.in_the_way.take().iter().for_each(|path| fs::create_dir(path).unwrap());
        let n = run.n;
        let generator = Generator::new(n, run.seed);
        let make = || {
            let mut a = vec![vec![0.0; n]; n + 1];
            a.iter_mut().enumerate().for_each(|(j, column)| generator.fill(0, j, column));
            a
        };
        let (started, clock) = (SystemTime::now(), Instant::now());
        let x = eliminate(make());
        progress.work(run.flops(), run.flops());
        let seconds = clock.elapsed().as_secs_f64();
        let a = make();
        let row = |i: usize| (0..n).map(|j| a[j][i]).collect::<Vec<f64>>();
        let max = |v: &mut dyn Iterator<Item = f64>| v.fold(0.0f64, |m, x| m.max(x.abs()));
        let sum = |v: &[f64]| v.iter().map(|x| x.abs()).sum::<f64>();
        let check = Check {
            ax_b_inf: max(
                &mut (0..n).map(|i| row(i).iter().zip(&x).map(|(a, x)| a * x).sum::<f64>() - a[n][i])
            ),
            a_inf: max(&mut (0..n).map(|i| sum(&row(i)))),
            a_one: max(&mut (0..n).map(|j| sum(&a[j]))),
            x_inf: max(&mut x.iter().copied()),
            x_one: sum(&x),
            b_inf: max(&mut a[n].iter().copied()),
        };
        Ok(Outcome {
            run: *run,
            seconds,
            started,
            ended: SystemTime::now(),
            info: 0,
            check: run.checked().then_some(check),
            x_hash: Hash::of(&x),
            phases: vec![Phases { update: seconds, ..Phases::default() }],
        })
    }
}

/// Gaussian elimination with partial pivoting of the columns of [A | b].
fn eliminate(mut a: Vec<Vec<f64>>) -> Vec<f64> {
    let n = a.len() - 1;
    for k in 0..n {
        let pivot = (k..n).max_by(|&i, &j| a[k][i].abs().total_cmp(&a[k][j].abs())).unwrap();
        a.iter_mut().for_each(|column| column.swap(k, pivot));
        let factors: Vec<f64> = (k + 1..n).map(|i| a[k][i] / a[k][k]).collect();
        for column in &mut a[k + 1..] {
            let u = column[k];
            column[k + 1..].iter_mut().zip(&factors).for_each(|(v, l)| *v -= l * u);
        }
    }
    let mut x = a[n].clone();
    for k in (0..n).rev() {
        x[k] /= a[k][k];
        let xk = x[k];
        (0..k).for_each(|i| x[i] -= a[k][i] * xk);
    }
    x
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.0.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Calls `hpl-run` with the report in `out` and `j.json`; `@` in the arguments is the folder.
    fn call(&self, args: &str, driver: &mut Textbook) -> Status {
        let at = self.0.path().display().to_string();
        let all = format!("hpl-run --quiet --output @/out --json @/j.json {args}").replace('@', &at);
        let cli = Cli::try_parse_from(all.split_whitespace()).unwrap();
        let host = Host {
            name: "this machine".into(),
            cores: 2,
            numa_nodes: 1,
            available: Some(1 << 30),
            bound: "free memory".into(),
            limits: fulmen::dist::memory::OfProcess::UNLIMITED,
        };
        session::run(&cli, Path::new(&at), &host, driver)
    }
}

/// The golden norms of netlib's x, and the report around them.
#[test]
fn a_sweep_from_start_to_end() {
    let folder = Folder::new();
    assert_eq!(folder.call("-N 10,100 --nb 8,16", &mut Textbook::default()), Status::Passed);
    let out = folder.read("out");
    assert_eq!(out.matches("...... PASSED").count(), 4);
    assert!(out.contains("\nN      :      10      100 \nNB     :       8       16 \n"), "{out}");
    assert!(out.contains("\nFinished      4 tests with the following results:\n"));
    assert!(out.contains("\n              4 tests completed and passed residual checks,\n"));
    let report = folder.json("j.json");
    assert_eq!(
        (&report["exit"], &report["passed"], &report["reason"]),
        (&0.into(), &4.into(), &"4 runs passed".into())
    );
    for (i, x_inf, x_one) in [(0, "2.059554", "9.822147"), (2, "2.775421", "77.951231")] {
        let norms = &report["runs"][i]["norms"];
        assert_eq!(format!("{:.6}", norms["x_inf"].as_f64().unwrap()), x_inf);
        assert_eq!(format!("{:.6}", norms["x_one"].as_f64().unwrap()), x_one);
    }
    assert_eq!(report["runs"][2]["x_hash"], report["runs"][3]["x_hash"]);
    assert_eq!(folder.names(), ["j.json", "out"]);
}

/// K2-01: netlib ends with 0 here.
#[test]
fn a_failed_residual_ends_with_one() {
    let folder = Folder::new();
    let status = folder.call("-N 100 --nb 16 --threshold 1e-30", &mut Textbook::default());
    assert_eq!(status, Status::Failed);
    let out = folder.read("out");
    assert!(out.contains("...... FAILED"));
    let norms = out.lines().filter(|l| l.starts_with("||") && l.contains(". . . =")).count();
    assert_eq!(norms, 6);
    let report = folder.json("j.json");
    assert_eq!((&report["exit"], &report["runs"][0]["passed"]), (&1.into(), &false.into()));
}

/// K2-02.
#[test]
fn without_a_threshold_nothing_is_called_passed() {
    let folder = Folder::new();
    let status = folder.call("-N 50,60 --nb 16 --threshold -16", &mut Textbook::default());
    assert_eq!(status, Status::Passed);
    let out = folder.read("out");
    assert!(!out.contains("PASSED") && out.contains("              2 tests completed without checking,"));
    let report = folder.json("j.json");
    assert_eq!((&report["unchecked"], &report["runs"][1]["passed"]), (&2.into(), &Value::Null));
}

/// A run that is faster than dgemm was when it was measured: it is measured again, and the larger counts.
#[test]
fn dgemm_is_measured_again_when_a_run_is_faster() {
    for (again, counts) in [(1e3, 1e3), (1e-9, 1e-6)] {
        let folder = Folder::new();
        let mut driver = Textbook { dgemm: Some([1e-6, again]), ..Textbook::default() };
        assert_eq!(folder.call("-N 200 --nb 16", &mut driver), Status::Passed);
        let report = folder.json("j.json");
        assert_eq!(report["kernels"]["gemm_gflops"], counts);
        let (gflops, fraction) = (&report["runs"][0]["gflops"], &report["runs"][0]["fraction_of_gemm"]);
        let ratio = gflops.as_f64().unwrap() / counts / fraction.as_f64().unwrap();
        assert!((ratio - 1.0).abs() < 1e-9, "{report}");
    }
}

/// K2-07.
#[test]
fn orders_zero_and_one() {
    let folder = Folder::new();
    assert_eq!(folder.call("-N 0,1 --nb 4 -P 2 -Q 2", &mut Textbook::default()), Status::Passed);
    let report = folder.json("j.json");
    assert_eq!((&report["passed"], &report["runs"][0]["residual"]), (&2.into(), &0.0.into()));
}

/// A lost rank: exit 4, the old files stay, what was done is kept beside them.
#[test]
fn a_lost_rank_leaves_the_old_report_and_a_partial_one() {
    let folder = Folder::new();
    fs::write(folder.path("out"), "old").unwrap();
    let mut driver = Textbook { lost_after: Some(2), ..Textbook::default() };
    assert_eq!(folder.call("-N 20,30,40 --nb 8", &mut driver), Status::PeerLost);
    assert_eq!(folder.read("out"), "old");
    assert_eq!(folder.read("out.partial").matches("PASSED").count(), 2);
    let report = folder.json("j.json.partial");
    assert_eq!((&report["exit"], report["runs"].as_array().unwrap().len()), (&4.into(), 2));
    assert!(report["reason"].as_str().unwrap().contains("rank 1 (mac-c, en5) is gone in panel 3"));
    assert_eq!(folder.names(), ["j.json.partial", "out", "out.partial"]);
}

/// What cannot take its place is kept, and so is the report for programs.
#[test]
fn a_folder_in_the_way_of_one_report_costs_none() {
    let folder = Folder::new();
    let mut driver = Textbook { in_the_way: Some(folder.path("out")), ..Textbook::default() };
    assert_eq!(folder.call("-N 20,30 --nb 8", &mut driver), Status::Resources);
    assert_eq!(folder.names(), ["j.json.partial", "out", "out.partial"]);
    assert!(folder.read("out.partial").contains("2 tests completed and passed"));
    let report = folder.json("j.json.partial");
    assert_eq!((&report["exit"], &report["passed"]), (&3.into(), &2.into()));
    assert!(report["reason"].as_str().unwrap().contains("out.partial"), "{report}");
}

/// What an earlier job has kept survives the next one; one that does not begin leaves it where it is.
#[test]
fn what_was_kept_is_not_lost() {
    let folder = Folder::new();
    for name in ["out.partial", "j.json.partial"] {
        fs::write(folder.path(name), "hours").unwrap();
    }
    let mut lost = Textbook { lost_after: Some(0), ..Textbook::default() };
    assert_eq!(folder.call("-N 20 --nb 8", &mut lost), Status::PeerLost);
    // Without a run there is a report for programs alone.
    assert_eq!(folder.names(), ["j.json.partial", "j.json.partial.1", "out.partial"]);
    assert_eq!(
        (folder.read("out.partial"), &folder.json("j.json.partial")["exit"]),
        ("hours".into(), &4.into())
    );
    assert_eq!(folder.call("-N 20 --nb 8", &mut Textbook::default()), Status::Passed);
    assert_eq!(folder.names(), ["j.json", "j.json.partial.1", "j.json.partial.2", "out", "out.partial.1"]);
    assert_eq!(
        (folder.read("out.partial.1"), folder.read("j.json.partial.1")),
        ("hours".into(), "hours".into())
    );
}

/// Nothing is started, touched or left behind when it cannot be.
#[test]
fn refusals_come_before_any_work() {
    let folder = Folder::new();
    fs::write(folder.path("out"), "old").unwrap();
    fs::write(folder.path("bad.dat"), "title\ntitle\nHPL.out\n6\n1\n1e2 Ns\n").unwrap();
    for (args, status) in [
        ("-N 100000", Status::Resources),
        ("@/bad.dat", Status::Usage),
        ("@/none.dat", Status::Usage),
        ("-P 2", Status::Usage),
        ("-N 10 -P 4 -Q 4 --ranks 4", Status::Usage),
    ] {
        let mut driver = Textbook::default();
        assert_eq!(folder.call(args, &mut driver), status, "{args}");
        assert!(!driver.started && driver.solved == 0);
        assert_eq!(folder.names(), ["bad.dat", "out"]);
    }
    assert_eq!(folder.read("out"), "old");
}

/// `HPL.dat` of the folder is taken as xhpl does, and its file gets the report.
#[test]
fn the_folders_own_file() {
    let folder = Folder::new();
    let dat = "t\nt\nHPL.out\n6\n2\n29 30 Ns\n1\n4\n0\n1\n1\n1\n16.0\n3\n0 1 2\n1\n4\n1\n2\n1\n1\n1\n1\n1\n0\n2\n\
               64\n0\n0\n1\n8\n";
    fs::write(folder.path("HPL.dat"), dat).unwrap();
    assert_eq!(folder.call("", &mut Textbook::default()), Status::Passed);
    let rows: Vec<String> = folder
        .read("out")
        .lines()
        .filter(|l| l.starts_with("WR"))
        .map(|l| l.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
        .collect();
    let expected = ["L4", "C4", "R4"].map(|p| format!("WR01C2{p}"));
    let expected: Vec<String> =
        [29, 30].iter().flat_map(|n| expected.iter().map(move |tv| format!("{tv} {n} 4"))).collect();
    assert_eq!(rows, expected);
}

/// K2-08: five files that agree.
#[test]
fn a_bundle_for_a_certificate() {
    let folder = Folder::new();
    assert_eq!(folder.call("-N 50,60 --nb 16 --bundle @/cert", &mut Textbook::default()), Status::Passed);
    let file = |name: &str| folder.read(&format!("cert/cert-60-{name}"));
    assert_eq!(file("hpl.rslts"), folder.read("out"));
    let report = folder.json("j.json");
    let rslts = file("hpl.rslts");
    let rows: Vec<&str> = rslts.lines().filter(|l| l.starts_with("WR11R2L8 ")).collect();
    let stamps: Vec<String> = file("hpl.tstamps").lines().map(str::to_string).collect();
    assert_eq!((rows.len(), stamps.len()), (2, 2));
    for i in 0..2 {
        let run = &report["runs"][i];
        let fields: Vec<&str> = rows[i].split_whitespace().collect();
        assert_eq!(fields[1], run["n"].to_string());
        let (gflops, all): (f64, f64) = (fields[6].parse().unwrap(), run["gflops"].as_f64().unwrap());
        assert!((gflops - all).abs() < 1e-4 * all);
        let start = run["started"].as_str().unwrap();
        assert!(
            stamps[i].contains(&format!("start {start}")) && stamps[i].ends_with(fields[5]),
            "{stamps:?}"
        );
    }
    let again = fulmen_hpl::dat::read("x", file("hpl.input").as_bytes()).unwrap();
    assert_eq!((again.input.ns, again.input.nbs), (vec![50, 60], vec![16]));
    assert!(file("configuration.txt").contains("kernels    native (self-test ok)"));
    assert!(file("hpl.run").ends_with('\n'));
}

/// A bundle replaces neither what is read nor another report, and is there as a whole or not at all.
#[test]
fn a_bundle_is_whole_and_costs_nothing() {
    let folder = Folder::new();
    let dat = "t\nt\nHPL.out\n6\n1\n60 Ns\n1\n16 NBs\n0\n1\n1\n1\n16.0\n1\n2\n1\n4\n1\n2\n1\n1\n1\n1\n1\n0\n2\n64\n0\n0\n1\n8\n";
    fs::create_dir(folder.path("cert")).unwrap();
    fs::write(folder.path("cert/cert-60-hpl.input"), dat).unwrap();
    let files = || fs::read_dir(folder.path("cert")).unwrap().count();
    for (args, what) in [
        ("@/cert/cert-60-hpl.input --bundle @/cert", "the HPL.dat that is run"),
        ("-N 60 --bundle @/cert --json @/cert/cert-60-hpl.run", "the JSON report"),
    ] {
        let args = args.replace('@', &folder.0.path().display().to_string());
        let json = if args.contains("--json") { "" } else { "--json /dev/null" };
        let all = format!("hpl-run --quiet --output {}/out {json} {args}", folder.0.path().display());
        let cli = Cli::try_parse_from(all.split_whitespace()).unwrap();
        let host = Host::detect();
        let status = session::run(&cli, folder.0.path(), &host, &mut Textbook::default());
        assert_eq!(status, Status::Usage, "{what}");
        assert_eq!(files(), 1, "{what}");
    }
    assert_eq!(folder.read("cert/cert-60-hpl.input"), dat);
    // The last of the five cannot be written: none is there.
    let mut driver =
        Textbook { in_the_way: Some(folder.path("cert/cert-50-configuration.txt")), ..Textbook::default() };
    assert_eq!(folder.call("-N 50 --nb 16 --bundle @/cert", &mut driver), Status::Resources);
    assert_eq!(files(), 2);
}

/// Runs in a process of its own: solves one system, then is slow.
struct Slow(Textbook);

impl Driver for Slow {
    fn calibrate(&mut self, kernels: &str, ranks: usize, threads: usize) -> Result<Job, Error> {
        self.0.calibrate(kernels, ranks, threads)
    }

    fn measure_again(&mut self) -> Option<f64> {
        None
    }

    fn start(&mut self, settings: &Settings) -> Result<(), Error> {
        self.0.start(settings)
    }

    fn solve(&mut self, run: &Run, progress: &Progress) -> Result<Outcome, Error> {
        if self.0.solved == 1 {
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        self.0.solve(run, progress)
    }
}

const SLOW_FOLDER: &str = "FULMEN_TEST_SLOW_FOLDER";

#[test]
#[ignore = "the child of `an_end_by_a_signal_keeps_the_report_so_far`"]
fn slow_child() {
    let Ok(folder) = std::env::var(SLOW_FOLDER) else { return };
    let args = format!("hpl-run --quiet -N 20,30 --nb 8 --output {folder}/out --json {folder}/j.json");
    let cli = Cli::try_parse_from(args.split_whitespace()).unwrap();
    let status = session::run(&cli, Path::new(&folder), &Host::detect(), &mut Slow(Textbook::default()));
    panic!("ended with {status:?}");
}

#[test]
fn an_end_by_a_signal_keeps_the_report_so_far() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGKILL] {
        let folder = Folder::new();
        fs::write(folder.path("out"), "old").unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "slow_child", "--ignored"])
            .env(SLOW_FOLDER, folder.0.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        // SAFETY: only sets a signal's action, with no handler: the shell of the tests may ignore it.
        unsafe {
            command.pre_exec(move || {
                libc::signal(signal, libc::SIG_DFL);
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        // The first run is in the report that grows beside the file.
        let grown = || {
            let growing = folder.names().iter().any(|n| n == "out.partial");
            growing
                && folder.read("out.partial").contains("PASSED")
                && folder.read("j.json.partial").ends_with("}\n")
        };
        let begun = Instant::now();
        while !grown() {
            assert!(begun.elapsed().as_secs() < 60, "{:?}", folder.names());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        // SAFETY: the child is ours and has not been waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        let code = child.wait().unwrap().code();
        assert_eq!(code, (signal != libc::SIGKILL).then_some(Status::Interrupted as i32));
        assert_eq!(folder.names(), ["j.json.partial", "out", "out.partial"]);
        assert_eq!(folder.read("out"), "old");
        assert!(folder.read("out.partial").contains("PASSED"));
        let report = folder.json("j.json.partial");
        assert_eq!((&report["exit"], &report["passed"]), (&5.into(), &1.into()));
    }
}
