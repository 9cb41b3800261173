//! A view in the terms of one rank.

use std::ops::Range;
use std::sync::Arc;

use fulmen_kernels::{MatRef, SharedMut};

use super::plan::{Permutation, RowPlan};
use crate::dist::index::{Axis, Col, Row};
use crate::dist::{DistMut, DistRef, Parts};
use crate::grid::Grid;

/// A view taken apart. `B` is how the parent's whole local block is held: lent to the team to be written
/// ([`SharedMut`]), or to be read ([`MatRef`]).
pub(crate) struct LocalView<'a, B> {
    /// The parent's whole local block.
    pub(crate) a: B,
    pub(crate) grid: &'a Arc<Grid>,
    pub(crate) rows: Axis<Row>,
    pub(crate) cols: Axis<Col>,
    /// The view's first row and column in the parent.
    pub(crate) ia: usize,
    pub(crate) ja: usize,
    /// Rows and columns of the view.
    pub(crate) m: usize,
    pub(crate) n: usize,
}

impl<'a, T> LocalView<'a, SharedMut<'a, T>> {
    pub(crate) fn new(a: DistMut<'a, T>) -> Self {
        let Parts { grid, rows, cols, row_range, col_range, block } = a.into_parts();
        LocalView {
            a: SharedMut::new(block),
            grid,
            rows,
            cols,
            ia: row_range.start,
            ja: col_range.start,
            m: row_range.len(),
            n: col_range.len(),
        }
    }
}

impl<'a, T> LocalView<'a, MatRef<'a, T>> {
    pub(crate) fn read(a: &DistRef<'a, T>) -> Self {
        LocalView {
            a: a.block(),
            grid: a.grid(),
            rows: a.row_axis(),
            cols: a.col_axis(),
            ia: a.row_range().start,
            ja: a.col_range().start,
            m: a.nrows(),
            n: a.ncols(),
        }
    }
}

impl<B> LocalView<'_, B> {
    /// Local rows of rows `range` of the view.
    pub(crate) fn local_rows(&self, range: Range<usize>) -> Range<usize> {
        self.rows.local_range(&(self.ia + range.start..self.ia + range.end), self.grid.myrow())
    }

    /// Local columns of columns `range` of the view.
    pub(crate) fn local_cols(&self, range: Range<usize>) -> Range<usize> {
        self.cols.local_range(&(self.ja + range.start..self.ja + range.end), self.grid.mycol())
    }

    /// Process column of a column of the view.
    pub(crate) fn col_owner(&self, j: usize) -> usize {
        self.cols.owner((self.ja + j).into())
    }

    /// How the view's rows lie on the grid: row block size, first row within its block, process row of it.
    pub(crate) fn row_place(&self) -> (usize, usize, usize) {
        (self.rows.nb, self.ia % self.rows.nb, self.rows.owner(self.ia.into()))
    }

    /// Columns of each panel, up to column min(m, n): cut where the blocks are, so that a panel lies in one
    /// process column.
    pub(crate) fn panels(&self) -> Vec<Range<usize>> {
        let end = self.m.min(self.n);
        let blocks = self.cols.blocks(self.ja..self.ja + end);
        blocks.map(|b| b.start - self.ja..b.end - self.ja).collect()
    }

    /// This rank's part in moving rows by a panel's interchanges; `first` is the panel's first row.
    pub(crate) fn plan(&self, permutation: &Permutation, first: usize) -> RowPlan {
        RowPlan::new(permutation, first, self.rows, self.ia, self.grid.myrow(), self.grid.nprow())
    }
}
