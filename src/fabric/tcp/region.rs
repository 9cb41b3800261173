//! A range of registered memory, held as long as the transport may touch it.

use std::sync::Arc;

use crate::fabric::checksum;
use crate::fabric::{Memory, rules};

/// Bytes `at .. at + len` of some memory, which are inside it.
#[derive(Clone)]
pub struct Region {
    memory: Arc<Memory>,
    at: usize,
    pub len: usize,
}

impl Region {
    /// Any memory will do here.
    ///
    /// # Errors
    /// When the range is not inside the memory.
    pub fn new(memory: &Arc<Memory>, range: &std::ops::Range<usize>) -> Result<Self, rules::Broken> {
        rules::range(true, memory, range)?;
        Ok(Region { memory: Arc::clone(memory), at: range.start, len: range.len() })
    }

    /// # Panics
    /// When it is not inside.
    pub fn part(&self, at: usize, len: usize) -> Region {
        assert!(at + len <= self.len);
        Region { memory: Arc::clone(&self.memory), at: self.at + at, len }
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: inside the memory, as `new` has checked.
        unsafe { self.memory.as_ptr().add(self.at) }
    }

    /// Writes the first bytes of an armed range.
    ///
    /// # Panics
    /// When there is not so much room.
    pub fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len);
        // SAFETY: inside the memory. It is armed, so that nobody but the transport touches it (`Buf`'s ledger),
        // and the transport fills it once.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr(), bytes.len()) };
    }

    /// CRC32C over all bytes, continuing from `crc`.
    pub fn crc(&self, crc: u32) -> u32 {
        // SAFETY: inside the memory and initialised. Nobody writes meanwhile: the range is being put, or has
        // just been filled by the transport itself.
        let bytes = unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) };
        checksum::crc32c_append(crc, bytes)
    }
}
