//! One rank's knowledge of the job: its peers' lanes, who has left, and how it failed. No I/O, no clock.

use std::collections::VecDeque;
use std::time::Duration;

use super::frame::{Header, Kind, TEXT};
use super::incoming::{Incoming, Place};
use super::outgoing::Outgoing;
use super::rx::Sink;
use super::tx::Frame;
use super::{Region, Wrong};
use crate::error::{Error, Loss, Result};
use crate::fabric::Lane;
use crate::fabric::shared::area::Failure;

/// Another rank.
struct Peer {
    host: String,
    /// Its link, for messages.
    link: String,
    out: Outgoing,
    inn: Incoming,
    /// Frames that go before everything else, by connection.
    urgent: Vec<VecDeque<Frame>>,
    /// On how many connections it has said that it leaves.
    lefts: usize,
    /// It has heard that this rank leaves.
    farewell: bool,
}

/// The job, as one rank sees it.
pub struct Job {
    me: usize,
    connections: usize,
    checked: bool,
    peers: Vec<Peer>,
    ended: Option<Error>,
    leaving: bool,
    activity: String,
    /// What this rank waits for: from whom, and which put.
    waiting: Option<(usize, Lane, u64)>,
}

/// What others are told of a failure, and its exit code.
fn encode(failure: &Failure) -> (Vec<u8>, u64) {
    let (kind, code, rank, text) = match failure {
        Failure::Aborted { by, reason, code } => (0, *code, *by, reason.as_str()),
        Failure::Gone { rank } => (1, 0, *rank, ""),
        Failure::Interrupted => (2, 0, 0, ""),
    };
    let mut len = text.len().min(TEXT - 2);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    let mut bytes = vec![kind, code];
    bytes.extend_from_slice(&text.as_bytes()[..len]);
    (bytes, rank as u64)
}

fn decode(bytes: &[u8], rank: u64, size: usize) -> Option<Failure> {
    let rank = usize::try_from(rank).ok().filter(|rank| *rank < size)?;
    let (&[kind, code], text) = bytes.split_first_chunk::<2>()?;
    match kind {
        0 => Some(Failure::Aborted { by: rank, reason: String::from_utf8_lossy(text).into_owned(), code }),
        1 => Some(Failure::Gone { rank }),
        2 => Some(Failure::Interrupted),
        _ => None,
    }
}

impl Job {
    /// Rank `me` among ranks with these hosts and links, with so many connections to each.
    pub fn new(me: usize, names: Vec<(String, String)>, connections: usize, checked: bool) -> Self {
        let peer = |(rank, (host, link)): (usize, (String, String))| Peer {
            host,
            link,
            out: Outgoing::default(),
            inn: Incoming::new(rank as u32, me as u32),
            urgent: (0..connections).map(|_| VecDeque::new()).collect(),
            lefts: 0,
            farewell: false,
        };
        let peers = names.into_iter().enumerate().map(peer).collect();
        let (ended, leaving, activity, waiting) = (None, false, String::new(), None);
        Job { me, connections, checked, peers, ended, leaving, activity, waiting }
    }

    pub fn size(&self) -> usize {
        self.peers.len()
    }

    pub fn host(&self, rank: usize) -> &str {
        &self.peers[rank].host
    }

