//! A back end proves itself before it is believed: results against [`crate::Reference`] where libraries have been
//! seen to fail (ml-explore/mlx#3563, flame/blis#930, plasma#50), and the speed of its dgemm, measured.
//!
//! It takes well under a second, so nothing is remembered between runs.

mod held;
mod routines;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use faer::Mat;

use crate::{Element, KernelSet, Op, Team, c32, c64};
use routines::Trial;

/// What [`self_test`] found.
#[derive(Clone, Debug)]
pub struct SelfTest {
    /// Whether every result was right.
    pub passed: bool,
    /// In words, what was not: routine, sizes, element, error. At most one a routine and type.
    pub failures: Vec<String>,
    /// Speed of double-precision gemm with the whole team, in Gflop/s, on the shape HPL lives in: a rank-256
    /// update of a square matrix.
    pub gflops: f64,
    /// Time it took.
    pub took: Duration,
}

/// Tests the kernels with teams up to this one, and measures dgemm before and after: a shared machine has moods,
/// and what it can do shows in its best. About a second. What dgemm is measured on takes at most `room` bytes, if that is
/// enough for the smallest.
pub fn self_test(set: &KernelSet, team: &Team, room: u64) -> SelfTest {
    const BUDGET: Duration = Duration::from_millis(300);
    let start = Instant::now();
    let before = dgemm_gflops(set, team, room, BUDGET);
    let failures = check(set, team);
    let gflops = before.max(dgemm_gflops(set, team, room, BUDGET));
    SelfTest { passed: failures.is_empty(), failures, gflops, took: start.elapsed() }
}

/// Speed of double-precision gemm with the whole team, in Gflop/s, as [`SelfTest::gflops`] means it: the best of
/// what fits into `budget` and `room`, three measurements at least. 0 when it panics.
pub fn dgemm_gflops(set: &KernelSet, team: &Team, room: u64, budget: Duration) -> f64 {
    catch_unwind(AssertUnwindSafe(|| calibrate(set, team, room, budget))).unwrap_or(0.0)
}

/// The failures of all four types.
fn check(set: &KernelSet, team: &Team) -> Vec<String> {
    // One thread, all, and some between: a race or a bad cut need not show with all.
    let between = Team::new(team.len().div_ceil(2)).unwrap_or_else(|_| Team::solo());
    let solo = Team::solo();
    let mut teams = vec![&solo];
    teams.extend((between.len() > 1).then_some(&between));
    teams.extend((team.len() > between.len()).then_some(team));

    let mut failures = Vec::new();
    check_type::<f64>(set, &teams, &mut failures);
    check_type::<f32>(set, &teams, &mut failures);
    check_type::<c64>(set, &teams, &mut failures);
    check_type::<c32>(set, &teams, &mut failures);
    failures
}

fn check_type<T: Element>(set: &KernelSet, teams: &[&Team], failures: &mut Vec<String>) {
    let kernels = &**set.of::<T>();
    for (routine, check) in routines::all::<T>() {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&mut Trial::new(kernels, teams))));
        let outcome = outcome.unwrap_or_else(|_| Err(format!("{}{routine} panicked", T::LETTER)));
        failures.extend(outcome.err());
    }
}

/// Gflop/s of C := C - A·B with A m × 256 and B 256 × m: the best of what fits into `budget`.
///
/// m is 2048 (4096 for more than 8 threads), or as much of it as can be had a few times in the time, and fits. C's
/// columns are as far apart as a local matrix's would be: no power of two, aligned.
fn calibrate(set: &KernelSet, team: &Team, room: u64, budget: Duration) -> f64 {
    const K: usize = 256;
    // C, A and B, and both packed.
    let fits = |m: usize| 8 * (m + 8) * (m + 4 * K + 8) <= usize::try_from(room).unwrap_or(usize::MAX);
    let kernels = set.of::<f64>();
    let largest = if team.len() > 8 { 4096 } else { 2048 };
    let start = Instant::now();
    let mut m = 256;
    loop {
        let matrix = |rows, cols| Mat::from_fn(rows + 8, cols, |i, j| ((i * 5 + j * 3) % 7) as f64 - 3.0);
        let (a, b, mut c) = (matrix(m, K), matrix(K, m), matrix(m, m));
        let (a, b) = (a.as_ref().subrows(0, m), b.as_ref().subrows(0, K));
        let mut once = || {
            let (start, c) = (Instant::now(), c.as_mut().subrows_mut(0, m));
            kernels.gemm(team, -1.0, (Op::NoTrans, a), (Op::NoTrans, b), 1.0, c);
            start.elapsed().max(Duration::from_nanos(1))
        };
        // The first also finds the caches and the threads: it does not count.
        once();
        let time = once();
        // The next size takes four times as long, and is wanted five times at least.
        if m < largest && fits(2 * m) && start.elapsed() + 20 * time < budget {
            m *= 2;
            continue;
        }
        let (mut best, mut count) = (time, 1);
        while count < 3 || start.elapsed() < budget {
            best = best.min(once());
            count += 1;
        }
        return (2 * m * m * K) as f64 / best.as_secs_f64() / 1e9;
    }
}
