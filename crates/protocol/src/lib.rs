//! The exec-server wire protocol: messages, the method table, error codes, path URIs, permissions.
//!
//! This crate has no socket, no clock and no process. It parses bytes into [`Incoming`] messages within
//! [`DecodeLimits`], params into their types, and encodes types to bytes ([`encode`]).
//!
//! It writes the newest revision, accepts every revision, and ignores unknown members.

mod base64_bytes;
pub mod discovery;
pub mod encode;
mod envelope;
pub mod environment;
pub mod environment_config;
pub mod error;
pub mod files;
pub mod http;
mod limits;
pub mod methods;
pub mod network;
pub mod openrpc;
mod path_uri;
mod permissions;
pub mod process;
pub mod resources;
pub mod run_event;
#[cfg(feature = "schema")]
pub mod schema;
pub mod session;
mod trace_parent;

pub use base64_bytes::Base64Bytes;
pub use encode::Encode;
pub use envelope::{Incoming, MalformedMessage, RequestId, Trace};
pub use error::{ErrorKind, RpcError};
pub use limits::DecodeLimits;
pub use methods::{
    Call, Effect, Family, FileCall, FileMethod, Method, Notification, Order, ServerCall, Touches,
    call, notification,
};
pub use path_uri::{PathUri, PathUriError};
pub use permissions::{
    AccessMode, Assurance, FileSystemEntry, FileSystemPath, FileSystemPolicy, LegacySandboxPolicy,
    MissingPathBehavior, NetworkPolicy, PermissionProfile, RestrictedFileSystem, SandboxContext,
    SandboxOverride, SpecialPath,
};
pub use trace_parent::{TraceParent, TraceParentError};

/// Parses the params of a request or notification; absent and `null` mean `{}`.
pub fn parse_params<P: serde::de::DeserializeOwned>(
    params: Option<&serde_json::value::RawValue>,
) -> Result<P, RpcError> {
    let text = params.map_or("{}", serde_json::value::RawValue::get);
    serde_json::from_str(text).map_err(|error| {
        RpcError::invalid_params(ErrorKind::InvalidParams, without_position(&error))
    })
}

/// The error without line and column, which mean nothing to a client.
fn without_position(error: &serde_json::Error) -> String {
    let mut message = error.to_string();
    if let Some(place) = message.rfind(" at line ").filter(|_| error.line() > 0) {
        message.truncate(place);
    }
    message
}
