//! Signals that ask this process to end, counted.

use std::sync::atomic::{AtomicU32, Ordering};

static COUNT: AtomicU32 = AtomicU32::new(0);

extern "C" fn note(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Counts SIGINT, SIGTERM and SIGHUP from now on. What was ignored (nohup) stays so. Being in a terminal's
/// background does not stop this process: SIGTTIN and SIGTTOU are ignored.
pub fn listen() {
    crate::interrupt::catch(note);
    for signal in [libc::SIGTTIN, libc::SIGTTOU] {
        // SAFETY: ignoring a signal.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// How many have come.
pub fn count() -> u32 {
    COUNT.load(Ordering::Relaxed)
}
