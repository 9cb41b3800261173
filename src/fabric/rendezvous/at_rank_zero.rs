//! A rendezvous of processes that know the address of rank 0.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::door::{Door, Refusal, knock, refused};
use super::handshake::{Hello, Purpose};
use super::{Rendezvous, Secret};
use crate::error::{Error, Result};

/// Nobody brings more.
const MOST: usize = 16 << 20;
/// Who waits looks so often, at least, who is missing.
const LOOK: Duration = Duration::from_millis(100);
/// Who waits for another's bytes looks so often whether it is interrupted.
const SLICE: Duration = Duration::from_millis(20);
const BROUGHT: u8 = 0;
const FAILED: u8 = 1;

/// Hears which ranks have not come yet, and may end the wait.
pub type Missing<'a> = &'a dyn Fn(&[usize]) -> Result<()>;

enum Received {
    Brought(Vec<u8>),
    /// There will be no job; why.
    Failed(String),
}

/// Why a rank does not have what another was to send.
enum Unheard {
    /// It looked up meanwhile, and saw that there is no use in waiting.
    Moot(Error),
    Io(std::io::Error),
}

type Heard<T> = std::result::Result<T, Unheard>;

/// What a rank looks for while it waits for another's bytes.
type Look<'a> = &'a dyn Fn() -> Result<()>;

impl From<std::io::Error> for Unheard {
    fn from(e: std::io::Error) -> Unheard {
        Unheard::Io(e)
    }
}

/// A star of connections with rank 0 in the middle, which listens.
pub struct AtRankZero {
    rank: usize,
    size: usize,
    until: Instant,
    /// Rank 0: everyone, by rank less one. Others: rank 0.
    links: Vec<TcpStream>,
}

fn late(ranks: &[usize], place: &str) -> Error {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let s = if ranks.len() == 1 { "" } else { "s" };
    Error::Unreachable {
        what: format!("rank{s} {} did not come to the job's rendezvous at {place} in time", names.join(", ")),
        remedy: "they were not started, have another secret, or a firewall is between them and rank 0".into(),
    }
}

/// Looks at the next byte without waiting for it.
fn peek(stream: &TcpStream) -> std::io::Result<usize> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    peeked
}

