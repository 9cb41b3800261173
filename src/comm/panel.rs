//! Panel broadcasts: long messages along a process row, under way while the ranks compute.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;

use super::cables::Cables;
use super::group::Group;
use super::topology::Topology;
use crate::error::{Error, Result};
use crate::fabric::{Buf, Lane};

/// The members and the lane of panel broadcasts, and the order in which the broadcasts on it take turns.
///
/// Puts between two ranks arrive in the order sent, whatever broadcast they belong to: so broadcasts that
/// are under way at once use each link in the order in which they were started. All broadcasts of a
/// group on one lane are made from one `BcastLane`.
#[derive(Clone)]
pub struct BcastLane {
    group: Group,
    lane: Lane,
    turns: Arc<Mutex<Turns>>,
    /// For each root each member's parent, where [`Topology::Cables`] is a tree.
    trees: Option<Arc<Vec<Vec<usize>>>>,
}

/// Per member: puts promised when broadcasts were started, and puts made.
struct Turns {
    to: Vec<Turn>,
    from: Vec<Turn>,
}

#[derive(Clone, Copy, Default)]
struct Turn {
    promised: u64,
    done: u64,
}

impl BcastLane {
    /// Broadcasts among `group`, on [`Lane::PANEL`], which can follow the cables. Every member calls it.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn along_cables(group: &Group) -> Result<Self> {
        let cables = Cables::gather(group)?;
        let trees = || Arc::new((0..cables.len()).map(|root| cables.tree(root)).collect());
        Ok(BcastLane { trees: (!cables.is_direct()).then(trees), ..BcastLane::new(group) })
    }

    /// Broadcasts among `group`, on [`Lane::PANEL`]. It knows of no cables.
    pub fn new(group: &Group) -> Self {
        let turns = || vec![Turn::default(); group.len()];
        BcastLane {
            group: group.clone(),
            lane: Lane::PANEL,
            turns: Arc::new(Mutex::new(Turns { to: turns(), from: turns() })),
            trees: None,
        }
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A chunk to be received from, or passed on to, a member.
#[derive(Clone, Copy)]
struct Hop {
    peer: usize,
    chunk: usize,
    /// The number of this hop on the link to or from `peer`.
    turn: u64,
}

/// A buffer and its broadcast, used again and again:
///
/// 1. everyone: [`start`](PanelBcast::start), with the same root and range;
/// 2. the root: fills [`data_mut`](PanelBcast::data_mut), then [`send`](PanelBcast::send);
/// 3. everyone: [`poll`](PanelBcast::poll) between pieces of other work, so that what has come is passed on;
/// 4. everyone: [`finish`](PanelBcast::finish); then [`data`](PanelBcast::data) is there.
///
/// Several may be under way at once, each with a buffer of its own. Everyone starts them in one order and
/// finishes them in that order.
pub struct PanelBcast<T> {
    lane: BcastLane,
    topology: Topology,
    chunk_len: usize,
    buf: Buf<T>,
    chunks: Vec<Range<usize>>,
    /// The piece that each chunk belongs to.
    piece_of: Vec<usize>,
    /// Chunks that are here and may be passed on.
    here: Vec<bool>,
    /// In the order in which they come and go (see [`Topology::step`]).
    receives: Vec<Hop>,
    received: usize,
    sends: Vec<Hop>,
    sent: usize,
    /// This rank is the root and has not called `send` yet.
    withheld: bool,
}

impl<T: Pod> PanelBcast<T> {
    /// Chunks of this many bytes keep a chain of ranks busy without costing a message too many.
    pub const CHUNK_BYTES: usize = 1 << 20;

    /// A buffer of `len` elements for broadcasts on `lane`, cut into chunks of at most `chunk_bytes`. Everyone
    /// gives the same.
    ///
    /// # Errors
    /// [`Error::Resources`] when there is no memory.
    pub fn new(lane: &BcastLane, topology: Topology, chunk_bytes: usize, len: usize) -> Result<Self> {
        Ok(PanelBcast {
            topology,
            chunk_len: (chunk_bytes / size_of::<T>().max(1)).max(1),
            buf: Buf::zeros(&**lane.group.fabric(), len)?,
            lane: lane.clone(),
            chunks: Vec::new(),
            piece_of: Vec::new(),
            here: Vec::new(),
            receives: Vec::new(),
            received: 0,
            sends: Vec::new(),
            sent: 0,
            withheld: false,
        })
    }

    /// Number of elements of the buffer.
    #[allow(clippy::len_without_is_empty, reason = "a buffer, not a collection")]
    pub fn len(&self) -> usize {
        self.buf.len()
    }

    /// Elements of the buffer.
    ///
    /// # Panics
    /// When part of `range` has yet to come.
    pub fn data(&self, range: Range<usize>) -> &[T] {
        self.buf.read(range)
    }

    /// Elements of the buffer, to write.
    ///
    /// # Panics
    /// When part of `range` has yet to come, or may still be being sent: not so between the root's `start`
    /// and `send`.
    pub fn data_mut(&mut self, range: Range<usize>) -> &mut [T] {
        self.buf.write(range)
    }

    /// Begins to broadcast `range` from member `root`: the others let it be filled from now on. Waits until
    /// what this buffer sent before has left.
    ///
    /// # Errors
    /// When a rank is lost; [`Error::Internal`] when the last broadcast of this buffer is not finished.
    ///
    /// # Panics
    /// When `range` is not in the buffer, or `root` not in the group.
    pub fn start(&mut self, root: usize, range: Range<usize>) -> Result<()> {
        if self.withheld || self.received < self.receives.len() || self.sent < self.sends.len() {
            return Err(Error::Internal("a panel broadcast was started before its last was finished".into()));
        }
        let group = self.lane.group.clone();
        let (net, n, me) = (&**group.fabric(), group.len(), group.me());
        assert!(root < n && range.start <= range.end && range.end <= self.buf.len());
        self.buf.flush(net)?;
        self.cut(range, n);
        self.plan(root, n, me);
        for hop in &self.receives {
            self.buf.arm(net, self.lane.lane, group.ranks()[hop.peer], self.chunks[hop.chunk].clone())?;
        }
        self.withheld = me == root;
        Ok(())
    }

    /// Cuts `range` into the topology's pieces and these into chunks.
    fn cut(&mut self, range: Range<usize>, n: usize) {
        self.chunks.clear();
        self.piece_of.clear();
        let pieces = self.topology.pieces(n);
        for piece in 0..pieces {
            let cut = |i: usize| range.start + range.len() / pieces * i + range.len() % pieces * i / pieces;
            let (mut at, end) = (cut(piece), cut(piece + 1));
            while at < end {
                let next = end.min(at + self.chunk_len);
                self.chunks.push(at..next);
                self.piece_of.push(piece);
                at = next;
            }
        }
        self.here.clear();
        self.here.resize(self.chunks.len(), false);
    }

    /// Lists the hops that this rank takes part in, in order, and takes their turns on the links.
    fn plan(&mut self, root: usize, n: usize, me: usize) {
        let topology = self.topology;
        let relative = (me + n - root) % n;
        let member = |relative: usize| (relative + root) % n;
        let tree = self.lane.trees.as_ref().filter(|_| topology == Topology::Cables);
        let parent = |relative: usize, piece: usize| match tree {
            Some(trees) => (relative > 0).then(|| (trees[root][member(relative)] + n - root) % n),
            None => topology.parent(n, relative, piece),
        };
        self.receives.clear();
        self.sends.clear();
        (self.received, self.sent) = (0, 0);
        for (chunk, &piece) in self.piece_of.iter().enumerate() {
            if let Some(parent) = parent(relative, piece) {
                self.receives.push(Hop { peer: parent, chunk, turn: 0 });
            }
            for child in (1..n).filter(|child| *child != relative) {
                if parent(child, piece) == Some(relative) {
                    self.sends.push(Hop { peer: child, chunk, turn: 0 });
                }
            }
        }
        let piece_of = &self.piece_of;
        // Chunks are unique within these keys, so an unstable sort (which allocates nothing) is enough.
        self.receives.sort_unstable_by_key(|h| (topology.step(n, relative, piece_of[h.chunk]), h.chunk));
        let step = |h: &Hop| match tree {
            Some(_) => (false, 0),
            None => topology.step(n, h.peer, piece_of[h.chunk]),
        };
        self.sends.sort_unstable_by_key(|h| (step(h), h.chunk, h.peer));
        let mut turns = self.lane.turns();
        let Turns { to, from } = &mut *turns;
        for (hops, links) in [(&mut self.receives, from), (&mut self.sends, to)] {
            for hop in hops {
                hop.peer = member(hop.peer);
                hop.turn = links[hop.peer].promised;
                links[hop.peer].promised += 1;
            }
        }
    }

    /// The root's data is in the buffer: sends it off.
    ///
    /// # Errors
    /// When a rank is lost; [`Error::Internal`] on a rank that is not the root of a started broadcast.
    pub fn send(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.withheld) {
            return Err(Error::Internal(
                "send of a panel broadcast that this rank is not the root of".into(),
            ));
        }
        self.here.fill(true);
        self.pass_on()
    }

    /// Takes in what has come and passes it on, without waiting. Returns whether everything is here.
    ///
    /// # Errors
    /// When a rank is lost, or what came is not what was expected.
    pub fn poll(&mut self) -> Result<bool> {
        self.lane.group.fabric().poll()?; // what was sent may still be queued here
        while let Some(&hop) = self.receives.get(self.received) {
            let group = &self.lane.group;
            if self.lane.turns().from[hop.peer].done != hop.turn {
                break;
            }
            let from = group.ranks()[hop.peer];
            match self.buf.try_wait(&**group.fabric(), self.lane.lane, from)? {
                Some(came) => self.take_in(hop, &came)?,
                None => break,
            }
            self.pass_on()?;
        }
        self.pass_on()?;
        Ok(!self.withheld && self.received == self.receives.len())
    }

    /// Waits until everything is here and has been passed on.
    ///
    /// # Errors
    /// When a rank is lost; [`Error::Internal`] when broadcasts are not finished in the order started, or
    /// the root has not sent.
    pub fn finish(&mut self) -> Result<()> {
        let out_of_order = || Error::Internal("panel broadcasts are finished in the order started".into());
        while !self.poll()? {
            let Some(&hop) = self.receives.get(self.received) else {
                return Err(Error::Internal("the root finished a panel broadcast without sending".into()));
            };
            let group = &self.lane.group;
            if self.lane.turns().from[hop.peer].done != hop.turn {
                return Err(out_of_order());
            }
            let came = self.buf.wait(&**group.fabric(), self.lane.lane, group.ranks()[hop.peer])?;
            self.take_in(hop, &came)?;
        }
        if self.sent == self.sends.len() { Ok(()) } else { Err(out_of_order()) }
    }

    fn take_in(&mut self, hop: Hop, came: &Range<usize>) -> Result<()> {
        let expected = &self.chunks[hop.chunk];
        if came != expected {
            let rank = self.lane.group.ranks()[hop.peer];
            return Err(Error::Internal(format!(
                "rank {rank} sent {} elements of a panel, where {} were expected",
                came.len(),
                expected.len()
            )));
        }
        self.here[hop.chunk] = true;
        self.received += 1;
        self.lane.turns().from[hop.peer].done += 1;
        Ok(())
    }

    fn pass_on(&mut self) -> Result<()> {
        while let Some(&hop) = self.sends.get(self.sent) {
            let group = &self.lane.group;
            if !self.here[hop.chunk] || self.lane.turns().to[hop.peer].done != hop.turn {
                break;
            }
            let (to, range) = (group.ranks()[hop.peer], self.chunks[hop.chunk].clone());
            self.buf.put(&**group.fabric(), self.lane.lane, to, range)?;
            self.sent += 1;
            self.lane.turns().to[hop.peer].done += 1;
        }
        Ok(())
    }

    /// Whether what this rank sent has left, so that [`start`](PanelBcast::start) will not wait.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn is_flushed(&mut self) -> Result<bool> {
        self.buf.is_flushed(&**self.lane.group.fabric())
    }

    /// Waits until what this rank sent has left, so that the buffer may be dropped or written.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn flush(&mut self) -> Result<()> {
        self.buf.flush(&**self.lane.group.fabric())
    }
}
