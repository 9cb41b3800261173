//! One rank's knowledge of the job: its peers' lanes, who has left, and how it failed. No I/O, no clock.

use std::collections::BTreeSet;
use std::time::Duration;

use super::frame::{CHUNK, Header, Kind};
use super::incoming::Place;
use super::peer::{End, Line, Peer};
use super::relay::Relay;
use super::routes::Routes;
use super::rx::Sink;
use super::tx::Frame;
use super::window::Window;
use super::words::{decode, encode};
use super::{Region, Wrong};
use crate::error::{Error, Loss, Result};
use crate::fabric::shared::area::Failure;
use crate::fabric::{Doing, Lane};

/// The job, as one rank sees it.
pub struct Job {
    me: usize,
    checked: bool,
    peers: Vec<Peer>,
    /// By rank; without connections where there are none.
    lines: Vec<Line>,
    relay: Relay,
    /// Whether some pair of ranks, perhaps not this one's, has others between.
    relayed: bool,
    /// Neighbours for whom something has come in that is to be passed on.
    touched: BTreeSet<usize>,
    ended: Option<Error>,
    leaving: bool,
    /// Calls of this rank.
    calls: u64,
    /// Signs that others work have come so often.
    works: u64,
    activity: String,
    /// What this rank waits for: from whom, and which put.
    waiting: Option<(usize, Lane, u64)>,
}

impl Job {
    /// Rank `me` of these; this rank's own entry does not count.
    pub fn new(me: usize, ends: Vec<End>, routes: &Routes, checked: bool) -> Self {
        let connections: Vec<usize> = ends.iter().map(|end| end.connections).collect();
        let mut lines: Vec<Line> = connections.iter().map(|n| Line::new(*n)).collect();
        let peer = |(rank, end)| Peer::new(me, rank, end, routes.between(me, rank), &connections);
        let peers: Vec<Peer> = ends.into_iter().enumerate().map(peer).collect();
        for (rank, peer) in peers.iter().enumerate().filter(|(rank, _)| *rank != me) {
            lines[peer.next].ends.push(rank);
        }
        let relay = Relay::new(routes.through(me), |rank| connections[rank].max(1));
        Job {
            me,
            checked,
            peers,
            lines,
            relay,
            relayed: !routes.is_direct(),
            touched: BTreeSet::new(),
            ended: None,
            leaving: false,
            calls: 0,
            works: 0,
            activity: String::new(),
            waiting: None,
        }
    }

    pub fn size(&self) -> usize {
        self.peers.len()
    }

    pub fn host(&self, rank: usize) -> &str {
        &self.peers[rank].end.host
    }

    pub fn link(&self, rank: usize) -> &str {
        &self.peers[rank].end.link
    }

    /// Why `rank`, though in a network of this one's, is not reached directly; `None`: it is, or nobody expects it to be.
    pub fn shut_off(&self, rank: usize) -> Option<&str> {
        self.peers[rank].end.shut_off.as_deref()
    }

    /// What is for `rank` goes over another link, which is named where it is lost.
    pub fn carries_no_data(&mut self, rank: usize, data: String) {
        self.peers[rank].end.data = Some(data);
    }

    /// How many connections lie between this rank and another.
    pub fn hops(&self, rank: usize) -> usize {
        self.peers[rank].between.len() + 1
    }

    /// The neighbour that what is for `rank` goes to.
    pub fn next_hop(&self, rank: usize) -> usize {
        self.peers[rank].next
    }

    /// Whether some ranks reach each other only through others.
    pub fn is_relayed(&self) -> bool {
        self.relayed
    }

    /// Whether this rank passes frames on.
    pub fn is_relay(&self) -> bool {
        self.relay.is_needed()
    }

