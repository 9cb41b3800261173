//! Ranks over the faulty network, run one at a time in an order drawn from the seed.
//!
//! Every operation on the fabric is a point where another rank may be let run. When every rank waits
//! and nothing that is under way can arrive, something was lost (or the program is wrong): that is
//! known at once, without a clock.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::faults::{Faults, Random};
use super::net::{Arrival, Net};
use super::{Rank, address_in, memory};
use crate::error::{Error, Loss, Result};
use crate::fabric::shared::area::Failure;
use crate::fabric::{Bounds, Fabric, Lane, Memory, Ticket, host_name, rules};

/// What a rank waits for.
#[derive(Clone, Copy, Debug)]
enum Want {
    Fill { lane: Lane, from: usize, arm: u64 },
    Taken(Ticket),
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Its thread has not come yet.
    Away,
    Ready,
    Blocked(Want),
    Done,
}

/// A job over the faulty network.
pub struct World {
    inside: Mutex<Inside>,
    /// For each rank, rung when it may go on.
    turn: Vec<Condvar>,
    job: usize,
    faults: Faults,
    bounds: Bounds,
    host: String,
}

struct Inside {
    net: Net,
    random: Random,
    states: Vec<State>,
    /// Who may run; `None` until all have come. Not heeded when the ranks are not `scheduled`.
    running: Option<usize>,
    scheduled: bool,
    failure: Option<Failure>,
    /// What the rank that found the failure is to be told, by rank.
    finding: Vec<Option<Error>>,
    /// Operations of each rank.
    operations: Vec<u64>,
    /// Fruitless looks of each rank since it last got or did anything.
    looks: Vec<u32>,
    activity: Vec<String>,
    /// A digest of the order in which ranks ran.
    #[cfg(test)]
    schedule: u64,
}

/// When every rank waits or has looked so often without fruit, and nothing can arrive, the looks are a
/// wait that will not end.
const FRUITLESS: u32 = 500;

/// One rank of it.
pub struct FaultyRank {
    rank: usize,
    world: Arc<World>,
}

