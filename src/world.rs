//! A program's place in a job.

use std::sync::Arc;

use fulmen_kernels::{Choice, Element, KernelSet, Kernels, Team, allowed_cores, cores};

use crate::compute::Compute;
use crate::error::{Error, Result};
#[cfg(feature = "mpi")]
use crate::fabric::mpi;
use crate::fabric::{Fabric, mem, shm};
use crate::grid::{Grid, Order};
use crate::job::Job;
use crate::job::env::{BIND, THREADS};

/// What each rank computes with.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Which kernels.
    pub kernels: Choice,
    /// Threads of each rank; 0: as many as there are cores for it (of Apple silicon, performance cores).
    pub threads: usize,
    /// Whether each thread is kept on a core of its own, if there are enough (Linux only). For a program
    /// that has the machine to itself.
    pub bind: bool,
}

impl Setup {
    fn compute(&self, rank: usize, ranks_here: usize) -> Result<Compute> {
        let threads = if self.threads > 0 { self.threads } else { (cores() / ranks_here.max(1)).max(1) };
        let kernels = KernelSet::select(&self.kernels).map_err(|problem| Error::Argument {
            name: "kernels".into(),
            value: self.kernels.to_string(),
            problem,
            remedy: "use `native`, which is always there".into(),
        })?;
        let cores = if self.bind { allowed_cores() } else { Vec::new() };
        let team = match cores.get(rank * threads..(rank + 1) * threads) {
            Some(own) if (2..=cores.len()).contains(&(ranks_here * threads)) => Team::bound(own),
            _ => Team::new(threads),
        };
        let team = team.map_err(|what| Error::Resources {
            what,
            remedy: "ask for fewer threads, or raise the limit on processes (`ulimit -u`)".into(),
        })?;
        Ok(Compute::new(kernels, team))
    }
}

/// One rank of a job: its links to the others, and what it computes with.
#[derive(Clone)]
pub struct World {
    fabric: Arc<dyn Fabric>,
    compute: Arc<Compute>,
    job: Option<Arc<Job>>,
}

impl World {
    /// A rank with this fabric.
    ///
    /// # Errors
    /// When the kernels or threads asked for cannot be had.
    pub fn new(fabric: Arc<dyn Fabric>, ranks_here: usize, setup: &Setup) -> Result<Self> {
        let local = (fabric.rank(), ranks_here);
        World::placed(fabric, local, setup)
    }

    /// A rank with this fabric, of which `local` tells its number among the ranks of its host and how many these are.
    ///
    /// # Errors
    /// When the kernels or threads asked for cannot be had.
    pub fn placed(fabric: Arc<dyn Fabric>, local: (usize, usize), setup: &Setup) -> Result<Self> {
        let compute = Arc::new(setup.compute(local.0, local.1)?);
        Ok(World { fabric, compute, job: None })
    }

    /// This process: one rank of the job that its environment tells of (started by `fulmen-run`, `torchrun`, `srun`,
    /// `mpirun`, or the shared-memory supervisor), or alone. All ranks of a job must call it; once.
    ///
    /// Of `setup`, threads that were left open are as many as `fulmen-run` was told (FULMEN_THREADS), and whether they are
    /// bound is as it was told, if it was (FULMEN_BIND).
    ///
    /// # Errors
    /// When the environment tells of a job and this rank does not find it, or cannot be connected to the others.
    pub fn from_env(setup: &Setup) -> Result<Self> {
        let mut setup = setup.clone();
        if setup.threads == 0 {
            setup.threads = threads_from_env()?.unwrap_or(0);
        }
        setup.bind = bind_from_env()?.unwrap_or(setup.bind);
        let Some(job) = Job::from_env()? else {
            let fabric = match shm::connect_from_env()? {
                Some(fabric) => fabric,
                None => mem::Job::new(1, &mem::Options::default())?.build().remove(0),
            };
            let size = fabric.size();
            return World::new(fabric, size, &setup);
        };
        let connected = job.options(job.bounds()).and_then(|options| job.connect(&options));
        let fabric = connected.inspect_err(|e| job.fail(e, false))?;
        let world = World::placed(Arc::clone(&fabric), job.local(), &setup).inspect_err(|e| {
            fabric.fail(e);
            job.fail(e, false);
        })?;
        Ok(World { job: Some(Arc::new(job)), ..world })
    }

    /// The job that [`World::from_env`] has found.
    pub fn job(&self) -> Option<&Job> {
        self.job.as_deref()
    }

    /// A job of `n` ranks that are threads of this process: runs `program` on each and returns what each
    /// returned. A rank that fails or panics ends the others.
    ///
    /// # Errors
    /// When the job cannot be made; each rank's own failure is in its place.
    pub fn threads<R: Send>(
        n: usize,
        setup: &Setup,
        program: impl Fn(World) -> Result<R> + Sync,
    ) -> Result<Vec<Result<R>>> {
        let job = mem::Job::new(n, &mem::Options::default())?;
        Ok(job.run(|fabric| program(World::new(fabric, n, setup)?)))
    }

    /// A rank of an MPI job, with the ranks of this communicator, which is duplicated. Collective.
    ///
    /// # Errors
    /// As [`crate::fabric::mpi::connect`] and [`World::new`].
    #[cfg(feature = "mpi")]
    pub fn mpi<C: mpi::rsmpi::traits::Communicator + ?Sized>(
        comm: &C,
        options: &mpi::Options,
        setup: &Setup,
    ) -> Result<Self> {
        let rank = mpi::connect(comm, options)?;
        let ranks_here = rank.ranks_here();
        World::new(rank, ranks_here, setup)
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.fabric.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.fabric.size()
    }

    /// A grid of `nprow` × `npcol` of the ranks, row-major.
    ///
    /// # Errors
    /// When there are fewer ranks.
    pub fn grid(&self, nprow: usize, npcol: usize) -> Result<Arc<Grid>> {
        Grid::new(self.fabric.clone(), nprow, npcol, Order::RowMajor)
    }

    /// The transport.
    pub fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.fabric
    }

    /// Kernels and threads.
    pub fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    /// Kernels for one element type.
    pub fn kernels<T: Element>(&self) -> &dyn Kernels<T> {
        &**self.compute.kernels::<T>()
    }

    /// This rank's threads.
    pub fn team(&self) -> &Team {
        self.compute.team()
    }
}

/// Threads of this rank, if whoever started it says (FULMEN_THREADS).
///
/// # Errors
/// [`Error::Argument`] when it is no number.
pub fn threads_from_env() -> Result<Option<usize>> {
    let Some(text) = std::env::var_os(THREADS) else { return Ok(None) };
    let text = text.to_string_lossy();
    match text.parse::<usize>() {
        Ok(threads) if threads > 0 => Ok(Some(threads)),
        _ => {
            Err(Error::argument(THREADS, text, "is no number of threads", "set it to 1 or more, or unset it"))
        }
    }
}

/// Whether this rank's threads are bound, if whoever started it says (FULMEN_BIND).
///
/// # Errors
/// [`Error::Argument`] when it is neither 0 nor 1.
pub fn bind_from_env() -> Result<Option<bool>> {
    let Some(text) = std::env::var_os(BIND).filter(|text| !text.is_empty()) else { return Ok(None) };
    match text.to_str() {
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        _ => Err(Error::argument(
            BIND,
            text.to_string_lossy(),
            "is neither 0 nor 1",
            "set it to 0 or 1, or unset it",
        )),
    }
}
