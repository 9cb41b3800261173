//! From a rendezvous to connections between all pairs of ranks, tested, before work starts.

use std::collections::HashMap;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Options;
use super::engine::Link;
use super::interfaces::{self, Interface};
use super::socket;
use crate::error::{Error, Result};
use crate::fabric::host_name;
use crate::fabric::rendezvous::door::{Door, knock, refused};
use crate::fabric::rendezvous::handshake::{Hello, Purpose};
use crate::fabric::rendezvous::{Rendezvous, Secret};

/// At most so many connections are made at a time.
const ABREAST: usize = 16;
/// An address that swallows packets costs no more than this.
const TRY: Duration = Duration::from_secs(3);
const TRIES: usize = 3;

/// What came of it.
pub struct Connected {
    pub links: Vec<Link>,
    /// Host and link of each rank.
    pub names: Vec<(String, String)>,
    /// Ranks that share this host's cores.
    pub here: usize,
}

/// What a rank tells the others first: a line each for its host's name, kernel, and network.
struct Place {
    host: String,
    kernel: String,
    network: String,
}

impl Place {
    fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
        let kernel = read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| host_name());
        // Loopback is shared within a network namespace only.
        let network = std::fs::read_link("/proc/self/ns/net")
            .map_or_else(|_| String::new(), |path| path.to_string_lossy().into_owned());
        Place { host: host_name(), kernel, network }
    }

    fn encode(&self) -> Vec<u8> {
        format!("{}\n{}\n{}", self.host, self.kernel, self.network).into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.split('\n').map(str::to_owned);
        Some(Place { host: lines.next()?, kernel: lines.next()?, network: lines.next()? })
    }
}

fn garbled(what: &str) -> Error {
    Error::Internal(format!("{what} that came over the rendezvous is garbled"))
}

/// Listens on each of the interfaces.
fn listen(chosen: &[Interface]) -> Result<(Vec<TcpListener>, Vec<u8>)> {
    let (mut listeners, mut told) = (Vec::new(), String::new());
    let mut why = None;
    for interface in chosen {
        // An address that is not ready yet (IPv6 looks for duplicates first) does not spoil the others.
        match TcpListener::bind(interface.socket(0)) {
            Ok(listener) => {
                let port = listener.local_addr().map_err(|e| refused("a listener's port", &e))?.port();
                told += &format!("{} {port}\n", interface.address);
                listeners.push(listener);
            }
            Err(e) => why = Some(refused(format!("listening on {}", interface.socket(0)), &e)),
        }
    }
    match why {
        Some(e) if listeners.is_empty() => Err(e),
        _ => Ok((listeners, told.into_bytes())),
    }
}

fn addresses(told: &[u8]) -> Option<Vec<(IpAddr, u16)>> {
    let line = |line: &str| {
        let (address, port) = line.split_once(' ')?;
        Some((address.parse().ok()?, port.parse().ok()?))
    };
    std::str::from_utf8(told).ok()?.lines().map(line).collect()
}

/// A connection, and the name of what it goes over.
type Made = (usize, u16, TcpStream, String);

struct Here<'a> {
    rank: usize,
    size: usize,
    secret: &'a Secret,
    connections: usize,
    ours: Vec<Interface>,
    until: Instant,
}

