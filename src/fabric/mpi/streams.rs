//! What is under way, by peer and lane: arms and puts as requests of MPI, in one of two ways.
//!
//! * [`Way::Messages`]: an arm is a posted receive into the range, a put a send from the range, the lane the tag. MPI
//!   matches both in the order made, which is the contract's order.
//! * [`Way::Window`]: an arm sends a credit (offset and length) and posts a receive for a length; a put takes its credit,
//!   writes with `MPI_Put` straight to the offset, flushes, and sends the length.

use std::collections::VecDeque;
use std::sync::Arc;

use super::raw::{Comm, Progress, Request, Window};
use crate::error::Result;
use crate::fabric::{Lane, Memory};

/// Tags: the lane's number for what arrives, this more for credits.
const CREDIT: i32 = Lane::COUNT as i32;
/// The tag of a rank's last message.
const FAREWELL: i32 = 2 * Lane::COUNT as i32;

/// How the bytes travel.
pub enum Way {
    /// Send and receive.
    Messages,
    /// Put, flush, notify.
    Window(Arc<Window>),
}

/// A range of this rank's memory, and what keeps it.
pub struct Piece {
    memory: Arc<Memory>,
    start: usize,
    len: usize,
}

impl Piece {
    /// `range` must lie inside `memory`.
    pub fn new(memory: &Arc<Memory>, range: &std::ops::Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= memory.len());
        Piece { memory: Arc::clone(memory), start: range.start, len: range.len() }
    }

    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: inside the memory, as checked when it was made.
        unsafe { self.memory.as_ptr().add(self.start) }
    }
}

/// A message of words, kept in place while MPI may read or write it.
struct Words<const N: usize> {
    words: Box<[u64; N]>,
    request: Request,
}

impl<const N: usize> Words<N> {
    fn send(comm: &Comm, words: [u64; N], to: usize, tag: i32) -> Result<Self> {
        let words = Box::new(words);
        // SAFETY: the words stay in their box, unchanged, as long as this lives, which is until the request is done.
        let request = unsafe { comm.isend(words.as_ptr().cast(), 8 * N, to, tag)? };
        Ok(Words { words, request })
    }

    fn receive(comm: &Comm, from: Option<usize>, tag: i32) -> Result<Self> {
        let mut words = Box::new([0; N]);
        // SAFETY: the words stay in their box, untouched, until the request is done.
        let request = unsafe { comm.irecv(words.as_mut_ptr().cast(), 8 * N, from, tag)? };
        Ok(Words { words, request })
    }
}

enum Arming {
    /// A receive into the range.
    Range(Request),
    /// The credit on its way (until it has left), and the length that is to come.
    Length(Option<Words<2>>, Words<1>),
}

struct Armed {
    piece: Piece,
    by: Arming,
}

/// The receiving side of one stream.
#[derive(Default)]
struct Incoming {
    /// Number of the next arm and of the next wait.
    next: u64,
    waited: u64,
    /// `waited..next`.
    armed: VecDeque<Armed>,
    /// Credits that have not left yet although their arm has been waited for.
    credits: Vec<Words<2>>,
}

enum Sending {
    /// The range is being sent.
    Range(Request),
    /// The target has not armed yet.
    Credit(Words<2>),
    /// The bytes are there; their length is on its way.
    Length(Words<1>),
    Done,
}

struct Sent {
    piece: Piece,
    by: Sending,
}

/// The sending side of one stream.
#[derive(Default)]
struct Outgoing {
    /// Number of the next put.
    next: u64,
    /// Up to `next`; those before are done.
    sent: VecDeque<Sent>,
}

/// What this rank has to do with one other, by lane.
#[derive(Default)]
struct Peer {
    outgoing: [Outgoing; Lane::COUNT],
    incoming: [Incoming; Lane::COUNT],
}

/// What has come of an armed range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// Nothing yet.
    Pending,
    /// So many bytes.
    Filled(usize),
    /// So many bytes were sent, which is more than the range that was armed has (the second number).
    TooLong(usize, usize),
}

