//! How far a run is: a bar on a terminal, a line now and then elsewhere. Always on stderr.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::params::flops;
use crate::units;

/// Between two lines where stderr is no terminal.
const EVERY: Duration = Duration::from_secs(10);

/// What is known at one moment of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Moment {
    /// Of all operations, 0 to 1.
    pub fraction: f64,
    /// So far.
    pub gflops: f64,
    /// Seconds left at that rate, if there is one.
    pub left: Option<f64>,
}

impl Moment {
    /// After `done` of `total` operations in `elapsed`.
    pub fn new(done: f64, total: f64, elapsed: Duration) -> Moment {
        let seconds = elapsed.as_secs_f64();
        let fraction = if total > 0.0 { (done / total).clamp(0.0, 1.0) } else { 1.0 };
        let gflops = if seconds > 0.0 { done / seconds / 1e9 } else { 0.0 };
        let left = (gflops > 0.0).then(|| ((total - done).max(0.0)) / (gflops * 1e9));
        Moment { fraction, gflops, left }
    }

    fn text(&self) -> String {
        let left = self.left.map_or(String::new(), |s| format!("   {} left", units::duration(s)));
        format!("{:3.0} %   {}{left}", 100.0 * self.fraction, units::rate(self.gflops))
    }
}

/// Operations done when the first `columns` columns of order `n` are factored and the rest updated.
pub fn done_after(n: usize, columns: usize) -> f64 {
    let rest = n.saturating_sub(columns) as f64;
    (flops(n) - 2.0 / 3.0 * rest * rest * rest).max(0.0)
}

/// Shows the progress of one run. Rank 0 calls [`Progress::columns`] once a panel.
#[derive(Debug)]
pub struct Progress {
    n: usize,
    begun: Instant,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Nothing,
    Bar(ProgressBar),
    Lines(Mutex<Instant>),
}

/// Steps of the bar.
const STEPS: u64 = 1000;

impl Progress {
    /// Begins to show a run of order `n`; the clock starts now. `quiet` shows nothing.
    pub fn begin(n: usize, quiet: bool) -> Progress {
        let begun = Instant::now();
        let shown = if quiet {
            Shown::Nothing
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("[{bar:25}] {msg}") {
                bar.set_style(style.progress_chars("=> "));
            }
            Shown::Bar(bar)
        } else {
            Shown::Lines(Mutex::new(begun))
        };
        Progress { n, begun, shown }
    }

    /// The first `columns` columns are factored and the rest is updated.
    pub fn columns(&self, columns: usize) {
        let moment = || Moment::new(done_after(self.n, columns), flops(self.n), self.begun.elapsed());
        match &self.shown {
            Shown::Nothing => {}
            Shown::Bar(bar) => {
                let moment = moment();
                bar.set_message(moment.text());
                bar.set_position((moment.fraction * STEPS as f64) as u64);
            }
            Shown::Lines(last) => {
                let mut last = last.lock().unwrap_or_else(|e| e.into_inner());
                if last.elapsed() >= EVERY {
                    *last = Instant::now();
                    // A closed stderr must not stop the run.
                    let _ = writeln!(std::io::stderr(), "{}", moment().text());
                }
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        let m = Moment::new(71.0e9, 100.0e9, Duration::from_millis(500));
        assert_eq!(m.text(), " 71 %   142 Gflop/s   0.2 s left");
        assert_eq!(Moment::new(0.0, 1e9, Duration::ZERO).text(), "  0 %   0.00 Gflop/s");
        assert_eq!(Moment::new(0.0, 0.0, Duration::from_secs(1)).fraction, 1.0);
    }

    #[test]
    fn work_grows_to_all_of_it() {
        let n = 1000;
        let done: Vec<f64> = (0..=n).step_by(50).map(|c| done_after(n, c)).collect();
        assert!(done.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(done_after(n, n), flops(n));
        // Half of the columns are seven eighths of the work.
        assert!((done_after(n, n / 2) / flops(n) - 0.875).abs() < 1e-2);
    }

    #[test]
    fn any_thread_may_report() {
        let progress = Progress::begin(1000, true);
        std::thread::scope(|s| {
            s.spawn(|| progress.columns(500));
        });
    }
}
