//! What a factored panel does to other columns: exchange rows, U := L11⁻¹·U, A22 := A22 − L21·U.
//!
//! The columns are cut into chunks, and each chunk goes through three stages, each a set of tasks that
//! the team's members take from a counter:
//!
//! * X: gather the rows that other ranks of the process column want (nothing if the column is one rank);
//! * A: assemble U strip by strip, packed; move displaced rows; triangular solve in place; write U back;
//! * B: A22 −= L21·U, a block of rows at a time. Where the next panel's pivots are known, their rows are exchanged on
//!   the way (see `early`), and stage A of the next update finds them assembled.
//!
//! Stage X runs two chunks ahead of B and A one ahead, so that rows travel while others multiply, and a
//! member that is late holds up nobody who still has a task. Member 0 is the rank's own thread; it
//! alone talks to the fabric, between its tasks.
//!
//! Three slots of buffers are in turn: a slot is reused when its chunk is through stage B.

mod messages;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{OnceLock, RwLock};

use fulmen_kernels::{
    Diag, Kernels, Mat, MatMut, MatRef, Member, Op, Scalar, ScatteredRows, SharedMut, Side, Team, Tile, Uplo,
    gather_strip, move_rows,
};

use super::early::{Early, EarlyBlock, EarlyExchange, EarlyPlan};
use super::plan::RowPlan;
use super::tasks::Tasks;
use super::timing::{Clock, Phase};
use crate::comm::Group;
use crate::error::{Error, Result};
use crate::fabric::{Buf, Fabric};

/// Chunks whose buffers exist at once.
const SLOTS: usize = 3;
/// Strips in one task of stage A: a multiple of the three that are solved together, and few enough for the lines that
/// they are gathered from (400 KB at jb = 256) to be in L2 beside a block of U.
const STRIPS: usize = 3;

/// Nothing hides the rows of the first chunk while they travel: it is so much narrower than the widest.
const RAMP: usize = 8;

/// `cols` cut into chunks, the first of `first` columns, each at most twice as wide as the one before, which its rows travel
/// behind, and none wider than `width`.
fn cuts(cols: Range<usize>, first: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let (mut at, mut next) = (cols.start, first.clamp(1, width));
    std::iter::from_fn(move || {
        let cut = at..(at + next).min(cols.end);
        (at, next) = (cut.end, (2 * next).min(width));
        (!cut.is_empty()).then_some(cut)
    })
}

/// Slivers of rows that are updated before their rows are exchanged for the next panel.
const EARLY_SLIVERS: usize = 4;

/// Buffers for packed U and of the row exchange, kept for the whole factorisation.
pub(crate) struct UpdateSpace<T> {
    u: [Vec<T>; SLOTS],
    exchange: Exchange<T>,
}

/// The part of [`UpdateSpace`] that other ranks write to.
pub(crate) struct Exchange<T> {
    /// Most columns in a chunk; a multiple of `nr`.
    width: usize,
    send: Vec<RwLock<Buf<T>>>,
    recv: Vec<RwLock<Buf<T>>>,
}

/// Packed U of the chunks under way, written and read by tasks.
pub(crate) type Slots<'a, T> = [SharedMut<'a, T>; SLOTS];

impl<T: Scalar> UpdateSpace<T> {
    /// For panels of at most `jb` columns and `ncols` local columns.
    pub(crate) fn new(kernels: &dyn Kernels<T>, column: &Group, jb: usize, ncols: usize) -> Result<Self> {
        let nr = kernels.tile().nr;
        // Wide enough to amortise the pass over L21, narrow enough for U to stay in the last-level cache
        // (2 MiB at jb = 256) and for some chunks to exist to be overlapped.
        let width = (ncols / 4).clamp(64, 1024).next_multiple_of(nr);
        let u_len = kernels.tile().packed_b_len(jb, width);
        let fabric = column.fabric();
        let (mut send, mut recv) = (Vec::new(), Vec::new());
        if column.len() > 1 {
            for _ in 0..SLOTS {
                // Received: at most jb rows of U and jb displaced rows. Sent: about as many, or more (see `open`).
                send.push(RwLock::new(Buf::zeros(&**fabric, 2 * jb * width)?));
                recv.push(RwLock::new(Buf::zeros(&**fabric, 2 * jb * width)?));
            }
        }
        let u = std::array::from_fn(|_| vec![T::zero(); u_len]);
        Ok(UpdateSpace { u, exchange: Exchange { width, send, recv } })
    }

