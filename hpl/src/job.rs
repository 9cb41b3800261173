//! The driver for a job of processes that a launcher has started: each process is one rank of it.
//!
//! Rank 0 reads the input, talks to the user and writes the reports ([`crate::session`]); it hands what is to be done
//! to the others over the fabric, and works as they do.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use fulmen::comm::{Cables, Group};
use fulmen::dist::memory::OfProcess;
use fulmen::fabric::mixed::Transport;
use fulmen::fabric::{Bounds, Fabric};
use fulmen::job::Job;
use fulmen::job::env::Starter;
use fulmen::{Error, Result, Setup, World};
use serde::{Deserialize, Serialize};

use crate::cli::{Cli, Command, Wanted};
use crate::doctor;
use crate::driver::Driver;
use crate::interrupt;
use crate::local::Local;
use crate::machine::Host;
use crate::params::Run;
use crate::progress::Progress;
use crate::rank;
use crate::report::links::{MOST_RANKS, RankLink};
use crate::report::{self, Outcome, RankPlace};
use crate::session;
use crate::settings::Settings;
use crate::worker::Assignment;

/// What rank 0 tells the others to do next.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Order {
    /// Look at the links between the hosts.
    Links,
    /// Test the kernels and measure them, with so many threads.
    Calibrate { kernels: String, threads: usize },
    /// Solve all runs, then end.
    Work(Box<Assignment>),
    /// End: there is nothing to solve.
    Nothing,
}

/// This process's rank of a job.
struct Member {
    job: Arc<Job>,
    fabric: Arc<dyn Fabric>,
    group: Group,
    /// Threads that the launcher gives this rank, if it does and the user does not.
    own_threads: Option<usize>,
}

/// Runs this rank of a job to its end.
pub fn run(job: Job) -> ExitCode {
    // All ranks have the same arguments; rank 0 alone complains of them.
    let job = Arc::new(job);
    let cli = Cli::try_parse();
    let given = cli.as_ref().ok();
    let mut bounds = job.bounds();
    if let Some(patience) = given.and_then(|c| c.timeout) {
        bounds.patience = patience;
    }
    // A launcher of ours watches with a bound of its own.
    if let (Some(silence), false) = (given.and_then(|c| c.silence), is_ours(&job)) {
        bounds.silence = Bounds::over_within(silence).silence;
    }
    let own_threads = match given.and_then(|c| c.threads) {
        Some(_) => None,
        None => match fulmen::world::threads_from_env() {
            Ok(threads) => threads,
            Err(e) => return told(&job, &e),
        },
    };
    // Ends after the fabric.
    #[cfg(feature = "mpi")]
    let universe = match crate::mpi::start(&job) {
        Ok(universe) => universe,
        Err(e) => return told(&job, &e),
    };
    let connect = || {
        #[cfg(feature = "mpi")]
        if let Some(universe) = &universe {
            return crate::mpi::connect(universe, bounds);
        }
        let mut options = job.options(bounds)?;
        if let Some(Wanted::Processes(choice)) = given.and_then(|c| c.fabric.as_ref()) {
            options.choice = choice.clone();
        }
        if let Some(on) = given.and_then(|c| c.interfaces.as_ref()) {
            options.tcp.on.clone_from(on);
        }
        // What is opened meanwhile is given back before this process ends.
        let may_hold = job.may_hold_devices(&options);
        if may_hold {
            interrupt::listen_with_devices();
        }
        let fabric = job.connect(&options).inspect_err(|e| {
            if may_hold && !matches!(e, Error::Interrupted) {
                // What it failed with is the cause.
                let _ = interrupt::stop_listening();
            }
        })?;
        if holds_devices(&job) {
            interrupt::gives_back(Arc::downgrade(&fabric), bounds.silence);
        } else if may_hold {
            interrupt::stop_listening().inspect_err(|e| fabric.fail(e))?;
        }
        Ok(fabric)
    };
    if let Some(Command::Doctor(options)) = given.and_then(|c| c.command.as_ref()) {
        let devices = match job.options(bounds) {
            Ok(options) => options.verbs.devices,
            Err(e) => return told(&job, &e),
        };
        let connect = || {
            connect().inspect(|_| {
                if holds_devices(&job) {
                    interrupt::watch(|_| {});
                }
            })
        };
        let status = doctor::job::run(options, &job, &devices, connect, &mut std::io::stdout());
        return status.map_or_else(|e| told(&job, &job.ending().unwrap_or(e)), ExitCode::from);
    }
    let member = match connect().and_then(|fabric| Member::join(Arc::clone(&job), fabric, own_threads)) {
        Ok(member) => member,
        Err(e) => return told(&job, &e),
    };
    if !holds_devices(&job) {
        interrupt::gives_back(Arc::downgrade(&member.fabric), Duration::ZERO);
    }
    if member.job.rank() == 0 {
        return lead(member, cli);
    }
    if holds_devices(&job) {
        interrupt::watch(|_| {});
    }
    match member.follow() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let e = member.job.ending().unwrap_or(e);
            member.fabric.fail(&e);
            told(&member.job, &e)
        }
    }
}

