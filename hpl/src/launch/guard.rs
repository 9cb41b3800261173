//! A small process beside each agent: when the agent is gone without having said so, it kills what the agent had
//! started, and removes what was copied. (On Linux the kernel does that for the ranks themselves, but not for what they have
//! started.) An agent that is stopped, and that nobody reaches to end it, it kills too.

use std::io::{BufRead, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, parent_id};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The argument that makes this program a guard.
pub const ARGUMENT: &str = "--guard";

/// The agent's end.
pub struct Guard {
    child: Child,
    to: PipeWriter,
}

impl Guard {
    /// Starts one.
    ///
    /// # Errors
    /// The system's.
    pub fn start() -> std::io::Result<Guard> {
        let (from, to) = std::io::pipe()?;
        // A guard that was stopped holds nobody up.
        // SAFETY: a flag of our own file.
        unsafe { libc::fcntl(to.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(ARGUMENT).process_group(0).stdin(from).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Guard { child: command.spawn()?, to })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A line, whole or not at all: a pipe takes so few bytes at once, or, when its reader was stopped long ago, none.
    fn say(&mut self, line: String) {
        // A guard that is gone cannot help; all else still works.
        let _ = self.to.write(line.as_bytes());
    }

    /// The agent lives, and will say so again well within this time.
    pub fn beat(&mut self, bound: Duration) {
        self.say(format!("beat {}\n", bound.as_millis()));
    }

    /// This group is to be killed when the agent is gone.
    pub fn watch(&mut self, group: u32) {
        self.say(format!("watch {group}\n"));
    }

    /// This folder is to be removed when the agent is gone.
    pub fn watch_folder(&mut self, folder: &Path) {
        self.say(format!("folder {}\n", folder.display()));
    }

    /// This group is over, or must not be killed.
    pub fn leave(&mut self, group: u32) {
        self.say(format!("leave {group}\n"));
    }

    /// All is over.
    pub fn dismiss(mut self) {
        self.say("done 0\n".into());
        drop(self.to);
        let _ = self.child.wait();
    }
}

/// What the guard itself knows, of lines that the agent writes.
#[derive(PartialEq, Eq, Debug, Default)]
struct Charge {
    /// To be killed.
    groups: Vec<i32>,
    /// To be removed.
    folder: Option<PathBuf>,
    /// The agent speaks at least so often.
    bound: Option<Duration>,
}

impl Charge {
    /// Whether all is over.
    fn hear(&mut self, line: &str) -> bool {
        if let Some(path) = line.strip_prefix("folder ") {
            self.folder = Some(PathBuf::from(path));
            return false;
        }
        match line.split_once(' ').map(|(word, number)| (word, number.parse::<i32>())) {
            Some(("watch", Ok(group))) if group > 1 => self.groups.push(group),
            Some(("leave", Ok(group))) => self.groups.retain(|g| *g != group),
            Some(("beat", Ok(bound))) if bound > 0 => self.bound = Some(Duration::from_millis(bound as u64)),
            Some(("done", _)) => return true,
            _ => {}
        }
        false
    }

    /// Kills and removes.
    fn end(self) {
        for group in self.groups {
            // SAFETY: a signal to a group that our agent has started and not seen ending.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        if let Some(folder) = self.folder {
            // Nobody is left who could be told that it cannot be removed.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// What `fulmen-run --guard` does.
pub fn run() {
    let agent = parent_id();
    let (lines, inbox) = mpsc::channel();
    let reader = std::thread::Builder::new().name("from agent".into()).spawn(move || {
        let mut lines = std::io::stdin().lock().lines().map_while(Result::ok).map(|line| lines.send(line));
        while let Some(Ok(())) = lines.next() {}
    });
    if reader.is_err() {
        return; // as if there were no guard
    }
    let mut charge = Charge::default();
    let (mut heard, mut looked) = (Instant::now(), Instant::now());
    loop {
        let line = inbox.recv_timeout(charge.bound.map_or(Duration::MAX, |bound| bound / 8));
        let now = Instant::now();
        // Who was stopped himself blames nobody.
        if charge.bound.is_some_and(|bound| now - looked > bound / 2) {
            heard = now;
        }
        looked = now;
        match line {
            Ok(line) if charge.hear(&line) => return,
            Ok(_) => heard = now,
            Err(RecvTimeoutError::Timeout) if charge.bound.is_some_and(|bound| now - heard > bound) => break,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if agent > 1 && parent_id() == agent {
        // SAFETY: our parent, which is there: it has the number still.
        unsafe { libc::kill(agent as libc::pid_t, libc::SIGKILL) };
    }
    charge.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_killed_unless_all_was_done() {
        let hear = |text: &str| {
            let mut charge = Charge::default();
            (text.lines().any(|line| charge.hear(line)), charge)
        };
        let (done, charge) = hear("watch 10\nwatch 11\nleave 10\nwatch 1\nnonsense\nwatch x\nbeat 0\n");
        assert_eq!((done, charge), (false, Charge { groups: vec![11], ..Charge::default() }));
        assert!(hear("folder /x\nwatch 10\ndone 0\n").0);
        let bound = Some(Duration::from_millis(700));
        assert_eq!(
            hear("beat 700\nfolder /a b\n").1,
            Charge { folder: Some("/a b".into()), bound, ..Charge::default() }
        );
    }
}