/// A put that does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooLong {
    pub to: usize,
    pub lane: Lane,
    pub seq: u64,
    pub len: usize,
    pub armed: usize,
}

/// How many puts and arms a rank has made, to and for one other, by lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    pub puts: [u64; Lane::COUNT],
    pub arms: [u64; Lane::COUNT],
}

/// A rank's last message: who it is, and what it has made to and for the receiver.
pub struct Farewell(Words<FAREWELL_WORDS>);

const FAREWELL_WORDS: usize = 1 + 2 * Lane::COUNT;

impl Farewell {
    /// Expects one, from anyone.
    pub fn expect(comm: &Comm) -> Result<Self> {
        Words::receive(comm, None, FAREWELL).map(Farewell)
    }

    /// Takes leave of a rank.
    pub fn send(comm: &Comm, to: usize, made: &Counts) -> Result<Self> {
        let mut words = [0; FAREWELL_WORDS];
        words[0] = comm.rank() as u64;
        words[1..=Lane::COUNT].copy_from_slice(&made.puts);
        words[1 + Lane::COUNT..].copy_from_slice(&made.arms);
        Words::send(comm, words, to, FAREWELL).map(Farewell)
    }

    /// Whether it has come, or has left; moves whatever MPI has under way.
    pub fn is_done(&mut self) -> Result<bool> {
        Ok(self.0.request.test()? != Progress::Pending)
    }

    /// Drops those that have left.
    pub fn forget_left(farewells: &mut Vec<Self>) -> Result<()> {
        forget_done(farewells, Self::is_done)
    }

    /// Gives up expecting one. Whether that is done.
    pub fn give_up(&mut self) -> Result<bool> {
        self.0.request.cancel();
        self.is_done()
    }

    /// Who left, and what it has made. For one that has come.
    pub fn read(&self) -> (usize, Counts) {
        let words = &self.0.words;
        let of = |at: usize| std::array::from_fn(|lane| words[at + lane]);
        (words[0] as usize, Counts { puts: of(1), arms: of(1 + Lane::COUNT) })
    }
}

/// All streams of a rank.
pub struct Streams {
    comm: Arc<Comm>,
    way: Way,
    /// Made when first used, for most ranks of a large job never meet.
    peers: Vec<Option<Box<Peer>>>,
    /// Puts that wait for a credit or for their length to leave; only they need to be moved by us.
    moving: usize,
}

impl Streams {
    pub fn new(comm: Arc<Comm>, way: Way) -> Self {
        let mut peers = vec![];
        peers.resize_with(comm.size(), || None);
        Streams { comm, way, peers, moving: 0 }
    }

    fn incoming(&mut self, from: usize, lane: Lane) -> &mut Incoming {
        &mut self.peers[from].get_or_insert_default().incoming[lane.0 as usize]
    }

    fn outgoing(&mut self, to: usize, lane: Lane) -> &mut Outgoing {
        &mut self.peers[to].get_or_insert_default().outgoing[lane.0 as usize]
    }

    /// Lets `from` fill the piece; returns the arm's number.
    pub fn arm(&mut self, lane: Lane, from: usize, piece: Piece) -> Result<u64> {
        let tag = i32::from(lane.0);
        let by = match &self.way {
            Way::Messages => {
                // SAFETY: the piece keeps its memory until the request is done, and the ledger of its buffer (or the
                // contract) keeps everyone from it.
                let request = unsafe { self.comm.irecv(piece.as_ptr(), piece.len, Some(from), tag)? };
                Arming::Range(request)
            }
            Way::Window(window) => {
                let length = Words::receive(&self.comm, Some(from), tag)?;
                let at = window.offset(piece.as_ptr());
                let credit = Words::send(&self.comm, [at, piece.len as u64], from, CREDIT + tag)?;
                Arming::Length(Some(credit), length)
            }
        };
        let incoming = self.incoming(from, lane);
        incoming.armed.push_back(Armed { piece, by });
        incoming.next += 1;
        Ok(incoming.next - 1)
    }

