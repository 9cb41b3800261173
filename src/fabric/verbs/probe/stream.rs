//! How fast two devices are, and that a peer that goes is noticed.

use std::time::{Duration, Instant};

use super::Outcome;
use super::pair::{Ends, Posted};
use crate::error::{Error, Result};
use crate::fabric::verbs::links::gather;
use crate::fabric::verbs::nic::Completion;
use crate::fabric::verbs::proof::Side;
use crate::fabric::verbs::protocol::FRAME;
use crate::fabric::verbs::trouble::{Step, Trouble};

/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Rounds of a message there and back. The first of them do not count: the ends do not begin at the same moment.
const ROUNDS: usize = 100;
const UNCOUNTED: usize = 10;
/// Bytes of a stream: a first look, and bounds for one that takes [`LONG`].
const SHORT: usize = 4 << 20;
const LARGEST: usize = 256 << 20;
/// Seconds that a stream is to take: much longer than the ends begin apart.
const LONG: f64 = 0.1;
/// Messages that are found within this time of one another may have been there together.
const GRAIN: Duration = Duration::from_micros(20);
/// How long a peer that has gone is waited for: this ends, whatever the device tells of it.
const GONE: Duration = Duration::from_millis(300);

/// Messages that take about [`LONG`] at so many bytes a second.
fn messages(rate: f64, slot: usize) -> usize {
    ((rate * LONG) as usize).min(LARGEST) / slot
}

/// When the messages of a stream came, by this end's clock.
struct Arrivals {
    /// Messages that may be there before this end looks.
    window: usize,
    all: usize,
    /// Those that were, and tell nothing of the cable's speed; when the last of them was found.
    at_once: usize,
    since: Instant,
    last: Instant,
}

impl Arrivals {
    fn new(window: usize) -> Self {
        let now = Instant::now();
        Arrivals { window, all: 0, at_once: 0, since: now, last: now }
    }

    /// One more.
    fn add(&mut self, now: Instant) {
        let is_with_the_last = self.all == 0 || now - self.last < GRAIN;
        if self.at_once == self.all && self.all < self.window && is_with_the_last {
            (self.at_once, self.since) = (self.at_once + 1, now);
        }
        (self.all, self.last) = (self.all + 1, now);
    }

    /// Messages per second, after those that were there at once.
    fn rate(&self) -> f64 {
        (self.all - self.at_once) as f64 / (self.last - self.since).as_secs_f64().max(1e-9)
    }
}

