//! What a process's environment says about its place in a job: a pure function of variables.
//!
//! The innermost starter counts: `torchrun` or `mpirun` within a Slurm allocation leave Slurm's variables in
//! sight, and `fulmen-run` within any of them leaves all.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::error::{Error, Result};

/// Environment variables by name.
pub type Variables = BTreeMap<String, String>;

/// The open file that leads to this rank's agent.
pub const CONTROL: &str = "FULMEN_CONTROL";
/// Number of this rank.
pub const RANK: &str = "FULMEN_RANK";
/// Number of ranks.
pub const SIZE: &str = "FULMEN_SIZE";
/// Number of this rank on its host.
pub const LOCAL_RANK: &str = "FULMEN_LOCAL_RANK";
/// Number of ranks on this host.
pub const LOCAL_SIZE: &str = "FULMEN_LOCAL_SIZE";
/// Set by the shared-memory supervisor, which has its own way to connect.
const SHM: &str = "FULMEN_SHM";
/// Threads of this rank.
pub const THREADS: &str = "FULMEN_THREADS";
/// Whether each thread of this rank is kept on a core of its own: `1` or `0`.
pub const BIND: &str = "FULMEN_BIND";
/// What may join the ranks: a [`crate::fabric::mixed::Choice`].
pub const FABRIC: &str = "FULMEN_FABRIC";
/// Interfaces that carry data: names and subnets ([`crate::fabric::tcp::On`]), with commas.
pub const INTERFACES: &str = "FULMEN_INTERFACES";
/// Addresses of this rank's host that the others in their networks are to try first, with commas; an IPv6 one may have a scope.
pub const ADDRESSES: &str = "FULMEN_ADDRESSES";
/// For each rank and each of its peers the RDMA devices towards it: rows with `;`, ranks with `,`, devices with `+`
/// between them, as in `,rdma_en2+rdma_en3;rdma_en4+rdma_en5,`.
pub const DEVICES: &str = "FULMEN_DEVICES";
/// `host:port` of rank 0, where no launcher tells it.
pub const RENDEZVOUS: &str = "FULMEN_RENDEZVOUS";
/// A file with at least 32 random bytes that only the job's user may read.
pub const SECRET_FILE: &str = "FULMEN_SECRET_FILE";

/// The addresses in the text of [`ADDRESSES`]. Scopes are left out: they differ from host to host.
///
/// # Errors
/// [`Error::Argument`], in the name of `place`, with the word that is no address.
pub fn addresses(place: &str, text: &str) -> Result<Vec<IpAddr>> {
    let address = |word: &str| {
        let bare = word.split('%').next().unwrap_or_default();
        bare.trim().parse().map_err(|_| {
            let remedy = "write as in 10.0.0.1 or fe80::1%en5, or leave it away";
            Error::argument(place, text, format!("has `{word}`, which is no IP address"), remedy)
        })
    };
    text.split(',').map(address).collect()
}

/// Who started this process as a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Starter {
    /// `fulmen-run`; the number of the open file that leads to the agent.
    FulmenRun {
        /// The file.
        control: i32,
    },
    /// `torchrun`, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpiexec`, or another that speaks PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

impl std::fmt::Display for Starter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Starter::FulmenRun { .. } => "fulmen-run",
            Starter::Torchrun => "torchrun",
            Starter::OpenMpi => "Open MPI",
            Starter::Pmi => "MPICH (PMI)",
            Starter::Slurm => "Slurm",
        })
    }
}

/// A rank's place in its job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Who says so.
    pub starter: Starter,
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// This rank among those of its host, and how many these are; if the starter tells.
    pub local: Option<(usize, usize)>,
    /// What tells this job from others of the same user on the same host; empty if the starter has no name for it.
    pub id: String,
    /// Host and port at which rank 0 can be met; if the starter tells.
    pub meeting: Option<(String, u16)>,
}

impl Place {
    /// Whether the starter says that all ranks are on one host.
    pub fn on_one_host(&self) -> bool {
        self.size == 1 || self.local.is_some_and(|(_, here)| here == self.size)
    }
}

