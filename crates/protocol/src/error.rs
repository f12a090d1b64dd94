//! The error object of the wire, and the only place where its codes are named.

use serde::{Deserialize, Serialize};

/// Malformed message, lifecycle violation, duplicate or unknown process, refused input.
pub const INVALID_REQUEST: i64 = -32600;
/// No such method.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// Params do not decode, or name something that cannot be had on this host.
pub const INVALID_PARAMS: i64 = -32602;
/// The host failed: a spawn, an I/O error.
pub const INTERNAL_ERROR: i64 = -32603;
/// A file, directory or file handle that is not there.
pub const NOT_FOUND: i64 = -32004;
/// A session that another live connection holds.
pub const SESSION_ATTACHED: i64 = -32010;

/// What an error response carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} (code {code})")]
pub struct RpcError {
    /// One of the constants of this module, or a peer's own.
    pub code: i64,
    /// For people; says what to do where something can be done.
    pub message: String,
}

impl RpcError {
    /// [`INVALID_REQUEST`].
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self { code: INVALID_REQUEST, message: message.into() }
    }

    /// [`METHOD_NOT_FOUND`].
    pub fn method_not_found(method: &str) -> Self {
        Self { code: METHOD_NOT_FOUND, message: format!("unknown method `{method}`") }
    }

    /// [`INVALID_PARAMS`].
    pub fn invalid_params(message: impl Into<String>) -> Self {
        Self { code: INVALID_PARAMS, message: message.into() }
    }

    /// [`INTERNAL_ERROR`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self { code: INTERNAL_ERROR, message: message.into() }
    }

    /// [`NOT_FOUND`].
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { code: NOT_FOUND, message: message.into() }
    }

    /// [`SESSION_ATTACHED`].
    pub fn session_attached(message: impl Into<String>) -> Self {
        Self { code: SESSION_ATTACHED, message: message.into() }
    }
}
