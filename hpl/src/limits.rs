//! `ulimit -f`: a file that may not grow is an error that is told, not the program's end.

extern "C" fn go_on(_: libc::c_int) {}

/// From now on a write beyond the limit of a file's size fails with an error (`EFBIG`). By itself the system would end
/// the program without a word, its shared memory counted as files too. What this program starts is not concerned: a
/// handler, other than an ignored signal, is not inherited.
pub fn tell_of_file_sizes() {
    // SAFETY: plain data, all zeros is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = go_on as extern "C" fn(libc::c_int) as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler does nothing, and stays valid for the whole program.
    unsafe { libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut()) };
}
