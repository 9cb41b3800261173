//! The connections of a rank, and what moves on them without waiting.

use std::io::{Error, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::job::Job;
use super::rx::Rx;
use super::socket;
use super::tx::Tx;
use crate::error::Loss;
use crate::fabric::Bounds;
use crate::fabric::alarm::Alarm;
use crate::fabric::rendezvous::door::poll;

/// Bytes that one connection moves before it is another's turn.
const TURN: usize = 1 << 20;
/// While a rank looks for the bytes of one peer, it looks for those of others so often.
const SWEEP: Duration = Duration::from_micros(50);

/// A connection to another rank.
pub struct Link {
    socket: TcpStream,
    peer: usize,
    /// Which of several to the same rank.
    connection: usize,
    rx: Rx,
    tx: Tx,
    heard: Instant,
    said: Instant,
    #[cfg(test)]
    written: usize,
    /// There is more to write than the system took.
    blocked: bool,
    /// The progress thread knows that.
    watched: bool,
    /// What comes is not looked at any more: it made no sense.
    deaf: bool,
    /// Nothing more will be written.
    shut: bool,
    closed: bool,
    /// What the system said when it broke. It says so once, to whoever asks next.
    broke: Option<ErrorKind>,
}

impl Link {
    pub fn new(socket: TcpStream, peer: usize, connection: usize) -> Self {
        let now = Instant::now();
        let (rx, tx) = (Rx::new(), Tx::default());
        let (blocked, deaf, shut, closed) = (false, false, false, false);
        Link {
            socket,
            peer,
            connection,
            rx,
            tx,
            heard: now,
            said: now,
            #[cfg(test)]
            written: 0,
            blocked,
            watched: false,
            deaf,
            shut,
            closed,
            broke: None,
        }
    }

    /// The system does not carry it any more.
    fn breaks(&mut self, e: &Error) {
        // Whose other end is closed for reading is closed, as is told by reading.
        if e.kind() != ErrorKind::BrokenPipe {
            self.broke.get_or_insert(e.kind());
        }
    }
}

/// What the rank's own thread and its progress thread take turns with.
pub struct Engine {
    pub job: Job,
    links: Vec<Link>,
    /// The links to each rank, or to the neighbour before it.
    of: Vec<Vec<usize>>,
    bounds: Bounds,
    looked: Instant,
    /// All connections were served.
    swept: Instant,
    /// The failure has been passed on.
    told: bool,
    /// Rings then: who waits elsewhere is told as well.
    pub alarm: Arc<Alarm>,
    /// The rank's own thread waits here and moves what there is to move.
    pub taken: bool,
    /// The progress thread sleeps on the sockets.
    pub polling: bool,
    pub stop: bool,
}

impl Engine {
    pub fn new(job: Job, links: Vec<Link>, bounds: Bounds) -> Self {
        let mut of = vec![Vec::new(); job.size()];
        links.iter().enumerate().for_each(|(at, link)| of[link.peer].push(at));
        let of = (0..of.len()).map(|rank| of[job.next_hop(rank)].clone()).collect();
        let now = Instant::now();
        let (told, taken, polling, stop) = (false, false, false, false);
        let alarm = Arc::default();
        Engine { job, links, of, bounds, looked: now, swept: now, told, alarm, taken, polling, stop }
    }

    /// Writes what may go on a connection.
    fn send(&mut self, at: usize) {
        let Engine { job, links, .. } = self;
        let link = &mut links[at];
        let mut turn = TURN;
        while !link.closed && !link.shut {
            while link.tx.has_room()
                && let Some(frame) = job.next(link.peer, link.connection)
            {
                link.tx.push(frame);
            }
            link.blocked = !link.tx.is_empty();
            if !link.blocked || turn == 0 {
                break;
            }
            let mut vecs = Tx::no_bytes();
            let n = link.tx.bytes(&mut vecs);
            // SAFETY: what `Tx` holds: frames of its own, and ranges being put, which do not change.
            match unsafe { socket::send(&link.socket, &mut vecs[..n]) } {
                Ok(n) => {
                    #[cfg(test)]
                    {
                        link.written += n;
                    }
                    link.said = Instant::now();
                    link.tx.wrote(n, |to, lane, number| job.written(to, lane, number));
                    turn = turn.saturating_sub(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    // What the peer said before it went is still to be read.
                    link.breaks(&e);
                    link.shut = true;
                    link.blocked = false;
                }
            }
        }
        self.tell();
    }

    /// Passes on that the job has failed, if it has.
    pub fn tell(&mut self) {
        if self.told || self.job.ended().is_none() {
            return;
        }
        self.told = true;
        self.alarm.ring();
        for at in 0..self.links.len() {
            self.send(at);
            let link = &mut self.links[at];
            if !link.closed && !link.shut && link.tx.is_empty() {
                Self::shut(link);
            }
        }
    }

    fn shut(link: &mut Link) {
        link.shut = true;
        // A connection that is gone need not be shut.
        let _ = link.socket.shutdown(Shutdown::Write);
    }

    /// Reads what has come on a connection, and passes on what is for others. Returns whether something has.
    fn receive(&mut self, at: usize) -> bool {
        let mut turn = TURN;
        loop {
            let more = self.receive_some(at, &mut turn);
            while let Some(neighbour) = self.job.touched() {
                self.push(neighbour);
            }
            if !more {
                break;
            }
        }
        self.tell();
        turn < TURN
    }

    /// Reads until there is something to pass on. Returns whether there may be more.
    fn receive_some(&mut self, at: usize, turn: &mut usize) -> bool {
        let Engine { job, links, .. } = self;
        let link = &mut links[at];
        let mut more = false;
        while !link.closed && *turn > 0 {
            if link.deaf {
                Self::discard(link);
                break;
            }
            let room = link.rx.room();
            let vecs = if room[1].iov_len > 0 { &room[..] } else { &room[..1] };
            let asked: usize = vecs.iter().map(|v| v.iov_len).sum();
            // SAFETY: what `Rx` gives: memory of its own, and an armed range, which is the transport's alone.
            match unsafe { socket::receive(&link.socket, vecs) } {
                Ok(0) => link.closed = true,
                Ok(n) => {
                    link.heard = Instant::now();
                    *turn = turn.saturating_sub(n);
                    if let Err(wrong) = link.rx.received(n, &mut job.arrivals(link.peer)) {
                        link.deaf = true;
                        job.wrong(link.peer, wrong);
                    } else if n < asked {
                        break;
                    } else if job.has_touched() {
                        more = true;
                        break;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    link.breaks(&e);
                    link.closed = true;
                }
            }
        }
        if link.closed {
            link.blocked = false;
            Self::shut(link);
            if !job.may_go(link.peer) {
                match link.broke {
                    Some(how) => drop(job.lose(link.peer, Loss::Broken(how), Duration::ZERO)),
                    None => job.gone(link.peer),
                }
            }
        }
        more
    }

    fn discard(link: &mut Link) {
        let mut unread = [0; 4096];
        loop {
            match link.socket.read(&mut unread) {
                Ok(0) => break link.closed = true,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(_) => break link.closed = true,
            }
        }
    }

    /// Writes what may go to `peer`.
    pub fn push(&mut self, peer: usize) {
        for turn in 0..self.of[peer].len() {
            self.send(self.of[peer][turn]);
        }
    }

    /// Moves what there is to move between this rank and `peer`; now and then between others too, if it
    /// goes through here.
    pub fn serve(&mut self, peer: usize) {
        if self.job.is_relay() {
            self.sweep_if_late();
        }
        for turn in 0..self.of[peer].len() {
            self.receive(self.of[peer][turn]);
        }
        self.push(peer);
    }

    /// [`Engine::serve`] once more: nothing is to be written unless something has come or is left over.
    pub fn listen(&mut self, peer: usize) {
        if self.job.is_relay() {
            self.sweep_if_late();
        }
        let mut news = false;
        for turn in 0..self.of[peer].len() {
            let at = self.of[peer][turn];
            news |= self.receive(at) || self.links[at].blocked;
        }
        if news {
            self.push(peer);
        }
    }

    /// Whether the progress thread sleeps and does not know of something that waits until it can be written.
    /// It is to be woken then.
    pub fn must_wake(&mut self) -> bool {
        let mut unknown = false;
        for link in self.links.iter_mut().filter(|link| self.polling && link.blocked && !link.watched) {
            link.watched = true;
            unknown = true;
        }
        unknown
    }

    /// Writes what is left over.
    pub fn flush(&mut self) {
        self.tell();
        for at in 0..self.links.len() {
            let Link { peer, connection, blocked, .. } = self.links[at];
            if blocked || self.job.has_untold(peer, connection) {
                self.send(at);
            }
        }
        if self.told {
            for link in self.links.iter_mut().filter(|l| !l.shut && l.tx.is_empty()) {
                Self::shut(link);
            }
        }
    }

    /// What the progress thread sleeps on.
    pub fn watch(&mut self) -> Vec<libc::pollfd> {
        self.links.iter_mut().for_each(|link| link.watched = link.blocked);
        self.polling = true;
        self.fds()
    }

    /// What to sleep on.
    pub fn fds(&self) -> Vec<libc::pollfd> {
        let fd = |link: &Link| libc::pollfd {
            fd: if link.closed { -1 } else { link.socket.as_raw_fd() },
            events: libc::POLLIN | if link.blocked { libc::POLLOUT } else { 0 },
            revents: 0,
        };
        self.links.iter().map(fd).collect()
    }

    /// Moves what can be moved on the connections that are ready.
    pub fn serve_ready(&mut self, fds: &[libc::pollfd]) {
        self.swept = Instant::now();
        for at in 0..self.links.len() {
            let ready = fds[at].revents;
            if ready & !libc::POLLOUT != 0 {
                self.receive(at);
                // A credit may have come, which any connection to this peer may use.
                self.push(self.links[at].peer);
            } else if ready != 0 {
                self.send(at);
            }
        }
        self.flush();
    }

    /// Moves what can be moved now.
    pub fn serve_all(&mut self) {
        let mut fds = self.fds();
        poll(&mut fds, Duration::ZERO);
        self.serve_ready(&fds);
    }

    /// [`Engine::serve_all`], now and then, where there are others than the one that is served all the time.
    pub fn sweep_if_late(&mut self) {
        if self.links.len() > 1 && self.swept.elapsed() >= SWEEP {
            self.serve_all();
        }
    }

    /// How often to show that this rank lives.
    fn beat(&self) -> Duration {
        (self.bounds.silence / 8).clamp(Duration::from_millis(5), Duration::from_millis(500))
    }

    /// [`Engine::tick`], if whose turn it is has not come to it.
    pub fn tick_if_late(&mut self) {
        if self.looked.elapsed() > self.beat() {
            self.tick();
        }
    }

    /// Shows that this rank lives, and looks who else does. Returns when to come back.
    pub fn tick(&mut self) -> Duration {
        let (now, beat) = (Instant::now(), self.beat());
        // Whoever was stopped himself cannot say who was silent meanwhile.
        if now.saturating_duration_since(self.looked) >= self.bounds.silence / 2 {
            self.links.iter_mut().for_each(|link| link.heard = now);
        }
        self.looked = now;
        for at in 0..self.links.len() {
            if now.saturating_duration_since(self.links[at].heard) > self.bounds.silence {
                self.receive(at); // what it said may lie here unread
            }
            let Link { peer, connection, closed, shut, said, heard, .. } = self.links[at];
            if closed || self.told {
                continue;
            }
            if !shut && self.links[at].tx.is_empty() && now.saturating_duration_since(said) >= beat {
                self.job.beat(peer, connection);
                self.send(at);
            }
            let silence = now.saturating_duration_since(heard);
            if silence > self.bounds.silence && !self.job.may_go(peer) {
                self.job.lose(peer, Loss::Silent, silence);
                self.tell();
            }
        }
        beat / 2
    }

    /// Whether everything put has been written, but to those who have left.
    pub fn is_drained(&mut self) -> bool {
        self.job.is_drained()
    }

    /// Whether everyone has heard that this rank leaves, and whatever this one had to say was written.
    pub fn is_parted(&self) -> bool {
        let relayed = self.job.is_relayed();
        (!relayed || self.job.is_over())
            && self.links.iter().all(|link| {
                let parted = relayed || self.job.has_farewell(link.peer);
                link.closed || parted && link.tx.is_empty() && !link.blocked
            })
    }

    /// Says on every connection that nothing more will be written: what was is not lost, though there may be
    /// bytes here that nobody reads.
    pub fn shut_all(&mut self) {
        self.links.iter_mut().filter(|link| !link.shut).for_each(Self::shut);
    }

    /// Whether all connections have ended.
    pub fn is_closed(&self) -> bool {
        self.links.iter().all(|link| link.closed)
    }

    /// Bytes written on each connection to a rank, for tests.
    #[cfg(test)]
    pub fn written(&self, peer: usize) -> Vec<usize> {
        self.of[peer].iter().map(|at| self.links[*at].written).collect()
    }

    /// Breaks the connections to a rank, for tests.
    #[cfg(test)]
    pub fn cut(&self, peer: usize) {
        for at in &self.of[peer] {
            let _ = self.links[*at].socket.shutdown(Shutdown::Both);
        }
    }

    /// Resets a connection to a rank, for tests: as a firewall does, and the system for a process killed with data unread.
    #[cfg(test)]
    pub fn reset(&mut self, peer: usize) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        other.set_nonblocking(true).unwrap();
        let broken = std::mem::replace(&mut self.links[self.of[peer][0]].socket, other);
        let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: an option of our own socket, and its size.
        let set = unsafe {
            libc::setsockopt(
                broken.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const at_once).cast(),
                size_of_val(&at_once) as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
    }

    /// Writes what makes no sense to a rank, for tests: where it lands among the frames is chance.
    #[cfg(test)]
    pub fn scribble(&self, peer: usize) {
        let mut garbage = [0x5A; 1000];
        let mut rest = &mut garbage[..];
        while !rest.is_empty() {
            let vec = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            // SAFETY: the rest of the garbage.
            match unsafe { socket::send(&self.links[self.of[peer][0]].socket, &mut [vec]) } {
                Ok(n) => rest = &mut rest[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
        }
    }
}