    /// The most bytes that this rank holds for any pair of others.
    #[cfg(test)]
    pub fn held(&self) -> u64 {
        self.relay.held()
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

    /// Whether someone is to be told of arms over this connection to a neighbour.
    pub fn has_untold(&self, neighbour: usize, connection: usize) -> bool {
        let peers = self.lines[neighbour].ends.iter().map(|end| &self.peers[*end]);
        peers.filter(|peer| peer.main() == connection).any(|peer| peer.inn.untold() > 0)
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

    /// Takes the put that the next wait is for, if it is there: its length.
    pub fn take_filled(&mut self, lane: Lane, from: usize) -> Option<usize> {
        let filled = self.filled(lane, from)?;
        self.take(lane, from);
        Some(filled)
    }

    /// As [`Outgoing::is_done`].
    pub fn is_done(&self, lane: Lane, to: usize, number: u64) -> Option<bool> {
        self.peers[to].out.is_done(lane, number)
    }

    pub fn written(&mut self, to: u32, lane: Lane, number: u64) {
        self.peers[to as usize].out.written(lane, number);
    }

    /// The next frame for a connection to a neighbour.
    pub fn next(&mut self, to: usize, connection: usize) -> Option<Frame> {
        let urgent = self.lines[to].urgent[connection].pop_front();
        if urgent.is_some() || self.ended.is_some() {
            return urgent;
        }
        self.credit(to, connection)
            .or_else(|| self.relay.quick(to, connection))
            .or_else(|| self.in_turn(to, connection))
    }

    /// Tells of the next arm.
    fn credit(&mut self, to: usize, connection: usize) -> Option<Frame> {
        for &end in &self.lines[to].ends {
            let peer = &mut self.peers[end];
            let full = peer.window.as_ref().is_some_and(|window| window.most().is_none());
            if full || peer.has_left() || peer.main() != connection {
                continue;
            }
            if let Some(header) = peer.inn.credit() {
                if let Some(window) = &mut peer.window {
                    window.sends(0);
                }
                return Some(Frame::own(header, Vec::new()));
            }
        }
        None
    }

    /// A piece of a put to one of those that are reached over this connection, or of what others send over it.
    fn in_turn(&mut self, to: usize, connection: usize) -> Option<Frame> {
        let parties = self.lines[to].ends.len() + 1;
        for turn in 1..=parties {
            let at = (self.lines[to].served + turn) % parties;
            let frame = match self.lines[to].ends.get(at) {
                Some(&end) => self.piece(end, connection),
                None => self.relay.bulk(to, connection),
            };
            if frame.is_some() {
                self.lines[to].served = at;
                return frame;
            }
        }
        None
    }

    fn piece(&mut self, end: usize, connection: usize) -> Option<Frame> {
        let peer = &mut self.peers[end];
        if peer.has_left() || peer.stream.is_some_and(|stream| stream != connection) {
            return None;
        }
        let most = peer.window.as_ref().map_or(Some(CHUNK), Window::most)?;
        match peer.out.piece(self.me as u32, end as u32, most) {
            Ok(None) => None,
            Ok(Some(piece)) => {
                if let Some(window) = &mut peer.window {
                    window.sends(piece.region.len);
                }
                Some(Frame::put(piece, self.checked))
            }
            Err(wrong) => {
                self.wrong(end, wrong);
                let next = self.next_hop(end);
                self.lines[next].urgent[connection].pop_front()
            }
        }
    }

    /// Something for `rank` that goes before everything else.
    fn say(&mut self, rank: usize, connection: usize, header: Header) {
        let next = self.next_hop(rank);
        self.lines[next].urgent[connection].push_back(Frame::own(header, Vec::new()));
    }

    /// This rank calls its fabric. Leaving is no work.
    pub fn called(&mut self) {
        self.calls += u64::from(!self.leaving);
    }

    /// Shows a neighbour that this rank lives, and whether it works.
    pub fn beat(&mut self, to: usize, connection: usize) {
        let beat = Header::empty(Kind::Beat, self.me as u32, to as u32);
        self.say(to, connection, Header { number: self.calls, ..beat });
    }

    /// A neighbour for whom something has come in that is to be passed on; once.
    pub fn touched(&mut self) -> Option<usize> {
        self.touched.pop_first()
    }

    /// Whether there is one.
    pub fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    // ---- leaving ----

    /// Whether everything put has been written, but to those who have left.
    pub fn is_drained(&mut self) -> bool {
        for peer in self.peers.iter_mut().filter(|peer| peer.has_left()) {
            peer.out.forget();
        }
        self.peers.iter().all(|peer| peer.out.is_empty() && peer.inn.untold() == 0 || peer.has_left())
    }

    /// Tells everyone that nothing more will be put. All of it must have been written.
    pub fn leave(&mut self) {
        self.leaving = true;
        for to in self.others() {
            let left = Header::empty(Kind::Left, self.me as u32, to as u32);
            match self.peers[to].stream {
                Some(stream) => self.say(to, stream, left),
                None => (0..self.peers[to].end.connections).for_each(|stream| self.say(to, stream, left)),
            }
        }
    }

    /// Whether `rank` has left.
    pub fn is_left(&self, rank: usize) -> bool {
        self.peers[rank].has_left()
    }

    /// Whether the connections to a neighbour may end now. Where ranks pass frames on, they do not before
    /// everyone who is reached over them has left, and so has this rank.
    pub fn may_go(&self, neighbour: usize) -> bool {
        let peer = &self.peers[neighbour];
        if self.ended.is_some() || !self.relayed {
            return self.ended.is_some() || peer.has_left() || self.leaving && peer.farewell;
        }
        let parted = |end: &usize| self.peers[*end].has_left() && self.peers[*end].farewell;
        self.lines[neighbour].ends.iter().all(parted) && self.relay.is_over_with(neighbour)
    }

    /// Whether `rank` has heard that this one leaves.
    pub fn has_farewell(&self, rank: usize) -> bool {
        self.peers[rank].farewell
    }

    /// Where ranks pass frames on: whether everyone has left, and nothing is left to be passed on.
    pub fn is_over(&self) -> bool {
        self.relay.is_over() && self.others().all(|rank| self.is_left(rank) && self.has_farewell(rank))
    }

    /// Changes while others work: data comes, or a neighbour has called its fabric.
    pub fn works(&self) -> u64 {
        self.works
    }

    /// A neighbour that has not left.
    pub fn straggler(&self) -> Option<usize> {
        self.others().find(|rank| self.peers[*rank].between.is_empty() && !self.is_left(*rank))
    }

    // ---- failure ----

    pub fn set_activity(&mut self, what: &str) {
        what.clone_into(&mut self.activity);
    }

    /// What this rank waits for, for the message of a failure.
    pub fn set_waiting(&mut self, what: Option<(usize, Lane, u64)>) {
        self.waiting = what;
    }

    /// What this rank is doing.
    pub fn doing(&self) -> Doing {
        let put =
            |(peer, lane, number): (usize, Lane, u64)| (peer, format!("put {number} on the {lane} lane"));
        Doing { activity: self.activity.clone(), waits_for: self.waiting.map(put) }
    }

    pub fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    fn lost_error(&self, rank: usize, loss: Loss, after: Duration) -> Error {
        let mut waiting_for = self.activity.clone();
        if let Some((peer, lane, number)) = self.waiting {
            let put = format!("put {number} on the {lane} lane");
            let sep = if waiting_for.is_empty() { "" } else { ", " };
            if peer == rank {
                waiting_for += &format!("{sep}{put}");
            } else if self.peers[peer].between.contains(&rank) {
                let host = self.host(peer);
                waiting_for +=
                    &format!("{sep}{put} between this rank and rank {peer} ({host}), which goes through it");
            }
        }
        let End { host, link, data, .. } = self.peers[rank].end.clone();
        let link = match (data, loss) {
            (Some(data), Loss::Broken(_)) => format!("{data}, watched over {link}"),
            // Of a process of this host only its own silence is left to explain it.
            (Some(data), Loss::Silent) if data != "shm" => format!("{data}, watched over {link}"),
            (Some(data), _) => data,
            (None, _) => link,
        };
        let by_host = self.host(self.me).into();
        Error::PeerLost { rank, host, link: link.into(), loss, after, waiting_for, by: self.me, by_host }
    }

    /// The job fails: this rank gets `error`, the others hear of `failure`. Returns what this rank gets, which
    /// is another error if it was not the first.
    fn end(&mut self, failure: &Failure, error: Error) -> Error {
        if let Some(first) = &self.ended {
            return first.clone();
        }
        self.ended = Some(error.clone());
        let (bytes, number) = encode(failure);
        // Neighbours tell theirs.
        for (to, line) in self.lines.iter_mut().enumerate() {
            let header = Header { number, ..Header::empty(Kind::Failed, self.me as u32, to as u32) };
            // On each connection, for each is closed behind it.
            for urgent in &mut line.urgent {
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
                let End { host, link, .. } = self.peers[rank].end.clone();
                Error::Corrupt { what, rank, host, link: link.into(), by: self.me }
            }
        };
        self.fail(error)
    }

    /// Takes what comes on a connection from a neighbour.
    pub fn arrivals(&mut self, neighbour: usize) -> Arrivals<'_> {
        Arrivals { job: self, neighbour }
    }

    /// A frame for this rank has come from `neighbour`: whether it comes the right way.
    fn expects(&self, header: &Header, neighbour: usize) -> bool {
        let from = header.from as usize;
        let own = matches!(header.kind, Kind::Beat | Kind::Failed);
        match self.peers.get(from) {
            _ if from == self.me => false,
            Some(peer) if peer.window.is_some() => !own && peer.next == neighbour,
            Some(_) => header.kind != Kind::Room && from == neighbour,
            None => false,
        }
    }
}

/// Takes frames that come on a connection from a neighbour.
pub struct Arrivals<'a> {
    job: &'a mut Job,
    neighbour: usize,
}

