//! Two devices at both ends of a cable: what passes, how much of it at once, how fast, and whether writes write.
//!
//! Both ends take the same steps; each waits for the other's result before the next, so that none ends alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Note, Outcome, Tell};
use crate::error::{Error, Result};
use crate::fabric::Memory;
use crate::fabric::rendezvous::Rendezvous;
use crate::fabric::verbs::arena::Arena;
use crate::fabric::verbs::ffi::Library;
use crate::fabric::verbs::links::{Offer, SLOTS, gather};
use crate::fabric::verbs::nic::{Completion, Granted, Nic, Operation, QpId, Service};
use crate::fabric::verbs::patience::Wait;
use crate::fabric::verbs::proof::noise;
use crate::fabric::verbs::proof::{self, Draft, Side, Way};
use crate::fabric::verbs::protocol::wire::SLOT;
use crate::fabric::verbs::protocol::{FRAME, Mode};
use crate::fabric::verbs::trouble::{Refusal, Step, Trouble};

/// Message sizes that are tried, the smallest first.
const SIZES: [usize; 3] = [FRAME, 64 << 10, LARGEST];
/// The largest message that is tried, in bytes; what every cable in order lets through.
pub const LARGEST: usize = 512 << 10;
/// Messages under way at once, at most.
const DEEPEST: usize = 32;
/// Attempts with a new queue pair before a size is given up.
const ATTEMPTS: usize = 3;
/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// What two devices do together.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Pair {
    /// Name of the device at the other end.
    pub far: String,
    /// What changes with the system's builds alone.
    pub known: Known,
    /// Seconds there and back of one frame.
    pub round_trip: f64,
    /// Bytes per second by the receiver's clock: to this host alone, and while it sends as much.
    pub rate: f64,
    /// See `rate`.
    pub rate_both_ways: f64,
}

/// What two devices do together on every cable, until the system or its driver is another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Known {
    /// The largest message that passes clean, in bytes.
    pub slot: usize,
    /// So many of them may be under way; half of what passed, when more did not.
    pub window: usize,
    /// Whether a write is one.
    pub writes: Writes,
}

/// Whether a write writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Writes {
    /// Not asked: Thunderbolt devices take it for a send.
    NotAsked,
    /// It does something else, or nothing.
    No,
    /// It does, over this kind of connection.
    Over(Service),
}

/// What the device itself has answered.
pub(super) type Posted<T> = std::result::Result<T, Refusal>;

/// Two ends that are being tried; the queue pairs go before the memory.
pub(super) struct Ends<'a> {
    pub(super) rendezvous: &'a mut dyn Rendezvous,
    pub(super) nic: Vec<Nic>,
    offers: Vec<Offer>,
    /// Of the queue pairs for messages: unreliable, which every device of Apple has, unless one end has no such.
    service: Service,
    arena: Arc<Arena>,
    tell: &'a mut Tell<'a>,
    pub(super) me: usize,
}

/// Tries `device` against the device of the other of two ranks; collective. What both ends know from before (`known`) is
/// not found out anew, unless nothing passes so.
///
/// # Errors
/// When the other rank is lost or has failed, or nothing passes at all; the steps have been told.
pub fn pair<'a>(
    rendezvous: &'a mut dyn Rendezvous,
    library: &'static Library,
    device: &str,
    known: Option<Known>,
    tell: &'a mut Tell<'a>,
) -> Result<Pair> {
    let me = rendezvous.rank();
    if rendezvous.size() != 2 {
        return Err(Error::Internal("a pair of devices has two ranks".into()));
    }
    let opened = super::open(library, device, tell).map_err(Error::from);
    let (nic, offer) = match opened {
        Ok(mut nic) => {
            let is_unreliable = has_unreliable(&mut nic, tell);
            let offer = Offer::of(std::slice::from_ref(&nic), LARGEST);
            (Some(nic), Ok((offer, is_unreliable, known)))
        }
        Err(error) => (None, Err(error)),
    };
    let both = gather(rendezvous, offer)?;
    let service = if both.iter().all(|(_, uc, _)| *uc) { Service::Uc } else { Service::Rc };
    let known = known.filter(|_| both.iter().all(|(.., theirs)| *theirs == known));
    let offers = both.into_iter().map(|(offer, ..)| offer).collect();
    let nic = nic.into_iter().collect();
    let mut ends = Ends { rendezvous, nic, offers, service, arena: Arc::default(), tell, me };
    ends.run(known)
}

