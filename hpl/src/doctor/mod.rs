//! `hpl-run doctor`: looks at the machine before a job does, recognises what is known to go wrong, and says what to do.
//!
//! [`gather`] asks the system and fills [`facts`], [`probe`] tries its RDMA devices; [`rdma`] and [`host`] are pure rules
//! from facts to [`finding`]s; [`report`] prints them. [`mlx`] reads and writes the files that tell which cable leads where.
//! As the ranks of a [`job`] it looks at all their hosts, and at the [`network`] between them.

pub mod facts;
pub mod finding;
pub mod gather;
pub mod host;
pub mod job;
pub mod mlx;
pub mod network;
pub mod probe;
pub mod rdma;
pub mod report;
pub mod table;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use fulmen::{Error, Result};
use serde::{Deserialize, Serialize};

use self::facts::Facts;
use self::finding::{DEVICES, Finding, PORTS, Weight};
use self::mlx::Cables;
use self::network::Network;
use crate::exit::Status;

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

    /// Write a hostfile of mlx.launch with the device matrix, from the cables of all hosts
    #[arg(long, value_name = "FILE")]
    pub write_hostfile: Option<PathBuf>,
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

#[derive(Deserialize)]
struct Heard {
    hosts: Vec<Facts>,
}

/// All that is recognised, host by host and then between them.
pub fn judge(all: &[Facts]) -> Vec<Finding> {
    let mut found = Vec::new();
    for facts in all {
        let mine = host::judge(facts).into_iter().chain(rdma::judge(facts));
        found.extend(mine.map(|f| Finding { host: facts.host.clone(), ..f }));
    }
    found.extend(host::compare(all));
    found
}

/// Looks, prints to `out`, and says how the program ends: with [`Status::Resources`] when something does not work.
///
/// # Errors
/// For files that cannot be read or written.
pub fn run(options: &Options, out: &mut dyn Write) -> Result<Status> {
    if let Some(notes) = &options.probe {
        return Ok(probe::child(notes, &options.skip));
    }
    tell(options, vec![look(options)], None, Vec::new(), out)
}

/// All about this host.
fn look(options: &Options) -> Facts {
    let mut here = gather::gather(&gather::Child);
    probe::look(&gather::Child, options.fresh, &mut here);
    here
}

/// Judges and prints what is known of these hosts and of their network; `findings`: what was found already.
fn tell(
    options: &Options,
    mut all: Vec<Facts>,
    network: Option<&Network>,
    mut findings: Vec<Finding>,
    out: &mut dyn Write,
) -> Result<Status> {
    for file in &options.with {
        let heard: Heard = serde_json::from_str(&read(file)?).map_err(|e| {
            let remedy = "give what `hpl-run doctor --json` printed on that host";
            Error::argument("--with", file.display(), format!("is not that: {e}"), remedy)
        })?;
        all.extend(heard.hosts);
    }
    findings.extend(judge(&all));
    findings.extend(network.iter().flat_map(|network| network::judge(network, &all)));
    if let Some(file) = &options.matrix {
        let cables = Cables::parse(&read(file)?, &file.display().to_string())?;
        findings.extend(compare(&cables, &all));
    }
    if let Some(file) = &options.write_hostfile {
        let cables = Cables::from_facts(&all);
        if cables.is_empty() {
            let problem = "no cable between the hosts is known";
            let remedy = "give the other hosts' facts: --with FILE, from `hpl-run doctor --json` on each";
            return Err(Error::argument("--write-hostfile", file.display(), problem, remedy));
        }
        std::fs::write(file, cables.hostfile()).map_err(|e| system("writing", file, &e))?;
    }
    let text = if options.json {
        let told = Told { schema: "fulmen.doctor/1", hosts: &all, network, findings: &findings };
        serde_json::to_string_pretty(&told).map_err(|e| Error::Internal(e.to_string()))? + "\n"
    } else {
        report::text(&all, network, &findings)
    };
    // Who closes the pipe early (`| head`) has read enough.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    let failed = findings.iter().any(|f| f.weight == Weight::Failure);
    Ok(if failed { Status::Resources } else { Status::Passed })
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|e| system("reading", file, &e))
}

fn system(what: &str, file: &Path, e: &std::io::Error) -> Error {
    Error::System { what: format!("{what} {}", file.display()), os: e.to_string() }
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
    for host in &cables.hosts {
        let Some(facts) = all.iter().find(|f| f.host.split('.').next() == host.name.split('.').next()) else {
            continue;
        };
        let Some(devices) = facts.rdma.devices.get() else { continue };
        for named in host.devices.iter().flatten() {
            if !devices.iter().any(|d| d.name == *named) {
                let mut finding =
                    Finding::failure("matrix-device", DEVICES, format!("the matrix names {named}"))
                        .because("this host has no such device: numbers change with restarts and cables")
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
