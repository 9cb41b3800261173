//! What came out of a run, and the three ways to tell it: `HPL.out`, JSON, and a few lines for people.
//!
//! The driver fills one [`Outcome`] a run; everything is printed from it.

pub mod bundle;
pub mod calibration;
pub mod file;
pub mod human;
pub mod json;
pub mod links;
pub mod out;

use std::time::SystemTime;

use fulmen::comm::Cables;
use serde::{Deserialize, Serialize};

use crate::params::Run;

/// HPL's relative machine precision: 2⁻⁵³.
pub const EPS: f64 = f64::EPSILON / 2.0;

/// The job that the runs belong to: what the driver found out before the first.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Job {
    /// Ranks.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// The transport: `mem`, `shm`, `verbs`, `tcp`, `mpi`, or `mixed` of some of them.
    pub fabric: String,
    /// Back end and core: `native/avx512`, `blas/OpenBLAS 0.3.30 SapphireRapids`.
    pub kernels: String,
    /// What the start-up self-test of the kernels said: `ok`, or what is wrong.
    pub self_test: String,
    /// Measured dgemm of all ranks and threads together, Gflop/s; `None` if it was not measured.
    pub gemm_gflops: Option<f64>,
    /// More threads than cores: they take turns, and where a thread's time went says little.
    pub crowded: bool,
    /// Where each rank is, if a launcher has started them.
    pub places: Vec<RankPlace>,
    /// How the ranks are joined, if they are already.
    pub cables: Option<Cables>,
    /// What joins them then.
    pub links: Vec<links::RankLink>,
}

/// A rank's place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankPlace {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// Its threads.
    pub threads: usize,
}

/// One run, solved and (unless the threshold forbids it) checked.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// What was solved.
    pub run: Run,
    /// Wall-clock seconds of factorisation and solve, the slowest rank's.
    pub seconds: f64,
    /// When the solve began.
    pub started: SystemTime,
    /// When it ended.
    pub ended: SystemTime,
    /// 0, or the 1-based column of the first exactly zero pivot.
    pub info: usize,
    /// The check; `None` if the run is not to be checked.
    pub check: Option<Check>,
    /// Hash of the bits of x ([`crate::hash`]).
    pub x_hash: u64,
    /// Where each rank's time went, in the order of the ranks.
    pub phases: Vec<Phases>,
}

/// The norms of the check, as HPL defines them.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Check {
    /// ‖Ax − b‖∞.
    pub ax_b_inf: f64,
    /// ‖A‖∞.
    pub a_inf: f64,
    /// ‖A‖₁.
    pub a_one: f64,
    /// ‖x‖∞.
    pub x_inf: f64,
    /// ‖x‖₁.
    pub x_one: f64,
    /// ‖b‖∞.
    pub b_inf: f64,
}

/// Seconds of one rank within a run's `seconds`; what is not listed is idle.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Phases {
    /// The rank.
    pub rank: usize,
    /// Its process row.
    pub row: usize,
    /// Its process column.
    pub col: usize,
    /// Factoring panels, pivot exchange within them included.
    pub panel: f64,
    /// Waiting for a panel of another process column.
    pub bcast_wait: f64,
    /// Exchanging and moving rows.
    pub row_exchange: f64,
    /// Triangular solve and GEMM of the trailing matrix.
    pub update: f64,
    /// The final triangular solves.
    pub solve: f64,
}

impl Phases {
    /// What is left of `seconds`.
    pub fn idle(&self, seconds: f64) -> f64 {
        (seconds - self.panel - self.bcast_wait - self.row_exchange - self.update - self.solve).max(0.0)
    }
}

impl Check {
    /// HPL's scaled residual ‖Ax−b‖∞ / (ε (‖A‖∞ ‖x‖∞ + ‖b‖∞) N); 0 for N = 0.
    pub fn residual(&self, n: usize) -> f64 {
        if n == 0 {
            return 0.0;
        }
        self.ax_b_inf / (EPS * (self.a_inf * self.x_inf + self.b_inf) * n as f64)
    }
}

/// The verdict on one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The residual is below the threshold.
    Passed,
    /// It is not, or it is no number.
    Failed,
    /// Nobody looked: the threshold is 0 or below.
    Unchecked,
}

impl Outcome {
    /// HPL's rate: (2/3 N³ + 3/2 N²) / seconds; 0 when no time passed.
    pub fn gflops(&self) -> f64 {
        if self.seconds > 0.0 { self.run.flops() / self.seconds / 1e9 } else { 0.0 }
    }

    /// The scaled residual, if it was checked.
    pub fn residual(&self) -> Option<f64> {
        self.check.map(|c| c.residual(self.run.n))
    }

    /// Passed only if the residual is below the threshold: a NaN is not.
    pub fn verdict(&self) -> Verdict {
        match self.residual() {
            None => Verdict::Unchecked,
            Some(_) if !self.run.checked() => Verdict::Unchecked,
            Some(residual) if residual < self.run.threshold => Verdict::Passed,
            Some(_) => Verdict::Failed,
        }
    }
}

