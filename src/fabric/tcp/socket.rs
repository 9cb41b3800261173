//! The calls on sockets that the standard library does not have.

use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

fn set(socket: &TcpStream, level: libc::c_int, name: libc::c_int, value: libc::c_int) {
    // What the system does not know is an optimisation that it does without.
    // SAFETY: an integer and its size, read during the call.
    let _ = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
}

#[cfg(not(target_vendor = "apple"))]
const NOTSENT_LOWAT: libc::c_int = libc::TCP_NOTSENT_LOWAT;
/// `TCP_NOTSENT_LOWAT` of Apple's netinet/tcp.h, which the libc crate lacks.
#[cfg(target_vendor = "apple")]
const NOTSENT_LOWAT: libc::c_int = 0x201;

/// Makes a connection ready for frames.
///
/// # Errors
/// The system's.
pub fn prepare(socket: &TcpStream) -> Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    // What is not on its way yet stays with us, so that a small put does not queue behind megabytes.
    set(socket, libc::IPPROTO_TCP, NOTSENT_LOWAT, 128 << 10);
    #[cfg(target_vendor = "apple")]
    set(socket, libc::SOL_SOCKET, libc::SO_NOSIGPIPE, 1);
    Ok(())
}

/// `sendmsg(2)`: never a SIGPIPE.
///
/// # Safety
/// The entries are valid for reads during the call.
///
/// # Errors
/// The system's.
pub unsafe fn send(socket: &TcpStream, vecs: &mut [libc::iovec]) -> Result<usize> {
    #[cfg(target_vendor = "apple")]
    let flags = 0;
    #[cfg(not(target_vendor = "apple"))]
    let flags = libc::MSG_NOSIGNAL;
    // SAFETY: all zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vecs.as_mut_ptr();
    message.msg_iovlen = vecs.len() as _;
    // SAFETY: the entries are the caller's promise.
    let n = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(n).map_err(|_| Error::last_os_error())
}

/// `readv(2)`.
///
/// # Safety
/// The entries are valid for writes during the call, and nobody else looks at them.
///
/// # Errors
/// The system's.
pub unsafe fn receive(socket: &TcpStream, vecs: &[libc::iovec]) -> Result<usize> {
    // SAFETY: the entries are the caller's promise.
    let n = unsafe { libc::readv(socket.as_raw_fd(), vecs.as_ptr(), vecs.len() as libc::c_int) };
    usize::try_from(n).map_err(|_| Error::last_os_error())
}
