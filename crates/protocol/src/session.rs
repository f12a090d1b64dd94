//! Sessions: `initialize` and `initialized`.

use serde::{Deserialize, Serialize};

use crate::environment::EnvironmentInfo;
use crate::process::{ProcessId, ProcessInfo};

/// Params of `initialize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// **extension**: how the client takes part in the session; as its holder if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachParams>,
    /// **extension**: the name of a new session, for people, as `session/list` returns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_name: Option<String>,
}

/// How a client takes part in a session (**extension**).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct AttachParams {
    /// What it may do.
    pub role: Role,
    /// The processes whose events a guest receives; the holder receives all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<ProcessId>,
    /// Whether all other connections of the session are detached from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub take: bool,
}

/// What a connection may do in its session (**extension**).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Everything. Processes wait for it and ask it; a session has at most one.
    #[default]
    Holder,
    /// Everything, as a guest beside others.
    Control,
    /// Reading output, screens and lists, as a guest beside others.
    View,
}

/// Params of the notification `session/detached` (**extension**): another client took the session, and the
/// server closes the connection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionDetachedNotification {}

/// Params of `session/list` (**extension**): none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionListParams {}

/// Result of `session/list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionListResponse {
    /// The sessions of this principal that have processes, oldest first.
    pub sessions: Vec<SessionInfo>,
}

/// One session of `session/list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SessionInfo {
    /// Its id, for `resumeSessionId`.
    pub session_id: String,
    /// Its name, if it was given one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_name: Option<String>,
    /// How many connections it has.
    pub connections: u32,
    /// Its processes, oldest first.
    pub processes: Vec<ProcessInfo>,
}

/// Result of `initialize`. Older servers leave out either member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct InitializeResponse {
    /// The session's id, for a later `resumeSessionId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// The result of `environment/info`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_info: Option<EnvironmentInfo>,
    /// **extension**: the role of this connection; absent from a server that has no roles, where every client
    /// is a holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
}

/// Params of the notification `initialized`: none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct InitializedParams {}

crate::encode::by_serde! { InitializeParams, InitializeResponse, InitializedParams, SessionDetachedNotification, SessionListParams, SessionListResponse }
