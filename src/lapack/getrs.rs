//! Solving A·X = B with the factors of A, for any number of right-hand sides.

use std::ops::Range;
use std::sync::OnceLock;

use fulmen_kernels::{Kernels, MatRef, Scalar, SharedMut, Team};

use super::local::LocalView;
use super::lu::interchange;
use super::panel::{Layout, Panel};
use super::plan::Permutation;
use super::timing::Clock;
use super::update::{FactoredPanel, Triangle, Update, UpdateSpace};
use crate::comm::{BcastLane, Topology};
use crate::dist::{DistMut, DistRef};
use crate::error::{Error, Result};

/// Solves A·X = B in place of B, where `a` and `ipiv` are what [`super::getrf`] left of the square A
/// (with `keep_l`). Every rank of the grid calls it.
///
/// The panels of L, then those of U from the last, are packed and broadcast along the process rows as in the
/// factorisation, and update B as they would update a trailing matrix.
///
/// A zero on U's diagonal gives infinities and NaNs, as in LAPACK.
///
/// # Errors
/// [`Error::Argument`] when A is not square or B does not match A in rows, grid, row block size and alignment;
/// or when a rank is lost or memory is short.
pub fn getrs<T: Scalar>(
    kernels: &dyn Kernels<T>,
    team: &Team,
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
    for cols in &steps {
        let permutation = Permutation::new(cols.start, &ipiv[cols.clone()]);
        let all = b.local_cols(0..b.n);
        interchange(kernels, team, &b, &mut solve.space, &permutation, cols.start, all)?;
    }
    for cols in &steps {
        solve.step(cols, Triangle::UnitLower, cols.end..a.m)?;
    }
    for cols in steps.iter().rev() {
        solve.step(cols, Triangle::Upper, 0..cols.start)?;
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

struct Solve<'a, T> {
    kernels: &'a dyn Kernels<T>,
    team: &'a Team,
    a: &'a LocalView<'a, MatRef<'a, T>>,
    b: &'a LocalView<'a, SharedMut<'a, T>>,
    panel: Panel<T>,
    space: UpdateSpace<T>,
}

impl<T: Scalar> Solve<'_, T> {
    /// Rows `cols` of B are solved with the diagonal block of columns `cols`, and rows `others` updated.
    fn step(&mut self, cols: &Range<usize>, triangle: Triangle, others: Range<usize>) -> Result<()> {
        let (a, b) = (self.a, self.b);
        let root = a.col_owner(cols.start);
        let packed = a.local_rows(others.clone());
        self.panel.begin(Layout::new(self.kernels, cols.len(), packed.len()), root)?;
        if root == a.grid.mycol() {
            self.fill(cols, packed)?;
            self.panel.send()?;
        }
        self.panel.finish()?;

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

    /// On the process column that holds the panel: replicates the diagonal block, packs the other rows.
    fn fill(&mut self, cols: &Range<usize>, packed: Range<usize>) -> Result<()> {
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
        self.kernels.pack_a(block.subrows(packed.start, packed.len()), out);
        Ok(())
    }
}
