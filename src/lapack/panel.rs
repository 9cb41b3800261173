//! A panel: a block column that is factored (or read from a finished factor), packed, and broadcast.
//!
//! Its buffer is registered once and reused for every step. What travels, in one piece:
//!
//! ```text
//! | info, ipiv (u64) | top: L11\U11, jb × jb, column-major | L21, packed, this process row's rows |
//! ```
//!
//! The ranks of a process row hold the same rows, so what one packs, the others use as it is.

use std::ops::Range;

use fulmen_kernels::{Kernels, MatMut, MatRef, Scalar, SharedMut};

use crate::comm::{BcastLane, PanelBcast, Topology};
use crate::error::Result;

/// One panel's buffer and its broadcast along the process row.
pub(crate) struct Panel<T> {
    bcast: PanelBcast<T>,
    layout: Layout,
}

/// Where things lie in a panel's buffer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Layout {
    pub(crate) jb: usize,
    pub(crate) meta: Range<usize>,
    pub(crate) top: Range<usize>,
    pub(crate) packed: Range<usize>,
}

impl Layout {
    /// For `jb` columns and `m` local rows of L21.
    pub(crate) fn new<T: Scalar>(kernels: &dyn Kernels<T>, jb: usize, m: usize) -> Self {
        // Sections start at multiples of 64 bytes.
        let align = |at: usize| at.next_multiple_of(64 / size_of::<T>());
        let meta = align(((1 + jb) * size_of::<u64>()).div_ceil(size_of::<T>()));
        let top = align(meta + jb * jb);
        let packed = top + kernels.tile().packed_a_len(m, jb);
        Layout { jb, meta: 0..meta, top: meta..meta + jb * jb, packed: top..packed }
    }

    fn len(&self) -> usize {
        self.packed.end
    }
}

impl<T: Scalar> Panel<T> {
    /// Room for panels of at most `jb` columns and `m` local rows.
    pub(crate) fn new(
        kernels: &dyn Kernels<T>,
        lane: &BcastLane,
        topology: Topology,
        jb: usize,
        m: usize,
    ) -> Result<Self> {
        let len = Layout::new(kernels, jb, m).len();
        let bcast = PanelBcast::new(lane, topology, PanelBcast::<T>::CHUNK_BYTES, len)?;
        Ok(Panel { bcast, layout: Layout::default() })
    }

    /// Begins a step: whoever is not `root` (a process column) lets it in.
    pub(crate) fn begin(&mut self, layout: Layout, root: usize) -> Result<()> {
        self.layout = layout;
        self.bcast.start(root, 0..self.layout.len())
    }

    /// The sections, for the root to fill: meta, top, packed.
    pub(crate) fn sections(&mut self) -> (&mut [u64], &mut [T], &mut [T]) {
        let Layout { meta, top, packed, .. } = self.layout.clone();
        let all = self.bcast.data_mut(0..packed.end);
        let (head, packed) = all.split_at_mut(packed.start);
        let (head_meta, head_top) = head.split_at_mut(meta.end);
        (bytemuck::cast_slice_mut(head_meta), &mut head_top[..top.len()], packed)
    }

    /// The sections that the root fills first: meta and top.
    pub(crate) fn head(&mut self) -> (&mut [u64], &mut [T]) {
        let Layout { meta, top, .. } = self.layout.clone();
        let (head_meta, head_top) = self.bcast.data_mut(0..top.end).split_at_mut(meta.end);
        (bytemuck::cast_slice_mut(head_meta), head_top)
    }

    /// The packed section as one column, for the root's threads to fill.
    ///
    /// # Safety
    /// It is used only until the panel is sent, and while the panel lives; meanwhile nobody else touches it.
    pub(crate) unsafe fn packed_shared<'a>(&mut self) -> SharedMut<'a, T> {
        let packed = self.bcast.data_mut(self.layout.packed.clone());
        // SAFETY: the pointer and length of a slice that is exclusively ours by the caller's promise.
        let column = unsafe { MatMut::from_raw_parts_mut(packed.as_mut_ptr(), packed.len(), 1, 1, 0) };
        SharedMut::new(column)
    }

    /// The root's panel is filled: off it goes.
    pub(crate) fn send(&mut self) -> Result<()> {
        self.bcast.send()
    }

    /// Moves what can be moved, without waiting. Returns whether the panel is here.
    pub(crate) fn poll(&mut self) -> Result<bool> {
        self.bcast.poll()
    }

    /// Waits until the panel is here and has been passed on.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.bcast.finish()
    }

    /// Waits until what this rank sent has left.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.bcast.flush()
    }

    /// First exactly zero pivot in the panel, by its column in the view.
    pub(crate) fn info(&self) -> Option<usize> {
        let meta = self.meta();
        meta[0].checked_sub(1).map(|i| i as usize)
    }

    /// Pivot rows, in the view.
    pub(crate) fn ipiv(&self) -> Vec<usize> {
        self.meta()[1..=self.layout.jb].iter().map(|&r| r as usize).collect()
    }

    fn meta(&self) -> &[u64] {
        bytemuck::cast_slice(self.bcast.data(self.layout.meta.clone()))
    }

    /// The replicated triangle, jb × jb.
    pub(crate) fn top(&self) -> MatRef<'_, T> {
        let jb = self.layout.jb;
        MatRef::from_column_major_slice(self.bcast.data(self.layout.top.clone()), jb, jb)
    }

    /// The packed rows.
    pub(crate) fn packed(&self) -> &[T] {
        self.bcast.data(self.layout.packed.clone())
    }
}
