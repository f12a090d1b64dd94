//! Requests that wait for their responses.
//!
//! Invariant: every request added ends exactly once: by its response, by the error given to
//! [`Pending::fail_all`], or by being dropped with the structure.

use std::collections::HashMap;
use std::fmt;

use codex_exec_server_protocol::{RequestId, RpcError};
use serde_json::value::RawValue;

/// Receives the outcome of a request; the result is still raw text, to be parsed once into its type.
pub type OnResponse<E> = Box<dyn FnOnce(Result<&RawValue, CallError<E>>) + Send>;

/// Why a request has no result.
#[derive(Debug, Clone)]
pub enum CallError<E> {
    /// The peer responded with an error.
    Response(RpcError),
    /// No response will come.
    Failed(E),
}

/// The requests in flight on one connection.
pub struct Pending<E> {
    last_id: i64,
    waiting: HashMap<i64, OnResponse<E>>,
}

impl<E> fmt::Debug for Pending<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl<E> Default for Pending<E> {
    fn default() -> Self {
        Self { last_id: 0, waiting: HashMap::new() }
    }
}

impl<E: Clone> Pending<E> {
    /// Adds a request and returns its new id.
    pub fn add(&mut self, on_response: OnResponse<E>) -> RequestId {
        self.last_id += 1;
        self.waiting.insert(self.last_id, on_response);
        RequestId::Integer(self.last_id)
    }

    /// Completes a request with its response; `false` if no request with this id is in flight.
    pub fn complete(&mut self, id: &RequestId, response: Result<&RawValue, RpcError>) -> bool {
        let RequestId::Integer(id) = id else { return false };
        match self.waiting.remove(id) {
            Some(on_response) => {
                on_response(response.map_err(CallError::Response));
                true
            }
            None => false,
        }
    }

    /// Removes a request whose caller no longer waits.
    pub fn cancel(&mut self, id: &RequestId) {
        if let RequestId::Integer(id) = id {
            self.waiting.remove(id);
        }
    }

    /// Completes every request with the same failure.
    pub fn fail_all(&mut self, failure: &E) {
        for (_, on_response) in self.waiting.drain() {
            on_response(Err(CallError::Failed(failure.clone())));
        }
    }

    /// How many requests are in flight.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request is in flight.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codex_exec_server_protocol::ErrorKind;
    use std::sync::mpsc;

    #[test]
    fn every_request_is_completed_exactly_once() {
        let (responses, got) = mpsc::channel();
        let mut pending = Pending::<&str>::default();
        let mut add = || {
            let responses = responses.clone();
            pending.add(Box::new(move |response| {
                let text = match response {
                    Ok(result) => result.get().to_owned(),
                    Err(CallError::Response(error)) => error.message,
                    Err(CallError::Failed(why)) => why.to_owned(),
                };
                responses.send(text).unwrap();
            }))
        };
        let (a, b, c) = (add(), add(), add());
        let raw = RawValue::from_string("7".into()).unwrap();
        assert!(pending.complete(&b, Ok(&raw)));
        assert!(!pending.complete(&b, Ok(&raw)), "answered already");
        assert!(pending.complete(&a, Err(RpcError::internal(ErrorKind::Internal, "no"))));
        assert!(!pending.complete(&RequestId::Text("x".into()), Ok(&raw)));
        pending.fail_all(&"gone");
        assert!(!pending.complete(&c, Ok(&raw)));
        assert!(pending.is_empty());
        assert_eq!(got.try_iter().collect::<Vec<_>>(), ["7", "no", "gone"]);
    }
}
