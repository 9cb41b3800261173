//! What is tried of each routine, and how far a result may lie from the reference's.

use super::held::{Held, Random, nan};
use crate::{Diag, Element, Kernels, MatRef, Op, Real, Reference, Scalar, SharedMut, Side, Team, Uplo};

type Outcome = Result<(), String>;

/// The back end on trial.
pub(super) struct Trial<'a, T: Element> {
    kernels: &'a dyn Kernels<T>,
    reference: Reference,
    teams: &'a [&'a Team],
    random: Random,
}

/// A routine's check.
type Check<T> = fn(&mut Trial<'_, T>) -> Outcome;

/// Every routine by name.
pub(super) fn all<T: Element>() -> [(&'static str, Check<T>); 7] {
    [
        ("gemm", gemm),
        ("trsm", trsm),
        ("gemm on packed operands", gemm_packed),
        ("trsm on packed operands", trsm_packed),
        ("gemm of the panel", gemm_panel),
        ("panel column", panel_column),
        ("iamax", iamax),
    ]
}

impl<'a, T: Element> Trial<'a, T> {
    pub(super) fn new(kernels: &'a dyn Kernels<T>, teams: &'a [&'a Team]) -> Self {
        Trial { kernels, reference: Reference::new(), teams, random: Random::new(2026) }
    }

    fn held(&mut self, rows: usize, cols: usize) -> Held<T> {
        Held::random(&mut self.random, rows, cols)
    }

    /// A triangle that is easy to solve with; what must not be read is NaN.
    fn triangle(&mut self, order: usize, uplo: Uplo, diag: Diag) -> Held<T> {
        let real = |x: f64| T::from_real(<T as Scalar>::Real::from_f64(x));
        let (random, shrink, away) = (&mut self.random, real(1.0 / order as f64), real(2.5));
        Held::from_fn(order, order, |i, j| match () {
            () if i == j && diag == Diag::Unit => nan(),
            () if i == j => random.element::<T>() + away,
            () if (i > j) == (uplo == Uplo::Lower) => random.element::<T>() * shrink,
            () => nan(),
        })
    }
}

/// 2-norm of each row of op(A).
fn row_norms<T: Element>(op: Op, a: MatRef<'_, T>) -> Vec<f64> {
    let a = if op == Op::NoTrans { a } else { a.transpose() };
    let norm = |i| (0..a.ncols()).map(|j| a[(i, j)].modulus().to_f64().powi(2)).sum::<f64>().sqrt();
    (0..a.nrows()).map(norm).collect()
}

fn column_norms<T: Element>(op: Op, a: MatRef<'_, T>) -> Vec<f64> {
    row_norms(if op == Op::NoTrans { Op::Trans } else { Op::NoTrans }, a)
}

/// How far two sums of k terms, each rounded in its own order, may differ per size of the sum.
fn roundoff<T: Element>(k: usize) -> f64 {
    let per_step = if T::IS_COMPLEX { 16.0 } else { 4.0 };
    per_step * (k + 4) as f64 * <T as Scalar>::Real::UNIT_ROUNDOFF.to_f64()
}

/// The first element that lies further from the reference's than `allowed`, in words.
fn compare<T: Element>(
    what: impl Fn() -> String,
    got: &Held<T>,
    want: &Held<T>,
    allowed: impl Fn(usize, usize) -> f64,
) -> Outcome {
    let (got_view, want_view) = (got.view(), want.view());
    for j in 0..got_view.ncols() {
        for i in 0..got_view.nrows() {
            let (x, y, allowed) = (got_view[(i, j)], want_view[(i, j)], allowed(i, j));
            let error = (x - y).modulus().to_f64();
            // A NaN is not within anything.
            if error.is_nan() || error > allowed {
                return Err(format!(
                    "{}{}: element ({i}, {j}) is {x}, the reference has {y} (error {error:.1e}, allowed {allowed:.1e})",
                    T::LETTER,
                    what()
                ));
            }
        }
    }
    if got.surroundings_stand() {
        Ok(())
    } else {
        Err(format!("{}{}: wrote outside its result", T::LETTER, what()))
    }
}

fn gemm<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    let real = |x: f64| T::from_real(<T as Scalar>::Real::from_f64(x));
    let n = Op::NoTrans;
    // Accelerate left NaNs in C here; a tall one that no cache block holds; a long sum.
    let mut cases = vec![
        ([1, 512, 544], (n, n), 0.0),
        ([500, 9, 300], (n, n), 1.0),
        ([9, 13, 1500], (n, Op::Trans), 0.0),
    ];
    for _ in 0..12 {
        let random = &mut trial.random;
        let ops = [Op::NoTrans, Op::Trans, Op::ConjTrans];
        let size = [(); 3].map(|()| 1 + random.below(130));
        cases.push((size, (ops[random.below(3)], ops[random.below(3)]), [0.0, 1.0, -0.5][random.below(3)]));
    }
    for (turn, (size, ops, beta)) in cases.into_iter().enumerate() {
        let [m, n, k] = size;
        let team = trial.teams[turn % trial.teams.len()];
        let stored = |op, rows, cols| if op == Op::NoTrans { (rows, cols) } else { (cols, rows) };
        let (ra, rb) = (stored(ops.0, m, k), stored(ops.1, k, n));
        let (a, b) = (trial.held(ra.0, ra.1), trial.held(rb.0, rb.1));
        let old = if beta == 0.0 { Held::from_fn(m, n, |_, _| nan()) } else { trial.held(m, n) };
        let (mut got, mut want) = (old.clone(), old.clone());
        let run = |kernels: &dyn Kernels<T>, team: &Team, c: &mut Held<T>| {
            kernels.gemm(team, real(-1.25), (ops.0, a.view()), (ops.1, b.view()), real(beta), c.view_mut());
        };
        run(trial.kernels, team, &mut got);
        run(&trial.reference, trial.teams[trial.teams.len() - 1], &mut want);
        let (rows, cols) = (row_norms(ops.0, a.view()), column_norms(ops.1, b.view()));
        let unit = roundoff::<T>(k);
        let what = || {
            let held = if beta == 0.0 { " (C held NaNs)" } else { "" };
            format!(
                "gemm {:?} {:?} m={m} n={n} k={k} beta={beta}{held}, misaligned, {} threads",
                ops.0,
                ops.1,
                team.len()
            )
        };
        compare(what, &got, &want, |i, j| unit * (1.25 * rows[i] * cols[j] + 1.0))?;
    }
    Ok(())
}

fn trsm<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    use {Diag::*, Op::*, Side::*, Uplo::*};
    let cases = [
        (Left, Lower, NoTrans, Unit, 96, 37),
        (Left, Upper, NoTrans, NonUnit, 37, 50),
        (Left, Lower, ConjTrans, NonUnit, 65, 9),
        (Right, Upper, NoTrans, NonUnit, 41, 33),
        (Right, Lower, Trans, Unit, 19, 70),
    ];
    for (turn, (side, uplo, op, diag, m, n)) in cases.into_iter().enumerate() {
        let team = trial.teams[turn % trial.teams.len()];
        let order = if side == Left { m } else { n };
        let a = trial.triangle(order, uplo, diag);
        let mut got = trial.held(m, n);
        let mut want = got.clone();
        trial.kernels.trsm(team, side, uplo, op, diag, T::one(), a.view(), got.view_mut());
        trial.reference.trsm(team, side, uplo, op, diag, T::one(), a.view(), want.view_mut());
        let what = || format!("trsm {side:?} {uplo:?} {op:?} {diag:?} m={m} n={n}, {} threads", team.len());
        compare(what, &got, &want, |_, _| 8.0 * roundoff::<T>(order))?;
    }
    Ok(())
}

/// A little more than one tile each way, with a k that keeps the reference quick.
fn packed_size<T: Element>(kernels: &dyn Kernels<T>) -> [usize; 3] {
    let tile = kernels.tile();
    let (m, n) = (tile.mr + tile.mr / 2 + 1, tile.nr + 3);
    [m, n, (1_500_000 / (m * n)).clamp(2, 77)]
}

fn gemm_packed<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    let (kernels, tile) = (trial.kernels, trial.kernels.tile());
    let [m, n, k] = packed_size(kernels);
    for &team in trial.teams {
        let (a, b) = (trial.held(m, k), trial.held(k, n));
        let (mut got, one) = (trial.held(m, n), T::one());
        let mut want = got.clone();
        let mut pa = vec![nan::<T>(); tile.packed_a_len(m, k)];
        let mut pb = vec![nan::<T>(); tile.packed_b_len(k, n)];
        kernels.pack_a(a.view(), &mut pa);
        kernels.pack_b(b.view(), &mut pb);
        let c = SharedMut::new(got.view_mut());
        // As LU does it: one packed operand, and every thread at once on rows of its own.
        team.run(|me| {
            let rows = me.share(m, tile.mr);
            let pa = &pa[rows.start * k..][..tile.packed_a_len(rows.len(), k)];
            // SAFETY: the members' rows are disjoint.
            kernels.gemm_packed(-one, pa, &pb, k, unsafe { c.part(rows, 0..n) });
        });
        trial.reference.gemm(
            team,
            -one,
            (Op::NoTrans, a.view()),
            (Op::NoTrans, b.view()),
            one,
            want.view_mut(),
        );
        let (rows, cols) = (row_norms(Op::NoTrans, a.view()), column_norms(Op::NoTrans, b.view()));
        let what = || format!("gemm on packed operands, m={m} n={n} k={k}, {} threads", team.len());
        compare(what, &got, &want, |i, j| roundoff::<T>(k) * (rows[i] * cols[j] + 2.0))?;
    }
    Ok(())
}

