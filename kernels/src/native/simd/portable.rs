//! Plain arrays, for CPUs that no other module knows. The compiler makes vectors of them where it can.
//!
//! A product and its sum are rounded separately: without the instruction a fused step is a library call.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Simd`")]

use super::{Arch, Elem, Simd};

/// Whatever the target's baseline is.
#[derive(Clone, Copy)]
pub(in crate::native) struct Portable;

impl Arch for Portable {
    #[inline(always)]
    unsafe fn enter<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
}

/// `N` elements.
#[derive(Clone, Copy)]
pub(in crate::native) struct Array<const N: usize>;

impl<R: Elem, const N: usize> Simd<R> for Array<N> {
    type V = [R; N];
    const LANES: usize = N;

    #[inline(always)]
    unsafe fn splat(x: R) -> [R; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(p: *const R) -> [R; N] {
        p.cast::<[R; N]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut R, v: [R; N]) {
        p.cast::<[R; N]>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn mul(a: [R; N], b: [R; N]) -> [R; N] {
        let mut r = a;
        for i in 0..N {
            r[i] *= b[i];
        }
        r
    }
    #[inline(always)]
    unsafe fn div(a: [R; N], b: [R; N]) -> [R; N] {
        let mut r = a;
        for i in 0..N {
            r[i] /= b[i];
        }
        r
    }
    #[inline(always)]
    unsafe fn fma(a: [R; N], b: [R; N], c: [R; N]) -> [R; N] {
        let mut r = c;
        for i in 0..N {
            r[i] += a[i] * b[i];
        }
        r
    }
    #[inline(always)]
    unsafe fn fnma(a: [R; N], b: [R; N], c: [R; N]) -> [R; N] {
        let mut r = c;
        for i in 0..N {
            r[i] -= a[i] * b[i];
        }
        r
    }
    #[inline(always)]
    unsafe fn fma1(a: R, b: R, c: R) -> R {
        a * b + c
    }
    #[inline(always)]
    unsafe fn max_magnitude(acc: [R; N], v: [R; N]) -> [R; N] {
        let mut r = acc;
        for i in 0..N {
            let v = v[i].magnitude();
            if v > acc[i].magnitude() {
                r[i] = R::of_bits(v);
            }
        }
        r
    }
    #[inline(always)]
    unsafe fn any_above(v: [R; N], w: [R; N]) -> bool {
        let mut any = false;
        for i in 0..N {
            any |= v[i].magnitude() > w[i].magnitude();
        }
        any
    }
    #[inline(always)]
    unsafe fn zip(re: [R; N], im: [R; N]) -> ([R; N], [R; N]) {
        let mut both = [re, im];
        for i in 0..N {
            both[2 * i / N][2 * i % N] = re[i];
            both[(2 * i + 1) / N][(2 * i + 1) % N] = im[i];
        }
        (both[0], both[1])
    }
    #[inline(always)]
    unsafe fn unzip(lo: [R; N], hi: [R; N]) -> ([R; N], [R; N]) {
        let both = [lo, hi];
        let (mut re, mut im) = (lo, hi);
        for i in 0..N {
            re[i] = both[2 * i / N][2 * i % N];
            im[i] = both[(2 * i + 1) / N][(2 * i + 1) % N];
        }
        (re, im)
    }
}
