//! The launcher: from the command line to an exit code.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use fulmen::fabric::host_name;
use fulmen::job::env::{self, ADDRESSES, DEVICES, FABRIC, INTERFACES, Starter};
use fulmen::job::messages::{Below, Hidden, Order, Place, Program, RankStart, Start, Welcome, beat, silence};
use fulmen::job::variables;
use fulmen::{Error, Result};

use super::branch::{self, Branch};
use super::cli::{Bind, Cli};
use super::conduct::{Act, Conduct, HostPlan, Limits, Verdict};
use super::ears::{Ear, Heard, Piece, Sinks, Times};
use super::hosts::{self, Host};
use super::input::{self, Credit};
use super::output::Printer;
use super::place::{Placement, place};
use super::ssh::{self, Reach};
use super::{agent, cables, program, signals};
use crate::doctor::mlx::Cables;
use crate::{limits, stdout, units};

/// How often the clock is looked at.
const LOOK: Duration = Duration::from_millis(10);
/// An unfinished line is shown on a terminal after this time.
const IDLE: Duration = Duration::from_millis(50);
/// Pieces of output that may wait to be shown.
const PIECES: usize = 32;
/// What is left to be shown after a failure gets so long at least.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// Runs a job; the exit code. All is said on stderr.
pub fn run(cli: &Cli) -> u8 {
    let open = stdout::must_be_open("what ranks say (>/dev/null, if nobody is to read it)");
    let verdict = open.and_then(|()| prepare(cli)).and_then(|job| job.run());
    match verdict {
        Ok(Verdict { code, words }) => {
            words.into_iter().for_each(|w| say(&w));
            code
        }
        Err(e) => {
            say(&e.to_string());
            e.exit_code()
        }
    }
}

fn say(text: &str) {
    // A closed stderr must not stop the job.
    let _ = writeln!(std::io::stderr(), "fulmen-run: {text}");
}

/// A job as it is to be started.
struct Job<'a> {
    cli: &'a Cli,
    /// Those of mlx.launch's hostfile.
    cables: Option<Cables>,
    hosts: Vec<Host>,
    placement: Placement,
    program: PathBuf,
    own: PathBuf,
    folder: PathBuf,
    vars: Vec<(OsString, OsString)>,
}

fn prepare(cli: &Cli) -> Result<Job<'_>> {
    let system = |what: &str, e: std::io::Error| Error::System { what: what.into(), os: e.to_string() };
    let own = std::env::current_exe().map_err(|e| system("cannot find this program's own file", e))?;
    alone()?;
    let hostfile = cli.hostfile.as_deref().map(Hostfile::read).transpose()?;
    let hosts = find_hosts(cli, hostfile.as_ref())?;
    let placement = place(&hosts, cli.n, cli.map_by)?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let name = cli.command.first().map_or(OsStr::new(""), OsString::as_os_str);
    let program = program::find(name, std::env::var_os("PATH").as_deref(), beside)?;
    // Those of -x come later, and count.
    let cables = cables(hostfile.as_ref())?;
    let envs = cables.iter().flat_map(|cables| &cables.envs).map(OsString::from);
    let vars: Vec<OsString> = envs.chain(cli.vars.iter().cloned()).collect();
    let vars = program::variables(&vars, |name| std::env::var_os(name))?;
    let folder = match &cli.wdir {
        Some(folder) => std::path::absolute(folder).map_err(|e| system("--wdir", e))?,
        None => std::env::current_dir().map_err(|e| system("the current folder cannot be found", e))?,
    };
    Ok(Job { cli, cables, hosts, placement, program, own, folder, vars })
}

/// Of several ranks each would start a job of its own, all on the same cores.
fn alone() -> Result<()> {
    // What makes no sense as a rank's word is no reason not to start others.
    let Ok(Some(place)) = env::find(&variables()) else { return Ok(()) };
    let what = format!("is itself rank {} of {}, started by {}", place.rank, place.size, place.starter);
    match place.starter {
        _ if place.size == 1 => Ok(()),
        Starter::FulmenRun { .. } => Ok(()),
        // An allocation's variables are those of an interactive step as well.
        Starter::Slurm => {
            say(&format!("warning: this fulmen-run {what}: each of them starts a job of its own"));
            Ok(())
        }
        starter => Err(Error::argument(
            "fulmen-run",
            "",
            format!("{what}: each of them would start a job of its own"),
            format!("start the program with {starter} itself, without fulmen-run, or fulmen-run by itself"),
        )),
    }
}

