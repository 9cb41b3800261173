//! Register kernels of the complex types.
//!
//! A packed column of A holds its real parts, then its imaginary parts, so that a product is four real
//! ones on whole vectors. Each element is accumulated as [`crate::Scalar::fused_mul_add`] says.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Micro`")]

use std::marker::PhantomData;

use num_complex::Complex;

use super::column;
use super::micro::{Lower, Micro, TileJob};
use super::real::STEPS_AHEAD;
use super::simd::{Arch, Elem, Simd, prefetch, prefetch_l2, prefetch_write};
use super::solve;
use crate::Scalar;

/// Tiles of `MV` vectors `S` by `NR` columns; strips are solved in vectors `W` (which divide `NR`),
/// `RB` rows at a time.
pub(super) struct SplitTile<A, S, W, const MV: usize, const NR: usize, const RB: usize>(
    PhantomData<fn(A, S, W)>,
);

impl<A, S, W, const MV: usize, const NR: usize, const RB: usize> Clone for SplitTile<A, S, W, MV, NR, RB> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A, S, W, const MV: usize, const NR: usize, const RB: usize> Copy for SplitTile<A, S, W, MV, NR, RB> {}

/// One vector of complex numbers.
type Pair<V> = (V, V);

impl<R, A, S, W, const MV: usize, const NR: usize, const RB: usize> Micro<Complex<R>>
    for SplitTile<A, S, W, MV, NR, RB>
where
    R: Elem,
    Complex<R>: Scalar<Real = R>,
    A: Arch,
    S: Simd<R>,
    W: Simd<R>,
{
    type Arch = A;
    const MR: usize = MV * S::LANES;
    const NR: usize = NR;
    const LR: usize = RB;
    const READS_COLUMNS: bool = false;

    #[inline(always)]
    unsafe fn tile<const AHEAD: bool>(job: TileJob<Complex<R>>) {
        let zero = S::splat(<R as Default>::default());
        let mut acc = [[(zero, zero); MV]; NR];
        let (mut a, mut b) = (job.a.cast::<R>(), job.b.cast::<R>());
        let chunk = job.k / NR;
        for j in 0..NR {
            let c = job.next_c.wrapping_add(j * job.ldc);
            for line in 0..=(Self::MR * 2 * size_of::<R>()) / 64 {
                prefetch_write(c.wrapping_byte_add(64 * line));
            }
            for line in 0..job.next_lines {
                prefetch_l2(job.next.wrapping_byte_add(64 * (j * job.next_lines + line)));
            }
            steps::<R, S, MV, NR, AHEAD>(chunk, &mut a, 2 * job.a_step, &mut b, &mut acc);
        }
        steps::<R, S, MV, NR, AHEAD>(job.k - chunk * NR, &mut a, 2 * job.a_step, &mut b, &mut acc);

        if job.rows == Self::MR && job.cols == NR {
            let (alpha_re, alpha_im) = (S::splat(job.alpha.re), S::splat(job.alpha.im));
            for j in 0..NR {
                let c = job.c.add(j * job.ldc).cast::<R>();
                for i in 0..MV {
                    let (lo, hi) = (c.add(2 * i * S::LANES), c.add((2 * i + 1) * S::LANES));
                    let (x_re, x_im) = acc[j][i];
                    let (mut re, mut im) = if job.add {
                        let (re, im) = S::unzip(S::load(lo), S::load(hi));
                        (S::fma(alpha_re, x_re, re), S::fma(alpha_re, x_im, im))
                    } else {
                        (S::mul(alpha_re, x_re), S::mul(alpha_re, x_im))
                    };
                    re = S::fnma(alpha_im, x_im, re);
                    im = S::fma(alpha_im, x_re, im);
                    let (x, y) = S::zip(re, im);
                    S::store(lo, x);
                    S::store(hi, y);
                }
            }
        } else {
            edge::<R, S, MV, NR>(&job, &acc);
        }
    }

    const SQUARE: usize = 0;
    #[inline(always)]
    unsafe fn transpose(_: *const Complex<R>, _: isize, _: *mut Complex<R>, _: isize) {
        unreachable!("there are no squares");
    }
    #[inline(always)]
    unsafe fn put_a(sliver: *mut Complex<R>, p: usize, i: usize, x: Complex<R>) {
        let column = sliver.add(p * Self::MR).cast::<R>();
        *column.add(i) = x.re;
        *column.add(Self::MR + i) = x.im;
    }
    #[inline(always)]
    unsafe fn copy_a(sliver: *mut Complex<R>, p: usize, run: *const Complex<R>) {
        let (column, run) = (sliver.add(p * Self::MR).cast::<R>(), run.cast::<R>());
        for i in 0..MV {
            let at = run.add(2 * i * S::LANES);
            let (re, im) = S::unzip(S::load(at), S::load(at.add(S::LANES)));
            S::store(column.add(i * S::LANES), re);
            S::store(column.add(Self::MR + i * S::LANES), im);
        }
    }
    #[inline(always)]
    unsafe fn solve(
        l: Lower<Complex<R>>,
        k: usize,
        unit: bool,
        x: *mut Complex<R>,
        strips: usize,
        ahead: impl FnMut(usize, usize),
    ) {
        solve::split::<R, W, NR, RB>(l, k, unit, x, strips, ahead);
    }
    #[inline(always)]
    unsafe fn column(
        cols: *mut Complex<R>,
        lld: usize,
        m: usize,
        scale: Option<Complex<R>>,
        u: *const Complex<R>,
        np: usize,
    ) -> Option<usize> {
        column::split::<R, S>(cols, lld, m, scale, u, np)
    }
    #[inline(always)]
    unsafe fn scal(alpha: Complex<R>, x: *mut Complex<R>, n: usize) {
        for i in 0..n {
            *x.add(i) *= alpha;
        }
    }
}

