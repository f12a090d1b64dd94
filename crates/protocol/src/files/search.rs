//! Extensions `fs/search` (file contents) and `fs/glob` (file names).

use serde::{Deserialize, Serialize};

use super::{
    FsDone, FsPathError, FsWalkEntry, default_true, is_false, is_true, null_is_default,
    null_is_true,
};
use crate::{PathUri, SandboxContext};

/// Extension `fs/search`: lines that match a regular expression.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSearchParams {
    /// Names this search among those that run on the connection. With it, matches come as
    /// `fs/search/matches` notifications; without it, in the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search_id: Option<String>,
    /// A directory, searched with all that is below it, or a file.
    pub path: PathUri,
    /// A regular expression (or plain text, with `literal`).
    pub pattern: String,
    /// Take `pattern` as plain text.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub literal: bool,
    /// Ignore the case of letters.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub case_insensitive: bool,
    /// Match whole words only.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub word: bool,
    /// Let a match span lines.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub multiline: bool,
    /// Search only files that match one of these git-style globs.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// Leave out files and directories that match one of these git-style globs.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Leave out what `.gitignore` and `.ignore` files say.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub respect_gitignore: bool,
    /// Look into names that start with a dot too.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub hidden: bool,
    /// Lines of context before a match; at most 50.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_zero")]
    pub before_context: u32,
    /// Lines of context after a match; at most 50.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_zero")]
    pub after_context: u32,
    /// Stop after this many matching lines; 1,000 if absent, at most 100,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_matches: Option<u32>,
    /// Stop in one file after this many matching lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_matches_per_file: Option<u32>,
    /// Pass over files larger than this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_file_bytes: Option<u64>,
    /// What the request is held to; none is no restriction.
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

/// Whether a line matches or stands beside one that does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FsSearchLineKind {
    /// The line matches.
    Match,
    /// The line is before or after a match.
    Context,
}

/// A stretch of a line, in bytes of its `text`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSearchRange {
    /// The first byte of the match.
    pub start: u64,
    /// The first byte after the match.
    pub end: u64,
}

/// One line (or, with `multiline`, one matching stretch of lines) of a searched file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSearchLine {
    /// From 1.
    pub line_number: u64,
    /// Whether the line matches or is context.
    pub kind: FsSearchLineKind,
    /// Without its line end; bytes that are not UTF-8 are replaced by U+FFFD.
    pub text: String,
    /// Where it matches; empty for context.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<FsSearchRange>,
    /// `text` is the beginning of a longer line.
    #[serde(default, skip_serializing_if = "is_false")]
    pub text_truncated: bool,
}

/// Lines of one file, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSearchFile {
    /// The file.
    pub path: PathUri,
    /// Its matching lines and their context.
    pub lines: Vec<FsSearchLine>,
}

/// Notification `fs/search/matches`. All of them come before the answer of the search.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSearchMatchesNotification {
    /// The id that the client gave the search.
    pub search_id: String,
    /// From 1, without gaps.
    pub seq: u64,
    /// A file with many lines may go on in the next notification.
    pub files: Vec<FsSearchFile>,
}

/// Answer of `fs/search`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsSearchResponse {
    /// Empty if the matches came as notifications.
    pub files: Vec<FsSearchFile>,
    /// Matching lines found.
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
    /// What could not be searched; the first 100.
    #[serde(default)]
    pub errors: Vec<FsPathError>,
}

/// Extension `fs/cancelSearch`: the search answers with what it has. Unknown is fine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsCancelSearchParams {
    /// The search to end.
    pub search_id: String,
    /// What the request is held to; none is no restriction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

impl FsCancelSearchParams {
    /// Ends the search with this id.
    pub fn new(search_id: impl Into<String>) -> Self {
        Self { search_id: search_id.into(), sandbox: None }
    }
}

/// Answer of `fs/cancelSearch`.
pub type FsCancelSearchResponse = FsDone;

/// Extension `fs/glob`: names that match one of the patterns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsGlobParams {
    /// Where the patterns start.
    pub path: PathUri,
    /// Relative to `path`; `*` stops at a slash, `**` does not.
    pub patterns: Vec<String>,
    /// Leave out files and directories that match one of these git-style globs.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Ignore the case of letters.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub case_insensitive: bool,
    /// Leave out what `.gitignore` and `.ignore` files say.
    #[serde(
        default = "default_true",
        deserialize_with = "null_is_true",
        skip_serializing_if = "is_true"
    )]
    pub respect_gitignore: bool,
    /// Look into names that start with a dot too.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub hidden: bool,
    /// List directories that match too, not only files.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "is_false")]
    pub directories: bool,
    /// 10,000 if absent, at most 50,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_results: Option<u32>,
    /// What the request is held to; none is no restriction.
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

/// Answer of `fs/glob`: sorted, each directory before what is in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsGlobResponse {
    /// The paths that match.
    pub entries: Vec<FsWalkEntry>,
    /// `max_results` or another limit cut the list short.
    pub truncated: bool,
    /// What could not be looked at; the first 100.
    #[serde(default)]
    pub errors: Vec<FsPathError>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

crate::encode::by_serde! { FsSearchParams, FsSearchResponse, FsSearchMatchesNotification, FsCancelSearchParams, FsGlobParams }
