//! Ranks as threads of one process.
//!
//! A put is one `memcpy` into the range armed for it, by whichever side comes second.

mod faults;
mod faulty;
mod net;
pub(crate) mod pages;

pub use faults::{Faults, Kill};

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use self::faulty::World;
use self::pages::Pages;
use super::shared::area::Area;
use super::shared::endpoint::{Endpoint, Space, UnderWay};
use super::shared::slot::Span;
use super::{Bounds, Fabric, Memory};
use crate::error::{Error, Result};

/// How a job of threads behaves.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Deadlines. A thread is never silent: only `patience` counts.
    pub bounds: Bounds,
    /// What goes wrong, for tests. `None`: nothing does.
    pub faults: Option<Faults>,
}

/// What [`Job::run`] asks of a rank beside its fabric.
trait Rank: Fabric {
    /// Its thread is there.
    fn enter(&self);

    /// Its work has ended.
    fn leave(&self) -> Result<()>;

    /// A digest of the order in which ranks ran.
    #[cfg(test)]
    fn schedule(&self) -> u64;
}

/// A job of `n` ranks in this process.
pub struct Job {
    ranks: Vec<Arc<dyn Rank>>,
}

impl Job {
    /// A job of `n` ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] when `n` is 0, [`Error::Resources`] when there is no memory for it.
    pub fn new(n: usize, options: &Options) -> Result<Self> {
        if n == 0 {
            return Err(Error::argument("ranks", n, "is no job", "ask for one rank or more"));
        }
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let job = JOBS.fetch_add(1, Ordering::Relaxed);
        if let Some(faults) = options.faults {
            let ranks = World::ranks(n, job, faults, options.bounds);
            return Ok(Job { ranks: ranks.into_iter().map(|r| Arc::new(r) as Arc<dyn Rank>).collect() });
        }
        let pages = Pages::sparse(Area::bytes(n))?;
        // SAFETY: fresh zeroed pages, enough of them, that the area keeps and nobody else knows.
        let area = Arc::new(unsafe { Area::new(pages.as_ptr(), n, Box::new(pages)) });
        let all: Arc<[Arc<UnderWay>]> = (0..n).map(|_| Arc::new(UnderWay::new(n))).collect();
        let ranks = (0..n)
            .map(|rank| {
                let space = Threads { rank, job, _all: Arc::clone(&all) };
                let under_way = Arc::clone(&all[rank]);
                let area = Arc::clone(&area);
                Arc::new(Endpoint::new(rank, area, space, under_way, options.bounds)) as Arc<dyn Rank>
            })
            .collect();
        Ok(Job { ranks })
    }

    /// The fabrics of all ranks, to be driven by threads of the caller's.
    pub fn build(self) -> Vec<Arc<dyn Fabric>> {
        self.ranks.into_iter().map(|rank| rank as Arc<dyn Fabric>).collect()
    }

    /// Runs `work` on every rank, each on a thread of its own, and returns what they returned.
    ///
    /// A rank that fails or panics ends the job: the waits of the others fail with [`Error::Aborted`],
    /// and a panic becomes an [`Error::Internal`].
    pub fn run<R: Send>(self, work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync) -> Vec<Result<R>> {
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .ranks
                .iter()
                .map(|end| {
                    std::thread::Builder::new()
                        .name(format!("rank {}", end.rank()))
                        .spawn_scoped(scope, move || run_rank(end, work))
                        .map_err(|e| {
                            end.abort("a thread could not be started");
                            // Nobody is to wait for it. What this returns is about its puts: it has none.
                            let _ = end.leave();
                            Error::Resources {
                                what: format!("no thread for rank {} of {}: {e}", end.rank(), end.size()),
                                remedy: "use fewer ranks or threads, or raise the limit (ulimit -u)".into(),
                            }
                        })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread?.join().unwrap_or_else(|panic| Err(Error::Internal(panic_text(&*panic))))
                })
                .collect()
        })
    }
}

