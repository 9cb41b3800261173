//! One rank of a job whose puts travel over verbs.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::arena::Arena;
use super::engine::{Broken, Engine, Peer};
use super::ffi::Library;
use super::links::{self, COMPLETIONS};
use super::nic::{Nic, Service, list};
use super::protocol::{Fault, Pair};
use super::trouble::{Refusal, Trouble};
use super::{Devices, Options};
use crate::error::{Error, Loss, Result};
use crate::fabric::rendezvous::Rendezvous;
use crate::fabric::{Bounds, Fabric, Lane, Memory, Ticket};

/// How often the control fabric is asked whether the job still stands.
const CONTROL_LOOK: Duration = Duration::from_millis(2);
/// How long a wait spins and yields before it naps: a nap costs several round trips.
const BUSY: Duration = Duration::from_millis(20);
/// Naps of a wait, and of the progress thread when something moves and when nothing does.
const NAP: Duration = Duration::from_micros(100);
const IDLE_NAP: Duration = Duration::from_millis(1);

/// One rank of a job over RDMA devices.
pub struct Verbs {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    rank: usize,
    size: usize,
    control: Arc<dyn Fabric>,
    bounds: Bounds,
    state: Mutex<State>,
    stop: AtomicBool,
    has_thread: bool,
}

struct State {
    engine: Engine,
    /// What this rank found and has not told its caller yet.
    found: Option<Error>,
    has_failed: bool,
    /// When the control fabric was asked last.
    asked: Instant,
    activity: String,
}

/// Connects this rank to the others over RDMA devices; collective. `control` is a fabric of the same ranks that works
/// already: it tells of lost ranks and ended jobs, which verbs cannot.
///
/// # Errors
/// [`Error::Argument`] when devices are not there or join not all ranks, [`Error::Resources`] with a remedy when a device
/// refuses, [`Error::Aborted`] when another rank met such an error.
pub fn connect(
    rendezvous: &mut dyn Rendezvous,
    control: Arc<dyn Fabric>,
    options: &Options,
) -> Result<Arc<dyn Fabric>> {
    Verbs::connect(rendezvous, control, options).map(|verbs| Arc::new(verbs) as Arc<dyn Fabric>)
}

/// Opens the devices that `options` name for this rank.
fn open(rank: usize, options: &Options) -> Result<Vec<Nic>> {
    let library = match &options.library {
        Some(path) => Library::open(path),
        None => Library::find(),
    };
    let library = library.map_err(|absent| Error::Resources {
        what: absent.to_string(),
        remedy: Trouble::NoLibrary.remedy().into(),
    })?;
    let listed = list(library)?;
    let wanted: Option<Vec<String>> = match &options.devices {
        Devices::All => None,
        Devices::Named(names) => Some(names.clone()),
        Devices::Matrix(matrix) => Some(matrix.get(rank).into_iter().flatten().flatten().cloned().collect()),
    };
    let mut nics = Vec::new();
    let mut why: Option<Refusal> = None;
    for device in &listed {
        if wanted.as_ref().is_some_and(|names| !names.contains(&device.name)) {
            continue;
        }
        match Nic::open(library, &device.name, COMPLETIONS) {
            Ok(nic) => nics.push(nic),
            Err(refusal) if wanted.is_some() => return Err(refusal.into()),
            Err(refusal) => why = Some(refusal), // a port without a cable is no failure
        }
    }
    let missing = wanted.iter().flatten().find(|name| listed.iter().all(|d| d.name != **name));
    if let Some(name) = missing {
        let have: Vec<&str> = listed.iter().map(|d| d.name.as_str()).collect();
        return Err(Error::argument(
            "device",
            name,
            format!("rank {rank} has no such device; it has: {}", have.join(", ")),
            "see `hpl-run doctor`",
        ));
    }
    match (nics.is_empty(), why) {
        (false, _) => Ok(nics),
        (true, Some(refusal)) => Err(refusal.into()),
        (true, None) => Err(Error::Resources {
            what: format!("{} lists no RDMA device for rank {rank}", library.name),
            remedy: Trouble::NotEnabled.remedy().into(),
        }),
    }
}

