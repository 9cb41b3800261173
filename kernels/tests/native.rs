//! The native kernels against the reference, for every type and every instruction set of this CPU.

mod common;

use common::{Framed, Random, close, is_nan, modulus};
use fulmen_kernels::{
    Diag, Isa, Kernels, Op, Real, Reference, Scalar, SharedMut, Side, Team, Uplo, c32, c64, native,
};
use proptest::prelude::*;

/// Calls a generic test with each type and instruction set.
macro_rules! for_all {
    ($test:ident($($arg:expr),*)) => {
        for isa in Isa::available() {
            $test::<f64>(isa, $($arg),*)?;
            $test::<f32>(isa, $($arg),*)?;
            $test::<c64>(isa, $($arg),*)?;
            $test::<c32>(isa, $($arg),*)?;
        }
    };
}

type Outcome = Result<(), TestCaseError>;

fn fail(what: impl std::fmt::Display) -> TestCaseError {
    TestCaseError::fail(what.to_string())
}

fn number<T: Scalar>(re: f64, im: f64) -> T {
    T::from_parts(<T as Scalar>::Real::from_f64(re), <T as Scalar>::Real::from_f64(im))
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![Just(Op::NoTrans), Just(Op::Trans), Just(Op::ConjTrans)]
}

fn factors() -> impl Strategy<Value = (f64, f64)> {
    prop_oneof![Just((0.0, 0.0)), Just((1.0, 0.0)), Just((-1.0, 0.0)), Just((0.7, -0.4))]
}

/// Small and ragged, with now and then one beyond a tile, a block or a pass.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..30, 2 => 30usize..110, 1 => 250usize..530]
}

/// Sizes with a product that stays small.
fn shape() -> impl Strategy<Value = (usize, usize, usize)> {
    (size(), size(), size()).prop_filter("quick enough", |&(m, n, k)| m * n * k < 2_000_000)
}

fn stored<T: Scalar>(op: Op, m: usize, n: usize, pad: usize, seed: u64) -> Framed<T> {
    let (rows, cols) = if op == Op::NoTrans { (m, n) } else { (n, m) };
    Framed::random(rows, cols, pad, seed)
}

fn gemm_case<T: Scalar>(
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    (opa, opb): (Op, Op),
    (alpha, beta): ((f64, f64), (f64, f64)),
    pad: usize,
    seed: u64,
    team: &Team,
) -> Outcome {
    let kernels = native::<T>(isa);
    let (alpha, beta) = (number::<T>(alpha.0, alpha.1), number::<T>(beta.0, beta.1));
    let a = stored::<T>(opa, m, k, pad, seed);
    let b = stored::<T>(opb, k, n, pad + 1, seed + 1);
    let mut c = Framed::<T>::random(m, n, pad + 2, seed + 2);
    if beta == T::zero() && m * n > 0 {
        c.view_mut()[(m / 2, n / 2)] = number(f64::NAN, f64::NAN);
    }
    let mut expected = c.clone();
    let (av, bv) = ((opa, a.view()), (opb, b.view()));
    Reference::new().gemm(&Team::solo(), alpha, av, bv, beta, expected.view_mut());
    kernels.gemm(team, alpha, av, bv, beta, c.view_mut());
    prop_assert!(c.frame_is_whole(), "padding was written");
    // |α||A||B| + |β||C| with all elements under √2.
    let size = 2.0 * k as f64 * modulus(alpha) + 2.0 * modulus(beta) + 1e-30;
    close(c.view(), expected.view(), k, |_, _| size).map_err(fail)?;
    prop_assert!((0..m * n).all(|i| !is_nan(c.view()[(i % m, i / m)])));
    Ok(())
}

