//! How the program ends: one number, one line that says why.

use std::fmt;
use std::process::ExitCode;

use crate::dat::Diagnostic;

/// The exit status.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Status {
    /// All runs passed, or none was checked.
    Passed = 0,
    /// A residual failed.
    Failed = 1,
    /// The command line or a file is wrong.
    Usage = 2,
    /// Memory is short, or the system refused something.
    Resources = 3,
    /// A rank was lost or too slow, or data arrived corrupt.
    PeerLost = 4,
    /// Ctrl-C or SIGTERM.
    Interrupted = 5,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        ExitCode::from(status as u8)
    }
}

/// Why nothing was run, or why the runs stopped.
#[derive(Clone, Debug)]
pub enum Failure {
    /// An `HPL.dat` that cannot be run: all that is wrong with it.
    Input(Vec<Diagnostic>),
    /// Anything else.
    Error(fulmen::Error),
}

impl From<fulmen::Error> for Failure {
    fn from(error: fulmen::Error) -> Self {
        Failure::Error(error)
    }
}

impl Failure {
    /// The exit status that it ends with.
    pub fn status(&self) -> Status {
        match self {
            Failure::Input(_) => Status::Usage,
            Failure::Error(error) => match error.exit_code() {
                2 => Status::Usage,
                4 => Status::PeerLost,
                5 => Status::Interrupted,
                _ => Status::Resources,
            },
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Input(all) => {
                for (i, diagnostic) in all.iter().enumerate() {
                    let end = if i > 0 { "\n" } else { "" };
                    write!(f, "{end}hpl-run: {diagnostic}")?;
                }
                if all.len() > 1 {
                    write!(f, "\nhpl-run: {} errors in {}; nothing was run", all.len(), all[0].file)?;
                }
                Ok(())
            }
            Failure::Error(error) => write!(f, "hpl-run: {error}"),
        }
    }
}

impl Status {
    /// Why, in a few words.
    pub fn reason(self) -> &'static str {
        match self {
            Status::Passed => "all done",
            Status::Failed => "a residual failed",
            Status::Usage => "usage or input",
            Status::Resources => "resources",
            Status::PeerLost => "a rank was lost",
            Status::Interrupted => "interrupted",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_library_keep_their_code() {
        for (error, status) in [
            (fulmen::Error::argument("-N", 1, "no", "yes"), Status::Usage),
            (fulmen::Error::Resources { what: "x".into(), remedy: "y".into() }, Status::Resources),
            (fulmen::Error::Aborted { by: 1, reason: "z".into() }, Status::PeerLost),
            (fulmen::Error::Interrupted, Status::Interrupted),
        ] {
            assert_eq!(Failure::from(error).status(), status);
        }
    }
}
