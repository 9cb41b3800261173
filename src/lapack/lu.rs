//! LU factorisation with partial pivoting.
//!
//! Right-looking, by panels, with look-ahead (HPL's `pdgesv`; Strazdins 1998 for the look-ahead). A
//! panel b is brought up to date and factored `lookahead` steps before its turn to update the rest, so
//! that its journey along the process row hides behind the updates that go before it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use fulmen_kernels::{Kernels, PanelShape, Scalar, SharedMut, SubTeam, Team, Variant};

use super::early::{EarlyPlan, EarlyRows};
use super::factor::{PanelSpace, PanelWork, PivotLog, threads_for_panel};
use super::local::LocalView;
use super::panel::{Layout, Panel};
use super::pivot::message_len;
use super::plan::{Permutation, RowPlan};
use super::timing::{Clock, Phase, PhaseTimes};
use super::update::{FactoredPanel, Triangle, Update, UpdateSpace};
use crate::comm::{AllToAllSmall, BcastLane, Topology};
use crate::dist::DistMut;
use crate::error::{Error, Result};
use crate::fabric::{Fabric, Lane};

/// How to factor. `Default` is right for most.
#[derive(Clone, Debug)]
pub struct LuOpts {
    /// Panels that are factored ahead of their turn: 0, 1 or 2 (HPL's DEPTH).
    pub lookahead: usize,
    /// How a panel travels along the process row (HPL's BCAST).
    pub bcast: Topology,
    /// How a panel is factored (HPL's RFACT, PFACT, NBMIN, NDIV).
    pub panel: PanelShape,
    /// Whether L is wanted: applies later interchanges to its columns too. A benchmark that solves
    /// for right-hand sides that are columns of the matrix needs only U.
    pub keep_l: bool,
}

impl Default for LuOpts {
    fn default() -> Self {
        LuOpts {
            lookahead: 1,
            bcast: Topology::RingM,
            panel: PanelShape { rfact: Variant::Right, pfact: Variant::Left, nbmin: 8, ndiv: 2 },
            keep_l: true,
        }
    }
}

/// Told about progress by every rank, on its own thread.
pub trait Observer: Send {
    /// `done` of `total` floating-point operations of the whole factorisation are behind us; 0 at its start.
    fn progress(&mut self, done: f64, total: f64);
}

/// An observer that does nothing.
pub struct Silent;

impl Observer for Silent {
    fn progress(&mut self, _done: f64, _total: f64) {}
}

/// What a factorisation says beside the factors.
#[derive(Clone, PartialEq, Debug)]
pub struct LuFactors {
    /// Row `ipiv[i]` was interchanged with row i, i ascending; rows of the view, from 0; on every rank.
    pub ipiv: Vec<usize>,
    /// First column whose pivot is exactly zero (LAPACK's INFO − 1): U is singular. The factorisation is
    /// complete all the same.
    pub info: Option<usize>,
    /// Where this rank's time went.
    pub times: PhaseTimes,
}

/// Factors A = P·L·U in place. A is any m × n view, of any block sizes, source rank and offset.
///
/// L is unit lower trapezoidal below the diagonal, U upper trapezoidal. Every rank of the grid calls it.
/// Pivots are the largest by |re| + |im|; of equal ones the highest up; so the result does not depend on
/// the grid (and with kernels that keep the order of operations, not in a single bit).
///
/// # Errors
/// When a rank is lost or memory is short. A zero pivot is no error: see [`LuFactors::info`].
pub fn getrf<T: Scalar>(
    kernels: &dyn Kernels<T>,
    team: &Team,
    a: DistMut<'_, T>,
    opts: &LuOpts,
    observer: &mut dyn Observer,
) -> Result<LuFactors> {
    let (m, n) = (a.nrows(), a.ncols());
    let view = LocalView::new(a);
    let steps = view.panels();
    let Some(last) = steps.last() else {
        return Ok(LuFactors { ipiv: Vec::new(), info: None, times: PhaseTimes::default() });
    };
    let end = last.end;
    let mut lu = Factorisation::new(kernels, team, view, opts, steps)?;
    let depth = lu.depth;
    let total = flops_from(m, n, 0);
    observer.progress(0.0, total);
    for b in 0..lu.steps.len() + depth {
        let panel = Some(b).filter(|&b| b < lu.steps.len());
        let update = b.checked_sub(depth);
        if depth == 0 {
            lu.round(panel, None)?;
            lu.round(None, update)?;
        } else {
            lu.round(panel, update)?;
        }
        let done = lu.steps.get((b + 1).saturating_sub(depth)).map_or(end, |next| next.start);
        observer.progress(total - flops_from(m, n, done), total);
    }
    if opts.keep_l {
        lu.interchange_left()?;
    }
    lu.finish()
}

