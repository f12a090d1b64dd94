//! JSON-RPC messages. The second parser is serde_json's own of any JSON, which counts values too.

use codex_exec_server_protocol::{
    DecodeLimits, Incoming, Method, RequestId, encode, parse_params, process,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use super::kind_of;

/// A message that is taken is JSON of the same meaning, and within limits that are exact.
pub(super) fn check(bytes: &[u8]) -> u64 {
    let limits = DecodeLimits::default();
    let message = match Incoming::parse(bytes, &limits) {
        Ok(message) => message,
        Err(error) => return kind_of(error),
    };
    let value: Value = serde_json::from_slice(bytes).expect("what is a message is JSON");
    let values = count(&value);
    let bound = |values| DecodeLimits { values, ..limits };
    assert!(Incoming::parse(bytes, &bound(values)).is_ok(), "refused at its {values} values");
    assert!(Incoming::parse(bytes, &bound(values - 1)).is_err(), "{values} values passed a limit");
    let short = DecodeLimits { message_bytes: bytes.len() - 1, ..limits };
    assert!(Incoming::parse(bytes, &short).is_err(), "longer than the limit");
    match &message {
        Incoming::Request { id, method, params, .. } => {
            check_id(id, &value);
            assert_eq!(value["method"], **method);
            if let Some(known) = Method::from_name(method) {
                assert_eq!(known.name(), method);
            }
            kind_of(known_params(method, *params)) + 1
        }
        Incoming::Notification { method, .. } => {
            assert_eq!(value["method"], **method);
            2
        }
        Incoming::Response { id, result } => {
            check_id(id, &value);
            let result: Value = serde_json::from_str(result.get()).expect("a result is JSON");
            assert_eq!(value["result"], result);
            3
        }
        Incoming::Error { id, error } => {
            let again = encode::error(id, error);
            let Ok(Incoming::Error { id: id_again, error: error_again }) =
                Incoming::parse(&again, &limits)
            else {
                panic!("an error that was encoded is none");
            };
            assert_eq!((&id_again, encode::error(&id_again, &error_again)), (id, again.clone()));
            4
        }
    }
}

fn check_id(id: &RequestId, value: &Value) {
    assert_eq!(serde_json::to_value(id).expect("an id is JSON"), value["id"]);
}

/// The values of a message, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

/// Params that are taken mean the same when they are written again.
fn known_params(method: &str, params: Option<&RawValue>) -> Option<bool> {
    match method {
        "process/start" => round_trip::<process::ExecParams>(params),
        "process/read" => round_trip::<process::ReadParams>(params),
        "process/write" => round_trip::<process::WriteParams>(params),
        _ => None,
    }
}

fn round_trip<P>(params: Option<&RawValue>) -> Option<bool>
where
    P: Serialize + DeserializeOwned,
{
    let Ok(parsed) = parse_params::<P>(params) else { return Some(false) };
    let text = serde_json::to_string(&parsed).expect("params are JSON");
    let again: P = serde_json::from_str(&text).expect("what was written can be read");
    // A spelling of older policies is not written again, so texts are compared.
    assert_eq!(serde_json::to_string(&again).expect("params are JSON"), text);
    Some(true)
}
