//! LU over grids, block sizes, offsets and types: backward error, pivots, and the same bits everywhere.

use fulmen::comm::Topology;
use fulmen::fabric::rendezvous::{Secret, in_process};
use fulmen::fabric::tcp;
use fulmen::lapack::{LuOpts, Silent, back_substitute, getrf, getrs};
use fulmen::{Desc, DistMatrix, Result, Setup, World};
use fulmen_kernels::{Choice, Element, Mat, Op, Real, Scalar, c32, c64};
use proptest::prelude::*;

/// A repeatable matrix: the top bits of a multiplicative hash of (seed, i, j).
fn entry<T: Scalar>(seed: u64, i: usize, j: usize) -> T {
    let half = |salt: u64| {
        let mut x = seed ^ salt ^ ((i as u64) << 32) ^ j as u64;
        for _ in 0..3 {
            x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(salt);
        }
        <T as Scalar>::Real::from_f64((x >> 11) as f64 / (1u64 << 53) as f64 - 0.5)
    };
    T::from_parts(half(1), half(2))
}

#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    mb: usize,
    nb: usize,
    grid: (usize, usize),
    src: (usize, usize),
    offset: (usize, usize),
    lookahead: usize,
    threads: usize,
}

struct Factored<T> {
    lu: Mat<T>,
    ipiv: Vec<usize>,
    info: Option<usize>,
}

fn setup(threads: usize) -> Setup {
    Setup { kernels: "native".parse::<Choice>().unwrap(), threads, bind: false }
}

/// Factors the view of `case` on its grid; everything outside the view must stay as it was.
fn factor<T: Element>(case: &Case, a: &(impl Fn(usize, usize) -> T + Sync)) -> Factored<T> {
    let (ia, ja) = case.offset;
    let (p, q) = case.grid;
    let desc = Desc {
        m: ia + case.m + 1,
        n: ja + case.n + 1,
        mb: case.mb,
        nb: case.nb,
        rsrc: case.src.0 % p,
        csrc: case.src.1 % q,
    };
    let (rows, cols) = (ia..ia + case.m, ja..ja + case.n);
    let outside = |i: usize, j: usize| T::from_parts(Real::from_f64(i as f64), Real::from_f64(j as f64));
    let inside = |i: usize, j: usize| rows.contains(&i) && cols.contains(&j);
    let results = World::threads(p * q, &setup(case.threads), |world| {
        let grid = world.grid(p, q)?;
        let mut matrix = DistMatrix::<T>::from_fn(&grid, desc, |i, j| {
            if inside(i, j) { a(i - ia, j - ja) } else { outside(i, j) }
        })?;
        let opts = LuOpts { lookahead: case.lookahead, ..LuOpts::default() };
        let view = matrix.view_mut().sub(rows.clone(), cols.clone());
        let factors = getrf(world.kernels::<T>(), world.team(), view, &opts, &mut Silent)?;
        let mut mine = vec![];
        for i in 0..desc.m {
            for j in 0..desc.n {
                if let Some(x) = matrix.get(i, j) {
                    if inside(i, j) {
                        mine.push((i - ia, j - ja, x));
                    } else {
                        assert_eq!(x, outside(i, j), "({i}, {j}) is outside of the view");
                    }
                }
            }
        }
        Ok((mine, factors))
    })
    .unwrap();
    let mut lu = Mat::zeros(case.m, case.n);
    let mut told = None;
    for result in results {
        let (mine, factors) = result.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        mine.into_iter().for_each(|(i, j, x)| lu[(i, j)] = x);
        let said = (factors.ipiv, factors.info);
        assert!(told.get_or_insert(said.clone()) == &said, "ranks disagree on the pivots");
    }
    let (ipiv, info) = told.unwrap();
    Factored { lu, ipiv, info }
}

/// ‖P·A − L·U‖₁ / (‖A‖₁ · max(m, n) · u): LAPACK's `xGET01`.
fn residual<T: Element>(case: &Case, a: &impl Fn(usize, usize) -> T, f: &Factored<T>) -> f64 {
    let (m, n) = (case.m, case.n);
    let k = m.min(n);
    let mut order: Vec<usize> = (0..m).collect();
    f.ipiv.iter().enumerate().for_each(|(i, &p)| order.swap(i, p));
    let (mut worst, mut norm) = (0.0f64, 0.0f64);
    for j in 0..n {
        let (mut sum, mut size) = (0.0, 0.0);
        for i in 0..m {
            let mut x = T::zero();
            for l in 0..k.min(i + 1).min(j + 1) {
                let left = if l == i { T::one() } else { f.lu[(i, l)] };
                x += left * f.lu[(l, j)];
            }
            sum += (x - a(order[i], j)).modulus().to_f64();
            size += a(i, j).modulus().to_f64();
        }
        worst = worst.max(sum);
        norm = norm.max(size);
    }
    let unit = <T as Scalar>::Real::UNIT_ROUNDOFF.to_f64();
    if norm == 0.0 { worst } else { worst / (norm * m.max(n) as f64 * unit) }
}

