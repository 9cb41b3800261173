//! One rank, as its calls and its thread share it: progress, failures, waits, leaving.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::engine::{Broken, Engine, Peer};
use super::links::Cable;
use super::protocol::{Fault, Pair};
use super::trouble::{Refusal, Trouble};
use crate::error::{Error, Loss, Result};
use crate::fabric::{Bounds, Fabric, Lane, Memory, Ticket, rules};

/// How often the control fabric is asked whether the job still stands.
const CONTROL_LOOK: Duration = Duration::from_millis(2);
/// How often a wait asks whether it is in vain.
const LOOK: Duration = Duration::from_millis(10);
/// How long a wait spins and yields before it naps: a nap costs several round trips.
const BUSY: Duration = Duration::from_millis(20);
/// Naps of a wait, and of the progress thread when something moves and when nothing does.
const NAP: Duration = Duration::from_micros(100);
const IDLE_NAP: Duration = Duration::from_millis(1);

/// What both share.
pub struct Shared {
    pub rank: usize,
    pub size: usize,
    pub control: Arc<dyn Fabric>,
    bounds: Bounds,
    state: Mutex<State>,
    pub stop: AtomicBool,
    /// Whether the thread moves puts; else it only shows the peers a sign of life.
    moves: bool,
}

pub struct State {
    pub engine: Engine,
    /// Why the job has ended, as far as this rank knows: what all its later calls return. A caller may drop an error
    /// on its way (in a callback, in another rank's favour): the next call has it again.
    failed: Option<Error>,
    /// When the control fabric was asked last.
    asked: Instant,
    /// Since when only answers to goodbyes are missing.
    said: Option<Instant>,
    pub activity: String,
}

/// `rc write over mlx5_0`.
pub fn describe(engine: &Engine, peer: &Peer) -> String {
    let link = &peer.link;
    format!("{:?} {:?} over {}", link.service, link.mode, devices(engine, peer)).to_lowercase()
}

/// The own device of a cable to a peer.
fn device(engine: &Engine, peer: usize, cable: usize) -> &str {
    let cable = engine.peers[peer].as_ref().and_then(|p| p.link.cables.get(cable));
    cable.map_or("", |c| engine.nics[c.nic].name())
}

/// The devices that join a peer: `rdma_en2, rdma_en3`.
fn devices(engine: &Engine, peer: &Peer) -> String {
    let names: Vec<&str> = peer.link.cables.iter().map(|c| engine.nics[c.nic].name()).collect();
    names.join(", ")
}

/// The cables to a peer, each from its device to ours: `verbs rdma_en10 to rdma_en01`.
fn from_peer(engine: &Engine, peer: &Peer, cable: Option<usize>) -> String {
    let ends = |c: &Cable| format!("{} to {}", c.far, engine.nics[c.nic].name());
    let one = cable.and_then(|i| peer.link.cables.get(i));
    let names: Vec<String> =
        one.map_or_else(|| peer.link.cables.iter().map(ends).collect(), |c| vec![ends(c)]);
    format!("verbs {}", names.join(", "))
}

/// What does not move on by itself: cable and number of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stall {
    /// The peer has sent it, and it has not come.
    Lost(usize, u64),
    /// The peer has it, and the own device, which takes no more, does not say that it has left.
    Owed(usize, u64),
}

impl Stall {
    fn of(pair: &Pair) -> Option<Stall> {
        let lost = pair.missing().map(|(cable, chunk)| Stall::Lost(cable, chunk));
        lost.or_else(|| pair.owed().map(|(cable, chunk)| Stall::Owed(cable, chunk)))
    }

    /// What it is after the silence bound, within what a rank waits for.
    fn fault(self, within: &str) -> Fault {
        match self {
            Stall::Lost(cable, chunk) => {
                let what = format!("chunk {chunk} was sent and did not come: a loss, within {within},");
                Fault::Corrupt(Some(cable), what)
            }
            Stall::Owed(cable, chunk) => Fault::Owed(cable, chunk),
        }
    }
}

