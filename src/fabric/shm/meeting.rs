//! How ranks of one host that others have started come to share memory.
//!
//! The lowest of them listens on a socket of this host. The others prove that they are of the job, as at every door, and
//! send their segment; it sends the segments of all, and the one of the job's state, to each. A rank that it does not
//! work with (another user's, in a container) is left out, and everyone knows why. Nothing here has a name that lasts.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::passing::{receive_file, send_file};
use super::segment::{Mapping, Segment};
use super::socket::{Socket, connect};
use super::{Segments, control_area};
use crate::error::Result;
use crate::fabric::Bounds;
use crate::fabric::rendezvous::door::{Door, Stream, prove};
use crate::fabric::rendezvous::handshake::{Hello, Purpose};
use crate::fabric::rendezvous::{Rendezvous, Secret, gather};
use crate::fabric::shared::area::Area;
use crate::fabric::shared::control::Control;
use crate::fabric::shared::endpoint::{Endpoint, UnderWay};

/// For one step of another process of this host, which may get no core for seconds. A rank that waits for the lowest waits for
/// its turn too.
const STEP: Duration = Duration::from_secs(10);
const TURN: Duration = Duration::from_secs(30);
/// All segments of a host that one process maps: half of what x86-64 and Apple silicon can address.
const ADDRESSABLE: usize = 1 << 46;
/// A copy is acknowledged by this.
const TAKEN: u8 = b'+';

/// One rank of a fabric over memory that ranks of one host share.
pub type Shm = Endpoint<Segments>;

/// Memory that this rank shares.
struct Parts {
    control: Segment,
    own: Segment,
    /// Of all that take part, this rank included.
    mappings: BTreeMap<usize, Mapping>,
}

/// What came of a meeting.
pub struct Met {
    rank: usize,
    parts: Option<Parts>,
    /// With whom each rank shares memory, or why with nobody.
    shares: Vec<std::result::Result<Vec<usize>, String>>,
}

/// Forms groups of ranks that share memory; collective. `group`: the ranks of this one's host, in order, itself
/// included; every rank of a host must name the same.
///
/// # Errors
/// As [`Rendezvous::all_gather`]; memory that cannot be shared is none, see [`Met::shares`].
pub fn meet(rendezvous: &mut dyn Rendezvous, secret: &Secret, group: &[usize]) -> Result<Met> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let lowest = group.first().copied().unwrap_or(rank);
    let socket = (lowest == rank && group.len() > 1).then(|| Socket::listen().map_err(|e| e.to_string()));
    let address = socket.as_ref().and_then(|s| s.as_ref().ok()).map_or(&[][..], Socket::address);
    let addresses = rendezvous.all_gather(address)?;
    let segment = || {
        let len = physical_memory().min(ADDRESSABLE / group.len().max(1));
        Segment::new(len).map_err(|e| e.to_string())
    };

    let parts = match socket {
        Some(socket) => lead(rendezvous, secret, group, socket, segment)?,
        None if lowest == rank => {
            rendezvous.all_gather(&[])?;
            Err("it is alone on its host".to_owned())
        }
        None => {
            let hello = Hello {
                purpose: Purpose::Memory,
                from: rank as u32,
                to: lowest as u32,
                size: size as u32,
                link: 0,
            };
            let entered = segment().and_then(|own| {
                let stream = enter(&addresses[lowest], secret, &hello, &own)
                    .map_err(|why| format!("rank {lowest} is not reached: {why}"))?;
                Ok((own, stream))
            });
            rendezvous.all_gather(&[])?; // from here on the lowest knows who came
            entered.and_then(|(own, stream)| take_part(rank, size, own, stream))
        }
    };

    let mine = parts.as_ref().map(|p| p.mappings.keys().copied().collect::<Vec<_>>()).map_err(Clone::clone);
    let shares = gather(rendezvous, &mine)?;
    Ok(Met { rank, parts: parts.ok(), shares })
}

impl Met {
    /// Whether two ranks share memory; why not.
    ///
    /// # Errors
    /// A reason.
    pub fn shares(&self, a: usize, b: usize) -> std::result::Result<(), String> {
        for rank in [a, b] {
            if let Err(why) = &self.shares[rank] {
                return Err(format!("rank {rank}: {why}"));
            }
        }
        let got = |rank: usize, other| self.shares[rank].as_ref().is_ok_and(|with| with.contains(&other));
        let missing = [(a, b), (b, a)].into_iter().find(|(rank, other)| !got(*rank, *other));
        missing.map_or(Ok(()), |(rank, other)| Err(format!("rank {rank} got no memory of rank {other}")))
    }

