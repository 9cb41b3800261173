//! Panel LU: pivots and residual against textbook elimination, and the same bits for any number of
//! threads and any split of the rows over ranks.

mod common;

use std::sync::{Barrier, Mutex};

use common::{Framed, Random, is_nan, modulus};
use fulmen_kernels::{
    Candidate, Isa, Kernels, LocalExchange, MatMut, Op, PanelJob, PanelShape, PivotExchange, Real, Reference,
    Scalar, Team, Variant, c32, c64, compare_pivots, getrf, getrf_panel, native,
};
use proptest::prelude::*;

fn variant() -> impl Strategy<Value = Variant> {
    prop_oneof![Just(Variant::Left), Just(Variant::Crout), Just(Variant::Right)]
}

fn panel_shape() -> impl Strategy<Value = PanelShape> {
    (variant(), variant(), 1usize..10, 2usize..5).prop_map(|(rfact, pfact, nbmin, ndiv)| PanelShape {
        rfact,
        pfact,
        nbmin,
        ndiv,
    })
}

const USUAL: PanelShape = PanelShape { rfact: Variant::Right, pfact: Variant::Crout, nbmin: 8, ndiv: 2 };

/// A factored panel: its rows with the top written back, the pivots, and `info`.
#[derive(PartialEq, Debug, Clone)]
struct Factored<T> {
    m: usize,
    lu: Vec<T>,
    ipiv: Vec<usize>,
    info: Option<usize>,
}

fn on_one_rank<T: Scalar>(
    kernels: &dyn Kernels<T>,
    threads: usize,
    shape: PanelShape,
    a: &Framed<T>,
) -> Factored<T> {
    let mut panel = a.clone();
    let (m, jb) = (a.m, a.n);
    let mut top = Framed::<T>::new(jb, jb, 1, 1, |_, _| T::zero());
    let mut ipiv = vec![0; jb];
    let team = Team::new(threads).unwrap();
    let mut exchange = LocalExchange::new(0);
    let info = getrf_panel(kernels, &team, shape, panel.view_mut(), top.view_mut(), &mut ipiv, &mut exchange)
        .unwrap();
    assert!(panel.frame_is_whole() && top.frame_is_whole());
    panel.view_mut().get_mut(0..jb, ..).copy_from(top.view());
    let lu = (0..m * jb).map(|i| panel.view()[(i % m, i / m)]).collect();
    Factored { m, lu, ipiv, info }
}

/// What a rank shows the others of its process column.
#[derive(Clone)]
struct Shown<T> {
    /// Its candidate: global row, value, the row of the panel.
    best: Option<(usize, T, Vec<T>)>,
    /// Row j of the top, from the rank that owns it.
    displaced: Option<Vec<T>>,
}

/// Where they show it: here, memory.
struct Meeting<T> {
    barrier: Barrier,
    shown: Mutex<Vec<Option<Shown<T>>>>,
}

struct RankExchange<'a, T> {
    meeting: &'a Meeting<T>,
    rank: usize,
    /// Global rows of this rank, ascending.
    rows: &'a [usize],
}

impl<T: Scalar> PivotExchange<T> for RankExchange<'_, T> {
    type Error = String;

    fn first_active(&self, j: usize) -> usize {
        self.rows.iter().filter(|&&row| row < j).count()
    }

    fn exchange(
        &mut self,
        j: usize,
        best: Option<Candidate<T>>,
        mut panel: MatMut<'_, T>,
        mut top: MatMut<'_, T>,
    ) -> Result<usize, String> {
        let jb = top.ncols();
        let row = |panel: &MatMut<'_, T>, i: usize| (0..jb).map(|c| panel[(i, c)]).collect::<Vec<_>>();
        let own_j = self.rows.iter().position(|&row| row == j);
        let mine = Shown {
            best: best.map(|best| (self.rows[best.row], best.value, row(&panel, best.row))),
            displaced: own_j.map(|i| row(&panel, i)),
        };
        self.meeting.shown.lock().unwrap()[self.rank] = Some(mine);
        self.meeting.barrier.wait();
        let shown: Vec<_> = self.meeting.shown.lock().unwrap().iter().flatten().cloned().collect();
        self.meeting.barrier.wait();
        let (global, _, pivot) = shown
            .iter()
            .filter_map(|shown| shown.best.clone())
            .reduce(|a, b| {
                let order = compare_pivots(b.1, a.1).then(a.0.cmp(&b.0));
                if order.is_gt() { b } else { a }
            })
            .ok_or("no rank has a row left")?;
        let displaced =
            shown.iter().find_map(|shown| shown.displaced.clone()).ok_or("nobody owns the row")?;
        for c in 0..jb {
            top[(j, c)] = pivot[c];
        }
        if let Some(i) = self.rows.iter().position(|&row| row == global) {
            for c in 0..jb {
                panel[(i, c)] = displaced[c];
            }
        }
        Ok(global)
    }
}

