//! One suite for every back end that this machine has: results within LAPACK-style bounds of naive loops in
//! double precision (or exactly equal, for whole numbers), the rules of [`Kernels`] about NaNs, β and
//! order, and nothing touched that was not lent.

mod backends;
mod broken;
mod sample;

use std::fmt::Debug;
use std::io::Write;

use fulmen_kernels::{
    Choice, Complex, Diag, Element, KernelSet, Kernels, Op, Real, ScatteredRows, SharedMut, Side, Team, Uplo,
    c32, c64, self_test,
};
use proptest::prelude::*;
use sample::{Random, RealOf, Sample, is_nan, nan, operand, under};

type Outcome = Result<(), TestCaseError>;

/// Runs a check for the four types of every back end.
macro_rules! everywhere {
    ($check:ident($($arg:expr),*)) => {
        for backend in backends::all() {
            let name = &backend.name;
            $check::<f32>(name, &**backend.set.of::<f32>(), $($arg),*)?;
            $check::<f64>(name, &**backend.set.of::<f64>(), $($arg),*)?;
            $check::<c32>(name, &**backend.set.of::<c32>(), $($arg),*)?;
            $check::<c64>(name, &**backend.set.of::<c64>(), $($arg),*)?;
        }
    };
}

/// In double precision.
fn wide<T: Element>(x: T) -> c64 {
    Complex::new(x.re().to_f64(), x.im().to_f64())
}

/// What k fused steps may lose of a sum of that size, whatever their order; complex products are four.
fn allowed<T: Element>(k: usize, size: f64) -> f64 {
    let per_step = if T::IS_COMPLEX { 8.0 } else { 2.0 };
    per_step * (k + 4) as f64 * RealOf::<T>::UNIT_ROUNDOFF.to_f64() * size
}

fn close<T: Element>(got: T, want: c64, bound: f64, what: impl FnOnce() -> String) -> Outcome {
    let error = (wide(got) - want).norm();
    prop_assert!(error <= bound, "{} is {got}, should be {want}: error {error:e} > {bound:e}", what());
    Ok(())
}

/// α·Σ aₚ·bₚ + β·c and the sum of the terms' sizes.
fn sum<T: Element>(alpha: T, terms: impl Iterator<Item = (T, T)>, beta: T, c: T) -> (c64, f64) {
    let beta_c = if beta == T::default() { c64::default() } else { wide(beta) * wide(c) };
    let (mut value, mut size) = (c64::default(), 0.0);
    for (a, b) in terms {
        value += wide(a) * wide(b);
        size += wide(a).norm() * wide(b).norm();
    }
    (wide(alpha) * value + beta_c, wide(alpha).norm() * size + beta_c.norm())
}

/// A dimension: mostly small, sometimes around the tiles of SIMD kernels, rarely around those of a BLAS.
fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 0..20usize, 5 => 20..70usize, 2 => 70..140usize, 1 => 505..530usize]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![Just(Op::NoTrans), Just(Op::Trans), Just(Op::ConjTrans)]
}

/// m, n and k of affordable size.
fn shape() -> impl Strategy<Value = [usize; 3]> {
    [extent(), extent(), extent()].prop_map(|[m, n, k]| {
        let k = 300_000usize.checked_div(m * n).map_or(k, |affordable| k.min(affordable));
        [m, n, k]
    })
}

/// 0, 1, -1 or something else.
fn factor<T: Element>(random: &mut Random) -> T {
    match random.below(4) {
        0 => T::default(),
        1 => T::one(),
        2 => -T::one(),
        _ => random.element(true),
    }
}

