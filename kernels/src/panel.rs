//! Recursive LU of a tall panel with partial pivoting, by a team of threads on one rank's rows.
//!
//! The rows may be only a part of the panel: what concerns other ranks is behind [`PivotExchange`].
//! The recursion over columns is Toledo's (1997) and Gustavson's (1997), with HPL's variants.
//!
//! Every element sees the same operations in the same order for any number of threads and any split
//! of the rows over ranks, so the factors have the same bits.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use faer::prelude::ReborrowMut;

use crate::scalar::reciprocal;
use crate::{Diag, Kernels, MatMut, Member, Op, Scalar, SharedMut, Side, Team, Uplo};

/// HPL's PFACT and RFACT: in which order columns and updates are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Variant {
    /// Left-looking: a column is brought up to date just before it is factored.
    Left,
    /// Crout: row and column of U and L are brought up to date together.
    Crout,
    /// Right-looking: a factored column updates all that is right of it.
    Right,
}

/// How a panel is cut: HPL's RFACT, PFACT, NBMIN and NDIV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PanelShape {
    /// Variant of the recursion.
    pub rfact: Variant,
    /// Variant of the base case.
    pub pfact: Variant,
    /// Widest base case (at least 1).
    pub nbmin: usize,
    /// Parts that a recursion step cuts its columns into (at least 2).
    pub ndiv: usize,
}

/// The best pivot that this rank found in one column.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate<T> {
    /// Local row in the panel.
    pub row: usize,
    /// The element there.
    pub value: T,
}

/// Which of two pivots is larger, by [`Scalar::abs1`]. A NaN is larger than every number and equal to
/// another NaN: so it is met, not passed over.
pub fn compare_pivots<T: Scalar>(a: T, b: T) -> Ordering {
    let (a, b) = (a.abs1(), b.abs1());
    let nan = |x: <T as Scalar>::Real| num_traits::Float::is_nan(x);
    a.partial_cmp(&b).unwrap_or_else(|| nan(a).cmp(&nan(b)))
}

/// What the panel's factorisation needs from the other ranks of the process column.
///
/// A panel of jb columns, which all ranks together have at least jb rows of, has a top: the jb rows of the matrix that become rows of L11 and U11. The k-th
/// of them may lie on any rank. `top` (jb × jb, column-major) is the replicated triangle: when
/// column j is done, its row j holds the pivot row on every rank.
pub trait PivotExchange<T: Scalar> {
    /// Why the other ranks could not be reached.
    type Error: Send;

    /// First local row of the panel that column j may still pivot on: the number of local rows
    /// among the first j rows of the top.
    fn first_active(&self, j: usize) -> usize;

    /// Settles the pivot of column j among the ranks and moves the rows.
    ///
    /// `best` is this rank's candidate, `None` when it has no active row. Of equal sizes
    /// ([`Scalar::abs1`]) the lowest global row wins. On return row j of `top` holds the pivot row's
    /// jb elements, and the pivot row's place in `panel` (on the rank that owned it) holds what was
    /// row j of the top. Returns the global row that was chosen.
    ///
    /// # Errors
    /// When a rank is lost.
    fn exchange(
        &mut self,
        j: usize,
        best: Option<Candidate<T>>,
        panel: MatMut<'_, T>,
        top: MatMut<'_, T>,
    ) -> Result<usize, Self::Error>;
}

/// The exchange for a panel whose rows are all on this rank.
#[derive(Clone, Copy, Debug)]
pub struct LocalExchange {
    first_row: usize,
}

impl LocalExchange {
    /// The panel's first row is global row `first_row`.
    pub fn new(first_row: usize) -> Self {
        LocalExchange { first_row }
    }
}

impl<T: Scalar> PivotExchange<T> for LocalExchange {
    type Error = std::convert::Infallible;

    fn first_active(&self, j: usize) -> usize {
        j
    }