/// Finds the place that `vars` describes; `None`: no starter of jobs has left word, the process is alone.
///
/// # Errors
/// [`Error::Argument`] naming variable and value, when a starter's word is incomplete or makes no sense: a
/// rank that cannot find its job must not run as a job of one.
pub fn find(vars: &Variables) -> Result<Option<Place>> {
    let mut place = match starter(vars)? {
        None => return is_alone(vars).map(|()| None),
        Some(place) => place,
    };
    if let Some(text) = vars.get(RENDEZVOUS) {
        place.meeting = Some(host_and_port(RENDEZVOUS, text)?);
    }
    Ok(Some(place))
}

/// Rank and size as launchers tell them that are not known here (no name: not told): mlx.launch, PRRTE, Flux, Cray's PALS and ALPS, Hydra
/// without PMI, MVAPICH, Spectrum MPI.
const OTHERS: [(&str, &str); 8] = [
    ("MLX_RANK", ""),
    ("PMIX_RANK", ""),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", ""),
    ("ALPS_APP_PE", ""),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
];

/// No starter has left its whole word. An error if one has left half of it: others wait for this process then.
fn is_alone(vars: &Variables) -> Result<()> {
    let is_set = |name: &str| vars.contains_key(name);
    let is_other_than = |name: &str, usual: &str| vars.get(name).is_some_and(|value| value.trim() != usual);
    if is_set(SHM) {
        return Ok(());
    }
    for (size, rank) in [(SIZE, RANK), ("WORLD_SIZE", "RANK")] {
        if is_other_than(size, "1") && !is_set(rank) {
            return Err(missing(rank, size, vars));
        }
    }
    // RANK by itself is a word that many use.
    if is_set("RANK") && (is_set("MASTER_ADDR") || is_set("LOCAL_RANK")) {
        return Err(missing("WORLD_SIZE", "RANK", vars));
    }
    // Of a batch script SLURM_PROCID is 0.
    if step(vars).is_some() {
        return Err(missing("SLURM_PROCID", "SLURM_STEP_ID", vars));
    }
    if is_other_than("SLURM_PROCID", "0") {
        return Err(missing("SLURM_STEP_ID", "SLURM_PROCID", vars));
    }
    for (rank, size) in OTHERS {
        let says = match vars.get(size) {
            Some(value) => (value.trim() != "1").then_some(size),
            None => is_set(rank).then_some(rank),
        };
        if let Some(says) = says {
            let problem = "says that this is a rank of a job, of a launcher that is not known here";
            let remedy = format!(
                "start the ranks with fulmen-run (--hostfile takes mlx.launch's), srun, torchrun, or the mpirun of Open MPI or MPICH, or \
                 unset {says} to run alone"
            );
            return Err(Error::argument(says, told(vars, says), problem, remedy));
        }
    }
    Ok(())
}

/// What a process should say that is alone within a Slurm allocation for several tasks, as a batch script is and what it starts
/// without `srun`: a job of one is not what most want there.
pub fn alone_in_allocation(vars: &Variables) -> Option<String> {
    let job = vars.get("SLURM_JOB_ID").filter(|_| !vars.contains_key(SHM))?;
    let count = |names: &[&str]| names.iter().find_map(|name| vars.get(*name)?.trim().parse::<usize>().ok());
    let per_node = || slurm_counts("", vars.get("SLURM_TASKS_PER_NODE")?).ok().map(|all| all.iter().sum());
    let nodes = count(&["SLURM_JOB_NUM_NODES", "SLURM_NNODES"]).unwrap_or(1);
    let tasks = count(&["SLURM_NTASKS", "SLURM_NPROCS"]).or_else(per_node).unwrap_or(nodes);
    let s = |n: usize| if n == 1 { "" } else { "s" };
    (tasks.max(nodes) > 1).then(|| {
        format!(
            "the Slurm allocation {job} has {tasks} task{} on {nodes} node{}, and this process is none of them: it runs alone, on \
             this node\n    `fulmen-run PROGRAM` or `srun PROGRAM` starts a rank for each task",
            s(tasks),
            s(nodes)
        )
    })
}

/// The step of Slurm's that this process belongs to, unless that is the shell of a batch script or of an `salloc`, whose steps have
/// reserved numbers.
fn step(vars: &Variables) -> Option<&String> {
    const RESERVED: u32 = 0xffff_fff0;
    vars.get("SLURM_STEP_ID").filter(|step| !step.trim().parse::<u32>().is_ok_and(|step| step >= RESERVED))
}