/// The rule on the order of operations: whole, in parts, packed or not, by one or more threads, an
/// element has the same bits.
fn bits_case<T: Scalar>(
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    cut: (usize, usize),
    pad: usize,
    seed: u64,
    team: &Team,
) -> Outcome {
    let kernels = native::<T>(isa);
    let alpha = number::<T>(-1.0, 0.0);
    let a = Framed::<T>::random(m, k, pad, seed);
    let b = Framed::<T>::random(k, n, pad, seed + 1);
    let c0 = Framed::<T>::random(m, n, pad, seed + 2);
    let (av, bv) = ((Op::NoTrans, a.view()), (Op::NoTrans, b.view()));
    let mut whole = c0.clone();
    kernels.gemm(&Team::solo(), alpha, av, bv, T::one(), whole.view_mut());

    let mut other = c0.clone();
    kernels.gemm(team, alpha, av, bv, T::one(), other.view_mut());
    prop_assert!(other.bits() == whole.bits(), "gemm by a team");

    let mut other = c0.clone();
    kernels.gemm_panel(alpha, a.view(), b.view(), other.view_mut());
    prop_assert!(other.bits() == whole.bits(), "gemm_panel");

    let tile = kernels.tile();
    let mut pa = vec![T::one(); tile.packed_a_len(m, k)];
    let mut pb = vec![T::one(); tile.packed_b_len(k, n)];
    kernels.pack_a(a.view(), &mut pa);
    kernels.pack_b(b.view(), &mut pb);
    let mut other = c0.clone();
    kernels.gemm_packed(alpha, &pa, &pb, k, other.view_mut());
    prop_assert!(other.bits() == whole.bits(), "gemm_packed");

    // In four parts, cut at tiles for the packed operands and anywhere for the others.
    let (mi, ni) = (cut.0 % (m + 1) / tile.mr * tile.mr, cut.1 % (n + 1) / tile.nr * tile.nr);
    let (mj, nj) = (cut.0 % (m + 1), cut.1 % (n + 1));
    let (mut packed, mut plain) = (c0.clone(), c0.clone());
    let (pc, uc) = (SharedMut::new(packed.view_mut()), SharedMut::new(plain.view_mut()));
    for (rows, cols, prows, pcols) in [
        (0..mj, 0..nj, 0..mi, 0..ni),
        (mj..m, 0..nj, mi..m, 0..ni),
        (0..mj, nj..n, 0..mi, ni..n),
        (mj..m, nj..n, mi..m, ni..n),
    ] {
        let pa = &pa[prows.start * k..][..prows.len().next_multiple_of(tile.mr) * k];
        let pb = &pb[pcols.start * k..][..pcols.len().next_multiple_of(tile.nr) * k];
        // SAFETY: the parts are disjoint.
        let (pc, uc) = unsafe { (pc.part(prows, pcols), uc.part(rows.clone(), cols.clone())) };
        kernels.gemm_packed(alpha, pa, pb, k, pc);
        let (a, b) = (a.view().get(rows, ..), b.view().get(.., cols));
        kernels.gemm(team, alpha, (Op::NoTrans, a), (Op::NoTrans, b), T::one(), uc);
    }
    prop_assert!(packed.bits() == whole.bits(), "gemm_packed in parts");
    prop_assert!(plain.bits() == whole.bits(), "gemm in parts");
    Ok(())
}

fn pack_case<T: Scalar>(isa: Isa, (k, n): (usize, usize), pad: usize, seed: u64) -> Outcome {
    let kernels = native::<T>(isa);
    let (nr, b) = (kernels.tile().nr, Framed::<T>::random(k, n, pad, seed));
    let mut packed = vec![T::one(); kernels.tile().packed_b_len(k, n)];
    kernels.pack_b(b.view(), &mut packed);
    for j in 0..n.next_multiple_of(nr) {
        for p in 0..k {
            let x = packed[j / nr * nr * k + p * nr + j % nr];
            prop_assert_eq!(x, if j < n { b.view()[(p, j)] } else { T::zero() });
        }
    }
    let mut back = Framed::<T>::new(k, n, pad, 1, |_, _| T::one());
    kernels.unpack_b(&packed, back.view_mut());
    prop_assert!(back.view() == b.view() && back.frame_is_whole());
    Ok(())
}

/// A triangle that is well conditioned.
fn triangle<T: Scalar>(n: usize, pad: usize, seed: u64) -> Framed<T> {
    let mut random = Random::new(seed);
    Framed::new(n, n, pad, 1, |i, j| {
        let x = random.scalar::<T>();
        if i == j { x + number::<T>(3.0, 0.0) } else { x / number::<T>(n as f64, 0.0) }
    })
}

