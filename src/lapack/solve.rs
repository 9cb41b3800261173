//! Solving with the factors.

use std::ops::Range;

use fulmen_kernels::{Mat, MatMut, MatRef, Scalar, SharedMut, Team};

use super::local::LocalView;
use crate::comm::Group;
use crate::dist::DistRef;
use crate::dist::index::{Axis, Row};
use crate::error::{Error, Result};
use crate::fabric::{Buf, Lane};

/// Rows of y that a thread brings up to date at once: they stay in its first-level cache.
const ROWS: usize = 1024;

/// Solves U·x = y, where the view is n × (n + 1), U its leading upper triangle and y its last column (HPL's
/// `pdtrsv`). x is on every rank.
///
/// y travels: the process column that holds the next block of U receives what is left of y, solves for its
/// part of x, subtracts that part's columns, and hands y on. So every element of y meets the columns of U
/// in the same order on every grid, and x has the same bits. (Keeping y in place and summing partial
/// results, as HPL does, sends less but makes the rounding depend on Q.)
///
/// A zero on the diagonal gives infinities and NaNs in x.
///
/// # Errors
/// When a rank is lost, or the view is not n × (n + 1).
pub fn back_substitute<T: Scalar>(team: &Team, a: &DistRef<'_, T>) -> Result<Vec<T>> {
    let n = a.nrows();
    if a.ncols() != n + 1 {
        return Err(Error::argument(
            "a",
            format!("{} x {}", n, a.ncols()),
            "is not n x (n + 1)",
            "append the right-hand side as one more column",
        ));
    }
    if n == 0 {
        return Ok(vec![]);
    }
    let view = LocalView::read(a);
    let LocalView { grid, rows, cols, ia, ja, a: local, .. } = view;
    let mycol = grid.mycol();
    let (row, column) = (grid.row_group(), grid.col_group());
    let fabric = &**row.fabric();
    fabric.set_activity("in the back substitution");

    let mine = view.local_rows(0..n);
    let mut travel = Travel::<T>::new(row, mine.len())?;
    let mut holder = view.col_owner(n);
    let mut y = vec![T::zero(); mine.len()];
    if holder == mycol {
        let at = view.local_cols(n..n + 1).start;
        y.iter_mut().zip(mine.clone()).for_each(|(y, i)| *y = local[(i, at)]);
    }

    // This process column's part of x, by local column.
    let first_col = view.local_cols(0..n).start;
    let mut x = vec![T::zero(); view.local_cols(0..n).len()];
    for block in view.panels().into_iter().rev() {
        let owner = view.col_owner(block.start);
        let above = view.local_rows(0..block.start).len();
        let through = view.local_rows(0..block.end).len();
        travel.hand_over(holder, owner, &mut y[..through])?;
        holder = owner;
        if owner != mycol {
            continue;
        }
        let at = view.local_cols(block.clone());
        let u = local.subcols(at.start, at.len());
        let diagonal = u.subrows(mine.start + above, through - above);
        let part = solve_block(column, rows, ia, &block, diagonal, &y[above..through])?;
        subtract(team, u.subrows(mine.start, above), &part, &mut y[..above]);
        x[at.start - first_col..at.end - first_col].copy_from_slice(&part);
    }
    travel.finish()?;

    // Every rank of a process column has the same part; the columns of a row have them all.
    let mut all = vec![T::zero(); n];
    for (q, part) in row.all_gather_var(&x)?.into_iter().enumerate() {
        let first = cols.local_range(&(ja..ja + n), q).start;
        for (l, value) in part.into_iter().enumerate() {
            all[cols.global((first + l).into(), q).0 - ja] = value;
        }
    }
    Ok(all)
}

/// y on its way along the process row.
struct Travel<'a, T> {
    row: &'a Group,
    send: Buf<T>,
    recv: Buf<T>,
}

impl<'a, T: Scalar> Travel<'a, T> {
    fn new(row: &'a Group, len: usize) -> Result<Self> {
        let len = if row.len() > 1 { len } else { 0 };
        let fabric = &**row.fabric();
        Ok(Travel { row, send: Buf::zeros(fabric, len)?, recv: Buf::zeros(fabric, len)? })
    }

