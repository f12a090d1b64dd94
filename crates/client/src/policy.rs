//! Requests of the server to this client: questions about hosts that the rules of a process's proxy leave
//! undecided.
//!
//! Invariant: a server can keep at most [`MAX_ANSWERS`] answers of this client in the making, and nothing
//! that it sends ends the connection. A question without a handler, or beyond the limit, is denied.

use std::fmt;
use std::sync::Arc;

use codex_exec_rpc::Outbound;
use codex_exec_server_protocol::network::{
    NetworkPolicyAnswer, NetworkPolicyRequestParams, NetworkPolicyResponse, PolicyRequest,
};
use codex_exec_server_protocol::{RequestId, RpcError, ServerCall, encode, parse_params};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;

/// Answers that are being made or wait for room to be sent, at a time.
const MAX_ANSWERS: usize = 256;

type Handler =
    dyn Fn(NetworkPolicyRequestParams) -> BoxFuture<'static, NetworkPolicyAnswer> + Send + Sync;

/// Answers the server's requests.
pub(crate) struct Answers {
    handler: Mutex<Option<Arc<Handler>>>,
    room: Arc<Semaphore>,
}

impl Default for Answers {
    fn default() -> Self {
        Self { handler: Mutex::default(), room: Arc::new(Semaphore::new(MAX_ANSWERS)) }
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers").finish_non_exhaustive()
    }
}

impl Answers {
    pub(crate) fn set_handler(&self, handler: Arc<Handler>) {
        *self.handler.lock() = Some(handler);
    }

    /// Answers a request, now or from a task: reading the connection never waits for an answer.
    pub(crate) fn answer(
        &self,
        id: RequestId,
        method: &str,
        params: Option<&RawValue>,
        outbound: &Outbound,
    ) {
        let question = match method {
            PolicyRequest::NAME => parse_params::<NetworkPolicyRequestParams>(params),
            _ => Err(RpcError::method_not_found(method)),
        };
        let room = self.room.clone().try_acquire_owned().ok();
        let handler = self.handler.lock().clone().filter(|_| room.is_some());
        let message = match (question, handler) {
            (Ok(question), Some(handler)) => {
                let outbound = outbound.clone();
                tokio::spawn(async move {
                    let _room = room;
                    tokio::select! {
                        answer = handler(question) => {
                            let _ = outbound.send(decided(&id, answer)).await;
                        }
                        // The question has gone with its connection.
                        () = outbound.closed() => {}
                    }
                });
                return;
            }
            (Ok(_), None) => {
                decided(&id, NetworkPolicyAnswer::Deny { reason: "not_allowed".to_owned() })
            }
            (Err(error), _) => encode::error(&id, &error),
        };
        if let Some(slot) = outbound.try_reserve(message.len()) {
            slot.send(message);
        } else if room.is_some() {
            let outbound = outbound.clone();
            tokio::spawn(async move {
                let _room = room;
                outbound.send(message).await
            });
        }
    }
}

fn decided(id: &RequestId, decision: NetworkPolicyAnswer) -> Vec<u8> {
    encode::response(id, &NetworkPolicyResponse { decision })
}
