//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use fulmen::fabric::mixed::Choice;
use fulmen::fabric::tcp::On;

use fulmen::Error;
use fulmen::job::env::FABRIC;

use crate::doctor;
use crate::params::{Bcast, Fact, Pmap, Swap};

const ABOUT: &str = "Solves a dense linear system on all ranks: the High-Performance Linpack benchmark";

const LONG_ABOUT: &str = "\
Solves a dense linear system on all ranks: the High-Performance Linpack benchmark.

With no argument hpl-run takes HPL.dat from the current folder, as xhpl does; if there is none, it
sizes itself to this machine and runs for about half a minute. Flags override the file. It starts
its own ranks: no MPI and no launcher is needed.";

const AFTER: &str = "\
Examples:
  hpl-run                             HPL.dat of this folder, or a run that fits this machine
  hpl-run --check                     what would run, how much memory, how long
  hpl-run -N 20000 --nb 256           one order and block size; the grid is chosen
  hpl-run -N 10000,20000 -P 1 -Q 2    two runs on a 1 x 2 grid: two ranks
  hpl-run my.dat --json report.json   a file of your own, and a report for programs
  hpl-run doctor                      what is wrong with this machine, and what to do about it

A list is written with commas and crossed with the other lists; -P and -Q pair up.
The HPL.out report goes to stdout (or the file that HPL.dat or --output names), all else to stderr.

Exit status:
  0  all runs passed (or were not checked, with a threshold of 0 or below)
  1  a residual failed
  2  usage or input           3  too little memory, or the system refused
  4  a rank was lost          5  interrupted";

/// Arguments of `hpl-run`.
#[derive(Parser, Clone, Debug, Default)]
#[command(
    name = "hpl-run",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = AFTER,
    max_term_width = 100,
    args_conflicts_with_subcommands = true
)]
pub struct Cli {
    /// Something else than a run.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// HPL.dat to run, in any dialect
    #[arg(value_name = "HPL.DAT")]
    pub file: Option<PathBuf>,

    /// One file too many
    #[arg(hide = true)]
    pub more: Vec<PathBuf>,

    /// The same, as an option
    #[arg(long, value_name = "HPL.DAT", conflicts_with = "file")]
    pub input: Option<PathBuf>,

    /// Orders of the matrix
    #[arg(short = 'N', value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 0), help_heading = PROBLEM)]
    pub n: Option<Vec<usize>>,

