//! What this machine offers: cores and memory, as the operating system allows this process.

use fulmen::Error;
use fulmen::dist::memory;

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
    /// Bytes that can be had without swapping or hitting a limit; `None` if the system does not say.
    pub available: Option<u64>,
    /// What bounds them.
    pub bound: String,
}

impl Host {
    /// Asks the operating system.
    pub fn detect() -> Host {
        let memory = memory::available();
        let cores = fulmen::kernels::cores();
        let process = match memory.process {
            u64::MAX => u64::MAX,
            limited => limited.saturating_sub(address_space_of_threads(cores)),
        };
        let bound = if process < memory.host { "ulimit -v" } else { "free memory" };
        Host {
            name: "this machine".to_string(),
            cores,
            numa_nodes: numa_nodes(),
            available: Some(process.min(memory.host)).filter(|&bytes| bytes < u64::MAX),
            bound: bound.to_string(),
        }
    }
}

impl Host {
    /// Refuses a machine that has not even room for threads: what runs out of memory before it can say so may say nothing.
    ///
    /// # Errors
    /// [`Error::Resources`] with the limit and what raises it.
    pub fn must_hold_threads(&self) -> Result<(), Error> {
        if self.available != Some(0) {
            return Ok(());
        }
        let needed = units::bytes(u128::from(address_space_of_threads(self.cores)));
        Err(Error::Resources {
            what: format!(
                "memory: the threads on {} cores take {needed} of addresses, and {} is less",
                self.cores, self.bound
            ),
            remedy: format!("nothing was run; raise it ({}), or give fewer cores (taskset)", self.bound),
        })
    }
}

/// Addresses that the threads of a run will take before its matrix comes, which counts where `ulimit -v` rules:
/// a stack, and the heap that glibc's allocator sets aside for each thread that allocates. Beside the workers there are
/// the threads of the signals, the progress and the fabric.
fn address_space_of_threads(cores: usize) -> u64 {
    const STACK: u64 = 2 << 20;
    const HEAP: u64 = 64 << 20;
    (cores as u64 + 3) * (STACK + HEAP)
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
