//! x86-64: AVX-512 and AVX2 with FMA.
#![allow(unsafe_op_in_unsafe_fn, reason = "every operation is unsafe for the one reason given at `Simd`")]

use std::arch::x86_64::*;

use super::{Arch, Simd};

/// AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(in crate::native) struct Avx512;

impl Arch for Avx512 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn enter<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
}

/// AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in crate::native) struct Avx2;

impl Arch for Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn enter<R>(work: impl FnOnce() -> R) -> R {
        work()
    }
}

/// 512-bit registers (AVX-512).
#[derive(Clone, Copy)]
pub(in crate::native) struct Zmm;
/// 256-bit registers (AVX2 with FMA).
#[derive(Clone, Copy)]
pub(in crate::native) struct Ymm;
/// 128-bit registers (AVX2 with FMA).
#[derive(Clone, Copy)]
pub(in crate::native) struct Xmm;

macro_rules! arithmetic {
    ($r:ty, $v:ty, $lanes:literal, $set1:ident, $loadu:ident, $storeu:ident, $mul:ident, $div:ident,
     $fmadd:ident, $fnmadd:ident) => {
        type V = $v;
        const LANES: usize = $lanes;

        #[inline(always)]
        unsafe fn splat(x: $r) -> $v {
            $set1(x)
        }
        #[inline(always)]
        unsafe fn load(p: *const $r) -> $v {
            $loadu(p)
        }
        #[inline(always)]
        unsafe fn store(p: *mut $r, v: $v) {
            $storeu(p, v)
        }
        #[inline(always)]
        unsafe fn mul(a: $v, b: $v) -> $v {
            $mul(a, b)
        }
        #[inline(always)]
        unsafe fn div(a: $v, b: $v) -> $v {
            $div(a, b)
        }
        #[inline(always)]
        unsafe fn fma(a: $v, b: $v, c: $v) -> $v {
            $fmadd(a, b, c)
        }
        #[inline(always)]
        unsafe fn fnma(a: $v, b: $v, c: $v) -> $v {
            $fnmadd(a, b, c)
        }
        #[inline(always)]
        unsafe fn fma1(a: $r, b: $r, c: $r) -> $r {
            a.mul_add(b, c)
        }
    };
}

/// Steps of a 3 × 4 tile in ymm registers, written out: 12 sums, 3 of A and 1 of B are all there are.
macro_rules! steps_3x4 {
    ($name:ident, $r:ty, $v:ty, $size:literal, $mov:literal, $broadcast:literal, $fma:literal) => {
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name(k: usize, mut a: *const $r, a_step: usize, mut b: *const $r, acc: *mut [[$v; 3]; 4]) {
            let [[mut c0, mut c1, mut c2], [mut c3, mut c4, mut c5], [mut c6, mut c7, mut c8], [mut c9, mut ca, mut cb]] =
                *acc;
            for _ in 0..k {
                std::arch::asm!(
                    concat!($mov, " {x}, [{a}]"),
                    concat!($mov, " {y}, [{a} + 32]"),
                    concat!($mov, " {z}, [{a} + 64]"),
                    concat!($broadcast, " {w}, [{b}]"),
                    concat!($fma, " {c0}, {x}, {w}"),
                    concat!($fma, " {c1}, {y}, {w}"),
                    concat!($fma, " {c2}, {z}, {w}"),
                    concat!($broadcast, " {w}, [{b} + ", $size, "]"),
                    concat!($fma, " {c3}, {x}, {w}"),
                    concat!($fma, " {c4}, {y}, {w}"),
                    concat!($fma, " {c5}, {z}, {w}"),
                    concat!($broadcast, " {w}, [{b} + 2 * ", $size, "]"),
                    concat!($fma, " {c6}, {x}, {w}"),
                    concat!($fma, " {c7}, {y}, {w}"),
                    concat!($fma, " {c8}, {z}, {w}"),
                    concat!($broadcast, " {w}, [{b} + 3 * ", $size, "]"),
                    concat!($fma, " {c9}, {x}, {w}"),
                    concat!($fma, " {ca}, {y}, {w}"),
                    concat!($fma, " {cb}, {z}, {w}"),
                    a = in(reg) a,
                    b = in(reg) b,
                    x = out(ymm_reg) _,
                    y = out(ymm_reg) _,
                    z = out(ymm_reg) _,
                    w = out(ymm_reg) _,
                    c0 = inout(ymm_reg) c0,
                    c1 = inout(ymm_reg) c1,
                    c2 = inout(ymm_reg) c2,
                    c3 = inout(ymm_reg) c3,
                    c4 = inout(ymm_reg) c4,
                    c5 = inout(ymm_reg) c5,
                    c6 = inout(ymm_reg) c6,
                    c7 = inout(ymm_reg) c7,
                    c8 = inout(ymm_reg) c8,
                    c9 = inout(ymm_reg) c9,
                    ca = inout(ymm_reg) ca,
                    cb = inout(ymm_reg) cb,
                    options(pure, readonly, nostack, preserves_flags),
                );
                a = a.wrapping_add(a_step);
                b = b.wrapping_add(4);
            }
            *acc = [[c0, c1, c2], [c3, c4, c5], [c6, c7, c8], [c9, ca, cb]];
        }
    };
}
steps_3x4!(steps_f64, f64, __m256d, "8", "vmovupd", "vbroadcastsd", "vfmadd231pd");
steps_3x4!(steps_f32, f32, __m256, "4", "vmovups", "vbroadcastss", "vfmadd231ps");

