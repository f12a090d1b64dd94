//! The tables of the schema document, from the rows of the methods.

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::reference;
use crate::discovery::*;
use crate::environment::*;
use crate::environment_config::*;
use crate::files::*;
use crate::http::*;
use crate::network::*;
use crate::process::*;
use crate::session::*;
use crate::{ErrorKind, FileMethod, Method, ServerCall};

macro_rules! requests {
    ($(#[$doc:meta] $call:ident $function:ident $kind:ident $name:literal
        $params:ty => $response:ty, $family:ident, $capability:ident, $effect:expr;)*) => {
        fn add_requests(generator: &mut SchemaGenerator, out: &mut Vec<Value>) {
            $(
                let params = reference::<$params>(generator);
                let result = reference::<$response>(generator);
                out.push(row(Method::$call, &params, &result, stringify!($effect)));
            )*
        }
    };
}

macro_rules! files {
    ($(#[$doc:meta] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        fn add_files(generator: &mut SchemaGenerator, out: &mut Vec<Value>) {
            $(
                let params = reference::<$params>(generator);
                let result = reference::<$response>(generator);
                let method = Method::File(FileMethod::$operation);
                out.push(row(method, &params, &result, stringify!($effect)));
            )*
        }
    };
}

macro_rules! notification_rows {
    ($(#[doc = $doc:literal] $notification:ident $name:literal $params:ty;)*) => {
        /// The notifications of both sides.
        pub(super) fn notifications(generator: &mut SchemaGenerator) -> Vec<Value> {
            vec![$({
                let summary = $doc.trim_ascii();
                json!({
                    "name": $name,
                    "summary": without_mark(summary),
                    "params": reference::<$params>(generator),
                    "from": if $name == "initialized" { "client" } else { "server" },
                    "extension": summary.contains(MARK),
                })
            },)*]
        }
    };
}

crate::request_methods!(requests);
crate::file_methods!(files);
crate::notification_methods!(notification_rows);

/// How the summary of an extension ends.
const MARK: &str = " (extension)";

fn without_mark(summary: &str) -> String {
    summary.replace(MARK, "")
}

/// The requests of the client.
pub(super) fn methods(generator: &mut SchemaGenerator) -> Vec<Value> {
    let mut out = Vec::new();
    add_requests(generator, &mut out);
    add_files(generator, &mut out);
    out
}

fn row(method: Method, params: &Value, result: &Value, effect: &str) -> Value {
    let lower = |word: String| word.to_lowercase();
    let (order, touches) = match method {
        Method::File(file) => (
            json!(lower(format!("{:?}", file.order()))),
            json!(lower(format!("{:?}", file.touches()))),
        ),
        _ => (Value::Null, Value::Null),
    };
    let capability = method.capability_name();
    json!({
        "name": method.name(),
        "summary": without_mark(method.summary()),
        "params": params,
        "result": result,
        "family": method.family().as_str(),
        "order": order,
        "touches": touches,
        "repeatable": repeatable(effect),
        "capability": capability.map(camel_case),
        // A summary with the mark and without a capability has an extension among its members only.
        "extension": capability.is_some() && method.summary().contains(MARK),
    })
}

/// Whether a request may be sent again if its response is lost: always, never, or if a member is as described.
fn repeatable(effect: &str) -> Value {
    let effect = effect.split_whitespace().collect::<Vec<_>>().join(" ");
    let (binding, body) = effect.trim_start_matches('|').split_once('|').unwrap_or_default();
    let body = body.trim();
    if let Some(rest) = body.strip_prefix("if ") {
        let (condition, _) = rest.split_once(" {").unwrap_or_default();
        let member = condition.strip_prefix(&format!("{}.", binding.trim())).unwrap_or_default();
        let (member, state) = if let Some(member) = member.strip_suffix(".is_some()") {
            (member, "present")
        } else if let Some(member) = member.strip_suffix(".is_read()") {
            (member, "read")
        } else {
            (member, "true")
        };
        assert!(
            !member.is_empty() && member.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "cannot describe the effect `{effect}`: add its form here"
        );
        return json!({"if": camel_case(member), "is": state});
    }
    match body {
        "Reads" | "Repeatable" => json!(true),
        "Once" => json!(false),
        _ => panic!("cannot describe the effect `{effect}`: add its form here"),
    }
}

/// The requests of the server.
pub(super) fn server_methods(generator: &mut SchemaGenerator) -> Vec<Value> {
    vec![json!({
        "name": PolicyRequest::NAME,
        "summary": "Asks the client about a host that the rules leave undecided.",
        "params": reference::<NetworkPolicyRequestParams>(generator),
        "result": reference::<NetworkPolicyResponse>(generator),
        "extension": false,
    })]
}

/// The kinds of errors with their codes; without codes, those that a client uses for itself.
pub(super) fn error_kinds() -> Vec<Value> {
    let row = |kind: &ErrorKind| json!({"kind": kind.name(), "summary": kind.summary(), "codes": kind.codes()});
    ErrorKind::ALL.iter().map(row).collect()
}

/// The capabilities, each with what it announces.
pub(super) fn capabilities(definitions: &Map<String, Value>) -> Vec<Value> {
    let properties = &definitions["Capabilities"]["properties"];
    let row = |(name, _): (&'static str, bool)| {
        let name = camel_case(name);
        let member = &properties[&name];
        let summary = member["description"].as_str().unwrap_or_default();
        let extension = member["x-extension"] == true;
        json!({
            "name": name,
            "summary": summary.trim_start_matches("**extension**: "),
            "extension": extension,
        })
    };
    Capabilities::default().list().into_iter().map(row).collect()
}

/// Whether a type belongs to methods and notifications that are extensions, and to no other.
pub(super) fn is_extension_type(name: &str, methods: &[Value], notifications: &[Value]) -> bool {
    let path = format!("#/$defs/{name}");
    let mut users = methods
        .iter()
        .chain(notifications)
        .filter(|row| row["params"]["$ref"] == path || row["result"]["$ref"] == path)
        .peekable();
    users.peek().is_some() && users.all(|row| row["extension"] == true)
}

fn camel_case(snake: &str) -> String {
    let mut words = snake.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| {
        let (head, tail) = word.split_at(word.len().min(1));
        name + &head.to_uppercase() + tail
    })
}
