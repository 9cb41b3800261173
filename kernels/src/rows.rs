//! Moving the rows of a column-major matrix: LAPACK's `laswp`, cut so that the rows that become U land
//! packed, ready for [`crate::Kernels::trsm_packed`] and [`crate::Kernels::gemm_packed`].
//!
//! Every element touched lies in a cache line of its own, so the cost is that of memory latency. The
//! lines of the next strip are asked for while the present one is copied. (Rows that are moved go where rows of U
//! were taken from, to lines that are here.)

use std::ops::Range;

use crate::{MatMut, MatRef, Scalar, SharedMut};

/// Where a row that is wanted here is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowSource {
    /// Row of the local matrix.
    Local(usize),
    /// Row of what another rank sent: (which message, row in it).
    Received(usize, usize),
}

/// Rows of a matrix that will be gathered soon, by [`gather_strip`] or the like.
#[derive(Clone, Copy)]
pub struct ScatteredRows<'a, T> {
    a: MatRef<'a, T>,
    rows: &'a [usize],
}

impl<'a, T: Scalar> ScatteredRows<'a, T> {
    /// `rows` of all columns of `a`.
    pub fn new(a: MatRef<'a, T>, rows: &'a [usize]) -> Self {
        ScatteredRows { a, rows }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows.len() * self.a.ncols()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where they are, column by column. For asking only: the addresses need not be valid.
    pub(crate) fn addresses(self) -> impl Iterator<Item = *const T> {
        let (base, lld) = (self.a.as_ptr(), self.a.col_stride());
        (0..self.a.ncols()).flat_map(move |j| {
            let column = base.wrapping_offset(j as isize * lld);
            self.rows.iter().map(move |&row| column.wrapping_add(row))
        })
    }
}

/// Asks for a cache line that will be written soon.
#[inline(always)]
fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Fills one packed strip (`k·nr` elements, see [`crate::Tile`]) with rows of `a`.
///
/// Row i of the strip is `rows[i]`; column c of the strip is column `col + c` of `a` and of every message.
/// Columns past the last of `a` are left zero. `messages[p]` is a column-major matrix of as many columns
/// as `a`.
///
/// # Panics
/// When a source is out of range.
pub fn gather_strip<T: Scalar>(
    a: MatRef<'_, T>,
    messages: &[MatRef<'_, T>],
    rows: &[RowSource],
    col: usize,
    nr: usize,
    strip: &mut [T],
) {
    assert_eq!(strip.len(), rows.len() * nr);
    let width = nr.min(a.ncols() - col);
    let next = (col + nr < a.ncols()).then(|| nr.min(a.ncols() - col - nr));
    for (out, source) in strip.chunks_exact_mut(nr).zip(rows) {
        match *source {
            RowSource::Local(row) => {
                assert!(row < a.nrows());
                let lld = a.col_stride();
                let at = a.as_ptr().wrapping_add(row).wrapping_offset(col as isize * lld);
                for (c, x) in out[..width].iter_mut().enumerate() {
                    // SAFETY: row < nrows and col + c < ncols.
                    *x = unsafe { *at.offset(c as isize * lld) };
                }
                for c in 0..next.unwrap_or(0) {
                    prefetch(at.wrapping_offset((nr + c) as isize * lld));
                }
            }
            RowSource::Received(p, row) => {
                for (c, x) in out[..width].iter_mut().enumerate() {
                    *x = messages[p][(row, col + c)];
                }
            }
        }
        out[width..].fill(T::zero());
    }
}

/// Writes rows into `a`: for each (destination row, source), the elements of all its columns.
/// Local sources are read before any destination is written only if no destination is also a source;
/// the pivoting of LU moves rows out of the top block into places below it, where this holds.
///
/// # Panics
/// When a row is out of range.
pub fn move_rows<T: Scalar>(
    mut a: MatMut<'_, T>,
    messages: &[MatRef<'_, T>],
    moves: &[(usize, RowSource)],
    col: usize,
) {
    for c in 0..a.ncols() {
        for &(to, source) in moves {
            let x = match source {
                RowSource::Local(from) => a[(from, c)],
                RowSource::Received(p, row) => messages[p][(row, col + c)],
            };
            a[(to, c)] = x;
        }
    }
}

/// Exchanges rows of columns `cols` of `a` with rows of packed strips: (row of `a`, row of every strip).
///
/// `strips` has a column for each row of each strip, `nr` elements; the strip of the first columns begins at its column
/// `first`, and each strip has `k` rows.
///
/// # Safety
/// Nobody else touches these rows of `a`, nor these rows of the strips.
///
/// # Panics
/// When a row or strip is out of range.
pub unsafe fn exchange_rows<T: Scalar>(
    a: SharedMut<'_, T>,
    cols: Range<usize>,
    strips: SharedMut<'_, T>,
    first: usize,
    k: usize,
    pairs: &[(usize, usize)],
) {
    let nr = strips.nrows();
    for (s, col) in cols.clone().step_by(nr).enumerate() {
        let width = nr.min(cols.end - col);
        for &(row, i) in pairs {
            assert!(i < k, "row {i} of {k}");
            let at = first + s * k + i;
            // SAFETY: the caller's promise, for this and the next.
            let here = unsafe { a.part(row..row + 1, col..col + width) };
            // SAFETY: as above.
            let there = unsafe { strips.part(0..width, at..at + 1) };
            prefetch(there.as_ptr().wrapping_add(k * nr));
            let (here, lld, there) = (here.as_ptr_mut(), a.lld(), there.as_ptr_mut());
            for c in 0..width {
                // SAFETY: inside the two parts, which are apart.
                unsafe { std::ptr::swap_nonoverlapping(here.add(c * lld), there.add(c), 1) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_hold_the_rows_asked_for_and_zeros_past_the_edge() {
        let a = faer::Mat::from_fn(6, 5, |i, j| (10 * i + j) as f64);
        let m = faer::Mat::from_fn(2, 5, |i, j| (100 + 10 * i + j) as f64);
        let rows = [RowSource::Local(4), RowSource::Received(0, 1), RowSource::Local(0)];
        let mut strip = vec![f64::NAN; 12];
        gather_strip(a.as_ref(), &[m.as_ref()], &rows, 0, 4, &mut strip);
        assert_eq!(strip, [40., 41., 42., 43., 110., 111., 112., 113., 0., 1., 2., 3.]);
        gather_strip(a.as_ref(), &[m.as_ref()], &rows, 4, 4, &mut strip);
        assert_eq!(strip, [44., 0., 0., 0., 114., 0., 0., 0., 4., 0., 0., 0.]);
    }

    #[test]
    fn rows_move_below() {
        let mut a = faer::Mat::from_fn(6, 3, |i, j| (10 * i + j) as f64);
        let m = faer::Mat::from_fn(2, 5, |i, j| (100 + 10 * i + j) as f64);
        move_rows(a.as_mut(), &[m.as_ref()], &[(5, RowSource::Local(1)), (3, RowSource::Received(0, 0))], 2);
        assert_eq!((a[(5, 0)], a[(5, 2)]), (10., 12.));
        assert_eq!((a[(3, 0)], a[(3, 2)]), (102., 104.));
    }
}