/// The text of one step of a 3 × 8 tile in zmm registers: 24 sums (8 to 31), 3 of A, 5 of B in turn. A's column is at
/// `$a`, B's row `$b` elements after `{b}`; `$ask` goes before it.
macro_rules! step_3x8 {
    ($mov:literal, $broadcast:literal, $fma:literal, $size:literal, $a:literal, $b:literal, $ask:expr) => {
        concat!(
            $ask,
            $mov, " zmm0, [", $a, "]\n",
            $mov, " zmm1, [", $a, " + 64]\n",
            $mov, " zmm2, [", $a, " + 128]\n",
            step_3x8!(@column $broadcast, $fma, $size, $b, "0", "3", "8", "9", "10"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "1", "4", "11", "12", "13"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "2", "5", "14", "15", "16"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "3", "6", "17", "18", "19"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "4", "7", "20", "21", "22"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "5", "3", "23", "24", "25"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "6", "4", "26", "27", "28"),
            step_3x8!(@column $broadcast, $fma, $size, $b, "7", "5", "29", "30", "31"),
        )
    };
    (@column $broadcast:literal, $fma:literal, $size:literal, $b:literal, $j:literal, $r:literal,
     $x:literal, $y:literal, $z:literal) => {
        concat!(
            $broadcast, " zmm", $r, ", [{b} + ", $b, " * ", $size, " + ", $j, " * ", $size, "]\n",
            $fma, " zmm", $x, ", zmm0, zmm", $r, "\n",
            $fma, " zmm", $y, ", zmm1, zmm", $r, "\n",
            $fma, " zmm", $z, ", zmm2, zmm", $r, "\n",
        )
    };
}

