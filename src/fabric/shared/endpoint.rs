//! One rank's end of a transport between ranks that reach each other's memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::area::{Area, Failure, Life};
use super::bell::Pace;
use super::control::Control;
use super::deadlock::{Suspicion, Wanted};
use super::slot::{FEW, Meeting, SLOTS, Span, Stream};
use crate::error::{Error, Loss, Result};
use crate::fabric::{Bounds, Fabric, Lane, Memory, Ticket, is_crowded, rules};

/// How a transport names and reaches memory.
pub trait Space: Send + Sync + 'static {
    /// The transport's name.
    fn name(&self) -> &'static str;

    /// Memory of this rank, as [`Fabric::alloc`] promises it.
    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>>;

    /// The address of the first byte of `memory`, as other ranks reach it; `None` when it is not this rank's.
    fn address(&self, memory: &Memory) -> Option<u64>;

    /// The span of another rank's memory; `None` when it is not all inside.
    fn reach(&self, rank: usize, span: Span) -> Option<*mut u8>;

    /// Whether other ranks show signs of life ([`super::area::Rank::beat`]), and how long this one has not.
    fn silent_for(&self, rank: usize) -> Option<Duration>;

    /// This rank has left. What it has put may be fetched still: its memory must not change any more.
    fn leave(&self);
}

/// A range that this rank armed or wants to put, and what keeps it.
struct Owned {
    memory: Arc<Memory>,
    /// Where in it, checked.
    start: usize,
    span: Span,
}

impl Owned {
    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `start` was checked to lie inside `memory`.
        unsafe { self.memory.as_ptr().add(self.start) }
    }
}

/// The sending side of one stream.
#[derive(Default)]
struct Outgoing {
    /// Number of the next put.
    next: u64,
    /// Puts that found the ring full; the last one is `next - 1`.
    spilled: VecDeque<Owned>,
    /// Memory that the target may read still: (put, memory).
    offered: VecDeque<(u64, Arc<Memory>)>,
}

impl Outgoing {
    fn forget_taken(&mut self, stream: &Stream) {
        while self.offered.front().is_some_and(|(i, _)| stream.is_taken(*i)) {
            self.offered.pop_front();
        }
    }
}

/// The receiving side of one stream.
#[derive(Default)]
struct Incoming {
    /// Number of the next arm.
    next: u64,
    /// Number of the next wait.
    waited: u64,
    /// `waited..next`: what was armed; those from `waited + SLOTS` on are not in the ring yet.
    armed: VecDeque<Owned>,
}

/// What this rank has to do with one other, by lane.
#[derive(Default)]
struct Peer {
    outgoing: [Outgoing; Lane::COUNT],
    incoming: [Incoming; Lane::COUNT],
}

/// By peer; made when first used, for most ranks of a large job never meet.
struct Streams {
    peers: Vec<Option<Box<Peer>>>,
}

impl Streams {
    fn outgoing(&mut self, to: usize, lane: Lane) -> &mut Outgoing {
        &mut self.peers[to].get_or_insert_default().outgoing[lane.0 as usize]
    }

    fn incoming(&mut self, from: usize, lane: Lane) -> &mut Incoming {
        &mut self.peers[from].get_or_insert_default().incoming[lane.0 as usize]
    }
}

/// What a rank has under way. The transport keeps it as long as any peer may touch its memory.
pub struct UnderWay {
    streams: Mutex<Streams>,
    /// Spilled puts of all streams.
    spilled: AtomicUsize,
}

