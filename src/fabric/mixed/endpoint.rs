//! One rank's fabric made of several.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Transport;
use crate::error::{Error, Result};
use crate::fabric::alarm::Alarm;
use crate::fabric::shm::meeting::Shm;
use crate::fabric::verbs::Verbs;
use crate::fabric::{Bounds, Doing, Fabric, Lane, Memory, Ticket, tcp};

/// Between two looks while another transport has queued puts.
const LOOK: Duration = Duration::from_micros(100);

/// See [`super`]. Fields are dropped in this order: the control fabric is the last to leave.
pub struct Mixed {
    shm: Option<Shm>,
    verbs: Option<Verbs>,
    tcp: Arc<tcp::Endpoint>,
    /// By peer.
    over: Vec<Transport>,
    /// Whether TCP carries data.
    has_tcp: bool,
    /// Rings when the job has failed.
    alarm: Arc<Alarm>,
    bounds: Bounds,
    name: &'static str,
}

impl Mixed {
    /// The fabric of these; one of them alone, where it is.
    pub fn build(
        tcp: Arc<tcp::Endpoint>,
        shm: Option<Shm>,
        verbs: Option<Verbs>,
        over: Vec<Transport>,
        bounds: Bounds,
    ) -> Arc<dyn Fabric> {
        let peers = || over.iter().enumerate().filter(|(peer, _)| *peer != tcp.rank()).map(|(_, over)| *over);
        let is_used = |transport| peers().any(|over| over == transport);
        if peers().all(|over| over == Transport::Tcp) {
            return tcp; // the others leave here
        }
        let first = peers().next().unwrap_or(Transport::Tcp);
        let name = if peers().all(|over| over == first) { first.name() } else { "mixed" };
        let shm = shm.filter(|_| is_used(Transport::Shm));
        let verbs = verbs.filter(|_| is_used(Transport::Verbs));
        let (has_tcp, alarm) = (is_used(Transport::Tcp), tcp.alarm());
        Arc::new(Mixed { shm, verbs, tcp, over, has_tcp, alarm, bounds, name })
    }

    /// What joins this rank to `peer`. TCP answers for ranks that there are not.
    fn over(&self, peer: usize) -> &dyn Fabric {
        match (self.over.get(peer), &self.shm, &self.verbs) {
            (Some(Transport::Shm), Some(shm), _) => shm,
            (Some(Transport::Verbs), _, Some(verbs)) => verbs,
            _ => &*self.tcp,
        }
    }

    /// Whether the job has failed: then nothing more is put, whatever the transport has heard. Costs a load.
    fn check(&self) -> Result<()> {
        if self.alarm.has_rung() { self.tcp.poll() } else { Ok(()) }
    }

    /// Looks whether `ready` while puts are queued in shared memory, which only this rank's calls move; a wait on another
    /// transport would leave them. `None`: none are queued any more.
    fn unless_queued<T>(&self, peer: usize, ready: impl Fn() -> Result<Option<T>>) -> Result<Option<T>> {
        let Some(shm) = self.shm.as_ref().filter(|_| self.over.get(peer) != Some(&Transport::Shm)) else {
            return Ok(None);
        };
        let began = Instant::now();
        while shm.has_queued() && began.elapsed() < self.bounds.patience {
            if let Some(value) = ready()? {
                return Ok(Some(value));
            }
            if self.tcp.has_left(peer) {
                break; // the wait itself says so
            }
            shm.poll()?;
            std::thread::sleep(LOOK);
        }
        Ok(None)
    }
}

impl Fabric for Mixed {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn size(&self) -> usize {
        self.tcp.size()
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn host(&self, rank: usize) -> String {
        self.tcp.host(rank)
    }

    fn link(&self, rank: usize) -> String {
        self.over(rank).link(rank)
    }

    fn hops(&self, rank: usize) -> usize {
        self.over(rank).hops(rank)
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        match (&self.verbs, &self.shm) {
            // Of shared memory, where there is some.
            (Some(verbs), _) => verbs.alloc(bytes),
            (None, Some(shm)) => shm.alloc(bytes),
            (None, None) => self.tcp.alloc(bytes),
        }
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        self.check()?;
        self.over(from).arm(lane, from, memory, range)
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        self.check()?;
        self.over(to).put(lane, to, memory, range)
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        self.check()?;
        self.over(from).try_wait(lane, from, arm)
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        self.check()?;
        let over = self.over(from);
        match self.unless_queued(from, || over.try_wait(lane, from, arm))? {
            Some(len) => Ok(len),
            None => over.wait(lane, from, arm),
        }
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        self.check()?;
        self.over(ticket.to).is_done(ticket)
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        self.check()?;
        let over = self.over(ticket.to);
        match self.unless_queued(ticket.to, || Ok(over.is_done(ticket)?.then_some(())))? {
            Some(()) => Ok(()),
            None => over.flush(ticket),
        }
    }

    fn poll(&self) -> Result<()> {
        if let Some(shm) = &self.shm {
            shm.poll()?;
        }
        if let Some(verbs) = &self.verbs {
            verbs.poll()?;
        }
        // Without data its thread does all there is to do.
        if self.alarm.has_rung() || self.has_tcp {
            self.tcp.poll()?;
        }
        Ok(())
    }

    fn set_activity(&self, what: &str) {
        self.tcp.set_activity(what);
        if let Some(shm) = &self.shm {
            shm.set_activity(what);
        }
        if let Some(verbs) = &self.verbs {
            verbs.set_activity(what);
        }
    }

    fn doing(&self) -> Doing {
        self.tcp.doing()
    }

    fn abort(&self, reason: &str) {
        self.tcp.abort(reason);
    }

    fn fail(&self, error: &Error) {
        self.tcp.fail(error);
    }
}
