//! A spare: the outer process of a future sandbox, started ahead of time.
//!
//! Executing and relocating a large program takes as long as the rest of a sandbox, and is the same for
//! every sandbox. So the server keeps one process that has done that, and that waits on a socket for
//! everything that a [`Launch`](crate::Launch) would have been spawned with.
//!
//! Invariant: until it receives a plan, a spare holds only its end of the socket and only waits; it is
//! used once; it ends when the socket closes.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::sys;
use crate::launch::PassedDescriptor;
use crate::reentry;

/// Maximum descriptors in the message: the standard streams and those that a launch passes.
const MAX_DESCRIPTORS: usize = 3 + 6;

/// Above every number that is passed.
const LOWEST_TEMPORARY: RawFd = 64;

/// A buffer for the header and the descriptors, aligned for the kernel.
#[repr(C, align(8))]
struct Control([u8; 128]);

/// A pair of sockets that preserve message boundaries.
pub(crate) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel stores two descriptors there, which are new and owned by nothing else.
    unsafe {
        sys::check(i64::from(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr())))?;
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// Sends a waiting spare its streams and descriptors. Does not block.
pub(crate) fn send(
    socket: &OwnedFd,
    streams: [BorrowedFd<'_>; 3],
    terminal: bool,
    passed: &[PassedDescriptor],
) -> io::Result<()> {
    let mut text = vec![u8::from(terminal)];
    text.extend(passed.iter().map(|passed| passed.number as u8));
    let fds: Vec<RawFd> = streams
        .iter()
        .map(AsRawFd::as_raw_fd)
        .chain(passed.iter().map(|passed| passed.as_fd().as_raw_fd()))
        .collect();
    if fds.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut control = Control([0; 128]);
    let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    let bytes = size_of_val(&fds[..]);
    // SAFETY: the message is plain data, all of whose pointers are to values that live across the
    // call; the control buffer is large enough for `MAX_DESCRIPTORS` descriptors.
    let sent = unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(bytes as u32) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes as u32) as _;
        std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(header), bytes);
        libc::sendmsg(
            socket.as_raw_fd(),
            &raw const message,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        )
    };
    sys::check(sent as i64)?;
    Ok(())
}

/// Waits for a launch and installs its descriptors. Exits if the socket closes first.
pub(super) fn wait_for_launch() {
    let mut text = [0u8; MAX_DESCRIPTORS];
    let mut control = MaybeUninit::<Control>::uninit();
    let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    let mut fds = [-1; MAX_DESCRIPTORS];
    let mut count = 0;
    // SAFETY: the message is plain data, all of whose pointers are to values that live across the
    // call; the kernel writes no more control data than there is room, and says how much.
    let received = unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of::<Control>() as _;
        let flags = libc::MSG_CMSG_CLOEXEC;
        let received = loop {
            let received = libc::recvmsg(reentry::SPARE, &raw mut message, flags);
            if received >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break received;
            }
        };
        if received > 0 {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                count = (bytes / size_of::<RawFd>()).min(MAX_DESCRIPTORS);
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                std::ptr::copy_nonoverlapping(data, fds.as_mut_ptr(), count);
            }
        }
        received
    };
    // The socket was closed: the server does not need this process any more.
    if received <= 0 || count < 3 || received as usize != 1 + count - 3 {
        sys::exit_now(0);
    }
    install_descriptors(&fds[..count], &text[1..received as usize], text[0] != 0);
}

fn install_descriptors(fds: &[RawFd], numbers: &[u8], terminal: bool) {
    let mut moved = [-1; MAX_DESCRIPTORS];
    // SAFETY: system calls on numbers that were received just now, that nothing else owns, and that no
    // destructor will close.
    unsafe {
        for (moved, fd) in moved.iter_mut().zip(fds) {
            *moved = libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, LOWEST_TEMPORARY);
            libc::close(*fd);
        }
        libc::close(reentry::SPARE);
        let targets = (0..3).chain(numbers.iter().map(|number| i32::from(*number)));
        for (fd, target) in moved.iter().zip(targets) {
            if *fd < 0 || libc::dup2(*fd, target) < 0 {
                sys::exit_now(super::FAILED);
            }
            libc::close(*fd);
        }
        if terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            sys::exit_now(super::FAILED);
        }
    }
}
