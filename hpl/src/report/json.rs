//! The report for programs; the schema is described in `hpl/JSON.md`.

use std::io::{self, Write};
use std::time::SystemTime;

use serde::Serialize;

use super::links::RankLink;
use super::{Job, Outcome, Phases, RankPlace, Tally, Verdict, calibration, human};
use crate::exit::Status;
use crate::hash;
use crate::machine::Host;
use crate::params::Pmap;

/// Name and version of the schema. Fields may be added under one version; none is removed or changed.
pub const SCHEMA: &str = "fulmen.hpl/1";

/// A whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    schema: &'static str,
    fulmen: &'static str,
    machine: Machine,
    kernels: Kernels,
    fabric: String,
    ranks: usize,
    threads: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    places: Vec<RankPlace>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    links: Vec<RankLink>,
    runs: Vec<RunReport>,
    passed: usize,
    failed: usize,
    unchecked: usize,
    exit: u8,
    reason: String,
}

#[derive(Clone, Debug, Serialize)]
struct Machine {
    os: &'static str,
    arch: &'static str,
    cores: usize,
    numa_nodes: usize,
    available_bytes: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
struct Kernels {
    name: String,
    self_test: String,
    gemm_gflops: Number,
}

#[derive(Clone, Debug, Serialize)]
struct RunReport {
    tv: String,
    n: usize,
    nb: usize,
    p: usize,
    q: usize,
    pmap: &'static str,
    depth: usize,
    bcast: String,
    rfact: String,
    pfact: String,
    nbmin: usize,
    ndiv: usize,
    seed: u64,
    started: String,
    ended: String,
    seconds: Number,
    gflops: Number,
    fraction_of_gemm: Number,
    gemm_reached: Number,
    #[serde(skip_serializing_if = "Option::is_none")]
    gemm_not_told: Option<&'static str>,
    info: usize,
    threshold: Number,
    residual: Number,
    passed: Option<bool>,
    norms: Option<Norms>,
    x_hash: String,
    phases: Vec<PhaseReport>,
}

#[derive(Clone, Debug, Serialize)]
struct Norms {
    ax_b_inf: Number,
    a_inf: Number,
    a_one: Number,
    x_inf: Number,
    x_one: Number,
    b_inf: Number,
}

#[derive(Clone, Debug, Serialize)]
struct PhaseReport {
    rank: usize,
    row: usize,
    col: usize,
    panel: f64,
    bcast_wait: f64,
    row_exchange: f64,
    update: f64,
    solve: f64,
    idle: f64,
}

/// A number, or why there is none: JSON has neither NaN nor infinities, so they are strings.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Other(&'static str),
    Absent(()),
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        match value {
            v if v.is_finite() => Number::Finite(v + 0.0), // of the two zeros the plain one
            v if v.is_nan() => Number::Other("NaN"),
            v if v > 0.0 => Number::Other("Infinity"),
            _ => Number::Other("-Infinity"),
        }
    }
}

impl From<Option<f64>> for Number {
    fn from(value: Option<f64>) -> Self {
        value.map_or(Number::Absent(()), Number::from)
    }
}

impl Report {
    /// The report of a job that ended with `status`, for `reason`.
    pub fn new(job: &Job, host: &Host, outcomes: &[Outcome], status: Status, reason: &str) -> Report {
        let mut tally = Tally::default();
        outcomes.iter().for_each(|o| tally.count(o.verdict()));
        Report {
            schema: SCHEMA,
            fulmen: env!("CARGO_PKG_VERSION"),
            machine: Machine {
                os: std::env::consts::OS,
                arch: std::env::consts::ARCH,
                cores: host.cores,
                numa_nodes: host.numa_nodes,
                available_bytes: host.available,
            },
            kernels: Kernels {
                name: job.kernels.clone(),
                self_test: job.self_test.clone(),
                gemm_gflops: job.gemm_gflops.into(),
            },
            fabric: job.fabric.clone(),
            ranks: job.ranks,
            threads: job.threads,
            places: job.places.clone(),
            links: job.links.clone(),
            runs: outcomes.iter().map(|o| RunReport::new(o, job)).collect(),
            passed: tally.passed,
            failed: tally.failed,
            unchecked: tally.unchecked,
            exit: status as u8,
            reason: reason.to_string(),
        }
    }

    /// Writes it, indented, with a line end.
    ///
    /// # Errors
    /// Of the writer.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        writeln!(out)
    }
}

impl RunReport {
    fn new(outcome: &Outcome, job: &Job) -> RunReport {
        let run = &outcome.run;
        RunReport {
            tv: run.tv(),
            n: run.n,
            nb: run.nb,
            p: run.p,
            q: run.q,
            pmap: if run.pmap == Pmap::Row { "row" } else { "column" },
            depth: run.depth,
            bcast: run.bcast.to_string(),
            rfact: run.rfact.to_string().to_lowercase(),
            pfact: run.pfact.to_string().to_lowercase(),
            nbmin: run.nbmin,
            ndiv: run.ndiv,
            seed: run.seed,
            started: utc(outcome.started),
            ended: utc(outcome.ended),
            seconds: outcome.seconds.into(),
            gflops: outcome.gflops().into(),
            fraction_of_gemm: human::fraction(outcome, job).into(),
            gemm_reached: calibration::reached(outcome, job).into(),
            gemm_not_told: calibration::not_told(outcome, job),
            info: outcome.info,
            threshold: run.threshold.into(),
            residual: outcome.residual().into(),
            passed: match outcome.verdict() {
                Verdict::Passed => Some(true),
                Verdict::Failed => Some(false),
                Verdict::Unchecked => None,
            },
            norms: outcome.check.map(|c| Norms {
                ax_b_inf: c.ax_b_inf.into(),
                a_inf: c.a_inf.into(),
                a_one: c.a_one.into(),
                x_inf: c.x_inf.into(),
                x_one: c.x_one.into(),
                b_inf: c.b_inf.into(),
            }),
            x_hash: hash::hex(outcome.x_hash),
            phases: outcome.phases.iter().map(|p| PhaseReport::new(p, outcome.seconds)).collect(),
        }
    }
}

