//! RDMA devices: puts that the network card makes.
//!
//! The verbs library is found at run time; without one there is no such transport, and [`Absent`] says why. A
//! device's refusal is told with its remedy ([`Trouble`]).
//!
//! One protocol serves two kinds of devices. Where the card can write into a peer's memory, it does (RDMA WRITE with
//! immediate data at the address that the target granted). Where it can only send into receives that the peer
//! has posted (Thunderbolt between Macs, which has nothing else), the target posts its receives *on the armed range*,
//! and the card of the source sends frame-matched chunks. Either way no byte of a large put is copied by a CPU, and
//! no header travels with it; checksums follow on a queue pair of their own. Which kind a device is is found by its
//! name and by a proof at connect, never by the operating system. `README.md` has the protocol and its reasons.

mod arena;
mod devices;
mod endpoint;
mod engine;
mod ffi;
mod links;
pub mod nic;
mod patience;
pub mod probe;
mod proof;
mod protocol;
mod rank;
pub mod trouble;

pub(super) use arena::Source;
pub use devices::Devices;
pub(crate) use devices::names;
pub use endpoint::{Verbs, connect};
pub use engine::Moved;
pub use ffi::{Absent, LIBRARY_VARIABLE, Library};
pub use links::LeftOut;
pub use nic::Service;
pub use protocol::Mode;
pub use trouble::{Refusal, Step, Trouble};

use std::path::PathBuf;
use std::time::Duration;

use super::Bounds;

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// The verbs library; `None`: [`Library::find`]'s.
    pub library: Option<PathBuf>,
    /// The devices.
    pub devices: Devices,
    /// Whether every two ranks must be joined. If not (on all ranks alike), pairs without a cable, or whose cables carry
    /// nothing, are left out, as are ranks without a device (unless [`Devices::Named`]): [`Verbs::joins`] tells.
    pub all_pairs: bool,
    /// Ranks that are reached otherwise (those of this host): no cable to them is looked for.
    pub without: Vec<usize>,
    /// Connection and mode; `None`: the best that passes its proof. Thunderbolt devices are always used by posted
    /// receives over UC. The lower rank's choice counts for a pair.
    pub way: Option<(Service, Mode)>,
    /// Bytes in a chunk of a large put: whole 4 KiB frames; the smallest of all ranks counts.
    pub chunk: usize,
    /// Bytes under way on a cable in one direction, at most.
    pub window: usize,
    /// Whether chunks are checked by CRC32C. `None`: unless the connection is reliable, for then the cards check.
    pub checksums: Option<bool>,
    /// Deadlines.
    pub bounds: Bounds,
    /// How long a new connection may take to carry its proofs before it is made anew.
    pub warm_up: Duration,
    /// Whether a thread moves puts while the rank computes; else they move when the rank calls its fabric, and the
    /// thread only shows the peers, once in a while, that the link lives.
    pub progress_thread: bool,
}

impl Default for Options {
    /// The library and all devices of the system, 64 KiB chunks, 1 MiB under way, a progress thread.
    fn default() -> Self {
        Options {
            library: None,
            devices: Devices::All,
            all_pairs: true,
            without: Vec::new(),
            way: None,
            chunk: 64 << 10,
            window: 1 << 20,
            checksums: None,
            bounds: Bounds::default(),
            warm_up: Duration::from_secs(3),
            progress_thread: true,
        }
    }
}
