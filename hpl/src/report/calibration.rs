//! The speed of a run's GEMM against the dgemm that was measured: what it says of the machine and its settings.

use super::{Job, Outcome, human};
use crate::units;

/// Below this share of measured dgemm a run's GEMM deserves a warning (flame/blis#464: 27 % with mis-set threads).
const LEAST: f64 = 0.6;

/// Shorter runs say little about the speed of anything.
const TELLING: f64 = 1.0;

/// Of runs shorter than this, where time went is a matter of chance.
const SHORTEST: f64 = 0.2;

/// No GEMM is so much faster than measured dgemm: what seems so was not measured.
const MOST: f64 = 1.5;

/// The rate of a run's update, nearly all of which is GEMM, as a share of measured dgemm on the ranks of the run; `None`
/// where it cannot be told.
pub fn reached(outcome: &Outcome, job: &Job) -> Option<f64> {
    seeming(outcome, job).filter(|&reached| !job.crowded && reached <= MOST)
}

/// Why it cannot be told of a run that is long enough for it.
pub fn not_told(outcome: &Outcome, job: &Job) -> Option<&'static str> {
    let seeming = seeming(outcome, job)?;
    if job.crowded {
        return Some("threads take turns on the cores, so what each of them took says nothing");
    }
    (seeming > MOST).then_some("too little of the time went into it")
}

fn seeming(outcome: &Outcome, job: &Job) -> Option<f64> {
    let share = human::mean(&outcome.phases).update / outcome.seconds;
    // Panels do N²·NB/2 operations of the 2/3·N³.
    let panels = 0.75 * outcome.run.nb as f64 / outcome.run.n.max(1) as f64;
    (share > 0.0 && panels < 1.0 && outcome.seconds >= SHORTEST).then_some(())?;
    human::fraction(outcome, job).map(|fraction| fraction * (1.0 - panels) / share)
}

/// Whether dgemm should be measured once more: the run was faster than it ought to be able to, or much slower.
pub fn doubtful(outcome: &Outcome, job: &Job) -> bool {
    human::fraction(outcome, job).is_some_and(|f| f > 1.0) || slow(outcome, job).is_some()
}

fn slow(outcome: &Outcome, job: &Job) -> Option<f64> {
    reached(outcome, job).filter(|&reached| reached < LEAST && outcome.seconds >= TELLING)
}

/// A warning, if the run's GEMM was too slow: `now` is dgemm measured again.
pub fn warning(outcome: &Outcome, job: &Job, now: Option<f64>) -> Option<String> {
    let reached = slow(outcome, job)?;
    let then = job.gemm_gflops?;
    let mut text = format!("GEMM reached {:.0} % of calibration\n    ", 100.0 * reached);
    text += &match now {
        _ if outcome.run.nb < 64 => {
            format!("NB {} is too narrow for a fast update: 128 to 384 is usual", outcome.run.nb)
        }
        Some(now) if now < 0.8 * then => format!(
            "dgemm alone reaches {} now and {} at the start: other programs are busy, or the machine is \
             throttled (heat, power)",
            units::rate(now),
            units::rate(then)
        ),
        now => format!(
            "dgemm alone {}: other programs may have been busy during the run, the machine throttled (heat, \
             power), or threads bound to the same cores (--threads, taskset, a BLAS's own variables)",
            match now {
                Some(now) => format!("still reaches {}", units::rate(now)),
                None => format!("reached {} at the start", units::rate(then)),
            }
        ),
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Run;
    use crate::report::tests::{outcome, run};

    fn job(ranks: usize, threads: usize, gflops: f64) -> Job {
        Job { ranks, threads, gemm_gflops: Some(gflops), ..Job::default() }
    }

    /// A run of N = 10000 at this rate; 93.1 % of the time is update.
    fn at(gflops: f64) -> Outcome {
        let r = Run { n: 10_000, nb: 200, ..run() };
        outcome(r, r.flops() / gflops / 1e9, 1e-3)
    }

    #[test]
    fn what_gemm_reached() {
        let reached = reached(&at(93.1), &job(1, 2, 100.0)).unwrap();
        assert!((reached - 0.985).abs() < 1e-3, "{reached}");
        let mut none = at(10.0);
        none.phases.clear();
        assert_eq!(super::reached(&none, &job(1, 1, 100.0)), None);
        assert_eq!(super::reached(&at(10.0), &Job::default()), None);
    }

    /// K6-05.
    #[test]
    fn too_slow_is_told_with_a_reason() {
        let told = |o: &Outcome, job: &Job, now| warning(o, job, now).unwrap_or_default();
        let half = at(46.0);
        assert_eq!(told(&at(60.0), &job(1, 8, 100.0), Some(100.0)), "");
        assert!(doubtful(&half, &job(1, 8, 100.0)) && !doubtful(&at(60.0), &job(1, 8, 100.0)));
        let text = told(&half, &job(1, 8, 100.0), Some(99.0));
        assert!(text.starts_with("GEMM reached 49 % of calibration\n"), "{text}");
        assert!(text.contains("dgemm alone still reaches 99.0 Gflop/s"), "{text}");
        let text = told(&half, &job(1, 8, 100.0), Some(50.0));
        assert!(text.contains("reaches 50.0 Gflop/s now and 100 Gflop/s at the start"), "{text}");
        // Narrow blocks are not the machine's fault.
        let narrow = Outcome { run: Run { nb: 16, ..half.run }, ..half.clone() };
        let text = told(&narrow, &job(1, 8, 100.0), Some(50.0));
        assert!(text.contains("NB 16 is too narrow") && !text.contains("throttled"), "{text}");
        // A moment says nothing.
        assert_eq!(told(&Outcome { seconds: 0.9, ..half }, &job(1, 8, 10_000.0), None), "");
    }

    #[test]
    fn faster_than_dgemm_is_doubtful() {
        assert!(doubtful(&at(101.0), &job(1, 2, 100.0)));
        assert_eq!(warning(&at(101.0), &job(1, 2, 100.0), Some(105.0)), None);
    }

    /// Whatever share of the time an update seems to have taken: more than can be is told as not known, with the reason.
    #[test]
    fn what_cannot_be_is_not_told() {
        for update in [1e-3, 0.006, 0.1, 0.5, 0.93] {
            let mut run = at(80.0);
            run.phases.iter_mut().for_each(|p| p.update = update * run.seconds);
            for crowded in [false, true] {
                let job = Job { crowded, ..job(1, 2, 100.0) };
                let told = reached(&run, &job);
                assert!(told.is_none_or(|r| r <= MOST));
                assert_eq!(told.is_none(), not_told(&run, &job).is_some());
                assert_eq!(crowded, not_told(&run, &job).is_some_and(|why| why.contains("take turns")));
                let text = human::breakdown(&run, &job);
                assert_eq!(text.contains("GEMM not rated: "), told.is_none(), "{text}");
            }
        }
    }
}
