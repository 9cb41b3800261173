//! Long streams of elements between two members, in chunks through two registered buffers.

use std::ops::Range;

use bytemuck::Pod;

use super::group::Group;
use crate::error::{Error, Result};
use crate::fabric::{Buf, Lane};

/// A pair of buffers through which whole matrices travel on [`Lane::BULK`]: while one chunk is on its
/// way, the next is packed or the last unpacked.
pub struct Bulk<T> {
    group: Group,
    halves: [Buf<T>; 2],
}

impl<T: Pod> Bulk<T> {
    /// Bytes of a chunk.
    pub const CHUNK_BYTES: usize = 1 << 20;

    /// Streams between members of `group`.
    ///
    /// # Errors
    /// [`Error::Resources`] when there is no memory.
    pub fn new(group: &Group) -> Result<Self> {
        let len = (Self::CHUNK_BYTES / size_of::<T>()).max(1);
        let half = || Buf::zeros(&**group.fabric(), len);
        Ok(Bulk { group: group.clone(), halves: [half()?, half()?] })
    }

    fn chunk(&self, i: usize, total: usize) -> Range<usize> {
        let len = self.halves[0].len();
        (i * len).min(total)..((i + 1) * len).min(total)
    }

    /// Sends `total` elements to member `to`, which receives as many: `fill` is asked for the parts in order.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn send(
        &mut self,
        to: usize,
        total: usize,
        mut fill: impl FnMut(Range<usize>, &mut [T]),
    ) -> Result<()> {
        let group = self.group.clone();
        let (net, to) = (&**group.fabric(), group.ranks()[to]);
        for i in 0.. {
            let part = self.chunk(i, total);
            if part.is_empty() {
                break;
            }
            let half = &mut self.halves[i % 2];
            half.flush(net)?;
            fill(part.clone(), half.write(0..part.len()));
            half.put(net, Lane::BULK, to, 0..part.len())?;
        }
        self.halves.iter_mut().try_for_each(|half| half.flush(net))
    }

    /// Receives the `total` elements that member `from` sends: `take` is given the parts in order.
    ///
    /// # Errors
    /// When a rank is lost, or sent another number of elements.
    pub fn receive(
        &mut self,
        from: usize,
        total: usize,
        mut take: impl FnMut(Range<usize>, &[T]),
    ) -> Result<()> {
        let group = self.group.clone();
        let (net, from) = (&**group.fabric(), group.ranks()[from]);
        for i in 0..2 {
            let part = self.chunk(i, total);
            if !part.is_empty() {
                self.halves[i].arm(net, Lane::BULK, from, 0..part.len())?;
            }
        }
        for i in 0.. {
            let (part, after) = (self.chunk(i, total), self.chunk(i + 2, total));
            if part.is_empty() {
                break;
            }
            let half = &mut self.halves[i % 2];
            let came = half.wait(net, Lane::BULK, from)?;
            if came.len() != part.len() {
                return Err(Error::Internal(format!(
                    "rank {from} sent {} elements where {} were expected",
                    came.len(),
                    part.len()
                )));
            }
            take(part, half.read(came));
            if !after.is_empty() {
                half.arm(net, Lane::BULK, from, 0..after.len())?;
            }
        }
        Ok(())
    }
}
