//! `hpl-run doctor`: looks at the machine before a job does, recognises what is known to go wrong, and says what to do.
//!
//! [`gather`] asks the system and fills [`facts`], [`probe`] tries its RDMA devices; [`rdma`] and [`host`] are pure rules
//! from facts to [`finding`]s; [`report`] prints them. [`mlx`] reads and writes the files that tell which cable leads where.
//! As the ranks of a [`job`] it looks at all their hosts, tries the RDMA cables between them ([`pairs`]), and measures the
//! [`network`].

mod cache;
pub mod facts;
pub mod finding;
pub mod gather;
pub mod host;
pub mod job;
pub mod mlx;
pub mod network;
mod notes;
pub mod pairs;
pub mod probe;
pub mod rdma;
pub mod report;
pub mod table;

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use fulmen::{Error, Result};
use serde::{Deserialize, Serialize};

use self::facts::Facts;
use self::finding::{DEVICES, Finding, PORTS, Weight};
use self::mlx::Cables;
use self::network::Network;
use crate::exit::Status;
use crate::interrupt;
use crate::limits;
use crate::params::Sink;
use crate::report::file::Target;
use crate::stdout;

/// Arguments of `hpl-run doctor`.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// Print facts and findings for programs, in place of the tables
    #[arg(long)]
    pub json: bool,

    /// What `hpl-run doctor --json` printed on another host; all hosts are compared. May be repeated
    #[arg(long = "with", value_name = "FILE")]
    pub with: Vec<PathBuf>,

    /// Check a device matrix or hostfile of mlx.launch against the hosts
    #[arg(long, value_name = "FILE")]
    pub matrix: Option<PathBuf>,

    /// Try the RDMA devices anew, also where that was done before on this build of the system
    #[arg(long)]
    pub fresh: bool,

    /// What a process that tries devices is given: where to write, and what to leave alone
    #[arg(long, hide = true, value_name = "FILE")]
    pub probe: Option<PathBuf>,

    /// Of those devices, one that such a process leaves alone. May be repeated
    #[arg(long, hide = true, value_name = "DEVICE", requires = "probe")]
    pub skip: Vec<String>,

    /// Of those devices, one that it only looks at. May be repeated
    #[arg(long, hide = true, value_name = "DEVICE", requires = "probe")]
    pub known: Vec<String>,

    /// What a process that tries one end of a cable is given
    #[arg(long, hide = true, value_name = "FILE")]
    pub pair: Option<PathBuf>,

    /// Write a hostfile of mlx.launch with the device matrix, from the cables of all hosts
    #[arg(long, value_name = "FILE")]
    pub write_hostfile: Option<PathBuf>,
}

impl Options {
    /// Whether this process only tries devices for another, and prints nothing.
    pub fn is_child(&self) -> bool {
        self.probe.is_some() || self.pair.is_some()
    }
}

/// What `--json` prints, and `--with` reads.
#[derive(Serialize)]
struct Told<'a> {
    schema: &'static str,
    hosts: &'a [Facts],
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<&'a Network>,
    findings: &'a [Finding],
}

/// The form of what `--json` prints.
const SCHEMA: &str = "fulmen.doctor/1";

#[derive(Deserialize)]
struct Heard {
    hosts: Vec<Facts>,
}

/// Read first: another form may have other hosts.
#[derive(Deserialize)]
struct Form {
    schema: String,
}

/// All that is recognised, host by host and then between them.
pub fn judge(all: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    for facts in all {
        let mine = host::judge(facts).into_iter().chain(rdma::judge(facts));
        found.extend(mine.map(|f| Finding { host: facts.host.clone(), ..f }));
    }
    found.extend(rdma::compare(all));
    found.extend(host::compare(all));
    found
}

/// Looks, prints to `out`, and says how the program ends: with [`Status::Resources`] when something does not work.
///
/// # Errors
/// For files that cannot be read or written.
pub fn run(options: &Options, out: &mut dyn Write) -> Result<Status> {
    if let Some(notes) = &options.probe {
        return Ok(probe::child(notes, &options.skip, &options.known));
    }
    if let Some(notes) = &options.pair {
        return Ok(pairs::child(notes));
    }
    let files = Files::open(options)?;
    let here = look(options);
    if interrupt::count() > 0 {
        return Err(Error::Interrupted);
    }
    tell(options.json, files, vec![here], None, Vec::new(), out)
}

