//! Messages that a stream has received and its owner has not taken, with their size.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use codex_exec_rpc::TransportError;
use futures_util::{Stream, stream};
use tokio::sync::{Notify, mpsc};

/// Bytes charged for an entry besides its length, so that tiny messages are bounded too.
const OVERHEAD: usize = 128;

/// The sending end. Dropping it ends the stream of messages.
#[derive(Debug)]
pub(crate) struct Inbox {
    sender: mpsc::UnboundedSender<Bytes>,
    held: Arc<AtomicUsize>,
}

impl Inbox {
    /// Makes an inbox and its stream of messages. Each message taken notifies `drained`.
    pub(crate) fn new(
        drained: Arc<Notify>,
    ) -> (Self, impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static) {
        let (sender, receiver) = mpsc::unbounded_channel::<Bytes>();
        let held = Arc::new(AtomicUsize::new(0));
        let state = (receiver, held.clone(), drained);
        let messages = stream::unfold(state, |(mut receiver, held, drained)| async move {
            let message = receiver.recv().await?;
            held.fetch_sub(message.len() + OVERHEAD, Ordering::Relaxed);
            drained.notify_one();
            Some((Ok(message), (receiver, held, drained)))
        });
        (Self { sender, held }, messages)
    }

    /// Adds a message; false if the stream is dropped.
    pub(crate) fn put(&self, message: Bytes) -> bool {
        self.held.fetch_add(message.len() + OVERHEAD, Ordering::Relaxed);
        self.sender.send(message).is_ok()
    }

    /// Bytes waiting to be taken.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}
