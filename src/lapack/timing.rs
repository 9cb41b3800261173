//! Where the time of a factorisation goes.

use std::time::{Duration, Instant};

/// What a thread is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Factoring and packing a panel, the pivot search with other ranks included.
    Panel,
    /// Putting, forwarding and waiting for panels.
    BcastWait,
    /// Exchanging rows, assembling U and solving with L11.
    RowExchange,
    /// A22 := A22 − L21·U.
    Update,
    /// Nothing: waiting for another thread of the same rank.
    Idle,
}

impl Phase {
    /// All of them, in the order of [`PhaseTimes`].
    pub const ALL: [Phase; 5] =
        [Phase::Panel, Phase::BcastWait, Phase::RowExchange, Phase::Update, Phase::Idle];
}

/// Seconds spent in each phase, averaged over the threads of a rank, so that they add up to its wall time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PhaseTimes {
    seconds: [f64; Phase::ALL.len()],
}

impl PhaseTimes {
    /// Seconds in one phase.
    pub fn get(&self, phase: Phase) -> f64 {
        self.seconds[phase as usize]
    }

    /// Seconds in all of them.
    pub fn total(&self) -> f64 {
        self.seconds.iter().sum()
    }

    /// Adds what one thread of `threads` measured.
    pub(crate) fn add(&mut self, clock: &Clock, threads: usize) {
        for (sum, time) in self.seconds.iter_mut().zip(clock.spent) {
            *sum += time.as_secs_f64() / threads as f64;
        }
    }
}

/// One thread's stopwatch.
#[derive(Default)]
pub(crate) struct Clock {
    spent: [Duration; Phase::ALL.len()],
}

impl Clock {
    /// Runs `work` and books its time.
    pub(crate) fn time<R>(&mut self, phase: Phase, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.spent[phase as usize] += start.elapsed();
        result
    }
}
