//! Directory entries: metadata, listing, creating, removing, copying, renaming.

use serde::{Deserialize, Serialize};

use super::{FsDone, default_true, is_false, is_true, null_is_default, null_is_true};
use crate::{PathUri, SandboxContext};

/// Params of `fs/createDirectory`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsCreateDirectoryParams {
    /// The directory to make.
    pub path: PathUri,
    /// Create missing parents too, and accept an existing directory (default true).
    #[serde(default = "default_true", deserialize_with = "null_is_true")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub recursive: bool,
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

impl FsCreateDirectoryParams {
    /// Makes `path` and its missing parents, following symbolic links.
    pub fn new(path: PathUri) -> Self {
        Self { path, recursive: true, follow_symlinks: true, sandbox: None }
    }
}

/// Result of `fs/createDirectory`.
pub type FsCreateDirectoryResponse = FsDone;

/// Params of `fs/getMetadata`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsGetMetadataParams {
    /// The path to describe.
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

impl FsGetMetadataParams {
    /// Describes `path`, following symbolic links.
    pub fn new(path: PathUri) -> Self {
        Self { path, follow_symlinks: true, sandbox: None }
    }
}

/// Result of `fs/getMetadata`: describes the target of a symbolic link, and whether the path is one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsGetMetadataResponse {
    /// The path is a directory, or a symbolic link to one.
    pub is_directory: bool,
    /// The path is a regular file, or a symbolic link to one.
    pub is_file: bool,
    /// The path itself is a symbolic link.
    #[serde(default)]
    pub is_symlink: bool,
    /// Size in bytes.
    #[serde(default)]
    pub size: u64,
    /// In milliseconds since 1970; 0 if unknown.
    #[serde(default)]
    pub created_at_ms: i64,
    /// In milliseconds since 1970; 0 if unknown.
    #[serde(default)]
    pub modified_at_ms: i64,
    /// Extension: permission bits (the low 12 bits of `st_mode`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Extension: the user id of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Extension: the group id of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Extension: the inode number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// Extension: number of hard links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nlink: Option<u64>,
    /// Extension: the device of the inode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
}

/// Params of `fs/canonicalize`, which resolves every symbolic link; the path must exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsCanonicalizeParams {
    /// The path to resolve.
    pub path: PathUri,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCanonicalizeParams {
    /// Resolves every symbolic link of `path`.
    pub fn new(path: PathUri) -> Self {
        Self { path, sandbox: None }
    }
}

/// Result of `fs/canonicalize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsCanonicalizeResponse {
    /// The path without symbolic links.
    pub path: PathUri,
}

/// Params of `fs/readDirectory`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadDirectoryParams {
    /// The directory to list.
    pub path: PathUri,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsReadDirectoryParams {
    /// Lists the entries of `path`.
    pub fn new(path: PathUri) -> Self {
        Self { path, sandbox: None }
    }
}

/// One directory entry; a symbolic link is described by its target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadDirectoryEntry {
    /// The name; bytes that are not UTF-8 are replaced by U+FFFD.
    pub file_name: String,
    /// The entry is a directory, or a symbolic link to one.
    pub is_directory: bool,
    /// The entry is a regular file, or a symbolic link to one.
    pub is_file: bool,
    /// Extension: the entry's full path, present if `file_name` is not exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_name_uri: Option<PathUri>,
}

/// Result of `fs/readDirectory`: at most 50,000 entries, sorted by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsReadDirectoryResponse {
    /// The entries, sorted by name.
    pub entries: Vec<FsReadDirectoryEntry>,
    /// Extension: the directory has more entries than the response.
    #[serde(default, skip_serializing_if = "is_false")]
    pub truncated: bool,
    /// Extension: the names of symbolic links without a target, which have no entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dead_links: Vec<String>,
}

