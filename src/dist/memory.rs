//! Memory for local blocks: how much there is, and zero pages that cost nothing until touched.

use std::ptr::NonNull;

use bytemuck::Pod;

use crate::comm::Group;
use crate::error::{Error, Result};

/// Blocks from here on are worth huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// What this process may still use, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Available {
    /// What all processes of this host and control group may still use together.
    pub host: u64,
    /// What this process may still use by its own limits (`ulimit -v`, `ulimit -d`).
    pub process: u64,
}

impl Available {
    /// The smaller of the two.
    pub fn least(&self) -> u64 {
        self.host.min(self.process)
    }
}

/// Asks the system: free and reclaimable memory, every control group above this process, and the
/// process's own limits. What cannot be found out does not limit.
pub fn available() -> Available {
    let process = of_process();
    Available { host: of_host().0, process: process.addresses.min(process.data) }
}

/// What bounds the memory of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// What the host has free.
    Free,
    /// The limit of a control group: of a container, or of a batch system's job.
    Group {
        /// Bytes that all of the group may use.
        limit: u64,
    },
}

/// [`Available::host`], and what bounds it.
pub fn of_host() -> (u64, Bound) {
    let free = system::free();
    match system::group() {
        Some((left, limit)) if left < free => (left, Bound::Group { limit }),
        _ => (free, Bound::Free),
    }
}

/// Bytes that a process has left of its own limits; `u64::MAX` where there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OfProcess {
    /// Addresses (`ulimit -v`): all that is mapped counts, whether it is touched or not.
    pub addresses: u64,
    /// Private memory that can be written (`ulimit -d`): heap, stacks, matrices.
    pub data: u64,
}

impl OfProcess {
    /// No limit.
    pub const UNLIMITED: OfProcess = OfProcess { addresses: u64::MAX, data: u64::MAX };
}

/// Asks the system what this process has left.
pub fn of_process() -> OfProcess {
    let used = system::used();
    let left = |limit: Option<u64>, used| limit.map_or(u64::MAX, |limit| limit.saturating_sub(used));
    OfProcess {
        addresses: left(limit_of(libc::RLIMIT_AS), used.addresses),
        data: left(limit_of(libc::RLIMIT_DATA), used.data),
    }
}

/// Refuses, on all ranks of `group` alike and before anything is touched, what does not fit.
///
/// `bytes` is what this rank is going to use for `what`; the needs of ranks on one host are added up.
///
/// # Errors
/// [`Error::Resources`] with host, needed and available bytes; also when a rank is lost.
pub fn require(group: &Group, what: &str, bytes: u64) -> Result<()> {
    let here = available();
    let mine = [bytes, here.host, here.process, u64::from(std::process::id())];
    let mut all = vec![0; 4 * group.len()];
    group.all_gather(&mine, &mut all)?;
    let asked: Vec<Asked> = (0..group.len())
        .map(|at| Asked {
            host: group.fabric().host(group.ranks()[at]),
            bytes: all[4 * at],
            available: Available { host: all[4 * at + 1], process: all[4 * at + 2] },
            process: all[4 * at + 3],
        })
        .collect();
    verdict(what, &asked)
}

/// What one rank wants and sees.
struct Asked {
    host: String,
    bytes: u64,
    available: Available,
    process: u64,
}

fn verdict(what: &str, asked: &[Asked]) -> Result<()> {
    for (at, one) in asked.iter().enumerate() {
        // The first rank of a host, or of a process, speaks for all of it.
        let same_host = || asked.iter().filter(|o| o.host == one.host);
        let same_process = || same_host().filter(|o| o.process == one.process);
        let first_of_host = !asked[..at].iter().any(|o| o.host == one.host);
        let first_of_process = !asked[..at].iter().any(|o| o.host == one.host && o.process == one.process);
        let on_host: u64 = same_host().map(|o| o.bytes).sum();
        let in_process: u64 = same_process().map(|o| o.bytes).sum();
        let host = same_host().map(|o| o.available.host).min().unwrap_or(u64::MAX);
        if first_of_host && on_host > host {
            return Err(short(what, &format!("on {}", one.host), on_host, host, "more memory or hosts"));
        }
        if first_of_process && in_process > one.available.process {
            let (place, remedy) = (
                format!("in process {} on {}", one.process, one.host),
                "a higher `ulimit -v` and `ulimit -d`",
            );
            return Err(short(what, &place, in_process, one.available.process, remedy));
        }
    }
    Ok(())
}

fn short(what: &str, place: &str, needed: u64, available: u64, remedy: &str) -> Error {
    Error::Resources {
        what: format!("{what} needs {} {place}, where {} are available", human(needed), human(available)),
        remedy: format!("give a smaller matrix, or {remedy}"),
    }
}

/// `3.1 GiB`
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = if bytes == 0 { 0 } else { bytes.ilog2() as usize / 10 };
    match unit {
        0 => format!("{bytes} bytes"),
        _ => format!("{:.1} {}", bytes as f64 / (1u64 << (10 * unit)) as f64, UNITS[unit]),
    }
}

