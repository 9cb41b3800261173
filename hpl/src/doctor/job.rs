//! The doctor as the ranks of a job: every host looks at itself, one rank of each measures the links, and rank 0 tells.
//!
//! Facts travel through the rendezvous, so that hosts which do not reach each other are described all the same.

use std::io::Write;
use std::sync::Arc;

use fulmen::comm::Group;
use fulmen::fabric::Fabric;
use fulmen::fabric::rendezvous::Rendezvous;
use fulmen::{Error, Job, Result};

use super::facts::Facts;
use super::finding::{Finding, NETWORK};
use super::network::{self, LONG, Network};
use super::{Options, look, tell};
use crate::exit::Status;

/// What a rank may say in one round of the rendezvous, with some room left.
const WORD: usize = 12 << 10;
/// More hosts are measured several pairs at a time.
const ONE_BY_ONE: usize = 16;

/// Looks at all hosts of a job; prints to `out` on rank 0. Collective. `connect` connects the ranks.
///
/// # Errors
/// When a rank is lost, or for files that cannot be read or written.
pub fn run(
    options: &Options,
    job: &Job,
    connect: impl FnOnce() -> Result<Arc<dyn Fabric>>,
    out: &mut dyn Write,
) -> Result<Status> {
    let leaders = leaders(job);
    let mine = match leaders.contains(&job.rank()) {
        true => serde_json::to_vec(&describe(options, job)).map_err(|e| Error::Internal(e.to_string()))?,
        false => Vec::new(),
    };
    let told = all_gather(job, &mine)?;
    let (fabric, findings) = match connect() {
        Ok(fabric) => (Some(fabric), vec![]),
        Err(Error::Unreachable { what, remedy }) => (None, vec![unreachable(&what, &remedy)]),
        Err(e @ Error::Argument { .. }) => (None, vec![unreachable(&e.to_string(), "")]),
        Err(e) => return Err(e),
    };
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
    let read = |&rank: &usize| {
        let problem =
            |e: serde_json::Error| Error::Internal(format!("what rank {rank} says of its host: {e}"));
        serde_json::from_slice(&told[rank]).map_err(problem)
    };
    let mut all: Vec<Facts> = leaders.iter().map(read).collect::<Result<_>>()?;
    let network = links.map(|links| Network { hosts: all.iter().map(|f| f.host.clone()).collect(), links });
    for link in network.iter().flat_map(|n| &n.links).filter(|l| l.from == 0) {
        all[link.to].clock_ahead_ms = Some(link.clock_ahead_ms);
    }
    tell(options, all, network.as_ref(), findings, out)
}

/// The first rank of each host.
pub fn leaders(job: &Job) -> Vec<usize> {
    let hosts: Vec<&str> = (0..job.size()).map(|rank| job.host(rank)).collect();
    (0..hosts.len()).filter(|&rank| !hosts[..rank].contains(&hosts[rank])).collect()
}

/// This host, under the name by which the user calls it.
fn describe(options: &Options, job: &Job) -> Facts {
    let facts = look(options);
    match job.host(job.rank()) {
        "localhost" => facts,
        name => Facts { host: name.into(), ..facts },
    }
}

fn unreachable(words: &str, remedy: &str) -> Finding {
    let finding =
        Finding::failure("unreachable", NETWORK, words.split_whitespace().collect::<Vec<_>>().join(" "));
    let cause = "a cable, an address or a firewall is in the way, or a network is taken that does not connect the hosts";
    let finding = finding.because(cause);
    if remedy.is_empty() { finding } else { finding.then(remedy) }
}

/// Words of any length, each in as many rounds as the longest needs.
fn all_gather(job: &Job, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
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
