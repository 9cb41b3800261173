//! The pulse on its sockets: a thread of each rank that never calls MPI, so that it beats while the rank computes, and
//! hears while the rank is held inside MPI.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Options;
use crate::error::{Error, Loss, Result};
use crate::fabric::Bounds;
use crate::fabric::pulse::{LONGEST, Pulse};
use crate::fabric::rendezvous::Secret;
use crate::fabric::shared::area::Failure;
use crate::fabric::shm::liveness::{grace, tick};
use crate::fabric::tcp::interfaces::{self, is_link_local};

/// A bound socket and where others may reach it.
pub struct Ear {
    socket: UdpSocket,
    addresses: Vec<IpAddr>,
    port: u16,
}

impl Ear {
    /// On this machine's loopback only, or on every interface.
    pub fn open(everywhere: bool) -> Result<Self> {
        let system = |e: std::io::Error| Error::System {
            what: "no socket for the heartbeat".into(),
            os: e.to_string(),
        };
        let socket = if everywhere {
            UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))
                .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))
        } else {
            UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        };
        let socket = socket.map_err(system)?;
        let port = socket.local_addr().map_err(system)?.port();
        let mut addresses = vec![Ipv4Addr::LOCALHOST.into()];
        if everywhere {
            // A link-local one means nothing on another host.
            let usable = interfaces::all()?.into_iter().map(|i| i.address).filter(|ip| !is_link_local(*ip));
            addresses = usable.collect();
        }
        Ok(Ear { socket, addresses, port })
    }

    /// For the other ranks.
    pub fn print(&self) -> String {
        let addresses: Vec<_> =
            self.addresses.iter().map(|a| SocketAddr::new(*a, self.port).to_string()).collect();
        addresses.join(" ")
    }

    /// What [`Ear::print`] has printed, as this socket sends to it.
    pub fn read(&self, printed: &str) -> Vec<SocketAddr> {
        let ours_is_6 = self.socket.local_addr().is_ok_and(|a| a.is_ipv6());
        let parsed = printed.split_whitespace().filter_map(|word| word.parse::<SocketAddr>().ok());
        parsed
            .filter_map(|address| match (address.ip(), ours_is_6) {
                (IpAddr::V4(ip), true) => Some(SocketAddr::new(ip.to_ipv6_mapped().into(), address.port())),
                (IpAddr::V6(_), false) => None,
                _ => Some(address),
            })
            .collect()
    }
}

struct Shared {
    rank: usize,
    bounds: Bounds,
    hosts: Vec<String>,
    pulse: Mutex<Pulse>,
    socket: UdpSocket,
    /// Rank 0: where each rank was last heard from. Others: where rank 0 may be; one, once it has answered.
    routes: Mutex<Vec<Vec<SocketAddr>>>,
    failed: AtomicBool,
    stop: AtomicBool,
    /// Whether the failure's words are to be said, and whether they were.
    say: bool,
    said: AtomicBool,
}

/// This rank's part of the star around rank 0.
pub struct Heart {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heart {
    /// Starts it. `rank_0`: where rank 0 listens.
    pub fn start(
        rank: usize,
        hosts: Vec<String>,
        options: &Options,
        secret: Secret,
        ear: Ear,
        rank_0: Vec<SocketAddr>,
    ) -> Result<Self> {
        let (size, bounds) = (hosts.len(), options.bounds);
        let mut routes = vec![vec![]; if rank == 0 { size } else { 1 }];
        if rank != 0 {
            routes[0] = rank_0;
        }
        let shared = Arc::new(Shared {
            rank,
            bounds,
            hosts,
            pulse: Mutex::new(Pulse::new(rank, size, secret, bounds)),
            socket: ear.socket,
            routes: Mutex::new(routes),
            failed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            say: options.say,
            said: AtomicBool::new(false),
        });
        let mine = Arc::clone(&shared);
        let thread = if size == 1 {
            None
        } else {
            let builder = std::thread::Builder::new().name("fulmen-heart".into());
            Some(builder.spawn(move || mine.run()).map_err(|e| Error::Resources {
                what: format!("no thread for the heartbeat of rank {rank}: {e}"),
                remedy: "use fewer threads, or raise the limit (ulimit -u)".into(),
            })?)
        };
        Ok(Heart { shared, thread })
    }

    /// Whether the job has failed, as far as this rank knows. Cheap.
    pub fn has_failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// The first failure that this rank knows of.
    pub fn failure(&self) -> Option<Failure> {
        lock(&self.shared.pulse).failure().cloned()
    }

    /// How long a rank has been silent; for others than rank 0, also whether rank 0, which watches it, is.
    pub fn silent_for(&self, rank: usize) -> Option<Duration> {
        lock(&self.shared.pulse).silent_for(rank)
    }