/// Bytes of a hostfile that names more hosts than there are.
const LONGEST_HOSTFILE: u64 = 16 << 20;

/// A hostfile, read once: it may be a pipe.
struct Hostfile {
    shown: String,
    bytes: Vec<u8>,
}

impl Hostfile {
    fn read(file: &Path) -> Result<Hostfile> {
        let shown = file.display().to_string();
        match limits::read(file, LONGEST_HOSTFILE) {
            Ok(bytes) => Ok(Hostfile { shown, bytes }),
            Err(e) => Err(Error::argument(
                "--hostfile",
                shown,
                format!("cannot be read: {e}"),
                "name a file that you may read",
            )),
        }
    }
}

fn find_hosts(cli: &Cli, file: Option<&Hostfile>) -> Result<Vec<Host>> {
    if !cli.host.is_empty() {
        return hosts::from_list(&cli.host.join(","));
    }
    if let Some(file) = file {
        return hosts::from_file(&file.shown, &file.bytes);
    }
    match hosts::from_slurm(&variables())? {
        Some(hosts) => Ok(hosts),
        None => Ok(vec![Host { name: "localhost".into(), ..Host::default() }]),
    }
}

/// A hostfile of mlx.launch's.
fn cables(file: Option<&Hostfile>) -> Result<Option<Cables>> {
    // What is no text is of another dialect, or was refused as such.
    let Some((file, Ok(text))) = file.map(|file| (file, std::str::from_utf8(&file.bytes))) else {
        return Ok(None);
    };
    let text = text.trim_start_matches('\u{feff}');
    if !hosts::is_json(text) {
        return Ok(None); // a hostfile of another dialect
    }
    Cables::parse(text, &file.shown).map(Some)
}

/// Whether a name means this host, whose own name is `own`: then no ssh is needed.
fn is_here(own: &str, name: &str) -> bool {
    let short = own.split('.').next().unwrap_or_default();
    ["localhost", "127.0.0.1", "::1", own, short].contains(&name)
}

fn secret() -> Result<Hidden> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes)).map(|()| Hidden(bytes)).map_err(
        |e| Error::System { what: "no random numbers for the job's secret".into(), os: e.to_string() },
    )
}

/// What all hosts are to do.
struct Tasks {
    /// All that is not of one host's own; below it those that are reached over ssh.
    start: Start,
    /// This host, as often as the user names it.
    here: Vec<Place>,
}

impl Tasks {
    /// All hosts, by number.
    fn all(&self) -> Vec<&Place> {
        let mut all: Vec<&Place> = self.here.iter().chain(&self.start.below.hosts).collect();
        all.sort_by_key(|place| place.host);
        all
    }
}

