//! The vector instructions that the kernels are written in.
//!
//! Everything here is `#[inline(always)]`, so that it becomes part of the function that
//! [`Arch::enter`] compiled with the instruction set switched on; only there do the intrinsics
//! themselves inline.

use crate::Real;

#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod portable;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

/// An instruction set.
pub(super) trait Arch: Copy + Send + Sync + 'static {
    /// Runs `work`, compiled for this instruction set (mark closures `#[inline(always)]`).
    ///
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn enter<R>(work: impl FnOnce() -> R) -> R;
}

/// A real type that vectors are made of.
pub(super) trait Elem: Real {
    /// |self| as an integer that orders like it; a NaN is above every number.
    fn magnitude(self) -> u64;
    /// The value without a sign whose bits are the low ones of `bits`.
    fn of_bits(bits: u64) -> Self;
}

impl Elem for f64 {
    #[inline(always)]
    fn magnitude(self) -> u64 {
        self.to_bits() & (u64::MAX >> 1)
    }
    #[inline(always)]
    fn of_bits(bits: u64) -> Self {
        f64::from_bits(bits & (u64::MAX >> 1))
    }
}

impl Elem for f32 {
    #[inline(always)]
    fn magnitude(self) -> u64 {
        u64::from(self.to_bits() & (u32::MAX >> 1))
    }
    #[inline(always)]
    fn of_bits(bits: u64) -> Self {
        f32::from_bits(bits as u32 & (u32::MAX >> 1))
    }
}

/// Vectors of `R`.
///
/// # Safety
/// Every function needs the instruction set that it stands for; `load` and `store` also need
/// `LANES` valid elements (of any alignment).
pub(super) trait Simd<R: Elem>: Copy + Send + Sync + 'static {
    /// A register.
    type V: Copy;
    /// Elements in it.
    const LANES: usize;

    unsafe fn splat(x: R) -> Self::V;
    unsafe fn load(p: *const R) -> Self::V;
    unsafe fn store(p: *mut R, v: Self::V);
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a·b + c
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// c − a·b
    unsafe fn fnma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a·b + c of one element, rounded exactly as a lane of [`Simd::fma`].
    unsafe fn fma1(a: R, b: R, c: R) -> R;
    /// Lane by lane the larger of `acc` and |v| by [`Elem::magnitude`]; `acc` has no sign.
    unsafe fn max_magnitude(acc: Self::V, v: Self::V) -> Self::V;
    /// Whether a lane of `v` is above the same lane of `w` by magnitude; neither has a sign.
    unsafe fn any_above(v: Self::V, w: Self::V) -> bool;
    /// (re₀ im₀ re₁ …), (…) from (re₀ re₁ …), (im₀ im₁ …).
    unsafe fn zip(re: Self::V, im: Self::V) -> (Self::V, Self::V);
    /// The inverse of [`Simd::zip`].
    unsafe fn unzip(lo: Self::V, hi: Self::V) -> (Self::V, Self::V);

    /// Whether squares of `LANES` × `LANES` elements are transposed in registers.
    const TRANSPOSES: bool = false;
    /// Element (i, q) of the square, which is at `from + i·from_step + q`, goes to `to + q·to_step + i`.
    unsafe fn transpose(_from: *const R, _from_step: isize, _to: *mut R, _to_step: isize) {
        unreachable!("asked for by no instruction set without it")
    }

    /// The tile, in vectors by columns, whose steps are written out by hand, and how many of them at a time.
    const BY_HAND: Option<(usize, usize, usize)> = None;
    /// Steps of that tile: `k` is a multiple of what they are written for; column p of A is at `a + p·a_step`.
    /// If `AHEAD`, what B has 8 steps later is asked for.
    unsafe fn steps<const AHEAD: bool>(
        _k: usize,
        _a: *const R,
        _a_step: usize,
        _b: *const R,
        _acc: *mut Self::V,
    ) {
        unreachable!("asked for by no instruction set without it")
    }
}

/// Asks for the line at `p` in L1, to be written. `p` need not be valid.
#[inline(always)]
pub(super) fn prefetch_write<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `prefetchw` faults on no address and exists (or does nothing) on every x86-64.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint; it faults on no address.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Asks for the line at `p` in L2, to be read. `p` need not be valid.
#[inline(always)]
pub(super) fn prefetch_l2<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it faults on no address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint; it faults on no address.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Asks for the line at `p` in L1, to be read. `p` need not be valid.
#[inline(always)]
pub(super) fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it faults on no address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint; it faults on no address.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}
