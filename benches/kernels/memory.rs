//! Large matrices in huge pages, as the library's arena has them.

use bytemuck::Pod;

/// Memory of the system's own, never given back: the benchmark ends soon.
pub fn huge<T: Pod>(len: usize) -> &'static mut [T] {
    let bytes = (len * size_of::<T>()).next_multiple_of(2 << 20) + (2 << 20);
    // SAFETY: a fresh mapping of our own, zero and so valid for any `Pod`; aligned within it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert!(base != libc::MAP_FAILED, "no memory for {bytes} bytes");
        let start = (base as usize).next_multiple_of(2 << 20);
        #[cfg(target_os = "linux")]
        libc::madvise(start as *mut _, bytes - (2 << 20), libc::MADV_HUGEPAGE);
        std::slice::from_raw_parts_mut(start as *mut T, len)
    }
}