    /// Waits until what was sent has left.
    pub(crate) fn flush(&mut self, fabric: &dyn Fabric) -> Result<()> {
        self.exchange.send.iter().try_for_each(|send| write(send).flush(fabric))
    }

    /// Lends the buffers to the updates of one step.
    pub(crate) fn lend(&mut self) -> (Slots<'_, T>, &Exchange<T>) {
        let slots = self.u.each_mut().map(|u| {
            let len = u.len();
            SharedMut::new(MatMut::from_column_major_slice_mut(&mut u[..], len, 1))
        });
        (slots, &self.exchange)
    }
}

/// What U is solved with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Triangle {
    /// Nothing: rows are moved only.
    None,
    /// L11: the lower triangle with unit diagonal.
    UnitLower,
    /// U11: the upper triangle with its diagonal.
    Upper,
}

/// A factored panel as the update reads it.
#[derive(Clone)]
pub(crate) struct FactoredPanel<'a, T> {
    /// Which part of `top` is used.
    pub(crate) triangle: Triangle,
    /// The panel's triangle, jb × jb.
    pub(crate) top: MatRef<'a, T>,
    /// The panel's other rows that this rank has, packed.
    pub(crate) packed: &'a [T],
    /// Which local rows they are: these rows of C are updated.
    pub(crate) rows: Range<usize>,
    /// My part in the row exchange.
    pub(crate) plan: &'a RowPlan,
}

impl<'a, T: Scalar> FactoredPanel<'a, T> {
    /// A panel that only moves rows.
    pub(crate) fn only_rows(plan: &'a RowPlan) -> Self {
        let top = MatRef::from_column_major_slice(&[], 0, 0); // not looked at
        FactoredPanel { triangle: Triangle::None, top, packed: &[], rows: 0..0, plan }
    }
}

/// One update, shared by the members that carry it out.
pub(crate) struct Update<'a, T> {
    kernels: &'a dyn Kernels<T>,
    column: &'a Group,
    space: &'a Exchange<T>,
    panel: FactoredPanel<'a, T>,
    /// Its L11, for the solves of all strips.
    l11: Vec<T>,
    /// The local block.
    a: SharedMut<'a, T>,
    chunks: Vec<Chunk<'a, T>>,
    /// Rows that the update before this one has exchanged, and this panel's number.
    before: Option<(Early<'a, T>, usize)>,
    /// Exchanges rows for the update after this one.
    after: Option<EarlyExchange<'a, T>>,
    failed: &'a OnceLock<Error>,
}

struct Chunk<'a, T> {
    cols: Range<usize>,
    u: SharedMut<'a, T>,
    x: Tasks,
    a: Tasks,
    b: Tasks,
    /// Rows in a task of stage B.
    mc: usize,
    /// The columns that go through stage B together, if rows are exchanged early.
    blocks: Vec<EarlyBlock>,
    /// Buffers are free and armed: stage X may write.
    open: AtomicBool,
    /// Messages that have arrived, counted by member 0.
    messages: AtomicUsize,
    /// All of them have: stage A may read.
    arrived: AtomicBool,
}

/// Rows that a member has updated, and will exchange when it can.
struct Due {
    block: usize,
    rows: Range<usize>,
}