fn trsm_packed<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    let tile = trial.kernels.tile();
    let [_, n, _] = packed_size(trial.kernels);
    let k = 53;
    let l = trial.triangle(k, Uplo::Lower, Diag::Unit);
    let mut want = trial.held(k, n);
    let mut got = want.clone();
    let mut packed = vec![nan::<T>(); tile.packed_b_len(k, n)];
    trial.kernels.pack_b(want.view(), &mut packed);
    trial.kernels.trsm_packed(l.view(), &mut packed);
    trial.kernels.unpack_b(&packed, got.view_mut());
    let (side, uplo, op, diag) = (Side::Left, Uplo::Lower, Op::NoTrans, Diag::Unit);
    trial.reference.trsm(&Team::solo(), side, uplo, op, diag, T::one(), l.view(), want.view_mut());
    compare(|| format!("trsm on packed operands, k={k} n={n}"), &got, &want, |_, _| 8.0 * roundoff::<T>(k))
}

fn gemm_panel<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    for [m, n, k] in [[203, 16, 16], [1, 5, 8], [77, 31, 64]] {
        let (a, b, mut got) = (trial.held(m, k), trial.held(k, n), trial.held(m, n));
        let mut want = got.clone();
        trial.kernels.gemm_panel(-T::one(), a.view(), b.view(), got.view_mut());
        trial.reference.gemm_panel(-T::one(), a.view(), b.view(), want.view_mut());
        let (rows, cols) = (row_norms(Op::NoTrans, a.view()), column_norms(Op::NoTrans, b.view()));
        let what = || format!("gemm of the panel, m={m} n={n} k={k}");
        compare(what, &got, &want, |i, j| roundoff::<T>(k) * (rows[i] * cols[j] + 2.0))?;
    }
    Ok(())
}

