//! Packing into slivers (A) and strips (B): the layout at [`crate::Tile`].

use super::micro::Micro;
use super::simd::{prefetch, prefetch_l2};
use crate::Scalar;

/// An operand as packing sees it: `n` rows of op(A) or columns of op(B), `k` long.
#[derive(Clone, Copy)]
pub(super) struct Source<T> {
    pub ptr: *const T,
    /// From one of the n to the next.
    pub across: isize,
    /// From one of the k to the next.
    pub along: isize,
    pub conj: bool,
}

impl<T> Source<T> {
    /// Where element (i, p) is; not read here.
    #[inline(always)]
    pub(super) fn at(&self, i: usize, p: usize) -> *const T {
        self.ptr.wrapping_offset(i as isize * self.across + p as isize * self.along)
    }

    /// The part from element (i, p) on.
    pub(super) fn from(self, i: usize, p: usize) -> Self {
        Source { ptr: self.at(i, p), ..self }
    }
}

/// Slivers that are filled in one sweep over the columns of A, so that long runs are read.
const GROUP: usize = 8;

/// Columns that are asked for ahead of their copying: each begins on a page that no prefetcher of the
/// hardware's will open.
const AHEAD: usize = 4;

/// Packs `n × k` elements into slivers of A (`A`) or strips of B, zero beyond `n`.
///
/// # Safety
/// Inside `enter` of K's `Arch`; `src` is valid for n × k elements, `out` for ⌈n/w⌉·w·k, w their width.
#[inline(always)]
pub(super) unsafe fn pack<T: Scalar, K: Micro<T>, const A: bool>(
    src: Source<T>,
    n: usize,
    k: usize,
    out: *mut T,
) {
    let w = if A { K::MR } else { K::NR };
    let whole = n / w;
    // SAFETY: indices below stay inside the extents that the caller promised.
    unsafe {
        if src.across == 1 && !src.conj {
            for first in (0..whole).step_by(GROUP) {
                let count = GROUP.min(whole - first);
                for p in 0..k {
                    let ahead = src.at(first * w, p + AHEAD);
                    for line in 0..(count * w * size_of::<T>()).div_ceil(64) {
                        prefetch(ahead.wrapping_byte_add(64 * line));
                    }
                    let run = src.at(first * w, p);
                    for s in 0..count {
                        let (sliver, run) = (out.add((first + s) * w * k), run.add(s * w));
                        if A {
                            K::copy_a(sliver, p, run);
                        } else {
                            sliver.add(p * w).copy_from_nonoverlapping(run, w);
                        }
                    }
                }
            }
        } else {
            for s in 0..whole {
                sliver::<T, K, A>(src, s * w, w, k, out.add(s * w * k));
            }
        }
        if whole * w < n {
            let out = out.add(whole * w * k);
            out.write_bytes(0, w * k);
            sliver::<T, K, A>(src, whole * w, n % w, k, out);
        }
    }
}

#[inline(always)]
unsafe fn put<T: Scalar, K: Micro<T>, const A: bool>(out: *mut T, p: usize, i: usize, x: T) {
    // SAFETY: as `pack`.
    unsafe {
        if A {
            K::put_a(out, p, i, x);
        } else {
            *out.add(p * K::NR + i) = x;
        }
    }
}

/// Packs one sliver of which `valid` elements exist.
#[inline(always)]
unsafe fn sliver<T: Scalar, K: Micro<T>, const A: bool>(
    src: Source<T>,
    first: usize,
    valid: usize,
    k: usize,
    out: *mut T,
) {
    let per_line = 64 / size_of::<T>();
    let w = if A { K::MR } else { K::NR };
    let mut done = 0;
    if K::SQUARE > 0 && src.along == 1 && !src.conj && valid == w {
        while done + K::SQUARE <= k {
            for i in 0..valid {
                prefetch_l2(src.at(first + valid + i, done));
            }
            for i in (0..w).step_by(K::SQUARE) {
                // SAFETY: as `pack`.
                unsafe {
                    K::transpose(src.at(first + i, done), src.across, out.add(done * w + i), w as isize);
                }
            }
            done += K::SQUARE;
        }
    }
    for p in done..k {
        if p % per_line == 0 {
            for i in 0..valid {
                prefetch_l2(src.at(first + valid + i, p));
            }
        }
        for i in 0..valid {
            // SAFETY: as `pack`.
            unsafe {
                let x = *src.at(first + i, p);
                put::<T, K, A>(out, p, i, if src.conj { x.conjugate() } else { x });
            }
        }
    }
}

/// Writes a packed B back to where `dst` says.
///
/// # Safety
/// As [`pack`], with `dst` written and `packed` read; `dst.conj` is ignored.
#[inline(always)]
pub(super) unsafe fn unpack<T: Scalar, K: Micro<T>>(packed: *const T, n: usize, k: usize, dst: Source<T>) {
    let w = K::NR;
    for s in 0..n.div_ceil(w) {
        let valid = w.min(n - s * w);
        let mut done = 0;
        if K::SQUARE > 0 && dst.along == 1 && valid == w {
            while done + K::SQUARE <= k {
                for i in (0..w).step_by(K::SQUARE) {
                    let to = dst.at(s * w + i, done).cast_mut();
                    // SAFETY: as `pack`.
                    unsafe {
                        K::transpose(packed.add(s * w * k + done * w + i), w as isize, to, dst.across);
                    }
                }
                done += K::SQUARE;
            }
        }
        for p in done..k {
            for i in 0..valid {
                // SAFETY: as `pack`.
                unsafe {
                    *dst.at(s * w + i, p).cast_mut() = *packed.add(s * w * k + p * w + i);
                }
            }
        }
    }
}
