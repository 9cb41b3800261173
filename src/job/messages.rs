//! What launcher, agents and ranks tell each other, and how it stands on a stream.
//!
//! ```text
//! launcher ◀── Up / Order, over ssh's stdin and stdout ──▶ agent (one a host) ◀── FromRank / ToRank, a socket ──▶ rank
//!                                                        ▲
//!                                                        └── Up / Order ──▶ agents of further hosts, where there are many
//! ```
//!
//! A frame is its length (4 bytes, little-endian) and a message in postcard's encoding. A stream begins with
//! [`GREETING`], which carries the version of all of this: nothing after it is read unless it is right. What
//! comes is not trusted: lengths are bounded, bytes are stored only as they come, and what is no message is an error.

use std::fmt;
use std::io::{self, Read, Write};
use std::time::Duration;

use crate::fabric::checksum;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The first line of every stream. The first number goes up whenever a message changes.
pub const GREETING: &str = concat!("fulmen job 3 ", env!("CARGO_PKG_VERSION"), "\n");

/// No frame is longer: the words of 4096 ranks at 16 KiB each.
pub const LONGEST: usize = 64 << 20;

/// What a rank may say in one round of its rendezvous.
pub const LONGEST_WORD: usize = 16 << 10;

/// 32 bytes that must not be seen in messages for people.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hidden(pub [u8; 32]);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hidden(..)")
    }
}

/// A file's length and checksum: tells builds apart, not attackers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Bytes.
    pub len: u64,
    /// CRC-32C of them.
    pub crc: u32,
}

impl Fingerprint {
    /// Of all that can be read.
    ///
    /// # Errors
    /// When reading fails.
    pub fn of(from: &mut impl Read) -> io::Result<Fingerprint> {
        let mut print = Fingerprint { len: 0, crc: 0 };
        let mut chunk = vec![0; 1 << 16];
        loop {
            match from.read(&mut chunk) {
                Ok(0) => return Ok(print),
                Ok(n) => {
                    print.len += n as u64;
                    print.crc = checksum::crc32c_append(print.crc, &chunk[..n]);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x} ({} bytes)", self.crc, self.len)
    }
}

/// What a rank tells its agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromRank {
    /// It uses the library, of this version, and listens.
    Hello {
        /// Version of the library.
        version: String,
    },
    /// Its word in a round of the rendezvous.
    Gather {
        /// Counted from 0.
        round: u32,
        /// At most [`LONGEST_WORD`].
        bytes: Vec<u8>,
    },
    /// It fails with this.
    Failed(Complaint),
    /// Whether it must never be killed hard, and why: it holds what only it can give back.
    Keep(Option<String>),
    /// What this rank sees of ranks that are lost.
    Sees(Sight),
}

/// What a rank sees of lost ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Sight {
    /// Whether it waits for one of them.
    pub waits: bool,
    /// Over which link, in the midst of what.
    pub words: String,
}

/// A rank's failure in its own words.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Complaint {
    /// The exit code it stands for.
    pub code: u8,
    /// Whether it only suffers from the failure of another.
    pub follows: bool,
    /// Whether it is only what another rank has told: who has seen it says more.
    pub heard: bool,
    /// Words that name the culprit and the remedy.
    pub words: String,
}

/// What an agent tells a rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToRank {
    /// The job, once, at the start.
    Welcome(Welcome),
    /// All words of a round, by rank.
    Gathered {
        /// The round.
        round: u32,
        /// By rank.
        parts: Vec<Vec<u8>>,
    },
    /// The job is over: end now, in order.
    End(Ending),
    /// The agent lives.
    Beat,
}

/// What a rank needs to know of its job.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// Name of the host of each rank, as the user calls it.
    pub hosts: Vec<String>,
    /// Known to the job's processes only.
    pub secret: Hidden,
    /// Within this time of a failure all must be over, milliseconds.
    pub bound_ms: u64,
    /// The rendezvous must be over so long after it began, milliseconds.
    pub start_ms: u64,
}

/// Why the job ends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ending {
    /// 4: a rank or host was lost; 5: interrupted; or what a rank ended with.
    pub code: u8,
    /// In words.
    pub reason: String,
    /// Ranks of which nothing is heard any more.
    pub lost: Vec<u32>,
}

