//! How a failure is put into words for other ranks.

use super::frame::TEXT;
use crate::fabric::shared::area::Failure;

/// What others are told of a failure, and its exit code.
pub fn encode(failure: &Failure) -> (Vec<u8>, u64) {
    let (kind, code, rank, text) = match failure {
        Failure::Aborted { by, reason, code } => (0, *code, *by, reason.as_str()),
        Failure::Gone { rank } => (1, 0, *rank, ""),
        Failure::Interrupted => (2, 0, 0, ""),
    };
    let mut bytes = vec![kind, code];
    bytes.extend_from_slice(head(text, TEXT - 2).as_bytes());
    (bytes, rank as u64)
}

/// The first bytes of a text, `most` of them, or a few less where a character would be cut.
pub fn head(text: &str, most: usize) -> &str {
    let mut len = text.len().min(most);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    &text[..len]
}

/// The failure in the words of another rank; `None`: there is none.
pub fn decode(bytes: &[u8], rank: u64, size: usize) -> Option<Failure> {
    let rank = usize::try_from(rank).ok().filter(|rank| *rank < size)?;
    let (&[kind, code], text) = bytes.split_first_chunk::<2>()?;
    match kind {
        0 => Some(Failure::Aborted { by: rank, reason: String::from_utf8_lossy(text).into_owned(), code }),
        1 => Some(Failure::Gone { rank }),
        2 => Some(Failure::Interrupted),
        _ => None,
    }
}
