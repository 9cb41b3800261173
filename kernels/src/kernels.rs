//! The seam between distributed algorithms and local arithmetic.

use crate::rows::ScatteredRows;
use crate::{MatMut, MatRef, Scalar, Team};

/// Whether an operand is used as it is, transposed, or conjugate-transposed (BLAS's `trans`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Op {
    /// `N`: A.
    NoTrans,
    /// `T`: Aᵀ.
    Trans,
    /// `C`: Aᴴ.
    ConjTrans,
}

/// Which side of the unknown a triangular matrix stands on (BLAS's `side`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Side {
    /// `L`: op(A)·X = α·B.
    Left,
    /// `R`: X·op(A) = α·B.
    Right,
}

/// Which triangle is referenced (BLAS's `uplo`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Uplo {
    /// `L`
    Lower,
    /// `U`
    Upper,
}

/// Whether the diagonal is taken as ones (BLAS's `diag`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Diag {
    /// `U`: ones, never read.
    Unit,
    /// `N`: as stored.
    NonUnit,
}

/// What a back end is, for reports and for agreement between ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Description {
    /// Back end: `native`, `reference`, `blas`, …
    pub backend: String,
    /// What it runs on this machine: `avx512`, `OpenBLAS 0.3.34 SkylakeX`, …
    pub detail: String,
    /// Names the packed layout. Two ranks may exchange packed operands only when theirs are equal.
    pub packing: String,
}

/// Shape of a packed operand's tiles and of the blocks that fit the caches.
///
/// A packed A (m × k) is ⌈m/mr⌉ slivers, each `mr·k` elements: for every column the `mr` rows of it.
/// A packed B (k × n) is ⌈n/nr⌉ strips, each `nr·k` elements: for every row the `nr` columns of it.
/// What lies beyond m or n is zero. (The `mr` elements of a column of A may be in an order of the back
/// end's own, as real before imaginary parts; those of B are not.) So a part of an operand that starts at a multiple of `mr` (`nr`)
/// is a contiguous range, and can be sent and used as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Rows of a tile of C.
    pub mr: usize,
    /// Columns of a tile of C.
    pub nr: usize,
    /// Rows of A that a thread should work through at once (a multiple of `mr`), for a `k` near 256.
    pub mc: usize,
    /// Columns of B that a thread should work through before it goes on to others (a multiple of `nr`, or more than
    /// there can be), for a `k` near 256.
    pub nc: usize,
}

impl Tile {
    /// Elements of a packed A of m × k.
    pub fn packed_a_len(&self, m: usize, k: usize) -> usize {
        m.next_multiple_of(self.mr) * k
    }

    /// Elements of a packed B of k × n.
    pub fn packed_b_len(&self, k: usize, n: usize) -> usize {
        n.next_multiple_of(self.nr) * k
    }
}

/// One rank's arithmetic on elements of type `T`.
///
/// All matrices are column-major: row stride 1, column stride (`lld`) at least the number of rows.
/// Sizes of 0 are legal everywhere and do nothing (or only scale by β). β = 0 means that C is not
/// read, so that a NaN in it vanishes; α = 0 means that A and B are not read.
///
/// # Order of operations
/// An element's value depends on its operands and on k alone: never on the tile it falls into, the
/// thread that computes it, or the number of rows and columns around it. The distributed LU gives the
/// same bits on every grid because of this rule; every back end under `native` keeps it. Foreign
/// libraries need not, and say so by [`Kernels::bitwise_stable`].
///
/// # Panics
/// When shapes do not match or a row stride is not 1: callers check their users' arguments before.
pub trait Kernels<T: Scalar>: Send + Sync {
    /// What this back end is.
    fn description(&self) -> &Description;

    /// Whether the order-of-operations rule above holds.
    fn bitwise_stable(&self) -> bool;

    // ---- Whole operands: the team works on one call ----

