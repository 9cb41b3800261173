//! The receiving half: arms meet announced puts, receives are posted and granted, chunks land, are verified, and
//! fill the range.

use std::collections::{BTreeMap, VecDeque};

use super::source::{ANNOUNCED, SMALL_WINDOW};
use super::wire::{CABLES, Grant, SMALL};
use super::{Fault, Mode, Settings, chunk_len, cost};
use crate::fabric::Lane;
use crate::fabric::verbs::nic::EXTENT;

/// Chunks in one grant.
const RUN: u64 = 64;
/// Refusals in a row, with nothing posted, after which a device is given up.
const REFUSALS: u32 = 1000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Open,
    /// Announced: length, address of the source, bytes granted and verified so far.
    Coming {
        len: u64,
        source: u64,
        granted: u64,
        verified: u64,
    },
    /// A small put has come and is to be copied into its range.
    Here,
    Filled(usize),
}

struct Arm {
    at: usize,
    room: usize,
    state: State,
}

/// What came before its range was armed.
enum Early {
    Small(Vec<u8>),
    Ready { len: u64, at: u64 },
}

#[derive(Default)]
struct Stream {
    /// Number of the first of `arms`.
    waited: u64,
    arms: VecDeque<Arm>,
    early: BTreeMap<u64, Early>,
    taken: u32,
    /// Announced puts that are not filled.
    coming: usize,
}

impl Stream {
    fn arm(&mut self, number: u64) -> Option<&mut Arm> {
        self.arms.get_mut(usize::try_from(number.checked_sub(self.waited)?).ok()?)
    }
}

/// A chunk that a receive is or was posted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    pub lane: Lane,
    pub put: u64,
    /// Number on its cable.
    pub number: u64,
    pub at: usize,
    pub len: usize,
}

#[derive(Default)]
struct Cable {
    window: u32,
    /// Number of the next chunk.
    next: u64,
    posted: VecDeque<Chunk>,
    /// Frames of `posted`.
    frames: u32,
    refusals: u32,
    /// Landed, not verified.
    landed: VecDeque<Chunk>,
    /// How many were verified, wrapping.
    there: u32,
    /// Sums of the chunks from the first of `landed` on, and how many came in all.
    sums: VecDeque<u32>,
    summed: u64,
}

pub struct Target {
    settings: Settings,
    streams: [Stream; Lane::COUNT],
    cables: Vec<Cable>,
    /// Number of the next chunk, over all cables.
    chunks: u64,
    /// Posted, not told.
    run: Option<Grant>,
    /// The run has ended: to be told before another begins.
    is_run_over: bool,
    turn: usize,
    /// Small puts to be copied into their ranges: lane, number, bytes.
    places: VecDeque<(Lane, u64, Vec<u8>)>,
    /// No new grants.
    pub is_leaving: bool,
}

impl Target {
    pub fn new(settings: Settings) -> Self {
        assert!((1..=CABLES).contains(&settings.windows.len()));
        let cables =
            settings.windows.iter().map(|w| Cable { window: w.receive, ..Cable::default() }).collect();
        Target {
            settings,
            streams: Default::default(),
            cables,
            chunks: 0,
            run: None,
            is_run_over: false,
            turn: 0,
            places: VecDeque::new(),
            is_leaving: false,
        }
    }

    /// Arms a range; returns its number.
    pub fn arm(&mut self, lane: Lane, at: usize, room: usize) -> Result<u64, Fault> {
        let s = &mut self.streams[lane.0 as usize];
        let number = s.waited + s.arms.len() as u64;
        s.arms.push_back(Arm { at, room, state: State::Open });
        match s.early.remove(&number) {
            None => {}
            Some(Early::Small(data)) => self.fill(lane, number, data)?,
            Some(Early::Ready { len, at }) => self.announce(lane, number, len, at)?,
        }
        Ok(number)
    }

    /// Numbers of the first arm that has not been waited for, and of the next arm.
    pub fn arms(&self, lane: Lane) -> (u64, u64) {
        let s = &self.streams[lane.0 as usize];
        (s.waited, s.waited + s.arms.len() as u64)
    }

