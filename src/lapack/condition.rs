//! How far a matrix is from being singular: an estimate of its condition from its LU factors.

use std::sync::Arc;

use fulmen_kernels::{Kernels, Op, Real, Scalar, Team};
use num_traits::{Float, One, Zero};

use super::getrs::getrs;
use crate::dist::index::{Axis, Local, Row};
use crate::dist::{Desc, DistMatrix, DistRef};
use crate::error::{Error, Result};
use crate::grid::Grid;

type Re<T> = <T as Scalar>::Real;

/// The norm in which a condition is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Norm {
    /// ‖A‖₁: the largest sum of moduli of a column.
    One,
    /// ‖A‖∞: the largest sum of moduli of a row.
    Inf,
}

/// An estimate of 1 / (‖A‖·‖A⁻¹‖), LAPACK's `xGECON`: `a` and `ipiv` are what [`super::getrf`] left of the
/// square A (with `keep_l`), `a_norm` is ‖A‖ before. Every rank of the grid calls it; all get the same, and
/// with kernels that keep the order of operations the same bits on every grid.
///
/// ‖A⁻¹‖ is approached from below by a handful of solves (Higham 1988, Algorithm 4.1; Hager 1984), in
/// practice within a factor of 3. 1 is the best condition there is and 0 is singular; when the result is
/// below n times the unit roundoff, no digit of a solution is certain.
///
/// # Errors
/// [`Error::Argument`] when A is not square or `a_norm` is no norm; when a rank is lost or memory is short.
pub fn gecon<T: Scalar>(
    kernels: &dyn Kernels<T>,
    team: &Team,
    norm: Norm,
    a: &DistRef<'_, T>,
    ipiv: &[usize],
    a_norm: Re<T>,
) -> Result<Re<T>> {
    let n = a.nrows();
    if a.ncols() != n {
        let value = format!("{n} x {}", a.ncols());
        return Err(Error::argument("a", value, "is not square", "only a square matrix has a condition"));
    }
    if !a_norm.finite() || a_norm < Re::<T>::zero() {
        let remedy = "give the norm of A before it was factored; if that overflows, scale A";
        return Err(Error::argument("a_norm", a_norm, "is no norm of a finite matrix", remedy));
    }
    if n == 0 {
        return Ok(Re::<T>::one());
    }
    if a_norm.is_zero() {
        return Ok(Re::<T>::zero());
    }
    let mut column = Column::new(a)?;
    // ‖A⁻¹‖∞ is ‖A⁻ᴴ‖₁.
    let (plain, adjoint) = match norm {
        Norm::One => (Op::NoTrans, Op::ConjTrans),
        Norm::Inf => (Op::ConjTrans, Op::NoTrans),
    };
    let condition = norm_one(n, |step, x: &mut [T]| {
        // Of ‖A‖·A⁻¹: whatever the scale of A, only a hopeless condition overflows.
        x.iter_mut().for_each(|x| *x *= T::from_real(a_norm));
        let op = if step == Step::Plain { plain } else { adjoint };
        column.solve(x, |b| getrs(kernels, team, op, a, ipiv, b))
    })?;
    let rcond = Re::<T>::one() / condition;
    Ok(if rcond.finite() { Float::min(rcond, Re::<T>::one()) } else { Re::<T>::zero() })
}

/// A right-hand side for A: one column whose rows lie as A's do.
struct Column<T> {
    x: DistMatrix<T>,
    /// Rows of `x` before A's first, within a block.
    first: usize,
}

impl<T: Scalar> Column<T> {
    fn new(a: &DistRef<'_, T>) -> Result<Self> {
        let (rows, at) = (a.row_axis(), a.row_range());
        let first = at.start % rows.nb;
        let desc = Desc::new(first + at.len(), 1, rows.nb, 1).with_source(rows.owner(at.start.into()), 0);
        Ok(Column { x: DistMatrix::zeros(a.grid(), desc)?, first })
    }

    /// x := what `solve` makes of it; all ranks have the whole of x.
    fn solve(
        &mut self,
        x: &mut [T],
        solve: impl FnOnce(crate::dist::DistMut<'_, T>) -> Result<()>,
    ) -> Result<()> {
        let (rows, grid, first) = (self.x.rows(), Arc::clone(self.x.grid()), self.first);
        let row_of = |p: usize, local: usize| rows.global(Local::new(local), p).0;
        let myrow = grid.myrow();
        let mut local = self.x.local_mut();
        for j in 0..local.ncols() {
            for i in 0..local.nrows() {
                let value = row_of(myrow, i).checked_sub(first).map_or(T::zero(), |row| x[row]);
                local[(i, j)] = value;
            }
        }
        solve(self.x.view_mut().sub(first..first + x.len(), 0..1))?;
        let local = self.x.local();
        let mine: Vec<T> =
            (0..local.ncols()).flat_map(|j| (0..local.nrows()).map(move |i| local[(i, j)])).collect();
        let parts = grid.all().all_gather_var(&mine)?;
        spread(&grid, rows, first, &parts, x);
        Ok(())
    }
}

/// Puts the parts of a column, one a rank of the grid, where they belong.
fn spread<T: Scalar>(grid: &Grid, rows: Axis<Row>, first: usize, parts: &[Vec<T>], x: &mut [T]) {
    for (rank, part) in parts.iter().enumerate() {
        let p = grid.coords_of(rank).0;
        for (i, &value) in part.iter().enumerate() {
            if let Some(row) = rows.global(Local::new(i), p).0.checked_sub(first) {
                x[row] = value;
            }
        }
    }
}

/// Which product the estimator asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// x := B·x.
    Plain,
    /// x := Bᴴ·x.
    Adjoint,
}

