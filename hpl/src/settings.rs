//! From the command line and `HPL.dat` to one set of settings; nothing is started here.
//!
//! Two steps, because sizing needs the speed of the machine: [`request`] reads and checks what the
//! user said, [`Request::settle`] fills what was left open.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fulmen::Error;
use fulmen::comm::Cables;
use fulmen::fabric::mixed;

use crate::apart;
use crate::auto::{self, Choice};
use crate::cabling;
use crate::cli::{Cli, Fabric, Wanted};
use crate::dat;
use crate::exit::Failure;
use crate::footprint::{Home, Shape};
use crate::limits;
use crate::machine::Host;
use crate::params::{DEEPEST, Input, Sink};
use crate::plan::Rate;
use crate::report;
use crate::units;

/// Larger files, and devices that never end, are no HPL.dat.
const LARGEST: u64 = 1 << 20;

/// Larger grids are slips of the hand: the largest machines have a few ten thousand nodes.
const MOST_RANKS: usize = 1 << 20;

/// One machine is not asked for more threads than this, or 16 a core: more is a slip of the hand, or a plan for another.
const MOST_THREADS: usize = 256;

/// What the user said, checked as far as it can be without knowing the machine.
#[derive(Clone, Debug)]
pub struct Request {
    /// The file's values under the flags'.
    pub input: Input,
    /// Whether N, NB and the grid were said.
    pub given: Given,
    /// `HPL.dat`, if one was read.
    pub file: Option<PathBuf>,
    /// Repairs and doubts, ready to print.
    pub warnings: Vec<String>,
    /// Things to know, ready to print.
    pub notes: Vec<String>,
    /// How the ranks are joined, if they are already.
    pub cables: Option<Cables>,
    /// Who the ranks are.
    pub home: Home,
    /// Where the JSON report goes.
    json: Option<Sink>,
    cli: Cli,
    /// What the ranks are.
    fabric: Fabric,
}

/// What was said and what is left to choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Given {
    /// N.
    pub n: bool,
    /// NB.
    pub nb: bool,
    /// P and Q.
    pub grid: bool,
    /// PMAP.
    pub pmap: bool,
    /// BCAST.
    pub bcast: bool,
}

/// Everything that a job needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The runs.
    pub input: Input,
    /// Ranks to start: at least what the largest grid needs.
    pub ranks: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// What the ranks are.
    pub fabric: Fabric,
    /// Who the ranks are.
    pub home: Home,
    /// Cores of the host that was planned for.
    pub cores: usize,
    /// The back end, as the library parses it: `native`, `reference`, `blas`, `blas:PATH`.
    pub kernels: String,
    /// Silence after which a rank is lost.
    pub silence: Duration,
    /// Wait after which a living rank is given up.
    pub timeout: Duration,
    /// Where the JSON report goes.
    pub json: Option<Sink>,
    /// `HPL.dat`, if one was read.
    pub file: Option<PathBuf>,
    /// Where the certificate's files go.
    pub bundle: Option<PathBuf>,
    /// Print the hash of x.
    pub hash: bool,
    /// Print nothing of our own.
    pub quiet: bool,
    /// Whether to say what joins each two ranks.
    pub verbose: bool,
    /// Only say what would run.
    pub check: bool,
    /// What was chosen for the user, and why.
    pub choices: Vec<Choice>,
    /// Repairs and doubts, ready to print.
    pub warnings: Vec<String>,
    /// Things to know, ready to print.
    pub notes: Vec<String>,
}

