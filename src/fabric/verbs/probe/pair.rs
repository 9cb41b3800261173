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
use crate::fabric::verbs::links::{self, Offer, SLOTS, gather};
use crate::fabric::verbs::nic::{Completion, Nic, Operation, QpId, Service};
use crate::fabric::verbs::proof::noise;
use crate::fabric::verbs::proof::{self, Draft, Side, Way};
use crate::fabric::verbs::protocol::wire::SLOT;
use crate::fabric::verbs::protocol::{FRAME, Mode};
use crate::fabric::verbs::trouble::{Step, Trouble};

/// Message sizes that are tried, the smallest first.
const SIZES: [usize; 3] = [FRAME, 64 << 10, 512 << 10];
/// Messages under way at once, at most.
const DEEPEST: usize = 32;
/// Attempts with a new queue pair before a size is given up.
const ATTEMPTS: usize = 3;
/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Rounds of a message there and back.
const ROUNDS: usize = 100;
/// Bytes of a stream, about.
const STREAM: usize = 16 << 20;

/// What two devices do together.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Pair {
    /// Name of the device at the other end.
    pub far: String,
    /// The largest message that passes clean, in bytes.
    pub slot: usize,
    /// So many of them may be under way; half of what passed, when more did not.
    pub window: usize,
    /// Seconds there and back of one frame.
    pub round_trip: f64,
    /// Bytes per second by the receiver's clock: to this host alone, and while it sends as much.
    pub rate: f64,
    /// See `rate`.
    pub rate_both_ways: f64,
    /// Whether a write wrote, and over which connection; `None`: not asked (Thunderbolt devices take it for a send).
    pub writes: Option<Option<Service>>,
}

/// Two ends that are being tried; the queue pairs go before the memory.
struct Ends<'a> {
    rendezvous: &'a mut dyn Rendezvous,
    nic: Vec<Nic>,
    offers: Vec<Offer>,
    arena: Arc<Arena>,
    tell: &'a mut Tell<'a>,
    me: usize,
}

/// Tries `device` against the device of the other of two ranks; collective.
///
/// # Errors
/// When the other rank is lost or has failed, or nothing passes at all; the steps have been told.
pub fn pair<'a>(
    rendezvous: &'a mut dyn Rendezvous,
    library: &'static Library,
    device: &str,
    tell: &'a mut Tell<'a>,
) -> Result<Pair> {
    let me = rendezvous.rank();
    if rendezvous.size() != 2 {
        return Err(Error::Internal("a pair of devices has two ranks".into()));
    }
    let opened = super::open(library, device, tell).map_err(Error::from);
    let (nic, offer) = match opened {
        Ok(nic) => {
            let offer = Offer::of(std::slice::from_ref(&nic), SIZES[2]);
            (Some(nic), Ok(offer))
        }
        Err(error) => (None, Err(error)),
    };
    let offers = gather(rendezvous, offer)?;
    let nic = nic.into_iter().collect();
    let mut ends = Ends { rendezvous, nic, offers, arena: Arc::default(), tell, me };
    ends.run()
}