impl PhaseReport {
    fn new(p: &Phases, seconds: f64) -> PhaseReport {
        let Phases { rank, row, col, panel, bcast_wait, row_exchange, update, solve } = *p;
        let [panel, bcast_wait, row_exchange, update, solve, idle] =
            [panel, bcast_wait, row_exchange, update, solve, p.idle(seconds)].map(|v| v + 0.0);
        PhaseReport { rank, row, col, panel, bcast_wait, row_exchange, update, solve, idle }
    }
}

/// RFC 3339 in UTC, whole seconds: `2026-11-30T07:00:00Z`. Days to date as in Hinnant's
/// "chrono-compatible low-level date algorithms" (civil_from_days).
pub(super) fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // from March
    let date = day - (153 * month + 2) / 5 + 1;
    let (year, month) =
        if month < 10 { (year + era * 400, month + 3) } else { (year + era * 400 + 1, month - 9) };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Run;
    use crate::report::tests::{outcome, run};
    use serde_json::Value;
    use std::time::{Duration, UNIX_EPOCH};

    fn host() -> Host {
        Host {
            name: "x".into(),
            cores: 2,
            numa_nodes: 1,
            available: None,
            bound: String::new(),
            limits: fulmen::dist::memory::OfProcess::UNLIMITED,
        }
    }

    fn written(outcomes: &[Outcome], status: Status) -> Value {
        let job = Job {
            ranks: 2,
            threads: 1,
            fabric: "shm".into(),
            kernels: "native/avx2".into(),
            self_test: "ok".into(),
            gemm_gflops: Some(2.0),
            crowded: false,
            places: vec![],
            cables: None,
            links: vec![],
        };
        let mut out = vec![];
        Report::new(&job, &host(), outcomes, status, "why").write(&mut out).unwrap();
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn what_a_program_looks_for() {
        let r = Run { p: 1, q: 2, ..run() };
        let report = written(&[outcome(r, 0.5, 1e-2)], Status::Passed);
        assert_eq!(report["schema"], SCHEMA);
        assert_eq!((&report["exit"], &report["passed"], &report["ranks"]), (&0.into(), &1.into(), &2.into()));
        let one = &report["runs"][0];
        assert_eq!(one["n"], 1000);
        assert_eq!(one["bcast"], "1ringM");
        assert_eq!(one["passed"], true);
        assert_eq!(one["x_hash"], "7f3a90c2e51b0001");
        assert_eq!(one["started"], "2026-11-30T07:00:00Z");
        let gflops = r.flops() / 0.5e9;
        assert!((one["gflops"].as_f64().unwrap() - gflops).abs() < 1e-12 * gflops);
        assert!((one["residual"].as_f64().unwrap() - 1e-2).abs() < 1e-12);
        assert!((one["fraction_of_gemm"].as_f64().unwrap() - gflops / 2.0).abs() < 1e-9);
        let phases = one["phases"].as_array().unwrap();
        assert_eq!(phases.len(), 2);
        let sum: f64 = ["panel", "bcast_wait", "row_exchange", "update", "solve", "idle"]
            .iter()
            .map(|k| phases[1][*k].as_f64().unwrap())
            .sum();
        assert!((sum - 0.5).abs() < 1e-9);
    }

    #[test]
    fn no_number_is_a_string_or_null() {
        let unchecked = Run { threshold: 0.0, ..run() };
        let report = written(
            &[
                outcome(run(), 1.0, f64::NAN),
                outcome(run(), 1.0, f64::INFINITY),
                outcome(unchecked, 1.0, 0.0),
            ],
            Status::Failed,
        );
        let runs = &report["runs"];
        assert_eq!((&runs[0]["residual"], &runs[0]["passed"]), (&"NaN".into(), &false.into()));
        assert_eq!(runs[1]["residual"], "Infinity");
        assert_eq!((&runs[2]["residual"], &runs[2]["passed"]), (&Value::Null, &Value::Null));
        assert_eq!(runs[2]["norms"], Value::Null);
        assert_eq!((&report["failed"], &report["unchecked"]), (&2.into(), &1.into()));
    }

    /// Some readers of JSON know no `-0.0`.
    #[test]
    fn zeros_have_no_sign() {
        let mut zeros = outcome(run(), 0.0, -0.0);
        zeros.phases.iter_mut().for_each(|p| (p.panel, p.solve) = (-0.0, -0.0));
        let unchecked = outcome(Run { threshold: -0.0, ..run() }, 0.0, 0.0);
        assert!(!written(&[zeros, unchecked], Status::Passed).to_string().contains("-0.0"));
    }

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
