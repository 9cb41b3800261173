//! A program's place in a job.

use std::sync::Arc;

use fulmen_kernels::{Choice, Element, KernelSet, Kernels, Team, allowed_cores};

use crate::compute::Compute;
use crate::error::{Error, Result};
use crate::fabric::{Fabric, mem};
use crate::grid::{Grid, Order};

/// What each rank computes with.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Which kernels.
    pub kernels: Choice,
    /// Threads of each rank; 0: as many as there are cores for it.
    pub threads: usize,
    /// Whether each thread is kept on a core of its own, if there are enough (Linux only). For a program
    /// that has the machine to itself.
    pub bind: bool,
}

impl Setup {
    fn compute(&self, rank: usize, ranks_here: usize) -> Result<Compute> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = if self.threads > 0 { self.threads } else { (cores / ranks_here.max(1)).max(1) };
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
}

impl World {
    /// A rank with this fabric.
    ///
    /// # Errors
    /// When the kernels or threads asked for cannot be had.
    pub fn new(fabric: Arc<dyn Fabric>, ranks_here: usize, setup: &Setup) -> Result<Self> {
        let compute = Arc::new(setup.compute(fabric.rank(), ranks_here)?);
        Ok(World { fabric, compute })
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