fn gemm<T: Element>(
    name: &str,
    kernels: &dyn Kernels<T>,
    size: [usize; 3],
    ops: (Op, Op),
    threads: usize,
    whole: bool,
    seed: u64,
) -> Outcome {
    let random = &mut Random::new(seed);
    let [m, n, k] = size;
    let (alpha, beta) = (factor::<T>(random), factor::<T>(random));
    let a = operand::<T>(random, ops.0, m, k, whole);
    let b = operand::<T>(random, ops.1, k, n, whole);
    let mut c = Sample::random(random, m, n, whole);
    if beta == T::default() {
        c.view_mut().fill(nan());
    }
    let before = c.clone();
    kernels.gemm(
        &Team::new(threads).unwrap(),
        alpha,
        (ops.0, a.view()),
        (ops.1, b.view()),
        beta,
        c.view_mut(),
    );
    prop_assert!(c.guards_stand(), "{name}: gemm {size:?} wrote outside C");
    for j in 0..n {
        for i in 0..m {
            let terms = (0..k).map(|p| (under(ops.0, &a, i, p), under(ops.1, &b, p, j)));
            let (want, size_of) = sum(alpha, terms, beta, before.at(i, j));
            let bound = if whole { 0.0 } else { allowed::<T>(k, size_of) };
            close(c.at(i, j), want, bound, || {
                format!(
                    "{name}: {}gemm {ops:?} {size:?} alpha {alpha} beta {beta}, {threads} threads: C({i}, {j})",
                    T::LETTER
                )
            })?;
        }
    }
    Ok(())
}

/// A well-conditioned triangle; what must not be read is NaN.
fn triangle<T: Element>(random: &mut Random, order: usize, uplo: Uplo, diag: Diag) -> Sample<T> {
    let shrink = RealOf::<T>::from_f64(1.0 / (order.max(1) as f64));
    let at = (random.below(3), random.below(3));
    Sample::from_fn(order, order, at, |i, j| {
        if i == j {
            return if diag == Diag::Unit {
                nan()
            } else {
                random.element::<T>(false) + T::from_real(RealOf::<T>::from_f64(2.5))
            };
        }
        if (i > j) == (uplo == Uplo::Lower) {
            random.element::<T>(false) * T::from_real(shrink)
        } else {
            nan()
        }
    })
}

fn trsm<T: Element>(
    name: &str,
    kernels: &dyn Kernels<T>,
    size: (usize, usize),
    how: (Side, Uplo, Op, Diag),
    threads: usize,
    seed: u64,
) -> Outcome {
    let random = &mut Random::new(seed);
    let ((m, n), (side, uplo, op, diag)) = (size, how);
    let order = if side == Side::Left { m } else { n };
    let alpha = factor::<T>(random);
    let a = triangle::<T>(random, order, uplo, diag);
    let b = Sample::random(random, m, n, false);
    let mut x = b.clone();
    kernels.trsm(&Team::new(threads).unwrap(), side, uplo, op, diag, alpha, a.view(), x.view_mut());
    prop_assert!(x.guards_stand(), "{name}: trsm {size:?} {how:?} wrote outside B");
    // op(A) as it counts, and the residual element by element (Higham 2002, theorem 8.5).
    let lower = (uplo == Uplo::Lower) == (op == Op::NoTrans);
    let t = |i: usize, p: usize| match () {
        () if i == p && diag == Diag::Unit => T::one(),
        () if i == p || (i > p) == lower => under(op, &a, i, p),
        () => T::default(),
    };
    for j in 0..n {
        for i in 0..m {
            let (got, size_of) = match side {
                Side::Left => {
                    sum(T::one(), (0..m).map(|p| (t(i, p), x.at(p, j))), T::default(), T::default())
                }
                Side::Right => {
                    sum(T::one(), (0..n).map(|p| (x.at(i, p), t(p, j))), T::default(), T::default())
                }
            };
            let want = wide(alpha) * wide(b.at(i, j));
            let (error, bound) = ((got - want).norm(), 4.0 * allowed::<T>(order, size_of + want.norm()));
            prop_assert!(
                error <= bound,
                "{name}: {}trsm {how:?} {size:?} alpha {alpha}, {threads} threads: residual {error:e} > {bound:e} at ({i}, {j})",
                T::LETTER
            );
        }
    }
    Ok(())
}

/// Parts of `0..n` that start at multiples of `unit`.
fn parts(n: usize, unit: usize, count: usize) -> Vec<(usize, usize)> {
    let step = n.div_ceil(count).next_multiple_of(unit).max(unit);
    (0..n).step_by(step).map(|start| (start, (n - start).min(step))).collect()
}

