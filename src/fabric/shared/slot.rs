//! One stream of puts between two ranks (one lane): a ring of slots where arms and puts meet.
//!
//! The i-th arm and the i-th put meet in slot `i % SLOTS`. Whoever comes second finds the other's
//! range there and copies the bytes, so a put makes progress as soon as both sides have come, whether
//! or not the first one is looking.
//!
//! ```text
//!              arm (target)           put (source): copies
//!   EMPTY(g) ---------------> ARMED(g) -------------------> FILLED(g) --- wait (target) ---> EMPTY(g+1)
//!      |                        |                              ^                                 ^
//!      |                        `--------> CARRIED(g) ---------|----- wait (target): copies -----'
//!      |  put (source)            put of few bytes             |
//!      `---------------> OFFERED(g) ---------------------------'
//!                                      arm (target): copies
//! ```
//!
//! A put of at most [`FEW`] bytes into an armed range travels in the slot itself: one cache line goes from core to core
//! then, not two.
//!
//! Only the first step out of `EMPTY` is contended: it is a compare-and-swap. Every other step has one
//! party that may take it. Each side writes only its own fields, before the release that publishes them.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of a ring: one page a stream. Arms and puts beyond it queue at their own side.
#[cfg(not(all(test, loom)))]
pub const SLOTS: u64 = 64;
/// So few that a model of two puts goes round.
#[cfg(all(test, loom))]
pub const SLOTS: u64 = 1;

const EMPTY: u64 = 0;
const ARMED: u64 = 1;
const OFFERED: u64 = 2;
const FILLED: u64 = 3;
const CARRIED: u64 = 4;

/// Bytes that a slot carries.
pub const FEW: usize = 24;

/// State of slot `i`'s ring position in the round that `i` belongs to. All zeros is `EMPTY` of round 0.
fn state(i: u64, code: u64) -> u64 {
    (i / SLOTS) << 3 | code
}

/// One meeting place, a cache line of its own.
#[repr(C, align(64))]
#[derive(Default)]
struct Slot {
    state: AtomicU64,
    /// Written by the target: where the bytes go, and how many fit.
    armed_at: AtomicU64,
    armed_len: AtomicU64,
    /// Written by the source: where the bytes are, and how many.
    put_at: AtomicU64,
    put_len: AtomicU64,
    /// Written by the source: the bytes themselves, when they are few.
    few: [AtomicU64; FEW / 8],
}

/// The ring. Valid when all zeros.
#[repr(C)]
pub struct Stream {
    slots: [Slot; SLOTS as usize],
}

/// A range in the memory of the other side, in the transport's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// First byte.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

/// What the first to come and the second to come have to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meeting {
    /// The other side has not come: it will copy.
    First,
    /// The other side waits with this range: copy now, then [`Stream::fill`]; or, for the source, [`Stream::carry`].
    Second(Span),
    /// The slot still serves an earlier round: come again later.
    Full,
    /// The state is none that the protocol knows: memory was overwritten.
    Broken,
}

impl Stream {
    fn slot(&self, i: u64) -> &Slot {
        &self.slots[(i % SLOTS) as usize]
    }

    /// The source is about to come with put `i`: brings the slot to this core meanwhile.
    pub fn expect(&self, i: u64) {
        prefetch_to_write(self.slot(i));
    }

    /// The source comes with put `i`.
    pub fn put(&self, i: u64, span: Span) -> Meeting {
        let slot = self.slot(i);
        let now = slot.state.load(Ordering::Acquire);
        if now == state(i, ARMED) {
            return Meeting::Second(slot.armed());
        }
        if now != state(i, EMPTY) {
            return if now < state(i, EMPTY) { Meeting::Full } else { Meeting::Broken };
        }
        slot.put_at.store(span.at, Ordering::Relaxed);
        slot.put_len.store(span.len, Ordering::Relaxed);
        // Release: publishes the span and the bytes in it. Acquire: sees the span that the target armed.
        match slot.state.compare_exchange(now, state(i, OFFERED), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Meeting::First,
            Err(now) if now == state(i, ARMED) => Meeting::Second(slot.armed()),
            Err(_) => Meeting::Broken,
        }
    }

    /// The target comes with arm `i`. It must have released `i - SLOTS` before.
    pub fn arm(&self, i: u64, span: Span) -> Meeting {
        let slot = self.slot(i);
        slot.armed_at.store(span.at, Ordering::Relaxed);
        slot.armed_len.store(span.len, Ordering::Relaxed);
        // Release: what the target did to the range is over. Acquire: the offered bytes are visible.
        match slot.state.compare_exchange(
            state(i, EMPTY),
            state(i, ARMED),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => Meeting::First,
            Err(now) if now == state(i, OFFERED) => Meeting::Second(slot.put_span()),
            Err(_) => Meeting::Broken,
        }
    }