    /// The length of an arm's put, once it is all there.
    pub fn filled(&self, lane: Lane, arm: u64) -> Option<usize> {
        let s = &self.streams[lane.0 as usize];
        match s.arms.get(usize::try_from(arm.checked_sub(s.waited)?).ok()?)?.state {
            State::Filled(len) => Some(len),
            _ => None,
        }
    }

    /// Whether an arm's put was announced, or is there.
    pub fn is_announced(&self, lane: Lane, arm: u64) -> bool {
        let s = &self.streams[lane.0 as usize];
        let arm = arm.checked_sub(s.waited).and_then(|i| s.arms.get(i as usize));
        arm.is_some_and(|arm| arm.state != State::Open)
    }

    /// The oldest arm was waited for.
    pub fn take(&mut self, lane: Lane) {
        let s = &mut self.streams[lane.0 as usize];
        if s.arms.pop_front().is_some() {
            s.waited += 1;
        }
    }

    /// For each lane, how many small puts were taken.
    pub fn taken(&self) -> [u32; Lane::COUNT] {
        std::array::from_fn(|i| self.streams[i].taken)
    }

    /// For each cable, how many chunks are there and are what was sent.
    pub fn there(&self) -> [u32; CABLES] {
        std::array::from_fn(|i| self.cables.get(i).map_or(0, |cable| cable.there))
    }

    /// No receive is posted, and none is to be told.
    pub fn is_idle(&self) -> bool {
        self.run.is_none() && self.cables.iter().all(|c| c.posted.is_empty() && c.landed.is_empty())
    }

    fn too_long(lane: Lane, put: u64, len: u64, room: usize) -> Fault {
        Fault::TooLong { lane, put, len, room: room as u64 }
    }

    fn fill(&mut self, lane: Lane, put: u64, data: Vec<u8>) -> Result<(), Fault> {
        let s = &mut self.streams[lane.0 as usize];
        let Some(arm) = s.arm(put) else { return Ok(()) };
        if data.len() > arm.room {
            return Err(Self::too_long(lane, put, data.len() as u64, arm.room));
        }
        arm.state = State::Here;
        s.taken = s.taken.wrapping_add(1);
        self.places.push_back((lane, put, data));
        Ok(())
    }

    fn announce(&mut self, lane: Lane, put: u64, len: u64, source: u64) -> Result<(), Fault> {
        let Some(arm) = self.streams[lane.0 as usize].arm(put) else { return Ok(()) };
        if len > arm.room as u64 {
            return Err(Self::too_long(lane, put, len, arm.room));
        }
        arm.state = State::Coming { len, source, granted: 0, verified: 0 };
        Ok(())
    }

    /// Whether put `number` may be new; `Err` when it was there before.
    fn is_armed(&mut self, lane: Lane, number: u64) -> Result<bool, Fault> {
        let s = &mut self.streams[lane.0 as usize];
        let again = number < s.waited
            || s.early.contains_key(&number)
            || s.arm(number).is_some_and(|arm| arm.state != State::Open);
        if again {
            return Err(Fault::Corrupt(None, format!("put {number} on the {lane} lane came twice")));
        }
        Ok(s.arm(number).is_some())
    }

    pub fn on_small(&mut self, lane: Lane, put: u64, data: Vec<u8>) -> Result<(), Fault> {
        if self.is_armed(lane, put)? {
            return self.fill(lane, put, data);
        }
        let s = &mut self.streams[lane.0 as usize];
        let held = s.early.values().filter(|e| matches!(e, Early::Small(_))).count();
        if held >= SMALL_WINDOW as usize || data.len() > SMALL {
            return Err(Fault::Corrupt(None, format!("more small puts on the {lane} lane than agreed")));
        }
        s.early.insert(put, Early::Small(data));
        Ok(())
    }