impl Here<'_> {
    /// Connects to one peer; on failure says what became of each address.
    fn reach(&self, peer: usize, theirs: &[(IpAddr, u16)]) -> std::result::Result<Vec<Made>, String> {
        let candidates = interfaces::candidates(&self.ours, theirs);
        let mut said = Vec::new();
        for attempt in 0..TRIES {
            said.clear();
            'candidates: for (address, name) in &candidates {
                let mut made = Vec::new();
                for link in 0..self.connections as u16 {
                    let hello = Hello {
                        purpose: Purpose::Link,
                        from: self.rank as u32,
                        to: peer as u32,
                        size: self.size as u32,
                        link,
                    };
                    match knock(*address, self.secret, &hello, self.until.min(Instant::now() + TRY)) {
                        Ok(stream) => made.push((peer, link, stream, name.clone())),
                        Err(e) => {
                            said.push(format!("{address} over {name}: {e}"));
                            continue 'candidates;
                        }
                    }
                }
                return Ok(made);
            }
            if Instant::now() >= self.until {
                break;
            }
            std::thread::sleep(Duration::from_millis(50 << attempt));
        }
        Err(if candidates.is_empty() { "no network in common".into() } else { said.join("; ") })
    }

    /// Connects to all lower ranks; the second part tells of those that are not reached.
    fn reach_all(&self, theirs: &[Vec<(IpAddr, u16)>], hosts: &[String]) -> (Vec<Made>, String) {
        let next = Mutex::new(0..self.rank);
        let done = Mutex::new((Vec::new(), String::new()));
        std::thread::scope(|scope| {
            for _ in 0..self.rank.min(ABREAST) {
                let work = || {
                    while let Some(peer) = { next.lock().unwrap_or_else(PoisonError::into_inner).next() } {
                        let end = self.reach(peer, &theirs[peer]);
                        let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                        match end {
                            Ok(made) => done.0.extend(made),
                            Err(said) => {
                                let (mine, his) = (&hosts[self.rank], &hosts[peer]);
                                let rank = self.rank;
                                done.1 += &format!("rank {rank} ({mine}) and rank {peer} ({his}): {said}\n");
                            }
                        }
                    }
                };
                let thread = std::thread::Builder::new().spawn_scoped(scope, work);
                if thread.is_err() {
                    work(); // one after the other then
                }
            }
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everybody connects to everybody.
///
/// # Errors
/// [`Error::Unreachable`] with every pair that does not reach each other, on every rank.
pub fn connect(rendezvous: &mut dyn Rendezvous, secret: &Secret, options: &Options) -> Result<Connected> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let until = Instant::now() + options.start;
    let places = rendezvous.all_gather(&Place::here().encode())?;
    let places: Option<Vec<Place>> = places.iter().map(|bytes| Place::decode(bytes)).collect();
    let places = places.ok_or_else(|| garbled("a host's name"))?;
    let hosts: Vec<String> = places.iter().map(|p| p.host.clone()).collect();
    let me = &places[rank];
    let one_host = places.iter().all(|p| (&p.kernel, &p.network) == (&me.kernel, &me.network));
    let here = places.iter().filter(|p| p.kernel == me.kernel).count();

    // A rank without a network still takes part in what follows, so that all hear of it.
    let listening = interfaces::all()
        .and_then(|all| interfaces::choose(&all, &options.on, one_host))
        .and_then(|ours| listen(&ours).map(|(listeners, told)| (ours, listeners, told)));
    let (ours, listeners, mut told, problem) = match listening {
        Ok((ours, listeners, told)) => (ours, listeners, told, None),
        Err(e) => (Vec::new(), Vec::new(), Vec::new(), Some(e)),
    };
    let connections = options.connections.clamp(1, 16);
    told.push(connections as u8);
    let told = rendezvous.all_gather(&told)?;
    let mut theirs = Vec::new();
    for (peer, bytes) in told.iter().enumerate() {
        let (wanted, bytes) = bytes.split_last().ok_or_else(|| garbled("an address"))?;
        if usize::from(*wanted) != connections {
            return Err(Error::argument(
                "connections",
                connections,
                format!("rank {peer} has {wanted}"),
                "start all ranks with the same",
            ));
        }
        theirs.push(addresses(bytes).ok_or_else(|| garbled("an address"))?);
    }

    let names: Vec<(IpAddr, String)> = ours.iter().map(|i| (i.address, i.name.clone())).collect();
    let here_now = Here { rank, size, secret, connections, ours, until };
    let mut door = Door::new(listeners, secret, Purpose::Link, rank, size)?;
    let stop = AtomicBool::new(false);
    let (made, admitted, reports) = std::thread::scope(|scope| {
        let serving = std::thread::Builder::new().spawn_scoped(scope, || {
            let mut admitted = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                admitted.extend(door.serve(Duration::from_millis(20)));
            }
            admitted
        });
        let (made, mut report) = here_now.reach_all(&theirs, &hosts);
        if let Err(e) = &serving {
            report += &format!("rank {rank} has no thread to listen: {e}\n");
        }
        if let Some(e) = &problem {
            report = format!("rank {rank} ({}): {e}\n", hosts[rank]);
        }
        // Whoever says here that it is connected was welcomed, by us too.
        let reports = rendezvous.all_gather(report.as_bytes());
        stop.store(true, Ordering::Relaxed);
        let admitted = serving.ok().and_then(|thread| thread.join().ok()).unwrap_or_default();
        (made, admitted, reports)
    });
    let reports: String = reports?.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect();
    if !reports.is_empty() {
        if let Some(e @ Error::Argument { .. }) = problem {
            return Err(e);
        }
        return Err(Error::Unreachable {
            what: format!("not all ranks reach each other:\n{}", reports.trim_end()),
            remedy: "name the interface or subnet that connects all hosts, or open their firewalls for it"
                .into(),
        });
    }

    let mut all: HashMap<(usize, u16), (TcpStream, String)> = HashMap::new();
    for (peer, link, stream, name) in made {
        all.insert((peer, link), (stream, name));
    }
    for (hello, stream) in admitted {
        let local = stream.local_addr().map(|a| a.ip()).ok();
        let name = names.iter().find(|(address, _)| Some(*address) == local);
        let name = name.map_or_else(String::new, |(_, name)| name.clone());
        // A second one of the same number: the first was given up.
        all.insert((hello.from as usize, hello.link), (stream, name));
    }
    finish(all, hosts, rank, connections, here)
}

fn finish(
    mut all: HashMap<(usize, u16), (TcpStream, String)>,
    hosts: Vec<String>,
    rank: usize,
    connections: usize,
    here: usize,
) -> Result<Connected> {
    let (mut links, mut names) = (Vec::new(), Vec::new());
    for (peer, host) in hosts.into_iter().enumerate() {
        let mut link = String::from("itself");
        for connection in (0..connections).filter(|_| peer != rank) {
            let (stream, name) = all.remove(&(peer, connection as u16)).ok_or_else(|| {
                Error::Internal(format!("connection {connection} of rank {rank} to rank {peer} is missing"))
            })?;
            let prepared = socket::prepare(&stream).and_then(|()| {
                let (from, to) = (stream.local_addr()?, stream.peer_addr()?);
                Ok(format!("tcp over {name} ({} to {})", from.ip(), to.ip()))
            });
            link = prepared.map_err(|e| Error::Unreachable {
                what: format!("the connection of rank {rank} to rank {peer} ({host}): {e}"),
                remedy: "it was closed at once: look at what that rank says".into(),
            })?;
            links.push(Link::new(stream, peer, connection));
        }
        names.push((host, link));
    }
    Ok(Connected { links, names, here })
}
