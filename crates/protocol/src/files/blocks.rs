//! Files in blocks: `fs/open`, `fs/readBlock`, `fs/writeBlock`, `fs/close`.

use serde::{Deserialize, Serialize};

use super::{FsDone, is_false, null_is_default};
use crate::{Base64Bytes, PathUri, SandboxContext};

/// What a handle is opened for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum FsOpenMode {
    /// Reading.
    #[default]
    Read,
    /// Writing; the file is created or truncated at once.
    Replace,
    /// Extension: writing to a temporary file, which replaces the old one when the handle is closed with
    /// `commit` and is removed otherwise. A block that fails removes it too: further blocks and the commit
    /// are refused.
    ReplaceAtomic,
}

impl FsOpenMode {
    /// Whether it opens for reading.
    pub fn is_read(&self) -> bool {
        *self == Self::Read
    }
}

/// Params of `fs/open`, which opens a handle on a regular file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsOpenParams {
    /// Chosen by the client, at most 32 bytes, unique among the open handles of the connection.
    pub handle_id: String,
    /// The file to open; a regular file, or a path at which `mode` creates one.
    pub path: PathUri,
    /// What the handle is for; reading where absent.
    #[serde(
        default,
        deserialize_with = "null_is_default",
        skip_serializing_if = "FsOpenMode::is_read"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<FsOpenMode>"))]
    pub mode: FsOpenMode,
    /// Extension: the permission bits of a file that this request or its commit creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<u32>,
    /// Extension: a persistent handle, which belongs to the session and survives a dropped connection.
    /// Requests on it may be repeated, this one included. Not with a sandbox.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub keep: bool,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsOpenParams {
    /// Opens `path` in `mode`, without extensions and without a sandbox.
    pub fn new(handle_id: impl Into<String>, path: PathUri, mode: FsOpenMode) -> Self {
        Self {
            handle_id: handle_id.into(),
            path,
            mode,
            permissions: None,
            keep: false,
            sandbox: None,
        }
    }
}

/// Result of `fs/open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsOpenResponse {
    /// The id that the client chose.
    pub handle_id: String,
}

/// Params of `fs/readBlock`, which reads bytes at any offset of a handle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadBlockParams {
    /// A handle that is open for reading.
    pub handle_id: String,
    /// Where to start, in bytes from the beginning of the file.
    pub offset: u64,
    /// How many bytes to read, from 1 to 1 MiB.
    pub len: u64,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsReadBlockParams {
    /// Reads `len` bytes at `offset`.
    pub fn new(handle_id: impl Into<String>, offset: u64, len: u64) -> Self {
        Self { handle_id: handle_id.into(), offset, len, sandbox: None }
    }
}

/// Result of `fs/readBlock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadBlockResponse {
    /// The bytes read; fewer than requested at the end of the file.
    pub chunk: Base64Bytes,
    /// The end of the file was reached: `chunk` is shorter than `len`.
    pub eof: bool,
}

/// Params of `fs/writeBlock`, which writes bytes at any offset of a handle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWriteBlockParams {
    /// A handle that is open for writing.
    pub handle_id: String,
    /// Where to write, in bytes from the beginning of the file.
    pub offset: u64,
    /// The bytes to write, at most 1 MiB.
    pub chunk: Base64Bytes,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsWriteBlockParams {
    /// Writes `chunk` at `offset`.
    pub fn new(handle_id: impl Into<String>, offset: u64, chunk: impl Into<Base64Bytes>) -> Self {
        Self { handle_id: handle_id.into(), offset, chunk: chunk.into(), sandbox: None }
    }
}

/// Result of `fs/writeBlock`.
pub type FsWriteBlockResponse = FsDone;

/// Params of `fs/close`. Closing an unknown handle succeeds, except with `commit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsCloseParams {
    /// The handle to close.
    pub handle_id: String,
    /// Extension: replace the file by that of a `replaceAtomic` handle.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub commit: bool,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCloseParams {
    /// Closes the handle without a commit.
    pub fn new(handle_id: impl Into<String>) -> Self {
        Self { handle_id: handle_id.into(), commit: false, sandbox: None }
    }
}

/// Result of `fs/close`.
pub type FsCloseResponse = FsDone;

crate::encode::by_serde! { FsOpenParams, FsOpenResponse, FsReadBlockParams, FsCloseParams }
