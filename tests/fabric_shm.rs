//! The `shm` fabric with real processes: this test program starts itself again as ranks and supervisors.

mod conformance;
mod ranks;
#[cfg(target_os = "linux")]
mod seeded;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
#[cfg(target_os = "linux")]
use std::time::Instant;

use fulmen::fabric::shm::{Outcome, Supervisor, connect_from_env};
use fulmen::fabric::{Bounds, Buf, Fabric, Lane};
use fulmen::{Error, Result};

/// What a rank is to do: the name of a conformance case, or of one of `programs`.
const PROGRAM: &str = "FULMEN_TEST_PROGRAM";
/// Where ranks leave word.
const NOTES: &str = "FULMEN_TEST_NOTES";

fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).stdout(Stdio::null());
    command
}

fn note(name: &str, text: &str) {
    let dir = PathBuf::from(std::env::var(NOTES).unwrap());
    // Renamed into place, so that nobody reads half of it.
    std::fs::write(dir.join(format!("{name}.part")), text).unwrap();
    std::fs::rename(dir.join(format!("{name}.part")), dir.join(name)).unwrap();
}

/// Only the ranks of `faults` wait for one that is silent; of the others none is to be found so, however busy the machine is.
fn bounds(program: &str) -> Bounds {
    let silence = if program == "work" { 4 } else { 20 };
    Bounds { silence: Duration::from_secs(silence), patience: Duration::from_secs(60) }
}

fn supervise(ranks: usize, program: &str, notes: &Path) -> Result<Outcome> {
    Supervisor::new(ranks, |_| {
        let mut command = again("as_rank");
        command.env(PROGRAM, program).env(NOTES, notes);
        command
    })
    .segment_bytes(256 << 20)
    .bounds(bounds(program))
    .run()
}

/// The rank's side. Without a supervisor there is nothing to do.
#[test]
fn as_rank() {
    let Ok(Some(fabric)) = connect_from_env() else { return };
    assert!(connect_from_env().is_err(), "a second connection was made");
    let program = std::env::var(PROGRAM).unwrap();
    let rank = fabric.rank();
    if let Some(case) = conformance::CASES.iter().find(|c| c.name == program) {
        let result = case.run(&fabric);
        case.judge(rank, &result);
        if let Err(e) = &result {
            fabric.fail(e);
        }
        note(&format!("right.{rank}"), "");
        drop(fabric);
        std::process::exit(result.map_or_else(|e| e.exit_code().into(), |()| 0));
    }
    let result = match program.as_str() {
        "work" => work(&*fabric),
        "argument" => argument(&*fabric),
        "all_memory" => all_memory(&*fabric),
        "exit_7" => std::process::exit(if rank == 1 { 7 } else { wait_for_1(&*fabric) }),
        "leave_with_1" => {
            drop(fabric);
            std::process::exit(1);
        }
        "panic" => {
            assert!(rank != 1, "rank 1 has a bug");
            std::process::exit(wait_for_1(&*fabric));
        }
        other => panic!("no program {other}"),
    };
    if let Err(e) = &result {
        fabric.fail(e);
    }
    drop(fabric);
    std::process::exit(result.map_or_else(|e| e.exit_code().into(), |()| 0));
}

/// Exchanges and checks, for as long as it is let.
fn work(fabric: &dyn Fabric) -> Result<()> {
    fabric.set_activity("in step 0"); // what is said of it from here on
    note(&format!("pid.{}", fabric.rank()), &std::process::id().to_string());
    ranks::exchange(fabric)
}

fn argument(fabric: &dyn Fabric) -> Result<()> {
    if fabric.rank() == 2 {
        return Err(Error::argument("nb", 0, "is not positive", "give at least 1"));
    }
    conformance::barrier(fabric, Lane::CONTROL)
}

/// The segment has 256 MiB.
fn all_memory(fabric: &dyn Fabric) -> Result<()> {
    let most = Buf::<u8>::zeros(fabric, 200 << 20)?;
    let e = Buf::<u8>::zeros(fabric, 57 << 20).err().expect("more than there is");
    assert!(matches!(e, Error::Resources { .. }), "{e}");
    drop(most);
    let buf = Buf::<u8>::zeros(fabric, 256 << 20)?;
    assert!(buf.read(0..256 << 20).iter().all(|b| *b == 0));
    drop(buf);
    Buf::<u64>::zeros(fabric, 1 << 40).map(|_| ())
}

