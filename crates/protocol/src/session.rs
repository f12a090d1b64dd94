//! The life of a connection: `initialize`, `initialized`, sessions.

use serde::{Deserialize, Serialize};

use crate::environment::EnvironmentInfo;

/// Params of `initialize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeParams {
    /// What the client calls itself, for logs.
    pub client_name: String,
    /// The session to attach to, instead of a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_session_id: Option<String>,
    /// **extension**: how long this session outlives its connection, in milliseconds; the server's
    /// own period where absent, and never longer than the server allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach_ttl_ms: Option<u64>,
}

/// Result of `initialize`. Older servers leave out either member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeResponse {
    /// Names the session in a later `resumeSessionId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// What `environment/info` would answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_info: Option<EnvironmentInfo>,
}

/// Params of the notification `initialized`: none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitializedParams {}

crate::encode::by_serde! { InitializeParams, InitializeResponse, InitializedParams }
