//! A matrix that several threads write at once, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

use crate::{MatMut, MatRef};

/// A column-major matrix lent to a team; members take disjoint parts of it.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    nrows: usize,
    ncols: usize,
    lld: isize,
    _lent: PhantomData<&'a mut T>,
}

// SAFETY: it is a borrowed `&mut [T]` cut up by `part`/`part_ref`, whose contracts forbid overlap.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above; `T: Sync` because `part_ref` hands out shared references on several threads.
unsafe impl<T: Send + Sync> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Takes the whole of `a`.
    ///
    /// # Panics
    /// When the row stride is not 1.
    pub fn new(a: MatMut<'a, T>) -> Self {
        assert!(a.row_stride() == 1 || a.nrows() <= 1, "matrices are column-major with unit row stride");
        SharedMut {
            ptr: a.as_ptr_mut(),
            nrows: a.nrows(),
            ncols: a.ncols(),
            lld: a.col_stride(),
            _lent: PhantomData,
        }
    }

    /// Number of rows.
    pub fn nrows(&self) -> usize {
        self.nrows
    }

    /// Number of columns.
    pub fn ncols(&self) -> usize {
        self.ncols
    }

    /// Column stride.
    pub fn lld(&self) -> usize {
        self.lld as usize
    }

    fn at(&self, rows: &Range<usize>, cols: &Range<usize>) -> *mut T {
        assert!(rows.start <= rows.end && rows.end <= self.nrows, "rows {rows:?} of {}", self.nrows);
        assert!(cols.start <= cols.end && cols.end <= self.ncols, "columns {cols:?} of {}", self.ncols);
        // `wrapping_*`: an empty part may start one past the end.
        self.ptr.wrapping_add(rows.start).wrapping_offset(cols.start as isize * self.lld)
    }

    /// The part `rows` × `cols`, to write.
    ///
    /// # Safety
    /// While the result lives, no other thread or reference may touch an element of this part.
    ///
    /// # Panics
    /// When the part is not inside the matrix.
    pub unsafe fn part(&self, rows: Range<usize>, cols: Range<usize>) -> MatMut<'a, T> {
        let ptr = self.at(&rows, &cols);
        // SAFETY: in bounds by `at`; exclusive by the caller's promise; alive for 'a.
        unsafe { MatMut::from_raw_parts_mut(ptr, rows.len(), cols.len(), 1, self.lld) }
    }

    /// The part `rows` × `cols`, to read.
    ///
    /// # Safety
    /// While the result lives, nobody may write an element of this part.
    ///
    /// # Panics
    /// When the part is not inside the matrix.
    pub unsafe fn part_ref(&self, rows: Range<usize>, cols: Range<usize>) -> MatRef<'a, T> {
        let ptr = self.at(&rows, &cols);
        // SAFETY: in bounds by `at`; nobody writes by the caller's promise; alive for 'a.
        unsafe { MatRef::from_raw_parts(ptr, rows.len(), cols.len(), 1, self.lld) }
    }
}
