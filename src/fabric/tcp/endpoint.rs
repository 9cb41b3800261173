//! One rank's end: the contract of [`Fabric`] over [`Engine`], and the thread that moves bytes while the rank
//! computes.

use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::frame::EAGER;
use super::region::Region;
use crate::error::{Error, Loss, Result};
use crate::fabric::alarm::Alarm;
use crate::fabric::mem::pages::Pages;
use crate::fabric::rendezvous::door::{poll, refused};
use crate::fabric::shared::area::Failure;
use crate::fabric::{Bounds, Doing, Fabric, Lane, Memory, Ticket, rules};

/// A wait spins so long before it sleeps, where each rank has a core.
const SPIN: Duration = Duration::from_micros(60);
/// The progress thread leaves a rank alone that was here so recently.
const RECENT: Duration = Duration::from_millis(1);
const LONGEST_REST: Duration = Duration::from_millis(8);
/// So many small arms wait for company before their source is told; its window is larger.
const UNTOLD: usize = 16;
/// What a rank does that waits for the others' leave; those that pass on others' data go last.
const LEAVING: &str =
    "while leaving the job (each rank waits until all have left, for data may go through it)";
/// After a failure: for everyone to hear of it.
const LINGER: Duration = Duration::from_secs(1);

struct Shared {
    engine: Mutex<Engine>,
    /// Calls of the rank: while they change, it moves its bytes itself.
    calls: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress thread.
    fn progress(&self, wake: &UnixStream) {
        let (mut calls, mut rest) = (0, RECENT);
        loop {
            let mut engine = self.lock();
            if engine.stop {
                return;
            }
            // Others wait for what goes through here.
            let recent = if engine.job.is_relay() { RECENT / 4 } else { RECENT };
            let now = self.calls.load(Ordering::Relaxed);
            if engine.taken || now != calls {
                // The rank is here. `taken` means that it sleeps on the sockets itself, if at all: nothing
                // may be read behind its back.
                rest = if engine.taken && now == calls { (2 * rest).min(LONGEST_REST) } else { recent };
                calls = now;
                engine.tick_if_late();
                drop(engine);
                std::thread::park_timeout(rest);
                continue;
            }
            rest = recent;
            let due = engine.tick();
            engine.flush();
            let mut fds = engine.watch();
            let links = fds.len();
            fds.push(libc::pollfd { fd: wake.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            drop(engine);
            poll(&mut fds, due);
            let mut engine = self.lock();
            engine.polling = false;
            if fds[links].revents != 0 {
                // Whatever was written there says the same.
                let _ = (&*wake).read(&mut [0; 64]);
            }
            if !engine.taken {
                engine.serve_ready(&fds[..links]);
            }
        }
    }
}

/// Whether the next wait should spin. Two ranks that the system keeps on one core take it from each other by
/// spinning: after waits that spun in vain, some do not.
#[derive(Default)]
struct Spins {
    /// So many waits do not.
    skip: AtomicU32,
    /// That many after the next one that spins in vain.
    penalty: AtomicU32,
}

impl Spins {
    fn next(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        self.skip.store(skip.saturating_sub(1), Ordering::Relaxed);
        skip == 0
    }

    fn succeeded(&self) {
        self.penalty.store(0, Ordering::Relaxed);
    }

    fn failed(&self) {
        let penalty = self.penalty.load(Ordering::Relaxed);
        self.skip.store(penalty, Ordering::Relaxed);
        self.penalty.store((2 * penalty).clamp(2, 64), Ordering::Relaxed);
    }
}

/// One rank of a job whose ranks reach each other over TCP.
pub struct Endpoint {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
    bounds: Bounds,
    /// More ranks than cores here.
    crowded: bool,
    spins: Spins,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Starts the progress thread.
    ///
    /// # Errors
    /// [`Error::Resources`] when there is none to be had.
    pub fn start(rank: usize, engine: Engine, bounds: Bounds, crowded: bool) -> Result<Self> {
        let size = engine.job.size();
        let shared = Arc::new(Shared { engine: Mutex::new(engine), calls: AtomicU64::new(1) });
        let pair = UnixStream::pair().and_then(|(a, b)| {
            a.set_nonblocking(true)?;
            b.set_nonblocking(true)?;
            Ok((a, b))
        });
        let (wake, woken) = pair.map_err(|e| refused("a pair of sockets", &e))?;
        let thread = (size > 1).then(|| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("fulmen-tcp".into())
                .spawn(move || shared.progress(&woken))
                .map_err(|e| Error::Resources {
                    what: format!("no thread for the connections of rank {rank}: {e}"),
                    remedy: "use fewer threads, or raise the limit (ulimit -u)".into(),
                })
        });
        let spins = Spins::default();
        Ok(Endpoint { rank, size, shared, bounds, crowded, spins, wake, thread: thread.transpose()? })
    }

    /// Rings when this rank hears that the job has failed.
    pub fn alarm(&self) -> Arc<Alarm> {
        Arc::clone(&self.shared.lock().alarm)
    }

    /// The engine, for an operation of the rank.
    fn enter(&self) -> MutexGuard<'_, Engine> {
        self.shared.calls.fetch_add(1, Ordering::Relaxed);
        let mut engine = self.shared.lock();
        engine.job.called();
        engine
    }

