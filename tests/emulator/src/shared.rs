//! The state of a world in a file that all its processes map: queues, keys and counters, under one lock a wire.
//!
//! The state begins as zeros, which mean "unused" everywhere. A process that dies while it holds a lock leaves it to the next
//! (robust mutexes); at worst one message is then lost or doubled, as on a wire.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::counters::Counters;
use crate::world::{DESCRIPTION, MAX_TRAPS, World};

/// Entries of each ring; also the largest budget in frames, plus one.
pub const RING: usize = 4096;
pub const QPS: usize = 32;
pub const CQS: usize = 32;
pub const PDS: usize = 32;
pub const MRS: usize = 512;

/// A send in its ring.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Send {
    pub wr_id: u64,
    pub addr: u64,
    pub len: u32,
    pub lkey: u32,
    pub opcode: i32,
    pub flags: u32,
    pub imm: u32,
    pub rkey: u32,
    pub remote: u64,
    pub posted: u64,
    /// Numbers of the receives that it fills, plus one; 0: none.
    pub recv: u64,
    pub twin: u64,
    /// When its last frame has left, and arrived.
    pub sent_at: u64,
    pub arrives_at: u64,
    pub status: i32,
    /// Not to be carried, for it is lost or wrong.
    pub vanishes: u32,
    pub fate: u32,
    /// Its completion is not to be shown.
    pub hidden: u32,
    pub missing_counted: u32,
    pub frames: u32,
}

/// A receive in its ring.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Recv {
    pub wr_id: u64,
    pub addr: u64,
    pub len: u32,
    pub lkey: u32,
    pub posted: u64,
    pub done: u32,
    pub hidden: u32,
    pub status: i32,
    pub opcode: i32,
    pub byte_len: u32,
    pub imm: u32,
    pub flags: u32,
    pub frames: u32,
}

