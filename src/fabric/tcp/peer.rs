//! What a rank knows of each other one, and of each neighbour's connections. No I/O, no clock.

use std::collections::VecDeque;

use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::tx::Frame;
use super::window::Window;

/// What is known of a rank when all are connected.
#[derive(Clone, Debug)]
pub struct End {
    pub host: String,
    /// How it is reached, for messages.
    pub link: String,
    /// What carries the data, where it is not TCP, which then only tells who lives.
    pub data: Option<String>,
    /// Why it is not reached directly, though it is in a network of this rank's.
    pub shut_off: Option<String>,
    /// Connections to it: none when others stand between.
    pub connections: usize,
}

/// Another rank.
pub struct Peer {
    pub end: End,
    /// Who stands between.
    pub between: Vec<usize>,
    /// The neighbour that its frames go to: itself, or the first of those between.
    pub next: usize,
    /// The only connection to `next` that its frames use; `None`: all.
    pub stream: Option<usize>,
    /// For a rank behind others.
    pub window: Option<Window>,
    pub out: Outgoing,
    pub inn: Incoming,
    /// On how many connections it has said that it leaves.
    pub lefts: usize,
    /// It has heard that this rank leaves.
    pub farewell: bool,
}

impl Peer {
    /// `connections` of each neighbour of rank `me`.
    pub fn new(me: usize, rank: usize, end: End, between: Vec<usize>, connections: &[usize]) -> Self {
        let next = between.first().copied().unwrap_or(rank);
        let behind = !between.is_empty();
        Peer {
            end,
            between,
            next,
            stream: behind.then(|| (me + rank) % connections[next].max(1)),
            window: behind.then(Window::default),
            out: Outgoing::default(),
            inn: Incoming::new(rank as u32, me as u32),
            lefts: 0,
            farewell: false,
        }
    }

    pub fn has_left(&self) -> bool {
        self.lefts == if self.stream.is_some() { 1 } else { self.end.connections }
    }

    /// The connection of what goes over one only.
    pub fn main(&self) -> usize {
        self.stream.unwrap_or(0)
    }
}

/// What goes over the connections to a neighbour.
#[derive(Default)]
pub struct Line {
    /// Frames that go before everything else, by connection.
    pub urgent: Vec<VecDeque<Frame>>,
    /// Ranks that are reached over it.
    pub ends: Vec<usize>,
    /// Which of them was served last.
    pub served: usize,
    /// Calls of the neighbour's fabric, as it told last.
    pub calls: u64,
}

impl Line {
    pub fn new(connections: usize) -> Self {
        Line { urgent: (0..connections).map(|_| VecDeque::new()).collect(), ..Line::default() }
    }
}
