//! Any BLAS on the machine, found at run time and never linked.
//!
//! Only `xGEMM` and `xTRSM` are called: they return nothing, so that no compiler's idea of how a complex
//! number is returned can differ from ours; the rest is left to our own kernels. The library is set to one
//! thread and called by all of ours at once, each on its own part of C: that is the one model that suits the
//! packed operands, and a library that can't be called so is called under a lock.
//!
//! A packed operand is the documented one with a tile so large that one tile is worth a call: a sliver of A
//! is a column-major matrix of `mr` rows, a strip of B the transpose of one of `nr` rows.

mod cut;
mod library;
mod vendor;

use std::ops::Range;

use faer::prelude::ReborrowMut;

use crate::reference::{gemm_shape, packing_name, scaled, trsm_shape};
use crate::{
    Description, Diag, Element, KernelSet, Kernels, MatMut, MatRef, Op, SharedMut, Side, Team, Tile, Uplo,
};

use library::Library;
pub(crate) use library::{Wanted, known_names};

/// A library packs both operands anew in each call. At this size that costs 7 % of OpenBLAS's and MKL's
/// speed on one big call (512 x 512: 12 %; 2048 x 512: 4 %, but too coarse to share among many threads).
const TILE: Tile = Tile { mr: 1024, nr: 512, mc: 1024, nc: usize::MAX };

/// Below this many multiplications waking the team costs more than it brings.
const WORTH_A_TEAM: usize = 64 * 64 * 64;

/// A foreign library as a back end.
pub(crate) struct Blas {
    library: &'static Library,
    /// The largest number that the library is given as a size.
    limit: usize,
    /// Serves what is not gemm or trsm.
    pieces: KernelSet,
    description: Description,
}

impl Blas {
    /// Finds the library; `pieces` serves what BLAS does not have.
    ///
    /// # Errors
    /// What was tried, and the remedy.
    pub(crate) fn find(wanted: &Wanted, pieces: KernelSet) -> Result<Self, String> {
        let library = Library::load(wanted)?;
        let detail = library.identity().detail();
        let description = Description { backend: "blas".into(), detail, packing: packing_name(TILE) };
        Ok(Blas { library, limit: library.limit(), pieces, description })
    }

    /// What the user should know about the library's choice of kernels.
    pub(crate) fn warning(&self) -> Option<String> {
        self.library.identity().warning()
    }

    /// C += α·op(A)·op(B) by this thread.
    fn update<T: Element>(&self, alpha: T, a: (Op, MatRef<'_, T>), b: (Op, MatRef<'_, T>), c: MatMut<'_, T>) {
        cut::gemm(self.library, self.limit, alpha, a, b, c);
    }
}

/// Cuts `parts` threads into rows × columns of parts of an m × n matrix, of the least perimeter.
fn grid(parts: usize, m: usize, n: usize) -> (usize, usize) {
    let fits = (1..=parts).filter(|p| parts.is_multiple_of(*p)).map(|p| (p, parts / p));
    fits.min_by_key(|(p, q)| m.div_ceil(*p) + n.div_ceil(*q)).unwrap_or((1, 1))
}

/// The `i`-th of `parts` parts of `0..n`, cut at multiples of `unit`.
fn part(n: usize, parts: usize, i: usize, unit: usize) -> Range<usize> {
    let units = n.div_ceil(unit);
    let cut = |i: usize| (units * i / parts * unit).min(n);
    cut(i)..cut(i + 1)
}

/// Part of op(A), as stored.
fn sub<'a, T>(op: Op, a: MatRef<'a, T>, rows: Range<usize>, cols: Range<usize>) -> MatRef<'a, T> {
    let (rows, cols) = if op == Op::NoTrans { (rows, cols) } else { (cols, rows) };
    a.submatrix(rows.start, cols.start, rows.len(), cols.len())
}

/// C := β·C. A zero β is written out and never left to the library: Accelerate has left NaNs standing
/// (ml-explore/mlx#3563), and OpenBLAS's `scal` has multiplied them.
fn scale<T: Element>(beta: T, mut c: MatMut<'_, T>) {
    if beta != T::one() {
        for j in 0..c.ncols() {
            for i in 0..c.nrows() {
                c[(i, j)] = scaled(beta, c[(i, j)]);
            }
        }
    }
}

