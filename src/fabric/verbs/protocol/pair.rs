//! One rank's view of one peer: both halves, the control window, and the order of leaving.

use super::control::Control;
use super::source::{self, Source};
use super::target::{self, Target};
use super::wire::{self, Body, CABLES, SLOT};
use super::{Fault, Settings};
use crate::fabric::Lane;

/// What is to be done next. What must be answered says by what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send the message in the buffer given to [`Pair::next`]: its first `len` bytes, then `data` (address and length,
    /// a small put's bytes), sealed ([`wire::seal`]). [`Pair::on_control_sent`] when it has left.
    Control {
        /// Its number; it belongs into the slot of this number, modulo the slots.
        number: u64,
        /// Bytes before `data`.
        len: usize,
        /// Address and length of what follows.
        data: Option<(usize, usize)>,
    },
    /// Copy a small put into its range.
    Place {
        /// Address of the range.
        at: usize,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// Post a receive: [`Pair::on_posted`] or [`Pair::on_post_refused`].
    Receive {
        /// On which cable.
        cable: usize,
        /// For which chunk.
        chunk: target::Chunk,
    },
    /// Send a chunk: [`Pair::on_sent`] or [`Pair::on_send_refused`].
    Send {
        /// On which cable.
        cable: usize,
        /// Which chunk.
        chunk: source::Chunk,
    },
    /// Compare a chunk's checksum: [`Pair::on_verified`].
    Verify {
        /// Where it came from.
        cable: usize,
        /// The chunk.
        chunk: target::Chunk,
        /// What it must be.
        sum: u32,
    },
}

/// How far a side has come in leaving.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Leave {
    No,
    /// Wants to leave, has not said so.
    Wanted,
    /// Arms no more.
    Leaving,
    /// Has nothing under way.
    Bye,
}

/// One rank's view of one peer.
pub struct Pair {
    checksums: bool,
    control: Control,
    source: Source,
    target: Target,
    me: Leave,
    peer: Leave,
    /// A message that tells nothing but the header is to be sent.
    tick: bool,
    /// The small puts that the peer was told to be taken.
    told: [u32; Lane::COUNT],
}

impl Pair {
    /// Nothing under way.
    pub fn new(settings: &Settings) -> Self {
        let least = super::cost(settings.mode, settings.chunk);
        assert!(
            settings.windows.iter().all(|w| w.send.min(w.receive) >= least),
            "a window holds a chunk: {settings:?}"
        );
        Pair {
            checksums: settings.checksums,
            control: Control::new(settings.slots),
            source: Source::new(settings.clone()),
            target: Target::new(settings.clone()),
            me: Leave::No,
            peer: Leave::No,
            tick: false,
            told: [0; Lane::COUNT],
        }
    }

    /// Whether sums of sent chunks are wanted.
    pub fn checksums(&self) -> bool {
        self.checksums
    }

    /// A put of `len` bytes at `at`; returns its number.
    pub fn put(&mut self, lane: Lane, at: usize, len: usize) -> u64 {
        let number = self.source.put(lane, at, len);
        if self.peer >= Leave::Leaving {
            self.source.forget();
        }
        number
    }

    /// Arms `room` bytes at `at`; returns the number.
    pub fn arm(&mut self, lane: Lane, at: usize, room: usize) -> Result<u64, Fault> {
        self.target.arm(lane, at, room)
    }

    /// How many puts were made on a lane.
    pub fn puts(&self, lane: Lane) -> u64 {
        self.source.puts(lane)
    }

    /// Numbers of the first arm that was not waited for, and of the next arm.
    pub fn arms(&self, lane: Lane) -> (u64, u64) {
        self.target.arms(lane)
    }

    /// Whether the bytes of a put may be changed again.
    pub fn is_done(&self, lane: Lane, put: u64) -> bool {
        self.source.is_done(lane, put)
    }

    /// Whether the target left before it took a put.
    pub fn is_forgotten(&self, lane: Lane, put: u64) -> bool {
        self.source.is_forgotten(lane, put)
    }

    /// The length of an arm's put, when all of it is there.
    pub fn filled(&self, lane: Lane, arm: u64) -> Option<usize> {
        self.target.filled(lane, arm)
    }

    /// The oldest arm of a lane was waited for.
    pub fn take(&mut self, lane: Lane) {
        self.target.take(lane);
    }

    /// Cable and number of a chunk that was sent and has not landed.
    pub fn missing(&self) -> Option<(usize, u64)> {
        self.target.missing()
    }

    /// Cable and number of a chunk that the peer has, but that the own device does not complete, while it takes no more.
    pub fn owed(&self) -> Option<(usize, u64)> {
        self.source.owed()
    }

    /// This rank arms no more. What was put is still sent; then the peer is told goodbye.
    pub fn leave(&mut self) {
        self.me = self.me.max(Leave::Wanted);
        self.target.is_leaving = true;
    }

    /// Whether the queue pairs may go, after [`Pair::leave`]: the peer has heard the goodbye, or has said its own and
    /// was answered. (When both goodbyes cross, each side waits for the other's.)
    pub fn has_left(&self) -> bool {
        match (self.me == Leave::Bye, self.peer == Leave::Bye) {
            (true, false) => self.control.is_acknowledged(),
            (true, true) => self.control.is_completed(),
            (false, true) => {
                self.me > Leave::No && !self.tick && self.control.is_completed() && self.is_idle()
            }
            (false, false) => false,
        }
    }

    /// Whether all that is left to wait for is the peer's answer to the goodbye.
    pub fn has_said_goodbye(&self) -> bool {
        self.me == Leave::Bye && self.control.is_completed()
    }

    /// Whether nothing is under way to or from the peer.
    pub fn is_idle(&self) -> bool {
        self.source.is_idle() && self.target.is_idle()
    }