    /// Block sizes
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 1), help_heading = PROBLEM)]
    pub nb: Option<Vec<usize>>,

    /// Process rows, one a grid
    #[arg(short = 'P', value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 1), help_heading = PROBLEM)]
    pub p: Option<Vec<usize>>,

    /// Process columns, one a grid
    #[arg(short = 'Q', value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 1), help_heading = PROBLEM)]
    pub q: Option<Vec<usize>>,

    /// Order of the ranks on the grid: row or column
    #[arg(long, value_parser = pmap, value_name = "ORDER", help_heading = PROBLEM)]
    pub pmap: Option<Pmap>,

    /// Limit of the scaled residual; 0 or below: the answer is not checked
    #[arg(long, value_parser = threshold, allow_negative_numbers = true, value_name = "LIMIT", help_heading = PROBLEM)]
    pub threshold: Option<f64>,

    /// Seed of the matrix generator (netlib's is 100)
    #[arg(long, allow_negative_numbers = true, value_parser = seed, value_name = "SEED", help_heading = PROBLEM)]
    pub seed: Option<u64>,

    /// Look-ahead depths
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 0), help_heading = ALGORITHM)]
    pub depth: Option<Vec<usize>>,

    /// Panel broadcasts: 1ring 1ringM 2ring 2ringM long longM, or 0 to 5 [default: 1ringM; without a switch, along the cables]
    #[arg(long, value_delimiter = ',', value_parser = bcast, help_heading = ALGORITHM)]
    pub bcast: Option<Vec<Bcast>>,

    /// Panel factorisations: left crout right, or 0 to 2
    #[arg(long, value_delimiter = ',', value_parser = fact, help_heading = ALGORITHM)]
    pub pfact: Option<Vec<Fact>>,

    /// Recursive factorisations: left crout right, or 0 to 2
    #[arg(long, value_delimiter = ',', value_parser = fact, help_heading = ALGORITHM)]
    pub rfact: Option<Vec<Fact>>,

    /// Columns at which the recursion stops
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 1), help_heading = ALGORITHM)]
    pub nbmin: Option<Vec<usize>>,

    /// Parts per recursion step
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, value_parser = |s: &str| whole(s, 2), help_heading = ALGORITHM)]
    pub ndiv: Option<Vec<usize>>,

    /// Row exchange: binary long mix, or 0 to 2
    #[arg(long, value_parser = swap, help_heading = ALGORITHM)]
    pub swap: Option<Swap>,

    /// Columns up to which mix uses the binary exchange
    #[arg(long, allow_negative_numbers = true, value_parser = |s: &str| whole(s, 0), value_name = "COLUMNS", help_heading = ALGORITHM)]
    pub swap_threshold: Option<usize>,

    /// Ranks to start [default: what the largest grid needs]
    #[arg(long, allow_negative_numbers = true, value_parser = |s: &str| whole(s, 1), help_heading = MACHINE)]
    pub ranks: Option<usize>,

    /// Threads of each rank [default: the cores, shared out]
    #[arg(long, allow_negative_numbers = true, value_parser = |s: &str| whole(s, 1), help_heading = MACHINE)]
    pub threads: Option<usize>,

    /// What joins the ranks. Ranks of its own: mem (threads of one process) or shm (processes of this machine)
    /// [default: mem]. Ranks that a launcher has started: auto, shm, tcp, verbs or verbs:DEVICE,DEVICE; what cannot
    /// be had is an error [default: auto, the best for each pair]
    #[arg(long, value_parser = wanted, value_name = "FABRIC", help_heading = MACHINE)]
    pub fabric: Option<Wanted>,

    /// Interfaces that carry data between hosts: names (en5) or subnets (10.0.0.0/24) [default: all but tunnels]
    #[arg(long, value_delimiter = ',', value_parser = interface, value_name = "INTERFACES", help_heading = MACHINE)]
    pub interfaces: Option<Vec<On>>,

    /// Who computes: native (native:avx512, avx2, neon, portable force an instruction set), reference, blas (the first
    /// one found), blas:NAME or blas:PATH [default: native]
    #[arg(long, value_parser = kernels, value_name = "KERNELS", help_heading = MACHINE)]
    pub kernels: Option<String>,

    /// A rank that gives no sign of life is found to be lost within this time (across hosts, the job is over by then)
    #[arg(long, allow_negative_numbers = true, value_parser = seconds, value_name = "SECONDS", default_value = "10", help_heading = MACHINE)]
    pub silence: Option<Duration>,

    /// A living rank that owes data for this long is given up
    #[arg(long, allow_negative_numbers = true, value_parser = seconds, value_name = "SECONDS", default_value = "600", help_heading = MACHINE)]
    pub timeout: Option<Duration>,

    /// Say what would run, how much memory and time it takes, and end
    #[arg(long, conflicts_with_all = ["json", "bundle", "hash"], help_heading = REPORT)]
    pub check: bool,

    /// Write the HPL.out report to FILE (- is stdout)
    #[arg(long, value_name = "FILE", help_heading = REPORT)]
    pub output: Option<PathBuf>,

    /// Write a report for programs to FILE (- is stdout; HPL.out then goes to stderr)
    #[arg(long, value_name = "FILE", help_heading = REPORT)]
    pub json: Option<PathBuf>,

    /// Write report, input, command, time stamps and configuration as cert-N-* into FOLDER
    #[arg(long, value_name = "FOLDER", help_heading = REPORT)]
    pub bundle: Option<PathBuf>,

    /// Print the hash of the solution's bits
    #[arg(long, help_heading = REPORT)]
    pub hash: bool,

    /// Print nothing but the HPL.out report, warnings, errors, and hashes if asked for
    #[arg(long, short, help_heading = REPORT)]
    pub quiet: bool,

    /// What has decided on `ranks`, if the user has not
    #[arg(skip)]
    pub ranks_by: Option<String>,

    /// Say what joins each two ranks that a launcher has started
    #[arg(long, short, conflicts_with = "quiet", help_heading = REPORT)]
    pub verbose: bool,
}

