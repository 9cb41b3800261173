//! One rank: the contract over streams of requests, with a heart beside it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use ::mpi::ffi::MPI_Comm;

use super::Options;
use super::heart::{Ear, Heart};
use super::memory::Source;
use super::raw::{self, Comm, Deadline, Progress, Returned};
use super::streams::{Arrival, Counts, Farewell, Piece, Streams, TooLong, Way};
use crate::error::{Error, Loss, Result};
use crate::fabric::rendezvous::Secret;
use crate::fabric::shared::area::Failure;
use crate::fabric::{Bounds, Fabric, Lane, Memory, Ticket, host_name, is_crowded, rules};

/// One rank. Dropping its last handle leaves the job, as [`Rank::leave`] does; a job that has failed ends there.
pub struct Rank {
    comm: Arc<Comm>,
    source: Source,
    rank: usize,
    hosts: Vec<String>,
    ranks_here: usize,
    crowded: bool,
    bounds: Bounds,
    /// The only thread that may call MPI, if there is only one.
    thread: Option<ThreadId>,
    heart: Heart,
    state: Mutex<State>,
    activity: Mutex<String>,
}

struct State {
    streams: Streams,
    /// By rank, what those that have left had made.
    left: Vec<Option<Counts>>,
    farewell: Farewell,
    /// This rank has left.
    over: bool,
}

/// What a rank waits for.
enum Waiting {
    Arm(usize, Lane, u64),
    Put(usize, Lane, u64),
    /// The end of all.
    End,
}

/// Tests before a wait lets others run; a test takes about 0.1 µs.
const SPINS: u32 = 2000;
const SPINS_WHEN_CROWDED: u32 = 20;
/// From then on a wait sleeps between tests, for a small share of the time that it has lasted.
const AWAKE: Duration = Duration::from_millis(2);
const LONGEST_NAP: Duration = Duration::from_micros(500);

impl Rank {
    pub(super) fn connect(comm: MPI_Comm, options: &Options) -> Result<Self> {
        if !raw::may_have_threads() {
            return Err(Error::argument(
                "MPI_Init_thread",
                "MPI_THREAD_SINGLE",
                "there are threads beside the one that calls MPI",
                "ask for MPI_THREAD_FUNNELED: mpi::initialize_with_threading(Threading::Funneled)",
            ));
        }
        let serialized = raw::is_serialized();
        if !serialized && !raw::is_main_thread() {
            return Err(Error::argument(
                "MPI_Init_thread",
                "MPI_THREAD_FUNNELED",
                "this is not the thread that initialised MPI",
                "connect on that thread, or ask for MPI_THREAD_SERIALIZED",
            ));
        }
        let bounds = options.bounds;
        let deadline = Deadline::within(bounds.patience);
        let comm = Arc::new(Comm::duplicate(comm, deadline)?);
        let (rank, size) = (comm.rank(), comm.size());
        let ranks_here = comm.ranks_here()?;

        // What everyone must know: host names, and of rank 0 the secret and where it listens.
        let alone = comm.all_gather_words(ranks_here as u64, deadline)?.iter().all(|n| *n as usize == size);
        let ear = Ear::open(options.heartbeat && !alone)?;
        let mut mine = Vec::new();
        if rank == 0 {
            mine.extend_from_slice(Secret::random()?.expose());
            mine.extend_from_slice(if options.heartbeat { ear.print() } else { String::new() }.as_bytes());
        }
        let told = comm.all_gather(&mine, deadline)?;
        let names = comm.all_gather(host_name().as_bytes(), deadline)?;
        let hosts: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        let Some((secret, address)) = told[0].split_first_chunk::<32>() else {
            return Err(Error::Internal("rank 0 has told no secret".into()));
        };
        let rank_0 = ear.read(&String::from_utf8_lossy(address));
        let secret = Secret::from_bytes(*secret);
        let heart = Heart::start(rank, hosts.clone(), options, secret, ear, rank_0)?;
        // Who has no heart does not come here, and a window's allocation has no deadline.
        deadline.wait("MPI_Ibarrier", comm.ibarrier()?, ())?;

        let source = Source::new(&comm, options.transfer)?;
        let way = source.window().map_or(Way::Messages, Way::Window);
        let state = State {
            streams: Streams::new(Arc::clone(&comm), way),
            left: vec![None; size],
            farewell: Farewell::expect(&comm)?,
            over: false,
        };
        Ok(Rank {
            comm,
            source,
            rank,
            hosts,
            ranks_here,
            crowded: is_crowded(ranks_here),
            bounds,
            thread: (!serialized).then(|| std::thread::current().id()),
            heart,
            state: Mutex::new(state),
            activity: Mutex::default(),
        })
    }

