//! Pages from the system: zeroed, touched when used.

use crate::error::{Error, Result};

/// From here on huge pages are asked for.
const LARGE: usize = 4 << 20;
const HUGE: usize = 2 << 20;

/// A private anonymous mapping.
pub struct Pages {
    base: *mut libc::c_void,
    mapped: usize,
    at: *mut u8,
}

// SAFETY: owns its mapping; the bytes are used under the protocol of whoever shares them.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `bytes` zeros, page-aligned; large ones aligned for huge pages.
    ///
    /// # Errors
    /// [`Error::Resources`] when the system refuses.
    pub fn new(bytes: usize) -> Result<Self> {
        Pages::map(bytes, bytes >= LARGE, 0)
    }

    /// As [`Pages::new`], for memory of which little will ever be touched.
    ///
    /// # Errors
    /// As [`Pages::new`].
    pub fn sparse(bytes: usize) -> Result<Self> {
        Pages::map(bytes, false, libc::MAP_NORESERVE)
    }

    fn map(bytes: usize, large: bool, flags: libc::c_int) -> Result<Self> {
        let mapped = bytes.max(1).saturating_add(if large { HUGE } else { 0 });
        // SAFETY: a fresh anonymous mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON | flags,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::Resources {
                what: format!("{bytes} bytes of memory: {}", std::io::Error::last_os_error()),
                remedy: "use a smaller problem or more hosts".into(),
            });
        }
        let skip = if large { (base as usize).next_multiple_of(HUGE) - base as usize } else { 0 };
        // SAFETY: `skip < HUGE`, which was mapped in addition.
        let at = unsafe { base.cast::<u8>().add(skip) };
        #[cfg(target_os = "linux")]
        if large {
            // SAFETY: advice on our own mapping; where it is refused, small pages serve.
            unsafe { libc::madvise(at.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Pages { base, mapped, at })
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping; whoever used it kept this value.
        unsafe { libc::munmap(self.base, self.mapped) };
    }
}
