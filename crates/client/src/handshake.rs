//! The handshake of a connection: `initialize`, its response, `initialized`.

use std::time::Duration;

use codex_exec_rpc::Connection;
use codex_exec_server_protocol::session::{
    InitializeParams, InitializeResponse, InitializedParams,
};
use codex_exec_server_protocol::{
    DecodeLimits, Incoming, Method, RequestId, RpcError, call, encode, notification,
};

use crate::channel::parse_result;
use crate::infer_kind::with_inferred_kind;

/// Why a handshake failed.
#[derive(Debug, Clone)]
pub(crate) enum HandshakeError {
    /// The connection ended.
    Ended(String),
    /// No response in time.
    Timeout(Duration),
    /// The server's error, with its kind if that is known.
    Server(RpcError),
    /// The server sent something other than a response to `initialize`.
    Protocol(String),
}

pub(crate) async fn handshake(
    connection: &mut Connection,
    params: &InitializeParams,
    timeout: Duration,
) -> Result<InitializeResponse, HandshakeError> {
    match tokio::time::timeout(timeout, exchange(connection, params)).await {
        Ok(result) => result,
        Err(_) => Err(HandshakeError::Timeout(timeout)),
    }
}

async fn exchange(
    connection: &mut Connection,
    params: &InitializeParams,
) -> Result<InitializeResponse, HandshakeError> {
    // A text id cannot collide with the integer ids of later requests.
    let own = RequestId::Text("initialize".to_owned());
    let ended = |_| HandshakeError::Ended("the server closed it at once".to_owned());
    let request = encode::request::<call::Initialize>(&own, params);
    connection.outbound().send(request).await.map_err(ended)?;
    let response = loop {
        let message = match connection.next().await {
            Some(Ok(message)) => message,
            Some(Err(error)) => return Err(HandshakeError::Ended(error.to_string())),
            None => {
                return Err(HandshakeError::Ended(
                    "the server closed it without a response to initialize".to_owned(),
                ));
            }
        };
        match Incoming::parse(&message, &DecodeLimits::default()) {
            Ok(Incoming::Response { id, result }) if id == own => {
                break parse_result(result).map_err(HandshakeError::Protocol)?;
            }
            Ok(Incoming::Error { id, error }) if id == own || id == RequestId::UNKNOWN => {
                return Err(HandshakeError::Server(with_inferred_kind(Method::Initialize, error)));
            }
            // Events of a resumed session; the client reads them again later.
            Ok(Incoming::Notification { .. }) => {}
            // A question of a resumed session, too early for this client. One with this request's own id is
            // its echo: the peer is not a server.
            Ok(Incoming::Request { id, method, .. }) if id != own => {
                let refused = encode::error(&id, &RpcError::method_not_found(&method));
                connection.outbound().send(refused).await.map_err(ended)?;
            }
            Ok(_) => {
                return Err(HandshakeError::Protocol(
                    "the server sent something other than a response".to_owned(),
                ));
            }
            Err(error) => return Err(HandshakeError::Protocol(error.to_string())),
        }
    };
    let initialized = encode::notification::<notification::Initialized>(&InitializedParams {});
    connection.outbound().send(initialized).await.map_err(ended)?;
    Ok(response)
}
