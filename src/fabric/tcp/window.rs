//! How much may be on its way between two ranks that others pass frames on between. No I/O, no clock.
//!
//! Each rank in between can hold [`ROOM`] bytes of every pair that it passes frames on for, so it never has to
//! stop reading, and no circle of full buffers can close.

use super::Wrong;
use super::frame::{CHUNK, EAGER, HEADER};

/// Bytes of frames, headers included, that a source may be ahead of what its target has taken.
pub const ROOM: u64 = 1 << 20;
/// A target that has taken so many says so.
const TELL: u64 = ROOM / 4;
/// Long puts leave so much of the window to small ones.
const RESERVE: u64 = 64 << 10;

/// What a long put may not have, and what a target may keep to itself, still let a piece through.
const _: () = assert!(TELL + RESERVE + (HEADER + CHUNK) as u64 <= ROOM);

/// A pair's window, as one of its two ranks sees it: as source, and as target.
#[derive(Default)]
pub struct Window {
    sent: u64,
    /// Of these, what the target says it has taken.
    acknowledged: u64,
    taken: u64,
    /// Of these, what the source has been told of.
    told: u64,
}

impl Window {
    /// How many bytes the next frame may have behind its header; `None`: no frame may go.
    pub fn most(&self) -> Option<usize> {
        let left = ROOM - (self.sent - self.acknowledged);
        if left >= (HEADER + CHUNK) as u64 + RESERVE {
            return Some(CHUNK);
        }
        left.checked_sub(HEADER as u64).map(|left| (left as usize).min(EAGER))
    }

    /// A frame with so many bytes behind its header goes.
    pub fn sends(&mut self, bytes: usize) {
        self.sent += (HEADER + bytes) as u64;
    }

    /// The target says how much it has taken in all.
    ///
    /// # Errors
    /// When that cannot be.
    pub fn acknowledge(&mut self, taken: u64) -> Result<(), Wrong> {
        if !(self.acknowledged..=self.sent).contains(&taken) {
            return Err(Wrong::Corrupt(format!(
                "a receipt for {taken} bytes, after one for {} and {} sent,",
                self.acknowledged, self.sent
            )));
        }
        self.acknowledged = taken;
        Ok(())
    }

    /// A frame with so many bytes behind its header was taken: how much to say was taken in all, if it is time.
    pub fn takes(&mut self, bytes: usize) -> Option<u64> {
        self.taken += (HEADER + bytes) as u64;
        (self.taken - self.told >= TELL).then(|| {
            self.told = self.taken;
            self.told
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the frames and however late they and the receipts are: never more than the window is on
        /// its way, and when all has arrived a piece may go.
        #[test]
        fn never_more_than_the_window_and_never_stuck(
            steps in proptest::collection::vec((0u8..4, 0usize..=CHUNK), 1..300)
        ) {
            let (mut source, mut target) = (Window::default(), Window::default());
            let (mut wire, mut back) = (std::collections::VecDeque::new(), std::collections::VecDeque::new());
            for (what, len) in steps {
                match what {
                    0 | 1 => if let Some(most) = source.most() {
                        source.sends(len.min(most));
                        wire.push_back(len.min(most));
                    },
                    2 => if let Some(len) = wire.pop_front() {
                        back.extend(target.takes(len));
                    },
                    _ => if let Some(taken) = back.pop_front() {
                        source.acknowledge(taken).unwrap();
                    },
                }
                let under_way: usize = wire.iter().map(|len| HEADER + len).sum();
                prop_assert!(under_way as u64 <= ROOM);
                prop_assert!(back.len() as u64 <= ROOM / TELL);
            }
            back.extend(wire.into_iter().filter_map(|len| target.takes(len)));
            for taken in back {
                source.acknowledge(taken).unwrap();
            }
            prop_assert_eq!(source.most(), Some(CHUNK));
        }
    }

    #[test]
    fn receipts_that_cannot_be() {
        let mut window = Window::default();
        window.sends(52);
        assert!(window.acknowledge(101).is_err());
        window.acknowledge(100).unwrap();
        assert!(window.acknowledge(99).is_err());
        window.acknowledge(100).unwrap();
    }
}