    pub fn on_ready(&mut self, lane: Lane, put: u64, len: u64, at: u64) -> Result<(), Fault> {
        let armed = self.is_armed(lane, put)?;
        let s = &mut self.streams[lane.0 as usize];
        // The source lets go of a put when its last chunk has left, which may be before it has landed here: twice
        // the window is never exceeded.
        if s.coming >= 2 * ANNOUNCED || len == 0 || at >= EXTENT as u64 {
            return Err(Fault::Corrupt(
                None,
                format!("an announcement of put {put} on the {lane} lane that cannot be"),
            ));
        }
        s.coming += 1;
        if armed {
            return self.announce(lane, put, len, at);
        }
        s.early.insert(put, Early::Ready { len, at });
        Ok(())
    }

    pub fn on_sums(&mut self, which: usize, first: u64, sums: &[u32]) -> Result<(), Fault> {
        let wrong = |text| Err(Fault::Corrupt(Some(which), text));
        let Some(cable) = self.cables.get_mut(which).filter(|_| self.settings.checksums) else {
            return Err(Fault::Corrupt(None, format!("checksums of cable {which}, which is not there")));
        };
        if first != cable.summed || first + sums.len() as u64 > cable.next {
            return wrong(format!("checksums from chunk {first} on where {} was due", cable.summed));
        }
        cable.summed += sums.len() as u64;
        cable.sums.extend(sums);
        Ok(())
    }

    /// A receive on a cable was completed with so many bytes; `immediate` is the data of a write.
    pub fn on_landed(
        &mut self,
        which: usize,
        number: u64,
        bytes: usize,
        immediate: u32,
    ) -> Result<(), Fault> {
        let mode = self.settings.mode;
        let cable = &mut self.cables[which];
        let wrong = |text| Err(Fault::Corrupt(Some(which), text));
        let Some(chunk) = cable.posted.pop_front().filter(|c| c.number == number) else {
            return wrong(format!("chunk {number} out of order"));
        };
        if bytes != chunk.len {
            return wrong(format!("chunk {number} with {bytes} bytes instead of {}", chunk.len));
        }
        if mode == Mode::Write && immediate != number as u32 {
            return wrong(format!("chunk {immediate} where {number} was due: one was lost or doubled"));
        }
        cable.frames -= cost(mode, chunk.len);
        cable.landed.push_back(chunk);
        Ok(())
    }

    /// A small put to be copied into its range now, which counts as filled from here on: if it did before, a fault found
    /// between its coming and its copying would leave a range that is not what it says.
    pub fn next_place(&mut self) -> Option<(usize, Vec<u8>)> {
        let (lane, put, data) = self.places.pop_front()?;
        let arm = self.streams[lane.0 as usize].arm(put)?;
        arm.state = State::Filled(data.len());
        Some((arm.at, data))
    }

    /// The next chunk that has landed and whose sum is known: cable, chunk, sum. [`Target::on_verified`] answers.
    pub fn next_verify(&self) -> Option<(usize, Chunk, u32)> {
        self.cables.iter().enumerate().find_map(|(i, cable)| {
            let chunk = cable.landed.front()?;
            if self.settings.checksums {
                Some((i, *chunk, *cable.sums.front()?))
            } else {
                Some((i, *chunk, 0))
            }
        })
    }

    pub fn on_verified(&mut self, which: usize, is_right: bool) -> Result<(), Fault> {
        let cable = &mut self.cables[which];
        cable.sums.pop_front();
        let Some(chunk) = cable.landed.pop_front() else { return Ok(()) };
        if !is_right {
            let Chunk { lane, put, number, .. } = chunk;
            return Err(Fault::Corrupt(
                Some(which),
                format!("chunk {number} (put {put} on the {lane} lane) with a checksum that is not its own"),
            ));
        }
        cable.there = cable.there.wrapping_add(1);
        let s = &mut self.streams[chunk.lane.0 as usize];
        let Some(arm) = s.arm(chunk.put) else { return Ok(()) };
        if let State::Coming { len, verified, .. } = &mut arm.state {
            *verified += chunk.len as u64;
            if verified == len {
                arm.state = State::Filled(*len as usize);
                s.coming -= 1;
            }
        }
        Ok(())
    }

    /// A chunk that its source has sent, by its sum, and that has not landed.
    pub fn missing(&self) -> Option<(usize, u64)> {
        self.cables.iter().enumerate().find_map(|(i, c)| {
            c.posted.front().filter(|chunk| chunk.number < c.summed).map(|chunk| (i, chunk.number))
        })
    }

