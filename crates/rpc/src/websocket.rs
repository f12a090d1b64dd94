//! JSON-RPC over websockets: one JSON text per message; text and binary messages are both accepted.

use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_websockets::{Error, Limits, WebSocketStream};

use crate::connection::{Connection, ConnectionConfig, TransportError};
use crate::keep_alive::KeepAliveTimer;
use crate::metered::{Meter, Metered};
use crate::outbound::outbound;
use crate::socket::{self, Framing, Received, SocketConfig, SocketReader};

/// The limits to build a websocket with, so that a slightly overlong message is skipped with an error.
pub fn websocket_limits(config: &ConnectionConfig) -> Limits {
    Limits::default().max_payload_len(Some(config.message_bytes + config.oversize_slack))
}

impl Connection {
    /// Makes a connection over an established websocket and spawns its write task.
    pub fn websocket<T>(socket: WebSocketStream<T>, config: &ConnectionConfig) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::websocket_with(socket, None, config)
    }

    /// Like [`Self::websocket`], over a websocket that reads within a [`Budget`](crate::Budget).
    pub fn metered_websocket<T>(
        socket: WebSocketStream<Metered<T>>,
        meter: Meter,
        config: &ConnectionConfig,
    ) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::websocket_with(socket, Some(meter), config)
    }

    fn websocket_with<T>(
        socket: WebSocketStream<T>,
        meter: Option<Meter>,
        config: &ConnectionConfig,
    ) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (outbound, queue) = outbound(config.outbound);
        let socket_config = SocketConfig {
            framing: Framing::Text,
            keep_alive: config.keep_alive.map(KeepAliveTimer::when_idle),
            close_timeout: config.close_timeout,
        };
        let (reader, writer) = socket::start(socket, (outbound.clone(), queue), socket_config);
        tokio::spawn(writer);
        let limit = config.message_bytes;
        match meter {
            Some(meter) => {
                let reader = reader.with_meter(meter.clone());
                Self::new(messages(reader, limit), outbound).with_meter(meter)
            }
            None => Self::new(messages(reader, limit), outbound),
        }
    }
}

/// The messages of a socket, up to its end or its first fatal error.
fn messages<T>(
    reader: SocketReader<T>,
    limit: usize,
) -> impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    stream::unfold(Some(reader), move |reader| async move {
        let mut reader = reader?;
        let Some(received) = reader.next().await else {
            reader.peer_gone();
            return None;
        };
        let item = match received {
            Ok(Received::Text(bytes) | Received::Binary(bytes)) if bytes.len() > limit => {
                Err(TransportError::TooLong { len: bytes.len(), limit })
            }
            Ok(Received::Text(bytes) | Received::Binary(bytes)) => Ok(bytes),
            Err(TransportError::WebSocket(Error::PayloadTooLong { .. })) => {
                Err(TransportError::TooLongToSkip { limit })
            }
            Err(error) => Err(error),
        };
        match item {
            Err(error) if error.is_fatal() => {
                reader.peer_gone();
                Some((Err(error), None))
            }
            item => Some((item, Some(reader))),
        }
    })
}