impl Ends<'_> {
    fn run(&mut self) -> Result<Pair> {
        let mut best: Option<(Side, usize)> = None;
        for size in SIZES {
            let way = Way { service: Service::Uc, mode: Mode::Posted, chunk: size };
            match self.warm_up(way)? {
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
            let way = Way { service: Service::Uc, mode: Mode::Posted, chunk: slot };
            side =
                self.warm_up(way)?.ok_or_else(|| Error::Internal("what has passed passes no more".into()))?;
        }
        let round_trip = self.round_trip(&side)?;
        let to_zero = self.stream(&side, slot, window, [false, true])?;
        let to_one = self.stream(&side, slot, window, [true, false])?;
        let rate_both_ways = self.stream(&side, slot, window, [true, true])?;
        let rate = if self.me == 0 { to_zero } else { to_one };
        self.destroy(&side);
        let writes = self.writes()?;
        let far = self.offers[1 - self.me].ports.first().map(|port| port.name.clone()).unwrap_or_default();
        Ok(Pair { far, slot, window, round_trip, rate, rate_both_ways, writes })
    }

    fn note(&mut self, step: Step, number: usize, outcome: Option<Outcome>) {
        (self.tell)(Note { step, number: number as u64, outcome });
    }

    fn destroy(&mut self, side: &Side) {
        for (qp, _) in side.drafts.iter().filter_map(|d| d.qp) {
            self.nic[0].destroy_qp(qp);
        }
    }

    /// A control and a data queue pair that have carried their proofs in both directions.
    fn warm_up(&mut self, way: Way) -> Result<Option<Side>> {
        let slots = links::take(&self.arena, &mut self.nic, 2 * SLOTS as usize * SLOT)?;
        let scratch = links::take(&self.arena, &mut self.nic, 4 * way.chunk)?;
        let drafts = vec![Draft::new((0, 0), true), Draft::new((0, 0), false)];
        let ways = vec![way; ATTEMPTS];
        let peer = 1 - self.me;
        let mut sides = vec![Side { peer, drafts, ways, made_at: 0, chunk: way.chunk, slots, scratch }];
        for attempt in 0..ATTEMPTS {
            self.note(Step::WarmUp, way.chunk, None);
            let done =
                proof::round(self.rendezvous, &mut self.nic, &mut sides, &self.offers, attempt, PATIENCE);
            let outcome = match (&done, sides[0].is_proved()) {
                (Ok(()), true) => Outcome::Done,
                _ => Outcome::Silent,
            };
            let refused = sides[0].drafts.iter().find_map(|draft| draft.refused.as_ref());
            let refused = refused.map(|r| (r.step, r.number));
            match refused {
                Some((step, number)) => self.note(step, way.chunk, Some(Outcome::Refused(number))),
                None => self.note(Step::WarmUp, way.chunk, Some(outcome)),
            }
            done?;
            if gather(self.rendezvous, Ok(sides[0].is_proved()))?.into_iter().all(|proved| proved) {
                self.drain()?;
                return Ok(sides.pop());
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
    fn data(side: &Side) -> Result<(QpId, usize)> {
        let found = side.drafts.get(1).and_then(|d| d.qp);
        found
            .map(|(qp, granted)| (qp, granted.receive as usize))
            .ok_or_else(|| Error::Internal("no queue pair".into()))
    }

    fn post(&mut self, qp: QpId, is_send: bool, id: u64, at: usize, len: usize) -> Result<()> {
        let nic = &mut self.nic[0];
        // SAFETY: memory of the arena, a part for each request under way, untouched until its completion or until the queue
        // pair is gone.
        let posted = unsafe {
            if is_send {
                nic.post_send(qp, id, Operation::Send, at, len)
            } else {
                nic.post_receive(qp, id, at, len)
            }
        };
        posted.map_err(Error::from)
    }

    /// Takes completions until `done` says so, or none has come for too long: then `false`.
    fn until(&mut self, mut done: impl FnMut(&mut Self, &Completion) -> Result<bool>) -> Result<bool> {
        let mut last = Instant::now();
        let mut completions = [Completion::default(); 32];
        while last.elapsed() < PATIENCE {
            let n = self.nic[0].poll(&mut completions)?;
            for completion in &completions[..n] {
                last = Instant::now();
                if done(self, completion)? {
                    return Ok(true);
                }
            }
            std::thread::yield_now();
        }
        Ok(false)
    }

    /// More and more messages under way at once, in both directions: how many pass, and whether more did not.
    fn ramp(&mut self, side: &Side, slot: usize) -> Result<(usize, bool)> {
        let (qp, granted) = Self::data(side)?;
        let memory = links::take(&self.arena, &mut self.nic, 2 * DEEPEST * slot)?;
        let first = memory.as_ptr() as usize;
        // Thunderbolt devices count frames, others requests.
        let cost = if self.nic[0].listed().is_thunderbolt() { slot / FRAME } else { 1 };
        let mut good = 0;
        let mut window = 1;
        while window <= DEEPEST && window * cost <= granted * 95 / 100 {
            self.note(Step::Completion, window, None);
            for i in 0..window {
                fill(&memory, (DEEPEST + i) * slot, slot, self.me, window + i);
                clear(&memory, i * slot, slot);
            }
            let mut posted = Ok(());
            for i in 0..window {
                posted = posted.and_then(|()| self.post(qp, false, i as u64, first + i * slot, slot));
            }
            gather(self.rendezvous, posted)?;
            let mut sent = Ok(());
            for i in 0..window {
                let at = first + (DEEPEST + i) * slot;
                sent = sent.and_then(|()| self.post(qp, true, (DEEPEST + i) as u64, at, slot));
            }
            let (mut left, mut status) = (2 * window, 0);
            let all = sent.is_ok()
                && self.until(|_, c| {
                    left -= 1;
                    let wrong_length = (c.id as usize) < DEEPEST && c.bytes as usize != slot;
                    status = if c.status == 0 && wrong_length { 1 } else { c.status };
                    Ok(left == 0 || status != 0)
                })?;
            let came = (0..window).map(|i| check(&memory, i * slot, slot, 1 - self.me, window + i));
            let outcome = match (status, all) {
                (0, true) => {
                    came.fold(Outcome::Done, |worst, this| if this == Outcome::Done { worst } else { this })
                }
                (0, false) => Outcome::Silent,
                (status, _) => Outcome::Refused(status),
            };
            self.note(Step::Completion, window, Some(outcome));
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

    /// Everybody's `mine`, and an error when one of the two has not got through.
    fn both(&mut self, what: &str, mine: Result<bool>) -> Result<()> {
        let told = mine.and_then(|ok| {
            ok.then_some(()).ok_or_else(|| Error::Resources {
                what: format!("{}: {what} was lost", self.nic[0].name()),
                remedy: Trouble::DeadDirection.remedy().into(),
            })
        });
        gather(self.rendezvous, told).map(drop)
    }

    /// Seconds of a frame there and back, on the control queue pair.
    fn round_trip(&mut self, side: &Side) -> Result<f64> {
        let qp = Self::control(side)?;
        let memory = links::take(&self.arena, &mut self.nic, 4 * FRAME)?;
        let at = memory.as_ptr() as usize;
        let place = |id: u64| at + id as usize * FRAME;
        self.note(Step::Completion, FRAME, None);
        // Ids 0 and 1 are receives, two of them posted ahead: a message never comes before its receive. 2 and 3 are sends.
        let posted = (0..2).try_for_each(|id| self.post(qp, false, id, place(id), FRAME));
        gather(self.rendezvous, posted)?;
        let start = Instant::now();
        let me = self.me;
        let (mut came, mut left) = (0, 0);
        let first = if me == 0 { self.post(qp, true, 2, place(2), FRAME) } else { Ok(()) };
        let done = first.and_then(|()| {
            self.until(|ends, c| {
                if c.status != 0 {
                    return Err(Error::Internal(format!("a completion with status {}", c.status)));
                }
                if c.id >= 2 {
                    left += 1;
                } else {
                    came += 1;
                    if came + 2 <= ROUNDS {
                        ends.post(qp, false, c.id, place(c.id), FRAME)?;
                    }
                    if me == 1 || came < ROUNDS {
                        let id = 2 + came as u64 % 2;
                        ends.post(qp, true, id, place(id), FRAME)?;
                    }
                }
                Ok(came == ROUNDS && left == ROUNDS)
            })
        });
        let took = start.elapsed().as_secs_f64() / ROUNDS as f64;
        let outcome = if matches!(done, Ok(true)) { Outcome::Done } else { Outcome::Silent };
        self.note(Step::Completion, FRAME, Some(outcome));
        self.both("a message there and back", done)?;
        Ok(took)
    }

    /// Bytes per second that come to this rank while the ranks send that `senders` tells; 0 when none come.
    fn stream(&mut self, side: &Side, slot: usize, window: usize, senders: [bool; 2]) -> Result<f64> {
        // Ids: what it is, and which. Credits tell that so many receives more are posted.
        const LANDED: u64 = 0;
        const LEFT: u64 = 1 << 32;
        const CREDIT: u64 = 2 << 32;
        const TOLD: u64 = 3 << 32;
        let (sends, receives) = (senders[self.me], senders[1 - self.me]);
        let (data, control) = (Self::data(side)?.0, Self::control(side)?);
        let memory = links::take(&self.arena, &mut self.nic, 2 * window * slot + 8 * FRAME)?;
        let at = memory.as_ptr() as usize;
        let (into, from, credits) = (at, at + window * slot, at + 2 * window * slot);
        let total = (STREAM / slot).max(2 * window);
        let batch = (window / 2).max(1);
        let credits_in_all = (total - 1) / batch;
        self.note(Step::Completion, slot, None);
        let mut posted = Ok(());
        if receives {
            let mut each = 0..window;
            posted = each.try_for_each(|i| self.post(data, false, LANDED | i as u64, into + i * slot, slot));
        }
        if sends {
            let mut each = 0..credits_in_all.min(4);
            posted = posted.and_then(|()| {
                each.try_for_each(|i| {
                    self.post(control, false, CREDIT | i as u64, credits + i * FRAME, FRAME)
                })
            });
        }
        gather(self.rendezvous, posted)?;
        let (mut granted, mut sent, mut left) = (0, 0, 0);
        let (mut landed, mut told, mut heard) = (0, 0, 0);
        let (mut first, mut last) = (Instant::now(), Instant::now());
        let mut push = |ends: &mut Self, granted: usize, left: usize| -> Result<()> {
            while sends && sent < total.min(window + granted * batch) && sent - left < window {
                ends.post(data, true, LEFT, from + sent % window * slot, slot)?;
                sent += 1;
            }
            Ok(())
        };
        let started = push(self, granted, left);
        let done = started.and_then(|()| {
            self.until(|ends, c| {
                let which = c.id as u32 as usize;
                if c.status != 0 {
                    return Err(Error::Internal(format!("a completion with status {}", c.status)));
                }
                match c.id >> 32 << 32 {
                    LANDED => {
                        landed += 1;
                        last = Instant::now();
                        if landed == 1 {
                            first = last;
                        }
                        // Nothing may stay posted: the memory is handed on.
                        if landed + window <= total {
                            ends.post(data, false, LANDED | which as u64, into + which * slot, slot)?;
                        }
                        if landed % batch == 0 && landed < total {
                            let place = credits + (4 + told % 4) * FRAME;
                            ends.post(control, true, TOLD, place, FRAME)?;
                            told += 1;
                        }
                    }
                    CREDIT => {
                        granted += 1;
                        if granted + 4 <= credits_in_all {
                            ends.post(control, false, c.id, credits + which * FRAME, FRAME)?;
                        }
                    }
                    LEFT => left += 1,
                    _ => heard += 1,
                }
                push(ends, granted, left)?;
                let has_received = !receives || (landed, heard) == (total, credits_in_all);
                Ok(has_received && (!sends || (left, granted) == (total, credits_in_all)))
            })
        });
        let outcome = if matches!(done, Ok(true)) { Outcome::Done } else { Outcome::Silent };
        self.note(Step::Completion, slot, Some(outcome));
        self.both("a part of a stream", done)?;
        Ok(if receives { ((total - 1) * slot) as f64 / (last - first).as_secs_f64().max(1e-9) } else { 0.0 })
    }

    /// Whether a write writes, tried with queue pairs that carry nothing else.
    fn writes(&mut self) -> Result<Option<Option<Service>>> {
        let is_thunderbolt = |offer: &Offer| offer.ports.iter().any(|port| port.is_thunderbolt);
        if self.offers.iter().any(is_thunderbolt) {
            return Ok(None);
        }
        for service in [Service::Rc, Service::Uc] {
            if let Some(side) = self.warm_up(Way { service, mode: Mode::Write, chunk: FRAME })? {
                self.destroy(&side);
                return Ok(Some(Some(service)));
            }
        }
        Ok(Some(None))
    }

    fn control(side: &Side) -> Result<QpId> {
        let found = side.drafts.first().and_then(|d| d.qp);
        found.map(|(qp, _)| qp).ok_or_else(|| Error::Internal("no queue pair".into()))
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
