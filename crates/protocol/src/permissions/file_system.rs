//! The file system half of a profile: a list of entries, each a path and an access.
//!
//! Invariant: nothing unknown is dropped silently. An unknown special kind is preserved and grants nothing;
//! anything else unknown is refused.

use std::num::NonZeroU32;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

use crate::PathUri;

/// Which paths may be read and written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileSystemPolicy {
    /// Access by entries; without an entry, no access.
    Restricted(RestrictedFileSystem),
    /// The whole disk.
    Unrestricted,
}

/// The members of a restricted file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RestrictedFileSystem {
    /// The entries, in any order; the most specific one decides.
    #[serde(default)]
    pub entries: Vec<FileSystemEntry>,
    /// How many directories deep a glob pattern is expanded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glob_scan_max_depth: Option<NonZeroU32>,
}

/// One rule: a path and what may be done below it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileSystemEntry {
    /// The path, and everything below it.
    pub path: FileSystemPath,
    /// What may be done there.
    pub access: AccessMode,
    /// What the entry means if its path does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_path_behavior: Option<MissingPathBehavior>,
}

impl FileSystemEntry {
    /// Makes an entry that also applies to a path that does not exist yet.
    pub fn new(path: FileSystemPath, access: AccessMode) -> Self {
        Self { path, access, missing_path_behavior: None }
    }
}

/// The paths that an entry applies to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileSystemPath {
    /// One path.
    Path {
        /// The absolute path.
        path: PathUri,
    },
    /// A path with a special meaning.
    Special {
        /// The kind of path.
        value: SpecialPath,
    },
    /// A git-style pattern; for denials only.
    GlobPattern {
        /// The pattern; a relative one starts at the context's `cwd`.
        pattern: String,
    },
}

/// The access to a path, in ascending precedence among entries for the same path.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    /// Read.
    Read,
    /// Read and write.
    Write,
    /// No access.
    #[serde(alias = "none")]
    Deny,
}

/// What an entry means if its path does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MissingPathBehavior {
    /// The entry is ignored.
    Skip,
}

/// A path with a special meaning, resolved where it is enforced.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SpecialPath {
    /// The whole disk.
    Root,
    /// The files that a program needs to start.
    Minimal,
    /// Each workspace root, or a path below each of them.
    ProjectRoots {
        /// Relative to the workspace root.
        subpath: Option<String>,
    },
    /// `$TMPDIR`.
    Tmpdir,
    /// `/tmp`.
    SlashTmp,
    /// A kind that this version does not know, preserved. Grants nothing.
    Unknown(Value),
}

impl Serialize for SpecialPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (kind, subpath) = match self {
            Self::Root => ("root", None),
            Self::Minimal => ("minimal", None),
            Self::ProjectRoots { subpath } => ("project_roots", subpath.as_ref()),
            Self::Tmpdir => ("tmpdir", None),
            Self::SlashTmp => ("slash_tmp", None),
            Self::Unknown(value) => return value.serialize(serializer),
        };
        let mut map = serializer.serialize_map(Some(1 + usize::from(subpath.is_some())))?;
        map.serialize_entry("kind", kind)?;
        if let Some(subpath) = subpath {
            map.serialize_entry("subpath", subpath)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for SpecialPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Through a value, since an unknown kind must keep its members.
        let value = Value::deserialize(deserializer)?;
        let kind = match &value {
            Value::String(kind) => Some(kind.as_str()),
            Value::Object(members) => members.get("kind").and_then(Value::as_str),
            _ => None,
        };
        let Some(kind) = kind else {
            return Err(de::Error::custom("a special path needs a `kind`"));
        };
        Ok(match kind {
            "root" => Self::Root,
            "minimal" => Self::Minimal,
            "project_roots" | "current_working_directory" => match value.get("subpath") {
                None | Some(Value::Null) => Self::ProjectRoots { subpath: None },
                Some(Value::String(subpath)) => {
                    Self::ProjectRoots { subpath: Some(subpath.clone()) }
                }
                Some(_) => return Err(de::Error::custom("`subpath` must be a string")),
            },
            "tmpdir" => Self::Tmpdir,
            "slash_tmp" => Self::SlashTmp,
            _ => Self::Unknown(value),
        })
    }
}
