//! Signals at any moment of a run: the program ends in order with 5, and leaves the files as they were.
#![cfg(target_os = "linux")]

use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What asks a program to end, and what is said of it.
const ALL: [(i32, &str); 9] = [
    (libc::SIGINT, "SIGINT: Ctrl-C"),
    (libc::SIGTERM, "SIGTERM: kill"),
    (libc::SIGHUP, "SIGHUP: its terminal"),
    (libc::SIGQUIT, "SIGQUIT: Ctrl-\\"),
    (libc::SIGUSR1, "SIGUSR1: a batch system's warning"),
    (libc::SIGUSR2, "SIGUSR2: a batch system's warning"),
    (libc::SIGXCPU, "SIGXCPU: the limit of CPU time"),
    (libc::SIGALRM, "SIGALRM: a timer"),
    (libc::SIGVTALRM, "SIGVTALRM: a timer"),
];

fn start(folder: &Path, ignoring: Option<i32>, args: &[&str]) -> Child {
    std::fs::write(folder.join("out"), "old").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpl-run"));
    command.args(args).args(["--quiet", "--threads", "1", "--output", "out", "--json", "j.json"]);
    command
        .process_group(0)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // Whatever the shell of the tests ignores: a test begins with the defaults.
    let reset = move || {
        for (signal, _) in ALL {
            let action = if ignoring == Some(signal) { libc::SIG_IGN } else { libc::SIG_DFL };
            // SAFETY: no handler.
            unsafe { libc::signal(signal, action) };
        }
        Ok(())
    };
    // SAFETY: only sets signals' actions.
    unsafe { command.pre_exec(reset) };
    command.spawn().unwrap()
}

fn send(child: &Child, signal: i32) {
    // SAFETY: the child is ours and has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, signal) };
}

/// Whether the process catches a signal.
fn catches(child: &Child, signal: i32) -> bool {
    is_caught(child.id(), signal)
}

fn is_caught(process: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0) >> (signal - 1) & 1 == 1
}

/// Children, of whichever thread.
fn ranks(child: &Child) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().flatten();
    let of = |path: std::path::PathBuf| std::fs::read_to_string(path.join("children")).unwrap_or_default();
    let all: String = threads.map(|thread| of(thread.path()) + " ").collect();
    // One that is still to become a rank has its parent's handlers.
    let is_rank = |id: &u32| {
        let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|word| word.starts_with(b"HPL_RUN_ASSIGNMENT="))
    };
    all.split_whitespace().map(|id| id.parse().unwrap()).filter(is_rank).collect()
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// What a program has said that was interrupted: it ends with 5, and the report that was there stays.
fn interrupted(child: Child, folder: &Path, when: &str) -> String {
    let hit = Instant::now();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(hit.elapsed() < Duration::from_secs(30), "{when}: {said}");
    assert_eq!(output.status.code(), Some(5), "{when}: {said}");
    assert_eq!(std::fs::read_to_string(folder.join("out")).unwrap(), "old", "{when}");
    assert!(
        names(folder).iter().all(|n| ["out", "j.json.partial"].contains(&n.as_str())),
        "{:?}",
        names(folder)
    );
    said
}

fn ended_in_order(child: Child, folder: &Path, when: &str, why: &str) {
    let said = interrupted(child, folder, when);
    assert_eq!(said.matches("hpl-run: interrupted").count(), 1, "{when}: {said}");
    assert!(said.contains(&format!("interrupted by {why}")), "{when}: {said}");
}

/// Tries what a machine that is busy at the wrong moment turns into something else, harmless as well.
fn one_of_three(what: &str, mut is_so: impl FnMut() -> bool) {
    assert!((0..3).any(|_| is_so()), "{what}");
}

/// From the first moment on, while nothing but dgemm has been measured.
#[test]
fn before_the_first_run() {
    for (signal, why) in &ALL[..3] {
        let signal = *signal;
        // Sent too late it meets a run.
        one_of_three(&format!("signal {signal} at once: a report is left"), || {
            let folder = tempfile::tempdir().unwrap();
            let child = start(folder.path(), None, &["-N", "12000"]);
            wait_until("it catches no signal", || catches(&child, signal));
            send(&child, signal);
            ended_in_order(child, folder.path(), &format!("signal {signal} at once"), why);
            names(folder.path()) == ["out"]
        });
    }
}

