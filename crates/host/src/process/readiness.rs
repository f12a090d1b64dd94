//! Registers descriptors with the runtime.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::unix::AsyncFd;

/// An owned descriptor, alone or shared.
pub(super) trait Owned: std::os::fd::AsRawFd {}
impl Owned for OwnedFd {}
impl Owned for Arc<OwnedFd> {}

/// Registers a non-blocking descriptor.
pub(super) fn register<T: Owned>(fd: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: the number stays open and the same for as long as `fd` lives, and `fd` lives as long
    // as the registration: both implementors of `Owned` own their descriptor.
    Ok(unsafe { AsyncFd::register(fd) }?)
}

/// Registers a non-blocking descriptor of a caller, such as a listening socket.
pub fn register_descriptor(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    register(fd)
}
