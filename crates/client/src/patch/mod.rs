//! Patches and unified diffs, applied through `fs/*` only.
//!
//! Invariant: every section is checked against the files before anything is written, so a patch that does
//! not fit changes nothing. A failed write leaves its file as it was, as far as the server allows;
//! otherwise the error says so.

mod apply;
mod lines;
mod parse;
mod step;
mod tree;
mod unified;

pub use apply::{PatchChange, PatchChangeKind, PatchReport};
pub use parse::{Hunk, HunkLine, Patch, PatchSection};
pub use unified::{DiffHunk, FileDiff};

use crate::error::ExecServerError;

/// Why a patch was not applied, or only in part.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PatchError {
    /// The text is not a valid patch.
    #[error("line {line} of the patch: {problem}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What is wrong, and what should be there.
        problem: String,
    },
    /// The patch has no sections.
    #[error(
        "the patch has no sections; add, update or delete a file between `*** Begin Patch` and `*** End Patch`"
    )]
    Empty,
    /// A path is invalid.
    #[error("{0}")]
    Path(String),
    /// A path cannot be changed as the patch asks, for example because the file does not exist.
    #[error("cannot {verb} {path}: {problem}; nothing was changed")]
    Target {
        /// `update`, `delete`, `move` or `add`.
        verb: &'static str,
        /// The path as written in the patch.
        path: String,
        /// Why it cannot be changed.
        problem: String,
    },
    /// A hunk's lines are not in the file.
    #[error(
        "hunk {hunk} of {path} does not fit: {problem}; read the file again and make the patch from it; nothing was changed. Looked for:\n{wanted}"
    )]
    Mismatch {
        /// The path as written in the patch.
        path: String,
        /// Counted from 1.
        hunk: usize,
        /// What was not found, and after which line.
        problem: String,
        /// The lines that were not found.
        wanted: String,
    },
    /// The server failed before anything was written.
    #[error("{0}; nothing was changed")]
    Unchanged(#[source] ExecServerError),
    /// A write failed after others had succeeded.
    #[error(
        "{cause}; the patch is applied in part: done: {}; not done: {}{}",
        list(.done), list(.undone), .uncertain.as_ref().map(|uncertain| format!("; {uncertain}")).unwrap_or_default()
    )]
    Partial {
        /// The changes that were made.
        done: Vec<PatchChange>,
        /// The changes that were not made.
        undone: Vec<PatchChange>,
        /// The state of the first of `undone`, if it may have changed.
        uncertain: Option<Box<str>>,
        /// Why the write failed.
        #[source]
        cause: ExecServerError,
    },
}

fn list(changes: &[PatchChange]) -> String {
    if changes.is_empty() {
        return "nothing".to_owned();
    }
    changes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
