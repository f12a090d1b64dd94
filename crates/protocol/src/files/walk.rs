//! `fs/walk`: a tree, breadth-first.

use serde::{Deserialize, Serialize};

use super::{is_false, null_is_default};
use crate::{PathUri, SandboxContext};

/// Params of `fs/walk`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWalkParams {
    /// The directory to walk.
    pub path: PathUri,
    /// How far to walk.
    pub options: FsWalkOptions,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsWalkParams {
    /// Walks `path` as far as `options` say.
    pub fn new(path: PathUri, options: FsWalkOptions) -> Self {
        Self { path, options, sandbox: None }
    }
}

/// The limits of a walk. The default is the server's maximum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWalkOptions {
    /// Directories more than this many levels below the root are listed but not read; at most 64.
    pub max_depth: u32,
    /// Directories that are read, the root included; from 1 to 10,000.
    pub max_directories: u32,
    /// Entries and errors in the response; from 1 to 50,000.
    pub max_entries: u32,
    /// List and read directories behind symbolic links, each once. Links to files are never listed.
    pub follow_directory_symlinks: bool,
    /// List directories whose name starts with a dot, but do not read them.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub prune_hidden_directories: bool,
}

impl Default for FsWalkOptions {
    fn default() -> Self {
        Self {
            max_depth: 64,
            max_directories: 10_000,
            max_entries: 50_000,
            follow_directory_symlinks: false,
            prune_hidden_directories: false,
        }
    }
}

/// The kind of an entry; for a symbolic link, of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum FsEntryKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
}

/// An entry of `fs/walk` and `fs/glob`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWalkEntry {
    /// The path of the entry.
    pub path: PathUri,
    /// Whether it is a directory or a file.
    pub kind: FsEntryKind,
}

/// A path that could not be read, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsPathError {
    /// The path that could not be read.
    pub path: PathUri,
    /// Why, for people.
    pub message: String,
}

/// Result of `fs/walk`, at most 4 MiB.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsWalkResponse {
    /// The entries, breadth-first.
    pub entries: Vec<FsWalkEntry>,
    /// Paths that could not be read.
    #[serde(default)]
    pub errors: Vec<FsPathError>,
    /// A limit other than the depth cut the walk short.
    pub truncated: bool,
}

crate::encode::by_serde! { FsWalkParams }