fn trsm_case<T: Scalar>(
    isa: Isa,
    (n, rhs): (usize, usize),
    (side, uplo, op, diag): (Side, Uplo, Op, Diag),
    alpha: (f64, f64),
    pad: usize,
    seed: u64,
    team: &Team,
) -> Outcome {
    let kernels = native::<T>(isa);
    let alpha = number::<T>(alpha.0, alpha.1);
    let mut a = triangle::<T>(n, pad, seed);
    // What is not referenced is poison.
    for j in 0..n {
        for i in 0..n {
            let other = if uplo == Uplo::Lower { i < j } else { i > j };
            if other || (i == j && diag == Diag::Unit) {
                a.view_mut()[(i, j)] = number(f64::NAN, 0.0);
            }
        }
    }
    let (rows, cols) = if side == Side::Left { (n, rhs) } else { (rhs, n) };
    let mut x = Framed::<T>::random(rows, cols, pad + 1, seed + 1);
    let mut expected = x.clone();
    Reference::new().trsm(&Team::solo(), side, uplo, op, diag, alpha, a.view(), expected.view_mut());
    let mut solo = x.clone();
    kernels.trsm(&Team::solo(), side, uplo, op, diag, alpha, a.view(), solo.view_mut());
    kernels.trsm(team, side, uplo, op, diag, alpha, a.view(), x.view_mut());
    prop_assert!(x.frame_is_whole(), "padding was written");
    prop_assert!(x.bits() == solo.bits(), "threads change bits");
    close(x.view(), expected.view(), 4 * n, |_, _| 4.0).map_err(fail)
}

fn trsm_packed_case<T: Scalar>(isa: Isa, (k, n): (usize, usize), pad: usize, seed: u64) -> Outcome {
    let kernels = native::<T>(isa);
    let tile = kernels.tile();
    let mut l = triangle::<T>(k, pad, seed);
    for j in 0..k {
        (0..=j).for_each(|i| l.view_mut()[(i, j)] = number(f64::NAN, 0.0));
    }
    let mut x = Framed::<T>::random(k, n, pad, seed + 1);
    let mut expected = x.clone();
    let mut strips = vec![T::one(); tile.packed_b_len(k, n)];
    kernels.pack_b(x.view(), &mut strips);
    let mut apart = strips.clone();
    kernels.trsm_packed(l.view(), &mut strips);
    if k > 0 {
        apart.chunks_mut(tile.nr * k).for_each(|strip| kernels.trsm_packed(l.view(), strip));
        prop_assert!(apart == strips, "strips change each other's bits");
    }
    kernels.unpack_b(&strips, x.view_mut());
    let (lower, unit) = (Uplo::Lower, Diag::Unit);
    Reference::new().trsm(
        &Team::solo(),
        Side::Left,
        lower,
        Op::NoTrans,
        unit,
        T::one(),
        l.view(),
        expected.view_mut(),
    );
    close(x.view(), expected.view(), 4 * k, |_, _| 4.0).map_err(fail)
}