impl Ending {
    /// No rank is out of reach.
    pub fn new(code: u8, reason: impl Into<String>) -> Ending {
        Ending { code, reason: reason.into(), lost: vec![] }
    }
}

/// One rank to be started.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankStart {
    /// Its number.
    pub rank: u32,
    /// Its number among those of its host.
    pub local: u32,
}

/// A program that travels with the order to start it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Program {
    /// Its path, bytes of the operating system.
    pub path: Vec<u8>,
    /// What the launcher's own copy looks like; `None`: any will do.
    pub fingerprint: Option<Fingerprint>,
    /// Its arguments, without its name.
    pub args: Vec<Vec<u8>>,
}

/// A host and what is of its own in the job.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Place {
    /// The number of its agent.
    pub host: u32,
    /// Its name, as the user calls it.
    pub name: String,
    /// Its ranks.
    pub ranks: Vec<RankStart>,
    /// Variables to set there, beside those of all.
    pub vars: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Hosts whose agents another starts, and how.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Below {
    /// The hosts.
    pub hosts: Vec<Place>,
    /// So many of them are reached directly at most, the others through them.
    pub fan_out: u32,
    /// What starts a command on a host: program and arguments; host and command follow.
    pub ssh: Vec<String>,
    /// Where the agent is on these hosts; `None`: it and the program are copied there.
    pub agent: Option<Vec<u8>>,
}

/// An agent's task.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Start {
    /// The agent's host.
    pub place: Place,
    /// Further hosts that it starts agents on.
    pub below: Below,
    /// The job, for the ranks.
    pub welcome: Welcome,
    /// What they run.
    pub program: Program,
    /// The folder to start in.
    pub folder: Vec<u8>,
    /// Whether another folder will do where that one is missing.
    pub any_folder: bool,
    /// Variables to set.
    pub vars: Vec<(Vec<u8>, Vec<u8>)>,
}

/// How a rank's process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum How {
    /// With an exit code.
    Code(u8),
    /// By a signal.
    Signal(i32),
}

/// One of a rank's streams.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// From an agent, or through it from one below.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Up {
    /// Its number.
    pub host: u32,
    /// What it says.
    pub news: News,
}

/// What agents tell.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum News {
    /// Everything is there; waits for [`Order::Go`].
    Ready {
        /// The agent's process.
        pid: u32,
        /// Things that the user should know.
        notes: Vec<String>,
    },
    /// It cannot be done here.
    Refused(Ending),
    /// A rank was started.
    Started {
        /// The rank.
        rank: u32,
        /// Its process.
        pid: u32,
    },
    /// A rank wrote something.
    Output {
        /// The rank.
        rank: u32,
        /// Where to.
        stream: Stream,
        /// What.
        bytes: Vec<u8>,
    },
    /// Rank 0 has taken so many bytes of its input, or will never take them.
    Taken(u32),
    /// A rank's word in a round.
    Gather {
        /// The rank.
        rank: u32,
        /// The round.
        round: u32,
        /// At most [`LONGEST_WORD`].
        bytes: Vec<u8>,
    },
    /// A rank fails with this.
    Failed {
        /// The rank.
        rank: u32,
        /// In its words, or the agent's about it.
        complaint: Complaint,
    },
    /// A rank's process is gone.
    Ended {
        /// The rank.
        rank: u32,
        /// How.
        how: How,
        /// Whether the agent had asked it to end before.
        asked: bool,
        /// Whether it had RDMA devices in its hands.
        held: bool,
    },
    /// A rank does not end and must not be killed hard.
    Kept {
        /// The rank.
        rank: u32,
        /// Why.
        why: String,
    },
    /// What a rank sees of lost ranks.
    Sees {
        /// The rank.
        rank: u32,
        /// What.
        sight: Sight,
    },
    /// Of an agent below, by the one that has started it: the connection to it has ended.
    Lost {
        /// What ssh said, and how it ended.
        words: String,
        /// Whether it ended in order.
        well: bool,
    },
    /// The agent lives.
    Beat,
}

/// What the launcher tells an agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Order {
    /// A part of the program, before the task, to an agent that was copied itself.
    Part(Vec<u8>),
    /// The task: look whether it can be done.
    Start(Box<Start>),
    /// Start the ranks.
    Go,
    /// All words of a round.
    Gathered {
        /// The round.
        round: u32,
        /// By rank.
        parts: Vec<Vec<u8>>,
    },
    /// Input for rank 0.
    Input(Vec<u8>),
    /// Its end.
    InputEnd,
    /// End the ranks in order, then yourself.
    End(Ending),
    /// End all at once.
    Kill,
    /// The launcher lives.
    Beat,
}

