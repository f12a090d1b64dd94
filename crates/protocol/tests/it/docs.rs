//! Every example of the documents is a message of the protocol.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use codex_exec_server_protocol::{
    Call, DecodeLimits, Family, Incoming, Method, Notice, call, notice,
};
use serde_json::value::RawValue;

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

macro_rules! by_method {
    ($method:expr, $part:ident, $raw:expr, $message:expr; $($call:ident)*) => {
        match $method {
            $(Method::$call => parse::<<call::$call as Call>::$part>($raw, $message),)*
        }
    };
}

macro_rules! requests {
    ($method:expr, $part:ident, $raw:expr, $message:expr) => {
        by_method!($method, $part, $raw, $message;
            Initialize ProcessStart ProcessRead ProcessWrite ProcessSignal ProcessTerminate
            ProcessResize ProcessList EnvironmentInfo EnvironmentStatus
            FsReadFile FsOpen FsReadBlock FsWriteBlock FsClose FsWriteFile FsCreateDirectory
            FsGetMetadata FsCanonicalize FsReadDirectory FsWalk FsRemove FsCopy FsWatchMissing
            FsRename FsSymlink FsSetMode FsSearch FsCancelSearch FsGlob FsWatch FsUnwatch
            HttpRequest)
    };
}

#[test]
fn every_example_is_a_message() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut documents = vec![root.join("README.md"), root.join("docs/PROTOCOL.md")];
    for entry in std::fs::read_dir(root.join("docs/protocol")).into_iter().flatten() {
        documents.push(entry.unwrap().path());
    }
    let (mut count, mut shown) = (0, HashSet::new());
    for document in documents {
        let text = std::fs::read_to_string(&document).unwrap();
        let mut asked = HashMap::new();
        for message in messages(&text) {
            count += 1;
            let incoming = Incoming::parse(message.as_bytes(), &DecodeLimits::default());
            match incoming.unwrap_or_else(|error| panic!("{error}: {message}")) {
                Incoming::Request { id, method, params, .. } => {
                    let method = Method::from_name(&method).unwrap_or_else(|| panic!("{message}"));
                    requests!(method, Params, params, &message);
                    shown.insert(method);
                    asked.insert(id, method);
                }
                Incoming::Response { id, result } => {
                    let method = asked[&id];
                    requests!(method, Response, Some(result), &message);
                }
                Incoming::Notification { method, params } => match method.as_str() {
                    notice::Initialized::NAME => {}
                    notice::ProcessOutput::NAME => {
                        parse::<<notice::ProcessOutput as Notice>::Params>(params, &message);
                    }
                    notice::ProcessExited::NAME => {
                        parse::<<notice::ProcessExited as Notice>::Params>(params, &message);
                    }
                    notice::ProcessClosed::NAME => {
                        parse::<<notice::ProcessClosed as Notice>::Params>(params, &message);
                    }
                    notice::FsMissingChanged::NAME => {
                        parse::<<notice::FsMissingChanged as Notice>::Params>(params, &message);
                    }
                    notice::FsSearchMatches::NAME => {
                        parse::<<notice::FsSearchMatches as Notice>::Params>(params, &message);
                    }
                    notice::FsChanged::NAME => {
                        parse::<<notice::FsChanged as Notice>::Params>(params, &message);
                    }
                    notice::HttpRequestBodyDelta::NAME => {
                        parse::<<notice::HttpRequestBodyDelta as Notice>::Params>(params, &message);
                    }
                    other => panic!("unknown notification {other}: {message}"),
                },
                Incoming::Error { .. } => {}
            }
        }
    }
    assert!(count > 30, "the documents have examples");
    for method in Method::ALL
        .iter()
        .filter(|method| matches!(method.family(), Family::Filesystem | Family::Http))
    {
        assert!(shown.contains(method), "{} has no example", method.name());
    }
}
