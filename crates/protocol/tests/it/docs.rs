//! Every example of the documents is a message of the protocol.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use codex_exec_server_protocol::network::PolicyRequest;
use codex_exec_server_protocol::{
    Call, DecodeLimits, ErrorKind, Family, FileMethod, Incoming, Method, Notification, ServerCall,
    Touches, call, file_methods, notification, notification_methods, request_methods,
};
use serde_json::value::RawValue;

use crate::schema::assert_valid_message;

/// The messages of a document: lines of its `json` blocks, and those after an arrow.
fn messages(document: &str) -> Vec<String> {
    let mut in_json = false;
    let mut found = Vec::new();
    for line in document.lines() {
        if let Some(fence) = line.strip_prefix("```") {
            in_json = fence == "json";
        } else if in_json {
            found.push(line.to_owned());
        } else if let Some(message) = line.strip_prefix("→ ").or(line.strip_prefix("← ")) {
            found.push(message.to_owned());
        }
    }
    found
}

fn parse<T: serde::de::DeserializeOwned>(raw: Option<&RawValue>, message: &str) {
    let text = raw.map_or("{}", RawValue::get);
    if let Err(error) = serde_json::from_str::<T>(text) {
        panic!("{error}: {message}");
    }
}

/// Which half of a call a message is.
#[derive(Clone, Copy)]
enum Half {
    Params,
    Response,
}

fn parse_call<C: Call>(half: Half, raw: Option<&RawValue>, message: &str) {
    match half {
        Half::Params => parse::<C::Params>(raw, message),
        Half::Response => parse::<C::Response>(raw, message),
    }
}

macro_rules! requests {
    ($(#[$doc:meta] $call:ident $function:ident $kind:ident $name:literal
        $params:ty => $response:ty, $family:ident, $capability:ident, $effect:expr;)*) => {
        fn parse_half(method: Method, half: Half, raw: Option<&RawValue>, message: &str) {
            match method {
                $(Method::$call => parse_call::<call::$call>(half, raw, message),)*
                Method::File(method) => parse_file_half(method, half, raw, message),
            }
        }
    };
}

macro_rules! files {
    ($(#[$doc:meta] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        fn parse_file_half(method: FileMethod, half: Half, raw: Option<&RawValue>, message: &str) {
            match method {
                $(FileMethod::$operation => parse_call::<call::$call>(half, raw, message),)*
            }
        }
    };
}

macro_rules! notifications {
    ($(#[$doc:meta] $notification:ident $name:literal $params:ty;)*) => {
        fn parse_notification(method: &str, raw: Option<&RawValue>, message: &str) {
            match method {
                $($name => parse::<<notification::$notification as Notification>::Params>(raw, message),)*
                other => panic!("unknown notification {other}: {message}"),
            }
        }
    };
}

request_methods!(requests);
file_methods!(files);
notification_methods!(notifications);

/// The table of kinds says what the code says, in the same order.
#[test]
fn documented_error_table_lists_every_kind_and_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/protocol/errors.md")).unwrap();
    let rows: Vec<(String, Vec<i64>)> = text
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
            let kind = cells.next()?.trim_end_matches('`').to_owned();
            let codes = cells.next()?.split(", ").filter(|code| !code.is_empty());
            let codes = codes.map(|code| code.parse().unwrap()).collect();
            assert!(cells.next().is_some_and(|when| !when.is_empty()), "{kind} says when");
            Some((kind, codes))
        })
        .collect();
    let kinds: Vec<(String, Vec<i64>)> =
        ErrorKind::ALL.iter().map(|kind| (kind.name().to_owned(), kind.codes().to_vec())).collect();
    assert_eq!(rows, kinds);
}