fn wait_for_1(fabric: &dyn Fabric) -> i32 {
    let mut buf = Buf::<u64>::zeros(fabric, 1).unwrap();
    buf.arm(fabric, Lane::BULK, 1, 0..1).unwrap();
    match buf.wait(fabric, Lane::BULK, 1) {
        Err(e @ (Error::PeerLost { rank: 1, .. } | Error::Aborted { by: 1, .. })) => i32::from(e.exit_code()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn conformance() {
    for case in conformance::CASES {
        let notes = tempfile::tempdir().unwrap();
        let outcome = supervise(case.ranks, case.name, notes.path()).unwrap();
        let right = std::fs::read_dir(notes.path()).unwrap().count();
        assert_eq!(right, case.ranks, "{}: {outcome:?}", case.name);
        assert_eq!(outcome.killed, 0, "{}: {outcome:?}", case.name);
        assert_eq!(outcome.exit_code == 0, case.ends_well(), "{}: {outcome:?}", case.name);
        assert_eq!(outcome.message.is_none(), case.ends_well(), "{}: {outcome:?}", case.name);
    }
}

#[test]
fn the_first_failure_is_reported() {
    let notes = tempfile::tempdir().unwrap();
    let run = |n, program| supervise(n, program, notes.path()).unwrap();

    let o = run(3, "argument");
    assert_eq!(o.exit_code, 2);
    assert!(o.message.as_ref().unwrap().starts_with("nb: 0: is not positive"), "{o:?}");

    let o = run(1, "all_memory");
    assert_eq!(o.exit_code, 3);
    assert!(o.message.as_ref().unwrap().contains("its segment has 268435456 bytes"), "{o:?}");

    let o = run(2, "exit_7");
    assert_eq!(o.exit_code, 7);
    assert!(o.message.as_ref().unwrap().contains("rank 1 ("), "{o:?}");
    assert!(o.message.as_ref().unwrap().contains("exit code 7"), "{o:?}");

    let o = run(2, "panic");
    assert_eq!(o.exit_code, 3);
    assert!(o.message.as_ref().unwrap().contains("rank 1 panicked"), "{o:?}");

    let o = run(2, "leave_with_1");
    assert_eq!((o.exit_code, o.message), (1, None));
}

#[test]
fn what_cannot_be_started_is_said() {
    let e = Supervisor::new(2, |_| Command::new("/no/such/program")).run().unwrap_err();
    assert!(e.to_string().contains("/no/such/program"), "{e}");
    assert_eq!(e.exit_code(), 3);
    assert_eq!(Supervisor::new(0, |_| Command::new("true")).run().unwrap_err().exit_code(), 2);
}

/// The supervisor's side of the fault runs, in a process of its own so that it can be killed.
#[test]
fn as_supervisor() {
    let Ok(ranks) = std::env::var("FULMEN_TEST_RANKS") else { return };
    let notes = PathBuf::from(std::env::var(NOTES).unwrap());
    let outcome = supervise(ranks.parse().unwrap(), "work", &notes).unwrap();
    note("message", outcome.message.as_deref().unwrap_or(""));
    std::process::exit(outcome.exit_code.into());
}

#[cfg(target_os = "linux")]
fn is_gone(pid: i32) -> bool {
    // What nobody has reaped yet is gone too.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .map_or(true, |stat| stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
}

#[cfg(target_os = "linux")]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(target_os = "linux")]
fn shared_files() -> Vec<std::ffi::OsString> {
    let list = std::fs::read_dir("/dev/shm").map(|dir| dir.flatten().map(|e| e.file_name()).collect());
    let mut list: Vec<std::ffi::OsString> = list.unwrap_or_default();
    list.retain(|name| name.to_string_lossy().contains("fulmen"));
    list
}

/// Kills, stops and terminates ranks and supervisors at random moments: nothing survives, nothing is
/// left, and the message names the rank. `FULMEN_FAULT_RUNS` says how often.
#[cfg(target_os = "linux")]
#[test]
fn faults() {
    const RANKS: usize = 4;
    let runs = std::env::var("FULMEN_FAULT_RUNS").map_or(10, |s| s.parse().unwrap());
    let mut draw = seeded::Draw::new(0x5EED);
    for run in 0..runs {
        let notes = tempfile::tempdir().unwrap();
        let mut command = again("as_supervisor");
        command.env("FULMEN_TEST_RANKS", RANKS.to_string()).env(NOTES, notes.path()).stderr(Stdio::null());
        let mut supervisor = command.spawn().unwrap();
        let pid_file = |rank: usize| notes.path().join(format!("pid.{rank}"));
        until("the ranks", || (0..RANKS).all(|rank| pid_file(rank).exists()));
        let pids: Vec<i32> =
            (0..RANKS).map(|r| std::fs::read_to_string(pid_file(r)).unwrap().parse().unwrap()).collect();
        std::thread::sleep(Duration::from_micros(draw.below(200_000)));

        let rank = draw.below(RANKS as u64) as usize;
        let above = supervisor.id() as i32;
        let (target, signal) = match run % 5 {
            0 | 3 => (pids[rank], libc::SIGKILL),
            1 => (pids[rank], libc::SIGSTOP),
            2 => (above, if run % 2 == 0 { libc::SIGKILL } else { libc::SIGSTOP }),
            _ => (above, libc::SIGTERM),
        };
        // SAFETY: a signal to a process that this test has started.
        assert_eq!(unsafe { libc::kill(target, signal) }, 0);

        until("the end of the ranks", || pids.iter().all(|pid| is_gone(*pid)));
        if (target, signal) == (above, libc::SIGSTOP) {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::kill(target, libc::SIGCONT) }, 0);
        }
        let status = supervisor.wait().unwrap();
        let message = std::fs::read_to_string(notes.path().join("message")).unwrap_or_default();
        let said = format!("run {run}: {signal} to {target}: {status}: {message}");
        if target != above {
            assert_eq!(status.code(), Some(4), "{said}");
            assert!(message.contains(&format!("rank {rank} (")), "{said}");
            // Of one that is stopped the supervisor may be the first to know, if the other ranks got no core.
            let how = if signal == libc::SIGKILL {
                &["SIGKILL"][..]
            } else {
                &["was silent for", "was stopped for"]
            };
            assert!(how.iter().any(|how| message.contains(how)), "{said}");
            assert!(message.contains("in step"), "{said}");
        } else if signal == libc::SIGSTOP {
            assert_eq!(status.code(), Some(4), "{said}");
            assert!(message.contains("the process that started the ranks"), "{said}");
        } else if signal == libc::SIGTERM {
            assert_eq!(status.code(), Some(5), "{said}");
        }
        assert!(shared_files().is_empty(), "{said}: left behind {:?}", shared_files());
    }
}
