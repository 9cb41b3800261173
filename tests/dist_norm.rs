//! Norms against a plain computation on one rank, and bit for bit between grids.

use std::sync::Arc;

use fulmen::blas::norm;
use fulmen::dist::{Desc, DistMatrix};
use fulmen::fabric::{Fabric, mem};
use fulmen::{Error, Grid, Order, Result};
use fulmen_kernels::{Scalar, c32, c64};

fn on<R: Send>(n: usize, work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync) -> Vec<R> {
    mem::run(n, mem::Options::default(), work).into_iter().map(|r| r.unwrap()).collect()
}

const GRIDS: [(usize, usize); 7] = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (1, 4), (3, 3)];

fn unit(i: usize, j: usize) -> f64 {
    ((i * 7919 + j * 104_729 + 31 * i * j) % 1009) as f64 / 1009.0 - 0.5
}

fn entry<T: Scalar>(i: usize, j: usize) -> T {
    let real = |x: f64| <<T as Scalar>::Real as fulmen_kernels::Real>::from_f64(x);
    T::from_parts(real(unit(i, j)), real(unit(j + 3, i)))
}

fn modulus<T: Scalar>(i: usize, j: usize) -> f64 {
    fulmen_kernels::Real::to_f64(entry::<T>(i, j).modulus())
}

fn check<T: Scalar>(m: usize, n: usize, mb: usize, nb: usize, offset: (usize, usize), tolerance: f64) {
    let size = |i: usize, j: usize| modulus::<T>(i + offset.0, j + offset.1);
    let largest = |sums: &mut dyn Iterator<Item = f64>| sums.fold(0.0, f64::max);
    let expected = [
        largest(&mut (0..m * n).map(|at| size(at % m, at / m))),
        largest(&mut (0..n).map(|j| (0..m).map(|i| size(i, j)).sum())),
        largest(&mut (0..m).map(|i| (0..n).map(|j| size(i, j)).sum())),
        (0..m * n).map(|at| size(at % m, at / m).powi(2)).sum::<f64>().sqrt(),
    ];
    let mut bits = None;
    for (nprow, npcol) in GRIDS {
        let desc = Desc::new(m + offset.0, n + offset.1, mb, nb).with_source(nprow - 1, npcol / 2);
        for norms in on(nprow * npcol, |fabric| {
            let grid = Grid::new(fabric, nprow, npcol, Order::RowMajor)?;
            let a = DistMatrix::<T>::from_fn(&grid, desc, entry)?;
            let a = a.view().sub(offset.0..offset.0 + m, offset.1..offset.1 + n);
            Ok([norm::max(&a)?, norm::one(&a)?, norm::inf(&a)?, norm::frobenius(&a)?]
                .map(fulmen_kernels::Real::to_f64))
        }) {
            for (got, want) in norms.iter().zip(expected) {
                assert!((got - want).abs() <= tolerance * want, "{m} x {n}: {norms:?}, not {expected:?}");
            }
            let these = norms.map(f64::to_bits);
            assert_eq!(*bits.get_or_insert(these), these, "{m} x {n} on {nprow} x {npcol}");
        }
    }
}

#[test]
fn norms_are_right_and_have_the_same_bits_on_every_grid() {
    for (m, n, mb, nb) in
        [(0, 0, 2, 2), (0, 3, 2, 2), (1, 1, 4, 4), (50, 33, 4, 7), (37, 61, 64, 3), (130, 20, 16, 16)]
    {
        for offset in [(0, 0), (5, 2)] {
            check::<f64>(m, n, mb, nb, offset, 1e-13);
        }
    }
    check::<f32>(40, 30, 8, 8, (1, 1), 1e-5);
    check::<c32>(40, 30, 8, 8, (0, 0), 1e-5);
    check::<c64>(21, 34, 5, 8, (2, 0), 1e-13);
}

/// More sums than go in one batch.
#[test]
fn tall_matrices_are_summed_in_batches() {
    check::<f64>(3000, 120, 1, 7, (0, 0), 1e-12);
    check::<f64>(120, 3000, 7, 1, (0, 0), 1e-12);
}

#[test]
fn squares_neither_overflow_nor_vanish() {
    for scale in [1e200, 1e-200] {
        on(2, |fabric| {
            let grid = Grid::squarest(fabric)?;
            let a = DistMatrix::from_fn(&grid, Desc::square_blocks(3, 4, 1), |_, _| scale)?;
            let expected = scale * 12f64.sqrt();
            assert!((norm::frobenius(&a.view())? / expected - 1.0).abs() < 1e-15);
            Ok(())
        });
    }
}

/// Case K3-02, and the order: lowest column first, then lowest row, the same on every grid.
#[test]
fn the_first_non_finite_element_is_named_on_every_grid() {
    let holes = [(1, 2, f64::INFINITY), (0, 7, f64::NAN), (4, 2, f64::NAN), (8, 8, f64::NEG_INFINITY)];
    for (nprow, npcol) in GRIDS {
        for order in [Order::RowMajor, Order::ColMajor] {
            on(nprow * npcol, |fabric| {
                let grid = Grid::new(fabric, nprow, npcol, order)?;
                let a = DistMatrix::from_fn(&grid, Desc::square_blocks(9, 9, 2), |i, j| {
                    holes.iter().find(|h| (h.0, h.1) == (i, j)).map_or(unit(i, j), |h| h.2)
                })?;
                assert_eq!(norm::find_non_finite(&a.view())?, Some((1, 2, f64::INFINITY)));
                let text = norm::require_finite(&a.view()).unwrap_err().to_string();
                assert!(text.starts_with("element (1, 2) of the input is inf"), "{text}");
                // Within a view: row 4 is row 2 of it.
                let (i, j, x) = norm::find_non_finite(&a.view().sub(2..9, 1..9))?.unwrap();
                assert!((i, j) == (2, 1) && x.is_nan());
                assert_eq!(norm::find_non_finite(&a.view().sub(0..9, 3..7))?, None);
                norm::require_finite(&a.view().sub(5..8, 0..9))?;
                // A NaN is never passed over.
                for norm in [norm::max, norm::one, norm::inf, norm::frobenius] {
                    assert!(norm(&a.view())?.is_nan());
                    assert_eq!(norm(&a.view().sub(5..9, 5..9))?, f64::INFINITY);
                }
                Ok(())
            });
        }
    }
    let complex = on(2, |fabric| {
        let grid = Grid::squarest(fabric)?;
        let a = DistMatrix::from_fn(&grid, Desc::square_blocks(5, 5, 1), |i, j| {
            c64::new(0.0, if (i, j) == (3, 1) { f64::NAN } else { 1.0 })
        })?;
        Ok(matches!(norm::require_finite(&a.view()), Err(Error::NonFinite { row: 3, col: 1, .. })))
    });
    assert!(complex.into_iter().all(|named| named));
}
