//! Patches: what agents send to change files, applied through `fs/*` only.
//!
//! Invariant: every section is checked against the files before anything is written. A patch that
//! does not fit changes nothing. A write that fails leaves its file as it was, as far as the server
//! lets us; where it may not be, the error says so.

mod apply;
mod lines;
mod parse;
mod step;
mod tree;

pub use apply::{PatchChange, PatchChangeKind, PatchReport};
pub use parse::{Hunk, HunkLine, Patch, PatchSection};

use crate::error::ExecServerError;

/// Why a patch was not applied, or not wholly.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PatchError {
    /// It is no patch.
    #[error("line {line} of the patch: {problem}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What is wrong, and what should be there.
        problem: String,
    },
    /// It changes nothing.
    #[error(
        "the patch has no sections; add, update or delete a file between `*** Begin Patch` and `*** End Patch`"
    )]
    Empty,
    /// A path that is none.
    #[error("{0}")]
    Path(String),
    /// A file it changes is not there, or is none.
    #[error("cannot {verb} {path}: {problem}; nothing was changed")]
    Target {
        /// `update`, `delete`, `move` or `add`.
        verb: &'static str,
        /// As the patch says it.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A hunk's lines are not in the file.
    #[error(
        "hunk {hunk} of {path} does not fit: {problem}; read the file again and make the patch from it; nothing was changed. Looked for:\n{wanted}"
    )]
    Mismatch {
        /// As the patch says it.
        path: String,
        /// Counted from 1.
        hunk: usize,
        /// What was not found, and from where it was looked for.
        problem: String,
        /// The lines.
        wanted: String,
    },
    /// The server failed before anything was written.
    #[error("{0}; nothing was changed")]
    Unchanged(#[source] ExecServerError),
    /// The server failed half-way.
    #[error(
        "{cause}; the patch is applied in part: done: {}; not done: {}{}",
        list(.done), list(.undone), .uncertain.as_ref().map(|uncertain| format!("; {uncertain}")).unwrap_or_default()
    )]
    Partial {
        /// What was written.
        done: Vec<PatchChange>,
        /// What was not.
        undone: Vec<PatchChange>,
        /// What has become of the first of `undone`, if it is not known to be as it was.
        uncertain: Option<Box<str>>,
        /// Why.
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
