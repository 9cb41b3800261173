//! The threads of one rank, working on one thing at a time.
//!
//! Kernels are written SPMD: every member runs the same closure, takes its share by its index or from
//! a shared counter, and meets the others at barriers. The rank's own thread is member 0.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::affinity::pin;

/// A fixed number of threads: the caller and `len() - 1` workers.
///
/// The workers live as long as the team. `run` costs some microseconds: meant for work of a
/// millisecond or more.
pub struct Team {
    workers: Option<rayon::ThreadPool>,
    len: usize,
}

/// One thread's place in a running [`Team`].
#[derive(Clone, Copy)]
pub struct Member<'a> {
    index: usize,
    len: usize,
    barrier: &'a Barrier,
}

impl Team {
    /// The caller alone.
    pub fn solo() -> Self {
        Team { workers: None, len: 1 }
    }

    /// The caller and `len - 1` workers (`len` 0 is taken as 1).
    ///
    /// # Errors
    /// When the system refuses a thread: its own words.
    pub fn new(len: usize) -> Result<Self, String> {
        let len = len.max(1);
        if len == 1 {
            return Ok(Team::solo());
        }
        let workers = rayon::ThreadPoolBuilder::new()
            .num_threads(len - 1)
            .thread_name(|i| format!("fulmen-worker-{}", i + 1))
            .build()
            .map_err(|e| format!("cannot start {} worker threads: {e}", len - 1))?;
        Ok(Team { workers: Some(workers), len })
    }

    /// As many threads as there are `cores`, each kept on its own: the caller, which stays there for good, on
    /// the first. Where there is one thread a core this is faster and steadier: a scheduler that leaves two
    /// of them on one core halves the speed of all.
    ///
    /// # Errors
    /// As [`Team::new`].
    pub fn bound(cores: &[usize]) -> Result<Self, String> {
        let team = Team::new(cores.len())?;
        team.run(|me| {
            if let Some(&core) = cores.get(me.index()) {
                pin(core);
            }
        });
        Ok(team)
    }

    /// Number of threads, the caller included.
    #[allow(clippy::len_without_is_empty, reason = "a team is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Runs `work` once on every member and returns when all have returned.
    ///
    /// # Panics
    /// When a member panics; members that wait at a barrier for it are released by a panic of their own.
    pub fn run(&self, work: impl Fn(Member<'_>) + Sync) {
        let barrier = Barrier::new(self.len);
        let member = |index| {
            let _poison = PoisonOnUnwind(&barrier);
            work(Member { index, len: self.len, barrier: &barrier });
        };
        match &self.workers {
            None => member(0),
            Some(pool) => pool.in_place_scope(|scope| {
                scope.spawn_broadcast(|_, ctx| member(ctx.index() + 1));
                member(0);
            }),
        }
    }
}

/// The first few members of a running team, with a barrier of their own: they can work on one thing (a
/// panel) while the others do another (the trailing update).
pub struct SubTeam {
    len: usize,
    barrier: Barrier,
}

impl SubTeam {
    /// Members `0..len` of a team.
    pub fn first(len: usize) -> Self {
        SubTeam { len, barrier: Barrier::new(len) }
    }

    /// Runs `work` if `me` belongs to it; returns whether it did. Does not wait for the others.
    ///
    /// # Panics
    /// When `work` does; the others of the part, and of the team, are released.
    pub fn run(&self, me: Member<'_>, work: impl FnOnce(Member<'_>)) -> bool {
        if me.index >= self.len {
            return false;
        }
        let _poison = PoisonOnUnwind(&self.barrier);
        let _poison_team = PoisonOnUnwind(me.barrier);
        work(Member { index: me.index, len: self.len, barrier: &self.barrier });
        true
    }
}

/// Waiting for something that another thread will do: spins, then yields the core.
#[derive(Default)]
pub struct Patience(u32);

impl Patience {
    /// A short pause, longer with every call.
    pub fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < 20_000 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

impl<'a> Member<'a> {
    /// This thread's index, 0 for the rank's own thread.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of members.
    #[allow(clippy::len_without_is_empty, reason = "a team is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Waits until every member has come here; what each wrote before is then visible to all.
    pub fn barrier(&self) {
        self.barrier.wait();
    }

    /// As [`Member::barrier`], but when all have come, member 0 runs `work` before any goes on.
    pub fn led(&self, work: impl FnOnce()) {
        self.barrier.wait_led(self.index == 0, work);
    }

    /// Spins, then yields, until `condition` holds: for waiting on a flag that another member will set.
    ///
    /// # Panics
    /// When another member has panicked, and the flag might never come.
    pub fn wait_until(&self, condition: impl Fn() -> bool) {
        let mut patience = Patience::default();
        while !condition() {
            assert!(!self.barrier.poisoned.load(Ordering::Relaxed), "another thread of this team panicked");
            patience.pause();
        }
    }

