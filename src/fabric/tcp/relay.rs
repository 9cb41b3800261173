//! What a rank passes on between others that do not reach each other, piece by piece. No I/O, no clock.
//!
//! Each pair's frames keep to one connection of each hop. Small ones overtake pieces of long puts, but neither
//! class changes its order, and a pair's farewell is the last of its long ones.

use std::collections::{HashMap, VecDeque};

use super::Wrong;
use super::frame::{EAGER, HEADER, Header, Kind};
use super::routes::Passing;
use super::tx::Frame;
use super::window::ROOM;

/// Beyond the window: receipts and farewells, which do not count there.
const SLACK: u64 = 16 * HEADER as u64;

/// One way between two others.
struct Pair {
    way: Passing,
    connection: usize,
    /// Bytes held, or being received.
    held: u64,
    /// The source has said that it leaves.
    left: bool,
    /// The source has heard that the target leaves.
    farewell: bool,
}

impl Pair {
    fn is_over(&self) -> bool {
        self.left && self.farewell
    }
}

#[derive(Default)]
struct Queue {
    quick: VecDeque<(Header, Frame)>,
    bulk: VecDeque<(Header, Frame)>,
}

/// All that a rank passes on.
#[derive(Default)]
pub struct Relay {
    pairs: HashMap<(u32, u32), Pair>,
    /// By neighbour and connection.
    queues: HashMap<(usize, usize), Queue>,
}

impl Relay {
    /// For these pairs. `connections` of each neighbour.
    pub fn new(ways: Vec<Passing>, connections: impl Fn(usize) -> usize) -> Self {
        let pair = |way: Passing| {
            let connection = (way.from + way.to) % connections(way.next);
            let pair = Pair { way, connection, held: 0, left: false, farewell: false };
            ((way.from as u32, way.to as u32), pair)
        };
        Relay { pairs: ways.into_iter().map(pair).collect(), queues: HashMap::new() }
    }

    /// Whether there is anything that this rank has to pass on, now or later.
    pub fn is_needed(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// A frame comes from neighbour `prev`: whether there is room for it.
    ///
    /// # Errors
    /// When it has no business here, or its source does not keep to its window.
    pub fn accept(&mut self, header: &Header, prev: usize) -> Result<(), Wrong> {
        let Header { kind, from, to, len, .. } = *header;
        let travels = matches!(kind, Kind::Put | Kind::Credit | Kind::Room | Kind::Left | Kind::Farewell);
        let pair = self.pairs.get_mut(&(from, to)).filter(|pair| travels && pair.way.prev == prev);
        let Some(pair) = pair.filter(|pair| !pair.is_over()) else {
            return Err(Wrong::Corrupt(format!(
                "a frame of rank {from} for rank {to}, which does not pass here,"
            )));
        };
        pair.held += HEADER as u64 + u64::from(len);
        if pair.held > ROOM + SLACK {
            return Err(Wrong::Corrupt(format!(
                "more bytes of rank {from} for rank {to} than may be on their way"
            )));
        }
        Ok(())
    }

    /// A frame that was accepted is there. Returns the neighbour that it goes to.
    pub fn landed(&mut self, header: &Header, bytes: Vec<u8>) -> Option<usize> {
        let pair = self.pairs.get_mut(&(header.from, header.to))?;
        pair.left |= header.kind == Kind::Left;
        pair.farewell |= header.kind == Kind::Farewell;
        let queue = self.queues.entry((pair.way.next, pair.connection)).or_default();
        let last = matches!(header.kind, Kind::Left | Kind::Farewell);
        let class = if bytes.len() <= EAGER && !last { &mut queue.quick } else { &mut queue.bulk };
        class.push_back((*header, Frame::passed(header, bytes)));
        Some(pair.way.next)
    }

    fn take(
        &mut self,
        link: (usize, usize),
        class: impl Fn(&mut Queue) -> &mut VecDeque<(Header, Frame)>,
    ) -> Option<Frame> {
        let (header, frame) = class(self.queues.get_mut(&link)?).pop_front()?;
        if let Some(pair) = self.pairs.get_mut(&(header.from, header.to)) {
            pair.held -= HEADER as u64 + u64::from(header.len);
        }
        Some(frame)
    }

    /// The next small frame for a connection to neighbour `next`.
    pub fn quick(&mut self, next: usize, connection: usize) -> Option<Frame> {
        self.take((next, connection), |queue| &mut queue.quick)
    }

    /// The next piece of a long put, or farewell.
    pub fn bulk(&mut self, next: usize, connection: usize) -> Option<Frame> {
        self.take((next, connection), |queue| &mut queue.bulk)
    }

    /// Whether all that will ever come has been passed on.
    pub fn is_over(&self) -> bool {
        self.pairs.values().all(Pair::is_over)
            && self.queues.values().all(|queue| queue.quick.is_empty() && queue.bulk.is_empty())
    }

    /// Whether nothing more comes from or goes to this neighbour.
    pub fn is_over_with(&self, neighbour: usize) -> bool {
        let concerned = |pair: &&Pair| [pair.way.prev, pair.way.next].contains(&neighbour);
        self.pairs.values().filter(concerned).all(Pair::is_over)
    }

    /// The most bytes that are held for any pair.
    #[cfg(test)]
    pub fn held(&self) -> u64 {
        self.pairs.values().map(|pair| pair.held).max().unwrap_or(0)
    }
}
