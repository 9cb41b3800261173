//! HPL's matrix: the linear congruential generator of netlib HPL 2.x, with jump-ahead.
//!
//! Element (i, j) of the N × (N+1) matrix [A | b] is number i + j·N + 1 of the sequence
//! x ← 6364136223846793005·x + 1 (mod 2⁶⁴) that starts with the seed, mapped to ½ − x/2⁶⁴.
//! Any element is reached in at most 64 multiplications (Brown, "Random number generation with
//! arbitrary strides", 1994), so a rank makes just its own rows and every grid sees the same bits.

/// The seed of netlib HPL.
pub const DEFAULT_SEED: u64 = 100;

const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const INCREMENT: u64 = 1;

/// Independent streams per run of rows: one step of the sequence waits for the one before it, so
/// several are kept in flight.
const STREAMS: usize = 8;

/// The affine map x ↦ mul·x + add (mod 2⁶⁴) that some number of steps amounts to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Jump {
    mul: u64,
    add: u64,
}

impl Jump {
    const STEP: Jump = Jump { mul: MULTIPLIER, add: INCREMENT };

    const fn apply(self, x: u64) -> u64 {
        self.mul.wrapping_mul(x).wrapping_add(self.add)
    }

    /// First `self`, then `next`.
    const fn then(self, next: Jump) -> Jump {
        Jump { mul: next.mul.wrapping_mul(self.mul), add: next.apply(self.add) }
    }

    /// `steps` steps at once, by squaring.
    const fn of(steps: u64) -> Jump {
        let (mut result, mut power, mut rest) = (Jump { mul: 1, add: 0 }, Jump::STEP, steps);
        while rest > 0 {
            if rest & 1 == 1 {
                result = result.then(power);
            }
            power = power.then(power);
            rest >>= 1;
        }
        result
    }
}

const STRIDE: Jump = Jump::of(STREAMS as u64);

/// ½ − x/2⁶⁴, rounded where netlib rounds: x to 53 bits, then the difference.
///
/// The conversion of x is written as two exact halves and one rounded sum, which vectorises where
/// the machine's own u64 → f64 does not exist.
#[inline(always)]
fn to_unit(x: u64) -> f64 {
    // 2⁸⁴ + high·2³² and 2⁵² + low, as bit patterns.
    let high = f64::from_bits(0x4530_0000_0000_0000 | (x >> 32));
    let low = f64::from_bits(0x4330_0000_0000_0000 | (x & 0xffff_ffff));
    let both = f64::from_bits(0x4530_0000_0010_0000); // 2⁸⁴ + 2⁵²
    0.5 - ((high - both) + low) * f64::from_bits(0x3bf0_0000_0000_0000) // 2⁻⁶⁴
}

/// The generator of one N × (N+1) matrix [A | b]; column N is b.
#[derive(Clone, Copy, Debug)]
pub struct Generator {
    n: usize,
    seed: u64,
}

impl Generator {
    /// The matrix of order `n` that `seed` gives; netlib's is [`DEFAULT_SEED`].
    pub fn new(n: usize, seed: u64) -> Self {
        Generator { n, seed }
    }

    /// Order of the matrix.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Element (`row`, `col`), col ≤ N.
    pub fn element(&self, row: usize, col: usize) -> f64 {
        to_unit(self.state(row, col))
    }

    /// Rows `row .. row + out.len()` of global column `col`, which must lie in the matrix. One call
    /// costs a jump of about a hundred cycles and then about a cycle or two an element: call it once
    /// for every contiguous run of rows that a rank holds (NB rows, or all of them if P = 1).
    ///
    /// # Panics
    /// If the rows or the column lie outside of the N × (N+1) matrix.
    pub fn fill(&self, row: usize, col: usize, out: &mut [f64]) {
        assert!(
            row + out.len() <= self.n && col <= self.n,
            "rows {row}..{} of column {col} of [A | b] of order {}",
            row + out.len(),
            self.n
        );
        let mut x = [self.state(row, col); STREAMS];
        for s in 1..STREAMS {
            x[s] = Jump::STEP.apply(x[s - 1]);
        }
        let mut chunks = out.chunks_exact_mut(STREAMS);
        for chunk in &mut chunks {
            for s in 0..STREAMS {
                chunk[s] = to_unit(x[s]);
                x[s] = STRIDE.apply(x[s]);
            }
        }
        for (value, state) in chunks.into_remainder().iter_mut().zip(x) {
            *value = to_unit(state);
        }
    }