    /// This member's share `[start, end)` of `n` things, cut at multiples of `unit`.
    pub fn share(&self, n: usize, unit: usize) -> std::ops::Range<usize> {
        let units = n.div_ceil(unit.max(1));
        let cut = |i: usize| (units * i / self.len * unit).min(n);
        cut(self.index)..cut(self.index + 1)
    }
}

/// Centralised sense-reversing barrier (Mellor-Crummey and Scott 1991, algorithm 7), spinning briefly
/// and then yielding, so that more threads than cores still make progress.
struct Barrier {
    len: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    poisoned: AtomicBool,
}

impl Barrier {
    fn new(len: usize) -> Self {
        Barrier {
            len,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            poisoned: AtomicBool::new(false),
        }
    }

    fn wait(&self) {
        if self.len == 1 {
            return;
        }
        let generation = self.generation.load(Ordering::Relaxed);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.len {
            self.release(generation);
        } else {
            self.wait_while(|| self.generation.load(Ordering::Acquire) == generation);
        }
    }

    fn wait_led(&self, leader: bool, work: impl FnOnce()) {
        let generation = self.generation.load(Ordering::Relaxed);
        if leader {
            self.wait_while(|| self.arrived.load(Ordering::Acquire) + 1 < self.len);
            work();
            self.release(generation);
        } else {
            self.arrived.fetch_add(1, Ordering::AcqRel);
            self.wait_while(|| self.generation.load(Ordering::Acquire) == generation);
        }
    }

    fn release(&self, generation: usize) {
        self.arrived.store(0, Ordering::Relaxed);
        self.generation.store(generation.wrapping_add(1), Ordering::Release);
    }

    fn wait_while(&self, condition: impl Fn() -> bool) {
        let mut patience = Patience::default();
        while condition() {
            assert!(!self.poisoned.load(Ordering::Relaxed), "another thread of this team panicked");
            patience.pause();
        }
    }
}

struct PoisonOnUnwind<'a>(&'a Barrier);

impl Drop for PoisonOnUnwind<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.poisoned.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_runs_once_and_barriers_order_their_writes() {
        for len in [1, 2, 3, 5] {
            let team = Team::new(len).unwrap();
            for _ in 0..20 {
                let slots: Vec<_> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                team.run(|me| {
                    for round in 1..=50 {
                        slots[me.index()].store(round, Ordering::Relaxed);
                        me.barrier();
                        assert!(slots.iter().all(|s| s.load(Ordering::Relaxed) == round));
                        me.barrier();
                    }
                });
                assert!(slots.iter().all(|s| s.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn shares_cover_everything_once_at_unit_cuts() {
        let barrier = Barrier::new(1);
        for (len, n, unit) in [(1, 10, 4), (3, 100, 24), (4, 7, 8), (5, 0, 8), (2, 17, 1)] {
            let mut next = 0;
            for index in 0..len {
                let r = Member { index, len, barrier: &barrier }.share(n, unit);
                assert_eq!(r.start, next);
                assert!(r.start.is_multiple_of(unit) || r.start == n);
                next = r.end;
            }
            assert_eq!(next, n);
        }
    }

    #[test]
    fn the_leader_works_while_the_others_wait() {
        for len in [1, 2, 3] {
            let team = Team::new(len).unwrap();
            let (arrived, led) = (AtomicUsize::new(0), AtomicUsize::new(0));
            team.run(|me| {
                for round in 1..=200 {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    me.led(|| {
                        assert_eq!(arrived.load(Ordering::Relaxed), round * len);
                        led.store(round, Ordering::Relaxed);
                    });
                    assert_eq!(led.load(Ordering::Relaxed), round);
                    me.barrier();
                }
            });
        }
    }

    #[test]
    fn a_part_of_a_team_meets_among_itself() {
        let team = Team::new(3).unwrap();
        let part = SubTeam::first(2);
        let seen = AtomicUsize::new(0);
        team.run(|me| {
            let in_part = part.run(me, |me| {
                seen.fetch_add(1, Ordering::Relaxed);
                me.barrier();
                assert_eq!((me.len(), seen.load(Ordering::Relaxed)), (2, 2));
            });
            assert_eq!(in_part, me.index() < 2);
            me.wait_until(|| seen.load(Ordering::Relaxed) == 2);
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_releases_the_waiting() {
        let team = Team::new(2).unwrap();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            team.run(|me| {
                assert!(me.index() != 1, "member 1 fails");
                me.barrier();
            });
        }));
        assert!(caught.is_err());
        team.run(|me| me.barrier()); // and the team still works
    }
}
