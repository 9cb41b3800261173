//! Solving linear systems: what a user of the library calls.

use fulmen_kernels::{Element, Op, Real, Scalar};

use crate::blas::norm::{self, require_finite};
use crate::dist::DistMatrix;
use crate::error::{Error, Result};
use crate::lapack::{LuFactors, LuOpts, Norm, Silent, gecon, getrf, getrs};
use crate::world::World;

/// P·A = L·U of a distributed matrix.
pub struct Lu<T: Scalar> {
    factors: DistMatrix<T>,
    told: LuFactors,
    /// ‖A‖₁ and ‖A‖∞.
    norms: [<T as Scalar>::Real; 2],
}

impl<T: Element> DistMatrix<T> {
    /// Factors this matrix with partial pivoting. Collective. See [`getrf`].
    ///
    /// # Errors
    /// [`Error::NonFinite`] names the first infinity or NaN of the matrix, in column order, the same on every
    /// grid; or a rank is lost, or memory is short. A singular matrix is no error: see [`Lu::info`].
    pub fn lu(self, world: &World) -> Result<Lu<T>> {
        self.lu_with(world, &LuOpts::default())
    }

    /// [`DistMatrix::lu`] with options. L is kept whatever they say.
    ///
    /// # Errors
    /// As [`DistMatrix::lu`].
    pub fn lu_with(mut self, world: &World, opts: &LuOpts) -> Result<Lu<T>> {
        require_finite(&self.view())?;
        let norms = [norm::one(&self.view())?, norm::inf(&self.view())?];
        let opts = LuOpts { keep_l: true, ..opts.clone() };
        let told = getrf(world.kernels::<T>(), world.team(), self.view_mut(), &opts, &mut Silent)?;
        Ok(Lu { factors: self, told, norms })
    }
}

impl<T: Element> Lu<T> {
    /// L below the diagonal (its ones are not stored) and U on and above it.
    pub fn factors(&self) -> &DistMatrix<T> {
        &self.factors
    }

    /// Row i was interchanged with row `ipiv()[i]`, i ascending; counted from 0.
    pub fn ipiv(&self) -> &[usize] {
        &self.told.ipiv
    }

    /// First column whose pivot is exactly zero, counted from 0 (LAPACK's INFO − 1); `None` if there is none
    /// and systems can be solved.
    pub fn info(&self) -> Option<usize> {
        self.told.info
    }

    /// Where this rank's time went.
    pub fn times(&self) -> &crate::lapack::PhaseTimes {
        &self.told.times
    }

    /// Solves A·X = B in place of B. Collective. See [`getrs`].
    ///
    /// # Errors
    /// [`Error::Argument`] when U is singular, A is not square, or B does not match it; or a rank is lost or
    /// memory is short.
    pub fn solve_in_place(&self, world: &World, b: &mut DistMatrix<T>) -> Result<()> {
        self.solve_op_in_place(world, Op::NoTrans, b)
    }

    /// Solves op(A)·X = B in place of B, where op(A) is A, Aᵀ or Aᴴ. Collective. See [`getrs`].
    ///
    /// # Errors
    /// As [`Lu::solve_in_place`].
    pub fn solve_op_in_place(&self, world: &World, op: Op, b: &mut DistMatrix<T>) -> Result<()> {
        if let Some(j) = self.told.info {
            return Err(Error::argument(
                "a",
                format!("U({j}, {j}) = 0"),
                "the matrix is singular",
                "look at Lu::info before solving; least squares or regularisation may be what is wanted",
            ));
        }
        getrs(world.kernels::<T>(), world.team(), op, &self.factors.view(), &self.told.ipiv, b.view_mut())
    }

    /// An estimate of 1 / (‖A‖·‖A⁻¹‖): 1 is the best condition, 0 is singular. About log₁₀ of it of a
    /// solution's digits are lost. Collective, the same on all ranks. See [`gecon`].
    ///
    /// # Errors
    /// [`Error::Argument`] when A is not square, or its norm overflows; or a rank is lost or memory is short.
    pub fn rcond(&self, world: &World, norm: Norm) -> Result<<T as Scalar>::Real> {
        let a_norm = self.norms[usize::from(norm == Norm::Inf)];
        let (a, ipiv) = (self.factors.view(), &self.told.ipiv);
        if self.told.info.is_some() && a.nrows() == a.ncols() {
            return Ok(num_traits::Zero::zero());
        }
        gecon(world.kernels::<T>(), world.team(), norm, &a, ipiv, a_norm)
    }

    /// Whether A is singular to working precision: its [`Lu::rcond`] in the 1-norm is below n times the unit
    /// roundoff, and no digit of a solution is certain, however small its residual. Collective.
    ///
    /// # Errors
    /// As [`Lu::rcond`].
    pub fn ill_conditioned(&self, world: &World) -> Result<bool> {
        type Re<T> = <T as Scalar>::Real;
        let limit = Re::<T>::from_f64(self.factors.nrows() as f64) * Re::<T>::UNIT_ROUNDOFF;
        Ok(self.factors.nrows() > 0 && self.rcond(world, Norm::One)? < limit)
    }
}