/// Whether RDMA joins this rank to another.
fn holds_devices(job: &Job) -> bool {
    job.steps().iter().any(|step| step.over == Transport::Verbs)
}

/// What says how many ranks a job has.
fn decided_by(starter: Starter, size: usize) -> String {
    let variable = match starter {
        Starter::FulmenRun { .. } => return "fulmen-run (-n, or its hosts)".to_string(),
        Starter::Torchrun => "WORLD_SIZE",
        Starter::OpenMpi => "OMPI_COMM_WORLD_SIZE",
        Starter::Pmi => "PMI_SIZE",
        Starter::Slurm if std::env::var_os("SLURM_STEP_NUM_TASKS").is_some() => "SLURM_STEP_NUM_TASKS",
        Starter::Slurm => "SLURM_NTASKS",
    };
    format!("{variable}={size} ({starter})")
}

fn is_ours(job: &Job) -> bool {
    matches!(job.starter(), Starter::FulmenRun { .. })
}

/// The launcher tells the user what a rank fails with; where there is none of ours, the rank does, unless another has.
fn told(job: &Job, e: &Error) -> ExitCode {
    job.fail(e, false);
    if !is_ours(job) && !e.is_consequence() {
        let (rank, words) = (job.rank(), interrupt::told(e));
        let _ = writeln!(std::io::stderr(), "hpl-run: rank {rank} ({}): {words}", job.host(rank));
    }
    ExitCode::from(e.exit_code())
}

fn lead(member: Member, cli: std::result::Result<Cli, clap::Error>) -> ExitCode {
    let mut lead = Lead { member, world: None, links: vec![], left: 0, over: false, failed: false };
    // Before all else: the others do not wait to be asked for it.
    let met = lead.member.hosts().and_then(|host| Ok((host, lead.member.links()?)));
    let status = (|| {
        let (host, links) = met?;
        lead.links = links;
        let host = host.unwrap_or_else(Host::detect);
        let mut cli = match cli {
            Ok(cli) => cli,
            Err(e) => {
                // Help too comes this way.
                let _ = e.print();
                return Ok(e.exit_code() as u8);
            }
        };
        let size = lead.member.job.size();
        if let Some(ranks) = cli.ranks.filter(|&r| r != size) {
            let problem = format!("the job has {size}");
            let remedy = "leave it away, or start as many ranks with the launcher (-n)";
            return Err(Error::argument("--ranks", ranks, problem, remedy));
        }
        if cli.fabric == Some(Wanted::Mem) {
            let remedy = "give auto, shm, tcp or verbs: ranks that a launcher has started are processes";
            return Err(Error::argument("--fabric", "mem", "is for ranks of this program's own", remedy));
        }
        // They have served.
        (cli.fabric, cli.interfaces) = (None, None);
        cli.ranks = Some(size);
        cli.ranks_by = Some(decided_by(lead.member.job.starter(), size));
        cli.threads = cli.threads.or(lead.member.own_threads);
        lead.member.order(&Order::Links)?;
        for slow in lead.member.slow_links()? {
            let _ = writeln!(std::io::stderr(), "hpl-run: warning: {slow}");
        }
        Ok(session::run(&cli, std::path::Path::new(""), &host, &mut lead) as u8)
    })();
    let status = status.unwrap_or_else(|e: Error| {
        let _ = writeln!(std::io::stderr(), "hpl-run: {e}");
        lead.fail(&e);
        e.exit_code()
    });
    lead.end();
    ExitCode::from(status)
}

impl Member {
    fn join(job: Arc<Job>, fabric: Arc<dyn Fabric>, own_threads: Option<usize>) -> Result<Member> {
        let group = Group::all(fabric.clone())?;
        Ok(Member { job, fabric, group, own_threads })
    }

    fn follow(&self) -> Result<()> {
        self.hosts()?;
        self.links()?;
        loop {
            match self.receive()? {
                Order::Links => drop(self.slow_links()?),
                Order::Calibrate { kernels, threads } => {
                    self.calibrate(&kernels, threads)?;
                }
                Order::Work(assignment) => {
                    let world = self.world(&assignment.kernels, assignment.threads)?;
                    for run in assignment.input.runs() {
                        rank::solve(&world, &run, &mut |_, _| {})?;
                    }
                    return Ok(());
                }
                Order::Nothing => return Ok(()),
            }
        }
    }

    /// Rank 0 tells the others.
    fn order(&self, order: &Order) -> Result<()> {
        let mut bytes = postcard::to_allocvec(order).map_err(|e| Error::Internal(e.to_string()))?;
        self.group.bcast(0, &mut [bytes.len() as u64])?;
        self.group.bcast(0, &mut bytes)
    }