/// Whether a device has unreliable connections. Apple's all do, and are not asked.
fn has_unreliable(nic: &mut Nic, tell: &mut Tell<'_>) -> bool {
    if nic.listed().is_thunderbolt() {
        return true;
    }
    let asked = Granted { send: 64, receive: 64 };
    match super::attempt(tell, Step::CreateQp, 64, |_| true, || nic.create_qp(Service::Uc, asked)) {
        Ok((qp, _)) => nic.destroy_qp(qp),
        // Whatever else it is will be met again.
        Err(refusal) => return !refusal.is_no_such_kind(),
    }
    true
}

impl Ends<'_> {
    fn run(&mut self, known: Option<Known>) -> Result<Pair> {
        let before = match known {
            Some(known) => self.warm_up(self.posted(known.slot))?.map(|side| (side, known)),
            None => None,
        };
        let (side, known) = match before {
            Some(found) => found,
            None => self.find_out()?,
        };
        let Known { slot, window, .. } = known;
        let round_trip = self.round_trip(&side)?;
        let (rate, rate_both_ways) = self.rates(&side, slot, window)?;
        self.gone(side)?;
        let far = self.offers[1 - self.me].ports.first().map(|port| port.name.clone()).unwrap_or_default();
        Ok(Pair { far, known, round_trip, rate, rate_both_ways })
    }

    /// The way that every device has.
    fn posted(&self, chunk: usize) -> Way {
        Way { service: self.service, mode: Mode::Posted, chunk }
    }

    /// What passes, and queue pairs on which it does.
    fn find_out(&mut self) -> Result<(Side, Known)> {
        let mut best: Option<(Side, usize)> = None;
        for size in SIZES {
            match self.warm_up(self.posted(size))? {
                Some(side) => {
                    if let Some((before, _)) = best.replace((side, size)) {
                        self.destroy(&before);
                    }
                }
                None => break,
            }
        }
        let Some((mut side, slot)) = best else {
            return Err(Error::Resources {
                what: format!("{}: {}", self.nic[0].name(), Trouble::DeadDirection.cause()),
                remedy: Trouble::DeadDirection.remedy().into(),
            });
        };
        let (window, failed) = self.ramp(&side, slot)?;
        if failed {
            // Its queue pairs may be dead.
            self.destroy(&side);
            let again = self.warm_up(self.posted(slot))?;
            side = again.ok_or_else(|| Error::Internal("what has passed passes no more".into()))?;
        }
        let writes = self.writes()?;
        Ok((side, Known { slot, window, writes }))
    }

    pub(super) fn note(&mut self, step: Step, number: usize, outcome: Option<Outcome>) {
        (self.tell)(Note { step, number: number as u64, outcome });
        // Nothing tells of a cable that was pulled but the port's state, and that only who asks.
        if outcome == Some(Outcome::Silent) && !self.nic[0].is_port_active() {
            (self.tell)(Note { step: Step::Port, number: 1, outcome: Some(Outcome::Refused(0)) });
        }
    }

    pub(super) fn destroy(&mut self, side: &Side) {
        for (qp, _) in side.drafts.iter().filter_map(|d| d.qp) {
            self.nic[0].destroy_qp(qp);
        }
    }

    /// Memory that the device knows, as one piece.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Arc<Memory>> {
        self.take_unless(bytes, false)
    }

    /// Memory for `most` pieces of `each` bytes, or for fewer where the device takes no more; and for how many.
    fn take_some(&mut self, most: usize, each: usize) -> Result<(Arc<Memory>, usize)> {
        let refused = match self.take_unless(most * each, true) {
            Ok(memory) => return Ok((memory, most)),
            Err(error) => error,
        };
        let less = std::iter::successors(Some(most / 2), |n| Some(n / 2)).take_while(|n| *n > 0);
        let found = less.filter_map(|n| Some((self.arena.take_whole(n * each)?, n))).next();
        found.ok_or(refused)
    }

    /// `has_less`: a refusal is no failure.
    fn take_unless(&mut self, bytes: usize, has_less: bool) -> Result<Arc<Memory>> {
        let (nic, tell) = (&mut self.nic[0], &mut *self.tell);
        self.arena.grow_whole(bytes, |at, len| {
            let number = nic.regions() as u64 + 1;
            super::attempt(
                tell,
                Step::Register,
                number,
                |_| has_less,
                || {
                    // SAFETY: the arena keeps it mapped and goes after the device: fields are dropped in order.
                    unsafe { nic.register(at, len) }
                },
            )?;
            Ok(())
        })
    }

    /// A control and a data queue pair that have carried their proofs in both directions.
    fn warm_up(&mut self, way: Way) -> Result<Option<Side>> {
        let memory = self.take(2 * SLOTS as usize * SLOT).and_then(|s| Ok((s, self.take(4 * way.chunk)?)));
        let ok = memory.as_ref().map(|_| ()).map_err(Clone::clone);
        gather(self.rendezvous, ok)?;
        let (slots, scratch) = memory?;
        let drafts = vec![Draft::new((0, 0), true), Draft::new((0, 0), false)];
        let ways = vec![way; ATTEMPTS];
        let peer = 1 - self.me;
        let mut sides = vec![Side { peer, drafts, ways, made_at: 0, chunk: way.chunk, slots, scratch }];
        for attempt in 0..ATTEMPTS {
            let tried = if way.mode == Mode::Write { Step::Write } else { Step::WarmUp };
            self.note(tried, way.chunk, None);
            let done =
                proof::round(self.rendezvous, &mut self.nic, &mut sides, &self.offers, attempt, PATIENCE);
            let side = &sides[0];
            let refused = side.drafts.iter().find_map(|draft| draft.refused.as_ref());
            let status = side.drafts.iter().map(|draft| draft.status).find(|status| *status != 0);
            let (step, outcome) = match (refused, &done, status) {
                (Some(refusal), ..) => (refusal.step, Outcome::Refused(refusal.number)),
                (_, Err(_), _) => (tried, Outcome::Left),
                (.., Some(status)) => (Step::Completion, Outcome::Refused(status)),
                _ if side.has_heard() => (tried, Outcome::Done),
                _ if side.drafts.iter().any(|draft| draft.is_spoilt) => (tried, Outcome::Garbage),
                _ => (tried, Outcome::Silent),
            };
            // How a write fails is no matter.
            self.note(if way.mode == Mode::Write { tried } else { step }, way.chunk, Some(outcome));
            if let Err(error) = done {
                sides.iter().for_each(|side| self.destroy(side));
                return Err(error);
            }
            let mine = (sides[0].is_proved(), self.nic[0].is_port_active());
            let all = gather(self.rendezvous, Ok(mine))?;
            if all.iter().all(|(proved, _)| *proved) {
                self.drain()?;
                return Ok(sides.pop());
            }
            if all.iter().any(|(_, up)| !up) {
                break;
            }
        }
        sides.iter().for_each(|side| self.destroy(side));
        self.drain()?;
        Ok(None)
    }

    /// What queue pairs that were destroyed have left in the completion queue is nobody's. Nothing else is under way: the
    /// other rank sends only after the next word.
    fn drain(&mut self) -> Result<()> {
        let mut completions = [Completion::default(); 32];
        while self.nic[0].poll(&mut completions)? > 0 {}
        Ok(())
    }

    /// Data queue pair, and what it was granted for receives.
    pub(super) fn data(side: &Side) -> Result<(QpId, usize)> {
        let found = side.drafts.get(1).and_then(|d| d.qp);
        found
            .map(|(qp, granted)| (qp, granted.receive as usize))
            .ok_or_else(|| Error::Internal("no queue pair".into()))
    }

    pub(super) fn control(side: &Side) -> Result<QpId> {
        let found = side.drafts.first().and_then(|d| d.qp);
        found.map(|(qp, _)| qp).ok_or_else(|| Error::Internal("no queue pair".into()))
    }

    pub(super) fn post(&mut self, qp: QpId, is_send: bool, id: u64, at: usize, len: usize) -> Posted<()> {
        let nic = &mut self.nic[0];
        // SAFETY: memory of the arena, a part for each request under way, untouched until its completion or until the queue
        // pair is gone.
        unsafe {
            if is_send {
                nic.post_send(qp, id, Operation::Send, at, len)
            } else {
                nic.post_receive(qp, id, at, len)
            }
        }
    }

    /// Takes completions until `done` says so, or none has come for too long: then `false`.
    pub(super) fn until(
        &mut self,
        patience: Duration,
        mut done: impl FnMut(&mut Self, &Completion) -> Posted<bool>,
    ) -> Posted<bool> {
        let mut wait = Wait::begin(patience, Instant::now());
        let mut completions = [Completion::default(); 32];
        loop {
            let is_late = wait.is_over(Instant::now());
            let n = self.nic[0].poll(&mut completions)?;
            for completion in completions[..n].iter().filter(|c| !proof::is_of_proof(c.id)) {
                wait.again(Instant::now());
                if done(self, completion)? {
                    return Ok(true);
                }
            }
            if is_late && n == 0 {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }

    /// More and more messages under way at once, in both directions: how many pass, and whether more did not.
    fn ramp(&mut self, side: &Side, slot: usize) -> Result<(usize, bool)> {
        let (qp, granted) = Self::data(side)?;
        // With what a stream of as many takes besides.
        let memory = self.take_some(DEEPEST, 2 * slot + 8 * FRAME);
        // Thunderbolt devices count frames, others requests.
        let cost = if self.nic[0].listed().is_thunderbolt() { slot / FRAME } else { 1 };
        let mine = memory.as_ref().map(|(_, room)| (*room).min(granted * 95 / 100 / cost));
        // Both ends take the same steps: as many as the one with less can.
        let deepest = gather(self.rendezvous, mine.map_err(Clone::clone))?.into_iter().min().unwrap_or(0);
        let (memory, _) = memory?;
        let mut good = 0;
        let mut window = 1;
        while window <= deepest {
            self.note(Step::Several, window, None);
            let (step, outcome) = self.several(qp, &memory, slot, window)?;
            self.note(step, window, Some(outcome));
            let ok = gather(self.rendezvous, Ok(outcome == Outcome::Done))?.into_iter().all(|ok| ok);
            if !ok {
                return if good == 0 {
                    Err(Error::Resources {
                        what: format!(
                            "{}: one message of {slot} bytes passes, its twin does not",
                            self.nic[0].name()
                        ),
                        remedy: Trouble::DeadDirection.remedy().into(),
                    })
                } else {
                    Ok(((good / 2).max(1), true))
                };
            }
            good = window;
            window *= 2;
        }
        Ok((good.max(1), false))
    }

    /// So many messages at once in both directions: how that ended here, and at which step.
    fn several(&mut self, qp: QpId, memory: &Memory, slot: usize, window: usize) -> Result<(Step, Outcome)> {
        let first = memory.as_ptr() as usize;
        for i in 0..window {
            fill(memory, (window + i) * slot, slot, self.me, window + i);
            clear(memory, i * slot, slot);
        }
        for is_send in [false, true] {
            let mut each = 0..window;
            let posted = each.try_for_each(|i| {
                let i = i + if is_send { window } else { 0 };
                self.post(qp, is_send, i as u64, first + i * slot, slot)
            });
            // Nobody sends before the other's receives are posted, nor waits for what the other could not send.
            let all = gather(self.rendezvous, Ok(posted.is_ok()))?;
            match posted {
                Err(refusal) => return Ok((refusal.step, Outcome::Refused(refusal.number))),
                Ok(()) if all.contains(&false) => return Ok((Step::Several, Outcome::Left)),
                Ok(()) => {}
            }
        }
        let (mut left, mut status) = (2 * window, 0);
        let all = self.until(PATIENCE, |_, c| {
            left -= 1;
            let wrong_length = (c.id as usize) < window && c.bytes as usize != slot;
            status = if c.status == 0 && wrong_length { 1 } else { c.status };
            Ok(left == 0 || status != 0)
        });
        let all = match all {
            Ok(all) => all,
            Err(refusal) => return Ok((refusal.step, Outcome::Refused(refusal.number))),
        };
        let came = (0..window).map(|i| check(memory, i * slot, slot, 1 - self.me, window + i));
        let outcome = match (status, all) {
            (0, true) => {
                came.fold(Outcome::Done, |worst, this| if this == Outcome::Done { worst } else { this })
            }
            (0, false) => Outcome::Silent,
            (status, _) => Outcome::Refused(status),
        };
        Ok((Step::Several, outcome))
    }

    /// Whether a write writes, tried with queue pairs that carry nothing else.
    fn writes(&mut self) -> Result<Writes> {
        let is_thunderbolt = |offer: &Offer| offer.ports.iter().any(|port| port.is_thunderbolt);
        if self.offers.iter().any(is_thunderbolt) {
            return Ok(Writes::NotAsked);
        }
        for service in [Service::Rc, Service::Uc] {
            // A refusal is an answer; a peer that is gone is none.
            match self.warm_up(Way { service, mode: Mode::Write, chunk: FRAME }) {
                Ok(Some(side)) => {
                    self.destroy(&side);
                    return Ok(Writes::Over(service));
                }
                Ok(None) | Err(Error::Resources { .. } | Error::Aborted { .. }) => self.drain()?,
                Err(error) => return Err(error),
            }
        }
        Ok(Writes::No)
    }
}

fn bytes(memory: &Memory, at: usize, len: usize) -> *mut [u8] {
    assert!(at + len <= memory.len());
    std::ptr::slice_from_raw_parts_mut(memory.as_ptr().wrapping_add(at), len)
}

fn pattern(from: usize, which: usize) -> impl Iterator<Item = u8> {
    noise((from * 131 + which) as u64).map(|byte| byte | 1) // never zero
}

/// Writes a message, of which nothing is under way.
fn fill(memory: &Memory, at: usize, len: usize, from: usize, which: usize) {
    // SAFETY: in bounds, and ours alone now.
    let bytes = unsafe { &mut *bytes(memory, at, len) };
    bytes.iter_mut().zip(pattern(from, which)).for_each(|(to, b)| *to = b);
}

fn clear(memory: &Memory, at: usize, len: usize) {
    // SAFETY: in bounds, and ours alone now.
    unsafe { (*bytes(memory, at, len)).fill(0) };
}

/// Whether a message has come as it was written.
fn check(memory: &Memory, at: usize, len: usize, from: usize, which: usize) -> Outcome {
    // SAFETY: in bounds; where a receive may still be under way its bytes are not believed anyway.
    let bytes = unsafe { &*bytes(memory, at, len) };
    if bytes.iter().copied().eq(pattern(from, which).take(len)) {
        Outcome::Done
    } else if bytes.iter().all(|b| *b == 0) {
        Outcome::Zeros
    } else {
        Outcome::Garbage
    }
}
