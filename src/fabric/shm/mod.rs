//! Ranks as processes of one host, in shared memory.
//!
//! A [`Supervisor`] makes one anonymous segment of memory for each rank and one for the state of the
//! job, starts the ranks and hands them the segments as open files. No segment has a name (on macOS:
//! none longer than a moment), so nothing is left behind even when all processes are killed.
//! Each rank calls [`connect_from_env`]. Ranks that others have started form such a group by themselves
//! (`meeting`), as a part of the `mixed` fabric.
//!
//! Who lives is known in three ways: the supervisor sees a process end or stop at once; every rank and
//! the supervisor count a heartbeat that the others watch; and a rank whose supervisor is gone ends.

pub(super) mod heap;
pub(super) mod liveness;
pub(super) mod meeting;
mod passing;
mod segment;
mod socket;
mod supervisor;

pub use supervisor::{Outcome, Supervisor};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::heap::Heap;
use self::liveness::{Liveness, Watch};
use self::segment::{Mapping, Segment};
use super::shared::area::Area;
use super::shared::endpoint::{Endpoint, Space, UnderWay};
use super::shared::slot::Span;
use super::{Bounds, Fabric, Memory};
use crate::error::{Error, Result};

/// A signal's number and name.
pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        libc::SIGHUP => "SIGHUP",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGBUS => "SIGBUS",
        libc::SIGABRT => "SIGABRT",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        libc::SIGPIPE => "SIGPIPE",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

/// Number of this rank, from 0.
const RANK: &str = "FULMEN_RANK";
/// Number of ranks.
const SIZE: &str = "FULMEN_SIZE";
/// `silence_ms patience_ms segment_bytes control_fd segment_fd...`
const SHM: &str = "FULMEN_SHM";

/// This rank's fabric, when a [`Supervisor`] has started this process; `None` otherwise.
///
/// Can be called once. When the last handle is dropped the rank has left the job; a process that ends
/// before that without an error code has left as well.
///
/// # Errors
/// [`Error::Argument`] when the environment is garbled, [`Error::System`] when a segment cannot be mapped.
pub fn connect_from_env() -> Result<Option<Arc<dyn Fabric>>> {
    static CONNECTED: AtomicBool = AtomicBool::new(false);
    let Ok(shm) = std::env::var(SHM) else { return Ok(None) };
    if CONNECTED.swap(true, Ordering::Relaxed) {
        return Err(Error::Internal("this process has connected to its job before".into()));
    }
    let plan = Plan::parse(&shm, std::env::var(RANK).ok(), std::env::var(SIZE).ok())?;
    // SAFETY: the supervisor handed these files to this process for this purpose, and only once.
    let control = unsafe { Segment::inherited(plan.control, Area::bytes(plan.size))? };
    let area = control_area(&control, plan.size)?;
    let mut own = None;
    let mut mappings = Vec::with_capacity(plan.size);
    for (rank, fd) in plan.segments.iter().enumerate() {
        // SAFETY: as above.
        let segment = unsafe { Segment::inherited(*fd, plan.segment_bytes)? };
        mappings.push(Some(segment.map()?));
        if rank == plan.rank {
            own = Some(segment); // the others' files are closed: their mappings stay
        }
    }
    let Some(own) = own else { return Err(garbled(&shm)) };
    let watch = Arc::new(Mutex::new(Watch::new(plan.size + 1)));
    let liveness = Liveness::start(plan.rank, Arc::clone(&area), Arc::clone(&watch), plan.bounds)?;
    let beats = Some((watch, liveness));
    let space = Segments::new(plan.rank, own, mappings, beats)?;
    let under_way = Arc::new(UnderWay::new(plan.size));
    Ok(Some(Arc::new(Endpoint::new(plan.rank, area, space, under_way, plan.bounds))))
}

