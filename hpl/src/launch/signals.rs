//! Signals that ask this process to end, counted.

use std::sync::atomic::{AtomicU32, Ordering};

static COUNT: AtomicU32 = AtomicU32::new(0);

extern "C" fn note(_: libc::c_int) {
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Counts SIGINT, SIGTERM and SIGHUP from now on. What was ignored (nohup) stays so. Being in a terminal's
/// background does not stop this process: SIGTTIN and SIGTTOU are ignored.
pub fn listen() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: plain data, all zeros is valid.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
        new.sa_sigaction = note as extern "C" fn(libc::c_int) as usize;
        new.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler only adds to an atomic.
        unsafe {
            libc::sigaction(signal, std::ptr::null(), &raw mut old);
            if old.sa_sigaction != libc::SIG_IGN {
                libc::sigaction(signal, &raw const new, std::ptr::null_mut());
            }
        }
    }
    for signal in [libc::SIGTTIN, libc::SIGTTOU] {
        // SAFETY: ignoring a signal.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// How many have come.
pub fn count() -> u32 {
    COUNT.load(Ordering::Relaxed)
}