/// Steps of a 3 × 8 tile, four at a time; `$ask` asks for the four rows of B that come 8 steps later. What the compiler makes of the same steps is 1-2 % slower.
macro_rules! steps_3x8 {
    ($name:ident, $r:ty, $v:ty, $size:literal, $mov:literal, $broadcast:literal, $fma:literal, $ask:literal) => {
        #[inline]
        #[target_feature(enable = "avx512f")]
        unsafe fn $name<const AHEAD: bool>(
            k: usize,
            mut a: *const $r,
            a_step: usize,
            mut b: *const $r,
            acc: &mut [[$v; 3]; 8],
        ) {
            macro_rules! four {
                        ($text:literal) => {
                            std::arch::asm!(
                                step_3x8!($mov, $broadcast, $fma, $size, "{a}", "0", $text),
                                step_3x8!($mov, $broadcast, $fma, $size, "{a} + {s}", "8", ""),
                                step_3x8!($mov, $broadcast, $fma, $size, "{a} + 2 * {s}", "16", ""),
                                step_3x8!($mov, $broadcast, $fma, $size, "{a} + {s3}", "24", ""),
                                a = in(reg) a,
                                b = in(reg) b,
                                s = in(reg) a_step * size_of::<$r>(),
                                s3 = in(reg) 3 * a_step * size_of::<$r>(),
                                out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                                out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                                inout("zmm8") acc[0][0], inout("zmm9") acc[0][1], inout("zmm10") acc[0][2],
                                inout("zmm11") acc[1][0], inout("zmm12") acc[1][1], inout("zmm13") acc[1][2],
                                inout("zmm14") acc[2][0], inout("zmm15") acc[2][1], inout("zmm16") acc[2][2],
                                inout("zmm17") acc[3][0], inout("zmm18") acc[3][1], inout("zmm19") acc[3][2],
                                inout("zmm20") acc[4][0], inout("zmm21") acc[4][1], inout("zmm22") acc[4][2],
                                inout("zmm23") acc[5][0], inout("zmm24") acc[5][1], inout("zmm25") acc[5][2],
                                inout("zmm26") acc[6][0], inout("zmm27") acc[6][1], inout("zmm28") acc[6][2],
                                inout("zmm29") acc[7][0], inout("zmm30") acc[7][1], inout("zmm31") acc[7][2],
                                options(readonly, nostack, preserves_flags),
                            )
                        };
                    }
            for _ in 0..k / 4 {
                if AHEAD {
                    four!($ask);
                } else {
                    four!("");
                }
                a = a.wrapping_add(4 * a_step);
                b = b.wrapping_add(32);
            }
        }
    };
}
steps_3x8!(
    steps_3x8_f64,
    f64,
    __m512d,
    "8",
    "vmovupd",
    "vbroadcastsd",
    "vfmadd231pd",
    "prefetcht0 [{b} + 512]\nprefetcht0 [{b} + 576]\nprefetcht0 [{b} + 640]\nprefetcht0 [{b} + 704]\n"
);
steps_3x8!(
    steps_3x8_f32,
    f32,
    __m512,
    "4",
    "vmovups",
    "vbroadcastss",
    "vfmadd231ps",
    "prefetcht0 [{b} + 256]\nprefetcht0 [{b} + 320]\n"
);

impl Simd<f64> for Zmm {
    const BY_HAND: Option<(usize, usize, usize)> = Some((3, 8, 4));
    #[inline(always)]
    unsafe fn steps<const AHEAD: bool>(
        k: usize,
        a: *const f64,
        a_step: usize,
        b: *const f64,
        acc: *mut __m512d,
    ) {
        steps_3x8_f64::<AHEAD>(k, a, a_step, b, &mut *acc.cast());
    }

    arithmetic!(
        f64,
        __m512d,
        8,
        _mm512_set1_pd,
        _mm512_loadu_pd,
        _mm512_storeu_pd,
        _mm512_mul_pd,
        _mm512_div_pd,
        _mm512_fmadd_pd,
        _mm512_fnmadd_pd
    );

