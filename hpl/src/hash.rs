//! One number for all bits of a solution.

/// FNV-1a, 64 bits (Fowler, Noll, Vo; draft-eastlake-fnv), over the little-endian bytes of x in
/// global order. Two solutions of one length that differ in a single byte never hash alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Hash(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    /// The hash of `x`.
    pub fn of(x: &[f64]) -> u64 {
        let mut hash = Hash::default();
        hash.values(x);
        hash.finish()
    }

    /// Continues with the next values.
    pub fn values(&mut self, x: &[f64]) {
        x.iter().for_each(|v| self.bytes(&v.to_bits().to_le_bytes()));
    }

    /// The hash of what came so far.
    pub fn finish(self) -> u64 {
        self.0
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// All 16 hexadecimal digits of a hash.
pub fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vectors() {
        for (text, expected) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            let mut hash = Hash::default();
            hash.bytes(text.as_bytes());
            assert_eq!(hash.finish(), expected, "{text}");
        }
    }

    #[test]
    fn every_bit_counts() {
        let x: Vec<f64> = (0..64).map(|i| f64::from(i) * 0.37 - 3.0).collect();
        let all = Hash::of(&x);
        for i in 0..x.len() {
            for bit in 0..64 {
                let mut y = x.clone();
                y[i] = f64::from_bits(y[i].to_bits() ^ (1 << bit));
                assert_ne!(Hash::of(&y), all, "element {i} bit {bit}");
            }
        }
        let mut parts = Hash::default();
        parts.values(&x[..17]);
        parts.values(&x[17..]);
        assert_eq!(parts.finish(), all);
        assert_ne!(Hash::of(&[0.0]), Hash::of(&[-0.0]));
    }
}
