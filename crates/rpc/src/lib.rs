//! Connections that carry JSON-RPC messages, and nothing about any method.
//!
//! A [`Connection`] is a stream of messages in and an [`Outbound`] queue for messages out. Only its
//! constructor knows what carries them: [`Connection::websocket`], [`Connection::lines`] (stdio),
//! [`Connection::pair`] (memory), [`Connection::over`] (a relay stream). [`WebsocketDial`] makes
//! one to a `ws://`, `wss://`, `unix:` or `vsock:` address. [`Pending`] matches responses to requests. [`socket`] is the
//! framed websocket below all of these, whether or not it carries JSON-RPC.

mod budget;
mod connection;
mod dial;
mod escape;
#[cfg(feature = "http-client")]
mod head_limit;
#[cfg(feature = "http-client")]
mod http;
mod keep_alive;
mod lines;
mod loopback;
mod memory;
mod metered;
mod net_stream;
mod outbound;
mod peer;
mod pending;
mod proxy;
mod secret;
pub mod socket;
mod tls;
mod upgrade;
mod websocket;

pub use budget::{Account, Budget, Share, Transfer};
pub use connection::{Connection, ConnectionConfig, TransportError};
pub use dial::{
    DialError, DialledStream, TransportStream, WebsocketDial, tls_from_roots, tls_with_identity,
    trust_only,
};
pub use escape::escape;
#[cfg(feature = "http-client")]
pub use http::{ExchangeError, HttpTarget};
pub use keep_alive::{KeepAlive, KeepAliveTimer};
pub use loopback::disable_pacing_on_loopback;
pub use metered::{Meter, Metered};
pub use net_stream::NetStream;
pub use outbound::{
    CloseReason, Closed, NotReading, Outbound, OutboundConfig, OutboundQueue, Room, Slot, outbound,
};
pub use peer::{Peer, PeerActivity};
pub use pending::{CallError, OnResponse, Pending};
pub use proxy::{Proxies, Proxy};
pub use secret::Secret;
pub use socket::websocket_config;
pub use tls::{TlsError, TlsFiles};
pub use upgrade::websocket_accept;
pub use websocket::websocket_limits;