/// Packing, its documented layout, the triangular solve and the product, with parts of the operands used
/// by several threads at once.
fn packed<T: Element>(
    name: &str,
    kernels: &dyn Kernels<T>,
    size: [usize; 3],
    threads: usize,
    whole: bool,
    seed: u64,
) -> Outcome {
    let random = &mut Random::new(seed);
    let ([m, n, k], tile) = (size, kernels.tile());
    prop_assert!(tile.mr > 0 && tile.nr > 0 && tile.mc > 0 && tile.mc % tile.mr == 0, "{name}: {tile:?}");
    let a = Sample::<T>::random(random, m, k, whole);
    let b = Sample::<T>::random(random, k, n, whole);
    let mut pa = vec![nan::<T>(); tile.packed_a_len(m, k)];
    let mut pb = vec![nan::<T>(); tile.packed_b_len(k, n)];
    kernels.pack_a(a.view(), &mut pa);
    kernels.pack_b(b.view(), &mut pb);
    for p in 0..k {
        for i in 0..m.next_multiple_of(tile.mr) {
            let want = if i < m { a.at(i, p) } else { T::default() };
            // A complex column may be in an order of the back end's own.
            prop_assert!(
                T::IS_COMPLEX || pa[i / tile.mr * tile.mr * k + p * tile.mr + i % tile.mr] == want,
                "{name}: packed A({i}, {p}) of {size:?}"
            );
        }
        for j in 0..n.next_multiple_of(tile.nr) {
            let want = if j < n { b.at(p, j) } else { T::default() };
            prop_assert!(
                pb[j / tile.nr * tile.nr * k + p * tile.nr + j % tile.nr] == want,
                "{name}: packed B({p}, {j}) of {size:?}"
            );
        }
    }
    let mut back = Sample::<T>::from_fn(k, n, (1, 2), |_, _| nan());
    kernels.unpack_b(&pb, back.view_mut());
    prop_assert!(back.guards_stand(), "{name}: unpack_b wrote outside");
    for j in 0..n {
        for p in 0..k {
            prop_assert!(back.at(p, j) == b.at(p, j), "{name}: unpacked B({p}, {j}) of {size:?}");
        }
    }

    let alpha = factor::<T>(random);
    let mut c = Sample::<T>::random(random, m, n, whole);
    let before = c.clone();
    {
        let shared = SharedMut::new(c.view_mut());
        let jobs: Vec<_> = parts(m, tile.mr, 2)
            .into_iter()
            .flat_map(|r| parts(n, tile.nr, 2).into_iter().map(move |c| (r, c)))
            .collect();
        let (pa, pb, jobs) = (&pa, &pb, &jobs);
        Team::new(threads).unwrap().run(|me| {
            for (_, ((i, mm), (j, nn))) in
                jobs.iter().enumerate().filter(|(job, _)| job % me.len() == me.index())
            {
                let pa = &pa[i * k..][..tile.packed_a_len(*mm, k)];
                let pb = &pb[j * k..][..tile.packed_b_len(k, *nn)];
                // SAFETY: jobs are disjoint parts of C, and each is one member's.
                kernels.gemm_packed(alpha, pa, pb, k, unsafe { shared.part(*i..i + mm, *j..j + nn) });
            }
        });
    }
    prop_assert!(c.guards_stand(), "{name}: gemm_packed {size:?} wrote outside C");
    for j in 0..n {
        for i in 0..m {
            let (want, size_of) =
                sum(alpha, (0..k).map(|p| (a.at(i, p), b.at(p, j))), T::one(), before.at(i, j));
            let bound = if whole { 0.0 } else { allowed::<T>(k, size_of) };
            close(c.at(i, j), want, bound, || {
                format!("{name}: {} gemm_packed {size:?}: C({i}, {j})", T::LETTER)
            })?;
        }
    }

    let l = triangle::<T>(random, k, Uplo::Lower, Diag::Unit);
    let mut again = pb.clone();
    let packed_l = kernels.pack_l(l.view());
    kernels.trsm_with(&packed_l, k, &mut again);
    let mut into = vec![T::one(); pb.len()];
    kernels.trsm_into(&packed_l, b.view(), &mut into);
    kernels.trsm_packed(l.view(), &mut pb);
    prop_assert!(again == pb, "{name}: trsm_with {size:?} gives other bits than trsm_packed");
    prop_assert!(into == pb, "{name}: trsm_into {size:?} gives other bits than trsm_packed");
    kernels.unpack_b(&pb, back.view_mut());
    for j in 0..n {
        for i in 0..k {
            let terms = (0..=i).map(|p| (if p == i { T::one() } else { l.at(i, p) }, back.at(p, j)));
            let (got, size_of) = sum(T::one(), terms, T::default(), T::default());
            let bound = 4.0 * allowed::<T>(k, size_of);
            prop_assert!(
                (got - wide(b.at(i, j))).norm() <= bound,
                "{name}: {} trsm_packed {size:?}: residual at ({i}, {j})",
                T::LETTER
            );
        }
    }
    let padding = (n..n.next_multiple_of(tile.nr)).flat_map(|j| (0..k).map(move |p| (p, j)));
    for (p, j) in padding {
        let x = pb[j / tile.nr * tile.nr * k + p * tile.nr + j % tile.nr];
        prop_assert!(x == T::default(), "{name}: trsm_packed left {x} in the padding");
    }
    Ok(())
}