impl Verbs {
    /// As [`connect`].
    ///
    /// # Errors
    /// As [`connect`].
    pub fn connect(
        rendezvous: &mut dyn Rendezvous,
        control: Arc<dyn Fabric>,
        options: &Options,
    ) -> Result<Verbs> {
        let (rank, size) = (rendezvous.rank(), rendezvous.size());
        let arena = Arc::new(Arena::default());
        let mut nics = if size > 1 { open(rank, options) } else { Ok(Vec::new()) };
        let mut peers: Vec<Option<Peer>> = (0..size).map(|_| None).collect();
        if size > 1 {
            let links = links::connect(rendezvous, nics.as_mut().map_err(|e| e.clone()), &arena, options)?;
            for link in links {
                let checksums = options.checksums.unwrap_or(link.service == Service::Uc);
                let rank = link.peer;
                peers[rank] = Some(Peer::new(link, checksums));
            }
        }
        let beat = (options.bounds.silence / 8).clamp(Duration::from_millis(20), Duration::from_millis(500));
        let shared = Arc::new(Shared {
            rank,
            size,
            control,
            bounds: options.bounds,
            state: Mutex::new(State {
                engine: Engine::new(nics?, peers, arena, beat),
                found: None,
                has_failed: false,
                asked: Instant::now(),
                activity: String::new(),
            }),
            stop: AtomicBool::new(false),
            has_thread: options.progress_thread && size > 1,
        });
        // Nobody sends before everybody is ready to be sent to.
        rendezvous.all_gather(&[])?;
        let thread = shared.has_thread.then(|| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("verbs {rank}")).spawn(move || shared.run())
        });
        let thread = thread.transpose().map_err(|e| Error::Resources {
            what: format!("no progress thread for rank {rank}: {e}"),
            remedy: "use fewer ranks or threads, or raise the limit (ulimit -u)".into(),
        })?;
        Ok(Verbs { shared, thread })
    }

    /// Leaves the job, once what was put has left: what goes wrong with it (a put that was too long) is told here, while
    /// dropping tells nobody. Nothing may be armed or put afterwards.
    ///
    /// # Errors
    /// As [`Fabric::wait`].
    pub fn leave(&self) -> Result<()> {
        self.shared.leave()
    }

    /// What each peer is joined by: `rc write over mlx5_0`, for a report.
    pub fn describe(&self) -> Vec<(usize, String)> {
        let state = self.shared.lock();
        let peers = state.engine.peers.iter().flatten();
        peers.map(|peer| (peer.link.peer, describe(&state.engine, peer))).collect()
    }

    /// Bytes of memory registered, queue pairs and registered pieces of each device.
    pub fn usage(&self) -> (usize, Vec<(String, usize, usize)>) {
        let state = self.shared.lock();
        let nics = state.engine.nics.iter().map(|n| (n.name().to_owned(), n.qps(), n.regions())).collect();
        (state.engine.arena.usage().0, nics)
    }
}

fn describe(engine: &Engine, peer: &Peer) -> String {
    let link = &peer.link;
    format!("{:?} {:?} over {}", link.service, link.mode, devices(engine, peer)).to_lowercase()
}