fn starter(vars: &Variables) -> Result<Option<Place>> {
    if let Some(control) = vars.get(CONTROL) {
        let control = number::<i32>(CONTROL, control)?;
        if let Some(name) =
            [RANK, SIZE, LOCAL_RANK, LOCAL_SIZE].iter().find(|name| !vars.contains_key(**name))
        {
            return Err(missing(name, CONTROL, vars));
        }
        let mut place = place(vars, Starter::FulmenRun { control }, (RANK, SIZE), (LOCAL_RANK, LOCAL_SIZE))?;
        if control < 0 {
            return Err(garbled(CONTROL, control));
        }
        place.id = control.to_string();
        return Ok(Some(place));
    }
    if vars.contains_key(RANK) && !vars.contains_key(SHM) {
        return Err(missing(CONTROL, RANK, vars));
    }
    if vars.contains_key("RANK") && vars.contains_key("WORLD_SIZE") {
        let mut place =
            place(vars, Starter::Torchrun, ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))?;
        if place.size > 1 {
            let host = vars.get("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR", "WORLD_SIZE", vars))?;
            let port = vars.get("MASTER_PORT").ok_or_else(|| missing("MASTER_PORT", "WORLD_SIZE", vars))?;
            let port = number::<u16>("MASTER_PORT", port)?;
            place.id = format!("{host}-{port}-{}", told(vars, "TORCHELASTIC_RUN_ID"));
            // torchrun itself listens at MASTER_PORT: its ranks meet one door further.
            let taken = vars.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True");
            let port = if taken { port.checked_add(1).unwrap_or(port - 1) } else { port };
            place.meeting = Some((host.clone(), port));
        }
        return Ok(Some(place));
    }
    if let Some(told) = either(vars, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")? {
        let local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
        let mut place = place(vars, Starter::OpenMpi, told, local)?;
        place.id = self::told(vars, "PMIX_NAMESPACE");
        return Ok(Some(place));
    }
    let step = step(vars).filter(|_| vars.contains_key("SLURM_PROCID"));
    // srun can speak PMI as well, and knows more.
    if step.is_none()
        && let Some(told) = either(vars, "PMI_RANK", "PMI_SIZE")?
    {
        let mut place = place(vars, Starter::Pmi, told, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))?;
        // The wire's own name, which all ranks of one host share, where there is one.
        place.id = self::told(vars, "PMI_JOBID");
        return Ok(Some(place));
    }
    // A batch script has SLURM_PROCID too, but no step: it is no rank.
    let Some(step) = step else { return Ok(None) };
    let size =
        if vars.contains_key("SLURM_STEP_NUM_TASKS") { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let mut place = place(vars, Starter::Slurm, ("SLURM_PROCID", size), ("", ""))?;
    let job = vars.get("SLURM_JOB_ID").ok_or_else(|| missing("SLURM_JOB_ID", "SLURM_PROCID", vars))?;
    place.id = format!("{job}.{step}");
    let nodes = vars.get("SLURM_STEP_NODELIST").or_else(|| vars.get("SLURM_JOB_NODELIST"));
    let nodes = nodes.map(|list| expand("SLURM_STEP_NODELIST", list)).transpose()?.unwrap_or_default();
    if let Some(local) = vars.get("SLURM_LOCALID") {
        let local = number("SLURM_LOCALID", local)?;
        let here = slurm_local_size(vars, nodes.len())?;
        place.local = here.map(|here| (local, here));
    }
    if let Some(first) = nodes.first() {
        place.meeting = Some((first.clone(), slurm_port(job, step)));
    }
    Ok(Some(place))
}

/// Tasks on this node: all if there is one node, else the entry of SLURM_STEP_TASKS_PER_NODE for SLURM_NODEID.
fn slurm_local_size(vars: &Variables, nodes: usize) -> Result<Option<usize>> {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    let Some(list) = vars.get(name).or_else(|| vars.get("SLURM_TASKS_PER_NODE")) else { return Ok(None) };
    let per_node = slurm_counts(name, list)?;
    let node = vars.get("SLURM_NODEID").map(|n| number::<usize>("SLURM_NODEID", n)).transpose()?;
    Ok(if nodes == 1 { per_node.first().copied() } else { node.and_then(|n| per_node.get(n).copied()) })
}

