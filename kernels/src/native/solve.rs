//! Triangular solves on packed strips: L·X = B in place, a few rows of X in registers at a time.
//!
//! Row i is B's row less Σₚ l\[i,p\]·x\[p\], p ascending, one fused step each (then divided by the
//! diagonal): the same whatever the number of strips.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Micro`")]

use num_complex::Complex;

use super::micro::{Lower, Micro};
use super::pack::{Source, pack};
use super::simd::{Elem, Simd, prefetch_l2};
use crate::Scalar;

/// Vectors of columns that are solved together.
const COLUMNS: usize = 3;

/// Packs B (k × n) into strips and solves with them, a few at a time: while some are solved, the columns of B that come next, and
/// where they go, are on their way into the caches.
///
/// # Safety
/// Inside `enter` of K's `Arch`; `l` is of order k, `b` valid for n columns of k elements, `out` for ⌈n/NR⌉·NR·k.
#[inline(always)]
pub(super) unsafe fn into<T: Scalar, K: Micro<T>>(
    l: Lower<T>,
    b: Source<T>,
    n: usize,
    k: usize,
    out: *mut T,
) {
    let columns = COLUMNS * K::NR;
    for first in (0..n).step_by(columns) {
        let here = columns.min(n - first);
        let strips = out.add(first * k);
        pack::<T, K, false>(b.from(first, 0), here, k, strips);
        let next = b.from(first + columns, 0);
        let soon = columns.min(n - first - here);
        let goes = strips.wrapping_add(columns * k);
        K::solve(l, k, true, strips, here.div_ceil(K::NR), |i, rows| {
            for j in 0..soon {
                prefetch_l2(next.at(j, i));
            }
            let bytes = soon * rows * size_of::<T>();
            for line in 0..bytes.div_ceil(64) {
                prefetch_l2(goes.wrapping_add(soon * i).wrapping_byte_add(64 * line));
            }
        });
    }
}

/// Strips of `NR` reals a row. `ahead` is called for each few rows, with the first and their number, while those of the first
/// columns are computed.
#[inline(always)]
pub(super) unsafe fn real<R: Elem, W: Simd<R>, const NR: usize, const RB: usize>(
    l: Lower<R>,
    k: usize,
    unit: bool,
    x: *mut R,
    strips: usize,
    mut ahead: impl FnMut(usize, usize),
) {
    let per_strip = NR / W::LANES;
    let vectors = strips * per_strip;
    let place = |v: usize| x.wrapping_add(v / per_strip * NR * k + v % per_strip * W::LANES);
    let mut v = 0;
    while v + COLUMNS <= vectors {
        let mut x = [x; COLUMNS];
        for s in 0..COLUMNS {
            x[s] = place(v + s);
        }
        real_columns::<R, W, NR, RB, COLUMNS>(l, k, unit, x, |i, rows| {
            if v == 0 {
                ahead(i, rows);
            }
        });
        v += COLUMNS;
    }
    while v < vectors {
        real_columns::<R, W, NR, RB, 1>(l, k, unit, [place(v)], |i, rows| {
            if v == 0 {
                ahead(i, rows);
            }
        });
        v += 1;
    }
}

#[inline(always)]
unsafe fn real_columns<R: Elem, W: Simd<R>, const NR: usize, const RB: usize, const V: usize>(
    l: Lower<R>,
    k: usize,
    unit: bool,
    x: [*mut R; V],
    mut ahead: impl FnMut(usize, usize),
) {
    let mut i = 0;
    while i + RB <= k {
        ahead(i, RB);
        real_rows::<R, W, NR, RB, V>((l.row(i, RB), l.step), i, unit, x);
        i += RB;
    }
    while i < k {
        ahead(i, 1);
        real_rows::<R, W, NR, 1, V>((l.row(i, RB), l.step), i, unit, x);
        i += 1;
    }
}

