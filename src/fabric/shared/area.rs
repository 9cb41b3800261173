//! The memory that all ranks of a job see: who lives, what failed, and the streams of puts.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::bell::Bell;
use super::deadlock::Wait;
use super::slot::Stream;
use crate::error::Error;
use crate::fabric::Lane;

/// How a job failed. The first failure is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// A rank ended it.
    Aborted {
        /// Who.
        by: usize,
        /// Why.
        reason: String,
        /// The exit code that it asks for.
        code: u8,
    },
    /// A rank is gone.
    Gone {
        /// Which.
        rank: usize,
    },
    /// A signal ended it.
    Interrupted,
}

impl Failure {
    /// That `rank` ended the job with this error.
    pub fn by(rank: usize, error: &Error) -> Self {
        match error {
            Error::Interrupted => Failure::Interrupted,
            other => Failure::Aborted { by: rank, reason: other.to_string(), code: other.exit_code() },
        }
    }
}

/// Where a rank is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// Not there yet, or running.
    Running,
    /// It returned and has nothing left to put.
    Left,
    /// It died.
    Dead,
}

/// What each rank shows of itself.
#[repr(C, align(128))]
pub struct Rank {
    pub bell: Bell,
    life: AtomicU32,
    /// Counts while the rank lives; who sees it stand still knows that the rank does not run. 0: has not
    /// joined yet.
    pub beat: AtomicU64,
    pub wait: Wait,
    activity: Text<128>,
}

/// A short text. Whoever reads while it is written may see some of both: it is for messages only.
#[repr(C)]
struct Text<const N: usize> {
    len: AtomicU32,
    bytes: [AtomicU8; N],
}

impl<const N: usize> Text<N> {
    fn set(&self, text: &str) {
        let mut len = text.len().min(N);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        for (cell, byte) in self.bytes.iter().zip(&text.as_bytes()[..len]) {
            cell.store(*byte, Ordering::Relaxed);
        }
        self.len.store(len as u32, Ordering::Relaxed);
    }

    fn get(&self) -> String {
        let len = (self.len.load(Ordering::Relaxed) as usize).min(N);
        let bytes: Vec<u8> = self.bytes[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Rank {
    /// What the rank is doing, for messages.
    pub fn activity(&self) -> String {
        self.activity.get()
    }

    pub fn set_activity(&self, what: &str) {
        self.activity.set(what);
    }

    pub fn life(&self) -> Life {
        match self.life.load(Ordering::Acquire) {
            0 => Life::Running,
            1 => Life::Left,
            _ => Life::Dead,
        }
    }

    pub fn set_life(&self, life: Life) {
        let code = match life {
            Life::Running => 0,
            Life::Left => 1,
            Life::Dead => 2,
        };
        self.life.store(code, Ordering::Release);
    }
}

#[repr(C, align(128))]
struct Header {
    /// 0: none; 1: being written; 2: to be read.
    failed: AtomicU32,
    kind: AtomicU32,
    rank: AtomicU32,
    code: AtomicU32,
    /// As a rank's, of the process that started the ranks.
    supervisor_beat: AtomicU64,
    reason: Text<2048>,
}

/// A view of that memory. Everything in it is atomic and valid when all zeros.
pub struct Area {
    base: *const u8,
    ranks: usize,
    /// Keeps the memory mapped.
    _memory: Box<dyn std::any::Any + Send + Sync>,
}

// SAFETY: all access to the memory is through atomics.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    const RANKS_AT: usize = size_of::<Header>();

    fn streams_at(ranks: usize) -> usize {
        (Self::RANKS_AT + ranks * size_of::<Rank>()).next_multiple_of(4096)
    }

    /// Bytes needed for so many ranks. Most are never touched: a page for each stream that is used.
    pub fn bytes(ranks: usize) -> usize {
        Self::streams_at(ranks) + ranks * ranks * Lane::COUNT * size_of::<Stream>()
    }

    /// # Safety
    /// `base` is page-aligned and points to [`Area::bytes`] bytes, zeroed before the first rank used
    /// them, that live as long as `memory` and are used through `Area` alone.
    pub unsafe fn new(base: *const u8, ranks: usize, memory: Box<dyn std::any::Any + Send + Sync>) -> Self {
        Area { base, ranks, _memory: memory }
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    fn header(&self) -> &Header {
        // SAFETY: at the start of the memory promised to `new`; atomics are valid for any bits.
        unsafe { &*self.base.cast() }
    }

    /// The beat of the process that started the ranks, if there is one.
    pub fn supervisor_beat(&self) -> &AtomicU64 {
        &self.header().supervisor_beat
    }

    /// # Panics
    /// When there is no such rank.
    pub fn rank(&self, rank: usize) -> &Rank {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        // SAFETY: inside the memory promised to `new`, aligned to 128 as `Header` is.
        unsafe { &*self.base.add(Self::RANKS_AT).cast::<Rank>().add(rank) }
    }

    /// The stream of puts from one rank to another.
    ///
    /// # Panics
    /// When there is no such rank or lane.
    pub fn stream(&self, from: usize, to: usize, lane: Lane) -> &Stream {
        assert!(from < self.ranks && to < self.ranks && (lane.0 as usize) < Lane::COUNT);
        let at = (to * self.ranks + from) * Lane::COUNT + lane.0 as usize;
        // SAFETY: inside the memory promised to `new`; page-aligned.
        unsafe { &*self.base.add(Self::streams_at(self.ranks)).cast::<Stream>().add(at) }
    }

    /// The failure of the job, if any. Cheap when there is none.
    pub fn failure(&self) -> Option<Failure> {
        let header = self.header();
        if header.failed.load(Ordering::Acquire) != 2 {
            return None;
        }
        let rank = header.rank.load(Ordering::Relaxed) as usize;
        Some(match header.kind.load(Ordering::Relaxed) {
            0 => Failure::Aborted {
                by: rank,
                reason: header.reason.get(),
                code: header.code.load(Ordering::Relaxed) as u8,
            },
            1 => Failure::Gone { rank },
            _ => Failure::Interrupted,
        })
    }

    /// Records a failure, if it is the first, and wakes everybody. Returns whether it was the first.
    pub fn fail(&self, failure: &Failure) -> bool {
        let header = self.header();
        if header.failed.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        let (kind, rank) = match failure {
            Failure::Aborted { by, reason, code } => {
                header.reason.set(reason);
                header.code.store(u32::from(*code), Ordering::Relaxed);
                (0, *by)
            }
            Failure::Gone { rank } => (1, *rank),
            Failure::Interrupted => (2, 0),
        };
        header.kind.store(kind, Ordering::Relaxed);
        header.rank.store(rank as u32, Ordering::Relaxed);
        header.failed.store(2, Ordering::Release);
        self.ring_all();
        true
    }

    pub fn ring_all(&self) {
        for rank in 0..self.ranks {
            self.rank(rank).bell.ring();
        }
    }
}
