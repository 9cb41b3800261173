//! Register kernels of the real types.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Micro`")]

use std::marker::PhantomData;

use super::column;
use super::micro::{Lower, Micro, TileJob};
use super::simd::{Arch, Elem, Simd, prefetch, prefetch_l2, prefetch_write};
use super::solve;
use crate::Scalar;

/// Tiles of `MV` vectors `S` by `NR` columns; strips are solved in vectors `W` (which divide `NR`),
/// `RB` rows at a time.
pub(super) struct RealTile<A, S, W, const MV: usize, const NR: usize, const RB: usize>(
    PhantomData<fn(A, S, W)>,
);

impl<A, S, W, const MV: usize, const NR: usize, const RB: usize> Clone for RealTile<A, S, W, MV, NR, RB> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<A, S, W, const MV: usize, const NR: usize, const RB: usize> Copy for RealTile<A, S, W, MV, NR, RB> {}

impl<R, A, S, W, const MV: usize, const NR: usize, const RB: usize> Micro<R> for RealTile<A, S, W, MV, NR, RB>
where
    R: Elem + Scalar<Real = R>,
    A: Arch,
    S: Simd<R>,
    W: Simd<R>,
{
    type Arch = A;
    const MR: usize = MV * S::LANES;
    const NR: usize = NR;
    const LR: usize = RB;
    const READS_COLUMNS: bool = true;

    #[inline(always)]
    unsafe fn tile<const AHEAD: bool>(job: TileJob<R>) {
        let mut acc = [[S::splat(R::default()); MV]; NR];
        let (mut a, mut b) = (job.a, job.b);
        let chunk = job.k / NR;
        for j in 0..NR {
            // A column of the next tile and some of what comes after this strip or sliver: spread, so as not to fill the
            // line-fill buffers.
            let c = job.next_c.wrapping_add(j * job.ldc);
            for line in 0..(Self::MR * size_of::<R>()).div_ceil(64) {
                prefetch_write(c.wrapping_byte_add(64 * line));
            }
            prefetch_write(c.wrapping_add(Self::MR - 1));
            for line in 0..job.next_lines {
                prefetch_l2(job.next.wrapping_byte_add(64 * (j * job.next_lines + line)));
            }
            steps::<R, S, MV, NR, AHEAD>(chunk, &mut a, job.a_step, &mut b, &mut acc);
        }
        steps::<R, S, MV, NR, AHEAD>(job.k - chunk * NR, &mut a, job.a_step, &mut b, &mut acc);

        if job.rows == Self::MR && job.cols == NR {
            let alpha = S::splat(job.alpha);
            for j in 0..NR {
                let c = job.c.add(j * job.ldc);
                for i in 0..MV {
                    let c = c.add(i * S::LANES);
                    let v =
                        if job.add { S::fma(alpha, acc[j][i], S::load(c)) } else { S::mul(alpha, acc[j][i]) };
                    S::store(c, v);
                }
            }
        } else {
            edge::<R, S, MV, NR>(&job, &acc);
        }
    }

    const SQUARE: usize = if S::TRANSPOSES && NR.is_multiple_of(S::LANES) { S::LANES } else { 0 };
    #[inline(always)]
    unsafe fn transpose(from: *const R, from_step: isize, to: *mut R, to_step: isize) {
        S::transpose(from, from_step, to, to_step);
    }
    #[inline(always)]
    unsafe fn put_a(sliver: *mut R, p: usize, i: usize, x: R) {
        *sliver.add(p * Self::MR + i) = x;
    }
    #[inline(always)]
    unsafe fn copy_a(sliver: *mut R, p: usize, run: *const R) {
        let column = sliver.add(p * Self::MR);
        for i in 0..MV {
            S::store(column.add(i * S::LANES), S::load(run.add(i * S::LANES)));
        }
    }
    #[inline(always)]
    unsafe fn solve(
        l: Lower<R>,
        k: usize,
        unit: bool,
        x: *mut R,
        strips: usize,
        ahead: impl FnMut(usize, usize),
    ) {
        solve::real::<R, W, NR, RB>(l, k, unit, x, strips, ahead);
    }
    #[inline(always)]
    unsafe fn column(
        cols: *mut R,
        lld: usize,
        m: usize,
        scale: Option<R>,
        u: *const R,
        np: usize,
    ) -> Option<usize> {
        column::real::<R, S>(cols, lld, m, scale, u, np)
    }
    #[inline(always)]
    unsafe fn scal(alpha: R, x: *mut R, n: usize) {
        for i in 0..n {
            *x.add(i) *= alpha;
        }
    }
}

/// How far ahead B is asked for. (A, too, gained nothing more.)
pub(super) const STEPS_AHEAD: usize = 8;

/// `k` steps of the tile's product.
#[inline(always)]
unsafe fn steps<R: Elem, S: Simd<R>, const MV: usize, const NR: usize, const AHEAD: bool>(
    k: usize,
    a: &mut *const R,
    a_step: usize,
    b: &mut *const R,
    acc: &mut [[S::V; MV]; NR],
) {
    let mut k = k;
    if let Some((mv, nr, at_once)) = S::BY_HAND
        && (mv, nr) == (MV, NR)
    {
        let by_hand = k / at_once * at_once;
        S::steps::<AHEAD>(by_hand, *a, a_step, *b, acc.as_mut_ptr().cast());
        *a = a.wrapping_add(by_hand * a_step);
        *b = b.wrapping_add(by_hand * NR);
        k -= by_hand;
    }
    for _ in 0..k {
        if a_step != MV * S::LANES {
            // A is not packed: the next sliver's part of this column, on a page that no prefetcher of
            // the hardware's will open.
            for line in 0..(MV * S::LANES * size_of::<R>()).div_ceil(64) {
                prefetch(a.wrapping_add(MV * S::LANES).wrapping_byte_add(64 * line));
            }
        }
        if AHEAD {
            for line in 0..(NR * size_of::<R>()).div_ceil(64) {
                prefetch(b.wrapping_add(STEPS_AHEAD * NR).wrapping_byte_add(64 * line));
            }
        }
        let mut av = [S::splat(R::default()); MV];
        for i in 0..MV {
            av[i] = S::load(a.add(i * S::LANES));
        }
        for j in 0..NR {
            let bj = S::splat(*b.add(j));
            for i in 0..MV {
                acc[j][i] = S::fma(av[i], bj, acc[j][i]);
            }
        }
        *a = a.wrapping_add(a_step);
        *b = b.wrapping_add(NR);
    }
}

/// Adds the part of a tile that exists: the same roundings as the whole tile's.
#[inline(always)]
unsafe fn edge<R: Elem, S: Simd<R>, const MV: usize, const NR: usize>(
    job: &TileJob<R>,
    acc: &[[S::V; MV]; NR],
) {
    let mut column = [R::default(); 64];
    for j in 0..NR {
        for i in 0..MV {
            S::store(column.as_mut_ptr().add(i * S::LANES), acc[j][i]);
        }
        if j < job.cols {
            let c = job.c.add(j * job.ldc);
            for i in 0..job.rows {
                let x = *column.as_ptr().add(i);
                *c.add(i) = if job.add { S::fma1(job.alpha, x, *c.add(i)) } else { job.alpha * x };
            }
        }
    }
}