/// A queue pair. Ring positions count up for ever; `x_tail` is the next to be posted.
#[repr(C)]
pub struct Qp {
    pub used: u32,
    pub state: i32,
    pub kind: i32,
    pub number: u32,
    pub pid: i32,
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub signal_all: u32,
    pub access: u32,
    pub peer: u32,
    pub peer_number: u32,
    pub send_grant: u32,
    pub recv_grant: u32,
    pub send_frames: u32,
    pub recv_frames: u32,
    /// Messages longer than `dead_over - 1` vanish; 0: none do.
    pub dead_over: u64,
    pub sending_until: u64,
    pub last_addr: u64,
    pub last_len: u32,
    pub last_lkey: u32,
    pub send_tail: u64,
    pub send_matched: u64,
    pub send_sent: u64,
    pub send_arrived: u64,
    pub send_polled: u64,
    pub recv_tail: u64,
    pub recv_matched: u64,
    pub recv_polled: u64,
    pub sends: [Send; RING],
    pub recvs: [Recv; RING],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Mr {
    pub used: u32,
    pub pid: i32,
    pub key: u32,
    pub pd: u32,
    pub access: u32,
    pub generation: u32,
    pub addr: u64,
    pub len: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Cq {
    pub used: u32,
    pub pid: i32,
    pub size: u32,
    /// Completions not polled yet.
    pub waiting: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Pd {
    pub used: u32,
    pub pid: i32,
    pub lost: u32,
    /// One of its queue pairs was moved to ERR.
    pub erred: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Draw {
    pub seen: u64,
    pub played: u64,
}

/// A device.
#[repr(C)]
pub struct Port {
    pub counters: Counters,
    pub qps_made: u64,
    pub sending_until: u64,
    pub receiving_until: u64,
    pub draws: [Draw; MAX_TRAPS],
    pub pds: [Pd; PDS],
    pub cqs: [Cq; CQS],
    pub mrs: [Mr; MRS],
    pub qps: [Qp; QPS],
}

#[repr(C, align(64))]
struct Lock {
    mutex: libc::pthread_mutex_t,
    down: u32,
}

#[repr(C, align(4096))]
struct Head {
    ready: u64,
    made_at: AtomicU64,
    /// How often the world was described anew.
    generation: AtomicU64,
}

/// For each completion queue: the time from which a look into it is worth while. Read without the lock.
type Bells = [AtomicU64; CQS];

/// A description and what follows from it.
struct Described {
    world: World,
    /// Of each device; those without one share the last lock.
    wires: Vec<usize>,
    /// Indices of the traps that concern each device.
    traps: Vec<Vec<usize>>,
}

/// The mapped state and its description.
pub struct Shared {
    base: *mut u8,
    bytes: usize,
    folder: PathBuf,
    devices: usize,
    locks: usize,
    /// Of the description below.
    generation: Mutex<u64>,
    /// Older ones stay, for they may be borrowed: a test describes a world some thousand times at most.
    described: AtomicPtr<Described>,
}

// SAFETY: the mapping lives as long as the value; what is in it is reached under its lock or through atomics.
unsafe impl std::marker::Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Nanoseconds of the host's monotonic clock, the same for all processes.
pub fn now() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

impl Shared {
    /// Maps the state of the world described in `dir`; the first process makes it.
    pub fn open(dir: &Path) -> io::Result<Shared> {
        let described = Described::read(dir)?;
        let (devices, locks) = (described.world.devices.len(), described.world.wires.len() + 1);
        let bytes =
            size_of::<Head>() + locks_bytes(locks) + devices * (size_of::<Bells>() + size_of::<Port>());
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(dir.join("state"))?;
        let _first = FileLock::of(&file)?;
        if file.metadata()?.len() == 0 {
            file.set_len(bytes as u64)?;
        }
        // SAFETY: a fresh shared mapping of a file that is `bytes` long.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let shared = Shared {
            base: base.cast(),
            bytes,
            folder: dir.to_owned(),
            devices,
            locks,
            generation: Mutex::new(0),
            described: AtomicPtr::new(Box::into_raw(Box::new(described))),
        };
        shared.initialise()?;
        Ok(shared)
    }

    fn initialise(&self) -> io::Result<()> {
        // SAFETY: the head is at the mapping's start; the file's lock is held, so nobody else touches it.
        let head = unsafe { &mut *self.base.cast::<Head>() };
        if head.ready != 0 {
            return Ok(());
        }
        head.made_at.store(now(), Ordering::Relaxed);
        for wire in 0..self.locks {
            // SAFETY: a mutex attribute that lives here, and a mutex in the mapping that nobody uses yet.
            let failed = unsafe {
                let mut kind: libc::pthread_mutexattr_t = std::mem::zeroed();
                libc::pthread_mutexattr_init(&mut kind)
                    | libc::pthread_mutexattr_setpshared(&mut kind, libc::PTHREAD_PROCESS_SHARED)
                    | libc::pthread_mutexattr_setrobust(&mut kind, libc::PTHREAD_MUTEX_ROBUST)
                    | libc::pthread_mutex_init(&raw mut (*self.lock_at(wire)).mutex, &kind)
            };
            if failed != 0 {
                return Err(io::Error::from_raw_os_error(failed));
            }
        }
        head.ready = 1;
        Ok(())
    }

    fn lock_at(&self, wire: usize) -> *mut Lock {
        // SAFETY: within the mapping by the computation of its size.
        unsafe { self.base.add(size_of::<Head>()).cast::<Lock>().add(wire) }
    }

    fn head(&self) -> &Head {
        // SAFETY: at the mapping's start; `ready` is not written after `open`, the rest are atomics.
        unsafe { &*self.base.cast::<Head>() }
    }

    fn bells(&self, port: usize) -> &Bells {
        assert!(port < self.devices);
        // SAFETY: within the mapping, aligned to a page, atomics only.
        unsafe { &*self.base.add(size_of::<Head>() + locks_bytes(self.locks)).cast::<Bells>().add(port) }
    }

    fn port_at(&self, port: usize) -> *mut Port {
        assert!(port < self.devices);
        let before = size_of::<Head>() + locks_bytes(self.locks) + self.devices * size_of::<Bells>();
        // SAFETY: within the mapping by the computation of its size.
        unsafe { self.base.add(before).cast::<Port>().add(port) }
    }

    fn described(&self) -> &Described {
        // SAFETY: made by `open` or `refresh`, never freed.
        unsafe { &*self.described.load(Ordering::Acquire) }
    }

    /// The description.
    pub fn world(&self) -> &World {
        &self.described().world
    }

    /// Takes the newest description.
    pub fn refresh(&self) -> io::Result<()> {
        // Whoever comes meanwhile waits: no rank may begin in the old world.
        let mut known = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = self.head().generation.load(Ordering::Acquire);
        if *known != newest {
            let described = Box::new(Described::read(&self.folder)?);
            self.described.store(Box::into_raw(described), Ordering::Release);
            *known = newest;
        }
        Ok(())
    }

    /// Describes the world anew: its state is as at the start.
    pub fn change(&self, world: &World) -> io::Result<()> {
        let same = world.devices.len() == self.devices
            && world.wires.iter().map(|w| &w.devices).eq(self.world().wires.iter().map(|w| &w.devices));
        if !same {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "other devices or wires: install another world",
            ));
        }
        std::fs::write(self.folder.join(DESCRIPTION), serde_json::to_vec_pretty(world)?)?;
        for port in 0..self.devices {
            let patience = Duration::from_secs(5);
            let mut wire =
                self.lock(port, patience).ok_or_else(|| io::Error::from(io::ErrorKind::TimedOut))?;
            wire.set_down(false);
            let p = wire.port(port);
            p.counters = Counters::default();
            (p.qps_made, p.sending_until, p.receiving_until) = (0, 0, 0);
            p.draws = [Draw { seen: 0, played: 0 }; MAX_TRAPS];
            p.pds.iter_mut().for_each(|x| x.used = 0);
            p.cqs.iter_mut().for_each(|x| x.used = 0);
            p.mrs.iter_mut().for_each(|x| x.used = 0);
            p.qps.iter_mut().for_each(|x| x.used = 0);
        }
        self.head().made_at.store(now(), Ordering::Relaxed);
        self.head().generation.fetch_add(1, Ordering::AcqRel);
        self.refresh()
    }

    /// Nanoseconds since the world was made.
    pub fn age(&self) -> u64 {
        now() - self.head().made_at.load(Ordering::Relaxed)
    }

    /// From when on a look into the completion queue is worth while.
    pub fn bell(&self, port: usize, cq: usize) -> &AtomicU64 {
        &self.bells(port)[cq]
    }

    /// Takes a device's wire; `None` when its holder is stopped for longer than `patience`.
    pub fn lock(&self, port: usize, patience: Duration) -> Option<Guard<'_>> {
        self.lock_wire(self.described().wires[port], patience)
    }