/// A column of a matrix with unit row stride.
fn column<'a, T>(a: MatRef<'a, T>, j: usize) -> &'a [T] {
    if a.nrows() == 1 {
        return std::slice::from_ref(a.get(0, j));
    }
    a.col(j).try_as_col_major().expect("unit row stride").as_slice()
}

/// out[j + p·nr] = b[p, j], in blocks that stay in cache; `out` is one strip.
fn pack_strip<T: Element>(b: MatRef<'_, T>, nr: usize, out: &mut [T]) {
    const BLOCK: usize = 16;
    for j0 in (0..b.ncols()).step_by(BLOCK) {
        for p0 in (0..b.nrows()).step_by(BLOCK) {
            for j in j0..b.ncols().min(j0 + BLOCK) {
                for (p, x) in column(b, j).iter().enumerate().skip(p0).take(BLOCK) {
                    out[p * nr + j] = *x;
                }
            }
        }
    }
    if b.ncols() < nr {
        out.chunks_exact_mut(nr).for_each(|row| row[b.ncols()..].fill(T::default()));
    }
}

/// Columns of a packed strip up to the last one that is not all zeros.
fn live_columns<T: Element>(strip: &[T], nr: usize) -> usize {
    (1..=nr).rev().find(|n| strip.chunks_exact(nr).any(|row| row[n - 1] != T::default())).unwrap_or(0)
}

/// A sliver or strip as the column-major matrix that it is: `width` rows apart, `used` of them shown.
fn as_matrix<T>(packed: &[T], width: usize, used: usize) -> MatRef<'_, T> {
    MatRef::from_column_major_slice_with_stride(packed, used, packed.len() / width, width)
}

impl<T: Element> Kernels<T> for Blas {
    fn description(&self) -> &Description {
        &self.description
    }

    fn bitwise_stable(&self) -> bool {
        false
    }

    fn gemm(
        &self,
        team: &Team,
        alpha: T,
        a: (Op, MatRef<'_, T>),
        b: (Op, MatRef<'_, T>),
        beta: T,
        c: MatMut<'_, T>,
    ) {
        let (m, n, k) = gemm_shape(a, b, &c);
        if k == 0 || alpha == T::default() {
            return scale(beta, c);
        }
        let work = |rows: Range<usize>, cols: Range<usize>, mut c: MatMut<'_, T>| {
            scale(beta, c.rb_mut());
            self.update(alpha, (a.0, sub(a.0, a.1, rows, 0..k)), (b.0, sub(b.0, b.1, 0..k, cols)), c);
        };
        if m.saturating_mul(n).saturating_mul(k) < WORTH_A_TEAM {
            return work(0..m, 0..n, c);
        }
        let (p, q) = grid(team.len(), m, n);
        let shared = SharedMut::new(c);
        team.run(|me| {
            let (rows, cols) = (part(m, p, me.index() % p, 32), part(n, q, me.index() / p, 8));
            // SAFETY: the parts of the members' grid are disjoint.
            work(rows.clone(), cols.clone(), unsafe { shared.part(rows, cols) });
        });
    }

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
    ) {
        trsm_shape(side, a, &b);
        if alpha == T::default() {
            return scale(alpha, b);
        }
        let (m, n) = (b.nrows(), b.ncols());
        let shared = SharedMut::new(b);
        let solve = |rows, cols| {
            // SAFETY: members solve for disjoint rows or columns.
            let b = unsafe { shared.part(rows, cols) };
            cut::trsm(self.library, self.limit, (side, uplo, op, diag), alpha, a, b);
        };
        if m.saturating_mul(n).saturating_mul(a.nrows()) < WORTH_A_TEAM {
            return solve(0..m, 0..n);
        }
        team.run(|me| match side {
            Side::Left => solve(0..m, me.share(n, 8)),
            Side::Right => solve(me.share(m, 32), 0..n),
        });
    }

    fn tile(&self) -> Tile {
        TILE
    }