/// Params of `fs/remove`, which removes a symbolic link, never its target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsRemoveParams {
    /// The path to remove.
    pub path: PathUri,
    /// Remove the content of a directory too (default true).
    #[serde(default = "default_true", deserialize_with = "null_is_true")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub recursive: bool,
    /// Treat a missing path as success (default true).
    #[serde(default = "default_true", deserialize_with = "null_is_true")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub force: bool,
    /// Whether symbolic links are allowed (default true); false refuses one in any component, also the last.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub follow_symlinks: bool,
    /// **extension**: refuse the root, a home directory, the server's working directory, mount points, and
    /// what contains one of them (default false).
    #[serde(default, skip_serializing_if = "is_false")]
    pub preserve: bool,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsRemoveParams {
    /// Removes `path` and everything below it; a missing path is success.
    pub fn new(path: PathUri) -> Self {
        Self {
            path,
            recursive: true,
            force: true,
            follow_symlinks: true,
            preserve: false,
            sandbox: None,
        }
    }
}

/// Result of `fs/remove`.
pub type FsRemoveResponse = FsDone;

/// Params of `fs/copy`, which copies a symbolic link as a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsCopyParams {
    /// The file, symbolic link or directory to copy.
    pub source_path: PathUri,
    /// Where the copy goes.
    pub destination_path: PathUri,
    /// Required to copy a directory.
    pub recursive: bool,
    /// Extension: copy one file to a temporary file in the destination's directory, fsync it, and rename it
    /// over the destination, which keeps its mode and owner. A new file gets the permission bits of the
    /// source, without set-id and sticky bits.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub atomic: bool,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCopyParams {
    /// Copies `source_path` to `destination_path` in place.
    pub fn new(source_path: PathUri, destination_path: PathUri, recursive: bool) -> Self {
        Self { source_path, destination_path, recursive, atomic: false, sandbox: None }
    }
}

/// Result of `fs/copy`.
pub type FsCopyResponse = FsDone;

/// Params of the extension `fs/rename`, which renames within one filesystem; a symbolic link itself moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsRenameParams {
    /// The current name.
    pub source_path: PathUri,
    /// The new name.
    pub destination_path: PathUri,
    /// Whether to replace an existing destination (default true).
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub overwrite: bool,
    /// Whether to follow symbolic links in the directories of both paths (default true); false refuses them.
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

impl FsRenameParams {
    /// Renames `source_path`, replacing an existing destination.
    pub fn new(source_path: PathUri, destination_path: PathUri) -> Self {
        Self {
            source_path,
            destination_path,
            overwrite: true,
            follow_symlinks: true,
            sandbox: None,
        }
    }
}

/// Result of `fs/rename`.
pub type FsRenameResponse = FsDone;

/// Params of the extension `fs/symlink`, which makes a symbolic link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSymlinkParams {
    /// The path of the new link.
    pub path: PathUri,
    /// Its target: a relative or absolute native path, stored unchanged, or a `file:` URI, which can hold
    /// any bytes.
    pub target: String,
    /// Whether to follow symbolic links in the directories of `path` (default true); false refuses them.
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

impl FsSymlinkParams {
    /// Makes a symbolic link at `path` that points to `target`.
    pub fn new(path: PathUri, target: impl Into<String>) -> Self {
        Self { path, target: target.into(), follow_symlinks: true, sandbox: None }
    }
}

/// Result of `fs/symlink`.
pub type FsSymlinkResponse = FsDone;

/// Params of the extension `fs/setMode`, which sets permission bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSetModeParams {
    /// The path whose permission bits change.
    pub path: PathUri,
    /// The permission bits, from 0 to 0o7777.
    pub mode: u32,
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

impl FsSetModeParams {
    /// Sets the permission bits of `path`, following symbolic links.
    pub fn new(path: PathUri, mode: u32) -> Self {
        Self { path, mode, follow_symlinks: true, sandbox: None }
    }
}

/// Result of `fs/setMode`.
pub type FsSetModeResponse = FsDone;

crate::encode::by_serde! { FsCreateDirectoryParams, FsGetMetadataParams, FsGetMetadataResponse, FsCanonicalizeParams, FsCanonicalizeResponse, FsReadDirectoryParams, FsRemoveParams, FsCopyParams, FsRenameParams, FsSymlinkParams, FsSetModeParams }