    /// The fabric over what is shared, once; `None` when that is nothing. `control` joins all ranks of the job.
    ///
    /// # Errors
    /// [`Error::System`] when memory cannot be mapped.
    pub fn connect(&mut self, control: Control, bounds: Bounds) -> Result<Option<Shm>> {
        let Some(Parts { control: state, own, mut mappings }) = self.parts.take() else { return Ok(None) };
        let (size, here) = (self.shares.len(), mappings.len());
        let area = control_area(&state, size)?;
        let mappings = (0..size).map(|rank| mappings.remove(&rank)).collect();
        let space = Segments::new(self.rank, own, mappings, None)?;
        let under_way = Arc::new(UnderWay::new(size));
        let endpoint = Endpoint::new(self.rank, area, space, under_way, bounds);
        Ok(Some(endpoint.controlled(control, here)))
    }
}

/// Bytes of memory of this host: no rank allocates more.
fn physical_memory() -> usize {
    // SAFETY: asks for two numbers.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let bytes =
        usize::try_from(pages).ok().zip(usize::try_from(page).ok()).map(|(n, len)| n.saturating_mul(len));
    bytes.filter(|bytes| *bytes > 0).unwrap_or(1 << 36)
}

fn words(e: &std::io::Error) -> String {
    e.to_string()
}

// ---- the lowest rank ----

fn lead(
    rendezvous: &mut dyn Rendezvous,
    secret: &Secret,
    group: &[usize],
    socket: std::result::Result<Socket, String>,
    segment: impl Fn() -> std::result::Result<Segment, String>,
) -> Result<std::result::Result<Parts, String>> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let door = socket.and_then(|socket| {
        let (listener, name) = socket.open();
        let door = Door::new(vec![listener], secret, Purpose::Memory, rank, size);
        door.map(|door| (door, name)).map_err(|e| e.to_string())
    });
    let (mut door, name) = match door {
        Ok(door) => door,
        Err(why) => {
            rendezvous.all_gather(&[])?;
            return Ok(Err(format!("rank {rank} cannot listen: {why}")));
        }
    };
    let stop = AtomicBool::new(false);
    let (all, came) = std::thread::scope(|scope| {
        let serving = std::thread::Builder::new().spawn_scoped(scope, || {
            let mut came = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                came.extend(door.serve(Duration::from_millis(5)));
            }
            came
        });
        let all = rendezvous.all_gather(&[]);
        stop.store(true, Ordering::Relaxed);
        let came = serving.map_err(|e| words(&e)).map(|thread| thread.join().unwrap_or_default());
        (all, came)
    });
    all?;
    drop(name);
    let came = came.map(|came| came.into_iter().map(|(hello, stream)| (hello.from as usize, stream)));
    Ok(came.and_then(|came| hand_out(rank, size, segment()?, came.filter(|(from, _)| group.contains(from)))))
}

fn hand_out(
    rank: usize,
    size: usize,
    own: Segment,
    came: impl Iterator<Item = (usize, UnixStream)>,
) -> std::result::Result<Parts, String> {
    let control = Segment::new(Area::bytes(size)).map_err(|e| e.to_string())?;
    let mut segments = BTreeMap::from([(rank, own)]);
    let mut streams = Vec::new();
    for (from, stream) in came {
        // Who says nothing more is missed later.
        let Ok(()) = stream.set_patience(Some(STEP)) else { continue };
        let Ok(([who, len], file)) = receive_file(&stream) else { continue };
        if who == from as u64
            && let Ok(len) = usize::try_from(len)
            && let Ok(segment) = Segment::received(file, len)
        {
            segments.insert(from, segment);
            streams.push((from, stream));
        }
    }
    for (to, mut stream) in streams {
        // One after the other, so that few files are under way; one that fails says so itself.
        let mut give = || {
            let others = segments.iter().filter(|(r, _)| **r != to);
            send_file(&stream, [segments.len() as u64 - 1, control.len() as u64], control.fd())?;
            for (r, segment) in others {
                send_file(&stream, [*r as u64, segment.len() as u64], segment.fd())?;
            }
            stream.read_exact(&mut [0])
        };
        drop(give());
    }
    let own = segments.remove(&rank);
    let own = own.ok_or_else(|| "its own segment is missing".to_owned())?;
    let mut mappings = BTreeMap::from([(rank, map(&own)?)]);
    for (r, segment) in segments {
        mappings.insert(r, map(&segment)?);
    }
    Ok(Parts { control, own, mappings })
}