/// What else the program does.
#[derive(Subcommand, Clone, Debug)]
pub enum Command {
    /// Say what is wrong with this machine, or with several, and what to do about it
    Doctor(doctor::Options),
}

const PROBLEM: &str = "Problem";
const ALGORITHM: &str = "Algorithm";
const MACHINE: &str = "Machine";
const REPORT: &str = "Report";

/// What `--fabric` names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// Threads of one process.
    Mem,
    /// Processes.
    Processes(Choice),
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Wanted::Mem => f.write_str("mem"),
            Wanted::Processes(choice) => choice.fmt(f),
        }
    }
}

/// What ranks of this program's own are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fabric {
    /// Threads of one process
    #[default]
    Mem,
    /// Processes of this machine
    Shm,
}

impl Fabric {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Fabric::Mem => "mem",
            Fabric::Shm => "shm",
        }
    }
}

fn whole(text: &str, least: usize) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(value) if value < least => Err(format!("must be at least {least}")),
        Ok(value) if value > i32::MAX as usize => Err(format!("must be at most {}", i32::MAX)),
        Ok(value) => Ok(value),
        Err(_) if text.parse::<i128>().is_ok_and(|value| value < 0) => {
            Err(format!("must be at least {least}"))
        }
        Err(_) if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
            Err(format!("must be at most {}", i32::MAX))
        }
        Err(_) => {
            let plain: String = text.chars().filter(|c| !matches!(c, '_' | '\'')).collect();
            Err(match plain.parse::<f64>() {
                Ok(v) if v.fract() == 0.0 && v >= 0.0 && v <= f64::from(i32::MAX) => {
                    format!("not a whole number: write {v}")
                }
                _ => "not a whole number: write digits only, a list with commas".to_string(),
            })
        }
    }
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse::<u64>().map_err(|_| match text.parse::<f64>() {
        Ok(value) if value < 0.0 => "must be at least 0: netlib's seed is 100".to_string(),
        Ok(value) if value >= 2f64.powi(64) => format!("must be at most {}", u64::MAX),
        _ => "not a whole number: write digits only, such as 100, netlib's seed".to_string(),
    })
}

/// A name or number out of a table.
fn pick<T: Copy>(text: &str, table: &[(T, &[&str])]) -> Result<T, String> {
    let wanted = text.to_lowercase();
    let found = table.iter().enumerate().find(|(i, (_, names))| {
        *i.to_string() == *wanted || names.iter().any(|n| n.to_lowercase() == wanted)
    });
    found.map(|(_, (value, _))| *value).ok_or_else(|| {
        let all: Vec<String> =
            table.iter().enumerate().map(|(i, (_, names))| format!("{} ({i})", names[0])).collect();
        format!("write one of {}", all.join(", "))
    })
}

fn pmap(text: &str) -> Result<Pmap, String> {
    pick(text, &[(Pmap::Row, &["row", "r"]), (Pmap::Column, &["column", "col", "c"])])
}

fn fact(text: &str) -> Result<Fact, String> {
    pick(
        text,
        &[(Fact::Left, &["left", "l"]), (Fact::Crout, &["crout", "c"]), (Fact::Right, &["right", "r"])],
    )
}

