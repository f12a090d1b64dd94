//! Requests and their responses on one connection.
//!
//! Invariant: every request gets exactly one result: from the peer, or from [`Channel::fail`] when the
//! connection ends. A failed channel accepts no more requests.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use codex_exec_rpc::{CallError, Outbound, Pending};
use codex_exec_server_protocol::{Call, RequestId, RpcError, encode};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use crate::infer_kind::with_inferred_kind;

/// Why a request failed.
#[derive(Debug, Clone)]
pub(crate) enum ChannelError {
    /// The connection ended before the request was sent.
    NotSent,
    /// The connection ended before the response arrived.
    Interrupted,
    /// The peer's error, with its kind if that is known.
    Server(RpcError),
    /// The response does not parse, or was too long.
    Protocol(String),
}

/// Parses a result, which is an object for every method: `serde` would also take its members from an array.
pub(crate) fn parse_result<T: DeserializeOwned>(raw: &RawValue) -> Result<T, String> {
    if raw.get().trim_start().starts_with('[') {
        return Err("expected an object, not an array".to_owned());
    }
    serde_json::from_str(raw.get()).map_err(|error| error.to_string())
}

pub(crate) struct Channel {
    /// The number of the client's connection, from 1.
    pub(crate) epoch: u64,
    outbound: Outbound,
    requests: Mutex<Requests>,
}

struct Requests {
    pending: Pending<ChannelError>,
    open: bool,
}

impl Channel {
    pub(crate) fn new(epoch: u64, outbound: Outbound) -> Arc<Self> {
        let requests = Mutex::new(Requests { pending: Pending::default(), open: true });
        Arc::new(Self { epoch, outbound, requests })
    }

    pub(crate) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Sends a request and returns its pending response. Requests sent one after the other arrive in that
    /// order.
    pub(crate) async fn send<C: Call>(
        self: &Arc<Self>,
        params: &C::Params,
    ) -> Result<PendingResponse<C>, ChannelError> {
        let (sender, receiver) = oneshot::channel();
        let id = {
            let mut requests = self.requests.lock();
            if !requests.open {
                return Err(ChannelError::NotSent);
            }
            requests.pending.add(Box::new(move |answer| {
                let result = match answer {
                    Ok(raw) => parse_result::<C::Response>(raw).map_err(ChannelError::Protocol),
                    Err(CallError::Response(error)) => {
                        Err(ChannelError::Server(with_inferred_kind(C::METHOD, error)))
                    }
                    Err(CallError::Failed(error)) => Err(error),
                };
                // Fails if the caller has dropped the pending response.
                let _ = sender.send(result);
            }))
        };
        let message = encode::request::<C>(&id, params);
        let response = PendingResponse {
            channel: self.clone(),
            id,
            receiver,
            received: false,
            call: PhantomData,
        };
        match self.outbound.send(message).await {
            Ok(()) => Ok(response),
            Err(_) => Err(ChannelError::NotSent),
        }
    }

    /// Delivers a response to its request.
    pub(crate) fn respond(&self, id: &RequestId, response: Result<&RawValue, RpcError>) -> bool {
        self.requests.lock().pending.complete(id, response)
    }

    /// Fails all pending requests: the transport discarded a message that may answer one of them. The
    /// channel stays open.
    pub(crate) fn response_lost(&self, why: &str) {
        self.requests.lock().pending.fail_all(&ChannelError::Protocol(why.to_owned()));
    }

    /// Fails all pending requests and closes the channel.
    pub(crate) fn fail(&self) {
        let mut requests = self.requests.lock();
        requests.open = false;
        requests.pending.fail_all(&ChannelError::Interrupted);
    }
}

/// The response to a request. Dropping it forgets the request.
pub(crate) struct PendingResponse<C: Call> {
    channel: Arc<Channel>,
    id: RequestId,
    receiver: oneshot::Receiver<Result<C::Response, ChannelError>>,
    received: bool,
    call: PhantomData<fn(C)>,
}

impl<C: Call> Future for PendingResponse<C> {
    type Output = Result<C::Response, ChannelError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = ready!(Pin::new(&mut self.receiver).poll(cx));
        self.received = true;
        Poll::Ready(response.unwrap_or(Err(ChannelError::Interrupted)))
    }
}

impl<C: Call> Drop for PendingResponse<C> {
    fn drop(&mut self) {
        if !self.received {
            self.channel.requests.lock().pending.cancel(&self.id);
        }
    }
}
