//! The file system half of a profile: a list of entries, each a path and an access.
//!
//! Invariant: what we do not understand is kept as it came and grants nothing (an unknown special
//! kind), or is refused (anything else); it is never dropped in silence.

use std::num::NonZeroU32;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

use crate::PathUri;

/// Which paths may be read and written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileSystemPolicy {
    /// What the entries say; without an entry, no access.
    Restricted(RestrictedFileSystem),
    /// The whole disk.
    Unrestricted,
}

/// The members of a restricted file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct RestrictedFileSystem {
    /// In any order; the most specific entry decides.
    #[serde(default)]
    pub entries: Vec<FileSystemEntry>,
    /// How many directories deep a glob pattern is expanded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glob_scan_max_depth: Option<NonZeroU32>,
}

/// One rule: a path and what may be done below it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct FileSystemEntry {
    /// The path, and everything below it.
    pub path: FileSystemPath,
    /// What may be done there.
    pub access: AccessMode,
    /// What an entry means whose path does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_path_behavior: Option<MissingPathBehavior>,
}

impl FileSystemEntry {
    /// An entry that also holds for a path that does not exist yet.
    pub fn new(path: FileSystemPath, access: AccessMode) -> Self {
        Self { path, access, missing_path_behavior: None }
    }
}

/// What an entry speaks of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileSystemPath {
    /// One path.
    Path {
        /// Absolute.
        path: PathUri,
    },
    /// A place that is known by its purpose.
    Special {
        /// Which one.
        value: SpecialPath,
    },
    /// A git-style pattern; for denials only.
    GlobPattern {
        /// Relative ones are relative to the context's `cwd`.
        pattern: String,
    },
}

/// What may be done with a path. The order is the order of precedence among equals.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    /// Read.
    Read,
    /// Read and write.
    Write,
    /// Neither.
    #[serde(alias = "none")]
    Deny,
}

/// What an entry means whose path does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingPathBehavior {
    /// The entry is ignored.
    Skip,
}

/// A place that is known by its purpose and resolved where it is enforced.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SpecialPath {
    /// The whole disk.
    Root,
    /// What a program needs to start.
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
    /// A kind this version does not know, kept as it came. Grants nothing.
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
        // Through a value, since an unknown kind has to keep members nobody has named here.
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
                Some(_) => return Err(de::Error::custom("`subpath` has to be a string")),
            },
            "tmpdir" => Self::Tmpdir,
            "slash_tmp" => Self::SlashTmp,
            _ => Self::Unknown(value),
        })
    }
}
