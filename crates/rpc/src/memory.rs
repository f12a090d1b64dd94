//! Two connections joined in memory: an embedded server and its client, and tests.

use bytes::Bytes;
use futures_util::{Stream, stream};

use crate::connection::{Connection, ConnectionConfig, TransportError};
use crate::outbound::{OutboundQueue, outbound};
use crate::peer::PeerActivity;

impl Connection {
    /// Makes both ends of an in-memory connection. A message frees its room when the peer takes it.
    pub fn pair(config: &ConnectionConfig) -> (Self, Self) {
        let (left_out, left_queue) = outbound(config.outbound);
        let (right_out, right_queue) = outbound(config.outbound);
        let left = Self::new(messages(right_queue), left_out);
        let right = Self::new(messages(left_queue), right_out);
        (left, right)
    }

    /// Makes a connection from a stream of incoming messages, and returns the queue of outgoing ones.
    /// Dropping the queue closes the connection for its senders.
    pub fn over(
        incoming: impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static,
        config: &ConnectionConfig,
    ) -> (Self, OutboundQueue) {
        let (outbound, queue) = outbound(config.outbound);
        (Self::new(incoming, outbound), queue)
    }

    /// Sets how [`Peer::responds_within`](crate::Peer::responds_within) pings the peer; `ping` must not
    /// block. The transport reports replies through the returned [`PeerActivity`].
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
