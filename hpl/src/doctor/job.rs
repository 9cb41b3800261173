//! The doctor as the ranks of a job: every host looks at itself, its cables are tried, one rank of each host measures the
//! links, and rank 0 tells.
//!
//! Facts travel through the rendezvous, so that hosts which do not reach each other are described all the same.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use fulmen::comm::Group;
use fulmen::fabric::Fabric;
use fulmen::fabric::rendezvous::Rendezvous;
use fulmen::fabric::verbs::Devices;
use fulmen::{Error, Job, Result};

use super::facts::Facts;
use super::finding::{DEVICES, Finding, NETWORK};
use super::mlx::Cables;
use super::network::{self, LONG, Network};
use super::{Files, Options, look, pairs, tell};
use crate::exit::Status;

/// What a rank may say in one round of the rendezvous, with some room left.
const WORD: usize = 12 << 10;
/// More hosts are measured several pairs at a time.
const ONE_BY_ONE: usize = 16;

/// Looks at all hosts of a job and at the cables between them; prints to `out` on rank 0. Collective. `devices`: those
/// that join the ranks, as far as they were told; `connect` connects the ranks.
///
/// # Errors
/// When a rank is lost, or for files that cannot be read or written.
pub fn run(
    options: &Options,
    job: &Job,
    devices: &Devices,
    connect: impl FnOnce() -> Result<Arc<dyn Fabric>>,
    out: &mut dyn Write,
) -> Result<Status> {
    let ranks = by_host(job);
    let leaders = leaders(job);
    // Rank 0's alone: other hosts need not have them.
    let files = if job.rank() == 0 { Files::open(options)? } else { Files::default() };
    let mine = match leaders.contains(&job.rank()) {
        true => serde_json::to_vec(&describe(options, job)).map_err(|e| Error::Internal(e.to_string()))?,
        false => Vec::new(),
    };
    let told = all_gather(job, &mine)?;
    let read = |&rank: &usize| {
        let problem =
            |e: serde_json::Error| Error::Internal(format!("what rank {rank} says of its host: {e}"));
        serde_json::from_slice(&told[rank]).map_err(problem)
    };
    let mut all: Vec<Facts> = leaders.iter().map(read).collect::<Result<_>>()?;
    let named = files.cables.as_ref().and_then(|cables| by_rank(cables, &ranks, &all));
    // Before the ranks are connected: what joins them then may hold the devices.
    let tried = pairs::look(job, &ranks, &all, named.as_ref().unwrap_or(devices), options.fresh)?;
    let (fabric, mut findings) = match connect() {
        Ok(fabric) => (Some(fabric), vec![]),
        Err(Error::Unreachable { what, remedy }) => (None, vec![unreachable(&what, &remedy)]),
        Err(e @ Error::Argument { .. }) => (None, vec![unreachable(&e.to_string(), "")]),
        Err(e) => return Err(e),
    };
    findings.extend(not_tried(tried.left, pairs::patience(job), leaders.len()));
    let by_matrix = matches!(named.as_ref().unwrap_or(devices), Devices::Matrix(_));
    let unjoined = tried.unjoined.iter().map(|(host, device)| (&all[*host].host, device));
    findings.extend(unjoined.map(|(host, device)| leads_nowhere(host, device, by_matrix)));
    tried.links.into_iter().for_each(|(host, link)| all[host].rdma.links.push(link));
    let links = match &fabric {
        Some(fabric) if leaders.len() > 1 => {
            let rounds = match leaders.len() <= ONE_BY_ONE {
                true => network::one_by_one(leaders.len()),
                false => network::side_by_side(leaders.len()),
            };
            network::links(&Group::all(Arc::clone(fabric))?, &leaders, &rounds, &LONG)?
        }
        _ => None,
    };
    if job.rank() != 0 {
        return Ok(Status::Passed);
    }
    let network = links.map(|links| Network { hosts: all.iter().map(|f| f.host.clone()).collect(), links });
    for link in network.iter().flat_map(|n| &n.links).filter(|l| l.from == 0) {
        all[link.to].clock_ahead_ms = Some(link.clock_ahead_ms);
    }
    tell(options.json, files, all, network.as_ref(), findings, out)
}

/// The first rank of each host.
pub fn leaders(job: &Job) -> Vec<usize> {
    by_host(job).iter().map(|ranks| ranks[0]).collect()
}