fn control_area(control: &Segment, ranks: usize) -> Result<Arc<Area>> {
    let mapping = control.map()?;
    // SAFETY: the segment was made zeroed, with `Area::bytes(ranks)` bytes; the mapping is page-aligned and
    // kept by the area. Other processes use it through `Area` too.
    Ok(Arc::new(unsafe { Area::new(mapping.as_ptr(), ranks, Box::new(mapping)) }))
}

/// What the environment says.
struct Plan {
    rank: usize,
    size: usize,
    bounds: Bounds,
    segment_bytes: usize,
    control: i32,
    segments: Vec<i32>,
}

fn garbled(value: &str) -> Error {
    Error::argument(
        format!("{RANK}, {SIZE}, {SHM}"),
        value,
        "is not what the launcher of this library writes",
        format!("unset {SHM}, or start the ranks with the launcher"),
    )
}

impl Plan {
    fn parse(shm: &str, rank: Option<String>, size: Option<String>) -> Result<Plan> {
        let read = || -> Option<Plan> {
            let numbers: Vec<u64> = shm.split(' ').map(|w| w.parse().ok()).collect::<Option<_>>()?;
            let [silence, patience, segment_bytes, control, segments @ ..] = numbers.as_slice() else {
                return None;
            };
            let (rank, size): (usize, usize) = (rank?.parse().ok()?, size?.parse().ok()?);
            let fd = |n: &u64| i32::try_from(*n).ok();
            let plan = Plan {
                rank,
                size,
                bounds: Bounds {
                    silence: Duration::from_millis(*silence),
                    patience: Duration::from_millis(*patience),
                },
                segment_bytes: usize::try_from(*segment_bytes).ok()?,
                control: fd(control)?,
                segments: segments.iter().map(fd).collect::<Option<_>>()?,
            };
            (rank < size && plan.segments.len() == size).then_some(plan)
        };
        read().ok_or_else(|| garbled(shm))
    }

    fn print(&self) -> String {
        let mut text = format!(
            "{} {} {} {}",
            self.bounds.silence.as_millis(),
            self.bounds.patience.as_millis(),
            self.segment_bytes,
            self.control
        );
        for fd in &self.segments {
            text += &format!(" {fd}");
        }
        text
    }
}

/// Memory of processes: an address is an offset in the segment of its rank.
pub(super) struct Segments {
    store: Arc<Store>,
    /// `None`: another fabric of the job knows who lives.
    beats: Option<(Arc<Mutex<Watch>>, Liveness)>,
}

/// This rank's segment and what is free of it, and the segments of those that share memory with it. Kept by memory
/// that was handed out.
pub(super) struct Store {
    rank: usize,
    segment: Segment,
    /// By rank, this one included.
    mappings: Box<[Option<Mapping>]>,
    /// Where the first byte of this rank's own is.
    first: usize,
    heap: Mutex<Heap>,
    /// From then on nothing is reused: peers may fetch from here what they have not armed yet.
    left: AtomicBool,
}

impl Segments {
    /// # Errors
    /// [`Error::Internal`] when the rank's own segment is not among the mappings.
    fn new(
        rank: usize,
        segment: Segment,
        mappings: Vec<Option<Mapping>>,
        beats: Option<(Arc<Mutex<Watch>>, Liveness)>,
    ) -> Result<Self> {
        let first = mappings.get(rank).and_then(Option::as_ref).map(|own| own.as_ptr() as usize);
        let first =
            first.ok_or_else(|| Error::Internal(format!("rank {rank} has not mapped its segment")))?;
        let (heap, left) = (Mutex::new(Heap::new(segment.len())), AtomicBool::new(false));
        let store = Store { rank, segment, mappings: mappings.into(), first, heap, left };
        Ok(Segments { store: Arc::new(store), beats })
    }

    /// Where memory comes from; it does not keep the rank in its job.
    pub(super) fn store(&self) -> &Arc<Store> {
        &self.store
    }
}

