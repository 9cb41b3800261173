//! From a stream of bytes to frames: bytes of puts are received where they belong. No I/O, no clock.

use super::Wrong;
use super::frame::{HEADER, Header};
use super::incoming::Place;
use crate::fabric::checksum;

/// Headers and small puts are received here, several at a time.
const ROOM: usize = 8 << 10;

/// Where frames go.
pub trait Sink {
    /// A header has come: where do its bytes go?
    fn accept(&mut self, header: &Header) -> Result<Place, Wrong>;

    /// Its bytes are there, and their checksum is right.
    fn landed(&mut self, header: &Header, place: Place) -> Result<(), Wrong>;
}

struct Body {
    header: Header,
    place: Place,
    got: usize,
    crc: u32,
}

impl Body {
    fn left(&self) -> usize {
        self.header.len as usize - self.got
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        match &mut self.place {
            Place::Armed(region) => region.part(self.got, region.len - self.got).as_ptr(),
            Place::Kept(bytes) => bytes[self.got..].as_mut_ptr(),
        }
    }

    /// `n` more bytes are there.
    fn advance(&mut self, n: usize) {
        if self.header.crc.is_some() {
            self.crc = match &self.place {
                Place::Armed(region) => region.part(self.got, n).crc(self.crc),
                Place::Kept(bytes) => checksum::crc32c_append(self.crc, &bytes[self.got..self.got + n]),
            };
        }
        self.got += n;
    }

    fn copy(&mut self, bytes: &[u8]) {
        match &mut self.place {
            Place::Armed(region) => region.part(self.got, bytes.len()).fill(bytes),
            Place::Kept(kept) => kept[self.got..self.got + bytes.len()].copy_from_slice(bytes),
        }
        self.advance(bytes.len());
    }
}

/// The receiving side of a connection.
pub struct Rx {
    room: Box<[u8; ROOM]>,
    /// How much of it is filled; all of it was looked at.
    have: usize,
    /// The frame whose bytes come next; then `room` is empty.
    body: Option<Body>,
}

impl Rx {
    pub fn new() -> Self {
        Rx { room: Box::new([0; ROOM]), have: 0, body: None }
    }

    /// Where the next bytes are to be received, in order. Behind the bytes of a put is room for the next
    /// header only: what is received elsewhere has to be copied.
    pub fn room(&mut self) -> [libc::iovec; 2] {
        let vec = |ptr: *mut u8, len: usize| libc::iovec { iov_base: ptr.cast(), iov_len: len };
        let tail = self.room.as_mut_ptr();
        match &mut self.body {
            Some(body) => [vec(body.as_mut_ptr(), body.left()), vec(tail, HEADER)],
            None => [vec(self.room[self.have..].as_mut_ptr(), ROOM - self.have), vec(tail, 0)],
        }
    }

    /// `n` bytes were received there.
    ///
    /// # Errors
    /// What is wrong with them; nothing more may be received then.
    pub fn received(&mut self, n: usize, sink: &mut dyn Sink) -> Result<(), Wrong> {
        let direct = self.body.as_ref().map_or(0, |body| n.min(body.left()));
        if let Some(body) = &mut self.body {
            body.advance(direct);
        }
        self.have += n - direct;
        let mut used = 0;
        loop {
            if let Some(body) = &mut self.body {
                let more = body.left().min(self.have - used);
                body.copy(&self.room[used..used + more]);
                used += more;
                if body.left() > 0 {
                    self.have = 0;
                    return Ok(());
                }
            }
            if let Some(Body { header, place, crc, .. }) = self.body.take() {
                if header.crc.is_some_and(|sent| sent != crc) {
                    return Err(Wrong::Corrupt(format!(
                        "a wrong checksum of bytes {}.. of put {} on the {} lane",
                        header.offset, header.number, header.lane
                    )));
                }
                sink.landed(&header, place)?;
            }
            let Some(head) = self.room[used..self.have].first_chunk::<HEADER>() else { break };
            let header = Header::decode(head).map_err(|what| Wrong::Corrupt(what.into()))?;
            used += HEADER;
            let place = sink.accept(&header)?;
            self.body = Some(Body { header, place, got: 0, crc: 0 });
        }
        self.room.copy_within(used..self.have, 0);
        self.have -= used;
        Ok(())
    }
}