impl Job<'_> {
    fn tasks(&self) -> Result<Tasks> {
        let cli = self.cli;
        let own = host_name();
        let here: Vec<bool> = self.hosts.iter().map(|h| is_here(&own, &h.name)).collect();
        let fingerprint = match cli.any_build {
            true => None,
            false => Some(program::fingerprint(&self.program)?),
        };
        let welcome = Welcome {
            hosts: self.placement.hosts.iter().map(|&h| self.hosts[h].name.clone()).collect(),
            secret: secret()?,
            bound_ms: cli.silence.as_millis() as u64,
            start_ms: cli.meet_timeout.as_millis() as u64,
        };
        let bytes = |s: &OsStr| s.as_bytes().to_vec();
        let mut vars: Vec<(Vec<u8>, Vec<u8>)> = self.vars.iter().map(|(k, v)| (bytes(k), bytes(v))).collect();
        let mut set = |name: &str, value: String| vars.push((name.into(), value.into_bytes()));
        if let Some(bind) = cli.bind {
            set("FULMEN_BIND", u8::from(bind == Bind::Core).to_string());
        }
        if let Some(threads) = cli.threads_per_rank {
            set("FULMEN_THREADS", threads.to_string());
        }
        if let Some(choice) = &cli.fabric {
            set(FABRIC, choice.to_string());
        }
        if let Some(on) = &cli.interfaces {
            set(INTERFACES, on.clone());
        }
        let names: Vec<&str> = welcome.hosts.iter().map(String::as_str).collect();
        // The RDMA devices from rank to rank.
        if let Some(devices) = self.cables.as_ref().and_then(|cables| cables::by_rank(cables, &names)) {
            set(DEVICES, devices);
        }
        let (mut all_here, mut below) = (vec![], vec![]);
        // Hosts that got no rank take no part.
        for (host, h) in self.hosts.iter().enumerate() {
            let mine = (0..self.placement.hosts.len()).filter(|&r| self.placement.hosts[r] == host);
            let ranks: Vec<RankStart> = mine
                .enumerate()
                .map(|(local, rank)| RankStart { rank: rank as u32, local: local as u32 })
                .collect();
            if ranks.is_empty() {
                continue;
            }
            let mut vars = vec![];
            if let Some(threads) = cli.threads_per_host {
                let each = (threads / ranks.len()).max(1);
                vars.push((b"FULMEN_THREADS".to_vec(), each.to_string().into_bytes()));
            }
            let number = (all_here.len() + below.len()) as u32;
            // Interfaces named by the user are the choice already.
            if !h.addresses.is_empty() && cli.interfaces.is_none() {
                let list: Vec<String> = h.addresses.iter().map(IpAddr::to_string).collect();
                vars.push((ADDRESSES.into(), list.join(",").into_bytes()));
            }
            let place = Place { host: number, name: h.name.clone(), ranks, vars };
            if here[host] { &mut all_here } else { &mut below }.push(place);
        }
        let reach = Reach::new(cli.ssh.as_deref(), cli.start_timeout);
        let at = cli.agent_path.as_deref().unwrap_or(&self.own);
        let start = Start {
            place: Place { host: 0, name: own, ranks: vec![], vars: vec![] },
            below: Below {
                hosts: below,
                fan_out: cli.fan_out,
                ssh: reach.words(),
                agent: (!cli.copy).then(|| bytes(at.as_os_str())),
            },
            welcome,
            program: Program {
                path: bytes(self.program.as_os_str()),
                fingerprint,
                args: cli.command[1..].iter().map(|a| a.clone().into_vec()).collect(),
            },
            folder: bytes(self.folder.as_os_str()),
            any_folder: cli.wdir.is_none(),
            vars,
        };
        Ok(Tasks { start, here: all_here })
    }

    fn run(self) -> Result<Verdict> {
        let cli = self.cli;
        let system = |what: &str, e: std::io::Error| Error::System { what: what.into(), os: e.to_string() };
        for &(host, ranks, slots) in &self.placement.crowded {
            let (slots, ranks) = (units::count(slots, "slot"), units::count(ranks, "rank"));
            say(&format!("warning: {} has {slots} and gets {ranks}", self.hosts[host].name));
        }
        let tasks = self.tasks()?;
        let live = std::io::stdout().is_terminal();
        let mut printer =
            Printer::new(std::io::stdout(), std::io::stderr(), cli.tag_output, cli.output, live);
        if let Some(folder) = &cli.output_dir {
            let made = printer.into_folder(folder.clone(), self.placement.hosts.len());
            printer = made.map_err(|e| {
                let remedy = "name a folder that you may write to";
                Error::argument("--output-dir", folder.display(), format!("cannot be written: {e}"), remedy)
            })?;
            let next = format!("rank.{}.out", self.placement.hosts.len());
            if folder.join(&next).exists() {
                let folder = folder.display();
                say(&format!(
                    "warning: {folder} has files of an earlier job with more ranks: {next} and on are not this one's"
                ));
            }
        }
        if cli.verbose {
            for place in tasks.all() {
                let ranks: Vec<String> = place.ranks.iter().map(|r| r.rank.to_string()).collect();
                let s = if ranks.len() == 1 { "" } else { "s" };
                say(&format!("{}: rank{s} {}", place.name, ranks.join(" ")));
            }
        }
        signals::listen();
        let (news, inbox) = mpsc::channel();
        let (output, pieces) = mpsc::sync_channel(PIECES);
        let mute = news.clone();
        let printing = thread::Builder::new()
            .name("output".into())
            .spawn(move || {
                if let Err(e) = print(printer, &pieces) {
                    let _ = mute.send(Heard::Mute(e.to_string()));
                    // Nobody shall wait for output that nobody gets.
                    pieces.iter().for_each(drop);
                }
            })
            .map_err(|e| system("no thread", e))?;
        let credit = Credit::default();
        let times = Times::of(tasks.all().len());
        let sinks = Sinks { news, output, credit: credit.clone(), times };
        let mut running = Running::start(&self, &tasks, &sinks)?;
        drop(sinks);
        let verdict = running.conduct(&inbox, &credit);
        let failed = running.conduct.failed();
        drop(running);
        // Whoever reads our output may take his time; when he wants the end, not for ever; after a failure, which took up to half of
        // that time to be found, as long as is left of it.
        let now = Instant::now();
        let until = failed.map_or(now + cli.silence, |at| (at + silence(cli.silence)).max(now + LAST_WORDS));
        let asked = signals::count();
        let patient = || verdict.code == 0 && signals::count() == asked;
        while !printing.is_finished() && (patient() || Instant::now() < until) {
            thread::sleep(Duration::from_millis(2));
        }
        // What could not be written after the agents had gone.
        let mute = inbox.try_iter().find_map(|heard| match heard {
            Heard::Mute(why) => Some(why),
            _ => None,
        });
        Ok(match mute {
            Some(why) if verdict.code == 0 => {
                Verdict { code: 3, words: Some(format!("the ranks' output cannot be written: {why}")) }
            }
            _ => verdict,
        })
    }
}

