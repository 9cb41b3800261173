//! Ctrl-C and SIGTERM: the job ends in order, once.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// How often the watcher looks.
const EVERY: Duration = Duration::from_millis(50);

extern "C" fn note(signal: libc::c_int) {
    // A second one ends the program at once, whatever the first is waiting for.
    if SIGNAL.swap(signal, Ordering::Relaxed) != 0 {
        // SAFETY: _exit may be called from a signal handler.
        unsafe { libc::_exit(5) };
    }
}

/// Whether the user wants the job to end.
pub fn requested() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0
}

/// Catches SIGINT and SIGTERM from now on, and runs `end` on a thread of its own when one comes. `end`
/// keeps what can be kept; then the program ends with 5.
pub fn watch(end: impl FnOnce() + Send + 'static) {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only touches an atomic and calls _exit; it stays valid for the whole program.
        unsafe { libc::signal(signal, note as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
    let watcher = std::thread::Builder::new().name("interrupt".to_string());
    // Without a watcher the second signal still ends the program.
    let _ = watcher.spawn(move || {
        while !requested() {
            std::thread::sleep(EVERY);
        }
        end();
        std::process::exit(5);
    });
}
