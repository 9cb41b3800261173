//! A matrix dealt block-cyclically over a grid.

use std::sync::Arc;

use fulmen_kernels::{Mat, MatMut, MatRef, Scalar};

use super::index::{Axis, Col, Global, Local, Row};
use super::memory::{self, Zeroed};
use super::{Desc, DistMut, DistRef};
use crate::error::{Error, Result};
use crate::grid::Grid;

/// Bytes of a cache line.
const LINE: usize = 64;

/// A matrix of which each rank of a grid holds a part, its local block.
///
/// The local block is column-major with leading dimension [`DistMatrix::lld`], in private memory: what
/// travels is packed. Entry (i, j) of the local block is the global entry that [`DistMatrix::rows`] and
/// [`DistMatrix::cols`] say.
pub struct DistMatrix<T> {
    grid: Arc<Grid>,
    desc: Desc,
    rows: Axis<Row>,
    cols: Axis<Col>,
    nrows: usize,
    ncols: usize,
    lld: usize,
    block: Zeroed<T>,
}

impl<T: Scalar> DistMatrix<T> {
    /// A matrix of zeros. Collective over the grid: all members get the same verdict on memory, before
    /// any is touched. Pages are taken when first written, by the thread that writes them.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad `desc`, or on a rank that is not in the grid; [`Error::Resources`] when a
    /// host has too little memory for its ranks' parts; when a rank is lost.
    pub fn zeros(grid: &Arc<Grid>, desc: Desc) -> Result<Self> {
        let (myrow, mycol) = grid.require_member()?;
        let (rows, cols) = desc.axes(grid.nprow(), grid.npcol())?;
        let (nrows, ncols) = (rows.count(myrow), cols.count(mycol));
        let lld = padded_lld::<T>(nrows);
        let len = if nrows == 0 { Some(0) } else { lld.checked_mul(ncols) };
        let bytes = len.and_then(|l| l.checked_mul(size_of::<T>())).unwrap_or(usize::MAX / (1 << 20));
        let what = format!("a matrix of {} x {}", desc.m, desc.n);
        memory::require(grid.all(), &what, bytes as u64)?;
        let block = len
            .ok_or_else(|| {
                Error::argument(
                    "M x N",
                    format!("{} x {}", desc.m, desc.n),
                    "is beyond all memory",
                    "give a smaller size",
                )
            })
            .and_then(Zeroed::new);
        // A limit that could not be foreseen on one rank must not leave the others waiting.
        // And all must mean the same matrix: a maximum and a minimum that differ say that they do not.
        let Desc { m, n, mb, nb, rsrc, csrc } = desc;
        let said = [m, n, mb, nb, rsrc, csrc].map(|x| x as u64);
        let mut all = [u64::from(block.is_err()); 1 + 2 * 6];
        all[1..7].copy_from_slice(&said);
        all[7..].iter_mut().zip(said).for_each(|(inverse, x)| *inverse = !x);
        grid.all().all_max(&mut all)?;
        let names = ["M", "N", "MB", "NB", "RSRC", "CSRC"];
        if let Some(i) = (0..6).find(|&i| all[1 + i] != !all[7 + i]) {
            let problem = format!("the ranks do not agree: from {} to {}", !all[7 + i], all[1 + i]);
            return Err(Error::argument(
                names[i],
                said[i],
                problem,
                "describe the matrix alike on every rank",
            ));
        }
        let block = block?;
        if all[0] != 0 {
            return Err(Error::Resources {
                what: format!("{what} could not be allocated on every rank"),
                remedy: "give a smaller matrix, or raise the limits of all hosts".into(),
            });
        }
        Ok(DistMatrix { grid: Arc::clone(grid), desc, rows, cols, nrows, ncols, lld, block })
    }

    /// The matrix whose entry (i, j), counted from 0 over the whole matrix, is `entry(i, j)`. Collective.
    ///
    /// # Errors
    /// As [`DistMatrix::zeros`].
    pub fn from_fn(grid: &Arc<Grid>, desc: Desc, mut entry: impl FnMut(usize, usize) -> T) -> Result<Self> {
        let mut a = Self::zeros(grid, desc)?;
        let (myrow, mycol) = (grid.myrow(), grid.mycol());
        let filled = if a.nrows == 0 { 0 } else { a.ncols };
        for lj in 0..filled {
            let j = a.cols.global(Local::new(lj), mycol).0;
            let column = &mut a.block.as_mut_slice()[lj * a.lld..][..a.nrows];
            for (li, x) in column.iter_mut().enumerate() {
                *x = entry(a.rows.global(Local::new(li), myrow).0, j);
            }
        }
        Ok(a)
    }

    /// Bytes of memory that the part of process (`p`, `q`) of a grid of `nprow` × `npcol` takes, padding
    /// included. Nothing is allocated.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad `desc`.
    pub fn local_bytes(desc: &Desc, (nprow, npcol): (usize, usize), (p, q): (usize, usize)) -> Result<u64> {
        let (rows, cols) = desc.axes(nprow, npcol)?;
        let (nrows, ncols) = (rows.count(p), cols.count(q));
        let bytes = if nrows == 0 { 0 } else { padded_lld::<T>(nrows) as u128 * ncols as u128 };
        Ok(u64::try_from(bytes * size_of::<T>() as u128).unwrap_or(u64::MAX))
    }

