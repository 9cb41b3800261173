//! The command line of `fulmen-run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, Parser, ValueEnum};
use fulmen::fabric::mixed::Choice;
use fulmen::fabric::tcp::On;

use super::place::MapBy;
use super::ssh::words;

const LONG_ABOUT: &str = "\
Starts the ranks of a program on this and other hosts, over your own ssh, and sees that none outlives the job.

What goes for `ssh HOST` goes here: your config, keys, agent and jump hosts. ssh is never asked to prompt. The same
fulmen-run, and the same program, must be on every host (see --copy).";

const AFTER: &str = "\
Examples:
  fulmen-run -n 4 hpl-run -N 20000               four ranks on this machine
  fulmen-run --host a,b:2 hpl-run my.dat         one rank on a, two on b
  fulmen-run -n 8 --hostfile hosts --map-by node --tag-output ./program --its-own-flags
  fulmen-run --hostfile hosts.json hpl-run       a hostfile of mlx.launch

A hostfile is Open MPI's (`name slots=4`), MPICH's (`name:4`) or mlx.launch's (JSON, with its `envs`;
the `ips` of its ring are where data goes first). Names may be ranges, n[01-12].
Without hosts, a Slurm allocation is used if there is one; else this machine.

When a rank fails, the others are asked to end, then get SIGTERM, then SIGKILL. Ctrl-C does the same; a second one
ends all at once. A rank's background processes end with it; those that have left its process group (setsid) end with
the last rank of their host, on Linux. Elsewhere, and where fulmen-run itself is killed on that host, they go on.

Exit status: that of the first rank that failed, which is named. 0 when none did;
  2  usage, or a program that is missing or of another build     3  a resource: memory, files, what --ssh names
  4  a rank was killed, a host was lost or cannot be reached, or --timeout is over      5  interrupted";

/// Arguments of `fulmen-run`.
#[derive(Parser, Clone, Debug)]
#[command(
    name = "fulmen-run",
    version,
    about = "Starts the ranks of a program on hosts, and sees that none outlives the job",
    long_about = LONG_ABOUT,
    after_help = AFTER,
    max_term_width = 100
)]
pub struct Cli {
    /// Ranks [default: one for each slot]
    #[arg(short = 'n', long = "np", value_name = "RANKS")]
    pub n: Option<usize>,

    /// Hosts, with slots after a colon: a,b:2,n[01-12]
    #[arg(long, visible_alias = "hosts", value_name = "HOSTS", conflicts_with = "hostfile")]
    pub host: Vec<String>,

    /// A file of hosts
    #[arg(long, short = 'f', visible_alias = "machinefile", value_name = "FILE")]
    pub hostfile: Option<PathBuf>,

    /// How ranks are dealt out to the hosts
    #[arg(long, value_enum, default_value_t, value_name = "ORDER")]
    pub map_by: MapBy,

    /// Set a variable for the ranks, or pass on this program's
    #[arg(short = 'x', value_name = "VAR[=VALUE]")]
    pub vars: Vec<OsString>,

    /// The folder to start the ranks in [default: this one, where it exists]
    #[arg(long, visible_alias = "wd", value_name = "FOLDER")]
    pub wdir: Option<PathBuf>,

    /// Threads of each rank (FULMEN_THREADS) [default: the host's cores, shared out]
    #[arg(long, value_name = "THREADS", value_parser = threads, conflicts_with = "threads_per_host")]
    pub threads_per_rank: Option<usize>,

    /// Threads of each host, shared out to its ranks
    #[arg(long, value_parser = threads, value_name = "THREADS")]
    pub threads_per_host: Option<usize>,

    /// Whether each thread is kept on a core of its own, where there are enough (FULMEN_BIND)
    #[arg(long, value_enum, value_name = "WHETHER")]
    pub bind: Option<Bind>,

    /// What joins the ranks: auto, shm, tcp, verbs or verbs:DEVICE,DEVICE; what cannot be had is an error (FULMEN_FABRIC)
    /// [default: auto, the best for each pair]
    #[arg(long, value_name = "FABRIC")]
    pub fabric: Option<Choice>,

    /// Interfaces that carry data between hosts: names (en5) or subnets (10.0.0.0/24) (FULMEN_INTERFACES)
    /// [default: all but tunnels]
    #[arg(long, value_parser = interfaces, value_name = "INTERFACES")]
    pub interfaces: Option<String>,

    /// Put the number of its rank before each line
    #[arg(long)]
    pub tag_output: bool,

    /// Whose output is shown
    #[arg(long, value_enum, default_value_t, value_name = "RANKS")]
    pub output: Which,

    /// Write each rank's output to FOLDER/rank.N.out and .err, byte by byte (what is shown is cut into whole lines)
    #[arg(long, value_name = "FOLDER")]
    pub output_dir: Option<PathBuf>,

    /// What starts a command on a host: CMD HOST COMMAND, words as in a shell [default: ssh]
    #[arg(long, value_parser = ssh, value_name = "CMD")]
    pub ssh: Option<String>,

    /// So many hosts are reached directly; where there are more, each of these reaches some of the others, which it must be able
    /// to do over ssh as well
    #[arg(long, value_name = "HOSTS", default_value = "64", value_parser = clap::value_parser!(u32).range(1..))]
    pub fan_out: u32,

    /// Where fulmen-run is on the other hosts [default: where it is on this one]
    #[arg(long, value_name = "PATH", conflicts_with = "copy")]
    pub agent_path: Option<PathBuf>,