impl UnderWay {
    /// Nothing, among so many ranks.
    pub fn new(ranks: usize) -> Self {
        let mut peers = Vec::new();
        peers.resize_with(ranks, || None);
        UnderWay { streams: Mutex::new(Streams { peers }), spilled: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank of a job.
pub struct Endpoint<S: Space> {
    rank: usize,
    area: Arc<Area>,
    space: S,
    under_way: Arc<UnderWay>,
    bounds: Bounds,
    host: String,
    crowded: bool,
    /// `None`: the area keeps the job's failures.
    control: Option<Control>,
}

impl<S: Space> Endpoint<S> {
    pub fn new(rank: usize, area: Arc<Area>, space: S, under_way: Arc<UnderWay>, bounds: Bounds) -> Self {
        let crowded = is_crowded(area.ranks());
        let host = crate::fabric::host_name();
        Endpoint { rank, area, space, under_way, bounds, host, crowded, control: None }
    }

    /// For `ranks` of the area's, which are on this host; `control` joins all.
    pub fn controlled(mut self, control: Control, ranks: usize) -> Self {
        let (area, rank) = (Arc::clone(&self.area), self.rank);
        control.alarm.add(move || area.rank(rank).bell.ring());
        self.host = control.fabric.host(rank);
        self.crowded = is_crowded(ranks);
        self.control = Some(control);
        self
    }

    /// Its memory.
    pub fn space(&self) -> &S {
        &self.space
    }

    /// Whether puts are queued here, which move only when this rank calls.
    pub fn has_queued(&self) -> bool {
        self.under_way.spilled.load(Ordering::Relaxed) > 0
    }

    /// Leaves the job, once what is queued here is on its way.
    pub fn leave(&self) -> Result<()> {
        let result = self.drain();
        self.space.leave();
        self.area.rank(self.rank).set_life(Life::Left);
        self.area.ring_all();
        result
    }

    fn drain(&self) -> Result<()> {
        let mut pace = Pace::new(self.crowded);
        loop {
            self.forget_unwanted();
            if !self.has_queued() {
                return Ok(());
            }
            self.poll()?;
            if pace.step(&self.area.rank(self.rank).bell, Duration::from_millis(1), &mut || false)
                && pace.waited() > self.bounds.patience
            {
                return Err(self.broken(format!(
                    "puts that no rank has armed ranges for were left after {:.1} s",
                    pace.waited().as_secs_f64()
                )));
            }
        }
    }

    /// Drops queued puts to ranks that have left: nobody will arm a range for them.
    fn forget_unwanted(&self) {
        let mut streams = self.under_way.lock();
        for to in (0..self.size()).filter(|to| self.area.rank(*to).life() != Life::Running) {
            for out in streams.peers[to].iter_mut().flat_map(|peer| &mut peer.outgoing) {
                self.under_way.spilled.fetch_sub(out.spilled.len(), Ordering::Relaxed);
                out.spilled.clear();
            }
        }
    }

    fn stream(&self, from: usize, to: usize, lane: Lane) -> &Stream {
        self.area.stream(from, to, lane)
    }

    /// The error of a job that has failed, as this rank sees it.
    fn failed(&self, failure: Failure) -> Error {
        match failure {
            Failure::Aborted { by, reason, .. } => Error::Aborted { by, reason },
            Failure::Gone { rank } => self.lost(rank, Loss::Gone, Duration::ZERO, None),
            Failure::Interrupted => Error::Interrupted,
        }
    }

    fn lost(&self, rank: usize, loss: Loss, after: Duration, what: Option<(u64, Lane)>) -> Error {
        let mut waiting_for = self.area.rank(self.rank).activity();
        if let Some((i, lane)) = what {
            let sep = if waiting_for.is_empty() { "" } else { ", " };
            waiting_for += &format!("{sep}put {i} on the {lane} lane");
        }
        Error::PeerLost {
            rank,
            host: self.host(rank),
            link: self.space.name().into(),
            loss,
            after,
            waiting_for,
            by: self.rank,
            by_host: self.host(self.rank).into(),
        }
    }

    /// A broken rule ends the job.
    fn broken(&self, what: String) -> Error {
        self.end(Error::Internal(what))
    }

    /// This error ends the job for all, unless another was first.
    fn end(&self, error: Error) -> Error {
        if let Some(control) = &self.control {
            return control.end(error);
        }
        if self.area.fail(&Failure::by(self.rank, &error)) {
            return error;
        }
        self.area.failure().map_or(error, |first| self.failed(first))
    }

    fn check(&self) -> Result<()> {
        if let Some(control) = &self.control {
            return control.check();
        }
        self.area.failure().map_or(Ok(()), |failure| Err(self.failed(failure)))
    }

    fn has_failed(&self) -> bool {
        self.control.as_ref().map_or_else(|| self.area.failure().is_some(), |c| c.alarm.has_rung())
    }

    fn check_peer(&self, peer: usize, lane: Lane) -> Result<()> {
        rules::peer(self.rank, self.size(), peer, lane).map_err(|rule| self.broken(rule))?;
        self.check()
    }

    fn owned(&self, memory: &Arc<Memory>, range: &Range<usize>) -> Result<Owned> {
        let base = self.space.address(memory);
        rules::range(base.is_some(), memory, range).map_err(|rule| self.broken(rule))?;
        let span = Span { at: base.unwrap_or_default() + range.start as u64, len: range.len() as u64 };
        Ok(Owned { memory: Arc::clone(memory), start: range.start, span })
    }

    /// The sender's copy into the range that the target armed. Reports the rest of the program's mistakes.
    fn copy_out(&self, lane: Lane, to: usize, i: u64, from: *const u8, len: u64, armed: Span) -> Result<()> {
        if len > armed.len {
            return Err(self.too_long(self.rank, to, lane, i, len, armed.len));
        }
        if len <= FEW as u64 {
            // SAFETY: `len` bytes of this rank's that are being put.
            let bytes = unsafe { std::slice::from_raw_parts(from, len as usize) };
            self.stream(self.rank, to, lane).carry(i, bytes);
            self.area.rank(to).bell.ring();
            return Ok(());
        }
        let Some(target) = self.space.reach(to, Span { at: armed.at, len }) else {
            return Err(self.foreign(to, lane, i));
        };
        // SAFETY: `target` is `len` bytes that rank `to` armed for this put and nobody touches until it is
        // filled; `from` is as many of this rank's, which do not overlap another rank's memory.
        unsafe { std::ptr::copy_nonoverlapping(from, target, len as usize) };
        self.stream(self.rank, to, lane).fill(i, len);
        self.area.rank(to).bell.ring();
        Ok(())
    }

    /// The target's copy of a range that the source offered.
    fn copy_in(
        &self,
        lane: Lane,
        from: usize,
        i: u64,
        into: *mut u8,
        room: u64,
        offered: Span,
    ) -> Result<()> {
        if offered.len > room {
            return Err(self.too_long(from, self.rank, lane, i, offered.len, room));
        }
        let Some(source) = self.space.reach(from, offered) else {
            return Err(self.foreign(from, lane, i));
        };
        // SAFETY: `source` is a range that rank `from` offered and does not change until it is taken;
        // `into` has room for it, is this rank's and is being armed, so nobody else touches it.
        unsafe { std::ptr::copy_nonoverlapping(source.cast_const(), into, offered.len as usize) };
        self.stream(from, self.rank, lane).fill(i, offered.len);
        self.area.rank(from).bell.ring();
        Ok(())
    }

    fn too_long(&self, from: usize, to: usize, lane: Lane, i: u64, len: u64, room: u64) -> Error {
        self.broken(format!(
            "put {i} of rank {from} to rank {to} on the {lane} lane has {len} bytes, but {room} were armed for it"
        ))
    }

    fn foreign(&self, rank: usize, lane: Lane, i: u64) -> Error {
        self.end(Error::Corrupt {
            what: format!("an address outside of its memory, for put {i} on the {lane} lane,"),
            rank,
            host: self.host(rank),
            link: self.space.name().into(),
            by: self.rank,
        })
    }

    fn overwritten(&self, rank: usize, lane: Lane, i: u64) -> Error {
        self.end(Error::Corrupt {
            what: format!("an impossible state of put {i} on the {lane} lane"),
            rank,
            host: self.host(rank),
            link: self.space.name().into(),
            by: self.rank,
        })
    }

    /// Brings put `i` to the ring. `false`: the ring is full.
    fn send(&self, out: &mut Outgoing, lane: Lane, to: usize, i: u64, owned: &Owned) -> Result<bool> {
        let stream = self.stream(self.rank, to, lane);
        match stream.put(i, owned.span) {
            Meeting::Second(armed) => {
                self.copy_out(lane, to, i, owned.as_ptr(), owned.span.len, armed)?;
            }
            // The target has not armed, so it does not wait for this put: nothing to ring for.
            Meeting::First => {
                out.forget_taken(stream);
                out.offered.push_back((i, Arc::clone(&owned.memory)));
            }
            Meeting::Full => return Ok(false),
            Meeting::Broken => return Err(self.overwritten(to, lane, i)),
        }
        Ok(true)
    }

    /// Brings arm `i`, which the ring has room for, to the ring.
    fn publish(&self, lane: Lane, from: usize, i: u64, owned: &Owned) -> Result<()> {
        match self.stream(from, self.rank, lane).arm(i, owned.span) {
            Meeting::First => Ok(()),
            Meeting::Second(offered) => self.copy_in(lane, from, i, owned.as_ptr(), owned.span.len, offered),
            Meeting::Full | Meeting::Broken => Err(self.overwritten(from, lane, i)),
        }
    }

    fn move_spilled(&self) -> Result<()> {
        if !self.has_queued() {
            return Ok(());
        }
        let mut streams = self.under_way.lock();
        for (to, peer) in streams.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            for (lane, out) in (0..).map(Lane).zip(&mut peer.outgoing) {
                while let Some(owned) = out.spilled.pop_front() {
                    let i = out.next - out.spilled.len() as u64 - 1;
                    if !self.send(out, lane, to, i, &owned)? {
                        out.spilled.push_front(owned);
                        break;
                    }
                    self.under_way.spilled.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Waits until `ready`, moving queued puts meanwhile. `peer` is who can make it so.
    fn block(
        &self,
        wanted: Wanted,
        (peer, lane, i): (usize, Lane, u64),
        owes: &mut dyn FnMut() -> bool,
        ready: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        if ready() {
            return Ok(());
        }
        let wait = &self.area.rank(self.rank).wait;
        wait.begin(wanted, peer, lane, i);
        let result = self.sleep_until((peer, lane, i), owes, ready);
        wait.end();
        result
    }

    fn sleep_until(
        &self,
        (peer, lane, i): (usize, Lane, u64),
        owes: &mut dyn FnMut() -> bool,
        ready: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let bell = &self.area.rank(self.rank).bell;
        let mut pace = Pace::new(self.crowded);
        let mut suspicion = None;
        loop {
            if ready() {
                return Ok(());
            }
            self.poll()?;
            let nap = if self.has_queued() { Duration::from_micros(200) } else { Duration::from_secs(1) };
            if !pace.step(bell, nap, &mut || ready() || self.has_failed()) {
                continue;
            }
            let alive = self.area.rank(peer).life() == Life::Running;
            if !alive && !ready() && owes() {
                // A rank that fails says so before it leaves.
                self.control.as_ref().map_or_else(|| self.check(), Control::settle)?;
                return Err(self.end(self.lost(peer, Loss::Gone, pace.waited(), Some((i, lane)))));
            }
            if alive
                && let Some(silence) = self.space.silent_for(peer)
                && silence > self.bounds.silence
                && !ready()
            {
                return Err(self.end(self.lost(peer, Loss::Silent, silence, Some((i, lane)))));
            }
            // One that shows no sign of life is not waiting, but stopped.
            let silent = |rank| self.space.silent_for(rank).is_some_and(|s| s > Duration::from_millis(500));
            let suspicion = suspicion.get_or_insert_with(Suspicion::new);
            if let Some(circle) = suspicion.look(&self.area, self.rank, silent) {
                return Err(self.broken(circle));
            }
            if pace.waited() > self.bounds.patience {
                return Err(self.end(self.lost(peer, Loss::Slow, pace.waited(), Some((i, lane)))));
            }
        }
    }

    /// Checks that `arm` is the one that may be waited for.
    fn check_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<()> {
        self.check_peer(from, lane)?;
        let mut streams = self.under_way.lock();
        let incoming = streams.incoming(from, lane);
        let (waited, next) = (incoming.waited, incoming.next);
        drop(streams);
        rules::wait(self.rank, (lane, from, arm), waited, next).map_err(|rule| self.broken(rule))
    }

    /// Takes note of put `i`, which is filled, and lets the next queued arm have its slot.
    fn take(&self, lane: Lane, from: usize, i: u64, len: u64) -> Result<usize> {
        let mut streams = self.under_way.lock();
        let incoming = streams.incoming(from, lane);
        let armed = incoming.armed.pop_front().filter(|owned| owned.span.len >= len);
        incoming.waited = i + 1;
        let Some(armed) = armed else {
            drop(streams);
            return Err(self.overwritten(from, lane, i));
        };
        let stream = self.stream(from, self.rank, lane);
        if let Some(bytes) = stream.carried(i) {
            let len = (len as usize).min(FEW);
            // SAFETY: the range that was armed, which has room for `len` bytes and is this rank's alone now.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), armed.as_ptr(), len) };
        }
        stream.release(i);
        if let Some(queued) = incoming.armed.get(SLOTS as usize - 1) {
            self.publish(lane, from, i + SLOTS, queued)?;
        }
        Ok(len as usize)
    }

    /// Whether a put waits for a free slot still.
    fn is_spilled(&self, ticket: Ticket) -> Result<bool> {
        self.check_peer(ticket.to, ticket.lane)?;
        self.move_spilled()?;
        let mut streams = self.under_way.lock();
        let out = streams.outgoing(ticket.to, ticket.lane);
        let stream = self.stream(self.rank, ticket.to, ticket.lane);
        out.forget_taken(stream);
        let (next, spilled) = (out.next, out.spilled.len() as u64);
        drop(streams);
        rules::ticket(ticket, ticket.seq < next).map_err(|rule| self.broken(rule))?;
        Ok(ticket.seq >= next - spilled)
    }
}

impl<S: Space> Fabric for Endpoint<S> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.area.ranks()
    }

    fn name(&self) -> &'static str {
        self.space.name()
    }

    fn host(&self, _: usize) -> String {
        self.host.clone()
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        self.space.alloc(bytes)
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        self.check_peer(from, lane)?;
        let owned = self.owned(memory, &range)?;
        let mut streams = self.under_way.lock();
        let incoming = streams.incoming(from, lane);
        let i = incoming.next;
        incoming.next += 1;
        if i < incoming.waited + SLOTS {
            self.publish(lane, from, i, &owned)?;
        }
        incoming.armed.push_back(owned);
        Ok(i)
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        self.check_peer(to, lane)?;
        self.move_spilled()?;
        let mut streams = self.under_way.lock();
        let out = streams.outgoing(to, lane);
        let seq = out.next;
        self.stream(self.rank, to, lane).expect(seq);
        let owned = self.owned(memory, &range)?;
        if !out.spilled.is_empty() || !self.send(out, lane, to, seq, &owned)? {
            out.spilled.push_back(owned);
            self.under_way.spilled.fetch_add(1, Ordering::Relaxed);
        }
        out.next += 1;
        Ok(Ticket { to, lane, seq })
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        self.check_wait(lane, from, arm)?;
        self.move_spilled()?;
        match self.stream(from, self.rank, lane).filled(arm) {
            Some(len) => self.take(lane, from, arm, len).map(Some),
            None => Ok(None),
        }
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        self.check_wait(lane, from, arm)?;
        let stream = self.stream(from, self.rank, lane);
        let (mut owes, mut ready) = (|| !stream.has_put(arm), || stream.filled(arm).is_some());
        self.block(Wanted::Put, (from, lane, arm), &mut owes, &mut ready)?;
        self.take(lane, from, arm, stream.filled(arm).unwrap_or_default())
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        let spilled = self.is_spilled(ticket)?;
        Ok(!spilled && self.stream(self.rank, ticket.to, ticket.lane).is_taken(ticket.seq))
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        let Ticket { to, lane, seq } = ticket;
        if self.is_done(ticket)? {
            return Ok(());
        }
        let stream = self.stream(self.rank, to, lane);
        // While it is spilled the slot is in an earlier round, which `is_taken` would take for the past.
        let mut done = || {
            let mut streams = self.under_way.lock();
            let out = streams.outgoing(to, lane);
            seq < out.next - out.spilled.len() as u64 && stream.is_taken(seq)
        };
        self.block(Wanted::Room, (to, lane, seq), &mut || true, &mut done)
    }

    fn poll(&self) -> Result<()> {
        self.check()?;
        self.move_spilled()
    }

    fn set_activity(&self, what: &str) {
        self.area.rank(self.rank).set_activity(what);
    }

    fn abort(&self, reason: &str) {
        if let Some(control) = &self.control {
            return control.fabric.abort(reason);
        }
        self.area.fail(&Failure::Aborted { by: self.rank, reason: reason.into(), code: 4 });
    }

    fn fail(&self, error: &Error) {
        if let Some(control) = &self.control {
            return control.fabric.fail(error);
        }
        self.area.fail(&Failure::by(self.rank, error));
    }
}

impl<S: Space> Drop for Endpoint<S> {
    /// The rank leaves, when what it has put is on its way. One that panics ends the job.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(&Error::Internal(format!("rank {} panicked", self.rank)));
        }
        // What goes wrong here is recorded for the job; nobody is left to tell on this side.
        let _ = self.leave();
    }
}
