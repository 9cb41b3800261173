//! The protocol between two ranks, without I/O and without a clock.
//!
//! [`Pair`] is one rank's view of one peer. What happens is told to it (`put`, `arm`, a message, a completion),
//! and [`Pair::next`] says what is to be done, one [`Action`] at a time, until there is nothing more to do.
//!
//! * A **control** queue pair carries messages of one 4 KiB slot ([`wire`]); each side knows how many receives
//!   the other keeps posted, and never sends beyond them ([`control`]).
//! * **Data** queue pairs, one a cable, carry chunks and nothing else. The *target* decides the order: it posts a
//!   receive for each chunk, on the armed range itself, then grants; the source sends exactly in the order of the
//!   grants ([`source`], [`target`]). Chunk k of a pair travels on cable k mod d. So a receive meets its own chunk
//!   although neither carries a name, several lanes share a queue pair, and a lane whose source or target is late
//!   holds up nobody: receives are posted only for puts that the source has announced and the target has armed.
//! * **Small** puts travel in control slots, with a copy at both ends.
//! * CRC32C of the chunks follow on the control queue pair. A chunk that was lost, doubled, changed or swapped
//!   meets a sum that is not its own, or none, before anybody may look at its range.

mod control;
mod pair;
#[cfg(test)]
mod sim;
mod source;
mod target;
pub mod wire;

pub use pair::{Action, Pair};

use super::nic::EXTENT;

/// A frame: what a device counts its queues in.
pub const FRAME: usize = 4096;

/// How data chunks travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Sends into receives that are posted on the range: what every device can.
    Posted,
    /// Writes with immediate data at the address of the range.
    Write,
}

/// Frames under way on one cable, at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Sends.
    pub send: u32,
    /// Receives.
    pub receive: u32,
}

/// What both ends of a pair agree on, and their own windows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Settings {
    /// How chunks travel.
    pub mode: Mode,
    /// Bytes in a chunk: whole frames.
    pub chunk: usize,
    /// Control slots of each side.
    pub slots: u64,
    /// Whether chunks have checksums.
    pub checksums: bool,
    /// For each cable.
    pub windows: Vec<Window>,
}

/// What ends the job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// What arrived is not what was sent: on which cable (`None`: the control queue pair), and what is wrong.
    Corrupt(Option<usize>, String),
    /// A put is longer than the range armed for it.
    TooLong {
        /// Lane.
        lane: crate::fabric::Lane,
        /// Number of the put.
        put: u64,
        /// Its length.
        len: u64,
        /// What was armed.
        room: u64,
    },
    /// A cable's device takes nothing any more.
    Full(usize),
    /// A cable's device takes no more, and never completes this chunk, which the target has.
    Owed(usize, u64),
}

/// What a chunk costs of a window.
fn cost(mode: Mode, len: usize) -> u32 {
    match mode {
        Mode::Posted => len.div_ceil(FRAME).max(1) as u32,
        Mode::Write => 1,
    }
}

/// Length of the chunk at `offset` of a put of `len` bytes, which both ends derive alike: no chunk crosses an
/// extent's line at either end. `source` and `target` are the put's first addresses.
fn chunk_len(chunk: usize, source: u64, target: u64, offset: u64, len: u64) -> usize {
    let to_line = |first: u64| EXTENT as u64 - (first.wrapping_add(offset)) % EXTENT as u64;
    (chunk as u64).min(len - offset).min(to_line(source)).min(to_line(target)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cross_no_line_and_cover_the_put() {
        let line = EXTENT as u64;
        for (source, target) in [(0, 0), (line - 100, 64), (64, line - 5000), (line - 1, line - 4096)] {
            let (len, mut offset, mut n) = (1u64 << 20, 0, 0);
            while offset < len {
                let c = chunk_len(65536, source, target, offset, len) as u64;
                assert!(c > 0 && offset + c <= len);
                for first in [source, target] {
                    assert_eq!((first + offset) / line, (first + offset + c - 1) / line);
                }
                (offset, n) = (offset + c, n + 1);
            }
            assert!(n <= 18, "{n} chunks");
        }
        assert_eq!((cost(Mode::Posted, 1), cost(Mode::Posted, 4097), cost(Mode::Write, 1 << 20)), (1, 2, 1));
    }
}
