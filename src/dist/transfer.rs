//! Whole matrices to and from one rank.

use std::ops::Range;

use fulmen_kernels::{Mat, MatRef, Scalar};

use super::index::{Axis, Local};
use super::{DistMut, DistRef, memory};
use crate::comm::Bulk;
use crate::error::{Error, Result};
use crate::grid::Grid;

/// What one process holds of a view, and where it lies in it.
struct Share<'a, R, C> {
    rows: &'a Axis<R>,
    cols: &'a Axis<C>,
    /// Global offset of the view.
    at: (usize, usize),
    /// The process.
    proc: (usize, usize),
    local_rows: Range<usize>,
    local_cols: Range<usize>,
}

impl<'a, R, C> Share<'a, R, C> {
    fn new(
        (rows, row_range): (&'a Axis<R>, &Range<usize>),
        (cols, col_range): (&'a Axis<C>, &Range<usize>),
        proc: (usize, usize),
    ) -> Self {
        Share {
            rows,
            cols,
            at: (row_range.start, col_range.start),
            proc,
            local_rows: rows.local_range(row_range, proc.0),
            local_cols: cols.local_range(col_range, proc.1),
        }
    }

    /// Number of elements. They travel column by column.
    fn len(&self) -> usize {
        self.local_rows.len() * self.local_cols.len()
    }

    /// Tells `visit`, for each element of the packed range, its place in that range, in the local block
    /// and in the view.
    fn visit(&self, packed: Range<usize>, mut visit: impl FnMut(usize, (usize, usize), (usize, usize))) {
        let height = self.local_rows.len();
        let mut at = packed.start;
        while at < packed.end {
            let (li, lj) = (self.local_rows.start + at % height, self.local_cols.start + at / height);
            let j = self.cols.global(Local::new(lj), self.proc.1).0 - self.at.1;
            let i = self.rows.global(Local::new(li), self.proc.0).0 - self.at.0;
            // To the end of the block, of the column, or of the range.
            let run = (self.rows.nb - li % self.rows.nb).min(self.local_rows.end - li).min(packed.end - at);
            for k in 0..run {
                visit(at - packed.start + k, (li + k, lj), (i + k, j));
            }
            at += run;
        }
    }
}

fn require_root(grid: &Grid, root: usize) -> Result<()> {
    let size = grid.all().len();
    if root < size {
        return Ok(());
    }
    Err(Error::argument(
        "root",
        root,
        format!("the grid has {size} ranks, counted from 0"),
        "name one of them",
    ))
}

impl<T: Scalar> DistRef<'_, T> {
    /// Brings the view together on rank `root` of the grid; the others get `None`. Collective.
    ///
    /// # Errors
    /// [`Error::Resources`] on all ranks when the root's host cannot hold it; [`Error::Argument`] for a root
    /// outside the grid; when a rank is lost.
    pub fn gather(&self, root: usize) -> Result<Option<Mat<T>>> {
        let grid = self.grid();
        require_root(grid, root)?;
        let all = grid.all();
        let here = all.me() == root;
        let (m, n) = (self.nrows(), self.ncols());
        let bytes = m as u128 * n as u128 * size_of::<T>() as u128;
        let bytes = if here { u64::try_from(bytes).unwrap_or(u64::MAX / 2) } else { 0 };
        memory::require(all, &format!("gathering a matrix of {m} x {n} on rank {root}"), bytes)?;

        let (rows, cols) = (&self.row_axis(), &self.col_axis());
        let share =
            |rank| Share::new((rows, &self.row_range()), (cols, &self.col_range()), grid.coords_of(rank));
        let mut bulk = Bulk::<T>::new(all)?;
        if !here {
            let share = share(all.me());
            bulk.send(root, share.len(), |part, out| {
                share.visit(part, |at, local, _| out[at] = self.block()[local]);
            })?;
            return Ok(None);
        }
        let mut whole = Mat::<T>::zeros(m, n);
        for rank in 0..all.len() {
            let share = share(rank);
            if rank == root {
                share.visit(0..share.len(), |_, local, global| whole[global] = self.block()[local]);
            } else {
                bulk.receive(rank, share.len(), |part, data| {
                    share.visit(part, |at, _, global| whole[global] = data[at]);
                })?;
            }
        }
        Ok(Some(whole))
    }
}

impl<T: Scalar> DistMut<'_, T> {
    /// Deals `whole`, which rank `root` of the grid gives (the others give `None`), out into the view.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Argument`] on all ranks when the root gives no matrix or one of another shape; when a rank is lost.
    pub fn scatter(&mut self, root: usize, whole: Option<MatRef<'_, T>>) -> Result<()> {
        let grid = self.grid();
        require_root(grid, root)?;
        let all = grid.all();
        let (m, n) = (self.nrows(), self.ncols());
        // The root's mistake is everyone's, or the others would wait for it.
        let mut given = whole.map_or([0, 0, 0], |a| [1, a.nrows() as u64, a.ncols() as u64]);
        all.bcast(root, &mut given)?;
        if given != [1, m as u64, n as u64] {
            let value = if given[0] == 0 { "none".into() } else { format!("{} x {}", given[1], given[2]) };
            return Err(Error::argument(
                "matrix to scatter",
                value,
                format!("the view is {m} x {n}"),
                format!("give a matrix of that shape on rank {root}"),
            ));
        }
        let (rows, cols) = (&self.row_axis(), &self.col_axis());
        let (row_range, col_range) = (self.row_range(), self.col_range());
        let share = |rank| Share::new((rows, &row_range), (cols, &col_range), grid.coords_of(rank));
        let mine = share(all.me());
        let mut bulk = Bulk::<T>::new(all)?;
        let mut block = self.block_mut();
        match whole {
            Some(whole) if all.me() == root => {
                for rank in (0..all.len()).filter(|&r| r != root) {
                    let share = share(rank);
                    bulk.send(rank, share.len(), |part, out| {
                        share.visit(part, |at, _, global| out[at] = whole[global]);
                    })?;
                }
                mine.visit(0..mine.len(), |_, local, global| block[local] = whole[global]);
                Ok(())
            }
            _ => bulk.receive(root, mine.len(), |part, data| {
                mine.visit(part, |at, local, _| block[local] = data[at]);
            }),
        }
    }
}