    const TRANSPOSES: bool = true;
    #[inline(always)]
    unsafe fn transpose(from: *const f64, from_step: isize, to: *mut f64, to_step: isize) {
        let mut rows = [_mm512_setzero_pd(); 8];
        for i in 0..8 {
            rows[i] = _mm512_loadu_pd(from.wrapping_offset(i as isize * from_step));
        }
        // Of each 128-bit lane of two rows their even elements, then their odd ones.
        let mut pairs = rows;
        for i in [0, 2, 4, 6] {
            pairs[i] = _mm512_unpacklo_pd(rows[i], rows[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_pd(rows[i], rows[i + 1]);
        }
        for odd in 0..2 {
            let (a, b, c, d) = (pairs[odd], pairs[2 + odd], pairs[4 + odd], pairs[6 + odd]);
            let (left, right) = (_mm512_shuffle_f64x2::<0x44>(a, b), _mm512_shuffle_f64x2::<0x44>(c, d));
            let to = to.wrapping_offset(odd as isize * to_step);
            _mm512_storeu_pd(to, _mm512_shuffle_f64x2::<0x88>(left, right));
            _mm512_storeu_pd(to.wrapping_offset(2 * to_step), _mm512_shuffle_f64x2::<0xdd>(left, right));
            let (left, right) = (_mm512_shuffle_f64x2::<0xee>(a, b), _mm512_shuffle_f64x2::<0xee>(c, d));
            _mm512_storeu_pd(to.wrapping_offset(4 * to_step), _mm512_shuffle_f64x2::<0x88>(left, right));
            _mm512_storeu_pd(to.wrapping_offset(6 * to_step), _mm512_shuffle_f64x2::<0xdd>(left, right));
        }
    }

    #[inline(always)]
    unsafe fn max_magnitude(acc: __m512d, v: __m512d) -> __m512d {
        let v = _mm512_castpd_si512(_mm512_abs_pd(v));
        _mm512_castsi512_pd(_mm512_max_epu64(_mm512_castpd_si512(acc), v))
    }
    #[inline(always)]
    unsafe fn any_above(v: __m512d, w: __m512d) -> bool {
        _mm512_cmpgt_epu64_mask(_mm512_castpd_si512(v), _mm512_castpd_si512(w)) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: __m512d, im: __m512d) -> (__m512d, __m512d) {
        let lo = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
        let hi = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
        (_mm512_permutex2var_pd(re, lo, im), _mm512_permutex2var_pd(re, hi, im))
    }
    #[inline(always)]
    unsafe fn unzip(lo: __m512d, hi: __m512d) -> (__m512d, __m512d) {
        let re = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
        let im = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
        (_mm512_permutex2var_pd(lo, re, hi), _mm512_permutex2var_pd(lo, im, hi))
    }
}

impl Simd<f32> for Zmm {
    const BY_HAND: Option<(usize, usize, usize)> = Some((3, 8, 4));
    #[inline(always)]
    unsafe fn steps<const AHEAD: bool>(
        k: usize,
        a: *const f32,
        a_step: usize,
        b: *const f32,
        acc: *mut __m512,
    ) {
        steps_3x8_f32::<AHEAD>(k, a, a_step, b, &mut *acc.cast());
    }

    arithmetic!(
        f32,
        __m512,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_mul_ps,
        _mm512_div_ps,
        _mm512_fmadd_ps,
        _mm512_fnmadd_ps
    );

    #[inline(always)]
    unsafe fn max_magnitude(acc: __m512, v: __m512) -> __m512 {
        let v = _mm512_castps_si512(_mm512_abs_ps(v));
        _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(acc), v))
    }
    #[inline(always)]
    unsafe fn any_above(v: __m512, w: __m512) -> bool {
        _mm512_cmpgt_epu32_mask(_mm512_castps_si512(v), _mm512_castps_si512(w)) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: __m512, im: __m512) -> (__m512, __m512) {
        let lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let hi = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        (_mm512_permutex2var_ps(re, lo, im), _mm512_permutex2var_ps(re, hi, im))
    }
    #[inline(always)]
    unsafe fn unzip(lo: __m512, hi: __m512) -> (__m512, __m512) {
        let re = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let im = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        (_mm512_permutex2var_ps(lo, re, hi), _mm512_permutex2var_ps(lo, im, hi))
    }
}

impl Simd<f64> for Ymm {
    const BY_HAND: Option<(usize, usize, usize)> = Some((3, 4, 1));
    #[inline(always)]
    unsafe fn steps<const AHEAD: bool>(
        k: usize,
        a: *const f64,
        a_step: usize,
        b: *const f64,
        acc: *mut __m256d,
    ) {
        steps_f64(k, a, a_step, b, acc.cast());
    }

    arithmetic!(
        f64,
        __m256d,
        4,
        _mm256_set1_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_mul_pd,
        _mm256_div_pd,
        _mm256_fmadd_pd,
        _mm256_fnmadd_pd
    );