    fn pack_a(&self, a: MatRef<'_, T>, out: &mut [T]) {
        let (m, k) = (a.nrows(), a.ncols());
        assert_eq!(out.len(), TILE.packed_a_len(m, k), "pack_a: length of `out` for {m} x {k}");
        if out.is_empty() {
            return;
        }
        for (sliver, out) in out.chunks_exact_mut(TILE.mr * k).enumerate() {
            let first = sliver * TILE.mr;
            let rows = TILE.mr.min(m - first);
            for (p, out) in out.chunks_exact_mut(TILE.mr).enumerate() {
                out[..rows].copy_from_slice(&column(a, p)[first..][..rows]);
                out[rows..].fill(T::default());
            }
        }
    }

    fn pack_b(&self, b: MatRef<'_, T>, out: &mut [T]) {
        let (k, n) = (b.nrows(), b.ncols());
        assert_eq!(out.len(), TILE.packed_b_len(k, n), "pack_b: length of `out` for {k} x {n}");
        if out.is_empty() {
            return;
        }
        for (strip, out) in out.chunks_exact_mut(TILE.nr * k).enumerate() {
            let first = strip * TILE.nr;
            pack_strip(b.subcols(first, TILE.nr.min(n - first)), TILE.nr, out);
        }
    }

    fn unpack_b(&self, packed: &[T], mut b: MatMut<'_, T>) {
        let (k, n) = (b.nrows(), b.ncols());
        assert_eq!(packed.len(), TILE.packed_b_len(k, n), "unpack_b: length of `packed` for {k} x {n}");
        for j in 0..n {
            let strip = &packed[j / TILE.nr * TILE.nr * k..];
            for p in 0..k {
                b[(p, j)] = strip[p * TILE.nr + j % TILE.nr];
            }
        }
    }

    fn trsm_packed(&self, l: MatRef<'_, T>, b: &mut [T]) {
        let k = l.nrows();
        assert_eq!(k, l.ncols(), "trsm_packed: L is square");
        if b.is_empty() {
            return;
        }
        assert_eq!(b.len() % (k * TILE.nr), 0, "trsm_packed: whole strips");
        // B is stored transposed: Bᵀ := Bᵀ·L⁻ᵀ.
        let flags = (Side::Right, Uplo::Lower, Op::Trans, Diag::Unit);
        for strip in b.chunks_exact_mut(k * TILE.nr) {
            let used = live_columns(strip, TILE.nr);
            let bt = MatMut::from_column_major_slice_with_stride_mut(strip, used, k, TILE.nr);
            cut::trsm(self.library, self.limit, flags, T::one(), l, bt);
        }
    }

    fn gemm_packed(&self, alpha: T, a: &[T], b: &[T], k: usize, mut c: MatMut<'_, T>) {
        let (m, n) = (c.nrows(), c.ncols());
        assert_eq!(a.len(), TILE.packed_a_len(m, k), "gemm_packed: length of A for {m} x {k}");
        assert_eq!(b.len(), TILE.packed_b_len(k, n), "gemm_packed: length of B for {k} x {n}");
        if m == 0 || n == 0 || k == 0 || alpha == T::default() {
            return;
        }
        for (strip, b) in b.chunks_exact(TILE.nr * k).enumerate() {
            let col = strip * TILE.nr;
            let cols = TILE.nr.min(n - col);
            let bt = as_matrix(b, TILE.nr, cols);
            for (sliver, a) in a.chunks_exact(TILE.mr * k).enumerate() {
                let row = sliver * TILE.mr;
                let rows = TILE.mr.min(m - row);
                let c = c.rb_mut().submatrix_mut(row, col, rows, cols);
                self.update(alpha, (Op::NoTrans, as_matrix(a, TILE.mr, rows)), (Op::Trans, bt), c);
            }
        }
    }

    fn gemm_panel(&self, alpha: T, a: MatRef<'_, T>, b: MatRef<'_, T>, c: MatMut<'_, T>) {
        let (_, _, k) = gemm_shape((Op::NoTrans, a), (Op::NoTrans, b), &c);
        if k > 0 && alpha != T::default() {
            self.update(alpha, (Op::NoTrans, a), (Op::NoTrans, b), c);
        }
    }

    fn iamax(&self, x: &[T]) -> Option<usize> {
        self.pieces.of::<T>().iamax(x)
    }