/// Runs `work` on `n` ranks: [`Job::new`] and [`Job::run`].
///
/// ```
/// use fulmen::fabric::{Buf, Lane, mem};
///
/// let sums = mem::run(2, mem::Options::default(), |fabric| {
///     let other = 1 - fabric.rank();
///     let mut mine = Buf::<f64>::zeros(&*fabric, 1)?;
///     let mut theirs = Buf::<f64>::zeros(&*fabric, 1)?;
///     theirs.arm(&*fabric, Lane::CONTROL, other, 0..1)?;
///     mine.write(0..1)[0] = 1.0 + fabric.rank() as f64;
///     mine.put(&*fabric, Lane::CONTROL, other, 0..1)?;
///     theirs.wait(&*fabric, Lane::CONTROL, other)?;
///     Ok(mine.read(0..1)[0] + theirs.read(0..1)[0])
/// });
/// assert!(sums.into_iter().all(|sum| sum.unwrap() == 3.0));
/// ```
pub fn run<R: Send>(
    n: usize,
    options: Options,
    work: impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    match Job::new(n, &options) {
        Ok(job) => job.run(work),
        Err(e) => (0..n).map(|_| Err(e.clone())).collect(),
    }
}

fn run_rank<R>(end: &Arc<dyn Rank>, work: &(impl Fn(Arc<dyn Fabric>) -> Result<R> + Sync)) -> Result<R> {
    end.enter();
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| work(Arc::clone(end) as Arc<dyn Fabric>)));
    let result = done.unwrap_or_else(|panic| {
        Err(Error::Internal(format!("rank {} panicked: {}", end.rank(), panic_text(&*panic))))
    });
    if let Err(e) = &result {
        end.fail(e);
    }
    let left = end.leave();
    result.and_then(|value| left.map(|()| value))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "a panic without words".into())
}

/// Memory of threads: everybody reaches everything by its pointer.
struct Threads {
    rank: usize,
    job: usize,
    /// What every rank has under way keeps the memory that others may still touch.
    _all: Arc<[Arc<UnderWay>]>,
}

/// What a [`Memory`] of this fabric is made of.
struct Owner {
    _pages: Pages,
    rank: usize,
    job: usize,
}

/// Memory of a rank of a job.
fn memory(rank: usize, job: usize, bytes: usize) -> Result<Arc<Memory>> {
    let pages = Pages::new(bytes)?;
    let at = pages.as_ptr();
    let owner = Owner { _pages: pages, rank, job };
    // SAFETY: zeroed pages of at least `bytes` that live as long as the owner and are known only here.
    Ok(Arc::new(unsafe { Memory::new(at, bytes, Box::new(owner)) }))
}

/// The address of what [`memory`] made for the same rank and job.
fn address_in(memory: &Memory, job: usize, rank: usize) -> Option<u64> {
    let owner = memory.owner().downcast_ref::<Owner>()?;
    (owner.rank == rank && owner.job == job).then_some(memory.as_ptr() as u64)
}

impl Rank for Endpoint<Threads> {
    fn enter(&self) {}

    fn leave(&self) -> Result<()> {
        Endpoint::leave(self)
    }

    #[cfg(test)]
    fn schedule(&self) -> u64 {
        0
    }
}

impl Space for Threads {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn alloc(&self, bytes: usize) -> Result<Arc<Memory>> {
        memory(self.rank, self.job, bytes)
    }

    fn address(&self, memory: &Memory) -> Option<u64> {
        address_in(memory, self.job, self.rank)
    }

    fn reach(&self, _: usize, span: Span) -> Option<*mut u8> {
        // Published by a rank of this job, from a range it had checked.
        Some(span.at as *mut u8)
    }

    fn silent_for(&self, _: usize) -> Option<Duration> {
        None
    }

    /// What is under way is kept by the job.
    fn leave(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::{Buf, Lane};

    fn schedule_of(seed: u64) -> u64 {
        let options = Options { faults: Some(Faults::harmless(seed)), ..Options::default() };
        let job = Job::new(3, &options).unwrap();
        let last = Arc::clone(&job.ranks[0]);
        let results = job.run(|fabric| {
            let mut buf = Buf::<u64>::zeros(&*fabric, 3)?;
            let (me, n) = (fabric.rank(), fabric.size());
            for _ in 0..20 {
                for peer in (0..n).filter(|p| *p != me) {
                    buf.arm(&*fabric, Lane::CONTROL, peer, peer..peer + 1)?;
                    buf.put(&*fabric, Lane::CONTROL, peer, me..me + 1)?;
                }
                for peer in (0..n).filter(|p| *p != me) {
                    buf.wait(&*fabric, Lane::CONTROL, peer)?;
                }
                buf.flush(&*fabric)?;
            }
            Ok(())
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        last.schedule()
    }

    #[test]
    fn a_seed_is_a_schedule() {
        let of: Vec<u64> = (0..20).map(schedule_of).collect();
        assert_eq!(of, (0..20).map(schedule_of).collect::<Vec<_>>());
        let mut different = of.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 15, "{of:?}");
    }
}
