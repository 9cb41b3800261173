//! Threads on cores of their own: on a shared machine the scheduler may leave two on one core for as long
//! as a case lasts.

use fulmen_kernels::Team;

/// Binds each member to its own core.
pub fn bind(team: &Team) {
    team.run(|me| set(Some(me.index())));
}

/// Lets this thread run on any core again: threads that a peer starts inherit it.
pub fn release() {
    set(None);
}

#[cfg(target_os = "linux")]
fn set(core: Option<usize>) {
    // SAFETY: plain data, filled by the calls; 0 is the calling thread.
    unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        let all = 0..libc::CPU_SETSIZE as usize;
        all.filter(|&c| core.is_none_or(|core| core == c)).for_each(|c| libc::CPU_SET(c, &mut cores));
        // Fails where there are fewer cores than threads; then the scheduler decides.
        libc::sched_setaffinity(0, size_of_val(&cores), &cores);
    }
}

#[cfg(not(target_os = "linux"))]
fn set(_core: Option<usize>) {}
