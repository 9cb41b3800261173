//! Ranks as processes of any hosts, over TCP.
//!
//! Every pair of ranks has a connection (or several), over interfaces that [`Options::on`] allows; each is
//! proven with the job's secret before a byte of it counts. Ranks that do not reach each other (a chain or
//! ring of cables, with no switch) do so through ranks in between, which pass bytes on while they compute,
//! and stay until all have left. What travels is **authenticated at connect, not
//! encrypted**: whoever can write into an established connection can change what is computed (a checksum
//! finds accidents, not intent). Use a network that is yours, or a VPN between the hosts.
//!
//! A put goes from the source's memory to the socket and from the socket into the range armed for it, without
//! a copy in between. A thread moves bytes while the rank computes; a rank that waits moves them itself.
//! `src/fabric/README.md` tells of the protocol.

mod endpoint;
mod engine;
mod frame;
mod incoming;
pub(super) mod interfaces;
mod job;
mod outgoing;
mod peer;
mod region;
mod relay;
#[cfg(test)]
mod relay_tests;
mod routes;
mod rx;
mod setup;
mod socket;
#[cfg(test)]
mod tests;
mod tx;
mod window;
mod words;

pub use interfaces::{On, is_tunnel, not_here};

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub(super) use self::endpoint::Endpoint;
use self::engine::Engine;
use self::job::Job;
use self::region::Region;
pub(super) use self::setup::Place;
use super::rendezvous::{Rendezvous, Secret};
use super::{Bounds, Fabric, Lane, is_crowded};
use crate::error::Result;

/// How ranks are connected.
#[derive(Clone, Debug)]
pub struct Options {
    /// Deadlines of the job.
    pub bounds: Bounds,
    /// How long connecting may take.
    pub start: Duration,
    /// Interfaces that carry data. Empty: all but tunnels and loopback, or loopback if all ranks are on one
    /// host.
    pub on: Vec<On>,
    /// Addresses of this rank's host that the others are to try before its other ones, where they have an address in the same
    /// network.
    pub first: Vec<IpAddr>,
    /// Connections between each two ranks, over each cable (a subnet of two hosts, or one of several named in
    /// `on` that both have) if there are several: long puts are spread over them. 1 to 16, on all ranks the
    /// same.
    pub connections: usize,
    /// Whether what this rank puts is protected by a CRC32C; `None`: unless all ranks are on one host, whose bytes never leave
    /// its memory.
    pub checksums: Option<bool>,
    /// Which ranks may be connected: rank `a` and a lower `b` if `reach[a][b]`; on all ranks the same. `None`:
    /// all that reach each other. For cabling that is known, and for trying one out.
    pub reach: Option<Vec<Vec<bool>>>,
    /// What this rank's host is called in messages; `None`: its own name.
    pub host: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            bounds: Bounds::default(),
            start: Duration::from_secs(30),
            on: Vec::new(),
            first: Vec::new(),
            connections: 1,
            checksums: None,
            reach: None,
            host: None,
        }
    }
}

/// Connects this rank with all others. Collective.
///
/// # Errors
/// [`crate::Error::Unreachable`], on every rank, when some do not reach each other, not even through others:
/// with each such island, each pair that is not connected, their hosts and the addresses that were tried; [`crate::Error::Argument`] when no interface is allowed.
///
/// ```
/// use fulmen::fabric::rendezvous::{Secret, in_process};
/// use fulmen::fabric::{Buf, Fabric, Lane, tcp};
///
/// let secret = Secret::random()?;
/// std::thread::scope(|scope| {
///     for mut rendezvous in in_process(2) {
///         let secret = secret.clone();
///         scope.spawn(move || {
///             let fabric = tcp::connect(&mut rendezvous, secret, &tcp::Options::default())?;
///             let other = 1 - fabric.rank();
///             let mut buf = Buf::<u64>::zeros(&*fabric, 2)?;
///             buf.arm(&*fabric, Lane::CONTROL, other, 1..2)?;
///             buf.write(0..1)[0] = fabric.rank() as u64;
///             buf.put(&*fabric, Lane::CONTROL, other, 0..1)?;
///             let got = buf.wait(&*fabric, Lane::CONTROL, other)?;
///             assert_eq!(buf.read(got), [other as u64]);
///             Ok::<(), fulmen::Error>(())
///         });
///     }
/// });
/// # Ok::<(), fulmen::Error>(())
/// ```
pub fn connect(
    rendezvous: &mut dyn Rendezvous,
    secret: Secret,
    options: &Options,
) -> Result<Arc<dyn Fabric>> {
    Ok(Arc::new(endpoint(rendezvous, &secret, options)?.0))
}

/// This rank's end, and where each rank is.
pub(super) fn endpoint(
    rendezvous: &mut dyn Rendezvous,
    secret: &Secret,
    options: &Options,
) -> Result<(Endpoint, Vec<Place>)> {
    let rank = rendezvous.rank();
    let mut connected = setup::connect(rendezvous, secret, options)?;
    let places = std::mem::take(&mut connected.places);
    Ok((start(rank, connected, options)?, places))
}

fn start(rank: usize, connected: setup::Connected, options: &Options) -> Result<Endpoint> {
    let checked = options.checksums.unwrap_or(!connected.one_host);
    let job = Job::new(rank, connected.ends, &connected.routes, checked);
    let engine = Engine::new(job, connected.links, options.bounds);
    Endpoint::start(rank, engine, options.bounds, is_crowded(connected.here))
}

/// What is wrong with a frame, or with what a program asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Wrong {
    /// Bytes that no peer can have meant.
    Corrupt(String),
    /// A rule of the contract that the program has broken.
    Program(String),
}

impl Wrong {
    fn too_long(from: u32, to: u32, lane: Lane, number: u64, total: u64, armed: u64) -> Self {
        Wrong::Program(format!(
            "put {number} of rank {from} to rank {to} on the {lane} lane has {total} bytes, but {armed} were armed \
             for it"
        ))
    }
}
