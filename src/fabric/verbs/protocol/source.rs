//! The sending half: puts wait, are announced, granted, sent in the order of the grants, and done.

use std::collections::VecDeque;

use super::wire::{Body, CABLES, Grant, SMALL, SUMS};
use super::{Fault, Mode, Settings, chunk_len, cost};
use crate::fabric::Lane;
use crate::fabric::verbs::nic::EXTENT;

/// Small puts under way on a lane that the target has not taken.
pub const SMALL_WINDOW: u32 = 16;
/// Announced puts under way on a lane.
pub const ANNOUNCED: usize = 64;
/// Refusals in a row, with nothing under way, after which a device is given up.
const REFUSALS: u32 = 1000;

struct Put {
    number: u64,
    at: usize,
    len: usize,
    /// Bytes granted.
    granted: u64,
    /// Bytes that have left.
    left: usize,
}

#[derive(Default)]
struct Stream {
    next: u64,
    /// Not announced, in order.
    waiting: VecDeque<Put>,
    /// Announced and not done.
    announced: VecDeque<Put>,
    small_sent: u32,
    small_taken: u32,
    /// Puts from here on that had not been granted when the target left: nobody will take them.
    forgotten: Vec<u64>,
}

/// A chunk that was granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    pub lane: Lane,
    pub put: u64,
    /// Number on its cable.
    pub number: u64,
    pub at: usize,
    pub len: usize,
    /// Where it goes (write mode).
    pub address: u64,
    pub key: u32,
}

#[derive(Default)]
struct Cable {
    window: u32,
    granted: u64,
    queued: VecDeque<Chunk>,
    /// Sent, and not completed by the device.
    flying: VecDeque<Chunk>,
    /// Frames of `flying`.
    frames: u32,
    /// The target has the chunks before this one.
    there: u64,
    refusals: u32,
    /// Sums not told yet, the last of them of the last chunk sent.
    sums: VecDeque<u32>,
    summed: u64,
}

impl Cable {
    /// Whether the target has all that the device has not completed.
    fn all_there(&self) -> bool {
        self.flying.back().is_none_or(|chunk| chunk.number < self.there)
    }

    fn is_full_for(&self, mode: Mode, chunk: &Chunk) -> bool {
        self.frames + cost(mode, chunk.len) > self.window
    }
}

/// A chunk has left its memory.
fn leave(streams: &mut [Stream; Lane::COUNT], chunk: &Chunk) {
    let announced = &mut streams[chunk.lane.0 as usize].announced;
    if let Some(i) = announced.iter().position(|p| p.number == chunk.put) {
        let put = &mut announced[i];
        put.left += chunk.len;
        if put.left == put.len {
            announced.remove(i);
        }
    }
}

pub struct Source {
    settings: Settings,
    streams: [Stream; Lane::COUNT],
    cables: Vec<Cable>,
    /// Number of the next chunk to be granted.
    chunks: u64,
    /// Lane that speaks next.
    turn: usize,
}

impl Source {
    pub fn new(settings: Settings) -> Self {
        let cables = settings.windows.iter().map(|w| Cable { window: w.send, ..Cable::default() }).collect();
        Source { settings, streams: Default::default(), cables, chunks: 0, turn: 0 }
    }

    pub fn put(&mut self, lane: Lane, at: usize, len: usize) -> u64 {
        let stream = &mut self.streams[lane.0 as usize];
        let number = stream.next;
        stream.next += 1;
        stream.waiting.push_back(Put { number, at, len, granted: 0, left: 0 });
        number
    }

    /// How many puts were made.
    pub fn puts(&self, lane: Lane) -> u64 {
        self.streams[lane.0 as usize].next
    }

    pub fn is_done(&self, lane: Lane, put: u64) -> bool {
        let s = &self.streams[lane.0 as usize];
        let is_open = |puts: &VecDeque<Put>| puts.iter().any(|p| p.number == put);
        put < s.next && !is_open(&s.waiting) && !is_open(&s.announced) && !s.forgotten.contains(&put)
    }