fn panel<T: Element>(
    name: &str,
    kernels: &dyn Kernels<T>,
    m: usize,
    done: usize,
    scaled: bool,
    whole: bool,
    seed: u64,
) -> Outcome {
    let random = &mut Random::new(seed);
    let mut cols = Sample::<T>::random(random, m, done + 1, whole);
    let before = cols.clone();
    let u: Vec<T> = (0..done).map(|_| random.element(whole)).collect();
    let scale = (scaled && done > 0).then(|| random.element::<T>(true));
    let found = kernels.panel_column(cols.view_mut(), scale, &u);
    prop_assert!(cols.guards_stand(), "{name}: panel_column wrote outside");
    let mut current = Vec::new();
    for i in 0..m {
        for p in 0..done {
            let old = before.at(i, p);
            let want = if p + 1 == done { wide(scale.unwrap_or(T::one())) * wide(old) } else { wide(old) };
            close(cols.at(i, p), want, allowed::<T>(0, want.norm()), || {
                format!("{name}: panel_column: finished ({i}, {p})")
            })?;
        }
        let (want, size_of) =
            sum(-T::one(), (0..done).map(|p| (cols.at(i, p), u[p])), T::one(), before.at(i, done));
        let bound = if whole { 0.0 } else { allowed::<T>(done, size_of) };
        close(cols.at(i, done), want, bound, || {
            format!("{name}: {} panel_column {m} x {done}: row {i}", T::LETTER)
        })?;
        current.push(cols.at(i, done));
    }
    prop_assert_eq!(found, largest(&current), "{}: panel_column's index", name);
    prop_assert_eq!(kernels.iamax(&current), largest(&current), "{}: iamax", name);
    if m > 0 {
        current[random.below(m)] = nan();
        current[random.below(m)] = nan();
        prop_assert_eq!(
            kernels.iamax(&current),
            current.iter().position(|x| is_nan(*x)),
            "{}: iamax with NaN",
            name
        );
    }
    Ok(())
}

/// First of the largest by |re| + |im|.
fn largest<T: Element>(x: &[T]) -> Option<usize> {
    let size = x.iter().map(|e| e.abs1().to_f64()).fold(-1.0, f64::max);
    x.iter().position(|e| e.abs1().to_f64() == size)
}

fn gemm_panel<T: Element>(
    name: &str,
    kernels: &dyn Kernels<T>,
    size: [usize; 3],
    whole: bool,
    seed: u64,
) -> Outcome {
    let random = &mut Random::new(seed);
    let [m, n, k] = size;
    let alpha = factor::<T>(random);
    let (a, b) = (Sample::<T>::random(random, m, k, whole), Sample::random(random, k, n, whole));
    let mut c = Sample::random(random, m, n, whole);
    let before = c.clone();
    kernels.gemm_panel(alpha, a.view(), b.view(), c.view_mut());
    prop_assert!(c.guards_stand(), "{name}: gemm_panel {size:?} wrote outside C");
    for j in 0..n {
        for i in 0..m {
            let (want, size_of) =
                sum(alpha, (0..k).map(|p| (a.at(i, p), b.at(p, j))), T::one(), before.at(i, j));
            let bound = if whole { 0.0 } else { allowed::<T>(k, size_of) };
            close(c.at(i, j), want, bound, || {
                format!("{name}: {} gemm_panel {size:?}: C({i}, {j})", T::LETTER)
            })?;
        }
    }
    Ok(())
}

