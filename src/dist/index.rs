//! Block-cyclic index arithmetic in one dimension: pure, 64-bit, no communication.
//!
//! `n` indices are cut into blocks of `nb`, which are dealt to `nprocs` processes in turn, starting with
//! process `src`. These are ScaLAPACK's `NUMROC`, `INDXG2P`, `INDXG2L` and `INDXL2G` (ScaLAPACK Users'
//! Guide, §4.3), counted from 0. A matrix has one [`Axis`] of rows and one of columns; the types keep
//! global and local indices, and rows and columns, from being mixed.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::ops::{Add, Range};

/// Marks what belongs to the rows of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Row {}
/// Marks what belongs to the columns of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Col {}

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub struct $name<D>(pub usize, PhantomData<D>);

        impl<D> $name<D> {
            /// Index `i`, from 0.
            pub const fn new(i: usize) -> Self {
                $name(i, PhantomData)
            }
        }

        // Written out, because a derive would ask the same of `D`.
        impl<D> Clone for $name<D> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<D> Copy for $name<D> {}
        impl<D> PartialEq for $name<D> {
            fn eq(&self, other: &Self) -> bool {
                self.0 == other.0
            }
        }
        impl<D> Eq for $name<D> {}
        impl<D> PartialOrd for $name<D> {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }
        impl<D> Ord for $name<D> {
            fn cmp(&self, other: &Self) -> Ordering {
                self.0.cmp(&other.0)
            }
        }
        impl<D> Hash for $name<D> {
            fn hash<H: Hasher>(&self, state: &mut H) {
                self.0.hash(state);
            }
        }
        impl<D> fmt::Debug for $name<D> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
        impl<D> fmt::Display for $name<D> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
        impl<D> From<usize> for $name<D> {
            fn from(i: usize) -> Self {
                $name::new(i)
            }
        }
        impl<D> Add<usize> for $name<D> {
            type Output = Self;
            fn add(self, by: usize) -> Self {
                $name::new(self.0 + by)
            }
        }
    };
}

index!(
    /// An index into the whole matrix, from 0.
    Global
);
index!(
    /// An index into the part that one process holds, from 0.
    Local
);

/// One dimension of a block-cyclic layout.
pub struct Axis<D> {
    /// Number of indices.
    pub n: usize,
    /// Block size, at least 1.
    pub nb: usize,
    /// Process coordinate that holds the first block, less than `nprocs`.
    pub src: usize,
    /// Number of processes in this dimension, at least 1.
    pub nprocs: usize,
    _dimension: PhantomData<D>,
}

impl<D> Clone for Axis<D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Axis<D> {}
impl<D> PartialEq for Axis<D> {
    fn eq(&self, other: &Self) -> bool {
        (self.n, self.nb, self.src, self.nprocs) == (other.n, other.nb, other.src, other.nprocs)
    }
}
impl<D> Eq for Axis<D> {}
impl<D> fmt::Debug for Axis<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Axis { n, nb, src, nprocs, .. } = self;
        write!(f, "{n} in blocks of {nb} over {nprocs} from {src}")
    }
}

impl<D> Axis<D> {
    /// `n` indices in blocks of `nb`, dealt to `nprocs` processes from `src` on.
    ///
    /// # Panics
    /// When `nb` or `nprocs` is 0, or `src` is not below `nprocs`: [`crate::dist::Desc`] checks a user's.
    pub const fn new(n: usize, nb: usize, src: usize, nprocs: usize) -> Self {
        assert!(nb > 0 && src < nprocs);
        Axis { n, nb, src, nprocs, _dimension: PhantomData }
    }

    /// How many steps after `src` process `proc` is served.
    const fn turn(&self, proc: usize) -> usize {
        assert!(proc < self.nprocs);
        if proc >= self.src { proc - self.src } else { self.nprocs - self.src + proc }
    }

    /// Coordinate of the process that holds `g` (`INDXG2P`). Also defined past `n`, as if the axis went on.
    pub const fn owner(&self, g: Global<D>) -> usize {
        let turn = (g.0 / self.nb) % self.nprocs;
        let to_end = self.nprocs - self.src;
        if turn < to_end { self.src + turn } else { turn - to_end }
    }

    /// Index of `g` on its owner (`INDXG2L`).
    pub const fn local(&self, g: Global<D>) -> Local<D> {
        Local::new(g.0 / self.nb / self.nprocs * self.nb + g.0 % self.nb)
    }

    /// The global index of `l` on process `proc` (`INDXL2G`).
    pub const fn global(&self, l: Local<D>, proc: usize) -> Global<D> {
        Global::new((l.0 / self.nb * self.nprocs + self.turn(proc)) * self.nb + l.0 % self.nb)
    }

    /// How many indices process `proc` holds (`NUMROC`).
    pub const fn count(&self, proc: usize) -> usize {
        self.count_before(Global::new(self.n), proc)
    }

    /// How many indices below `g` process `proc` holds; that is, its first local index at or after `g`.
    /// `g` may be `n`.
    pub const fn count_before(&self, g: Global<D>, proc: usize) -> usize {
        let blocks = g.0 / self.nb;
        let turn = self.turn(proc);
        let whole = blocks / self.nprocs * self.nb;
        let last = blocks % self.nprocs;
        if turn < last {
            whole + self.nb
        } else if turn == last {
            whole + g.0 % self.nb
        } else {
            whole
        }
    }

