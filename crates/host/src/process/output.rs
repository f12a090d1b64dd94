//! Reads the output of a process.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use codex_exec_server_protocol::process::OutputStream;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

/// Maximum bytes of one read.
pub(super) const READ_BYTES: usize = 256 << 10;

/// More than a terminal buffers.
const TERMINAL_BYTES: u64 = 128 << 10;

/// Pipe size for a process that writes a lot.
const ENLARGED_PIPE: usize = 1 << 20;

thread_local! {
    /// Reads go here and are copied out unless it is full: an idle process needs no buffer, and a busy
    /// one no copy.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// One output stream of a process.
#[derive(Debug)]
pub(super) struct Output {
    pub stream: OutputStream,
    /// `None` once the stream has ended.
    fd: Option<AsyncFd<OwnedFd>>,
    /// The pipe was enlarged, or cannot be.
    enlarged: bool,
    /// Bytes still to be read before the stream ends.
    buffered: Option<u64>,
}

impl Output {
    pub(super) fn new(stream: OutputStream, fd: AsyncFd<OwnedFd>) -> Self {
        Self { stream, fd: Some(fd), enlarged: stream == OutputStream::Pty, buffered: None }
    }

    pub(super) fn is_open(&self) -> bool {
        self.fd.is_some()
    }

    /// Closes our end; later writes by the process fail.
    pub(super) fn end(&mut self) {
        self.fd = None;
    }

    /// Ends the stream after the output it buffers now, even if a process still writes to it.
    pub(super) fn end_after_buffered(&mut self) {
        // A terminal does not report all that it buffers; read it until it is empty.
        let buffered = match self.stream {
            OutputStream::Pty => TERMINAL_BYTES,
            _ => self.available(),
        };
        match buffered {
            0 => self.end(),
            buffered => self.buffered = Some(buffered),
        }
    }

    /// Reads at most `limit` bytes, if there are any; `None` at the end of the stream.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, limit: usize) -> Poll<Option<Bytes>> {
        if let Some(buffered) = self.buffered {
            return Poll::Ready(self.read_buffered(limit, buffered));
        }
        let Some(fd) = self.fd.as_ref() else { return Poll::Ready(None) };
        let bytes = loop {
            let Ok(mut ready) = ready!(fd.poll_read_ready(cx)) else { break Bytes::new() };
            match read(fd.get_ref(), limit) {
                Ok(bytes) => {
                    // A short read means that a pipe is empty; a terminal may hold more.
                    if bytes.len() < limit.min(READ_BYTES) && self.stream != OutputStream::Pty {
                        ready.clear_ready();
                    }
                    break bytes;
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => {
                    // Reading a terminal without users fails with EIO.
                    if error != Errno::IO {
                        tracing::debug!(%error, stream = self.stream.as_str(), "output ended");
                    }
                    break Bytes::new();
                }
            }
        };
        if bytes.len() == READ_BYTES {
            self.enlarge();
        }
        Poll::Ready(self.unless_ended(bytes))
    }

    /// Whether [`poll_read`](Self::poll_read) may succeed now; if not, wakes the waker of `cx` when it may.
    pub(super) fn is_readable(&self, cx: &mut Context<'_>) -> bool {
        match &self.fd {
            Some(fd) => self.buffered.is_some() || fd.poll_read_ready(cx).is_ready(),
            None => false,
        }
    }

    fn read_buffered(&mut self, limit: usize, buffered: u64) -> Option<Bytes> {
        let fd = self.fd.as_ref()?.get_ref();
        let limit = usize::try_from(buffered).unwrap_or(usize::MAX).min(limit);
        // Nothing left to read counts as the end.
        let bytes = rustix::io::retry_on_intr(|| read(fd, limit)).unwrap_or_default();
        let buffered = buffered.saturating_sub(bytes.len() as u64);
        self.buffered = Some(buffered);
        if buffered == 0 || bytes.is_empty() {
            self.end();
        }
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Enlarges the pipe of a process that fills it, to switch between writer and reader less often.
    fn enlarge(&mut self) {
        if !std::mem::replace(&mut self.enlarged, true)
            && let Some(fd) = &self.fd
        {
            // The kernel refuses this to a user with many large pipes; then the size stays.
            let _ = rustix::pipe::fcntl_setpipe_size(fd.get_ref(), ENLARGED_PIPE);
        }
    }

    /// Reads at most `limit` bytes without waiting, if there are any.
    pub(super) fn read_now(&mut self, limit: usize) -> Option<Bytes> {
        match read(self.fd.as_ref()?.get_ref(), limit) {
            Ok(bytes) => self.unless_ended(bytes),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(_) => self.unless_ended(Bytes::new()),
        }
    }

    /// Bytes that can be read now.
    pub(super) fn available(&self) -> u64 {
        let fd = self.fd.as_ref();
        fd.and_then(|fd| rustix::io::ioctl_fionread(fd.get_ref()).ok()).unwrap_or(0)
    }

    fn unless_ended(&mut self, bytes: Bytes) -> Option<Bytes> {
        if bytes.is_empty() {
            self.fd = None;
            return None;
        }
        Some(bytes)
    }
}

/// Reads what is available. Continues while a busy process keeps up, so that its output forms few large
/// chunks; a keystroke's echo is returned at once.
fn read(fd: &OwnedFd, limit: usize) -> Result<Bytes, Errno> {
    // A terminal gives at most a byte less than 4 KiB at a time.
    const MUCH: usize = 2 << 10;
    if limit < READ_BYTES {
        let mut bytes = vec![0; limit];
        let len = rustix::io::read(fd, &mut bytes)?;
        bytes.truncate(len);
        return Ok(Bytes::from(bytes));
    }
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.clear();
        scratch.reserve_exact(READ_BYTES);
        let mut last = rustix::io::read(fd, spare_capacity(scratch))?;
        while last >= MUCH && scratch.len() < scratch.capacity() {
            // The next read finds an end or an error again.
            last = rustix::io::read(fd, spare_capacity(scratch)).unwrap_or(0);
        }
        if scratch.len() == scratch.capacity() {
            return Ok(Bytes::from(std::mem::take(scratch)));
        }
        Ok(Bytes::copy_from_slice(scratch))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::future::poll_fn;

    use super::super::readiness::register;
    use super::*;

    /// A stream that ends yields what was written before, and nothing written meanwhile.
    #[tokio::test]
    async fn ending_stream_is_read_to_its_current_end() {
        let mut random = fastrand::Rng::with_seed(5);
        for len in [0, 1, 100, 4096, 60_000] {
            let (ours, theirs) = rustix::pipe::pipe().unwrap();
            rustix::io::ioctl_fionbio(&ours, true).unwrap();
            let fd = register(ours).unwrap();
            let mut output = Output::new(OutputStream::Stdout, fd);
            let before: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
            if len > 0 {
                assert_eq!(rustix::io::write(&theirs, &before).unwrap(), len);
            }
            output.end_after_buffered();
            let mut got = Vec::new();
            while output.is_open() {
                rustix::io::write(&theirs, b"later").unwrap();
                let limit = random.usize(1..30_000);
                got.extend(poll_fn(|cx| output.poll_read(cx, limit)).await.unwrap_or_default());
            }
            assert!(got == before, "{} of {len} bytes", got.len());
        }
    }
}
