//! The lines for people: what runs, how it went, where the time was.

use super::{Job, Outcome, Phases, Verdict, c_exponent, calibration};
use crate::hash;
use crate::plan::Plan;
use crate::units;

/// Ranks whose breakdown is printed one by one; of larger jobs the mean and the extremes are shown.
const RANKS_SHOWN: usize = 16;

/// The first two lines: the job, and what it will run.
pub fn head(job: &Job, plan: &Plan) -> String {
    let gemm = job.gemm_gflops.map_or(String::new(), |g| format!("; dgemm {}", units::rate(g)));
    let first = format!(
        "fulmen {}   {} x {}   kernels {} (self-test {}{gemm})   fabric {}",
        env!("CARGO_PKG_VERSION"),
        units::count(job.ranks, "rank"),
        units::count(job.threads, "thread"),
        job.kernels,
        job.self_test,
        job.fabric
    );
    let run = &plan.largest;
    let memory = match &plan.available {
        Some((bytes, bound)) => {
            let free = if bound == "free memory" { "free".to_string() } else { format!("({bound})") };
            format!("{} of {} {free}", units::bytes(plan.memory.total), units::bytes(u128::from(*bytes)))
        }
        None => units::bytes(plan.memory.total),
    };
    let what = if plan.runs == 1 {
        format!("N {}   NB {}   grid {}x{}", run.n, run.nb, run.p, run.q)
    } else {
        format!("{} runs   largest N {}   NB {}   grid {}x{}", plan.runs, run.n, run.nb, run.p, run.q)
    };
    format!("{first}\n{what}   {memory}   about {}", units::duration(plan.seconds))
}

/// The verdict, the number and what it means; the hash if `with_hash`.
pub fn verdict(outcome: &Outcome, job: &Job, with_hash: bool) -> String {
    let gflops = outcome.gflops();
    let threshold = outcome.run.threshold;
    let (word, residual) = match (outcome.verdict(), outcome.residual()) {
        (Verdict::Passed, Some(r)) => {
            ("PASSED", format!("residual {} (limit {threshold})", c_exponent(r, 0, 1)))
        }
        (Verdict::Failed, Some(r)) => {
            ("FAILED", format!("residual {} (limit {threshold})", c_exponent(r, 0, 1)))
        }
        _ => ("UNCHECKED", "no residual was computed".to_string()),
    };
    let mut line = format!("{word}   {residual}   {}", units::rate(gflops));
    if let Some(fraction) = fraction(outcome, job) {
        line += &format!(" = {:.0} % of measured dgemm", 100.0 * fraction);
        if fraction > 1.02 {
            line += " (measured in a slower moment)";
        }
    }
    if with_hash {
        line += &format!("   x {}", hash::hex(outcome.x_hash));
    }
    if outcome.info > 0 {
        line += &format!(
            "\n    pivot {} is exactly zero: the matrix is singular, and x means nothing",
            outcome.info
        );
    }
    // K2-04: small systems with a tight limit flip around it by grid and NB.
    if let Some(r) = outcome.residual().filter(|r| outcome.run.checked() && r.is_finite()) {
        let ratio = r / threshold;
        if (0.3..3.0).contains(&ratio) && threshold < 1.0 {
            line += &format!(
                "\n    the residual is {ratio:.2} of the limit: by NB and grid it may fall on either side{}",
                if outcome.run.n < 2000 { "; with N of 4000 or more it is about 2e-3" } else { "" }
            );
        }
    }
    line
}

/// All that a quiet run says of a hash that was asked for.
pub fn hash_of(outcome: &Outcome) -> String {
    let r = &outcome.run;
    format!("N {} NB {} {}x{}   x {}", r.n, r.nb, r.p, r.q, hash::hex(outcome.x_hash))
}

/// The rate as a fraction of measured dgemm on the ranks of this run.
pub fn fraction(outcome: &Outcome, job: &Job) -> Option<f64> {
    let gemm = job.gemm_gflops? * outcome.run.ranks() as f64 / job.ranks.max(1) as f64;
    (gemm > 0.0).then(|| outcome.gflops() / gemm)
}

