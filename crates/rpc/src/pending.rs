//! Requests that wait for their answers.
//!
//! Invariant: every request added is answered exactly once: by its response, or by the error given
//! to [`Pending::fail_all`], or by being dropped with the structure.

use std::collections::HashMap;
use std::fmt;

use codex_exec_server_protocol::{RequestId, RpcError};
use serde_json::value::RawValue;

/// What is done with an answer: the result as text, parsed there once, into its type.
pub type OnResponse<E> = Box<dyn FnOnce(Result<&RawValue, CallError<E>>) + Send>;

/// An answer that is no result.
#[derive(Debug, Clone)]
pub enum CallError<E> {
    /// The peer's error.
    Response(RpcError),
    /// None will come.
    Failed(E),
}

/// Requests under way on one connection.
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
    /// Takes a new id for a request.
    pub fn add(&mut self, on_response: OnResponse<E>) -> RequestId {
        self.last_id += 1;
        self.waiting.insert(self.last_id, on_response);
        RequestId::Integer(self.last_id)
    }

    /// Hands an answer to its request; `false` if none of that id is under way.
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

    /// Forgets a request whose caller has gone.
    pub fn cancel(&mut self, id: &RequestId) {
        if let RequestId::Integer(id) = id {
            self.waiting.remove(id);
        }
    }

    /// Answers every request with the same failure.
    pub fn fail_all(&mut self, failure: &E) {
        for (_, on_response) in self.waiting.drain() {
            on_response(Err(CallError::Failed(failure.clone())));
        }
    }

    /// How many are under way.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none is under way.
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