impl World {
    /// `n` ranks; `job` tells their memory from that of other jobs.
    pub fn ranks(n: usize, job: usize, faults: Faults, bounds: Bounds) -> Vec<FaultyRank> {
        let inside = Inside {
            net: Net::new(n, faults),
            random: Random::new(faults.seed ^ 0x5C4E_D01E),
            states: vec![State::Away; n],
            running: None,
            scheduled: false,
            failure: None,
            finding: vec![None; n],
            operations: vec![0; n],
            looks: vec![0; n],
            activity: vec![String::new(); n],
            #[cfg(test)]
            schedule: 0,
        };
        let turn = (0..n).map(|_| Condvar::new()).collect();
        let inside = Mutex::new(inside);
        let world = Arc::new(World { inside, turn, job, faults, bounds, host: host_name() });
        (0..n).map(|rank| FaultyRank { rank, world: Arc::clone(&world) }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self, inside: &Inside, rank: usize, by: usize, loss: Loss, owed: &str) -> Error {
        let sep = if inside.activity[by].is_empty() || owed.is_empty() { "" } else { ", " };
        Error::PeerLost {
            rank,
            host: self.host.clone(),
            link: "mem".into(),
            loss,
            after: Duration::ZERO,
            waiting_for: format!("{}{sep}{owed}", inside.activity[by]),
            by,
            by_host: self.host.clone().into(),
        }
    }

    /// Records what `by` has found.
    fn found(&self, inside: &mut Inside, by: usize, error: Error) {
        if inside.failure.is_none() {
            let (reason, code) = (error.to_string(), error.exit_code());
            inside.finding[by] = Some(error);
            self.end(inside, Failure::Aborted { by, reason, code });
        }
    }

    fn end(&self, inside: &mut Inside, failure: Failure) {
        if inside.failure.is_none() {
            inside.failure = Some(failure);
            self.wake(inside);
        }
    }

    /// Lets arrive what is due, and makes ready who waited for it.
    fn deliver(&self, inside: &mut Inside) {
        while let Some(event) = inside.net.deliver() {
            match event.arrival {
                Arrival::Filled | Arrival::Duplicate => {}
                Arrival::Corrupt(what) => {
                    let error = Error::Corrupt {
                        what,
                        rank: event.from,
                        host: self.host.clone(),
                        link: "mem".into(),
                        by: event.to,
                    };
                    self.found(inside, event.to, error);
                }
                Arrival::TooLong(what) => self.found(inside, event.to, Error::Internal(what)),
            }
        }
        self.wake(inside);
    }

    /// Makes ready every rank whose wait is over.
    fn wake(&self, inside: &mut Inside) {
        for rank in 0..inside.states.len() {
            if let State::Blocked(want) = inside.states[rank]
                && (inside.failure.is_some() || inside.is_met(rank, want))
            {
                inside.states[rank] = State::Ready;
                if !inside.scheduled {
                    self.turn[rank].notify_all();
                }
            }
        }
    }

    /// Gives the turn to some rank that can use it. When all wait, time goes on until something arrives;
    /// when nothing will, that is the end.
    fn next_turn(&self, inside: &mut Inside) {
        loop {
            let ready: Vec<usize> =
                (0..inside.states.len()).filter(|r| matches!(inside.states[*r], State::Ready)).collect();
            if !ready.is_empty() {
                let next = ready[inside.random.below(ready.len() as u64) as usize];
                inside.running = Some(next);
                #[cfg(test)]
                {
                    inside.schedule = (inside.schedule ^ next as u64).wrapping_mul(0x0100_0000_01B3);
                }
                self.turn[next].notify_all();
                return;
            }
            if !self.advance(inside) {
                inside.running = None; // all are done
                return;
            }
        }
    }

    /// Nobody can run: lets time pass. `false` when all are done.
    fn advance(&self, inside: &mut Inside) -> bool {
        if inside.net.skip() {
            self.deliver(inside);
            return true;
        }
        // Nothing will arrive. A put that was made and is not there was lost; else somebody owes one.
        let waits: Vec<(usize, Want)> = inside
            .states
            .iter()
            .enumerate()
            .filter_map(|(r, s)| if let State::Blocked(want) = s { Some((r, *want)) } else { None })
            .collect();
        let lost = waits.iter().copied().find(|(r, want)| inside.was_put(*r, *want));
        let Some((by, want)) = lost.or_else(|| waits.first().copied()) else { return false };
        let error = self.never(inside, by, want);
        self.found(inside, by, error);
        true
    }

    /// The error of a wait that cannot end.
    fn never(&self, inside: &Inside, by: usize, want: Want) -> Error {
        let gone = |rank: usize| matches!(inside.states[rank], State::Done);
        let (rank, owed) = match want {
            Want::Fill { lane, from, arm } if inside.was_put(by, want) => {
                (from, format!("put {arm} on the {lane} lane, which was lost on the way"))
            }
            Want::Fill { lane, from, arm } => (from, format!("put {arm} on the {lane} lane")),
            Want::Taken(Ticket { to, lane, seq }) => {
                (to, format!("a range armed for put {seq} on the {lane} lane"))
            }
        };
        self.lost(inside, rank, by, if gone(rank) { Loss::Gone } else { Loss::Slow }, &owed)
    }
}

impl Inside {
    fn is_met(&self, rank: usize, want: Want) -> bool {
        match want {
            Want::Fill { lane, from, .. } => self.net.is_filled(from, rank, lane),
            Want::Taken(Ticket { to, lane, seq }) => self.net.is_done(rank, to, lane, seq),
        }
    }

    fn was_put(&self, rank: usize, want: Want) -> bool {
        match want {
            Want::Fill { lane, from, arm } => self.net.puts(from, rank, lane) > arm,
            Want::Taken(_) => false,
        }
    }
}

impl FaultyRank {
    /// Begins an operation: waits for this rank's turn, lets time pass, and fails if the job has.
    fn begin(&self) -> Result<MutexGuard<'_, Inside>> {
        let world = &*self.world;
        let mut inside = self.my_turn(world.lock());
        inside.net.tick();
        let operation = inside.operations[self.rank];
        inside.operations[self.rank] += 1;
        if world.faults.kill.is_some_and(|k| k.rank == self.rank && k.at == operation) {
            world.end(&mut inside, Failure::Gone { rank: self.rank });
            return Err(Error::Aborted {
                by: self.rank,
                reason: format!("killed at operation {operation}, as planned"),
            });
        }
        world.deliver(&mut inside);
        self.check(&mut inside)?;
        Ok(inside)
    }

