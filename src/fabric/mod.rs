//! Armed-slot puts: the one contract that every transport keeps.
//!
//! * Memory that travels is allocated by the fabric ([`Fabric::alloc`], used through [`Buf`]) and
//!   registered once.
//! * The target **arms** a range of it for one source: "this rank may fill this once".
//! * The source **puts** a range of its own into the next range armed for it.
//! * On one [`Lane`], puts between two ranks arrive in the order sent and fill ranges in the order
//!   armed; lanes are independent of each other. Both sides derive that order from the same program,
//!   so no message carries a tag or an address, and the bytes land in their final place.
//! * A put may be shorter than the range armed for it, never longer; the length arrives with it.
//! * Nothing here waits for ever: [`Fabric::wait`] and [`Fabric::flush`] end with the bytes, or with
//!   an error that names the peer.
//!
//! Puts never block: one that finds no armed range is queued at the source (in order) and moves, at
//! the latest, when [`Fabric::poll`], `wait` or `flush` is called. A rank that computes for long calls
//! `poll` now and then. (`mem` and `shm` need that only beyond 64 puts under way on one lane between
//! two ranks: there the target fetches what was put before it armed.)
//!
//! A failure is the job's: the rank that finds it gets the error, and what every other rank does next
//! with its fabric fails too, with [`crate::Error::Aborted`] and the finder's words, or, when a rank
//! died, with [`crate::Error::PeerLost`].

mod alarm;
mod buf;
pub(crate) mod checksum;
pub mod mem;
pub mod mixed;
#[cfg(feature = "mpi")]
pub mod mpi;
// Tested without MPI.
#[cfg(any(feature = "mpi", test))]
mod pulse;
pub mod rendezvous;
mod rules;
mod shared;
pub mod shm;
pub mod tcp;
pub mod verbs;

pub use buf::{Buf, Memory};

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;

/// An independent stream of puts between each pair of ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lane(pub u8);

impl Lane {
    /// Barriers, reductions and other small collectives.
    pub const CONTROL: Lane = Lane(0);
    /// The pivot search within a panel.
    pub const PIVOT: Lane = Lane(1);
    /// Panel broadcast.
    pub const PANEL: Lane = Lane(2);
    /// Row exchange.
    pub const ROWS: Lane = Lane(3);
    /// Moving matrices: gather, scatter, redistribution.
    pub const BULK: Lane = Lane(4);
    /// How many lanes a fabric must offer.
    pub const COUNT: usize = 8;
}

impl std::fmt::Display for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Lane::CONTROL => f.write_str("control"),
            Lane::PIVOT => f.write_str("pivot"),
            Lane::PANEL => f.write_str("panel"),
            Lane::ROWS => f.write_str("rows"),
            Lane::BULK => f.write_str("bulk"),
            Lane(other) => write!(f, "{other}th"),
        }
    }
}

/// A put of at most so many bytes takes one way on every transport: it does not wait to be asked for.
pub const SHORT: usize = 4000;

/// How long a rank waits for a peer before it is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Without any sign of life.
    pub silence: Duration,
    /// Alive, but owing a put.
    pub patience: Duration,
}

impl Default for Bounds {
    /// 10 s of silence, 600 s of patience.
    fn default() -> Self {
        Bounds { silence: Duration::from_secs(10), patience: Duration::from_secs(600) }
    }
}

impl Bounds {
    /// With these a job that loses a rank is over within this time: 7/10 of it for its discovery, the rest for all ranks to end.
    pub fn over_within(time: Duration) -> Self {
        Bounds { silence: time * 7 / 10, ..Bounds::default() }
    }
}

/// Whether so many ranks have no core each on this host.
pub(crate) fn is_crowded(ranks: usize) -> bool {
    ranks > std::thread::available_parallelism().map_or(1, usize::from)
}

/// This host's name, for messages.
pub fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: writes at most the length given.
    let failed = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) } != 0;
    let len = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    if failed || len == 0 { "this host".into() } else { String::from_utf8_lossy(&name[..len]).into_owned() }
}

/// A put under way, to be asked for with [`Fabric::flush`] or [`Fabric::is_done`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Target.
    pub to: usize,
    /// Lane.
    pub lane: Lane,
    /// Number of the put on this lane to this target, from 0.
    pub seq: u64,
}