/// Where the time went: all ranks together, then each rank of a small job.
pub fn breakdown(outcome: &Outcome, job: &Job) -> String {
    let phases = &outcome.phases;
    if phases.is_empty() || outcome.seconds <= 0.0 {
        return String::new();
    }
    let all = mean(phases);
    let mut text = format!("time: {}", shares(&all, outcome.seconds));
    let gemm = match (calibration::reached(outcome, job), calibration::not_told(outcome, job)) {
        (Some(reached), _) => Some(format!("GEMM reached {:.0} % of calibration", 100.0 * reached)),
        (None, why) => why.map(|why| format!("GEMM not rated: {why}")),
    };
    if let (Some(fraction), Some(gemm)) = (fraction(outcome, job), gemm) {
        text += &format!("\nlost against dgemm: {:.1} %   {gemm}", 100.0 * (1.0 - fraction).max(0.0));
    }
    if (2..=RANKS_SHOWN).contains(&phases.len()) {
        for p in phases {
            text += &format!("\n  rank {} ({},{}): {}", p.rank, p.row, p.col, shares(p, outcome.seconds));
        }
    } else if phases.len() > RANKS_SHOWN {
        let by_update = |a: &&Phases, b: &&Phases| a.update.total_cmp(&b.update);
        let ends = [phases.iter().min_by(by_update), phases.iter().max_by(by_update)];
        for (word, p) in ["least", "most"].iter().zip(ends.into_iter().flatten()) {
            let shares = shares(p, outcome.seconds);
            text += &format!("\n  rank {} ({},{}), {word} update: {shares}", p.rank, p.row, p.col);
        }
    }
    text
}

fn shares(p: &Phases, seconds: f64) -> String {
    let percent = |s: f64| format!("{:.1} %", 100.0 * s / seconds);
    format!(
        "update {}   panel {}   row exchange {}   waiting {}   solve {}   idle {}",
        percent(p.update),
        percent(p.panel),
        percent(p.row_exchange),
        percent(p.bcast_wait),
        percent(p.solve),
        percent(p.idle(seconds))
    )
}

/// The mean of all ranks.
pub(crate) fn mean(phases: &[Phases]) -> Phases {
    let of = |f: fn(&Phases) -> f64| phases.iter().map(f).sum::<f64>() / phases.len() as f64;
    Phases {
        panel: of(|p| p.panel),
        bcast_wait: of(|p| p.bcast_wait),
        row_exchange: of(|p| p.row_exchange),
        update: of(|p| p.update),
        solve: of(|p| p.solve),
        ..Phases::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Run;
    use crate::report::tests::{outcome, run};

    fn job(ranks: usize) -> Job {
        Job {
            ranks,
            threads: 2,
            fabric: "mem".into(),
            kernels: "native/avx512".into(),
            self_test: "ok".into(),
            gemm_gflops: Some(153.0),
            crowded: false,
            places: vec![],
            cables: None,
            links: vec![],
        }
    }

    #[test]
    fn the_closing_lines_of_the_design() {
        let r = Run { n: 16128, ..run() };
        let o = outcome(r, r.flops() / 144.9e9, 1.6e-3);
        assert_eq!(
            verdict(&o, &job(1), true),
            "PASSED   residual 1.6e-03 (limit 16)   145 Gflop/s = 95 % of measured dgemm   x 7f3a90c2e51b0001"
        );
        let text = breakdown(&o, &job(1));
        assert!(text.starts_with("time: update 93.1 %   panel 3.0 %   row exchange 1.9 %   waiting 1.2 %   solve 0.8 %   idle 0.0 %"), "{text}");
        assert!(text.contains("\nlost against dgemm: 5.3 %   GEMM reached 101 % of calibration"), "{text}");
    }

    #[test]
    fn ranks_are_listed_while_they_are_few() {
        let lines = |p, q| breakdown(&outcome(Run { p, q, ..run() }, 1.0, 0.0), &job(p * q)).lines().count();
        assert_eq!((lines(1, 1), lines(1, 2), lines(5, 5)), (2, 4, 4));
    }

    #[test]
    fn failures_and_doubts_are_said() {
        let failed = outcome(run(), 1.0, 100.0);
        assert!(verdict(&failed, &job(1), false).starts_with("FAILED   residual 1.0e+02 (limit 16)"));
        let tight = outcome(Run { n: 100, threshold: 0.01, ..run() }, 1.0, 0.0095);
        assert!(verdict(&tight, &job(1), false).contains("0.95 of the limit"));
        let unchecked = outcome(Run { threshold: 0.0, ..run() }, 1.0, 0.0);
        assert!(verdict(&unchecked, &job(1), false).starts_with("UNCHECKED"));
        let mut singular = outcome(run(), 1.0, f64::NAN);
        singular.info = 3;
        assert!(verdict(&singular, &job(1), false).contains("pivot 3 is exactly zero"));
    }

    /// A run on fewer ranks than the job has is measured against those.
    #[test]
    fn the_fraction_is_of_the_ranks_that_ran() {
        let o = outcome(Run { p: 1, q: 1, n: 10_000, ..run() }, flops_at(76.5), 0.0);
        assert!((fraction(&o, &job(2)).unwrap() - 1.0).abs() < 1e-9);
    }

    fn flops_at(gflops: f64) -> f64 {
        crate::params::flops(10_000) / gflops / 1e9
    }
}
