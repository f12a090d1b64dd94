//! Why a filesystem request failed.
//!
//! Invariant: an error says what was tried on which path, in the system's own words where the
//! system spoke; [`FileError::kind`] decides its code on the wire, and nothing else does.

use codex_exec_server_protocol::{PathUri, RpcError};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FileError {
    /// The system refused or failed.
    #[error("{action} {}: {}", show(path), words(*errno))]
    Os {
        /// What was tried: "open", "write", …
        action: String,
        /// On what.
        path: PathUri,
        /// What the system answered.
        errno: i32,
    },
    /// The system refused inside a sandbox, and the sandbox is the likely reason.
    #[error("Operation not permitted: {action} {}: {}", show(path), words(*errno))]
    Denied {
        /// What was tried.
        action: String,
        /// On what.
        path: PathUri,
        /// What the system answered.
        errno: i32,
    },
    /// A directory, FIFO, socket or device where a regular file is needed.
    #[error("{} is {found}, not a regular file", show(path))]
    NotRegularFile {
        /// The path.
        path: PathUri,
        /// What it is, with its article.
        found: String,
    },
    /// `followSymlinks: false`, and there is one.
    #[error("{} has a symbolic link in it, and followSymlinks is false", show(path))]
    SymlinkRefused {
        /// The path.
        path: PathUri,
    },
    /// A number or text of the request is outside its limits.
    #[error("{what} is {value}, but must be {allowed}")]
    OutOfRange {
        /// Which one.
        what: String,
        /// What it is.
        value: u64,
        /// What it may be.
        allowed: String,
    },
    /// A file larger than one answer carries.
    #[error("{} is larger than {limit} bytes; read it in blocks", show(path))]
    TooLarge {
        /// The path.
        path: PathUri,
        /// The limit.
        limit: u64,
    },
    /// The answer would carry more than there is [memory](super::AnswerMemory) for yet. Never leaves a
    /// [`FileConnection`](super::FileConnection).
    #[error("the answer carries {bytes} bytes")]
    NeedsMemory {
        /// How much it would carry.
        bytes: u64,
    },
    /// No open handle has this id.
    #[error("unknown file handle `{handle_id}`")]
    UnknownHandle {
        /// The id.
        handle_id: String,
    },
    /// An open handle has this id.
    #[error("file handle `{handle_id}` is in use")]
    HandleTaken {
        /// The id.
        handle_id: String,
    },
    /// A search or watch of this id is running.
    #[error("{what} `{id}` is in use")]
    IdTaken {
        /// "searchId" or "watchId".
        what: String,
        /// The id.
        id: String,
    },
    /// Too many of something are open on this connection.
    #[error("more than {limit} {what} on one connection; close some")]
    TooMany {
        /// Of what.
        what: String,
        /// How many there may be.
        limit: u64,
    },
    /// Reading from a handle for writing, or the other way round.
    #[error("file handle `{handle_id}` is not open for {purpose}")]
    WrongMode {
        /// The id.
        handle_id: String,
        /// "reading" or "writing".
        purpose: String,
    },
    /// A block of an atomic replacement was not written, so nothing is replaced.
    #[error(
        "nothing is replaced: a block of file handle `{handle_id}` was not written ({cause}); open \
         the file again"
    )]
    Torn {
        /// The handle.
        handle_id: String,
        /// Why the first block that failed did.
        cause: Box<FileError>,
    },
    /// The request contradicts itself or the state of the tree.
    #[error("{}: {reason}", show(path))]
    Refused {
        /// The path it is about.
        path: PathUri,
        /// Why.
        reason: String,
    },
    /// A pattern or glob that does not parse or is too large.
    #[error("invalid pattern `{pattern}`: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why.
        reason: String,
    },
    /// The request's sandbox cannot be built; nothing ran.
    #[error("the sandbox cannot be enforced: {reason}")]
    Sandbox {
        /// Why.
        reason: String,
    },
    /// The client went away, or asked for the end.
    #[error("request cancelled")]
    Cancelled,
    /// The process that runs operations for us failed.
    #[error("file helper failed: {reason}")]
    Helper {
        /// How.
        reason: String,
    },
}

