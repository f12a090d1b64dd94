//! Two connections joined in memory: an embedded server and its client, and tests.

use bytes::Bytes;
use futures_util::stream;
use tokio::sync::mpsc;

use crate::connection::{Connection, ConnectionConfig};
use crate::outbound::{OutboundQueue, Queued, outbound};

impl Connection {
    /// Both ends of a connection without a transport. A message taken by the peer frees its room.
    pub fn pair(config: &ConnectionConfig) -> (Self, Self) {
        let (left_out, left_queue) = outbound(config.outbound);
        let (right_out, right_queue) = outbound(config.outbound);
        let left = Self::new(messages(right_queue), left_out);
        let right = Self::new(messages(left_queue), right_out);
        (left, right)
    }

    /// A connection over two channels of whole messages (a relay stream).
    pub fn channel(
        incoming: mpsc::Receiver<Bytes>,
        outgoing: mpsc::Sender<Bytes>,
        config: &ConnectionConfig,
    ) -> Self {
        let (outbound, mut queue) = outbound(config.outbound);
        tokio::spawn(async move {
            while let Some(queued) = queue.recv().await {
                if let Queued::Message(message, _share) = queued
                    && outgoing.send(message).await.is_err()
                {
                    break;
                }
            }
        });
        let messages = stream::unfold(incoming, |mut incoming| async move {
            incoming.recv().await.map(|message| (Ok(message), incoming))
        });
        Self::new(messages, outbound)
    }
}

fn messages(
    queue: OutboundQueue,
) -> impl futures_util::Stream<Item = Result<Bytes, crate::TransportError>> + Send + 'static {
    stream::unfold(queue, |mut queue| async move {
        loop {
            if let Queued::Message(message, _share) = queue.recv().await? {
                return Some((Ok(message), queue));
            }
        }
    })
}