    /// Whether the peer has said goodbye: what it has not announced will not come.
    pub fn is_peer_gone(&self) -> bool {
        self.peer == Leave::Bye
    }

    /// Whether an arm's put was announced, or is there.
    pub fn is_announced(&self, lane: Lane, arm: u64) -> bool {
        self.target.is_announced(lane, arm)
    }

    /// The peer is to be shown a sign of life, and what was received.
    pub fn tick(&mut self) {
        self.tick |= self.me < Leave::Bye && self.peer < Leave::Bye;
    }

    /// A control message came, and its receive is posted anew.
    pub fn on_control(&mut self, message: &[u8]) -> Result<(), Fault> {
        let bad = |text: String| Fault::Corrupt(None, text);
        let (header, body) = wire::read(message)
            .ok_or_else(|| bad(format!("{} bytes that are no control message", message.len())))?;
        self.control.on_received(&header).map_err(bad)?;
        self.source.on_taken(&header.taken).map_err(bad)?;
        self.source.on_there(&header.there).map_err(bad)?;
        match body {
            Body::Tick => {}
            Body::Small { lane, put, data } => self.target.on_small(lane, put, data)?,
            Body::Ready { lane, put, len, at } => self.target.on_ready(lane, put, len, at)?,
            Body::Grant(grant) => self.source.on_grant(&grant).map_err(bad)?,
            Body::Sums { cable, first, sums } => self.target.on_sums(cable, first, &sums)?,
            Body::Leaving => {
                self.peer = self.peer.max(Leave::Leaving);
                self.source.forget();
            }
            Body::Bye => {
                self.peer = Leave::Bye;
                self.tick = self.me < Leave::Bye;
            }
        }
        Ok(())
    }

    /// A control message has left its slot, and so have those before it.
    pub fn on_control_sent(&mut self, number: u64) {
        self.control.on_completed(number);
    }

    /// Answers [`Action::Receive`].
    pub fn on_posted(&mut self, cable: usize, chunk: target::Chunk) {
        self.target.on_posted(cable, chunk);
    }

    /// Answers [`Action::Receive`]: the device is full.
    pub fn on_post_refused(&mut self, cable: usize) -> Result<(), Fault> {
        self.target.on_post_refused(cable)
    }

    /// Answers [`Action::Send`], with the chunk's CRC32C (ignored without checksums).
    pub fn on_sent(&mut self, cable: usize, sum: u32) {
        self.source.on_sent(cable, sum);
    }

    /// Answers [`Action::Send`]: the device is full.
    pub fn on_send_refused(&mut self, cable: usize) -> Result<(), Fault> {
        self.source.on_send_refused(cable)
    }

    /// Answers [`Action::Verify`].
    pub fn on_verified(&mut self, cable: usize, is_right: bool) -> Result<(), Fault> {
        self.target.on_verified(cable, is_right)
    }

    /// A chunk has left: its memory may change.
    pub fn on_completed(&mut self, cable: usize, number: u64) -> Result<(), Fault> {
        self.source.on_completed(cable, number).map_err(|text| Fault::Corrupt(Some(cable), text))
    }

    /// A receive of a data queue pair was completed.
    pub fn on_landed(
        &mut self,
        cable: usize,
        number: u64,
        bytes: usize,
        immediate: u32,
    ) -> Result<(), Fault> {
        self.target.on_landed(cable, number, bytes, immediate)
    }

    /// What is to be done next. A message is written into `out`; `keys` gives the remote keys of memory that this
    /// rank has registered.
    pub fn next(&mut self, out: &mut [u8; SLOT], keys: &dyn Fn(u64) -> [u32; CABLES]) -> Option<Action> {
        if let Some((at, data)) = self.target.next_place() {
            return Some(Action::Place { at, data });
        }
        if let Some((cable, chunk, sum)) = self.target.next_verify() {
            return Some(Action::Verify { cable, chunk, sum });
        }
        if let Some((cable, chunk)) = self.target.next_receive() {
            return Some(Action::Receive { cable, chunk });
        }
        if let Some((cable, chunk)) = self.source.next_send() {
            return Some(Action::Send { cable, chunk });
        }
        let mut data = None;
        let may_speak = self.control.has_room(false) && self.peer < Leave::Bye;
        let body = if may_speak { self.next_message(&mut data, keys) } else { None };
        let body = body.or_else(|| (self.owes() && self.control.has_room(true)).then_some(Body::Tick))?;
        self.tick = false;
        self.told = self.target.taken();
        let header = self.control.header(self.told, self.target.there());
        let len = wire::write(&header, &body, out);
        Some(Action::Control { number: header.number, len, data })
    }

    /// Whether a bare acknowledgement is due.
    fn owes(&self) -> bool {
        if self.me == Leave::Bye || self.peer == Leave::Bye {
            return self.tick;
        }
        let mut taken = self.target.taken().into_iter().zip(self.told);
        self.tick
            || self.control.owes()
            || taken.any(|(taken, told)| taken.wrapping_sub(told) >= source::SMALL_WINDOW / 2)
    }

    fn next_message(
        &mut self,
        data: &mut Option<(usize, usize)>,
        keys: &dyn Fn(u64) -> [u32; CABLES],
    ) -> Option<Body> {
        if let Some(mut grant) = self.target.next_grant() {
            grant.keys = keys(grant.address);
            return Some(Body::Grant(grant));
        }
        if let Some((body, bytes)) = self.source.next_message() {
            *data = bytes;
            return Some(body);
        }
        if self.me == Leave::Wanted {
            self.me = Leave::Leaving;
            return Some(Body::Leaving);
        }
        if self.me == Leave::Leaving && self.is_idle() {
            self.me = Leave::Bye;
            return Some(Body::Bye);
        }
        None
    }
}