fn bcast(text: &str) -> Result<Bcast, String> {
    pick(
        text,
        &[
            (Bcast::Ring1, &["1ring", "1rg"]),
            (Bcast::Ring1M, &["1ringM", "1rM", "1rinM"]),
            (Bcast::Ring2, &["2ring", "2rg"]),
            (Bcast::Ring2M, &["2ringM", "2rM", "2rinM"]),
            (Bcast::Long, &["long", "Lng", "Blong"]),
            (Bcast::LongM, &["longM", "LnM", "BlongM", "BlonM"]),
        ],
    )
}

fn swap(text: &str) -> Result<Swap, String> {
    pick(
        text,
        &[
            (Swap::BinaryExchange, &["binary", "bin-exch", "binary-exchange"]),
            (Swap::SpreadRoll, &["long", "spread-roll"]),
            (Swap::Mix, &["mix"]),
        ],
    )
}

fn wanted(text: &str) -> Result<Wanted, String> {
    match text {
        "mem" => Ok(Wanted::Mem),
        _ => text.parse().map(Wanted::Processes).map_err(|_| {
            "write mem or shm; with a launcher auto, shm, tcp, verbs or verbs:DEVICE".to_string()
        }),
    }
}

impl Cli {
    /// What [`FABRIC`] names counts where no flag does, for ranks of this program's own too.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the variable.
    pub fn fabric_of(&mut self, variable: Option<String>) -> Result<(), Error> {
        let (None, Some(text)) = (&self.fabric, variable) else { return Ok(()) };
        let wrong = |problem: &str, remedy: &str| Err(Error::argument(FABRIC, &text, problem, remedy));
        match wanted(&text) {
            Ok(Wanted::Processes(Choice::Auto)) => {}
            Ok(one @ (Wanted::Mem | Wanted::Processes(Choice::Shm))) => self.fabric = Some(one),
            Ok(_) => {
                return wrong(
                    "is for ranks that a launcher has started",
                    "start them so (fulmen-run --host a,b hpl-run ...), or unset it",
                );
            }
            Err(remedy) => return wrong("is no transport", &remedy),
        }
        Ok(())
    }
}

fn interface(text: &str) -> Result<On, String> {
    text.trim().parse().map_err(|e: fulmen::Error| match e {
        fulmen::Error::Argument { problem, remedy, .. } => format!("it {problem}: {remedy}"),
        other => other.to_string(),
    })
}

fn threshold(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        Ok(_) => {
            Err("not a finite number: write the limit of the residual, such as 16; 0 checks nothing"
                .to_string())
        }
        _ => Err("not a number: write the limit of the residual, such as 16".to_string()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 => {
            Duration::try_from_secs_f64(value).map_err(|_| "too long: write seconds, such as 10".to_string())
        }
        _ => Err("must be above 0: write seconds, such as 10".to_string()),
    }
}

