//! What can go wrong, in words that name the culprit and the remedy.

use std::io::ErrorKind;
use std::time::Duration;

/// Result of everything in this library that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// How a peer was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// Its process is gone.
    Gone,
    /// Its process exists but gives no sign of life: stopped, or cut off.
    Silent,
    /// It lives, but what it owes did not come in time.
    Slow,
    /// The connection to it broke, as the system says. What has become of its process is not known.
    Broken(ErrorKind),
}

/// A failure. [`Error::exit_code`] says how a program should end with it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// An argument that cannot be: found before any work started.
    #[error("{name}: {value}: {problem}\n    {remedy}")]
    Argument {
        /// The argument, as the caller knows it.
        name: String,
        /// The value that was given.
        value: String,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },

    /// Too little memory, disk, or threads: found before the resource was touched where possible.
    #[error("{what}\n    {remedy}")]
    Resources {
        /// What is short, with needed and available.
        what: String,
        /// What to do.
        remedy: String,
    },

    /// The input holds an infinity or a NaN.
    #[error(
        "element ({row}, {col}) of the input is {value}\n    only finite numbers can be factored; rows and columns are counted from 0"
    )]
    NonFinite {
        /// Global row, from 0.
        row: usize,
        /// Global column, from 0.
        col: usize,
        /// The value, printed.
        value: String,
    },

    /// A peer was lost while something was owed by it.
    #[error("rank {rank} ({host}, {link}) {}{}, {} by rank {by} ({by_host})\n    {}", describe_loss(.loss, .after), spaced(.waiting_for), noticed(.loss), loss_remedy(.loss, .link))]
    PeerLost {
        /// The lost rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The link to it.
        link: Box<str>,
        /// How it was lost.
        loss: Loss,
        /// How long it was waited for.
        after: Duration,
        /// What was waited for: `in panel 41 of 120`, `at the barrier`, …
        waiting_for: String,
        /// The rank that noticed.
        by: usize,
        /// That rank's host.
        by_host: Box<str>,
    },

    /// Bytes arrived that are not what was sent.
    #[error(
        "{what} from rank {rank} ({host}, {link}) to rank {by}\n    the link or the memory of one of them is faulty: run again; if it comes again, test both hosts"
    )]
    Corrupt {
        /// What was wrong: checksum, length, sequence number.
        what: String,
        /// The sender.
        rank: usize,
        /// Its host.
        host: String,
        /// The link.
        link: Box<str>,
        /// The receiver.
        by: usize,
    },

    /// The ranks of a job do not find or reach each other: found before work starts.
    #[error("{what}\n    {remedy}")]
    Unreachable {
        /// Which ranks, at which addresses.
        what: String,
        /// What to do.
        remedy: String,
    },

    /// The job was ended by another rank, which has said why.
    #[error("rank {by} ended the job: {reason}")]
    Aborted {
        /// Who ended it.
        by: usize,
        /// Its reason.
        reason: String,
    },

    /// A job ended early; a supervisor, or another of its ranks, tells what the first failing rank said.
    #[error("{message}")]
    Ended {
        /// What the first failing rank said.
        message: String,
        /// The exit code it stands for.
        code: u8,
    },

    /// Ctrl-C or SIGTERM.
    #[error("interrupted")]
    Interrupted,

    /// The operating system refused something.
    #[error("{what}: {os}")]
    System {
        /// What was tried.
        what: String,
        /// The system's own words.
        os: String,
    },

    /// The library's own rules were broken: a fault of the program, not of its user.
    #[error("internal: {0}\n    this is a fault in the program; please report it")]
    Internal(String),
}

/// A character as it may be printed.
fn visible(c: char) -> String {
    if c.is_control() && c != '\n' { c.escape_default().to_string() } else { c.into() }
}

fn describe_loss(loss: &Loss, after: &Duration) -> String {
    match loss {
        Loss::Gone => "is gone".into(),
        Loss::Silent => format!("was silent for {:.1} s", after.as_secs_f64()),
        Loss::Slow => format!("lives but sent nothing for {:.1} s", after.as_secs_f64()),
        Loss::Broken(how) => format!("is out of reach: the connection to it broke ({how})"),
    }
}

