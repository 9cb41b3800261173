//! Who lives and what failed: a star around rank 0, without I/O and without a clock of its own.
//!
//! Every rank sends a [`Beat`] to rank 0 at each tick, and rank 0 sends [`News`] to every rank: who was silent for how
//! long, whether the job has failed, whether all have left. Each datagram says all there is to say, so that a lost one
//! is made good by the next. Rank 0 decides which failure was the first.

use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::fabric::Bounds;
use crate::fabric::rendezvous::Secret;
use crate::fabric::shared::area::Failure;
use crate::fabric::shm::liveness::{Watch, pause};

/// Longest datagram: it must not be cut into fragments.
pub const LONGEST: usize = 1400;
const MAC: usize = 16;
/// A reason is cut to this.
const REASON: usize = 900;
/// So many silent ranks are named in one datagram.
const NAMED: usize = 40;

fn mac(secret: &Secret, bytes: &[u8]) -> Hmac<Sha256> {
    let mut mac = secret.mac();
    mac.update(bytes);
    mac
}

/// A stranger's datagram is worth nothing: each carries proof that its sender knows the job's secret.
fn seal(secret: &Secret, mut bytes: Vec<u8>) -> Vec<u8> {
    let mac = mac(secret, &bytes).finalize().into_bytes();
    bytes.extend_from_slice(&mac[..MAC]);
    bytes
}

fn open<'a>(secret: &Secret, datagram: &'a [u8]) -> Option<&'a [u8]> {
    let (bytes, theirs) = datagram.split_at_checked(datagram.len().checked_sub(MAC)?)?;
    mac(secret, bytes).verify_truncated_left(theirs).ok()?;
    Some(bytes)
}

/// What a rank tells rank 0.
#[derive(Clone, PartialEq, Debug)]
pub struct Beat {
    from: u32,
    count: u64,
    left: bool,
    failure: Option<Failure>,
}