    fn receive(&self) -> Result<Order> {
        self.fabric.set_activity("while waiting for what rank 0 wants done");
        let mut len = [0u64];
        self.group.bcast(0, &mut len)?;
        let mut bytes = vec![0u8; len[0] as usize];
        self.group.bcast(0, &mut bytes)?;
        postcard::from_bytes(&bytes).map_err(|e| Error::Internal(format!("an order that is none: {e}")))
    }

    fn threads(&self, assigned: usize) -> usize {
        self.own_threads.unwrap_or(assigned)
    }

    fn world(&self, kernels: &str, threads: usize) -> Result<World> {
        let kernels = kernels.parse().map_err(Error::Internal)?;
        let bind = fulmen::world::bind_from_env()?.unwrap_or(true);
        let setup = Setup { kernels, threads: self.threads(threads), bind };
        World::placed(self.fabric.clone(), self.job.local(), &setup)
    }

    /// All hosts of the job as one, on rank 0.
    fn hosts(&self) -> Result<Option<Host>> {
        let own = Host::detect();
        let limits = own.limits;
        let available = own.available.unwrap_or(u64::MAX);
        let mine = [own.cores as u64, available, own.numa_nodes as u64, limits.addresses, limits.data];
        let Some(all) = self.group.gather(0, &mine)? else { return Ok(None) };
        let facts: Vec<[u64; FACTS]> = all.as_chunks().0.to_vec();
        let names: Vec<&str> = (0..self.job.size()).map(|r| self.job.host(r)).collect();
        Ok(Some(together(&names, &facts, own)))
    }

    /// Words on links between the job's hosts that are far slower than others, on rank 0.
    fn slow_links(&self) -> Result<Vec<String>> {
        let leaders = doctor::job::leaders(&self.job);
        let names = leaders.iter().map(|&rank| self.job.host(rank).to_string()).collect();
        doctor::network::slow_links(&self.group, &leaders, names)
    }

    /// What joins each two ranks, unless they are many.
    fn links(&self) -> Result<Vec<RankLink>> {
        if self.job.size() > MOST_RANKS {
            return Ok(vec![]);
        }
        let mine = RankLink::of(self.job.rank(), self.job.steps());
        let mine = postcard::to_allocvec(&mine).map_err(|e| Error::Internal(e.to_string()))?;
        let all = self.group.all_gather_var(&mine)?;
        let read = |bytes: &Vec<u8>| postcard::from_bytes::<Vec<RankLink>>(bytes);
        let all = all.iter().map(read).collect::<std::result::Result<Vec<_>, _>>();
        Ok(all
            .map_err(|e| Error::Internal(format!("links that are none: {e}")))?
            .into_iter()
            .flatten()
            .collect())
    }

    /// Every rank at the same time; on rank 0 all rates and thread counts.
    fn calibrate(&self, kernels: &str, threads: usize) -> Result<Option<(report::Job, Vec<[f64; 2]>)>> {
        let cables = Some(Cables::gather(&self.group)?);
        self.fabric.set_activity("while measuring dgemm");
        let threads = self.threads(threads);
        let measured = report::Job { cables, ..Local::default().calibrate(kernels, 1, threads)? };
        let mine = [measured.gemm_gflops.unwrap_or(0.0), threads as f64];
        let all = self.group.gather(0, &mine)?;
        Ok(all.map(|all| (measured, all.chunks_exact(2).map(|c| [c[0], c[1]]).collect())))
    }
}

/// Numbers that each rank tells of its host and process.
const FACTS: usize = 5;

/// The hosts of all ranks as one: all cores, and as much memory as all ranks can have if each takes as much as the
/// one that can have least. `facts` of each rank's host and process: cores, bytes available, memory domains, addresses and
/// private bytes within its limits.
fn together(names: &[&str], facts: &[[u64; FACTS]], own: Host) -> Host {
    let mut seen: Vec<&str> = vec![];
    let (mut cores, mut domains, mut least) = (0, 0, (u64::MAX, ""));
    for (rank, name) in names.iter().enumerate() {
        let [c, available, numa, ..] = facts[rank];
        if !seen.contains(name) {
            seen.push(name);
            cores += c as usize;
            domains += numa as usize;
        }
        let here = names.iter().filter(|n| *n == name).count() as u64;
        least = least.min((available / here, name));
    }
    let least_of = |fact: usize| facts.iter().map(|f| f[fact]).min().unwrap_or(u64::MAX);
    let limits = OfProcess { addresses: least_of(3), data: least_of(4) };
    if seen.len() == 1 {
        return Host { limits, ..own };
    }
    let available = least.0.checked_mul(names.len() as u64).filter(|_| least.0 < u64::MAX / 1024);
    Host {
        name: format!("the job's {} hosts", seen.len()),
        cores,
        numa_nodes: domains,
        available,
        bound: format!("the ranks on {} have least", least.1),
        limits,
    }
}