    fn lock_wire(&self, wire: usize, patience: Duration) -> Option<Guard<'_>> {
        let lock = self.lock_at(wire);
        // SAFETY: a mutex made by `initialise`, in a mapping that outlives the guard.
        let got = unsafe {
            let mutex = &raw mut (*lock).mutex;
            match libc::pthread_mutex_trylock(mutex) {
                libc::EBUSY => {
                    let mut until: libc::timespec = std::mem::zeroed();
                    libc::clock_gettime(libc::CLOCK_REALTIME, &mut until);
                    let ns = until.tv_nsec as u64 + patience.subsec_nanos() as u64;
                    until.tv_sec += (patience.as_secs() + ns / 1_000_000_000) as libc::time_t;
                    until.tv_nsec = (ns % 1_000_000_000) as _;
                    libc::pthread_mutex_timedlock(mutex, &until)
                }
                other => other,
            }
        };
        match got {
            0 => {}
            libc::EOWNERDEAD => {
                // SAFETY: held by this thread; the state is used as it is (see the top).
                unsafe { libc::pthread_mutex_consistent(&raw mut (*lock).mutex) };
            }
            _ => return None,
        }
        Some(Guard { shared: self, lock, wire })
    }

    /// Everything counted so far.
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for port in 0..self.devices {
            let Some(mut wire) = self.lock(port, Duration::from_secs(5)) else { continue };
            sum.add(&wire.port(port).counters);
        }
        sum
    }

    /// Pulls or plugs in a cable.
    pub fn set_cable(&self, wire: usize, up: bool) {
        if let Some(mut guard) = self.lock_wire(wire, Duration::from_secs(5)) {
            guard.set_down(!up);
            for (port, _) in self.described().wires.iter().enumerate().filter(|(_, w)| **w == wire) {
                (0..CQS).for_each(|cq| guard.ring(port, cq as u32));
            }
        }
    }

    /// Indices of the traps that concern a device.
    pub fn traps_of(&self, port: usize) -> &[usize] {
        &self.described().traps[port]
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`; nothing borrows from it any more.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

fn locks_bytes(locks: usize) -> usize {
    (locks * size_of::<Lock>()).next_multiple_of(4096)
}

impl Described {
    fn read(folder: &Path) -> io::Result<Described> {
        let world: World = serde_json::from_slice(&std::fs::read(folder.join(DESCRIPTION))?)?;
        let stray = world.wires.iter().flat_map(|w| &w.devices).any(|d| *d >= world.devices.len());
        if world.traps.len() > MAX_TRAPS || stray {
            let why = format!(
                "{DESCRIPTION}: more than {MAX_TRAPS} traps, or a wire to a device that is not there"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let traps_of = |device: &crate::world::Device| {
            let applies = |t: &crate::world::Trap| t.device.as_ref().is_none_or(|name| *name == device.name);
            (0..world.traps.len()).filter(|i| applies(&world.traps[*i])).collect()
        };
        let traps = world.devices.iter().map(traps_of).collect();
        let wires = (0..world.devices.len()).map(|d| world.wire_of(d).unwrap_or(world.wires.len())).collect();
        Ok(Described { world, wires, traps })
    }
}

/// A wire, held.
pub struct Guard<'a> {
    pub shared: &'a Shared,
    lock: *mut Lock,
    wire: usize,
}

impl Guard<'_> {
    /// A device on this wire.
    pub fn port(&mut self, port: usize) -> &mut Port {
        assert_eq!(self.shared.described().wires[port], self.wire, "device {port} is on another wire");
        // SAFETY: the wire's lock is held, so no other thread or process uses the port; valid for any bits.
        unsafe { &mut *self.shared.port_at(port) }
    }

    /// Whether a device without a cable was asked for, or the cable is pulled.
    pub fn is_down(&self) -> bool {
        // SAFETY: the lock is held.
        self.wire + 1 == self.shared.locks || unsafe { (*self.lock).down != 0 }
    }

    pub fn set_down(&mut self, down: bool) {
        // SAFETY: the lock is held.
        unsafe { (*self.lock).down = down as u32 };
    }

    /// Makes the next poll of a completion queue look.
    pub fn ring(&self, port: usize, cq: u32) {
        self.shared.bell(port, cq as usize).store(0, Ordering::Release);
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // SAFETY: held by this thread.
        unsafe { libc::pthread_mutex_unlock(&raw mut (*self.lock).mutex) };
    }
}

/// `flock` on a file, until dropped.
struct FileLock<'a>(&'a File);

impl FileLock<'_> {
    fn of(file: &File) -> io::Result<FileLock<'_>> {
        // SAFETY: an open file.
        while unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(FileLock(file))
    }
}

impl Drop for FileLock<'_> {
    fn drop(&mut self) {
        // SAFETY: an open file.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}