impl<'a, T: Scalar> Update<'a, T> {
    /// Prepares the update of local columns `cols` of `a` by `panel`.
    pub(crate) fn new(
        kernels: &'a dyn Kernels<T>,
        column: &'a Group,
        (u, space): (Slots<'a, T>, &'a Exchange<T>),
        panel: FactoredPanel<'a, T>,
        a: SharedMut<'a, T>,
        cols: Range<usize>,
        failed: &'a OnceLock<Error>,
    ) -> Self {
        let Tile { mr, nr, mc, nc } = kernels.tile();
        let exchange = column.len() > 1;
        let first = if exchange { (space.width / RAMP).next_multiple_of(STRIPS * nr) } else { space.width };
        let chunks = cuts(cols.clone(), first, space.width)
            .enumerate()
            .map(|(c, part)| {
                // The last tasks are smaller, so that all finish nearly together.
                let mc = if part.end == cols.end { fine(mc, mr) } else { mc };
                let cols = part;
                let groups = cols.len().div_ceil(STRIPS * nr);
                let (row_blocks, blocks) = (panel.rows.len().div_ceil(mc), cols.len().div_ceil(nc));
                Chunk {
                    u: u[c % SLOTS],
                    x: Tasks::new(if exchange { groups } else { 0 }),
                    a: Tasks::new(groups),
                    b: Tasks::new(row_blocks * blocks),
                    mc,
                    blocks: Vec::new(),
                    open: AtomicBool::new(!exchange),
                    messages: AtomicUsize::new(0),
                    arrived: AtomicBool::new(!exchange),
                    cols,
                }
            })
            .collect();
        let l11 = match panel.triangle {
            Triangle::UnitLower if !cols.is_empty() => kernels.pack_l(panel.top),
            _ => Vec::new(),
        };
        Update { kernels, column, space, panel, l11, a, chunks, before: None, after: None, failed }
    }

    /// As panel `at`: takes rows that were exchanged early, and exchanges those of the next panel as soon as its plan is
    /// there, if it is going to be.
    pub(crate) fn with_early(
        mut self,
        early: Early<'a, T>,
        at: usize,
        next: Option<&'a OnceLock<EarlyPlan>>,
    ) -> Self {
        self.before = Some((early, at));
        if next.is_some() {
            for chunk in &mut self.chunks {
                let blocks = chunk.cols.len().div_ceil(self.kernels.tile().nc);
                let top = self.panel.rows.len().min(early.jb).div_ceil(chunk.mc);
                chunk.blocks = (0..blocks).map(|_| EarlyBlock::new(top)).collect();
            }
        }
        self.after = next.map(|next| EarlyExchange { early, next, a: self.a });
        self
    }

    /// Does this member's part; returns when no task is left to take (others may still be in theirs).
    /// Member 0 calls `between` between its tasks.
    pub(crate) fn work(&self, me: Member<'_>, clock: &mut Clock, between: &mut dyn FnMut() -> Result<()>) {
        if self.failed.get().is_some() {
            return; // an update before this one failed: its buffers are as it left them
        }
        if let Err(e) = self.stages(me, clock, between) {
            let _ = self.failed.set(e); // the first error is the one that is told
        }
    }

    fn stages(
        &self,
        me: Member<'_>,
        clock: &mut Clock,
        between: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut due = Vec::new();
        for c in 0..self.chunks.len() + 2 {
            if c < self.chunks.len() {
                self.stage_x(c, me, clock)?;
            }
            let a = c.checked_sub(1).filter(|&c| c < self.chunks.len());
            let b = c.checked_sub(2);
            if let Some(b) = b {
                clock.time(Phase::Idle, || self.wait(me, || self.chunks[b].a.all_done()))?;
                while let Some(task) = self.chunks[b].b.take() {
                    // The rows of the next chunk are fetched while this one is multiplied: a task of stage A with
                    // each of stage B, as long as there are any. Rows that are still on their way are not waited for.
                    let strips = match a {
                        Some(a) if self.arrived(a, me)? => self.chunks[a].a.take().map(|task| (a, task)),
                        _ => None,
                    };
                    clock.time(Phase::Update, || self.multiply(b, task, strips, me, &mut due))?;
                    self.chunks[b].b.finish();
                    if let Some((a, task)) = strips {
                        clock.time(Phase::RowExchange, || self.assemble_and_solve(a, task));
                        self.chunks[a].a.finish();
                    }
                    between_tasks(me, clock, between)?;
                }
                // The last few wait for a copy of the top that another member is at.
                let copied = || due.iter().all(|due: &Due| self.chunks[b].blocks[due.block].is_copied());
                clock.time(Phase::Idle, || self.wait(me, copied))?;
                self.settle(b, &mut due);
            }
            if let Some(a) = a {
                self.stage_a(a, me, clock)?; // what is left of it
            }
        }
        Ok(())
    }