/// Reads the file (if any) and puts the flags over it. `folder` is where `HPL.dat` is looked for when
/// no file is named.
///
/// # Errors
/// Whatever is wrong with the file or the flags: exit 2.
pub fn request(cli: &Cli, folder: &Path) -> Result<Request, Failure> {
    if let (Some(first), Some(more)) = (&cli.file, cli.more.first()) {
        let problem = format!("is one file too many: {} is given already", first.display());
        return Err(Error::argument("HPL.dat", more.display(), problem, "run one at a time").into());
    }
    let named = cli.file.as_ref().or(cli.input.as_ref());
    let found = folder.join("HPL.dat");
    // A folder or a dangling link of that name is an error, not a file that is not there.
    let file = named.cloned().or_else(|| found.symlink_metadata().is_ok().then_some(found));
    let (mut warnings, mut notes) = (vec![], vec![]);
    let mut given = Given::default();
    let mut input = match &file {
        None => Input::default(),
        Some(path) => {
            let shown = if named.is_some() { path.display().to_string() } else { "HPL.dat".to_string() };
            let bytes = limits::read(path, LARGEST).map_err(|e| {
                let remedy = "name a file that you may read, or give the values as flags (see --help)";
                Error::argument("HPL.dat", &shown, format!("cannot be read: {e}"), remedy)
            })?;
            let parsed = dat::read(&shown, &bytes).map_err(Failure::Input)?;
            given = Given { n: true, nb: true, grid: true, pmap: true, bcast: true };
            if named.is_none() {
                notes.push(format!("{shown} of this folder is run (name another file, or start elsewhere)"));
            }
            warnings.extend(parsed.warnings.iter().map(|w| w.to_string()));
            notes.extend(parsed.notes);
            // A flag says otherwise.
            notes.extend(parsed.device.filter(|_| cli.output.is_none()));
            parsed.input
        }
    };
    let json = cli.json.as_deref().map(report::file::meant);
    override_with(cli, json.as_ref(), &mut input, &mut given)?;
    apart::reports(file.as_deref(), &input.sink, json.as_ref())?;
    let fabric = own_fabric(cli)?;
    if let Some((p, q)) =
        input.grids.iter().find(|(p, q)| p.checked_mul(*q).is_none_or(|all| all > MOST_RANKS))
    {
        let problem = format!("is more than {MOST_RANKS} ranks");
        return Err(Error::argument("P x Q", format!("{p} x {q}"), problem, "give a smaller grid").into());
    }
    cap_depths(&mut input, &mut warnings);
    let home = if fabric == Fabric::Shm { Home::Processes } else { Home::Threads };
    Ok(Request { input, given, file, json, warnings, notes, cables: None, home, fabric, cli: cli.clone() })
}

/// What this program's own ranks are.
fn own_fabric(cli: &Cli) -> Result<Fabric, Error> {
    let launched = |name: &str, value: String| {
        let remedy = "start them so (fulmen-run --host a,b hpl-run ...), or leave it away";
        Err(Error::argument(name, value, "is for ranks that a launcher has started", remedy))
    };
    if let Some(on) = &cli.interfaces {
        let names: Vec<String> = on.iter().map(ToString::to_string).collect();
        return launched("--interfaces", names.join(","));
    }
    match &cli.fabric {
        None | Some(Wanted::Mem) => Ok(Fabric::Mem),
        Some(Wanted::Processes(mixed::Choice::Shm)) => Ok(Fabric::Shm),
        Some(other) => launched("--fabric", other.to_string()),
    }
}

fn override_with(cli: &Cli, json: Option<&Sink>, input: &mut Input, given: &mut Given) -> Result<(), Error> {
    fn set<T: Clone>(flag: &Option<T>, value: &mut T) -> bool {
        flag.as_ref().is_some_and(|f| {
            *value = f.clone();
            true
        })
    }
    given.n |= set(&cli.n, &mut input.ns);
    given.nb |= set(&cli.nb, &mut input.nbs);
    given.grid |= grids(cli, input, given.grid)?;
    given.pmap |= set(&cli.pmap, &mut input.pmap);
    set(&cli.threshold, &mut input.threshold);
    set(&cli.seed, &mut input.seed);
    set(&cli.depth, &mut input.depths);
    given.bcast |= set(&cli.bcast, &mut input.bcasts);
    set(&cli.pfact, &mut input.pfacts);
    set(&cli.rfact, &mut input.rfacts);
    set(&cli.nbmin, &mut input.nbmins);
    set(&cli.ndiv, &mut input.ndivs);
    set(&cli.swap, &mut input.swap);
    set(&cli.swap_threshold, &mut input.swap_threshold);
    if let Some(path) = &cli.output {
        input.sink = report::file::meant(path);
    } else if let Sink::File(path) = &input.sink {
        input.sink = report::file::meant(path);
    }
    if json == Some(&Sink::Stdout) && input.sink == Sink::Stdout {
        input.sink = Sink::Stderr;
    }
    Ok(())
}