/// A message and its length, as it stands on a stream.
///
/// # Errors
/// When the message is too long, or cannot be encoded.
pub fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let bytes = postcard::to_extend(message, vec![0; 4]).map_err(io::Error::other)?;
    let len = bytes.len() - 4;
    if len > LONGEST {
        return Err(io::Error::other(format!("a message of {len} bytes is too long")));
    }
    let mut bytes = bytes;
    bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(bytes)
}

/// Writes one message.
///
/// # Errors
/// When it cannot be written.
pub fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(message)?)?;
    to.flush()
}

/// What came is no message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Garbage(pub String);

/// Takes a stream apart: bytes in, messages out. Does no I/O.
#[derive(Default)]
pub struct Frames {
    bytes: Vec<u8>,
    /// Of `bytes`, taken.
    at: usize,
}

impl Frames {
    /// More of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.at > 0 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, if all of it is there. After an error the stream is of no use.
    ///
    /// # Errors
    /// When the next bytes are no message of this type.
    #[allow(clippy::should_implement_trait, reason = "an iterator has one type of item")]
    pub fn next<M: DeserializeOwned>(&mut self) -> Result<Option<M>, Garbage> {
        let rest = &self.bytes[self.at..];
        let Some((head, body)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*head) as usize;
        if len > LONGEST {
            return Err(Garbage(format!("a frame of {len} bytes is longer than any message")));
        }
        let Some(body) = body.get(..len) else { return Ok(None) };
        let (message, rest) = postcard::take_from_bytes(body)
            .map_err(|e| Garbage(format!("a frame that is no message: {e}")))?;
        if !rest.is_empty() {
            return Err(Garbage(format!("{} bytes after the end of a message", rest.len())));
        }
        self.at += 4 + len;
        Ok(Some(message))
    }

    /// Whether the stream ends here between two messages.
    pub fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }
}

