//! Matrices in awkward places, and the bound that LAPACK's testers use.
#![allow(dead_code, reason = "each test program uses its own part")]

use fulmen_kernels::{MatMut, MatRef, Real, Scalar};
use num_traits::Float;

/// Numbers in (-1, 1), the same for a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    fn real(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub fn scalar<T: Scalar>(&mut self) -> T {
        let mut part = || <T as Scalar>::Real::from_f64(self.real());
        let re = part();
        let im = part();
        T::from_parts(re, im)
    }
}

/// An m × n matrix that starts at an odd address and has rows of padding, which must stay as they are.
#[derive(Clone)]
pub struct Framed<T> {
    data: Vec<T>,
    pub m: usize,
    pub n: usize,
    pad: usize,
    offset: usize,
}

impl<T: Scalar> Framed<T> {
    pub fn new(m: usize, n: usize, pad: usize, offset: usize, mut x: impl FnMut(usize, usize) -> T) -> Self {
        let canary = T::from_real(<T as Scalar>::Real::from_f64(-777.25));
        let mut framed = Framed { data: vec![canary; offset + (m + pad) * n + 3], m, n, pad, offset };
        for j in 0..n {
            for i in 0..m {
                framed.data[offset + j * (m + pad) + i] = x(i, j);
            }
        }
        framed
    }

    pub fn random(m: usize, n: usize, pad: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        Framed::new(m, n, pad, (seed % 4) as usize, |_, _| random.scalar())
    }

    pub fn lld(&self) -> usize {
        self.m + self.pad
    }

    pub fn view(&self) -> MatRef<'_, T> {
        let start = self.data[self.offset..].as_ptr();
        // SAFETY: n columns of m elements, `lld` apart, lie inside `data`.
        unsafe { MatRef::from_raw_parts(start, self.m, self.n, 1, self.lld() as isize) }
    }

    pub fn view_mut(&mut self) -> MatMut<'_, T> {
        let (m, n, lld) = (self.m, self.n, self.lld() as isize);
        let start = self.data[self.offset..].as_mut_ptr();
        // SAFETY: n columns of m elements, `lld` apart, lie inside `data`, which is borrowed.
        unsafe { MatMut::from_raw_parts_mut(start, m, n, 1, lld) }
    }

    pub fn frame_is_whole(&self) -> bool {
        let canary = T::from_real(<T as Scalar>::Real::from_f64(-777.25));
        let inside = |i: usize| {
            i >= self.offset
                && (i - self.offset) / self.lld().max(1) < self.n
                && (i - self.offset) % self.lld().max(1) < self.m
        };
        (0..self.data.len()).all(|i| inside(i) || self.data[i] == canary)
    }

    pub fn bits(&self) -> Vec<u8> {
        bytemuck::cast_slice(&self.data).to_vec()
    }
}

/// Whether all of |x − y| ≤ steps · ε · size.
pub fn close<T: Scalar>(
    x: MatRef<'_, T>,
    y: MatRef<'_, T>,
    steps: usize,
    size: impl Fn(usize, usize) -> f64,
) -> Result<(), String> {
    let eps = <T as Scalar>::Real::UNIT_ROUNDOFF.to_f64();
    for j in 0..x.ncols() {
        for i in 0..x.nrows() {
            let difference = (x[(i, j)] - y[(i, j)]).modulus().to_f64();
            let bound = 4.0 * (steps + 4) as f64 * eps * size(i, j);
            if difference > bound || difference.is_nan() {
                return Err(format!("({i}, {j}): {} and {}, bound {bound:e}", x[(i, j)], y[(i, j)]));
            }
        }
    }
    Ok(())
}

pub fn modulus<T: Scalar>(x: T) -> f64 {
    x.modulus().to_f64()
}

pub fn is_nan<T: Scalar>(x: T) -> bool {
    Float::is_nan(x.abs1())
}