/// Operations of factoring what is left of an m × n matrix after column j (LAWN 41).
fn flops_from(m: usize, n: usize, j: usize) -> f64 {
    let (m, n) = ((m - j.min(m)) as f64, (n - j.min(n)) as f64);
    let k = m.min(n);
    2.0 * m * n * k - (m + n) * k * k + 2.0 / 3.0 * k * k * k
}

struct Factorisation<'a, T> {
    kernels: &'a dyn Kernels<T>,
    team: &'a Team,
    opts: &'a LuOpts,
    view: LocalView<'a, SharedMut<'a, T>>,
    /// Columns of each panel.
    steps: Vec<Range<usize>>,
    /// Look-ahead: as asked for, but not further than to the last panel.
    depth: usize,
    /// Panel b in slot b mod (depth + 1), until its updates are done.
    slots: Vec<Option<Slot<T>>>,
    space: UpdateSpace<T>,
    early: Option<EarlyRows<T>>,
    pivots: AllToAllSmall<T>,
    result: LuFactors,
}

/// A panel and what its pivots mean for this rank's rows.
pub(crate) struct Slot<T> {
    pub(crate) panel: Panel<T>,
    pub(crate) plan: RowPlan,
}

impl<'a, T: Scalar> Factorisation<'a, T> {
    fn new(
        kernels: &'a dyn Kernels<T>,
        team: &'a Team,
        view: LocalView<'a, SharedMut<'a, T>>,
        opts: &'a LuOpts,
        steps: Vec<Range<usize>>,
    ) -> Result<Self> {
        let jb = steps.iter().map(Range::len).max().unwrap_or(0);
        let depth = opts.lookahead.min(steps.len().saturating_sub(1));
        let m_local = view.local_rows(0..view.m).len();
        let column = view.grid.col_group();
        let row = view.grid.row_group();
        let lane = match opts.bcast {
            Topology::Cables => BcastLane::along_cables(row)?,
            _ => BcastLane::new(row),
        };
        let slot = |_| {
            let panel = Panel::new(kernels, &lane, opts.bcast, jb, m_local)?;
            Ok(Some(Slot { panel, plan: RowPlan::default() }))
        };
        Ok(Factorisation {
            slots: (0..=depth).map(slot).collect::<Result<_>>()?,
            space: UpdateSpace::new(kernels, column, jb, view.local_cols(0..view.n).len())?,
            // Without look-ahead nothing is known early.
            early: if depth > 0 { EarlyRows::of(&view, &steps, kernels.tile().nr)? } else { None },
            pivots: AllToAllSmall::new(column, Lane::PIVOT, message_len::<T>(jb))?,
            kernels,
            team,
            opts,
            view,
            steps,
            depth,
            result: LuFactors { ipiv: Vec::new(), info: None, times: PhaseTimes::default() },
        })
    }