/// Slurm's counts by node: `2(x3),1` is 2, 2, 2, 1.
///
/// # Errors
/// [`Error::Argument`] naming `variable`, when it is none of that.
pub fn slurm_counts(variable: &str, text: &str) -> Result<Vec<usize>> {
    let mut counts = vec![];
    for part in text.split(',') {
        let (count, times) = match part.split_once("(x") {
            None => (part, Some("1")),
            Some((count, times)) => (count, times.strip_suffix(')')),
        };
        match (count.parse::<usize>(), times.map(str::parse::<usize>)) {
            (Ok(count), Some(Ok(times))) if times <= MOST => counts.extend(std::iter::repeat_n(count, times)),
            _ => return Err(garbled(variable, text)),
        }
        if counts.len() > MOST {
            return Err(garbled(variable, text));
        }
    }
    Ok(counts)
}

/// Ports that no service has by convention and that few systems give away themselves.
fn slurm_port(job: &str, step: &str) -> u16 {
    let mixed = job.bytes().chain([b'.']).chain(step.bytes());
    let hash =
        mixed.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    20000 + ((hash ^ (hash >> 32)) % 10000) as u16
}

/// No list of hosts is longer.
const MOST: usize = 1 << 20;

/// Host names written with ranges: `a,n[01-03,7]x` is a, n01x, n02x, n03x, n7x. Several brackets multiply.
///
/// # Errors
/// [`Error::Argument`] naming `what`, when brackets or numbers make no sense.
pub fn expand(what: &str, list: &str) -> Result<Vec<String>> {
    let wrong = |problem: &str| Error::argument(what, list, problem, "write ranges as in n[01-12,20]");
    let mut names = vec![];
    let (mut depth, mut start) = (0usize, 0);
    let mut parts = vec![];
    for (at, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1).ok_or_else(|| wrong("has a ] without a ["))?,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        if depth > 1 {
            return Err(wrong("has a [ within brackets"));
        }
    }
    if depth > 0 {
        return Err(wrong("has a [ without a ]"));
    }
    parts.push(&list[start..]);
    for part in parts {
        let part = part.trim();
        if part.is_empty() {
            return Err(wrong("has an empty name"));
        }
        let mut all = vec![String::new()];
        let mut rest = part;
        while let Some((plain, after)) = rest.split_once('[') {
            // Found above: there is one.
            let Some((ranges, after)) = after.split_once(']') else {
                return Err(wrong("has a [ without a ]"));
            };
            let mut numbers = vec![];
            for range in ranges.split(',') {
                let (low, high) = range.split_once('-').unwrap_or((range, range));
                let digits = |s: &str| !s.is_empty() && s.len() < 10 && s.bytes().all(|b| b.is_ascii_digit());
                if !digits(low) || !digits(high) {
                    return Err(wrong("has a range that is not two whole numbers"));
                }
                let (first, last): (usize, usize) = (low.parse().unwrap_or(0), high.parse().unwrap_or(0));
                if first > last {
                    return Err(wrong("has a range that runs backwards"));
                }
                if last - first >= MOST || numbers.len() >= MOST {
                    return Err(wrong("names more hosts than there can be"));
                }
                numbers.extend((first..=last).map(|n| format!("{n:0width$}", width = low.len())));
            }
            if all.len().saturating_mul(numbers.len()) > MOST {
                return Err(wrong("names more hosts than there can be"));
            }
            all = all
                .iter()
                .flat_map(|head| numbers.iter().map(move |n| format!("{head}{plain}{n}")))
                .collect();
            rest = after;
        }
        all.iter_mut().for_each(|name| name.push_str(rest));
        names.extend(all);
        if names.len() > MOST {
            return Err(wrong("names more hosts than there can be"));
        }
    }
    Ok(names)
}

/// Both names if both are there; an error if one is.
fn either<'a>(vars: &Variables, rank: &'a str, size: &'a str) -> Result<Option<(&'a str, &'a str)>> {
    match (vars.contains_key(rank), vars.contains_key(size)) {
        (false, false) => Ok(None),
        (true, true) => Ok(Some((rank, size))),
        (true, false) => Err(missing(size, rank, vars)),
        (false, true) => Err(missing(rank, size, vars)),
    }
}

