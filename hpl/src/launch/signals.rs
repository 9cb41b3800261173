//! Signals that ask this process to end, counted.

use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

static COUNT: AtomicU32 = AtomicU32::new(0);
/// Which came first.
static WHICH: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let _ = WHICH.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Counts them from now on. What was ignored (nohup) stays so. Being in a terminal's
/// background does not stop this process: SIGTTIN and SIGTTOU are ignored.
pub fn listen() {
    crate::interrupt::catch(note);
    for signal in [libc::SIGTTIN, libc::SIGTTOU] {
        // SAFETY: ignoring a signal.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Which it was, and where it mostly comes from.
pub fn words() -> String {
    crate::interrupt::by(WHICH.load(Ordering::Relaxed))
}

/// How many have come.
pub fn count() -> u32 {
    COUNT.load(Ordering::Relaxed)
}
