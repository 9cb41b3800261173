//! The rows of the next U, taken out of the trailing matrix while an update has them in cache.
//!
//! A panel's pivot rows are scattered: each of their elements, and each place that a displaced row goes to, costs a cache
//! line from memory, all of them a quarter of what the update itself moves. But while panel k updates the columns on the
//! right, panel k + 1 is factored already (look-ahead), and it is known which rows will be exchanged. So whoever has
//! updated the top block of some columns makes a packed copy of it, and whoever has updated other rows of them exchanges
//! those that are pivots with the copy, which at the end is U before its solve. The next update finds it there.
//!
//! Where the pivots come too late for some columns, the next update gathers their rows itself; so it is where a process
//! column has several ranks, since rows from other ranks are not here yet.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fulmen_kernels::{MatMut, RowSource, Scalar, SharedMut, exchange_rows, gather_strip};

use super::local::LocalView;
use super::plan::RowPlan;
use super::tasks::Tasks;
use crate::dist::memory::Zeroed;
use crate::error::Result;

/// Room for the rows of one panel's U in all local columns, packed in strips.
pub(crate) struct EarlyRows<T> {
    rows: Zeroed<T>,
    /// For each strip, the panel whose rows it holds.
    panel: Vec<AtomicUsize>,
    /// Local columns that take part; strips are cut from the first on.
    cols: Range<usize>,
    nr: usize,
    jb: usize,
}

/// One column in so many, the first of all, is left to the next update.
const SKIPPED: usize = 3;

/// No panel.
const NONE: usize = usize::MAX;

impl<T: Scalar> EarlyRows<T> {
    /// For the factorisation of `view` by panels `steps`; `None` where a process column has several ranks.
    ///
    /// # Errors
    /// When memory is short.
    pub(crate) fn of<B>(view: &LocalView<'_, B>, steps: &[Range<usize>], nr: usize) -> Result<Option<Self>> {
        let (Some(last), 1) = (steps.last(), view.grid.nprow()) else { return Ok(None) };
        let jb = steps.iter().map(Range::len).max().unwrap_or(0);
        let from = |j: usize| view.local_cols(j..view.n).start;
        // The first third of the columns would take a third of the room, and has a ninth of the exchanges.
        let first = steps.iter().find(|step| SKIPPED * step.start >= view.n).unwrap_or(last);
        let start = from(first.start);
        // Updates begin where panels end: their strips are to be the same ones in all of them.
        let same = |j: usize| from(j).abs_diff(start).is_multiple_of(nr);
        let end = match last.end {
            end if end == view.n || same(end) => view.local_cols(0..view.n).end,
            _ => from(last.start),
        };
        let all = steps.iter().all(|step| same(step.start));
        all.then(|| Self::new(jb, start..end, nr)).transpose()
    }

    /// For panels of at most `jb` columns and strips of `nr`.
    fn new(jb: usize, cols: Range<usize>, nr: usize) -> Result<Self> {
        let strips = cols.len().div_ceil(nr);
        let panel = (0..strips).map(|_| AtomicUsize::new(NONE)).collect();
        Ok(EarlyRows { rows: Zeroed::new(strips * nr * jb)?, panel, cols, nr, jb })
    }

    /// Lends it to the updates of one step.
    pub(crate) fn lend(&mut self) -> Early<'_, T> {
        let rows = self.rows.as_mut_slice();
        let len = rows.len() / self.nr;
        let rows = SharedMut::new(MatMut::from_column_major_slice_mut(rows, self.nr, len));
        Early { rows, panel: &self.panel, first: self.cols.start, end: self.cols.end, jb: self.jb }
    }
}

/// [`EarlyRows`], lent to a team.
#[derive(Clone, Copy)]
pub(crate) struct Early<'a, T> {
    /// A column for each row of each strip.
    rows: SharedMut<'a, T>,
    panel: &'a [AtomicUsize],
    first: usize,
    end: usize,
    /// Most columns of a panel.
    pub(crate) jb: usize,
}

impl<T: Scalar> Early<'_, T> {
    fn strip_of(&self, col: usize) -> usize {
        (col - self.first) / self.rows.nrows()
    }

    /// Whether the strip that begins at local column `col` holds rows of `panel`.
    pub(crate) fn holds(&self, panel: usize, col: usize) -> bool {
        (self.first..self.end).contains(&col)
            && self.panel[self.strip_of(col)].load(Ordering::Relaxed) == panel
    }

    /// Copies that strip, of `out.len()` elements.
    pub(crate) fn copy(&self, col: usize, out: &mut [T]) {
        let nr = self.rows.nrows();
        let k = out.len() / nr;
        let first = self.strip_of(col) * k;
        // SAFETY: it is complete since the team last met, and is written again only when its columns are updated, after
        // this. (Strip s lies at s·k. Only the last panel may have another k here, a smaller one: what is written for it lies
        // in strips up to s, which have been read.)
        let strip = unsafe { self.rows.part_ref(0..nr, first..first + k) };
        // SAFETY: the strip's rows follow each other.
        out.copy_from_slice(unsafe { std::slice::from_raw_parts(strip.as_ptr(), nr * k) });
    }
}

