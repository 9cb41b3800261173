//! The source's side of the lanes to one peer: which bytes may travel next. No I/O, no clock.

use std::collections::VecDeque;

use super::frame::{CHUNK, EAGER, Header, Kind, WINDOW};
use super::{Region, Wrong};
use crate::fabric::Lane;

/// A put that has not left its memory yet.
struct Put {
    region: Region,
    /// Bytes that were handed out in frames.
    handed: usize,
    /// Whether the last frame was.
    complete: bool,
    /// Frames handed out and not written yet.
    writing: usize,
}

#[derive(Default)]
struct LaneOut {
    /// Number of the next put.
    next: u64,
    /// The last puts, in order; all before them have left.
    puts: VecDeque<Put>,
    /// Of how many arms the peer has told.
    credited: u64,
    /// The lengths of those whose put has not started.
    lengths: VecDeque<u64>,
    /// Number of the next put to start.
    start: u64,
}

impl LaneOut {
    fn first(&self) -> u64 {
        self.next - self.puts.len() as u64
    }

    /// The put that may send a piece now, of at most so many bytes.
    fn ready(&self, most: usize) -> Option<u64> {
        let first = self.first();
        // The one that has started, if any, is the last before `start`.
        if self.start > first {
            let last = &self.puts[(self.start - 1 - first) as usize];
            if !last.complete {
                return (CHUNK.min(last.region.len - last.handed) <= most).then_some(self.start - 1);
            }
        }
        let put = self.puts.get((self.start - first) as usize)?;
        if CHUNK.min(put.region.len) > most {
            return None;
        }
        let eager = put.region.len <= EAGER && self.start < self.credited.saturating_add(WINDOW);
        (self.start < self.credited || eager).then_some(self.start)
    }
}

/// A piece of a put, to be sent.
pub struct Piece {
    pub header: Header,
    pub region: Region,
}

/// All lanes to one peer.
#[derive(Default)]
pub struct Outgoing {
    lanes: [LaneOut; Lane::COUNT],
    /// Who was served last.
    served: usize,
}

impl Outgoing {
    /// Queues a put; returns its number.
    pub fn put(&mut self, lane: Lane, region: Region) -> u64 {
        let out = &mut self.lanes[lane.0 as usize];
        out.puts.push_back(Put { region, handed: 0, complete: false, writing: 0 });
        out.next += 1;
        out.next - 1
    }

    /// The peer has armed a range of `len` bytes.
    pub fn credit(&mut self, lane: Lane, number: u64, len: u64) -> Result<(), Wrong> {
        let out = &mut self.lanes[lane.0 as usize];
        if number != out.credited {
            return Err(Wrong::Corrupt(format!(
                "credit {number} on the {lane} lane instead of credit {}",
                out.credited
            )));
        }
        out.credited += 1;
        if number >= out.start {
            out.lengths.push_back(len);
        }
        Ok(())
    }

    /// The next piece of at most `most` bytes to send from rank `from` to rank `to`, if any may go: one of
    /// each lane in turn.
    pub fn piece(&mut self, from: u32, to: u32, most: usize) -> Result<Option<Piece>, Wrong> {
        for turn in 1..=Lane::COUNT {
            let at = (self.served + turn) % Lane::COUNT;
            let Some(number) = self.lanes[at].ready(most) else { continue };
            self.served = at;
            return self.cut(at, number, from, to).map(Some);
        }
        Ok(None)
    }

    fn cut(&mut self, at: usize, number: u64, from: u32, to: u32) -> Result<Piece, Wrong> {
        let (lane, out) = (Lane(at as u8), &mut self.lanes[at]);
        let first = out.first();
        let put = &mut out.puts[(number - first) as usize];
        let total = put.region.len;
        if number == out.start {
            out.start += 1;
            if let Some(armed) = out.lengths.pop_front()
                && total as u64 > armed
            {
                return Err(Wrong::too_long(from, to, lane, number, total as u64, armed));
            }
        }
        let len = CHUNK.min(total - put.handed);
        let region = put.region.part(put.handed, len);
        let header = Header {
            lane,
            number,
            offset: put.handed as u64,
            total: total as u64,
            len: len as u32,
            ..Header::empty(Kind::Put, from, to)
        };
        put.handed += len;
        put.complete = put.handed == total;
        put.writing += 1;
        Ok(Piece { header, region })
    }

    /// A piece has been written: the system has its bytes.
    pub fn written(&mut self, lane: Lane, number: u64) {
        let out = &mut self.lanes[lane.0 as usize];
        let first = out.first();
        if let Some(put) = number.checked_sub(first).and_then(|at| out.puts.get_mut(at as usize)) {
            put.writing -= 1;
        }
        while out.puts.front().is_some_and(|put| put.complete && put.writing == 0) {
            out.puts.pop_front();
        }
    }

    /// Whether the memory of a put is free again. `None`: it was never made.
    pub fn is_done(&self, lane: Lane, number: u64) -> Option<bool> {
        let out = &self.lanes[lane.0 as usize];
        (number < out.next).then(|| number < out.first())
    }

    /// Whether no put is under way.
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|out| out.puts.is_empty())
    }

    /// Drops what has not started: nobody will arm a range for it.
    pub fn forget(&mut self) {
        for out in &mut self.lanes {
            while out.puts.back().is_some_and(|put| put.writing == 0) {
                out.puts.pop_back();
                out.next -= 1;
            }
            out.start = out.start.min(out.next);
        }
    }
}