    fn check(&self, inside: &mut Inside) -> Result<()> {
        if let Some(error) = inside.finding[self.rank].take() {
            return Err(error);
        }
        match &inside.failure {
            None => Ok(()),
            Some(Failure::Aborted { by, reason, .. }) => {
                Err(Error::Aborted { by: *by, reason: reason.clone() })
            }
            Some(Failure::Gone { rank }) => Err(self.world.lost(inside, *rank, self.rank, Loss::Gone, "")),
            Some(Failure::Interrupted) => Err(Error::Interrupted),
        }
    }

    fn my_turn<'a>(&self, mut inside: MutexGuard<'a, Inside>) -> MutexGuard<'a, Inside> {
        while inside.scheduled && inside.running != Some(self.rank) {
            inside = self.world.turn[self.rank].wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
        inside
    }

    /// Ends an operation: perhaps another rank is to run now.
    fn end<'a>(&self, mut inside: MutexGuard<'a, Inside>, fruitless: bool) -> MutexGuard<'a, Inside> {
        if inside.scheduled && (fruitless || inside.random.chance(0.1)) {
            self.world.next_turn(&mut inside);
            inside = self.my_turn(inside);
        }
        inside
    }

    /// Waits for `want`.
    fn block<'a>(&self, mut inside: MutexGuard<'a, Inside>, want: Want) -> Result<MutexGuard<'a, Inside>> {
        let world = &*self.world;
        let start = Instant::now();
        loop {
            world.deliver(&mut inside);
            self.check(&mut inside)?;
            if inside.is_met(self.rank, want) {
                return Ok(inside);
            }
            inside.states[self.rank] = State::Blocked(want);
            if inside.scheduled {
                world.next_turn(&mut inside);
                inside = self.my_turn(inside);
            } else if inside.states.iter().all(|s| matches!(s, State::Blocked(_) | State::Done)) {
                world.advance(&mut inside);
            } else {
                // Ranks that run by themselves: time passes by itself too.
                let nap = Duration::from_millis(1);
                inside =
                    world.turn[self.rank].wait_timeout(inside, nap).unwrap_or_else(PoisonError::into_inner).0;
                inside.net.tick();
                if start.elapsed() > world.bounds.patience {
                    let error = world.never(&inside, self.rank, want);
                    world.found(&mut inside, self.rank, error);
                }
            }
            inside.states[self.rank] = State::Ready;
        }
    }

    /// A look that found nothing, of which there may be too many.
    fn fruitless(&self, mut inside: MutexGuard<'_, Inside>, want: Want) -> Result<()> {
        inside.looks[self.rank] += 1;
        let stuck = (0..inside.states.len()).all(|rank| match inside.states[rank] {
            State::Blocked(_) | State::Done => true,
            State::Away | State::Ready => inside.looks[rank] > FRUITLESS,
        });
        if inside.scheduled && stuck && !inside.net.skip() {
            let error = self.world.never(&inside, self.rank, want);
            self.world.found(&mut inside, self.rank, error);
            self.check(&mut inside)?;
        }
        drop(self.end(inside, true));
        Ok(())
    }

    fn broken(&self, inside: &mut Inside, what: String) -> Error {
        let error = Error::Internal(what);
        self.world.found(inside, self.rank, error.clone());
        inside.finding[self.rank] = None;
        error
    }

    fn check_peer(&self, inside: &mut Inside, peer: usize, lane: Lane) -> Result<()> {
        rules::peer(self.rank, self.size(), peer, lane).map_err(|rule| self.broken(inside, rule))
    }

    fn check_range(&self, inside: &mut Inside, memory: &Memory, range: &Range<usize>) -> Result<()> {
        let is_own = address_in(memory, self.world.job, self.rank).is_some();
        rules::range(is_own, memory, range).map_err(|rule| self.broken(inside, rule))
    }

    fn check_wait(&self, inside: &mut Inside, lane: Lane, from: usize, arm: u64) -> Result<()> {
        self.check_peer(inside, from, lane)?;
        let (arms, waited) = inside.net.arms(from, self.rank, lane);
        rules::wait(self.rank, (lane, from, arm), waited, arms).map_err(|rule| self.broken(inside, rule))
    }

    fn check_ticket(&self, inside: &mut Inside, ticket: Ticket) -> Result<()> {
        self.check_peer(inside, ticket.to, ticket.lane)?;
        let is_made = ticket.seq < inside.net.puts(self.rank, ticket.to, ticket.lane);
        rules::ticket(ticket, is_made).map_err(|rule| self.broken(inside, rule))
    }
}

