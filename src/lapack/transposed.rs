//! The steps of solving op(A)·X = B for a transposed A: Uᵀ·Y = B forwards, Lᵀ·X = Y backwards.
//!
//! Column `cols` of a factor is row `cols` of its transpose. So where A's solve updates the other rows of B
//! with each solved block, this one collects, for the block to be solved, the products of the panel's rows
//! with the rows of B that are solved already. They lie where B's rows lie: nothing but these sums
//! travels, and the panel along the process row.
//!
//! Each block of rows gives one product, and the products are subtracted in the order of the blocks: so the
//! solution depends on the blocks, but not on who has them.

use std::ops::Range;

use fulmen_kernels::{Diag, Mat, MatRef, Op, Scalar, Side, Uplo};

use super::getrs::Solve;
use super::update::Triangle;
use crate::error::{Error, Result};

/// Products that a process column exchanges at once, in bytes.
const BATCH_BYTES: usize = 4 << 20;

impl<T: Scalar> Solve<'_, T> {
    /// Rows `cols` of B are solved with the transposed diagonal block of columns `cols`, after what they owe to
    /// rows `others`, which are solved.
    pub(super) fn step_transposed(
        &mut self,
        op: Op,
        cols: &Range<usize>,
        triangle: Triangle,
        others: Range<usize>,
    ) -> Result<()> {
        let rows = self.a.local_rows(others.clone());
        let column_major = |rows: MatRef<'_, T>, out: &mut [T]| {
            for j in 0..rows.ncols() {
                let column = out[j * rows.nrows()..][..rows.nrows()].iter_mut();
                column.zip(0..).for_each(|(out, i)| *out = rows[(i, j)]);
            }
        };
        self.bring(cols, &others, column_major)?;
        let panel = &self.panel.packed()[..rows.len() * cols.len()];
        let panel = MatRef::from_column_major_slice(panel, rows.len(), cols.len());

        // The blocks of the other rows, in order, and who has them.
        let (a, b) = (self.a, self.b);
        let blocks: Vec<(usize, Range<usize>)> = a
            .rows
            .blocks(a.ia + others.start..a.ia + others.end)
            .map(|block| (a.rows.owner(block.start.into()), block.start - a.ia..block.end - a.ia))
            .collect();
        let elements = cols.len() * (1 + blocks.len());
        let width = (BATCH_BYTES / size_of::<T>() / elements).max(1);
        let all = b.local_cols(0..b.n);
        for start in all.clone().step_by(width) {
            let batch = start..all.end.min(start + width);
            self.batch(op, cols, triangle, (panel, rows.start), &blocks, batch)?;
        }
        Ok(())
    }

    /// The same for local columns `at` of B. `panel` has this rank's part of `blocks`, local rows from `base` on.
    fn batch(
        &self,
        op: Op,
        cols: &Range<usize>,
        triangle: Triangle,
        (panel, base): (MatRef<'_, T>, usize),
        blocks: &[(usize, Range<usize>)],
        at: Range<usize>,
    ) -> Result<()> {
        let (kernels, b, jb) = (self.kernels, self.b, cols.len());
        let column = b.grid.col_group();
        let own = b.local_rows(cols.clone());
        // SAFETY: no team is running: this thread alone has B until the parts are dropped.
        let solved = unsafe { b.a.part_ref(0..b.a.nrows(), at.clone()) };
        let own_rows = solved.subrows(own.start, own.len());
        let mut mine: Vec<T> = Vec::new();
        for i in 0..own_rows.nrows() {
            mine.extend((0..at.len()).map(|j| own_rows[(i, j)]));
        }
        let mut product = Mat::<T>::zeros(jb, at.len());
        for (_, rows) in blocks.iter().filter(|(owner, _)| *owner == column.me()) {
            let (from, of) = (self.a.local_rows(rows.clone()), b.local_rows(rows.clone()));
            let l = panel.subrows(from.start - base, from.len());
            let x = solved.subrows(of.start, of.len());
            let (none, zero) = (Op::NoTrans, T::zero());
            kernels.gemm(self.team, T::one(), (op, l), (none, x), zero, product.as_mut());
            for j in 0..at.len() {
                mine.extend((0..jb).map(|i| product[(i, j)]));
            }
        }
        let parts = column.all_gather_var(&mine)?;

        let missing = || Error::Internal(format!("a part of rows {cols:?} of B is missing"));
        let mut next: Vec<&[T]> = parts.iter().map(Vec::as_slice).collect();
        let mut take = |owner: usize, len: usize| {
            let (taken, rest) = next[owner].split_at_checked(len).ok_or_else(missing)?;
            next[owner] = rest;
            Ok::<_, Error>(taken)
        };
        let mut x = Mat::<T>::zeros(jb, at.len());
        for (i, row) in cols.clone().enumerate() {
            let values = take(b.rows.owner((b.ia + row).into()), at.len())?;
            values.iter().enumerate().for_each(|(j, &value)| x[(i, j)] = value);
        }
        for (owner, _) in blocks {
            let products = take(*owner, jb * at.len())?;
            for (j, products) in products.chunks_exact(jb).enumerate() {
                products.iter().enumerate().for_each(|(i, &product)| x[(i, j)] -= product);
            }
        }
        let (uplo, diag) = match triangle {
            Triangle::Upper => (Uplo::Upper, Diag::NonUnit),
            _ => (Uplo::Lower, Diag::Unit),
        };
        let (left, one) = (Side::Left, T::one());
        kernels.trsm(self.team, left, uplo, op, diag, one, self.panel.top(), x.as_mut());

        // SAFETY: as above; `solved` is no longer used.
        let mut out = unsafe { b.a.part(own, at.clone()) };
        let is_own = |row: &usize| b.rows.owner((b.ia + row).into()) == column.me();
        for (i, row) in cols.clone().filter(is_own).enumerate() {
            (0..at.len()).for_each(|j| out[(i, j)] = x[(row - cols.start, j)]);
        }
        Ok(())
    }
}
