//! What changes with the element type and the instruction set, and the loop over the tiles of a block.

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
    /// The tile of C that comes next, and the part of B that comes after this strip: fetched meanwhile.
    pub next_c: *const T,
    pub next_b: *const T,
    pub next_b_lines: usize,
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

    /// Computes one tile.
    unsafe fn tile(job: TileJob<T>);

    /// Writes element i of column p of a sliver of A. Within their column the MR elements may lie as
    /// the tile likes them (the strips of B lie as documented).
    unsafe fn put_a(sliver: *mut T, p: usize, i: usize, x: T);
    /// Writes column p of a sliver of A, MR elements from `run` on.
    unsafe fn copy_a(sliver: *mut T, p: usize, run: *const T);

    /// X := L⁻¹·X for `strips` strips, each `k·NR` elements, one after another. `l` is k × k, lower;
    /// its diagonal is taken as ones if `unit`.
    unsafe fn solve(l: *const T, ldl: usize, k: usize, unit: bool, x: *mut T, strips: usize);

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
}

impl<T: Scalar> Block<T> {
    /// Computes the block, strip by strip: B's strip stays in L1, A's block in L2. The next tile of C
    /// and the next strip of B are fetched while a tile is computed.
    ///
    /// # Safety
    /// As for [`Micro`].
    #[inline(always)]
    pub(super) unsafe fn run<K: Micro<T>>(self) {
        let slivers = self.m.div_ceil(K::MR);
        let strips = self.n.div_ceil(K::NR);
        let b_bytes = K::NR * self.k * size_of::<T>();
        // Of the next strip, each tile fetches its share, in NR steps.
        let lines = b_bytes.div_ceil(64).div_ceil(slivers.max(1) * K::NR);
        for s in 0..strips {
            let b = self.b.wrapping_add(s * self.b_strip);
            let c0 = self.c.wrapping_add(s * K::NR * self.ldc);
            let after = if s + 1 < strips { b.wrapping_add(self.b_strip) } else { self.b };
            for r in 0..slivers {
                let c = c0.wrapping_add(r * K::MR);
                let next_c =
                    if r + 1 < slivers { c.wrapping_add(K::MR) } else { c0.wrapping_add(K::NR * self.ldc) };
                // SAFETY: the caller's promise; the tile lies inside the block.
                unsafe {
                    K::tile(TileJob {
                        k: self.k,
                        alpha: self.alpha,
                        a: self.a.wrapping_add(r * self.a_sliver),
                        a_step: self.a_step,
                        b,
                        c,
                        ldc: self.ldc,
                        rows: (self.m - r * K::MR).min(K::MR),
                        cols: (self.n - s * K::NR).min(K::NR),
                        add: self.add,
                        next_c,
                        next_b: after.wrapping_byte_add(r * K::NR * lines * 64),
                        next_b_lines: lines,
                    });
                }
            }
        }
    }
}
