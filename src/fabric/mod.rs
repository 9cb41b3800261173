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
//! Puts never block: one that finds no armed range is queued at the source (in order) and moves when
//! [`Fabric::poll`], `wait` or `flush` is called. A rank that computes for long calls `poll` now and
//! then.

mod buf;

pub use buf::{Buf, Memory};

use std::ops::Range;
use std::sync::Arc;

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

    /// Zeroed, page-aligned, registered memory. Lives until its last handle is dropped.
    ///
    /// # Errors
    /// [`crate::Error::Resources`] when there is not enough.
    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>>;

    /// Lets `from` fill `range` (bytes) of `mem` once. Use [`Buf::arm`], which keeps the range from being
    /// looked at meanwhile.
    ///
    /// # Errors
    /// When the fabric is broken (a peer was lost), or `mem` is not its own.
    fn arm(&self, lane: Lane, from: usize, mem: &Arc<Memory>, range: Range<usize>) -> Result<()>;

    /// Puts `range` (bytes) of `mem` into the next range armed by `to` for this rank on this lane. Use
    /// [`Buf::put`]. The bytes must not change until the ticket is done.
    ///
    /// # Errors
    /// When a peer was lost, or the put is longer than the range armed for it.
    fn put(&self, lane: Lane, to: usize, mem: &Arc<Memory>, range: Range<usize>) -> Result<Ticket>;

    /// Whether the oldest range armed for `from` has been filled: its length in bytes, once. `None`:
    /// not yet. Also moves queued puts.
    ///
    /// # Errors
    /// When a peer was lost or the bytes are not what was sent.
    fn try_wait(&self, lane: Lane, from: usize) -> Result<Option<usize>>;

    /// Waits until the oldest range armed for `from` has been filled; returns the length in bytes.
    ///
    /// # Errors
    /// [`crate::Error::PeerLost`] when `from` is gone, gives no sign of life within the silence bound, or
    /// lives but owes this put longer than the patience bound; [`crate::Error::Corrupt`]; [`crate::Error::Aborted`].
    fn wait(&self, lane: Lane, from: usize) -> Result<usize>;

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

    /// Ends the job: every other rank's waits fail with [`crate::Error::Aborted`] and this reason.
    fn abort(&self, reason: &str);
}
