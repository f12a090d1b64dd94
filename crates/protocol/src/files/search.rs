//! Extensions `fs/search` (file contents) and `fs/glob` (file names).

use serde::{Deserialize, Serialize};

use super::{
    FsDone, FsPathError, FsWalkEntry, default_true, is_false, is_true, null_is_default,
    null_is_true,
};
use crate::{PathUri, SandboxContext};

/// Params of the extension `fs/search`, which finds lines that match a regular expression.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSearchParams {
    /// The search's id, unique among the running searches of the connection. With it, matches arrive as
    /// `fs/search/matches` notifications; without it, in the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search_id: Option<String>,
    /// A file, or a directory to search recursively.
    pub path: PathUri,
    /// A regular expression (or plain text, with `literal`).
    pub pattern: String,
    /// Take `pattern` as plain text.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub literal: bool,
    /// Ignore the case of letters.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub case_insensitive: bool,
    /// Match whole words only.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub word: bool,
    /// Allow a match to span lines.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub multiline: bool,
    /// Search only files that match one of these git-style globs.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<String>>"))]
    pub include: Vec<String>,
    /// Skip files and directories that match one of these git-style globs.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<String>>"))]
    pub exclude: Vec<String>,
    /// Skip what `.gitignore` and `.ignore` files list (default true).
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub respect_gitignore: bool,
    /// Include names that start with a dot.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub hidden: bool,
    /// Lines of context before a match; at most 50.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u32>"))]
    pub before_context: u32,
    /// Lines of context after a match; at most 50.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<u32>"))]
    pub after_context: u32,
    /// Stop after this many matching lines (default 1,000, at most 100,000).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_matches: Option<u32>,
    /// Stop in one file after this many matching lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_matches_per_file: Option<u32>,
    /// Skip files larger than this, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_file_bytes: Option<u64>,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsSearchParams {
    /// Searches `path` for the regular expression `pattern`, with every option at its default.
    pub fn new(path: PathUri, pattern: impl Into<String>) -> Self {
        Self {
            search_id: None,
            path,
            pattern: pattern.into(),
            literal: false,
            case_insensitive: false,
            word: false,
            multiline: false,
            include: Vec::new(),
            exclude: Vec::new(),
            respect_gitignore: true,
            hidden: false,
            before_context: 0,
            after_context: 0,
            max_matches: None,
            max_matches_per_file: None,
            max_file_bytes: None,
            sandbox: None,
        }
    }
}

/// Whether a line matches or is context of a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum FsSearchLineKind {
    /// The line matches.
    Match,
    /// The line is before or after a match.
    Context,
}

/// A match within a line, in bytes of its `text`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSearchRange {
    /// The first byte of the match.
    pub start: u64,
    /// The first byte after the match.
    pub end: u64,
}

/// One line of a searched file; with `multiline`, one match of several lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSearchLine {
    /// The number of the line, from 1.
    pub line_number: u64,
    /// Whether the line matches or is context.
    pub kind: FsSearchLineKind,
    /// The line without its newline; bytes that are not UTF-8 become U+FFFD.
    pub text: String,
    /// The matches; empty for context.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<FsSearchRange>,
    /// `text` is the beginning of a longer line.
    #[serde(default, skip_serializing_if = "is_false")]
    pub text_truncated: bool,
}

/// Lines of one file, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSearchFile {
    /// The file.
    pub path: PathUri,
    /// Its matching lines and their context.
    pub lines: Vec<FsSearchLine>,
}

/// Params of the notification `fs/search/matches`. All of them precede the response of the search.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSearchMatchesNotification {
    /// The id that the client gave the search.
    pub search_id: String,
    /// The number of the notification, from 1, without gaps.
    pub seq: u64,
    /// The matches; a file with many lines may continue in the next notification.
    pub files: Vec<FsSearchFile>,
}

/// Result of `fs/search`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsSearchResponse {
    /// The matches; empty if they were sent as notifications.
    pub files: Vec<FsSearchFile>,
    /// The number of matching lines.
    pub matches: u64,
    /// Files with at least one match.
    pub files_matched: u64,
    /// Files that were read.
    pub files_searched: u64,
    /// A limit or a cancellation cut the search short.
    pub truncated: bool,
    /// Ended by `fs/cancelSearch`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cancelled: bool,
    /// Paths that could not be searched; the first 100.
    #[serde(default)]
    pub errors: Vec<FsPathError>,
}

/// Params of the extension `fs/cancelSearch`: the search responds with what it has found. Cancelling an unknown search succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsCancelSearchParams {
    /// The search to end.
    pub search_id: String,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCancelSearchParams {
    /// Ends the search with this id.
    pub fn new(search_id: impl Into<String>) -> Self {
        Self { search_id: search_id.into(), sandbox: None }
    }
}

/// Result of `fs/cancelSearch`.
pub type FsCancelSearchResponse = FsDone;

/// Params of the extension `fs/glob`, which finds paths that match a pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsGlobParams {
    /// The directory that the patterns are relative to.
    pub path: PathUri,
    /// Relative to `path`; `*` stops at a slash, `**` does not.
    pub patterns: Vec<String>,
    /// Skip files and directories that match one of these git-style globs.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Vec<String>>"))]
    pub exclude: Vec<String>,
    /// Ignore the case of letters.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub case_insensitive: bool,
    /// Skip what `.gitignore` and `.ignore` files list (default true).
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::TrueByDefault"))]
    pub respect_gitignore: bool,
    /// Include names that start with a dot.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub hidden: bool,
    /// List directories that match too, not only files.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::FalseByDefault"))]
    pub directories: bool,
    /// The most entries in the response (default 10,000, at most 50,000).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_results: Option<u32>,
    /// The sandbox policy of the request; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsGlobParams {
    /// Matches `patterns` below `path`, with every option at its default.
    pub fn new(path: PathUri, patterns: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            path,
            patterns: patterns.into_iter().map(Into::into).collect(),
            exclude: Vec::new(),
            case_insensitive: false,
            respect_gitignore: true,
            hidden: false,
            directories: false,
            max_results: None,
            sandbox: None,
        }
    }
}

/// Result of `fs/glob`: sorted, each directory before its content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FsGlobResponse {
    /// The paths that match.
    pub entries: Vec<FsWalkEntry>,
    /// `max_results` or another limit cut the list short.
    pub truncated: bool,
    /// Paths that could not be read; the first 100.
    #[serde(default)]
    pub errors: Vec<FsPathError>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

crate::encode::by_serde! { FsSearchParams, FsSearchResponse, FsSearchMatchesNotification, FsCancelSearchParams, FsGlobParams }
