//! Short messages from everyone to everyone, as fast as the fabric goes.

use std::ops::Range;

use bytemuck::Pod;

use super::group::Group;
use crate::error::{Error, Result};
use crate::fabric::{Buf, Lane, SHORT};

/// Rounds in which every member of a group sends one short message to every other: one hop a round.
///
/// Slots are kept armed ahead of time in two halves that alternate: when the messages of a round arrive,
/// their places have been open since the round before. A round that has been posted by everyone proves
/// that the round before it is over, so nothing else needs to be waited for.
///
/// What is longer than a short put ([`SHORT`]) travels in several at once; every message has as many, some of them empty.
pub struct AllToAllSmall<T> {
    group: Group,
    lane: Lane,
    len: usize,
    /// Elements of a piece.
    piece: usize,
    /// Two halves of `group.len()` slots of `len`.
    slots: Buf<T>,
    outgoing: [Buf<T>; 2],
    /// What came in the last round collected, by member; empty ranges before the first.
    came: Vec<Range<usize>>,
    /// Length of this rank's own message.
    own: usize,
    rounds: u64,
    posted: bool,
}

/// The messages of one round.
pub struct Messages<'a, T> {
    exchange: &'a AllToAllSmall<T>,
}

impl<T: Pod> Messages<'_, T> {
    /// What `member` posted.
    ///
    /// # Panics
    /// When there is no such member.
    pub fn from(&self, member: usize) -> &[T] {
        let e = self.exchange;
        if member == e.group.me() {
            e.outgoing[e.last_half()].read(0..e.own)
        } else {
            e.slots.read(e.came[member].clone())
        }
    }

    /// All messages in the order of the group.
    pub fn iter(&self) -> impl Iterator<Item = &[T]> {
        (0..self.exchange.group.len()).map(|member| self.from(member))
    }
}

/// The pieces that a message of `len` elements is cut into.
fn pieces(len: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(piece).map(move |start| start..(start + piece).min(len))
}

impl<T: Pod> AllToAllSmall<T> {
    /// Rounds of messages of at most `len` elements (at least 1) on `lane`. While it lives, nothing else
    /// uses this lane between members of the group. Every member makes one with the same `len`.
    ///
    /// # Errors
    /// [`Error::Resources`] when there is no memory; when a rank is lost.
    pub fn new(group: &Group, lane: Lane, len: usize) -> Result<Self> {
        let net = &**group.fabric();
        let len = len.max(1);
        let mut made = AllToAllSmall {
            group: group.clone(),
            lane,
            len,
            piece: (SHORT / size_of::<T>().max(1)).clamp(1, len),
            slots: Buf::zeros(net, 2 * group.len() * len)?,
            outgoing: [Buf::zeros(net, len)?, Buf::zeros(net, len)?],
            came: vec![0..0; group.len()],
            own: 0,
            rounds: 0,
            posted: false,
        };
        made.arm(0)?;
        made.arm(1)?;
        Ok(made)
    }

    fn arm(&mut self, half: usize) -> Result<()> {
        let (n, me) = (self.group.len(), self.group.me());
        for member in (0..n).filter(|&m| m != me) {
            let start = (half * n + member) * self.len;
            let from = self.group.ranks()[member];
            for piece in pieces(self.len, self.piece) {
                let slot = start + piece.start..start + piece.end;
                self.slots.arm(&**self.group.fabric(), self.lane, from, slot)?;
            }
        }
        Ok(())
    }

    /// The half that the last posted round used.
    fn last_half(&self) -> usize {
        (self.rounds as usize + 1) % 2
    }

    /// Members of the group.
    pub fn members(&self) -> usize {
        self.group.len()
    }

    /// Sends `message` to every other member.
    ///
    /// # Errors
    /// When a rank is lost; [`Error::Internal`] when the last round has not been collected.
    ///
    /// # Panics
    /// When the message is longer than `len`.
    pub fn post(&mut self, message: &[T]) -> Result<()> {
        self.put(message)?;
        // The round before was collected by this rank, so its slots are free for the round after this
        // one; nobody sends that before having this rank's message of this round.
        if self.rounds > 1 {
            self.arm(self.rounds as usize % 2)?;
        }
        Ok(())
    }

    fn put(&mut self, message: &[T]) -> Result<()> {
        if self.posted {
            return Err(Error::Internal("a round was posted before the last was collected".into()));
        }
        let (n, me) = (self.group.len(), self.group.me());
        let net = &**self.group.fabric();
        let outgoing = &mut self.outgoing[self.rounds as usize % 2];
        outgoing.flush(net)?;
        outgoing.write(0..message.len()).copy_from_slice(message);
        for step in 1..n {
            let to = self.group.ranks()[(me + step) % n];
            for piece in pieces(self.len, self.piece) {
                let end = piece.end.min(message.len());
                outgoing.put(net, self.lane, to, piece.start.min(end)..end)?;
            }
        }
        self.own = message.len();
        self.rounds += 1;
        self.posted = true;
        Ok(())
    }

    /// Waits for the messages of all members of the round that was posted last.
    ///
    /// # Errors
    /// When a rank is lost; [`Error::Internal`] when none was posted.
    pub fn collect(&mut self) -> Result<Messages<'_, T>> {
        if !std::mem::take(&mut self.posted) {
            return Err(Error::Internal("a round was collected before it was posted".into()));
        }
        let (n, me) = (self.group.len(), self.group.me());
        let net = &**self.group.fabric();
        for step in 1..n {
            let member = (me + n - step) % n;
            let from = self.group.ranks()[member];
            let first = self.slots.wait(net, self.lane, from)?;
            let mut end = first.end;
            for _ in pieces(self.len, self.piece).skip(1) {
                let more = self.slots.wait(net, self.lane, from)?;
                end = if more.is_empty() { end } else { more.end };
            }
            self.came[member] = first.start..end;
        }
        Ok(Messages { exchange: self })
    }

    /// Ends the rounds together: every member calls it after the same round, and the lane is free again.
    ///
    /// # Errors
    /// When a rank is lost; [`Error::Internal`] when the last round has not been collected.
    pub fn finish(mut self) -> Result<()> {
        // Use up the slots that are still armed: both halves before the second round, one after.
        let unused = if self.rounds == 0 { 2 } else { 1 };
        for _ in 0..unused {
            self.put(&[T::zeroed()])?;
            self.collect()?;
        }
        let net = &**self.group.fabric();
        self.outgoing.iter_mut().try_for_each(|out| out.flush(net))
    }
}