    fn state(&self, row: usize, col: usize) -> u64 {
        // The position is taken mod 2⁶⁴, the sequence's period.
        let position = (col as u64).wrapping_mul(self.n as u64).wrapping_add(row as u64).wrapping_add(1);
        Jump::of(position).apply(self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// ‖A‖∞, ‖A‖₁ and ‖b‖∞, column by column.
    fn norms(n: usize) -> (f64, f64, f64) {
        let generator = Generator::new(n, DEFAULT_SEED);
        let (mut rows, mut column, mut one) = (vec![0.0; n], vec![0.0; n], 0.0f64);
        for j in 0..n {
            generator.fill(0, j, &mut column);
            one = one.max(column.iter().map(|v| v.abs()).sum());
            rows.iter_mut().zip(&column).for_each(|(sum, v)| *sum += v.abs());
        }
        generator.fill(0, n, &mut column);
        let max = |v: &[f64]| v.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        (max(&rows), one, max(&column))
    }

    /// What netlib HPL 2.3 prints with seed 100, to all of its digits.
    #[test]
    fn golden_norms_of_netlib() {
        for (n, infinity, one, b) in [
            (10, "3.421364", "3.390136", "0.439823"),
            (100, "28.570778", "27.783704", "0.493970"),
            (1000, "262.773468", "263.865287", "0.499776"),
            (4000, "1032.941422", "1032.746040", "0.499822"),
        ] {
            let (i, o, m) = norms(n);
            let got = (format!("{i:.6}"), format!("{o:.6}"), format!("{m:.6}"));
            assert_eq!(got, (infinity.into(), one.into(), b.into()), "N = {n}");
        }
        for (n, infinity) in
            [(512, "138.677792"), (768, "205.030952"), (1001, "263.066624"), (1024, "271.694900")]
        {
            assert_eq!(format!("{:.6}", norms(n).0), infinity, "N = {n}");
        }
    }

    #[test]
    fn conversion_rounds_once() {
        // The machine's own conversion, which rounds to nearest even.
        for x in [0, 1, (1 << 53) - 1, (1 << 53) + 1, (1 << 54) + 2, (1 << 54) + 6, 1 << 63, u64::MAX] {
            assert_eq!(to_unit(x), 0.5 - x as f64 * 2f64.powi(-64), "{x}");
        }
    }

    #[test]
    fn jumps_are_steps() {
        let mut x = 7;
        for steps in 0..100 {
            assert_eq!(Jump::of(steps).apply(7), x);
            x = Jump::STEP.apply(x);
        }
        assert_eq!(Jump::of(12_345_678_901).then(Jump::of(98_765_432_109)), Jump::of(111_111_111_010));
    }

    proptest! {
        /// However a column is cut into runs of rows, its bits are the same.
        #[test]
        fn any_cut_gives_the_same_bits(
            n in 1usize..200, col in 0usize..200, cuts in prop::collection::vec(0usize..200, 0..6), seed: u64
        ) {
            let col = col.min(n);
            let generator = Generator::new(n, seed);
            let whole: Vec<u64> = (0..n).map(|i| generator.element(i, col).to_bits()).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(n)).chain([0, n]).collect();
            cuts.sort();
            let mut got = vec![0.0; n];
            for pair in cuts.windows(2) {
                generator.fill(pair[0], col, &mut got[pair[0]..pair[1]]);
            }
            prop_assert_eq!(got.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), whole);
        }

        #[test]
        fn conversion_is_the_machines(x: u64) {
            prop_assert_eq!(to_unit(x), 0.5 - x as f64 * 2f64.powi(-64));
        }
    }
}