fn column_case<T: Scalar>(
    isa: Isa,
    (m, np): (usize, usize),
    scaled: bool,
    odd: Option<(usize, f64)>,
    seed: u64,
) -> Outcome {
    let kernels = native::<T>(isa);
    let mut cols = Framed::<T>::random(m, np + 1, 3, seed);
    if let (Some((at, x)), true) = (odd, m > 0) {
        cols.view_mut()[(at % m, np)] = number(x, 0.0);
    }
    let mut random = Random::new(seed + 1);
    let u: Vec<T> = (0..np).map(|_| random.scalar()).collect();
    let scale = (scaled && np > 0).then(|| number::<T>(1.25, 0.5));
    let mut expected = cols.clone();
    let best = kernels.panel_column(cols.view_mut(), scale, &u);
    Reference::new().panel_column(expected.view_mut(), scale, &u);
    prop_assert!(cols.frame_is_whole());
    let column: Vec<T> = (0..m).map(|i| cols.view()[(i, np)]).collect();
    prop_assert_eq!(best, Kernels::<T>::iamax(&Reference::new(), &column));
    prop_assert_eq!(best, kernels.iamax(&column));
    let finite = odd.is_none_or(|(_, x)| x.is_finite());
    if finite {
        close(cols.view(), expected.view(), np + 1, |_, _| 4.0 * (np + 1) as f64).map_err(fail)?;
    }
    // In two parts: the same bits.
    let cut = seed as usize % (m + 1);
    let mut parts = Framed::<T>::random(m, np + 1, 3, seed);
    if let (Some((at, x)), true) = (odd, m > 0) {
        parts.view_mut()[(at % m, np)] = number(x, 0.0);
    }
    let (up, down) = parts.view_mut().split_at_row_mut(cut);
    kernels.panel_column(up, scale, &u);
    kernels.panel_column(down, scale, &u);
    prop_assert!(parts.bits() == cols.bits(), "a cut changes bits");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn gemm_is_the_references(
        shape in shape(), op in (ops(), ops()), factor in (factors(), factors()),
        pad in 0usize..4, seed in 0u64..1000, threads in 1usize..4,
    ) {
        let team = Team::new(threads).unwrap();
        for_all!(gemm_case(shape, op, factor, pad, seed, &team));
    }

    #[test]
    fn an_elements_bits_depend_on_k_alone(
        shape in shape(), cut in (0usize..600, 0usize..600), pad in 0usize..4, seed in 0u64..1000,
        threads in 2usize..4,
    ) {
        let team = Team::new(threads).unwrap();
        for_all!(bits_case(shape, cut, pad, seed, &team));
    }

    #[test]
    fn packed_b_is_as_documented(shape in (0usize..40, 0usize..60), pad in 0usize..3, seed in 0u64..1000) {
        for_all!(pack_case(shape, pad, seed));
    }

    #[test]
    fn trsm_is_the_references(
        n in prop_oneof![3 => 0usize..40, 1 => 60usize..200], rhs in 0usize..70, left: bool, lower: bool,
        op in ops(), unit: bool, alpha in factors(), pad in 0usize..3, seed in 0u64..1000,
        threads in 1usize..4,
    ) {
        let side = if left { Side::Left } else { Side::Right };
        let uplo = if lower { Uplo::Lower } else { Uplo::Upper };
        let diag = if unit { Diag::Unit } else { Diag::NonUnit };
        let team = Team::new(threads).unwrap();
        for_all!(trsm_case((n, rhs), (side, uplo, op, diag), alpha, pad, seed, &team));
    }

    #[test]
    fn packed_trsm_is_the_references(k in 0usize..150, n in 0usize..90, pad in 0usize..3, seed in 0u64..1000) {
        for_all!(trsm_packed_case((k, n), pad, seed));
    }

    #[test]
    fn a_panel_column_is_the_references(
        m in prop_oneof![0usize..40, 40usize..700], np in 0usize..9, scaled: bool,
        odd in prop_oneof![
            Just(None),
            (0usize..700, prop_oneof![Just(f64::NAN), Just(-f64::NAN), Just(f64::INFINITY), Just(-50.0)])
                .prop_map(Some)
        ],
        seed in 0u64..1000,
    ) {
        for_all!(column_case((m, np), scaled, odd, seed));
    }
}

/// Two passes over k, several blocks of A and more threads than blocks.
#[test]
fn a_large_product_is_the_references() {
    let run = || -> Outcome {
        for isa in Isa::available() {
            let team = Team::new(5).unwrap();
            let one = ((1.0, 0.0), (1.0, 0.0));
            gemm_case::<f64>(isa, (413, 119, 285), (Op::NoTrans, Op::Trans), one, 3, 7, &team)?;
            gemm_case::<f32>(isa, (119, 413, 285), (Op::Trans, Op::NoTrans), one, 3, 8, &team)?;
            gemm_case::<c64>(isa, (213, 69, 285), (Op::ConjTrans, Op::NoTrans), one, 3, 9, &team)?;
        }
        Ok(())
    };
    run().unwrap();
}

#[test]
fn the_first_of_several_nans_is_found() {
    for isa in Isa::available() {
        let kernels = native::<f64>(isa);
        let mut x = vec![1.0; 500];
        x[13] = f64::INFINITY;
        x[77] = -f64::NAN;
        x[78] = f64::from_bits(0x7fff_ffff_ffff_ffff);
        x[400] = f64::NAN;
        assert_eq!(kernels.iamax(&x), Some(77));
        assert_eq!(kernels.iamax(&[]), None);
        assert_eq!(kernels.iamax(&[0.0; 100]), Some(0));
        assert_eq!(kernels.iamax(&[0.0, -2.0, 2.0, 1.0]), Some(1));
    }
}

#[test]
fn instruction_sets_have_names() {
    for isa in Isa::available() {
        assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
        let kernels = native::<f64>(isa);
        assert_eq!(kernels.description().backend, "native");
        assert!(kernels.description().detail.starts_with(isa.name()));
    }
    assert!("mmx".parse::<Isa>().unwrap_err().contains("portable"));
    assert_eq!(*Isa::available().last().unwrap(), Isa::Portable);
}
