//! Why a filesystem request failed.
//!
//! Invariant: an error says what was tried on which path, in the system's own words where the
//! system spoke; [`FileError::kind`] is its kind on the wire.

use codex_exec_server_protocol::{ErrorKind, PathUri, RpcError, error as code};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FileError {
    /// The system refused or failed.
    #[error("{action} {}: {}", display(path), errno_message(*errno))]
    Os {
        /// What was tried: "open", "write", …
        action: String,
        /// On what.
        path: PathUri,
        /// What the system answered.
        errno: i32,
    },
    /// The system refused inside a sandbox, and the sandbox is the likely reason.
    #[error("Operation not permitted: {action} {}: {}", display(path), errno_message(*errno))]
    Denied {
        /// What was tried.
        action: String,
        /// On what.
        path: PathUri,
        /// What the system answered.
        errno: i32,
    },
    /// A directory, FIFO, socket or device where a regular file is needed.
    #[error("{} is {found}, not a regular file", display(path))]
    NotRegularFile {
        /// The path.
        path: PathUri,
        /// What it is, with its article.
        found: String,
    },
    /// `followSymlinks: false`, and there is one.
    #[error("{} has a symbolic link in it, and followSymlinks is false", display(path))]
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
    #[error("{} is larger than {limit} bytes; read it in blocks", display(path))]
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
    #[error("{}: {reason}", display(path))]
    Refused {
        /// The path it is about.
        path: PathUri,
        /// Why.
        reason: String,
    },
    /// A limit of the system, or of how large a tree may be.
    #[error("{}: {reason}", display(path))]
    Limit {
        /// The path it is about.
        path: PathUri,
        /// Which one.
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

    pub(crate) fn limit(path: &PathUri, reason: impl Into<String>) -> Self {
        Self::Limit { path: path.clone(), reason: reason.into() }
    }

    pub(crate) fn out_of_range(what: &str, value: u64, allowed: impl Into<String>) -> Self {
        Self::OutOfRange { what: what.into(), value, allowed: allowed.into() }
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Os { errno, .. } => ErrorKind::of_io(&std::io::Error::from_raw_os_error(*errno)),
            Self::Denied { .. } => ErrorKind::DeniedBySandbox,
            Self::UnknownHandle { .. } => ErrorKind::UnknownFileHandle,
            Self::NotRegularFile { .. } => ErrorKind::NotARegularFile,
            Self::SymlinkRefused { .. } => ErrorKind::SymlinkRefused,
            Self::OutOfRange { .. } | Self::WrongMode { .. } | Self::Pattern { .. } => {
                ErrorKind::InvalidParams
            }
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            Self::HandleTaken { .. } | Self::IdTaken { .. } => ErrorKind::IdInUse,
            Self::TooMany { .. } | Self::Limit { .. } => ErrorKind::LimitReached,
            Self::Refused { .. } => ErrorKind::Refused,
            Self::Torn { cause, .. } => cause.kind(),
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Sandbox { .. } => ErrorKind::SandboxUnavailable,
            Self::Helper { .. } | Self::NeedsMemory { .. } => ErrorKind::Internal,
        }
    }

    /// Its code on the wire: what the system says is told as its own failure, except for what a
    /// request can be blamed for.
    fn code(&self) -> i64 {
        match self {
            Self::Os { .. } => match self.kind() {
                ErrorKind::PathNotFound => code::NOT_FOUND,
                ErrorKind::PermissionDenied | ErrorKind::InvalidParams => code::INVALID_REQUEST,
                _ => code::INTERNAL_ERROR,
            },
            Self::UnknownHandle { .. } => code::NOT_FOUND,
            Self::Torn { cause, .. } => cause.code(),
            Self::Cancelled | Self::Helper { .. } | Self::NeedsMemory { .. } => {
                code::INTERNAL_ERROR
            }
            Self::Denied { .. }
            | Self::NotRegularFile { .. }
            | Self::SymlinkRefused { .. }
            | Self::OutOfRange { .. }
            | Self::TooLarge { .. }
            | Self::HandleTaken { .. }
            | Self::IdTaken { .. }
            | Self::TooMany { .. }
            | Self::Limit { .. }
            | Self::WrongMode { .. }
            | Self::Refused { .. }
            | Self::Pattern { .. }
            | Self::Sandbox { .. } => code::INVALID_REQUEST,
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
        Self { code: error.code(), message: error.to_string(), kind: Some(error.kind()) }
    }
}

fn display(path: &PathUri) -> std::path::Display<'_> {
    path.as_path().display()
}

/// The system's words for an error number.
pub(crate) fn errno_message(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes that were sent before there were kinds.
    fn code_of_errno(errno: i32) -> i64 {
        match Errno::from_raw_os_error(errno) {
            Errno::NOENT => code::NOT_FOUND,
            Errno::ACCESS | Errno::PERM | Errno::INVAL => code::INVALID_REQUEST,
            _ => code::INTERNAL_ERROR,
        }
    }

    #[test]
    fn every_errno_has_its_code_and_a_kind_that_goes_with_it() {
        for errno in 1..=133 {
            let path: PathUri = "/x".parse().unwrap();
            let os = FileError::Os { action: "open".into(), path, errno };
            let torn = FileError::Torn { handle_id: "h".into(), cause: Box::new(os.clone()) };
            let sandboxed = os.clone().in_sandbox();
            for error in [os, torn] {
                let sent = RpcError::from(error);
                assert_eq!(sent.code, code_of_errno(errno), "{sent}");
                assert!(sent.kind.unwrap().codes().contains(&sent.code), "{sent:?}");
            }
            let sent = RpcError::from(sandboxed);
            assert!(sent.kind.unwrap().codes().contains(&sent.code), "{sent:?}");
        }
    }
}