#[inline(always)]
unsafe fn real_rows<R: Elem, W: Simd<R>, const NR: usize, const ROWS: usize, const V: usize>(
    (l, step): (*const R, usize),
    i: usize,
    unit: bool,
    x: [*mut R; V],
) {
    let mut acc = [[W::splat(R::default()); V]; ROWS];
    for r in 0..ROWS {
        for s in 0..V {
            acc[r][s] = W::load(x[s].add((i + r) * NR));
        }
    }
    for p in 0..i {
        let lp = l.add(p * step);
        let mut xp = [W::splat(R::default()); V];
        for s in 0..V {
            xp[s] = W::load(x[s].add(p * NR));
        }
        for r in 0..ROWS {
            let lr = W::splat(*lp.add(r));
            for s in 0..V {
                acc[r][s] = W::fnma(lr, xp[s], acc[r][s]);
            }
        }
    }
    // Written out, because the compiler keeps `acc` in registers only if it unrolls all of this.
    macro_rules! eliminate {
        ($($r:literal)*) => {$(
            if $r < ROWS {
                let lp = l.add((i + $r) * step);
                if !unit {
                    let d = W::splat(*lp.add($r));
                    for s in 0..V {
                        acc[$r][s] = W::div(acc[$r][s], d);
                    }
                }
                for below in $r + 1..ROWS {
                    let lr = W::splat(*lp.add(below));
                    for s in 0..V {
                        acc[below][s] = W::fnma(lr, acc[$r][s], acc[below][s]);
                    }
                }
                for s in 0..V {
                    W::store(x[s].add((i + $r) * NR), acc[$r][s]);
                }
            }
        )*};
    }
    const { assert!(ROWS <= 8) };
    eliminate!(0 1 2 3 4 5 6 7);
}

/// Strips of `NR` complex numbers a row; in registers real and imaginary parts are apart. `ahead` as for [`real`].
#[inline(always)]
pub(super) unsafe fn split<R: Elem, W: Simd<R>, const NR: usize, const RB: usize>(
    l: Lower<Complex<R>>,
    k: usize,
    unit: bool,
    x: *mut Complex<R>,
    strips: usize,
    mut ahead: impl FnMut(usize, usize),
) where
    Complex<R>: Scalar<Real = R>,
{
    let per_strip = NR / W::LANES;
    for v in 0..strips * per_strip {
        let x = x.add(v / per_strip * NR * k + v % per_strip * W::LANES).cast::<R>();
        let mut i = 0;
        while i + RB <= k {
            if v == 0 {
                ahead(i, RB);
            }
            split_rows::<R, W, NR, RB>((l.row(i, RB), l.step), i, unit, x);
            i += RB;
        }
        while i < k {
            if v == 0 {
                ahead(i, 1);
            }
            split_rows::<R, W, NR, 1>((l.row(i, RB), l.step), i, unit, x);
            i += 1;
        }
    }
}

#[inline(always)]
unsafe fn split_rows<R: Elem, W: Simd<R>, const NR: usize, const ROWS: usize>(
    (l, step): (*const Complex<R>, usize),
    i: usize,
    unit: bool,
    x: *mut R,
) where
    Complex<R>: Scalar<Real = R>,
{
    let zero = W::splat(<R as Default>::default());
    let mut acc = [(zero, zero); ROWS];
    for r in 0..ROWS {
        acc[r] = load_row::<R, W>(x.add((i + r) * 2 * NR));
    }
    for p in 0..i {
        let lp = l.add(p * step);
        let xp = load_row::<R, W>(x.add(p * 2 * NR));
        for r in 0..ROWS {
            acc[r] = subtract::<R, W>(*lp.add(r), xp, acc[r]);
        }
    }
    macro_rules! eliminate {
        ($($r:literal)*) => {$(
            if $r < ROWS {
                let lp = l.add((i + $r) * step);
                if !unit {
                    let d = crate::scalar::reciprocal(*lp.add($r));
                    let (re, im) = (W::splat(d.re), W::splat(d.im));
                    let (x, y) = acc[$r];
                    acc[$r] = (W::fnma(y, im, W::mul(x, re)), W::fma(y, re, W::mul(x, im)));
                }
                for below in $r + 1..ROWS {
                    acc[below] = subtract::<R, W>(*lp.add(below), acc[$r], acc[below]);
                }
                let row = x.add((i + $r) * 2 * NR);
                let (lo, hi) = W::zip(acc[$r].0, acc[$r].1);
                W::store(row, lo);
                W::store(row.add(W::LANES), hi);
            }
        )*};
    }
    const { assert!(ROWS <= 8) };
    eliminate!(0 1 2 3 4 5 6 7);
}

#[inline(always)]
unsafe fn load_row<R: Elem, W: Simd<R>>(row: *const R) -> (W::V, W::V) {
    W::unzip(W::load(row), W::load(row.add(W::LANES)))
}

/// c − l·x
#[inline(always)]
unsafe fn subtract<R: Elem, W: Simd<R>>(l: Complex<R>, x: (W::V, W::V), c: (W::V, W::V)) -> (W::V, W::V) {
    let (re, im) = (W::splat(l.re), W::splat(l.im));
    (W::fma(im, x.1, W::fnma(re, x.0, c.0)), W::fnma(im, x.0, W::fnma(re, x.1, c.1)))
}