/// The devices that join a peer: `rdma_en2, rdma_en3`.
fn devices(engine: &Engine, peer: &Peer) -> String {
    let names: Vec<&str> = peer.link.cables.iter().map(|c| engine.nics[c.nic].name()).collect();
    names.join(", ")
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress thread.
    fn run(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let moved = match self.state.try_lock() {
                Ok(mut state) => self.step(&mut state),
                Err(TryLockError::Poisoned(state)) => self.step(&mut state.into_inner()),
                Err(TryLockError::WouldBlock) => false, // the rank itself is at it
            };
            std::thread::sleep(if moved { NAP } else { IDLE_NAP });
        }
    }

    /// Moves what moves; a failure is kept for the rank's next call.
    fn step(&self, state: &mut State) -> bool {
        if state.has_failed {
            return false;
        }
        match state.engine.progress() {
            Ok(moved) => moved,
            Err(broken) => {
                let error = self.told(state, broken);
                state.found = Some(self.end(state, error));
                true
            }
        }
    }

    /// Moves what moves, and fails if the job has.
    fn progress(&self, state: &mut State) -> Result<()> {
        self.step(state);
        if let Some(error) = state.found.take() {
            return Err(error);
        }
        if state.has_failed || state.asked.elapsed() > CONTROL_LOOK {
            state.asked = Instant::now();
            if let Err(error) = self.control.poll() {
                state.has_failed = true;
                return Err(error);
            }
            if state.has_failed {
                return Err(Error::Aborted { by: self.rank, reason: "it had failed".into() });
            }
        }
        Ok(())
    }

    /// This error ends the job for all, unless another was first.
    fn end(&self, state: &mut State, error: Error) -> Error {
        state.has_failed = true;
        self.control.fail(&error);
        match self.control.poll() {
            Err(Error::Aborted { by, .. }) if by == self.rank => error,
            Err(first) => first,
            Ok(()) => error,
        }
    }

    fn lost(&self, state: &State, rank: usize, loss: Loss, after: Duration, owed: &str) -> Error {
        let sep = if state.activity.is_empty() || owed.is_empty() { "" } else { ", " };
        let link = state.engine.peers[rank].as_ref().map(|p| devices(&state.engine, p)).unwrap_or_default();
        Error::PeerLost {
            rank,
            host: self.control.host(rank),
            link: format!("verbs {link}"),
            loss,
            after,
            waiting_for: format!("{}{sep}{owed}", state.activity),
            by: self.rank,
        }
    }

    /// A failure of protocol or device in the words of the library.
    fn told(&self, state: &State, broken: Broken) -> Error {
        match broken {
            Broken::Fault(rank, Fault::Corrupt(cable, what)) => {
                let peer = state.engine.peers[rank].as_ref();
                let link = match (peer, cable) {
                    (Some(peer), Some(i)) => {
                        let cable = &peer.link.cables[i];
                        format!("verbs {} to {}", state.engine.nics[cable.nic].name(), cable.far)
                    }
                    (Some(peer), None) => format!("verbs {}", devices(&state.engine, peer)),
                    (None, _) => "verbs".into(),
                };
                Error::Corrupt { what, rank, host: self.control.host(rank), link, by: self.rank }
            }
            Broken::Fault(rank, Fault::TooLong { lane, put, len, room }) => Error::Internal(format!(
                "put {put} of rank {rank} to rank {} on the {lane} lane has {len} bytes, but {room} were armed for it",
                self.rank
            )),
            Broken::Fault(rank, Fault::Full(_)) => Error::Resources {
                what: format!("rank {}'s device towards rank {rank}: {}", self.rank, Trouble::QueueFull),
                remedy: Trouble::QueueFull.remedy().into(),
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
            Broken::Refused(_, refusal) => refusal.into(),
        }
    }

    fn broken(&self, state: &mut State, what: String) -> Error {
        self.end(state, Error::Internal(what))
    }

    fn check_peer(&self, state: &mut State, peer: usize, lane: Lane) -> Result<()> {
        if peer >= self.size || peer == self.rank || lane.0 as usize >= Lane::COUNT {
            let (rank, size) = (self.rank, self.size);
            let text = format!("rank {rank} of {size} names rank {peer} on lane {} as its peer", lane.0);
            return Err(self.broken(state, text));
        }
        Ok(())
    }

    fn check_range(&self, state: &mut State, memory: &Memory, range: &Range<usize>) -> Result<()> {
        if !state.engine.arena.owns(memory) {
            return Err(self.broken(state, "memory of another fabric was armed or put".into()));
        }
        if range.start > range.end || range.end > memory.len() {
            let text = format!("bytes {range:?} of {} were armed or put", memory.len());
            return Err(self.broken(state, text));
        }
        Ok(())
    }

    fn check_wait(&self, state: &mut State, lane: Lane, from: usize, arm: u64) -> Result<()> {
        self.check_peer(state, from, lane)?;
        let (waited, next) = pair(state, from).map_or((0, 0), |pair| pair.arms(lane));
        if arm == waited && arm < next {
            return Ok(());
        }
        let rank = self.rank;
        Err(self.broken(
            state,
            format!(
                "rank {rank} waits for arm {arm} of rank {from} on the {lane} lane, but {next} were armed and {waited} \
                 waited for"
            ),
        ))
    }

    fn check_ticket(&self, state: &mut State, ticket: Ticket) -> Result<()> {
        self.check_peer(state, ticket.to, ticket.lane)?;
        if pair(state, ticket.to).is_some_and(|pair| ticket.seq < pair.puts(ticket.lane)) {
            return Ok(());
        }
        let text = format!("put {} to rank {} has not been made", ticket.seq, ticket.to);
        Err(self.broken(state, text))
    }

    /// Takes a put that has come.
    fn take(state: &mut State, lane: Lane, from: usize, arm: u64) -> Option<usize> {
        let peer = state.engine.peers[from].as_mut()?;
        let len = peer.pair.filled(lane, arm)?;
        peer.take(lane);
        Some(len)
    }

    /// Waits until `ready` says so. `owes`: whether the peer, which has left, still owes this.
    fn block<T>(
        &self,
        peer: usize,
        owed: &str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
        owes: impl Fn(&Pair) -> bool,
    ) -> Result<T> {
        let start = Instant::now();
        let (mut round, mut looked) = (0u32, start);
        let mut missing: Option<((usize, u64), Instant)> = None;
        loop {
            let mut state = self.lock();
            let result = self.progress(&mut state);
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            result?;
            let now = Instant::now();
            if now - looked > Duration::from_millis(10) {
                looked = now;
                self.look(&mut state, peer, owed, start, &mut missing, &owes)?;
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
        missing: &mut Option<((usize, u64), Instant)>,
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
        match (p.pair.missing(), &missing) {
            (Some(chunk), Some((same, since))) if chunk == *same => {
                if now - *since > self.bounds.silence {
                    let what = format!("chunk {} was sent and did not come: a loss, within {owed},", chunk.1);
                    let error = self.told(state, Broken::Fault(peer, Fault::Corrupt(Some(chunk.0), what)));
                    return Err(self.end(state, error));
                }
            }
            (Some(chunk), _) => *missing = Some((chunk, now)),
            (None, _) => *missing = None,
        }
        let silence = now.saturating_duration_since(p.heard);
        if self.has_thread && silence > self.bounds.silence && !p.pair.is_peer_gone() {
            let error = self.lost(state, peer, Loss::Silent, silence, owed);
            return Err(self.end(state, error));
        }
        if now - start > self.bounds.patience {
            let error = self.lost(state, peer, Loss::Slow, now - start, owed);
            return Err(self.end(state, error));
        }
        Ok(())
    }

    /// Says goodbye to everybody, once what was put has left and what was granted has come.
    fn leave(&self) -> Result<()> {
        let start = Instant::now();
        self.lock().engine.peers.iter_mut().flatten().for_each(|p| p.pair.leave());
        let mut said: Option<Instant> = None;
        loop {
            let mut state = self.lock();
            let pairs = || state.engine.peers.iter().flatten().map(|p| &p.pair);
            if pairs().all(Pair::has_left) {
                return Ok(());
            }
            // An answer to a goodbye that does not come is nobody's loss.
            if pairs().all(|pair| pair.has_left() || pair.has_said_goodbye()) {
                if said.get_or_insert_with(Instant::now).elapsed() > self.bounds.silence {
                    return Ok(());
                }
            } else {
                said = None;
            }
            self.progress(&mut state)?;
            if start.elapsed() > self.bounds.patience {
                let text = "puts that no rank has armed ranges for were left".to_owned();
                return Err(self.broken(&mut state, text));
            }
            drop(state);
            if start.elapsed() < BUSY { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
    }
}

fn pair(state: &State, peer: usize) -> Option<&Pair> {
    state.engine.peers.get(peer)?.as_ref().map(|p| &p.pair)
}

impl Fabric for Verbs {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn name(&self) -> &'static str {
        "verbs"
    }

    fn host(&self, rank: usize) -> String {
        self.shared.control.host(rank)
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        let mut state = self.shared.lock();
        let engine = &mut state.engine;
        links::take(&engine.arena, &mut engine.nics, bytes)
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        shared.check_peer(&mut state, from, lane)?;
        shared.check_range(&mut state, memory, &range)?;
        let armed = match &mut state.engine.peers[from] {
            Some(peer) => peer.arm(lane, memory, range.start, range.len()),
            None => return Err(Error::Internal(format!("rank {from} is not connected"))),
        };
        let arm = armed.map_err(|fault| {
            let error = shared.told(&state, Broken::Fault(from, fault));
            shared.end(&mut state, error)
        })?;
        shared.progress(&mut state)?;
        Ok(arm)
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        shared.check_peer(&mut state, to, lane)?;
        shared.check_range(&mut state, memory, &range)?;
        let seq = match &mut state.engine.peers[to] {
            Some(peer) => peer.put(lane, memory, range.start, range.len()),
            None => return Err(Error::Internal(format!("rank {to} is not connected"))),
        };
        shared.progress(&mut state)?;
        Ok(Ticket { to, lane, seq })
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        shared.check_wait(&mut state, lane, from, arm)?;
        shared.progress(&mut state)?;
        Ok(Shared::take(&mut state, lane, from, arm))
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        let shared = &*self.shared;
        shared.check_wait(&mut shared.lock(), lane, from, arm)?;
        shared.block(
            from,
            &format!("put {arm} on the {lane} lane"),
            |state| Shared::take(state, lane, from, arm),
            |pair| pair.is_peer_gone() && !pair.is_announced(lane, arm),
        )
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        shared.check_ticket(&mut state, ticket)?;
        shared.progress(&mut state)?;
        Ok(pair(&state, ticket.to).is_some_and(|pair| pair.is_done(ticket.lane, ticket.seq)))
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        let shared = &*self.shared;
        let Ticket { to, lane, seq } = ticket;
        shared.check_ticket(&mut shared.lock(), ticket)?;
        shared.block(
            to,
            &format!("a range armed for put {seq} on the {lane} lane"),
            |state| pair(state, to).filter(|pair| pair.is_done(lane, seq)).map(|_| ()),
            |pair| pair.is_forgotten(lane, seq),
        )
    }

    fn poll(&self) -> Result<()> {
        self.shared.progress(&mut self.shared.lock())
    }

    fn set_activity(&self, what: &str) {
        self.shared.lock().activity = what.into();
        self.shared.control.set_activity(what);
    }

    fn abort(&self, reason: &str) {
        self.shared.control.abort(reason);
        self.shared.lock().has_failed = true;
    }

    fn fail(&self, error: &Error) {
        self.shared.control.fail(error);
        self.shared.lock().has_failed = true;
    }
}

impl Drop for Verbs {
    /// The rank leaves, when what it has put is on its way. One that panics ends the job. Then queue pairs, memory and
    /// devices are given back in order.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(&Error::Internal(format!("rank {} panicked", self.shared.rank)));
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A progress thread that panicked has nothing to tell here.
            let _ = thread.join();
        }
        // Its errors have been recorded for the job; nobody is left to tell on this side.
        let _ = self.shared.leave();
    }
}