/// [`crate::Scalar::fused_mul_add`] with this instruction set's own fused step.
#[inline(always)]
pub(super) unsafe fn fma1<R: Elem, S: Simd<R>>(a: Complex<R>, b: Complex<R>, c: Complex<R>) -> Complex<R> {
    Complex {
        re: S::fma1(-a.im, b.im, S::fma1(a.re, b.re, c.re)),
        im: S::fma1(a.im, b.re, S::fma1(a.re, b.im, c.im)),
    }
}

/// `k` steps of the tile's product; `a_step` counts reals.
#[inline(always)]
unsafe fn steps<R: Elem, S: Simd<R>, const MV: usize, const NR: usize, const AHEAD: bool>(
    k: usize,
    a: &mut *const R,
    a_step: usize,
    b: &mut *const R,
    acc: &mut [[Pair<S::V>; MV]; NR],
) {
    let mr = MV * S::LANES;
    for _ in 0..k {
        if AHEAD {
            for line in 0..(2 * NR * size_of::<R>()).div_ceil(64) {
                prefetch(b.wrapping_add(STEPS_AHEAD * 2 * NR).wrapping_byte_add(64 * line));
            }
        }
        let zero = S::splat(<R as Default>::default());
        let mut av = [(zero, zero); MV];
        for i in 0..MV {
            av[i] = (S::load(a.add(i * S::LANES)), S::load(a.add(mr + i * S::LANES)));
        }
        for j in 0..NR {
            let (re, im) = (S::splat(*b.add(2 * j)), S::splat(*b.add(2 * j + 1)));
            for i in 0..MV {
                let (x, y) = &mut acc[j][i];
                *x = S::fnma(av[i].1, im, S::fma(av[i].0, re, *x));
                *y = S::fma(av[i].1, re, S::fma(av[i].0, im, *y));
            }
        }
        *a = a.wrapping_add(a_step);
        *b = b.wrapping_add(2 * NR);
    }
}

/// Adds the part of a tile that exists: the same roundings as the whole tile's.
#[inline(always)]
unsafe fn edge<R: Elem, S: Simd<R>, const MV: usize, const NR: usize>(
    job: &TileJob<Complex<R>>,
    acc: &[[Pair<S::V>; MV]; NR],
) where
    Complex<R>: Scalar<Real = R>,
{
    let zero = <R as Default>::default();
    let (mut re, mut im) = ([zero; 64], [zero; 64]);
    for j in 0..NR {
        for i in 0..MV {
            S::store(re.as_mut_ptr().add(i * S::LANES), acc[j][i].0);
            S::store(im.as_mut_ptr().add(i * S::LANES), acc[j][i].1);
        }
        if j < job.cols {
            let c = job.c.add(j * job.ldc);
            for i in 0..job.rows {
                let x = Complex { re: *re.as_ptr().add(i), im: *im.as_ptr().add(i) };
                let c = c.add(i);
                *c = if job.add {
                    fma1::<R, S>(job.alpha, x, *c)
                } else {
                    let (ar, ai) = (job.alpha.re, job.alpha.im);
                    Complex { re: S::fma1(-ai, x.im, ar * x.re), im: S::fma1(ai, x.re, ar * x.im) }
                };
            }
        }
    }
}
