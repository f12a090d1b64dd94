//! The message envelope: kind, id, and params as raw text.
//!
//! JSON-RPC 2.0 without the `jsonrpc` member. Params and results stay raw until the method is known, and are
//! parsed exactly once, into their type.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::error::RpcError;
use crate::limits::{self, DecodeLimits};

/// The id of a request; its response repeats it unchanged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestId {
    /// Any 64-bit integer.
    Integer(i64),
    /// Any text.
    Text(String),
}

impl RequestId {
    /// The id of a response to a message whose own id could not be read.
    pub const UNKNOWN: Self = Self::Integer(-1);
}

impl From<i64> for RequestId {
    fn from(id: i64) -> Self {
        Self::Integer(id)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(id) => id.fmt(f),
            Self::Text(id) => id.fmt(f),
        }
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Integer(id) => serializer.serialize_i64(*id),
            Self::Text(id) => serializer.serialize_str(id),
        }
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Id;
        impl Visitor<'_> for Id {
            type Value = RequestId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an id that is a string or a 64-bit integer")
            }

            fn visit_i64<E>(self, id: i64) -> Result<RequestId, E> {
                Ok(RequestId::Integer(id))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<RequestId, E> {
                i64::try_from(id)
                    .map(RequestId::Integer)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(id), &self))
            }

            fn visit_str<E>(self, id: &str) -> Result<RequestId, E> {
                Ok(RequestId::Text(id.to_owned()))
            }
        }
        deserializer.deserialize_any(Id)
    }
}

/// W3C trace context of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// The `traceparent` header's value.
    pub traceparent: Option<String>,
    /// The `tracestate` header's value.
    pub tracestate: Option<String>,
}

/// A received message, borrowed from its text.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// `method` and `id`.
    Request {
        /// The id for the response.
        id: RequestId,
        /// The method's name, not yet looked up.
        method: String,
        /// The params, not yet parsed; `None` if absent.
        params: Option<&'a RawValue>,
        /// The caller's trace context.
        trace: Option<Trace>,
    },
    /// `method` alone.
    Notification {
        /// The method's name, not yet looked up.
        method: String,
        /// The params, not yet parsed; `None` if absent.
        params: Option<&'a RawValue>,
    },
    /// `result`.
    Response {
        /// The id of the request.
        id: RequestId,
        /// The result, not yet parsed.
        result: &'a RawValue,
    },
    /// `error`.
    Error {
        /// The id of the request, or [`RequestId::UNKNOWN`].
        id: RequestId,
        /// The error.
        error: RpcError,
    },
}

/// Why a message could not be parsed; the response has the id -1.
#[derive(Debug, thiserror::Error)]
pub enum MalformedMessage {
    /// The message is longer than [`DecodeLimits::message_bytes`].
    #[error("message of {len} bytes is over the limit of {limit}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// JSON, but not an object.
    #[error("message is not a JSON object")]
    NotAnObject,
    /// The text is not JSON, exceeds a limit, or lacks members that a message must have.
    #[error("malformed message: {0}")]
    Json(#[from] serde_json::Error),
}

impl<'a> Incoming<'a> {
    /// Parses the envelope and enforces the limits on the whole message.
    pub fn parse(text: &'a [u8], limits: &DecodeLimits) -> Result<Self, MalformedMessage> {
        if text.len() > limits.message_bytes {
            return Err(MalformedMessage::TooLong { len: text.len(), limit: limits.message_bytes });
        }
        limits::check(text, limits)?;
        if text.iter().find(|b| !b.is_ascii_whitespace()) != Some(&b'{') {
            return Err(MalformedMessage::NotAnObject);
        }
        let wire: Wire<'a> = serde_json::from_slice(text)?;
        let missing = |member| MalformedMessage::Json(de::Error::missing_field(member));
        match (wire.method, wire.id, wire.result) {
            (Some(method), Some(id), _) => {
                Ok(Self::Request { id, method, params: wire.params, trace: wire.trace.0 })
            }
            (Some(method), None, _) => Ok(Self::Notification { method, params: wire.params }),
            (None, id, Some(result)) => {
                Ok(Self::Response { id: id.ok_or_else(|| missing("id"))?, result })
            }
            (None, id, None) => {
                let error = wire.error.ok_or_else(|| missing("error"))?;
                Ok(Self::Error {
                    id: id.ok_or_else(|| missing("id"))?,
                    error: serde_json::from_str(error.get())?,
                })
            }
        }
    }
}

/// The members that matter; a present `null` differs from an absent member in `id` and `result`.
#[derive(serde::Deserialize)]
struct Wire<'a> {
    #[serde(default, deserialize_with = "present")]
    id: Option<RequestId>,
    #[serde(default, deserialize_with = "present")]
    method: Option<String>,
    #[serde(default, borrow)]
    params: Option<&'a RawValue>,
    #[serde(default, borrow, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(default, borrow)]
    error: Option<&'a RawValue>,
    #[serde(default)]
    trace: LenientTrace,
}

fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// A trace context that is invalid is ignored, never an error.
#[derive(Default)]
struct LenientTrace(Option<Trace>);

impl<'de> Deserialize<'de> for LenientTrace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Members {
            #[serde(default)]
            traceparent: Option<String>,
            #[serde(default)]
            tracestate: Option<String>,
        }
        let raw = <&RawValue>::deserialize(deserializer)?;
        Ok(Self(
            serde_json::from_str::<Members>(raw.get())
                .ok()
                .map(|m| Trace { traceparent: m.traceparent, tracestate: m.tracestate })
                .filter(|trace| *trace != Trace::default()),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Incoming<'_>, MalformedMessage> {
        Incoming::parse(text.as_bytes(), &DecodeLimits::default())
    }

    #[test]
    fn message_kind_follows_from_its_members() {
        assert!(matches!(
            parse(r#"{"id":1,"method":"m","params":{"a":[1]},"jsonrpc":"2.0","x":0}"#),
            Ok(Incoming::Request { id: RequestId::Integer(1), params: Some(p), .. })
                if p.get() == r#"{"a":[1]}"#
        ));
        assert!(matches!(
            parse(r#"{"id":1,"method":"m","params":null,"result":1}"#),
            Ok(Incoming::Request { params: None, .. })
        ));
        assert!(matches!(parse(r#"{"method":"m"}"#), Ok(Incoming::Notification { .. })));
        assert!(matches!(
            parse(r#"{"id":"a","result":null}"#),
            Ok(Incoming::Response { id: RequestId::Text(id), result })
                if id == "a" && result.get() == "null"
        ));
        assert!(matches!(
            parse(r#"{"id":-1,"error":{"code":-32600,"message":"no","data":1}}"#),
            Ok(Incoming::Error { id: RequestId::UNKNOWN, error: RpcError { code: -32600, .. } })
        ));
    }

    #[test]
    fn ids_are_strings_or_64_bit_integers() {
        for id in ["-9223372036854775808", "9223372036854775807", r#""""#, r#""x""#] {
            let text = format!(r#"{{"id":{id},"method":"m"}}"#);
            let Ok(Incoming::Request { id: parsed, .. }) = parse(&text) else {
                panic!("{id}");
            };
            assert_eq!(serde_json::to_string(&parsed).unwrap(), id);
        }
        for id in ["null", "1.5", "9223372036854775808", "true", "[]", "{}"] {
            parse(&format!(r#"{{"id":{id},"method":"m"}}"#)).unwrap_err();
        }
    }

    #[test]
    fn invalid_messages_are_malformed() {
        for text in [
            "",
            "hello",
            "[1]",
            "1",
            "null",
            "{}",
            r#"{"id":7}"#,
            r#"{"result":1}"#,
            r#"{"error":{"code":1,"message":"x"}}"#,
            r#"{"id":1,"error":{"code":1}}"#,
            r#"{"id":1,"method":5}"#,
            r#"{"id":1,"method":null}"#,
            r#"{"id":1,"id":2,"method":"m"}"#,
            r#"{"id":1,"method":"m","params":{"a":1,"a":2}}"#,
            "\u{feff}{}",
        ] {
            parse(text).unwrap_err();
        }
        let limits = DecodeLimits { message_bytes: 10, ..DecodeLimits::default() };
        assert!(matches!(
            Incoming::parse(br#"{"method":"m"}"#, &limits),
            Err(MalformedMessage::TooLong { len: 14, limit: 10 })
        ));
    }

    #[test]
    fn a_trace_is_never_an_error() {
        let trace = |text: &str| match parse(text) {
            Ok(Incoming::Request { trace, .. }) => trace,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            trace(r#"{"id":1,"method":"m","trace":{"traceparent":"00-a-b-01"}}"#),
            Some(Trace { traceparent: Some("00-a-b-01".into()), tracestate: None })
        );
        assert_eq!(trace(r#"{"id":1,"method":"m","trace":5}"#), None);
        assert_eq!(trace(r#"{"id":1,"method":"m","trace":{"traceparent":5}}"#), None);
    }
}
