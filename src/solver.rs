//! Solving linear systems: what a user of the library calls.

use fulmen_kernels::Element;

use crate::blas::norm::require_finite;
use crate::dist::DistMatrix;
use crate::error::{Error, Result};
use crate::lapack::{LuFactors, LuOpts, Silent, getrf, getrs};
use crate::world::World;

/// P·A = L·U of a distributed matrix.
pub struct Lu<T> {
    factors: DistMatrix<T>,
    told: LuFactors,
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
        let opts = LuOpts { keep_l: true, ..opts.clone() };
        let told = getrf(world.kernels::<T>(), world.team(), self.view_mut(), &opts, &mut Silent)?;
        Ok(Lu { factors: self, told })
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
        if let Some(j) = self.told.info {
            return Err(Error::argument(
                "a",
                format!("U({j}, {j}) = 0"),
                "the matrix is singular",
                "look at Lu::info before solving; least squares or regularisation may be what is wanted",
            ));
        }
        getrs(world.kernels::<T>(), world.team(), &self.factors.view(), &self.told.ipiv, b.view_mut())
    }
}