    /// The second to come has copied `len` bytes.
    pub fn fill(&self, i: u64, len: u64) {
        let slot = self.slot(i);
        slot.put_len.store(len, Ordering::Relaxed);
        slot.state.store(state(i, FILLED), Ordering::Release);
    }

    /// Instead of copying, the source leaves `bytes`, at most [`FEW`], in the slot.
    pub fn carry(&self, i: u64, bytes: &[u8]) {
        let slot = self.slot(i);
        let mut words = [0; FEW];
        words[..bytes.len()].copy_from_slice(bytes);
        for (word, bytes) in slot.few.iter().zip(words.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        slot.put_len.store(bytes.len() as u64, Ordering::Relaxed);
        slot.state.store(state(i, CARRIED), Ordering::Release);
    }

    /// For the target: the length of put `i` once its bytes are there.
    pub fn filled(&self, i: u64) -> Option<u64> {
        let slot = self.slot(i);
        let now = slot.state.load(Ordering::Acquire);
        (now == state(i, FILLED) || now == state(i, CARRIED)).then(|| slot.put_len.load(Ordering::Relaxed))
    }

    /// For the target, of a filled `i`: its bytes, and more behind them, if the slot carries them.
    pub fn carried(&self, i: u64) -> Option<[u8; FEW]> {
        let slot = self.slot(i);
        if slot.state.load(Ordering::Acquire) != state(i, CARRIED) {
            return None;
        }
        let mut bytes = [0; FEW];
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(&slot.few) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        Some(bytes)
    }

    /// The target has taken note of put `i`: the slot is free for `i + SLOTS`.
    pub fn release(&self, i: u64) {
        self.slot(i).state.store(state(i + SLOTS, EMPTY), Ordering::Release);
    }

    /// For the source, once put `i` was [`Meeting::First`] or filled: nobody reads its range any more.
    pub fn is_taken(&self, i: u64) -> bool {
        self.slot(i).state.load(Ordering::Acquire) != state(i, OFFERED)
    }

    /// For the target, of an armed `i`: whether the source has come at all.
    pub fn has_put(&self, i: u64) -> bool {
        self.slot(i).state.load(Ordering::Acquire) != state(i, ARMED)
    }
}

/// Fetches a cache line that this core is about to write.
fn prefetch_to_write<T>(at: &T) {
    let at = std::ptr::from_ref(at);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads and writes nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_ET0>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

impl Slot {
    fn armed(&self) -> Span {
        Span { at: self.armed_at.load(Ordering::Relaxed), len: self.armed_len.load(Ordering::Relaxed) }
    }

    fn put_span(&self) -> Span {
        Span { at: self.put_at.load(Ordering::Relaxed), len: self.put_len.load(Ordering::Relaxed) }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    /// What travels, and where to. Loom fails the model when an access to a cell races with another.
    struct World {
        stream: Stream,
        source: [UnsafeCell<u64>; PUTS],
        target: [UnsafeCell<u64>; PUTS],
    }

    const PUTS: usize = 2;

    impl World {
        /// The source comes second: the first put is copied, the second carried.
        fn send(&self, i: u64) {
            if i == 0 {
                return self.copy(i);
            }
            // SAFETY: what the model is to prove.
            let word = self.source[i as usize].with(|p| unsafe { *p });
            self.stream.carry(i, &word.to_ne_bytes());
        }

        /// Whoever comes second.
        fn copy(&self, i: u64) {
            // SAFETY: what the model is to prove.
            let word = self.source[i as usize].with(|p| unsafe { *p });
            // SAFETY: as above.
            self.target[i as usize].with_mut(|p| unsafe { *p = word });
            self.stream.fill(i, word);
        }
    }

    /// Interleavings of up to five preemptions, with every reordering that the memory model allows: no
    /// race on the bytes, none lost, each number its own, across a round of the ring.
    #[test]
    fn loom_finds_no_race() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(5);
        model.check(|| {
            let world = Arc::new(World {
                stream: Stream { slots: std::array::from_fn(|_| Slot::default()) },
                source: std::array::from_fn(|_| UnsafeCell::new(0)),
                target: std::array::from_fn(|_| UnsafeCell::new(0)),
            });
            let theirs = Arc::clone(&world);
            let source = loom::thread::spawn(move || {
                for i in 0..PUTS as u64 {
                    // SAFETY: as above.
                    theirs.source[i as usize].with_mut(|p| unsafe { *p = 10 + i });
                    loop {
                        match theirs.stream.put(i, Span { at: i, len: 10 + i }) {
                            Meeting::First => break,
                            Meeting::Second(to) => {
                                assert_eq!(to, Span { at: 100 + i, len: 20 });
                                theirs.send(i);
                                break;
                            }
                            Meeting::Full => loom::thread::yield_now(),
                            Meeting::Broken => panic!("broken"),
                        }
                    }
                }
                // As a flush: what was taken may be written again.
                while !theirs.stream.is_taken(PUTS as u64 - 1) {
                    loom::thread::yield_now();
                }
                // SAFETY: as above.
                theirs.source[PUTS - 1].with_mut(|p| unsafe { *p = 0 });
            });
            for i in 0..PUTS as u64 {
                // SAFETY: as above.
                world.target[i as usize].with_mut(|p| unsafe { *p = 1 });
                match world.stream.arm(i, Span { at: 100 + i, len: 20 }) {
                    Meeting::First => {}
                    Meeting::Second(from) => {
                        assert_eq!(from, Span { at: i, len: 10 + i });
                        world.copy(i);
                    }
                    other => panic!("{other:?}"),
                }
                while world.stream.filled(i).is_none() {
                    loom::thread::yield_now();
                }
                match world.stream.carried(i) {
                    None => assert_eq!(world.stream.filled(i), Some(10 + i)),
                    Some(bytes) => {
                        assert_eq!(world.stream.filled(i), Some(8));
                        let word = u64::from_ne_bytes(*bytes.first_chunk().unwrap());
                        // SAFETY: as above.
                        world.target[i as usize].with_mut(|p| unsafe { *p = word });
                    }
                }
                // SAFETY: as above.
                assert_eq!(world.target[i as usize].with(|p| unsafe { *p }), 10 + i);
                world.stream.release(i);
            }
            source.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn stream() -> Stream {
        Stream { slots: std::array::from_fn(|_| Slot::default()) }
    }

    fn span(at: u64) -> Span {
        Span { at, len: at + 1 }
    }

    #[test]
    fn the_second_to_come_copies() {
        let s = stream();
        assert_eq!(s.arm(0, span(10)), Meeting::First);
        assert_eq!(s.filled(0), None);
        assert_eq!(s.put(0, span(20)), Meeting::Second(span(10)));
        s.fill(0, 21);
        assert_eq!(s.filled(0), Some(21));
        assert!(s.is_taken(0));

        assert_eq!(s.put(1, span(30)), Meeting::First);
        assert!(!s.is_taken(1));
        assert_eq!(s.arm(1, span(40)), Meeting::Second(span(30)));
        s.fill(1, 31);
        assert!(s.is_taken(1));
        assert_eq!(s.filled(1), Some(31));
        assert_eq!(s.carried(1), None);

        for (i, few) in (2..).zip([&b""[..], b"short", &[7; FEW]]) {
            assert_eq!(s.arm(i, span(50)), Meeting::First);
            s.expect(i);
            assert_eq!(s.put(i, span(60)), Meeting::Second(span(50)));
            s.carry(i, few);
            assert!(s.is_taken(i) && s.has_put(i));
            assert_eq!(s.filled(i), Some(few.len() as u64));
            assert_eq!(&s.carried(i).unwrap()[..few.len()], few);
            s.release(i);
            assert_eq!((s.filled(i), s.carried(i)), (None, None));
        }
    }

    #[test]
    fn a_full_ring_says_so_until_the_target_releases() {
        let s = stream();
        for i in 0..SLOTS {
            assert_eq!(s.put(i, span(i)), Meeting::First);
        }
        assert_eq!(s.put(SLOTS, span(7)), Meeting::Full);
        assert_eq!(s.arm(0, span(9)), Meeting::Second(span(0)));
        s.fill(0, 1);
        assert_eq!(s.put(SLOTS, span(7)), Meeting::Full);
        s.release(0);
        assert!(s.is_taken(0), "a released slot was taken");
        assert_eq!(s.put(SLOTS, span(7)), Meeting::First);
        assert!(s.is_taken(0) && !s.is_taken(SLOTS));
    }

    #[test]
    fn two_threads_racing_for_every_slot_lose_nothing() {
        const PUTS: u64 = 200_000;
        let s = stream();
        let copies = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..PUTS {
                    loop {
                        match s.put(i, span(i)) {
                            Meeting::First => break,
                            Meeting::Second(to) => {
                                assert_eq!(to, span(2 * i));
                                copies.fetch_add(1, Ordering::Relaxed);
                                s.fill(i, i + 1);
                                break;
                            }
                            Meeting::Full => std::thread::yield_now(),
                            Meeting::Broken => panic!("broken at {i}"),
                        }
                    }
                }
            });
            for i in 0..PUTS {
                match s.arm(i, span(2 * i)) {
                    Meeting::First => {}
                    Meeting::Second(from) => {
                        assert_eq!(from, span(i));
                        copies.fetch_add(1, Ordering::Relaxed);
                        s.fill(i, from.len);
                    }
                    other => panic!("{other:?} at {i}"),
                }
                let len = loop {
                    match s.filled(i) {
                        Some(len) => break len,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(len, i + 1);
                s.release(i);
            }
        });
        assert_eq!(copies.into_inner(), PUTS);
    }
}
