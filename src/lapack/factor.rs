//! Factoring one panel on the process column that holds it: the recursion, then what travels is put together.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use fulmen_kernels::{Kernels, Mat, MatMut, Member, PanelJob, PanelShape, Scalar, SharedMut};

use super::local::LocalView;
use super::lu::Slot;
use super::pivot::ColumnPivots;
use crate::comm::AllToAllSmall;
use crate::error::{Error, Result};

/// How many threads of `team` should factor a panel of m × `jb` while the others update `n` columns (`None`:
/// nobody updates). As few as are done in time, because a panel, which meets at a barrier every column, does
/// not use threads as well as an update does.
pub(crate) fn threads_for_panel(team: usize, m: usize, jb: usize, n: Option<usize>) -> usize {
    // Elements of a panel that make another thread worth its barriers: a quarter of a megabyte.
    let most = (m * jb / 32_768).clamp(1, team);
    // Per row: about jb² operations at half the speed of the 2·n·jb of the update.
    let in_time = |size: &usize| match n {
        Some(n) => jb as f64 / *size as f64 <= n as f64 / (team - size) as f64,
        None => false,
    };
    (1..most).find(in_time).unwrap_or(most)
}

/// What a panel's factorisation works with, prepared before the team runs.
pub(crate) struct PanelSpace<'a, T> {
    pivots: ColumnPivots<'a, T>,
    top: Mat<T>,
    ipiv: Vec<usize>,
}

impl<'a, T: Scalar> PanelSpace<'a, T> {
    pub(crate) fn new(
        view: &LocalView<'_, SharedMut<'_, T>>,
        cols: &Range<usize>,
        exchange: &'a mut AllToAllSmall<T>,
        log: &'a PivotLog,
    ) -> Self {
        let pivots = ColumnPivots {
            exchange,
            rows: view.rows,
            offset: view.ia,
            first: cols.start,
            me: view.grid.myrow(),
            base: view.local_rows(cols.start..view.m).start,
            message: Vec::new(),
            log,
        };
        PanelSpace { pivots, top: Mat::zeros(cols.len(), cols.len()), ipiv: vec![0; cols.len()] }
    }
}

/// The pivots chosen so far, and why no more could be.
#[derive(Default)]
pub(crate) struct PivotLog {
    pub(crate) rows: Mutex<Vec<u64>>,
    pub(crate) failed: OnceLock<Error>,
}

/// One panel's factorisation, shared by the members that carry it out.
pub(crate) struct PanelWork<'a, T: Scalar> {
    kernels: &'a dyn Kernels<T>,
    current: &'a Mutex<Option<Slot<T>>>,
    job: PanelJob<'a, T, ColumnPivots<'a, T>>,
    log: &'a PivotLog,
    /// This rank's rows of the panel, and the triangle on top.
    panel: SharedMut<'a, T>,
    top: SharedMut<'a, T>,
    /// Where L21 goes, packed: one column.
    packed: SharedMut<'a, T>,
    /// For each of this rank's rows of the top: which row of it.
    top_rows: Vec<usize>,
    /// First row of the panel in the view.
    first: usize,
}