    /// (waited for, armed) so far.
    pub fn arms(&mut self, from: usize, lane: Lane) -> (u64, u64) {
        let incoming = self.incoming(from, lane);
        (incoming.waited, incoming.next)
    }

    /// What has come of the oldest arm that was not waited for. When it was filled, the next one is the oldest.
    pub fn arrival(&mut self, lane: Lane, from: usize) -> Result<Arrival> {
        let window = match &self.way {
            Way::Messages => None,
            Way::Window(window) => Some(Arc::clone(window)),
        };
        let incoming = self.incoming(from, lane);
        let Some(oldest) = incoming.armed.front_mut() else { return Ok(Arrival::Pending) };
        let armed = oldest.piece.len;
        let bytes = match &mut oldest.by {
            Arming::Range(request) => match request.test()? {
                Progress::Pending => return Ok(Arrival::Pending),
                Progress::Done(bytes) => bytes,
                Progress::TooLong(bytes) => {
                    incoming.armed.pop_front();
                    return Ok(Arrival::TooLong(bytes, armed));
                }
            },
            Arming::Length(credit, length) => {
                if length.request.test()? == Progress::Pending {
                    return Ok(Arrival::Pending);
                }
                if let Some(window) = window {
                    window.sync();
                }
                let bytes = length.words[0] as usize;
                incoming.credits.extend(credit.take());
                bytes
            }
        };
        forget_done(&mut incoming.credits, |credit| Ok(credit.request.test()? != Progress::Pending))?;
        incoming.armed.pop_front();
        incoming.waited += 1;
        Ok(Arrival::Filled(bytes))
    }

    /// Puts the piece into the next range that `to` arms on `lane`; returns the put's number.
    pub fn put(&mut self, lane: Lane, to: usize, piece: Piece) -> Result<u64> {
        let tag = i32::from(lane.0);
        let by = match &self.way {
            Way::Messages => {
                // SAFETY: the piece keeps its memory until the request is done, and the ledger of its buffer (or the
                // contract) keeps everyone from writing to it.
                let request = unsafe { self.comm.isend(piece.as_ptr(), piece.len, to, tag)? };
                Sending::Range(request)
            }
            Way::Window(_) => {
                self.moving += 1;
                Sending::Credit(Words::receive(&self.comm, Some(to), CREDIT + tag)?)
            }
        };
        let out = self.outgoing(to, lane);
        out.sent.push_back(Sent { piece, by });
        out.next += 1;
        Ok(out.next - 1)
    }

    /// How many puts were made.
    pub fn puts(&mut self, to: usize, lane: Lane) -> u64 {
        self.outgoing(to, lane).next
    }

    /// By lane, how many puts and arms were made to and for a rank.
    pub fn counts(&self, peer: usize) -> Counts {
        let of = |count: fn(&Peer, usize) -> u64| {
            std::array::from_fn(|lane| self.peers[peer].as_ref().map_or(0, |peer| count(peer, lane)))
        };
        Counts {
            puts: of(|peer, lane| peer.outgoing[lane].next),
            arms: of(|peer, lane| peer.incoming[lane].next),
        }
    }

    /// Whether the source of put `seq` is free again.
    pub fn is_done(&mut self, to: usize, lane: Lane, seq: u64) -> Result<bool> {
        let out = self.outgoing(to, lane);
        let first = out.next - out.sent.len() as u64;
        let Some(at) = seq.checked_sub(first) else { return Ok(true) };
        let Some(sent) = out.sent.get_mut(at as usize) else { return Ok(true) };
        let done = match &mut sent.by {
            Sending::Done => true,
            Sending::Range(request) => request.test()? != Progress::Pending,
            // Moved by `advance`.
            Sending::Credit(_) | Sending::Length(_) => false,
        };
        if done {
            sent.by = Sending::Done;
            while out.sent.front().is_some_and(|sent| matches!(sent.by, Sending::Done)) {
                out.sent.pop_front();
            }
        }
        Ok(done)
    }

