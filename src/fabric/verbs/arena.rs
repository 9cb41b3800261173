//! Memory that is registered once and stays registered: a few large mappings, handed out in pages.
//!
//! Devices have few regions (about a hundred on a Mac) and registering is slow, so nothing is registered or
//! given back on the way: what a program drops is handed out again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::nic::EXTENT;
use super::protocol::FRAME;
use crate::error::{Error, Result};
use crate::fabric::Memory;
use crate::fabric::mem::pages::Pages;

/// What is handed out is a multiple of this: the page of Apple's machines.
const PAGE: usize = 16 << 10;
/// The first mapping's length; each further one is twice as long as the one before, up to [`LARGEST`].
const SMALLEST: usize = 4 << 20;
const LARGEST: usize = 256 << 20;
/// Mappings are multiples of this: huge pages.
const HUGE: usize = 2 << 20;

/// Memory of another transport of this rank, so that both can use what is handed out here.
pub type Source = Box<dyn Fn(usize) -> Result<Arc<Memory>> + Send + Sync>;

/// A mapping.
enum Mapped {
    Own(Pages),
    Given(Arc<Memory>),
}

impl Mapped {
    fn as_ptr(&self) -> *mut u8 {
        match self {
            Mapped::Own(pages) => pages.as_ptr(),
            Mapped::Given(memory) => memory.as_ptr(),
        }
    }
}

struct Region {
    pages: Mapped,
    len: usize,
    /// Free ranges: offset and length; neighbours are joined.
    free: BTreeMap<usize, usize>,
    /// From here on nothing was ever handed out: it is zeroed.
    fresh: usize,
}

impl Region {
    /// A range of `len` bytes; `whole`: one that crosses no [`EXTENT`] line.
    fn take(&mut self, len: usize, whole: bool) -> Option<usize> {
        let first = self.pages.as_ptr() as usize;
        let fits = |(from, have): (usize, usize)| {
            let left = EXTENT - (first + from) % EXTENT;
            let skip = if whole && left < len { left } else { 0 };
            let fits = skip + len <= have && !(whole && len > EXTENT);
            fits.then_some((from, have, from + skip))
        };
        let (from, have, at) = self.free.iter().find_map(|(from, have)| fits((*from, *have)))?;
        self.free.remove(&from);
        if at > from {
            self.free.insert(from, at - from);
        }
        if from + have > at + len {
            self.free.insert(at + len, from + have - at - len);
        }
        Some(at)
    }

    fn give_back(&mut self, mut at: usize, mut len: usize) {
        if let Some((before, have)) = self.free.range(..at).next_back().map(|(a, l)| (*a, *l))
            && before + have == at
        {
            self.free.remove(&before);
            (at, len) = (before, have + len);
        }
        if let Some(after) = self.free.remove(&(at + len)) {
            len += after;
        }
        self.free.insert(at, len);
    }
}

/// All memory of one rank's fabric.
#[derive(Default)]
pub struct Arena {
    regions: Mutex<Vec<Region>>,
    /// Where mappings come from; `None`: from the system.
    source: Option<Source>,
    adopted: Mutex<Adopted>,
}

/// Memory of other fabrics.
#[derive(Default)]
struct Adopted {
    /// By first address.
    whole: BTreeMap<usize, Arc<Memory>>,
    /// A part of each may be registered, so they have to stay.
    refused: Vec<Arc<Memory>>,
}

impl Adopted {
    fn holds(&self, at: usize, len: usize) -> bool {
        let before = self.whole.range(..=at).next_back();
        before.is_some_and(|(first, memory)| at + len <= first + memory.len())
    }
}

/// What a [`Memory`] of this fabric is made of.
struct Owner {
    arena: Arc<Arena>,
    region: usize,
    at: usize,
    len: usize,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.arena.lock()[self.region].give_back(self.at, self.len);
    }
}

