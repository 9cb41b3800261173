//! What the program needs of the machine room: kernels measured, ranks started, one system solved.

use fulmen::Error;

use crate::params::Run;
use crate::progress::Progress;
use crate::report::{Job, Outcome};
use crate::settings::Settings;

/// Measures, starts and solves. The program calls in this order: [`Driver::calibrate`] once,
/// [`Driver::start`] once (never for `--check`), [`Driver::solve`] once a run.
pub trait Driver {
    /// What is left to do if this process ends with a job that has failed, because it computes and does not hear of it: told
    /// once, before all else. A driver that hears of every failure in time drops it.
    fn at_failure(&mut self, _end: Box<dyn FnOnce(&Error) + Send>) {}

    /// Whether this is what whoever started the ranks has ended the job with, and tells the user himself.
    fn is_told(&self, _error: &Error) -> bool {
        false
    }

    /// Makes the kernels ready, tests them, and measures dgemm on `ranks` × `threads` of this machine.
    /// `kernels` is the user's words: `native`, `reference`, `blas`, `blas:PATH`.
    ///
    /// # Errors
    /// When they cannot be had ([`Error::Argument`]) or fail their test.
    fn calibrate(&mut self, kernels: &str, ranks: usize, threads: usize) -> Result<Job, Error>;

    /// Measures dgemm again, as [`Driver::calibrate`] did, when no rank is at work; Gflop/s. `None` if it cannot.
    fn measure_again(&mut self) -> Option<f64>;

    /// Starts the ranks.
    ///
    /// # Errors
    /// When they cannot be started.
    fn start(&mut self, settings: &Settings) -> Result<(), Error>;

    /// Generates, factors, solves and (if [`Run::checked`]) checks one system on its grid. Rank 0 tells
    /// `progress`.
    ///
    /// # Errors
    /// When a rank is lost, memory is short, or the job is interrupted.
    fn solve(&mut self, run: &Run, progress: &Progress) -> Result<Outcome, Error>;
}
