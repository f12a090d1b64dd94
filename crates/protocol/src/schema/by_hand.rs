//! Schemas of types whose JSON is written by hand, and of members that are read leniently.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::{literal, reference};
use crate::permissions::{
    Assurance, FileSystemPolicy, NetworkPolicy, PermissionProfile, SandboxContext, SandboxOverride,
    SpecialPath,
};
use crate::{Base64Bytes, ErrorKind, PathUri, RequestId, RpcError, Trace};

/// Implements [`JsonSchema`] by an expression.
macro_rules! by_hand {
    ($($type:ident, |$generator:ident| $schema:expr;)*) => {$(
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema($generator: &mut SchemaGenerator) -> Schema {
                literal($schema)
            }
        }
    )*};
}

/// A boolean that is true if it is absent or null.
pub(crate) struct TrueByDefault;

/// A boolean that is false if it is absent or null.
pub(crate) struct FalseByDefault;

macro_rules! flag {
    ($($type:ident $default:literal;)*) => {$(
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": ["boolean", "null"], "default": $default})
            }
        }
    )*};
}

flag! {
    TrueByDefault true;
    FalseByDefault false;
}

/// The level of assurance in a response, which may be one that this version does not know.
pub(crate) struct ReportedAssurance;

/// The older and shorter spellings of a policy.
struct LegacySandboxPolicy;

/// `error.data`.
struct ErrorData;

