//! The pivot search of a panel whose rows lie on several ranks.
//!
//! One hop a column: every rank of the process column puts its candidate to all others, with the whole
//! row of the panel that would be swapped, and each then takes the same decision by itself. The rank
//! that owns row j of the top adds that row, which goes to where the pivot row was. (HPL reaches the same
//! in ⌈log₂ P⌉ hops, `HPL_pdmxswp`; for the few process rows of a small cluster, latency counts more
//! than the P−1 messages.)

use std::sync::{Mutex, MutexGuard, PoisonError};

use fulmen_kernels::{Candidate, MatMut, PivotExchange, Scalar, compare_pivots};

use super::factor::PivotLog;
use crate::comm::AllToAllSmall;
use crate::dist::index::{Axis, Global, Row};
use crate::error::{Error, Result};

/// No candidate.
const NONE: u64 = u64::MAX;

/// See the module.
pub(crate) struct ColumnPivots<'a, T> {
    /// Messages of [`message_len`] elements among the process column.
    pub(crate) exchange: &'a mut AllToAllSmall<T>,
    /// Row axis of the matrix; row r of the view is row `offset + r`.
    pub(crate) rows: Axis<Row>,
    /// Row of the view's first row in the matrix.
    pub(crate) offset: usize,
    /// First row of the panel's top, in the view.
    pub(crate) first: usize,
    /// My process row.
    pub(crate) me: usize,
    /// First local row of the panel.
    pub(crate) base: usize,
    /// My message of the round, kept to be filled again.
    pub(crate) message: Vec<T>,
    /// Where the choices are noted, and the failure of a choice.
    pub(crate) log: &'a PivotLog,
}

/// Elements of one message for a panel of `jb` columns: a row number, a candidate row, a top row.
pub(crate) fn message_len<T>(jb: usize) -> usize {
    header_len::<T>() + 2 * jb
}

fn header_len<T>() -> usize {
    size_of::<u64>().div_ceil(size_of::<T>())
}

impl<T: Scalar> ColumnPivots<'_, T> {
    fn global(&self, top_row: usize) -> Global<Row> {
        Global::new(self.offset + self.first + top_row)
    }
}

impl<T: Scalar> PivotExchange<T> for ColumnPivots<'_, T> {
    type Error = Error;

    fn first_active(&self, j: usize) -> usize {
        self.rows.count_before(self.global(j), self.me) - self.base
    }

    fn exchange(
        &mut self,
        j: usize,
        best: Option<Candidate<T>>,
        panel: MatMut<'_, T>,
        top: MatMut<'_, T>,
    ) -> Result<usize> {
        let chosen = match best {
            Some(best) if self.exchange.members() == 1 => Ok(self.alone(j, best, panel, top)),
            _ => self.together(j, best, panel, top),
        };
        match &chosen {
            Ok(row) => lock(&self.log.rows).push(*row as u64),
            Err(e) => drop(self.log.failed.set(e.clone())),
        }
        chosen
    }
}

fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Scalar> ColumnPivots<'_, T> {
    /// All rows are here.
    fn alone(&self, j: usize, best: Candidate<T>, mut panel: MatMut<'_, T>, mut top: MatMut<'_, T>) -> usize {
        for k in 0..panel.ncols() {
            top[(j, k)] = panel[(best.row, k)];
            panel[(best.row, k)] = panel[(j, k)];
        }
        self.first + best.row
    }

    fn together(
        &mut self,
        j: usize,
        best: Option<Candidate<T>>,
        mut panel: MatMut<'_, T>,
        mut top: MatMut<'_, T>,
    ) -> Result<usize> {
        let jb = panel.ncols();
        let header = header_len::<T>();
        let owner = self.rows.owner(self.global(j));
        let diagonal_row = self.first_active(j);
        let first = (self.offset + self.first) as u64;
        let (rows, base, me) = (self.rows, self.base, self.me);
        let row_of = |local: usize| rows.global((base + local).into(), me).0 as u64;

        let message = &mut self.message;
        // Who does not own row j of the top has nothing to send of it.
        let len = if owner == me { message_len::<T>(jb) } else { header + jb };
        message.clear();
        message.resize(len, T::zero());
        let number = best.map_or(NONE, |c| row_of(c.row));
        bytemuck::cast_slice_mut::<T, u8>(&mut message[..header])[..8].copy_from_slice(&number.to_le_bytes());
        if let Some(c) = best {
            (0..jb).for_each(|k| message[header + k] = panel[(c.row, k)]);
        }
        if owner == me {
            (0..jb).for_each(|k| message[header + jb + k] = panel[(diagonal_row, k)]);
        }
        self.exchange.post(message)?;
        let messages = self.exchange.collect()?;

        let mut chosen: Option<(usize, u64, T)> = None;
        for (p, message) in messages.iter().enumerate() {
            let mut number = [0; 8];
            number.copy_from_slice(&bytemuck::cast_slice::<T, u8>(&message[..header])[..8]);
            let (number, value) = (u64::from_le_bytes(number), message[header + j]);
            if number != NONE
                && chosen.is_none_or(|(_, n, v)| {
                    let order = compare_pivots(value, v);
                    order.is_gt() || (order.is_eq() && number < n)
                })
            {
                chosen = Some((p, number, value));
            }
        }
        let (winner, number, _) = chosen.ok_or_else(|| {
            Error::Internal(format!(
                "no process row has a candidate for column {j} of the panel at row {first}"
            ))
        })?;
        for k in 0..jb {
            top[(j, k)] = messages.from(winner)[header + k];
        }
        if winner == me && number != first + j as u64 {
            let local = rows.local(Global::new(number as usize)).0 - base;
            for k in 0..jb {
                panel[(local, k)] = messages.from(owner)[header + jb + k];
            }
        }
        Ok(number as usize - self.offset)
    }
}
