//! `hpl-run` built with the feature `mpi`: what mpirun or srun has started is a rank of `MPI_COMM_WORLD`.

use std::sync::Arc;

use fulmen::fabric::mpi::rsmpi::environment::Universe;
use fulmen::fabric::mpi::rsmpi::traits::Communicator;
use fulmen::fabric::mpi::rsmpi::{Threading, initialize_with_threading};
use fulmen::fabric::mpi::{self, Options};
use fulmen::fabric::{Bounds, Fabric};
use fulmen::job::Job;
use fulmen::job::env::Starter;
use fulmen::{Error, Result};

/// Initialises MPI, when the job was started by something that starts MPI's processes. It is finalised when what is
/// returned is dropped.
///
/// # Errors
/// [`Error::Argument`] when MPI sees another job than the environment: the launcher is another MPI's.
pub fn start(job: &Job) -> Result<Option<Universe>> {
    if !matches!(job.starter(), Starter::OpenMpi | Starter::Pmi | Starter::Slurm) {
        return Ok(None);
    }
    let Some((universe, _)) = initialize_with_threading(Threading::Funneled) else {
        return Err(Error::Internal("MPI was initialised before".into()));
    };
    let world = universe.world();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    if (rank, size) != (job.rank(), job.size()) {
        return Err(Error::argument(
            "MPI_COMM_WORLD",
            format!("rank {rank} of {size}"),
            format!("{} has started rank {} of {}", job.starter(), job.rank(), job.size()),
            "start the ranks with the MPI that this program was built with (MPICC), or build it for the other",
        ));
    }
    Ok(Some(universe))
}

/// The fabric of all of MPI's ranks.
///
/// # Errors
/// As [`mpi::connect`].
pub fn connect(universe: &Universe, bounds: Bounds) -> Result<Arc<dyn Fabric>> {
    // Each rank of this program says itself what it fails with.
    let options = Options { bounds, say: false, ..Options::default() };
    let rank = mpi::connect(&universe.world(), &options)?;
    Ok(rank)
}
