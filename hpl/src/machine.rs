//! What this machine offers: cores and memory, as the operating system allows this process.

use fulmen::Error;
use fulmen::dist::memory::{self, Bound, OfProcess};

use crate::footprint::{self, Needed, Shape};
use crate::units;

/// A host, as far as planning needs to know it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Its name in messages.
    pub name: String,
    /// Cores that deserve a thread: those that this process may use (affinity and quota taken into account); on Apple
    /// silicon the performance cores.
    pub cores: usize,
    /// Memory domains.
    pub numa_nodes: usize,
    /// Bytes that all its processes together can have without swapping or hitting a limit; `None` if the system does not
    /// say.
    pub available: Option<u64>,
    /// What bounds them.
    pub bound: String,
    /// What each process has left of its own limits.
    pub limits: OfProcess,
}

/// What a host has too little of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lack {
    needed: u128,
    /// Of what: words after the number.
    of: &'static str,
    has: u64,
    /// What bounds it.
    pub bound: String,
}

impl Host {
    /// Asks the operating system.
    pub fn detect() -> Host {
        let (bytes, bound) = memory::of_host();
        let bound = match bound {
            Bound::Free => "free memory".to_string(),
            Bound::Group { limit } => {
                format!("memory limit of this container or cgroup: {}", units::bytes(limit.into()))
            }
        };
        Host {
            name: "this machine".to_string(),
            cores: fulmen::kernels::cores(),
            numa_nodes: numa_nodes(),
            available: Some(bytes).filter(|&bytes| bytes < u64::MAX),
            bound,
            limits: memory::of_process(),
        }
    }

    /// What it has far too little of, if `share` (0 to 1) of what it has is to hold a run.
    pub fn lacks(&self, needed: &Needed, share: f64) -> Option<Lack> {
        let limits = self.limits;
        [
            (needed.total, self.available.unwrap_or(u64::MAX), "", self.bound.as_str()),
            (needed.addresses, limits.addresses, " of addresses in one process", "ulimit -v"),
            (needed.data, limits.data, " of private memory in one process", "ulimit -d"),
        ]
        .into_iter()
        .filter(|&(needed, has, ..)| has < u64::MAX && needed as f64 > share * has as f64)
        .max_by(|a, b| (a.0 as f64 / a.1 as f64).total_cmp(&(b.0 as f64 / b.1 as f64)))
        .map(|(needed, has, of, bound)| Lack { needed, of, has, bound: bound.to_string() })
    }

    /// Refuses a machine that has not even room for the program and the threads that it is measured with: what runs out of
    /// memory before it can say so may say nothing.
    ///
    /// # Errors
    /// [`Error::Resources`] with the limit and what raises it.
    pub fn must_hold_threads(&self, shape: &Shape) -> Result<(), Error> {
        let threads = (shape.ranks * shape.threads).min(self.cores);
        let Some(lack) = self.lacks(&footprint::of_program(threads, shape), 1.0) else { return Ok(()) };
        let threads = units::count(threads, "thread");
        Err(Error::Resources {
            what: format!("memory: the program with {threads} {}", lack.told(&self.name)),
            remedy: format!("nothing was run; raise it ({}), or give fewer --threads", lack.bound),
        })
    }
}

impl Lack {
    /// `needs 12.1 GiB, this machine has 2.00 GiB (free memory)`
    pub fn told(&self, host: &str) -> String {
        format!(
            "needs {}{}, {host} has {} ({})",
            units::bytes(self.needed),
            self.of,
            units::bytes(u128::from(self.has)),
            self.bound
        )
    }
}

/// Bytes that measuring dgemm with so many threads may take: a quarter of what there is now. No run is sized by them.
pub fn room_to_measure(threads: usize) -> u64 {
    let left = memory::of_process();
    let mine = left.addresses.min(left.data).saturating_sub(footprint::addresses_of_threads(threads));
    memory::of_host().0.min(mine) / 4
}

/// Gives back to the system what the heap keeps of memory that is free.
pub fn give_back_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: may be called at any time; touches free memory only.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Memory domains; 1 where the system does not tell.
fn numa_nodes() -> usize {
    let nodes = std::fs::read_dir("/sys/devices/system/node").map_or(0, |dir| {
        let names = dir.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
        names.filter(|n| n.strip_prefix("node").is_some_and(|n| n.parse::<usize>().is_ok())).count()
    });
    nodes.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_and_memory() {
        let host = Host::detect();
        assert!(host.cores >= 1 && host.numa_nodes >= 1);
        assert!(host.available.is_none_or(|bytes| bytes > 0));
    }
}