    pub fn link(&self, rank: usize) -> &str {
        &self.peers[rank].link
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.peers.len()).filter(move |rank| *rank != me)
    }

    // ---- puts and arms ----

    pub fn put(&mut self, lane: Lane, to: usize, region: Region) -> u64 {
        self.peers[to].out.put(lane, region)
    }

    pub fn arm(&mut self, lane: Lane, from: usize, region: Region) -> Result<u64> {
        self.peers[from].inn.arm(lane, region).map_err(|wrong| self.wrong(from, wrong))
    }

    /// Of how many arms `peer` has not been told.
    pub fn untold(&self, peer: usize) -> usize {
        self.peers[peer].inn.untold()
    }

    /// The next arm of `from` to wait for, and the next to make.
    pub fn position(&self, lane: Lane, from: usize) -> (u64, u64) {
        self.peers[from].inn.position(lane)
    }

    pub fn filled(&self, lane: Lane, from: usize) -> Option<usize> {
        self.peers[from].inn.filled(lane)
    }

    pub fn take(&mut self, lane: Lane, from: usize) {
        self.peers[from].inn.take(lane);
    }

    /// As [`Outgoing::is_done`].
    pub fn is_done(&self, lane: Lane, to: usize, number: u64) -> Option<bool> {
        self.peers[to].out.is_done(lane, number)
    }

    pub fn written(&mut self, to: u32, lane: Lane, number: u64) {
        self.peers[to as usize].out.written(lane, number);
    }

    /// The next frame for a connection to `to`.
    pub fn next(&mut self, to: usize, connection: usize) -> Option<Frame> {
        let peer = &mut self.peers[to];
        if let Some(frame) = peer.urgent[connection].pop_front() {
            return Some(frame);
        }
        if self.ended.is_some() || peer.lefts == self.connections {
            return None;
        }
        if connection == 0
            && let Some(header) = peer.inn.credit()
        {
            return Some(Frame::own(header, Vec::new()));
        }
        match peer.out.piece(self.me as u32, to as u32) {
            Ok(piece) => piece.map(|piece| Frame::put(piece, self.checked)),
            Err(wrong) => {
                self.wrong(to, wrong);
                self.peers[to].urgent[connection].pop_front()
            }
        }
    }

    /// Shows `to` that this rank lives.
    pub fn beat(&mut self, to: usize, connection: usize) {
        let frame = Frame::own(Header::empty(Kind::Beat, self.me as u32, to as u32), Vec::new());
        self.peers[to].urgent[connection].push_back(frame);
    }

    // ---- leaving ----

    /// Whether everything put has been written, but to those who have left.
    pub fn is_drained(&mut self) -> bool {
        for peer in &mut self.peers {
            if peer.lefts == self.connections {
                peer.out.forget();
            }
        }
        self.peers.iter().all(|peer| peer.out.is_empty() && peer.inn.untold() == 0 || self.has_left(peer))
    }

    fn has_left(&self, peer: &Peer) -> bool {
        peer.lefts == self.connections
    }

    /// Tells everyone that nothing more will be put. All of it must have been written.
    pub fn leave(&mut self) {
        self.leaving = true;
        for to in self.others() {
            for connection in 0..self.connections {
                let frame = Frame::own(Header::empty(Kind::Left, self.me as u32, to as u32), Vec::new());
                self.peers[to].urgent[connection].push_back(frame);
            }
        }
    }

    /// Whether `rank` has left.
    pub fn is_left(&self, rank: usize) -> bool {
        self.has_left(&self.peers[rank])
    }

    /// Whether a connection to `rank` may end now.
    pub fn may_go(&self, rank: usize) -> bool {
        self.ended.is_some() || self.is_left(rank) || self.leaving && self.peers[rank].farewell
    }

    /// Whether `rank` has heard that this one leaves.
    pub fn has_farewell(&self, rank: usize) -> bool {
        self.peers[rank].farewell
    }

    // ---- failure ----

    pub fn set_activity(&mut self, what: &str) {
        what.clone_into(&mut self.activity);
    }

    /// What this rank waits for, for the message of a failure.
    pub fn set_waiting(&mut self, what: Option<(usize, Lane, u64)>) {
        self.waiting = what;
    }

    pub fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    fn lost_error(&self, rank: usize, loss: Loss, after: Duration) -> Error {
        let mut waiting_for = self.activity.clone();
        if let Some((_, lane, number)) = self.waiting.filter(|(peer, ..)| *peer == rank) {
            let sep = if waiting_for.is_empty() { "" } else { ", " };
            waiting_for += &format!("{sep}put {number} on the {lane} lane");
        }
        let Peer { host, link, .. } = &self.peers[rank];
        let (host, link) = (host.clone(), link.clone());
        Error::PeerLost { rank, host, link, loss, after, waiting_for, by: self.me }
    }

    /// The job fails: this rank gets `error`, the others hear of `failure`. Returns what this rank gets, which
    /// is another error if it was not the first.
    fn end(&mut self, failure: &Failure, error: Error) -> Error {
        if let Some(first) = &self.ended {
            return first.clone();
        }
        self.ended = Some(error.clone());
        let (bytes, number) = encode(failure);
        for to in self.others() {
            let header = Header { number, ..Header::empty(Kind::Failed, self.me as u32, to as u32) };
            // On each connection, for each is closed behind it.
            for urgent in &mut self.peers[to].urgent {
                urgent.clear();
                urgent.push_back(Frame::own(header, bytes.clone()));
            }
        }
        error
    }

    /// This rank has met an error.
    pub fn fail(&mut self, error: Error) -> Error {
        self.end(&Failure::by(self.me, &error), error)
    }

    /// This rank ends the job, and sees its end as the others do.
    pub fn abort(&mut self, failure: &Failure) -> Error {
        let error = self.error_of(failure);
        self.end(failure, error)
    }

    fn error_of(&self, failure: &Failure) -> Error {
        match failure {
            Failure::Aborted { by, reason, .. } => Error::Aborted { by: *by, reason: reason.clone() },
            Failure::Gone { rank } => self.lost_error(*rank, Loss::Gone, Duration::ZERO),
            Failure::Interrupted => Error::Interrupted,
        }
    }

    /// `rank` is lost.
    pub fn lose(&mut self, rank: usize, loss: Loss, after: Duration) -> Error {
        let error = self.lost_error(rank, loss, after);
        self.fail(error)
    }

    /// The connection to `rank` has ended: it is gone, for all.
    pub fn gone(&mut self, rank: usize) {
        self.abort(&Failure::Gone { rank });
    }

    /// Something that came from `rank`, or was to go to it, is wrong.
    pub fn wrong(&mut self, rank: usize, wrong: Wrong) -> Error {
        let error = match wrong {
            Wrong::Program(what) => Error::Internal(what),
            Wrong::Corrupt(what) => {
                let Peer { host, link, .. } = &self.peers[rank];
                Error::Corrupt { what, rank, host: host.clone(), link: link.clone(), by: self.me }
            }
        };
        self.fail(error)
    }

    /// Takes what comes on a connection from `rank`.
    pub fn arrivals(&mut self, rank: usize) -> Arrivals<'_> {
        Arrivals { job: self, rank }
    }
}