impl Arena {
    /// One that takes its mappings from there.
    pub fn over(source: Option<Source>) -> Self {
        Arena { source, ..Arena::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeroed memory from what is mapped already; `None`: [`Arena::grow`] first. It may cross an [`EXTENT`] line, and then no
    /// device takes it for one piece: this is for who cuts messages there.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Arc<Memory>> {
        self.hand_out(bytes, false)
    }

    /// [`Arena::take`] of memory that crosses no line; at most [`EXTENT`] bytes.
    pub fn take_whole(self: &Arc<Self>, bytes: usize) -> Option<Arc<Memory>> {
        self.hand_out(bytes, true)
    }

    /// [`Arena::take_whole`], for which the arena grows if it has to.
    pub fn grow_whole(
        self: &Arc<Self>,
        bytes: usize,
        mut register: impl FnMut(*mut u8, usize) -> Result<()>,
    ) -> Result<Arc<Memory>> {
        // A line through a mapping of twice the length leaves a side that is long enough.
        let twice = 2 * (bytes.next_multiple_of(PAGE) + PAGE);
        for more in [0, bytes, twice] {
            if more > 0 {
                self.grow(more, &mut register)?;
            }
            if let Some(memory) = self.take_whole(bytes) {
                return Ok(memory);
            }
        }
        Err(Error::Internal(format!("no {bytes} bytes in one piece after growing")))
    }

    fn hand_out(self: &Arc<Self>, bytes: usize, whole: bool) -> Option<Arc<Memory>> {
        let len = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let mut regions = self.lock();
        let (region, at) =
            regions.iter_mut().enumerate().find_map(|(i, r)| Some((i, r.take(len, whole)?)))?;
        let r = &mut regions[region];
        // SAFETY: a range of the region that nobody else has.
        let first = unsafe { r.pages.as_ptr().add(at) };
        let used = r.fresh.saturating_sub(at).min(len);
        // SAFETY: the part of that range that was handed out before.
        unsafe { first.write_bytes(0, used) };
        r.fresh = r.fresh.max(at + len);
        let owner = Owner { arena: Arc::clone(self), region, at, len };
        // SAFETY: initialised, page-aligned, in a mapping that lives as long as the arena, which the owner keeps.
        Some(Arc::new(unsafe { Memory::new(first, bytes, Box::new(owner)) }))
    }

    /// Maps at least `bytes` more and shows them to `register`, in pieces that cross no [`EXTENT`] line.
    pub fn grow(&self, bytes: usize, mut register: impl FnMut(*mut u8, usize) -> Result<()>) -> Result<()> {
        let mut regions = self.lock();
        let step = SMALLEST.checked_shl(regions.len() as u32).unwrap_or(LARGEST).clamp(SMALLEST, LARGEST);
        let len = bytes.max(step).saturating_add(PAGE).next_multiple_of(HUGE);
        let pages = match &self.source {
            Some(source) => Mapped::Given(source(len)?),
            None => Mapped::Own(Pages::new(len)?),
        };
        let first = pages.as_ptr();
        // SAFETY: inside the mapping.
        let done =
            pieces(first as usize, len).try_for_each(|(at, piece)| register(unsafe { first.add(at) }, piece));
        // A mapping of which a part was registered has to stay, but is not handed out.
        let free = if done.is_ok() { BTreeMap::from([(0, len)]) } else { BTreeMap::new() };
        regions.push(Region { pages, len, free, fresh: 0 });
        done
    }

    /// Shows memory of another fabric to `register`, in pieces that cross no [`EXTENT`] line, and keeps it.
    pub fn adopt(
        self: &Arc<Self>,
        memory: &Arc<Memory>,
        mut register: impl FnMut(*mut u8, usize) -> Result<()>,
    ) -> Result<()> {
        let (first, len) = (memory.as_ptr() as usize, memory.len());
        if len == 0 || self.owns(memory) {
            return Ok(());
        }
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        // Of what was refused a part may be registered: it is not tried again.
        let was_refused = adopted.refused.iter().any(|m| Arc::ptr_eq(m, memory));
        let overlaps =
            adopted.whole.range(..first + len).next_back().is_some_and(|(at, m)| at + m.len() > first);
        if overlaps || was_refused || !first.is_multiple_of(FRAME) {
            return Err(Error::Internal(format!(
                "{len} bytes at {first:#x} were to be adopted: they begin at no page, or a part of them was adopted, or all of them refused, before"
            )));
        }
        let done = pieces(first, len).try_for_each(|(at, piece)| register((first + at) as *mut u8, piece));
        match done {
            Ok(()) => drop(adopted.whole.insert(first, Arc::clone(memory))),
            Err(_) => adopted.refused.push(Arc::clone(memory)),
        }
        done
    }

    /// Whether `memory` was taken from here, or is (a part of) what was adopted.
    pub fn owns(self: &Arc<Self>, memory: &Memory) -> bool {
        if let Some(owner) = memory.owner().downcast_ref::<Owner>() {
            return Arc::ptr_eq(&owner.arena, self);
        }
        let adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        adopted.holds(memory.as_ptr() as usize, memory.len())
    }

    /// Bytes mapped, and bytes handed out.
    pub fn usage(&self) -> (usize, usize) {
        let regions = self.lock();
        let mapped = regions.iter().map(|r| r.len).sum();
        (mapped, mapped - regions.iter().flat_map(|r| r.free.values()).sum::<usize>())
    }
}

/// Offset and length of the pieces of `len` bytes at address `first`, cut at the lines.
fn pieces(first: usize, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let piece = (EXTENT - (first + at) % EXTENT).min(len - at);
        at += piece;
        (piece > 0).then_some((at - piece, piece))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cross_no_line() {
        let all: Vec<_> = pieces(3 * EXTENT - 4096, EXTENT + 8192).collect();
        assert_eq!(all, [(0, 4096), (4096, EXTENT), (EXTENT + 4096, 4096)]);
        assert_eq!(pieces(64, 100).collect::<Vec<_>>(), [(0, 100)]);
    }

    #[test]
    fn what_is_given_back_is_handed_out_again_zeroed() {
        let arena = Arc::new(Arena::default());
        assert!(arena.take(10).is_none());
        let mut registered = 0;
        let grow = |arena: &Arena, bytes, registered: &mut usize| {
            arena.grow(bytes, |at, len| {
                assert_eq!(at as usize / EXTENT, (at as usize + len - 1) / EXTENT);
                *registered += len;
                Ok(())
            })
        };
        grow(&arena, 10, &mut registered).unwrap();
        let many: Vec<_> = (0..50).map(|i| arena.take(1000 * i).unwrap()).collect();
        for memory in &many {
            assert!((memory.as_ptr() as usize).is_multiple_of(4096) && arena.owns(memory));
            // SAFETY: ours alone.
            unsafe { memory.as_ptr().write_bytes(7, memory.len()) };
        }
        let (mapped, used) = arena.usage();
        assert_eq!(mapped, registered);
        assert!(used >= 50 * 49 * 500);
        drop(many);
        assert_eq!(arena.usage(), (mapped, 0));
        let all = arena.take(mapped).unwrap();
        // SAFETY: ours alone.
        assert!(unsafe { std::slice::from_raw_parts(all.as_ptr(), all.len()) }.iter().all(|b| *b == 0));
        assert!(arena.take(1).is_none());
        grow(&arena, 20 << 20, &mut registered).unwrap();
        assert!(arena.take(20 << 20).is_some());
        assert!(!Arc::new(Arena::default()).owns(&all));
    }

    /// A line may be anywhere in a mapping: control messages and proofs are one piece to a device all the same.
    #[test]
    fn what_is_to_be_whole_crosses_no_line() {
        const BEFORE: usize = 3 << 20;
        const RESERVED: usize = 2 * EXTENT;
        let reserved = Arc::new(Pages::sparse(RESERVED).unwrap());
        let first = reserved.as_ptr() as usize;
        // Mappings that a line cuts in two, one with less before it than the next.
        let mut at = first.next_multiple_of(EXTENT) - BEFORE;
        at += if at < first { EXTENT } else { 0 };
        let left = std::sync::atomic::AtomicUsize::new(2);
        let source = move |bytes: usize| {
            let is_cut = left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) == 2;
            let at = if is_cut { at } else { at + BEFORE + (8 << 20) };
            assert!(at + bytes <= first + RESERVED, "the test has reserved too little");
            // SAFETY: inside the mapping, which the owner keeps; each of the two is another part.
            Ok(Arc::new(unsafe { Memory::new(at as *mut u8, bytes, Box::new(Arc::clone(&reserved))) }))
        };
        let arena = Arc::new(Arena::over(Some(Box::new(source))));
        let mut pieces = 0;
        let mut whole = |bytes: usize| {
            let memory = arena.grow_whole(bytes, |_, _| {
                pieces += 1;
                Ok(())
            });
            let memory = memory.unwrap();
            let at = memory.as_ptr() as usize;
            assert_eq!(at / EXTENT, (at + bytes - 1) / EXTENT, "{bytes} bytes at {at:#x}");
            memory
        };
        let small = whole(2 << 20);
        // Not what is left before the line; then nowhere in this mapping.
        let behind = whole(2 << 20);
        assert_eq!(behind.as_ptr() as usize % EXTENT, 0);
        let _further = whole(4 << 20);
        assert_eq!(pieces, 3, "two of the first, one of the second");
        // Others may cross it, and what was skipped is not lost.
        drop((small, behind));
        let any = arena.take(BEFORE + (1 << 20)).unwrap();
        assert_eq!(any.as_ptr() as usize % EXTENT, EXTENT - BEFORE);
        assert!(arena.take_whole(EXTENT + 1).is_none());
    }