fn panel_column<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    for (m, done) in [(1, 0), (131, 7), (66, 15)] {
        let u: Vec<T> = (0..done).map(|_| trial.random.element()).collect();
        let scale = (done > 0).then(|| trial.random.element());
        let mut got = trial.held(m, done + 1);
        let mut want = got.clone();
        let found = trial.kernels.panel_column(got.view_mut(), scale, &u);
        trial.reference.panel_column(want.view_mut(), scale, &u);
        let what = || format!("panel column, m={m}, {done} columns done");
        compare(what, &got, &want, |_, _| roundoff::<T>(done) * 2.0 * (done + 1) as f64)?;
        // Its own column decides: the reference's may differ in the last bit.
        let column: Vec<T> = (0..m).map(|i| got.view()[(i, done)]).collect();
        index::<T>(what(), found, crate::reference::iamax(&column))?;
    }
    Ok(())
}

fn iamax<T: Element>(trial: &mut Trial<'_, T>) -> Outcome {
    for n in [0, 1, 7, 64, 200] {
        let mut x: Vec<T> = (0..n).map(|_| trial.random.element()).collect();
        let ask = |x: &[T], what: &str| {
            index::<T>(format!("iamax n={n}{what}"), trial.kernels.iamax(x), crate::reference::iamax(x))
        };
        ask(&x, "")?;
        if n >= 7 {
            // The first of equals, whatever their signs.
            let most = T::from_real(<T as Scalar>::Real::from_f64(3.0));
            (x[n - 2], x[n / 2], x[n - 5]) = (most, -most, most);
            ask(&x, " with ties")?;
            (x[n - 1], x[3]) = (nan(), nan());
            ask(&x, " with NaNs")?;
        }
    }
    Ok(())
}

fn index<T: Element>(what: String, found: Option<usize>, want: Option<usize>) -> Outcome {
    let wrong = || format!("{} {what}: found index {found:?}, the reference {want:?}", T::LETTER);
    if found == want { Ok(()) } else { Err(wrong()) }
}
