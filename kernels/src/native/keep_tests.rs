//! Which operand has its block in L2 follows the CPU; both ways are tested on every CPU, and have the same bits.

use super::*;
use crate::Real;

fn filled<T: Scalar>(n: usize, seed: u64) -> Vec<T> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f64 / f64::from(1 << 24) - 0.5
    };
    (0..n)
        .map(|_| T::from_parts(<T as Scalar>::Real::from_f64(next()), <T as Scalar>::Real::from_f64(next())))
        .collect()
}

/// Products of ragged shapes by kernels that keep A's block and B's.
fn both_keeps_agree<T: Scalar, K: Micro<T>>(isa: Isa) {
    if !isa.is_available() {
        return;
    }
    let kernels = [Keep::A, Keep::B].map(|keep| {
        let mut native = Native::<T, K>::new(isa);
        // Small blocks, so that small matrices have several.
        native.blocking = Blocking { keep, l2_bytes: 64 << 10, ..native.blocking };
        native
    });
    let (mr, nr) = (K::MR, K::NR);
    for (at, (m, n, k)) in [
        (1, 1, 1),
        (mr - 1, nr + 1, 7),
        (4 * mr, 2 * nr, 64),
        (4 * mr + 3, 5 * nr - 1, 71),
        (9 * mr + 1, 3 * nr + 2, 72),
        (6 * mr + 5, 9 * nr, 129),
        (5 * mr, 2 * nr + 1, 900), // three passes
    ]
    .into_iter()
    .enumerate()
    {
        let (lda, ldb, ldc) = (m + 3, k + 1, m + 2);
        let (a, b, c) = (filled::<T>(lda * k, at as u64), filled::<T>(ldb * n, 77), filled::<T>(ldc * n, 99));
        let view = |x: &'_ [T], rows, cols, ld| {
            // SAFETY: as long as `ld · cols`.
            unsafe { MatRef::<'_, T>::from_raw_parts(x.as_ptr(), rows, cols, 1, ld as isize) }
        };
        let run = |native: &Native<T, K>, how: usize| {
            let mut c = c.clone();
            // SAFETY: as long as `ldc · n`, and borrowed by nobody else.
            let out = unsafe { MatMut::from_raw_parts_mut(c.as_mut_ptr(), m, n, 1, ldc as isize) };
            let (a, b) = (view(&a, m, k, lda), view(&b, k, n, ldb));
            match how {
                0 => native.gemm_panel(-T::one(), a, b, out),
                1 => {
                    let (a, b) = ((Op::NoTrans, a), (Op::NoTrans, b));
                    native.gemm(&Team::new(2).unwrap(), T::one(), a, b, T::one(), out);
                }
                _ => {
                    let tile = native.tile();
                    let mut pa = vec![T::zero(); tile.packed_a_len(m, k)];
                    let mut pb = vec![T::zero(); tile.packed_b_len(k, n)];
                    native.pack_a(a, &mut pa);
                    native.pack_b(b, &mut pb);
                    native.gemm_packed(T::one(), &pa, &pb, k, out);
                }
            }
            c
        };
        for how in 0..3 {
            let [by_a, by_b] = [&kernels[0], &kernels[1]].map(|native| run(native, how));
            assert!(by_a == by_b, "{}, way {how}: {m} x {n} x {k}", isa.name());
            assert!(by_a != c, "{}, way {how}: nothing was done", isa.name());
        }
    }
}

#[test]
fn blocks_of_a_and_of_b_give_the_same_bits() {
    both_keeps_agree::<f64, RealTile<Portable, Array<4>, Array<4>, 1, 4, 2>>(Isa::Portable);
    both_keeps_agree::<c32, SplitTile<Portable, Array<4>, Array<4>, 1, 4, 1>>(Isa::Portable);
    #[cfg(target_arch = "x86_64")]
    {
        use simd::x86::*;
        both_keeps_agree::<f64, RealTile<Avx512, Zmm, Zmm, 3, 8, 8>>(Isa::Avx512);
        both_keeps_agree::<f32, RealTile<Avx512, Zmm, Ymm, 3, 8, 8>>(Isa::Avx512);
        both_keeps_agree::<c64, SplitTile<Avx512, Zmm, Ymm, 3, 4, 8>>(Isa::Avx512);
        both_keeps_agree::<f64, RealTile<Avx2, Ymm, Ymm, 3, 4, 4>>(Isa::Avx2);
    }
    #[cfg(target_arch = "aarch64")]
    {
        use simd::neon::*;
        both_keeps_agree::<f64, RealTile<Neon, Neon, Neon, 3, 8, 8>>(Isa::Neon);
    }
}