fn check<T: Element>(case: &Case, seed: u64) {
    let a = |i: usize, j: usize| entry::<T>(seed, i, j);
    let f = factor(case, &a);
    assert_eq!(f.info, None, "{case:?}");
    assert!(f.ipiv.iter().enumerate().all(|(i, &p)| (i..case.m).contains(&p)), "{case:?}: {:?}", f.ipiv);
    let residual = residual(case, &a, &f);
    assert!(residual < 30.0, "{case:?} {}: residual {residual}", T::LETTER);
    // L is bounded by 1 with the modulus replaced by |re| + |im|: at most √2.
    for j in 0..case.n {
        for i in j + 1..case.m {
            assert!(f.lu[(i, j)].modulus().to_f64() < 1.4143, "{case:?}: multiplier at ({i}, {j})");
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = prop_oneof![Just(0usize), Just(1), 2usize..12, 12usize..70];
    (
        (sizes.clone(), sizes, 1usize..17, 1usize..17),
        (1usize..4, 1usize..4, 0usize..3, 0usize..3),
        (0usize..9, 0usize..9, 0usize..3, 1usize..4),
    )
        .prop_map(|((m, n, mb, nb), (p, q, rsrc, csrc), (ia, ja, lookahead, threads))| Case {
            m,
            n,
            mb,
            nb,
            grid: (p, q),
            src: (rsrc, csrc),
            offset: (ia, ja),
            lookahead,
            threads,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn backward_stable_on_any_view_f64(case in cases(), seed: u64) { check::<f64>(&case, seed); }
    #[test]
    fn backward_stable_on_any_view_f32(case in cases(), seed: u64) { check::<f32>(&case, seed); }
    #[test]
    fn backward_stable_on_any_view_c64(case in cases(), seed: u64) { check::<c64>(&case, seed); }
    #[test]
    fn backward_stable_on_any_view_c32(case in cases(), seed: u64) { check::<c32>(&case, seed); }
}

/// K3-01 of the field's cases: `info` names the first zero pivot, the same on every grid, and the
/// factorisation is complete all the same.
#[test]
fn info_of_singular_matrices() {
    let n = 137;
    for grid in [(1, 1), (2, 2), (3, 1)] {
        let case =
            Case { m: n, n, mb: 32, nb: 32, grid, src: (0, 0), offset: (0, 0), lookahead: 1, threads: 1 };
        let info = |a: &(dyn Fn(usize, usize) -> f64 + Sync)| {
            let f = factor(&case, &a);
            let r = residual(&case, &a, &f);
            assert!(r < 30.0, "residual {r}");
            f.info
        };
        assert_eq!(info(&|_, _| 0.0), Some(0));
        assert_eq!(info(&|_, _| 1.0), Some(1));
        assert_eq!(info(&|i, j| f64::from(i == j)), None);
        for zero in [0, 1, 13, 136] {
            assert_eq!(info(&|i, j| if j == zero { 0.0 } else { entry(7, i, j) }), Some(zero));
        }
    }
}

/// x of [A | b] by factorisation and back substitution, as one rank does it.
fn solve(world: &World, n: usize, nb: usize, (p, q): (usize, usize), opts: &LuOpts) -> Result<Vec<f64>> {
    let desc = Desc { m: n, n: n + 1, mb: nb, nb, rsrc: 0, csrc: 0 };
    let grid = world.grid(p, q)?;
    let mut a = DistMatrix::<f64>::from_fn(&grid, desc, |i, j| entry(100, i, j))?;
    getrf(world.kernels::<f64>(), world.team(), a.view_mut(), opts, &mut Silent)?;
    back_substitute(world.team(), &a.view())
}

/// The bits of x, which every rank has.
fn bits(xs: Vec<Result<Vec<f64>>>) -> Vec<u64> {
    let mut all: Vec<Vec<u64>> =
        xs.into_iter().map(|x| x.unwrap().into_iter().map(f64::to_bits).collect()).collect();
    all.dedup();
    assert_eq!(all.len(), 1, "every rank has the same x");
    all.remove(0)
}

fn solve_bits(n: usize, nb: usize, grid: (usize, usize), threads: usize, opts: &LuOpts) -> Vec<u64> {
    let ranks = grid.0 * grid.1;
    bits(World::threads(ranks, &setup(threads), |world| solve(&world, n, nb, grid, opts)).unwrap())
}

/// As [`solve_bits`], with ranks that talk over TCP; only those that `reach` allows are connected.
fn solve_bits_over_tcp(
    n: usize,
    nb: usize,
    grid: (usize, usize),
    threads: usize,
    opts: &LuOpts,
    reach: Option<&dyn Fn(usize, usize) -> bool>,
) -> Vec<u64> {
    let (ranks, secret) = (grid.0 * grid.1, Secret::random().unwrap());
    let reach: Option<Vec<Vec<bool>>> =
        reach.map(|reach| (0..ranks).map(|a| (0..a).map(|b| reach(a, b)).collect()).collect());
    let rank = |mut rendezvous| {
        let options =
            tcp::Options { connections: 1 + ranks % 2, reach: reach.clone(), ..tcp::Options::default() };
        let fabric = tcp::connect(&mut rendezvous, secret.clone(), &options)?;
        let world = World::new(fabric.clone(), ranks, &setup(threads))?;
        solve(&world, n, nb, grid, opts).inspect_err(|e| fabric.fail(e))
    };
    let xs = std::thread::scope(|scope| {
        let ranks: Vec<_> = in_process(ranks).into_iter().map(|r| scope.spawn(|| rank(r))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    bits(xs)
}

#[test]
fn same_bits_on_every_grid_thread_count_depth_broadcast_and_transport() {
    let (n, nb) = (203, 24);
    let opts = LuOpts { keep_l: false, ..LuOpts::default() };
    let expected = solve_bits(n, nb, (1, 1), 1, &opts);
    // and they solve the system
    let x: Vec<f64> = expected.iter().map(|&b| f64::from_bits(b)).collect();
    let worst = (0..n)
        .map(|i| (0..n).map(|j| entry::<f64>(100, i, j) * x[j]).sum::<f64>() - entry::<f64>(100, i, n))
        .fold(0.0, |w: f64, r| w.max(r.abs()));
    let size = x.iter().fold(0.0, |w: f64, v| w.max(v.abs()));
    assert!(worst / (size * n as f64 * f64::EPSILON) < 16.0, "residual {worst}");
    let mut topologies = Topology::ALL.into_iter().cycle();
    for grid in [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (1, 6)] {
        for (lookahead, threads) in [(0, 1), (1, 2), (2, 3), (1, 4)] {
            let bcast = topologies.next().unwrap();
            let opts = LuOpts { lookahead, bcast, ..opts.clone() };
            let bits = solve_bits(n, nb, grid, threads, &opts);
            assert!(bits == expected, "{grid:?}, look-ahead {lookahead}, {threads} threads, {bcast:?}");
        }
        let (lookahead, bcast) = (1, topologies.next().unwrap());
        let bits = solve_bits_over_tcp(n, nb, grid, 2, &LuOpts { lookahead, bcast, ..opts.clone() }, None);
        assert!(bits == expected, "{grid:?}, {bcast:?}, over tcp");
    }
}

/// Hosts without a switch: a chain, and a ring, of cables.
#[test]
fn same_bits_where_only_neighbours_are_connected() {
    let (n, nb) = (203, 24);
    let opts = LuOpts { keep_l: false, ..LuOpts::default() };
    let expected = solve_bits(n, nb, (1, 1), 1, &opts);
    let chain = |a: usize, b: usize| a - b == 1;
    let cases = [
        ((2, 2), Topology::Cables),
        ((1, 4), Topology::Cables),
        ((1, 4), Topology::LongM),
        ((4, 1), Topology::RingM),
    ];
    for (grid, bcast) in cases {
        let ring = |a: usize, b: usize| a - b == 1 || a - b == 3;
        for (name, reach) in [("chain", &chain as &dyn Fn(usize, usize) -> bool), ("ring", &ring)] {
            let opts = LuOpts { bcast, ..opts.clone() };
            let bits = solve_bits_over_tcp(n, nb, grid, 1, &opts, Some(reach));
            assert!(bits == expected, "{grid:?} on a {name}");
        }
    }
}

/// With a large diagonal no rows are exchanged: all rows of a panel's U are on one rank, which sends them to all others.
#[test]
fn one_rank_may_have_all_rows_of_u() {
    let (n, nb) = (190, 16);
    let solve = |nprow: usize| {
        let xs = World::threads(nprow, &setup(1), |world| {
            let grid = world.grid(nprow, 1)?;
            let element = |i, j| entry::<f64>(3, i, j) + if i == j { 1e3 } else { 0.0 };
            let a = DistMatrix::from_fn(&grid, Desc::square_blocks(n, n, nb), element)?;
            let mut x = DistMatrix::from_fn(&grid, Desc::square_blocks(n, 1, nb), |i, _| element(i, n))?;
            a.lu(&world)?.solve_in_place(&world, &mut x)?;
            x.gather(0)
        });
        let x = xs.unwrap().remove(0).unwrap().unwrap();
        (0..n).map(|i| x[(i, 0)].to_bits()).collect::<Vec<_>>()
    };
    let expected = solve(1);
    assert!((0..n).all(|i| f64::from_bits(expected[i]).abs() < 1e-2));
    for nprow in 2..=6 {
        assert!(solve(nprow) == expected, "{nprow} x 1");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// op(A)·X = B for any B: ‖op(A)·X − B‖ / (‖A‖·‖X‖·n·u), LAPACK's `xGET02`.
    #[test]
    fn solves_for_any_right_hand_sides(
        case in cases(), op in prop::sample::select(vec![Op::NoTrans, Op::Trans, Op::ConjTrans]),
        nrhs in 0usize..20, bnb in 1usize..9, seed: u64,
    ) {
        let n = case.m;
        let (p, q) = case.grid;
        let (mb, rsrc) = (case.mb, case.src.0 % p);
        let (ia, ja) = case.offset;
        let a = |i: usize, j: usize| entry::<c64>(seed, i, j);
        let op_a = |i: usize, j: usize| match op {
            Op::NoTrans => a(i, j),
            Op::Trans => a(j, i),
            Op::ConjTrans => a(j, i).conj(),
        };
        let b = |i: usize, j: usize| entry::<c64>(!seed, i, j);
        let results = World::threads(p * q, &setup(case.threads), |world| {
            let grid = world.grid(p, q)?;
            let desc = Desc { m: ia + n, n: ja + n, mb, nb: case.nb, rsrc, csrc: case.src.1 % q };
            let outside = c64::new(f64::NAN, 0.0);
            let mut matrix = DistMatrix::from_fn(&grid, desc, |i, j| {
                if i >= ia && j >= ja { a(i - ia, j - ja) } else { outside }
            })?;
            let (kernels, team) = (world.kernels::<c64>(), world.team());
            let view = matrix.view_mut().sub(ia..ia + n, ja..ja + n);
            let lu = getrf(kernels, team, view, &LuOpts::default(), &mut Silent)?;
            // Somewhere else in its parent, but aligned.
            let ib = ia + mb * p;
            let desc = Desc { m: ib + n, n: nrhs, mb, nb: bnb, rsrc, csrc: 0 };
            let mut x = DistMatrix::from_fn(&grid, desc, |i, j| if i >= ib { b(i - ib, j) } else { outside })?;
            let view = matrix.view().sub(ia..ia + n, ja..ja + n);
            getrs(kernels, team, op, &view, &lu.ipiv, x.view_mut().sub(ib..ib + n, 0..nrhs))?;
            let untouched = (0..ib * nrhs).all(|k| x.get(k % ib, k / ib).is_none_or(|v| v.re.is_nan()));
            assert!(untouched, "{case:?}: rows outside of the view were written");
            Ok((0..n * nrhs).filter_map(|k| x.get(ib + k % n, k / n).map(|v| (k, v))).collect::<Vec<_>>())
        }).unwrap();
        let mut x = Mat::<c64>::zeros(n, nrhs);
        for (k, v) in results.into_iter().flat_map(|r| r.unwrap()) {
            x[(k % n, k / n)] = v;
        }
        let norm = |f: &dyn Fn(usize) -> f64| (0..n).map(f).sum::<f64>();
        let a_norm = (0..n).map(|j| norm(&|i| op_a(i, j).norm())).fold(0.0, f64::max);
        for j in 0..nrhs {
            let r = norm(&|i| ((0..n).map(|k| op_a(i, k) * x[(k, j)]).sum::<c64>() - b(i, j)).norm());
            let bound = 30.0 * a_norm * norm(&|i| x[(i, j)].norm()) * n as f64 * f64::EPSILON;
            prop_assert!(r <= bound, "{case:?} {op:?}: column {j}: {r} > {bound}");
        }
    }
}
