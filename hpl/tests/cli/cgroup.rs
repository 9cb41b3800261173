//! A control group with a limit of memory, made below the tests' own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Removed with what it holds when it is dropped; its processes have ended by then.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// A group that may use `bytes`; `None`, and the reason on stderr, where this machine lets us make none.
    pub fn new(bytes: u64) -> Option<Cgroup> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let paths = own.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let path = path.trim_start_matches('/');
            match controllers {
                "" => Some((Path::new("/sys/fs/cgroup").join(path), "memory.max")),
                c if c.split(',').any(|c| c == "memory") => {
                    Some((Path::new("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"))
                }
                _ => None,
            }
        });
        for (parent, limit) in paths {
            let name = format!("fulmen-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let group = Cgroup(parent.join(name));
            let made =
                fs::create_dir(&group.0).and_then(|()| fs::write(group.0.join(limit), bytes.to_string()));
            if made.is_ok() {
                return Some(group);
            }
        }
        eprintln!(
            "skipped: no control group with a limit of memory can be made here (it takes root, and a hierarchy that may be written)"
        );
        None
    }

    /// A command that runs `program` in the group.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
            .arg(self.0.join("cgroup.procs"))
            .arg(program);
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has ended leaves its group a moment later.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
