//! A small process beside each agent: when the agent is gone without having said so, it kills what the agent had
//! started, and removes what was copied. (On Linux the kernel does that for the ranks themselves, but not for what they have started.)

use std::io::{BufRead, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

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
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(ARGUMENT).process_group(0).stdin(from).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Guard { child: command.spawn()?, to })
    }

    fn say(&mut self, word: &str, group: u32) {
        // A guard that is gone cannot help; all else still works.
        let _ = writeln!(self.to, "{word} {group}");
    }

    /// This group is to be killed when the agent is gone.
    pub fn watch(&mut self, group: u32) {
        self.say("watch", group);
    }

    /// This folder is to be removed when the agent is gone.
    pub fn watch_folder(&mut self, folder: &Path) {
        let _ = writeln!(self.to, "folder {}", folder.display());
    }

    /// This group is over, or must not be killed.
    pub fn leave(&mut self, group: u32) {
        self.say("leave", group);
    }

    /// All is over.
    pub fn dismiss(mut self) {
        self.say("done", 0);
        drop(self.to);
        let _ = self.child.wait();
    }
}

/// The guard itself: reads what to watch until the end of its input. Returns the groups to be killed and the folder
/// to be removed.
pub fn listen(from: impl BufRead) -> (Vec<i32>, Option<PathBuf>) {
    let (mut groups, mut folder) = (Vec::<i32>::new(), None);
    for line in from.lines() {
        let Ok(line) = line else { break };
        if let Some(path) = line.strip_prefix("folder ") {
            folder = Some(PathBuf::from(path));
            continue;
        }
        match line.split_once(' ').map(|(word, group)| (word, group.parse::<i32>())) {
            Some(("watch", Ok(group))) if group > 1 => groups.push(group),
            Some(("leave", Ok(group))) => groups.retain(|g| *g != group),
            Some(("done", _)) => return (vec![], None),
            _ => {}
        }
    }
    (groups, folder)
}

/// What `fulmen-run --guard` does.
pub fn run() {
    let (groups, folder) = listen(std::io::stdin().lock());
    for group in groups {
        // SAFETY: a signal to a group that our agent has started and not seen ending.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    if let Some(folder) = folder {
        // Nobody is left who could be told that it cannot be removed.
        let _ = std::fs::remove_dir_all(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_killed_unless_all_was_done() {
        assert_eq!(
            listen(&b"watch 10\nwatch 11\nleave 10\nwatch 1\nnonsense\nwatch x\n"[..]),
            (vec![11], None)
        );
        assert_eq!(listen(&b"folder /x\nwatch 10\ndone 0\n"[..]), (vec![], None));
        assert_eq!(listen(&b"folder /a b\n"[..]), (vec![], Some("/a b".into())));
    }
}