    fn panel_column(&self, cols: MatMut<'_, T>, scale: Option<T>, u: &[T]) -> Option<usize> {
        self.pieces.of::<T>().panel_column(cols, scale, u)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reference;
    use faer::Mat;
    use std::io::Write;

    fn blas() -> Option<Blas> {
        Blas::find(&Wanted::Any, KernelSet::new(Reference::new()))
            .map_err(|why| drop(writeln!(std::io::stderr(), "skipped: {why}")))
            .ok()
    }

    /// What a library with narrower integers would be given: every size and leading dimension is beyond it.
    #[test]
    fn sizes_beyond_the_librarys_integers_are_cut_or_copied() {
        let Some(mut blas) = blas() else { return };
        let team = Team::new(2).unwrap();
        let (m, n, k) = (37, 29, 31);
        let big =
            |rows: usize, cols: usize| Mat::from_fn(rows, cols, |i, j| ((i * 7 + j * 5) % 9) as f64 - 4.0);
        for limit in [1, 5, 30, 40, 1000] {
            blas.limit = limit;
            for op in [Op::NoTrans, Op::Trans] {
                let (a, b) = if op == Op::NoTrans { (big(m, k), big(k, n)) } else { (big(k, m), big(n, k)) };
                let (mut got, mut want) = (big(m, n), big(m, n));
                blas.gemm(&team, -2.0, (op, a.as_ref()), (op, b.as_ref()), 3.0, got.as_mut());
                Reference::new().gemm(&team, -2.0, (op, a.as_ref()), (op, b.as_ref()), 3.0, want.as_mut());
                assert_eq!(got, want, "limit {limit}");
            }
            let l = Mat::from_fn(5.min(limit), 5.min(limit), |i, j| if i == j { 2.0 } else { 0.5 });
            for (side, rows, cols) in [(Side::Left, l.nrows(), n), (Side::Right, m, l.nrows())] {
                // Rows further apart than the limit.
                let (got, mut want) = (big(rows + 50, cols), big(rows, cols));
                let mut got = got;
                let how = (side, Uplo::Lower, Op::NoTrans, Diag::NonUnit);
                let part = got.as_mut().subrows_mut(0, rows);
                blas.trsm(&team, how.0, how.1, how.2, how.3, 1.0, l.as_ref(), part);
                Reference::new().trsm(&team, how.0, how.1, how.2, how.3, 1.0, l.as_ref(), want.as_mut());
                let error = got.as_ref().subrows(0, rows) - &want;
                assert!(error.norm_max() < 1e-13, "limit {limit}, {side:?}: {error:?}");
            }
        }
    }

    #[test]
    fn a_missing_library_is_told_with_what_was_tried_and_the_remedy() {
        let find =
            |wanted| Blas::find(&wanted, KernelSet::new(Reference::new())).err().expect("no such library");
        let text = find(Wanted::File("/nowhere/libblas.so".into()));
        assert!(text.contains("/nowhere/libblas.so can't be used"), "{text}");
        assert!(
            text.contains("tried /nowhere/libblas.so: cannot open") || cfg!(target_os = "macos"),
            "{text}"
        );
        assert!(text.contains("install one") && text.contains("blas:/path/to/library"), "{text}");
        if !cfg!(target_os = "macos") {
            let text = find(Wanted::Known("accelerate"));
            assert!(text.starts_with("BLAS `accelerate` is a part of macOS"), "{text}");
        }
        // A library that is none.
        if cfg!(target_os = "linux") {
            let text = find(Wanted::File("libc.so.6".into()));
            assert!(text.contains("exports no dgemm"), "{text}");
        }
    }

    #[test]
    fn the_same_library_is_loaded_once() {
        let Some(one) = blas() else { return };
        assert!(std::ptr::eq(one.library, blas().unwrap().library));
    }

    #[test]
    fn threads_are_cut_to_the_matrix() {
        assert_eq!(grid(4, 1000, 1000), (2, 2));
        assert_eq!(grid(4, 8000, 100), (4, 1));
        assert_eq!(grid(6, 10, 8000), (1, 6));
        assert_eq!(grid(7, 100, 100), (1, 7));
        assert_eq!((part(100, 3, 0, 32), part(100, 3, 2, 32)), (0..32, 64..100));
    }
}