/// What kind of failure it is, as far as a client may care.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileErrorKind {
    /// A path or handle that is not there.
    NotFound,
    /// The system or the sandbox does not permit it.
    PermissionDenied,
    /// The request makes no sense on this file or breaks a limit.
    InvalidInput,
    /// No space left on the device.
    StorageFull,
    /// The user's quota is used up.
    QuotaExceeded,
    /// The client went away.
    Cancelled,
    /// Anything else the system says.
    Other,
}

impl FileError {
    /// An error of the system.
    pub(crate) fn os(action: &str, path: &PathUri, errno: Errno) -> Self {
        Self::Os { action: action.into(), path: path.clone(), errno: errno.raw_os_error() }
    }

    /// An error of the standard library.
    pub(crate) fn io(action: &str, path: &PathUri, error: &std::io::Error) -> Self {
        Self::os(action, path, Errno::from_io_error(error).unwrap_or(Errno::IO))
    }

    pub(crate) fn refused(path: &PathUri, reason: impl Into<String>) -> Self {
        Self::Refused { path: path.clone(), reason: reason.into() }
    }

    pub(crate) fn out_of_range(what: &str, value: u64, allowed: impl Into<String>) -> Self {
        Self::OutOfRange { what: what.into(), value, allowed: allowed.into() }
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> FileErrorKind {
        match self {
            Self::Os { errno, .. } => match Errno::from_raw_os_error(*errno) {
                Errno::NOENT => FileErrorKind::NotFound,
                Errno::ACCESS | Errno::PERM => FileErrorKind::PermissionDenied,
                Errno::INVAL => FileErrorKind::InvalidInput,
                Errno::NOSPC => FileErrorKind::StorageFull,
                Errno::DQUOT => FileErrorKind::QuotaExceeded,
                _ => FileErrorKind::Other,
            },
            Self::Denied { .. } => FileErrorKind::PermissionDenied,
            Self::UnknownHandle { .. } => FileErrorKind::NotFound,
            Self::NotRegularFile { .. }
            | Self::SymlinkRefused { .. }
            | Self::OutOfRange { .. }
            | Self::TooLarge { .. }
            | Self::HandleTaken { .. }
            | Self::IdTaken { .. }
            | Self::TooMany { .. }
            | Self::WrongMode { .. }
            | Self::Refused { .. }
            | Self::Pattern { .. } => FileErrorKind::InvalidInput,
            Self::Torn { cause, .. } => cause.kind(),
            Self::Cancelled => FileErrorKind::Cancelled,
            Self::Sandbox { .. } => FileErrorKind::InvalidInput,
            Self::Helper { .. } | Self::NeedsMemory { .. } => FileErrorKind::Other,
        }
    }

    /// The error as a sandboxed request reports it: where the system would not let us, say that it
    /// was not permitted, for a read-only mount, a border between mounts, a mount point or a missing
    /// right is how a sandbox refuses.
    #[must_use]
    pub fn in_sandbox(self) -> Self {
        match self {
            Self::Os { action, path, errno }
                if matches!(
                    Errno::from_raw_os_error(errno),
                    Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::XDEV | Errno::BUSY
                ) =>
            {
                Self::Denied { action, path, errno }
            }
            Self::Torn { handle_id, cause } => {
                Self::Torn { handle_id, cause: Box::new(cause.in_sandbox()) }
            }
            other => other,
        }
    }
}

impl From<FileError> for RpcError {
    fn from(error: FileError) -> Self {
        let message = error.to_string();
        match error.kind() {
            FileErrorKind::NotFound => Self::not_found(message),
            FileErrorKind::PermissionDenied | FileErrorKind::InvalidInput => {
                Self::invalid_request(message)
            }
            FileErrorKind::StorageFull
            | FileErrorKind::QuotaExceeded
            | FileErrorKind::Cancelled
            | FileErrorKind::Other => Self::internal(message),
        }
    }
}

fn show(path: &PathUri) -> std::path::Display<'_> {
    path.as_path().display()
}

/// The system's words for an error number.
pub(crate) fn words(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}
