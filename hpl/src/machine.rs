//! What this machine offers: cores and memory, as the operating system allows this process.

use std::fs;
use std::path::{Path, PathBuf};

/// A host, as far as planning needs to know it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Its name in messages.
    pub name: String,
    /// Cores that this process may use (affinity and quota taken into account).
    pub cores: usize,
    /// Memory domains.
    pub numa_nodes: usize,
    /// Bytes that can be had without swapping or hitting a limit; `None` if the system does not say.
    pub available: Option<u64>,
    /// What bounds them: free memory, a control group, a resource limit.
    pub bound: String,
}

impl Host {
    /// Asks the operating system.
    pub fn detect() -> Host {
        let mut bounds: Vec<(u64, &str)> = vec![];
        bounds.extend(free_memory().map(|bytes| (bytes, "free memory")));
        bounds.extend(cgroup_room(Path::new("/")).map(|bytes| (bytes, "the control group's limit")));
        bounds.extend(address_space().map(|bytes| (bytes, "ulimit -v")));
        let tightest = bounds.into_iter().min_by_key(|b| b.0);
        Host {
            name: "this machine".to_string(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            numa_nodes: numa_nodes(),
            available: tightest.map(|b| b.0),
            bound: tightest.map_or("", |b| b.1).to_string(),
        }
    }
}

fn numa_nodes() -> usize {
    let nodes = fs::read_dir("/sys/devices/system/node").map_or(0, |dir| {
        dir.flatten()
            .filter(|e| {
                let name = e.file_name().to_string_lossy().into_owned();
                name.strip_prefix("node").is_some_and(|n| n.parse::<usize>().is_ok())
            })
            .count()
    });
    nodes.max(1)
}

#[cfg(not(target_os = "macos"))]
fn free_memory() -> Option<u64> {
    Some(meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")? * 1024)
}

#[cfg(target_os = "macos")]
fn free_memory() -> Option<u64> {
    // Pages that are free, or can be dropped without writing.
    let page = sysctl("hw.pagesize")?;
    let parts = ["vm.page_free_count", "vm.page_purgeable_count", "vm.page_pageable_external_count"];
    match parts.iter().map(|name| sysctl(name)).sum::<Option<u64>>() {
        Some(pages) => Some(pages * page),
        None => sysctl("hw.memsize").map(|all| all / 5 * 4),
    }
}

#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<u64> {
    let name = std::ffi::CString::new(name).ok()?;
    let (mut value, mut size) = (0u64, size_of::<u64>());
    // SAFETY: the name is a C string, and value and size describe eight writable bytes; shorter
    // answers fill the low bytes of the zeroed value on the little-endian machines that macOS runs on.
    let failed = unsafe {
        libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &raw mut size, std::ptr::null_mut(), 0)
    };
    (failed == 0).then_some(value)
}

/// A number of `/proc/meminfo`, in its unit (KiB).
#[cfg(any(test, not(target_os = "macos")))]
fn meminfo(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse().ok())
}

/// Bytes left in the tightest control group (version 2 or 1) around this process, under `root`.
fn cgroup_room(root: &Path) -> Option<u64> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut tightest: Option<u64> = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, limit, used) = if controllers.is_empty() {
            (root.join("sys/fs/cgroup"), "memory.max", "memory.current")
        } else if controllers.split(',').any(|c| c == "memory") {
            (root.join("sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        // Every group up to the root binds; inside a container the path may not exist, the root does.
        let mut group: PathBuf = base.join(path.trim_start_matches('/'));
        while group.starts_with(&base) {
            let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
            if let (Some(limit), Some(used)) = (number(limit), number(used)) {
                // Version 1 writes "no limit" as a number near 2⁶³.
                if limit < 1 << 60 {
                    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
                    let cache = stat
                        .lines()
                        .find_map(|l| l.strip_prefix("inactive_file ")?.parse::<u64>().ok())
                        .unwrap_or(0);
                    let room = limit.saturating_sub(used.saturating_sub(cache));
                    tightest = Some(tightest.map_or(room, |t| t.min(room)));
                }
            }
            if !group.pop() {
                break;
            }
        }
    }
    tightest
}

/// What is left of `ulimit -v`, if it is set.
fn address_space() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: limit is a writable rlimit.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    if failed != 0 || limit.rlim_cur == libc::RLIM_INFINITY || limit.rlim_cur > 1 << 60 {
        return None;
    }
    let used = fs::read_to_string("/proc/self/status").ok();
    let used = used.and_then(|s| {
        s.lines().find_map(|l| l.strip_prefix("VmSize:")?.split_whitespace().next()?.parse::<u64>().ok())
    });
    Some(limit.rlim_cur.saturating_sub(used.unwrap_or(0) * 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       24567 kB\nMemAvailable:   22600 kB\n";
        assert_eq!(meminfo(text, "MemAvailable:"), Some(22600));
        assert_eq!(meminfo(text, "Nothing:"), None);
    }

    #[test]
    fn the_tightest_control_group_binds() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("proc/self/cgroup", "0::/job/step\n");
        put("sys/fs/cgroup/job/step/memory.max", "max\n");
        put("sys/fs/cgroup/job/step/memory.current", "10\n");
        put("sys/fs/cgroup/job/memory.max", "2147483648\n");
        put("sys/fs/cgroup/job/memory.current", "147483648\n");
        put("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 47483648\n");
        assert_eq!(cgroup_room(root.path()), Some(2_147_483_648 - 100_000_000));

        put("proc/self/cgroup", "5:cpu:/\n4:memory:/a\n");
        assert_eq!(cgroup_room(root.path()), None);
        put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
        put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1\n");
        assert_eq!(cgroup_room(root.path()), None);
        put("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
        put("sys/fs/cgroup/memory/memory.usage_in_bytes", "400\n");
        assert_eq!(cgroup_room(root.path()), Some(600));
    }

    #[test]
    fn this_machine_has_cores_and_memory() {
        let host = Host::detect();
        assert!(host.cores >= 1 && host.numa_nodes >= 1);
        assert!(host.available.is_none_or(|bytes| bytes > 0));
    }
}
