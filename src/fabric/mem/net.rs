//! The faulty network: frames under way, and the checks at their arrival. No threads, no clock but a count.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::faults::Faults;
use crate::fabric::checksum;
use crate::fabric::{Lane, Memory};

/// All streams of a job.
pub struct Net {
    ranks: usize,
    faults: Faults,
    now: u64,
    streams: Vec<Stream>,
    /// When the last frame between two ranks is due, for jobs that do not reorder lanes.
    last_due: Vec<u64>,
}

#[derive(Default)]
struct Stream {
    /// Ranges armed and not filled, oldest first.
    armed: VecDeque<(Arc<Memory>, Range<usize>)>,
    /// Number of the next arm.
    arms: u64,
    /// Lengths of filled ranges not waited for.
    filled: VecDeque<usize>,
    /// Number of the next wait.
    waited: u64,
    frames: VecDeque<Frame>,
    /// Number of the next put.
    puts: u64,
    /// Number of the frame that the target expects.
    expected: u64,
}

/// What travels.
struct Frame {
    seq: u64,
    len: u64,
    crc: u32,
    payload: Payload,
    flipped: Option<u64>,
    due: u64,
}

enum Payload {
    /// Read at arrival: whoever changes it before its put is done is found by the checksum.
    Source(Arc<Memory>, Range<usize>),
    /// The second of a pair of duplicates.
    Copy(Vec<u8>),
}

/// What an arrival leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// A range was filled.
    Filled,
    /// A duplicate was told by its number and ignored.
    Duplicate,
    /// The frame is not what was sent, or not the next: words that follow with the ranks.
    Corrupt(String),
    /// The program put more than was armed.
    TooLong(String),
}

/// A frame that arrived.
pub struct Event {
    pub from: usize,
    pub to: usize,
    pub arrival: Arrival,
}

fn checksum(seq: u64, len: u64, payload: &[u8]) -> u32 {
    let head = checksum::crc32c_append(checksum::crc32c(&seq.to_le_bytes()), &len.to_le_bytes());
    checksum::crc32c_append(head, payload)
}

fn bytes(memory: &Memory, range: &Range<usize>) -> &'static [u8] {
    // SAFETY: checked to lie inside `memory`, which the frame keeps; used before the frame is dropped. Not
    // written meanwhile: the ledger of `Buf` refuses it until the put is done.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().add(range.start), range.len()) }
}

impl Net {
    pub fn new(ranks: usize, faults: Faults) -> Self {
        let mut streams = Vec::new();
        streams.resize_with(ranks * ranks * Lane::COUNT, Stream::default);
        Net { ranks, faults, now: 0, streams, last_due: vec![0; ranks * ranks] }
    }

    fn index(&self, from: usize, to: usize, lane: Lane) -> usize {
        (from * self.ranks + to) * Lane::COUNT + lane.0 as usize
    }

    fn stream(&self, from: usize, to: usize, lane: Lane) -> &Stream {
        &self.streams[self.index(from, to, lane)]
    }

    /// Arms a range, which must lie in `memory`; returns the arm's number.
    pub fn arm(
        &mut self,
        from: usize,
        to: usize,
        lane: Lane,
        memory: &Arc<Memory>,
        range: Range<usize>,
    ) -> u64 {
        let at = self.index(from, to, lane);
        let stream = &mut self.streams[at];
        stream.armed.push_back((Arc::clone(memory), range));
        stream.arms += 1;
        stream.arms - 1
    }

    /// Sends a range, which must lie in `memory`; returns the put's number.
    pub fn put(
        &mut self,
        from: usize,
        to: usize,
        lane: Lane,
        memory: &Arc<Memory>,
        range: Range<usize>,
    ) -> u64 {
        let at = self.index(from, to, lane);
        let seq = self.streams[at].puts;
        self.streams[at].puts += 1;
        let fate = self.faults.fate(from, to, lane, seq);
        if fate.dropped {
            return seq;
        }
        let mut due = self.now + fate.delay;
        let last_due = &mut self.last_due[from * self.ranks + to];
        if !self.faults.reorder {
            due = due.max(*last_due);
            *last_due = due;
        }
        let payload = bytes(memory, &range);
        let (len, crc) = (range.len() as u64, checksum(seq, range.len() as u64, payload));
        let copy = fate.duplicated.then(|| payload.to_vec());
        let frames = &mut self.streams[at].frames;
        let payload = Payload::Source(Arc::clone(memory), range);
        frames.push_back(Frame { seq, len, crc, payload, flipped: fate.flipped, due });
        if let Some(copy) = copy {
            frames.push_back(Frame { seq, len, crc, payload: Payload::Copy(copy), flipped: None, due });
        }
        seq
    }

