//! Solving op(A)·X = B with the factors of A, for any number of right-hand sides.

use std::ops::Range;
use std::sync::OnceLock;

use fulmen_kernels::{Kernels, MatRef, Op, Scalar, SharedMut, Team};

use super::local::LocalView;
use super::lu::interchange;
use super::panel::{Layout, Panel};
use super::plan::Permutation;
use super::timing::Clock;
use super::update::{FactoredPanel, Triangle, Update, UpdateSpace};
use crate::comm::{BcastLane, Topology};
use crate::dist::{DistMut, DistRef};
use crate::error::{Error, Result};

/// Solves op(A)·X = B in place of B, where `a` and `ipiv` are what [`super::getrf`] left of the square A
/// (with `keep_l`): op(A) is A, Aᵀ or Aᴴ. Every rank of the grid calls it.
///
/// The panels of L, then those of U from the last, travel along the process rows as in the factorisation, and
/// update B as they would update a trailing matrix. For Aᵀ and Aᴴ they come in the opposite order, U first,
/// and each collects what its rows of B owe to those before it: see `transposed.rs`.
///
/// A zero on U's diagonal gives infinities and NaNs, as in LAPACK.
///
/// # Errors
/// [`Error::Argument`] when A is not square or B does not match A in rows, grid, row block size and alignment;
/// or when a rank is lost or memory is short.
pub fn getrs<T: Scalar>(
    kernels: &dyn Kernels<T>,
    team: &Team,
    op: Op,
    a: &DistRef<'_, T>,
    ipiv: &[usize],
    b: DistMut<'_, T>,
) -> Result<()> {
    let (a, b) = (LocalView::read(a), LocalView::new(b));
    check(&a, &b)?;
    let steps = a.panels();
    let jb = steps.iter().map(Range::len).max().unwrap_or(0);
    let mut solve = Solve {
        panel: Panel::new(
            kernels,
            &BcastLane::new(a.grid.row_group()),
            Topology::default(),
            jb,
            a.local_rows(0..a.m).len(),
        )?,
        space: UpdateSpace::new(kernels, a.grid.col_group(), jb, b.local_cols(0..b.n).len())?,
        kernels,
        team,
        a: &a,
        b: &b,
    };
    a.grid.fabric().set_activity("in the triangular solve");
    match op {
        Op::NoTrans => {
            for cols in &steps {
                let permutation = Permutation::new(cols.start, &ipiv[cols.clone()]);
                solve.interchange(&permutation, cols.start)?;
            }
            for cols in &steps {
                solve.step(cols, Triangle::UnitLower, cols.end..a.m)?;
            }
            for cols in steps.iter().rev() {
                solve.step(cols, Triangle::Upper, 0..cols.start)?;
            }
        }
        Op::Trans | Op::ConjTrans => {
            for cols in &steps {
                solve.step_transposed(op, cols, Triangle::Upper, 0..cols.start)?;
            }
            for cols in steps.iter().rev() {
                solve.step_transposed(op, cols, Triangle::UnitLower, cols.end..a.m)?;
            }
            for cols in steps.iter().rev() {
                let permutation = Permutation::new(cols.start, &ipiv[cols.clone()]);
                solve.interchange(&permutation.inverse(cols.start), cols.start)?;
            }
        }
    }
    solve.panel.flush()?;
    solve.space.flush(&**a.grid.fabric())
}

fn check<A, B>(a: &LocalView<'_, A>, b: &LocalView<'_, B>) -> Result<()> {
    if a.m != a.n {
        let value = format!("{} x {}", a.m, a.n);
        return Err(Error::argument("a", value, "is not square", "solve least squares for other shapes"));
    }
    if b.m != a.m {
        let problem = format!("has not the {} rows of A", a.m);
        return Err(Error::argument("b", format!("{} rows", b.m), problem, "give one row for each row of A"));
    }
    if !std::sync::Arc::ptr_eq(a.grid, b.grid) {
        return Err(Error::argument("b", "its grid", "is not A's grid", "distribute A and B over one grid"));
    }

    if a.m > 0 && a.row_place() != b.row_place() {
        let (mb, within, owner) = b.row_place();
        return Err(Error::argument(
            "b",
            format!("MB {mb}, first row at {within} of a block on process row {owner}"),
            format!(
                "is not aligned with A (MB {}, {} of a block on process row {})",
                a.row_place().0,
                a.row_place().1,
                a.row_place().2
            ),
            "give B the MB, RSRC and row offset of A",
        ));
    }
    Ok(())
}

