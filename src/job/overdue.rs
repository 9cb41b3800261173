//! The end of a rank that does not come to its end.
//!
//! A rank that computes hears at its next call of the fabric that the job has failed, and that may be a while. Whoever
//! `fulmen-run` has started is ended by its agent; others end themselves here, as ranks over `shm` do too.

use std::io::Write;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::lock;
use crate::error::{Error, Result};
use crate::fabric::mixed::Connected;

/// What a process does before it ends.
pub type LastWords = Box<dyn FnOnce(&Error) + Send>;

/// Of a silence bound: ranks have so long to end by themselves.
fn grace(silence: Duration) -> Duration {
    silence / 4
}

/// From the job's failure on this rank has a grace to drop its fabric; then its process ends, with the failure's exit code.
///
/// # Errors
/// [`Error::Resources`] when there is no thread to be had.
pub fn watch(
    connected: &Connected,
    silence: Duration,
    last_words: Arc<Mutex<Option<LastWords>>>,
    me: String,
) -> Result<()> {
    let (ring, rung) = mpsc::channel();
    connected.at_failure(move || {
        let _ = ring.send(());
    });
    let fabric = Arc::downgrade(&connected.fabric);
    let watch = move || {
        // The bell goes with the fabric: then the rank has left.
        if rung.recv().is_err() {
            return;
        }
        std::thread::sleep(grace(silence));
        let Some(error) = fabric.upgrade().and_then(|fabric| fabric.poll().err()) else { return };
        let _ = writeln!(
            std::io::stderr(),
            "fulmen: {me} was still busy {:.1} s after the job's end, and ends now: {error}",
            grace(silence).as_secs_f64()
        );
        if let Some(last) = lock(&last_words).take() {
            last(&error);
        }
        // SAFETY: ends the process, whatever its other threads are at.
        unsafe { libc::_exit(i32::from(error.exit_code())) };
    };
    let thread = std::thread::Builder::new().name("fulmen-end".into()).spawn(watch);
    thread.map(drop).map_err(|e| Error::Resources {
        what: format!("no thread that ends this rank with its job: {e}"),
        remedy: "use fewer threads, or raise the limit (ulimit -u)".into(),
    })
}
