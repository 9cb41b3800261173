//! One column of the panel in one pass: scale the column before, bring this one up to date, find its
//! largest element.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Micro`")]

use num_complex::Complex;

use super::simd::{Elem, Simd};
use super::split::fma1;
use crate::Scalar;

/// Vectors that are worked on together, to hide the latency of their sums.
const GROUP: usize = 4;

/// The first largest magnitude so far.
struct Largest {
    bits: u64,
    at: Option<usize>,
}

impl Largest {
    fn new() -> Self {
        Largest { bits: 0, at: None }
    }

    /// Looks at one more element. After a NaN nothing is larger.
    #[inline(always)]
    fn see<R: Elem>(&mut self, x: R, at: usize) {
        let bits = if x.is_nan() { u64::MAX } else { x.magnitude() };
        if bits > self.bits || self.at.is_none() {
            (self.bits, self.at) = (bits, Some(at));
        }
    }
}

/// See [`crate::Kernels::panel_column`].
#[inline(always)]
pub(super) unsafe fn real<R: Elem + Scalar<Real = R>, S: Simd<R>>(
    cols: *mut R,
    lld: usize,
    m: usize,
    scale: Option<R>,
    u: *const R,
    np: usize,
) -> Option<usize> {
    let c = cols.wrapping_add(np * lld);
    let mut largest = Largest::new();
    let mut limit = S::splat(<R as Default>::default());
    let rows = GROUP * S::LANES;
    let mut i = 0;
    while i + rows <= m {
        let c = c.add(i);
        let mut acc = [limit; GROUP];
        for g in 0..GROUP {
            acc[g] = S::load(c.add(g * S::LANES));
        }
        if np > 0 {
            for p in 0..np - 1 {
                let (col, up) = (cols.add(p * lld + i), S::splat(*u.add(p)));
                for g in 0..GROUP {
                    acc[g] = S::fnma(S::load(col.add(g * S::LANES)), up, acc[g]);
                }
            }
            let (col, up) = (cols.add((np - 1) * lld + i), S::splat(*u.add(np - 1)));
            let mut last = acc;
            for g in 0..GROUP {
                last[g] = S::load(col.add(g * S::LANES));
            }
            if let Some(scale) = scale {
                let scale = S::splat(scale);
                for g in 0..GROUP {
                    last[g] = S::mul(last[g], scale);
                    S::store(col.add(g * S::LANES), last[g]);
                }
            }
            for g in 0..GROUP {
                acc[g] = S::fnma(last[g], up, acc[g]);
                S::store(c.add(g * S::LANES), acc[g]);
            }
        }
        let mut max = S::splat(<R as Default>::default());
        for g in 0..GROUP {
            max = S::max_magnitude(max, acc[g]);
        }
        if largest.at.is_none() || S::any_above(max, limit) {
            for r in 0..rows {
                largest.see(*c.add(r), i + r);
            }
            limit = S::splat(R::of_bits(largest.bits));
        }
        i += rows;
    }
    while i < m {
        let mut x = *c.add(i);
        for p in 0..np {
            let l = cols.add(p * lld + i);
            if let (true, Some(scale)) = (p + 1 == np, scale) {
                *l *= scale;
            }
            x = S::fma1(-*l, *u.add(p), x);
        }
        if np > 0 {
            *c.add(i) = x;
        }
        largest.see(x, i);
        i += 1;
    }
    largest.at
}

/// The same for complex elements, whose size is |re| + |im|.
#[inline(always)]
pub(super) unsafe fn split<R: Elem, S: Simd<R>>(
    cols: *mut Complex<R>,
    lld: usize,
    m: usize,
    scale: Option<Complex<R>>,
    u: *const Complex<R>,
    np: usize,
) -> Option<usize>
where
    Complex<R>: Scalar<Real = R>,
{
    let c = cols.wrapping_add(np * lld);
    if let (true, Some(scale)) = (np > 0, scale) {
        let last = cols.add((np - 1) * lld);
        for i in 0..m {
            *last.add(i) *= scale;
        }
    }
    // Some rows at a time, so that they stay in L1 while the columns pass.
    const ROWS: usize = 256;
    let mut largest = Largest::new();
    for start in (0..m).step_by(ROWS) {
        let end = (start + ROWS).min(m);
        for p in 0..np {
            let (col, up) = (cols.add(p * lld), *u.add(p));
            for i in start..end {
                *c.add(i) = fma1::<R, S>(-*col.add(i), up, *c.add(i));
            }
        }
        for i in start..end {
            largest.see((*c.add(i)).abs1(), i);
        }
    }
    largest.at
}
