//! Two connections joined in memory: an embedded server and its client, and tests.

use bytes::Bytes;
use futures_util::{Stream, stream};

use crate::connection::{Connection, ConnectionConfig, TransportError};
use crate::outbound::{OutboundQueue, outbound};
use crate::peer::PeerActivity;

impl Connection {
    /// Both ends of a connection without a transport. A message taken by the peer frees its room.
    pub fn pair(config: &ConnectionConfig) -> (Self, Self) {
        let (left_out, left_queue) = outbound(config.outbound);
        let (right_out, right_queue) = outbound(config.outbound);
        let left = Self::new(messages(right_queue), left_out);
        let right = Self::new(messages(left_queue), right_out);
        (left, right)
    }

    /// A connection whose messages come by any stream, and the queue that its messages leave by.
    /// Ends, for those who send, as soon as the queue is dropped.
    pub fn over(
        incoming: impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static,
        config: &ConnectionConfig,
    ) -> (Self, OutboundQueue) {
        let (outbound, queue) = outbound(config.outbound);
        (Self::new(incoming, outbound), queue)
    }

    /// Has the peer asked for a sign of life by `ping`, which must not block, when somebody wants
    /// [one](crate::Peer::responds_within). What it answers is to be noted in what this gives back.
    pub fn set_ping(&self, ping: impl Fn() + Send + Sync + 'static) -> PeerActivity {
        let liveness = self.outbound().liveness();
        liveness.set_ping(ping);
        PeerActivity(liveness.clone())
    }
}

fn messages(
    queue: OutboundQueue,
) -> impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static {
    stream::unfold(queue, |mut queue| async move {
        let (message, _room) = queue.next_message().await?;
        Some((Ok(message), queue))
    })
}
