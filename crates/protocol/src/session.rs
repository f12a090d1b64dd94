//! Sessions: `initialize` and `initialized`.

use serde::{Deserialize, Serialize};

use crate::environment::EnvironmentInfo;

/// Params of `initialize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeParams {
    /// The client's name, for logs.
    pub client_name: String,
    /// The session to resume, instead of a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_session_id: Option<String>,
    /// **extension**: how long the session outlives its connection, in milliseconds; the server's default
    /// if absent, and never more than the server's limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detach_ttl_ms: Option<u64>,
}

/// Result of `initialize`. Older servers leave out either member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitializeResponse {
    /// The session's id, for a later `resumeSessionId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// The result of `environment/info`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_info: Option<EnvironmentInfo>,
}

/// Params of the notification `initialized`: none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitializedParams {}

crate::encode::by_serde! { InitializeParams, InitializeResponse, InitializedParams }