    #[test]
    fn what_is_adopted_is_owned_with_all_its_parts() {
        let pages = Pages::new(1 << 20).unwrap();
        let at = pages.as_ptr();
        // SAFETY: a fresh mapping, which the owner keeps.
        let whole = Arc::new(unsafe { Memory::new(at, 1 << 20, Box::new(pages)) });
        let part = |from: usize, len: usize| {
            // SAFETY: inside the whole, or never looked at.
            unsafe { Memory::new(whole.as_ptr().wrapping_add(from), len, Box::new(Arc::clone(&whole))) }
        };
        let arena = Arc::new(Arena::default());
        assert!(!arena.owns(&whole));
        let mut registered = 0;
        let mut register = |_: *mut u8, len: usize| {
            registered += len;
            Ok(())
        };
        arena.adopt(&whole, &mut register).unwrap();
        arena.adopt(&whole, &mut register).unwrap();
        assert!(arena.adopt(&Arc::new(part(1 << 19, 1 << 20)), &mut register).is_err());
        assert_eq!(registered, 1 << 20);
        assert!(arena.owns(&whole) && arena.owns(&part(4096, 100)) && arena.owns(&part((1 << 20) - 8, 8)));
        assert!(!arena.owns(&part((1 << 20) - 8, 9)) && !arena.owns(&part(1 << 20, 0x1000)));
        // What a device refuses cannot be used, but stays.
        let arena = Arc::new(Arena::default());
        let refuse = |_: *mut u8, _: usize| Err(Error::Internal("no".into()));
        assert!(arena.adopt(&whole, refuse).is_err() && !arena.owns(&whole));
        assert_eq!(Arc::strong_count(&whole), 3, "both arenas hold it");
    }
}
