//! The library's front: solving systems, and what it says of systems that cannot be solved.

use fulmen::kernels::Mat;
use fulmen::prelude::*;

fn on_grids<R: Send + std::fmt::Debug>(
    grids: &[(usize, usize)],
    program: impl Fn(&World, &std::sync::Arc<Grid>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    grids
        .iter()
        .map(|&(p, q)| {
            let setup = Setup { threads: 1, ..Setup::default() };
            let mut results =
                World::threads(p * q, &setup, |world| program(&world, &world.grid(p, q)?)).unwrap();
            // The first rank's; an abort is the consequence of another rank's error.
            let told = results.iter().position(|r| !matches!(r, Err(Error::Aborted { .. }))).unwrap_or(0);
            results.swap_remove(told)
        })
        .collect()
}

const GRIDS: [(usize, usize); 4] = [(1, 1), (2, 2), (1, 3), (3, 1)];

/// Scaled residual of HPL for A·x = b solved on every grid; x must have the same bits on all.
fn residual(
    n: usize,
    nb: usize,
    a: impl Fn(usize, usize) -> f64 + Sync,
    b: impl Fn(usize) -> f64 + Sync,
) -> f64 {
    let xs = on_grids(&GRIDS, |world, grid| {
        let matrix = DistMatrix::from_fn(grid, Desc::square_blocks(n, n, nb), &a)?;
        let mut x = DistMatrix::from_fn(grid, Desc::square_blocks(n, 1, nb), |i, _| b(i))?;
        matrix.lu(world)?.solve_in_place(world, &mut x)?;
        x.gather(0)
    });
    let xs: Vec<Mat<f64>> = xs.into_iter().map(|x| x.unwrap().unwrap()).collect();
    assert!(xs.windows(2).all(|w| (0..n).all(|i| w[0][(i, 0)].to_bits() == w[1][(i, 0)].to_bits())));
    let x = &xs[0];
    let max = |f: &dyn Fn(usize) -> f64| (0..n).map(f).fold(0.0, f64::max);
    let r = max(&|i| ((0..n).map(|j| a(i, j) * x[(j, 0)]).sum::<f64>() - b(i)).abs());
    let a_inf = max(&|i| (0..n).map(|j| a(i, j).abs()).sum());
    let scale = a_inf * max(&|i| x[(i, 0)].abs()) + max(&|i| b(i).abs());
    r / (scale * n as f64 * f64::EPSILON / 2.0)
}

/// K3-02 of the field's cases: ScaLAPACK loses the Inf and gives different answers on different grids.
#[test]
fn non_finite_input_is_named_alike_on_every_grid() {
    let a = |i: usize, j: usize| {
        let (i, j) = (i + 1, j + 1);
        ((7919 * i + 104_729 * j + 31 * i * j) % 1009) as f64 / 1009.0 - 0.5
    };
    for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let told = on_grids(&GRIDS, |world, grid| {
            let entry = |i, j| if (i, j) == (1, 2) || (i, j) == (7, 8) { bad } else { a(i, j) };
            DistMatrix::from_fn(grid, Desc::square_blocks(9, 9, 2), entry)?.lu(world).map(|_| ())
        });
        for result in told {
            let Err(Error::NonFinite { row: 1, col: 2, value }) = &result else { panic!("{result:?}") };
            assert_eq!(value, &bad.to_string());
            assert_eq!(result.unwrap_err().exit_code(), 2);
        }
    }
}

/// K3-04: exactly dependent columns, where one fused step leaves a tiny pivot. Whatever it is, it is the
/// same on every grid.
#[test]
fn dependent_columns_give_one_answer() {
    let a: [[f64; 3]; 3] = [[1.0, 5.0, 7.0], [2.0, 10.0, -3.0], [5.0, 25.0, 1.0]];
    let told = on_grids(&GRIDS, |world, grid| {
        let lu = DistMatrix::from_fn(grid, Desc::square_blocks(3, 3, 1), |i, j| a[i][j])?.lu(world)?;
        let factors = lu.factors().gather(0)?;
        Ok((lu.info(), lu.ipiv().to_vec(), factors.map(|f| f[(1, 1)].to_bits())))
    });
    let first = told[0].as_ref().unwrap().clone();
    assert!(told.iter().all(|t| t.as_ref().unwrap() == &first), "{told:?}");
    let pivot = f64::from_bits(first.2.unwrap());
    assert!(first.0 == Some(1) || (first.0.is_none() && pivot.abs() < 1e-14), "{first:?}, pivot {pivot}");
}

/// K3-05: as ill conditioned as can be, and still backward stable.
#[test]
fn hilbert_is_backward_stable() {
    let r = residual(12, 4, |i, j| 1.0 / (i + j + 1) as f64, |_| 1.0);
    assert!(r < 16.0, "{r}");
}

/// Wilkinson's matrix: partial pivoting lets elements grow by 2ⁿ⁻¹, and the check must see it.
#[test]
fn growth_fails_the_check() {
    let wilkinson = |n: usize| {
        move |i: usize, j: usize| match () {
            () if i == j || j == n - 1 => 1.0,
            () if j < i => -1.0,
            () => 0.0,
        }
    };
    let b = |i: usize| ((i * 37 % 11) as f64).sin();
    assert!(residual(20, 8, wilkinson(20), b) < 1e5);
    let r = residual(120, 16, wilkinson(120), b);
    assert!(r.is_nan() || r > 16.0, "{r}: the growth went unnoticed");
}

#[test]
fn singular_systems_are_refused_by_name() {
    let told = on_grids(&GRIDS, |world, grid| {
        let a = DistMatrix::<f64>::from_fn(grid, Desc::square_blocks(8, 8, 3), |_, _| 1.0)?;
        let mut b = DistMatrix::from_fn(grid, Desc::square_blocks(8, 1, 3), |_, _| 1.0)?;
        let lu = a.lu(world)?;
        assert_eq!(lu.info(), Some(1));
        lu.solve_in_place(world, &mut b)
    });
    for result in told {
        let Err(e @ Error::Argument { .. }) = result else { panic!("{result:?}") };
        assert!(e.to_string().contains("U(1, 1) = 0"), "{e}");
    }
}

/// K4-02: what does not fit is said with both values, before any work.
#[test]
fn right_hand_sides_that_do_not_fit_are_refused() {
    for (desc, word) in [(Desc::new(8, 1, 2, 1), "MB 2"), (Desc::new(7, 1, 3, 1), "7 rows")] {
        let told = on_grids(&GRIDS[1..2], |world, grid| {
            let a = DistMatrix::<f64>::from_fn(grid, Desc::square_blocks(8, 8, 3), |i, j| {
                if i == j { 9.0 } else { 1.0 }
            })?;
            let mut b = DistMatrix::zeros(grid, desc)?;
            a.lu(world)?.solve_in_place(world, &mut b)
        });
        let Err(e @ Error::Argument { .. }) = &told[0] else { panic!("{told:?}") };
        assert!(e.to_string().contains(word), "{e}");
    }
}