impl Fabric for FaultyRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world.turn.len()
    }

    fn name(&self) -> &'static str {
        "mem"
    }

    fn host(&self, _: usize) -> String {
        self.world.host.clone()
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        memory(self.rank, self.world.job, bytes)
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        let mut inside = self.begin()?;
        self.check_peer(&mut inside, from, lane)?;
        self.check_range(&mut inside, memory, &range)?;
        inside.looks[self.rank] = 0;
        let arm = inside.net.arm(from, self.rank, lane, memory, range);
        drop(self.end(inside, false));
        Ok(arm)
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        let mut inside = self.begin()?;
        self.check_peer(&mut inside, to, lane)?;
        self.check_range(&mut inside, memory, &range)?;
        inside.looks[self.rank] = 0;
        let seq = inside.net.put(self.rank, to, lane, memory, range);
        drop(self.end(inside, false));
        Ok(Ticket { to, lane, seq })
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        let mut inside = self.begin()?;
        self.check_wait(&mut inside, lane, from, arm)?;
        let Some(len) = inside.net.take(from, self.rank, lane) else {
            self.fruitless(inside, Want::Fill { lane, from, arm })?;
            return Ok(None);
        };
        inside.looks[self.rank] = 0;
        drop(self.end(inside, false));
        Ok(Some(len))
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        let mut inside = self.begin()?;
        self.check_wait(&mut inside, lane, from, arm)?;
        let mut inside = self.block(inside, Want::Fill { lane, from, arm })?;
        inside.looks[self.rank] = 0;
        let len = inside.net.take(from, self.rank, lane).unwrap_or_default();
        drop(self.end(inside, false));
        Ok(len)
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        let mut inside = self.begin()?;
        self.check_ticket(&mut inside, ticket)?;
        if inside.is_met(self.rank, Want::Taken(ticket)) {
            drop(self.end(inside, false));
            return Ok(true);
        }
        self.fruitless(inside, Want::Taken(ticket))?;
        Ok(false)
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        let mut inside = self.begin()?;
        self.check_ticket(&mut inside, ticket)?;
        let inside = self.block(inside, Want::Taken(ticket))?;
        drop(self.end(inside, false));
        Ok(())
    }

    fn poll(&self) -> Result<()> {
        let inside = self.begin()?;
        drop(self.end(inside, false));
        Ok(())
    }

    fn set_activity(&self, what: &str) {
        self.world.lock().activity[self.rank] = what.into();
    }

    fn abort(&self, reason: &str) {
        let failure = Failure::Aborted { by: self.rank, reason: reason.into(), code: 4 };
        self.world.end(&mut self.world.lock(), failure);
    }

    fn fail(&self, error: &Error) {
        self.world.end(&mut self.world.lock(), Failure::by(self.rank, error));
    }
}

impl Rank for FaultyRank {
    fn enter(&self) {
        let mut inside = self.world.lock();
        inside.scheduled = true;
        inside.states[self.rank] = State::Ready;
        if !inside.states.iter().any(|s| matches!(s, State::Away)) {
            self.world.next_turn(&mut inside);
        }
        drop(self.my_turn(inside));
    }

    /// What it has put may arrive still.
    fn leave(&self) -> Result<()> {
        let mut inside = self.world.lock();
        if matches!(inside.states[self.rank], State::Done) {
            return Ok(());
        }
        inside.states[self.rank] = State::Done;
        if inside.scheduled {
            if !inside.states.iter().any(|s| matches!(s, State::Away)) {
                self.world.next_turn(&mut inside);
            }
        } else {
            for turn in &self.world.turn {
                turn.notify_all();
            }
        }
        Ok(())
    }

    #[cfg(test)]
    fn schedule(&self) -> u64 {
        self.world.lock().schedule
    }
}

impl Drop for FaultyRank {
    fn drop(&mut self) {
        // Its own result has been given out, or nobody is left to ask for it.
        let _ = self.leave();
    }
}
