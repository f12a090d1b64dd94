//! Whole files: `fs/readFile` and `fs/writeFile`.

use serde::{Deserialize, Serialize};

use super::{FsDone, default_true, is_false, is_true, null_is_default, null_is_true};
use crate::{Base64Bytes, PathUri, SandboxContext};

/// Params of `fs/readFile`, which reads the whole content of a regular file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadFileParams {
    /// The file to read.
    pub path: PathUri,
    /// Whether to follow symbolic links (default true); false refuses one in any component.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub follow_symlinks: bool,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsReadFileParams {
    /// Reads `path`, following symbolic links.
    pub fn new(path: PathUri) -> Self {
        Self { path, follow_symlinks: true, sandbox: None }
    }
}

/// Result of `fs/readFile`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadFileResponse {
    /// The content of the file.
    #[serde(rename = "dataBase64")]
    pub data: Base64Bytes,
}

/// Params of `fs/writeFile`, which replaces the content of a file or creates it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWriteFileParams {
    /// The file to write.
    pub path: PathUri,
    /// The new content of the file.
    #[serde(rename = "dataBase64")]
    pub data: Base64Bytes,
    /// Whether to follow symbolic links (default true); false refuses one in any component.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub follow_symlinks: bool,
    /// Extension: write a temporary file in the same directory, fsync it, and rename it over the old one.
    /// Readers see the old content or the new, never a part; hard links to the old file keep it.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub atomic: bool,
    /// Extension: the permission bits of a file that this request creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsWriteFileParams {
    /// Writes `data` to `path` in place, following symbolic links.
    pub fn new(path: PathUri, data: impl Into<Base64Bytes>) -> Self {
        Self {
            path,
            data: data.into(),
            follow_symlinks: true,
            atomic: false,
            mode: None,
            sandbox: None,
        }
    }
}

/// Result of `fs/writeFile`.
pub type FsWriteFileResponse = FsDone;

crate::encode::by_serde! { FsReadFileParams }