/// Rank and size, and where the names of the local ones are not empty, these.
fn place(
    vars: &Variables,
    starter: Starter,
    (rank, size): (&str, &str),
    local: (&str, &str),
) -> Result<Place> {
    let get = |name: &str, other: &str| -> Result<usize> {
        number(name, vars.get(name).ok_or_else(|| missing(name, other, vars))?)
    };
    let within = |name: &str, rank: usize, of: &str, size: usize| match rank < size {
        true => Ok(()),
        false => Err(Error::argument(
            name,
            rank,
            format!("does not go with {of} = {size}: ranks count from 0"),
            "start the ranks with a launcher, or unset both",
        )),
    };
    let (n, of) = (get(rank, size)?, get(size, rank)?);
    within(rank, n, size, of)?;
    let here = match (vars.get(local.0), vars.get(local.1)) {
        (Some(rank), Some(size)) => {
            let (rank, size) = (number(local.0, rank)?, number(local.1, size)?);
            within(local.0, rank, local.1, size)?;
            within(local.1, size, "the number of ranks + 1", of + 1)?;
            Some((rank, size))
        }
        _ => None,
    };
    Ok(Place { starter, rank: n, size: of, local: here, id: String::new(), meeting: None })
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|_| garbled(name, text))
}

/// `host:port`; an IPv6 address stands in brackets.
fn host_and_port(name: &str, text: &str) -> Result<(String, u16)> {
    let wrong =
        || Error::argument(name, text, "is not host:port", "write as in node1:29500 or [fe80::1%en5]:29500");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse::<u16>().map_err(|_| wrong())?;
    let bare = host.strip_prefix('[').map_or(Some(host), |h| h.strip_suffix(']')).ok_or_else(wrong)?;
    if bare.is_empty() || port == 0 || (bare.contains(':') && bare == host) {
        return Err(wrong());
    }
    Ok((bare.to_string(), port))
}

fn told(vars: &Variables, name: &str) -> String {
    vars.get(name).cloned().unwrap_or_default()
}

fn garbled(name: impl Into<String>, value: impl ToString) -> Error {
    Error::argument(
        name,
        value,
        "is not what a launcher of ranks writes",
        "start the ranks with a launcher, or unset it to run alone",
    )
}