    fn exchange(
        &mut self,
        j: usize,
        best: Option<Candidate<T>>,
        mut panel: MatMut<'_, T>,
        mut top: MatMut<'_, T>,
    ) -> Result<usize, Self::Error> {
        let row = best.map_or(j, |best| best.row);
        for col in 0..top.ncols() {
            top[(j, col)] = panel[(row, col)];
            panel[(row, col)] = panel[(j, col)];
        }
        Ok(self.first_row + row)
    }
}

/// Factors a panel: P·A = L·U with L unit lower, by the whole team.
///
/// `panel` is this rank's rows (any number) of jb columns; `top` (jb × jb) receives L11 (below its
/// diagonal) and U11. On return the rows of `panel` from [`PivotExchange::first_active`]`(jb)` on hold
/// L21; those above, which belong to the top, are not meaningful: whoever owns them writes them back
/// from `top`. `ipiv[j]` is the global row that was exchanged with row j of the top.
///
/// Returns the first column whose pivot is exactly zero, LAPACK's `info` less one; the factorisation
/// is then complete all the same, and U singular.
///
/// Multipliers are formed as in LAPACK: by the pivot's reciprocal, or by division where that could
/// overflow.
///
/// # Errors
/// Those of the exchange; all members have then ended.
///
/// # Panics
/// When shapes do not match, `shape` is out of its range, or this rank's rows are fewer than it says.
pub fn getrf_panel<T: Scalar, X: PivotExchange<T> + Send>(
    kernels: &dyn Kernels<T>,
    team: &Team,
    shape: PanelShape,
    panel: MatMut<'_, T>,
    top: MatMut<'_, T>,
    ipiv: &mut [usize],
    exchange: &mut X,
) -> Result<Option<usize>, X::Error> {
    let job = PanelJob::new(kernels, team.len(), shape, panel, top, ipiv, exchange);
    team.run(|me| job.run(me));
    job.finish()
}

/// A panel to be factored from inside a running team, by all its members, one ([`Team::solo`] or a
/// [`crate::SubTeam`] of one) or some: look-ahead lets a few members factor the next panel while the
/// others update the trailing matrix.
///
/// Make it, let every member of the team or part call [`PanelJob::run`], then [`PanelJob::finish`].
/// See [`getrf_panel`] for the meaning of all.
pub struct PanelJob<'a, T: Scalar, X: PivotExchange<T>> {
    kernels: &'a dyn Kernels<T>,
    shape: PanelShape,
    panel: SharedMut<'a, T>,
    top: SharedMut<'a, T>,
    /// `first_active(j)` for j in 0..=jb.
    first_active: Vec<usize>,
    /// What each member found in the column at hand.
    found: Box<[Found<T>]>,
    /// What only member 0 touches.
    leader: Mutex<Leader<'a, X, X::Error>>,
    failed: AtomicBool,
}

struct Leader<'a, X, E> {
    exchange: &'a mut X,
    ipiv: &'a mut [usize],
    info: Option<usize>,
    error: Option<E>,
}

