//! Names in the tree: metadata, listing, making, removing, copying, renaming.

use serde::{Deserialize, Serialize};

use super::{FsDone, default_true, is_false, is_true, null_is_default, null_is_true};
use crate::{PathUri, SandboxContext};

/// `fs/createDirectory`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsCreateDirectoryParams {
    /// The directory to make.
    pub path: PathUri,
    /// Make missing parents too, and take an existing directory as success.
    #[serde(default = "default_true", deserialize_with = "null_is_true")]
    pub recursive: bool,
    /// False refuses a symbolic link in any component.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub follow_symlinks: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCreateDirectoryParams {
    /// Makes `path` and its missing parents, following symbolic links.
    pub fn new(path: PathUri) -> Self {
        Self { path, recursive: true, follow_symlinks: true, sandbox: None }
    }
}

/// Answer of `fs/createDirectory`.
pub type FsCreateDirectoryResponse = FsDone;

/// `fs/getMetadata`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsGetMetadataParams {
    /// The path to describe.
    pub path: PathUri,
    /// False refuses a symbolic link in any component.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub follow_symlinks: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsGetMetadataParams {
    /// Describes `path`, following symbolic links.
    pub fn new(path: PathUri) -> Self {
        Self { path, follow_symlinks: true, sandbox: None }
    }
}

/// Answer of `fs/getMetadata`: the file a link leads to, and whether the path itself is a link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Milliseconds since the epoch, 0 if unknown.
    #[serde(default)]
    pub created_at_ms: i64,
    /// Milliseconds since the epoch, 0 if unknown.
    #[serde(default)]
    pub modified_at_ms: i64,
    /// Extension: permission bits (the low 12 bits of `st_mode`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// Extension: number of hard links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nlink: Option<u64>,
    /// Extension: the device that `inode` is a number of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
}

/// `fs/canonicalize`: the path with every link resolved; it has to exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsCanonicalizeParams {
    /// The path to resolve.
    pub path: PathUri,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCanonicalizeParams {
    /// Resolves every symbolic link of `path`.
    pub fn new(path: PathUri) -> Self {
        Self { path, sandbox: None }
    }
}

/// Answer of `fs/canonicalize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsCanonicalizeResponse {
    /// The path without symbolic links.
    pub path: PathUri,
}

/// `fs/readDirectory`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsReadDirectoryParams {
    /// The directory to list.
    pub path: PathUri,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsReadDirectoryParams {
    /// Lists the entries of `path`.
    pub fn new(path: PathUri) -> Self {
        Self { path, sandbox: None }
    }
}

/// One name of a directory; a link is described by what it leads to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsReadDirectoryEntry {
    /// The name; bytes that are not UTF-8 are replaced by U+FFFD.
    pub file_name: String,
    /// The entry is a directory, or a symbolic link to one.
    pub is_directory: bool,
    /// The entry is a regular file, or a symbolic link to one.
    pub is_file: bool,
    /// Extension: the entry's whole path, present when `file_name` has lost bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_name_uri: Option<PathUri>,
}

/// Answer of `fs/readDirectory`: at most 50,000 entries, sorted by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsReadDirectoryResponse {
    /// The entries, sorted by name.
    pub entries: Vec<FsReadDirectoryEntry>,
    /// Extension: the directory holds more than the answer does.
    #[serde(default, skip_serializing_if = "is_false")]
    pub truncated: bool,
    /// Extension: the names of links that lead nowhere, which have no entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dead_links: Vec<String>,
}

/// `fs/remove`: a link is removed, never what it leads to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsRemoveParams {
    /// The path to remove.
    pub path: PathUri,
    /// Remove what a directory holds too.
    #[serde(default = "default_true", deserialize_with = "null_is_true")]
    pub recursive: bool,
    /// A missing path is success.
    #[serde(default = "default_true", deserialize_with = "null_is_true")]
    pub force: bool,
    /// False refuses a symbolic link in any component, the last included.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub follow_symlinks: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsRemoveParams {
    /// Removes `path` and everything below it; a missing path is success.
    pub fn new(path: PathUri) -> Self {
        Self { path, recursive: true, force: true, follow_symlinks: true, sandbox: None }
    }
}

/// Answer of `fs/remove`.
pub type FsRemoveResponse = FsDone;

/// `fs/copy`: a link is copied as a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsCopyParams {
    /// The file, symbolic link or directory to copy.
    pub source_path: PathUri,
    /// Where the copy goes.
    pub destination_path: PathUri,
    /// Needed for a directory.
    pub recursive: bool,
    /// Extension: copy one file into a temporary file beside the destination, fsync it, and rename
    /// it over the destination, which keeps its mode and owner. A new file gets the permission bits
    /// of the source, without set-id and sticky bits.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub atomic: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCopyParams {
    /// Copies `source_path` to `destination_path` in place.
    pub fn new(source_path: PathUri, destination_path: PathUri, recursive: bool) -> Self {
        Self { source_path, destination_path, recursive, atomic: false, sandbox: None }
    }
}

/// Answer of `fs/copy`.
pub type FsCopyResponse = FsDone;

/// Extension `fs/rename`: moves a name within one filesystem; a link is moved, not its target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsRenameParams {
    /// The current name.
    pub source_path: PathUri,
    /// The new name.
    pub destination_path: PathUri,
    /// False refuses to replace an existing destination.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub overwrite: bool,
    /// False refuses a symbolic link in any directory on the way to either name.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub follow_symlinks: bool,
    /// What the request is held to; none is no restriction.
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

/// Answer of `fs/rename`.
pub type FsRenameResponse = FsDone;

/// Extension `fs/symlink`: makes a symbolic link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSymlinkParams {
    /// Where the link is made.
    pub path: PathUri,
    /// What it says: a relative or absolute native path, kept as it is, or a `file:` URI, which
    /// can carry any bytes.
    pub target: String,
    /// False refuses a symbolic link in any directory on the way to `path`.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub follow_symlinks: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsSymlinkParams {
    /// Makes a symbolic link at `path` that points to `target`.
    pub fn new(path: PathUri, target: impl Into<String>) -> Self {
        Self { path, target: target.into(), follow_symlinks: true, sandbox: None }
    }
}

/// Answer of `fs/symlink`.
pub type FsSymlinkResponse = FsDone;

/// Extension `fs/setMode`: sets the permission bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSetModeParams {
    /// The path whose permission bits change.
    pub path: PathUri,
    /// 0 … 0o7777.
    pub mode: u32,
    /// False refuses a symbolic link in any component.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub follow_symlinks: bool,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsSetModeParams {
    /// Sets the permission bits of `path`, following symbolic links.
    pub fn new(path: PathUri, mode: u32) -> Self {
        Self { path, mode, follow_symlinks: true, sandbox: None }
    }
}

/// Answer of `fs/setMode`.
pub type FsSetModeResponse = FsDone;

crate::encode::by_serde! { FsCreateDirectoryParams, FsGetMetadataParams, FsGetMetadataResponse, FsCanonicalizeParams, FsCanonicalizeResponse, FsReadDirectoryParams, FsRemoveParams, FsCopyParams, FsRenameParams, FsSymlinkParams, FsSetModeParams }