    /// Records a failure, if none is known here, and tells it at once. Returns whether it was the first.
    pub fn fail(&self, failure: Failure) -> bool {
        self.shared.fail(failure)
    }

    /// Says that this rank will not use the fabric any more.
    pub fn leave(&self) {
        lock(&self.shared.pulse).leave_self();
        self.shared.speak();
    }

    /// After a failure: the one rank whose failure it was (or, without rank 0, rank 1) says so on standard error. Then
    /// all are given a moment to end in order. Returns the exit code.
    pub fn last_words(&self) -> u8 {
        let end = Instant::now() + grace(&self.shared.bounds);
        let wait = |until: &dyn Fn(&Pulse) -> bool| {
            while !until(&lock(&self.shared.pulse)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        wait(&|pulse| pulse.decided().is_some());
        let code = self.shared.say();
        self.leave();
        wait(&Pulse::all_left);
        if !self.shared.said.load(Ordering::Relaxed) {
            // The one who said it is the one to end the job: more than one end looks like more than one failure.
            std::thread::sleep(Duration::from_millis(100));
        }
        code
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to return, and does not panic.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let tick = tick(&self.bounds);
        let mut next = Instant::now();
        let mut failed_at = None;
        let mut datagram = [0; LONGEST + 1];
        while !self.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            if now >= next {
                next = now + tick;
                self.speak();
            }
            // A timeout of 0 would mean for ever.
            let nap = (next - now).clamp(Duration::from_millis(1), Duration::from_millis(20));
            let heard =
                self.socket.set_read_timeout(Some(nap)).and_then(|()| self.socket.recv_from(&mut datagram));
            if let Ok((len, from)) = heard {
                self.hear(&datagram[..len], from);
            }
            let now = Instant::now();
            let overdue = {
                let mut pulse = lock(&self.pulse);
                pulse.look(now);
                pulse.overdue().filter(|_| pulse.failure().is_none())
            };
            if let Some((rank, silence)) = overdue {
                let error = self.lost(rank, Loss::Silent, silence, String::new());
                self.fail(Failure::by(self.rank, &error));
            }
            if lock(&self.pulse).failure().is_some() {
                self.failed.store(true, Ordering::Release);
                let since = *failed_at.get_or_insert(now);
                // The rank's own thread is to end the process; where it is held by MPI, this one does.
                if now - since > 2 * grace(&self.bounds) {
                    let code = self.say();
                    // SAFETY: ends this process, which has nothing left to do.
                    unsafe { libc::_exit(code.into()) };
                }
            }
        }
    }

    fn lost(&self, rank: usize, loss: Loss, after: Duration, waiting_for: String) -> Error {
        let (host, by, by_host) =
            (self.hosts[rank].clone(), self.rank, self.hosts[self.rank].as_str().into());
        Error::PeerLost { rank, host, link: "mpi".into(), loss, after, waiting_for, by, by_host }
    }

    fn fail(&self, failure: Failure) -> bool {
        let first = lock(&self.pulse).fail(failure);
        self.failed.store(true, Ordering::Release);
        self.speak();
        first
    }

    /// Sends the next datagram. What cannot be sent now is said again at the next tick.
    fn speak(&self) {
        let datagram = lock(&self.pulse).speak();
        for address in lock(&self.routes).iter().flatten() {
            let _ = self.socket.send_to(&datagram, address);
        }
    }

    fn hear(&self, datagram: &[u8], from: SocketAddr) {
        let Some((rank, urgent)) = lock(&self.pulse).hear(datagram) else { return };
        if let Some(route) = lock(&self.routes).get_mut(rank) {
            *route = vec![from];
        }
        if urgent {
            self.speak();
        }
    }

    /// The failure's words, once in the job. Returns its exit code.
    fn say(&self) -> u8 {
        let (decided, failure) = {
            let pulse = lock(&self.pulse);
            (pulse.decided().cloned(), pulse.failure().cloned())
        };
        let Some(failure) = decided.clone().or(failure) else { return 4 };
        let (by, words, code) = match failure {
            Failure::Aborted { by, reason, code } => (by, reason, code),
            Failure::Gone { rank } => (0, format!("rank {rank} is gone"), 4),
            Failure::Interrupted => (0, "interrupted".into(), 5),
        };
        // Without rank 0 nobody has decided whose failure it was; all but one keep quiet.
        let speaker = if decided.is_some() { by } else { usize::from(self.hosts.len() > 1) };
        if speaker == self.rank && !self.said.swap(true, Ordering::Relaxed) && self.say {
            eprintln!("rank {by} ({}): {words}", self.hosts.get(by).map_or("", |host| host.as_str()));
        }
        code
    }
}
