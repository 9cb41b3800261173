//! A command in a child, watched.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::Run;
use crate::doctor::facts::Answer;
use crate::interrupt;

/// No answer is longer.
const LONGEST: u64 = 4 << 20;
/// How often to look whether the child has ended.
const LOOK: Duration = Duration::from_millis(5);
/// What a child gets to end by itself when it is asked to.
const GRACE: Duration = Duration::from_secs(1);

/// Runs commands as children of this process.
///
/// A child that does not end is asked to (SIGTERM), and then left alone: killing a process that holds verbs objects
/// wedges Apple's driver for good. One of this program's own gives back what it holds, after the step that it is in.
pub struct Child;

impl Run for Child {
    fn run(&self, command: &[&str], patience: Duration) -> Answer<String> {
        let Some((program, arguments)) = command.split_first() else { return Answer::Unasked };
        if interrupt::count() > 0 {
            return Answer::Unasked;
        }
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Who kills this process's group hard does not hit what holds verbs objects.
            .process_group(0)
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(e) => return Answer::Refused(format!("{program}: {e}")),
        };
        let (out, err) = (collect(child.stdout.take()), collect(child.stderr.take()));
        let start = Instant::now();
        let mut asked: Option<Instant> = None;
        // Who is interrupted has no more use for an answer.
        let given_up = || match interrupt::count() {
            0 => Answer::Hung(patience.as_secs()),
            _ => Answer::Unasked,
        };
        loop {
            match child.try_wait() {
                Ok(Some(_)) if asked.is_some() => return given_up(),
                Ok(Some(status)) => return ended(status, &text(&out), &text(&err)),
                Ok(None) => {}
                Err(e) => return Answer::Refused(format!("{program}: {e}")),
            }
            match asked {
                Some(at) if at.elapsed() > GRACE => return given_up(),
                None if start.elapsed() > patience || interrupt::count() > 0 => {
                    asked = Some(Instant::now());
                    ask_to_end(&child);
                }
                _ => {}
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Asks a child to end. It must not have been waited for.
fn ask_to_end(child: &std::process::Child) {
    // SAFETY: a signal to our own child, whose number is its own until it is waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
}

fn ended(status: ExitStatus, out: &str, err: &str) -> Answer<String> {
    match (status.success(), status.signal()) {
        (true, _) => Answer::Is(out.to_string()),
        (false, Some(signal)) => Answer::Died(signal),
        (false, None) => {
            let words = err.lines().chain(out.lines()).map(str::trim).find(|line| !line.is_empty());
            Answer::Refused(words.map_or_else(|| status.to_string(), str::to_string))
        }
    }
}

/// Reads a pipe to its end on a thread of its own, which a wedged child may keep.
fn collect(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (to, from) = mpsc::channel();
    let _ = std::thread::Builder::new().name("doctor-pipe".into()).spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let _ = pipe.take(LONGEST).read_to_end(&mut bytes);
        }
        let _ = to.send(bytes);
    });
    from
}

fn text(from: &mpsc::Receiver<Vec<u8>>) -> String {
    // The child has ended; a grandchild may still hold the pipe.
    String::from_utf8_lossy(&from.recv_timeout(GRACE).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, patience: Duration) -> Answer<String> {
        Child.run(&["sh", "-c", script], patience)
    }

    #[test]
    fn every_way_to_end_is_told_apart() {
        let long = Duration::from_secs(20);
        assert_eq!(run("echo yes", long), Answer::Is("yes\n".into()));
        assert_eq!(run("echo no >&2; exit 3", long), Answer::Refused("no".into()));
        assert_eq!(run("exit 3", long), Answer::Refused("exit status: 3".into()));
        assert_eq!(run("kill -SEGV $$", long), Answer::Died(libc::SIGSEGV));
        assert!(
            matches!(Child.run(&["/no/such/program"], long), Answer::Refused(words) if words.contains("/no/such"))
        );
        assert_eq!(Child.run(&[], long), Answer::Unasked);
    }

    #[test]
    fn a_child_that_does_not_end_is_given_up_not_killed() {
        let start = Instant::now();
        assert_eq!(run("exec sleep 30", Duration::ZERO), Answer::Hung(0), "asked to end, it ends");
        let stubborn = "trap '' TERM; for i in 1 2 3 4 5 6; do sleep 0.5; done";
        assert_eq!(run(stubborn, Duration::from_millis(300)), Answer::Hung(0), "it does not even then");
        assert!(start.elapsed() < Duration::from_secs(25));
    }
}