/// The order-of-operations rule: a part of C has the same bits computed alone as within the whole, however
/// many threads there are.
fn stable<T: Element>(
    name: &str,
    kernels: &dyn Kernels<T>,
    size: [usize; 3],
    cut: [usize; 4],
    seed: u64,
) -> Outcome {
    if !kernels.bitwise_stable() {
        return Ok(());
    }
    let same = |x: T, y: T, what: &dyn Debug| -> Outcome {
        let equal = bytemuck_bytes(&x) == bytemuck_bytes(&y);
        prop_assert!(equal, "{name}: {} {size:?} cut at {cut:?}: {x} or {y} at {what:?}", T::LETTER);
        Ok(())
    };
    let random = &mut Random::new(seed);
    let [m, n, k] = size;
    let tile = kernels.tile();
    let (a, b) = (Sample::<T>::random(random, m, k, false), Sample::<T>::random(random, k, n, false));
    let l = triangle::<T>(random, k, Uplo::Lower, Diag::Unit);
    let c = Sample::<T>::random(random, m, n, false);
    let (mut whole, mut part) = (c.clone(), c.clone());
    let (one, two) = (Team::solo(), Team::new(2).unwrap());
    let (rows, cols) = (cut[0] % (m + 1), cut[1] % (n + 1));
    let (i0, j0) = (cut[2] % (rows + 1), cut[3] % (cols + 1));
    let (rows, cols) = (rows - i0, cols - j0);
    kernels.gemm(
        &two,
        T::one(),
        (Op::NoTrans, a.view()),
        (Op::NoTrans, b.view()),
        -T::one(),
        whole.view_mut(),
    );
    let (sub_a, sub_b) = (a.view().submatrix(i0, 0, rows, k), b.view().submatrix(0, j0, k, cols));
    kernels.gemm(
        &one,
        T::one(),
        (Op::NoTrans, sub_a),
        (Op::NoTrans, sub_b),
        -T::one(),
        part.view_mut().submatrix_mut(i0, j0, rows, cols),
    );
    for j in j0..j0 + cols {
        for i in i0..i0 + rows {
            same(whole.at(i, j), part.at(i, j), &("gemm", i, j))?;
        }
    }

    let (mut whole, mut part) = (c.clone(), c.clone());
    kernels.gemm_panel(-T::one(), a.view(), b.view(), whole.view_mut());
    kernels.gemm_panel(-T::one(), sub_a, sub_b, part.view_mut().submatrix_mut(i0, j0, rows, cols));
    for j in j0..j0 + cols {
        for i in i0..i0 + rows {
            same(whole.at(i, j), part.at(i, j), &("gemm_panel", i, j))?;
        }
    }

    let (mut whole, mut part) = (b.clone(), b.clone());
    kernels.trsm(
        &two,
        Side::Left,
        Uplo::Lower,
        Op::NoTrans,
        Diag::Unit,
        T::one(),
        l.view(),
        whole.view_mut(),
    );
    kernels.trsm(
        &one,
        Side::Left,
        Uplo::Lower,
        Op::NoTrans,
        Diag::Unit,
        T::one(),
        l.view(),
        part.view_mut().subcols_mut(j0, cols),
    );
    for j in j0..j0 + cols {
        for i in 0..k {
            same(whole.at(i, j), part.at(i, j), &("trsm", i, j))?;
        }
    }

    // Packed: the part is packed by itself, and so falls into other tiles.
    let pack = |a: fulmen_kernels::MatRef<'_, T>, b: fulmen_kernels::MatRef<'_, T>| {
        let mut pa = vec![T::default(); tile.packed_a_len(a.nrows(), k)];
        let mut pb = vec![T::default(); tile.packed_b_len(k, b.ncols())];
        kernels.pack_a(a, &mut pa);
        kernels.pack_b(b, &mut pb);
        kernels.trsm_packed(l.view(), &mut pb);
        (pa, pb)
    };
    let (mut whole, mut part) = (c.clone(), c.clone());
    let (pa, pb) = pack(a.view(), b.view());
    kernels.gemm_packed(-T::one(), &pa, &pb, k, whole.view_mut());
    // What is asked for on the way may lie anywhere.
    let rows_asked: Vec<usize> = (0..3 * m).map(|i| 7 * i).collect();
    let soon = ScatteredRows::new(a.view(), &rows_asked);
    let (pa, pb) = pack(sub_a, sub_b);
    let part_of_c = part.view_mut().submatrix_mut(i0, j0, rows, cols);
    kernels.gemm_packed_before(-T::one(), &pa, &pb, k, part_of_c, soon);
    for j in j0..j0 + cols {
        for i in i0..i0 + rows {
            same(whole.at(i, j), part.at(i, j), &("packed", i, j))?;
        }
    }

    if n > 0 {
        let u: Vec<T> = (1..n).map(|_| random.element(false)).collect();
        let scale = (n > 1).then(|| random.element(false));
        let (mut whole, mut part) = (c.clone(), c.clone());
        kernels.panel_column(whole.view_mut(), scale, &u);
        kernels.panel_column(part.view_mut().subrows_mut(i0, rows), scale, &u);
        for j in 0..n {
            for i in i0..i0 + rows {
                same(whole.at(i, j), part.at(i, j), &("panel_column", i, j))?;
            }
        }
    }
    Ok(())
}

