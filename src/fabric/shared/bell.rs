//! How a rank sleeps until another has something for it.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// One rank's bell, in memory that all ranks see. Valid when all zeros.
///
/// Sleeper: `asleep = 1; fence; look again; sleep while asleep == 1`. Ringer: `publish; fence; if asleep
/// was 1, set 0 and wake`. The two fences make it impossible that the sleeper misses what was published
/// and the ringer misses that it sleeps (Dekker).
#[repr(C)]
#[derive(Default)]
pub struct Bell {
    asleep: AtomicU32,
}

impl Bell {
    /// Wakes the owner if it sleeps. Call after publishing what it waits for.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) != 0 && self.asleep.swap(0, Ordering::Relaxed) != 0 {
            os::wake(&self.asleep);
        }
    }

    /// Sleeps until rung, for `at_most` at most, unless `ready` holds already. May return early.
    fn sleep(&self, at_most: Duration, ready: &mut dyn FnMut() -> bool) {
        self.asleep.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !ready() {
            os::sleep(&self.asleep, at_most);
        }
        self.asleep.store(0, Ordering::Relaxed);
    }
}

/// The pace of a wait: spin while the answer is likely near, then let others run, then sleep.
pub struct Pace {
    round: u32,
    spins: u32,
    nap: Duration,
    began: Option<Instant>,
}

/// Rounds of yielding before sleep.
const YIELDS: u32 = 64;
/// Nobody sleeps longer than this without looking around (deadlines, silent peers), and at first much
/// shorter.
const LONGEST_NAP: Duration = Duration::from_millis(250);
const FIRST_NAP: Duration = Duration::from_millis(2);

impl Pace {
    /// `crowded`: there are more ranks than cores, so that spinning takes time from who is waited for.
    pub fn new(crowded: bool) -> Self {
        Pace { round: 0, spins: if crowded { 20 } else { 400 }, nap: FIRST_NAP, began: None }
    }

    /// Passes a little time. `true`: the wait is long enough by now to look at clocks and peers.
    pub fn step(&mut self, bell: &Bell, at_most: Duration, ready: &mut dyn FnMut() -> bool) -> bool {
        self.round = self.round.saturating_add(1);
        if self.round <= self.spins {
            std::hint::spin_loop();
            return false;
        }
        if self.began.is_none() {
            self.began = Some(Instant::now());
        }
        if self.round <= self.spins + YIELDS {
            std::thread::yield_now();
            return self.round.is_multiple_of(16);
        }
        bell.sleep(at_most.min(self.nap), ready);
        self.nap = (2 * self.nap).min(LONGEST_NAP);
        true
    }

    /// Since when it waits, but for the first microseconds.
    pub fn waited(&self) -> Duration {
        self.began.map_or(Duration::ZERO, |t| t.elapsed())
    }
}

#[cfg(target_os = "linux")]
mod os {
    use super::{AtomicU32, Duration};

    pub fn sleep(word: &AtomicU32, at_most: Duration) {
        let timeout = libc::timespec {
            tv_sec: at_most.as_secs() as libc::time_t,
            tv_nsec: at_most.subsec_nanos() as libc::c_long,
        };
        // SAFETY: FUTEX_WAIT reads the aligned word, which outlives the call, and the timeout. It is not
        // marked private: the ranks may be processes.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 1u32, &raw const timeout);
        }
    }

    pub fn wake(word: &AtomicU32) {
        // SAFETY: FUTEX_WAKE uses the address of the word only.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

/// macOS has a futex since 14.4; it is looked up when the program runs, so that older systems still start it.
#[cfg(target_os = "macos")]
mod os {
    use std::ffi::{CStr, c_int, c_void};
    use std::sync::LazyLock;

    use super::{AtomicU32, Duration};

    /// `os_sync_wait_on_address_with_timeout`: address, value, its size, flags, clock, nanoseconds from now.
    type Wait = unsafe extern "C" fn(*mut c_void, u64, usize, u32, libc::os_clockid_t, u64) -> c_int;
    /// `os_sync_wake_by_address_all`: address, size of the value, flags.
    type Wake = unsafe extern "C" fn(*mut c_void, usize, u32) -> c_int;

    const SIZE: usize = size_of::<AtomicU32>();
    /// Nobody has measured yet whether every wake-up arrives in memory that is not shared (ranks as threads): no
    /// sleeper relies on it for longer.
    const LONGEST: Duration = Duration::from_millis(1);

    static FUTEX: LazyLock<Option<(Wait, Wake)>> = LazyLock::new(|| {
        let find = |name: &CStr| {
            // SAFETY: looks a name up in the libraries that are loaded.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        let (wait, wake) =
            (find(c"os_sync_wait_on_address_with_timeout")?, find(c"os_sync_wake_by_address_all")?);
        // SAFETY: the signatures of os/os_sync_wait_on_address.h; the system's library stays loaded.
        Some(unsafe {
            (std::mem::transmute::<*mut c_void, Wait>(wait), std::mem::transmute::<*mut c_void, Wake>(wake))
        })
    });

    pub fn sleep(word: &AtomicU32, at_most: Duration) {
        if let Some((wait, _)) = *FUTEX {
            let nanoseconds = at_most.min(LONGEST).as_nanos() as u64;
            let clock = libc::OS_CLOCK_MACH_ABSOLUTE_TIME;
            // SAFETY: reads the aligned word, which outlives the call; shared, for the ranks may be processes.
            let waited = unsafe {
                wait(word.as_ptr().cast(), 1, SIZE, libc::OS_SYNC_WAIT_ON_ADDRESS_SHARED, clock, nanoseconds)
            };
            let error = std::io::Error::last_os_error().raw_os_error();
            if waited >= 0 || matches!(error, Some(libc::ETIMEDOUT | libc::EINTR)) {
                return;
            }
        }
        // Without a futex, sleepers look around often.
        std::thread::sleep(at_most.min(Duration::from_micros(50)));
    }

    pub fn wake(word: &AtomicU32) {
        if let Some((_, wake)) = *FUTEX {
            // SAFETY: uses the address of the word only.
            unsafe { wake(word.as_ptr().cast(), SIZE, libc::OS_SYNC_WAKE_BY_ADDRESS_SHARED) };
        }
    }
}

/// Without a futex that works across processes, sleepers look around often.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod os {
    use super::{AtomicU32, Duration};

    pub fn sleep(_: &AtomicU32, at_most: Duration) {
        std::thread::sleep(at_most.min(Duration::from_micros(50)));
    }

    pub fn wake(_: &AtomicU32) {}
}