    /// How many of the ranks run on this rank's host.
    pub fn ranks_here(&self) -> usize {
        self.ranks_here
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a job that has failed, as this rank sees it.
    fn failed(&self, failure: Failure) -> Error {
        match failure {
            Failure::Aborted { by, reason, .. } => Error::Aborted { by, reason },
            Failure::Gone { rank } => self.lost(rank, Loss::Gone, Duration::ZERO, &Waiting::End),
            Failure::Interrupted => Error::Interrupted,
        }
    }

    fn lost(&self, rank: usize, loss: Loss, after: Duration, waiting: &Waiting) -> Error {
        let mut waiting_for = self.activity.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let what = match waiting {
            Waiting::Arm(_, lane, i) | Waiting::Put(_, lane, i) => format!("put {i} on the {lane} lane"),
            Waiting::End => "at the end of the job".into(),
        };
        waiting_for += if waiting_for.is_empty() { "" } else { ", " };
        waiting_for += &what;
        let seen = self.heart.silent_for(rank).is_some();
        let link = if seen { "mpi" } else { "mpi, its heartbeat not seen" }.into();
        let (host, by, by_host) = (self.host(rank), self.rank, self.host(self.rank).into());
        Error::PeerLost { rank, host, link, loss, after, waiting_for, by, by_host }
    }

    /// This error ends the job for all, unless another was first.
    fn end(&self, error: Error) -> Error {
        if self.heart.fail(Failure::by(self.rank, &error)) {
            return error;
        }
        self.heart.failure().map_or(error, |first| self.failed(first))
    }

    /// A broken rule ends the job.
    fn broken(&self, what: String) -> Error {
        self.end(Error::Internal(what))
    }

    fn check(&self) -> Result<()> {
        if self.heart.has_failed()
            && let Some(failure) = self.heart.failure()
        {
            return Err(self.failed(failure));
        }
        if !self.may_call() {
            return Err(self.broken(format!(
                "rank {} uses its fabric on another thread than the one that may call MPI",
                self.rank
            )));
        }
        Ok(())
    }

    fn may_call(&self) -> bool {
        self.thread.is_none_or(|thread| thread == std::thread::current().id())
    }

    fn check_peer(&self, peer: usize, lane: Lane) -> Result<()> {
        rules::peer(self.rank, self.size(), peer, lane).map_err(|rule| self.broken(rule))?;
        self.check()
    }

    fn piece(&self, memory: &Arc<Memory>, range: &Range<usize>) -> Result<Piece> {
        rules::range(self.source.gave(memory), memory, range).map_err(|rule| self.broken(rule))?;
        Ok(Piece::new(memory, range))
    }

    fn too_long(&self, from: usize, to: usize, lane: Lane, i: u64, len: usize, room: usize) -> Error {
        // Some libraries do not tell how long a message was that they cut.
        let len = if len > room { len.to_string() } else { format!("more than {room}") };
        self.broken(format!(
            "put {i} of rank {from} to rank {to} on the {lane} lane has {len} bytes, but {room} were armed for it"
        ))
    }

    /// Moves what MPI does not move by itself.
    fn advance(&self, state: &mut State) -> Result<()> {
        match state.streams.advance().map_err(|e| self.end(e))? {
            Ok(()) => Ok(()),
            Err(TooLong { to, lane, seq, len, armed }) => {
                Err(self.too_long(self.rank, to, lane, seq, len, armed))
            }
        }
    }

    /// Hears who has left, and moves whatever MPI has under way.
    fn hear(&self, state: &mut State) -> Result<()> {
        while !state.over_and_heard(self.size()) && state.farewell.is_done().map_err(|e| self.end(e))? {
            let (peer, made) = state.farewell.read();
            if let Some(left) = state.left.get_mut(peer) {
                *left = Some(made);
            }
            state.farewell = Farewell::expect(&self.comm).map_err(|e| self.end(e))?;
        }
        Ok(())
    }

    /// Asks `step` until it has something, moving everything meanwhile.
    fn block<T>(
        &self,
        waiting: &Waiting,
        mut step: impl FnMut(&mut State) -> Result<Option<T>>,
    ) -> Result<T> {
        let _errors = Returned::errors();
        let spins = if self.crowded { SPINS_WHEN_CROWDED } else { SPINS };
        let mut round = 0u32;
        let mut began = None;
        loop {
            let mut state = self.state();
            if let Some(value) = step(&mut state)? {
                return Ok(value);
            }
            self.check()?;
            self.advance(&mut state)?;
            round = round.saturating_add(1);
            if round < spins {
                continue;
            }
            self.hear(&mut state)?;
            let waited = began.get_or_insert_with(Instant::now).elapsed();
            // Whoever has left has said before what it had put: a look after that is the last.
            let owing = self.owing(&state, waiting);
            if let Some(peer) = owing {
                if let Some(value) = step(&mut state)? {
                    return Ok(value);
                }
                self.check()?; // a rank that fails says so before it leaves
                return Err(self.end(self.lost(peer, Loss::Gone, waited, waiting)));
            }
            let watched = self.watched(&state, waiting);
            drop(state);
            self.watch(&watched, waited, waiting)?;
            if waited < AWAKE {
                std::thread::yield_now();
            } else {
                std::thread::sleep((waited / 32).min(LONGEST_NAP));
            }
        }
    }

    /// The rank that has left without making the put that is waited for.
    fn owing(&self, state: &State, waiting: &Waiting) -> Option<usize> {
        match waiting {
            Waiting::Arm(from, lane, arm) => {
                let made = state.left[*from]?;
                (made.puts[lane.0 as usize] <= *arm).then_some(*from)
            }
            Waiting::Put(..) | Waiting::End => None,
        }
    }

    /// On whom it depends that a wait ends.
    fn watched(&self, state: &State, waiting: &Waiting) -> Vec<usize> {
        match waiting {
            Waiting::Arm(peer, ..) | Waiting::Put(peer, ..) => vec![*peer],
            Waiting::End => {
                let others = || (0..self.size()).filter(|p| *p != self.rank);
                let unheard: Vec<usize> = others().filter(|p| state.left[*p].is_none()).collect();
                // All have taken leave: what is left is to part, for which each waits for each.
                if unheard.is_empty() { others().collect() } else { unheard }
            }
        }
    }

    /// Whether those on whom a wait depends live.
    fn watch(&self, peers: &[usize], waited: Duration, waiting: &Waiting) -> Result<()> {
        let lost = |peer, loss, after| Err(self.end(self.lost(peer, loss, after, waiting)));
        // Rank 0 tells of the others.
        let hub = (self.rank != 0).then_some(0);
        for peer in peers.iter().copied().chain(hub) {
            if let Some(silence) = self.heart.silent_for(peer).filter(|s| *s > self.bounds.silence) {
                return lost(peer, Loss::Silent, silence);
            }
        }
        // The end comes when the slowest has done its work; while it beats, that is no loss.
        let patient = matches!(waiting, Waiting::End);
        let slow = peers.iter().find(|peer| !patient || self.heart.silent_for(**peer).is_none());
        match slow {
            Some(peer) if waited > self.bounds.patience => lost(*peer, Loss::Slow, waited),
            _ => Ok(()),
        }
    }

    /// Leaves the job: waits until all ranks do, and until what was put has arrived. The fabric is of no use
    /// afterwards. Collective.
    ///
    /// # Errors
    /// When the job has failed, or fails meanwhile: a put may turn out here to be too long for its range, a rank to be
    /// lost. Dropping the last handle then ends all processes.
    pub fn leave(&self) -> Result<()> {
        self.check()?;
        let mut goodbyes = {
            let mut state = self.state();
            if std::mem::replace(&mut state.over, true) {
                return Ok(());
            }
            let peers = (0..self.size()).filter(|peer| *peer != self.rank);
            let sent = peers.map(|peer| Farewell::send(&self.comm, peer, &state.streams.counts(peer)));
            sent.collect::<Result<Vec<_>>>().map_err(|e| self.end(e))?
        };
        let mut settled = vec![false; self.size()];
        settled[self.rank] = true;
        self.block(&Waiting::End, |state| {
            Farewell::forget_left(&mut goodbyes).map_err(|e| self.end(e))?;
            for (peer, settled) in settled.iter_mut().enumerate().filter(|(_, settled)| !**settled) {
                if let Some(made) = state.left[peer] {
                    *settled = state.streams.settle(peer, &made).map_err(|e| self.end(e))?;
                }
            }
            Ok((goodbyes.is_empty() && settled.iter().all(|settled| *settled)).then_some(()))
        })?;
        self.part().map_err(|e| self.end(e))
    }

    /// All ranks part together: no heart stops before everyone is here.
    fn part(&self) -> Result<()> {
        self.block(&Waiting::End, |state| state.farewell.give_up().map(|done| done.then_some(())))?;
        let (mut barrier, mut passed) = (self.comm.ibarrier()?, false);
        self.block(&Waiting::End, |_| {
            passed = passed || barrier.test()? != Progress::Pending;
            Ok(passed.then_some(()))
        })?;
        if let Some(window) = self.source.window() {
            window.close();
            // Buffers may outlive the fabric; then the window does.
            let held = self
                .comm
                .all_gather_words(self.source.pieces() as u64, Deadline::within(self.bounds.patience))?;
            if held.iter().all(|n| *n == 0) {
                window.free();
            }
        }
        self.heart.leave();
        self.comm.free();
        Ok(())
    }
}

impl State {
    /// Nobody is left who could take leave.
    fn over_and_heard(&self, size: usize) -> bool {
        self.over && self.left.iter().flatten().count() + 1 == size
    }
}

impl Fabric for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.hosts.len()
    }

    fn name(&self) -> &'static str {
        "mpi"
    }

    fn host(&self, rank: usize) -> String {
        self.hosts.get(rank).cloned().unwrap_or_default()
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        self.source.alloc(self.rank, bytes)
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        self.check_peer(from, lane)?;
        let piece = self.piece(memory, &range)?;
        self.state().streams.arm(lane, from, piece).map_err(|e| self.end(e))
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        self.check_peer(to, lane)?;
        let piece = self.piece(memory, &range)?;
        let mut state = self.state();
        let seq = state.streams.put(lane, to, piece).map_err(|e| self.end(e))?;
        self.advance(&mut state)?;
        Ok(Ticket { to, lane, seq })
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        self.check_wait(lane, from, arm)?;
        let _errors = Returned::errors();
        let mut state = self.state();
        self.advance(&mut state)?;
        self.arrival(&mut state, lane, from, arm)
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        self.check_wait(lane, from, arm)?;
        self.block(&Waiting::Arm(from, lane, arm), |state| self.arrival(state, lane, from, arm))
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        let Ticket { to, lane, seq } = ticket;
        self.check_peer(to, lane)?;
        let mut state = self.state();
        rules::ticket(ticket, seq < state.streams.puts(to, lane)).map_err(|rule| self.broken(rule))?;
        self.advance(&mut state)?;
        state.streams.is_done(to, lane, seq).map_err(|e| self.end(e))
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        let Ticket { to, lane, seq } = ticket;
        if self.is_done(ticket)? {
            return Ok(());
        }
        self.block(&Waiting::Put(to, lane, seq), |state| {
            let done = state.streams.is_done(to, lane, seq).map_err(|e| self.end(e))?;
            Ok(done.then_some(()))
        })
    }

    fn poll(&self) -> Result<()> {
        self.check()?;
        let mut state = self.state();
        self.hear(&mut state)?;
        self.advance(&mut state)
    }

    fn set_activity(&self, what: &str) {
        let mut activity = self.activity.lock().unwrap_or_else(PoisonError::into_inner);
        activity.clear();
        activity.push_str(what);
    }

    fn abort(&self, reason: &str) {
        self.heart.fail(Failure::Aborted { by: self.rank, reason: reason.into(), code: 4 });
    }

    fn fail(&self, error: &Error) {
        self.heart.fail(Failure::by(self.rank, error));
    }
}