    fn stage_x(&self, c: usize, me: Member<'_>, clock: &mut Clock) -> Result<()> {
        let chunk = &self.chunks[c];
        if self.column.len() == 1 {
            return clock.time(Phase::Idle, || self.slot_free(c, me));
        }
        clock.time(Phase::RowExchange, || {
            if me.index() == 0 {
                self.open(c, me)?;
            }
            self.wait(me, || chunk.open.load(Ordering::Acquire))?;
            while let Some(task) = chunk.x.take() {
                self.gather_for_others(c, task);
                chunk.x.finish();
            }
            if me.index() == 0 {
                self.wait(me, || chunk.x.all_done())?;
                self.send(c)?;
            }
            Ok(())
        })
    }

    fn stage_a(&self, c: usize, me: Member<'_>, clock: &mut Clock) -> Result<()> {
        let chunk = &self.chunks[c];
        clock.time(Phase::RowExchange, || {
            if me.index() == 0 {
                self.receive(c, true)?;
            }
            self.wait(me, || chunk.arrived.load(Ordering::Acquire))?;
            while let Some(task) = chunk.a.take() {
                self.assemble_and_solve(c, task);
                chunk.a.finish();
            }
            Ok(())
        })
    }

    /// Whether the rows of a chunk are here; member 0 looks.
    fn arrived(&self, c: usize, me: Member<'_>) -> Result<bool> {
        if me.index() == 0 {
            self.receive(c, false)?;
        }
        Ok(self.chunks[c].arrived.load(Ordering::Acquire))
    }

    /// Spins until `condition`; an error of another member ends the wait.
    fn wait(&self, me: Member<'_>, condition: impl Fn() -> bool) -> Result<()> {
        me.wait_until(|| condition() || self.failed.get().is_some());
        match self.failed.get() {
            Some(e) => Err(e.clone()),
            None => Ok(()),
        }
    }

    /// Waits until the chunk that had this slot before is through.
    fn slot_free(&self, c: usize, me: Member<'_>) -> Result<()> {
        match c.checked_sub(SLOTS) {
            Some(before) => {
                self.wait(me, || self.chunks[before].b.all_done() && self.chunks[before].a.all_done())
            }
            None => Ok(()),
        }
    }

    fn strips(&self, c: usize, task: usize) -> Range<usize> {
        let group = STRIPS * self.kernels.tile().nr;
        task * group..((task + 1) * group).min(self.chunks[c].cols.len())
    }

