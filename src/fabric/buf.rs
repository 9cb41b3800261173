//! Registered memory and the ledger that keeps it safe.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;

use bytemuck::Pod;
use fulmen_kernels::{MatMut, SharedMut};

use super::{Fabric, Lane, Ticket};
use crate::error::{Error, Result};

/// A piece of memory registered with a fabric. Transports make it; programs use it through [`Buf`].
pub struct Memory {
    ptr: *mut u8,
    len: usize,
    /// What keeps the bytes alive (a mapping, a box, …) and tells the transport where they are.
    owner: Box<dyn std::any::Any + Send + Sync>,
}

// SAFETY: plain bytes; who may touch which of them when is the ledger's business (see `Buf`) and the
// fabric's protocol's, and both hand over with release/acquire.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Wraps `len` bytes at `ptr`, kept alive by `owner`.
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `len` bytes, initialised and aligned to 64, for as long
    /// as `owner` lives, and used through this `Memory` alone.
    pub unsafe fn new(ptr: *mut u8, len: usize, owner: Box<dyn std::any::Any + Send + Sync>) -> Self {
        Memory { ptr, len, owner }
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What the transport keeps with it.
    pub fn owner(&self) -> &(dyn std::any::Any + Send + Sync) {
        &*self.owner
    }
}

/// A typed array in registered memory.
///
/// It keeps a ledger of the ranges that are armed (a peer may write them at any moment) and of the
/// ranges that are being put (the transport may still read them). A reference to an armed range, or a
/// mutable one to either, is refused: this makes the one-sided world safe to program in.
pub struct Buf<T> {
    memory: Arc<Memory>,
    len: usize,
    ledger: Mutex<Ledger>,
    _element: PhantomData<T>,
}

#[derive(Default)]
struct Ledger {
    /// Oldest first.
    armed: Vec<Armed>,
    sending: Vec<(Ticket, Range<usize>)>,
}

struct Armed {
    lane: Lane,
    from: usize,
    /// Number of the arm, from the fabric.
    arm: u64,
    /// Elements.
    range: Range<usize>,
}

impl Ledger {
    fn check_readable(&self, range: &Range<usize>) {
        assert!(
            !self.armed.iter().any(|a| overlap(&a.range, range)),
            "{range:?} is armed and cannot be read before its put has been waited for"
        );
    }

