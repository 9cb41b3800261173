//! Which cores the threads run on. Only Linux lets a program say so; elsewhere nothing is done.

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
