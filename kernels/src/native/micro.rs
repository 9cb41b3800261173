//! What changes with the element type and the instruction set, and the loop over the tiles of a block.

use super::cpu::Keep;
use super::simd::Arch;
use crate::Scalar;

/// One tile of C: C := α·A·B, or C += α·A·B.
#[derive(Clone, Copy)]
pub(super) struct TileJob<T> {
    pub k: usize,
    pub alpha: T,
    /// A's sliver: column p at `a + p·a_step`.
    pub a: *const T,
    pub a_step: usize,
    /// B's strip.
    pub b: *const T,
    pub c: *mut T,
    pub ldc: usize,
    /// Rows and columns of the tile that exist; the rest is computed and dropped.
    pub rows: usize,
    pub cols: usize,
    /// Add to C; else C is not read.
    pub add: bool,
    /// The tile of C that comes next: fetched into L1 meanwhile.
    pub next_c: *const T,
    /// The part of the operand in L1 (strip of B or sliver of A) that comes after this one: fetched into L2, so
    /// many lines for each column of the tile.
    pub next: *const T,
    pub next_lines: usize,
}

/// A lower triangle as the solves read it: element (i, p) is at `at + (i / LR)·sliver + i % LR + p·step`.
#[derive(Clone, Copy)]
pub(super) struct Lower<T> {
    pub at: *const T,
    pub sliver: usize,
    pub step: usize,
}

impl<T> Lower<T> {
    /// As it lies in a column-major matrix.
    pub(super) fn stored(at: *const T, ld: usize, lr: usize) -> Self {
        Lower { at, sliver: lr, step: ld }
    }

    /// In slivers of `lr` rows, each `lr·k` elements.
    pub(super) fn packed(at: *const T, k: usize, lr: usize) -> Self {
        Lower { at, sliver: lr * k, step: lr }
    }

    /// Column 0 of rows `i..`.
    pub(super) fn row(self, i: usize, lr: usize) -> *const T {
        self.at.wrapping_add(i / lr * self.sliver + i % lr)
    }
}

/// The register kernels of one element type on one instruction set.
///
/// # Safety
/// All functions run inside [`Arch::enter`] of their `Arch`, and pointers are valid for what the
/// arguments say.
pub(super) trait Micro<T: Scalar>: Copy + Send + Sync + 'static {
    /// The instruction set.
    type Arch: Arch;
    /// Rows of a tile.
    const MR: usize;
    /// Columns of a tile.
    const NR: usize;
    /// Whether [`Micro::tile`] can read A where it lies, without packing.
    const READS_COLUMNS: bool;

    /// Computes one tile. If `AHEAD`, B is asked for some steps ahead.
    unsafe fn tile<const AHEAD: bool>(job: TileJob<T>);

    /// Writes element i of column p of a sliver of A. Within their column the MR elements may lie as
    /// the tile likes them (the strips of B lie as documented).
    unsafe fn put_a(sliver: *mut T, p: usize, i: usize, x: T);
    /// Writes column p of a sliver of A, MR elements from `run` on.
    unsafe fn copy_a(sliver: *mut T, p: usize, run: *const T);

    /// Length of the sides of the squares that [`Micro::transpose`] moves, which divides MR and NR; 0 if there is none.
    const SQUARE: usize;
    /// Element (i, q) of the square, which is at `from + i·from_step + q`, goes to `to + q·to_step + i`.
    unsafe fn transpose(from: *const T, from_step: isize, to: *mut T, to_step: isize);

    /// Rows of L that are solved together.
    const LR: usize;
    /// X := L⁻¹·X for `strips` strips, each `k·NR` elements, one after another. L is k × k, lower; its diagonal is taken
    /// as ones if `unit`. `ahead` is called for some rows at a time (the first, their number), once for each row.
    unsafe fn solve(
        l: Lower<T>,
        k: usize,
        unit: bool,
        x: *mut T,
        strips: usize,
        ahead: impl FnMut(usize, usize),
    );

    /// See [`crate::Kernels::panel_column`]: `cols` is m × (np + 1), `u` has np elements.
    unsafe fn column(
        cols: *mut T,
        lld: usize,
        m: usize,
        scale: Option<T>,
        u: *const T,
        np: usize,
    ) -> Option<usize>;

    /// x := alpha·x
    unsafe fn scal(alpha: T, x: *mut T, n: usize);
}

