//! Norms of distributed matrices, and the search for numbers that are none.
//!
//! Sums are taken block by block, and the sums of blocks from the first to the last: so a norm has the same
//! bits on every grid, and depends on the matrix and its blocks alone. A NaN anywhere makes a norm NaN.

use std::ops::Range;

use bytemuck::Pod;
use fulmen_kernels::{MatRef, Real, Scalar};
use num_traits::{Float, Zero};

use crate::comm::Group;
use crate::dist::{Axis, DistRef, Global, Local};
use crate::error::{Error, Result};

/// Partial sums that a rank sends at once, in bytes.
const BATCH_BYTES: usize = 1 << 20;

type Re<T> = <T as Scalar>::Real;

/// Largest modulus; 0 for an empty matrix. Collective.
///
/// # Errors
/// When a rank is lost.
pub fn max<T: Scalar>(a: &DistRef<'_, T>) -> Result<Re<T>> {
    let local = a.local();
    let mut largest = Re::<T>::zero();
    for j in 0..local.ncols() {
        largest = larger(largest, fold_lanes(column(local, j), |x| x.modulus(), larger));
    }
    largest_of(a.grid().all(), largest)
}

/// ‖A‖₁: the largest sum of moduli of a column. Collective.
///
/// # Errors
/// When a rank is lost.
pub fn one<T: Scalar>(a: &DistRef<'_, T>) -> Result<Re<T>> {
    let sums = column_sums(a, |x| x.modulus())?;
    let largest = sums.into_iter().fold(Re::<T>::zero(), larger);
    largest_of(a.grid().row_group(), largest)
}

/// ‖A‖∞: the largest sum of moduli of a row. Collective.
///
/// # Errors
/// When a rank is lost.
pub fn inf<T: Scalar>(a: &DistRef<'_, T>) -> Result<Re<T>> {
    let sums = row_sums(a)?;
    let largest = sums.into_iter().fold(Re::<T>::zero(), larger);
    largest_of(a.grid().col_group(), largest)
}

/// ‖A‖F, scaled by the largest modulus so that squares neither overflow nor vanish. Collective.
///
/// # Errors
/// When a rank is lost.
pub fn frobenius<T: Scalar>(a: &DistRef<'_, T>) -> Result<Re<T>> {
    let scale = max(a)?;
    if scale == Re::<T>::zero() || !scale.finite() {
        return Ok(scale);
    }
    let sums = column_sums(a, |x| {
        let ratio = x.modulus() / scale;
        ratio * ratio
    })?;
    // Sums of columns, added from the first column to the last.
    let everyones = a.grid().row_group().all_gather_var(&sums)?;
    let (cols, range) = (a.col_axis(), a.col_range());
    let mut sum = Re::<T>::zero();
    for block in cols.blocks(range.clone()) {
        let owner = cols.owner(Global::new(block.start));
        let first = cols.count_before(Global::new(range.start), owner);
        let at = cols.local(Global::new(block.start)).0 - first;
        sum = everyones[owner][at..at + block.len()].iter().fold(sum, |s, &x| s + x);
    }
    Ok(scale * Float::sqrt(sum))
}

/// The first element that is infinite or NaN, in column-major order, by its place in the view. Collective;
/// the same answer on all ranks and on every grid.
///
/// # Errors
/// When a rank is lost.
pub fn find_non_finite<T: Scalar>(a: &DistRef<'_, T>) -> Result<Option<(usize, usize, T)>> {
    let (grid, local) = (a.grid(), a.local());
    let all = grid.all();
    let first = (0..local.ncols()).find_map(|j| {
        let column = column(local, j);
        // A whole column at once is fast; which element it is, is asked once.
        if column.iter().fold(true, |finite, x| finite & x.finite()) {
            return None;
        }
        column.iter().position(|x| !x.finite()).map(|i| (i, j))
    });
    let none = [u64::MAX; 2];
    let mine = first.map_or(none, |(i, j)| {
        let (rows, cols) = (a.local_rows(0..a.nrows()), a.local_cols(0..a.ncols()));
        let row = a.row_axis().global(Local::new(rows.start + i), grid.myrow()).0 - a.row_range().start;
        let col = a.col_axis().global(Local::new(cols.start + j), grid.mycol()).0 - a.col_range().start;
        [col as u64, row as u64]
    });
    let mut everyones = vec![none; all.len()];
    all.all_gather(&[mine], &mut everyones)?;
    let Some((owner, &[col, row])) = everyones.iter().enumerate().min_by_key(|(_, place)| **place) else {
        return Ok(None);
    };
    if [col, row] == none {
        return Ok(None);
    }
    let mut value = [first.map_or(T::zero(), |place| local[place])];
    all.bcast(owner, &mut value)?;
    Ok(Some((row as usize, col as usize, value[0])))
}

