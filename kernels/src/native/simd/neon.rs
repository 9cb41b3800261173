//! aarch64: NEON, which every aarch64 has.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Simd`")]

use std::arch::aarch64::*;

use super::{Arch, Simd};

/// The baseline of aarch64, and its 128-bit registers.
#[derive(Clone, Copy)]
pub(in crate::native) struct Neon;

impl Arch for Neon {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn enter<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
}

impl Simd<f64> for Neon {
    type V = float64x2_t;
    const LANES: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f64) -> float64x2_t {
        vdupq_n_f64(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f64) -> float64x2_t {
        vld1q_f64(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f64, v: float64x2_t) {
        vst1q_f64(p, v)
    }
    #[inline(always)]
    unsafe fn mul(a: float64x2_t, b: float64x2_t) -> float64x2_t {
        vmulq_f64(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: float64x2_t, b: float64x2_t) -> float64x2_t {
        vdivq_f64(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: float64x2_t, b: float64x2_t, c: float64x2_t) -> float64x2_t {
        vfmaq_f64(c, a, b)
    }
    #[inline(always)]
    unsafe fn fnma(a: float64x2_t, b: float64x2_t, c: float64x2_t) -> float64x2_t {
        vfmsq_f64(c, a, b)
    }
    #[inline(always)]
    unsafe fn fma1(a: f64, b: f64, c: f64) -> f64 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    unsafe fn max_magnitude(acc: float64x2_t, v: float64x2_t) -> float64x2_t {
        let v = vabsq_f64(v);
        let above = vcgtq_u64(vreinterpretq_u64_f64(v), vreinterpretq_u64_f64(acc));
        vbslq_f64(above, v, acc)
    }
    #[inline(always)]
    unsafe fn any_above(v: float64x2_t, w: float64x2_t) -> bool {
        let above = vcgtq_u64(vreinterpretq_u64_f64(v), vreinterpretq_u64_f64(w));
        vmaxvq_u32(vreinterpretq_u32_u64(above)) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: float64x2_t, im: float64x2_t) -> (float64x2_t, float64x2_t) {
        (vzip1q_f64(re, im), vzip2q_f64(re, im))
    }
    #[inline(always)]
    unsafe fn unzip(lo: float64x2_t, hi: float64x2_t) -> (float64x2_t, float64x2_t) {
        (vuzp1q_f64(lo, hi), vuzp2q_f64(lo, hi))
    }
}

impl Simd<f32> for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        vld1q_f32(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        vst1q_f32(p, v)
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vdivq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    #[inline(always)]
    unsafe fn fnma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmsq_f32(c, a, b)
    }
    #[inline(always)]
    unsafe fn fma1(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    unsafe fn max_magnitude(acc: float32x4_t, v: float32x4_t) -> float32x4_t {
        let v = vreinterpretq_u32_f32(vabsq_f32(v));
        vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(acc), v))
    }
    #[inline(always)]
    unsafe fn any_above(v: float32x4_t, w: float32x4_t) -> bool {
        vmaxvq_u32(vcgtq_u32(vreinterpretq_u32_f32(v), vreinterpretq_u32_f32(w))) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: float32x4_t, im: float32x4_t) -> (float32x4_t, float32x4_t) {
        (vzip1q_f32(re, im), vzip2q_f32(re, im))
    }
    #[inline(always)]
    unsafe fn unzip(lo: float32x4_t, hi: float32x4_t) -> (float32x4_t, float32x4_t) {
        (vuzp1q_f32(lo, hi), vuzp2q_f32(lo, hi))
    }
}
