//! Matrices for tests: any offset and leading dimension, with guards of NaNs around them.

use fulmen_kernels::{Element, MatMut, MatRef, Op, Real, Scalar};

/// The type of its parts.
pub type RealOf<T> = <T as Scalar>::Real;

/// xorshift64*: the same cases from the same seed on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }

    /// In [-1, 1), or a whole number in -4..=4 that every type multiplies without rounding.
    pub fn number(&mut self, whole: bool) -> f64 {
        if whole {
            self.below(9) as f64 - 4.0
        } else {
            (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        }
    }

    pub fn element<T: Element>(&mut self, whole: bool) -> T {
        T::from_parts(RealOf::<T>::from_f64(self.number(whole)), RealOf::<T>::from_f64(self.number(whole)))
    }
}

pub fn nan<T: Element>() -> T {
    T::from_parts(RealOf::<T>::from_f64(f64::NAN), RealOf::<T>::from_f64(f64::NAN))
}

pub fn is_nan<T: Element>(x: T) -> bool {
    x.re().to_f64().is_nan() || x.im().to_f64().is_nan()
}

#[derive(Clone)]
pub struct Sample<T> {
    memory: Vec<T>,
    offset: usize,
    rows: usize,
    cols: usize,
    lld: usize,
}

impl<T: Element> Sample<T> {
    /// A rows × cols matrix of `f(i, j)`, `offset` elements into its memory, `pad` rows apart from the next column.
    pub fn from_fn(
        rows: usize,
        cols: usize,
        at: (usize, usize),
        mut f: impl FnMut(usize, usize) -> T,
    ) -> Self {
        let (offset, pad) = at;
        let lld = (rows + pad).max(1);
        let memory = vec![nan(); offset + lld * cols + pad];
        let mut sample = Sample { memory, offset, rows, cols, lld };
        for j in 0..cols {
            for i in 0..rows {
                sample.memory[offset + i + j * lld] = f(i, j);
            }
        }
        sample
    }

    pub fn random(random: &mut Random, rows: usize, cols: usize, whole: bool) -> Self {
        let at = (random.below(5), random.below(4));
        Sample::from_fn(rows, cols, at, |_, _| random.element(whole))
    }

    pub fn at(&self, i: usize, j: usize) -> T {
        self.memory[self.offset + i + j * self.lld]
    }

    pub fn view(&self) -> MatRef<'_, T> {
        MatRef::from_column_major_slice_with_stride(
            &self.memory[self.offset..][..self.lld * self.cols],
            self.rows,
            self.cols,
            self.lld,
        )
    }

    pub fn view_mut(&mut self) -> MatMut<'_, T> {
        MatMut::from_column_major_slice_with_stride_mut(
            &mut self.memory[self.offset..][..self.lld * self.cols],
            self.rows,
            self.cols,
            self.lld,
        )
    }

    /// Whether nothing outside the matrix was written.
    pub fn guards_stand(&self) -> bool {
        self.memory.iter().enumerate().all(|(at, x)| {
            let inside = at
                .checked_sub(self.offset)
                .is_some_and(|at| at % self.lld < self.rows && at / self.lld < self.cols);
            inside || is_nan(*x)
        })
    }
}

/// Element (i, j) of op(A).
pub fn under<T: Element>(op: Op, a: &Sample<T>, i: usize, j: usize) -> T {
    match op {
        Op::NoTrans => a.at(i, j),
        Op::Trans => a.at(j, i),
        Op::ConjTrans => a.at(j, i).conjugate(),
    }
}

/// op(A) of the given shape.
pub fn operand<T: Element>(random: &mut Random, op: Op, rows: usize, cols: usize, whole: bool) -> Sample<T> {
    let (rows, cols) = if op == Op::NoTrans { (rows, cols) } else { (cols, rows) };
    Sample::random(random, rows, cols, whole)
}