#[test]
fn every_documented_example_parses() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut documents = vec![root.join("README.md"), root.join("docs/PROTOCOL.md")];
    for entry in std::fs::read_dir(root.join("docs/protocol")).into_iter().flatten() {
        documents.push(entry.unwrap().path());
    }
    documents.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    let (mut count, mut shown) = (0, HashSet::new());
    for document in documents {
        let text = std::fs::read_to_string(&document).unwrap();
        let mut asked = HashMap::new();
        for message in messages(&text) {
            count += 1;
            let incoming = Incoming::parse(message.as_bytes(), &DecodeLimits::default());
            match incoming.unwrap_or_else(|error| panic!("{error}: {message}")) {
                // The one request of the server to the client.
                Incoming::Request { id, method, params, .. } if method == PolicyRequest::NAME => {
                    parse::<<PolicyRequest as ServerCall>::Params>(params, &message);
                    assert_valid_message(&message, None);
                    asked.remove(&id);
                }
                Incoming::Request { id, method, params, .. } => {
                    let method = Method::from_name(&method).unwrap_or_else(|| panic!("{message}"));
                    parse_half(method, Half::Params, params, &message);
                    assert_valid_message(&message, None);
                    shown.insert(method);
                    asked.insert(id, method);
                }
                Incoming::Response { id, result } => match asked.get(&id) {
                    Some(method) => {
                        parse_half(*method, Half::Response, Some(result), &message);
                        assert_valid_message(&message, Some(method.name()));
                    }
                    None => {
                        parse::<<PolicyRequest as ServerCall>::Response>(Some(result), &message);
                        assert_valid_message(&message, Some(PolicyRequest::NAME));
                    }
                },
                Incoming::Notification { method, params } => {
                    parse_notification(&method, params, &message);
                    assert_valid_message(&message, None);
                }
                Incoming::Error { .. } => assert_valid_message(&message, None),
            }
        }
    }
    assert!(count > 30, "the documents have examples");
    let needs_example =
        |method: &Method| !matches!(method.family(), Family::Session | Family::Exec);
    for method in Method::all().filter(needs_example) {
        assert!(shown.contains(&method), "{} has no example", method.name());
    }
}

/// The table of methods, as it stands in `docs/PROTOCOL.md`.
fn method_table() -> String {
    let mut table = String::from(
        "| method | what it does | order | a sandbox restricts | capability |\n| --- | --- | --- | --- | --- |\n",
    );
    for method in Method::all() {
        let (order, restricts) = match method {
            Method::File(method) => {
                let restricts = match method.touches() {
                    Touches::Paths => "its paths",
                    Touches::Handle => "the `fs/open` of its handle",
                    Touches::Nothing => "",
                };
                (format!("{:?}", method.order()).to_lowercase(), restricts)
            }
            Method::ProcessStart => (String::new(), "the program"),
            Method::CapabilityRootsDiscover | Method::CapabilitiesDiscover => {
                (String::new(), "its paths")
            }
            _ => (String::new(), ""),
        };
        let capability = method.capability_name().map_or(String::new(), |name| {
            let mut words = name.split('_');
            let first = words.next().unwrap_or_default().to_owned();
            let capitalised = |word: &str| word[..1].to_uppercase() + &word[1..];
            format!("`{}`", words.map(capitalised).fold(first, |name, word| name + &word))
        });
        let (name, summary) = (method.name(), method.summary().trim_end_matches('.'));
        table += &format!("| `{name}` | {summary} | {order} | {restricts} | {capability} |\n");
    }
    table
}

#[test]
fn documented_method_table_matches_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/PROTOCOL.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("## Methods\n\n").expect("a section of methods");
    let start = rest.find("| method |").expect("a table");
    let (introduction, rest) = rest.split_at(start);
    let end = rest.find("\n\n").expect("something after the table") + 1;
    let table = method_table();
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        let rest = &rest[end..];
        let text = format!("{before}## Methods\n\n{introduction}{table}{rest}");
        std::fs::write(&path, text).unwrap();
        return;
    }
    assert_eq!(&rest[..end], table, "run the test with UPDATE_SNAPSHOTS=1");
}
