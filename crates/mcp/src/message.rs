//! JSON-RPC 2.0 messages of MCP.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

/// A message could not be parsed.
pub(crate) const PARSE_ERROR: i64 = -32700;
/// It is not a request, notification or response.
pub(crate) const INVALID_REQUEST: i64 = -32600;
/// No such method.
pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
/// Params that do not decode, or a tool that does not exist.
pub(crate) const INVALID_PARAMS: i64 = -32602;
/// The exec-server failed.
pub(crate) const INTERNAL_ERROR: i64 = -32603;
/// A resource does not exist.
pub(crate) const RESOURCE_NOT_FOUND: i64 = -32002;

/// A message of a client.
#[derive(Debug, Clone)]
pub(crate) enum Incoming {
    /// It wants a response.
    Request {
        /// A string or a number.
        id: Value,
        method: String,
        params: Map<String, Value>,
    },
    /// It does not.
    Notification { method: String, params: Map<String, Value> },
    /// The response to a request of this server, which sends none.
    Response,
}

/// Why a text is not a message, and the id to respond with.
#[derive(Debug)]
pub(crate) struct Malformed {
    pub(crate) id: Value,
    pub(crate) code: i64,
    pub(crate) message: String,
}

impl Malformed {
    fn new(id: Value, message: impl Into<String>) -> Self {
        Self { id, code: INVALID_REQUEST, message: message.into() }
    }

    pub(crate) fn response(&self) -> Value {
        error(&self.id, self.code, &self.message)
    }
}

/// Parses a text: one message or, in older revisions of MCP, several.
pub(crate) fn parse(text: &[u8]) -> Result<Vec<Result<Incoming, Malformed>>, Malformed> {
    let value: Value = serde_json::from_slice(text).map_err(|error| Malformed {
        id: Value::Null,
        code: PARSE_ERROR,
        message: format!("not JSON: {error}"),
    })?;
    match value {
        Value::Array(batch) if batch.is_empty() => {
            Err(Malformed::new(Value::Null, "an empty batch"))
        }
        Value::Array(batch) => Ok(batch.into_iter().map(message).collect()),
        value => Ok(vec![message(value)]),
    }
}

fn message(value: Value) -> Result<Incoming, Malformed> {
    #[derive(Deserialize)]
    struct Wire {
        jsonrpc: Option<Value>,
        #[serde(default, deserialize_with = "present")]
        id: Option<Value>,
        method: Option<Value>,
        params: Option<Value>,
        #[serde(default, deserialize_with = "present")]
        result: Option<Value>,
        error: Option<Value>,
    }
    fn present<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
        Value::deserialize(from).map(Some)
    }
    let Ok(wire) = serde_json::from_value::<Wire>(value) else {
        return Err(Malformed::new(Value::Null, "a message has to be an object"));
    };
    let id = wire.id.clone().filter(|id| id.is_string() || id.is_number());
    let fail = |why: &str| Err(Malformed::new(id.clone().unwrap_or(Value::Null), why));
    if wire.jsonrpc.as_ref().and_then(Value::as_str) != Some("2.0") {
        return fail("`jsonrpc` has to be \"2.0\"");
    }
    if wire.id.is_some() && id.is_none() {
        return fail("`id` has to be a string or a number");
    }
    let method = match wire.method {
        Some(Value::String(method)) => method,
        None if wire.result.is_some() || wire.error.is_some() => return Ok(Incoming::Response),
        _ => return fail("`method` has to be a string"),
    };
    let params = match wire.params {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(params)) => params,
        Some(_) => return fail("`params` has to be an object"),
    };
    Ok(match id {
        Some(id) => Incoming::Request { id, method, params },
        None => Incoming::Notification { method, params },
    })
}

/// A successful response.
pub(crate) fn response(id: &Value, result: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "result": result})
}

/// An error response.
pub(crate) fn error(id: &Value, code: i64, message: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
}

/// Where the messages go that belong to a request: its progress, then its response. A client that has gone
/// receives nothing, which is no error.
#[derive(Debug, Clone)]
pub(crate) struct Replies(mpsc::Sender<Value>);

impl Replies {
    /// A bounded queue: a client that does not read makes the answers wait.
    pub(crate) fn channel(capacity: usize) -> (Self, mpsc::Receiver<Value>) {
        let (sender, receiver) = mpsc::channel(capacity);
        (Self(sender), receiver)
    }

    pub(crate) async fn send(&self, message: Value) {
        let _ = self.0.send(message).await;
    }

    /// Sends what may be left out if the client does not keep up.
    pub(crate) fn offer(&self, message: Value) {
        let _ = self.0.try_send(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Result<Incoming, Malformed> {
        parse(text.as_bytes()).and_then(|mut all| all.remove(0))
    }

    #[test]
    fn message_kind_follows_from_its_members() {
        assert!(matches!(
            one(r#"{"jsonrpc":"2.0","id":1,"method":"a","params":{"b":1}}"#),
            Ok(Incoming::Request { params, .. }) if params["b"] == 1
        ));
        assert!(matches!(
            one(r#"{"jsonrpc":"2.0","method":"a"}"#),
            Ok(Incoming::Notification { .. })
        ));
        assert!(matches!(one(r#"{"jsonrpc":"2.0","id":1,"result":null}"#), Ok(Incoming::Response)));
        assert_eq!(parse(br#"[{"jsonrpc":"2.0","method":"a"},5]"#).unwrap().len(), 2);
    }

    #[test]
    fn malformed_messages_are_answered_with_their_id_if_it_can_be_read() {
        for (text, id, code) in [
            ("{", Value::Null, PARSE_ERROR),
            ("[]", Value::Null, INVALID_REQUEST),
            ("5", Value::Null, INVALID_REQUEST),
            (r#"{"id":7,"method":"a"}"#, json!(7), INVALID_REQUEST),
            (r#"{"jsonrpc":"2.0","id":"x","method":5}"#, json!("x"), INVALID_REQUEST),
            (r#"{"jsonrpc":"2.0","id":null,"method":"a"}"#, Value::Null, INVALID_REQUEST),
            (r#"{"jsonrpc":"2.0","id":1,"method":"a","params":[1]}"#, json!(1), INVALID_REQUEST),
        ] {
            let malformed = one(text).unwrap_err();
            assert_eq!((malformed.id, malformed.code), (id, code), "{text}");
        }
    }
}