    /// Moves what MPI does not move by itself: puts that wait for credits.
    pub fn advance(&mut self) -> Result<std::result::Result<(), TooLong>> {
        let Way::Window(window) = &self.way else { return Ok(Ok(())) };
        if self.moving == 0 {
            return Ok(Ok(()));
        }
        for (to, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            for (lane, out) in (0..).map(Lane).zip(&mut peer.outgoing) {
                let first = out.next - out.sent.len() as u64;
                for (seq, sent) in (first..).zip(&mut out.sent) {
                    if let Sending::Credit(credit) = &mut sent.by {
                        if credit.request.test()? == Progress::Pending {
                            break; // the later ones wait for it
                        }
                        let ([at, armed], len) = (*credit.words, sent.piece.len);
                        if len as u64 > armed {
                            return Ok(Err(TooLong { to, lane, seq, len, armed: armed as usize }));
                        }
                        // SAFETY: the piece keeps its memory, and nobody writes to it before the put is done.
                        unsafe { window.put(sent.piece.as_ptr(), len, to, at)? };
                        let length = Words::send(&self.comm, [len as u64], to, i32::from(lane.0))?;
                        sent.by = Sending::Length(length);
                    }
                    if let Sending::Length(length) = &mut sent.by
                        && length.request.test()? != Progress::Pending
                    {
                        sent.by = Sending::Done;
                        self.moving -= 1;
                    }
                }
                while out.sent.front().is_some_and(|sent| matches!(sent.by, Sending::Done)) {
                    out.sent.pop_front();
                }
            }
        }
        Ok(Ok(()))
    }

    /// When this rank and `from` make no more arms and puts: ends what is under way between them. What `from` has put
    /// and this rank never armed for is taken in and forgotten; what either armed for puts that the other never made is
    /// given up. `theirs`: what the peer has made. Whether all has ended.
    pub fn settle(&mut self, from: usize, theirs: &Counts) -> Result<bool> {
        let messages = matches!(self.way, Way::Messages);
        let peer = self.peers[from].get_or_insert_default();
        for (lane, incoming) in peer.incoming.iter_mut().enumerate() {
            while let Some(oldest) = incoming.armed.front_mut() {
                let request = match &mut oldest.by {
                    Arming::Range(request) => request,
                    Arming::Length(_, length) => &mut length.request,
                };
                if incoming.waited >= theirs.puts[lane] {
                    request.cancel();
                }
                if request.test()? == Progress::Pending {
                    return Ok(false);
                }
                if let Arming::Length(credit, _) = &mut oldest.by {
                    incoming.credits.extend(credit.take());
                }
                incoming.armed.pop_front();
                incoming.waited += 1;
            }
            while messages && incoming.next < theirs.puts[lane] {
                if !self.comm.discard(from, lane as i32)? {
                    return Ok(false);
                }
                incoming.next += 1;
            }
            forget_done(&mut incoming.credits, |credit| Ok(credit.request.test()? != Progress::Pending))?;
            if !incoming.credits.is_empty() {
                return Ok(false);
            }
        }
        for (lane, out) in peer.outgoing.iter_mut().enumerate() {
            let first = out.next - out.sent.len() as u64;
            for seq in first..out.next {
                let Some(oldest) = out.sent.front_mut() else { break };
                let done = match &mut oldest.by {
                    Sending::Done => true,
                    Sending::Range(request) => request.test()? != Progress::Pending,
                    Sending::Credit(credit) if seq >= theirs.arms[lane] => {
                        credit.request.cancel();
                        let given_up = credit.request.test()? != Progress::Pending;
                        self.moving -= usize::from(given_up);
                        given_up
                    }
                    // Moved by `advance`.
                    Sending::Credit(_) | Sending::Length(_) => false,
                };
                if !done {
                    return Ok(false);
                }
                out.sent.pop_front();
            }
        }
        Ok(true)
    }
}

/// Drops messages that have left.
fn forget_done<M>(messages: &mut Vec<M>, is_done: impl Fn(&mut M) -> Result<bool>) -> Result<()> {
    let mut at = 0;
    while at < messages.len() {
        if is_done(&mut messages[at])? {
            messages.swap_remove(at);
        } else {
            at += 1;
        }
    }
    Ok(())
}
