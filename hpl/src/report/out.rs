//! `HPL.out`: the lines that existing parsers read are netlib HPL 2.3's to the column, the prose is ours.

use std::fmt::Display;
use std::io::{self, Write};
use std::time::SystemTime;

use super::{Outcome, Tally, Verdict, c_exponent, c_fixed};
use crate::params::{Input, Swap};

const DOUBLE: &str = "================================================================================";
const SINGLE: &str = "--------------------------------------------------------------------------------";

/// Values of a list in a line of the echo.
const PER_LINE: usize = 8;

/// The head of the report: banner, explanation, the parameters.
///
/// # Errors
/// Of the writer.
pub fn head(out: &mut dyn Write, input: &Input) -> io::Result<()> {
    writeln!(out, "{DOUBLE}")?;
    writeln!(out, "HPLinpack 2.3  --  in the format of, by hpl-run of fulmen {}", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "{DOUBLE}")?;
    writeln!(
        out,
        "\nAn explanation of the input/output parameters follows:\n\
         T/V    : Map, depth, BCAST, RFACT, NDIV, PFACT, NBMIN of a run, encoded.\n\
         N      : The order of the matrix A.\n\
         NB     : The block size of its distribution.\n\
         P      : Process rows.\n\
         Q      : Process columns.\n\
         Time   : Seconds to factor A and solve.\n\
         Gflops : (2/3 N^3 + 3/2 N^2) / Time / 1e9.\n\n\
         The following parameter values will be used:\n"
    )?;
    list(out, "N", &input.ns)?;
    list(out, "NB", &input.nbs)?;
    writeln!(out, "PMAP   : {} process mapping", input.pmap)?;
    list(out, "P", &input.grids.iter().map(|g| g.0).collect::<Vec<_>>())?;
    list(out, "Q", &input.grids.iter().map(|g| g.1).collect::<Vec<_>>())?;
    list(out, "PFACT", &input.pfacts)?;
    list(out, "NBMIN", &input.nbmins)?;
    list(out, "NDIV", &input.ndivs)?;
    list(out, "RFACT", &input.rfacts)?;
    list(out, "BCAST", &input.bcasts)?;
    list(out, "DEPTH", &input.depths)?;
    match input.swap {
        Swap::Mix => writeln!(out, "SWAP   : Mix (threshold = {})", input.swap_threshold)?,
        other => writeln!(out, "SWAP   : {other}")?,
    }
    let form = |transposed: bool| if transposed { "transposed" } else { "no-transposed" };
    writeln!(out, "L1     : {} form", form(input.l1_transposed))?;
    writeln!(out, "U      : {} form", form(input.u_transposed))?;
    writeln!(out, "EQUIL  : {}", if input.equil { "yes" } else { "no" })?;
    writeln!(out, "ALIGN  : {} double precision words\n", input.align)?;
    if input.threshold > 0.0 {
        writeln!(out, "{SINGLE}\n")?;
        writeln!(out, "- The matrix A is generated from a seed ({}) for each test.", input.seed)?;
        writeln!(out, "- The following scaled residual check will be computed:")?;
        writeln!(out, "      ||Ax-b||_oo / ( eps * ( || x ||_oo * || A ||_oo + || b ||_oo ) * N )")?;
        let eps = c_exponent(super::EPS, 21, 6);
        writeln!(out, "- The relative machine precision (eps) is taken to be      {eps}")?;
        let threshold = c_fixed(input.threshold, 11, 1);
        writeln!(out, "- Computational tests pass if scaled residuals are less than         {threshold}\n")?;
    }
    Ok(())
}

/// One parameter of the echo: `%8d ` a value, eight values a line.
fn list<T: Display>(out: &mut dyn Write, name: &str, values: &[T]) -> io::Result<()> {
    write!(out, "{name:<7}:")?;
    for (i, value) in values.iter().enumerate() {
        if i > 0 && i % PER_LINE == 0 {
            write!(out, "\n        ")?;
        }
        write!(out, "{value:>8} ")?;
    }
    writeln!(out)
}