    /// The local indices on `proc` of the global range `from..to`.
    pub const fn local_range(&self, range: &Range<usize>, proc: usize) -> Range<usize> {
        self.count_before(Global::new(range.start), proc)..self.count_before(Global::new(range.end), proc)
    }

    /// First index of the block that holds `g`.
    pub const fn block_start(&self, g: Global<D>) -> Global<D> {
        Global::new(g.0 / self.nb * self.nb)
    }

    /// One past the last index of the block that holds `g`, at most `n`.
    pub const fn block_end(&self, g: Global<D>) -> Global<D> {
        let end = g.0 / self.nb * self.nb + self.nb;
        Global::new(if end < self.n { end } else { self.n })
    }

    /// The global range `range` cut at the ends of blocks, in ascending order.
    pub fn blocks(self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = at;
            if start >= range.end {
                return None;
            }
            at = self.block_end(Global::new(start)).0.min(range.end);
            Some(start..at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Deals the blocks out one by one, as a child would deal cards.
    fn deal(n: usize, nb: usize, src: usize, nprocs: usize) -> Vec<Vec<usize>> {
        let mut hands = vec![Vec::new(); nprocs];
        let mut proc = src;
        for g in 0..n {
            if g > 0 && g % nb == 0 {
                proc = (proc + 1) % nprocs;
            }
            hands[proc].push(g);
        }
        hands
    }

    fn agrees_with_dealing(n: usize, nb: usize, src: usize, nprocs: usize) {
        let axis = Axis::<Row>::new(n, nb, src, nprocs);
        let hands = deal(n, nb, src, nprocs);
        assert_eq!((0..nprocs).map(|p| axis.count(p)).sum::<usize>(), n);
        for (proc, hand) in hands.iter().enumerate() {
            assert_eq!(axis.count(proc), hand.len(), "{axis:?} on {proc}");
            for (l, &g) in hand.iter().enumerate() {
                assert_eq!(axis.owner(Global::new(g)), proc);
                assert_eq!(axis.local(Global::new(g)).0, l);
                assert_eq!(axis.global(Local::new(l), proc).0, g);
            }
            for g in 0..=n {
                assert_eq!(axis.count_before(Global::new(g), proc), hand.iter().filter(|&&h| h < g).count());
            }
        }
    }

    #[test]
    fn small_axes_are_dealt_like_cards() {
        for nprocs in 1..=4 {
            for src in 0..nprocs {
                for nb in 1..=5 {
                    for n in 0..=23 {
                        agrees_with_dealing(n, nb, src, nprocs);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_axis_is_dealt_like_cards(n in 0usize..300, nb in 1usize..70, src in 0usize..9, more in 1usize..5) {
            agrees_with_dealing(n, nb, src, src + more);
        }

        #[test]
        fn there_and_back_far_beyond_32_bits(
            g in 0usize..1 << 48, nb in 1usize..5000, src in 0usize..64, more in 1usize..64,
        ) {
            let axis = Axis::<Col>::new(1 << 48, nb, src, src + more);
            let (proc, l) = (axis.owner(Global::new(g)), axis.local(Global::new(g)));
            prop_assert_eq!(axis.global(l, proc).0, g);
            prop_assert_eq!(axis.count_before(Global::new(g), proc), l.0);
            prop_assert_eq!(axis.count_before(Global::new(g + 1), proc), l.0 + 1);
            let before: usize = (0..axis.nprocs).map(|p| axis.count_before(Global::new(g), p)).sum();
            prop_assert_eq!(before, g);
        }

        #[test]
        fn blocks_tile_a_range(n in 1usize..200, nb in 1usize..40, a in 0usize..200, b in 0usize..200) {
            let axis = Axis::<Row>::new(n, nb, 0, 3);
            let (a, b) = (a.min(b).min(n), a.max(b).min(n));
            let mut next = a;
            for block in axis.blocks(a..b) {
                prop_assert_eq!(block.start, next);
                prop_assert!(block.end > block.start && block.end <= b);
                prop_assert_eq!((block.end - 1) / nb, block.start / nb);
                prop_assert!(block.start == a || block.start % nb == 0);
                next = block.end;
            }
            prop_assert_eq!(next, a.max(b));
        }
    }

    /// Case K5-01: `(ld + 1)·nq` and `lda·col` overflowed 32 bits in HPL 1.0 and ScaLAPACK.
    #[test]
    fn the_last_element_of_n_65536_has_a_64_bit_offset() {
        let axis = Axis::<Row>::new(65536, 128, 0, 1);
        let (row, col) = (axis.local(Global::new(65535)).0, axis.local(Global::new(65535)).0);
        let ld = 65544;
        assert_eq!(col * ld + row, 4_295_491_575);
        assert!(col * ld + row > u32::MAX as usize);
    }

    /// Case K5-02: the workspace query 1 + 6n + 2n² of n = 33040 overflowed.
    #[test]
    fn a_workspace_of_n_33040_is_counted_in_64_bits() {
        let n = Axis::<Col>::new(33040, 64, 0, 1).count(0);
        assert_eq!(1 + 6 * n + 2 * n * n, 2_183_481_441);
        assert!(1 + 6 * n + 2 * n * n > i32::MAX as usize);
    }

    #[test]
    fn a_block_far_larger_than_the_axis_is_one_block() {
        let axis = Axis::<Row>::new(10, 1 << 40, 2, 4);
        assert_eq!([0, 1, 2, 3].map(|p| axis.count(p)), [0, 0, 10, 0]);
        assert_eq!(axis.block_end(Global::new(3)).0, 10);
        assert_eq!(axis.owner(Global::new(9)), 2);
    }
}
