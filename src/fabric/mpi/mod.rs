//! Ranks of an MPI job: the contract on any communicator of the caller's (cargo feature `mpi`).
//!
//! ```no_run
//! use fulmen::fabric::mpi;
//! use fulmen::{Setup, World};
//!
//! let universe = mpi::rsmpi::initialize_with_threading(mpi::rsmpi::Threading::Funneled).unwrap().0;
//! let world = World::mpi(&universe.world(), &mpi::Options::default(), &Setup::default())?;
//! println!("rank {} of {}", world.rank(), world.size());
//! # Ok::<(), fulmen::Error>(())
//! ```
//!
//! Needs `MPI_THREAD_FUNNELED`: MPI is called inside the fabric's functions only, by the thread that connected, which
//! must be the one that initialised MPI (any one, in turn, from `MPI_THREAD_SERIALIZED` on). A thread beside it, which
//! never calls MPI, beats and listens by UDP, so that a rank that is stopped is found although MPI waits for ever
//! ([`Options::heartbeat`]).
//!
//! A job that has failed ends when a rank drops its fabric: the failure's words go to standard error, once, and
//! `MPI_Abort` ends all processes with the failure's exit code. See README.md beside this file.

mod heart;
mod memory;
mod rank;
mod raw;
mod streams;

use std::sync::Arc;

pub use ::mpi as rsmpi;
use ::mpi::traits::Communicator;

pub use self::rank::Rank;
use super::Bounds;
use crate::error::{Error, Result};

/// How bytes travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transfer {
    /// `MPI_Isend` from, `MPI_Irecv` into the ranges: the faster way on most transports.
    #[default]
    Messages,
    /// `MPI_Put` into one window of so many bytes a rank, out of which all memory is allocated; then a flush, and a
    /// message that tells the length.
    Window {
        /// Memory of this rank. Some libraries take it all at once.
        bytes: usize,
    },
}

/// How a rank joins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// When a peer is given up. Must be the same on every rank.
    pub bounds: Bounds,
    /// How bytes travel. Must be the same on every rank but for the bytes.
    pub transfer: Transfer,
    /// Whether ranks show signs of life to rank 0 by UDP. Without it (or where nothing gets through) a rank that is
    /// stopped is given up after the patience bound, not the silence bound.
    pub heartbeat: bool,
    /// Whether a failed job's words go to standard error when it ends; not for a program whose ranks say themselves
    /// what they fail with.
    pub say: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { bounds: Bounds::default(), transfer: Transfer::default(), heartbeat: true, say: true }
    }
}

/// Joins a job of the ranks of `comm`, which is duplicated. Collective.
///
/// # Errors
/// [`Error::Argument`] when MPI was initialised without threads; [`Error::Resources`]; [`Error::System`] with MPI's own
/// words, also when not all ranks come within the patience bound.
pub fn connect<C: Communicator + ?Sized>(comm: &C, options: &Options) -> Result<Arc<Rank>> {
    Rank::connect(comm.as_raw(), options).map(Arc::new)
}

/// Ends all processes of MPI: with the error's words on standard error, and its exit code.
pub fn abort(error: &Error) -> ! {
    eprintln!("{error}");
    if raw::is_up() {
        raw::abort(error.exit_code());
    }
    std::process::exit(error.exit_code().into())
}