impl Ends<'_> {
    /// How a wait for completions ended: told, and an error on both ends when it was not well on one of them.
    fn over(
        &mut self,
        step: Step,
        number: usize,
        what: &str,
        waited: Posted<bool>,
        status: i32,
    ) -> Result<()> {
        let (step, outcome) = match (&waited, status) {
            (_, status) if status != 0 => (step, Outcome::Refused(status)),
            (Ok(true), _) => (step, Outcome::Done),
            (Ok(false), _) => (step, Outcome::Silent),
            (Err(refusal), _) => (refusal.step, Outcome::Refused(refusal.number)),
        };
        self.note(step, number, Some(outcome));
        let told = waited.map_err(Error::from).and_then(|ok| {
            (ok && status == 0).then_some(()).ok_or_else(|| Error::Resources {
                what: format!("{}: {what} was lost", self.nic[0].name()),
                remedy: Trouble::DeadDirection.remedy().into(),
            })
        });
        gather(self.rendezvous, told).map(drop)
    }

    /// What was refused before both waited: told, and an error on both ends.
    fn begun(&mut self, number: usize, posted: Posted<()>) -> Result<()> {
        if let Err(refusal) = &posted {
            self.note(refusal.step, number, Some(Outcome::Refused(refusal.number)));
        }
        gather(self.rendezvous, posted.map_err(Error::from)).map(drop)
    }

    /// Seconds of a frame there and back, on the control queue pair.
    pub(super) fn round_trip(&mut self, side: &Side) -> Result<f64> {
        let qp = Self::control(side)?;
        let memory = self.take(4 * FRAME)?;
        let at = memory.as_ptr() as usize;
        let place = |id: u64| at + id as usize * FRAME;
        self.note(Step::RoundTrip, FRAME, None);
        // Ids 0 and 1 are receives, two of them posted ahead: a message never comes before its receive. 2 and 3 are sends.
        let posted = (0..2).try_for_each(|id| self.post(qp, false, id, place(id), FRAME));
        self.begun(FRAME, posted)?;
        let mut start = Instant::now();
        let me = self.me;
        let (mut came, mut left, mut status) = (0, 0, 0);
        let first = if me == 0 { self.post(qp, true, 2, place(2), FRAME) } else { Ok(()) };
        let done = first.and_then(|()| {
            self.until(PATIENCE, |ends, c| {
                status = c.status;
                if status != 0 {
                    return Ok(true);
                }
                if c.id >= 2 {
                    left += 1;
                } else {
                    came += 1;
                    if came == UNCOUNTED {
                        start = Instant::now();
                    }
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
        let took = start.elapsed().as_secs_f64() / (ROUNDS - UNCOUNTED) as f64;
        self.over(Step::RoundTrip, FRAME, "a message there and back", done, status)?;
        Ok(took)
    }

    /// Bytes per second that come to this rank: while the other sends alone, and while both send.
    pub(super) fn rates(&mut self, side: &Side, slot: usize, window: usize) -> Result<(f64, f64)> {
        let least = (SHORT / slot).max(2);
        let (mut alone, mut slowest) = (0.0, f64::INFINITY);
        for receiver in [0, 1] {
            let senders = [receiver == 1, receiver == 0];
            let mine = self.stream(side, slot, window, senders, least)?;
            let mut rate = gather(self.rendezvous, Ok(mine))?[receiver];
            let longer = messages(rate, slot);
            if longer > least {
                let mine = self.stream(side, slot, window, senders, longer)?;
                // A busy moment makes one of them slower than the cable is, and none faster.
                rate = rate.max(gather(self.rendezvous, Ok(mine))?[receiver]);
            }
            slowest = f64::min(slowest, rate);
            if receiver == self.me {
                alone = rate;
            }
        }
        let both = self.stream(side, slot, window, [true, true], messages(slowest, slot).max(least))?;
        Ok((alone, both))
    }

    /// Bytes per second that come to this rank while the ranks send that `senders` tells; 0 when none come.
    fn stream(
        &mut self,
        side: &Side,
        slot: usize,
        window: usize,
        senders: [bool; 2],
        total: usize,
    ) -> Result<f64> {
        // Ids: what it is, and which. Credits tell that so many receives more are posted.
        const LANDED: u64 = 0;
        const LEFT: u64 = 1 << 32;
        const CREDIT: u64 = 2 << 32;
        const TOLD: u64 = 3 << 32;
        let (sends, receives) = (senders[self.me], senders[1 - self.me]);
        // A slow cable is not filled for long.
        let window = window.min(total / 2).max(1);
        let (data, control) = (Self::data(side)?.0, Self::control(side)?);
        let memory = self.take(2 * window * slot + 8 * FRAME)?;
        let at = memory.as_ptr() as usize;
        let (into, from, credits) = (at, at + window * slot, at + 2 * window * slot);
        let batch = (window / 2).max(1);
        let credits_in_all = (total - 1) / batch;
        self.note(Step::Stream, slot, None);
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
        self.begun(slot, posted)?;
        let (mut granted, mut sent, mut left) = (0, 0, 0);
        let (mut told, mut heard, mut status) = (0, 0, 0);
        let mut landed = Arrivals::new(window);
        let mut push = |ends: &mut Self, granted: usize, left: usize| -> Posted<()> {
            while sends && sent < total.min(window + granted * batch) && sent - left < window {
                ends.post(data, true, LEFT, from + sent % window * slot, slot)?;
                sent += 1;
            }
            Ok(())
        };
        let started = push(self, granted, left);
        let done = started.and_then(|()| {
            self.until(PATIENCE, |ends, c: &Completion| {
                let which = c.id as u32 as usize;
                status = c.status;
                if status != 0 {
                    return Ok(true);
                }
                match c.id >> 32 << 32 {
                    LANDED => {
                        landed.add(Instant::now());
                        // Nothing may stay posted: the memory is handed on.
                        if landed.all + window <= total {
                            ends.post(data, false, LANDED | which as u64, into + which * slot, slot)?;
                        }
                        if landed.all.is_multiple_of(batch) && landed.all < total {
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
                let has_received = !receives || (landed.all, heard) == (total, credits_in_all);
                Ok(has_received && (!sends || (left, granted) == (total, credits_in_all)))
            })
        });
        self.over(Step::Stream, slot, "a part of a stream", done, status)?;
        Ok(if receives { landed.rate() * slot as f64 } else { 0.0 })
    }

    /// The second rank gives up its queue pairs, as one does that ends; the first waits for a message of it, which no
    /// device ends: that has to end all the same.
    pub(super) fn gone(&mut self, side: Side) -> Result<()> {
        let memory = self.take(FRAME)?;
        let waits = self.me == 0;
        if !waits {
            self.destroy(&side);
        }
        gather(self.rendezvous, Ok(()))?;
        if waits {
            self.note(Step::Gone, GONE.as_millis() as usize, None);
            let qp = Self::control(&side)?;
            let posted = self.post(qp, false, 0, memory.as_ptr() as usize, FRAME);
            // That nothing came, or an error, is what should be.
            let came = posted.is_ok() && self.until(GONE, |_, c| Ok(c.status == 0)).unwrap_or(false);
            let outcome = if came { Outcome::Garbage } else { Outcome::Done };
            self.note(Step::Gone, GONE.as_millis() as usize, Some(outcome));
            self.destroy(&side);
        }
        gather(self.rendezvous, Ok(())).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rate of messages that come so many microseconds after one another; half of them may be there at once.
    fn rate(gaps: impl Iterator<Item = u64> + Clone) -> f64 {
        let mut arrivals = Arrivals::new(gaps.clone().count() / 2);
        let mut now = Instant::now();
        for gap in gaps {
            now += Duration::from_micros(gap);
            arrivals.add(now);
        }
        arrivals.rate()
    }

    fn is_near(rate: f64, wanted: f64) -> bool {
        (rate / wanted - 1.0).abs() < 0.01
    }

    #[test]
    fn a_stream_is_as_fast_as_its_messages_come() {
        let same = |gap, n| std::iter::repeat_n(gap, n);
        // 64 KiB at 8.9 GB/s, frames at half of that; a slow cable; two messages.
        for (gap, n) in [(7, 64), (1, 1024), (8_000, 8), (500, 2)] {
            assert!(is_near(rate(same(gap, n)), 1e6 / gap as f64), "{gap} us");
        }
        // One hiccup counts for what it is.
        let hiccup = same(5, 500).chain([5_000]).chain(same(5, 499));
        let wanted = 500.0 / (500.0 * 5e-6 + 4_995e-6);
        assert!(is_near(rate(hiccup.clone()), wanted), "{} {wanted}", rate(hiccup));
        // What was there when this end looked is not counted.
        assert!(is_near(rate(same(2, 16).chain(same(100, 48))), 1e4));
    }
}