impl Shared {
    /// A rank of `size` with its devices and peers; `moves`: its thread moves puts.
    pub fn new(
        (rank, size): (usize, usize),
        control: Arc<dyn Fabric>,
        engine: Engine,
        bounds: Bounds,
        moves: bool,
    ) -> Self {
        let state =
            State { engine, failed: None, asked: Instant::now(), said: None, activity: String::new() };
        Shared { rank, size, control, bounds, state: Mutex::new(state), stop: AtomicBool::new(false), moves }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: moves puts while the rank computes; or, where that is not wanted, makes progress once in a while when
    /// the rank itself does not. Peers can therefore tell a rank that computes from a dead link.
    pub fn run(&self) {
        let beat = self.lock().engine.beat;
        while !self.stop.load(Ordering::Relaxed) {
            let mut state = match self.state.try_lock() {
                Ok(state) => Some(state),
                Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
                Err(TryLockError::WouldBlock) => None, // the rank itself is at it
            };
            let turn = state.as_mut().filter(|s| self.moves || s.engine.idle_for() > beat / 2);
            let moved = turn.is_some_and(|state| self.step(state));
            drop(state);
            let nap = match (self.moves, moved) {
                (true, true) => NAP,
                (true, false) => IDLE_NAP,
                (false, _) => beat / 2,
            };
            std::thread::park_timeout(nap);
        }
    }

    /// Moves what moves; a failure is kept for the rank's next call.
    fn step(&self, state: &mut State) -> bool {
        if state.failed.is_some() {
            return false;
        }
        match state.engine.progress() {
            Ok(moved) => moved,
            Err(broken) => {
                let error = self.told(state, broken);
                self.end(state, error);
                true
            }
        }
    }

    /// Moves what moves, and fails if the job has.
    pub fn progress(&self, state: &mut State) -> Result<()> {
        self.step(state);
        if state.failed.is_none() && state.asked.elapsed() > CONTROL_LOOK {
            state.asked = Instant::now();
            state.failed = self.control.poll().err();
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// The rank itself ends the job with this error.
    pub fn fail(&self, error: &Error) {
        self.control.fail(error);
        self.lock().failed.get_or_insert_with(|| error.clone());
    }

    /// The rank itself ends the job, for a reason.
    pub fn abort(&self, reason: &str) {
        self.control.abort(reason);
        let own = || Error::Aborted { by: self.rank, reason: reason.into() };
        self.lock().failed.get_or_insert_with(own);
    }

    /// This error ends the job for all, unless another was first; returns the first.
    pub fn end(&self, state: &mut State, error: Error) -> Error {
        if let Some(first) = &state.failed {
            return first.clone();
        }
        self.control.fail(&error);
        let first = match self.control.poll() {
            Err(Error::Aborted { by, .. }) if by == self.rank => error,
            Err(first) => first,
            Ok(()) => error,
        };
        state.failed.insert(first).clone()
    }

    fn lost(&self, state: &State, rank: usize, loss: Loss, after: Duration, owed: &str) -> Error {
        let sep = if state.activity.is_empty() || owed.is_empty() { "" } else { ", " };
        let link = state.engine.peers[rank].as_ref();
        let link = link.map_or("verbs".into(), |p| from_peer(&state.engine, p, None));
        Error::PeerLost {
            rank,
            host: self.control.host(rank),
            link: link.into(),
            loss,
            after,
            waiting_for: format!("{}{sep}{owed}", state.activity),
            by: self.rank,
            by_host: self.control.host(self.rank).into(),
        }
    }

    /// A failure of protocol or device in the words of the library.
    pub fn told(&self, state: &State, broken: Broken) -> Error {
        match broken {
            Broken::Fault(rank, Fault::Corrupt(cable, what)) => {
                let peer = state.engine.peers[rank].as_ref();
                let link = peer.map_or("verbs".into(), |p| from_peer(&state.engine, p, cable));
                Error::Corrupt { what, rank, host: self.control.host(rank), link: link.into(), by: self.rank }
            }
            Broken::Fault(rank, Fault::TooLong { lane, put, len, room }) => Error::Internal(format!(
                "put {put} of rank {rank} to rank {} on the {lane} lane has {len} bytes, but {room} were armed for it",
                self.rank
            )),
            Broken::Fault(rank, Fault::Full(cable)) => Error::Resources {
                what: format!(
                    "{}: {}",
                    self.named(device(&state.engine, rank, cable), Some(rank)),
                    Trouble::QueueFull
                ),
                remedy: Trouble::QueueFull.remedy().into(),
            },
            Broken::Fault(rank, Fault::Owed(cable, chunk)) => Error::Resources {
                what: format!(
                    "{}, at chunk {chunk}: {}",
                    self.named(device(&state.engine, rank, cable), Some(rank)),
                    Trouble::Stuck
                ),
                remedy: Trouble::Stuck.remedy().into(),
            },
            Broken::Refused(Some(rank), refusal) if refusal.trouble() == Some(Trouble::Unanswered) => {
                // The control fabric mostly knows better why: it is given a moment.
                let since = Instant::now();
                while since.elapsed() < Duration::from_secs(1) {
                    if let Err(error) = self.control.poll() {
                        return error;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                self.lost(state, rank, Loss::Silent, since.elapsed(), "")
            }
            Broken::Refused(towards, refusal) => self.refused(refusal, towards),
        }
    }

    /// A device's refusal, with rank and host of the device: every Mac has an `rdma_en5`.
    fn refused(&self, refusal: Refusal, towards: Option<usize>) -> Error {
        let device = self.named(&refusal.device, towards);
        Refusal { device, ..refusal }.into()
    }

    /// What this rank lacks, with its name and its host's.
    pub fn own(&self, error: Error) -> Error {
        match error {
            Error::Resources { what, remedy } => {
                let what = format!("rank {} ({}): {what}", self.rank, self.control.host(self.rank));
                Error::Resources { what, remedy }
            }
            other => other,
        }
    }

    /// `rank 0's device rdma_en01 (mac-a) towards rank 1 (mac-b)`.
    fn named(&self, device: &str, towards: Option<usize>) -> String {
        let host = |rank| self.control.host(rank);
        let to = towards.map_or(String::new(), |rank| format!(" towards rank {rank} ({})", host(rank)));
        format!("rank {}'s device {device} ({}){to}", self.rank, host(self.rank))
    }

    fn broken(&self, state: &mut State, what: String) -> Error {
        self.end(state, Error::Internal(what))
    }

    pub fn check_peer(&self, state: &mut State, peer: usize, lane: Lane) -> Result<()> {
        rules::peer(self.rank, self.size, peer, lane).map_err(|rule| self.broken(state, rule))
    }

    pub fn check_range(&self, state: &mut State, memory: &Memory, range: &Range<usize>) -> Result<()> {
        let is_own = state.engine.arena.owns(memory);
        rules::range(is_own, memory, range).map_err(|rule| self.broken(state, rule))
    }

    pub fn check_wait(&self, state: &mut State, lane: Lane, from: usize, arm: u64) -> Result<()> {
        self.check_peer(state, from, lane)?;
        let (waited, next) = pair(state, from).map_or((0, 0), |pair| pair.arms(lane));
        rules::wait(self.rank, (lane, from, arm), waited, next).map_err(|rule| self.broken(state, rule))
    }

    pub fn check_ticket(&self, state: &mut State, ticket: Ticket) -> Result<()> {
        self.check_peer(state, ticket.to, ticket.lane)?;
        let is_made = pair(state, ticket.to).is_some_and(|pair| ticket.seq < pair.puts(ticket.lane));
        rules::ticket(ticket, is_made).map_err(|rule| self.broken(state, rule))
    }

    /// Takes a put that has come.
    pub fn take(state: &mut State, lane: Lane, from: usize, arm: u64) -> Option<usize> {
        let peer = state.engine.peers[from].as_mut()?;
        let len = peer.pair.filled(lane, arm)?;
        peer.take(lane);
        Some(len)
    }

    /// Waits until `ready` says so. `owes`: whether the peer, which has left, still owes this.
    pub fn block<T>(
        &self,
        peer: usize,
        owed: &str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
        owes: impl Fn(&Pair) -> bool,
    ) -> Result<T> {
        let start = Instant::now();
        let (mut round, mut looked) = (0u32, start);
        let mut stall: Option<(Stall, Instant)> = None;
        loop {
            let mut state = self.lock();
            let result = self.progress(&mut state);
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            result?;
            let now = Instant::now();
            if now - looked > LOOK {
                looked = now;
                self.look(&mut state, peer, owed, start, &mut stall, &owes)?;
            }
            drop(state);
            round = round.saturating_add(1);
            if round < 50 {
                std::hint::spin_loop();
            } else if now - start < BUSY {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Whether what `peer` owes will never come.
    fn look(
        &self,
        state: &mut State,
        peer: usize,
        owed: &str,
        start: Instant,
        stall: &mut Option<(Stall, Instant)>,
        owes: &impl Fn(&Pair) -> bool,
    ) -> Result<()> {
        let Some(p) = &state.engine.peers[peer] else { return Ok(()) };
        let now = Instant::now();
        if owes(&p.pair) {
            // A rank that fails says so before it leaves.
            let error = self.control.poll().err();
            let error = error.unwrap_or_else(|| self.lost(state, peer, Loss::Gone, now - start, owed));
            return Err(self.end(state, error));
        }
        match (Stall::of(&p.pair), &stall) {
            (Some(found), Some((same, since))) if found == *same => {
                if now - *since > self.bounds.silence {
                    let error = self.told(state, Broken::Fault(peer, found.fault(owed)));
                    return Err(self.end(state, error));
                }
            }
            (found, _) => *stall = found.map(|found| (found, now)),
        }
        self.check_silence(state, peer, owed)?;
        if now - start > self.bounds.patience {
            let error = self.lost(state, peer, Loss::Slow, now - start, owed);
            return Err(self.end(state, error));
        }
        Ok(())
    }

    /// Every rank's thread speaks often enough: a peer that is not heard, and has not left, is behind a dead link.
    fn check_silence(&self, state: &mut State, peer: usize, owed: &str) -> Result<()> {
        let Some(p) = &state.engine.peers[peer] else { return Ok(()) };
        let silence = p.heard.elapsed();
        if silence <= self.bounds.silence || p.pair.is_peer_gone() {
            return Ok(());
        }
        // The control fabric mostly knows better why.
        let error = self.control.poll().err();
        let error = error.unwrap_or_else(|| self.lost(state, peer, Loss::Silent, silence, owed));
        Err(self.end(state, error))
    }

    /// Says goodbye to everybody, once what was put has left and what was granted has come.
    pub fn leave(&self) -> Result<()> {
        let start = Instant::now();
        self.lock().engine.peers.iter_mut().flatten().for_each(|p| p.pair.leave());
        loop {
            let mut state = self.lock();
            let pairs = || state.engine.peers.iter().flatten().map(|p| &p.pair);
            if pairs().all(Pair::has_left) {
                return Ok(());
            }
            // An answer to a goodbye that does not come is nobody's loss. Nor is a completion that a device owes after the
            // peer's goodbye: that said that all it granted is there, and what it did not grant is forgotten.
            let only_answers =
                pairs().all(|pair| pair.has_left() || pair.has_said_goodbye() || pair.is_peer_gone());
            if !only_answers {
                state.said = None;
            } else if state.said.get_or_insert_with(Instant::now).elapsed() > self.bounds.silence {
                return Ok(());
            }
            self.progress(&mut state)?;
            for peer in 0..self.size {
                let waits = |p: &&Peer| !p.pair.has_left() && !p.pair.has_said_goodbye();
                if state.engine.peers[peer].as_ref().filter(waits).is_some() {
                    self.check_silence(&mut state, peer, "its goodbye")?;
                }
            }
            if start.elapsed() > self.bounds.patience {
                let text = "puts that no rank has armed ranges for were left".to_owned();
                return Err(self.broken(&mut state, text));
            }
            drop(state);
            if start.elapsed() < BUSY { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
    }
}

pub fn pair(state: &State, peer: usize) -> Option<&Pair> {
    state.engine.peers.get(peer)?.as_ref().map(|p| &p.pair)
}