    /// Brings panel b up to date, factors and sends it, while panel k updates all columns that are right
    /// of the panels factored so far.
    fn round(&mut self, b: Option<usize>, k: Option<usize>) -> Result<()> {
        let (kernels, team, view, steps) = (self.kernels, self.team, &self.view, &self.steps);
        let depth = self.depth;
        let slot = |k: usize| k % (depth + 1);
        let fabric: &dyn Fabric = &**view.grid.fabric();
        let at = b.or(k).unwrap_or(0);
        fabric.set_activity(&format!("in panel {} of {}", at + 1, steps.len()));

        let mut current = match b {
            Some(b) => self.slots[slot(b)].take(),
            None => None,
        };
        let columns = b.map(|b| steps[b].clone());
        let root = columns.as_ref().map(|cols| view.col_owner(cols.start));
        let mine = root == Some(view.grid.mycol());
        if let (Some(current), Some(cols), Some(root)) = (&mut current, &columns, root) {
            let below = view.local_rows(cols.end..view.m).len();
            current.panel.begin(Layout::new(kernels, cols.len(), below), root)?;
        }

        let failed = OnceLock::new();
        let buffers = self.space.lend();
        let slots = &self.slots;
        let early = self.early.as_mut().map(EarlyRows::lend);
        // The interchanges that come after panel k's.
        let next = OnceLock::new();
        let following = k.map(|k| k + 1).filter(|&following| early.is_some() && following < steps.len());
        let plan_early = |at: usize, plan: &RowPlan| {
            if Some(at) == following
                && let Some(plan) = EarlyPlan::new(at, plan)
            {
                let _ = next.set(plan);
            }
        };
        if let Some(at) = following
            && let Some(there) = &slots[slot(at)]
        {
            plan_early(at, &there.plan);
        }
        let update = |k: usize, cols: Range<usize>, next| -> Result<Update<'_, T>> {
            let Some(Slot { panel, plan }) = &slots[slot(k)] else {
                return Err(Error::Internal(format!("panel {k} is not there")));
            };
            let factored = FactoredPanel {
                triangle: Triangle::UnitLower,
                top: panel.top(),
                packed: panel.packed(),
                plan,
                rows: view.local_rows(steps[k].end..view.m),
            };
            let update =
                Update::new(kernels, view.grid.col_group(), buffers, factored, view.a, cols, &failed);
            Ok(match early {
                Some(early) => update.with_early(early, k, next),
                None => update,
            })
        };
        // Every earlier panel that has not met panel b's columns yet.
        let catch_up = match (b, &columns) {
            (Some(b), Some(cols)) if mine => (b.saturating_sub(depth)..b)
                .map(|k| update(k, view.local_cols(cols.clone()), None))
                .collect::<Result<Vec<_>>>()?,
            _ => Vec::new(),
        };
        let factored = k.map_or(0, |k| steps[(k + depth).min(steps.len() - 1)].end);
        let rest = view.local_cols(factored..view.n);
        let bulk = k.map(|k| update(k, rest.clone(), following.map(|_| &next))).transpose()?;