/// The interchanges of one panel as exchanges with a copy of its top block.
#[derive(Debug)]
pub(crate) struct EarlyPlan {
    panel: usize,
    /// Where its top block ends, in local rows.
    end: usize,
    /// The local row of the top block that row i of the copy begins as.
    copied: Vec<RowSource>,
    /// Local rows below the top block and the rows of the copy that they are exchanged with, by row.
    exchanged: Vec<(usize, usize)>,
}

impl EarlyPlan {
    /// Of the plan for all rows, which are all on this rank.
    pub(crate) fn new(panel: usize, plan: &RowPlan) -> Option<Self> {
        let mut exchanged = Vec::new();
        let top: Range<usize> = plan.top.first()?.0..plan.top.last()?.0 + 1;
        let mut copied = Vec::with_capacity(plan.u.len());
        for (i, &source) in plan.u.iter().enumerate() {
            let RowSource::Local(row) = source else { return None };
            if top.contains(&row) {
                copied.push(source);
            } else {
                // What is displaced to `row` waits in the copy where the row itself will be.
                let at = plan.moves.binary_search_by_key(&row, |&(to, _)| to).ok()?;
                copied.push(plan.moves[at].1);
                exchanged.push((row, i));
            }
        }
        exchanged.sort_unstable();
        Some(EarlyPlan { panel, end: top.end, copied, exchanged })
    }

    /// The exchanges of some local rows.
    fn of(&self, rows: &Range<usize>) -> &[(usize, usize)] {
        let at = |row: usize| self.exchanged.partition_point(|&(r, _)| r < row);
        &self.exchanged[at(rows.start)..at(rows.end)]
    }
}

/// Some columns of an update, all rows of which are updated before the next columns.
pub(crate) struct EarlyBlock {
    /// Whether their rows are exchanged: settled with their first task.
    chosen: OnceLock<bool>,
    /// The tasks that update their top block.
    top: Tasks,
    /// The copy of it is there.
    copied: AtomicBool,
}

impl EarlyBlock {
    /// The first `tasks` tasks update what may be the next panel's top block.
    pub(crate) fn new(tasks: usize) -> Self {
        EarlyBlock { chosen: OnceLock::new(), top: Tasks::new(tasks), copied: AtomicBool::new(false) }
    }

    /// Whether its rows can be exchanged.
    pub(crate) fn is_copied(&self) -> bool {
        self.copied.load(Ordering::Acquire)
    }
}

/// The exchanges of the panel that comes next, carried out by an update.
pub(crate) struct EarlyExchange<'a, T> {
    pub(crate) early: Early<'a, T>,
    /// Known when that panel is.
    pub(crate) next: &'a OnceLock<EarlyPlan>,
    /// The local block.
    pub(crate) a: SharedMut<'a, T>,
}

