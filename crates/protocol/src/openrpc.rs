//! The schema document of the protocol as an OpenRPC document.
//!
//! Invariant: everything comes from the schema document, so the two cannot disagree.

use serde_json::{Map, Value, json};

/// The OpenRPC document of a schema document (`docs/protocol/schema.json`).
pub fn document(schema: &Value) -> Value {
    let rows = |table: &str| schema[table].as_array().cloned().unwrap_or_default();
    let definitions = &schema["$defs"];
    let mut methods = Vec::new();
    for row in rows("methods") {
        methods.push(method(&row, definitions, "client"));
    }
    for row in rows("serverMethods") {
        methods.push(method(&row, definitions, "server"));
    }
    for row in rows("notifications") {
        let from = row["from"].as_str().unwrap_or_default();
        methods.push(method(&row, definitions, from));
    }
    let errors: Map<String, Value> = rows("errorKinds")
        .iter()
        .filter_map(|row| {
            let (kind, code) = (row["kind"].as_str()?, row["codes"].get(0)?);
            let error = json!({"code": code, "message": row["summary"], "data": {"kind": kind}});
            Some((kind.to_owned(), error))
        })
        .collect();
    let mut document = json!({
        "openrpc": "1.3.2",
        "info": {
            "title": schema["title"],
            "version": env!("CARGO_PKG_VERSION"),
            "description": "JSON-RPC 2.0 without the member `jsonrpc`. `x-from` says which side sends a \
                message; a method without a result is a notification. Schemas are JSON Schema 2020-12.",
        },
        "methods": methods,
        "components": {"schemas": definitions, "errors": errors},
    });
    move_references(&mut document);
    document
}

fn method(row: &Value, definitions: &Value, from: &str) -> Value {
    let name_of = |side: &str| {
        row[side]["$ref"].as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default()
    };
    let params = &definitions[name_of("params")];
    let required = params["required"].as_array().cloned().unwrap_or_default();
    let properties = params["properties"].as_object().into_iter().flatten();
    let params = properties.map(|(name, schema)| {
        json!({"name": name, "required": required.iter().any(|r| r == name), "schema": schema})
    });
    // Required params come first, as the specification wants them.
    let (mut ordered, optional): (Vec<_>, Vec<_>) = params.partition(|p| p["required"] == true);
    ordered.extend(optional);
    let mut method = json!({
        "name": row["name"],
        "summary": row["summary"],
        "paramStructure": "by-name",
        "params": ordered,
        "x-from": from,
        "x-params": row["params"],
    });
    if row.get("result").is_some() {
        method["result"] = json!({"name": name_of("result"), "schema": row["result"]});
    }
    for (extra, name) in [
        ("extension", "x-extension"),
        ("family", "x-family"),
        ("order", "x-order"),
        ("touches", "x-touches"),
        ("repeatable", "x-repeatable"),
        ("capability", "x-capability"),
    ] {
        if let Some(value) = row.get(extra).filter(|value| !value.is_null()) {
            method[name] = value.clone();
        }
    }
    method
}

/// References lead to where OpenRPC keeps schemas.
fn move_references(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if let Some(Value::String(path)) = members.get_mut("$ref") {
                *path = path.replace("#/$defs/", "#/components/schemas/");
            }
            members.values_mut().for_each(move_references);
        }
        Value::Array(items) => items.iter_mut().for_each(move_references),
        _ => {}
    }
}
