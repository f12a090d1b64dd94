//! A process's stdout or stderr as a byte stream.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use super::delivery::Side;
use super::handle::Handle;

/// The bytes of one stream of a process, from [`Process::take_stdout`](crate::Process::take_stdout).
///
/// A read returns an error once where output is lost for good; later reads continue after the gap.
/// Dropping this discards the rest of the stream.
pub struct ProcessOutput {
    pub(super) handle: Arc<Handle>,
    pub(super) side: Side,
}

impl AsyncRead for ProcessOutput {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let (side, max) = (self.side, buffer.remaining());
        let read = ready!(
            self.handle.events.poll_take(cx, |sequencer| sequencer.delivery.read(side, max))
        );
        buffer.put_slice(&read?);
        Poll::Ready(Ok(()))
    }
}

impl Drop for ProcessOutput {
    fn drop(&mut self) {
        self.handle.events.feed(|sequencer| sequencer.delivery.discard(self.side));
    }
}

impl fmt::Debug for ProcessOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessOutput")
            .field("process", &self.handle.id)
            .field("side", &self.side)
            .finish_non_exhaustive()
    }
}