impl<T: Scalar> EarlyExchange<'_, T> {
    /// Settles whether the rows of a block are exchanged; called with its first task.
    pub(crate) fn choose(&self, block: &EarlyBlock, cols: &Range<usize>) {
        let plan = self.next.get().filter(|_| self.early.first <= cols.start && cols.end <= self.early.end);
        if let Some(plan) = plan {
            for col in cols.clone().step_by(self.early.rows.nrows()) {
                self.early.panel[self.early.strip_of(col)].store(plan.panel, Ordering::Relaxed);
            }
        }
        let _ = block.chosen.set(plan.is_some());
    }

    /// What was settled.
    pub(crate) fn chosen(&self, block: &EarlyBlock) -> Option<bool> {
        block.chosen.get().copied()
    }

    /// A task of the block's top is done; with the last of them, the top is copied.
    pub(crate) fn top_task_done(&self, block: &EarlyBlock, cols: &Range<usize>) {
        if !block.top.finish() {
            return;
        }
        let Some(plan) = self.next.get() else { return };
        let (nr, k) = (self.early.rows.nrows(), plan.copied.len());
        // SAFETY: the top's rows of these columns are up to date, and exchanged with nothing; those above are done with.
        let a = unsafe { self.a.part_ref(0..plan.end, cols.clone()) };
        for col in cols.clone().step_by(nr) {
            let first = self.early.strip_of(col) * k;
            // SAFETY: other members touch these strips only when they are told so, below.
            let strip = unsafe { self.early.rows.part(0..nr, first..first + k) };
            // SAFETY: the strip's rows follow each other.
            let strip = unsafe { std::slice::from_raw_parts_mut(strip.as_ptr_mut(), nr * k) };
            gather_strip(a, &[], &plan.copied, col - cols.start, nr, strip);
        }
        block.copied.store(true, Ordering::Release);
    }

    /// Exchanges what there is to be exchanged in these rows, which are up to date. Returns false if it is too early.
    pub(crate) fn exchange(&self, block: &EarlyBlock, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        if !block.is_copied() {
            return false;
        }
        let Some(plan) = self.next.get() else { return true };
        let pairs = plan.of(rows);
        if !pairs.is_empty() {
            let first = self.early.strip_of(cols.start) * plan.copied.len();
            // SAFETY: the member that updated these rows (of these columns) exchanges them, and each is exchanged with
            // one row of the copy.
            unsafe { exchange_rows(self.a, cols.clone(), self.early.rows, first, plan.copied.len(), pairs) };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::index::{Axis, Row};
    use crate::lapack::plan::Permutation;
    use fulmen_kernels::{Mat, move_rows};
    use proptest::prelude::*;

    proptest! {
        /// Whatever the order in which blocks of rows are exchanged, U and the rows below are what gathering and moving
        /// make them.
        #[test]
        fn as_gathered_and_moved(
            first in 0usize..3, rest in prop::collection::vec(0usize..30, 1..9),
            n in 1usize..20, step in 1usize..9, backwards: bool,
        ) {
            let (jb, nr, m) = (rest.len(), 4, first + 40);
            let ipiv: Vec<usize> = rest.iter().enumerate().map(|(i, r)| first + i + r).collect();
            let permutation = Permutation::new(first, &ipiv);
            let plan = RowPlan::new(&permutation, first, Axis::<Row>::new(m, 5, 0, 1), 0, 0, 1);
            let a = Mat::from_fn(m, n, |i, j| (100 * i + j) as f64);
            let strips = n.div_ceil(nr);

            let (mut moved, mut u) = (a.clone(), vec![0.0; strips * nr * jb]);
            for (strip, col) in u.chunks_exact_mut(nr * jb).zip((0..n).step_by(nr)) {
                gather_strip(moved.as_ref(), &[], &plan.u, col, nr, strip);
                move_rows(moved.as_mut().subcols_mut(col, nr.min(n - col)), &[], &plan.moves, col);
            }

            let mut exchanged = a.clone();
            let mut rows = EarlyRows::new(jb, 0..n, nr).unwrap();
            let early = rows.lend();
            let next = OnceLock::from(EarlyPlan::new(7, &plan).unwrap());
            let work = EarlyExchange { early, next: &next, a: SharedMut::new(exchanged.as_mut()) };
            let block = EarlyBlock::new(2);
            work.choose(&block, &(0..n));
            prop_assert_eq!(work.chosen(&block), Some(true));
            work.top_task_done(&block, &(0..n));
            prop_assert!(!work.exchange(&block, &(0..m), &(0..n)));
            work.top_task_done(&block, &(0..n));
            let mut parts: Vec<_> = (0..m).step_by(step).map(|i| i..(i + step).min(m)).collect();
            if backwards {
                parts.reverse();
            }
            for part in parts {
                prop_assert!(work.exchange(&block, &part, &(0..n)));
            }
            for (strip, col) in u.chunks_exact(nr * jb).zip((0..n).step_by(nr)) {
                prop_assert!(early.holds(7, col) && !early.holds(6, col));
                let mut out = vec![f64::NAN; nr * jb];
                early.copy(col, &mut out);
                prop_assert_eq!(&out[..], strip);
            }
            prop_assert_eq!(exchanged.subrows(first + jb, m - first - jb), moved.subrows(first + jb, m - first - jb));
        }
    }

    #[test]
    fn columns_whose_pivots_come_too_late_are_left_alone() {
        let mut a = Mat::<f64>::zeros(8, 8);
        let mut rows = EarlyRows::new(2, 0..8, 4).unwrap();
        let next = OnceLock::new();
        let work = EarlyExchange { early: rows.lend(), next: &next, a: SharedMut::new(a.as_mut()) };
        let block = EarlyBlock::new(1);
        assert_eq!(work.chosen(&block), None);
        work.choose(&block, &(0..8));
        assert_eq!(work.chosen(&block), Some(false));
        assert!(!work.early.holds(0, 0));
    }
}