/// One run. With checks the table's head comes before each, without only before the `first`.
///
/// # Errors
/// Of the writer.
pub fn run(out: &mut dyn Write, outcome: &Outcome, first: bool) -> io::Result<()> {
    let run = &outcome.run;
    let verdict = outcome.verdict();
    if first || verdict != Verdict::Unchecked {
        writeln!(out, "{DOUBLE}")?;
        writeln!(out, "T/V                N    NB     P     Q               Time                 Gflops")?;
        writeln!(out, "{SINGLE}")?;
    }
    writeln!(
        out,
        "{}{:12} {:5} {:5} {:5} {}    {}",
        run.tv(),
        run.n,
        run.nb,
        run.p,
        run.q,
        c_fixed(outcome.seconds, 18, 2),
        c_exponent(outcome.gflops(), 19, 4)
    )?;
    writeln!(out, "HPL_pdgesv() start time {}\n", clock(outcome.started))?;
    writeln!(out, "HPL_pdgesv() end time   {}\n", clock(outcome.ended))?;
    let (Some(check), Some(residual)) = (&outcome.check, outcome.residual()) else { return Ok(()) };
    if verdict == Verdict::Unchecked {
        return Ok(());
    }
    writeln!(out, "{SINGLE}")?;
    writeln!(
        out,
        "||Ax-b||_oo/(eps*(||A||_oo*||x||_oo+||b||_oo)*N)= {} ...... {}",
        c_exponent(residual, 16, 8),
        if verdict == Verdict::Passed { "PASSED" } else { "FAILED" }
    )?;
    if verdict == Verdict::Failed {
        for (name, value) in [
            ("||Ax-b||_oo  . . . . . . . . . . . . . . . . . = ", check.ax_b_inf),
            ("||A||_oo . . . . . . . . . . . . . . . . . . . = ", check.a_inf),
            ("||A||_1  . . . . . . . . . . . . . . . . . . . = ", check.a_one),
            ("||x||_oo . . . . . . . . . . . . . . . . . . . = ", check.x_inf),
            ("||x||_1  . . . . . . . . . . . . . . . . . . . = ", check.x_one),
            ("||b||_oo . . . . . . . . . . . . . . . . . . . = ", check.b_inf),
        ] {
            writeln!(out, "{name}{}", c_fixed(value, 18, 6))?;
        }
    }
    Ok(())
}

/// The closing counts.
///
/// # Errors
/// Of the writer.
pub fn tail(out: &mut dyn Write, tally: &Tally, checked: bool) -> io::Result<()> {
    writeln!(out, "{DOUBLE}\n")?;
    writeln!(out, "Finished {:6} tests with the following results:", tally.total())?;
    let mut line = |count: usize, what: &str| writeln!(out, "         {count:6} {what}");
    if checked {
        line(tally.passed, "tests completed and passed residual checks,")?;
        line(tally.failed, "tests completed and failed residual checks,")?;
    } else {
        line(tally.unchecked, "tests completed without checking,")?;
    }
    line(0, "tests skipped because of illegal input values.")?;
    writeln!(out, "{SINGLE}\n\nEnd of Tests.\n{DOUBLE}")
}