/// -P and -Q over the file's grids, and both against --ranks.
fn grids(cli: &Cli, input: &mut Input, from_file: bool) -> Result<bool, Error> {
    let list = |v: &[usize]| v.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let pair = |ps: &[usize], qs: &[usize]| -> Result<Vec<(usize, usize)>, Error> {
        if ps.len() != qs.len() {
            let problem = format!("{} values, but -Q has {} ({})", ps.len(), qs.len(), list(qs));
            let remedy = "P and Q pair up, one grid a pair: give as many of one as of the other";
            return Err(Error::argument("-P", list(ps), problem, remedy));
        }
        Ok(ps.iter().copied().zip(qs.iter().copied()).collect())
    };
    // The other side of the grid, from the file or from the number of ranks.
    let other = |flag: &str, these: &[usize], theirs: fn(&(usize, usize)) -> usize| {
        if from_file {
            return Ok(input.grids.iter().map(theirs).collect::<Vec<_>>());
        }
        let missing = if flag == "-P" { "-Q" } else { "-P" };
        let Some(ranks) = cli.ranks else {
            let remedy = format!("give {missing} too, or --ranks");
            return Err(Error::argument(flag, list(these), "a grid is P x Q", remedy));
        };
        match these.iter().find(|&&one| !ranks.is_multiple_of(one)) {
            Some(one) => {
                let problem = format!("{one} does not divide {ranks} ranks");
                let by = cli.ranks_by.as_deref().unwrap_or("--ranks");
                let remedy = format!("give {missing} too, or another number of ranks ({by})");
                Err(Error::argument(flag, list(these), problem, remedy))
            }
            None => Ok(these.iter().map(|one| ranks / one).collect()),
        }
    };
    let given = match (&cli.p, &cli.q) {
        (Some(ps), Some(qs)) => {
            input.grids = pair(ps, qs)?;
            true
        }
        (Some(ps), None) => {
            input.grids = pair(ps, &other("-P", ps, |g| g.1)?)?;
            true
        }
        (None, Some(qs)) => {
            input.grids = pair(&other("-Q", qs, |g| g.0)?, qs)?;
            true
        }
        (None, None) => from_file,
    };
    let needed = input.ranks_needed();
    match cli.ranks {
        Some(ranks) if given && needed > ranks => {
            let (p, q) = input.grids.iter().copied().max_by_key(|(p, q)| p * q).unwrap_or((1, 1));
            let Some(by) = &cli.ranks_by else {
                let problem = format!("the {p} x {q} grid needs {needed}, --ranks has {ranks}");
                let remedy = format!("leave --ranks away, raise it to {needed}, or take a smaller grid");
                return Err(Error::argument("--ranks", ranks, problem, remedy));
            };
            let problem = format!("needs {needed} ranks, and this job has {ranks} by {by}");
            let alone = if by.contains('=') { ", or unset the variable to run alone" } else { "" };
            let remedy = format!("start {needed} with that launcher, take a smaller grid{alone}");
            Err(Error::argument("grid", format!("{p} x {q}"), problem, remedy))
        }
        _ => Ok(given),
    }
}