    /// Stage A for a few strips.
    fn assemble_and_solve(&self, c: usize, task: usize) {
        let chunk = &self.chunks[c];
        let (plan, nr) = (self.panel.plan, self.kernels.tile().nr);
        let k = plan.u.len();
        let recv = self.space.recv.get(c % SLOTS).map(read);
        let messages: Vec<MatRef<'_, T>> = match &recv {
            None => Vec::new(),
            Some(recv) => {
                let none = MatRef::from_column_major_slice(&[], 0, chunk.cols.len());
                let mut messages = vec![none; self.column.len()];
                for (p, range) in self.receive_ranges(c) {
                    let count = plan.recv_u[p] + plan.recv_moves[p];
                    messages[p] = MatRef::from_column_major_slice(recv.read(range), count, chunk.cols.len());
                }
                messages
            }
        };
        let cols = self.strips(c, task);
        let strips = cols.start / nr..cols.end.div_ceil(nr);
        // SAFETY: tasks write disjoint strips; stage B reads them after all tasks of stage A.
        let u = unsafe { chunk.u.part(strips.start * nr * k..strips.end * nr * k, 0..1) };
        let u = u.try_as_col_major_mut().map(|u| u.col_mut(0)).and_then(|u| u.try_as_col_major_mut());
        let u = u.expect("a column is contiguous").as_slice_mut();
        let global = chunk.cols.start + cols.start..chunk.cols.start + cols.end;
        // SAFETY: this task alone touches these columns in stage A.
        let mut a = unsafe { self.a.part(0..self.a.nrows(), global) };
        let received: Vec<_> = messages.iter().map(|m| m.subcols(cols.start, cols.len())).collect();
        for (strip, at) in u.chunks_exact_mut(nr * k).zip((0..cols.len()).step_by(nr)) {
            let width = nr.min(cols.len() - at);
            match self.before {
                Some((early, panel)) if early.holds(panel, chunk.cols.start + cols.start + at) => {
                    early.copy(chunk.cols.start + cols.start + at, strip);
                }
                _ => {
                    gather_strip(a.as_ref(), &received, &plan.u, at, nr, strip);
                    move_rows(a.as_mut().subcols_mut(at, width), &received, &plan.moves, at);
                }
            }
        }
        match self.panel.triangle {
            Triangle::None => {}
            Triangle::UnitLower => self.kernels.trsm_with(&self.l11, k, u),
            Triangle::Upper => self.solve_upper(u),
        }
        if let (Some(&(row, 0)), true) = (plan.top.first(), plan.top.len() == k) {
            // All of the top is here, row after row.
            return self.kernels.unpack_b(u, a.submatrix_mut(row, 0, k, cols.len()));
        }
        for (strip, at) in u.chunks_exact(nr * k).zip((0..cols.len()).step_by(nr)) {
            for &(row, i) in &plan.top {
                for j in 0..nr.min(cols.len() - at) {
                    a[(row, at + j)] = strip[i * nr + j];
                }
            }
        }
    }

    /// U := U11⁻¹·U for packed strips. There is no packed kernel for it: out, solved, and in again.
    fn solve_upper(&self, u: &mut [T]) {
        let k = self.panel.plan.u.len();
        let n = u.len() / k;
        let mut x = Mat::zeros(k, n);
        self.kernels.unpack_b(u, x.as_mut());
        let (a, one) = (self.panel.top, T::one());
        let (side, uplo, op, diag) = (Side::Left, Uplo::Upper, Op::NoTrans, Diag::NonUnit);
        self.kernels.trsm(&Team::solo(), side, uplo, op, diag, one, a, x.as_mut());
        self.kernels.pack_b(x.as_ref(), u);
    }

    /// Stage B for one block of rows and columns: all rows of some columns before the next columns. `next` is the
    /// task (of which chunk) of stage A that this member does next.
    fn multiply(
        &self,
        c: usize,
        task: usize,
        next: Option<(usize, usize)>,
        me: Member<'_>,
        due: &mut Vec<Due>,
    ) -> Result<()> {
        let chunk = &self.chunks[c];
        let (tile, k) = (self.kernels.tile(), self.panel.plan.u.len());
        let row_blocks = self.panel.rows.len().div_ceil(chunk.mc);
        let (row, block) = (task % row_blocks, task / row_blocks);
        let rows = row * chunk.mc..((row + 1) * chunk.mc).min(self.panel.rows.len());
        let cols = self.block_cols(c, block);
        // SAFETY: nobody writes U after all tasks of stage A.
        let u = unsafe { chunk.u.part_ref(cols.start * k..cols.end.next_multiple_of(tile.nr) * k, 0..1) };
        let u = u.col(0).try_as_col_major().expect("a column is contiguous").as_slice();
        let product = |rows: &Range<usize>, soon: Option<ScatteredRows<'_, T>>| {
            let l21 = &self.panel.packed[rows.start * k..rows.end.next_multiple_of(tile.mr) * k];
            let local = self.local_rows(rows);
            // SAFETY: tasks own disjoint blocks of the chunk, and its stage A is done.
            let c = unsafe { self.a.part(local, chunk.cols.start + cols.start..chunk.cols.start + cols.end) };
            match soon {
                Some(soon) => self.kernels.gemm_packed_before(-T::one(), l21, u, k, c, soon),
                None => self.kernels.gemm_packed(-T::one(), l21, u, k, c),
            }
        };
        let soon = next.and_then(|(chunk, task)| self.scattered(chunk, task));
        let Some(after) = &self.after else {
            product(&rows, soon);
            return Ok(());
        };
        let early = &chunk.blocks[block];
        let global = chunk.cols.start + cols.start..chunk.cols.start + cols.end;
        if row == 0 {
            after.choose(early, &global);
        }
        self.wait(me, || after.chosen(early).is_some())?;
        if after.chosen(early) == Some(false) {
            product(&rows, soon);
            return Ok(());
        }
        // A few slivers at a time, so that their lines are in L2 when rows are exchanged.
        let few = EARLY_SLIVERS * tile.mr;
        for start in rows.clone().step_by(few) {
            let part = start..(start + few).min(rows.end);
            product(&part, soon.filter(|_| part.end == rows.end));
            due.push(Due { block, rows: self.local_rows(&part) });
            self.settle(c, due);
        }
        if row * chunk.mc < after.early.jb {
            after.top_task_done(early, &global);
        }
        Ok(())
    }

    /// Columns of a chunk that go through stage B together.
    fn block_cols(&self, c: usize, block: usize) -> Range<usize> {
        let nc = self.kernels.tile().nc;
        block * nc..(block + 1).saturating_mul(nc).min(self.chunks[c].cols.len())
    }

    fn local_rows(&self, rows: &Range<usize>) -> Range<usize> {
        self.panel.rows.start + rows.start..self.panel.rows.start + rows.end
    }

    /// What a task of stage A is going to gather, unless it has been already.
    fn scattered(&self, c: usize, task: usize) -> Option<ScatteredRows<'_, T>> {
        let (start, cols) = (self.chunks[c].cols.start, self.strips(c, task));
        let mut strips = cols.clone().step_by(self.kernels.tile().nr);
        if let Some((early, panel)) = self.before
            && strips.all(|at| early.holds(panel, start + at))
        {
            return None;
        }
        // SAFETY: this member alone touches these columns in stage A, and it has taken the task.
        let a = unsafe { self.a.part_ref(0..self.a.nrows(), start + cols.start..start + cols.end) };
        Some(ScatteredRows::new(a, &self.panel.plan.send_u))
    }

    /// Exchanges rows of chunk `c` that are due, where that is possible yet.
    fn settle(&self, c: usize, due: &mut Vec<Due>) {
        if let Some(after) = &self.after {
            let chunk = &self.chunks[c];
            due.retain(|Due { block, rows }| {
                let cols = self.block_cols(c, *block);
                let cols = chunk.cols.start + cols.start..chunk.cols.start + cols.end;
                !after.exchange(&chunk.blocks[*block], rows, &cols)
            });
        }
    }
}

