//! Every example of `docs/protocol/files.md` is a message this implementation reads and writes.

use codex_exec_server_protocol::{Call, Encode, Notice, call, notice};
use serde_json::Value;

const DOCUMENT: &str = include_str!("../../../../../docs/protocol/files.md");

/// Examples of one document: fenced `json` blocks, one message a line; a line that starts with
/// `→` answers the request before it.
fn examples() -> Vec<(Option<String>, Value)> {
    let mut found = Vec::new();
    let mut method = None;
    let mut inside = false;
    for line in DOCUMENT.lines() {
        match line.trim() {
            "```json" => inside = true,
            "```" => inside = false,
            text if inside && !text.is_empty() => {
                let (answer, text) = match text.strip_prefix('→') {
                    Some(rest) => (true, rest),
                    None => (false, text),
                };
                let message: Value = serde_json::from_str(text).expect(text);
                if answer {
                    found.push((method.clone(), message));
                } else {
                    method = message["method"].as_str().map(str::to_owned);
                    found.push((None, message));
                }
            }
            _ => {}
        }
    }
    found
}

fn same<T: Encode + serde::de::DeserializeOwned>(value: &Value) {
    let read: T = serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{e}: {value}"));
    let mut bytes = Vec::new();
    read.encode_into(&mut bytes);
    let written: Value = serde_json::from_slice(&bytes).unwrap();
    // What is written may name defaults, but never drops or changes a member of the example.
    fn covers(written: &Value, example: &Value) -> bool {
        match (written, example) {
            (Value::Object(w), Value::Object(e)) => {
                e.iter().all(|(key, value)| w.get(key).is_some_and(|w| covers(w, value)))
            }
            (Value::Array(w), Value::Array(e)) => {
                w.len() == e.len() && w.iter().zip(e).all(|(w, e)| covers(w, e))
            }
            _ => written == example,
        }
    }
    assert!(covers(&written, value), "{value}\nis written as\n{written}");
}

macro_rules! by_name {
    ($name:expr, $value:expr, $part:ident; $($call:ident)*) => {
        match $name {
            $(name if name == <call::$call as Call>::METHOD.name() => {
                same::<<call::$call as Call>::$part>($value);
                true
            })*
            _ => false,
        }
    };
}

fn check(name: &str, value: &Value, is_answer: bool) -> bool {
    macro_rules! all {
        ($part:ident) => {
            by_name!(name, value, $part;
                FsReadFile FsOpen FsReadBlock FsWriteBlock FsClose FsWriteFile FsCreateDirectory
                FsGetMetadata FsCanonicalize FsReadDirectory FsWalk FsRemove FsCopy FsWatchMissing
                FsRename FsSymlink FsSetMode FsSearch FsCancelSearch FsGlob FsWatch FsUnwatch)
        };
    }
    if is_answer { all!(Response) } else { all!(Params) }
}

#[test]
fn every_example_is_a_message() {
    let examples = examples();
    let mut seen = std::collections::BTreeSet::new();
    for (answered, message) in &examples {
        match answered {
            Some(method) => {
                if let Some(error) = message.get("error") {
                    assert!(error["code"].is_i64() && error["message"].is_string());
                } else {
                    assert!(check(method, &message["result"], true), "{message}");
                }
            }
            None => {
                let method = message["method"].as_str().unwrap();
                let params = &message["params"];
                seen.insert(method.to_owned());
                if message.get("id").is_some() {
                    assert!(check(method, params, false), "{message}");
                } else {
                    match method {
                        name if name == notice::FsMissingChanged::NAME => {
                            same::<<notice::FsMissingChanged as Notice>::Params>(params);
                        }
                        name if name == notice::FsSearchMatches::NAME => {
                            same::<<notice::FsSearchMatches as Notice>::Params>(params);
                        }
                        name if name == notice::FsChanged::NAME => {
                            same::<<notice::FsChanged as Notice>::Params>(params);
                        }
                        other => panic!("an unknown notification {other}"),
                    }
                }
            }
        }
    }
    // And every message has an example.
    use codex_exec_server_protocol::Method;
    for method in
        Method::ALL.iter().map(|method| method.name()).filter(|name| name.starts_with("fs/"))
    {
        assert!(seen.contains(method), "{method} has no example");
    }
    for name in ["fs/missingChanged", "fs/search/matches", "fs/changed"] {
        assert!(seen.contains(name), "{name} has no example");
    }
}