    /// For tests that break something.
    #[cfg(test)]
    pub fn engine(&self) -> MutexGuard<'_, Engine> {
        self.shared.lock()
    }

    fn check(engine: &Engine) -> Result<()> {
        engine.job.ended().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Why `rank`, though in a network of this one's, is not reached directly.
    pub fn shut_off(&self, rank: usize) -> Option<String> {
        self.shared.lock().job.shut_off(rank).map(str::to_owned)
    }

    /// Another transport carries what is for `rank`: so it is called.
    pub fn carries_no_data(&self, rank: usize, data: String) {
        self.shared.lock().job.carries_no_data(rank, data);
    }

    /// Whether `rank` has left: nothing more comes of it.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.lock().job.is_left(rank)
    }

    /// A broken rule ends the job.
    fn broken(engine: &mut Engine, what: String) -> Error {
        let error = engine.job.fail(Error::Internal(what));
        engine.serve_all();
        error
    }

    fn check_peer(&self, engine: &mut Engine, peer: usize, lane: Lane) -> Result<()> {
        rules::peer(self.rank, self.size, peer, lane).map_err(|rule| Self::broken(engine, rule))?;
        Self::check(engine)
    }

    fn check_wait(&self, engine: &mut Engine, lane: Lane, from: usize, arm: u64) -> Result<()> {
        self.check_peer(engine, from, lane)?;
        let (waited, armed) = engine.job.position(lane, from);
        rules::wait(self.rank, (lane, from, arm), waited, armed).map_err(|rule| Self::broken(engine, rule))
    }

    fn region(engine: &mut Engine, memory: &Arc<Memory>, range: &Range<usize>) -> Result<Region> {
        Region::new(memory, range).map_err(|rule| Self::broken(engine, rule))
    }

    /// The progress thread has to know that something waits to be written.
    fn leave_to_thread(&self, engine: &mut Engine) {
        if engine.must_wake() {
            // It is full: then it wakes anyway.
            let _ = (&self.wake).write(&[1]);
        }
    }

    /// Moves bytes until `ready` says so, those of the peer that is waited for first. `late` is asked in between whether it has
    /// to end otherwise.
    fn move_until(
        &self,
        waiting: Option<(usize, Lane, u64)>,
        mut ready: impl FnMut(&mut Engine) -> Option<Result<()>>,
        mut late: impl FnMut(&mut Engine, Duration) -> Option<Error>,
    ) -> Result<()> {
        let began = Instant::now();
        let mut slept = false;
        // Where ranks share cores, sleep at once: what a yield is worth is the scheduler's mood.
        let spins = !self.crowded && self.spins.next();
        let spin = if spins { SPIN } else { Duration::ZERO };
        let mut first = true;
        loop {
            let mut engine = self.enter();
            engine.taken = true;
            engine.job.set_waiting(waiting);
            match waiting {
                Some((peer, ..)) if std::mem::take(&mut first) || slept => engine.serve(peer),
                Some((peer, ..)) => engine.listen(peer),
                None => engine.serve_all(),
            }
            if let Some(end) = ready(&mut engine) {
                engine.taken = false;
                engine.job.set_waiting(None);
                self.leave_to_thread(&mut engine);
                if spins && !slept {
                    self.spins.succeeded();
                }
                return end;
            }
            let waited = began.elapsed();
            if waited < spin {
                engine.sweep_if_late();
                drop(engine);
                std::hint::spin_loop();
                continue;
            }
            if spins && !std::mem::replace(&mut slept, true) {
                self.spins.failed();
            }
            engine.flush();
            let due = engine.tick();
            if let Some(end) = ready(&mut engine) {
                engine.taken = false;
                engine.job.set_waiting(None);
                self.leave_to_thread(&mut engine);
                return end;
            }
            if let Some(error) = late(&mut engine, waited) {
                engine.serve_all();
                engine.taken = false;
                engine.job.set_waiting(None);
                return Err(error);
            }
            let mut fds = engine.fds();
            drop(engine);
            poll(&mut fds, due);
            self.shared.lock().serve_ready(&fds);
        }
    }

    /// Waits for `peer` to make `ready` come true.
    fn block(&self, waiting: (usize, Lane, u64), mut ready: impl FnMut(&mut Engine) -> bool) -> Result<()> {
        let peer = waiting.0;
        self.move_until(
            Some(waiting),
            |engine| if ready(engine) { Some(Ok(())) } else { engine.job.ended().map(|e| Err(e.clone())) },
            |engine, waited| {
                let left = engine.job.is_left(peer);
                let loss = if left { Loss::Gone } else { Loss::Slow };
                (left || waited > self.bounds.patience).then(|| engine.job.lose(peer, loss, waited))
            },
        )
    }

    /// Leaves the job, once what is queued here is on its way.
    fn leave(&self) -> Result<()> {
        self.move_until(
            None,
            |engine| match engine.job.ended() {
                Some(e) => Some(Err(e.clone())),
                None => engine.is_drained().then_some(Ok(())),
            },
            |engine, waited| {
                (waited > self.bounds.patience).then(|| {
                    let waited = waited.as_secs_f64();
                    engine.job.fail(Error::Internal(format!(
                        "puts that no rank has armed ranges for were left after {waited:.1} s"
                    )))
                })
            },
        )?;
        {
            let mut engine = self.enter();
            engine.job.leave();
            engine.job.set_activity(LEAVING);
            (0..self.size).for_each(|peer| engine.push(peer));
        }
        // Who is gone or silent has ended the job. Others may work for as long as they like.
        let mut seen = (0, Duration::ZERO);
        self.move_until(
            None,
            |engine| match engine.job.ended() {
                Some(e) => Some(Err(e.clone())),
                None => engine.is_parted().then_some(Ok(())),
            },
            |engine, waited| {
                if engine.job.works() != seen.0 {
                    seen = (engine.job.works(), waited);
                }
                let idle = waited.saturating_sub(seen.1);
                let late = engine.job.straggler().filter(|_| idle > self.bounds.patience)?;
                let error = engine.job.lose(late, Loss::Slow, idle);
                // This rank's program has nothing more to do with its fabric, and is not told otherwise.
                eprintln!("rank {}: {error}", self.rank);
                Some(error)
            },
        )?;
        let mut engine = self.enter();
        if engine.job.is_relayed() {
            engine.shut_all();
            drop(engine);
            self.linger(self.bounds.silence);
        }
        Ok(())
    }

    /// Until everyone has heard all that was said, for a while.
    fn linger(&self, at_most: Duration) {
        let until = Instant::now() + at_most;
        loop {
            let mut engine = self.enter();
            engine.taken = true;
            engine.serve_all();
            if engine.is_closed() || Instant::now() >= until {
                engine.taken = false;
                return;
            }
            let mut fds = engine.fds();
            drop(engine);
            poll(&mut fds, Duration::from_millis(20));
        }
    }
}

