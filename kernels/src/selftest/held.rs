//! Matrices for the self-test: off any alignment, rows apart, surrounded by NaNs.

use crate::{MatMut, MatRef, Real, Scalar};

/// xorshift64*: the same test on every machine.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In `0..n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// Parts in [-1, 1).
    pub(super) fn element<T: Scalar>(&mut self) -> T {
        let mut part = || {
            let x = (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
            <T as Scalar>::Real::from_f64(x)
        };
        let re = part();
        T::from_parts(re, part())
    }
}

pub(super) fn nan<T: Scalar>() -> T {
    let nan = <T as Scalar>::Real::from_f64(f64::NAN);
    T::from_parts(nan, nan)
}

/// A matrix one element off its memory's start, its columns three elements further apart than its rows ask.
#[derive(Clone)]
pub(super) struct Held<T> {
    memory: Vec<T>,
    rows: usize,
    cols: usize,
}

const OFFSET: usize = 1;
const GAP: usize = 3;

impl<T: Scalar> Held<T> {
    pub(super) fn from_fn(rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> T) -> Self {
        let lld = rows + GAP;
        let mut memory = vec![nan(); OFFSET + cols * lld + GAP];
        for j in 0..cols {
            for i in 0..rows {
                memory[OFFSET + i + j * lld] = f(i, j);
            }
        }
        Held { memory, rows, cols }
    }

    pub(super) fn random(random: &mut Random, rows: usize, cols: usize) -> Self {
        Held::from_fn(rows, cols, |_, _| random.element())
    }

    pub(super) fn view(&self) -> MatRef<'_, T> {
        let lld = self.rows + GAP;
        let all = &self.memory[OFFSET..][..self.cols * lld];
        MatRef::from_column_major_slice_with_stride(all, self.rows, self.cols, lld)
    }

    pub(super) fn view_mut(&mut self) -> MatMut<'_, T> {
        let lld = self.rows + GAP;
        let all = &mut self.memory[OFFSET..][..self.cols * lld];
        MatMut::from_column_major_slice_with_stride_mut(all, self.rows, self.cols, lld)
    }

    /// Whether all that surrounds the matrix is as it was.
    pub(super) fn surroundings_stand(&self) -> bool {
        let lld = self.rows + GAP;
        let outside =
            |at: usize| at < OFFSET || (at - OFFSET) % lld >= self.rows || (at - OFFSET) / lld >= self.cols;
        (0..self.memory.len()).filter(|at| outside(*at)).all(|at| self.memory[at].re().to_f64().is_nan())
    }
}