/// Rows in a task of the last chunk: a quarter of the usual, but at least four slivers.
fn fine(mc: usize, mr: usize) -> usize {
    ((mc / 4).max(4 * mr) / mr * mr).min(mc)
}

fn between_tasks(me: Member<'_>, clock: &mut Clock, between: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    if me.index() == 0 { clock.time(Phase::BcastWait, between) } else { Ok(()) }
}

fn read<V>(lock: &RwLock<V>) -> std::sync::RwLockReadGuard<'_, V> {
    lock.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn write<V>(lock: &RwLock<V>) -> std::sync::RwLockWriteGuard<'_, V> {
    lock.write().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_columns_and_widen() {
        for (cols, first, width) in
            [(0..0, 8, 64), (3..4, 8, 64), (7..1000, 8, 64), (0..100, 64, 64), (5..99, 80, 64)]
        {
            let chunks: Vec<_> = cuts(cols.clone(), first, width).collect();
            assert_eq!(
                chunks.iter().cloned().flatten().collect::<Vec<_>>(),
                cols.clone().collect::<Vec<_>>()
            );
            assert!(chunks.iter().all(|c| c.len() <= width), "{chunks:?}");
            assert!(chunks.first().is_none_or(|c| c.len() <= first), "{chunks:?}");
            assert!(chunks.windows(2).all(|w| w[1].len() <= 2 * w[0].len()), "{chunks:?}");
        }
    }
}
