//! One connection in use: requests out, their answers back.
//!
//! Invariant: a request that was added to a link is answered exactly once: by the peer, or by
//! [`Link::fail`] when the connection ends. A failed link takes no more requests.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use codex_exec_rpc::{CallError, Outbound, Pending};
use codex_exec_server_protocol::{Call, RequestId, RpcError, encode};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use crate::foreign::with_kind;

/// Why a request on a link has no result.
#[derive(Debug, Clone)]
pub(crate) enum LinkError {
    /// The connection had ended before it could be sent.
    NotSent,
    /// The connection ended while it was under way.
    Interrupted,
    /// The peer's error, with its kind if it can be told.
    Server(RpcError),
    /// The peer's answer does not decode, or was too long to take.
    Protocol(String),
}

pub(crate) struct Link {
    /// Which connection of the client this is, from 1.
    pub(crate) epoch: u64,
    outbound: Outbound,
    requests: Mutex<Requests>,
}

struct Requests {
    pending: Pending<LinkError>,
    open: bool,
}

impl Link {
    pub(crate) fn new(epoch: u64, outbound: Outbound) -> Arc<Self> {
        let requests = Mutex::new(Requests { pending: Pending::default(), open: true });
        Arc::new(Self { epoch, outbound, requests })
    }

    pub(crate) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Sends a request; the answer is awaited apart. Requests sent one after the other through
    /// here arrive in that order.
    pub(crate) async fn send<C: Call>(
        self: &Arc<Self>,
        params: &C::Params,
    ) -> Result<AnswerOf<C>, LinkError> {
        let (sender, receiver) = oneshot::channel();
        let id = {
            let mut requests = self.requests.lock();
            if !requests.open {
                return Err(LinkError::NotSent);
            }
            requests.pending.add(Box::new(move |answer| {
                let result = match answer {
                    Ok(raw) => serde_json::from_str::<C::Response>(raw.get())
                        .map_err(|error| LinkError::Protocol(error.to_string())),
                    Err(CallError::Response(error)) => {
                        Err(LinkError::Server(with_kind(C::METHOD, error)))
                    }
                    Err(CallError::Failed(error)) => Err(error),
                };
                // The caller may have gone; then nobody wants it.
                let _ = sender.send(result);
            }))
        };
        let message = encode::request::<C>(&id, params);
        let answer =
            AnswerOf { link: self.clone(), id, receiver, answered: false, call: PhantomData };
        match self.outbound.send(message).await {
            Ok(()) => Ok(answer),
            Err(_) => Err(LinkError::NotSent),
        }
    }

    /// Hands an answer to its request.
    pub(crate) fn answer(&self, id: &RequestId, answer: Result<&RawValue, RpcError>) -> bool {
        self.requests.lock().pending.complete(id, answer)
    }

    /// The connection goes on, but one of these answers was thrown away.
    pub(crate) fn answer_lost(&self, why: &str) {
        self.requests.lock().pending.fail_all(&LinkError::Protocol(why.to_owned()));
    }

    /// The connection has ended.
    pub(crate) fn fail(&self) {
        let mut requests = self.requests.lock();
        requests.open = false;
        requests.pending.fail_all(&LinkError::Interrupted);
    }
}

/// The answer to come. Dropping it forgets the request.
pub(crate) struct AnswerOf<C: Call> {
    link: Arc<Link>,
    id: RequestId,
    receiver: oneshot::Receiver<Result<C::Response, LinkError>>,
    answered: bool,
    call: PhantomData<fn(C)>,
}

impl<C: Call> Future for AnswerOf<C> {
    type Output = Result<C::Response, LinkError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.receiver).poll(cx));
        self.answered = true;
        Poll::Ready(answer.unwrap_or(Err(LinkError::Interrupted)))
    }
}

impl<C: Call> Drop for AnswerOf<C> {
    fn drop(&mut self) {
        if !self.answered {
            self.link.requests.lock().pending.cancel(&self.id);
        }
    }
}