#[test]
fn in_the_middle_of_a_run() {
    for (i, fabric) in ["mem", "shm"].into_iter().enumerate() {
        // Each signal on one of the two at least.
        for (j, (signal, why)) in ALL.into_iter().enumerate().filter(|(j, _)| *j < 1 || j % 2 == i) {
            let folder = tempfile::tempdir().unwrap();
            let child =
                start(folder.path(), None, &["-N", "12000", "-P", "1", "-Q", "2", "--fabric", fabric]);
            wait_until("the run does not begin", || names(folder.path()).len() > 1);
            std::thread::sleep(Duration::from_millis(50 * (i + j) as u64));
            send(&child, signal);
            ended_in_order(child, folder.path(), &format!("signal {signal} on {fabric}"), why);
        }
    }
}

/// What a program writes to a terminal, as it comes; the thread ends with the program.
fn read_terminal(mut from: std::fs::File) -> (Arc<Mutex<String>>, JoinHandle<()>) {
    let seen = Arc::new(Mutex::new(String::new()));
    let grows = Arc::clone(&seen);
    let reader = std::thread::spawn(move || {
        let mut some = [0; 4096];
        // The last who closes a terminal makes reading it fail.
        while let Ok(count @ 1..) = from.read(&mut some) {
            grows.lock().unwrap().push_str(&String::from_utf8_lossy(&some[..count]));
        }
    });
    (seen, reader)
}