by_hand! {
    Base64Bytes, |_generator| json!({
        "description": "Bytes, as base64 text (standard alphabet, padded).",
        "type": "string",
        "contentEncoding": "base64",
    });
    PathUri, |_generator| json!({
        "description": "An absolute path of the server's machine as a `file:` URI, such as \
            `file:///srv/a%20b`. Bytes that are not UTF-8 are percent-encoded. A reader accepts a native \
            absolute path too; a writer sends a URI.",
        "type": "string",
        "pattern": "^(/|file:/)",
    });
    RequestId, |_generator| json!({
        "description": "The id of a request; its response repeats it unchanged. -1 answers a message whose \
            own id could not be read.",
        "anyOf": [{"type": "integer", "format": "int64"}, {"type": "string"}],
    });
    Trace, |_generator| json!({
        "description": "W3C trace context of a request.",
        "type": "object",
        "properties": {
            "traceparent": {"type": ["string", "null"], "description": "The `traceparent` header's value."},
            "tracestate": {"type": ["string", "null"], "description": "The `tracestate` header's value."},
        },
    });
    ErrorKind, |_generator| json!({
        "description": "What went wrong, for programs. Kinds without codes are never sent: a client uses \
            them for failures on its own side. `errorKinds` has the codes.",
        "type": "string",
        "enum": ErrorKind::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
    });
    ErrorData, |generator| json!({
        "description": "What a program needs to know about an error.",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {
            "description": "The kind; one that is not listed comes from a newer server.",
            "anyOf": [reference::<ErrorKind>(generator), {"type": "string"}],
        }},
    });
    RpcError, |generator| json!({
        "description": "The error object of a response.",
        "type": "object",
        "required": ["code", "message"],
        "properties": {
            "code": {"type": "integer", "format": "int64", "description": "The JSON-RPC code."},
            "message": {
                "type": "string",
                "description": "The message for people; it says what to do if something can be done.",
            },
            "data": {
                "description": "Absent from servers without kinds.",
                "anyOf": [reference::<ErrorData>(generator), {"type": "null"}],
            },
        },
    });
    ReportedAssurance, |generator| json!({
        "description": "Which kernel mechanisms enforce a sandbox; one that is not listed comes from a newer \
            server.",
        "anyOf": [reference::<Assurance>(generator), {"type": "string"}],
    });
    SpecialPath, |_generator| json!({
        "description": "A path with a special meaning, resolved where it is enforced. A kind that is not \
            listed is preserved, and grants nothing.",
        "anyOf": [
            {
                "type": "object",
                "required": ["kind"],
                "properties": {
                    "kind": {"anyOf": [
                        {"enum": ["root", "minimal", "project_roots", "tmpdir", "slash_tmp"]},
                        {"type": "string"},
                    ]},
                    "subpath": {
                        "type": ["string", "null"],
                        "description": "With `project_roots`: a path below each workspace root.",
                    },
                },
            },
            {"type": "string", "description": "The kind alone; read, never written."},
        ],
    });
    LegacySandboxPolicy, |generator| json!({
        "description": "The older and shorter spellings of a policy: read, never written. Its project root is \
            `cwd`, or the working directory of the process.",
        "anyOf": [
            {"enum": [
                "read-only", "workspace-write", "danger-full-access", "external-sandbox", "disabled",
                "external",
            ]},
            {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"enum": [
                        "read-only", "workspace-write", "danger-full-access", "external-sandbox",
                    ]},
                    "network_access": {
                        "description": "Whether the network can be reached; not if absent.",
                        "anyOf": [
                            {"type": ["boolean", "null"]}, reference::<NetworkPolicy>(generator),
                        ],
                    },
                    "writable_roots": {
                        "type": ["array", "null"],
                        "items": reference::<PathUri>(generator),
                        "description": "With `workspace-write`: writable besides the working directory.",
                    },
                    "exclude_tmpdir_env_var": {
                        "type": ["boolean", "null"],
                        "description": "With `workspace-write`: `$TMPDIR` is not writable.",
                    },
                    "exclude_slash_tmp": {
                        "type": ["boolean", "null"],
                        "description": "With `workspace-write`: `/tmp` is not writable.",
                    },
                },
            },
        ],
    });
    PermissionProfile, |generator| json!({
        "description": "What a command or a filesystem request may access.",
        "anyOf": [
            {
                "title": "managed",
                "description": "The server enforces file system and network.",
                "type": "object",
                "required": ["type", "file_system"],
                "properties": {
                    "type": {"const": "managed"},
                    "file_system": reference::<FileSystemPolicy>(generator),
                    "network": nullable(&reference::<NetworkPolicy>(generator)),
                },
            },
            {
                "title": "disabled",
                "description": "No sandbox.",
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"const": "disabled"}},
            },
            {
                "title": "external",
                "description": "An outer sandbox isolates the file system: full disk access, network as given.",
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"const": "external"},
                    "network": nullable(&reference::<NetworkPolicy>(generator)),
                },
            },
            reference::<LegacySandboxPolicy>(generator),
        ],
    });
    SandboxContext, |generator| json!({
        "description": "The sandbox policy of a `process/start` or filesystem request.",
        "anyOf": [
            {
                "title": "context",
                "type": "object",
                "required": ["permissions"],
                "properties": {
                    "permissions": reference::<PermissionProfile>(generator),
                    "cwd": nullable(&reference::<PathUri>(generator)),
                    "workspaceRoots": {
                        "type": ["array", "null"],
                        "items": reference::<PathUri>(generator),
                        "description": "The directories that `project_roots` means; empty grants nothing.",
                    },
                    "windowsSandboxLevel": {
                        "type": ["string", "null"],
                        "description": "For Windows servers; preserved, and ignored elsewhere.",
                    },
                    "windowsSandboxPrivateDesktop": {
                        "type": ["boolean", "null"],
                        "description": "For Windows servers; preserved, and ignored elsewhere.",
                    },
                    "windowsSandboxProxySettingsMode": {
                        "type": ["string", "null"],
                        "description": "For Windows servers; preserved, and ignored elsewhere.",
                    },
                    "useLegacyLandlock": {
                        "type": ["boolean", "null"],
                        "description": "How an older server should enforce this; preserved and ignored.",
                    },
                    "assurance": {
                        "anyOf": [reference::<Assurance>(generator), {"type": "null"}],
                        "description": "**extension**: the least assurance to accept; the server's setting \
                            if absent. The request is refused if this machine has less.",
                    },
                    "sandboxOverride": reference::<SandboxOverride>(generator),
                },
            },
            reference::<PermissionProfile>(generator),
        ],
    });
}

fn nullable(schema: &Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

/// Makes the variant `other` of an enum stand for every text that is not listed.
pub(crate) fn open_enum(schema: &mut Schema) {
    let Some(Value::Array(mut variants)) = schema.remove("oneOf") else { return };
    for variant in &mut variants {
        if variant["const"] == "other" {
            *variant = json!({"type": "string", "description": "A value of a newer server."});
        }
    }
    schema.insert("anyOf".to_owned(), Value::Array(variants));
}