fn map(segment: &Segment) -> std::result::Result<Mapping, String> {
    segment.map().map_err(|e| e.to_string())
}

// ---- the others ----

/// Proves at the door of the lowest rank that this one is of the job, and sends its segment.
fn enter(
    address: &[u8],
    secret: &Secret,
    hello: &Hello,
    own: &Segment,
) -> std::result::Result<UnixStream, String> {
    if address.is_empty() {
        return Err("it does not listen".into());
    }
    let stream = connect(address).map_err(|e| words(&e))?;
    let stream = prove(stream, secret, hello, Instant::now() + STEP).map_err(|e| e.to_string())?;
    let send = || {
        stream.set_patience(Some(TURN))?;
        send_file(&stream, [u64::from(hello.from), own.len() as u64], own.fd())
    };
    send().map_err(|e| words(&e))?;
    Ok(stream)
}

/// Takes the segments of all.
fn take_part(
    rank: usize,
    size: usize,
    own: Segment,
    mut stream: UnixStream,
) -> std::result::Result<Parts, String> {
    let late = |e: std::io::Error| format!("the lowest rank of its host did not send memory: {e}");
    let ([others, len], file) = receive_file(&stream).map_err(late)?;
    if len != Area::bytes(size) as u64 {
        return Err("the lowest rank of its host counts other ranks".into());
    }
    let control = Segment::received(file, Area::bytes(size)).map_err(|e| e.to_string())?;
    let mut mappings = BTreeMap::from([(rank, map(&own)?)]);
    for _ in 0..others.min(size as u64) {
        let ([who, len], file) = receive_file(&stream).map_err(late)?;
        let (who, len) = (who as usize, usize::try_from(len).unwrap_or(usize::MAX));
        if who >= size || who == rank {
            return Err(format!("memory of rank {who} was sent, of which there is none"));
        }
        // Its file is closed here: the mapping stays.
        mappings.insert(who, map(&Segment::received(file, len).map_err(|e| e.to_string())?)?);
    }
    stream.write_all(&[TAKEN]).map_err(|e| words(&e))?;
    Ok(Parts { control, own, mappings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::rendezvous::in_process;

    fn met(groups: &'static [&'static [usize]], secret_of: fn(usize) -> u8) -> Vec<Met> {
        let n = groups.iter().map(|g| g.len()).sum();
        std::thread::scope(|scope| {
            let ranks = in_process(n).into_iter().map(|mut rendezvous| {
                scope.spawn(move || {
                    let rank = rendezvous.rank();
                    let group = groups.iter().find(|g| g.contains(&rank)).unwrap();
                    meet(&mut rendezvous, &Secret::from_bytes([secret_of(rank); 32]), group).unwrap()
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_of_a_host_share_and_others_do_not() {
        let met = met(&[&[0, 2, 3], &[1], &[4, 5]], |_| 7);
        for met in &met {
            for (a, b) in [(0, 2), (2, 3), (3, 0), (4, 5)] {
                assert_eq!(met.shares(a, b), Ok(()));
            }
            assert_eq!(met.shares(0, 1).unwrap_err(), "rank 1: it is alone on its host");
            assert!(met.shares(0, 4).is_err());
        }
        // The same memory: what one writes the others see.
        let at = |rank: usize, of: usize| met[rank].parts.as_ref().unwrap().mappings[&of].as_ptr();
        // SAFETY: first bytes of segments that nobody else uses.
        unsafe {
            at(0, 3).write(42);
            assert_eq!((at(2, 3).read(), at(3, 3).read(), at(2, 0).read()), (42, 42, 0));
        }
    }

    #[test]
    fn who_does_not_know_the_secret_gets_no_memory() {
        let met = met(&[&[0, 1, 2]], |rank| if rank == 1 { 8 } else { 7 });
        for met in &met {
            assert_eq!(met.shares(0, 2), Ok(()));
            let why = met.shares(0, 1).unwrap_err();
            assert!(why.starts_with("rank 1: rank 0 is not reached: "), "{why}");
        }
        assert!(met[1].parts.is_none());
    }
}
