//! What the machine gives at the moment: multiply-adds on registers, and a product that lives in L2.

use std::sync::Mutex;
use std::time::Instant;

use fulmen_kernels::{Kernels, MatMut, Team};

/// Gflop/s of independent multiply-adds on all members.
pub fn fma(team: &Team) -> f64 {
    let steps = 2_000_000;
    let start = Instant::now();
    let per_step = std::sync::atomic::AtomicUsize::new(0);
    team.run(|_| per_step.store(burn(steps), std::sync::atomic::Ordering::Relaxed));
    let flops = per_step.into_inner() * steps * team.len();
    flops as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Sums swing about a middle and all differ, so that as many bits turn over as in real work: a CPU whose
/// clock follows its power runs faster on sums that stand still.
#[cfg(target_arch = "x86_64")]
const SWING: f64 = -0.999_999_999;

#[cfg(target_arch = "x86_64")]
fn start<const N: usize>() -> [f64; N] {
    std::array::from_fn(|i| (i as f64 * 0.754_877_666).fract())
}

/// Runs `steps` steps and returns the flops of one.
fn burn(steps: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has it.
            return unsafe { burn_avx512(steps) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has it.
            return unsafe { burn_avx2(steps) };
        }
    }
    let mut acc = [1.0f64; 16];
    for _ in 0..steps {
        let b = std::hint::black_box(0.37);
        acc.iter_mut().for_each(|x| *x = x.mul_add(-0.999_999, b));
    }
    std::hint::black_box(acc);
    32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn burn_avx512(steps: usize) -> usize {
    use std::arch::x86_64::*;
    let (a, b) = (_mm512_set1_pd(std::hint::black_box(SWING)), _mm512_set1_pd(std::hint::black_box(0.37)));
    let start = std::hint::black_box(start::<{ 20 * 8 }>());
    let mut acc = [a; 20];
    for (x, start) in acc.iter_mut().zip(start.as_chunks::<8>().0) {
        // SAFETY: 8 elements.
        *x = unsafe { _mm512_loadu_pd(start.as_ptr()) };
    }
    for _ in 0..steps {
        for x in &mut acc {
            *x = _mm512_fmadd_pd(*x, a, b);
        }
    }
    std::hint::black_box(acc);
    20 * 16
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn burn_avx2(steps: usize) -> usize {
    use std::arch::x86_64::*;
    let (a, b) = (_mm256_set1_pd(std::hint::black_box(SWING)), _mm256_set1_pd(std::hint::black_box(0.37)));
    let start = std::hint::black_box(start::<{ 12 * 4 }>());
    let mut acc = [a; 12];
    for (x, start) in acc.iter_mut().zip(start.as_chunks::<4>().0) {
        // SAFETY: 4 elements.
        *x = unsafe { _mm256_loadu_pd(start.as_ptr()) };
    }
    for _ in 0..steps {
        for x in &mut acc {
            *x = _mm256_fmadd_pd(*x, a, b);
        }
    }
    std::hint::black_box(acc);
    12 * 8
}

/// Gflop/s of a packed product whose operands stay in L2, on all members.
pub fn l2(kernels: &dyn Kernels<f64>, team: &Team) -> f64 {
    let (tile, k) = (kernels.tile(), 256);
    let (m, n) = (96usize.next_multiple_of(tile.mr), 96usize.next_multiple_of(tile.nr));
    let rounds = 100;
    let slowest = Mutex::new(0.0f64);
    team.run(|me| {
        let (a, b) = (vec![1e-3; tile.packed_a_len(m, k)], vec![1e-3; tile.packed_b_len(k, n)]);
        let mut c = vec![0.0; m * n];
        let mut round =
            || kernels.gemm_packed(-1.0, &a, &b, k, MatMut::from_column_major_slice_mut(&mut c, m, n));
        round(); // fetches everything
        me.barrier();
        let start = Instant::now();
        (0..rounds).for_each(|_| round());
        let mut slowest = slowest.lock().expect("no member panics");
        *slowest = slowest.max(start.elapsed().as_secs_f64());
    });
    (2 * m * n * k * rounds * team.len()) as f64 / slowest.into_inner().expect("no member panics") / 1e9
}
