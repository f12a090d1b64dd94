//! Limits what an HTTP server sends before the head of its final response.
//!
//! hyper skips interim responses (1xx) one after another, for as long as there is something to read: a
//! server that sends nothing else would keep its thread. So until the head is there, each read is short,
//! and the bytes and the interim responses are counted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

/// Maximum bytes before the end of the final head.
pub(crate) const MAX_HEAD_BYTES: usize = 1 << 20;

/// Maximum interim responses before the final one.
pub(crate) const MAX_INTERIM_RESPONSES: usize = 100;

/// Bytes of one read before the end of the final head: more than hyper can put into a body before the
/// caller has the head, and few enough to parse at once.
const READ_BYTES: u64 = 16 << 10;

/// How far a response is; shared by its stream and the caller.
#[derive(Debug, Default)]
pub(crate) struct HeadProgress {
    received: AtomicBool,
    exceeded: AtomicBool,
    interim: AtomicUsize,
}

impl HeadProgress {
    /// Counts an interim response.
    pub(crate) fn count_interim(&self) {
        self.interim.fetch_add(1, Ordering::Relaxed);
    }

    /// Lifts the limits: the head of the final response is there.
    pub(crate) fn set_received(&self) {
        self.received.store(true, Ordering::Release);
    }

    /// Whether a limit ended the exchange.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.exceeded.load(Ordering::Acquire)
    }
}

/// The stream of one HTTP exchange.
#[derive(Debug)]
pub(crate) struct HeadLimit<S> {
    stream: Take<S>,
    progress: Arc<HeadProgress>,
    read: usize,
}

impl<S: AsyncRead> HeadLimit<S> {
    pub(crate) fn new(stream: S, progress: Arc<HeadProgress>) -> Self {
        Self { stream: stream.take(READ_BYTES), progress, read: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HeadLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.progress.received.load(Ordering::Acquire) {
            self.stream.set_limit(u64::MAX);
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let interim = self.progress.interim.load(Ordering::Relaxed);
        if self.read >= MAX_HEAD_BYTES || interim > MAX_INTERIM_RESPONSES {
            self.progress.exceeded.store(true, Ordering::Release);
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        self.stream.set_limit(READ_BYTES);
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.read += buffer.filled().len() - before;
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for HeadLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(self.stream.get_mut()).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(self.stream.get_mut()).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_shutdown(context)
    }
}
