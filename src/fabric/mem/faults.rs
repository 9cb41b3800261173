//! What goes wrong, decided by a seed alone.

use crate::fabric::Lane;

/// A plan of faults. With a plan, puts travel as frames with a sequence number, a length and a CRC32C,
/// and ranks run one at a time in an order drawn from the seed (under [`super::Job::run`]): the same seed
/// and program meet the same faults in the same order.
///
/// A rank must not wait for another except through the fabric: the other may not be let run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Faults {
    /// Where all decisions come from.
    pub seed: u64,
    /// A frame is held back for up to so many operations of the job.
    pub delay: u32,
    /// Whether frames of one lane may overtake those of another between the same two ranks.
    pub reorder: bool,
    /// Probability that a frame is lost.
    pub drop: f64,
    /// Probability that a frame comes twice. Duplicates are told by their number and ignored.
    pub duplicate: f64,
    /// Probability that a bit of a frame is flipped.
    pub corrupt: f64,
    /// A rank that ends.
    pub kill: Option<Kill>,
}

/// A rank that ends without a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kill {
    /// Which.
    pub rank: usize,
    /// At which of its operations on the fabric, from 0.
    pub at: u64,
}

impl Faults {
    /// Delay, reordering and duplicates: nothing that a program could notice.
    pub fn harmless(seed: u64) -> Self {
        Faults { seed, delay: 20, reorder: true, duplicate: 0.1, ..Faults::default() }
    }
}

/// What becomes of one frame.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fate {
    pub dropped: bool,
    pub duplicated: bool,
    /// Which bit is flipped, to be taken modulo the number of bits.
    pub flipped: Option<u64>,
    pub delay: u64,
}

impl Faults {
    /// The fate of a put, whatever the order in which ranks run.
    pub fn fate(&self, from: usize, to: usize, lane: Lane, seq: u64) -> Fate {
        let mut random = Random::new(self.seed);
        for word in [from as u64, to as u64, u64::from(lane.0), seq] {
            random = Random::new(random.next() ^ word);
        }
        Fate {
            dropped: random.chance(self.drop),
            duplicated: random.chance(self.duplicate),
            flipped: random.chance(self.corrupt).then(|| random.next()),
            delay: random.below(u64::from(self.delay) + 1),
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform below `n` (0 when `n` is 0).
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    pub fn chance(&mut self, p: f64) -> bool {
        // 53 bits, so that 0 is never and 1 always.
        ((self.next() >> 11) as f64) < p * (1u64 << 53) as f64
    }
}