    #[inline(always)]
    unsafe fn max_magnitude(acc: __m256d, v: __m256d) -> __m256d {
        let v = _mm256_andnot_pd(_mm256_set1_pd(-0.0), v);
        let above = _mm256_cmpgt_epi64(_mm256_castpd_si256(v), _mm256_castpd_si256(acc));
        _mm256_blendv_pd(acc, v, _mm256_castsi256_pd(above))
    }
    #[inline(always)]
    unsafe fn any_above(v: __m256d, w: __m256d) -> bool {
        _mm256_movemask_epi8(_mm256_cmpgt_epi64(_mm256_castpd_si256(v), _mm256_castpd_si256(w))) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: __m256d, im: __m256d) -> (__m256d, __m256d) {
        let even = _mm256_unpacklo_pd(re, im); // r0 i0 r2 i2
        let odd = _mm256_unpackhi_pd(re, im); // r1 i1 r3 i3
        (_mm256_permute2f128_pd::<0x20>(even, odd), _mm256_permute2f128_pd::<0x31>(even, odd))
    }
    #[inline(always)]
    unsafe fn unzip(lo: __m256d, hi: __m256d) -> (__m256d, __m256d) {
        let even = _mm256_permute2f128_pd::<0x20>(lo, hi); // r0 i0 r2 i2
        let odd = _mm256_permute2f128_pd::<0x31>(lo, hi); // r1 i1 r3 i3
        (_mm256_unpacklo_pd(even, odd), _mm256_unpackhi_pd(even, odd))
    }
}

impl Simd<f32> for Ymm {
    const BY_HAND: Option<(usize, usize, usize)> = Some((3, 4, 1));
    #[inline(always)]
    unsafe fn steps<const AHEAD: bool>(
        k: usize,
        a: *const f32,
        a_step: usize,
        b: *const f32,
        acc: *mut __m256,
    ) {
        steps_f32(k, a, a_step, b, acc.cast());
    }

    arithmetic!(
        f32,
        __m256,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_mul_ps,
        _mm256_div_ps,
        _mm256_fmadd_ps,
        _mm256_fnmadd_ps
    );

    #[inline(always)]
    unsafe fn max_magnitude(acc: __m256, v: __m256) -> __m256 {
        let v = _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), v));
        _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(acc), v))
    }
    #[inline(always)]
    unsafe fn any_above(v: __m256, w: __m256) -> bool {
        _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_castps_si256(v), _mm256_castps_si256(w))) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: __m256, im: __m256) -> (__m256, __m256) {
        let lo = _mm256_unpacklo_ps(re, im); // 0 1 4 5
        let hi = _mm256_unpackhi_ps(re, im); // 2 3 6 7
        (_mm256_permute2f128_ps::<0x20>(lo, hi), _mm256_permute2f128_ps::<0x31>(lo, hi))
    }
    #[inline(always)]
    unsafe fn unzip(lo: __m256, hi: __m256) -> (__m256, __m256) {
        let a = _mm256_permute2f128_ps::<0x20>(lo, hi); // 0 1 4 5
        let b = _mm256_permute2f128_ps::<0x31>(lo, hi); // 2 3 6 7
        (_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b))
    }
}

impl Simd<f32> for Xmm {
    arithmetic!(
        f32,
        __m128,
        4,
        _mm_set1_ps,
        _mm_loadu_ps,
        _mm_storeu_ps,
        _mm_mul_ps,
        _mm_div_ps,
        _mm_fmadd_ps,
        _mm_fnmadd_ps
    );

    #[inline(always)]
    unsafe fn max_magnitude(acc: __m128, v: __m128) -> __m128 {
        let v = _mm_castps_si128(_mm_andnot_ps(_mm_set1_ps(-0.0), v));
        _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(acc), v))
    }
    #[inline(always)]
    unsafe fn any_above(v: __m128, w: __m128) -> bool {
        _mm_movemask_epi8(_mm_cmpgt_epi32(_mm_castps_si128(v), _mm_castps_si128(w))) != 0
    }
    #[inline(always)]
    unsafe fn zip(re: __m128, im: __m128) -> (__m128, __m128) {
        (_mm_unpacklo_ps(re, im), _mm_unpackhi_ps(re, im))
    }
    #[inline(always)]
    unsafe fn unzip(lo: __m128, hi: __m128) -> (__m128, __m128) {
        (_mm_shuffle_ps::<0b10_00_10_00>(lo, hi), _mm_shuffle_ps::<0b11_01_11_01>(lo, hi))
    }
}
