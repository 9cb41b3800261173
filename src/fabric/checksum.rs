//! CRC32C (Castagnoli's polynomial; RFC 3720, B.4): the check of bytes that travel where the link has none.

use crc_fast::{CrcAlgorithm, Digest};

/// Of these bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Of bytes of which `crc` is the checksum (none: 0), and these behind them.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    if crc == 0 {
        return crc32c(bytes);
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit, as the standard defines it.
    fn by_definition(bytes: &[u8]) -> u32 {
        let step = |crc: u32, byte: &u8| {
            (0..8).fold(
                crc ^ u32::from(*byte),
                |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 },
            )
        };
        !bytes.iter().fold(!0, step)
    }

    #[test]
    fn known_values() {
        assert_eq!((crc32c(b""), crc32c(b"123456789")), (0, 0xE306_9283));
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
    }

    proptest! {
        #[test]
        fn in_pieces_as_by_definition(bytes in prop::collection::vec(any::<u8>(), 0..3000), at: prop::sample::Index) {
            let (head, tail) = bytes.split_at(at.index(bytes.len() + 1));
            prop_assert_eq!(crc32c(&bytes), by_definition(&bytes));
            prop_assert_eq!(crc32c_append(crc32c(head), tail), crc32c(&bytes));
        }
    }
}