/// How many runs ended how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Checked and passed.
    pub passed: usize,
    /// Checked and failed.
    pub failed: usize,
    /// Not checked.
    pub unchecked: usize,
}

impl Tally {
    /// Counts one more.
    pub fn count(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed => self.failed += 1,
            Verdict::Unchecked => self.unchecked += 1,
        }
    }

    /// All that were run.
    pub fn total(&self) -> usize {
        self.passed + self.failed + self.unchecked
    }
}

/// C's `%{width}.{digits}e`, which Rust has not: two digits of exponent at least, and `nan`, `inf`.
pub fn c_exponent(value: f64, width: usize, digits: usize) -> String {
    let text = if value.is_finite() {
        let text = format!("{value:.digits$e}");
        let (mantissa, exponent) = text.split_once('e').expect("Rust writes an exponent");
        let exponent: i32 = exponent.parse().expect("Rust writes a number");
        format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    } else {
        c_special(value)
    };
    format!("{text:>width$}")
}

/// C's `%{width}.{digits}f`.
pub fn c_fixed(value: f64, width: usize, digits: usize) -> String {
    if value.is_finite() {
        format!("{value:width$.digits$}")
    } else {
        format!("{:>width$}", c_special(value))
    }
}

fn c_special(value: f64) -> String {
    let sign = if value.is_sign_negative() { "-" } else { "" };
    format!("{sign}{}", if value.is_nan() { "nan" } else { "inf" })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::params::Input;
    use std::time::{Duration, UNIX_EPOCH};

    /// An outcome whose scaled residual is `residual`.
    pub(crate) fn outcome(run: Run, seconds: f64, residual: f64) -> Outcome {
        let (a_inf, x_inf, b_inf) = (100.0, 2.0, 0.5);
        let check = Check {
            ax_b_inf: residual * EPS * (a_inf * x_inf + b_inf) * run.n as f64,
            a_inf,
            a_one: 99.0,
            x_inf,
            x_one: 50.0,
            b_inf,
        };
        let started = UNIX_EPOCH + Duration::from_secs(1_796_022_000);
        Outcome {
            run,
            seconds,
            started,
            ended: started + Duration::from_secs_f64(seconds),
            info: 0,
            check: run.checked().then_some(check),
            x_hash: 0x7f3a_90c2_e51b_0001,
            phases: (0..run.ranks())
                .map(|rank| Phases {
                    rank,
                    row: rank / run.q,
                    col: rank % run.q,
                    panel: 0.03 * seconds,
                    bcast_wait: 0.012 * seconds,
                    row_exchange: 0.019 * seconds,
                    update: 0.931 * seconds,
                    solve: 0.008 * seconds,
                })
                .collect(),
        }
    }

    pub(crate) fn run() -> Run {
        Input { ns: vec![1000], ..Input::default() }.run(0)
    }

    #[test]
    fn c_formats() {
        for (value, text) in [
            (134.8, "  1.3480e+02"),
            (4.6178e-6, "  4.6178e-06"),
            (0.0, "  0.0000e+00"),
            (1.5e-123, " 1.5000e-123"),
            (f64::NAN, "         nan"),
            (f64::NEG_INFINITY, "        -inf"),
        ] {
            assert_eq!(c_exponent(value, 12, 4), text);
        }
        assert_eq!(c_fixed(39.584, 10, 2), "     39.58");
        assert_eq!(c_fixed(f64::INFINITY, 6, 2), "   inf");
    }

    #[test]
    fn verdicts() {
        let verdict = |residual, threshold| outcome(Run { threshold, ..run() }, 1.0, residual).verdict();
        assert_eq!(verdict(1.6e-3, 16.0), Verdict::Passed);
        assert_eq!(verdict(17.0, 16.0), Verdict::Failed);
        assert_eq!(verdict(f64::NAN, 16.0), Verdict::Failed);
        assert_eq!(verdict(f64::INFINITY, 16.0), Verdict::Failed);
        // K2-02.
        assert_eq!(verdict(1e-3, 0.0), Verdict::Unchecked);
        assert_eq!(verdict(1e-3, -16.0), Verdict::Unchecked);
        let mut strict = outcome(Run { threshold: 0.0, ..run() }, 1.0, 1e-3);
        strict.check = Some(Check::default());
        assert_eq!(strict.verdict(), Verdict::Unchecked);
    }

    /// K2-07: N = 0 passes at 0 Gflop/s; nothing is divided by zero.
    #[test]
    fn the_empty_system_passes() {
        let empty = outcome(Run { n: 0, ..run() }, 0.0, 0.0);
        assert_eq!((empty.verdict(), empty.gflops(), empty.residual()), (Verdict::Passed, 0.0, Some(0.0)));
    }
}
