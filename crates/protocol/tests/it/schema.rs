//! The schema in `docs/protocol` is that of the code, and messages are valid by it.

use std::path::Path;
use std::sync::LazyLock;

use codex_exec_server_protocol::{openrpc, schema};
use schemars::JsonSchema;
use serde_json::{Value, json};

static DOCUMENT: LazyLock<Value> = LazyLock::new(schema::document);

static MESSAGE: LazyLock<jsonschema::Validator> =
    LazyLock::new(|| jsonschema::validator_for(&DOCUMENT).expect("the document is a schema"));

/// Panics unless the schema permits this text as a `T`.
pub(crate) fn assert_valid<T: JsonSchema>(text: &str) {
    check(schema::subschema::<T>(), text);
}

/// Panics unless the schema of this name permits the text.
fn check(mut schema: Value, text: &str) {
    schema["$defs"] = DOCUMENT["$defs"].clone();
    let validator = jsonschema::validator_for(&schema).expect("a schema of the document");
    let value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    if let Err(error) = validator.validate(&value) {
        panic!("{error} at {}: {text}", error.instance_path());
    }
}

/// Panics unless the schema permits the whole message, and its result as one of this method.
pub(crate) fn assert_valid_message(text: &str, answers: Option<&str>) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    if let Err(error) = MESSAGE.validate(&value) {
        // The error of an `anyOf` names no alternative; that of the method is the one to look at.
        if let Some(row) = value["method"].as_str().and_then(row) {
            check(row["params"].clone(), &value["params"].to_string());
        }
        panic!("{error}: {text}");
    }
    if let (Some(method), Some(result)) = (answers, value.get("result")) {
        let row = row(method).unwrap_or_else(|| panic!("no row of {method}"));
        check(row["result"].clone(), &result.to_string());
    }
}

/// The row of this name in one of the tables.
fn row(name: &str) -> Option<&'static Value> {
    let tables = ["methods", "serverMethods", "notifications"];
    let mut rows = tables.iter().flat_map(|table| DOCUMENT[table].as_array().unwrap());
    rows.find(|row| row["name"] == name)
}

fn assert_fresh(name: &str, document: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol").join(name);
    let text = serde_json::to_string_pretty(document).unwrap() + "\n";
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(stored == text, "docs/protocol/{name} is stale: run `cargo xtask schema`");
}

#[test]
fn stored_schema_and_openrpc_document_are_fresh() {
    assert_fresh("schema.json", &DOCUMENT);
    assert_fresh("openrpc.json", &openrpc::document(&DOCUMENT));
}

/// A schema that permits everything would pass every other test.
#[test]
fn schema_refuses_what_the_code_refuses() {
    for message in [
        json!({"id": 1, "method": "process/start", "params": {"processId": "p", "argv": ["ls"]}}),
        json!({"id": 1, "method": "process/start"}),
        json!({"id": 1.5, "method": "environment/info"}),
        json!({"id": 1, "method": "process/signal", "params": {"processId": "p", "signal": "SIGINT"}}),
        json!({"id": 1, "method": "process/resize", "params": {"processId": "p", "rows": 65536, "cols": 1}}),
        json!({"id": 1, "method": "fs/readFile", "params": {"path": "relative"}}),
        json!({"id": 1, "method": "fs/readFile", "params": {"path": 5}}),
        json!({"id": 1, "method": "process/start", "params": {"processId": "p", "argv": ["ls"],
            "cwd": "/", "sandbox": {"type": "no-such-policy"}}}),
        json!({"id": 1, "method": "process/start", "params": {"processId": "p", "argv": ["ls"],
            "cwd": "/", "limits": {"wallMs": 1, "unknown": 2}}}),
        json!({"method": "process/exited", "params": {"processId": "p", "seq": 1}}),
        json!({"id": 1, "error": {"code": "x", "message": "m"}}),
        json!({"result": {}}),
        json!([]),
    ] {
        assert!(!MESSAGE.is_valid(&message), "{message}");
    }
}

/// Every definition is reachable, every reference leads to a definition, and every type and member is described.
#[test]
fn definitions_are_complete_and_described() {
    let definitions = DOCUMENT["$defs"].as_object().unwrap();
    let mut used = std::collections::BTreeSet::new();
    fn references(value: &Value, used: &mut std::collections::BTreeSet<String>) {
        match value {
            Value::Object(members) => {
                if let Some(path) = members.get("$ref").and_then(Value::as_str) {
                    used.insert(path.trim_start_matches("#/$defs/").to_owned());
                }
                members.values().for_each(|value| references(value, used));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, used)),
            _ => {}
        }
    }
    references(&DOCUMENT, &mut used);
    let names: std::collections::BTreeSet<String> = definitions.keys().cloned().collect();
    assert_eq!(used, names);
    for (name, definition) in definitions {
        assert!(definition["description"].is_string(), "{name} has no description");
        for (member, schema) in definition["properties"].as_object().into_iter().flatten() {
            assert!(schema["description"].is_string(), "{name}.{member} has no description");
            let text = schema["description"].as_str().unwrap();
            assert!(!text.contains("[`") && !text.contains("`None`"), "{name}.{member}: {text}");
        }
    }
}

#[test]
fn extensions_are_marked() {
    let extension = |name: &str| row(name).unwrap()["extension"].clone();
    for name in ["fs/search", "process/resize", "session/list", "fs/changed", "process/resized"] {
        assert_eq!(extension(name), true, "{name}");
    }
    for name in ["fs/close", "process/start", "process/output", "fs/watchMissing"] {
        assert_eq!(extension(name), false, "{name}");
    }
    let definitions = &DOCUMENT["$defs"];
    assert_eq!(definitions["ExecParams"]["properties"]["retain"]["x-extension"], true);
    assert_eq!(definitions["ExecParams"]["properties"]["argv"]["x-extension"], Value::Null);
    assert_eq!(definitions["FsGlobParams"]["x-extension"], true);
    assert_eq!(definitions["FsDone"]["x-extension"], Value::Null);
    assert_eq!(
        row("process/write").unwrap()["repeatable"],
        json!({"if": "writeId", "is": "present"})
    );
    assert_eq!(row("fs/open").unwrap()["repeatable"], json!({"if": "mode", "is": "read"}));
    assert_eq!(row("fs/remove").unwrap()["repeatable"], false);
    assert_eq!(row("fs/walk").unwrap()["repeatable"], true);
}