/// Takes frames that come on a connection from one rank.
pub struct Arrivals<'a> {
    job: &'a mut Job,
    rank: usize,
}

impl Sink for Arrivals<'_> {
    fn accept(&mut self, header: &Header) -> std::result::Result<Place, Wrong> {
        if (header.from as usize, header.to as usize) != (self.rank, self.job.me) {
            return Err(Wrong::Corrupt(format!(
                "a frame of rank {} for rank {}, which does not pass here,",
                header.from, header.to
            )));
        }
        match header.kind {
            Kind::Put => self.job.peers[self.rank].inn.accept(header),
            _ => Ok(Place::Kept(vec![0; header.len as usize])),
        }
    }

    fn landed(&mut self, header: &Header, place: Place) -> std::result::Result<(), Wrong> {
        let (me, connections, size) = (self.job.me as u32, self.job.connections, self.job.size());
        let peer = &mut self.job.peers[self.rank];
        match (header.kind, place) {
            (Kind::Put, place) => peer.inn.landed(header, place),
            (Kind::Credit, _) => peer.out.credit(header.lane, header.number, header.total)?,
            (Kind::Beat, _) => {}
            (Kind::Left, _) => {
                peer.lefts += 1;
                if peer.lefts > connections {
                    return Err(Wrong::Corrupt("a second farewell".into()));
                }
                if peer.lefts == connections {
                    let header = Header::empty(Kind::Farewell, me, header.from);
                    peer.urgent[0].push_back(Frame::own(header, Vec::new()));
                }
            }
            (Kind::Farewell, _) => peer.farewell = true,
            (Kind::Failed, Place::Kept(bytes)) => match decode(&bytes, header.number, size) {
                Some(failure) => {
                    self.job.abort(&failure);
                }
                None => return Err(Wrong::Corrupt("a garbled farewell".into())),
            },
            (Kind::Failed, Place::Armed(_)) => {}
        }
        Ok(())
    }
}
