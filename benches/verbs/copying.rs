//! The baseline: each message is copied into registered slots, sent, and copied out, two slots deep.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use fulmen_emu_verbs::Installed;
use fulmen_emu_verbs::abi::{QPT_UC, WC_SUCCESS};

use crate::client::{Address, CABLE, End, Verbs, load};

const SLOTS: usize = 2;
pub const LARGEST: usize = 512 << 10;

/// The only size before macOS 26.3.
pub const SMALLEST: usize = 4096;

/// Slot sizes are 4 KiB, 8 KiB, … up to `largest`; a message takes the largest that it fills.
fn slot_for(bytes: usize, largest: usize) -> usize {
    let mut size = SMALLEST;
    while size * 2 <= bytes.min(largest) {
        size *= 2;
    }
    size
}

/// Bytes per second of a copy between two buffers that are not in the first cache: the best of many.
pub fn copy_rate() -> f64 {
    let (from, mut to) = (vec![1u8; 8 * LARGEST], vec![0u8; 8 * LARGEST]);
    let once = |_| {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
        from.len() as f64 / start.elapsed().as_secs_f64()
    };
    (0..50).map(once).fold(0.0, f64::max)
}

/// Copies, and takes as long as the copy would at `rate` bytes per second of this clock.
///
/// # Safety
/// `len` bytes from `from` may be read and from `to` written, nobody else uses them meanwhile, and they do not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize, rate: f64) {
    let start = Instant::now();
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    let until = Duration::from_secs_f64(len as f64 / rate);
    while start.elapsed() < until {
        std::thread::yield_now();
    }
}

fn meet<'a>(verbs: &'a Verbs, device: &str, out: &Sender<Address>, into: &Receiver<Address>) -> End<'a> {
    let end = End::new(verbs, device, QPT_UC, 1023, SLOTS * LARGEST);
    out.send(end.address()).unwrap();
    end.connect(&into.recv().unwrap());
    end
}

/// One side of a stream of messages: `start` begins a slot's work, `finish` ends it.
fn stream(end: &End<'_>, chunks: usize, mut start: impl FnMut(usize), mut finish: impl FnMut(usize)) {
    let (mut begun, mut done) = (0, 0);
    while begun < chunks.min(SLOTS) {
        start(begun);
        begun += 1;
    }
    let mut last = Instant::now();
    while done < chunks {
        assert!(last.elapsed() < Duration::from_secs(60), "nothing comes any more");
        for wc in end.poll() {
            last = Instant::now();
            assert_eq!(wc.status, WC_SUCCESS);
            finish(done);
            done += 1;
            if begun < chunks {
                start(begun);
                begun += 1;
            }
        }
        std::thread::yield_now();
    }
}

/// Seconds per message, one call after the other, by the receiver's clock; copies go at `rate` bytes per second, slots
/// are of `largest` bytes at most.
pub fn seconds_per_message(world: &Installed, bytes: usize, count: usize, rate: f64, largest: usize) -> f64 {
    let verbs = load(world);
    let ((to_b, from_a), (to_a, from_b)) = (channel(), channel());
    let slot = slot_for(bytes, largest);
    let chunks = bytes.div_ceil(slot);
    let part = |chunk: usize| slot.min(bytes - chunk * slot);
    let verbs = &verbs;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let end = meet(verbs, CABLE[0], &to_b, &from_b);
            let data = vec![7u8; bytes];
            for _ in 0..count {
                let start = |chunk: usize| {
                    let at = chunk % SLOTS * LARGEST;
                    // SAFETY: within the end's memory and the data; this slot is not under way.
                    unsafe { copy(data.as_ptr().add(chunk * slot), end.memory.add(at), part(chunk), rate) };
                    end.send(chunk as u64, at, slot as u32).unwrap();
                };
                stream(&end, chunks, start, |_| ());
            }
            from_b.recv().ok(); // the receiver is done: only then may the end go
        });
        let end = meet(verbs, CABLE[1], &to_a, &from_a);
        let mut data = vec![0u8; bytes];
        let mut start = Instant::now();
        for message in 0..count {
            let post = |chunk: usize| end.recv(chunk as u64, chunk % SLOTS * LARGEST, slot as u32).unwrap();
            let out = |chunk: usize| {
                let at = chunk % SLOTS * LARGEST;
                // SAFETY: within the end's memory and the data; this slot is not under way.
                unsafe { copy(end.memory.add(at), data.as_mut_ptr().add(chunk * slot), part(chunk), rate) };
            };
            stream(&end, chunks, post, out);
            if message == 0 {
                start = Instant::now();
            }
        }
        let took = start.elapsed().as_secs_f64();
        drop(to_a);
        assert!(data.iter().all(|b| *b == 7));
        took / (count - 1) as f64
    })
}
