//! What travels: a header of 48 bytes, and bytes.
//!
//! A header names the ranks that a frame is from and for, so that a rank in between can pass it on.

use crate::fabric::checksum;
use crate::fabric::{Lane, SHORT};

/// Length of an encoded header.
pub const HEADER: usize = 48;
/// A put travels in pieces of so many bytes, the last one less; puts of other lanes go in between.
pub const CHUNK: usize = 128 << 10;
/// Puts of at most so many bytes travel before the target has armed a range.
pub const EAGER: usize = 4 << 10;
const _: () = assert!(EAGER >= SHORT);
/// So many of them, for each lane: what bounds the memory of the target.
pub const WINDOW: u64 = 64;
/// Of the words that end a job.
pub const TEXT: usize = 4 << 10;

const CHECKED: u8 = 1;

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Bytes of put `number`, from `offset`; the put has `total`.
    Put = 1,
    /// Arm `number` has `total` bytes.
    Credit = 2,
    /// The sender lives, and has called its fabric so often (`number`).
    Beat = 3,
    /// The sender has put all it will ever put.
    Left = 4,
    /// All that came before `Left` has arrived.
    Farewell = 5,
    /// The job has failed; the bytes say how.
    Failed = 6,
    /// The sender has taken so many bytes (`number`) from the source, which others stand between.
    Room = 7,
}

/// The head of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub kind: Kind,
    pub lane: Lane,
    pub from: u32,
    pub to: u32,
    pub number: u64,
    pub offset: u64,
    pub total: u64,
    /// Bytes that follow.
    pub len: u32,
    /// Their CRC32C.
    pub crc: Option<u32>,
}

impl Header {
    /// A frame without bytes.
    pub fn empty(kind: Kind, from: u32, to: u32) -> Self {
        Header { kind, lane: Lane(0), from, to, number: 0, offset: 0, total: 0, len: 0, crc: None }
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind as u8;
        bytes[1] = self.lane.0;
        bytes[2] = if self.crc.is_some() { CHECKED } else { 0 };
        bytes[4..8].copy_from_slice(&self.from.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.to.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.total.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.crc.unwrap_or(0).to_le_bytes());
        let crc = checksum::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Header, &'static str> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if checksum::crc32c(&bytes[..44]) != u32_at(44) {
            return Err("a header with a wrong checksum");
        }
        let kind = match bytes[0] {
            1 => Kind::Put,
            2 => Kind::Credit,
            3 => Kind::Beat,
            4 => Kind::Left,
            5 => Kind::Farewell,
            6 => Kind::Failed,
            7 => Kind::Room,
            _ => return Err("a frame of no known kind"),
        };
        if bytes[1] as usize >= Lane::COUNT || bytes[2] & !CHECKED != 0 || bytes[3] != 0 {
            return Err("a header with impossible fields");
        }
        let header = Header {
            kind,
            lane: Lane(bytes[1]),
            from: u32_at(4),
            to: u32_at(8),
            number: u64_at(16),
            offset: u64_at(24),
            total: u64_at(32),
            len: u32_at(12),
            crc: (bytes[2] & CHECKED != 0).then(|| u32_at(40)),
        };
        let most = match kind {
            Kind::Put => CHUNK,
            Kind::Failed => TEXT,
            _ => 0,
        };
        if header.len as usize > most {
            return Err("a frame that is too long");
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded_and_no_bit_may_flip(
            fields: (u32, u32, u64, u64, u64), kind in 0usize..7, lane in 0u8..8, len in 0u32..=CHUNK as u32,
            crc: Option<u32>, flip in 0..HEADER * 8,
        ) {
            use Kind::{Beat, Credit, Failed, Farewell, Left, Put, Room};
            let kind = [Put, Credit, Beat, Left, Farewell, Failed, Room][kind];
            let len = match kind { Put => len, Failed => len % (TEXT as u32 + 1), _ => 0 };
            let (from, to, number, offset, total) = fields;
            let header = Header { kind, lane: Lane(lane), from, to, number, offset, total, len, crc };
            let mut bytes = header.encode();
            prop_assert_eq!(Header::decode(&bytes), Ok(header));
            bytes[flip / 8] ^= 1 << (flip % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn nothing_else_is_a_header(bytes: [u8; HEADER]) {
            prop_assert!(Header::decode(&bytes).is_err());
        }
    }
}
