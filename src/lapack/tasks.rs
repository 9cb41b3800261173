//! Tasks that a team's members take one by one.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Tasks 0..total, handed out by a counter.
pub(crate) struct Tasks {
    total: usize,
    next: AtomicUsize,
    done: AtomicUsize,
}

impl Tasks {
    pub(crate) fn new(total: usize) -> Self {
        Tasks { total, next: AtomicUsize::new(0), done: AtomicUsize::new(0) }
    }

    pub(crate) fn take(&self) -> Option<usize> {
        // The load keeps late comers from counting up a shared line for nothing.
        (self.next.load(Ordering::Relaxed) < self.total)
            .then(|| self.next.fetch_add(1, Ordering::Relaxed))
            .filter(|&task| task < self.total)
    }

    /// One task is done. Returns whether it was the last.
    pub(crate) fn finish(&self) -> bool {
        self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.total
    }

    pub(crate) fn all_done(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.total
    }
}