    fn check_writable(&self, range: &Range<usize>) {
        assert!(
            !self.armed.iter().any(|a| overlap(&a.range, range)),
            "{range:?} is armed and cannot be written"
        );
        assert!(!self.sending.iter().any(|(_, r)| overlap(r, range)), "{range:?} is being put: flush first");
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl<T: Pod> Buf<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::Resources`] when the fabric has not enough memory.
    ///
    /// # Panics
    /// When `T` has no size.
    pub fn zeros(fabric: &dyn Fabric, len: usize) -> Result<Self> {
        assert!(size_of::<T>() > 0, "elements without size cannot travel");
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let Some(bytes) = bytes else {
            return Err(Error::Resources {
                what: format!("{len} elements of {} bytes are more than can be addressed", size_of::<T>()),
                remedy: "use a smaller problem".into(),
            });
        };
        let memory = fabric.alloc(bytes)?;
        assert!((memory.as_ptr() as usize).is_multiple_of(align_of::<T>()) && memory.len() >= bytes);
        Ok(Buf { memory, len, ledger: Mutex::default(), _element: PhantomData })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        range.start * size_of::<T>()..range.end * size_of::<T>()
    }

    fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// When part of it is armed: a peer may be writing there.
    pub fn read(&self, range: Range<usize>) -> &[T] {
        let bytes = self.bytes(&range);
        self.ledger().check_readable(&range);
        // SAFETY: in bounds and initialised; no peer writes there (not armed), and arming needs `&mut self`,
        // which this borrow excludes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(bytes.start).cast(), range.len()) }
    }

    /// The elements of `range`, to write.
    ///
    /// # Panics
    /// When part of it is armed or being put.
    pub fn write(&mut self, range: Range<usize>) -> &mut [T] {
        let bytes = self.bytes(&range);
        self.ledger().check_writable(&range);
        // SAFETY: in bounds and initialised; exclusive by `&mut self` and the check above.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(bytes.start).cast(), range.len()) }
    }

    /// The elements of `range` as a column-major matrix of `nrows` rows, to be written by several threads.
    ///
    /// # Safety
    /// While parts of the result are in use nobody else may read or write them, nor may `range` be armed or
    /// put.
    ///
    /// # Panics
    /// When part of `range` is armed or being put, or `nrows` does not divide its length.
    pub unsafe fn shared(&self, range: Range<usize>, nrows: usize) -> SharedMut<'_, T> {
        let bytes = self.bytes(&range);
        self.ledger().check_writable(&range);
        assert!(range.len().is_multiple_of(nrows.max(1)), "{} elements in columns of {nrows}", range.len());
        // SAFETY: in bounds and initialised; exclusive by the caller's promise.
        let all = unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_ptr().add(bytes.start).cast::<T>(), range.len())
        };
        let ncols = range.len() / nrows.max(1);
        SharedMut::new(MatMut::from_column_major_slice_mut(all, nrows, ncols))
    }

    /// Lets `from` fill `range` once.
    ///
    /// # Errors
    /// When the fabric is broken.
    ///
    /// # Panics
    /// When part of `range` is armed already or being put.
    pub fn arm(&mut self, fabric: &dyn Fabric, lane: Lane, from: usize, range: Range<usize>) -> Result<()> {
        let bytes = self.bytes(&range);
        let ledger = self.ledger.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        ledger.check_writable(&range);
        let arm = fabric.arm(lane, from, &self.memory, bytes)?;
        ledger.armed.push(Armed { lane, from, arm, range });
        Ok(())
    }

    /// Puts `range` into the next range that `to` armed for this rank on `lane`.
    ///
    /// # Errors
    /// When a peer was lost, or the put is longer than the range armed for it.
    ///
    /// # Panics
    /// When part of `range` is armed.
    pub fn put(&self, fabric: &dyn Fabric, lane: Lane, to: usize, range: Range<usize>) -> Result<Ticket> {
        let bytes = self.bytes(&range);
        let mut ledger = self.ledger();
        ledger.check_readable(&range);
        let ticket = fabric.put(lane, to, &self.memory, bytes)?;
        ledger.sending.push((ticket, range));
        Ok(ticket)
    }

    /// Waits for the oldest range of this buffer armed for `from` on `lane`; returns what was filled.
    ///
    /// Ranges of several buffers armed for the same rank on the same lane are waited for in the order
    /// armed.
    ///
    /// # Errors
    /// As [`Fabric::wait`]; [`Error::Internal`] when nothing of this buffer is armed there.
    pub fn wait(&self, fabric: &dyn Fabric, lane: Lane, from: usize) -> Result<Range<usize>> {
        let (at, arm) = self.oldest_armed(lane, from)?;
        let bytes = fabric.wait(lane, from, arm)?;
        self.arrived(at, bytes)
    }

    /// As [`Buf::wait`], without waiting: `None` when it has not come yet.
    ///
    /// # Errors
    /// As [`Buf::wait`].
    pub fn try_wait(&self, fabric: &dyn Fabric, lane: Lane, from: usize) -> Result<Option<Range<usize>>> {
        let (at, arm) = self.oldest_armed(lane, from)?;
        match fabric.try_wait(lane, from, arm)? {
            Some(bytes) => self.arrived(at, bytes).map(Some),
            None => Ok(None),
        }
    }

    fn oldest_armed(&self, lane: Lane, from: usize) -> Result<(usize, u64)> {
        let ledger = self.ledger();
        let at = ledger.armed.iter().position(|a| a.lane == lane && a.from == from);
        at.map(|at| (at, ledger.armed[at].arm)).ok_or_else(|| {
            Error::Internal(format!(
                "waiting for rank {from} on the {lane} lane, for which nothing of this buffer is armed"
            ))
        })
    }

    fn arrived(&self, at: usize, bytes: usize) -> Result<Range<usize>> {
        let Armed { lane, from, range, .. } = self.ledger().armed.remove(at);
        if !bytes.is_multiple_of(size_of::<T>()) {
            return Err(Error::Internal(format!(
                "{bytes} bytes came from rank {from} on the {lane} lane for elements of {}",
                size_of::<T>()
            )));
        }
        Ok(range.start..range.start + bytes / size_of::<T>())
    }

    /// Whether everything put from this buffer has left it: then [`Buf::flush`] does not wait.
    ///
    /// # Errors
    /// As [`Fabric::is_done`].
    pub fn is_flushed(&mut self, fabric: &dyn Fabric) -> Result<bool> {
        let ledger = self.ledger.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        while let Some((ticket, _)) = ledger.sending.last() {
            if !fabric.is_done(*ticket)? {
                return Ok(false);
            }
            ledger.sending.pop();
        }
        Ok(true)
    }

    /// Waits until everything put from this buffer has left it.
    ///
    /// # Errors
    /// As [`Fabric::flush`].
    pub fn flush(&mut self, fabric: &dyn Fabric) -> Result<()> {
        let ledger = self.ledger.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for at in 0..ledger.sending.len() {
            if let Err(e) = fabric.flush(ledger.sending[at].0) {
                ledger.sending.drain(..at);
                return Err(e);
            }
        }
        ledger.sending.clear(); // keeps its memory: buffers are used again and again
        Ok(())
    }
}