/// Nothing of the bar is left where the shell writes next.
#[test]
fn the_progress_bar_goes_before_the_program() {
    for fabric in ["mem", "shm"] {
        let folder = tempfile::tempdir().unwrap();
        let (mut ours, mut theirs) = (0, 0);
        let mut size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let no_name = std::ptr::null_mut();
        // SAFETY: fills the two numbers and reads the size; the other arguments may be null.
        let made = unsafe {
            libc::openpty(&raw mut ours, &raw mut theirs, no_name, std::ptr::null_mut(), &raw mut size)
        };
        assert_eq!(made, 0);
        // SAFETY: two new files, which nobody else has.
        let (ours, theirs) = unsafe { (std::fs::File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpl-run"));
        command.args([
            "-N",
            "12000",
            "-P",
            "1",
            "-Q",
            "2",
            "--threads",
            "1",
            "--output",
            "out",
            "--fabric",
            fabric,
        ]);
        command.env("TERM", "xterm").current_dir(folder.path()).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(theirs).spawn().unwrap();
        drop(command); // and with it our end of theirs
        let (seen, reader) = read_terminal(ours);
        wait_until("no bar is shown", || seen.lock().unwrap().contains("[=>"));
        send(&child, libc::SIGTERM);
        let status = child.wait_with_output().unwrap().status;
        reader.join().unwrap();
        let seen = seen.lock().unwrap();
        assert_eq!(status.code(), Some(5), "{seen:?}");
        let words = seen.find("hpl-run: interrupted by SIGTERM").unwrap_or_else(|| panic!("{seen:?}"));
        let (before, after) = seen.split_at(words);
        let last = before.rfind("Gflop/s").map_or("", |bar| &before[bar..]);
        assert!(last.contains("\u{1b}[2K"), "{fabric}: {last:?}");
        assert!(!after.contains("Gflop/s"), "{fabric}: {after:?}");
    }
}

/// `ulimit -t` bounds each process by itself, and kills what does not end by itself soon.
#[test]
fn a_limit_of_cpu_time_is_told() {
    for fabric in ["mem", "shm"] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("out"), "old").unwrap();
        let script = format!(
            "ulimit -t 5; exec $0 -N 200,14000 -P 1 -Q 2 --fabric {fabric} --quiet --threads 1 --output out --json j.json"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_hpl-run")]).current_dir(folder.path());
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{fabric}: {said}");
        assert_eq!(
            said.matches("interrupted by SIGXCPU: the limit of CPU time").count(),
            1,
            "{fabric}: {said}"
        );
        assert_eq!(names(folder.path()), ["j.json.partial", "out", "out.partial"], "{fabric}: {said}");
        let report = std::fs::read_to_string(folder.path().join("j.json.partial")).unwrap();
        assert!(report.contains("\"passed\": 1,") && report.contains("\"exit\": 5"), "{report}");
    }
}

/// A scheduler's signal goes to every process of the group; a key held down sends several.
#[test]
fn to_the_whole_group_and_twice_in_a_row() {
    for fabric in ["mem", "shm"] {
        for signal in [libc::SIGINT, libc::SIGTERM] {
            let when = format!("signal {signal} twice to the group on {fabric}");
            // A second one that comes half a second later is meant: it ends the program at once, without a word.
            one_of_three(&format!("{when}: nothing is said"), || {
                let folder = tempfile::tempdir().unwrap();
                let child =
                    start(folder.path(), None, &["-N", "12000", "-P", "2", "-Q", "2", "--fabric", fabric]);
                wait_until("the run does not begin", || names(folder.path()).len() > 1);
                std::thread::sleep(Duration::from_millis(100));
                for _ in 0..2 {
                    // SAFETY: the child leads a group of its own, and has not been waited for.
                    unsafe { libc::kill(-(child.id() as libc::pid_t), signal) };
                    std::thread::sleep(Duration::from_millis(20));
                }
                let said = interrupted(child, folder.path(), &when);
                let told = said.matches("hpl-run: interrupted").count();
                assert!(told <= 1, "{when}: {said}");
                told == 1
            });
        }
    }
}

/// `nohup`, and jobs in the background of a script.
#[test]
fn what_is_ignored_stays_ignored() {
    for signal in [libc::SIGINT, libc::SIGHUP] {
        for fabric in ["mem", "shm"] {
            let folder = tempfile::tempdir().unwrap();
            let mut child =
                start(folder.path(), Some(signal), &["-N", "1500", "-P", "1", "-Q", "2", "--fabric", fabric]);
            wait_until("it does not end", || {
                send(&child, signal);
                child.try_wait().unwrap().is_some()
            });
            assert_eq!(child.wait().unwrap().code(), Some(0), "signal {signal} on {fabric}");
            assert_eq!(names(folder.path()), ["j.json", "out"]);
        }
    }
}

/// `top` shows ranks, and people end what they see there.
#[test]
fn to_one_rank() {
    for (signal, why) in ALL.into_iter().filter(|(signal, _)| *signal != libc::SIGXCPU) {
        let folder = tempfile::tempdir().unwrap();
        let child = start(folder.path(), None, &["-N", "12000", "-P", "1", "-Q", "2", "--fabric", "shm"]);
        wait_until("the run does not begin", || names(folder.path()).len() > 1);
        wait_until("no rank catches it", || ranks(&child).iter().any(|rank| is_caught(*rank, signal)));
        let rank = ranks(&child).into_iter().find(|rank| is_caught(*rank, signal)).unwrap();
        // SAFETY: a child of the program, which waits for it.
        unsafe { libc::kill(rank as libc::pid_t, signal) };
        ended_in_order(child, folder.path(), &format!("signal {signal} to a rank"), why);
    }
}

/// Ranks of another launcher's that wait for each other.
#[test]
fn while_others_are_waited_for() {
    for (rank, (signal, why)) in [(0, ALL[1]), (1, ALL[0])] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpl-run"));
        for (name, value) in [("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2)] {
            command.env(format!("OMPI_COMM_WORLD_{name}"), value.to_string());
        }
        command.args(["-N", "100"]).env("XDG_RUNTIME_DIR", folder.path()).current_dir(folder.path());
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("it catches no signal", || catches(&child, signal));
        wait_until("it waits for nobody", || names(folder.path()) == ["fulmen"]);
        std::thread::sleep(Duration::from_millis(300));
        let hit = Instant::now();
        send(&child, signal);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(hit.elapsed() < Duration::from_secs(10), "{said}");
        assert_eq!(output.status.code(), Some(5), "rank {rank}: {said}");
        assert!(said.contains(&format!("hpl-run: interrupted by {why}")), "{said}");
        assert!(names(&folder.path().join("fulmen")).is_empty(), "a file is left");
    }
}