/// The environment says that there is a job, and does not say enough.
fn missing(name: &str, there: &str, vars: &Variables) -> Error {
    let value = vars.get(there).map_or("", String::as_str);
    Error::argument(
        there,
        value,
        format!("says that this is a rank of a job, but {name} is not set"),
        format!("start the ranks with a launcher that sets both, or unset {there} to run alone"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vars(text: &str) -> Variables {
        text.split_whitespace()
            .map(|w| w.split_once('=').unwrap())
            .map(|(k, v)| (k.into(), v.into()))
            .collect()
    }

    fn found(text: &str) -> Place {
        find(&vars(text)).unwrap().unwrap()
    }

    #[test]
    fn nobody_has_left_word() {
        assert_eq!(find(&vars("HOME=/root PATH=/bin")).unwrap(), None);
        // In a batch script, outside of srun.
        assert_eq!(
            find(&vars("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_NODELIST=a")).unwrap(),
            None
        );
        // The shell of `salloc`, where that is a step of its own.
        assert_eq!(
            find(&vars(
                "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=4294967290"
            ))
            .unwrap(),
            None
        );
        // A job of one; and a word that anyone may use.
        for text in ["WORLD_SIZE=1", "RANK=general", "FULMEN_SIZE=1"] {
            assert_eq!(find(&vars(text)).unwrap(), None, "{text}");
        }
        // A rank of the shared-memory supervisor.
        assert_eq!(find(&vars("FULMEN_RANK=1 FULMEN_SIZE=2 FULMEN_SHM=1")).unwrap(), None);
    }

    #[test]
    fn fulmen_run_stands_before_all_others() {
        let text = "FULMEN_CONTROL=5 FULMEN_RANK=3 FULMEN_SIZE=4 FULMEN_LOCAL_RANK=1 FULMEN_LOCAL_SIZE=2 \
                    SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=9 RANK=8 WORLD_SIZE=9";
        let place = found(text);
        assert_eq!(place.starter, Starter::FulmenRun { control: 5 });
        assert_eq!((place.rank, place.size, place.local), (3, 4, Some((1, 2))));
    }

    #[test]
    fn torchrun() {
        let text = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29500";
        let place = found(text);
        assert_eq!((place.rank, place.size, place.on_one_host()), (1, 2, true));
        assert_eq!(place.meeting, Some(("n1".into(), 29500)));
        let place =
            found(&format!("{text} TORCHELASTIC_USE_AGENT_STORE=True SLURM_PROCID=0 SLURM_STEP_ID=0"));
        assert_eq!((place.starter, place.meeting), (Starter::Torchrun, Some(("n1".into(), 29501))));
        assert_eq!(found("RANK=0 WORLD_SIZE=1").size, 1);
    }

    #[test]
    fn open_mpi_and_mpich() {
        let place = found(
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-h-1@1 SLURM_JOB_ID=3",
        );
        assert_eq!((place.starter, place.rank, place.on_one_host()), (Starter::OpenMpi, 2, false));
        assert_eq!((place.id.as_str(), place.meeting), ("prterun-h-1@1", None));
        let place = found("PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3");
        assert_eq!((place.starter, place.size, place.on_one_host()), (Starter::Pmi, 3, true));
        let place = found("PMI_RANK=1 PMI_SIZE=3 FULMEN_RENDEZVOUS=[fe80::1%en5]:80");
        assert_eq!((place.on_one_host(), place.meeting), (false, Some(("fe80::1%en5".into(), 80))));
    }

    #[test]
    fn slurm() {
        let text = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 SLURM_NTASKS=9 SLURM_STEP_ID=2 SLURM_JOB_ID=4711 \
                    SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_NODELIST=n[08-11] SLURM_STEP_TASKS_PER_NODE=2(x3),1 \
                    PMI_RANK=5 PMI_SIZE=7";
        let place = found(text);
        assert_eq!((place.starter, place.rank, place.size), (Starter::Slurm, 5, 7));
        assert_eq!((place.local, place.id.as_str()), (Some((1, 2)), "4711.2"));
        let (host, port) = place.meeting.unwrap();
        assert_eq!(host, "n08");
        assert!((20000..30000).contains(&port));
        let other = found(&text.replace("STEP_ID=2", "STEP_ID=3")).meeting.unwrap().1;
        assert_ne!(port, other, "two steps of one job would meet");
    }

    #[test]
    fn who_is_alone_in_an_allocation_says_so() {
        for (text, said) in [
            ("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NNODES=2", "allocation 7 has 4 tasks on 2 nodes, and this"),
            ("SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3 SLURM_TASKS_PER_NODE=2(x3)", "has 6 tasks on 3 nodes"),
            ("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0", "has 4 tasks on 1 node, and"),
        ] {
            let note = alone_in_allocation(&vars(text)).unwrap();
            assert!(note.contains(said) && note.contains("srun"), "{note}");
        }
        for text in [
            "HOME=/",
            "SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_NNODES=1",
            "SLURM_NTASKS=4",
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 FULMEN_SHM=1",
            "SLURM_JOB_ID=7 SLURM_NTASKS=many SLURM_TASKS_PER_NODE=(x",
        ] {
            assert_eq!(alone_in_allocation(&vars(text)), None, "{text}");
        }
    }

    #[test]
    fn a_rank_that_cannot_find_its_job_is_told_which_variable() {
        for (text, name) in [
            (
                "FULMEN_RANK=1 FULMEN_SIZE=2",
                "FULMEN_RANK: 1: says that this is a rank of a job, but FULMEN_CONTROL",
            ),
            ("FULMEN_CONTROL=x FULMEN_RANK=1", "FULMEN_CONTROL: x: "),
            ("FULMEN_CONTROL=4 FULMEN_RANK=0", "FULMEN_SIZE is not set"),
            ("FULMEN_CONTROL=4 FULMEN_RANK=0 FULMEN_SIZE=1", "FULMEN_LOCAL_RANK"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_PORT is not set"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT: 70000: "),
            ("RANK=two WORLD_SIZE=2", "RANK: two: "),
            (
                "OMPI_COMM_WORLD_SIZE=4",
                "OMPI_COMM_WORLD_SIZE: 4: says that this is a rank of a job, but OMPI",
            ),
            ("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=4", "does not go with OMPI_COMM_WORLD_SIZE = 4"),
            ("PMI_RANK=0", "PMI_SIZE is not set"),
            ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=3", "MPI_LOCALNRANKS: 3: "),
            (
                "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=0 SLURM_JOB_ID=1",
                "does not go with SLURM_NTASKS = 0",
            ),
            ("PMI_RANK=0 PMI_SIZE=2 FULMEN_RENDEZVOUS=here", "FULMEN_RENDEZVOUS: here: is not host:port"),
            ("PMI_RANK=0 PMI_SIZE=2 FULMEN_RENDEZVOUS=fe80::1:80", "is not host:port"),
            // Half a word is no word that there are no others.
            ("WORLD_SIZE=2", "WORLD_SIZE: 2: says that this is a rank of a job, but RANK is not set"),
            (
                "FULMEN_SIZE=2",
                "FULMEN_SIZE: 2: says that this is a rank of a job, but FULMEN_RANK is not set",
            ),
            ("PMI_SIZE=2", "PMI_RANK is not set"),
            ("RANK=1 MASTER_ADDR=a", "WORLD_SIZE is not set"),
            ("SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_JOB_ID=1", "SLURM_STEP_ID is not set"),
            ("SLURM_STEP_ID=2 SLURM_NTASKS=4 SLURM_JOB_ID=1", "SLURM_PROCID is not set"),
            ("MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_RANK=0", "a launcher that is not known here"),
            ("MLX_RANK=0 MLX_HOSTFILE=h", "MLX_RANK: 0: says"),
            ("PMIX_RANK=1 PMIX_NAMESPACE=x", "unset PMIX_RANK to run alone"),
            ("FLUX_TASK_RANK=0 FLUX_JOB_SIZE=2", "FLUX_JOB_SIZE: 2: says"),
            ("PALS_RANKID=1", "PALS_RANKID: 1: says"),
            ("ALPS_APP_PE=1", "ALPS_APP_PE: 1: says"),
            ("MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", "MPI_LOCALNRANKS: 2: says"),
            (
                "FULMEN_CONTROL=5",
                "FULMEN_CONTROL: 5: says that this is a rank of a job, but FULMEN_RANK is not set",
            ),
            (
                "FULMEN_CONTROL=5 FULMEN_RANK=0 FULMEN_SIZE=1",
                "FULMEN_CONTROL: 5: says that this is a rank of a job, but FULMEN_LOCAL_RANK is not set",
            ),
        ] {
            let error = find(&vars(text)).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(name), "{text}: {error}");
        }
    }

    #[test]
    fn ranges() {
        assert_eq!(expand("x", "a,n[01-03,7]x").unwrap(), ["a", "n01x", "n02x", "n03x", "n7x"]);
        assert_eq!(expand("x", "r[1-2]n[8-9]").unwrap(), ["r1n8", "r1n9", "r2n8", "r2n9"]);
        assert_eq!(expand("x", "n[099-101]").unwrap(), ["n099", "n100", "n101"]);
        for wrong in [
            "",
            "a,",
            "n[1-2",
            "n1]",
            "n[2-1]",
            "n[a-b]",
            "n[]",
            "n[[1]]",
            "n[0-9999999]",
            "n[1-99999999999]",
        ] {
            assert!(expand("x", wrong).is_err(), "{wrong}");
        }
        assert_eq!(slurm_counts("x", "2(x3),1").unwrap(), [2, 2, 2, 1]);
        for wrong in ["", "x", "2(x)", "2(x3", "2(x99999999)"] {
            assert!(slurm_counts("x", wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        /// Whatever stands in the variables: a place within its job, or an error, never a panic.
        #[test]
        fn garbage_is_refused(values in proptest::collection::vec("[-0-9a-z,.:()\\[\\]]{0,12}", 21), mask in 0u32..1 << 21) {
            let names = [
                CONTROL, RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", RENDEZVOUS,
            ];
            let vars: Variables = names.iter().zip(values).enumerate()
                .filter(|(i, _)| mask >> i & 1 == 1)
                .map(|(_, (k, v))| (k.to_string(), v))
                .collect();
            if let Ok(Some(place)) = find(&vars) {
                prop_assert!(place.rank < place.size);
                prop_assert!(place.local.is_none_or(|(rank, size)| rank < size && size <= place.size));
            }
        }
    }
}
