//! Policies of sandboxes, in every spelling.

use codex_exec_server_protocol::SandboxContext;
use serde_json::Value;

use super::kind_of;

/// A policy means the same when it is written in the newest spelling, which is a fixed point.
pub(super) fn check(bytes: &[u8]) -> u64 {
    let Ok(context) = serde_json::from_slice::<SandboxContext>(bytes) else { return 0 };
    let written = serde_json::to_string(&context).expect("a policy is JSON");
    let again: SandboxContext =
        serde_json::from_str(&written).unwrap_or_else(|error| panic!("{error}: {written}"));
    assert_eq!(again.cwd, context.cwd, "{written}");
    // What a later version may add is kept, but its fractions only nearly.
    if !has_fraction(&serde_json::from_str(&written).expect("JSON")) {
        assert_eq!(again.permissions, context.permissions, "{written}");
        assert_eq!(serde_json::to_string(&again).expect("a policy is JSON"), written);
    }
    kind_of(&context.permissions) + context.workspace_roots.len().min(4) as u64
}

fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(list) => list.iter().any(has_fraction),
        Value::Object(map) => map.values().any(has_fraction),
        _ => false,
    }
}