    /// C := α·op(A)·op(B) + β·C. `a` and `b` are given as stored, before `op`.
    fn gemm(
        &self,
        team: &Team,
        alpha: T,
        a: (Op, MatRef<'_, T>),
        b: (Op, MatRef<'_, T>),
        beta: T,
        c: MatMut<'_, T>,
    );

    /// Solves op(A)·X = α·B (left) or X·op(A) = α·B (right) in place of B, A triangular.
    /// A zero on the diagonal gives infinities or NaNs, as in BLAS.
    fn trsm(
        &self,
        team: &Team,
        side: Side,
        uplo: Uplo,
        op: Op,
        diag: Diag,
        alpha: T,
        a: MatRef<'_, T>,
        b: MatMut<'_, T>,
    );

    // ---- Packed operands: one thread a call, any number of threads at once ----

    /// Tile and block sizes of the packed layout.
    fn tile(&self) -> Tile;

    /// Packs A (m × k, not transposed) into `out`, of [`Tile::packed_a_len`].
    fn pack_a(&self, a: MatRef<'_, T>, out: &mut [T]);

    /// Packs B (k × n, not transposed) into `out`, of [`Tile::packed_b_len`].
    fn pack_b(&self, b: MatRef<'_, T>, out: &mut [T]);

    /// The inverse of [`Kernels::pack_b`]: writes a packed B out to `b` (k × n).
    fn unpack_b(&self, packed: &[T], b: MatMut<'_, T>);

    /// B := L⁻¹·B for a packed B; `l` is k × k, lower, unit diagonal (never read, nor the upper part).
    fn trsm_packed(&self, l: MatRef<'_, T>, b: &mut [T]);

    /// L (k × k) as [`Kernels::trsm_with`] reads it best, for many solves with the same L; about k² elements.
    fn pack_l(&self, l: MatRef<'_, T>) -> Vec<T> {
        l.col_iter().flat_map(|column| column.iter().copied()).collect()
    }

    /// [`Kernels::trsm_packed`] with an L of order `k` from [`Kernels::pack_l`].
    fn trsm_with(&self, l: &[T], k: usize, b: &mut [T]) {
        self.trsm_packed(MatRef::from_column_major_slice(l, k, k), b);
    }

    /// Packs L⁻¹·B (k × n) into `out`, of [`Tile::packed_b_len`], with an L of order k from [`Kernels::pack_l`].
    fn trsm_into(&self, l: &[T], b: MatRef<'_, T>, out: &mut [T]) {
        self.pack_b(b, out);
        self.trsm_with(l, b.nrows(), out);
    }

    /// C += α·A·B for packed A and B; C is m × n and says how much of the tiles counts.
    fn gemm_packed(&self, alpha: T, a: &[T], b: &[T], k: usize, c: MatMut<'_, T>);

    /// As [`Kernels::gemm_packed`], for a product whose thread will read `soon` next: a back end that can fetches it
    /// into L2 meanwhile.
    fn gemm_packed_before(
        &self,
        alpha: T,
        a: &[T],
        b: &[T],
        k: usize,
        c: MatMut<'_, T>,
        _soon: ScatteredRows<'_, T>,
    ) {
        self.gemm_packed(alpha, a, b, k, c);
    }

    // ---- Pieces of the panel: one thread a call ----

    /// C += α·A·B with one thread, nothing transposed, small k: the panel's own update.
    fn gemm_panel(&self, alpha: T, a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>);

    /// Index of the first element of largest [`Scalar::abs1`], `None` for an empty `x`.
    /// A NaN counts as larger than everything, so that it is met and not passed over.
    fn iamax(&self, x: &[T]) -> Option<usize>;

    /// One left-looking column of the panel, in one pass over its rows.
    ///
    /// `cols` is m × (u.len() + 1): finished columns of L, then the column c to bring up to date.
    /// If `scale` is given, the last finished column is multiplied by it first (it still lacks its
    /// division by the pivot). Then c := c − Σₚ colₚ·u\[p\], p ascending, one fused step each; returned is
    /// [`Kernels::iamax`] of c.
    fn panel_column(&self, cols: MatMut<'_, T>, scale: Option<T>, u: &[T]) -> Option<usize>;

    /// x := α·x.
    fn scal(&self, alpha: T, x: &mut [T]) {
        for x in x {
            *x *= alpha;
        }
    }
}