impl Fabric for Endpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn name(&self) -> &'static str {
        "tcp"
    }

    fn host(&self, rank: usize) -> String {
        self.shared.lock().job.host(rank).into()
    }

    fn link(&self, rank: usize) -> String {
        self.shared.lock().job.link(rank).into()
    }

    fn hops(&self, rank: usize) -> usize {
        self.shared.lock().job.hops(rank)
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        let pages = Pages::new(bytes)?;
        let at = pages.as_ptr();
        // SAFETY: zeroed pages of at least `bytes` that live as long as the owner and are known only here.
        Ok(Arc::new(unsafe { Memory::new(at, bytes, Box::new(pages)) }))
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        let mut engine = self.enter();
        self.check_peer(&mut engine, from, lane)?;
        let region = Self::region(&mut engine, memory, &range)?;
        let number = engine.job.arm(lane, from, region).inspect_err(|_| engine.serve_all())?;
        // A put that needs no credit can wait for its credit.
        if range.len() > EAGER || engine.job.untold(from) >= UNTOLD {
            engine.push(from);
            self.leave_to_thread(&mut engine);
        }
        Ok(number)
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        let mut engine = self.enter();
        self.check_peer(&mut engine, to, lane)?;
        let region = Self::region(&mut engine, memory, &range)?;
        let seq = engine.job.put(lane, to, region);
        engine.push(to);
        Self::check(&engine)?;
        self.leave_to_thread(&mut engine);
        Ok(Ticket { to, lane, seq })
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        let mut engine = self.enter();
        self.check_wait(&mut engine, lane, from, arm)?;
        engine.serve(from);
        let filled = engine.job.take_filled(lane, from);
        if filled.is_none() {
            engine.flush();
            Self::check(&engine)?;
        }
        self.leave_to_thread(&mut engine);
        Ok(filled)
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        let mut engine = self.enter();
        self.check_wait(&mut engine, lane, from, arm)?;
        let mut filled = engine.job.take_filled(lane, from);
        drop(engine);
        if filled.is_none() {
            self.block((from, lane, arm), |engine| {
                filled = engine.job.take_filled(lane, from);
                filled.is_some()
            })?;
        }
        Ok(filled.unwrap_or_default())
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        let Ticket { to, lane, seq } = ticket;
        let mut engine = self.enter();
        self.check_peer(&mut engine, to, lane)?;
        let done = engine.job.is_done(lane, to, seq);
        rules::ticket(ticket, done.is_some()).map_err(|rule| Self::broken(&mut engine, rule))?;
        if done == Some(true) {
            return Ok(true);
        }
        engine.serve(to);
        Self::check(&engine)?;
        self.leave_to_thread(&mut engine);
        Ok(engine.job.is_done(lane, to, seq) == Some(true))
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        let Ticket { to, lane, seq } = ticket;
        if self.is_done(ticket)? {
            return Ok(());
        }
        self.block((to, lane, seq), |engine| engine.job.is_done(lane, to, seq) == Some(true))
    }

    fn poll(&self) -> Result<()> {
        let mut engine = self.enter();
        engine.serve_all();
        self.leave_to_thread(&mut engine);
        Self::check(&engine)
    }

    fn set_activity(&self, what: &str) {
        self.shared.lock().job.set_activity(what);
    }

    fn doing(&self) -> Doing {
        self.shared.lock().job.doing()
    }

    fn abort(&self, reason: &str) {
        let mut engine = self.enter();
        engine.job.abort(&Failure::Aborted { by: self.rank, reason: reason.into(), code: 4 });
        engine.tell();
    }

    fn fail(&self, error: &Error) {
        let mut engine = self.enter();
        engine.job.fail(error.clone());
        engine.tell();
    }
}

impl Drop for Endpoint {
    /// The rank leaves, when what it has put is on its way. One that panics ends the job.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(&Error::Internal(format!("rank {} panicked", self.rank)));
        }
        // What goes wrong here is told to the others; nobody is left to tell on this side.
        if self.leave().is_err() {
            self.linger(LINGER);
        }
        self.shared.lock().stop = true;
        let _ = (&self.wake).write(&[1]);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has nothing to return, and does not panic.
            let _ = thread.join();
        }
    }
}