fn print<O: Write, E: Write>(mut printer: Printer<O, E>, pieces: &Receiver<Piece>) -> std::io::Result<()> {
    loop {
        match pieces.recv_timeout(IDLE) {
            Ok((rank, stream, bytes)) => printer.take(rank, stream, &bytes)?,
            Err(RecvTimeoutError::Timeout) => printer.idle()?,
            Err(RecvTimeoutError::Disconnected) => return printer.end(),
        }
    }
}

/// A job under way.
struct Running {
    conduct: Conduct,
    branches: Vec<Branch>,
    /// When each host was last heard.
    times: Times,
    names: Vec<String>,
    here: Vec<bool>,
    reach: Reach,
    fan_out: usize,
    bound: Duration,
    timeout: Option<Duration>,
    began: Instant,
    /// Commands that end agents which do not answer, and how long each has.
    reapers: Vec<(Child, Instant)>,
    input: bool,
}

impl Running {
    fn start(job: &Job<'_>, tasks: &Tasks, sinks: &Sinks) -> Result<Running> {
        let cli = job.cli;
        let began = Instant::now();
        let all = tasks.all();
        let above = branch::above(&tasks.start.below.hosts, cli.fan_out as usize);
        let plan = |place: &&Place| HostPlan {
            name: place.name.clone(),
            ranks: place.ranks.iter().map(|r| r.rank as usize).collect(),
            above: above.get(&place.host).map(|&host| host as usize),
        };
        let limits = Limits { start: cli.start_timeout, meet: cli.meet_timeout, bound: cli.silence };
        let mut hear = |hosts: &[u32]| Ear::new(hosts, sinks);
        let mut branches = vec![];
        for place in &tasks.here {
            let mut command = Command::new(&job.own);
            command.arg(agent::ARGUMENT);
            // It has the launcher's own files.
            let program = Program { fingerprint: None, ..tasks.start.program.clone() };
            let (place, below) = (place.clone(), Below::default());
            let start = Start { place, below, program, ..tasks.start.clone() };
            branches.push(Branch::start(command, None, start, &mut hear)?);
        }
        branches.extend(branch::grow(&tasks.start, hear)?);
        Ok(Running {
            conduct: Conduct::new(all.iter().map(plan).collect(), limits, began),
            branches,
            times: sinks.times.clone(),
            names: all.iter().map(|place| place.name.clone()).collect(),
            here: all.iter().map(|place| tasks.here.contains(place)).collect(),
            reach: Reach::new(cli.ssh.as_deref(), cli.start_timeout),
            fan_out: cli.fan_out as usize,
            bound: cli.silence,
            timeout: cli.timeout,
            began,
            reapers: vec![],
            input: false,
        })
    }

    /// The connection over which a host is reached.
    fn branch(&self, host: usize) -> Option<&Branch> {
        self.branches.iter().find(|branch| branch.hosts.contains(&(host as u32)))
    }

