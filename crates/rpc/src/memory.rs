//! Two connections joined in memory: an embedded server and its client, and tests.

use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::sync::mpsc;

use crate::connection::{Connection, ConnectionConfig, TransportError};
use crate::outbound::{OutboundQueue, Queued, outbound};
use crate::peer::Heard;

impl Connection {
    /// Both ends of a connection without a transport. A message taken by the peer frees its room.
    pub fn pair(config: &ConnectionConfig) -> (Self, Self) {
        let (left_out, left_queue) = outbound(config.outbound);
        let (right_out, right_queue) = outbound(config.outbound);
        let left = Self::new(messages(right_queue), left_out);
        let right = Self::new(messages(left_queue), right_out);
        (left, right)
    }

    /// A connection whose messages come by any stream and leave by a channel. Ends, for those who
    /// send, as soon as the channel's receiver is gone.
    pub fn over(
        incoming: impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static,
        outgoing: mpsc::Sender<Bytes>,
        config: &ConnectionConfig,
    ) -> Self {
        let (outbound, mut queue) = outbound(config.outbound);
        tokio::spawn(async move {
            loop {
                let queued = tokio::select! {
                    queued = queue.recv() => queued,
                    () = outgoing.closed() => break,
                };
                match queued {
                    Some(Queued::Message(message, _share)) => {
                        if outgoing.send(message).await.is_err() {
                            break;
                        }
                    }
                    Some(Queued::Mark(mark)) => mark.reached(),
                    Some(Queued::Ping | Queued::Flush(_)) => {}
                    None => break,
                }
            }
        });
        Self::new(incoming, outbound)
    }

    /// Has the peer asked for a sign of life by `ping`, which must not block, when somebody wants
    /// [one](crate::Peer::answers). What it answers is to be noted in what this gives back.
    pub fn pings_by(&self, ping: impl Fn() + Send + Sync + 'static) -> Heard {
        let signs = self.outbound().signs();
        signs.pings_by(ping);
        Heard(signs.clone())
    }
}

fn messages(
    queue: OutboundQueue,
) -> impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static {
    stream::unfold(queue, |mut queue| async move {
        loop {
            match queue.recv().await? {
                Queued::Message(message, _share) => return Some((Ok(message), queue)),
                Queued::Mark(mark) => mark.reached(),
                Queued::Ping | Queued::Flush(_) => {}
            }
        }
    })
}