/// Reads one message, waiting for it; `None` at the end of the stream.
///
/// # Errors
/// When reading fails, or what comes is no message.
pub fn read<M: DeserializeOwned>(from: &mut impl Read, frames: &mut Frames) -> io::Result<Option<M>> {
    let invalid = |e: Garbage| io::Error::new(io::ErrorKind::InvalidData, e);
    let mut chunk = [0; 1 << 14];
    loop {
        if let Some(message) = frames.next().map_err(invalid)? {
            return Ok(Some(message));
        }
        match from.read(&mut chunk) {
            Ok(0) if frames.is_empty() => return Ok(None),
            Ok(0) => return Err(invalid(Garbage("the stream ended within a message".into()))),
            Ok(n) => frames.push(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Looks for [`GREETING`] in what a stream has brought so far, skipping what a login shell may have said
/// before: how many bytes to skip, greeting included. `None`: not yet.
///
/// # Errors
/// When another version greets, or so much has come without a greeting that none will.
pub fn greeted(bytes: &[u8]) -> Result<Option<usize>, Garbage> {
    let name = b"fulmen job ";
    let mut line = 0;
    while let Some(end) = bytes[line..].iter().position(|b| *b == b'\n') {
        // A login that sets the title of a window ends no line.
        let this = &bytes[line..=line + end];
        if this.ends_with(GREETING.as_bytes()) {
            return Ok(Some(line + end + 1));
        }
        if let Some(at) = this.windows(name.len()).position(|part| part == name) {
            let this = &this[at..];
            let theirs = String::from_utf8_lossy(&this[..this.len() - 1]);
            let ours = GREETING.trim_end();
            return Err(Garbage(format!(
                "the other side is of another version: it speaks `{theirs}`, not `{ours}`"
            )));
        }
        line += end + 1;
    }
    match bytes.len() > 1 << 16 {
        true => Err(Garbage("64 KiB of other things came in the place of a greeting".into())),
        false => Ok(None),
    }
}

/// After a failure ranks have so long to end by themselves, then so long again after SIGTERM.
pub fn grace(bound: Duration) -> Duration {
    bound / 8
}

/// Launcher and agents count each other as lost after so long without a sign of life.
pub fn silence(bound: Duration) -> Duration {
    bound / 2
}

/// How often they give one.
pub fn beat(bound: Duration) -> Duration {
    (bound / 20).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn news() -> Vec<Up> {
        vec![
            Up { host: 3, news: News::Beat },
            Up { host: 0, news: News::Output { rank: 7, stream: Stream::Err, bytes: b"x\n".repeat(9000) } },
            Up { host: 1, news: News::Ended { rank: 7, how: How::Signal(9), asked: false, held: true } },
            Up { host: 1, news: News::Ready { pid: 12, notes: vec!["n".into()] } },
        ]
    }

    #[test]
    fn messages_come_as_they_went_whatever_the_pieces() {
        let mut stream = vec![];
        news().iter().for_each(|n| write(&mut stream, n).unwrap());
        for piece in [1, 3, 1000, stream.len()] {
            let mut frames = Frames::default();
            let mut got = vec![];
            for bytes in stream.chunks(piece) {
                frames.push(bytes);
                while let Some(message) = frames.next::<Up>().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, news());
            assert!(frames.is_empty());
        }
        let mut frames = Frames::default();
        let mut from = &stream[..stream.len() - 1];
        for _ in 0..3 {
            read::<Up>(&mut from, &mut frames).unwrap().unwrap();
        }
        assert!(read::<Up>(&mut from, &mut frames).unwrap_err().to_string().contains("within a message"));
    }

    #[test]
    fn a_secret_is_not_printed() {
        let text = format!("{:?}", Hidden([0x5a; 32]));
        assert_eq!(text, "Hidden(..)");
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_stored() {
        let mut frames = Frames::default();
        frames.push(&u32::MAX.to_le_bytes());
        assert!(frames.next::<Up>().unwrap_err().0.contains("longer than any message"));
        let mut trailing = frame(&Order::Beat).unwrap();
        trailing[0] += 1;
        trailing.push(0);
        let mut frames = Frames::default();
        frames.push(&trailing);
        assert!(frames.next::<Order>().unwrap_err().0.contains("1 bytes after the end"));
        assert!(frame(&Order::Input(vec![0; LONGEST + 1])).is_err());
    }

    #[test]
    fn greetings_are_found_behind_what_a_shell_says() {
        let text = format!("Welcome to host b\r\nquota: 3 %\n{GREETING}rest");
        assert_eq!(greeted(text.as_bytes()).unwrap(), Some(text.len() - 4));
        let title = format!("\u{1b}]0;host b\u{7}{GREETING}");
        assert_eq!(greeted(title.as_bytes()).unwrap(), Some(title.len()));
        assert!(greeted(b"$ fulmen job 999\n").unwrap_err().0.contains("another version"));
        assert_eq!(greeted(b"fulmen job").unwrap(), None);
        assert!(greeted(b"fulmen job 999\n").unwrap_err().0.contains("another version"));
        assert!(greeted(&[b'x'; 70000]).is_err());
    }

    #[test]
    fn fingerprints_tell_builds_apart() {
        let a = Fingerprint::of(&mut &b"123456789"[..]).unwrap();
        assert_eq!((a.len, a.crc), (9, 0xe306_9283));
        assert_ne!(a, Fingerprint::of(&mut &b"123456780"[..]).unwrap());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_a_message_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut frames = Frames::default();
            frames.push(&bytes);
            while let Ok(Some(_)) = frames.next::<Up>() {}
            let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
            framed.extend(&bytes);
            for kind in 0..4 {
                let mut frames = Frames::default();
                frames.push(&framed);
                let ended = match kind {
                    0 => frames.next::<Up>().map(|m| m.is_some()),
                    1 => frames.next::<Order>().map(|m| m.is_some()),
                    2 => frames.next::<FromRank>().map(|m| m.is_some()),
                    _ => frames.next::<ToRank>().map(|m| m.is_some()),
                };
                prop_assert!(!matches!(ended, Ok(false)), "a whole frame is something");
            }
            let _ = greeted(&bytes);
        }

        /// A message with some of its bytes changed.
        #[test]
        fn damage_is_noticed_or_harmless(at in 0usize..200, byte in any::<u8>(), which in 0usize..4) {
            let mut bytes = frame(&news()[which]).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            let mut frames = Frames::default();
            frames.push(&bytes);
            let _ = frames.next::<Up>();
        }
    }
}