/// C's `ctime` without its line end, in local time: `Sat May 15 18:05:59 2021`.
fn clock(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let seconds = libc::time_t::try_from(seconds).unwrap_or(0);
    // SAFETY: an all-zero tm is a valid value of this plain C struct.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live locals, and localtime_r keeps neither.
    if unsafe { libc::localtime_r(&raw const seconds, &raw mut tm) }.is_null() {
        return "?".to_string();
    }
    let name = |names: &[&'static str], i: i32| {
        usize::try_from(i).ok().and_then(|i| names.get(i).copied()).unwrap_or("?")
    };
    format!(
        "{} {} {:2} {:02}:{:02}:{:02} {}",
        name(&DAYS, tm.tm_wday),
        name(&MONTHS, tm.tm_mon),
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec,
        tm.tm_year + 1900
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Fact, Input, Run};
    use crate::report::tests::outcome;
    use crate::report::{Check, Tally};

    /// Lines that parsers key on, of runs of netlib HPL 2.3 as they were published: a sweep's echo and
    /// first runs, a run that failed, the closing lines. The clock times are masked.
    const NETLIB_ECHO: &str = include_str!("../../tests/netlib-2.3/echo.txt");
    const NETLIB_RUNS: &str = include_str!("../../tests/netlib-2.3/runs.txt");
    const NETLIB_FAILED: &str = include_str!("../../tests/netlib-2.3/failed.txt");
    const NETLIB_TAIL: &str = include_str!("../../tests/netlib-2.3/tail.txt");

    fn text(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
        let mut out = vec![];
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// The clock's reading replaced by X, letter by letter.
    fn masked(text: &str) -> String {
        let mask = |line: &str| match line.split_once("time ") {
            Some((head, clock)) if line.starts_with("HPL_pdgesv()") => {
                let clock = clock.trim_start();
                format!("{head}time {} {}", clock.len(), clock.matches(':').count())
            }
            _ => line.to_string(),
        };
        text.lines().map(mask).collect::<Vec<_>>().join("\n")
    }

    fn sweep() -> Input {
        Input {
            ns: vec![29, 30, 34, 35],
            nbs: vec![1, 2, 3, 4],
            grids: vec![(2, 2), (1, 4), (4, 1)],
            pfacts: Fact::ALL.to_vec(),
            nbmins: vec![2, 4],
            ndivs: vec![2],
            rfacts: Fact::ALL.to_vec(),
            bcasts: vec![crate::params::Bcast::Ring1],
            depths: vec![0],
            ..Input::default()
        }
    }

    #[test]
    fn parameter_echo_is_netlibs() {
        let ours = text(|out| head(out, &sweep()));
        for line in NETLIB_ECHO.lines() {
            assert!(ours.lines().any(|l| l == line), "missing: {line:?} in\n{ours}");
        }
        let order = |text: &str| {
            let labels: Vec<String> = text
                .lines()
                .filter(|l| {
                    l.len() > 8 && l.as_bytes()[7] == b':' && !l.contains(" of ") && !l.contains("N^3")
                })
                .map(|l| l[..6].trim().to_string())
                .filter(|l| l.chars().all(|c| c.is_ascii_uppercase() || c == '1'))
                .collect();
            labels
        };
        let echo: Vec<String> = order(NETLIB_ECHO);
        assert!(order(&ours).ends_with(&echo), "{:?}", order(&ours));
    }

    #[test]
    fn results_are_netlibs_to_the_column() {
        let input = sweep();
        let ours = text(|out| {
            for (i, (gflops, residual)) in
                [(4.6178e-6, 1.72533487e-2), (4.4728e-6, 1.72533487e-2), (3.9376e-6, 1.72533487e-2)]
                    .into_iter()
                    .enumerate()
            {
                let r = input.run(i);
                run(out, &outcome(r, r.flops() / gflops / 1e9, residual), i == 0)?;
            }
            Ok(())
        });
        assert_eq!(masked(&ours), masked(NETLIB_RUNS));
    }

    #[test]
    fn a_failed_run_has_its_six_norms() {
        let r = Run {
            n: 24576,
            nb: 2048,
            depth: 1,
            bcast: crate::params::Bcast::Ring1,
            rfact: Fact::Left,
            pfact: Fact::Left,
            nbmin: 2,
            ..sweep().run(0)
        };
        let r = Run { p: 1, q: 1, ..r };
        let mut failed = outcome(r, 228.2567, 0.0);
        failed.check = Some(Check {
            ax_b_inf: 5455.998041,
            a_inf: 6229.846527,
            a_one: 6230.505776,
            x_inf: 790.874477,
            x_one: 203978.961025,
            b_inf: 0.499978,
        });
        let ours = text(|out| run(out, &failed, true));
        assert_eq!(masked(&ours), masked(NETLIB_FAILED));
    }

    #[test]
    fn the_tail_is_netlibs() {
        let ours = text(|out| tail(out, &Tally { passed: 1, ..Tally::default() }, true));
        assert_eq!(ours, NETLIB_TAIL);
        let ours = text(|out| tail(out, &Tally { unchecked: 12, ..Tally::default() }, false));
        assert!(ours.contains("\n             12 tests completed without checking,\n"), "{ours}");
        assert!(!ours.contains("passed"));
    }

    /// K2-02: one table head, no verdict.
    #[test]
    fn unchecked_runs_are_never_called_passed() {
        let r = Run { threshold: 0.0, ..sweep().run(0) };
        let ours = text(|out| {
            head(out, &Input { threshold: 0.0, ..sweep() })?;
            run(out, &outcome(r, 1.0, 0.0), true)?;
            run(out, &outcome(r, 1.0, 0.0), false)
        });
        assert_eq!(ours.matches("T/V  ").count(), 1 + 1, "explanation and table");
        assert!(!ours.contains("PASSED") && !ours.contains("FAILED") && !ours.contains("residual"));
    }

    #[test]
    fn long_lists_break_after_eight() {
        let ours = text(|out| list(out, "N", &(1..=17).collect::<Vec<usize>>()));
        let lines: Vec<&str> = ours.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("N      :       1        2 "));
        assert_eq!(lines[2], "              17 ");
    }

    /// SCC's certificate rule: `^W[RC][0-9]+[LCR][0-9]+[LCR][0-9]+` (K2-08).
    #[test]
    fn rows_begin_with_the_code() {
        for r in sweep().runs() {
            let code = r.tv();
            let letters: String = code.chars().filter(|c| c.is_alphabetic()).collect();
            assert!(letters.len() == 4 && letters.starts_with('W'), "{code}");
        }
    }
}
