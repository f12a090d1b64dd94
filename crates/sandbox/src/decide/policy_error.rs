//! Why a policy is refused: each error names the path, and what to do about it.

use std::path::PathBuf;

use super::glob::GlobError;

/// Why a policy cannot be resolved. Nothing has run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// An entry is relative to a working directory that the request does not name.
    #[error("the policy is relative to a working directory, but the request names none; set `cwd`")]
    CwdNeeded,
    /// A pattern grants access.
    #[error("pattern `{0}` allows something; glob patterns can only deny")]
    GlobAllows(String),
    /// A pattern is invalid.
    #[error("pattern `{pattern}` cannot be used: {source}")]
    GlobInvalid {
        /// The pattern.
        pattern: String,
        /// Why it is invalid.
        source: GlobError,
    },
    /// The patterns match more files than can be hidden one by one.
    #[error(
        "the glob patterns match more than {0} files; deny a directory instead, or narrow them"
    )]
    GlobMatches(usize),
    /// The patterns cover a tree that is too large to search.
    #[error("the glob patterns cover more than {0} files; lower `glob_scan_max_depth`")]
    GlobScan(usize),
    /// A directory that an entry grants, or where patterns begin, can be entered but not listed, so what the
    /// patterns match in it cannot be found.
    #[error(
        "the glob patterns cannot be checked in `{}`, which can be entered but not listed; make it \
         listable, or deny it",
        .0.display()
    )]
    GlobUnlistable(PathBuf),
    /// The policy has too many entries.
    #[error("the policy has {found} entries; at most {limit} are enforced")]
    Entries {
        /// Their number.
        found: usize,
        /// The maximum.
        limit: usize,
    },
    /// A `subpath` leaves the workspace root.
    #[error("subpath `{0}` of project_roots leaves the workspace root")]
    Subpath(String),
    /// A pattern reaches deeper than the maximum depth.
    #[error(
        "the glob patterns reach below `{0}`, deeper than the server expands them; set \
         `glob_scan_max_depth`, or narrow them"
    )]
    GlobDepth(PathBuf),
    /// A grant leads through a link that a sandboxed process could change.
    #[error(
        "`{}` cannot be granted: `{}` is a link in a directory that sandboxed processes can write \
         to; grant its target, or replace it with a directory",
        .name.display(), .link.display()
    )]
    Link {
        /// The path as the policy names it.
        name: PathBuf,
        /// The link.
        link: PathBuf,
    },
    /// A path cannot be resolved, so it can be neither protected nor granted.
    #[error("`{}` cannot be protected or granted: `{}`: {why}", .name.display(), .at.display())]
    Unreachable {
        /// The path, as the policy names it or implies it.
        name: PathBuf,
        /// Where the resolution fails.
        at: PathBuf,
        /// The reason.
        why: String,
    },
    /// A path leads through a per-process part of `/proc`, which differs between server and sandbox.
    #[error(
        "`{}` leads through `{}`, a per-process part of /proc, which differs between the sandbox and the \
         server; name its target instead",
        .name.display(), .at.display()
    )]
    Process {
        /// The path as the policy names it.
        name: PathBuf,
        /// The per-process part.
        at: PathBuf,
    },
    /// A restricted name may have other spellings, by which it is not restricted.
    #[error(
        "`{}` cannot be protected: in `{}`, a name may lead to the same file in upper and in lower case; use \
         a file system that tells them apart, or restrict nothing there",
        .name.display(), .at.display()
    )]
    Spelling {
        /// The restricted path.
        name: PathBuf,
        /// The directory with such names, or with none that would tell.
        at: PathBuf,
    },
    /// A pattern denies names, but files have other spellings.
    #[error(
        "the glob patterns cannot be applied in `{}`, where names in upper and in lower case lead to the same \
         file; deny the directory",
        .at.display()
    )]
    PatternSpelling {
        /// The mount with such names.
        at: PathBuf,
    },
    /// The mount table is not usable, so aliases cannot be determined.
    #[error("cannot read the mount table: {0}")]
    Mounts(String),
    /// The policy denies a kind of special path that this version does not know.
    #[error("the policy denies a special path of unknown kind: {0}")]
    UnknownDenied(String),
}