/// A broken connection is found by who has it, whatever he does.
fn noticed(loss: &Loss) -> &'static str {
    if matches!(loss, Loss::Broken(_)) { "noticed" } else { "waited for" }
}

fn spaced(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(" {what}") }
}

fn loss_remedy(loss: &Loss, link: &str) -> &'static str {
    match loss {
        Loss::Silent if ["shm", "mem"].contains(&link) => {
            "its process was stopped (SIGSTOP, a debugger), or had no CPU for so long: look at it with ps and top"
        }
        Loss::Gone if link.starts_with("tcp") => {
            "it has closed the connection, as when a process ends, is killed or leaves early: its own words, its launcher's or its \
             host's log say which"
        }
        Loss::Gone => "its process ended or was killed: look at its host's log for the reason",
        Loss::Broken(ErrorKind::ConnectionAborted) => {
            "this host's own system ended the connection: by hand (ss -K), or because its address or interface went away"
        }
        Loss::Broken(ErrorKind::ConnectionReset) => {
            "a firewall or a person reset it, or its process ended with data unread: look whether the process is there (ps), then \
             at what lies between the two hosts"
        }
        Loss::Broken(_) => "look at the cable and the addresses between the two hosts",
        Loss::Silent => {
            "the cable or the host is gone, or the process was stopped: ping its host, and look at the process with ps"
        }
        Loss::Slow => "the host is overloaded or swapping, or the deadline is too short for this problem",
    }
}

/// What each rank of a job returned, as of [`crate::World::threads`]; or the failure that was the cause of the others.
///
/// # Errors
/// The first of the ranks' errors that is no consequence of another's.
pub fn all_ok<R>(results: Vec<Result<R>>) -> Result<Vec<R>> {
    let errors = || results.iter().filter_map(|result| result.as_ref().err());
    match errors().find(|e| !e.is_consequence()).or_else(|| errors().next()) {
        Some(cause) => Err(cause.clone()),
        None => results.into_iter().collect(),
    }
}

impl Error {
    /// The exit code of a program that ends with this error: 2 usage or input, 3 resources, 4 peer
    /// lost or timed out, 5 interrupted (1, a failed residual, is not an error of the library).
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Argument { .. } | Error::NonFinite { .. } => 2,
            Error::Resources { .. } | Error::System { .. } | Error::Internal(_) => 3,
            Error::PeerLost { .. } | Error::Corrupt { .. } | Error::Unreachable { .. } => 4,
            Error::Aborted { .. } => 4,
            Error::Ended { code, .. } => *code,
            Error::Interrupted => 5,
        }
    }

    /// Whether this only tells that another rank has failed: that rank's error is the cause.
    pub fn is_consequence(&self) -> bool {
        matches!(self, Error::Aborted { .. })
    }

    /// Shorthand for [`Error::Argument`].
    pub fn argument(
        name: impl Into<String>,
        value: impl ToString,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        // Given by users, files and other hosts: nothing of it is for the terminal itself.
        let shown = |text: String| match text.contains(|c: char| c.is_control() && c != '\n') {
            true => text.chars().map(visible).collect(),
            false => text,
        };
        Error::Argument {
            name: shown(name.into()),
            value: shown(value.to_string()),
            problem: shown(problem.into()),
            remedy: remedy.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_text() {
        let error = Error::argument("--host", "a\u{1b}[2Jb\r", "has `\u{7}`", "é");
        assert_eq!(error.to_string(), "--host: a\\u{1b}[2Jb\\r: has `\\u{7}`\n    é");
    }

    #[test]
    fn the_cause_is_told_not_what_followed() {
        let cause = Error::argument("N", 0, "is no size", "give one");
        let follows = || Err::<u8, _>(Error::Aborted { by: 1, reason: cause.to_string() });
        assert_eq!(all_ok(vec![Ok(1), Ok(2)]).unwrap(), [1, 2]);
        let told = all_ok(vec![follows(), Ok(3), Err(cause.clone())]).unwrap_err();
        assert_eq!((told.exit_code(), told.to_string()), (2, cause.to_string()));
        assert_eq!(all_ok(vec![Ok(0), follows()]).unwrap_err().exit_code(), 4);
    }
}