/// Whether the other end has gone.
fn is_closed(stream: &TcpStream) -> bool {
    match peek(stream) {
        Ok(bytes) => bytes == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

impl AtRankZero {
    /// Rank 0: waits at `listener` until all others have come, `limit` at most. It counts for every
    /// [`Rendezvous::all_gather`] too.
    ///
    /// # Errors
    /// [`Error::Unreachable`] with the ranks that did not come.
    pub fn host(listener: TcpListener, size: usize, secret: &Secret, limit: Duration) -> Result<Self> {
        AtRankZero::host_watched(listener, size, secret, limit, &|_| Ok(()))
    }

    /// [`AtRankZero::host`] that tells every now and then, several times a second, which ranks have not come yet.
    ///
    /// # Errors
    /// As [`AtRankZero::host`], and what `missing` ends the wait with; those who have come hear of it.
    pub fn host_watched(
        listener: TcpListener,
        size: usize,
        secret: &Secret,
        limit: Duration,
        missing: Missing<'_>,
    ) -> Result<Self> {
        let until = Instant::now() + limit;
        let place = listener.local_addr().map_or_else(|e| e.to_string(), |a| a.to_string());
        let mut door = Door::new(vec![listener], secret, Purpose::Rendezvous, 0, size)?;
        let mut come: Vec<Option<TcpStream>> = Vec::new();
        come.resize_with(size.saturating_sub(1), || None);
        while come.iter().any(Option::is_none) {
            let left = until.saturating_duration_since(Instant::now());
            let late_ones: Vec<usize> = (1..size).filter(|r| come[r - 1].is_none()).collect();
            let waits = if left.is_zero() { Err(late(&late_ones, &place)) } else { missing(&late_ones) };
            if let Err(e) = waits {
                let here = AtRankZero { rank: 0, size, until, links: come.into_iter().flatten().collect() };
                here.tell(&e);
                return Err(e);
            }
            for (hello, stream) in door.serve(left.min(LOOK)) {
                let rank = hello.from as usize;
                let other = come.get(rank - 1).and_then(Option::as_ref);
                let wrong = match hello.size as usize != size {
                    true => Some(format!("rank {rank} is one of {}, and rank 0 one of {size}", hello.size)),
                    // Else the first gave up, or was not heard.
                    false => {
                        other.filter(|s| !is_closed(s)).map(|_| format!("two processes are rank {rank}"))
                    }
                };
                if let Some(what) = wrong {
                    let remedy = "start each rank once, all with the same number of ranks".to_string();
                    let what = format!("{what} of the job that meets at {place}");
                    let e = Error::Unreachable { what, remedy };
                    let links = come.into_iter().flatten().chain([stream]).collect();
                    AtRankZero { rank: 0, size, until, links }.tell(&e);
                    return Err(e);
                }
                come[rank - 1] = Some(stream);
            }
        }
        AtRankZero { rank: 0, size, until, links: come.into_iter().flatten().collect() }.ready()
    }

    /// Another rank: tries the addresses of rank 0, which need not listen yet, for `limit` at most. It
    /// counts for every [`Rendezvous::all_gather`] too.
    ///
    /// # Errors
    /// [`Error::Unreachable`] with what became of each address.
    pub fn join(
        addresses: &[SocketAddr],
        rank: usize,
        size: usize,
        secret: &Secret,
        limit: Duration,
    ) -> Result<Self> {
        AtRankZero::join_watched(addresses, rank, size, secret, limit, &|_| Ok(()))
    }

    /// [`AtRankZero::join`] that tells every now and then that rank 0 is not there yet.
    ///
    /// # Errors
    /// As [`AtRankZero::join`], and what `missing` ends the wait with.
    pub fn join_watched(
        addresses: &[SocketAddr],
        rank: usize,
        size: usize,
        secret: &Secret,
        limit: Duration,
        missing: Missing<'_>,
    ) -> Result<Self> {
        let until = Instant::now() + limit;
        let hello =
            Hello { purpose: Purpose::Rendezvous, from: rank as u32, to: 0, size: size as u32, link: 0 };
        let mut pause = Duration::from_millis(10);
        loop {
            let mut said = Vec::new();
            let mut strangers = 0;
            for address in addresses {
                // One that swallows packets may not keep the others from being tried.
                let turn = until.min(Instant::now() + Duration::from_secs(3));
                match knock(*address, secret, &hello, turn) {
                    Ok(stream) => return AtRankZero { rank, size, until, links: vec![stream] }.ready(),
                    Err(e) => {
                        strangers += usize::from(matches!(e, Refusal::Stranger));
                        said.push(format!("{address}: {e}"));
                    }
                }
            }
            if Instant::now() + pause >= until || strangers == addresses.len() {
                return Err(Error::Unreachable {
                    what: format!("rank {rank} does not reach rank 0 ({})", said.join("; ")),
                    remedy: "rank 0 was not started or ended, or a firewall is between them".into(),
                });
            }
            missing(&[0])?;
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(250));
        }
    }

    fn ready(self) -> Result<Self> {
        for stream in &self.links {
            stream.set_nodelay(true).map_err(|e| refused("TCP_NODELAY", &e))?;
        }
        Ok(self)
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    fn send(&self, mut stream: &TcpStream, kind: u8, bytes: &[u8]) -> std::io::Result<()> {
        stream.set_write_timeout(Some(self.left()))?;
        let mut head = [kind; 9];
        head[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        stream.write_all(&head)?;
        stream.write_all(bytes)
    }

    /// Reads what there is, at least a byte.
    fn read(&self, mut stream: &TcpStream, into: &mut [u8], look: Look<'_>) -> Heard<usize> {
        loop {
            stream.set_read_timeout(Some(self.left().min(SLICE)))?;
            match stream.read(into) {
                Ok(0) => return Err(Unheard::Io(ErrorKind::UnexpectedEof.into())),
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // One or the other, by system.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    look().map_err(Unheard::Moot)?;
                    if Instant::now() >= self.until {
                        return Err(Unheard::Io(ErrorKind::TimedOut.into()));
                    }
                }
                Err(e) => return Err(Unheard::Io(e)),
            }
        }
    }

    fn receive(&self, stream: &TcpStream, look: Look<'_>) -> Heard<Received> {
        let mut head = [0; 9];
        let mut have = 0;
        while have < head.len() {
            have += self.read(stream, &mut head[have..], look)?;
        }
        let len =
            u64::from_le_bytes([head[1], head[2], head[3], head[4], head[5], head[6], head[7], head[8]]);
        let most = if self.rank == 0 { MOST } else { (MOST + 8).saturating_mul(self.size) } as u64;
        if len > most {
            return Err(Unheard::Io(std::io::Error::other(format!("it sends {len} bytes"))));
        }
        // Grows as bytes come: a length alone allocates nothing.
        let (mut bytes, mut chunk) = (Vec::new(), [0; 1 << 14]);
        while (bytes.len() as u64) < len {
            let room = (len - bytes.len() as u64).min(chunk.len() as u64) as usize;
            let got = self.read(stream, &mut chunk[..room], look)?;
            bytes.extend_from_slice(&chunk[..got]);
        }
        match head[0] {
            BROUGHT => Ok(Received::Brought(bytes)),
            FAILED => Ok(Received::Failed(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Err(Unheard::Io(ErrorKind::InvalidData.into())),
        }
    }

    fn gone(&self, peer: usize, why: impl std::fmt::Display) -> Error {
        Error::Unreachable {
            what: format!("rank {peer} left the job's rendezvous before rank {}: {why}", self.rank),
            remedy: "look at what it says".into(),
        }
    }

    /// Another rank's part.
    fn bring(&self, rank_zero: &TcpStream, mine: &[u8], look: Look<'_>) -> Result<Vec<Vec<u8>>> {
        let sent = self.send(rank_zero, BROUGHT, mine);
        // Also when it could not be sent: rank 0 may have said why before it closed the connection.
        match (self.receive(rank_zero, look), sent) {
            (Ok(Received::Failed(what)), _) => {
                Err(Error::Unreachable { what, remedy: "so said rank 0".into() })
            }
            (Err(Unheard::Moot(e)), _) => Err(e),
            (_, Err(e)) | (Err(Unheard::Io(e)), _) => Err(self.gone(0, e)),
            (Ok(Received::Brought(all)), Ok(())) => {
                unpack(&all, self.size).ok_or_else(|| self.gone(0, "what it sends is garbled"))
            }
        }
    }

    /// Rank 0's part.
    fn collect(&self, mine: &[u8], look: Look<'_>) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![mine.to_vec()];
        for (peer, stream) in (1..).zip(&self.links) {
            // Who has brought what it has may be told to end while another is late.
            let look = || look().and_then(|()| self.are_there(&self.links[..peer - 1]));
            match self.receive(stream, &look) {
                Ok(Received::Brought(bytes)) => all.push(bytes),
                Ok(Received::Failed(why)) => return Err(self.gone(peer, why)),
                Err(Unheard::Moot(e)) => return Err(e),
                Err(Unheard::Io(e)) => return Err(self.gone(peer, e)),
            }
        }
        let packed = pack(&all);
        for (peer, stream) in (1..).zip(&self.links) {
            self.send(stream, BROUGHT, &packed).map_err(|e| self.gone(peer, e))?;
        }
        Ok(all)
    }

    /// Whether these, the first ones, wait for what rank 0 sends.
    fn are_there(&self, links: &[TcpStream]) -> Result<()> {
        for (peer, stream) in (1..).zip(links) {
            match peek(stream) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(self.gone(peer, e)),
                Ok(_) => {
                    return Err(match self.receive(stream, &|| Ok(())) {
                        Ok(Received::Failed(why)) => self.gone(peer, why),
                        Err(Unheard::Io(e)) => self.gone(peer, e),
                        Ok(Received::Brought(_)) => self.gone(peer, "it brings more than it was asked for"),
                        Err(Unheard::Moot(e)) => e,
                    });
                }
            }
        }
        Ok(())
    }

    /// [`Rendezvous::all_gather`] that asks again and again whether this rank is interrupted. The others hear of it, at once or when
    /// they meet next.
    ///
    /// # Errors
    /// As [`Rendezvous::all_gather`], and [`Error::Interrupted`].
    pub fn all_gather_unless(&mut self, mine: &[u8], interrupted: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>> {
        if mine.len() > MOST {
            return Err(Error::Internal(format!("{} bytes are brought to a rendezvous", mine.len())));
        }
        let look = || if interrupted() { Err(Error::Interrupted) } else { Ok(()) };
        let done = look().and_then(|()| match self.rank {
            0 => self.collect(mine, &look),
            _ => self.bring(&self.links[0], mine, &look),
        });
        done.inspect_err(|e| {
            if self.rank == 0 || matches!(e, Error::Interrupted) {
                self.tell(e);
            }
        })
    }

    /// Tells those at the other ends why there is no job.
    fn tell(&self, error: &Error) {
        let text = match error {
            Error::Unreachable { what, .. } => what.clone(),
            Error::Interrupted => format!("rank {} was interrupted", self.rank),
            other => other.to_string(),
        };
        for stream in &self.links {
            // Who does not hear it hears that the connection is closed.
            let _ = self.send(stream, FAILED, text.as_bytes());
            let _ = stream.shutdown(Shutdown::Write);
        }
        // A connection closed with bytes unread is reset, and what was said on it is lost with it.
        let until = Instant::now() + Duration::from_secs(1);
        for mut stream in &self.links {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let mut unread = [0; 4096];
            while stream.set_read_timeout(Some(left)).is_ok()
                && stream.read(&mut unread).is_ok_and(|n| n > 0)
                && Instant::now() < until
            {}
        }
    }
}

impl Rendezvous for AtRankZero {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_gather_unless(mine, &|| false)
    }
}

fn pack(all: &[Vec<u8>]) -> Vec<u8> {
    let mut packed = Vec::new();
    for bytes in all {
        packed.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        packed.extend_from_slice(bytes);
    }
    packed
}

fn unpack(mut packed: &[u8], n: usize) -> Option<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    for _ in 0..n {
        let (len, rest) = packed.split_first_chunk::<8>()?;
        let (bytes, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        all.push(bytes.to_vec());
        packed = rest;
    }
    packed.is_empty().then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; 32])
    }

    #[test]
    fn everyone_gets_everyones_bytes() {
        let n = 5;
        let (listener, address) = listener();
        let mut listener = Some(listener);
        let brought = |rank: usize, round: usize| vec![rank as u8; rank * 1000 * round];
        std::thread::scope(|scope| {
            for rank in 0..n {
                let listener = if rank == 0 { listener.take() } else { None };
                scope.spawn(move || {
                    let mut me = match listener {
                        Some(listener) => AtRankZero::host(listener, n, &secret(1), LIMIT).unwrap(),
                        None => AtRankZero::join(&[address], rank, n, &secret(1), LIMIT).unwrap(),
                    };
                    assert_eq!((me.rank(), me.size()), (rank, n));
                    for round in 0..4 {
                        let all = me.all_gather(&brought(rank, round)).unwrap();
                        assert_eq!(all, (0..n).map(|r| brought(r, round)).collect::<Vec<_>>());
                    }
                });
            }
        });
    }

    #[test]
    fn strangers_change_nothing() {
        let (listener, address) = listener();
        std::thread::scope(|scope| {
            let host = scope.spawn(move || AtRankZero::host(listener, 2, &secret(1), LIMIT));
            // Half-open, silent, garbage, another secret.
            let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
            for i in 0..100u8 {
                let mut stream = TcpStream::connect(address).unwrap();
                // It may be closed while we write: then it was refused.
                let _ = stream.write_all(&[i; 200]);
            }
            let e = AtRankZero::join(&[address], 1, 2, &secret(2), LIMIT).err().unwrap();
            assert!(e.to_string().contains("not of this job"), "{e}");
            let mut joined = AtRankZero::join(&[address], 1, 2, &secret(1), LIMIT).unwrap();
            let mut host = host.join().unwrap().unwrap();
            let other = scope.spawn(move || joined.all_gather(b"one").unwrap());
            assert_eq!(host.all_gather(b"zero").unwrap(), [b"zero".to_vec(), b"one".to_vec()]);
            assert_eq!(other.join().unwrap().len(), 2);
            drop(silent);
        });
    }

    #[test]
    fn who_does_not_come_is_named_to_all() {
        let (listener, address) = listener();
        std::thread::scope(|scope| {
            let host = scope.spawn(move || {
                let seen = std::cell::RefCell::new(Vec::new());
                let look = |missing: &[usize]| {
                    seen.borrow_mut().push(missing.to_vec());
                    Ok(())
                };
                let limit = Duration::from_secs(5); // rank 2 comes in it, however busy the machine is
                let e = AtRankZero::host_watched(listener, 4, &secret(1), limit, &look).err().unwrap();
                assert_eq!(seen.borrow()[0], [1, 2, 3]);
                assert_eq!(seen.borrow().last().unwrap(), &[1, 3]);
                e
            });
            let mut two = AtRankZero::join(&[address], 2, 4, &secret(1), LIMIT).unwrap();
            let e = two.all_gather(b"").unwrap_err();
            for e in [e, host.join().unwrap()] {
                assert!(e.to_string().contains("ranks 1, 3 did not come"), "{e}");
                assert_eq!(e.exit_code(), 4);
            }
        });
        // Nobody listens.
        let e = AtRankZero::join(&[address], 1, 2, &secret(1), Duration::from_millis(200)).err().unwrap();
        assert!(e.to_string().contains(&address.to_string()), "{e}");
    }

    /// Told at once, to all who have come.
    #[test]
    fn who_comes_twice_or_counts_otherwise_is_named() {
        for (second, why) in
            [((1, 3), "two processes are rank 1"), ((2, 4), "rank 2 is one of 4, and rank 0 one of 3")]
        {
            let (listener, address) = listener();
            let began = Instant::now();
            std::thread::scope(|scope| {
                let host =
                    scope.spawn(move || AtRankZero::host(listener, 3, &secret(1), LIMIT).err().unwrap());
                let mut one = AtRankZero::join(&[address], 1, 3, &secret(1), LIMIT).unwrap();
                let (rank, size) = second;
                let mut other = AtRankZero::join(&[address], rank, size, &secret(1), LIMIT).unwrap();
                let told = [
                    one.all_gather(b"").unwrap_err(),
                    other.all_gather(b"").unwrap_err(),
                    host.join().unwrap(),
                ];
                for e in told {
                    assert!(e.to_string().contains(why), "{e}");
                }
            });
            assert!(began.elapsed() < LIMIT / 2);
        }
    }

    /// One that has given up before is no second one.
    #[test]
    fn who_comes_again_is_taken() {
        let (listener, address) = listener();
        std::thread::scope(|scope| {
            let host = scope.spawn(move || AtRankZero::host(listener, 3, &secret(1), LIMIT).unwrap());
            drop(AtRankZero::join(&[address], 1, 3, &secret(1), LIMIT).unwrap());
            let mut one = AtRankZero::join(&[address], 1, 3, &secret(1), LIMIT).unwrap();
            let mut two = AtRankZero::join(&[address], 2, 3, &secret(1), LIMIT).unwrap();
            let others = [
                scope.spawn(move || one.all_gather(b"").unwrap()),
                scope.spawn(move || two.all_gather(b"").unwrap()),
            ];
            assert_eq!(host.join().unwrap().all_gather(b"").unwrap().len(), 3);
            others.into_iter().for_each(|other| assert_eq!(other.join().unwrap().len(), 3));
        });
    }

    #[test]
    fn who_goes_is_named() {
        let (listener, address) = listener();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(AtRankZero::join(&[address], 1, 2, &secret(1), LIMIT)));
            let mut host = AtRankZero::host(listener, 2, &secret(1), LIMIT).unwrap();
            let e = host.all_gather(b"").unwrap_err();
            assert!(e.to_string().contains("rank 1 left"), "{e}");
        });
    }

    /// Rank 0 or another: who is told to end while it waits does so, and the others hear why.
    #[test]
    fn who_is_interrupted_ends_at_once_and_says_so() {
        for who in [0, 1] {
            let (listener, address) = listener();
            let began = Instant::now();
            let came = std::sync::Barrier::new(3);
            let came = &came;
            std::thread::scope(|scope| {
                let gather = move |mut me: AtRankZero| {
                    came.wait();
                    let since = Instant::now();
                    let is_interrupted = move || since.elapsed() > Duration::from_millis(200);
                    match me.rank == who {
                        true => me.all_gather_unless(b"", &is_interrupted).unwrap_err(),
                        false => me.all_gather(b"").unwrap_err(),
                    }
                };
                let host =
                    scope.spawn(move || gather(AtRankZero::host(listener, 4, &secret(1), LIMIT).unwrap()));
                let join = |rank| AtRankZero::join(&[address], rank, 4, &secret(1), LIMIT).unwrap();
                let one = scope.spawn(move || gather(join(1)));
                let two = scope.spawn(move || gather(join(2)));
                // Comes, and brings nothing.
                let late = join(3);
                let told = [host.join().unwrap(), one.join().unwrap(), two.join().unwrap()];
                for (rank, e) in told.iter().enumerate() {
                    match rank == who {
                        true => assert!(matches!(e, Error::Interrupted), "{rank} {e}"),
                        false => assert!(
                            e.to_string().contains(&format!("rank {who} was interrupted")),
                            "{rank} {e}"
                        ),
                    }
                }
                drop(late);
            });
            assert!(began.elapsed() < LIMIT / 2);
        }
    }
}