    /// The grid.
    pub fn grid(&self) -> &Arc<Grid> {
        &self.grid
    }

    /// Shape and layout.
    pub fn desc(&self) -> &Desc {
        &self.desc
    }

    /// Global rows.
    pub fn nrows(&self) -> usize {
        self.desc.m
    }

    /// Global columns.
    pub fn ncols(&self) -> usize {
        self.desc.n
    }

    /// How rows are dealt over the process rows.
    pub fn rows(&self) -> Axis<Row> {
        self.rows
    }

    /// How columns are dealt over the process columns.
    pub fn cols(&self) -> Axis<Col> {
        self.cols
    }

    /// Leading dimension of the local block: elements from one column to the next. At least 1.
    pub fn lld(&self) -> usize {
        self.lld
    }

    /// The local block.
    pub fn local(&self) -> MatRef<'_, T> {
        column_major(self.block.as_slice(), self.nrows, self.ncols, self.lld)
    }

    /// The local block, to write.
    pub fn local_mut(&mut self) -> MatMut<'_, T> {
        column_major_mut(self.block.as_mut_slice(), self.nrows, self.ncols, self.lld)
    }

    /// The whole matrix as a view.
    pub fn view(&self) -> DistRef<'_, T> {
        DistRef::whole(&self.grid, self.rows, self.cols, self.local())
    }

    /// The whole matrix as a view, to write.
    pub fn view_mut(&mut self) -> DistMut<'_, T> {
        // Not `local_mut`: the grid is borrowed beside the block.
        let local = column_major_mut(self.block.as_mut_slice(), self.nrows, self.ncols, self.lld);
        DistMut::whole(&self.grid, self.rows, self.cols, local)
    }

    /// The whole matrix on rank `root` of the grid: [`DistRef::gather`]. Collective.
    ///
    /// # Errors
    /// As [`DistRef::gather`].
    pub fn gather(&self, root: usize) -> Result<Option<Mat<T>>> {
        self.view().gather(root)
    }

    /// Fills the matrix with what rank `root` of the grid gives: [`DistMut::scatter`]. Collective.
    ///
    /// # Errors
    /// As [`DistMut::scatter`].
    pub fn scatter(&mut self, root: usize, whole: Option<MatRef<'_, T>>) -> Result<()> {
        self.view_mut().scatter(root, whole)
    }

    /// Entry (i, j) if this rank holds it.
    pub fn get(&self, i: usize, j: usize) -> Option<T> {
        let (i, j) = (Global::new(i), Global::new(j));
        let mine = self.rows.owner(i) == self.grid.myrow() && self.cols.owner(j) == self.grid.mycol();
        mine.then(|| self.block.as_slice()[self.cols.local(j).0 * self.lld + self.rows.local(i).0])
    }
}

impl<T> std::fmt::Debug for DistMatrix<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} on {:?}: {} x {} here", self.desc, self.grid, self.nrows, self.ncols)
    }
}

fn column_major<T>(block: &[T], nrows: usize, ncols: usize, lld: usize) -> MatRef<'_, T> {
    MatRef::from_column_major_slice_with_stride(block, nrows, ncols, lld)
}

fn column_major_mut<T>(block: &mut [T], nrows: usize, ncols: usize, lld: usize) -> MatMut<'_, T> {
    MatMut::from_column_major_slice_with_stride_mut(block, nrows, ncols, lld)
}

/// Leading dimension for `nrows` rows: an odd number of cache lines, so that the elements of one row
/// spread over all sets of every cache (a stride of a power of two, or of a page, would use a few).
/// Columns shorter than that matters are not padded.
fn padded_lld<T>(nrows: usize) -> usize {
    const WORTH_PADDING: usize = 1024;
    let bytes = nrows * size_of::<T>();
    if bytes < WORTH_PADDING {
        return nrows.max(1);
    }
    let lines = bytes.div_ceil(LINE) | 1;
    lines * (LINE / size_of::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_never_lie_a_power_of_two_or_a_page_apart() {
        for nrows in (0..3000).chain([4096, 10_000, 20_000, 65_536, 1 << 20]) {
            let lld = padded_lld::<f64>(nrows);
            assert!(lld >= nrows.max(1) && lld <= nrows + 16);
            if nrows >= 128 {
                assert!(lld * 8 % 128 == 64, "{nrows} rows lie {lld} apart");
            }
        }
        assert_eq!(padded_lld::<fulmen_kernels::c64>(20_000), 20_004);
    }

    /// Case K5-04: HPL on 64 x 64 ranks, counted without allocating anything.
    #[test]
    fn the_memory_of_a_petascale_run_is_counted() {
        let desc = Desc::square_blocks(5_786_112, 5_786_112, 24);
        let bytes = DistMatrix::<f64>::local_bytes(&desc, (64, 64), (0, 0)).unwrap();
        assert_eq!(memory::human(bytes), "60.9 GiB");
    }
}