impl Rank {
    /// Checks that `arm` is the one that may be waited for.
    fn check_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<()> {
        self.check_peer(from, lane)?;
        let (waited, next) = self.state().streams.arms(from, lane);
        rules::wait(self.rank, (lane, from, arm), waited, next).map_err(|rule| self.broken(rule))
    }

    fn arrival(&self, state: &mut State, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        match state.streams.arrival(lane, from).map_err(|e| self.end(e))? {
            Arrival::Pending => Ok(None),
            Arrival::Filled(bytes) => Ok(Some(bytes)),
            Arrival::TooLong(bytes, armed) => Err(self.too_long(from, self.rank, lane, arm, bytes, armed)),
        }
    }
}

impl Drop for Rank {
    /// The rank leaves. One that panics, or whose job has failed, ends the job's processes: MPI knows no other way.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(&Error::Internal(format!("rank {} panicked", self.rank)));
        }
        let may_call = raw::is_up() && self.may_call();
        let over = self.state().over;
        if !may_call && !over {
            self.fail(&Error::Internal(format!(
                "rank {} drops its fabric after MPI_Finalize, or on another thread than the one that may call MPI",
                self.rank
            )));
        }
        if self.heart.failure().is_none() && (over || self.leave().is_ok()) {
            return;
        }
        let code = self.heart.last_words();
        if may_call {
            raw::abort(code);
        }
        std::process::exit(code.into());
    }
}