/// The same panel with row i on rank `owner(i)`.
fn on_ranks<T: Scalar>(
    isa: Isa,
    ranks: usize,
    threads: usize,
    shape: PanelShape,
    a: &Framed<T>,
    owner: impl Fn(usize) -> usize + Sync,
) -> Factored<T> {
    let (m, jb) = (a.m, a.n);
    let meeting = Meeting { barrier: Barrier::new(ranks), shown: Mutex::new(vec![None; ranks]) };
    let results: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..ranks)
            .map(|rank| {
                let (meeting, owner) = (&meeting, &owner);
                scope.spawn(move || {
                    let kernels = native::<T>(isa);
                    let rows: Vec<_> = (0..m).filter(|&i| owner(i) == rank).collect();
                    let mut panel = Framed::new(rows.len(), jb, 2, 1, |i, j| a.view()[(rows[i], j)]);
                    let mut top = Framed::<T>::new(jb, jb, 0, 0, |_, _| T::zero());
                    let mut ipiv = vec![0; jb];
                    let mut exchange = RankExchange { meeting, rank, rows: &rows };
                    let team = Team::new(threads).unwrap();
                    let info = getrf_panel(
                        &*kernels,
                        &team,
                        shape,
                        panel.view_mut(),
                        top.view_mut(),
                        &mut ipiv,
                        &mut exchange,
                    )
                    .unwrap();
                    (rows, panel, top, ipiv, info)
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    let mut lu = vec![T::zero(); m * jb];
    for (rows, panel, top, ipiv, info) in &results {
        assert!(ipiv == &results[0].3 && info == &results[0].4, "all ranks agree");
        assert!(top.view() == results[0].2.view(), "the top is replicated");
        for (i, &row) in rows.iter().enumerate() {
            for c in 0..jb {
                lu[row + c * m] = if row < jb { top.view()[(row, c)] } else { panel.view()[(i, c)] };
            }
        }
    }
    Factored { m, lu, ipiv: results[0].3.clone(), info: results[0].4 }
}

/// Textbook elimination: pivots and `info`.
fn textbook<T: Scalar>(a: &Framed<T>) -> (Vec<usize>, Option<usize>) {
    let (mut a, mut ipiv, mut info) = (a.clone(), Vec::new(), None);
    let (m, n) = (a.m, a.n);
    let mut a = a.view_mut();
    for j in 0..m.min(n) {
        let mut p = j;
        for i in j + 1..m {
            if a[(i, j)].abs1() > a[(p, j)].abs1() {
                p = i;
            }
        }
        ipiv.push(p);
        for c in 0..n {
            (a[(j, c)], a[(p, c)]) = (a[(p, c)], a[(j, c)]);
        }
        if a[(j, j)] == T::zero() {
            info = info.or(Some(j));
            continue;
        }
        for i in j + 1..m {
            let l = a[(i, j)] / a[(j, j)];
            for c in j + 1..n {
                let u = a[(j, c)];
                a[(i, c)] -= l * u;
            }
        }
    }
    (ipiv, info)
}

/// LAPACK's measure: max |PA − LU| over max |A| · max(m, n) · ε. Of order 1 and below.
fn residual<T: Scalar>(a: &Framed<T>, lu: &[T], ipiv: &[usize]) -> f64 {
    let (m, n) = (a.m, a.n);
    let mut pa = a.clone();
    for (j, &p) in ipiv.iter().enumerate() {
        let mut pa = pa.view_mut();
        for c in 0..n {
            (pa[(j, c)], pa[(p, c)]) = (pa[(p, c)], pa[(j, c)]);
        }
    }
    let (mut worst, mut size) = (0.0f64, 0.0f64);
    for c in 0..n {
        for i in 0..m {
            let mut x = T::zero();
            for p in 0..=i.min(c).min(m.min(n) - 1) {
                let l = if p == i { T::one() } else { lu[i + p * m] };
                x += l * lu[p + c * m];
            }
            worst = worst.max(modulus(x - pa.view()[(i, c)]));
            size = size.max(modulus(pa.view()[(i, c)]));
        }
    }
    worst / (size * m.max(n) as f64 * <T as Scalar>::Real::UNIT_ROUNDOFF.to_f64())
}

fn check<T: Scalar>(
    isa: Isa,
    (below, jb): (usize, usize),
    shape: PanelShape,
    seed: u64,
) -> Result<(), TestCaseError> {
    let kernels = native::<T>(isa);
    let a = Framed::<T>::random(jb + below, jb, (seed % 3) as usize, seed);
    let one = on_one_rank(&*kernels, 1, shape, &a);
    prop_assert_eq!((one.ipiv.clone(), one.info), textbook(&a));
    let r = residual(&a, &one.lu, &one.ipiv);
    prop_assert!(r < 10.0, "residual {r}");
    for threads in [2, 3] {
        prop_assert!(on_one_rank(&*kernels, threads, shape, &a) == one, "{threads} threads change bits");
    }
    // The top on rank 0 and the rest dealt out in blocks, as block-cyclic; and any rows anywhere.
    let blocks = |i: usize| if i < jb { 0 } else { i / 7 % 3 };
    prop_assert!(on_ranks(isa, 3, 2, shape, &a, blocks) == one, "three ranks change bits");
    let mixed = |i: usize| (i * 7 + i / 3) % 2;
    prop_assert!(on_ranks(isa, 2, 1, shape, &a, mixed) == one, "two ranks change bits");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn any_shape_threads_and_ranks_factor_alike(
        below in prop_oneof![0usize..9, 9usize..200], jb in prop_oneof![1 => 1usize..4, 4 => 4usize..70], shape in panel_shape(), seed in 0u64..1000,
    ) {
        for isa in Isa::available() {
            check::<f64>(isa, (below, jb), shape, seed)?;
            check::<c64>(isa, (below, jb), shape, seed)?;
        }
        check::<f32>(Isa::detect(), (below, jb), shape, seed)?;
        check::<c32>(Isa::detect(), (below, jb), shape, seed)?;
    }

    /// In the base case the three orders sum the same terms in the same order.
    #[test]
    fn orders_of_the_base_case_agree(below in 0usize..100, jb in 1usize..40, rfact in variant(), seed in 0u64..1000) {
        for isa in Isa::available() {
            let kernels = native::<f64>(isa);
            let a = Framed::<f64>::random(jb + below, jb, 1, seed);
            let by = |pfact| {
                on_one_rank(&*kernels, 2, PanelShape { rfact, pfact, nbmin: 8, ndiv: 2 }, &a)
            };
            let left = by(Variant::Left);
            prop_assert!(by(Variant::Crout) == left);
            if isa != Isa::Portable {
                prop_assert!(by(Variant::Right) == left);
            }
        }
    }

    #[test]
    fn getrf_is_lapacks(m in 0usize..90, n in 0usize..90, threads in 1usize..4, seed in 0u64..1000) {
        let kernels = native::<f64>(Isa::detect());
        let a = Framed::<f64>::random(m, n, 2, seed);
        let mut lu = a.clone();
        let mut ipiv = vec![0; m.min(n)];
        let team = Team::new(threads).unwrap();
        let info = getrf(&*kernels, &team, USUAL, lu.view_mut(), &mut ipiv);
        prop_assert!(lu.frame_is_whole());
        prop_assert_eq!((ipiv.clone(), info), textbook(&a));
        if m * n > 0 {
            let lu: Vec<_> = (0..m * n).map(|i| lu.view()[(i % m, i / m)]).collect();
            prop_assert!(residual(&a, &lu, &ipiv) < 10.0);
        }
    }
}

#[test]
fn getrf_of_several_panels() {
    let kernels = native::<f64>(Isa::detect());
    for (m, n) in [(700, 600), (520, 640), (1500, 257)] {
        let a = Framed::<f64>::random(m, n, 1, 5);
        let mut lu = a.clone();
        let mut ipiv = vec![0; m.min(n)];
        let info = getrf(&*kernels, &Team::new(2).unwrap(), USUAL, lu.view_mut(), &mut ipiv);
        assert_eq!((ipiv.clone(), info), textbook(&a));
        let lu: Vec<_> = (0..m * n).map(|i| lu.view()[(i % m, i / m)]).collect();
        let r = residual(&a, &lu, &ipiv);
        assert!(r < 10.0, "{m} x {n}: {r}");
    }
}

#[test]
fn the_reference_back_end_serves_as_well() {
    let a = Framed::<f64>::random(60, 20, 1, 3);
    let one = on_one_rank(&Reference::new(), 2, USUAL, &a);
    assert_eq!((one.ipiv.clone(), one.info), textbook(&a));
    assert!(residual(&a, &one.lu, &one.ipiv) < 10.0);
}

#[test]
fn a_zero_pivot_is_told_and_passed() {
    let kernels = native::<f64>(Isa::detect());
    let random = Framed::<f64>::random(40, 12, 0, 1);
    let shapes = [
        USUAL,
        PanelShape { pfact: Variant::Right, nbmin: 3, ..USUAL },
        PanelShape { rfact: Variant::Left, pfact: Variant::Left, nbmin: 4, ndiv: 3 },
    ];
    for shape in shapes {
        // A column of zeros; all zeros; one column nonzero in its last row alone.
        let zero_column = Framed::new(40, 12, 0, 0, |i, j| if j == 5 { 0.0 } else { random.view()[(i, j)] });
        let f = on_one_rank(&*kernels, 2, shape, &zero_column);
        assert_eq!(f.info, Some(5));
        assert!(f.lu.iter().all(|x| x.is_finite()));
        assert!(residual(&zero_column, &f.lu, &f.ipiv) < 10.0);

        let zeros = Framed::new(40, 12, 0, 0, |_, _| 0.0);
        let f = on_one_rank(&*kernels, 2, shape, &zeros);
        assert_eq!((f.info, f.ipiv), (Some(0), (0..12).collect()));
        assert!(f.lu.iter().all(|&x| x == 0.0));

        let last = Framed::new(40, 1, 0, 0, |i, _| if i == 39 { -2.0 } else { 0.0 });
        let f = on_one_rank(&*kernels, 3, shape, &last);
        assert_eq!((f.info, f.ipiv), (None, vec![39]));

        // Equal columns: the second cancels exactly.
        let twins = Framed::new(6, 2, 0, 0, |i, _| [1.0, 2.0, -4.0, 4.0, 0.5, 0.0][i]);
        let f = on_one_rank(&*kernels, 1, shape, &twins);
        assert_eq!((f.info, f.ipiv[0]), (Some(1), 2));
    }
}

#[test]
fn a_nan_is_met() {
    let kernels = native::<f64>(Isa::detect());
    let mut a = Framed::<f64>::random(50, 10, 0, 2);
    a.view_mut()[(33, 4)] = f64::NAN;
    let f = on_one_rank(&*kernels, 2, USUAL, &a);
    assert_eq!(f.ipiv[4], 33);
    assert!(is_nan(f.lu[4 + 4 * 50]), "U's diagonal shows it");
}

#[test]
fn a_pivot_without_reciprocal_divides() {
    let kernels = native::<f64>(Isa::detect());
    let tiny = f64::MIN_POSITIVE / 8.0;
    let a = Framed::new(20, 3, 0, 0, |i, j| {
        (if i == 7 + j { 1.0 } else { ((i * 5 + j * 3) % 8) as f64 / 16.0 }) * tiny
    });
    for pfact in [Variant::Left, Variant::Right] {
        let f = on_one_rank(&*kernels, 2, PanelShape { pfact, ..USUAL }, &a);
        assert_eq!(f.ipiv[0], 7);
        assert!(f.lu.iter().all(|x| x.is_finite()));
        assert_eq!(f.lu[19], a.view()[(19, 0)] / tiny);
    }
}

/// Fails at one column.
struct Lost {
    at: usize,
    inner: LocalExchange,
}

impl PivotExchange<f64> for Lost {
    type Error = usize;
    fn first_active(&self, j: usize) -> usize {
        PivotExchange::<f64>::first_active(&self.inner, j)
    }
    fn exchange(
        &mut self,
        j: usize,
        best: Option<Candidate<f64>>,
        panel: MatMut<'_, f64>,
        top: MatMut<'_, f64>,
    ) -> Result<usize, usize> {
        if j == self.at {
            return Err(j);
        }
        Ok(self.inner.exchange(j, best, panel, top).unwrap_or_else(|never| match never {}))
    }
}

#[test]
fn a_lost_rank_ends_all_members() {
    let kernels = native::<f64>(Isa::detect());
    let team = Team::new(3).unwrap();
    for at in [0, 3, 8, 19] {
        for pfact in [Variant::Left, Variant::Crout, Variant::Right] {
            let mut a = Framed::<f64>::random(100, 20, 0, 4);
            let mut top = Framed::<f64>::new(20, 20, 0, 0, |_, _| 0.0);
            let (mut ipiv, mut lost) = (vec![0; 20], Lost { at, inner: LocalExchange::new(0) });
            let shape = PanelShape { pfact, nbmin: 4, ..USUAL };
            let result =
                getrf_panel(&*kernels, &team, shape, a.view_mut(), top.view_mut(), &mut ipiv, &mut lost);
            assert_eq!(result, Err(at));
        }
    }
}

/// Look-ahead: one member factors the panel while the others multiply.
#[test]
fn one_member_factors_while_the_others_work() {
    let kernels = native::<f64>(Isa::detect());
    let a = Framed::<f64>::random(300, 32, 0, 6);
    let expected = on_one_rank(&*kernels, 1, USUAL, &a);
    let mut panel = a.clone();
    let mut top = Framed::<f64>::new(32, 32, 0, 0, |_, _| 0.0);
    let (mut ipiv, mut exchange) = (vec![0; 32], LocalExchange::new(0));
    let job = PanelJob::new(&*kernels, 1, USUAL, panel.view_mut(), top.view_mut(), &mut ipiv, &mut exchange);
    let part = fulmen_kernels::SubTeam::first(1);
    let other = Framed::<f64>::random(64, 64, 0, 7);
    let product = Mutex::new(Framed::<f64>::new(64, 64, 0, 0, |_, _| 0.0));
    Team::new(2).unwrap().run(|me| {
        if !part.run(me, |me| job.run(me)) {
            let (x, mut c) = ((Op::NoTrans, other.view()), product.lock().unwrap());
            kernels.gemm(&Team::solo(), 1.0, x, x, 0.0, c.view_mut());
        }
    });
    assert_eq!(job.finish(), Ok(None));
    assert_eq!(ipiv, expected.ipiv);
    assert!((0..32).all(|i| top.view()[(i, i)] == expected.lu[i + i * 300]));
    assert!((0..300 - 32).all(|i| panel.view()[(32 + i, 31)] == expected.lu[32 + i + 31 * 300]));
}

#[test]
fn pivots_compare_by_size_and_nan_is_largest() {
    use std::cmp::Ordering::*;
    assert_eq!(compare_pivots(1.0, -2.0), Less);
    assert_eq!(compare_pivots(-2.0, 2.0), Equal);
    assert_eq!(compare_pivots(f64::NAN, f64::INFINITY), Greater);
    assert_eq!(compare_pivots(3.0, f64::NAN), Less);
    assert_eq!(compare_pivots(f64::NAN, -f64::NAN), Equal);
    let (a, b) = (c64::new(3.0, -4.0), c64::new(0.0, 6.0));
    assert_eq!(compare_pivots(a, b), Greater);
    let _ = Random::new(1);
}