/// Operands of a block product: how slivers, strips and columns follow each other.
#[derive(Clone, Copy)]
pub(super) struct Block<T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: T,
    pub a: *const T,
    /// From a sliver of A to the next.
    pub a_sliver: usize,
    /// From a column of a sliver to the next.
    pub a_step: usize,
    pub b: *const T,
    /// From a strip of B to the next.
    pub b_strip: usize,
    pub c: *mut T,
    pub ldc: usize,
    pub add: bool,
    /// Whether B may be far away yet, where its block is to be kept in L2.
    pub fresh: bool,
}

/// Slivers of A that a fresh block of B is multiplied with strip by strip: each strip is on its way while so many tiles
/// of the one before are computed.
const FIRST: usize = 4;

impl<T: Scalar> Block<T> {
    /// Computes the block. The next tile of C and the next part of the operand that is not kept in L2 are
    /// fetched while a tile is computed. Calls `before` each tile.
    ///
    /// # Safety
    /// As for [`Micro`].
    #[inline(always)]
    pub(super) unsafe fn run<K: Micro<T>>(self, keep: Keep, mut before: impl FnMut()) {
        // SAFETY: the caller's promise.
        unsafe {
            match keep {
                // Strip by strip.
                Keep::A => self.tiles::<K, false>(before),
                // Sliver by sliver. It does not fit into L1 beside all else, and much of it has to be asked for.
                Keep::B if self.fresh && self.m >= FIRST * K::MR => {
                    let rows = FIRST * K::MR;
                    Block { m: rows, ..self }.tiles::<K, false>(&mut before);
                    let (a, c) = (self.a.wrapping_add(FIRST * self.a_sliver), self.c.wrapping_add(rows));
                    Block { m: self.m - rows, a, c, ..self }.tiles::<K, true>(before);
                }
                Keep::B => self.tiles::<K, true>(before),
            }
        }
    }

    #[inline(always)]
    unsafe fn tiles<K: Micro<T>, const BY_SLIVER: bool>(self, mut before: impl FnMut()) {
        let slivers = self.m.div_ceil(K::MR);
        let strips = self.n.div_ceil(K::NR);
        let (outer, inner) = if BY_SLIVER { (slivers, strips) } else { (strips, slivers) };
        let (width, outer_step, first) =
            if BY_SLIVER { (K::MR, self.a_sliver, self.a) } else { (K::NR, self.b_strip, self.b) };
        // Of the next sliver (strip), each tile fetches its share, in NR steps.
        let lines = (width * self.k * size_of::<T>()).div_ceil(64).div_ceil(inner.max(1) * K::NR);
        // Slivers that are not packed, or are packed one by one, are asked for by the caller.
        let lines = if BY_SLIVER && (self.a_step != K::MR || self.a_sliver == 0) { 0 } else { lines };
        let at = |o: usize, i: usize| {
            let (r, s) = if BY_SLIVER { (o, i) } else { (i, o) };
            (r, s, self.c.wrapping_add(r * K::MR + s * K::NR * self.ldc))
        };
        for o in 0..outer {
            // After the last comes what follows it in memory, where the caller will most likely go on.
            let after = first.wrapping_add((o + 1) * outer_step);
            for i in 0..inner {
                before();
                let (r, s, c) = at(o, i);
                let (_, _, next_c) = if i + 1 < inner { at(o, i + 1) } else { at(o + 1, 0) };
                // SAFETY: the caller's promise; the tile lies inside the block.
                unsafe {
                    K::tile::<BY_SLIVER>(TileJob {
                        k: self.k,
                        alpha: self.alpha,
                        a: self.a.wrapping_add(r * self.a_sliver),
                        a_step: self.a_step,
                        b: self.b.wrapping_add(s * self.b_strip),
                        c,
                        ldc: self.ldc,
                        rows: (self.m - r * K::MR).min(K::MR),
                        cols: (self.n - s * K::NR).min(K::NR),
                        add: self.add,
                        next_c,
                        next: after.wrapping_byte_add(i * K::NR * lines * 64),
                        next_lines: lines,
                    });
                }
            }
        }
    }
}
