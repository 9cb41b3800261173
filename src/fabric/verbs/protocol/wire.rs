//! Messages of the control queue pair: one 4 KiB slot each, sealed by a CRC32C.
//!
//! ```text
//!  0  crc32c of the rest     4  kind   5  lane or cable   6  length of the body
//!  8  number of the message  16 how many of the receiver's messages were received
//! 24  for each lane, how many small puts were taken (8 x u32, wrapping)
//! 56  for each cable, how many chunks are there (8 x u32, wrapping)
//! 88  body
//! ```
//! Little-endian. The peer is authenticated (rendezvous), not trusted to be free of faults: everything is checked.

use crate::fabric::checksum;
use crate::fabric::{Lane, SHORT};

/// A control slot: one frame of the device.
pub const SLOT: usize = 4096;
/// What comes before a body.
pub const HEADER: usize = 88;
/// Puts of at most so many bytes travel in a control slot, behind their number: they are copied, at both ends.
pub const SMALL: usize = SLOT - HEADER - 8;
const _: () = assert!(SMALL >= SHORT);
/// Checksums in one message.
pub const SUMS: usize = 512;
/// Cables between two ranks.
pub const CABLES: usize = 8;

/// What every message tells beside its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// Its number, from 0.
    pub number: u64,
    /// How many messages of the receiver's had come.
    pub received: u64,
    /// For each lane, how many of the receiver's small puts were taken, wrapping.
    pub taken: [u32; Lane::COUNT],
    /// For each cable, how many of the receiver's chunks are there and are what was sent, wrapping.
    pub there: [u32; CABLES],
}

/// Leave to send chunks: receives for them are posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The put, by its lane and number.
    pub lane: Lane,
    /// Number of the put.
    pub put: u64,
    /// Where in the put the first chunk starts.
    pub offset: u64,
    /// Bytes in all chunks of this grant.
    pub len: u64,
    /// Number of the first chunk, counted over all that this target has granted this source.
    pub first: u64,
    /// Address of the byte at `offset` in the target's memory.
    pub address: u64,
    /// Key of that memory, for each cable (write mode).
    pub keys: [u32; CABLES],
}

/// A message's body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// Nothing: the header tells.
    Tick,
    /// A small put, whole.
    Small {
        /// Its lane.
        lane: Lane,
        /// Its number.
        put: u64,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// A put waits at the source.
    Ready {
        /// Its lane.
        lane: Lane,
        /// Its number.
        put: u64,
        /// Its length.
        len: u64,
        /// Its address within its extent.
        at: u64,
    },
    /// Leave to send.
    Grant(Grant),
    /// Checksums of chunks that were sent over one cable.
    Sums {
        /// The cable.
        cable: usize,
        /// Number of the first chunk, counted on this cable.
        first: u64,
        /// CRC32C of each chunk.
        sums: Vec<u32>,
    },
    /// The sender will arm no more.
    Leaving,
    /// The sender has nothing under way and will be gone.
    Bye,
}

const TICK: u8 = 1;
const SMALL_PUT: u8 = 2;
const READY: u8 = 3;
const GRANT: u8 = 4;
const SUMS_OF: u8 = 5;
const LEAVING: u8 = 6;
const BYE: u8 = 7;

/// Writes a message, but for a small put's bytes (`data` is taken as their length) and the seal; returns its length
/// so far.
pub fn write(header: &Header, body: &Body, out: &mut [u8; SLOT]) -> usize {
    let mut len = HEADER;
    let mut push = |bytes: &[u8]| {
        out[len..len + bytes.len()].copy_from_slice(bytes);
        len += bytes.len();
    };
    let (kind, which) = match body {
        Body::Tick => (TICK, 0),
        Body::Small { lane, put, data } => {
            push(&put.to_le_bytes());
            push(data);
            (SMALL_PUT, lane.0)
        }
        Body::Ready { lane, put, len, at } => {
            for word in [put, len, at] {
                push(&word.to_le_bytes());
            }
            (READY, lane.0)
        }
        Body::Grant(g) => {
            for word in [g.put, g.offset, g.len, g.first, g.address] {
                push(&word.to_le_bytes());
            }
            for key in g.keys {
                push(&key.to_le_bytes());
            }
            (GRANT, g.lane.0)
        }
        Body::Sums { cable, first, sums } => {
            push(&first.to_le_bytes());
            for sum in sums {
                push(&sum.to_le_bytes());
            }
            (SUMS_OF, *cable as u8)
        }
        Body::Leaving => (LEAVING, 0),
        Body::Bye => (BYE, 0),
    };
    out[4] = kind;
    out[5] = which;
    out[8..16].copy_from_slice(&header.number.to_le_bytes());
    out[16..24].copy_from_slice(&header.received.to_le_bytes());
    let counts = header.taken.iter().chain(&header.there);
    for (count, out) in counts.zip(out[24..HEADER].chunks_exact_mut(4)) {
        out.copy_from_slice(&count.to_le_bytes());
    }
    len
}

