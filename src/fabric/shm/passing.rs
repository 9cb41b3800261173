//! Open files, handed from process to process over a socket of this host.

use std::io::{Error, ErrorKind, Read, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Two numbers that come with each file.
type Words = [u64; 2];
const LEN: usize = size_of::<Words>();

/// Room for one file's number among the control messages, aligned for their header.
#[repr(C, align(8))]
struct Ancillary([u8; 64]);

/// A message of the bytes at `vec`, with room for control messages.
fn message(vec: &mut libc::iovec, ancillary: &mut Ancillary, room: usize) -> libc::msghdr {
    // SAFETY: plain data; null pointers and zero lengths say that there is no address.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vec;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut ancillary.0).cast();
    message.msg_controllen = room as _;
    message
}

fn room() -> usize {
    // SAFETY: computes a length.
    unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize }
}

/// Sends a copy of an open file.
pub fn send_file(stream: &UnixStream, words: Words, file: RawFd) -> Result<()> {
    let mut bytes: [u8; LEN] = bytemuck::cast(words);
    let mut vec = libc::iovec { iov_base: (&raw mut bytes).cast(), iov_len: LEN };
    let mut ancillary = Ancillary([0; 64]);
    let message = message(&mut vec, &mut ancillary, room());
    // SAFETY: `message` has room for one header, which is in `ancillary`.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file);
    }
    loop {
        // SAFETY: `message` describes the bytes and the control message above, which outlive the call.
        let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, NO_SIGNAL) };
        if sent == LEN as isize {
            return Ok(());
        }
        let e = if sent < 0 { Error::last_os_error() } else { ErrorKind::WriteZero.into() };
        if e.kind() != ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Takes a file that the other end has sent.
pub fn receive_file(stream: &UnixStream) -> Result<(Words, OwnedFd)> {
    let mut bytes = [0u8; LEN];
    let mut ancillary = Ancillary([0; 64]);
    let mut vec = libc::iovec { iov_base: (&raw mut bytes).cast(), iov_len: LEN };
    let mut message = message(&mut vec, &mut ancillary, room());
    let received = loop {
        // SAFETY: as in `send_file`; to be written.
        let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, CLOSE_ON_EXEC) };
        if received >= 0 {
            break received as usize;
        }
        let e = Error::last_os_error();
        if e.kind() != ErrorKind::Interrupted {
            return Err(e);
        }
    };
    if received == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let wrong = || Error::new(ErrorKind::InvalidData, "a message without a file");
    // SAFETY: what the system has written: null, or a header within `ancillary` with as much behind it as it says.
    let file = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
            || ((*header).cmsg_len as usize) < libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize
        {
            return Err(wrong());
        }
        // An open file that is now this process's.
        OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned())
    };
    (&*stream).read_exact(&mut bytes[received..])?;
    Ok((bytemuck::cast(bytes), file))
}

#[cfg(target_os = "linux")]
const NO_SIGNAL: libc::c_int = libc::MSG_NOSIGNAL;
/// Rust's runtime ignores SIGPIPE.
#[cfg(not(target_os = "linux"))]
const NO_SIGNAL: libc::c_int = 0;

#[cfg(target_os = "linux")]
const CLOSE_ON_EXEC: libc::c_int = libc::MSG_CMSG_CLOEXEC;
/// `Segment::received` sets it.
#[cfg(not(target_os = "linux"))]
const CLOSE_ON_EXEC: libc::c_int = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    #[test]
    fn files_arrive_with_their_numbers_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut files = Vec::new();
        for i in 0..5u64 {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&i.to_le_bytes()).unwrap();
            file.rewind().unwrap();
            send_file(&a, [i, 10 + i], file.as_raw_fd()).unwrap();
            files.push(file);
        }
        for i in 0..5u64 {
            let (words, file) = receive_file(&b).unwrap();
            assert_eq!(words, [i, 10 + i]);
            let mut text = [0; 8];
            std::fs::File::from(file).read_exact(&mut text).unwrap();
            assert_eq!(u64::from_le_bytes(text), i);
        }
        (&a).write_all(&[0; 16]).unwrap();
        assert_eq!(receive_file(&b).unwrap_err().kind(), ErrorKind::InvalidData);
        drop(a);
        assert_eq!(receive_file(&b).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