/// What rank 0 tells everyone.
#[derive(Clone, PartialEq, Debug)]
pub struct News {
    count: u64,
    all_left: bool,
    /// (rank, milliseconds) of those that have been silent for a while.
    silent: Vec<(u32, u32)>,
    failure: Option<Failure>,
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take::<1>().map(|[b]| b)
    }

    fn flag(&mut self) -> Option<bool> {
        self.byte().and_then(|b| (b < 2).then_some(b == 1))
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn count(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn failure(&mut self) -> Option<Option<Failure>> {
        Some(match self.byte()? {
            0 => None,
            1 => {
                let (by, code) = (self.word()? as usize, self.byte()?);
                let len = self.word()? as usize;
                let (reason, rest) = self.0.split_at_checked(len)?;
                self.0 = rest;
                Some(Failure::Aborted { by, reason: String::from_utf8(reason.to_vec()).ok()?, code })
            }
            2 => Some(Failure::Gone { rank: self.word()? as usize }),
            3 => Some(Failure::Interrupted),
            _ => return None,
        })
    }
}

fn write_failure(bytes: &mut Vec<u8>, failure: Option<&Failure>) {
    match failure {
        None => bytes.push(0),
        Some(Failure::Aborted { by, reason, code }) => {
            let text = cut(reason, REASON);
            bytes.push(1);
            bytes.extend((*by as u32).to_le_bytes());
            bytes.push(*code);
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        Some(Failure::Gone { rank }) => {
            bytes.push(2);
            bytes.extend((*rank as u32).to_le_bytes());
        }
        Some(Failure::Interrupted) => bytes.push(3),
    }
}

fn cut(text: &str, len: usize) -> &str {
    let mut len = len.min(text.len());
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    &text[..len]
}

impl Beat {
    fn encode(&self, secret: &Secret) -> Vec<u8> {
        let mut bytes = vec![b'B'];
        bytes.extend(self.from.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.push(self.left.into());
        write_failure(&mut bytes, self.failure.as_ref());
        seal(secret, bytes)
    }

    fn decode(datagram: &[u8], secret: &Secret) -> Option<Self> {
        let mut r = Reader(open(secret, datagram)?);
        (r.byte()? == b'B').then_some(())?;
        let beat = Beat { from: r.word()?, count: r.count()?, left: r.flag()?, failure: r.failure()? };
        r.0.is_empty().then_some(beat)
    }
}

impl News {
    fn encode(&self, secret: &Secret) -> Vec<u8> {
        let mut bytes = vec![b'N'];
        bytes.extend(self.count.to_le_bytes());
        bytes.push(self.all_left.into());
        bytes.push(self.silent.len() as u8);
        for (rank, millis) in &self.silent {
            bytes.extend(rank.to_le_bytes());
            bytes.extend(millis.to_le_bytes());
        }
        write_failure(&mut bytes, self.failure.as_ref());
        seal(secret, bytes)
    }

    fn decode(datagram: &[u8], secret: &Secret) -> Option<Self> {
        let mut r = Reader(open(secret, datagram)?);
        (r.byte()? == b'N').then_some(())?;
        let (count, all_left, named) = (r.count()?, r.flag()?, r.byte()?);
        let silent = (0..named).map(|_| Some((r.word()?, r.word()?))).collect::<Option<_>>()?;
        let news = News { count, all_left, silent, failure: r.failure()? };
        r.0.is_empty().then_some(news)
    }
}

/// One rank's view of the job.
pub struct Pulse {
    rank: usize,
    secret: Secret,
    bounds: Bounds,
    /// Counts what this rank sends: a datagram is taken only when it is newer than the last.
    count: u64,
    /// Rank 0: the last count of each rank; others: of rank 0, at index 0.
    heard: Vec<u64>,
    watch: Watch,
    /// Rank 0: of each rank; others: of this rank, at index 0.
    left: Vec<bool>,
    all_left: bool,
    /// What rank 0 said of the others' silence.
    silent: Vec<(u32, u32)>,
    /// The first failure that this rank knows of.
    failure: Option<Failure>,
    /// The job's first failure, as decided by rank 0.
    decided: Option<Failure>,
}

impl Pulse {
    pub fn new(rank: usize, size: usize, secret: Secret, bounds: Bounds) -> Self {
        let counters = if rank == 0 { size } else { 1 };
        let (heard, left, watch) = (vec![0; counters], vec![false; counters], Watch::new(counters));
        Pulse {
            rank,
            secret,
            bounds,
            count: 0,
            heard,
            watch,
            left,
            all_left: size == 1,
            silent: vec![],
            failure: None,
            decided: None,
        }
    }

    /// To rank 0, or from rank 0 to everyone: the next datagram.
    pub fn speak(&mut self) -> Vec<u8> {
        self.count += 1;
        if self.rank != 0 {
            let failure = self.failure.clone();
            let beat = Beat { from: self.rank as u32, count: self.count, left: self.left[0], failure };
            return beat.encode(&self.secret);
        }
        self.heard[0] = self.count;
        let worth_telling = self.bounds.silence / 4;
        let silent = (1..self.heard.len())
            .filter_map(|rank| Some((rank, self.watch.silent_for(rank).filter(|s| *s > worth_telling)?)))
            .map(|(rank, silence)| (rank as u32, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX)))
            .take(NAMED)
            .collect();
        let news = News { count: self.count, all_left: self.all_left, silent, failure: self.decided.clone() };
        news.encode(&self.secret)
    }

    /// Takes in a datagram. `None`: it is a stranger's, garbled or old. Otherwise the rank that it came from, and
    /// whether it changed what the others should know at once.
    pub fn hear(&mut self, datagram: &[u8]) -> Option<(usize, bool)> {
        if self.rank != 0 {
            let news = News::decode(datagram, &self.secret).filter(|news| news.count > self.heard[0])?;
            self.heard[0] = news.count;
            self.silent = news.silent;
            self.all_left |= news.all_left;
            if let Some(failure) = news.failure {
                self.failure.get_or_insert_with(|| failure.clone());
                self.decided.get_or_insert(failure);
            }
            return Some((0, false));
        }
        let beat = Beat::decode(datagram, &self.secret)?;
        let from = beat.from as usize;
        let known = self.heard.get(from).copied().filter(|_| from != 0)?;
        if beat.count <= known {
            return None;
        }
        self.heard[from] = beat.count;
        let mut urgent = beat.failure.is_some_and(|failure| self.fail(failure));
        if beat.left {
            urgent |= self.leave(from);
        }
        Some((from, urgent))
    }

    /// Looks at the clock.
    pub fn look(&mut self, now: Instant) {
        self.watch.look(now, pause(&self.bounds), |i| self.heard[i]);
    }

    /// How long a rank had shown no sign of life at the last look; `None`: it was never heard of.
    pub fn silent_for(&self, rank: usize) -> Option<Duration> {
        if self.rank == 0 || rank == 0 {
            return self.watch.silent_for(rank);
        }
        let since = self.watch.silent_for(0)?;
        let told = self.silent.iter().find(|(silent, _)| *silent as usize == rank);
        Some(since + told.map_or(Duration::ZERO, |(_, millis)| Duration::from_millis((*millis).into())))
    }

    /// A rank that this one watches and that is well over the bound: nobody may be waiting for it, or whoever does is
    /// held by MPI.
    pub fn overdue(&self) -> Option<(usize, Duration)> {
        // Who has left waits for nobody, and the others' hearts may have stopped.
        if self.left[0] {
            return None;
        }
        let watched = if self.rank == 0 { 1..self.heard.len() } else { 0..1 };
        let bound = self.bounds.silence + self.bounds.silence / 4;
        watched
            .filter(|rank| self.rank != 0 || !self.left[*rank])
            .find_map(|rank| Some((rank, self.silent_for(rank).filter(|s| *s > bound)?)))
    }

    /// Records a failure, if this rank knows of none. Returns whether it was the first.
    pub fn fail(&mut self, failure: Failure) -> bool {
        if self.failure.is_some() {
            return false;
        }
        if self.rank == 0 {
            self.decided = Some(failure.clone());
        }
        self.failure = Some(failure);
        true
    }

    /// The first failure that this rank knows of.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// The job's first failure, once rank 0 has decided.
    pub fn decided(&self) -> Option<&Failure> {
        self.decided.as_ref()
    }

    /// This rank will not use the fabric any more.
    pub fn leave_self(&mut self) -> bool {
        self.leave(0)
    }

    fn leave(&mut self, at: usize) -> bool {
        self.left[at] = true;
        let before = self.all_left;
        if self.rank == 0 {
            self.all_left = self.left.iter().all(|left| *left);
        }
        self.all_left && !before
    }

    /// Whether every rank has said that it leaves.
    pub fn all_left(&self) -> bool {
        self.all_left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { silence: Duration::from_secs(8), patience: Duration::from_secs(60) };
    const SECOND: Duration = Duration::from_secs(1);

    fn job(size: usize) -> Vec<Pulse> {
        (0..size).map(|rank| Pulse::new(rank, size, Secret::from_bytes([7; 32]), BOUNDS)).collect()
    }

    /// One tick at `now`, in which the ranks of `mute` are neither heard nor hear.
    fn tick(job: &mut [Pulse], now: Instant, mute: &[usize]) {
        let lives = |rank: &usize| !mute.contains(rank);
        for rank in (1..job.len()).filter(lives) {
            let beat = job[rank].speak();
            if lives(&0) {
                assert_eq!(job[0].hear(&beat).unwrap().0, rank);
            }
        }
        let news = job[0].speak();
        for rank in (1..job.len()).filter(lives).filter(|_| lives(&0)) {
            job[rank].hear(&news).unwrap();
        }
        for rank in (0..job.len()).filter(lives) {
            job[rank].look(now);
        }
    }

    fn aborted(by: usize, reason: &str) -> Failure {
        Failure::Aborted { by, reason: reason.into(), code: 4 }
    }

    #[test]
    fn datagrams_come_back_as_they_were_and_fit() {
        let key = Secret::from_bytes([3; 32]);
        let reason = "é".repeat(2000);
        for failure in [
            None,
            Some(aborted(9, "x")),
            Some(aborted(9, &reason)),
            Some(Failure::Gone { rank: 4 }),
            Some(Failure::Interrupted),
        ] {
            let mut beat = Beat { from: 77, count: 1 << 40, left: true, failure };
            let sent = beat.encode(&key);
            if let Some(Failure::Aborted { reason, .. }) = &mut beat.failure {
                reason.truncate(REASON);
            }
            assert_eq!(Beat::decode(&sent, &key), Some(beat.clone()));
            let mut news = News {
                count: 5,
                all_left: false,
                silent: (0..NAMED as u32).map(|r| (r, 9 * r)).collect(),
                failure: beat.failure,
            };
            let sent = news.encode(&key);
            assert!(sent.len() <= LONGEST, "{}", sent.len());
            assert_eq!(News::decode(&sent, &key).as_ref(), Some(&news));
            assert!(
                Beat::decode(&sent, &key).is_none()
                    && News::decode(&sent, &Secret::from_bytes([4; 32])).is_none()
            );
            for cut in 0..sent.len() {
                assert!(News::decode(&sent[..cut], &key).is_none());
            }
            for at in 0..sent.len() {
                let mut bad = sent.clone();
                bad[at] ^= 1;
                assert!(News::decode(&bad, &key).is_none(), "a flipped bit in byte {at} was taken");
            }
            // Sealed garbage, as of a peer that has gone mad.
            news.silent.clear();
            let plain = open(&key, &news.encode(&key)).unwrap().to_vec();
            for cut in 0..plain.len() {
                assert!(News::decode(&seal(&key, plain[..cut].to_vec()), &key).is_none());
            }
        }
    }

    #[test]
    fn a_silent_rank_is_known_to_all() {
        let (mut job, start) = (job(4), Instant::now());
        for s in 0..3 {
            tick(&mut job, start + s * SECOND, &[]);
        }
        assert!((0..4).all(|me| job[me].silent_for(2).is_some_and(|s| s <= SECOND)));
        for s in 3..20 {
            tick(&mut job, start + s * SECOND, &[2]);
        }
        for me in [0, 1, 3] {
            let silence = job[me].silent_for(2).unwrap();
            assert!((16 * SECOND..=18 * SECOND).contains(&silence), "rank {me}: {silence:?}");
            assert!(job[me].silent_for(4 - me.max(1)).is_none_or(|s| s <= SECOND), "rank {me}");
        }
        assert_eq!(job[0].overdue().unwrap().0, 2);
        assert_eq!(job[1].overdue(), None, "rank 0 is alive");
    }

    #[test]
    fn rank_0_is_watched_by_all() {
        let (mut job, start) = (job(3), Instant::now());
        for s in 0..20 {
            tick(&mut job, start + s * SECOND, if s < 3 { &[] } else { &[0] });
        }
        for me in [1, 2] {
            assert!(job[me].silent_for(0).is_some_and(|s| s >= 16 * SECOND));
            assert_eq!(job[me].overdue().unwrap().0, 0);
        }
    }

    #[test]
    fn who_was_never_heard_of_is_not_called_silent() {
        let (mut job, start) = (job(3), Instant::now());
        for s in 0..30 {
            tick(&mut job, start + s * SECOND, &[1]);
        }
        assert_eq!(job[0].silent_for(1), None);
        assert_eq!(job[0].overdue(), None);
        assert_eq!(job[1].silent_for(0), None);
    }

    #[test]
    fn the_first_failure_at_rank_0_is_the_jobs() {
        let (mut job, start) = (job(4), Instant::now());
        tick(&mut job, start, &[]);
        assert!(job[2].fail(aborted(2, "two")) && job[3].fail(aborted(3, "three")));
        assert!(!job[2].fail(aborted(2, "again")));
        let (late, early) = (job[2].speak(), job[3].speak());
        assert_eq!(job[0].hear(&early), Some((3, true)));
        assert_eq!(job[0].hear(&late), Some((2, false)));
        tick(&mut job, start + SECOND, &[]);
        for me in 0..4 {
            assert_eq!(job[me].decided(), Some(&aborted(3, "three")));
        }
        assert_eq!(job[2].failure(), Some(&aborted(2, "two")), "what it has met itself");
        assert_eq!(job[1].failure(), Some(&aborted(3, "three")));
    }

    #[test]
    fn old_datagrams_and_strangers_change_nothing() {
        let mut job = job(2);
        let old = job[1].speak();
        job[1].fail(aborted(1, "x"));
        let new = job[1].speak();
        assert_eq!(job[0].hear(&new), Some((1, true)));
        assert_eq!(job[0].hear(&old), None);
        assert_eq!(job[0].hear(&new), None);
        let own = job[0].speak();
        assert_eq!(job[0].hear(&own), None, "its own words, sent back");
        let mut stranger = Pulse::new(1, 2, Secret::from_bytes([8; 32]), BOUNDS);
        assert_eq!(job[0].hear(&stranger.speak()), None);
        let mut beyond = Pulse::new(9, 10, Secret::from_bytes([7; 32]), BOUNDS);
        assert_eq!(job[0].hear(&beyond.speak()), None, "no such rank");
    }

    /// All have passed the last barrier, and rank 0's heart has stopped before it told.
    #[test]
    fn who_has_left_misses_nobody() {
        let (mut job, start) = (job(3), Instant::now());
        for s in 0..3 {
            tick(&mut job, start + s * SECOND, &[]);
        }
        for pulse in &mut job {
            pulse.leave_self();
        }
        for s in 3..60 {
            tick(&mut job, start + s * SECOND, &[0]);
        }
        assert!(job.iter().all(|pulse| pulse.overdue().is_none()));
    }

    #[test]
    fn all_know_when_all_have_left() {
        let (mut job, start) = (job(3), Instant::now());
        for (s, leaver) in [1, 0, 2].into_iter().enumerate() {
            assert!(job.iter().all(|p| !p.all_left()));
            job[leaver].leave_self();
            tick(&mut job, start + s as u32 * SECOND, &[]);
        }
        assert!(job.iter().all(Pulse::all_left));
    }
}
