//! Where a rank's memory comes from: pages of its own, or its part of a window.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Transfer;
use super::raw::{Comm, Window};
use crate::error::{Error, Result};
use crate::fabric::Memory;
use crate::fabric::mem::pages::Pages;
use crate::fabric::shm::heap::Heap;

/// This rank's source of memory.
pub struct Source {
    /// Tells this fabric's memory from another's.
    id: usize,
    window: Option<Arc<Piecewise>>,
}

/// A window given out in pieces.
struct Piecewise {
    window: Arc<Window>,
    heap: Mutex<Heap>,
}

struct Owner {
    fabric: usize,
    _bytes: Box<dyn Any + Send + Sync>,
}

/// A piece of a window; dropping it gives it back.
struct Piece {
    of: Arc<Piecewise>,
    at: usize,
    len: usize,
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.of.heap.lock().unwrap_or_else(PoisonError::into_inner).give(self.at, self.len);
    }
}

impl Source {
    /// Collective.
    pub fn new(comm: &Comm, transfer: Transfer) -> Result<Self> {
        static FABRICS: AtomicUsize = AtomicUsize::new(0);
        let window = match transfer {
            Transfer::Messages => None,
            Transfer::Window { bytes } => {
                let window = Arc::new(Window::allocate(comm, bytes)?);
                Some(Arc::new(Piecewise { window, heap: Mutex::new(Heap::new(bytes)) }))
            }
        };
        Ok(Source { id: FABRICS.fetch_add(1, Ordering::Relaxed), window })
    }

    /// The window that all memory is in, if there is one.
    pub fn window(&self) -> Option<Arc<Window>> {
        self.window.as_ref().map(|pieces| Arc::clone(&pieces.window))
    }

    /// How many pieces of the window are held.
    pub fn pieces(&self) -> usize {
        self.window.as_ref().map_or(0, |pieces| Arc::strong_count(pieces) - 1)
    }

    /// Zeros, page-aligned.
    pub fn alloc(&self, rank: usize, bytes: usize) -> Result<Arc<Memory>> {
        let fabric = self.id;
        let Some(pieces) = &self.window else {
            let pages = Pages::new(bytes)?;
            let at = pages.as_ptr();
            let owner = Owner { fabric, _bytes: Box::new(pages) };
            // SAFETY: zeroed pages of at least `bytes` that live as long as the owner and are known only here.
            return Ok(Arc::new(unsafe { Memory::new(at, bytes, Box::new(owner)) }));
        };
        let mut heap = pieces.heap.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((at, len)) = heap.take(bytes) else {
            return Err(Error::Resources {
                what: format!(
                    "rank {rank} needs {bytes} bytes of its window, which has {}, {} of them free, in pieces of at most {}",
                    heap.size(),
                    heap.free(),
                    heap.largest()
                ),
                remedy: "ask for a larger window, or let bytes travel as messages".into(),
            });
        };
        drop(heap);
        let owner = Owner { fabric, _bytes: Box::new(Piece { of: Arc::clone(pieces), at, len }) };
        // SAFETY: `at + len` lies in the window, which the piece keeps; the heap gave it to nobody else, and nobody puts
        // into it before it is armed.
        unsafe {
            let start = pieces.window.start().add(at);
            start.write_bytes(0, bytes);
            Ok(Arc::new(Memory::new(start, bytes, Box::new(owner))))
        }
    }

    /// Whether this source gave it.
    pub fn gave(&self, memory: &Memory) -> bool {
        memory.owner().downcast_ref::<Owner>().is_some_and(|owner| owner.fabric == self.id)
    }
}