/// A member's candidate, alone on its cache lines (two: they are fetched in pairs).
#[repr(align(128))]
struct Found<T>(Mutex<Option<Candidate<T>>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One member's part in a [`PanelJob`].
struct Worker<'j, 'a, T: Scalar, X: PivotExchange<T>> {
    job: &'j PanelJob<'a, T, X>,
    me: Member<'j>,
    /// The rows that are this member's.
    rows: Range<usize>,
    /// Memory for packed strips.
    strips: Vec<T>,
}

/// An exchange failed: leave.
struct Failed;

impl<'a, T: Scalar, X: PivotExchange<T> + Send> PanelJob<'a, T, X> {
    /// For `members` members.
    ///
    /// # Panics
    /// As [`getrf_panel`].
    pub fn new(
        kernels: &'a dyn Kernels<T>,
        members: usize,
        shape: PanelShape,
        panel: MatMut<'a, T>,
        top: MatMut<'a, T>,
        ipiv: &'a mut [usize],
        exchange: &'a mut X,
    ) -> Self {
        let jb = panel.ncols();
        assert!(top.nrows() == jb && top.ncols() == jb, "top is {} x {} of {jb}", top.nrows(), top.ncols());
        assert_eq!(ipiv.len(), jb, "ipiv: one a column");
        assert!(shape.nbmin >= 1 && shape.ndiv >= 2, "{shape:?}: nbmin is at least 1, ndiv 2");
        let first_active: Vec<_> = (0..=jb).map(|j| exchange.first_active(j)).collect();
        assert!(
            first_active[jb] <= panel.nrows(),
            "{} rows of the panel are of its top, but it has {}",
            first_active[jb],
            panel.nrows()
        );
        PanelJob {
            kernels,
            shape,
            panel: SharedMut::new(panel),
            top: SharedMut::new(top),
            first_active,
            found: (0..members).map(|_| Found(Mutex::new(None))).collect(),
            leader: Mutex::new(Leader { exchange, ipiv, info: None, error: None }),
            failed: AtomicBool::new(false),
        }
    }

    /// This member's part; every member calls it.
    ///
    /// # Panics
    /// When the member's team has another size than said before.
    pub fn run(&self, me: Member<'_>) {
        assert_eq!(me.len(), self.found.len(), "members of the team");
        let mut worker = Worker { job: self, me, rows: self.rows_of(me), strips: Vec::new() };
        // A failure is told by `finish`.
        let _ = worker.recurse(0, self.panel.ncols());
    }

    /// What came of it, after `run` has returned on all members.
    ///
    /// # Errors
    /// That of the exchange.
    pub fn finish(self) -> Result<Option<usize>, X::Error> {
        let leader = self.leader.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        leader.error.map_or(Ok(leader.info), Err)
    }

    /// A member's rows. Rows of the top leave the work one by one, so they count half.
    fn rows_of(&self, me: Member<'_>) -> Range<usize> {
        let (m, top) = (self.panel.nrows(), self.first_active[self.panel.ncols()]);
        let weight = m - top / 2;
        let cut = |i: usize| {
            let w = weight * i / me.len();
            let row = if w <= top / 2 { 2 * w } else { w + top / 2 };
            if i == me.len() { m } else { row.next_multiple_of(8).min(m) }
        };
        cut(me.index())..cut(me.index() + 1)
    }
}

impl<T: Scalar, X: PivotExchange<T> + Send> Worker<'_, '_, T, X> {
    /// This member's rows that column j may still pivot on.
    fn active(&self, j: usize) -> Range<usize> {
        let start = self.rows.start.max(self.job.first_active[j]);
        start..self.rows.end.max(start)
    }

    /// Factors columns `j0..j0 + n`, which are up to date with all that is left of them.
    fn recurse(&mut self, j0: usize, n: usize) -> Result<(), Failed> {
        let PanelShape { rfact, pfact, nbmin, ndiv } = self.job.shape;
        if n <= nbmin {
            return match pfact {
                Variant::Left | Variant::Crout => self.left_looking(j0, n, pfact == Variant::Crout),
                Variant::Right => self.right_looking(j0, n),
            };
        }
        let width = nbmin * n.div_ceil(nbmin).div_ceil(ndiv);
        let end = j0 + n;
        for j in (j0..end).step_by(width) {
            let next = (j + width).min(end);
            match rfact {
                Variant::Left => {
                    self.solve(j0..j, j..next);
                    self.update(j0..j, j..next, j);
                    self.recurse(j, next - j)?;
                }
                Variant::Crout => {
                    self.update(j0..j, j..next, j);
                    self.recurse(j, next - j)?;
                    self.update_top(j..next, j0..j, next..end);
                    self.solve(j..next, next..end);
                }
                Variant::Right => {
                    self.recurse(j, next - j)?;
                    self.solve(j..next, next..end);
                    self.update(j..next, next..end, next);
                }
            }
        }
        Ok(())
    }

    /// top\[k, cols\] := L\[k, k\]⁻¹ · top\[k, cols\], by columns; ends with a barrier.
    fn solve(&mut self, k: Range<usize>, cols: Range<usize>) {
        if k.is_empty() || cols.is_empty() {
            return;
        }
        let (kernels, top) = (self.job.kernels, self.job.top);
        let share = self.me.share(cols.len(), kernels.tile().nr);
        let mine = cols.start + share.start..cols.start + share.end;
        if !mine.is_empty() {
            // SAFETY: members' columns are disjoint and none is among L's.
            let (l, mut u) = unsafe { (top.part_ref(k.clone(), k.clone()), top.part(k, mine)) };
            self.strips.resize(kernels.tile().packed_b_len(l.nrows(), u.ncols()), T::zero());
            kernels.pack_b(u.as_ref(), &mut self.strips);
            kernels.trsm_packed(l, &mut self.strips);
            kernels.unpack_b(&self.strips, u.rb_mut());
        }
        self.me.barrier();
    }

    /// panel\[active, cols\] −= panel\[active, k\] · top\[k, cols\] for this member's rows active from
    /// column j on.
    fn update(&self, k: Range<usize>, cols: Range<usize>, j: usize) {
        let rows = self.active(j);
        if k.is_empty() || cols.is_empty() || rows.is_empty() {
            return;
        }
        let PanelJob { kernels, panel, top, .. } = self.job;
        // SAFETY: the rows are this member's own, L's and C's columns disjoint; nobody writes U until
        // all have met again.
        unsafe {
            let l = panel.part_ref(rows.clone(), k.clone());
            let u = top.part_ref(k, cols.clone());
            kernels.gemm_panel(-T::one(), l, u, panel.part(rows, cols));
        }
    }

    /// top\[rows, cols\] −= top\[rows, k\] · top\[k, cols\], by columns, without a barrier after.
    fn update_top(&self, rows: Range<usize>, k: Range<usize>, cols: Range<usize>) {
        let PanelJob { kernels, top, .. } = self.job;
        let share = self.me.share(cols.len(), kernels.tile().nr);
        if rows.is_empty() || k.is_empty() || share.is_empty() {
            return;
        }
        let mine = cols.start + share.start..cols.start + share.end;
        // SAFETY: members' columns are disjoint, and none is among L's; the rows written are not read.
        unsafe {
            let l = top.part_ref(rows.clone(), k.clone());
            let u = top.part_ref(k, mine.clone());
            kernels.gemm_panel(-T::one(), l, u, top.part(rows, mine));
        }
    }

    /// Base case: each column is brought up to date in one pass when its turn comes. Crout's order
    /// finishes a row of U with its pivot, the left-looking one a column of U before its use; the sums
    /// are the same, term by term.
    fn left_looking(&mut self, j0: usize, n: usize, crout: bool) -> Result<(), Failed> {
        let job = self.job;
        let mut scale = None;
        let mut u = Vec::with_capacity(n);
        for j in j0..j0 + n {
            // SAFETY: the top is written only by the leader, when all wait.
            let top = unsafe { job.top.part_ref(j0..j0 + n, j0..j0 + n) };
            u.clear();
            for i in 0..j - j0 {
                let mut x = top[(i, j - j0)];
                if !crout {
                    for (p, &up) in u.iter().enumerate() {
                        x = T::fused_mul_add(-top[(i, p)], up, x);
                    }
                }
                u.push(x);
            }
            let rows = self.active(j);
            // SAFETY: the rows are this member's own.
            let cols = unsafe { job.panel.part(rows.clone(), j0..j + 1) };
            let best = job.kernels.panel_column(cols, scale, &u);
            let best = best.map(|i| rows.start + i);
            let column = |mut top: MatMut<'_, T>| {
                for (i, &x) in u.iter().enumerate() {
                    top[(j0 + i, j)] = x;
                }
            };
            let row = |mut top: MatMut<'_, T>| {
                for q in j + 1..j0 + n {
                    for p in j0..j {
                        top[(j, q)] = T::fused_mul_add(-top[(j, p)], top[(p, q)], top[(j, q)]);
                    }
                }
            };
            if crout {
                self.settle(j, best, |_| (), row)?
            } else {
                self.settle(j, best, column, |_| ())?
            }
            scale = self.multiplier(j);
        }
        self.scale_last(j0 + n - 1, scale);
        Ok(())
    }

    /// Base case: each column, once factored, updates those right of it.
    fn right_looking(&mut self, j0: usize, n: usize) -> Result<(), Failed> {
        let job = self.job;
        let rows = self.active(j0);
        // SAFETY: the rows are this member's own.
        let first = unsafe { job.panel.part(rows.clone(), j0..j0 + 1) };
        let mut best = job.kernels.panel_column(first, None, &[]).map(|i| rows.start + i);
        for j in j0..j0 + n {
            self.settle(j, best, |_| (), |_| ())?;
            let mut scale = self.multiplier(j);
            let rows = self.active(j + 1);
            for q in j + 1..j0 + n {
                // SAFETY: the rows are this member's own; nobody writes the top now.
                let (l, u) = unsafe {
                    (job.panel.part(rows.clone(), j..j0 + n), job.top.part_ref(j..j + 1, q..q + 1)[(0, 0)])
                };
                let (ptr, apart) = (l.as_ptr_mut(), l.col_stride() * (q - j) as isize);
                // SAFETY: columns j and q of this member's rows.
                let pair = unsafe { MatMut::from_raw_parts_mut(ptr, rows.len(), 2, 1, apart) };
                let found = job.kernels.panel_column(pair, scale.take(), &[u]);
                if q == j + 1 {
                    best = found.map(|i| rows.start + i);
                }
            }
            self.scale_last(j, scale);
        }
        Ok(())
    }

    /// Settles the pivot of column j: this member's best row is told to member 0, which exchanges with
    /// the other ranks; it runs `before` and `after` on the top.
    fn settle(
        &self,
        j: usize,
        best: Option<usize>,
        before: impl FnOnce(MatMut<'_, T>),
        after: impl FnOnce(MatMut<'_, T>),
    ) -> Result<(), Failed> {
        let job = self.job;
        let (m, jb) = (job.panel.nrows(), job.panel.ncols());
        *lock(&job.found[self.me.index()].0) = best.map(|row| {
            // SAFETY: the row is this member's own.
            Candidate { row, value: unsafe { job.panel.part_ref(row..row + 1, j..j + 1) }[(0, 0)] }
        });
        self.me.led(|| {
            // SAFETY: the others wait.
            let (panel, mut top) = unsafe { (job.panel.part(0..m, 0..jb), job.top.part(0..jb, 0..jb)) };
            before(top.rb_mut());
            // Members' rows ascend: of equals the first is the lowest.
            let best = job.found.iter().filter_map(|found| *lock(&found.0)).reduce(|best, other| {
                if compare_pivots(other.value, best.value).is_gt() { other } else { best }
            });
            let leader = &mut *lock(&job.leader);
            match leader.exchange.exchange(j, best, panel, top.rb_mut()) {
                Ok(row) => {
                    leader.ipiv[j] = row;
                    if top[(j, j)] == T::zero() {
                        leader.info.get_or_insert(j);
                    }
                    after(top);
                }
                Err(error) => {
                    leader.error = Some(error);
                    job.failed.store(true, Relaxed);
                }
            }
        });
        if job.failed.load(Relaxed) { Err(Failed) } else { Ok(()) }
    }

    /// What column j is still to be multiplied by. Where the reciprocal of the pivot could overflow,
    /// the column is divided here and now.
    fn multiplier(&self, j: usize) -> Option<T> {
        // SAFETY: nobody writes the top now.
        let pivot = unsafe { self.job.top.part_ref(j..j + 1, j..j + 1) }[(0, 0)];
        if pivot == T::zero() {
            return None;
        }
        // LAPACK's sfmin is the least normal number for both formats.
        let safe = <<T as Scalar>::Real as num_traits::Float>::min_positive_value();
        // A NaN goes the usual way and spreads.
        if pivot.modulus() < safe {
            let rows = self.active(j + 1);
            // SAFETY: the rows are this member's own.
            let mut l = unsafe { self.job.panel.part(rows, j..j + 1) };
            for i in 0..l.nrows() {
                l[(i, 0)] /= pivot;
            }
            return None;
        }
        Some(reciprocal(pivot))
    }

    /// Scales the rest of column j, which no later column of its block does.
    fn scale_last(&self, j: usize, scale: Option<T>) {
        let rows = self.active(j + 1);
        if let (Some(scale), false) = (scale, rows.is_empty()) {
            // SAFETY: the rows are this member's own.
            let column = unsafe { self.job.panel.part(rows, j..j + 1) };
            // SAFETY: a column is contiguous.
            let column = unsafe { std::slice::from_raw_parts_mut(column.as_ptr_mut(), column.nrows()) };
            self.job.kernels.scal(scale, column);
        }
    }
}

/// Columns of the panels that [`getrf`] cuts a matrix into.
const PANEL: usize = 256;

/// LAPACK's `getrf` on one rank: P·A = L·U of an m × n matrix in place, L unit lower. Row j was
/// exchanged with row `ipiv[j]`, in this order, j < min(m, n).
///
/// Returns the first column whose pivot is exactly zero (LAPACK's `info` less one); the factorisation
/// is complete all the same.
///
/// # Panics
/// When `ipiv` is not min(m, n) long, or `shape` out of its range.
pub fn getrf<T: Scalar>(
    kernels: &dyn Kernels<T>,
    team: &Team,
    shape: PanelShape,
    a: MatMut<'_, T>,
    ipiv: &mut [usize],
) -> Option<usize> {
    let (m, n) = (a.nrows(), a.ncols());
    let k = m.min(n);
    assert_eq!(ipiv.len(), k, "ipiv: one a pivot");
    let mut info = None;
    let a = SharedMut::new(a);
    let mut top = vec![T::zero(); PANEL.min(k) * PANEL.min(k)];
    for j in (0..k).step_by(PANEL) {
        let jb = PANEL.min(k - j);
        let next = j + jb;
        // SAFETY: one thread at work, one part at a time.
        let panel = unsafe { a.part(j..m, j..next) };
        let mut top = MatMut::from_column_major_slice_mut(&mut top[..jb * jb], jb, jb);
        let pivots = &mut ipiv[j..next];
        let zero = match getrf_panel(
            kernels,
            team,
            shape,
            panel,
            top.rb_mut(),
            pivots,
            &mut LocalExchange::new(j),
        ) {
            Ok(zero) => zero,
            Err(never) => match never {},
        };
        info = info.or(zero.map(|z| j + z));
        // SAFETY: as above.
        let mut own = unsafe { a.part(j..next, j..next) };
        own.copy_from(top.as_ref());
        let pivots = &ipiv[j..next];
        team.run(|me| {
            for col in me.share(n - jb, 1).map(|c| if c < j { c } else { c + jb }) {
                // SAFETY: members' columns are disjoint.
                let mut col = unsafe { a.part(0..m, col..col + 1) };
                for (i, &p) in pivots.iter().enumerate().filter(|&(i, &p)| p != j + i) {
                    (col[(j + i, 0)], col[(p, 0)]) = (col[(p, 0)], col[(j + i, 0)]);
                }
            }
        });
        if next < n {
            let one = T::one();
            // SAFETY: disjoint parts, one thread at work on them but for the team of each call.
            unsafe {
                let (l11, u12) = (a.part_ref(j..next, j..next), a.part(j..next, next..n));
                kernels.trsm(team, Side::Left, Uplo::Lower, Op::NoTrans, Diag::Unit, one, l11, u12);
                let l21 = (Op::NoTrans, a.part_ref(next..m, j..next));
                let u12 = (Op::NoTrans, a.part_ref(j..next, next..n));
                kernels.gemm(team, -one, l21, u12, one, a.part(next..m, next..n));
            }
        }
    }
    info
}