/// A lower bound, and mostly more than a third, of ‖B‖₁ of an n × n matrix B, n > 0, that is known by its
/// products with vectors: LAPACK's `xLACN2`. Not finite if a product is not.
///
/// The largest ‖B·x‖₁ over ‖x‖₁ = 1 is at a corner eⱼ; where a step uphill from here leads, Bᴴ·sign(B·x) says.
/// The last try, a vector of alternating signs, meets matrices that are built to mislead the others.
fn norm_one<T: Scalar>(n: usize, mut product: impl FnMut(Step, &mut [T]) -> Result<()>) -> Result<Re<T>> {
    const MOST_STEPS: usize = 5;
    let real = |x: f64| T::from_real(Re::<T>::from_f64(x));
    let mut x = vec![real(1.0 / n as f64); n];
    product(Step::Plain, &mut x)?;
    let mut estimate = sum(&x);
    if n == 1 || !estimate.finite() {
        return Ok(estimate);
    }
    let mut signs = to_signs(&mut x);
    product(Step::Adjoint, &mut x)?;
    let mut corner = largest(&x);
    for step in 2..=MOST_STEPS {
        x.fill(T::zero());
        x[corner] = T::one();
        product(Step::Plain, &mut x)?;
        let before = std::mem::replace(&mut estimate, sum(&x));
        if !estimate.finite() {
            return Ok(estimate);
        }
        if estimate <= before {
            estimate = before;
            break;
        }
        let next = to_signs(&mut x);
        // Of real matrices: the same signs lead to the same corner.
        let repeated = !T::IS_COMPLEX && next == signs;
        signs = next;
        if repeated || step == MOST_STEPS {
            break;
        }
        product(Step::Adjoint, &mut x)?;
        let uphill = largest(&x);
        if x[corner].modulus() == x[uphill].modulus() {
            break;
        }
        corner = uphill;
    }
    for (i, x) in x.iter_mut().enumerate() {
        let size = 1.0 + i as f64 / (n - 1) as f64;
        *x = real(if i % 2 == 0 { size } else { -size });
    }
    product(Step::Plain, &mut x)?;
    let alternative = sum(&x) * Re::<T>::from_f64(2.0 / (3.0 * n as f64));
    Ok(if alternative <= estimate { estimate } else { alternative })
}

fn sum<T: Scalar>(x: &[T]) -> Re<T> {
    x.iter().fold(Re::<T>::zero(), |sum, x| sum + x.modulus())
}

/// x := x / |x|, element by element, 1 for a zero. Returns what they are.
fn to_signs<T: Scalar>(x: &mut [T]) -> Vec<T> {
    for x in x.iter_mut() {
        let size = x.modulus();
        *x = if size > Re::<T>::min_positive_value() { *x / T::from_real(size) } else { T::one() };
    }
    x.to_vec()
}

/// Index of the first element of largest modulus.
fn largest<T: Scalar>(x: &[T]) -> usize {
    let mut at = 0;
    for (i, value) in x.iter().enumerate() {
        if value.modulus() > x[at].modulus() {
            at = i;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmen_kernels::{Mat, c64};

    /// ‖B‖₁ as the estimator finds it, and how many products that took.
    fn estimated<T: Scalar>(b: &Mat<T>) -> (Re<T>, usize) {
        let n = b.nrows();
        let mut products = 0;
        let norm = norm_one(n, |step, x: &mut [T]| {
            products += 1;
            let y: Vec<T> = (0..n)
                .map(|i| {
                    let terms = (0..n).map(|j| match step {
                        Step::Plain => b[(i, j)] * x[j],
                        Step::Adjoint => b[(j, i)].conjugate() * x[j],
                    });
                    terms.fold(T::zero(), |sum, term| sum + term)
                })
                .collect();
            x.copy_from_slice(&y);
            Ok(())
        });
        (norm.unwrap(), products)
    }

    #[test]
    fn norms_that_are_known() {
        assert_eq!(estimated(&Mat::<f64>::from_fn(1, 1, |_, _| -3.0)), (3.0, 1));
        let identity = estimated(&Mat::<f64>::from_fn(9, 9, |i, j| f64::from(i == j))).0;
        assert!((identity - 1.0).abs() < 1e-15, "{identity}");
        // The largest column is found wherever it is.
        for at in 0..7 {
            let b = Mat::<f64>::from_fn(7, 7, |i, j| if j == at { 1.0 + i as f64 } else { 0.5 });
            assert_eq!(estimated(&b).0, 28.0);
        }
        let b = Mat::<c64>::from_fn(
            5,
            5,
            |i, j| if j == 3 { c64::new(0.0, 2.0) } else { c64::from_real(i as f64) },
        );
        assert_eq!(estimated(&b).0, 10.0);
    }

    /// Signs that cancel in the first product hide a large column from the walk; the alternating vector sees it.
    #[test]
    fn a_matrix_that_hides_its_size() {
        let n = 8;
        let b = Mat::<f64>::from_fn(n, n, |_, j| if j % 2 == 0 { 100.0 } else { -100.0 });
        let (norm, products) = estimated(&b);
        assert!((800.0 / 3.0..=800.0).contains(&norm), "{norm}");
        assert!(products <= 11, "{products} products");
    }

    #[test]
    fn overflow_is_passed_on() {
        assert!(!estimated(&Mat::<f64>::from_fn(3, 3, |_, _| f64::MAX)).0.finite());
        assert!(
            !estimated(&Mat::<f64>::from_fn(3, 3, |_, j| if j == 2 { f64::NAN } else { 1.0 })).0.finite()
        );
    }
}
