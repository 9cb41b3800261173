//! How far a run is: a bar on a terminal, a line now and then elsewhere. Always on stderr.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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

/// Shows the progress of one run. Rank 0 calls [`Progress::work`] once a panel.
#[derive(Debug)]
pub struct Progress {
    begun: Mutex<Instant>,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Nothing,
    Bar(ProgressBar),
    Lines(Mutex<Instant>),
}

/// The bar that is on the terminal now, for who ends the program meanwhile.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Takes the bar away, if there is one: the program ends.
pub fn clear() {
    if let Some(bar) = BAR.lock().unwrap_or_else(|e| e.into_inner()).take() {
        bar.finish_and_clear();
    }
}

/// Steps of the bar.
const STEPS: u64 = 1000;

impl Progress {
    /// Begins to show a run; the clock starts now. `quiet` shows nothing.
    pub fn begin(quiet: bool) -> Progress {
        let begun = Instant::now();
        let shown = if quiet {
            Shown::Nothing
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("[{bar:25}] {msg}") {
                bar.set_style(style.progress_chars("=> "));
            }
            *BAR.lock().unwrap_or_else(|e| e.into_inner()) = Some(bar.clone());
            Shown::Bar(bar)
        } else {
            Shown::Lines(Mutex::new(begun))
        };
        Progress { begun: Mutex::new(begun), shown }
    }

    /// `done` of `total` floating-point operations of the run are behind us; with 0 the clock starts anew.
    pub fn work(&self, done: f64, total: f64) {
        let begun = {
            let mut begun = self.begun.lock().unwrap_or_else(|e| e.into_inner());
            if done == 0.0 {
                *begun = Instant::now(); // the matrix is there, the clock of the rate starts
            }
            *begun
        };
        let moment = || Moment::new(done, total, begun.elapsed());
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
        if matches!(self.shown, Shown::Bar(_)) {
            clear();
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
    fn any_thread_may_report() {
        let progress = Progress::begin(true);
        std::thread::scope(|s| {
            s.spawn(|| progress.work(5.0, 10.0));
        });
    }
}