fn cap_depths(input: &mut Input, warnings: &mut Vec<String>) {
    if let Some(&deepest) = input.depths.iter().filter(|d| **d > DEEPEST).max() {
        warnings.push(format!(
            "DEPTH {deepest}: {DEEPEST} panels are kept ahead at most, and {DEEPEST} is taken\n    \
             deeper look-ahead costs memory and gains nothing"
        ));
        input.depths.iter_mut().for_each(|d| *d = (*d).min(DEEPEST));
    }
}

impl Request {
    /// Whether the speed of the machine is needed to settle it.
    pub fn needs_rate(&self) -> bool {
        !self.given.n
    }

    /// The back end that was asked for.
    pub fn kernels(&self) -> &str {
        self.cli.kernels.as_deref().unwrap_or("native")
    }

    /// Ranks and threads per rank, as far as they were said, on a host.
    pub fn shape(&self, host: &Host) -> (usize, usize) {
        let needed = if self.given.grid { self.input.ranks_needed() } else { 1 };
        let alone = !self.given.grid && self.cli.ranks.is_none() && self.cli.threads.is_none();
        let ranks = self.cli.ranks.unwrap_or(if alone { auto::ranks(host) } else { needed });
        (ranks, self.cli.threads.unwrap_or_else(|| (host.cores / ranks).max(1)))
    }

    /// The same, as what shares the memory of the host with a matrix.
    pub fn crowd(&self, host: &Host) -> Shape {
        let (ranks, threads) = self.shape(host);
        Shape { ranks, threads, home: self.home, blas: is_foreign(self.kernels()), cores: host.cores }
    }

    /// Refuses more threads than a machine can be asked for.
    ///
    /// # Errors
    /// [`Error::Argument`] with both numbers.
    pub fn must_be_startable(&self, host: &Host) -> Result<(), Error> {
        let (ranks, threads) = self.shape(host);
        let most = MOST_THREADS.max(16 * host.cores);
        if ranks.saturating_mul(threads) <= most {
            return Ok(());
        }
        let problem = format!(
            "this machine has {}, and starts {most} threads at most",
            units::count(host.cores, "core")
        );
        let remedy = "give a smaller grid, or fewer --threads; --check plans for other machines";
        Err(Error::argument("ranks x threads", format!("{ranks} x {threads}"), problem, remedy))
    }

    /// Fills what was left open.
    pub fn settle(self, host: &Host, rate: Rate) -> Settings {
        let shape = self.crowd(host);
        let Shape { ranks, threads, home, cores, .. } = shape;
        let Request { mut input, given, file, json, warnings, mut notes, cables, cli, fabric, .. } = self;
        let mut choices = auto::fill(&mut input, given, &shape, host, rate);
        if let Some(cables) = &cables {
            cabling::settle(&mut input, given, cables, &mut choices, &mut notes);
        }
        let needed = input.ranks_needed();
        if ranks > needed {
            notes.push(format!(
                "{} of {ranks} ranks stay idle: the largest grid needs {needed}",
                ranks - needed
            ));
        }
        Settings {
            input,
            ranks,
            threads,
            fabric,
            home,
            cores,
            kernels: cli.kernels.unwrap_or_else(|| "native".to_string()),
            silence: cli.silence.unwrap_or(Duration::from_secs(10)),
            timeout: cli.timeout.unwrap_or(Duration::from_secs(600)),
            json,
            file,
            bundle: cli.bundle,
            hash: cli.hash,
            quiet: cli.quiet,
            verbose: cli.verbose,
            check: cli.check,
            choices,
            warnings,
            notes,
        }
    }
}

impl Settings {
    /// What shares the memory with the matrices.
    pub fn shape(&self) -> Shape {
        let Settings { ranks, threads, home, cores, .. } = *self;
        Shape { ranks, threads, home, blas: is_foreign(&self.kernels), cores }
    }
}