/// What a rank is doing, as far as its fabric knows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Doing {
    /// As told to [`Fabric::set_activity`].
    pub activity: String,
    /// The rank that it waits for, and what is to come from there.
    pub waits_for: Option<(usize, String)>,
}

/// One rank's end of a transport. Used by one thread at a time (the rank's own), but shareable so that
/// a handle can be kept in several places.
pub trait Fabric: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// The transport's name as the user chooses it: `mem`, `shm`, `tcp`, …
    fn name(&self) -> &'static str;

    /// Host name of a rank.
    fn host(&self, rank: usize) -> String;

    /// How a rank is reached, for messages and reports: `shm`, `tcp over en5 (10.0.0.1 to 10.0.0.2)`, …
    fn link(&self, _rank: usize) -> String {
        self.name().into()
    }

    /// How many cables lie between this rank and another: 1 when they are joined directly, more when ranks in
    /// between pass on what travels.
    fn hops(&self, _rank: usize) -> usize {
        1
    }

    /// Zeroed, page-aligned, registered memory. Lives until its last handle is dropped.
    ///
    /// # Errors
    /// [`crate::Error::Resources`] when there is not enough.
    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>>;

    /// Lets `from` fill `range` (bytes) of `mem` once. Use [`Buf::arm`], which keeps the range from being
    /// looked at meanwhile. Returns the number of this arm for `from` on this lane, from 0.
    ///
    /// # Errors
    /// When the fabric is broken (a peer was lost), `mem` is not its own, or `from` is this rank.
    fn arm(&self, lane: Lane, from: usize, mem: &Arc<Memory>, range: Range<usize>) -> Result<u64>;

    /// Puts `range` (bytes) of `mem` into the next range armed by `to` for this rank on this lane. Use
    /// [`Buf::put`]. The bytes must not change until the ticket is done.
    ///
    /// # Errors
    /// When a peer was lost, the put is longer than the range armed for it, or `to` is this rank. A put
    /// that is too long may be found later, by the target's `arm`; it ends the job.
    fn put(&self, lane: Lane, to: usize, mem: &Arc<Memory>, range: Range<usize>) -> Result<Ticket>;

    /// Whether the range of `arm` has been filled: its length in bytes, once. `None`: not yet. Also moves
    /// queued puts. `arm` must be the oldest for `from` on this lane that has not been waited for.
    ///
    /// # Errors
    /// When a peer was lost or the bytes are not what was sent; [`crate::Error::Internal`] out of order.
    fn try_wait(&self, lane: Lane, from: usize, arm: u64) -> Result<Option<usize>>;

    /// Waits until the range of `arm` has been filled; returns the length in bytes. `arm` as in
    /// [`Fabric::try_wait`].
    ///
    /// # Errors
    /// [`crate::Error::PeerLost`] when `from` is gone, gives no sign of life within the silence bound, or
    /// lives but owes this put longer than the patience bound; [`crate::Error::Corrupt`]; [`crate::Error::Aborted`].
    fn wait(&self, lane: Lane, from: usize, arm: u64) -> Result<usize>;

    /// Whether the source range of a put may be changed again. Also moves queued puts.
    ///
    /// # Errors
    /// When a peer was lost.
    fn is_done(&self, ticket: Ticket) -> Result<bool>;

    /// Waits until the source range of a put may be changed again.
    ///
    /// # Errors
    /// As [`Fabric::wait`].
    fn flush(&self, ticket: Ticket) -> Result<()>;

    /// Moves queued puts as far as they go, without waiting.
    ///
    /// # Errors
    /// When a peer was lost or the job was aborted.
    fn poll(&self) -> Result<()>;

    /// Says, for the message of a wait that fails, what this rank is doing: `in panel 41 of 120`.
    fn set_activity(&self, what: &str);

    /// What this rank is doing, for messages of others' failures.
    fn doing(&self) -> Doing {
        Doing::default()
    }

    /// Ends the job: every other rank's waits fail with [`crate::Error::Aborted`] and this reason.
    fn abort(&self, reason: &str);

    /// Ends the job with an error that this rank has met, if it has not ended yet: as [`Fabric::abort`],
    /// and whoever started the ranks reports this error's words and exit code.
    fn fail(&self, error: &crate::Error);
}