/// Refuses a matrix that holds an infinity or a NaN. Collective.
///
/// # Errors
/// [`Error::NonFinite`] with the element that [`find_non_finite`] finds; when a rank is lost.
pub fn require_finite<T: Scalar>(a: &DistRef<'_, T>) -> Result<()> {
    match find_non_finite(a)? {
        None => Ok(()),
        Some((row, col, value)) => Err(Error::NonFinite { row, col, value: value.to_string() }),
    }
}

/// The larger of two; a NaN if there is one.
fn larger<R: Real>(a: R, b: R) -> R {
    if a > b || Float::is_nan(a) { a } else { b }
}

fn largest_of<R: Real>(group: &Group, mine: R) -> Result<R> {
    let mut largest = [mine];
    group.all_reduce(&mut largest, larger)?;
    Ok(largest[0])
}

fn column<T>(a: MatRef<'_, T>, j: usize) -> &[T] {
    a.col(j).try_as_col_major().map_or(&[], |c| c.as_slice())
}

/// For each of this rank's columns of the view, the sum of `size` over all rows of the view.
fn column_sums<T: Scalar>(a: &DistRef<'_, T>, size: impl Fn(T) -> Re<T>) -> Result<Vec<Re<T>>> {
    let sum = |block: Range<usize>, cols: Range<usize>, out: &mut Vec<Re<T>>| {
        let part = a.block().submatrix(block.start, cols.start, block.len(), cols.len());
        out.extend((0..cols.len()).map(|j| fold_lanes(column(part, j), &size, |a, b| a + b)));
    };
    let rows = (a.row_axis(), a.row_range(), a.grid().myrow());
    block_sums(rows, a.local_cols(0..a.ncols()), a.grid().col_group(), sum)
}

/// For each of this rank's rows of the view, the sum of moduli over all columns of the view.
fn row_sums<T: Scalar>(a: &DistRef<'_, T>) -> Result<Vec<Re<T>>> {
    let sum = |block: Range<usize>, rows: Range<usize>, out: &mut Vec<Re<T>>| {
        let part = a.block().submatrix(rows.start, block.start, rows.len(), block.len());
        let at = out.len();
        out.resize(at + rows.len(), Re::<T>::zero());
        for j in 0..block.len() {
            for (sum, x) in out[at..].iter_mut().zip(column(part, j)) {
                *sum += x.modulus();
            }
        }
    };
    let cols = (a.col_axis(), a.col_range(), a.grid().mycol());
    block_sums(cols, a.local_rows(0..a.nrows()), a.grid().row_group(), sum)
}

/// Sums along `axis`, of which this process holds every so many blocks: `partial(block, lines, out)` appends
/// one block's sum for each of the `lines` across; `group` is the processes along the axis.
fn block_sums<D, R: Real + Pod>(
    (axis, range, me): (Axis<D>, Range<usize>, usize),
    lines: Range<usize>,
    group: &Group,
    partial: impl Fn(Range<usize>, Range<usize>, &mut Vec<R>),
) -> Result<Vec<R>> {
    let blocks: Vec<(usize, Range<usize>)> = axis
        .blocks(range)
        .map(|block| {
            let owner = axis.owner(Global::new(block.start));
            (owner, axis.local_range(&block, owner))
        })
        .collect();
    let batch = (BATCH_BYTES / size_of::<R>() / blocks.len().max(1)).max(1);
    let mut sums = Vec::with_capacity(lines.len());
    let mut mine = Vec::new();
    for start in lines.clone().step_by(batch) {
        let lines = start..lines.end.min(start + batch);
        mine.clear();
        for (_, block) in blocks.iter().filter(|(owner, _)| *owner == me) {
            partial(block.clone(), lines.clone(), &mut mine);
        }
        let everyones = group.all_gather_var(&mine)?;
        let at = sums.len();
        sums.resize(at + lines.len(), R::zero());
        let mut next = vec![0; group.len()];
        for (owner, _) in &blocks {
            let from = next[*owner];
            next[*owner] += lines.len();
            let part = &everyones[*owner][from..from + lines.len()];
            sums[at..].iter_mut().zip(part).for_each(|(sum, &x)| *sum += x);
        }
    }
    Ok(sums)
}

/// Folds `x` in eight interleaved lanes, and the lanes from first to last: a fixed order that vectorises.
fn fold_lanes<T: Scalar>(x: &[T], size: impl Fn(T) -> Re<T>, fold: impl Fn(Re<T>, Re<T>) -> Re<T>) -> Re<T> {
    let mut lanes = [Re::<T>::zero(); 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for l in 0..8 {
            lanes[l] = fold(lanes[l], size(chunk[l]));
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = fold(*lane, size(x));
    }
    lanes.into_iter().fold(Re::<T>::zero(), fold)
}
