//! The descriptor that packets come from and go to: a TUN device without packet information, or anything
//! else that moves one packet with each call.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use tokio::net::unix::pipe;

/// The longest packet that IPv4 or a TUN device carries.
pub(super) const MAX_PACKET: usize = 65_535;

pub(super) struct Link {
    /// No pipe, but registered and read as one.
    descriptor: pipe::Receiver,
}

impl Link {
    pub(super) fn new(descriptor: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        Ok(Self { descriptor: pipe::Receiver::from_owned_fd_unchecked(descriptor)? })
    }

    /// Waits for packets and gives each to `take`, at most `max` of them. Fails when the device is gone.
    pub(super) async fn receive(
        &self,
        buffer: &mut [u8],
        max: usize,
        mut take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.descriptor.readable().await?;
        for _ in 0..max {
            match self.descriptor.try_read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => take(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends a packet, or drops it: the device has no room or is down, and TCP sends it again.
    pub(super) fn send(&self, packet: &[u8]) {
        while rustix::io::write(&self.descriptor, packet) == Err(Errno::INTR) {}
    }
}