    /// Copy fulmen-run and the program to the other hosts, into a private folder that is removed
    #[arg(long)]
    pub copy: bool,

    /// Let the program (and fulmen-run) be of another build on other hosts
    #[arg(long)]
    pub any_build: bool,

    /// After a failure everything is over within this time, its discovery included
    #[arg(long, value_parser = seconds, value_name = "SECONDS", default_value = "10")]
    pub silence: Duration,

    /// Give up a host that does not answer within this time
    #[arg(long, value_parser = seconds, value_name = "SECONDS", default_value = "9")]
    pub start_timeout: Duration,

    /// Give up when ranks do not meet within this time of the first's coming
    #[arg(long, value_parser = seconds, value_name = "SECONDS", default_value = "60")]
    pub meet_timeout: Duration,

    /// End the job after this time
    #[arg(long, value_parser = seconds, value_name = "SECONDS")]
    pub timeout: Option<Duration>,

    /// Say which ranks are started where
    #[arg(long, short)]
    pub verbose: bool,

    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// Whether threads are bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Bind {
    /// Each thread is kept on a core
    Core,
    /// The system decides
    None,
}

/// Whose output is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum Which {
    /// All ranks'
    #[default]
    All,
    /// Rank 0's
    #[value(name = "0")]
    Rank0,
    /// Nobody's
    None,
}

fn interfaces(text: &str) -> Result<String, fulmen::Error> {
    let parsed: Result<Vec<On>, _> = text.split(',').map(|on| on.trim().parse()).collect();
    parsed.map(|_| text.to_owned())
}

fn ssh(text: &str) -> Result<String, String> {
    words(text).map(|_| text.to_owned())
}

/// No host has more cores.
const MOST_THREADS: usize = 4096;

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MOST_THREADS).contains(&n) => Ok(n),
        _ => Err(format!("give a whole number from 1 to {MOST_THREADS}")),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(value) if value >= 0.1 => {
            Duration::try_from_secs_f64(value).map_err(|_| "too long: write seconds, such as 10".to_string())
        }
        _ => Err("must be at least 0.1: write seconds, such as 10".to_string()),
    }
}

/// Writes `mpirun`'s long options, which begin with one dash, as ours: up to the program, which has its own, and is
/// marked with `--`.
pub fn with_two_dashes(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    const LONG: [&str; 7] = ["-np", "-host", "-hosts", "-hostfile", "-machinefile", "-wdir", "-wd"];
    let command = Cli::command();
    let takes_value = |word: &str| {
        command.get_arguments().any(|a| {
            let long = word.strip_prefix("--").is_some_and(|name| {
                a.get_long() == Some(name) || a.get_all_aliases().is_some_and(|all| all.contains(&name))
            });
            let short =
                word.strip_prefix('-').is_some_and(|s| a.get_short().is_some_and(|c| s == c.to_string()));
            (long || short) && a.get_action().takes_values()
        })
    };
    let mut args = args.into_iter();
    let mut all: Vec<OsString> = args.next().into_iter().collect();
    while let Some(arg) = args.next() {
        let Some(word) = arg.to_str().filter(|w| w.starts_with('-') && *w != "--") else {
            if arg != "--" {
                all.push("--".into());
            }
            all.push(arg);
            break;
        };
        let word = if LONG.contains(&word) { format!("-{word}") } else { word.to_string() };
        let value = takes_value(&word);
        all.push(word.into());
        if value {
            all.extend(args.next());
        }
    }
    all.extend(args);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Cli, String> {
        let args = std::iter::once("fulmen-run").chain(text.split_whitespace()).map(OsString::from);
        Cli::try_parse_from(with_two_dashes(args)).map_err(|e| {
            assert_eq!(e.exit_code(), 2);
            e.to_string()
        })
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn as_mpirun_is_called() {
        let cli = parse("-np 4 -host a,b:2 --host c -x A=1 -x B --wdir /x prog -np 7 -x --host y").unwrap();
        assert_eq!((cli.n, cli.host), (Some(4), vec!["a,b:2".to_string(), "c".into()]));
        assert_eq!(cli.vars, ["A=1", "B"]);
        assert_eq!(cli.command, ["prog", "-np", "7", "-x", "--host", "y"]);
        assert_eq!(cli.silence, Duration::from_secs(10));
        let cli = parse("-n 2 -machinefile f --map-by node --tag-output --output 0 -- -odd -np 3").unwrap();
        assert_eq!((cli.hostfile, cli.map_by), (Some("f".into()), MapBy::Node));
        assert_eq!((cli.output, cli.command), (Which::Rank0, vec!["-odd".into(), "-np".into(), "3".into()]));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, words) in [
            ("-n 4", "required"),
            ("-n x prog", "invalid value 'x'"),
            ("--silence 0 prog", "must be at least 0.1"),
            ("--host a --hostfile f prog", "cannot be used with"),
            ("--nonsense prog", "unexpected argument"),
            ("--fabric ib prog", "give auto, shm, tcp, verbs"),
            ("--interfaces en5,,en6 prog", "is empty"),
            ("--threads-per-rank 0 prog", "give a whole number from 1 to 4096"),
            ("--threads-per-host 99999 prog", "give a whole number from 1 to 4096"),
            ("--ssh= prog", "names no command"),
            ("--ssh ssh' prog", "a quote that is not closed"),
        ] {
            let message = parse(text).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }
}
