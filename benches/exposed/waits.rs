//! A fabric that notes how long its rank waits, and for what.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fulmen::fabric::{Fabric, Lane, Memory, Ticket};
use fulmen::{Error, Result};

/// One rank's end, timed.
pub struct Timed {
    fabric: Arc<dyn Fabric>,
    /// In `wait` and `flush`, by lane.
    waits: Mutex<[Duration; Lane::COUNT]>,
}

impl Timed {
    /// Nothing noted yet.
    pub fn new(fabric: Arc<dyn Fabric>) -> Self {
        Timed { fabric, waits: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, [Duration; Lane::COUNT]> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was waited so far does not count.
    pub fn forget(&self) {
        *self.lock() = Default::default();
    }

    /// Seconds waited on a lane.
    pub fn waited(&self, lane: Lane) -> f64 {
        self.lock()[lane.0 as usize].as_secs_f64()
    }

    fn time<R>(&self, lane: Lane, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.lock()[lane.0 as usize] += start.elapsed();
        result
    }
}

impl Fabric for Timed {
    fn rank(&self) -> usize {
        self.fabric.rank()
    }

    fn size(&self) -> usize {
        self.fabric.size()
    }

    fn name(&self) -> &'static str {
        self.fabric.name()
    }

    fn host(&self, rank: usize) -> String {
        self.fabric.host(rank)
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        self.fabric.alloc(bytes)
    }

    fn arm(&self, lane: Lane, from: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<u64> {
        self.fabric.arm(lane, from, memory, range)
    }

    fn put(&self, lane: Lane, to: usize, memory: &Arc<Memory>, range: Range<usize>) -> Result<Ticket> {
        self.fabric.put(lane, to, memory, range)
    }

    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>> {
        self.fabric.try_wait(lane, from, arm)
    }

    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize> {
        self.time(lane, || self.fabric.wait(lane, from, arm))
    }

    fn is_done(&self, ticket: Ticket) -> Result<bool> {
        self.fabric.is_done(ticket)
    }

    fn flush(&self, ticket: Ticket) -> Result<()> {
        self.time(ticket.lane, || self.fabric.flush(ticket))
    }

    fn poll(&self) -> Result<()> {
        self.fabric.poll()
    }

    fn set_activity(&self, what: &str) {
        self.fabric.set_activity(what);
    }

    fn abort(&self, reason: &str) {
        self.fabric.abort(reason);
    }

    fn fail(&self, error: &Error) {
        self.fabric.fail(error);
    }
}