    /// The put whose chunks are granted next: lane, number, and the rest of it.
    fn next_put(&self) -> Option<(Lane, u64)> {
        if let Some(run) = &self.run {
            return Some((run.lane, run.put));
        }
        (0..Lane::COUNT).map(|i| (self.turn + i) % Lane::COUNT).find_map(|index| {
            let s = &self.streams[index];
            let i = s
                .arms
                .iter()
                .position(|arm| matches!(arm.state, State::Coming { len, granted, .. } if granted < len))?;
            Some((Lane(index as u8), s.waited + i as u64))
        })
    }

    /// The next receive to be posted: cable and chunk. Answered by [`Target::on_posted`] or
    /// [`Target::on_post_refused`].
    pub fn next_receive(&mut self) -> Option<(usize, Chunk)> {
        if self.is_run_over || (self.is_leaving && self.run.is_none()) {
            return None;
        }
        let (lane, put) = self.next_put()?;
        let (chunk, mode) = (self.settings.chunk, self.settings.mode);
        let which = (self.chunks % self.cables.len() as u64) as usize;
        let s = &mut self.streams[lane.0 as usize];
        let arm = s.arm(put)?;
        let State::Coming { len, source, granted, .. } = arm.state else { return None };
        let at = arm.at + granted as usize;
        let size = chunk_len(chunk, source, arm.at as u64, granted, len);
        let cable = &self.cables[which];
        let fits = cable.frames + cost(mode, size) <= cable.window;
        if let Some(run) = &self.run {
            let same_extent = run.address as usize / EXTENT == at / EXTENT;
            if fits && same_extent && self.chunks - run.first < RUN {
                return Some((which, Chunk { lane, put, number: cable.next, at, len: size }));
            }
            self.is_run_over = true;
            return None;
        }
        // A new run begins when it is worth a message: for the rest of the put, or a quarter of the window.
        let rest =
            cost(mode, size).max((len - granted).min(u64::from(u32::MAX)) as u32 / super::FRAME as u32);
        let free = cable.window.saturating_sub(cable.frames);
        let is_worth = cable.posted.is_empty() || free >= rest.min(cable.window / 4);
        (fits && is_worth).then_some((which, Chunk { lane, put, number: cable.next, at, len: size }))
    }

    /// The receive of [`Target::next_receive`] is posted.
    pub fn on_posted(&mut self, which: usize, chunk: Chunk) {
        let mode = self.settings.mode;
        let cable = &mut self.cables[which];
        cable.frames += cost(mode, chunk.len);
        cable.next += 1;
        cable.refusals = 0;
        cable.posted.push_back(chunk);
        let first = self.chunks;
        self.chunks += 1;
        let Some(arm) = self.streams[chunk.lane.0 as usize].arm(chunk.put) else { return };
        let State::Coming { len, granted, .. } = &mut arm.state else { return };
        let run = self.run.get_or_insert(Grant {
            lane: chunk.lane,
            put: chunk.put,
            offset: *granted,
            len: 0,
            first,
            address: chunk.at as u64,
            keys: [0; CABLES],
        });
        run.len += chunk.len as u64;
        *granted += chunk.len as u64;
        if granted == len {
            self.is_run_over = true;
            self.turn = (chunk.lane.0 as usize + 1) % Lane::COUNT;
        }
    }

    /// The device took no more receives: the window is what is posted now, or one chunk.
    pub fn on_post_refused(&mut self, which: usize) -> Result<(), Fault> {
        let least = cost(self.settings.mode, self.settings.chunk);
        let cable = &mut self.cables[which];
        cable.window = cable.frames.max(least);
        cable.refusals += 1;
        if cable.posted.is_empty() && cable.refusals > REFUSALS {
            return Err(Fault::Full(which));
        }
        self.is_run_over = self.run.is_some();
        Ok(())
    }

    /// The grant that is to be told.
    pub fn next_grant(&mut self) -> Option<Grant> {
        if !self.is_run_over {
            return None;
        }
        self.is_run_over = false;
        self.run.take()
    }
}
