//! A stream that fails once nothing has moved for too long.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Wraps the client's side of a connection, which sees the bytes of both directions.
pub(crate) struct Idle<S> {
    stream: S,
    timeout: Duration,
    moved: Instant,
    alarm: Pin<Box<Sleep>>,
}

impl<S> Idle<S> {
    pub(crate) fn new(stream: S, timeout: Duration) -> Self {
        Self { stream, timeout, moved: Instant::now(), alarm: Box::pin(sleep(timeout)) }
    }

    /// The stream, for calls that need no watching.
    pub(crate) fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Something has moved.
    pub(crate) fn touch(&mut self) {
        self.moved = Instant::now();
    }

    /// Resolves once nothing has moved for too long.
    pub(crate) fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        while self.alarm.as_mut().poll(cx).is_ready() {
            // The alarm is not moved with every byte, only when it rings.
            let due = self.moved + self.timeout;
            if due <= Instant::now() {
                return Poll::Ready(io::ErrorKind::TimedOut.into());
            }
            self.alarm.as_mut().reset(due);
        }
        Poll::Pending
    }

    /// Passes `poll` on; while it waits, the alarm may end it.
    fn watch<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.touch();
            return poll;
        }
        self.poll_idle(cx).map(Err)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Idle<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.stream).poll_read(cx, buffer);
        this.watch(cx, poll)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Idle<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.stream).poll_write(cx, data);
        this.watch(cx, poll)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_when_nothing_moves() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut idle = Idle::new(near, Duration::from_secs(10));
        let started = Instant::now();
        let writer = tokio::spawn(async move {
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                far.write_all(b"x").await.unwrap();
            }
            far
        });
        for _ in 0..5 {
            assert_eq!(idle.read_u8().await.unwrap(), b'x');
        }
        assert_eq!(started.elapsed().as_secs(), 45);
        let error = idle.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed().as_secs(), 55);
        drop(writer.await.unwrap());
    }
}
