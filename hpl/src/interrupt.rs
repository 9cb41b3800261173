//! Ctrl-C, SIGTERM, a closed terminal and what else asks a program to end: it does so in order, once. This is the only place that catches
//! signals in `hpl-run`; whoever starts processes asks [`count`]. (`fulmen-run`, which ends others first, counts for
//! itself: `launch::signals`.)

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use fulmen::Error;
use fulmen::fabric::Fabric;

/// Signals that end a program, and where they mostly come from. (By themselves all of them end it without a word.)
const SIGNALS: [(libc::c_int, &str, &str); 9] = [
    (libc::SIGINT, "SIGINT", "Ctrl-C"),
    (libc::SIGTERM, "SIGTERM", "kill, or a batch system that ends the job"),
    (libc::SIGHUP, "SIGHUP", "its terminal was closed"),
    (libc::SIGQUIT, "SIGQUIT", "Ctrl-\\"),
    (libc::SIGUSR1, "SIGUSR1", "a batch system's warning that time runs out, such as Slurm's --signal"),
    (
        libc::SIGUSR2,
        "SIGUSR2",
        "a batch system's warning that it will be killed, such as Grid Engine's -notify",
    ),
    (libc::SIGXCPU, "SIGXCPU", "the limit of CPU time: ulimit -t, or a batch system's"),
    (libc::SIGALRM, "SIGALRM", "a timer that was set before it was started"),
    (libc::SIGVTALRM, "SIGVTALRM", "a timer that was set before it was started"),
];

static CAUGHT: AtomicI32 = AtomicI32::new(0);
/// Which came first.
static WHICH: AtomicI32 = AtomicI32::new(0);
/// When the first came, in milliseconds of a clock that only goes on.
static FIRST: AtomicI64 = AtomicI64::new(0);

/// RDMA devices may be in this process's hands.
static HOLDS: AtomicBool = AtomicBool::new(false);

/// A signal this much later (in milliseconds) than the first is meant.
const AGAIN: i64 = 500;

/// Giving devices back takes no longer, unless their driver is stuck.
const GIVING_BACK: Duration = Duration::from_secs(2);

/// How often the watcher looks.
const EVERY: Duration = Duration::from_millis(50);

extern "C" fn note(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // What a rank hands on may reach this process by itself as well.
    #[cfg(target_os = "linux")]
    // SAFETY: installed with SA_SIGINFO alone (`catch_one`), so the system passes what it knows of this signal.
    if unsafe { (*info).si_code } == libc::SI_QUEUE && CAUGHT.load(Ordering::Relaxed) > 0 {
        return;
    }
    let _ = info;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the struct; may be called from a signal handler.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let now = now.tv_sec * 1000 + now.tv_nsec / 1_000_000;
    // The system repeats this one every second.
    if signal == libc::SIGXCPU && CAUGHT.load(Ordering::Relaxed) > 0 {
        return;
    }
    let first = WHICH.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if first {
        FIRST.store(now, Ordering::Relaxed);
    }
    CAUGHT.fetch_add(1, Ordering::Relaxed);
    if first {
        return;
    }
    // A second one ends the program at once, whatever the first is waiting for; but not what a key held down or a
    // launcher that sends two signals in a row adds: the first has files to tidy.
    // Nor while devices are given back, which is bounded by itself: a batch system and the launcher that it signals as well
    // send one each.
    if now - FIRST.load(Ordering::Relaxed) > AGAIN && !HOLDS.load(Ordering::Relaxed) {
        // SAFETY: _exit may be called from a signal handler.
        unsafe { libc::_exit(5) };
    }
}

/// How many signals asked the program to end so far.
pub fn count() -> i32 {
    CAUGHT.load(Ordering::Relaxed)
}

/// What ended the program: `interrupted by SIGUSR1: a batch system's warning ...`
pub fn words() -> String {
    by(WHICH.load(Ordering::Relaxed))
}

/// What such a signal says.
pub(crate) fn by(which: libc::c_int) -> String {
    let known = SIGNALS.iter().find(|(signal, ..)| *signal == which);
    known.map_or("interrupted".to_string(), |(_, name, origin)| format!("interrupted by {name}: {origin}"))
}

/// An error in words, with the signal if one is the cause.
pub fn told(e: &Error) -> String {
    if matches!(e, Error::Interrupted) && count() > 0 { words() } else { e.to_string() }
}

/// Calls `handler` for [`SIGNALS`] from now on. Signals that were ignored (`nohup`, a job in the
/// background of a script) stay so. The handler may do only what a signal handler may: atomics and `_exit`.
pub(crate) fn catch(handler: Handler) {
    SIGNALS.iter().for_each(|(signal, ..)| catch_one(*signal, handler));
}

/// What the system calls with a signal.
pub(crate) type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

fn catch_one(signal: libc::c_int, handler: Handler) {
    // SAFETY: plain data, all zeros is valid.
    let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
    new.sa_sigaction = handler as usize;
    new.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
    // SAFETY: both handlers of this crate only read the signal's facts, touch atomics and call _exit; a function stays valid for the
    // whole program.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), &raw mut old);
        if old.sa_sigaction != libc::SIG_IGN {
            libc::sigaction(signal, &raw const new, std::ptr::null_mut());
        }
    }
}

/// What a parent may have left so that nothing is heard: children that end without a word (`SIGCHLD` ignored, as daemons do, and they
/// are waited for in vain), and signals held back. To be called first: threads have the mask of who starts them.
pub fn hear() {
    // SAFETY: an action without a handler; a set on the stack that is emptied before it is used; this thread's own mask.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut all);
        for signal in SIGNALS.iter().map(|(signal, ..)| *signal).chain([libc::SIGCHLD]) {
            libc::sigaddset(&raw mut all, signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const all, std::ptr::null_mut());
    }
}