fn kernels(text: &str) -> Result<String, String> {
    match text {
        "native" | "reference" | "blas" => Ok(text.to_string()),
        _ if text.starts_with("native:") || text.starts_with("blas:") => Ok(text.to_string()),
        _ => {
            Err("write native, native:avx512 (avx2, neon, portable), reference, blas, blas:NAME or blas:PATH"
                .to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(args: &[&str]) -> Result<Cli, String> {
        Cli::try_parse_from(std::iter::once(&"hpl-run").chain(args)).map_err(|e| {
            assert_eq!(e.exit_code(), 2);
            e.to_string()
        })
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_of_the_manual() {
        let cli = parse(
            &"-N 10000,20000 --nb 256,384 -P 1 -Q 2 --pmap column --depth 0,1 --bcast 1ringM,4,Lng --pfact \
              left,1 --rfact R --nbmin 4,8 --ndiv 2 --swap mix --swap-threshold 32 --threshold -1 --seed 7 \
              --threads 2 --fabric shm --kernels blas:/x/libblis.so --json - --output out --hash --quiet \
              --timeout 2.5 --silence 1 my.dat"
                .split_whitespace()
                .collect::<Vec<_>>(),
        )
        .unwrap();
        assert_eq!(cli.n, Some(vec![10000, 20000]));
        assert_eq!(cli.bcast, Some(vec![Bcast::Ring1M, Bcast::Long, Bcast::Long]));
        assert_eq!(cli.pfact, Some(vec![Fact::Left, Fact::Crout]));
        assert_eq!((cli.pmap, cli.swap), (Some(Pmap::Column), Some(Swap::Mix)));
        assert_eq!(
            (cli.threshold, cli.seed, cli.fabric.clone()),
            (Some(-1.0), Some(7), Some(Wanted::Processes(Choice::Shm)))
        );
        assert_eq!(cli.timeout, Some(Duration::from_millis(2500)));
        assert_eq!(cli.file, Some("my.dat".into()));
    }

    #[test]
    fn bad_values_are_told_how_to_be_good() {
        for (args, words) in [
            (&["-N", "1e2"][..], "invalid value '1e2' for '-N <N>': not a whole number: write 100"),
            (&["-N", "ten"], "write digits only"),
            (&["-N", "3000000000"], "must be at most 2147483647"),
            (&["--nb", "0"], "must be at least 1"),
            (&["--ndiv", "1"], "must be at least 2"),
            (&["--bcast", "7"], "write one of 1ring (0), 1ringM (1), 2ring (2)"),
            (
                &["--kernels", "mkl"],
                "write native, native:avx512 (avx2, neon, portable), reference, blas, blas:NAME or blas:PATH",
            ),
            (&["--timeout", "0"], "must be above 0"),
            (&["--fabric", "ib"], "write mem or shm; with a launcher auto, shm, tcp, verbs"),
            (&["--interfaces", "en5,10.0.0.0/99"], "has no number of bits"),
            (&["-q", "-v"], "cannot be used with"),
            (&["--threshold", "nan"], "not a finite number"),
            (&["--threshold", "x"], "not a number"),
            (&["-N", "-5"], "must be at least 0"),
            (&["-N", "99999999999999999999"], "must be at most 2147483647"),
            (&["--seed", "-1"], "must be at least 0: netlib's seed is 100"),
            (&["--seed", "1e3"], "write digits only"),
            (&["--seed", "18446744073709551616"], "must be at most 18446744073709551615"),
            (&["a.dat", "--input", "b.dat"], "cannot be used with"),
            (&["--check", "--json", "x"], "cannot be used with"),
        ] {
            let message = parse(args).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }

    /// The variable's word counts as the flag's does.
    #[test]
    fn the_variable_that_names_a_fabric() {
        let of = |args: &[&str], value: Option<&str>| {
            let mut cli = parse(args).unwrap();
            cli.fabric_of(value.map(str::to_string)).map(|()| cli.fabric).map_err(|e| e.to_string())
        };
        assert_eq!(of(&[], None), Ok(None));
        assert_eq!(of(&[], Some("auto")), Ok(None));
        assert_eq!(of(&[], Some("shm")), Ok(Some(Wanted::Processes(Choice::Shm))));
        assert_eq!(of(&["--fabric", "mem"], Some("shm")), Ok(Some(Wanted::Mem)));
        for (value, words) in [("tcp", "is for ranks that a launcher has started"), ("ib", "is no transport")]
        {
            let message = of(&[], Some(value)).unwrap_err();
            assert!(message.starts_with(&format!("FULMEN_FABRIC: {value}: {words}")), "{message}");
        }
    }

    #[test]
    fn help_is_grouped_and_shows_examples() {
        let help = Cli::command().render_long_help().to_string();
        for word in ["Problem:", "Algorithm:", "Machine:", "Report:", "Examples:", "Exit status:"] {
            assert!(help.contains(word), "{word}");
        }
    }
}
