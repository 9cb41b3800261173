//! A rendezvous of threads.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Rendezvous;
use crate::error::{Error, Result};

/// Threads that have not met by then will not.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Meeting {
    /// What the ranks brought, by rank; `None`: not there yet.
    brought: Vec<Option<Vec<u8>>>,
    /// The last complete meeting, and how many there were.
    complete: Arc<Vec<Vec<u8>>>,
    meetings: u64,
    /// A rank that ended.
    ended: Option<usize>,
}

struct Place {
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

impl Place {
    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread's place in a rendezvous.
pub struct InProcess {
    rank: usize,
    size: usize,
    place: Arc<Place>,
}

/// A rendezvous for each of `n` threads of this process.
pub fn in_process(n: usize) -> Vec<InProcess> {
    let meeting = Meeting { brought: vec![None; n], ..Meeting::default() };
    let place = Arc::new(Place { meeting: Mutex::new(meeting), changed: Condvar::new() });
    (0..n).map(|rank| InProcess { rank, size: n, place: Arc::clone(&place) }).collect()
}

impl Rendezvous for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let until = Instant::now() + DEADLINE;
        let mut meeting = self.place.lock();
        let this = meeting.meetings;
        meeting.brought[self.rank] = Some(mine.to_vec());
        if meeting.brought.iter().all(Option::is_some) {
            meeting.complete = Arc::new(meeting.brought.iter_mut().filter_map(Option::take).collect());
            meeting.meetings += 1;
            self.place.changed.notify_all();
        }
        while meeting.meetings == this {
            let missing = meeting.brought.iter().position(Option::is_none);
            let left = until.saturating_duration_since(Instant::now());
            if meeting.ended.is_some() || left.is_zero() {
                let rank = meeting.ended.or(missing).unwrap_or_default();
                return Err(Error::Unreachable {
                    what: format!("rank {rank} did not come to the rendezvous of rank {}", self.rank),
                    remedy: "it ended, or does not take part: look at what it says".into(),
                });
            }
            meeting =
                self.place.changed.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(meeting.complete.to_vec())
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let mut meeting = self.place.lock();
        meeting.ended.get_or_insert(self.rank);
        self.place.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_meet_again_and_again() {
        let each = |mut me: InProcess| {
            (0..50u8).for_each(|round| {
                let all = me.all_gather(&[me.rank() as u8, round]).unwrap();
                assert_eq!(all, (0..4).map(|r| vec![r, round]).collect::<Vec<_>>());
            });
        };
        std::thread::scope(|s| in_process(4).into_iter().for_each(|me| drop(s.spawn(move || each(me)))));
    }

    #[test]
    fn who_ends_is_named() {
        let mut all = in_process(3);
        drop(all.remove(1));
        let e = all[0].all_gather(b"x").unwrap_err();
        assert!(e.to_string().contains("rank 1 did not come"), "{e}");
        assert_eq!(e.exit_code(), 4);
    }
}