/// What a [`Memory`] of this fabric is made of.
struct Piece {
    store: Arc<Store>,
    at: usize,
    len: usize,
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Piece { store, at, len } = self;
        if store.left.load(Ordering::Relaxed) {
            return;
        }
        // Zero before anyone can get it again.
        if let Some(mapping) = &store.mappings[store.rank] {
            store.segment.discard(mapping, *at, *len);
        }
        store.heap().give(*at, *len);
    }
}

impl Store {
    fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Fabric::alloc`].
    ///
    /// # Errors
    /// As there.
    pub(super) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Arc<Memory>> {
        let short = |why: String| Error::Resources {
            what: format!("rank {} needs {bytes} bytes of shared memory: {why}", self.rank),
            remedy: "use a smaller problem, fewer ranks, or more memory".into(),
        };
        let mut heap = self.heap();
        let Some((at, len)) = heap.take(bytes) else {
            return Err(short(format!(
                "its segment has {} bytes, {} of them free, in pieces of at most {}",
                heap.size(),
                heap.free(),
                heap.largest()
            )));
        };
        // With the pages in hand there is no SIGBUS later, when others write here.
        if let Err(e) = self.segment.reserve(at, len) {
            heap.give(at, len);
            return Err(short(e));
        }
        drop(heap);
        let piece = Piece { store: Arc::clone(self), at, len };
        // SAFETY: `at + len` lies in the segment; it is zeroed (fresh, or discarded) and this rank's heap
        // gave it to nobody else; the owner keeps the mapping.
        Ok(Arc::new(unsafe { Memory::new((self.first + at) as *mut u8, bytes, Box::new(piece)) }))
    }
}

impl Space for Segments {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        self.store.alloc(bytes)
    }

    fn address(&self, memory: &Memory) -> Option<u64> {
        // By where it is: another transport may have cut it from a larger piece of this segment.
        let at = (memory.as_ptr() as usize).checked_sub(self.store.first)?;
        (at.checked_add(memory.len())? <= self.store.segment.len()).then_some(at as u64)
    }

    fn reach(&self, rank: usize, span: Span) -> Option<*mut u8> {
        let mapping = self.store.mappings.get(rank)?.as_ref()?;
        let end = span.at.checked_add(span.len)?;
        // SAFETY: inside the mapping.
        (end <= mapping.len() as u64).then(|| unsafe { mapping.as_ptr().add(span.at as usize) })
    }

    fn silent_for(&self, rank: usize) -> Option<Duration> {
        let (watch, _) = self.beats.as_ref()?;
        watch.lock().unwrap_or_else(PoisonError::into_inner).silent_for(rank)
    }

    fn leave(&self) {
        self.store.left.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_supervisor_prints_is_what_a_rank_reads() {
        let plan = Plan {
            rank: 1,
            size: 3,
            bounds: Bounds { silence: Duration::from_millis(1500), patience: Duration::from_secs(60) },
            segment_bytes: 1 << 40,
            control: 7,
            segments: vec![8, 9, 11],
        };
        let read = Plan::parse(&plan.print(), Some("1".into()), Some("3".into())).unwrap();
        assert_eq!((read.rank, read.size, read.control), (1, 3, 7));
        assert_eq!(read.bounds, plan.bounds);
        assert_eq!((read.segment_bytes, read.segments), (1 << 40, vec![8, 9, 11]));
    }

    #[test]
    fn garbled_environments_are_refused() {
        for (shm, rank, size) in [
            ("", "0", "1"),
            ("1 2 3", "0", "1"),
            ("1 2 3 4", "0", "0"),
            ("1 2 3 4 5", "1", "1"),
            ("1 2 3 4 5", "0", "2"),
            ("1 2 3 4 five", "0", "1"),
            ("1 2 3 4 99999999999", "0", "1"),
            ("1 2 3 4 5", "-1", "1"),
        ] {
            let e = Plan::parse(shm, Some(rank.into()), Some(size.into())).err().unwrap();
            assert_eq!(e.exit_code(), 2, "{shm:?} {rank} {size}");
        }
        assert!(Plan::parse("1 2 3 4 5", None, Some("1".into())).is_err());
    }
}
