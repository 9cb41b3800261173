//! Ranks that wait for each other, so that none can ever go on.
//!
//! A rank waits for one thing of one peer at a time, and shows it. From a rank that waits, what it waits for leads to a
//! peer, and on from there; where that leads back, and nothing that is waited for has been made, no rank of the circle
//! can make it: each is inside its own wait. Whether all were there at once, a second look tells: nobody's
//! [`Wait`] may have changed in between.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::area::{Area, Life};
use crate::fabric::Lane;

/// A wait is looked into after this long, and a circle must last as long.
const LOOK: Duration = Duration::from_secs(1);

/// What is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// The peer's put.
    Put,
    /// That the peer arms a range for this rank's put.
    Room,
}

/// What a rank waits for, in memory that all ranks see. Valid when all zeros.
#[repr(C)]
#[derive(Default)]
pub struct Wait {
    /// Odd while it waits: counts the beginnings and the ends.
    count: AtomicU64,
    /// Peer, lane and [`Wanted`].
    whom: AtomicU64,
    number: AtomicU64,
}

impl Wait {
    /// The rank begins to wait for number `i` on `lane` of, or to, `peer`.
    pub fn begin(&self, wanted: Wanted, peer: usize, lane: Lane, i: u64) {
        let whom = (peer as u64) << 16 | u64::from(lane.0) << 8 | u64::from(wanted == Wanted::Room);
        self.whom.store(whom, Ordering::Relaxed);
        self.number.store(i, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Release);
    }

    /// It does not wait any more.
    pub fn end(&self) {
        self.count.fetch_add(1, Ordering::Release);
    }

    fn look(&self, rank: usize) -> Option<Waiting> {
        let count = self.count.load(Ordering::Acquire);
        let (whom, number) = (self.whom.load(Ordering::Relaxed), self.number.load(Ordering::Relaxed));
        let wanted = if whom & 1 == 0 { Wanted::Put } else { Wanted::Room };
        let (peer, lane) = ((whom >> 16) as usize, Lane((whom >> 8) as u8));
        (count % 2 == 1).then_some(Waiting { rank, count, wanted, peer, lane, number })
    }
}

/// One rank's wait, as another sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiting {
    rank: usize,
    count: u64,
    wanted: Wanted,
    peer: usize,
    lane: Lane,
    number: u64,
}

impl Waiting {
    /// Whether what it waits for has been made: it will go on.
    fn fulfilled(&self, area: &Area) -> bool {
        match self.wanted {
            Wanted::Put => area.stream(self.peer, self.rank, self.lane).has_put(self.number),
            Wanted::Room => area.stream(self.rank, self.peer, self.lane).is_taken(self.number),
        }
    }
}

/// The circle that the wait of `rank` leads into, if it does; it begins with the lowest rank.
fn circle(area: &Area, rank: usize) -> Option<Vec<Waiting>> {
    let mut trail: Vec<Waiting> = Vec::new();
    let mut at = rank;
    loop {
        if let Some(first) = trail.iter().position(|w| w.rank == at) {
            let mut circle = trail.split_off(first);
            let lowest = (0..circle.len()).min_by_key(|&i| circle[i].rank).unwrap_or(0);
            circle.rotate_left(lowest);
            return Some(circle);
        }
        let valid = |w: &Waiting| w.peer < area.ranks() && usize::from(w.lane.0) < Lane::COUNT;
        let rank = Some(area.rank(at)).filter(|r| r.life() == Life::Running)?;
        let waiting = rank.wait.look(at).filter(valid).filter(|w| !w.fulfilled(area))?;
        trail.push(waiting);
        at = waiting.peer;
    }
}

/// Looks for a circle while a rank waits.
pub struct Suspicion {
    since: Instant,
    seen: Option<Vec<Waiting>>,
}

impl Suspicion {
    /// The wait begins.
    pub fn new() -> Self {
        Suspicion { since: Instant::now(), seen: None }
    }

    /// Looks, at times. The ranks that wait for each other for good, in words; `silent` ones may be stopped, which
    /// is another failure.
    pub fn look(&mut self, area: &Area, rank: usize, silent: impl Fn(usize) -> bool) -> Option<String> {
        if self.since.elapsed() < LOOK {
            return None;
        }
        self.since = Instant::now();
        let now = circle(area, rank).filter(|circle| !circle.iter().any(|w| silent(w.rank)));
        let stands = now.is_some() && now == self.seen;
        self.seen = now;
        stands.then(|| in_words(area, self.seen.as_deref().unwrap_or_default()))
    }
}

fn in_words(area: &Area, circle: &[Waiting]) -> String {
    const TOLD: usize = 8;
    let mut text = "ranks wait for each other, and none can go on: ".to_owned();
    for (i, w) in circle.iter().take(TOLD).enumerate() {
        let Waiting { rank, peer, lane, number, .. } = w;
        let activity = area.rank(*rank).activity();
        let (space, separator) = (if activity.is_empty() { "" } else { " " }, if i == 0 { "" } else { "; " });
        // Writing to a string does not fail.
        let _ = match w.wanted {
            Wanted::Put => write!(
                text,
                "{separator}rank {rank}{space}{activity} waits for put {number} of rank {peer} on the {lane} lane"
            ),
            Wanted::Room => write!(
                text,
                "{separator}rank {rank}{space}{activity} waits until rank {peer} takes put {number} on the {lane} lane"
            ),
        };
    }
    if circle.len() > TOLD {
        let _ = write!(text, "; and {} more", circle.len() - TOLD);
    }
    text + "\n    ranks called different collectives, or the same ones in another order"
}
