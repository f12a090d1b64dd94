//! What a stream has received and its owner has not taken yet: a queue that knows its bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use codex_exec_rpc::TransportError;
use futures_util::{Stream, stream};
use tokio::sync::{Notify, mpsc};

/// What an entry costs besides its bytes, so that tiny messages are bounded too.
const OVERHEAD: usize = 128;

/// The end that is filled. Dropping it ends the stream for whoever takes.
#[derive(Debug)]
pub(crate) struct Inbox {
    sender: mpsc::UnboundedSender<Bytes>,
    held: Arc<AtomicUsize>,
}

impl Inbox {
    /// An inbox and the stream that empties it. `drained` is told of everything taken.
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

    /// Puts a message in. False if nobody will take it.
    pub(crate) fn put(&self, message: Bytes) -> bool {
        self.held.fetch_add(message.len() + OVERHEAD, Ordering::Relaxed);
        self.sender.send(message).is_ok()
    }

    /// Bytes waiting to be taken.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}