    /// How many arms there were, and how many of them were waited for.
    pub fn arms(&self, from: usize, to: usize, lane: Lane) -> (u64, u64) {
        let stream = self.stream(from, to, lane);
        (stream.arms, stream.waited)
    }

    /// How many puts there were.
    pub fn puts(&self, from: usize, to: usize, lane: Lane) -> u64 {
        self.stream(from, to, lane).puts
    }

    /// Whether the next wait would succeed.
    pub fn is_filled(&self, from: usize, to: usize, lane: Lane) -> bool {
        !self.stream(from, to, lane).filled.is_empty()
    }

    /// The length of the oldest filled range, once.
    pub fn take(&mut self, from: usize, to: usize, lane: Lane) -> Option<usize> {
        let at = self.index(from, to, lane);
        let len = self.streams[at].filled.pop_front()?;
        self.streams[at].waited += 1;
        Some(len)
    }

    /// Whether put `seq` has left its source: taken, or lost on the way.
    pub fn is_done(&self, from: usize, to: usize, lane: Lane, seq: u64) -> bool {
        let mut frames = self.stream(from, to, lane).frames.iter();
        !frames.any(|f| f.seq == seq && matches!(f.payload, Payload::Source(..)))
    }

    /// Lets one operation's time pass.
    pub fn tick(&mut self) {
        self.now += 1;
    }

    /// Lets time pass until something can arrive. `false`: nothing ever will, unless a rank acts.
    pub fn skip(&mut self) -> bool {
        let due = self.streams.iter().filter_map(|s| s.head().map(|f| f.due)).min();
        self.now = self.now.max(due.unwrap_or(0));
        due.is_some()
    }

    /// The next frame that is due and has a range armed for it arrives.
    pub fn deliver(&mut self) -> Option<Event> {
        let at = self.streams.iter().position(|s| s.head().is_some_and(|f| f.due <= self.now))?;
        let (pair, lane) = (at / Lane::COUNT, Lane((at % Lane::COUNT) as u8));
        let (from, to) = (pair / self.ranks, pair % self.ranks);
        let stream = &mut self.streams[at];
        let frame = stream.frames.pop_front()?;
        Some(Event { from, to, arrival: stream.arrive(from, to, lane, frame) })
    }
}

impl Stream {
    /// The frame that would arrive next: a range is armed for it, or it needs none.
    fn head(&self) -> Option<&Frame> {
        self.frames.front().filter(|f| !self.armed.is_empty() || f.seq < self.expected)
    }