/// The files that the arguments name: read, and found to be writable, before the machine is asked.
#[derive(Default)]
struct Files {
    cables: Option<Cables>,
    heard: Vec<Facts>,
    hostfile: Option<(PathBuf, Target)>,
}

impl Files {
    fn open(options: &Options) -> Result<Files> {
        stdout::must_be_open("what is found")?;
        let mut heard = Vec::new();
        for file in &options.with {
            let text = read("--with", file)?;
            let garbled = |e: serde_json::Error| {
                let remedy = "give what `hpl-run doctor --json` printed on that host";
                Error::argument("--with", file.display(), format!("is not that: {e}"), remedy)
            };
            let Form { schema } = serde_json::from_str(&text).map_err(garbled)?;
            if schema != SCHEMA {
                let problem = format!("is of the form {schema:?}, and this program reads {SCHEMA}");
                let remedy = "run the same version of hpl-run on all hosts";
                return Err(Error::argument("--with", file.display(), problem, remedy));
            }
            let told: Heard = serde_json::from_str(&text).map_err(garbled)?;
            if told.hosts.is_empty() {
                let remedy = "give what `hpl-run doctor --json` printed on that host";
                return Err(Error::argument("--with", file.display(), "tells of no host", remedy));
            }
            heard.extend(told.hosts);
        }
        let cables = options
            .matrix
            .as_ref()
            .map(|file| Cables::parse(&read("--matrix", file)?, &file.display().to_string()));
        let hostfile = options.write_hostfile.clone().map(|file| {
            Target::open(&Sink::File(file.clone()), "--write-hostfile").map(|target| (file, target))
        });
        Ok(Files { cables: cables.transpose()?, heard, hostfile: hostfile.transpose()? })
    }
}

/// All about this host.
fn look(options: &Options) -> Facts {
    let mut here = gather::gather(&gather::Child);
    probe::look(&gather::Child, options.fresh, &mut here);
    here
}

/// Judges and prints what is known of these hosts and of their network; `findings`: what was found already.
fn tell(
    json: bool,
    files: Files,
    mut all: Vec<Facts>,
    network: Option<&Network>,
    mut findings: Vec<Finding>,
    out: &mut dyn Write,
) -> Result<Status> {
    all.extend(files.heard);
    findings.extend(judge(&all));
    findings.extend(network.iter().flat_map(|network| network::judge(network, &all)));
    findings.extend(files.cables.iter().flat_map(|cables| compare(cables, &all)));
    let text = if json {
        let told = Told { schema: SCHEMA, hosts: &all, network, findings: &findings };
        serde_json::to_string_pretty(&told).map_err(|e| Error::Internal(e.to_string()))? + "\n"
    } else {
        // Other hosts' words are no commands for this terminal.
        report::text(&all, network, &findings).replace(|c: char| c.is_control() && c != '\n', "?")
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Who closes the pipe early (`| head`) has read enough.
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            return Err(Error::System {
                what: "the doctor's report cannot be written".into(),
                os: e.to_string(),
            });
        }
        _ => {}
    }
    if let Some((file, mut target)) = files.hostfile {
        let cables = Cables::from_facts(&all);
        if cables.is_empty() {
            let devices = |facts: &Facts| facts.rdma.devices.get().map_or(0, Vec::len);
            let (problem, remedy) = match all.iter().map(devices).sum() {
                // Of one host alone the others may have some.
                0 if all.len() > 1 => (
                    "none of these hosts has an RDMA device",
                    "see `devices` above: nothing can join them by RDMA yet",
                ),
                _ => (
                    "no cable between the hosts is known",
                    "give the other hosts' facts: --with FILE, from `hpl-run doctor --json` on each",
                ),
            };
            return Err(Error::argument("--write-hostfile", file.display(), problem, remedy));
        }
        target
            .write_all(cables.hostfile().as_bytes())
            .and_then(|()| target.complete())
            .map_err(|e| Error::System { what: format!("writing {}", file.display()), os: e.to_string() })?;
    }
    let failed = findings.iter().any(|f| f.weight == Weight::Failure);
    Ok(if failed { Status::Resources } else { Status::Passed })
}

