//! What a process is given open: numbers that names like `/dev/fd/5` stand for, and whether there was a standard output when
//! the program began. Later nobody can tell: the standard library puts `/dev/null` in the place of a closed one, and what is
//! written there is gone without an error.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use fulmen::Error;

static CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn look() {
    // SAFETY: only asks for the flags of a descriptor.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Ordering::Relaxed);
}

// SAFETY: the C library calls what this section points to once, before `main`; `look` needs nothing that is made later.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = look;

/// The file that somebody has left open here at a number, as a shell does for `5>log`.
///
/// # Errors
/// When there is none.
pub fn duplicate(number: RawFd) -> io::Result<File> {
    // SAFETY: a call that fails where the number is nobody's.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    match copy {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: new, and ours alone.
        copy => Ok(unsafe { File::from_raw_fd(copy) }),
    }
}

/// Refuses to write to a standard output that was closed (`>&-`). Known on Linux only; elsewhere it passes.
///
/// # Errors
/// [`Error::System`], with `what` would have been written.
pub fn must_be_open(what: &str) -> Result<(), Error> {
    if CLOSED.load(Ordering::Relaxed) {
        return Err(Error::System {
            what: format!("{what} cannot be written"),
            os: "stdout is closed".into(),
        });
    }
    Ok(())
}