    /// When each host was last heard.
    fn heard(&self) -> Vec<Instant> {
        let mut heard: Vec<Instant> = (0..self.names.len()).map(|host| self.times.heard(host)).collect();
        for branch in &self.branches {
            let link = branch.link.heard();
            let (head, rest) = (branch.head() as usize, &branch.hosts[1..]);
            heard[head] = heard[head].max(link);
            // All wait for our own output, and their silence is our doing.
            if branch.link.is_busy() {
                rest.iter().for_each(|&host| heard[host as usize] = link);
            }
        }
        heard
    }

    fn conduct(&mut self, inbox: &Receiver<Heard>, credit: &Credit) -> Verdict {
        let (mut signals, mut beaten) = (0, Instant::now());
        while !self.conduct.is_over() {
            let heard = inbox.recv_timeout(LOOK);
            let now = Instant::now();
            let mut acts = match heard {
                Ok(Heard::News(host, news)) => self.conduct.hear(host, news, now),
                Ok(Heard::Gone(host, words, status)) => {
                    let well = status == ssh::WELL;
                    let words = self.reach.explain(&words, &status, &self.names[host]);
                    self.conduct.lost(host, &words, well, now)
                }
                Ok(Heard::Mute(why)) => {
                    self.conduct.give_up(3, format!("the ranks' output cannot be written: {why}"), now)
                }
                // All readers are gone, and each has said so before.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => vec![],
            };
            while signals < signals::count() {
                signals += 1;
                acts.extend(self.conduct.signal(&signals::words(), now));
            }
            if let Some(timeout) = self.timeout.take_if(|t| now - self.began > *t) {
                let words = format!(
                    "the job has run for {:.0} s, as long as --timeout lets it",
                    timeout.as_secs_f64()
                );
                acts.extend(self.conduct.give_up(4, words, now));
            }
            if now - beaten >= beat(self.bound) {
                beaten = now;
                self.branches.iter().for_each(|branch| branch.link.outbox.say(&Order::Beat));
                acts.extend(self.bury(now));
            }
            let heard = self.heard();
            acts.extend(self.conduct.tick(now, &heard));
            acts.into_iter().for_each(|act| self.act(act, credit));
        }
        self.reap();
        self.conduct.verdict()
    }

    /// Connections whose process is gone, though its stream is held open by what it has started.
    fn bury(&mut self, now: Instant) -> Vec<Act> {
        let mut acts = vec![];
        for i in 0..self.branches.len() {
            if self.branches[i].is_abandoned(now) {
                self.branches[i].link.outbox.close();
                let head = self.branches[i].head() as usize;
                acts.extend(self.conduct.lost(head, "ssh has ended, or was killed", false, now));
            }
        }
        acts
    }

    fn act(&mut self, act: Act, credit: &Credit) {
        match act {
            Act::TellAll(order) => {
                self.branches.iter().for_each(|branch| branch.link.outbox.say(&order));
                // Rank 0's host is the first, which is reached directly.
                let first = self.branch(self.conduct.host_of(0)).map(|branch| branch.link.outbox.clone());
                if order == Order::Go
                    && !self.input
                    && let Some(to) = first
                {
                    self.input = true;
                    let credit = credit.clone();
                    // Without it rank 0 gets no input, and its end none either.
                    let spawned = thread::Builder::new().name("input".into());
                    if let Err(e) = spawned.spawn(move || input::forward(&to, &credit)) {
                        say(&format!("warning: rank 0 gets no input: {e}"));
                    }
                }
            }
            Act::Cut(host) => {
                // Others below end themselves when they do not hear of us.
                let own = self.branch(host).filter(|branch| branch.head() as usize == host);
                own.iter().for_each(|branch| branch.link.cut());
                if let (false, Some(pid)) = (self.here[host], self.conduct.agent_pid(host))
                    && self.reapers.len() < self.fan_out
                {
                    let mut command = self.reach.command(&self.names[host], &ssh::kill(pid));
                    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                    // Half the bound went by in silence; the rest must do, also where the host is busy.
                    let until = Instant::now() + self.bound * 2 / 5;
                    self.reapers.extend(command.spawn().ok().map(|child| (child, until)));
                }
            }
            Act::Say(words) => say(&words),
        }
    }

    fn reap(&mut self) {
        for (reaper, until) in &mut self.reapers {
            while matches!(reaper.try_wait(), Ok(None)) && Instant::now() < *until {
                thread::sleep(LOOK);
            }
            // The host is out of reach.
            let _ = reaper.kill();
            let _ = reaper.wait();
        }
    }
}
