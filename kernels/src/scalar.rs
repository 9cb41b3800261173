//! The four element types of BLAS and LAPACK: `f32`, `f64`, [`c32`], [`c64`].

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::Neg;

/// Single-precision complex, laid out as Fortran's `COMPLEX`.
#[allow(non_camel_case_types, reason = "the field's name for it")]
pub type c32 = num_complex::Complex<f32>;
/// Double-precision complex, laid out as Fortran's `COMPLEX*16`.
#[allow(non_camel_case_types, reason = "the field's name for it")]
pub type c64 = num_complex::Complex<f64>;

/// A real type: `f32` or `f64`.
pub trait Real: Scalar<Real = Self> + PartialOrd + num_traits::Float + Sum {
    /// Unit roundoff as LAPACK means it: half the gap between 1 and the next number (2⁻⁵³ for `f64`).
    const UNIT_ROUNDOFF: Self;

    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// This value in double precision (exact).
    fn to_f64(self) -> f64;
}

/// An element of a matrix.
pub trait Scalar:
    Copy
    + Default
    + PartialEq
    + Debug
    + Display
    + Send
    + Sync
    + 'static
    + bytemuck::Pod
    + num_traits::NumAssign
    + Neg<Output = Self>
    + faer::traits::ComplexField
    + crate::HasNative
{
    /// The type of its absolute value.
    type Real: Real;
    /// BLAS's letter: `s`, `d`, `c` or `z`.
    const LETTER: char;
    /// Whether this is a complex type.
    const IS_COMPLEX: bool;

    /// `re + 0i`.
    fn from_real(re: <Self as Scalar>::Real) -> Self;
    /// `re + im·i`; `im` is dropped by the real types.
    fn from_parts(re: <Self as Scalar>::Real, im: <Self as Scalar>::Real) -> Self;
    /// Real part.
    fn re(self) -> <Self as Scalar>::Real;
    /// Imaginary part, 0 for the real types.
    fn im(self) -> <Self as Scalar>::Real;
    /// Complex conjugate.
    fn conjugate(self) -> Self;
    /// Modulus.
    fn modulus(self) -> <Self as Scalar>::Real;
    /// |re| + |im|: the size by which BLAS's `iXamax`, and so LAPACK's pivoting, compares.
    fn abs1(self) -> <Self as Scalar>::Real;
    /// Neither infinite nor NaN in any part.
    fn finite(self) -> bool;
    /// `self·b + c`: one rounding for the real types; for complex, re then im, each two fused steps
    /// in a fixed order.
    fn fused_mul_add(self, b: Self, c: Self) -> Self;
}

/// 1/x; complex by Smith (1962, Algorithm 116), so that nothing overflows on the way.
pub(crate) fn reciprocal<T: Scalar>(x: T) -> T {
    let (re, im) = (x.re(), x.im());
    let one = <<T as Scalar>::Real as num_traits::One>::one();
    if !T::IS_COMPLEX {
        return T::from_real(one / re);
    }
    let abs = <<T as Scalar>::Real as num_traits::Float>::abs;
    if abs(re) >= abs(im) {
        let ratio = im / re;
        let d = re + im * ratio;
        T::from_parts(one / d, -ratio / d)
    } else {
        let ratio = re / im;
        let d = re * ratio + im;
        T::from_parts(ratio / d, -one / d)
    }
}

macro_rules! real {
    ($t:ty, $letter:literal, $roundoff:expr) => {
        impl Real for $t {
            const UNIT_ROUNDOFF: Self = $roundoff;
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
        }
        impl Scalar for $t {
            type Real = $t;
            const LETTER: char = $letter;
            const IS_COMPLEX: bool = false;
            fn from_real(re: $t) -> Self {
                re
            }
            fn from_parts(re: $t, _im: $t) -> Self {
                re
            }
            fn re(self) -> $t {
                self
            }
            fn im(self) -> $t {
                0.0
            }
            fn conjugate(self) -> Self {
                self
            }
            fn modulus(self) -> $t {
                <$t>::abs(self)
            }
            #[inline]
            fn abs1(self) -> $t {
                <$t>::abs(self)
            }
            #[inline]
            fn finite(self) -> bool {
                <$t>::is_finite(self)
            }
            #[inline]
            fn fused_mul_add(self, b: Self, c: Self) -> Self {
                <$t>::mul_add(self, b, c)
            }
        }
    };
}
real!(f32, 's', f32::EPSILON / 2.0);
real!(f64, 'd', f64::EPSILON / 2.0);

macro_rules! complex {
    ($t:ty, $r:ty, $letter:literal) => {
        impl Scalar for $t {
            type Real = $r;
            const LETTER: char = $letter;
            const IS_COMPLEX: bool = true;
            fn from_real(re: $r) -> Self {
                Self::new(re, 0.0)
            }
            fn from_parts(re: $r, im: $r) -> Self {
                Self::new(re, im)
            }
            fn re(self) -> $r {
                self.re
            }
            fn im(self) -> $r {
                self.im
            }
            fn conjugate(self) -> Self {
                self.conj()
            }
            fn modulus(self) -> $r {
                self.norm()
            }
            #[inline]
            fn abs1(self) -> $r {
                self.re.abs() + self.im.abs()
            }
            #[inline]
            fn finite(self) -> bool {
                self.re.is_finite() && self.im.is_finite()
            }
            #[inline]
            fn fused_mul_add(self, b: Self, c: Self) -> Self {
                Self::new(
                    self.im.mul_add(-b.im, self.re.mul_add(b.re, c.re)),
                    self.im.mul_add(b.re, self.re.mul_add(b.im, c.im)),
                )
            }
        }
    };
}
complex!(c32, f32, 'c');
complex!(c64, f64, 'z');
