//! Watching for changes: `fs/watchMissing`, and the extensions `fs/watch` and `fs/unwatch`.

use serde::{Deserialize, Serialize};

use super::{FsDone, default_true, is_false, is_true, null_is_true};
use crate::{PathUri, SandboxContext};

/// Params of `fs/watchMissing`, which notifies once when a missing path appears or a present one changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWatchMissingParams {
    /// Chosen by the client, unique among the watches of the connection.
    pub watch_id: i64,
    /// Paths that do not exist yet.
    pub missing: Vec<PathUri>,
    /// A path that exists and is watched for changes.
    #[serde(default)]
    pub present: Option<PathUri>,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsWatchMissingParams {
    /// Watches the `missing` paths and, if given, the `present` one.
    pub fn new(watch_id: i64, missing: Vec<PathUri>, present: Option<PathUri>) -> Self {
        Self { watch_id, missing, present, sandbox: None }
    }
}

/// Result of `fs/watchMissing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWatchMissingResponse {
    /// False if the paths cannot be watched; no notification will come.
    pub watching: bool,
}

/// Params of the notification `fs/missingChanged`, the only one of its watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsMissingChangedNotification {
    /// The watch that fired, and has ended with this.
    pub watch_id: i64,
}

/// Params of the extension `fs/watch`, which notifies of changes of a file or a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWatchParams {
    /// Chosen by the client, unique among the watches of the connection.
    pub watch_id: i64,
    /// The file or directory to watch.
    pub path: PathUri,
    /// Watch everything below a directory, not only its own entries (default true).
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub recursive: bool,
    /// How long changes are collected before a notification, in milliseconds (default 100, at most 60,000).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub debounce_ms: Option<u32>,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsWatchParams {
    /// Watches `path` and everything below it.
    pub fn new(watch_id: i64, path: PathUri) -> Self {
        Self { watch_id, path, recursive: true, debounce_ms: None, sandbox: None }
    }
}

/// Result of `fs/watch`: changes made after it are reported.
pub type FsWatchResponse = FsDone;

/// Params of the extension `fs/unwatch`, which ends a watch. Ending an unknown watch succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsUnwatchParams {
    /// The watch to end.
    pub watch_id: i64,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsUnwatchParams {
    /// Ends the watch with this id.
    pub fn new(watch_id: i64) -> Self {
        Self { watch_id, sandbox: None }
    }
}

/// Result of `fs/unwatch`: no notification of the watch follows it.
pub type FsUnwatchResponse = FsDone;

/// What happened to a path since the last notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum FsChangeKind {
    /// It appeared, also by a rename.
    Created,
    /// Its content or its attributes changed.
    Modified,
    /// It is gone, also by a rename.
    Removed,
}

/// One changed path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsChange {
    /// The path that changed.
    pub path: PathUri,
    /// What happened to it.
    pub kind: FsChangeKind,
}

/// Params of the notification `fs/changed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsChangedNotification {
    /// The watch that reports.
    pub watch_id: i64,
    /// The paths that changed since the last notification.
    pub changes: Vec<FsChange>,
    /// Some changes were lost: read the whole tree again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overflow: bool,
    /// Why the watch ended by itself, if it did; this is its last notification.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

crate::encode::by_serde! { FsWatchMissingParams, FsWatchMissingResponse, FsMissingChangedNotification, FsWatchParams, FsUnwatchParams, FsChangedNotification }