        let size = columns.as_ref().map_or(1, |cols| {
            let m = view.local_rows(cols.start..view.m).len();
            threads_for_panel(team.len(), m, cols.len(), bulk.as_ref().map(|_| rest.len()))
        });
        let part = SubTeam::first(size);
        // Member 0 alone locks it, as long as the team runs.
        let current = Mutex::new(current);
        let log = PivotLog::default();
        let mut space = match &columns {
            Some(cols) if mine => Some((cols, PanelSpace::new(view, cols, &mut self.pivots, &log))),
            _ => None,
        };
        let work = space.as_mut().map(|(cols, space)| {
            // SAFETY: when the work runs, the updates of these columns are done, and the bulk update is of columns
            // to the right; `current` is only polled before the work has sent it.
            unsafe { PanelWork::new(kernels, size, self.opts.panel, view, cols, &current, space) }
        });
        let work = work.transpose()?;
        let clocks: Vec<Mutex<Clock>> = (0..team.len()).map(|_| Mutex::default()).collect();
        team.run(|me| {
            let clock = &mut *lock(&clocks[me.index()]);
            let mut poll = || match &mut *lock(&current) {
                Some(current) => {
                    if current.panel.poll()?
                        && let Some(b) = b.filter(|&b| Some(b) == following && next.get().is_none())
                    {
                        let first = steps[b].start;
                        plan_early(b, &view.plan(&Permutation::new(first, &current.panel.ipiv()), first));
                    }
                    Ok(())
                }
                None => fabric.poll(),
            };
            for update in &catch_up {
                update.work(me, clock, &mut poll);
                clock.time(Phase::Idle, || me.barrier());
            }
            if !catch_up.is_empty() {
                // All see the same before anyone goes on: members that part ways would wait for each other.
                let broken = failed.get().is_some();
                clock.time(Phase::Idle, || me.barrier());
                if broken {
                    return;
                }
            }
            if let Some(work) = &work {
                part.run(me, |me| clock.time(Phase::Panel, || work.run(me, &failed)));
            }
            if me.index() == 0
                && let Err(e) = poll()
            {
                let _ = failed.set(e);
            }
            if let Some(bulk) = &bulk {
                bulk.work(me, clock, &mut poll);
            }
            clock.time(Phase::Idle, || me.barrier());
        });
        drop((work, catch_up, bulk));
        for clock in &clocks {
            self.result.times.add(&lock(clock), team.len());
        }
        if let Some(e) = failed.into_inner() {
            return Err(e);
        }
        let current = current.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let (Some(b), Some(mut current)) = (b, current) {
            let mut clock = Clock::default();
            clock.time(Phase::BcastWait, || current.panel.finish())?;
            self.result.times.add(&clock, 1);
            self.record(b, &mut current);
            self.slots[slot(b)] = Some(current);
        }
        Ok(())
    }

    /// Leaves every lane as it was found, and nothing in flight.
    fn finish(mut self) -> Result<LuFactors> {
        self.pivots.finish()?;
        self.slots.iter_mut().flatten().try_for_each(|slot| slot.panel.flush())?;
        self.space.flush(&**self.view.grid.fabric())?;
        Ok(self.result)
    }

    /// Panel b is here: notes its pivots and makes the plan of its row exchange.
    fn record(&mut self, b: usize, slot: &mut Slot<T>) {
        let first = self.steps[b].start;
        let ipiv = slot.panel.ipiv();
        slot.plan = self.view.plan(&Permutation::new(first, &ipiv), first);
        self.result.ipiv.extend(ipiv);
        self.result.info = self.result.info.or(slot.panel.info());
    }

    /// Applies every panel's interchanges to the columns on its left, as LAPACK's `getrf` does.
    fn interchange_left(&mut self) -> Result<()> {
        let view = &self.view;
        for cols in &self.steps {
            let permutation = Permutation::new(cols.start, &self.result.ipiv[cols.clone()]);
            let left = view.local_cols(0..cols.start);
            let clock =
                interchange(self.kernels, self.team, view, &mut self.space, &permutation, cols.start, left)?;
            self.result.times.add(&clock, 1);
        }
        Ok(())
    }
}

/// Applies one panel's interchanges to local columns `cols` of a view.
pub(crate) fn interchange<T: Scalar>(
    kernels: &dyn Kernels<T>,
    team: &Team,
    view: &LocalView<'_, SharedMut<'_, T>>,
    space: &mut UpdateSpace<T>,
    permutation: &Permutation,
    first: usize,
    cols: Range<usize>,
) -> Result<Clock> {
    let plan = view.plan(permutation, first);
    let failed = OnceLock::new();
    let factored = FactoredPanel::only_rows(&plan);
    let update = Update::new(kernels, view.grid.col_group(), space.lend(), factored, view.a, cols, &failed);
    let fabric = view.grid.fabric();
    let clock = Mutex::new(Clock::default());
    team.run(|me| {
        let mut spare = Clock::default();
        let clock = if me.index() == 0 { &mut *lock(&clock) } else { &mut spare };
        update.work(me, clock, &mut || fabric.poll());
    });
    drop(update);
    match failed.into_inner() {
        Some(e) => Err(e),
        None => Ok(clock.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