/// Whether these kernels, in the user's words, are a library's.
fn is_foreign(kernels: &str) -> bool {
    kernels.starts_with("blas")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use fulmen::dist::memory::OfProcess;

    fn cli(args: &str) -> Cli {
        Cli::try_parse_from(std::iter::once("hpl-run").chain(args.split_whitespace())).unwrap()
    }

    fn asked(args: &str) -> Result<Request, String> {
        let nowhere = tempfile::tempdir().unwrap();
        request(&cli(args), nowhere.path()).map_err(|e| {
            assert_eq!(e.status() as u8, 2);
            e.to_string()
        })
    }

    fn host(cores: usize) -> Host {
        Host {
            name: "this machine".into(),
            cores,
            numa_nodes: 1,
            available: Some(24 << 30),
            bound: "free memory".into(),
            limits: OfProcess::UNLIMITED,
        }
    }

    fn settled(args: &str, cores: usize) -> Settings {
        asked(args).unwrap().settle(&host(cores), Rate::measured(75.0 * cores as f64))
    }

    const DAT: &str = "a\nb\nHPL.out\n6\n1\n500\n1\n64\n0\n2\n2 1\n2 4\n16.0\n1\n2\n1\n4\n1\n2\n1\n1\n1\n1\n1\n1\n2\n\
                       64\n0\n0\n1\n8\n";

    #[test]
    fn flags_stand_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("HPL.dat"), DAT).unwrap();
        let plain = request(&cli(""), folder.path()).unwrap();
        assert_eq!((plain.input.ns.clone(), plain.input.grids.clone()), (vec![500], vec![(2, 2), (1, 4)]));
        assert!(plain.notes[0].contains("HPL.dat of this folder is run"));
        let over = request(&cli("-N 600 --depth 0,64 -Q 3,5"), folder.path()).unwrap();
        assert_eq!((over.input.ns.clone(), over.input.grids.clone()), (vec![600], vec![(2, 3), (1, 5)]));
        assert_eq!(over.input.depths, [0, 2]);
        assert!(over.warnings[0].starts_with("DEPTH 64"));
        let wrong = request(&cli("-Q 3"), folder.path()).unwrap_err().to_string();
        assert!(wrong.contains("-P: 2,1: 2 values, but -Q has 1 (3)"), "{wrong}");
        let settings = plain.settle(&host(2), Rate::measured(100.0));
        assert_eq!((settings.ranks, settings.threads), (4, 1));
    }

    #[test]
    fn k2_05_ranks_and_grids() {
        let message = asked("-P 4 -Q 4 --ranks 4").unwrap_err();
        assert!(message.contains("--ranks: 4: the 4 x 4 grid needs 16, --ranks has 4"), "{message}");
        let settings = settled("-N 100 -P 1 -Q 2 --ranks 4", 4);
        assert_eq!(settings.ranks, 4);
        assert!(settings.notes.iter().any(|n| n.starts_with("2 of 4 ranks stay idle")));
    }

    #[test]
    fn slips_of_the_hand_are_refused() {
        for grid in ["-P 2147483647 -Q 2147483647", "-P 1 -Q 1048577"] {
            assert!(asked(grid).unwrap_err().contains("is more than 1048576 ranks"), "{grid}");
        }
        let refused =
            |args: &str| asked(args).unwrap().must_be_startable(&host(2)).map_err(|e| e.to_string());
        let message = refused("--threads 100000").unwrap_err();
        assert!(
            message.contains("1 x 100000: this machine has 2 cores, and starts 256 threads at most"),
            "{message}"
        );
        assert!(refused("-P 16 -Q 17").is_err() && refused("-P 16 -Q 16").is_ok());
    }

    /// Who has decided on the number of ranks is named, and nobody else.
    #[test]
    fn what_started_the_ranks_is_named() {
        let cli = Cli { ranks: Some(1), ranks_by: Some("PMI_SIZE=1 (MPICH)".into()), ..cli("-P 1 -Q 2") };
        let message = request(&cli, tempfile::tempdir().unwrap().path()).unwrap_err().to_string();
        assert!(
            message.contains("grid: 1 x 2: needs 2 ranks, and this job has 1 by PMI_SIZE=1 (MPICH)"),
            "{message}"
        );
        assert!(!message.contains("--ranks"), "{message}");
        let message = asked("one.dat two.dat").unwrap_err();
        assert!(message.contains("two.dat: is one file too many: one.dat is given already"), "{message}");
        let message = asked("--interfaces en5,10.0.0.0/24").unwrap_err();
        assert!(
            message.contains("--interfaces: en5,10.0.0.0/24: is for ranks that a launcher has started"),
            "{message}"
        );
    }

    #[test]
    fn half_a_grid() {
        assert!(asked("-P 2").unwrap_err().contains("-P: 2: a grid is P x Q\n    give -Q too, or --ranks"));
        assert!(asked("-P 2 --ranks 3").unwrap_err().contains("-P: 2: 2 does not divide 3 ranks"));
        assert_eq!(asked("-P 2 --ranks 6").unwrap().input.grids, [(2, 3)]);
        assert_eq!(asked("-Q 3,2 --ranks 6").unwrap().input.grids, [(2, 3), (3, 2)]);
        assert!(asked("-P 1,2 -Q 3").unwrap_err().contains("pair up"));
    }

    #[test]
    fn files_that_cannot_be_read() {
        let message = asked("/nonexistent/HPL.dat").unwrap_err();
        assert!(message.contains("HPL.dat: /nonexistent/HPL.dat: cannot be read: "), "{message}");
        let message = asked("/dev/zero").unwrap_err();
        assert!(message.contains("/dev/zero: cannot be read: it is larger than 1.00 MiB"), "{message}");
        let folder = tempfile::tempdir().unwrap();
        let found = folder.path().join("HPL.dat");
        std::fs::create_dir(&found).unwrap();
        let error = request(&cli(""), folder.path()).unwrap_err().to_string();
        assert!(error.contains("HPL.dat: HPL.dat: cannot be read: "), "{error}");
        std::fs::remove_dir(&found).unwrap();
        std::os::unix::fs::symlink("nowhere", &found).unwrap();
        let error = request(&cli(""), folder.path()).unwrap_err().to_string();
        assert!(error.contains("HPL.dat: HPL.dat: cannot be read: "), "{error}");
        std::fs::write(folder.path().join("x.dat"), DAT.replacen("500", "1e2", 1)).unwrap();
        let named = cli(&folder.path().join("x.dat").display().to_string());
        let error = request(&named, folder.path()).unwrap_err();
        assert_eq!(error.status() as u8, 2);
        assert!(error.to_string().contains("x.dat:6: N: `1e2` is not a whole number"), "{error}");
    }

    #[test]
    fn json_on_stdout_moves_the_report() {
        assert_eq!(asked("--json -").unwrap().input.sink, Sink::Stderr);
        assert_eq!(asked("--json - --output x").unwrap().input.sink, Sink::File("x".into()));
        for other in ["x", "./x", "src/../x"] {
            assert!(asked(&format!("--json x --output {other}")).unwrap_err().contains("name another file"));
        }
        assert!(asked("--json x --output src/x").is_ok());
    }

    #[test]
    fn threads_share_the_cores() {
        let shape = |args: &str, cores| {
            let s = settled(args, cores);
            (s.ranks, s.threads)
        };
        assert_eq!(shape("", 2), (1, 2));
        assert_eq!(shape("-P 1 -Q 2", 2), (2, 1));
        assert_eq!(shape("-P 2 -Q 3", 4), (6, 1));
        assert_eq!(shape("--threads 1", 8), (1, 1));
        assert_eq!(shape("--ranks 4", 8), (4, 2));
    }
}