fn read(argument: &str, file: &Path) -> Result<String> {
    /// Facts of hundreds of hosts.
    const MOST: u64 = 64 << 20;
    let text = |bytes| String::from_utf8(bytes).map_err(|_| std::io::Error::other("it is no text"));
    limits::read(file, MOST).and_then(text).map_err(|e| {
        let remedy = "name a file that you may read";
        Error::argument(argument, file.display(), format!("cannot be read: {e}"), remedy)
    })
}

/// A device matrix against itself and against what the hosts have.
pub fn compare(cables: &Cables, all: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    for problem in cables.problems() {
        found.push(
            Finding::failure("matrix", PORTS, problem)
                .because("the device matrix cannot be right")
                .then("write it anew from the cables: `hpl-run doctor --with FILE --write-hostfile FILE`"),
        );
    }
    let at = cables.places(&all.iter().map(|facts| facts.host.as_str()).collect::<Vec<_>>());
    if cables.is_bare() {
        found.extend(all.iter().filter_map(|facts| in_no_row(cables, facts)));
    } else if at.iter().all(Option::is_none) && !cables.is_empty() {
        let names: Vec<&str> = cables.hosts.iter().map(|h| h.name.as_str()).collect();
        let here: Vec<&str> = all.iter().map(|f| f.host.as_str()).collect();
        let seen = format!("it is of {}, this is {}", names.join(", "), here.join(", "));
        found.push(
            Finding::failure("matrix-hosts", PORTS, seen)
                .because("none of the hosts of the matrix was looked at: nothing of it was compared")
                .then("run this on those hosts: `fulmen-run --hostfile FILE hpl-run doctor --matrix FILE`")
                .then("or name the hosts in the file as the system does: `hostname`"),
        );
    }
    for (facts, at) in all.iter().zip(at) {
        let Some(host) = at.filter(|_| !cables.is_bare()).map(|at| &cables.hosts[at]) else { continue };
        // Without a library there is no list, and no device either.
        let devices = facts.rdma.devices.get().map_or(&[][..], Vec::as_slice);
        for named in host.devices.iter().flatten() {
            if !devices.iter().any(|d| d.name == *named) {
                let cause = if devices.is_empty() {
                    "this host has no RDMA device at all; what it lacks is told above or below"
                } else {
                    "this host has no such device: numbers change with restarts and cables"
                };
                let mut finding =
                    Finding::failure("matrix-device", DEVICES, format!("the matrix names {named}"))
                        .because(cause)
                        .then("write the matrix anew: `hpl-run doctor --with FILE --write-hostfile FILE`");
                finding.host.clone_from(&facts.host);
                found.push(finding);
            }
        }
    }
    if cables.shape() == mlx::Shape::Apart && !cables.is_empty() {
        found.push(
            Finding::failure("cables-apart", PORTS, "not every host can be reached from every other")
                .because("the cables of the matrix leave hosts apart")
                .then("join them: a ring needs two ports a host, and nothing but Fulmen forwards"),
        );
    }
    found
}

/// A bare matrix does not say which row is whose: one that a host could have is looked for.
fn in_no_row(cables: &Cables, facts: &Facts) -> Option<Finding> {
    let devices = facts.rdma.devices.get().map_or(&[][..], Vec::as_slice);
    let has = |name: &String| devices.iter().any(|d| d.name == *name);
    let could_be = |host: &mlx::Host| host.devices.iter().flatten().all(has);
    (!cables.hosts.iter().any(could_be)).then(|| {
        let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
        let have = if names.is_empty() { "none".to_string() } else { names.join(", ") };
        let mut finding = Finding::failure(
            "matrix-device",
            DEVICES,
            format!("each row of the matrix names devices that are not here (here: {have})"),
        )
        .because("this host is none of the matrix, or its devices have other numbers since a restart")
        .then("write the matrix anew: `hpl-run doctor --with FILE --write-hostfile FILE`");
        finding.host.clone_from(&facts.host);
        finding
    })
}
