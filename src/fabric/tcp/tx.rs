//! From frames to a stream of bytes: bytes of puts are sent from where they are. No I/O, no clock.

use std::collections::VecDeque;

use super::frame::{HEADER, Header};
use super::outgoing::Piece;
use super::region::Region;
use crate::fabric::Lane;
use crate::fabric::checksum;

/// Frames are taken up while fewer bytes than this are to be written: what comes later waits for them.
const AHEAD: usize = 256 << 10;
const FRAMES: usize = 32;

enum Body {
    Own(Vec<u8>),
    Put { to: u32, lane: Lane, number: u64, region: Region },
}

/// A frame to be sent.
pub struct Frame {
    head: [u8; HEADER],
    body: Body,
}

impl Frame {
    /// A frame with few bytes, not of a put.
    pub fn own(header: Header, bytes: Vec<u8>) -> Self {
        let crc = (!bytes.is_empty()).then(|| checksum::crc32c(&bytes));
        let header = Header { len: bytes.len() as u32, crc, ..header };
        Frame { head: header.encode(), body: Body::Own(bytes) }
    }

    /// A frame of another rank, passed on as it came.
    pub fn passed(header: &Header, bytes: Vec<u8>) -> Self {
        Frame { head: header.encode(), body: Body::Own(bytes) }
    }

    /// A piece of a put.
    pub fn put(piece: Piece, checked: bool) -> Self {
        let Piece { mut header, region } = piece;
        header.crc = checked.then(|| region.crc(0));
        let body = Body::Put { to: header.to, lane: header.lane, number: header.number, region };
        Frame { head: header.encode(), body }
    }

    fn body(&self) -> (*const u8, usize) {
        match &self.body {
            Body::Own(bytes) => (bytes.as_ptr(), bytes.len()),
            Body::Put { region, .. } => (region.as_ptr().cast_const(), region.len),
        }
    }

    fn len(&self) -> usize {
        HEADER + self.body().1
    }
}

/// The sending side of a connection.
#[derive(Default)]
pub struct Tx {
    frames: VecDeque<Frame>,
    /// Bytes of the first frame that were written.
    written: usize,
    /// Bytes of all frames that were not.
    left: usize,
}

impl Tx {
    /// Whether more frames should be taken up.
    pub fn has_room(&self) -> bool {
        self.left < AHEAD && self.frames.len() < FRAMES
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub fn push(&mut self, frame: Frame) {
        self.left += frame.len();
        self.frames.push_back(frame);
    }

    /// What to write next, in order; returns how many entries it has.
    pub fn bytes(&self, vecs: &mut [libc::iovec; 2 * FRAMES]) -> usize {
        let (mut n, mut skip) = (0, self.written);
        for frame in self.frames.iter().take(FRAMES) {
            for (ptr, len) in [(frame.head.as_ptr(), HEADER), frame.body()] {
                let skipped = skip.min(len);
                skip -= skipped;
                if skipped < len {
                    // SAFETY: less than the part's length.
                    let base = unsafe { ptr.add(skipped) };
                    vecs[n] = libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len - skipped };
                    n += 1;
                }
            }
        }
        n
    }

    /// `n` bytes were written. `done` hears of each piece of a put that was written whole: for which rank,
    /// lane and number.
    pub fn wrote(&mut self, n: usize, mut done: impl FnMut(u32, Lane, u64)) {
        self.left -= n;
        self.written += n;
        while let Some(frame) = self.frames.front() {
            let len = frame.len();
            if self.written < len {
                break;
            }
            self.written -= len;
            if let Some(Frame { body: Body::Put { to, lane, number, .. }, .. }) = self.frames.pop_front() {
                done(to, lane, number);
            }
        }
    }

    /// Room for [`Tx::bytes`].
    pub fn no_bytes() -> [libc::iovec; 2 * FRAMES] {
        [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2 * FRAMES]
    }
}
