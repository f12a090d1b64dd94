//! Files in blocks: `fs/open`, `fs/readBlock`, `fs/writeBlock`, `fs/close`.

use serde::{Deserialize, Serialize};

use super::{FsDone, is_false, null_is_default};
use crate::{Base64Bytes, PathUri, SandboxContext};

/// What a handle is opened for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FsOpenMode {
    /// Reading.
    #[default]
    Read,
    /// Writing; the file is created or truncated at once.
    Replace,
    /// Extension: writing to a temporary file, which takes the place of the old one when the
    /// handle is closed with `commit`, and vanishes otherwise. The first block that is not written
    /// makes it vanish too: further blocks and the commit are refused.
    ReplaceAtomic,
}

impl FsOpenMode {
    /// Whether it opens for reading.
    pub fn is_read(&self) -> bool {
        *self == Self::Read
    }
}

/// `fs/open`: a handle of this connection on a regular file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    pub mode: FsOpenMode,
    /// Extension: permission bits, if the file is created by this request or its commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<u32>,
    /// Extension: the handle belongs to the session, and outlives the connection as long as the
    /// session does. Requests on it may be repeated, this one included. Not with a sandbox.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub keep: bool,
    /// What the request is held to; none is no restriction.
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

/// Answer of `fs/open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsOpenResponse {
    /// The id that the client chose.
    pub handle_id: String,
}

/// `fs/readBlock`: some bytes from any offset of a handle opened for reading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsReadBlockParams {
    /// A handle that is open for reading.
    pub handle_id: String,
    /// Where to start, in bytes from the beginning of the file.
    pub offset: u64,
    /// 1 … 1 MiB.
    pub len: u64,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsReadBlockParams {
    /// Reads `len` bytes at `offset`.
    pub fn new(handle_id: impl Into<String>, offset: u64, len: u64) -> Self {
        Self { handle_id: handle_id.into(), offset, len, sandbox: None }
    }
}

/// Answer of `fs/readBlock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsReadBlockResponse {
    /// The bytes read; fewer than requested at the end of the file.
    pub chunk: Base64Bytes,
    /// Fewer than `len` bytes were left.
    pub eof: bool,
}

/// `fs/writeBlock`: bytes for any offset of a handle opened for writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsWriteBlockParams {
    /// A handle that is open for writing.
    pub handle_id: String,
    /// Where to write, in bytes from the beginning of the file.
    pub offset: u64,
    /// At most 1 MiB, decoded.
    pub chunk: Base64Bytes,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsWriteBlockParams {
    /// Writes `chunk` at `offset`.
    pub fn new(handle_id: impl Into<String>, offset: u64, chunk: impl Into<Base64Bytes>) -> Self {
        Self { handle_id: handle_id.into(), offset, chunk: chunk.into(), sandbox: None }
    }
}

/// Answer of `fs/writeBlock`.
pub type FsWriteBlockResponse = FsDone;

/// `fs/close`: gives a handle back. An unknown one is fine, unless `commit` is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsCloseParams {
    /// The handle to close.
    pub handle_id: String,
    /// Extension: put the file of a `replaceAtomic` handle in its place.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub commit: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCloseParams {
    /// Closes the handle without a commit.
    pub fn new(handle_id: impl Into<String>) -> Self {
        Self { handle_id: handle_id.into(), commit: false, sandbox: None }
    }
}

/// Answer of `fs/close`.
pub type FsCloseResponse = FsDone;

crate::encode::by_serde! { FsOpenParams, FsOpenResponse, FsReadBlockParams, FsCloseParams }
