//! Anonymous shared memory: a file without a name that processes inherit and map.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::error::{Error, Result};

/// An open file of memory.
pub struct Segment {
    file: OwnedFd,
    len: usize,
}

fn system(what: &str) -> Error {
    Error::System { what: what.into(), os: std::io::Error::last_os_error().to_string() }
}

/// Whether `fd` is an open file of at least `len` bytes, and not empty.
fn check(fd: RawFd, len: usize) -> Result<()> {
    // SAFETY: `stat` is plain data, all zeros is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: writes a `stat`; any number is a fine argument.
    if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return Err(system(&format!("looking for the shared memory that came as file {fd}")));
    }
    // macOS rounds the size up to pages.
    if stat.st_size < len.max(1) as libc::off_t {
        return Err(Error::System {
            what: format!("the shared memory that came as file {fd}"),
            os: format!("has {} bytes instead of {len}", stat.st_size),
        });
    }
    Ok(())
}

impl Segment {
    /// `len` zeros (at least one page), which take no memory until they are reserved or written. Closed on `exec`.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(len: usize) -> Result<Self> {
        let file = open_anonymous()?;
        let len = len.max(1);
        // SAFETY: our own file.
        if unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) } != 0 {
            return Err(system(&format!("making a segment of {len} bytes of shared memory")));
        }
        Ok(Segment { file, len })
    }

    /// The segment of `len` bytes that was inherited as file `fd`.
    ///
    /// # Errors
    /// [`Error::System`] when there is no such file or it has another size.
    ///
    /// # Safety
    /// `fd` belongs to nobody else in this process.
    pub unsafe fn inherited(fd: RawFd, len: usize) -> Result<Self> {
        check(fd, len)?;
        // SAFETY: open, as the check has shown; the caller says that nobody else has it.
        Ok(Segment::of(unsafe { OwnedFd::from_raw_fd(fd) }, len))
    }

    fn of(file: OwnedFd, len: usize) -> Self {
        // SAFETY: sets a flag of our own file, so that this process' own children do not get it.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
        Segment { file, len: len.max(1) }
    }

    /// The segment of `len` bytes that another process has sent.
    ///
    /// # Errors
    /// As [`Segment::inherited`].
    pub fn received(file: OwnedFd, len: usize) -> Result<Self> {
        check(file.as_raw_fd(), len)?;
        Ok(Segment::of(file, len))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The file's number.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Maps all of it.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn map(&self) -> Result<Mapping> {
        #[cfg(target_os = "linux")]
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        #[cfg(not(target_os = "linux"))]
        let flags = libc::MAP_SHARED;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping of our own file.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), self.len, prot, flags, self.fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(system(&format!("mapping {} bytes of shared memory", self.len)));
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice on our own mapping; where the system refuses it, small pages serve.
        unsafe {
            libc::madvise(at, self.len, libc::MADV_HUGEPAGE)
        };
        Ok(Mapping { at: at.cast(), len: self.len })
    }

    /// Takes the pages of a range from the system now, or says why there are none.
    pub fn reserve(&self, at: usize, len: usize) -> std::result::Result<(), String> {
        os::reserve(self.fd(), at, len)
    }

    /// Makes a range zero again and gives its pages back where the system can.
    pub fn discard(&self, mapping: &Mapping, at: usize, len: usize) {
        debug_assert!(at + len <= mapping.len);
        if !os::punch(self.fd(), at, len) {
            // SAFETY: inside the mapping; nobody uses the range any more.
            unsafe { mapping.as_ptr().add(at).write_bytes(0, len) };
        }
    }
}

/// A mapped segment.
pub struct Mapping {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory; its users keep to the protocol of `shared::slot`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; who used it kept this value.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

#[cfg(target_os = "linux")]
fn open_anonymous() -> Result<OwnedFd> {
    // SAFETY: the name is for /proc only; returns a new file or -1.
    let fd = unsafe { libc::memfd_create(c"fulmen".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(system("making a segment of shared memory"));
    }
    // SAFETY: new, and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A name that lives from `shm_open` to the next line (POSIX has no anonymous ones; macOS allows 31 bytes).
#[cfg(not(target_os = "linux"))]
fn open_anonymous() -> Result<OwnedFd> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("/fulmen.{:x}.{number:x}", std::process::id());
    let Ok(name) = std::ffi::CString::new(name) else { return Err(system("naming shared memory")) };
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    // SAFETY: a valid C string; returns a new file or -1. macOS sets close-on-exec by itself.
    let fd = unsafe { libc::shm_open(name.as_ptr(), flags, 0o600) };
    if fd < 0 {
        return Err(system("making a segment of shared memory"));
    }
    // SAFETY: as above.
    unsafe { libc::shm_unlink(name.as_ptr()) };
    // SAFETY: new, and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(target_os = "linux")]
mod os {
    use std::os::fd::RawFd;

    /// From here on the system's free memory is looked at first: it would rather kill a process than refuse.
    const LARGE: usize = 16 << 20;

    pub fn reserve(fd: RawFd, at: usize, len: usize) -> Result<(), String> {
        if len >= LARGE
            && let Some(available) = available()
            && len > available
        {
            return Err(format!("this host has {available} bytes available"));
        }
        // In pieces: a signal makes the system undo and repeat the one it is at.
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(4 * LARGE);
            // SAFETY: our own file.
            if unsafe { libc::fallocate(fd, 0, (at + done) as libc::off_t, piece as libc::off_t) } == 0 {
                done += piece;
                continue;
            }
            let e = std::io::Error::last_os_error();
            if e.kind() != std::io::ErrorKind::Interrupted {
                punch(fd, at, len);
                return Err(e.to_string());
            }
        }
        Ok(())
    }

    /// `MemAvailable` of this host.
    fn available() -> Option<usize> {
        let info = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
    }

    pub fn punch(fd: RawFd, at: usize, len: usize) -> bool {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: our own file.
        unsafe { libc::fallocate(fd, mode, at as libc::off_t, len as libc::off_t) == 0 }
    }
}

/// Elsewhere shared memory is swapped like any other: nothing to reserve.
#[cfg(not(target_os = "linux"))]
mod os {
    use std::os::fd::RawFd;

    pub fn reserve(_: RawFd, _: usize, _: usize) -> Result<(), String> {
        Ok(())
    }

    pub fn punch(_: RawFd, _: usize, _: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_see_the_same_bytes_and_discarded_ones_are_zero() {
        let segment = Segment::new(1 << 20).unwrap();
        let (a, b) = (segment.map().unwrap(), segment.map().unwrap());
        segment.reserve(0, 1 << 16).unwrap();
        // SAFETY: inside both mappings, one thread.
        unsafe {
            a.as_ptr().add(100).write(7);
            assert_eq!(b.as_ptr().add(100).read(), 7);
            segment.discard(&a, 0, 1 << 16);
            assert_eq!(b.as_ptr().add(100).read(), 0);
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_an_error() {
        // SAFETY: no such file: nobody owns it.
        let e = unsafe { Segment::inherited(9999, 10) }.err().unwrap();
        assert_eq!(e.exit_code(), 3);
    }
}