    fn hand_over(&mut self, from: usize, to: usize, y: &mut [T]) -> Result<()> {
        let (fabric, ranks) = (&**self.row.fabric(), self.row.ranks());
        if from == to || y.is_empty() {
            return Ok(());
        }
        if self.row.me() == from {
            self.send.flush(fabric)?;
            self.send.write(0..y.len()).copy_from_slice(y);
            self.send.put(fabric, Lane::BULK, ranks[to], 0..y.len())?;
        } else if self.row.me() == to {
            self.recv.arm(fabric, Lane::BULK, ranks[from], 0..y.len())?;
            let came = self.recv.wait(fabric, Lane::BULK, ranks[from])?;
            y.copy_from_slice(self.recv.read(came));
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        self.send.flush(&**self.row.fabric())
    }
}

/// Solves the diagonal block on every rank of the process column. `u` and `y` are this rank's rows of it.
fn solve_block<T: Scalar>(
    column: &Group,
    rows: Axis<Row>,
    ia: usize,
    block: &Range<usize>,
    u: MatRef<'_, T>,
    y: &[T],
) -> Result<Vec<T>> {
    let nb = block.len();
    let owner_of = |i: usize| rows.owner((ia + i).into());
    let first = owner_of(block.start);
    if block.clone().all(|i| owner_of(i) == first) {
        let mut x = y.to_vec();
        if first == column.me() {
            solve_upper(u, &mut x);
        } else {
            x.resize(nb, T::zero());
        }
        column.bcast(first, &mut x)?;
        return Ok(x);
    }
    // The block's rows lie on several ranks: bring them together, row by row with their y.
    let mut mine = Vec::with_capacity(y.len() * (nb + 1));
    for (i, &y) in y.iter().enumerate() {
        mine.extend((0..nb).map(|j| u[(i, j)]));
        mine.push(y);
    }
    let parts = column.all_gather_var(&mine)?;
    let mut next: Vec<_> = parts.iter().map(|p| p.chunks_exact(nb + 1)).collect();
    let mut whole = Mat::<T>::zeros(nb, nb);
    let mut x = Vec::with_capacity(nb);
    for i in block.clone() {
        let row = next[owner_of(i)].next().ok_or_else(|| Error::Internal(format!("row {i} is missing")))?;
        for j in 0..nb {
            whole[(i - block.start, j)] = row[j];
        }
        x.push(row[nb]);
    }
    solve_upper(whole.as_ref(), &mut x);
    Ok(x)
}

/// x := U⁻¹·x, column by column from the right.
fn solve_upper<T: Scalar>(u: MatRef<'_, T>, x: &mut [T]) {
    for j in (0..x.len()).rev() {
        x[j] /= u[(j, j)];
        for i in 0..j {
            x[i] -= u[(i, j)] * x[j];
        }
    }
}

/// y := y − U·x, columns ascending for every element.
fn subtract<T: Scalar>(team: &Team, u: MatRef<'_, T>, x: &[T], y: &mut [T]) {
    let len = y.len();
    let y = SharedMut::new(MatMut::from_column_major_slice_mut(y, len, 1));
    let work = |rows: Range<usize>| {
        // SAFETY: members take disjoint ranges of rows.
        let mut part = unsafe { y.part(rows.clone(), 0..1) };
        let Some(part) = part.as_mut().col_mut(0).try_as_col_major_mut() else { return };
        let part = part.as_slice_mut();
        for (chunk, start) in part.chunks_mut(ROWS).zip(rows.step_by(ROWS)) {
            for (j, &x) in x.iter().enumerate() {
                let Some(column) = u.col(j).subrows(start, chunk.len()).try_as_col_major() else { continue };
                chunk.iter_mut().zip(column.as_slice()).for_each(|(y, &u)| *y -= u * x);
            }
        }
    };
    // Below this, waking the team costs more than it saves.
    if len * x.len() < 64 * 1024 {
        work(0..len);
    } else {
        team.run(|me| work(me.share(len, 64)));
    }
}