/// A private array of zeros, taken from the system page by page as it is first touched, so that on a
/// machine with several memories each page lies near the thread that first wrote it.
pub struct Zeroed<T> {
    ptr: NonNull<T>,
    len: usize,
    /// The whole mapping: address and bytes.
    mapping: Option<(usize, usize)>,
}

// SAFETY: it owns its memory, as a `Vec` does.
unsafe impl<T: Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Zeroed<T> {}

impl<T: Pod> Zeroed<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`Error::Resources`] when the system refuses the address space.
    pub fn new(len: usize) -> Result<Self> {
        let empty = Zeroed { ptr: NonNull::dangling(), len: 0, mapping: None };
        let refused = |why: String| Error::Resources {
            what: format!("the system refused {len} elements of {} bytes: {why}", size_of::<T>()),
            remedy: "give a smaller matrix, or raise the limits of this process (`ulimit -v`, `ulimit -d`)"
                .into(),
        };
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|&b| b <= isize::MAX as usize / 2) else {
            return Err(refused("more than an address space".into()));
        };
        if bytes == 0 {
            return Ok(Zeroed { len, ..empty });
        }
        let huge = bytes >= HUGE_PAGE;
        let mapped = if huge { bytes + HUGE_PAGE } else { bytes };
        // SAFETY: a new private mapping; no memory of this program is named.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(refused(std::io::Error::last_os_error().to_string()));
        }
        let start = if huge { (base as usize).next_multiple_of(HUGE_PAGE) } else { base as usize };
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: advice about pages of the mapping made above; refusal is harmless.
            unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_HUGEPAGE) };
        }
        let ptr = NonNull::new(base.cast::<u8>().wrapping_add(start - base as usize).cast())
            .ok_or_else(|| refused("a mapping at address 0".into()))?;
        Ok(Zeroed { ptr, len, mapping: Some((base as usize, mapped)) })
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` initialised (zero pages of a `Pod`) elements, page-aligned, alive as long as self.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and exclusive by `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T> Drop for Zeroed<T> {
    fn drop(&mut self) {
        if let Some((base, bytes)) = self.mapping {
            // SAFETY: the mapping made in `new`; nothing borrows from it any more.
            unsafe { libc::munmap(base as *mut libc::c_void, bytes) };
        }
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
type Resource = libc::c_int;

/// A soft limit in bytes.
fn limit_of(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the struct given.
    let failed = unsafe { libc::getrlimit(resource, &mut limit) } != 0;
    (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(target_os = "linux")]
mod system {
    use std::path::Path;

    use super::OfProcess;

    fn read(path: &str) -> String {
        std::fs::read_to_string(path).unwrap_or_default()
    }

    pub(super) fn free() -> u64 {
        field(&read("/proc/meminfo"), "MemAvailable:").unwrap_or(u64::MAX)
    }

    pub(super) fn group() -> Option<(u64, u64)> {
        least_of_groups(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup"))
    }

    pub(super) fn used() -> OfProcess {
        let status = read("/proc/self/status");
        let of = |name| field(&status, name).unwrap_or(0);
        OfProcess { addresses: of("VmSize:"), data: of("VmData:") }
    }

    /// A field of /proc/meminfo or /proc/self/status, in bytes.
    pub(super) fn field(text: &str, name: &str) -> Option<u64> {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    }

    /// What the control group from this process's own up to the root leaves that leaves least, and its limit. Version
    /// 2, and the memory controller of version 1.
    pub(super) fn least_of_groups(root: &Path, proc_self_cgroup: &str) -> Option<(u64, u64)> {
        let mut least = None;
        for line in proc_self_cgroup.lines() {
            let mut fields = line.splitn(3, ':');
            let (_, Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            let (top, names) = match controllers {
                "" => (root.to_path_buf(), ["memory.max", "memory.current", "inactive_file"]),
                c if c.split(',').any(|c| c == "memory") => (
                    root.join("memory"),
                    ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
                ),
                _ => continue,
            };
            // In a container the path may be the host's, and only the top be seen here.
            for group in Path::new(path.trim_start_matches('/')).ancestors() {
                least = least.into_iter().chain(left_of(&top.join(group), names)).min();
            }
        }
        least
    }

    fn left_of(group: &Path, [max, current, inactive]: [&str; 3]) -> Option<(u64, u64)> {
        let number = |name: &str| std::fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let limit = number(max)?; // `max`, or no such file: no limit
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let reclaimable =
            stat.lines().find_map(|l| l.strip_prefix(inactive)?.trim().parse::<u64>().ok()).unwrap_or(0);
        Some((limit.saturating_sub(number(current)?.saturating_sub(reclaimable)), limit))
    }
}

#[cfg(target_os = "macos")]
mod system {
    use fulmen_kernels::sysctl::number;

    use super::OfProcess;

    /// Pages that are free, hold a file's content that is still on disk, or that their owner let go.
    pub(super) fn free() -> u64 {
        let pages = number(c"vm.page_free_count").map(|free| {
            free + number(c"vm.page_pageable_external_count").unwrap_or(0)
                + number(c"vm.page_purgeable_count").unwrap_or(0)
        });
        match (pages, number(c"hw.pagesize"), number(c"hw.memsize")) {
            (Some(pages), Some(page), Some(all)) => (pages * page).min(all),
            (_, _, Some(all)) => all,
            _ => u64::MAX,
        }
    }

    pub(super) fn group() -> Option<(u64, u64)> {
        None
    }

    pub(super) fn used() -> OfProcess {
        OfProcess { addresses: 0, data: 0 }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod system {
    use super::OfProcess;

    pub(super) fn free() -> u64 {
        u64::MAX
    }

    pub(super) fn group() -> Option<(u64, u64)> {
        None
    }

    pub(super) fn used() -> OfProcess {
        OfProcess { addresses: 0, data: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_zero_and_writable_at_every_size() {
        for len in [0, 1, 511, 512, (HUGE_PAGE / 8) - 1, HUGE_PAGE / 8, HUGE_PAGE / 8 + 1] {
            let mut block = Zeroed::<f64>::new(len).unwrap();
            assert!(block.as_slice().iter().all(|&x| x == 0.0) && block.as_slice().len() == len);
            block.as_mut_slice().fill(1.5);
            assert!(block.as_slice().iter().all(|&x| x == 1.5));
        }
        assert!(matches!(Zeroed::<f64>::new(usize::MAX / 4), Err(Error::Resources { .. })));
        assert!(matches!(Zeroed::<f64>::new(1 << 56), Err(Error::Resources { .. })));
    }

    #[test]
    fn sizes_are_printed_for_people() {
        assert_eq!(human(0), "0 bytes");
        assert_eq!(human(1023), "1023 bytes");
        assert_eq!(human(1 << 30), "1.0 GiB");
        assert_eq!(human(5_786_112 * 5_786_112 * 8), "243.6 TiB"); // case K5-04
        assert_eq!(human(u64::MAX), "16.0 EiB");
    }

    fn asked(host: &str, process: u64, bytes: u64, on_host: u64, in_process: u64) -> Asked {
        Asked {
            host: host.into(),
            bytes,
            available: Available { host: on_host, process: in_process },
            process,
        }
    }

    /// Case K5-05: N = 40000 within 2 GiB.
    #[test]
    fn what_a_host_or_process_lacks_is_refused_by_name() {
        let gib = 1 << 30;
        let n40000 = 40000 * 40000 * 8;
        let message = |asked: &[Asked]| verdict("a matrix of 40000 x 40000", asked).unwrap_err().to_string();
        let text = message(&[asked("a", 1, n40000, 2 * gib, u64::MAX)]);
        assert!(text.contains("needs 11.9 GiB on a, where 2.0 GiB are available"), "{text}");
        // Two ranks fit one by one, but not together on their host; the third host has room.
        let on = |host: &str, process| asked(host, process, 3 * gib, 5 * gib, u64::MAX);
        assert!(verdict("x", &[on("a", 1), on("b", 2), on("c", 3)]).is_ok());
        let text = message(&[on("a", 1), on("b", 2), on("b", 3)]);
        assert!(text.contains("needs 6.0 GiB on b, where 5.0 GiB"), "{text}");
        // Ranks that are threads share the limit of their process.
        let limited = |process| asked("a", process, 3 * gib, 64 * gib, 4 * gib);
        assert!(verdict("x", &[limited(1), limited(2)]).is_ok());
        let text = message(&[limited(1), limited(1)]);
        assert!(text.contains("in process 1 on a") && text.contains("ulimit -v"), "{text}");
    }

    #[test]
    fn this_machine_has_some_memory() {
        let available = available();
        assert!(available.least() > 1 << 20, "{available:?}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn every_control_group_above_counts_and_page_cache_does_not() {
        use super::system::{field, least_of_groups};
        assert_eq!(field("MemTotal: 9 kB\nMemAvailable:   2048 kB\n", "MemAvailable:"), Some(2 << 20));
        assert_eq!(field("MemTotal: 9 kB\n", "MemAvailable:"), None);

        let root = std::env::temp_dir().join(format!("fulmen-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("job/memory.max", "2147483648\n");
        write("job/memory.current", "1073741824\n");
        write("job/memory.stat", "anon 5\ninactive_file 536870912\n");
        write("job/step/memory.max", "max\n");
        write("job/step/memory.current", "7\n");
        assert_eq!(least_of_groups(&root, "0::/job/step\n"), Some((3 << 29, 2 << 30)));
        assert_eq!(least_of_groups(&root, "0::/elsewhere\n"), None);
        assert_eq!(least_of_groups(&root, ""), None);

        write("memory/box/memory.limit_in_bytes", "1000\n");
        write("memory/box/memory.usage_in_bytes", "400\n");
        write("memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 100\n");
        assert_eq!(least_of_groups(&root, "9:cpu,cpuacct:/\n5:memory:/box\n"), Some((700, 1000)));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