/// Completes a message of `len` bytes: its length and checksum.
pub fn seal(message: &mut [u8]) {
    let body = (message.len() - HEADER) as u16;
    message[6..8].copy_from_slice(&body.to_le_bytes());
    let sum = checksum::crc32c(&message[4..]);
    message[..4].copy_from_slice(&sum.to_le_bytes());
}

/// Reads bytes in order; `None` when there are too few.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*head))
    }

    fn u64(&mut self) -> Option<u64> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*head))
    }
}

/// Reads a message; `None` when it is not one.
pub fn read(message: &[u8]) -> Option<(Header, Body)> {
    if message.len() < HEADER || message.len() > SLOT {
        return None;
    }
    let mut r = Reader(message);
    let sum = r.u32()?;
    let body = usize::from(u16::from_le_bytes([message[6], message[7]]));
    if HEADER + body != message.len() || checksum::crc32c(&message[4..]) != sum {
        return None;
    }
    let (kind, which) = (message[4], message[5]);
    let mut r = Reader(&message[8..]);
    let (number, received) = (r.u64()?, r.u64()?);
    let (mut taken, mut there) = ([0; Lane::COUNT], [0; CABLES]);
    for count in taken.iter_mut().chain(&mut there) {
        *count = r.u32()?;
    }
    let lane = || Some(Lane(which)).filter(|l| (l.0 as usize) < Lane::COUNT);
    let body = match kind {
        TICK => Body::Tick,
        SMALL_PUT => Body::Small { lane: lane()?, put: r.u64()?, data: std::mem::take(&mut r.0).to_vec() },
        READY => Body::Ready { lane: lane()?, put: r.u64()?, len: r.u64()?, at: r.u64()? },
        GRANT => {
            let (put, offset, len, first, address) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?, r.u64()?);
            let mut keys = [0; CABLES];
            for key in &mut keys {
                *key = r.u32()?;
            }
            Body::Grant(Grant { lane: lane()?, put, offset, len, first, address, keys })
        }
        SUMS_OF => {
            let first = r.u64()?;
            let mut sums = Vec::with_capacity(r.0.len() / 4);
            while !r.0.is_empty() {
                sums.push(r.u32()?);
            }
            Body::Sums { cable: which.into(), first, sums }
        }
        LEAVING => Body::Leaving,
        BYE => Body::Bye,
        _ => return None,
    };
    r.0.is_empty().then_some((Header { number, received, taken, there }, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bodies() -> Vec<Body> {
        vec![
            Body::Tick,
            Body::Small { lane: Lane(7), put: 3, data: (0..100).collect() },
            Body::Small { lane: Lane(0), put: u64::MAX, data: vec![] },
            Body::Small { lane: Lane(1), put: 0, data: vec![9; SMALL] },
            Body::Ready { lane: Lane(2), put: 9, len: 1 << 40, at: 77 },
            Body::Grant(Grant {
                lane: Lane(1),
                put: 5,
                offset: 1 << 33,
                len: 7,
                first: 8,
                address: u64::MAX - 1,
                keys: [1, 2, 3, 4, 5, 6, 7, 8],
            }),
            Body::Sums { cable: 3, first: 11, sums: (0..SUMS as u32).collect() },
            Body::Leaving,
            Body::Bye,
        ]
    }

    #[test]
    fn what_is_written_is_read_and_no_flipped_bit_passes() {
        let (mut taken, mut there) = ([0; Lane::COUNT], [0; CABLES]);
        (taken[3], there[7]) = (u32::MAX, 5);
        let header = Header { number: 1 << 40, received: 12, taken, there };
        for body in bodies() {
            let mut slot = [0; SLOT];
            let len = write(&header, &body, &mut slot);
            let message = &mut slot[..len];
            seal(message);
            assert_eq!(read(message), Some((header, body.clone())));
            assert_eq!(read(&message[..len - 1]), None, "{body:?}");
            for bit in (0..8 * len).step_by(7) {
                message[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(read(message), None, "{body:?}, bit {bit}");
                message[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            let mut message = bytes;
            read(&message);
            if message.len() >= HEADER {
                seal(&mut message);
                read(&message);
            }
        }
    }
}