/// Catches what asks the program to end from now on, for who looks at [`count`] between the steps of what has to end in order.
/// A second signal ends the program at once.
pub fn listen() {
    catch(note);
}

/// [`listen`], for who may hold RDMA devices and gives them back in bounded time: meanwhile a second signal says nothing new.
pub fn listen_with_devices() {
    HOLDS.store(true, Ordering::Relaxed);
    listen();
}

/// A signal ends the program again as it does one that catches none.
///
/// # Errors
/// [`Error::Interrupted`] when one has come meanwhile.
pub fn stop_listening() -> Result<(), Error> {
    HOLDS.store(false, Ordering::Relaxed);
    for (signal, ..) in SIGNALS {
        // SAFETY: plain data, all zeros is valid.
        let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: asks, and gives up no handler but our own.
        unsafe {
            libc::sigaction(signal, std::ptr::null(), &raw mut now);
            if now.sa_sigaction == note as Handler as usize {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
    if count() > 0 { Err(Error::Interrupted) } else { Ok(()) }
}

/// What joins this process to the other ranks, and how long it may take to give it back.
static HELD: Mutex<Option<(Weak<dyn Fabric>, Duration)>> = Mutex::new(None);

/// From now on the other ranks hear of a signal before this process ends by it, and it has `within` to give back what the fabric
/// holds: the rank's own thread does so at its next call. (A process that ends with RDMA devices in its hands may leave them
/// unusable until a restart.)
pub fn gives_back(fabric: Weak<dyn Fabric>, within: Duration) {
    *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some((fabric, within));
}

/// What the program has failed with, and said.
static OVER: Mutex<Option<Error>> = Mutex::new(None);

/// The program has failed with this and is about to end: a signal from now on is no cause.
pub fn is_over(with: &Error) {
    OVER.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| with.clone());
}

/// Tells the other ranks. Returns until when to wait for what, and what the job had failed with before: then the signal only ends
/// what is over.
fn give_back() -> Option<(Weak<dyn Fabric>, Instant, Option<Error>)> {
    let (held, within) = HELD.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    let fabric = held.upgrade()?;
    fabric.fail(&Error::Interrupted);
    // Of several the first.
    let before = fabric.poll().err().filter(|e| !matches!(e, Error::Interrupted));
    Some((held, Instant::now() + within, before))
}

/// Who has started this rank.
#[cfg(target_os = "linux")]
static STARTER: AtomicI32 = AtomicI32::new(0);

#[cfg(target_os = "linux")]
extern "C" fn hand_on(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let to = STARTER.load(Ordering::Relaxed);
    let nothing = libc::sigval { sival_ptr: std::ptr::null_mut() };
    // SAFETY: installed with SA_SIGINFO alone (`goes_to_starter`), so the system passes what it knows of this signal; both calls may
    // be made in a handler, and the number is the parent's as long as the parent lives, which is asked.
    unsafe {
        if (*info).si_code == libc::SI_USER && (*info).si_pid() != to && libc::getppid() == to {
            libc::sigqueue(to, signal, nothing);
        }
    }
}

/// A signal that somebody sends to this rank goes to the process that has started it (and is its parent), which ends the job by it. A
/// terminal's go to both anyway. Linux only; elsewhere ranks ignore them.
pub fn goes_to_starter() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: always succeeds.
        STARTER.store(unsafe { libc::getppid() }, Ordering::Relaxed);
        for (signal, ..) in SIGNALS.iter().filter(|(signal, ..)| *signal != libc::SIGXCPU) {
            // SAFETY: plain data, all zeros is valid; `hand_on` does only what a handler may, and stays valid for the whole program.
            unsafe {
                let mut new: libc::sigaction = std::mem::zeroed();
                new.sa_sigaction = hand_on as Handler as usize;
                new.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
                libc::sigaction(*signal, &raw const new, std::ptr::null_mut());
            }
        }
    }
}

/// The limit of CPU time, which each process has by itself, runs `end` on a thread of its own; the program goes on. For a rank
/// whose other signals are answered by who started it.
pub fn at_limit_of_cpu_time(end: impl FnOnce() + Send + 'static) {
    catch_one(libc::SIGXCPU, note);
    // Without a watcher the hard limit ends this process.
    let _ = std::thread::Builder::new().name("interrupt".to_string()).spawn(move || {
        while count() == 0 {
            std::thread::sleep(EVERY);
        }
        end();
    });
}

/// Catches what asks the program to end from now on, and runs `end` on a thread of its own when one comes. `end` keeps what
/// can be kept, and is given what the job had failed with before; then the program ends with 5, or that failure's code, after what is
/// held was given back ([`gives_back`]).
pub fn watch(end: impl FnOnce(Option<&Error>) + Send + 'static) {
    catch(note);
    let watcher = std::thread::Builder::new().name("interrupt".to_string());
    // Without a watcher the second signal still ends the program.
    let _ = watcher.spawn(move || {
        while count() == 0 {
            std::thread::sleep(EVERY);
        }
        let held = give_back();
        let over = OVER.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let before = over.as_ref().or_else(|| held.as_ref().and_then(|(.., before)| before.as_ref()));
        if held.is_none() {
            HOLDS.store(false, Ordering::Relaxed);
        }
        end(before);
        if let Some((fabric, until, _)) = &held {
            while fabric.strong_count() > 0 && Instant::now() < *until {
                std::thread::sleep(EVERY);
            }
            // The count is zero from when the last owner begins to give back: it ends the program when it has.
            let until = (*until).min(Instant::now() + GIVING_BACK);
            while Instant::now() < until {
                std::thread::sleep(EVERY);
            }
        }
        std::process::exit(before.map_or(5, Error::exit_code).into());
    });
}
