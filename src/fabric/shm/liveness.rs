//! Heartbeats: counting one's own, watching the others'.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::shared::area::{Area, Failure};
use super::Bounds;
use crate::error::{Error, Result};

/// When each of some counters was last seen to move.
pub struct Watch {
    /// Last value and when it came; `None` before the first look.
    seen: Vec<Option<(u64, Instant)>>,
    looked: Option<Instant>,
}

impl Watch {
    /// So many counters.
    pub fn new(counters: usize) -> Self {
        Watch { seen: vec![None; counters], looked: None }
    }

    /// Looks at the counters at `now`. Whoever has not looked for `pause` or longer was stopped himself (the
    /// whole job may have been, by Ctrl-Z): nobody's silence counts from before that.
    pub fn look(&mut self, now: Instant, pause: Duration, beat: impl Fn(usize) -> u64) {
        let slept = self.looked.is_some_and(|before| now.saturating_duration_since(before) >= pause);
        for (i, seen) in self.seen.iter_mut().enumerate() {
            let value = beat(i);
            if slept || seen.is_none_or(|(before, _)| before != value) {
                *seen = Some((value, now));
            }
        }
        self.looked = Some(now);
    }

    /// How long counter `i` had stood still at the last look. `None`: it has never moved from 0.
    pub fn silent_for(&self, i: usize) -> Option<Duration> {
        let ((value, since), looked) = (self.seen[i]?, self.looked?);
        (value != 0).then(|| looked.saturating_duration_since(since))
    }
}

/// How often to count and look, for a silence bound.
pub fn tick(bounds: &Bounds) -> Duration {
    (bounds.silence / 16).clamp(Duration::from_millis(5), Duration::from_millis(250))
}

/// A looker that paused so long does not trust its clock.
pub fn pause(bounds: &Bounds) -> Duration {
    bounds.silence / 2
}

/// After a failure ranks have so long to end by themselves.
pub fn grace(bounds: &Bounds) -> Duration {
    bounds.silence.min(Duration::from_secs(5))
}

/// The thread that counts this rank's heartbeat.
pub struct Liveness {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Liveness {
    /// Starts it. Counter `ranks` of `watch` is the supervisor's.
    ///
    /// # Errors
    /// [`Error::Resources`] when there is no thread to be had.
    pub fn start(rank: usize, area: Arc<Area>, watch: Arc<Mutex<Watch>>, bounds: Bounds) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        area.rank(rank).beat.fetch_add(1, Ordering::Relaxed);
        let heart = Heart { rank, area, watch, bounds, parent: parent(), stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new()
            .name("fulmen-heart".into())
            .spawn(move || heart.run())
            .map_err(|e| Error::Resources {
                what: format!("no thread for the heartbeat of rank {rank}: {e}"),
                remedy: "use fewer threads, or raise the limit (ulimit -u)".into(),
            })?;
        Ok(Liveness { stop, thread: Some(thread) })
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has nothing to return, and does not panic.
            let _ = thread.join();
        }
    }
}

fn parent() -> libc::pid_t {
    // SAFETY: always succeeds.
    unsafe { libc::getppid() }
}

struct Heart {
    rank: usize,
    area: Arc<Area>,
    watch: Arc<Mutex<Watch>>,
    bounds: Bounds,
    parent: libc::pid_t,
    stop: Arc<AtomicBool>,
}

impl Heart {
    fn run(self) {
        let ranks = self.area.ranks();
        let mut failed_at = None;
        while !self.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            self.area.rank(self.rank).beat.fetch_add(1, Ordering::Relaxed);
            let silence = {
                let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
                watch.look(now, pause(&self.bounds), |i| {
                    if i < ranks { &self.area.rank(i).beat } else { self.area.supervisor_beat() }
                        .load(Ordering::Relaxed)
                });
                watch.silent_for(ranks)
            };
            if parent() != self.parent {
                self.orphaned("is gone".into());
            } else if let Some(silence) = silence.filter(|s| *s > self.bounds.silence) {
                self.orphaned(format!("was silent for {:.1} s", silence.as_secs_f64()));
            }
            if self.area.failure().is_some() {
                // The rank's own thread is to end the process, the supervisor sees to it, and if both fail:
                let since = *failed_at.get_or_insert(now);
                if now - since > 2 * grace(&self.bounds) {
                    // SAFETY: ends this process, which has nothing left to do.
                    unsafe { libc::_exit(4) };
                }
            }
            std::thread::park_timeout(tick(&self.bounds));
        }
    }

    /// Nobody is left to report for this rank: it does so itself.
    fn orphaned(&self, what: String) {
        let reason = format!(
            "the process that started the ranks (pid {}) {what}\n    \
             it was killed or stopped: start the job again",
            self.parent
        );
        let first = self.area.fail(&Failure::Aborted { by: self.rank, reason: reason.clone(), code: 4 });
        if first {
            eprintln!("rank {}: {reason}", self.rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn silence_is_since_the_last_movement() {
        let start = Instant::now();
        let mut watch = Watch::new(2);
        assert_eq!(watch.silent_for(0), None);
        for s in 0..10 {
            watch.look(start + s * SECOND, 5 * SECOND, |i| if i == 0 { 1 + u64::from(s.min(3)) } else { 0 });
        }
        assert_eq!(watch.silent_for(0), Some(6 * SECOND));
        assert_eq!(watch.silent_for(1), None, "not there yet");
    }

    #[test]
    fn who_was_stopped_himself_forgives_silence() {
        let start = Instant::now();
        let mut watch = Watch::new(1);
        watch.look(start, 5 * SECOND, |_| 1);
        watch.look(start + 4 * SECOND, 5 * SECOND, |_| 1);
        assert_eq!(watch.silent_for(0), Some(4 * SECOND));
        watch.look(start + 60 * SECOND, 5 * SECOND, |_| 1);
        assert_eq!(watch.silent_for(0), Some(Duration::ZERO));
        watch.look(start + 62 * SECOND, 5 * SECOND, |_| 1);
        assert_eq!(watch.silent_for(0), Some(2 * SECOND));
    }
}
