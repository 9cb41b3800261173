//! What macOS tells of itself by name, as the command `sysctl -n NAME` does.

use std::ffi::CStr;

/// A number, of 4 or 8 bytes; `None` where the system does not know the name.
pub fn number(name: &CStr) -> Option<u64> {
    let mut bytes = [0u8; 8];
    let len = read(name, &mut bytes)?;
    // Apple's machines are little-endian: what was not written is the upper half.
    matches!(len, 4 | 8).then(|| u64::from_le_bytes(bytes))
}

/// A text of at most 255 bytes, trimmed; `None` where the system does not know the name.
pub fn text(name: &CStr) -> Option<String> {
    let mut bytes = [0u8; 256];
    let len = read(name, &mut bytes)?;
    let text = String::from_utf8_lossy(&bytes[..len]);
    Some(text.trim_end_matches('\0').trim().to_string()).filter(|text| !text.is_empty())
}

/// Fills `bytes`; returns how many were written.
fn read(name: &CStr, bytes: &mut [u8]) -> Option<usize> {
    let mut len = bytes.len();
    // SAFETY: writes at most `len` bytes into `bytes`, and nothing when they do not suffice.
    let failed = unsafe {
        libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &raw mut len, std::ptr::null_mut(), 0)
    } != 0;
    (!failed && len <= bytes.len()).then_some(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_texts_are_read_and_unknown_names_are_none() {
        assert!(number(c"hw.memsize").unwrap() > 1 << 30);
        assert!(number(c"hw.ncpu").unwrap() >= 1);
        assert!(text(c"kern.osproductversion").unwrap().contains('.'));
        assert_eq!(number(c"fulmen.nothing"), None);
        assert_eq!(text(c"fulmen.nothing"), None);
    }
}