/// The ranks of each host, hosts in the order of their first ranks.
fn by_host(job: &Job) -> Vec<Vec<usize>> {
    let mut found: Vec<(&str, Vec<usize>)> = Vec::new();
    for rank in 0..job.size() {
        let host = job.host(rank);
        match found.iter_mut().find(|(name, _)| *name == host) {
            Some((_, ranks)) => ranks.push(rank),
            None => found.push((host, vec![rank])),
        }
    }
    found.into_iter().map(|(_, ranks)| ranks).collect()
}

/// The devices from rank to rank by a device matrix, whose hosts have the job's names, or none and the job's order.
fn by_rank(cables: &Cables, ranks: &[Vec<usize>], all: &[Facts]) -> Option<Devices> {
    let at = cables.places(&all.iter().map(|facts| facts.host.as_str()).collect::<Vec<_>>());
    let size = ranks.iter().map(Vec::len).sum();
    let mut rows = vec![vec![Vec::new(); size]; size];
    for (from, to) in (0..all.len()).flat_map(|a| (0..all.len()).map(move |b| (a, b))) {
        let (Some(a), Some(b)) = (at[from], at[to]) else { continue };
        for (&x, &y) in ranks[from].iter().flat_map(|x| ranks[to].iter().map(move |y| (x, y))) {
            rows[x][y] = cables.between(a, b).to_vec();
        }
    }
    at.iter().any(Option::is_some).then_some(Devices::Matrix(rows))
}

fn not_tried(cables: usize, patience: Duration, hosts: usize) -> Option<Finding> {
    (cables > 0).then(|| {
        let seen = format!("{} not tried", crate::units::count(cables, "cable"));
        let limit = crate::units::duration(patience.as_secs_f64());
        let finding = Finding::warning("cables-not-tried", DEVICES, seen)
            .because(format!("the others took {limit}, which is all the time that there is for cables"));
        match patience == pairs::ALTOGETHER {
            true if hosts > 2 => finding.then("run this on two hosts at a time: `fulmen-run --host HOST,HOST hpl-run doctor`"),
            true => finding.then("see to what is told of the others, then run this again"),
            false => finding.then("`fulmen-run --host HOST,HOST hpl-run doctor` takes its time: other launchers' ranks have a minute"),
        }
    })
}

/// This host, under the name by which the user calls it.
fn describe(options: &Options, job: &Job) -> Facts {
    let facts = look(options);
    match job.host(job.rank()) {
        "localhost" => facts,
        name => Facts { host: name.into(), ..facts },
    }
}

/// `by_matrix`: a device matrix says where cables lead.
fn leads_nowhere(host: &str, device: &str, by_matrix: bool) -> Finding {
    let mut finding = if by_matrix {
        Finding::warning("not-in-matrix", device, "its port is active, and the device matrix joins it to no host of this job")
            .because("the matrix names no device for it at its other end, or is older than the cables: names change with restarts")
            .then("without the matrix this finds cables by their addresses, and writes it anew: `--write-hostfile FILE`")
    } else {
        Finding::warning("leads-nowhere", device, "its port is active, and leads to no other host of this job")
            .because("its far end belongs to a host that is not of the job, or the two ends have addresses of different networks")
            .then("both ends of a cable need addresses of one /30, which no other cable has: `ifconfig` at both")
            .then("or name the cables: `--matrix FILE`, `fulmen-run --hostfile FILE` with a device matrix")
    };
    finding.host = host.into();
    finding
}

fn unreachable(words: &str, remedy: &str) -> Finding {
    let finding =
        Finding::failure("unreachable", NETWORK, words.split_whitespace().collect::<Vec<_>>().join(" "));
    let cause = "a cable, an address or a firewall is in the way, or a network is taken that does not connect the hosts";
    let finding = finding.because(cause);
    if remedy.is_empty() { finding } else { finding.then(remedy) }
}

/// Words of any length, each in as many rounds as the longest needs.
pub(super) fn all_gather(job: &Job, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut meeting = job;
    let lengths = meeting.all_gather(&(mine.len() as u32).to_le_bytes())?;
    let length = |bytes: &Vec<u8>| Some(u32::from_le_bytes(bytes.as_slice().try_into().ok()?) as usize);
    let lengths: Option<Vec<usize>> = lengths.iter().map(length).collect();
    let lengths = lengths.ok_or_else(|| Error::Internal("a length that is none".into()))?;
    let mut all = vec![Vec::new(); job.size()];
    for at in (0..lengths.into_iter().max().unwrap_or(0)).step_by(WORD) {
        let part = &mine[at.min(mine.len())..(at + WORD).min(mine.len())];
        for (all, part) in all.iter_mut().zip(meeting.all_gather(part)?) {
            all.extend(part);
        }
    }
    Ok(all)
}
