//! Where connections come in: strangers are bounded in number, bytes and time.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::handshake::{Acceptor, CHALLENGE, Connector, Hello, Purpose, Step, WELCOME};
use super::{Secret, random};
use crate::error::{Error, Result};

/// Connections that have not proven themselves; of more, the oldest go. An honest connector tries again.
const PENDING: usize = 64;
/// An honest handshake takes two round trips.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// What a door stands behind: hosts come over TCP, processes of this host over its own sockets.
pub trait Listener: AsRawFd {
    /// A connection.
    type Stream: Stream;
    /// The next one.
    fn take(&self) -> std::io::Result<Self::Stream>;
    /// Whether [`Listener::take`] waits.
    fn set_blocking(&self, blocking: bool) -> std::io::Result<()>;
}

/// A connection of either kind.
pub trait Stream: AsRawFd + Read + Write {
    /// Whether reading and writing wait.
    fn set_blocking(&self, blocking: bool) -> std::io::Result<()>;
    /// How long they wait at most.
    fn set_patience(&self, at_most: Option<Duration>) -> std::io::Result<()>;
}

macro_rules! kind {
    ($listener:ty, $stream:ty) => {
        impl Listener for $listener {
            type Stream = $stream;

            fn take(&self) -> std::io::Result<$stream> {
                self.accept().map(|(stream, _)| stream)
            }

            fn set_blocking(&self, blocking: bool) -> std::io::Result<()> {
                self.set_nonblocking(!blocking)
            }
        }

        impl Stream for $stream {
            fn set_blocking(&self, blocking: bool) -> std::io::Result<()> {
                self.set_nonblocking(!blocking)
            }

            fn set_patience(&self, at_most: Option<Duration>) -> std::io::Result<()> {
                self.set_read_timeout(at_most)?;
                self.set_write_timeout(at_most)
            }
        }
    };
}

kind!(TcpListener, TcpStream);
kind!(UnixListener, UnixStream);

struct Pending<S> {
    stream: S,
    acceptor: Acceptor,
    until: Instant,
}

/// Listeners, and who stands before them.
pub struct Door<L: Listener = TcpListener> {
    listeners: Vec<L>,
    pending: VecDeque<Pending<L::Stream>>,
    secret: Secret,
    purpose: Purpose,
    me: u32,
    size: u32,
}

impl<L: Listener> Door<L> {
    /// For rank `me` of `size`.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(listeners: Vec<L>, secret: &Secret, purpose: Purpose, me: usize, size: usize) -> Result<Self> {
        for listener in &listeners {
            listener.set_blocking(false).map_err(|e| refused("a listener", &e))?;
        }
        let (me, size) = (me as u32, size as u32);
        Ok(Door { listeners, pending: VecDeque::new(), secret: secret.clone(), purpose, me, size })
    }

    /// Serves whoever comes, for `at_most`; returns as soon as one or more have proven themselves. Their
    /// streams are blocking.
    pub fn serve(&mut self, at_most: Duration) -> Vec<(Hello, L::Stream)> {
        let until = Instant::now() + at_most;
        let mut proven = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if !proven.is_empty() || left.is_zero() {
                return proven;
            }
            let mut fds: Vec<libc::pollfd> = (self.listeners.iter().map(AsRawFd::as_raw_fd))
                .chain(self.pending.iter().map(|p| p.stream.as_raw_fd()))
                .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
                .collect();
            poll(&mut fds, left.min(Duration::from_millis(100)));
            let ready: Vec<bool> = fds.iter().map(|fd| fd.revents != 0).collect();
            let (listeners, pending) = ready.split_at(self.listeners.len());
            self.hear(pending, &mut proven);
            for at in (0..listeners.len()).filter(|at| listeners[*at]) {
                self.admit(at);
            }
        }
    }

    /// Takes what those have to say who stand before the door.
    fn hear(&mut self, ready: &[bool], proven: &mut Vec<(Hello, L::Stream)>) {
        let now = Instant::now();
        for (at, mut pending) in std::mem::take(&mut self.pending).into_iter().enumerate() {
            match if ready[at] { pending.hear() } else { Step::More } {
                Step::Proven(hello) => {
                    // A fresh connection has room for one byte. Who has gone will be missed later.
                    if pending.stream.write_all(&[WELCOME]).is_ok()
                        && pending.stream.set_blocking(true).is_ok()
                    {
                        proven.push((hello, pending.stream));
                    }
                }
                Step::Refused => {}
                Step::More | Step::Send(_) if pending.until > now => self.pending.push_back(pending),
                Step::More | Step::Send(_) => {}
            }
        }
    }

    fn admit(&mut self, at: usize) {
        // A bounded number a turn, so that those inside are heard too.
        for _ in 0..PENDING / 2 {
            let stream = match self.listeners[at].take() {
                Ok(stream) => stream,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Out of files, or the connection went at once: those inside come first.
                    self.pending.pop_front();
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            };
            let Ok(nonce) = random() else { continue };
            if stream.set_blocking(false).is_err() {
                continue;
            }
            if self.pending.len() >= PENDING {
                self.pending.pop_front();
            }
            let acceptor = Acceptor::new(&self.secret, self.purpose, self.me, self.size, nonce);
            let until = Instant::now() + HANDSHAKE;
            self.pending.push_back(Pending { stream, acceptor, until });
        }
    }
}

