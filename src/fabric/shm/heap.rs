//! Which parts of a segment are free: first fit, whole pages, neighbours joined.

use std::collections::BTreeMap;

/// Pieces are multiples of this (the largest page size of the systems we run on but for huge pages).
const UNIT: usize = 16 << 10;

/// The book of one segment. It never touches the memory.
pub struct Heap {
    size: usize,
    /// Start and length of every free piece; no two touch.
    free: BTreeMap<usize, usize>,
}

impl Heap {
    /// All free.
    pub fn new(size: usize) -> Self {
        let usable = size / UNIT * UNIT;
        Heap { size, free: (usable > 0).then_some((0, usable)).into_iter().collect() }
    }

    /// At least `bytes`: where it starts and how long it is.
    pub fn take(&mut self, bytes: usize) -> Option<(usize, usize)> {
        let len = bytes.max(1).checked_next_multiple_of(UNIT)?;
        let (&at, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&at);
        if room > len {
            self.free.insert(at + len, room - len);
        }
        Some((at, len))
    }

    /// Gives back what [`Heap::take`] gave.
    pub fn give(&mut self, mut at: usize, mut len: usize) {
        if let Some((&before, &room)) = self.free.range(..at).next_back()
            && before + room == at
        {
            self.free.remove(&before);
            (at, len) = (before, room + len);
        }
        if let Some(room) = self.free.remove(&(at + len)) {
            len += room;
        }
        self.free.insert(at, len);
    }

    /// Bytes in all.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes that are free.
    pub fn free(&self) -> usize {
        self.free.values().sum()
    }

    /// The largest piece that is free.
    pub fn largest(&self) -> usize {
        self.free.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_disjoint_and_come_back(ops in proptest::collection::vec((any::<bool>(), 0usize..200_000), 1..200)) {
            const SIZE: usize = 1 << 20;
            let mut heap = Heap::new(SIZE);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (take, n) in ops {
                if take || held.is_empty() {
                    if let Some((at, len)) = heap.take(n) {
                        prop_assert!(len >= n.max(1) && at % UNIT == 0 && at + len <= SIZE);
                        prop_assert!(held.iter().all(|(a, l)| at + len <= *a || a + l <= at));
                        held.push((at, len));
                    } else {
                        prop_assert!(heap.largest() < n.max(1).next_multiple_of(UNIT));
                    }
                } else {
                    let (at, len) = held.swap_remove(n % held.len());
                    heap.give(at, len);
                }
                prop_assert_eq!(heap.free() + held.iter().map(|h| h.1).sum::<usize>(), SIZE);
            }
            for (at, len) in held {
                heap.give(at, len);
            }
            prop_assert_eq!(heap.largest(), SIZE, "all joined again");
        }
    }

    #[test]
    fn the_impossible_is_refused() {
        assert_eq!(Heap::new(0).take(1), None);
        assert_eq!(Heap::new(UNIT - 1).take(0), None);
        assert_eq!(Heap::new(1 << 30).take(usize::MAX), None);
        assert_eq!(Heap::new(1 << 30).take((1 << 30) + 1), None);
    }
}
