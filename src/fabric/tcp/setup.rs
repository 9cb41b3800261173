//! From a rendezvous to connections between all pairs of ranks, tested, before work starts.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Options;
use super::engine::Link;
use super::interfaces::{self, Interface};
use super::peer::End;
use super::routes::Routes;
use super::{socket, words};
use crate::error::{Error, Result};
use crate::fabric::host_name;
use crate::fabric::rendezvous::door::{Door, Refusal, knock, refused};
use crate::fabric::rendezvous::handshake::{Hello, Purpose};
use crate::fabric::rendezvous::{Rendezvous, Secret, gather};

/// At most so many connections are made at a time.
const ABREAST: usize = 16;
/// An address that swallows packets costs no more than this.
const TRY: Duration = Duration::from_secs(3);
const TRIES: usize = 3;

/// What came of it.
pub struct Connected {
    pub links: Vec<Link>,
    /// Each rank.
    pub ends: Vec<End>,
    pub routes: Routes,
    /// Ranks that share this host's cores.
    pub here: usize,
    /// Whether these are all.
    pub one_host: bool,
    /// Where each rank is.
    pub places: Vec<Place>,
}

/// Where a rank is, which it tells the others first.
#[derive(Serialize, Deserialize)]
pub struct Place {
    /// Its host's name.
    pub host: String,
    /// The kernel that it runs on, until the next boot.
    pub kernel: String,
    /// The network namespace.
    pub network: String,
}

impl Place {
    /// This process's. `host`: what its host is to be called.
    pub fn here(host: Option<&str>) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
        let kernel = read("/proc/sys/kernel/random/boot_id").ok().or_else(boot).unwrap_or_else(host_name);
        // Loopback is shared within a network namespace only.
        let network = std::fs::read_link("/proc/self/ns/net")
            .map_or_else(|_| String::new(), |path| path.to_string_lossy().into_owned());
        Place { host: host.map_or_else(host_name, str::to_owned), kernel, network }
    }
}

/// What a Mac calls the time since it was started: hosts may have one name, never this.
#[cfg(target_os = "macos")]
fn boot() -> Option<String> {
    fulmen_kernels::sysctl::text(c"kern.bootsessionuuid")
}

#[cfg(not(target_os = "macos"))]
fn boot() -> Option<String> {
    None
}

fn garbled(what: &str) -> Error {
    Error::Internal(format!("{what} that came over the rendezvous is garbled"))
}

