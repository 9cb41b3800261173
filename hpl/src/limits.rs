//! What bounds this program, told instead of its end without a word: `ulimit -f` (a file that may not grow is an error), `ulimit -t`,
//! files without an end, and what this user may do.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::units;

/// A file of at most `most` bytes; what has no end (`/dev/zero`) is not read until memory is full.
///
/// # Errors
/// Of the system, or that it is longer.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other(format!("it is larger than {}", units::bytes(most.into())))),
        false => Ok(bytes),
    }
}

/// Whose rights this process has.
pub fn user() -> u32 {
    // SAFETY: no arguments, always succeeds.
    unsafe { libc::geteuid() }
}

extern "C" fn go_on(_: libc::c_int) {}

/// From now on a write beyond the limit of a file's size fails with an error (`EFBIG`). By itself the system would end
/// the program without a word, its shared memory counted as files too. What this program starts is not concerned: a
/// handler, other than an ignored signal, is not inherited.
pub fn tell_of_file_sizes() {
    // SAFETY: plain data, all zeros is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = go_on as extern "C" fn(libc::c_int) as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler does nothing, and stays valid for the whole program.
    unsafe { libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut()) };
}

/// `ulimit -t` sets two limits to one value, and at the second the system kills. From now on the first, of which we are told
/// (SIGXCPU), comes earlier by what all threads use while the program ends in order.
pub fn leave_time_to_end() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the struct given.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_CPU, &raw mut limit) } == 0;
    if !known || limit.rlim_cur == libc::RLIM_INFINITY || limit.rlim_cur < limit.rlim_max {
        return;
    }
    let spare = (1 + fulmen::kernels::cores() as libc::rlim_t / 4).min(limit.rlim_max / 2);
    limit.rlim_cur = limit.rlim_max - spare;
    // SAFETY: lowers the first of the two.
    unsafe { libc::setrlimit(libc::RLIMIT_CPU, &raw const limit) };
}
