//! How the "NIC" moves bytes: within this process by a copy, between processes by the kernel, never by the target's code.
//! On demand it moves them as a device does, for which the pages' protection does not count: then programs can forbid their
//! own processor to touch what the device moves.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;

fn vector(addr: u64, len: usize) -> libc::iovec {
    libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len }
}

/// Moves bytes between the memories of two processes, of which this is one.
///
/// # Errors
/// The kernel's: ESRCH when the other process is gone, EPERM, EFAULT.
///
/// # Safety
/// Of this process' memory the range must be mapped, and nobody may use it meanwhile: what a program promises when it
/// registers and posts it.
pub unsafe fn carry(from: (i32, u64), to: (i32, u64), len: usize) -> io::Result<()> {
    let own = std::process::id() as i32;
    if from.0 == own && to.0 == own {
        // `copy`: a program may send a range to itself.
        // SAFETY: by this function's contract.
        unsafe { std::ptr::copy(from.1 as *const u8, to.1 as *mut u8, len) };
        return Ok(());
    }
    let mut done = 0;
    while done < len {
        let source = vector(from.1 + done as u64, len - done);
        let target = vector(to.1 + done as u64, len - done);
        // SAFETY: this process' side is valid by the contract; the kernel checks the other side.
        let n = unsafe {
            if from.0 == own {
                libc::process_vm_writev(to.0, &source, 1, &target, 1, 0)
            } else {
                libc::process_vm_readv(from.0, &target, 1, &source, 1, 0)
            }
        };
        if n <= 0 {
            return Err(if n < 0 {
                io::Error::last_os_error()
            } else {
                io::Error::from_raw_os_error(libc::EFAULT)
            });
        }
        done += n as usize;
    }
    Ok(())
}

/// As [`carry`], whatever the protection of the pages.
///
/// # Errors
/// As [`carry`]; and EPERM where the kernel does not let even a process itself do so.
pub fn carry_past_protection(from: (i32, u64), to: (i32, u64), len: usize) -> io::Result<()> {
    let open =
        |pid: i32, write: bool| OpenOptions::new().read(!write).write(write).open(format!("/proc/{pid}/mem"));
    let gone = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => io::Error::from_raw_os_error(libc::ESRCH),
        _ => e,
    };
    let (source, target) = (open(from.0, false).map_err(gone)?, open(to.0, true).map_err(gone)?);
    let mut staged = [0u8; 16 << 10];
    let mut done = 0;
    while done < len {
        let part = &mut staged[..(len - done).min(16 << 10)];
        source.read_exact_at(part, from.1 + done as u64)?;
        target.write_all_at(part, to.1 + done as u64)?;
        done += part.len();
    }
    Ok(())
}

/// Flips a bit in the memory of a process.
///
/// # Safety
/// As [`carry`].
pub unsafe fn flip(pid: i32, addr: u64, bit: u32) -> io::Result<()> {
    let own = std::process::id() as i32;
    let mut byte = [0u8];
    // SAFETY: `byte` is ours; the other side by the contract.
    unsafe {
        carry((pid, addr), (own, byte.as_mut_ptr() as u64), 1)?;
        byte[0] ^= 1 << bit;
        carry((own, byte.as_mut_ptr() as u64), (pid, addr), 1)
    }
}

/// Lets any process of this user write into this one, where the kernel (Yama) would only let its parents.
pub fn open_to_neighbours() {
    // SAFETY: a plain request; it fails where Yama is absent, and then nothing needs it.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
}

/// Whether a process exists.
pub fn exists(pid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    unsafe { libc::kill(pid, 0) == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) }
}