impl<'a, T: Scalar> PanelWork<'a, T> {
    /// For `members` members.
    ///
    /// # Safety
    /// From the first call of [`PanelWork::run`] until it has returned on all members, nobody else touches the
    /// panel's columns of `view` from its first row on, nor the packed section of `current` before this work has
    /// sent it. (Before that, earlier panels may still update those columns.)
    pub(crate) unsafe fn new(
        kernels: &'a dyn Kernels<T>,
        members: usize,
        shape: PanelShape,
        view: &'a LocalView<'_, SharedMut<'_, T>>,
        cols: &Range<usize>,
        current: &'a Mutex<Option<Slot<T>>>,
        space: &'a mut PanelSpace<'a, T>,
    ) -> Result<Self> {
        let rows = view.local_rows(cols.start..view.m);
        let at = view.local_cols(cols.clone());
        let top_rows = view
            .local_rows(cols.clone())
            .map(|l| view.rows.global(l.into(), view.grid.myrow()).0 - view.ia - cols.start)
            .collect();
        let packed = match &mut *current.lock().unwrap_or_else(PoisonError::into_inner) {
            // SAFETY: the caller's promise.
            Some(slot) => unsafe { slot.panel.packed_shared() },
            None => return Err(Error::Internal("no panel to factor into".into())),
        };
        // The job takes the panel as a whole, and is done with it when its last barrier is passed.
        // SAFETY: nothing is touched before `run`; from then on by the caller's promise.
        let (whole, parts) =
            unsafe { (view.a.part(rows.clone(), at.clone()), SharedMut::new(view.a.part(rows, at))) };
        let top: MatMut<'a, T> = space.top.as_mut();
        // SAFETY: as large as `top`, and used only when the job is done with it.
        let shared_top = unsafe {
            SharedMut::new(MatMut::from_raw_parts_mut(
                top.as_ptr_mut(),
                top.nrows(),
                top.ncols(),
                1,
                top.col_stride(),
            ))
        };
        let log = space.pivots.log;
        Ok(PanelWork {
            kernels,
            current,
            job: PanelJob::new(kernels, members, shape, whole, top, &mut space.ipiv, &mut space.pivots),
            log,
            panel: parts,
            top: shared_top,
            packed,
            top_rows,
            first: cols.start,
        })
    }

    /// This member's part.
    pub(crate) fn run(&self, me: Member<'_>, failed: &OnceLock<Error>) {
        self.job.run(me);
        me.barrier();
        if let Some(e) = self.log.failed.get() {
            let _ = failed.set(e.clone());
            return;
        }
        let jb = self.top.ncols();
        let above = self.top_rows.len();
        let below = self.panel.nrows() - above;
        let mr = self.kernels.tile().mr;
        // SAFETY: the job is done; from here on the triangle is only read.
        let top = unsafe { self.top.part_ref(0..jb, 0..jb) };
        // L21, packed: each member its slivers.
        let share = me.share(below, mr);
        if !share.is_empty() {
            // SAFETY: the job is done; nobody writes these rows.
            let rows = unsafe { self.panel.part_ref(above + share.start..above + share.end, 0..jb) };
            let range = share.start * jb..share.end.next_multiple_of(mr) * jb;
            // SAFETY: members' shares are disjoint slivers.
            let out = unsafe { self.packed.part(range, 0..1) };
            if let Some(out) = out.col_mut(0).try_as_col_major_mut() {
                self.kernels.pack_a(rows, out.as_slice_mut());
            }
        }
        // My rows of the top go back into the matrix.
        for j in me.share(jb, 1) {
            // SAFETY: members take disjoint columns.
            let mut rows = unsafe { self.panel.part(0..above, j..j + 1) };
            for (i, &row) in self.top_rows.iter().enumerate() {
                rows[(i, 0)] = top[(row, j)];
            }
        }
        me.barrier();
        if me.index() == 0
            && let Err(e) = self.send(top)
        {
            let _ = failed.set(e);
        }
    }

    fn send(&self, top: fulmen_kernels::MatRef<'_, T>) -> Result<()> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = current.as_mut() else { return Err(Error::Internal("no panel to send".into())) };
        let jb = top.ncols();
        let (meta, out) = slot.panel.head();
        let zero = (0..jb).find(|&j| top[(j, j)] == T::zero());
        meta[0] = zero.map_or(0, |j| (self.first + j + 1) as u64);
        let rows = self.log.rows.lock().unwrap_or_else(PoisonError::into_inner);
        meta[1..=jb].copy_from_slice(&rows);
        for (j, column) in out.chunks_exact_mut(jb).enumerate() {
            column.iter_mut().enumerate().for_each(|(i, x)| *x = top[(i, j)]);
        }
        slot.panel.send()
    }
}