/// Listens on each of the interfaces. What the others are told of it begins with the addresses that they are to try `first`.
fn listen(chosen: &[Interface], first: &[IpAddr]) -> Result<(Vec<TcpListener>, Vec<u8>)> {
    let (mut listeners, mut told) = (Vec::new(), String::new());
    let mut why = None;
    let is_first = |interface: &&Interface| first.contains(&interface.address);
    for interface in chosen.iter().filter(is_first).chain(chosen.iter().filter(|i| !is_first(i))) {
        // An address that is not ready yet (IPv6 looks for duplicates first) does not spoil the others.
        match TcpListener::bind(interface.socket(0)) {
            Ok(listener) => {
                let port = listener.local_addr().map_err(|e| refused("a listener's port", &e))?.port();
                let mark = if is_first(&interface) { FIRST } else { "" };
                told += &format!("{mark}{} {port}\n", interface.address);
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

/// Before an address that is to be tried first.
const FIRST: &str = "!";

/// Where a rank listens.
struct Ears {
    places: Vec<(IpAddr, u16)>,
    /// So many of them are to be tried first.
    first: usize,
}

impl Ears {
    fn told(told: &[u8]) -> Option<Self> {
        let told = std::str::from_utf8(told).ok()?;
        let line = |line: &str| {
            let (address, port) = line.trim_start_matches(FIRST).split_once(' ')?;
            Some((address.parse().ok()?, port.parse().ok()?))
        };
        let first = told.lines().filter(|line| line.starts_with(FIRST)).count();
        Some(Ears { places: told.lines().map(line).collect::<Option<_>>()?, first })
    }

    /// Where to reach it from `ours`, best first, with the interface. What is named but in no network of ours, as the other cables
    /// of a ring, may cost a time-out, and is as good as the rest.
    fn candidates(&self, ours: &[Interface]) -> Vec<(SocketAddr, String)> {
        let (named, others) = self.places.split_at(self.first);
        let (first, far): (Vec<_>, Vec<_>) =
            named.iter().partition(|(address, _)| ours.iter().any(|i| i.shares(*address)));
        let rest = [&far[..], others].concat();
        [first, rest].iter().flat_map(|places| interfaces::candidates(ours, places)).collect()
    }
}

/// A connection, and the name of what it goes over.
type Made = (usize, u16, TcpStream, String);

struct Here<'a> {
    rank: usize,
    size: usize,
    secret: &'a Secret,
    connections: usize,
    reach: Option<&'a [Vec<bool>]>,
    /// The user has named the interfaces.
    named: bool,
    ours: Vec<Interface>,
    until: Instant,
}

impl Here<'_> {
    fn knock(&self, address: SocketAddr, peer: usize, link: u16) -> std::result::Result<TcpStream, Refusal> {
        let (from, to, size) = (self.rank as u32, peer as u32, self.size as u32);
        let hello = Hello { purpose: Purpose::Link, from, to, size, link };
        knock(address, self.secret, &hello, self.until.min(Instant::now() + TRY))
    }

    /// Connects to a peer that several cables lead to, over those of them that work.
    fn over_cables(&self, peer: usize, theirs: &Ears) -> Vec<Made> {
        let mut made: Vec<Made> = Vec::new();
        for (address, name) in interfaces::cables(&self.ours, &theirs.places, self.named) {
            for _ in 0..self.connections {
                let link = made.len() as u16;
                let Ok(stream) = self.knock(address, peer, link) else { break };
                made.push((peer, link, stream, name.clone()));
            }
        }
        made
    }

    /// Connects to one peer; on failure says what became of each address.
    fn reach(&self, peer: usize, theirs: &Ears) -> std::result::Result<Vec<Made>, Missed> {
        let allowed = |reach: &[Vec<bool>]| reach.get(self.rank).and_then(|row| row.get(peer)) == Some(&true);
        if !self.reach.is_none_or(allowed) {
            return Err(Missed { peer: peer as u32, why: "not to be connected".into(), near: None });
        }
        let made = self.over_cables(peer, theirs);
        if !made.is_empty() {
            return Ok(made);
        }
        let candidates = theirs.candidates(&self.ours);
        let mut said = Vec::new();
        for attempt in 0..TRIES {
            said.clear();
            'candidates: for (address, name) in &candidates {
                let mut made = Vec::new();
                for link in 0..self.connections as u16 {
                    match self.knock(*address, peer, link) {
                        Ok(stream) => made.push((peer, link, stream, name.clone())),
                        Err(e) => {
                            said.push((address.ip(), format!("{address} over {name}: {e}"), e.to_string()));
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
        let near = interfaces::neighbourhood(&self.ours, &theirs.places).and_then(|(ours, there)| {
            let (.., e) = said.iter().find(|(address, ..)| *address == there)?;
            Some(format!("tcp over {} ({} to {there}): {e}", ours.name, ours.address))
        });
        let all = said.into_iter().map(|(_, all, _)| all).collect::<Vec<_>>().join("; ");
        let why = if candidates.is_empty() { "no network in common".into() } else { all };
        Err(Missed { peer: peer as u32, why, near })
    }

    /// Connects to all lower ranks; the second part tells of those that are not reached.
    fn reach_all(&self, theirs: &[Ears]) -> (Vec<Made>, Vec<Missed>) {
        let next = Mutex::new(0..self.rank);
        let done = Mutex::new((Vec::new(), Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..self.rank.min(ABREAST) {
                let work = || {
                    while let Some(peer) = { next.lock().unwrap_or_else(PoisonError::into_inner).next() } {
                        let end = self.reach(peer, &theirs[peer]);
                        let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                        match end {
                            Ok(made) => done.0.extend(made),
                            Err(missed) => done.1.push(missed),
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

/// Everybody connects to everybody. Pairs that cannot are given a route through others.
///
/// # Errors
/// [`Error::Unreachable`] on every rank, when there is none.
pub fn connect(rendezvous: &mut dyn Rendezvous, secret: &Secret, options: &Options) -> Result<Connected> {
    connect_on(rendezvous, secret, options, interfaces::all())
}

/// As [`connect`], on a host with these interfaces.
pub fn connect_on(
    rendezvous: &mut dyn Rendezvous,
    secret: &Secret,
    options: &Options,
    all: Result<Vec<Interface>>,
) -> Result<Connected> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let until = Instant::now() + options.start;
    let places = gather(rendezvous, &Place::here(options.host.as_deref()))?;
    let hosts: Vec<String> = places.iter().map(|p| p.host.clone()).collect();
    let me = &places[rank];
    let one_host = places.iter().all(|p| (&p.kernel, &p.network) == (&me.kernel, &me.network));
    let here = places.iter().filter(|p| p.kernel == me.kernel).count();

    // A rank without a network still takes part in what follows, so that all hear of it.
    let listening = all
        .and_then(|all| interfaces::choose(&all, &options.on, &options.first, one_host))
        .and_then(|ours| listen(&ours, &options.first).map(|(listeners, told)| (ours, listeners, told)));
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
        theirs.push(Ears::told(bytes).ok_or_else(|| garbled("an address"))?);
    }

    let names: Vec<(IpAddr, String)> = ours.iter().map(|i| (i.address, i.name.clone())).collect();
    let here_now = Here {
        rank,
        size,
        secret,
        connections,
        reach: options.reach.as_deref(),
        named: !options.on.is_empty(),
        ours,
        until,
    };
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
        let (made, missed) = here_now.reach_all(&theirs);
        let trouble = match (&problem, &serving) {
            (Some(e), _) => Some(format!("rank {rank} ({}): {e}", hosts[rank])),
            (None, Err(e)) => Some(format!("rank {rank} ({}) has no thread to listen: {e}", hosts[rank])),
            (None, Ok(_)) => None,
        };
        // Whoever says here that it is connected was welcomed, by us too.
        let reports = gather(rendezvous, &Report::of(rank, &made, trouble, missed));
        stop.store(true, Ordering::Relaxed);
        let admitted = serving.ok().and_then(|thread| thread.join().ok()).unwrap_or_default();
        (made, admitted, reports)
    });
    let reports: Vec<Report> = reports?;
    let links = |a: usize, b: usize| reports[a.max(b)].links(a.min(b));
    let routes = Routes::new(size, |a, b| links(a, b) > 0).map_err(|islands| match &problem {
        Some(e @ Error::Argument { .. }) => e.clone(),
        _ => split(&islands, &hosts, &reports),
    })?;

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
    let links = (0..size).map(|peer| if peer == rank { 0 } else { links(rank, peer) }).collect();
    let (links, mut ends) = finish(all, &hosts, rank, links, &routes)?;
    for (peer, end) in ends.iter_mut().enumerate().filter(|(peer, _)| *peer != rank) {
        end.shut_off = reports[rank.max(peer)].near(rank.min(peer)).map(str::to_owned);
    }
    Ok(Connected { links, ends, routes, here, one_host, places })
}

/// Some ranks do not reach each other, whichever way.
fn split(islands: &[Vec<usize>], hosts: &[String], reports: &[Report]) -> Error {
    let island = |ranks: &Vec<usize>| {
        let names: Vec<String> = ranks.iter().map(|rank| format!("{rank} ({})", hosts[*rank])).collect();
        format!("  {}\n", names.join(", "))
    };
    let islands: String = islands.iter().map(island).collect();
    let pairs: String = reports.iter().enumerate().map(|(rank, report)| report.words(rank, hosts)).collect();
    Error::Unreachable {
        what: format!(
            "not all ranks reach each other, not even through others; these do, each among themselves:\n{islands}\
             and these pairs are not connected:\n{}",
            pairs.trim_end()
        ),
        remedy: "name the interface or subnet that connects all hosts, or open their firewalls for it".into(),
    }
}

/// Of its words: a launcher takes so much of each rank that there is room for twice that.
const SAID: usize = 7 << 10;

/// A rank that was not reached.
#[derive(Serialize, Deserialize)]
struct Missed {
    peer: u32,
    /// What became of each of its addresses.
    why: String,
    /// Where both are in one network: which, and what became of that address.
    near: Option<String>,
}

/// What a rank tells the others of its connections to lower ones.
#[derive(Serialize, Deserialize)]
struct Report {
    /// How many it has to each.
    links: Vec<u16>,
    /// Why it has none at all.
    trouble: Option<String>,
    /// Those that are not reached, as many as there is room for.
    missed: Vec<Missed>,
}

impl Report {
    fn of(rank: usize, made: &[Made], trouble: Option<String>, missed: Vec<Missed>) -> Self {
        let mut links = vec![0; rank];
        made.iter().for_each(|(peer, ..)| links[*peer] += 1);
        let trouble = trouble.map(|text| words::head(&text, SAID / 2).to_owned());
        let mut room = SAID - trouble.as_ref().map_or(0, String::len);
        let cut = |Missed { peer, why, near }| Missed {
            peer,
            why: words::head(&why, SAID / 8).into(),
            near: near.map(|near| words::head(&near, SAID / 16).into()),
        };
        // Beside the words a few bytes of numbers.
        let fits = |missed: &Missed| {
            let len = missed.why.len() + missed.near.as_ref().map_or(0, String::len) + 16;
            room.checked_sub(len).map(|left| room = left).is_some()
        };
        let missed = missed.into_iter().map(cut).take_while(fits).collect();
        Report { links, trouble, missed }
    }

    /// In lines, of which pairs are not connected.
    fn words(&self, rank: usize, hosts: &[String]) -> String {
        let name = |rank: usize| format!("rank {rank} ({})", hosts.get(rank).map_or("?", String::as_str));
        if let Some(trouble) = &self.trouble {
            return format!("{trouble}\n");
        }
        let line = |Missed { peer, why, .. }: &Missed| {
            format!("{} and {}: {why}\n", name(rank), name(*peer as usize))
        };
        self.missed.iter().map(line).collect()
    }

    /// Why a lower rank in the same network is not reached.
    fn near(&self, peer: usize) -> Option<&str> {
        self.missed.iter().find(|missed| missed.peer as usize == peer)?.near.as_deref()
    }

    fn links(&self, peer: usize) -> usize {
        self.links.get(peer).map_or(0, |count| usize::from(*count))
    }
}

/// How a rank behind others is reached, for messages.
fn through(between: &[usize], hosts: &[String]) -> String {
    let names: Vec<String> = between.iter().map(|rank| format!("rank {rank} ({})", hosts[*rank])).collect();
    format!("tcp through {}", names.join(" and "))
}

fn finish(
    mut all: HashMap<(usize, u16), (TcpStream, String)>,
    hosts: &[String],
    rank: usize,
    counts: Vec<usize>,
    routes: &Routes,
) -> Result<(Vec<Link>, Vec<End>)> {
    let (mut links, mut ends) = (Vec::new(), Vec::new());
    for (peer, connections) in counts.into_iter().enumerate() {
        let host = &hosts[peer];
        let between = routes.between(rank, peer);
        let mut ways = Vec::new();
        for connection in 0..connections {
            let (stream, name) = all.remove(&(peer, connection as u16)).ok_or_else(|| {
                Error::Internal(format!("connection {connection} of rank {rank} to rank {peer} is missing"))
            })?;
            let prepared = socket::prepare(&stream).and_then(|()| {
                let (from, to) = (stream.local_addr()?, stream.peer_addr()?);
                Ok(format!("{name} ({} to {})", from.ip(), to.ip()))
            });
            let way = prepared.map_err(|e| Error::Unreachable {
                what: format!("the connection of rank {rank} to rank {peer} ({host}): {e}"),
                remedy: "it was closed at once: look at what that rank says".into(),
            })?;
            if !ways.contains(&way) {
                ways.push(way);
            }
            links.push(Link::new(stream, peer, connection));
        }
        let link = match connections {
            0 if peer == rank => "itself".into(),
            0 => through(&between, hosts),
            _ => format!("tcp over {}", ways.join(" and ")),
        };
        ends.push(End { host: host.clone(), link, data: None, shut_off: None, connections });
    }
    Ok((links, ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a launcher takes of each rank (`job::messages::LONGEST_WORD`).
    const LONGEST_WORD: usize = 16 << 10;

    #[test]
    fn addresses_that_are_named_come_first_where_they_are_near() {
        let ours: Vec<Interface> = [("en0", "192.168.1.20"), ("en5", "10.0.1.1")]
            .into_iter()
            .zip(1..)
            .map(|((name, address), scope)| Interface {
                name: name.into(),
                address: address.parse().unwrap(),
                prefix: 96 + 24,
                scope,
                loopback: false,
            })
            .collect();
        let tried = |told: &str| -> Vec<String> {
            let ears = Ears::told(told.as_bytes()).unwrap();
            ears.candidates(&ours).into_iter().map(|(place, name)| format!("{place} {name}")).collect()
        };
        // The last is on a cable to a third host.
        let [lan, cable, other] = ["192.168.1.21:7 en0", "10.0.1.2:8 en5", "10.0.2.1:9 en5"];
        assert_eq!(tried("192.168.1.21 7\n10.0.1.2 8\n10.0.2.1 9\n"), [lan, cable, other]);
        assert_eq!(tried("!10.0.1.2 8\n!10.0.2.1 9\n192.168.1.21 7\n"), [cable, lan, other]);
        assert_eq!(tried("!192.168.1.21 7\n10.0.1.2 8\n"), [lan, cable]);
        assert!(Ears::told(b"!10.0.1.2").is_none() && Ears::told(b"\xff 1").is_none());
    }

    #[test]
    fn a_report_of_many_that_are_not_reached_is_a_word() {
        let missed = |len: usize| {
            let why = |peer| Missed {
                peer,
                why: "10.0.0.1:4000 over en0: é; ".repeat(len),
                near: Some("en0: é".into()),
            };
            (0..4000).map(why).collect::<Vec<_>>()
        };
        for (len, least) in [(1, 50), (1000, 2)] {
            for trouble in [None, Some("no é ".repeat(10_000))] {
                let report = Report::of(4000, &[], trouble, missed(len));
                assert!(postcard::to_stdvec(&report).unwrap().len() <= LONGEST_WORD);
                assert!(report.missed.len() > least && report.links(7) == 0);
                assert_eq!((report.near(1), report.near(3999)), (Some("en0: é"), None));
            }
        }
    }
}
