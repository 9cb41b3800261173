//! A back end proves itself before it is believed: results against [`Reference`] where libraries have been
//! seen to fail (ml-explore/mlx#3563, flame/blis#930, plasma#50), and the speed of its dgemm, measured.
//!
//! It takes well under a second, so nothing is remembered between runs.

mod held;
mod routines;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::{Element, KernelSet, Op, Team, c32, c64};
use held::Held;
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

/// Tests the kernels with teams up to this one, then measures dgemm for about half a second.
pub fn self_test(set: &KernelSet, team: &Team) -> SelfTest {
    let start = Instant::now();
    let failures = check(set, team);
    let measured = catch_unwind(AssertUnwindSafe(|| calibrate(set, team, Duration::from_millis(500))));
    SelfTest { passed: failures.is_empty(), failures, gflops: measured.unwrap_or(0.0), took: start.elapsed() }
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

/// Gflop/s of C := C - A·B with A m × 256 and B 256 × m: the median of what fits into `budget`.
///
/// m is as large as that allows, and at most 4096.
fn calibrate(set: &KernelSet, team: &Team, budget: Duration) -> f64 {
    const K: usize = 256;
    const LARGEST: usize = 4096;
    let kernels = set.of::<f64>();
    let start = Instant::now();
    let measure = |m: usize, time: Duration| {
        let mut random = held::Random::new(1);
        let (a, b) = (Held::random(&mut random, m, K), Held::random(&mut random, K, m));
        let mut c = Held::random(&mut random, m, m);
        let mut rates = Vec::new();
        let until = Instant::now() + time;
        // The first one also finds the pages, the caches and the threads: it does not count.
        while rates.len() < 4 || Instant::now() < until {
            let start = Instant::now();
            kernels.gemm(team, -1.0, (Op::NoTrans, a.view()), (Op::NoTrans, b.view()), 1.0, c.view_mut());
            rates.push((2 * m * m * K) as f64 / start.elapsed().as_secs_f64().max(1e-9) / 1e9);
        }
        rates.remove(0);
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let rough = measure(128, Duration::ZERO);
    // About ten of them in the time; a multiple of 64 as local matrices mostly are.
    let flops = rough * 1e9 * budget.as_secs_f64() / 10.0;
    let m = ((flops / (2 * K) as f64).sqrt() as usize / 64 * 64).clamp(128, LARGEST);
    measure(m, budget.saturating_sub(start.elapsed()))
}