impl<S: Stream> Pending<S> {
    /// Reads what has come, but no byte of what follows the handshake.
    fn hear(&mut self) -> Step {
        let mut room = [0; 128];
        loop {
            let wants = self.acceptor.wants().min(room.len());
            let got = match self.stream.read(&mut room[..wants]) {
                Ok(0) => return Step::Refused,
                Ok(got) => got,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Step::More,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Step::Refused,
            };
            match self.acceptor.take(&room[..got]) {
                Step::More => {}
                // A fresh connection has room for a challenge.
                Step::Send(challenge) if self.stream.write_all(&challenge).is_ok() => {}
                Step::Send(_) => return Step::Refused,
                end => return end,
            }
        }
    }
}

/// Why a connection was not made.
#[derive(Debug)]
pub enum Refusal {
    /// Nobody there, or it went away: trying again may help.
    Io(std::io::Error),
    /// Who listens there does not know the secret.
    Stranger,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Io(e) => e.fmt(f),
            Refusal::Stranger => f.write_str("who listens there is not of this job"),
        }
    }
}

/// Connects to a door by `until` at the latest. The stream is blocking, without deadlines.
///
/// # Errors
/// A [`Refusal`].
pub fn knock(
    address: SocketAddr,
    secret: &Secret,
    hello: &Hello,
    until: Instant,
) -> std::result::Result<TcpStream, Refusal> {
    let left = left(until).map_err(Refusal::Io)?;
    let stream = TcpStream::connect_timeout(&address, left).map_err(Refusal::Io)?;
    prove(stream, secret, hello, until)
}

fn left(until: Instant) -> std::io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now()).min(HANDSHAKE);
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// As [`knock`], over a connection that was just made.
///
/// # Errors
/// A [`Refusal`].
pub fn prove<S: Stream>(
    mut stream: S,
    secret: &Secret,
    hello: &Hello,
    until: Instant,
) -> std::result::Result<S, Refusal> {
    let io = Refusal::Io;
    let nonce = random().map_err(|e| io(std::io::Error::other(e.to_string())))?;
    stream.set_patience(Some(left(until).map_err(io)?)).map_err(io)?;
    let connector = Connector::new(secret, hello, nonce);
    stream.write_all(connector.hello()).map_err(io)?;
    let mut challenge = [0; CHALLENGE];
    stream.read_exact(&mut challenge).map_err(io)?;
    let proof = connector.prove(&challenge).ok_or(Refusal::Stranger)?;
    stream.write_all(&proof).map_err(io)?;
    let mut welcome = [0];
    stream.read_exact(&mut welcome).map_err(io)?;
    if welcome != [WELCOME] {
        return Err(Refusal::Stranger);
    }
    stream.set_patience(None).map_err(io)?;
    Ok(stream)
}

/// `poll(2)`. What has come is in `revents`; a signal is nothing.
pub fn poll(fds: &mut [libc::pollfd], at_most: Duration) {
    // Rounded up: a wait of less than a millisecond is not a spin.
    let millis = at_most.as_nanos().div_ceil(1_000_000).min(60_000) as libc::c_int;
    // SAFETY: as many descriptions of files as said, to be read and written.
    if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) } < 0 {
        fds.iter_mut().for_each(|fd| fd.revents = 0);
    }
}

/// The system refused something.
pub fn refused(what: impl Into<String>, e: &std::io::Error) -> Error {
    Error::System { what: what.into(), os: e.to_string() }
}
