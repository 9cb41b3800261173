//! Which cores the threads run on. Only Linux lets a program say so; macOS puts threads that are as many as its
//! performance cores on these.

/// How many cores deserve a thread: those that this process may use; on Apple silicon the performance cores, for
/// threads that meet at barriers are as fast as the slowest.
pub fn cores() -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    #[cfg(target_os = "macos")]
    if let Some(fast) = crate::sysctl::number(c"hw.perflevel0.physicalcpu") {
        return all.min(fast as usize).max(1);
    }
    all
}

/// The cores that this thread may run on, in ascending order; empty where the system does not tell.
pub fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: plain data, all zeros is an empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: writes at most the size given into `set`.
        let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0;
        if failed {
            return Vec::new();
        }
        // SAFETY: the index is within the set.
        (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
    }
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}

/// Keeps this thread on one core. A refusal is not an error: the thread then runs where the system puts it.
pub(crate) fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    if core < libc::CPU_SETSIZE as usize {
        // SAFETY: plain data, all zeros is an empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `core` is within the set, which outlives the call.
        unsafe {
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_cores_deserve_a_thread_and_no_more_than_there_are() {
        let all = std::thread::available_parallelism().unwrap().get();
        assert!((1..=all).contains(&cores()));
        assert!(allowed_cores().is_sorted());
    }
}
