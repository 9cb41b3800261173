//! Rectangular parts of distributed matrices, at any offset.
//!
//! A view keeps the layout of its parent: the parent's axes, its local block, and the ranges of global rows
//! and columns that it covers. Row i of a view is row `row_range().start + i` of the parent. Taking a view
//! never communicates or copies.

use std::ops::Range;
use std::sync::Arc;

use fulmen_kernels::{MatMut, MatRef};

use super::index::{Axis, Col, Row};
use crate::grid::Grid;

/// Where a view lies in its parent, and where both lie on the grid.
#[derive(Clone, Debug)]
struct Frame<'a> {
    grid: &'a Arc<Grid>,
    rows: Axis<Row>,
    cols: Axis<Col>,
    row_range: Range<usize>,
    col_range: Range<usize>,
}

impl Frame<'_> {
    fn sub(&self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let within = |part: &Range<usize>, whole: &Range<usize>, what: &str| {
            assert!(
                part.start <= part.end && part.end <= whole.len(),
                "{what} {part:?} of a view with {}",
                whole.len()
            );
            whole.start + part.start..whole.start + part.end
        };
        Frame {
            row_range: within(&rows, &self.row_range, "rows"),
            col_range: within(&cols, &self.col_range, "columns"),
            ..self.clone()
        }
    }

    fn local_rows(&self, rows: Range<usize>) -> Range<usize> {
        let at = self.row_range.start;
        self.rows.local_range(&(at + rows.start..at + rows.end), self.grid.myrow())
    }

    fn local_cols(&self, cols: Range<usize>) -> Range<usize> {
        let at = self.col_range.start;
        self.cols.local_range(&(at + cols.start..at + cols.end), self.grid.mycol())
    }

    fn my_rows(&self) -> Range<usize> {
        self.rows.local_range(&self.row_range, self.grid.myrow())
    }

    fn my_cols(&self) -> Range<usize> {
        self.cols.local_range(&self.col_range, self.grid.mycol())
    }
}

/// A part of a distributed matrix, to read.
#[derive(Clone)]
pub struct DistRef<'a, T> {
    frame: Frame<'a>,
    block: MatRef<'a, T>,
}

/// A part of a distributed matrix, to write.
///
/// The view owns the right to its parent's whole local block while it lives.
pub struct DistMut<'a, T> {
    frame: Frame<'a>,
    block: MatMut<'a, T>,
}

/// A [`DistMut`] taken apart: everything that an algorithm over the parent's layout needs.
pub struct Parts<'a, T> {
    /// The grid.
    pub grid: &'a Arc<Grid>,
    /// How the parent's rows are dealt.
    pub rows: Axis<Row>,
    /// How the parent's columns are dealt.
    pub cols: Axis<Col>,
    /// Parent's global rows that the view covers; its start is ScaLAPACK's `IA` − 1.
    pub row_range: Range<usize>,
    /// Parent's global columns that the view covers; its start is ScaLAPACK's `JA` − 1.
    pub col_range: Range<usize>,
    /// The parent's whole local block, in the parent's local indices.
    pub block: MatMut<'a, T>,
}

macro_rules! frame_methods {
    () => {
        /// The grid.
        pub fn grid(&self) -> &'a Arc<Grid> {
            self.frame.grid
        }

        /// Rows of the view.
        pub fn nrows(&self) -> usize {
            self.frame.row_range.len()
        }

        /// Columns of the view.
        pub fn ncols(&self) -> usize {
            self.frame.col_range.len()
        }

        /// How the parent's rows are dealt over the process rows.
        pub fn row_axis(&self) -> Axis<Row> {
            self.frame.rows
        }

        /// How the parent's columns are dealt over the process columns.
        pub fn col_axis(&self) -> Axis<Col> {
            self.frame.cols
        }

        /// The parent's global rows that the view covers.
        pub fn row_range(&self) -> Range<usize> {
            self.frame.row_range.clone()
        }

        /// The parent's global columns that the view covers.
        pub fn col_range(&self) -> Range<usize> {
            self.frame.col_range.clone()
        }

        /// Rows of the parent's local block that hold the view's rows `rows`.
        pub fn local_rows(&self, rows: Range<usize>) -> Range<usize> {
            self.frame.local_rows(rows)
        }

        /// Columns of the parent's local block that hold the view's columns `cols`.
        pub fn local_cols(&self, cols: Range<usize>) -> Range<usize> {
            self.frame.local_cols(cols)
        }
    };
}

impl<'a, T> DistRef<'a, T> {
    pub(super) fn whole(grid: &'a Arc<Grid>, rows: Axis<Row>, cols: Axis<Col>, block: MatRef<'a, T>) -> Self {
        DistRef { frame: Frame { grid, rows, cols, row_range: 0..rows.n, col_range: 0..cols.n }, block }
    }

    frame_methods!();

    /// The part `rows` × `cols` of this view, counted within it.
    ///
    /// # Panics
    /// When it is not inside the view.
    pub fn sub(&self, rows: Range<usize>, cols: Range<usize>) -> DistRef<'a, T> {
        DistRef { frame: self.frame.sub(rows, cols), block: self.block }
    }

    /// The parent's whole local block.
    pub fn block(&self) -> MatRef<'a, T> {
        self.block
    }

    /// What this rank holds of the view.
    pub fn local(&self) -> MatRef<'a, T> {
        let (rows, cols) = (self.frame.my_rows(), self.frame.my_cols());
        self.block.submatrix(rows.start, cols.start, rows.len(), cols.len())
    }
}

impl<'a, T> DistMut<'a, T> {
    pub(super) fn whole(grid: &'a Arc<Grid>, rows: Axis<Row>, cols: Axis<Col>, block: MatMut<'a, T>) -> Self {
        DistMut { frame: Frame { grid, rows, cols, row_range: 0..rows.n, col_range: 0..cols.n }, block }
    }

    frame_methods!();

    /// The part `rows` × `cols` of this view, counted within it.
    ///
    /// # Panics
    /// When it is not inside the view.
    #[must_use]
    pub fn sub(self, rows: Range<usize>, cols: Range<usize>) -> DistMut<'a, T> {
        DistMut { frame: self.frame.sub(rows, cols), block: self.block }
    }

    /// The same view for a while.
    pub fn rb_mut(&mut self) -> DistMut<'_, T> {
        DistMut { frame: self.frame.clone(), block: self.block.as_mut() }
    }

    /// The same view, to read.
    pub fn rb(&self) -> DistRef<'_, T> {
        DistRef { frame: self.frame.clone(), block: self.block.as_ref() }
    }

    /// The parent's whole local block.
    pub fn block_mut(&mut self) -> MatMut<'_, T> {
        self.block.as_mut()
    }

    /// What this rank holds of the view.
    pub fn local_mut(&mut self) -> MatMut<'_, T> {
        let (rows, cols) = (self.frame.my_rows(), self.frame.my_cols());
        self.block.as_mut().submatrix_mut(rows.start, cols.start, rows.len(), cols.len())
    }

    /// Takes the view apart.
    pub fn into_parts(self) -> Parts<'a, T> {
        let Frame { grid, rows, cols, row_range, col_range } = self.frame;
        Parts { grid, rows, cols, row_range, col_range, block: self.block }
    }
}