impl Sink for Arrivals<'_> {
    fn accept(&mut self, header: &Header) -> std::result::Result<Place, Wrong> {
        let job = &mut *self.job;
        if header.to as usize != job.me {
            job.relay.accept(header, self.neighbour)?;
        } else if !job.expects(header, self.neighbour) {
            return Err(Wrong::Corrupt(format!(
                "a frame of rank {} for rank {}, which does not pass here,",
                header.from, header.to
            )));
        } else if header.kind == Kind::Put {
            return job.peers[header.from as usize].inn.accept(header);
        }
        Ok(Place::Kept(vec![0; header.len as usize]))
    }

    fn landed(&mut self, header: &Header, place: Place) -> std::result::Result<(), Wrong> {
        let (job, from) = (&mut *self.job, header.from as usize);
        job.works += u64::from(header.kind != Kind::Beat);
        if header.to as usize != job.me {
            if let Place::Kept(bytes) = place {
                job.touched.extend(job.relay.landed(header, bytes));
            }
            return Ok(());
        }
        let (me, size) = (job.me as u32, job.size());
        let peer = &mut job.peers[from];
        let main = peer.main();
        match (header.kind, place) {
            (Kind::Put, place) => peer.inn.landed(header, place),
            (Kind::Credit, _) => peer.out.credit(header.lane, header.number, header.total)?,
            (Kind::Beat, _) => {
                let before = std::mem::replace(&mut job.lines[from].calls, header.number);
                job.works += u64::from(before != header.number);
            }
            (Kind::Room, _) => {
                if let Some(window) = &mut peer.window {
                    window.acknowledge(header.number)?;
                }
            }
            (Kind::Left, _) => {
                if peer.has_left() {
                    return Err(Wrong::Corrupt("a second farewell".into()));
                }
                peer.lefts += 1;
                if peer.has_left() {
                    job.say(from, main, Header::empty(Kind::Farewell, me, header.from));
                }
            }
            (Kind::Farewell, _) => peer.farewell = true,
            (Kind::Failed, Place::Kept(bytes)) => match decode(&bytes, header.number, size) {
                Some(failure) => {
                    job.abort(&failure);
                }
                None => return Err(Wrong::Corrupt("a garbled farewell".into())),
            },
            (Kind::Failed, Place::Armed(_)) => {}
        }
        if matches!(header.kind, Kind::Put | Kind::Credit)
            && let Some(window) = &mut job.peers[from].window
            && let Some(taken) = window.takes(header.len as usize)
        {
            let room = Header { number: taken, ..Header::empty(Kind::Room, me, header.from) };
            job.say(from, main, room);
        }
        Ok(())
    }
}
