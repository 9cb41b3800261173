//! The target's side of the lanes from one peer: where bytes go. No I/O, no clock.

use std::collections::VecDeque;

use super::frame::{CHUNK, EAGER, Header, Kind, WINDOW};
use super::{Region, Wrong};
use crate::fabric::Lane;

/// What is known of one number: an arm, a put, or both.
#[derive(Default)]
struct Slot {
    region: Option<Region>,
    /// Length of the put, once a piece of it has come.
    total: Option<usize>,
    /// Which pieces have come, or are coming.
    seen: Vec<u64>,
    /// How many have landed.
    landed: usize,
    /// A put that came before its arm.
    early: Option<Vec<u8>>,
}

impl Slot {
    fn filled(&self) -> Option<usize> {
        let total = self.total?;
        (self.region.is_some() && self.landed == pieces(total)).then_some(total)
    }
}

/// In how many pieces a put travels.
fn pieces(total: usize) -> usize {
    total.div_ceil(CHUNK).max(1)
}

#[derive(Default)]
struct LaneIn {
    /// Number of the next wait, which is that of the first slot.
    waited: u64,
    /// Number of the next arm.
    armed: u64,
    slots: VecDeque<Slot>,
    /// Lengths of the last arms, of which the peer has not been told.
    untold: VecDeque<u64>,
}

impl LaneIn {
    fn slot(&mut self, number: u64) -> &mut Slot {
        let at = (number - self.waited) as usize;
        if at >= self.slots.len() {
            self.slots.resize_with(at + 1, Slot::default);
        }
        &mut self.slots[at]
    }
}

/// Where the bytes of a frame go.
pub enum Place {
    /// Into armed memory.
    Armed(Region),
    /// To be kept until they are asked for.
    Kept(Vec<u8>),
}

/// All lanes from one peer.
pub struct Incoming {
    from: u32,
    to: u32,
    lanes: [LaneIn; Lane::COUNT],
    untold: usize,
}

impl Incoming {
    /// From rank `from` to rank `to`.
    pub fn new(from: u32, to: u32) -> Self {
        Incoming { from, to, lanes: Default::default(), untold: 0 }
    }

    fn too_long(&self, lane: Lane, number: u64, total: usize, armed: usize) -> Wrong {
        Wrong::too_long(self.from, self.to, lane, number, total as u64, armed as u64)
    }

    /// Arms a range; returns its number.
    pub fn arm(&mut self, lane: Lane, region: Region) -> Result<u64, Wrong> {
        let inn = &mut self.lanes[lane.0 as usize];
        let number = inn.armed;
        inn.armed += 1;
        inn.untold.push_back(region.len as u64);
        self.untold += 1;
        let slot = inn.slot(number);
        if let Some(total) = slot.total.filter(|total| *total > region.len) {
            return Err(self.too_long(lane, number, total, region.len));
        }
        if let Some(early) = slot.early.take() {
            region.fill(&early);
        }
        slot.region = Some(region);
        Ok(number)
    }

    /// Of how many arms the peer has not been told.
    pub fn untold(&self) -> usize {
        self.untold
    }

    /// Tells of the next.
    pub fn credit(&mut self) -> Option<Header> {
        for (lane, inn) in (0..).map(Lane).zip(&mut self.lanes) {
            if let Some(total) = inn.untold.pop_front() {
                self.untold -= 1;
                let number = inn.armed - inn.untold.len() as u64 - 1;
                return Some(Header {
                    lane,
                    number,
                    total,
                    ..Header::empty(Kind::Credit, self.to, self.from)
                });
            }
        }
        None
    }

    /// Where the bytes of a piece go. Nothing is touched unless all of it is as it must be.
    pub fn accept(&mut self, header: &Header) -> Result<Place, Wrong> {
        let Header { lane, number, offset, total, len, .. } = *header;
        let corrupt = |what: &str| Wrong::Corrupt(format!("{what} of put {number} on the {lane} lane"));
        let inn = &mut self.lanes[lane.0 as usize];
        let (total, offset, len) = match (usize::try_from(total), usize::try_from(offset)) {
            (Ok(total), Ok(offset)) if offset < total || total == 0 && offset == 0 => {
                (total, offset, len as usize)
            }
            _ => return Err(corrupt("an impossible offset")),
        };
        if !offset.is_multiple_of(CHUNK) || len != CHUNK.min(total - offset) {
            return Err(corrupt("an impossible piece"));
        }
        if number < inn.waited {
            return Err(corrupt("a second copy"));
        }
        let armed = number < inn.armed;
        if !armed && (total > EAGER || number - inn.armed >= WINDOW) {
            return Err(corrupt("bytes that nobody armed a range for,"));
        }
        let slot = inn.slot(number);
        if let Some(region) = slot.region.as_ref().filter(|region| total > region.len) {
            let room = region.len;
            return Err(self.too_long(lane, number, total, room));
        }
        if *slot.total.get_or_insert(total) != total {
            return Err(corrupt("two lengths"));
        }
        let piece = offset / CHUNK;
        slot.seen.resize(pieces(total).div_ceil(64), 0);
        if slot.seen[piece / 64] >> (piece % 64) & 1 == 1 {
            return Err(corrupt("a second copy"));
        }
        slot.seen[piece / 64] |= 1 << (piece % 64);
        Ok(match &slot.region {
            Some(region) => Place::Armed(region.part(offset, len)),
            None => Place::Kept(vec![0; len]),
        })
    }

    /// The bytes of a piece are there, and right.
    pub fn landed(&mut self, header: &Header, place: Place) {
        let slot = self.lanes[header.lane.0 as usize].slot(header.number);
        slot.landed += 1;
        if let Place::Kept(bytes) = place {
            match &slot.region {
                // Armed while the bytes came: `arm` has seen the length.
                Some(region) => region.fill(&bytes),
                None => slot.early = Some(bytes),
            }
        }
    }

    /// Next arm to wait for, and next to make.
    pub fn position(&self, lane: Lane) -> (u64, u64) {
        let inn = &self.lanes[lane.0 as usize];
        (inn.waited, inn.armed)
    }

    /// Whether the next arm to wait for is filled: its length.
    pub fn filled(&self, lane: Lane) -> Option<usize> {
        self.lanes[lane.0 as usize].slots.front()?.filled()
    }

    /// Ends the wait for the next arm.
    pub fn take(&mut self, lane: Lane) {
        let inn = &mut self.lanes[lane.0 as usize];
        inn.slots.pop_front();
        inn.waited += 1;
    }
}
