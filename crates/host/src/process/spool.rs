//! Output that is too large for memory: a ring buffer in an unlinked file.
//!
//! The space is allocated up front, so a full disk is an error at the start of a process and not in the
//! middle of its output. The kernel removes the file with its last descriptor, however this process
//! ends.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::pool;
use bytes::{Bytes, BytesMut};
use rustix::fs::{FallocateFlags, Mode, OFlags};

#[derive(Debug)]
pub(super) struct Spool {
    file: Arc<File>,
    capacity: u64,
    /// Position of the oldest byte, counted from the first byte ever written.
    start: u64,
    len: u64,
}

impl Spool {
    /// A ring of at least `capacity` bytes in `directory`.
    pub(super) fn create(directory: &Path, capacity: u64) -> io::Result<Self> {
        // Retention may exceed its limit by one chunk.
        let capacity = capacity + (1 << 20);
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file: File = match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => fd.into(),
            // The file system does not support unnamed files: unlink one at once.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => named(directory)?,
            Err(error) => return Err(error.into()),
        };
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, capacity) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Self { file: Arc::new(file), capacity, start: 0, len: 0 })
    }

    pub(super) async fn push(&mut self, bytes: Bytes) -> io::Result<()> {
        let len = bytes.len() as u64;
        if self.len + len > self.capacity {
            return Err(io::Error::other("the spool is full"));
        }
        let (file, at, capacity) = (self.file.clone(), self.start + self.len, self.capacity);
        blocking(move || {
            let (first, second) = bytes.split_at(before_end(at, len, capacity));
            file.write_all_at(first, at % capacity)?;
            file.write_all_at(second, 0)
        })
        .await?;
        self.len += len;
        Ok(())
    }

    pub(super) fn drop_oldest(&mut self, len: u64) {
        self.start += len;
        self.len -= len;
    }

    /// Reads `len` bytes from `offset` after the oldest byte.
    pub(super) async fn read(&self, offset: u64, len: u64) -> io::Result<Bytes> {
        let (file, at, capacity) = (self.file.clone(), self.start + offset, self.capacity);
        blocking(move || {
            let mut bytes = BytesMut::zeroed(len as usize);
            let (first, second) = bytes.split_at_mut(before_end(at, len, capacity));
            file.read_exact_at(first, at % capacity)?;
            file.read_exact_at(second, 0)?;
            Ok(bytes.freeze())
        })
        .await
    }
}

/// How many of `len` bytes at `at` fit before the end of the ring.
fn before_end(at: u64, len: u64, capacity: u64) -> usize {
    len.min(capacity - at % capacity) as usize
}

fn named(directory: &Path) -> io::Result<File> {
    let file = tempfile::Builder::new().prefix(".codex-spool-").tempfile_in(directory)?;
    Ok(file.into_file())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    pool::blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reads_wrap_around_the_end_of_the_ring() {
        let mut spool = Spool::create(&std::env::temp_dir(), 0).unwrap();
        let chunk = |n: u8| Bytes::from(vec![n; 300_000]);
        for n in 0..20 {
            if n >= 3 {
                assert_eq!(spool.read(0, 300_000).await.unwrap(), chunk(n - 3));
                spool.drop_oldest(300_000);
            }
            spool.push(chunk(n)).await.unwrap();
        }
        assert_eq!(spool.read(300_000, 300_000).await.unwrap(), chunk(18));
        spool.push(chunk(0)).await.unwrap_err();
    }
}