/// Rank 0.
struct Lead {
    member: Member,
    world: Option<World>,
    links: Vec<RankLink>,
    /// Runs that the others still wait for.
    left: usize,
    /// The others have been told all that there is.
    over: bool,
    failed: bool,
}

impl Lead {
    /// A failure of this rank, which the user is told of: the job's end.
    fn fail(&mut self, e: &Error) {
        if !std::mem::replace(&mut self.failed, true) {
            // The launcher first: what the others make of it follows.
            self.member.job.fail(e, true);
            self.member.fabric.fail(e);
        }
    }

    fn noting<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|e| {
            // The launcher's reason is the cause of what the fabric says.
            let e = self.member.job.ending().unwrap_or(e);
            self.fail(&e);
            e
        })
    }

    /// Nobody is left waiting.
    fn end(&mut self) {
        if self.failed {
            return;
        }
        if !self.over {
            let ordered = self.member.order(&Order::Nothing);
            // They are gone already: all the better.
            drop(ordered);
        } else if self.left > 0 {
            // A cause, not the end that others have ordered.
            let os = "it has said why".into();
            self.fail(&Error::System { what: "rank 0 has ended early".into(), os });
        }
    }
}

impl Driver for Lead {
    fn is_told(&self, error: &Error) -> bool {
        self.member.job.ending().is_some_and(|ending| ending.to_string() == error.to_string())
    }

    fn at_failure(&mut self, end: Box<dyn FnOnce(&Error) + Send>) {
        self.member.job.last_words(end);
    }

    fn calibrate(&mut self, kernels: &str, ranks: usize, threads: usize) -> Result<report::Job> {
        let measured = (|| {
            self.member.order(&Order::Calibrate { kernels: kernels.into(), threads })?;
            self.member.calibrate(kernels, threads)
        })();
        let Some((own, all)) = self.noting(measured)? else {
            return Err(Error::Internal("rank 0 got no rates".into()));
        };
        let job = &self.member.job;
        let place =
            |rank: usize| RankPlace { rank, host: job.host(rank).into(), threads: all[rank][1] as usize };
        Ok(report::Job {
            ranks,
            fabric: self.member.fabric.name().into(),
            gemm_gflops: Some(all.iter().map(|r| r[0]).sum()),
            places: (0..job.size()).map(place).collect(),
            links: self.links.clone(),
            ..own
        })
    }

    /// The others go on to the next run at once, and must not be disturbed.
    fn measure_again(&mut self) -> Option<f64> {
        None
    }

    fn start(&mut self, settings: &Settings) -> Result<()> {
        let assignment = Assignment {
            input: settings.input.clone(),
            kernels: settings.kernels.clone(),
            threads: settings.threads,
        };
        self.left = settings.input.runs().count();
        self.over = true;
        let world = (|| {
            self.member.order(&Order::Work(Box::new(assignment)))?;
            self.member.world(&settings.kernels, settings.threads)
        })();
        self.world = Some(self.noting(world)?);
        Ok(())
    }

    fn solve(&mut self, run: &Run, progress: &Progress) -> Result<Outcome> {
        let Some(world) = &self.world else {
            return Err(Error::Internal("a run before the ranks were started".into()));
        };
        let solved = rank::solve(world, run, &mut |done, total| progress.work(done, total));
        let outcome = self.noting(solved)?;
        self.left -= 1;
        outcome.ok_or_else(|| Error::Internal("rank 0 had no outcome".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_count_once_and_the_poorest_rank_bounds_memory() {
        let own = Host {
            name: "this machine".into(),
            cores: 8,
            numa_nodes: 1,
            available: Some(64),
            bound: "x".into(),
            limits: OfProcess::UNLIMITED,
        };
        const NONE: u64 = u64::MAX;
        let facts = [[8, 64, 1, NONE, 9], [8, 64, 1, 7, NONE], [4, 40, 2, NONE, NONE]];
        let all = together(&["a", "a", "b"], &facts, own.clone());
        assert_eq!((all.cores, all.numa_nodes, all.available), (12, 3, Some(96)));
        assert_eq!(all.name, "the job's 2 hosts");
        assert!(all.bound.contains("on a"));
        assert_eq!(all.limits, OfProcess { addresses: 7, data: 9 });
        assert_eq!(
            together(&["a", "a"], &facts[..2], own.clone()),
            Host { limits: all.limits, ..own.clone() }
        );
        let unknown = [[8, NONE, 1, NONE, NONE], [8, NONE, 1, NONE, NONE]];
        assert_eq!(together(&["a", "b"], &unknown, own).available, None);
    }
}