    pub fn is_forgotten(&self, lane: Lane, put: u64) -> bool {
        self.streams[lane.0 as usize].forgotten.contains(&put)
    }

    /// Nothing waits and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.streams.iter().all(|s| s.waiting.is_empty() && s.announced.is_empty())
            && self.cables.iter().all(|c| c.queued.is_empty() && c.all_there() && c.sums.is_empty())
    }

    /// The target will arm no more: what it has not granted stays.
    pub fn forget(&mut self) {
        for s in &mut self.streams {
            s.forgotten.extend(s.announced.iter().filter(|p| p.granted == 0).map(|p| p.number));
            s.announced.retain(|p| p.granted > 0);
            s.forgotten.extend(s.waiting.drain(..).map(|p| p.number));
        }
    }

    /// The target has taken so many small puts of each lane.
    pub fn on_taken(&mut self, taken: &[u32; Lane::COUNT]) -> Result<(), String> {
        for (s, taken) in self.streams.iter_mut().zip(taken) {
            if taken.wrapping_sub(s.small_taken) > s.small_sent.wrapping_sub(s.small_taken) {
                return Err(format!("{taken} small puts taken of {}", s.small_sent));
            }
            s.small_taken = *taken;
        }
        Ok(())
    }

    /// Leave to send the chunks of a grant.
    pub fn on_grant(&mut self, grant: &Grant) -> Result<(), String> {
        let wrong = || format!("a grant that fits nothing: {grant:?}");
        let stream = &mut self.streams[grant.lane.0 as usize];
        let put = stream.announced.iter_mut().find(|p| p.number == grant.put).ok_or_else(wrong)?;
        let end = grant.offset.checked_add(grant.len).ok_or_else(wrong)?;
        if grant.first != self.chunks || grant.offset != put.granted || end > put.len as u64 || grant.len == 0
        {
            return Err(wrong());
        }
        let first_address = grant.address.wrapping_sub(grant.offset);
        while put.granted < end {
            let offset = put.granted;
            let len =
                chunk_len(self.settings.chunk, put.at as u64, first_address, offset, put.len as u64) as u64;
            if offset + len > end {
                return Err(wrong());
            }
            let which = (self.chunks % self.cables.len() as u64) as usize;
            let cable = &mut self.cables[which];
            cable.queued.push_back(Chunk {
                lane: grant.lane,
                put: put.number,
                number: cable.granted,
                at: put.at + offset as usize,
                len: len as usize,
                address: first_address.wrapping_add(offset),
                key: grant.keys[which],
            });
            cable.granted += 1;
            self.chunks += 1;
            put.granted += len;
        }
        Ok(())
    }

    /// The next chunk that its cable has room for.
    pub fn next_send(&self) -> Option<(usize, Chunk)> {
        self.cables.iter().enumerate().find_map(|(i, cable)| {
            let chunk = cable.queued.front()?;
            (!cable.is_full_for(self.settings.mode, chunk)).then_some((i, *chunk))
        })
    }

    /// The chunk of [`Source::next_send`] was taken by the device.
    pub fn on_sent(&mut self, cable: usize, sum: u32) {
        let cable = &mut self.cables[cable];
        if let Some(chunk) = cable.queued.pop_front() {
            cable.frames += cost(self.settings.mode, chunk.len);
            cable.flying.push_back(chunk);
            cable.refusals = 0;
            if self.settings.checksums {
                cable.sums.push_back(sum);
            }
        }
    }

    /// It was not: the window is what is under way now, or one chunk.
    pub fn on_send_refused(&mut self, which: usize) -> Result<(), Fault> {
        let least = cost(self.settings.mode, self.settings.chunk);
        let cable = &mut self.cables[which];
        cable.window = cable.frames.max(least);
        cable.refusals += 1;
        if cable.flying.is_empty() && cable.refusals > REFUSALS { Err(Fault::Full(which)) } else { Ok(()) }
    }

    /// The device has completed a chunk, and so those before it, whether it has said so or not: a queue pair keeps order.
    pub fn on_completed(&mut self, which: usize, number: u64) -> Result<(), String> {
        let cable = &mut self.cables[which];
        let at = cable.flying.iter().position(|chunk| chunk.number == number);
        let at = at.ok_or_else(|| format!("chunk {number} was completed twice, or was never sent"))?;
        for chunk in cable.flying.drain(..=at) {
            cable.frames -= cost(self.settings.mode, chunk.len);
            if chunk.number >= cable.there {
                leave(&mut self.streams, &chunk);
            }
        }
        Ok(())
    }

    /// The target has so many chunks of each cable: they have left, although the device may not have said so. (A reliable
    /// device may still repeat one whose acknowledgement was lost; the other end knows it by its number and drops it.)
    pub fn on_there(&mut self, there: &[u32; CABLES]) -> Result<(), String> {
        for (i, (cable, there)) in self.cables.iter_mut().zip(there).enumerate() {
            let more = u64::from(there.wrapping_sub(cable.there as u32));
            let sent = cable.granted - cable.queued.len() as u64;
            if more > sent - cable.there {
                return Err(format!("{there} chunks have come over cable {i} of {sent}"));
            }
            let now = cable.there + more;
            for chunk in cable.flying.iter().filter(|c| (cable.there..now).contains(&c.number)) {
                leave(&mut self.streams, chunk);
            }
            cable.there = now;
        }
        Ok(())
    }

    /// Cable and number of a chunk that the target has, but that the device does not complete, while it takes no more.
    pub fn owed(&self) -> Option<(usize, u64)> {
        self.cables.iter().enumerate().find_map(|(i, cable)| {
            let (first, next) = (cable.flying.front()?, cable.queued.front()?);
            let is_owed = first.number < cable.there && cable.is_full_for(self.settings.mode, next);
            is_owed.then_some((i, first.number))
        })
    }

    /// The next message that this half has to send, with the address of a small put's bytes.
    pub fn next_message(&mut self) -> Option<(Body, Option<(usize, usize)>)> {
        self.next_sums().map(|body| (body, None)).or_else(|| self.next_put())
    }

    fn next_sums(&mut self) -> Option<Body> {
        let mode = self.settings.mode;
        for (i, cable) in self.cables.iter_mut().enumerate() {
            let more = cable.queued.front().is_some_and(|chunk| !cable.is_full_for(mode, chunk));
            if cable.sums.len() >= SUMS || (!cable.sums.is_empty() && !more) {
                let n = cable.sums.len().min(SUMS);
                let sums: Vec<u32> = cable.sums.drain(..n).collect();
                let first = cable.summed;
                cable.summed += n as u64;
                return Some(Body::Sums { cable: i, first, sums });
            }
        }
        None
    }

    fn next_put(&mut self) -> Option<(Body, Option<(usize, usize)>)> {
        for i in 0..Lane::COUNT {
            let index = (self.turn + i) % Lane::COUNT;
            let (lane, s) = (Lane(index as u8), &mut self.streams[index]);
            let Some(put) = s.waiting.front() else { continue };
            let is_small = put.len <= SMALL;
            if is_small && s.small_sent.wrapping_sub(s.small_taken) >= SMALL_WINDOW
                || !is_small && s.announced.len() >= ANNOUNCED
            {
                continue;
            }
            let Some(put) = s.waiting.pop_front() else { continue };
            self.turn = (index + 1) % Lane::COUNT;
            if is_small {
                s.small_sent = s.small_sent.wrapping_add(1);
                let body = Body::Small { lane, put: put.number, data: Vec::new() };
                return Some((body, Some((put.at, put.len))));
            }
            let (number, len, at) = (put.number, put.len as u64, (put.at % EXTENT) as u64);
            s.announced.push_back(put);
            return Some((Body::Ready { lane, put: number, len, at }, None));
        }
        None
    }
}
