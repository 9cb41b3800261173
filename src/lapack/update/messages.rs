//! The rows that the ranks of a process column send each other, a message from each to each for every chunk.

use std::ops::Range;
use std::sync::atomic::Ordering;

use fulmen_kernels::{Member, Scalar};

use super::{SLOTS, Update, read, write};
use crate::error::Result;
use crate::fabric::{Buf, Lane};

impl<T: Scalar> Update<'_, T> {
    /// Member 0: frees the slot, arms what the others will send, and lets stage X begin.
    pub(super) fn open(&self, c: usize, me: Member<'_>) -> Result<()> {
        self.slot_free(c, me)?;
        let fabric = &**self.column.fabric();
        let slot = c % SLOTS;
        let mut send = write(&self.space.send[slot]);
        send.flush(fabric)?;
        // Where one rank has most rows of U, as in a matrix with a large diagonal, each goes to every other rank.
        let needed = self.send_ranges(c).last().map_or(0, |(_, range)| range.end);
        if needed > send.len() {
            *send = Buf::zeros(fabric, needed)?;
        }
        drop(send);
        let mut recv = write(&self.space.recv[slot]);
        for (p, range) in self.receive_ranges(c) {
            if !range.is_empty() {
                recv.arm(fabric, Lane::ROWS, self.column.ranks()[p], range)?;
            }
        }
        self.chunks[c].open.store(true, Ordering::Release);
        Ok(())
    }

    /// For each other rank that sends something, where its message lies in the receive buffer.
    pub(super) fn receive_ranges(&self, c: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let ncols = self.chunks[c].cols.len();
        let plan = self.panel.plan;
        let mut at = 0;
        let me = self.column.me();
        (0..self.column.len()).filter(move |&p| p != me).map(move |p| {
            let start = at;
            at += (plan.recv_u[p] + plan.recv_moves[p]) * ncols;
            (p, start..at)
        })
    }

    /// For each other rank, where my message to it lies in the send buffer.
    pub(super) fn send_ranges(&self, c: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let ncols = self.chunks[c].cols.len();
        let plan = self.panel.plan;
        let mut at = 0;
        let me = self.column.me();
        (0..self.column.len()).filter(move |&q| q != me).map(move |q| {
            let start = at;
            at += (plan.send_u.len() + plan.send_moves[q].len()) * ncols;
            (q, start..at)
        })
    }

    /// Stage X: the columns of one task, for every other rank.
    pub(super) fn gather_for_others(&self, c: usize, task: usize) {
        let chunk = &self.chunks[c];
        let plan = self.panel.plan;
        let cols = self.strips(c, task);
        // SAFETY: only rows of these columns are read; nobody writes them before stage A of this chunk.
        let a = unsafe {
            self.a.part_ref(0..self.a.nrows(), chunk.cols.start + cols.start..chunk.cols.start + cols.end)
        };
        let send = read(&self.space.send[c % SLOTS]);
        for (q, range) in self.send_ranges(c) {
            let count = plan.send_u.len() + plan.send_moves[q].len();
            if count == 0 {
                continue;
            }
            // SAFETY: tasks write disjoint columns of the message, which is not being put (flushed in `open`,
            // put after all tasks of stage X).
            let message = unsafe { send.shared(range, count).part(0..count, cols.clone()) };
            for (out, j) in message.col_iter_mut().zip(0..) {
                for (x, &row) in out.iter_mut().zip(plan.send_u.iter().chain(&plan.send_moves[q])) {
                    *x = a[(row, j)];
                }
            }
        }
    }

    /// Member 0: puts my messages.
    pub(super) fn send(&self, c: usize) -> Result<()> {
        let fabric = &**self.column.fabric();
        let send = read(&self.space.send[c % SLOTS]);
        for (q, range) in self.send_ranges(c) {
            if !range.is_empty() {
                send.put(fabric, Lane::ROWS, self.column.ranks()[q], range)?;
            }
        }
        Ok(())
    }

    /// Member 0: takes the others' messages, waiting for them or not.
    pub(super) fn receive(&self, c: usize, wait: bool) -> Result<()> {
        let chunk = &self.chunks[c];
        if chunk.arrived.load(Ordering::Relaxed) {
            return Ok(());
        }
        let fabric = &**self.column.fabric();
        let recv = read(&self.space.recv[c % SLOTS]);
        let have = chunk.messages.load(Ordering::Relaxed);
        for (p, _) in self.receive_ranges(c).filter(|(_, range)| !range.is_empty()).skip(have) {
            let rank = self.column.ranks()[p];
            if wait {
                recv.wait(fabric, Lane::ROWS, rank)?;
            } else if recv.try_wait(fabric, Lane::ROWS, rank)?.is_none() {
                return Ok(());
            }
            chunk.messages.fetch_add(1, Ordering::Relaxed);
        }
        chunk.arrived.store(true, Ordering::Release);
        Ok(())
    }
}
