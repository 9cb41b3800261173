//! Factoring one panel on the process column that holds it.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use fulmen_kernels::{Candidate, Kernels, Member, PanelShape, PivotExchange, Scalar, SharedMut};

use super::local::LocalView;
use super::lu::Slot;
use super::pivot::ColumnPivots;
use crate::comm::AllToAllSmall;
use crate::error::{Error, Result};

/// One panel's factorisation, shared by the members that carry it out.
pub(crate) struct PanelWork<'a, T> {
    kernels: &'a dyn Kernels<T>,
    current: &'a Mutex<Option<Slot<T>>>,
    pivots: Mutex<ColumnPivots<'a, T>>,
    panel: SharedMut<'a, T>,
    cols: Range<usize>,
}

/// How many threads should factor a panel of `jb` columns while the others update `n`: as few as are done
/// in time, because a panel does not use threads as well as an update does.
pub(crate) fn threads_for_panel(team: usize, jb: usize, n: usize) -> usize {
    // Per row: about jb² operations at half the speed of the 2·n·jb of the update.
    let panel = 2.0 * jb as f64;
    let update = 2.0 * n as f64;
    (1..team).find(|&size| panel / size as f64 <= update / (team - size) as f64).unwrap_or(team)
}

impl<'a, T: Scalar> PanelWork<'a, T> {
    pub(crate) fn new(
        kernels: &'a dyn Kernels<T>,
        _shape: PanelShape,
        view: &'a LocalView<'_, SharedMut<'_, T>>,
        cols: &Range<usize>,
        current: &'a Mutex<Option<Slot<T>>>,
        exchange: &'a mut AllToAllSmall<T>,
    ) -> Result<Self> {
        let rows = view.local_rows(cols.start..view.m);
        let at = view.local_cols(cols.clone());
        let pivots = ColumnPivots {
            exchange,
            rows: view.rows,
            offset: view.ia,
            first: cols.start,
            me: view.grid.myrow(),
            base: rows.start,
            message: Vec::new(),
        };
        // SAFETY: the members that run this work have the panel's columns to themselves: earlier panels' updates
        // of them are done, and the bulk update is of columns right of them.
        let panel = unsafe { view.a.part(rows, at) };
        Ok(PanelWork {
            kernels,
            current,
            pivots: Mutex::new(pivots),
            panel: SharedMut::new(panel),
            cols: cols.clone(),
        })
    }

    /// This member's part.
    pub(crate) fn run(&self, me: Member<'_>, failed: &OnceLock<Error>) {
        if me.index() == 0
            && let Err(e) = self.plain()
        {
            let _ = failed.set(e);
        }
    }

    fn plain(&self) -> Result<()> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Slot { panel: slot, plan: _ }) = current.as_mut() else {
            return Err(Error::Internal("no panel".into()));
        };
        let mut pivots = self.pivots.lock().unwrap_or_else(PoisonError::into_inner);
        let jb = self.cols.len();
        let (meta, top, packed) = slot.sections();
        let mut top = fulmen_kernels::MatMut::from_column_major_slice_mut(top, jb, jb);
        // SAFETY: member 0 alone.
        let mut a = unsafe { self.panel.part(0..self.panel.nrows(), 0..jb) };
        let mut info = 0;
        for j in 0..jb {
            let active = pivots.first_active(j);
            let m = a.nrows();
            let best = {
                let col = a.as_ref().col(j).subrows(active, m - active).try_as_col_major();
                let col = col.map(|c| c.as_slice()).unwrap_or(&[]);
                self.kernels.iamax(col).map(|i| Candidate { row: active + i, value: col[i] })
            };
            meta[1 + j] = pivots.exchange(j, best, a.as_mut(), top.as_mut())? as u64;
            let below = pivots.first_active(j + 1);
            let pivot = top[(j, j)];
            if pivot == T::zero() {
                if info == 0 {
                    info = (self.cols.start + j + 1) as u64;
                }
                continue;
            }
            for i in below..m {
                a[(i, j)] *= T::one() / pivot;
                let l = a[(i, j)];
                for k in j + 1..jb {
                    a[(i, k)] -= l * top[(j, k)];
                }
            }
        }
        meta[0] = info;
        let below = pivots.first_active(jb);
        self.kernels.pack_a(a.as_ref().subrows(below, a.nrows() - below), packed);
        // The rank's rows of the top block.
        let (rows, first) = (pivots.rows, pivots.offset + pivots.first);
        for i in 0..below {
            let global = rows.global((pivots.base + i).into(), pivots.me).0;
            for k in 0..jb {
                a[(i, k)] = top[(global - first, k)];
            }
        }
        slot.send()
    }
}
