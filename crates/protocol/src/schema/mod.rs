//! The protocol as JSON Schema (feature `schema`): every type of the table of methods, and the table itself.
//!
//! Invariant: the schema describes what a reader of this version accepts, in the spellings that are documented.
//! A member is required if its absence is an error; whatever a writer of this version sends is valid.

mod by_hand;
mod table;

use schemars::generate::SchemaSettings;
use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

pub(crate) use by_hand::{FalseByDefault, ReportedAssurance, TrueByDefault, open_enum};

use crate::ErrorKind;
use crate::run_event::RunEvent;

/// The schema document: `$defs` of all types, the tables of methods, notifications and error kinds, and, as
/// the schema itself, every message.
pub fn document() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let methods = table::methods(&mut generator);
    let server_methods = table::server_methods(&mut generator);
    let notifications = table::notifications(&mut generator);
    let id = generator.subschema_for::<crate::RequestId>();
    let error = generator.subschema_for::<crate::RpcError>();
    let run_event = generator.subschema_for::<RunEvent>();
    generator.subschema_for::<ErrorKind>();
    generator.subschema_for::<crate::Trace>();
    let mut definitions = generator.take_definitions(false);
    for (name, definition) in &mut definitions {
        if let Ok(schema) = <&mut Schema>::try_from(definition) {
            RecursiveTransform(tidy).transform(schema);
            if table::is_extension_type(name, &methods, &notifications) {
                schema.insert("x-extension".to_owned(), json!(true));
            }
        }
    }
    let mut messages = Vec::new();
    for method in methods.iter().chain(&server_methods) {
        messages.push(message(method, Some(&id), &definitions));
    }
    for notification in &notifications {
        messages.push(message(notification, None, &definitions));
    }
    messages.push(json!({
        "title": "response", "type": "object", "required": ["id", "result"],
        "properties": {"id": id, "result": true},
    }));
    messages.push(json!({
        "title": "error response", "type": "object", "required": ["id", "error"],
        "properties": {"id": id, "error": error},
    }));
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:codex-exec-server:protocol",
        "title": "The exec-server protocol",
        "description": "Messages are JSON-RPC 2.0 without the member `jsonrpc`; a message that matches this \
            schema is one of them. `methods`, `serverMethods`, `notifications`, `errorKinds` and \
            `capabilities` are tables for generators. Members and types with `x-extension` are not part of \
            the published protocol. Readers ignore unknown members.",
        "anyOf": messages,
        "methods": methods,
        "serverMethods": server_methods,
        "notifications": notifications,
        "errorKinds": table::error_kinds(),
        "capabilities": table::capabilities(&definitions),
        "runEvent": run_event,
        "$defs": definitions,
    })
}

/// The schema of `T` alone; its references lead into the `$defs` of the [`document`].
pub fn subschema<T: JsonSchema>() -> Value {
    SchemaSettings::draft2020_12().into_generator().subschema_for::<T>().to_value()
}

/// A request or notification of this row.
fn message(row: &Value, id: Option<&Schema>, definitions: &Map<String, Value>) -> Value {
    let mut required = vec!["method"];
    let mut properties = Map::new();
    properties.insert("method".to_owned(), json!({"const": row["name"]}));
    if let Some(id) = id {
        required.push("id");
        properties.insert("id".to_owned(), json!(id));
        properties.insert("trace".to_owned(), json!({"$ref": "#/$defs/Trace"}));
    }
    let name = row["params"]["$ref"].as_str().and_then(|path| path.rsplit('/').next());
    let params = name.and_then(|name| definitions.get(name));
    let mut schema = row["params"].clone();
    if params.is_some_and(|params| params.get("required").is_some()) {
        required.push("params");
    } else {
        schema = json!({"anyOf": [schema, {"type": "null"}]});
    }
    properties.insert("params".to_owned(), schema);
    json!({
        "title": row["name"], "type": "object", "required": required, "properties": properties,
    })
}

/// Marks extensions, and removes what only readers of the Rust code need.
fn tidy(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else { return };
    if object.get("default").is_some_and(Value::is_null) {
        object.remove("default");
    }
    let optional_flags: Vec<String> = {
        let required =
            object.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
        let properties = object.get("properties").and_then(Value::as_object);
        let optional = properties.into_iter().flatten().filter(|(name, member)| {
            member["type"] == "boolean"
                && member.get("default").is_none()
                && !required.iter().any(|required| required == *name)
        });
        optional.map(|(name, _)| name.clone()).collect()
    };
    if let Some(properties) = object.get_mut("properties").and_then(Value::as_object_mut) {
        for name in optional_flags {
            properties[&name]["default"] = json!(false);
        }
    }
    let Some(Value::String(description)) = object.get("description") else { return };
    let plain = without_links(&description.replace('\n', " "));
    let extension = plain.starts_with("**extension**") || plain.starts_with("Extension:");
    object.insert("description".to_owned(), json!(plain));
    if extension {
        object.insert("x-extension".to_owned(), json!(true));
    }
}

/// The text of documentation without links to Rust items.
fn without_links(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("[`") {
        out.push_str(&rest[..start]);
        let linked = &rest[start + 1..];
        let Some(end) = linked.find("`]") else {
            rest = &rest[start..];
            break;
        };
        out.push_str(&linked[..=end]);
        rest = &linked[end + 2..];
        if let Some(target) = rest.strip_prefix('(').and_then(|target| target.find(')')) {
            rest = &rest[target + 2..];
        }
    }
    out + rest
}

/// A schema that is given by a JSON literal.
fn literal(value: Value) -> Schema {
    Schema::try_from(value).unwrap_or_default()
}

/// The reference to the definition of `T`.
fn reference<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}