    fn arrive(&mut self, from: usize, to: usize, lane: Lane, mut frame: Frame) -> Arrival {
        let mut damaged = None;
        let mut payload: &[u8] = match &frame.payload {
            Payload::Source(memory, range) => bytes(memory, range),
            Payload::Copy(bytes) => bytes,
        };
        if let Some(bit) = frame.flipped {
            let bit = bit % (64 + 64 + 32 + 8 * payload.len() as u64);
            match bit {
                0..64 => frame.seq ^= 1 << bit,
                64..128 => frame.len ^= 1 << (bit - 64),
                128..160 => frame.crc ^= 1 << (bit - 128),
                _ => {
                    let copy: &mut Vec<u8> = damaged.insert(payload.to_vec());
                    copy[(bit - 160) as usize / 8] ^= 1 << (bit % 8);
                    payload = copy;
                }
            }
        }
        let expected = self.expected;
        if checksum(frame.seq, frame.len, payload) != frame.crc {
            return Arrival::Corrupt(format!("the checksum of put {expected} on the {lane} lane is wrong"));
        }
        if frame.seq < expected {
            return Arrival::Duplicate;
        }
        if frame.seq > expected {
            let came = frame.seq;
            return Arrival::Corrupt(format!(
                "put {expected} on the {lane} lane was lost: put {came} came in its place"
            ));
        }
        let Some((memory, range)) = self.armed.pop_front() else {
            return Arrival::Corrupt(format!("put {expected} on the {lane} lane came unasked"));
        };
        if payload.len() > range.len() {
            return Arrival::TooLong(format!(
                "put {expected} of rank {from} to rank {to} on the {lane} lane has {} bytes, but {} were armed \
                 for it",
                payload.len(),
                range.len()
            ));
        }
        // SAFETY: the range was checked to lie inside `memory`, is armed, so that nobody looks at it, and
        // is another rank's memory than the payload.
        unsafe {
            let to = memory.as_ptr().add(range.start);
            std::ptr::copy_nonoverlapping(payload.as_ptr(), to, payload.len());
        }
        self.expected += 1;
        self.filled.push_back(payload.len());
        Arrival::Filled
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory;
    use super::*;

    const LANE: Lane = Lane::ROWS;

    fn set(memory: &Memory, value: u8) {
        // SAFETY: one thread, no other reference.
        unsafe { memory.as_ptr().write_bytes(value, memory.len()) }
    }

    fn get(memory: &Memory) -> Vec<u8> {
        bytes(memory, &(0..memory.len())).to_vec()
    }

    /// Puts ten times and delivers all; returns the target and what arrived.
    fn ten(faults: Faults) -> (Arc<Memory>, Vec<Arrival>) {
        let (source, target) = (memory(0, 0, 10).unwrap(), memory(1, 0, 10).unwrap());
        let mut net = Net::new(2, faults);
        let mut seen = Vec::new();
        set(&source, 9);
        for i in 0..10 {
            assert_eq!(net.put(0, 1, LANE, &source, i..i + 1), i as u64);
            assert_eq!(net.arm(0, 1, LANE, &target, i..i + 1), i as u64);
        }
        while net.skip() {
            while let Some(event) = net.deliver() {
                assert_eq!((event.from, event.to), (0, 1));
                seen.push(event.arrival);
            }
        }
        (target, seen)
    }

    #[test]
    fn a_good_network_delivers() {
        let (target, seen) = ten(Faults { delay: 50, ..Faults::default() });
        assert_eq!(get(&target), [9; 10]);
        assert_eq!(seen, vec![Arrival::Filled; 10]);
    }

    #[test]
    fn duplicates_are_told_and_fill_nothing() {
        let (target, seen) = ten(Faults { duplicate: 1.0, ..Faults::default() });
        assert_eq!(get(&target), [9; 10]);
        assert_eq!(seen.iter().filter(|a| **a == Arrival::Duplicate).count(), 10);
        assert_eq!(seen.iter().filter(|a| **a == Arrival::Filled).count(), 10);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        for seed in 0..500 {
            let (target, seen) = ten(Faults { seed, corrupt: 1.0, ..Faults::default() });
            assert_eq!(get(&target), [0; 10], "seed {seed}: wrong bytes were accepted");
            assert!(seen.iter().all(|a| matches!(a, Arrival::Corrupt(_))), "seed {seed}: {seen:?}");
        }
    }

    #[test]
    fn a_gap_is_named() {
        for seed in 0..100 {
            let (target, seen) = ten(Faults { seed, drop: 0.3, ..Faults::default() });
            let filled = seen.iter().take_while(|a| **a == Arrival::Filled).count();
            assert!(get(&target)[filled..].iter().all(|b| *b == 0));
            match seen.get(filled) {
                Some(Arrival::Corrupt(what)) => {
                    assert!(what.starts_with(&format!("put {filled} on the rows lane was lost")), "{what}");
                }
                None => {}
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_source_that_changes_too_early_is_found() {
        let (source, target) = (memory(0, 0, 10).unwrap(), memory(1, 0, 10).unwrap());
        let mut net = Net::new(2, Faults::default());
        net.put(0, 1, LANE, &source, 0..10);
        assert!(!net.is_done(0, 1, LANE, 0));
        set(&source, 1);
        net.arm(0, 1, LANE, &target, 0..10);
        assert!(matches!(net.deliver().unwrap().arrival, Arrival::Corrupt(_)));
        assert!(net.is_done(0, 1, LANE, 0));
    }
}
