//! Requests of the server to its client, on one connection.
//!
//! Invariant: every request ends, with the client's response or, as soon as the connection is gone,
//! without one. Its connection alone keeps a [`ClientCalls`] alive: processes hold weak references.

use std::convert::Infallible;
use std::sync::{Arc, Weak};

use codex_exec_rpc::{Outbound, Pending};
use codex_exec_server_protocol::{RequestId, RpcError, ServerCall, encode};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

/// The requests of the server that wait for a response on one connection.
#[derive(Debug)]
pub(crate) struct ClientCalls {
    outbound: Outbound,
    pending: Mutex<Pending<Infallible>>,
}

/// No usable response: an error, one that does not decode, no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoResponse;

impl ClientCalls {
    pub(crate) fn new(outbound: Outbound) -> Arc<Self> {
        Arc::new(Self { outbound, pending: Mutex::default() })
    }

    pub(crate) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Makes a request. Dropping the future forgets it; a later response is ignored.
    pub(crate) async fn call<C: ServerCall>(
        calls: &Weak<Self>,
        params: &C::Params,
    ) -> Result<C::Response, NoResponse> {
        let (respond, response) = oneshot::channel();
        let (pending, outbound) = {
            let calls_now = calls.upgrade().ok_or(NoResponse)?;
            let id = calls_now.pending.lock().add(Box::new(move |answer| {
                let parsed = answer.ok().and_then(|raw| serde_json::from_str(raw.get()).ok());
                // The caller may have gone.
                let _ = respond.send(parsed);
            }));
            (PendingCall { calls: calls.clone(), id }, calls_now.outbound.clone())
        };
        let message = encode::server_request::<C>(&pending.id, params);
        outbound.send(message).await.map_err(|_| NoResponse)?;
        drop(outbound);
        response.await.ok().flatten().ok_or(NoResponse)
    }

    /// Takes a response of the client; false if no request with this id waits.
    pub(crate) fn complete(&self, id: &RequestId, response: Result<&RawValue, RpcError>) -> bool {
        self.pending.lock().complete(id, response)
    }
}

/// Forgets its request when it is dropped.
struct PendingCall {
    calls: Weak<ClientCalls>,
    id: RequestId,
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if let Some(calls) = self.calls.upgrade() {
            calls.pending.lock().cancel(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use codex_exec_rpc::{Connection, ConnectionConfig};
    use codex_exec_server_protocol::network::{
        NetworkPolicyAnswer, NetworkPolicyRequest, NetworkPolicyRequestParams, NetworkProtocol,
        PolicyRequest,
    };

    use super::*;

    fn question() -> NetworkPolicyRequestParams {
        let protocol = NetworkProtocol::Http;
        let request = NetworkPolicyRequest { protocol, host: "a.com".into(), port: 80 };
        NetworkPolicyRequestParams { process_id: "p".into(), request }
    }

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[tokio::test]
    async fn calls_end_with_their_response_or_with_the_connection() {
        let (ours, mut theirs) = Connection::pair(&ConnectionConfig::default());
        let calls = ClientCalls::new(ours.outbound().clone());
        let weak = Arc::downgrade(&calls);
        let question = question();
        for (next_id, (response, expected)) in (1..).zip([
            (Ok(r#"{"decision":{"type":"allow"}}"#), Ok(NetworkPolicyAnswer::Allow)),
            (Ok(r#"{"decision":"allow"}"#), Err(NoResponse)),
            (Err(RpcError::method_not_found("x")), Err(NoResponse)),
        ]) {
            let answered = async {
                let sent = theirs.next().await.unwrap().unwrap();
                let sent: serde_json::Value = serde_json::from_slice(&sent).unwrap();
                assert_eq!(
                    (&sent["id"], &sent["method"]),
                    (&next_id.into(), &"network/policyRequest".into())
                );
                let id = RequestId::Integer(next_id);
                let response = response.map(raw);
                assert!(calls.complete(&id, response.as_deref().map_err(Clone::clone)));
                assert!(!calls.complete(&id, Ok(&raw("null"))), "answered already");
            };
            let (answer, ()) =
                tokio::join!(ClientCalls::call::<PolicyRequest>(&weak, &question), answered);
            assert_eq!(answer.map(|answer| answer.decision), expected);
        }
        // Forgotten, so that a client that never answers costs nothing.
        let mut forgotten = Box::pin(ClientCalls::call::<PolicyRequest>(&weak, &question));
        assert!(futures_util::poll!(&mut forgotten).is_pending());
        assert_eq!(calls.pending.lock().len(), 1);
        drop(forgotten);
        assert!(calls.pending.lock().is_empty());
        let mut cut = Box::pin(ClientCalls::call::<PolicyRequest>(&weak, &question));
        assert!(futures_util::poll!(&mut cut).is_pending());
        drop(calls);
        assert_eq!(cut.await.unwrap_err(), NoResponse);
        assert_eq!(
            ClientCalls::call::<PolicyRequest>(&weak, &question).await.unwrap_err(),
            NoResponse,
            "detached"
        );
    }
}
