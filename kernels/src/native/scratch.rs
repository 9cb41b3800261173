//! Working memory for packed operands.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Mutex;

/// Page-aligned memory of `len` elements, zero at first; in huge pages where it is large enough.
pub(super) struct Buffer<T: bytemuck::Pod> {
    ptr: NonNull<T>,
    len: usize,
}

// SAFETY: it owns its memory as a `Vec` does.
unsafe impl<T: bytemuck::Pod + Send> Send for Buffer<T> {}

const HUGE: usize = 2 << 20;

impl<T: bytemuck::Pod> Buffer<T> {
    fn layout(len: usize) -> Layout {
        let bytes = len.max(1) * size_of::<T>();
        let align = if bytes >= 2 * HUGE { HUGE } else { 4096 };
        Layout::from_size_align(bytes, align).expect("a buffer fits the address space")
    }

    pub(super) fn new(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the size is not 0.
        let raw = unsafe { alloc(layout) };
        let Some(ptr) = NonNull::new(raw.cast::<T>()) else { handle_alloc_error(layout) };
        // Before the first touch, or the pages are small for good.
        #[cfg(target_os = "linux")]
        if layout.align() == HUGE {
            // SAFETY: whole pages of our own; advice only.
            unsafe { libc::madvise(raw.cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        // SAFETY: `layout` is that long. All zero bits are a value of any `Pod`.
        unsafe { raw.write_bytes(0, layout.size()) };
        Buffer { ptr, len }
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr.as_ptr()
    }
}

impl<T: bytemuck::Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with the same layout.
        unsafe { dealloc(self.ptr.as_ptr().cast(), Self::layout(self.len)) };
    }
}

/// Buffers that are kept from call to call: the pages of a new one cost as much as packing into it.
pub(super) struct Pool<T: bytemuck::Pod>(Mutex<Vec<Buffer<T>>>);

/// Buffers that a pool keeps at most: callers beyond, and those with more to pack than usual, pay for
/// their pages.
const KEPT: usize = 2;
/// Bytes of a buffer that is kept.
const KEPT_BYTES: usize = 32 << 20;

impl<T: bytemuck::Pod> Pool<T> {
    pub(super) fn new() -> Self {
        Pool(Mutex::new(Vec::new()))
    }

    /// Runs `work` with a buffer of at least `len` elements, of any content.
    pub(super) fn with<R>(&self, len: usize, work: impl FnOnce(&mut Buffer<T>) -> R) -> R {
        let kept = {
            let mut free = self.0.lock().unwrap_or_else(|e| e.into_inner());
            let fits = |b: &Buffer<T>| b.len >= len && b.len / 4 <= len;
            free.iter().position(fits).map(|i| free.swap_remove(i))
        };
        let mut buffer = kept.unwrap_or_else(|| Buffer::new(len));
        let result = work(&mut buffer);
        if buffer.len * size_of::<T>() > KEPT_BYTES {
            return result;
        }
        let mut free = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if free.len() == KEPT {
            free.remove(0);
        }
        free.push(buffer);
        result
    }
}

thread_local! {
    static OWN: RefCell<Vec<Buffer<u64>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with this thread's own memory for `len` elements, of any content.
pub(super) fn with_own<T: bytemuck::Pod, R>(len: usize, work: impl FnOnce(*mut T) -> R) -> R {
    let words = (len * size_of::<T>()).div_ceil(8);
    let mut buffer = OWN
        .with_borrow_mut(Vec::pop)
        .filter(|b| b.len >= words)
        .unwrap_or_else(|| Buffer::new(words.next_power_of_two().max(1 << 13)));
    let result = work(buffer.as_mut_ptr().cast());
    OWN.with_borrow_mut(|own| {
        if own.is_empty() {
            own.push(buffer);
        }
    });
    result
}
