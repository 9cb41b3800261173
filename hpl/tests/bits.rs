//! The program as a user runs it: the bits of x are the same however the machine is divided, and a rank that
//! is lost ends the job with its name.

use std::process::{Command, Output, Stdio};

fn hpl_run(folder: &std::path::Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hpl-run"))
        .args(args)
        .args(["--quiet", "--json", "-"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// The hashes of x of all runs; all must have passed.
fn hashes(args: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let output = hpl_run(folder.path(), args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let runs = report["runs"].as_array().unwrap();
    assert!(runs.iter().all(|r| r["passed"] == true && r["n"] == 2000), "{args:?}: {report}");
    runs.iter().map(|r| r["x_hash"].as_str().unwrap().to_string()).collect()
}

const SYSTEM: [&str; 4] = ["-N", "2000", "--nb", "96"];

fn same(expected: &str, args: &[&str]) {
    let all = [&SYSTEM, args].concat();
    let found = hashes(&all);
    assert!(found.iter().all(|h| h == expected), "{args:?}: {found:?}, not {expected}");
}

#[test]
fn same_bits_however_the_machine_is_divided() {
    let expected = hashes(&[&SYSTEM[..], &["-P", "1", "-Q", "1", "--threads", "1"]].concat()).remove(0);
    for fabric in ["mem", "shm"] {
        for (p, q) in [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2"), ("2", "3"), ("3", "2"), ("1", "6")] {
            same(&expected, &["-P", p, "-Q", q, "--fabric", fabric, "--threads", "1"]);
        }
    }
    for threads in ["2", "3", "4"] {
        same(&expected, &["-P", "1", "-Q", "1", "--threads", threads]);
        same(&expected, &["-P", "2", "-Q", "1", "--threads", threads, "--fabric", "shm"]);
    }
    // One job of 18 runs: every broadcast at every depth.
    same(&expected, &["-P", "1", "-Q", "3", "--depth", "0,1,2", "--bcast", "0,1,2,3,4,5", "--threads", "1"]);
    same(&expected, &["-P", "3", "-Q", "2", "--depth", "0,1,2", "--pmap", "column", "--threads", "2"]);
}

#[test]
fn same_bits_for_each_instruction_set() {
    for isa in ["native:avx512", "native:avx2", "native:neon", "native:portable"] {
        let folder = tempfile::tempdir().unwrap();
        let probe =
            hpl_run(folder.path(), &["-N", "10", "--nb", "4", "-P", "1", "-Q", "1", "--kernels", isa]);
        if probe.status.code() == Some(2) {
            println!("skipped {isa}: {}", String::from_utf8_lossy(&probe.stderr).trim());
            continue;
        }
        let with = |args: &[&'static str]| [&SYSTEM[..], &["--kernels", isa], args].concat();
        let expected = hashes(&with(&["-P", "1", "-Q", "1", "--threads", "1"])).remove(0);
        let other = hashes(&with(&["-P", "2", "-Q", "2", "--threads", "2"])).remove(0);
        assert_eq!(expected, other, "{isa}");
    }
}

/// A rank that is killed, or stopped, while it works.
#[cfg(target_os = "linux")]
#[test]
fn a_lost_rank_is_named_and_nothing_is_left() {
    use std::time::{Duration, Instant};
    // Of ours: others of this machine come and go.
    let is_ours = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().contains("fulmen");
    let shm = || std::fs::read_dir("/dev/shm").map_or(0, |d| d.flatten().filter(is_ours).count());
    let before = shm();
    let runs = std::env::var("FULMEN_FAULT_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    for round in 0..runs {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("HPL.out"), "an old report").unwrap();
        let job = Command::new(env!("CARGO_BIN_EXE_hpl-run"))
            .args(["-N", "20000", "--nb", "128", "-P", "2", "-Q", "2", "--fabric", "shm", "--threads", "1"])
            .args(["--silence", "1", "--output", "HPL.out", "--quiet"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let children = || -> Vec<i32> {
            let path = format!("/proc/{0}/task", job.id());
            let tasks = std::fs::read_dir(path).into_iter().flatten().flatten();
            tasks
                .filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok())
                .flat_map(|c| c.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
                .collect()
        };
        let begun = Instant::now();
        while children().len() < 4 {
            assert!(begun.elapsed() < Duration::from_secs(30), "the ranks do not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        let ranks = children();
        // Any time from the start of the program to the middle of the factorisation.
        std::thread::sleep(Duration::from_millis(150 + 397 * round % 2500));
        let victim = ranks[round as usize % ranks.len()];
        let signal = if round % 2 == 0 { libc::SIGKILL } else { libc::SIGSTOP };
        // SAFETY: a signal to a process that this test started.
        unsafe { libc::kill(victim, signal) };
        let hit = Instant::now();
        let output = job.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(hit.elapsed() < Duration::from_secs(60), "round {round}: {:?}: {said}", hit.elapsed());
        assert_eq!(output.status.code(), Some(4), "round {round}: {said}");
        assert!(said.contains("rank "), "round {round}: {said}");
        for rank in ranks {
            let gone = !std::path::Path::new(&format!("/proc/{rank}/exe")).exists();
            assert!(gone, "round {round}: process {rank} outlived the job");
        }
        let old = std::fs::read_to_string(folder.path().join("HPL.out")).unwrap();
        assert_eq!(old, "an old report", "round {round}");
    }
    assert_eq!(shm(), before, "/dev/shm");
}
