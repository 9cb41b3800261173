//! What this machine offers: cores and memory, as the operating system allows this process.

use fulmen::dist::memory;

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
        let bound = if memory.process < memory.host { "ulimit -v" } else { "free memory" };
        Host {
            name: "this machine".to_string(),
            cores: fulmen::kernels::cores(),
            numa_nodes: numa_nodes(),
            available: Some(memory.least()).filter(|&bytes| bytes < u64::MAX),
            bound: bound.to_string(),
        }
    }
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