fn bytemuck_bytes<T: Element>(x: &T) -> [u64; 2] {
    [x.re().to_f64().to_bits(), x.im().to_f64().to_bits()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gemm_is_right(size in shape(), ops in (op(), op()), threads in 1..4usize, whole: bool, seed: u64) {
        everywhere!(gemm(size, ops, threads, whole, seed));
    }

    #[test]
    fn trsm_is_right(
        size in shape(),
        left: bool, lower: bool, unit: bool, op in op(), threads in 1..4usize, seed: u64,
    ) {
        let side = if left { Side::Left } else { Side::Right };
        let uplo = if lower { Uplo::Lower } else { Uplo::Upper };
        let diag = if unit { Diag::Unit } else { Diag::NonUnit };
        let [m, n, _] = size;
        let size = if left { (m.min(70), n) } else { (m, n.min(70)) };
        everywhere!(trsm(size, (side, uplo, op, diag), threads, seed));
    }

    #[test]
    fn packed_operands_are_right(size in shape(), threads in 1..4usize, whole: bool, seed: u64) {
        everywhere!(packed(size, threads, whole, seed));
    }

    #[test]
    fn the_panels_pieces_are_right(m in extent(), done in 0..40usize, scaled: bool, whole: bool, seed: u64) {
        everywhere!(panel(m, done, scaled, whole, seed));
        everywhere!(gemm_panel([m, 1 + done / 2, done], whole, seed));
    }

    #[test]
    fn bits_do_not_depend_on_place_or_threads(size in shape(), cut: [usize; 4], seed: u64) {
        everywhere!(stable(size, cut, seed));
    }
}

#[test]
fn every_back_end_passes_its_self_test() {
    for backend in backends::all() {
        for threads in [1, 3] {
            let report = self_test(&backend.set, &Team::new(threads).unwrap(), u64::MAX);
            assert!(report.passed && report.failures.is_empty(), "{}: {:#?}", backend.name, report.failures);
            assert!(report.gflops > 0.0, "{}", backend.name);
            let _ = writeln!(
                std::io::stderr(),
                "{}, {threads} threads: dgemm {:.1} Gflop/s, self-test took {:.2} s",
                backend.name,
                report.gflops,
                report.took.as_secs_f64()
            );
        }
    }
}

#[test]
fn a_broken_back_end_is_named_and_not_believed() {
    let team = Team::new(2).unwrap();
    for (fault, words) in broken::ALL {
        let right = KernelSet::select(&Choice::reference()).unwrap();
        let report = self_test(&KernelSet::new(broken::Broken { right, fault }), &team, 0);
        assert!(!report.passed, "{fault:?} was not noticed");
        let told = report.failures.iter().any(|failure| failure.contains(words));
        assert!(told, "{fault:?} should be told with `{words}`: {:#?}", report.failures);
    }
}