pub(super) struct Solve<'a, T> {
    pub(super) kernels: &'a dyn Kernels<T>,
    pub(super) team: &'a Team,
    pub(super) a: &'a LocalView<'a, MatRef<'a, T>>,
    pub(super) b: &'a LocalView<'a, SharedMut<'a, T>>,
    pub(super) panel: Panel<T>,
    space: UpdateSpace<T>,
}

impl<T: Scalar> Solve<'_, T> {
    /// Moves rows of B.
    fn interchange(&mut self, permutation: &Permutation, first: usize) -> Result<()> {
        let all = self.b.local_cols(0..self.b.n);
        interchange(self.kernels, self.team, self.b, &mut self.space, permutation, first, all).map(drop)
    }

    /// Rows `cols` of B are solved with the diagonal block of columns `cols`, and rows `others` updated.
    fn step(&mut self, cols: &Range<usize>, triangle: Triangle, others: Range<usize>) -> Result<()> {
        let (kernels, b) = (self.kernels, self.b);
        self.bring(cols, &others, |rows, out| kernels.pack_a(rows, out))?;
        let plan = b.plan(&Permutation::identity(cols.clone()), cols.start);
        let panel = FactoredPanel {
            triangle,
            top: self.panel.top(),
            packed: self.panel.packed(),
            rows: b.local_rows(others),
            plan: &plan,
        };
        let failed = OnceLock::new();
        let all = b.local_cols(0..b.n);
        let column = b.grid.col_group();
        let update = Update::new(self.kernels, column, self.space.lend(), panel, b.a, all, &failed);
        let fabric = b.grid.fabric();
        self.team.run(|me| update.work(me, &mut Clock::default(), &mut || fabric.poll()));
        drop(update);
        failed.into_inner().map_or(Ok(()), Err)
    }

    /// Brings columns `cols` of A to every process column: the diagonal block, and this process row's rows of
    /// `others`, laid out by `pack`.
    pub(super) fn bring(
        &mut self,
        cols: &Range<usize>,
        others: &Range<usize>,
        pack: impl Fn(MatRef<'_, T>, &mut [T]),
    ) -> Result<()> {
        let a = self.a;
        let root = a.col_owner(cols.start);
        let rows = a.local_rows(others.clone());
        self.panel.begin(Layout::new(self.kernels, cols.len(), rows.len()), root)?;
        if root == a.grid.mycol() {
            self.fill(cols, rows, pack)?;
            self.panel.send()?;
        }
        self.panel.finish()
    }

    /// On the process column that holds the panel: replicates the diagonal block, packs the other rows.
    fn fill(
        &mut self,
        cols: &Range<usize>,
        others: Range<usize>,
        pack: impl Fn(MatRef<'_, T>, &mut [T]),
    ) -> Result<()> {
        let a = self.a;
        let jb = cols.len();
        let at = a.local_cols(cols.clone());
        let block = a.a.subcols(at.start, at.len());
        let diagonal = block.subrows(a.local_rows(cols.clone()).start, a.local_rows(cols.clone()).len());
        let mine: Vec<T> =
            (0..diagonal.nrows()).flat_map(|i| (0..jb).map(move |j| diagonal[(i, j)])).collect();
        let parts = a.grid.col_group().all_gather_var(&mine)?;
        let mut next: Vec<_> = parts.iter().map(|p| p.chunks_exact(jb)).collect();
        let (_, top, out) = self.panel.sections();
        for (i, row) in cols.clone().enumerate() {
            let owner = a.rows.owner((a.ia + row).into());
            let values =
                next[owner].next().ok_or_else(|| Error::Internal(format!("row {row} of A is missing")))?;
            values.iter().enumerate().for_each(|(j, &x)| top[i + j * jb] = x);
        }
        pack(block.subrows(others.start, others.len()), out);
        Ok(())
    }
}
