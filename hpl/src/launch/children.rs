//! The ranks of one host as child processes: started, watched, ended.
//!
//! Each rank leads a process group of its own and is asked for its state before it is reaped, so that a signal to
//! its group can meet nobody else.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

use fulmen::job::messages::How;

/// A started rank.
pub struct Rank {
    child: Child,
    /// How it ended.
    status: Option<How>,
}

/// What has become of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It was stopped.
    Stopped,
    /// It goes on.
    Continued,
    /// It is gone.
    Ended(How),
}

/// Starts `command` as the leader of a process group that inherits `control`, and is killed when the calling
/// thread ends (on Linux).
///
/// # Errors
/// The system's.
pub fn start(mut command: Command, control: &UnixStream) -> std::io::Result<Rank> {
    command.process_group(0);
    let control: RawFd = control.as_raw_fd();
    // SAFETY: no arguments, always succeeds.
    let agent = unsafe { libc::getpid() };
    let before_exec = move || {
        // SAFETY: lets the new program keep our own file.
        if unsafe { libc::fcntl(control, libc::F_SETFD, 0) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        for signal in [libc::SIGTTIN, libc::SIGTTOU] {
            // SAFETY: back to what programs expect; the launcher ignores them.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        #[cfg(target_os = "linux")]
        // SAFETY: only asks to be killed when the parent ends.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL)
        };
        // SAFETY: always succeeds.
        match unsafe { libc::getppid() } == agent {
            true => Ok(()),
            false => Err(std::io::Error::from_raw_os_error(libc::ESRCH)),
        }
    };
    // SAFETY: between fork and exec the closure makes only system calls and allocates nothing.
    unsafe { command.pre_exec(before_exec) };
    Ok(Rank { child: command.spawn()?, status: None })
}

/// From now on what a rank has started, and not waited for, is this process's child when the rank is gone (Linux): also what has left
/// the rank's process group.
pub fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    // SAFETY: a property of this process; where it is not to be had, such processes go on.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1)
    };
}

/// Kills all children of this process but `own`, with what these have started, and buries them. Returns whether there were any: some
/// may have come since.
pub fn kill_orphans(own: &[u32]) -> bool {
    let me = std::process::id();
    let parents = parents();
    let is_below = |pid: u32| {
        let mut above = pid;
        for _ in 0..parents.len() {
            match parents.iter().find(|(of, _)| *of == above) {
                Some((_, parent)) if *parent == me => return !own.contains(&above),
                Some((_, parent)) => above = *parent,
                None => return false,
            }
        }
        false
    };
    let orphans: Vec<u32> = parents.iter().map(|(pid, _)| *pid).filter(|pid| is_below(*pid)).collect();
    for pid in &orphans {
        // SAFETY: a signal to a process below this one, which buries it: the number is its own until then. (Of those further below
        // the parent is killed in the same moment.)
        unsafe { libc::kill(*pid as libc::pid_t, libc::SIGKILL) };
    }
    for (pid, _) in parents.iter().filter(|(pid, parent)| *parent == me && orphans.contains(pid)) {
        // SAFETY: buries a child that nobody else waits for.
        unsafe { libc::waitpid(*pid as libc::pid_t, std::ptr::null_mut(), libc::WNOHANG) };
    }
    !orphans.is_empty()
}

/// All processes that this one sees, with the parent of each; none where the system does not tell.
fn parents() -> Vec<(u32, u32)> {
    let Ok(all) = std::fs::read_dir("/proc") else { return vec![] };
    let parent = |entry: std::fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // A program's name, in parentheses, may hold anything.
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        Some((pid, parent))
    };
    all.flatten().filter_map(parent).collect()
}

impl Rank {
    /// Its process, and its group.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn id(&self) -> libc::pid_t {
        self.child.id() as libc::pid_t
    }

    /// Its streams, to be taken.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Whether it is gone.
    pub fn ended(&self) -> bool {
        self.status.is_some()
    }

    /// The next change, if any. What an ended rank has left running in its group is killed, unless `keep`.
    pub fn look(&mut self, keep: bool) -> Option<Change> {
        if self.ended() {
            return None;
        }
        // SAFETY: plain data, all zeros is valid.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WEXITED | libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: asks about our own child; writes `info`.
        if unsafe { libc::waitid(libc::P_PID, self.child.id() as libc::id_t, &raw mut info, flags) } != 0 {
            return None;
        }
        match info.si_code {
            libc::CLD_STOPPED | libc::CLD_CONTINUED => {
                // SAFETY: plain data, all zeros is valid.
                let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
                // Takes this alone: an end that came meanwhile is for the next look, which ends the group first.
                let flags = libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG;
                // SAFETY: asks about our own child; writes `info`.
                let took =
                    unsafe { libc::waitid(libc::P_PID, self.child.id() as libc::id_t, &raw mut info, flags) };
                match info.si_code {
                    _ if took != 0 => None,
                    libc::CLD_STOPPED => Some(Change::Stopped),
                    libc::CLD_CONTINUED => Some(Change::Continued),
                    _ => None,
                }
            }
            libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED => {
                if !keep {
                    // Not reaped yet: the group's number is still its own.
                    self.signal_group(libc::SIGKILL);
                }
                self.child.wait().ok().map(|status| self.gone(status))
            }
            _ => None,
        }
    }

    fn gone(&mut self, status: ExitStatus) -> Change {
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => How::Code(code as u8),
            (None, signal) => How::Signal(signal.unwrap_or(0)),
        };
        self.status = Some(how);
        Change::Ended(how)
    }

    fn signal_group(&self, signal: i32) {
        // SAFETY: a signal to the group of our own child, which has not been reaped.
        unsafe { libc::kill(-self.id(), signal) };
    }

    /// Sends a signal to the rank and all of its group.
    pub fn signal(&self, signal: i32) {
        if !self.ended() {
            self.signal_group(signal);
        }
    }
}
