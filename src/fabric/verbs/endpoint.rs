//! One rank of a job whose puts travel over verbs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use super::Options;
use super::arena::{Arena, Source};
use super::devices::{self, Devices};
use super::engine::{Broken, Engine, Moved, Peer};
use super::links::{self, LeftOut};
use super::nic::Service;
use super::rank::{self, Shared};
use crate::error::{Error, Result};
use crate::fabric::rendezvous::Rendezvous;
use crate::fabric::{Fabric, Lane, Memory, Ticket};

/// One rank of a job over RDMA devices.
pub struct Verbs {
    shared: Arc<Shared>,
    /// Moves puts while the rank computes, or only speaks for it ([`Options::progress_thread`]).
    thread: Option<JoinHandle<()>>,
    left_out: Vec<LeftOut>,
}

/// Connects this rank to the others over RDMA devices; collective. `control` is a fabric of the same ranks that works
/// already: it tells of lost ranks and ended jobs, which verbs cannot.
///
/// # Errors
/// [`Error::Argument`] when a device that is named is not there, [`Error::Resources`] with a remedy when a device refuses or
/// devices join not all ranks, [`Error::Aborted`] when another rank met such an error.
pub fn connect(
    rendezvous: &mut dyn Rendezvous,
    control: Arc<dyn Fabric>,
    options: &Options,
) -> Result<Arc<dyn Fabric>> {
    Verbs::connect(rendezvous, control, options).map(|verbs| Arc::new(verbs) as Arc<dyn Fabric>)
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
        Verbs::connect_over(rendezvous, control, options, None)
    }

    /// As [`connect`], with memory from `source`.
    ///
    /// # Errors
    /// As [`connect`].
    pub(in crate::fabric) fn connect_over(
        rendezvous: &mut dyn Rendezvous,
        control: Arc<dyn Fabric>,
        options: &Options,
        source: Option<Source>,
    ) -> Result<Verbs> {
        let (rank, size) = (rendezvous.rank(), rendezvous.size());
        let arena = Arc::new(Arena::over(source));
        let mut nics = if size > 1 { devices::open(rank, options) } else { Ok(Vec::new()) };
        let mut absent = None;
        if let Err(error @ Error::Resources { .. }) = &nics
            && !options.all_pairs
            && !matches!(options.devices, Devices::Named(_))
        {
            absent = Some(error.to_string());
            nics = Ok(Vec::new());
        }
        let mut peers: Vec<Option<Peer>> = (0..size).map(|_| None).collect();
        let mut left_out = Vec::new();
        if size > 1 {
            let nics = nics.as_mut().map_err(|e| e.clone());
            let (joined, unjoined) = links::connect(rendezvous, nics, absent, &arena, options)?;
            for link in joined {
                let checksums = options.checksums.unwrap_or(link.service == Service::Uc);
                let rank = link.peer;
                peers[rank] = Some(Peer::new(link, checksums));
            }
            left_out = unjoined;
        }
        let beat = (options.bounds.silence / 8).clamp(Duration::from_millis(20), Duration::from_millis(500));
        let has_peers = peers.iter().any(Option::is_some);
        let engine = Engine::new(nics?, peers, arena, beat);
        let shared =
            Arc::new(Shared::new((rank, size), control, engine, options.bounds, options.progress_thread));
        // Nobody sends before everybody is ready to be sent to.
        rendezvous.all_gather(&[])?;
        let thread = has_peers.then(|| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("verbs {rank}")).spawn(move || shared.run())
        });
        let thread = thread.transpose().map_err(|e| Error::Resources {
            what: format!("no progress thread for rank {rank}: {e}"),
            remedy: "use fewer ranks or threads, or raise the limit (ulimit -u)".into(),
        })?;
        Ok(Verbs { shared, thread, left_out })
    }

    /// Whether this fabric joins this rank to `rank`: to all others, unless [`Options::all_pairs`] or
    /// [`Options::without`] says otherwise.
    pub fn joins(&self, rank: usize) -> bool {
        rank::pair(&self.shared.lock(), rank).is_some()
    }

    /// The ranks that it does not join to this one, each with the reason.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// Registers memory of another fabric with all devices: it, and any [`Memory`] that is a part of it, can be armed
    /// and put here from now on. It is kept as long as this fabric. A device has few regions (about 100 on a Mac) and
    /// this takes one for each GiB begun: few and large ones, nothing for each allocation.
    ///
    /// # Errors
    /// [`Error::Resources`] when a device refuses, [`Error::Internal`] when it does not begin at a page (4 KiB).
    pub fn adopt(&self, memory: &Arc<Memory>) -> Result<()> {
        let mut state = self.shared.lock();
        let engine = &mut state.engine;
        let nics = &mut engine.nics;
        engine.arena.adopt(memory, |at, len| links::register(nics, at, len))
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
        peers.map(|peer| (peer.link.peer, rank::describe(&state.engine, peer))).collect()
    }

    /// How bytes of puts have left or reached this rank so far.
    pub fn moved(&self) -> Moved {
        self.shared.lock().engine.moved
    }

    /// Bytes of memory registered, queue pairs and registered pieces of each device.
    pub fn usage(&self) -> (usize, Vec<(String, usize, usize)>) {
        let state = self.shared.lock();
        let nics = state.engine.nics.iter().map(|n| (n.name().to_owned(), n.qps(), n.regions())).collect();
        (state.engine.arena.usage().0, nics)
    }
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

    fn link(&self, rank: usize) -> String {
        let state = self.shared.lock();
        let peer = state.engine.peers.get(rank).and_then(Option::as_ref);
        peer.map_or("verbs".into(), |peer| format!("verbs, {}", rank::describe(&state.engine, peer)))
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        let mut state = self.shared.lock();
        let engine = &mut state.engine;
        let memory = links::take(&engine.arena, &mut engine.nics, bytes);
        memory.map_err(|error| self.shared.own(error))
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
        Ok(rank::pair(&state, ticket.to).is_some_and(|pair| pair.is_done(ticket.lane, ticket.seq)))
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        let shared = &*self.shared;
        let Ticket { to, lane, seq } = ticket;
        shared.check_ticket(&mut shared.lock(), ticket)?;
        shared.block(
            to,
            &format!("a range armed for put {seq} on the {lane} lane"),
            |state| rank::pair(state, to).filter(|pair| pair.is_done(lane, seq)).map(|_| ()),
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
        self.shared.abort(reason);
    }

    fn fail(&self, error: &Error) {
        self.shared.fail(error);
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
            thread.thread().unpark();
            // A progress thread that panicked has nothing to tell here.
            let _ = thread.join();
        }
        // Its errors have been recorded for the job; nobody is left to tell on this side.
        let _ = self.shared.leave();
    }
}
