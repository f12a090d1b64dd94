//! Why a filesystem request failed.
//!
//! Invariant: an error names the action and the path, with the system's own message if the system
//! failed; [`FileError::kind`] is its kind in the response.

use codex_exec_server_protocol::{ErrorKind, PathUri, RpcError, error as code};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::Preserved;

/// Why a filesystem request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FileError {
    /// A system call failed.
    #[error("{action} {}: {}", display(path), errno_message(*errno))]
    Os {
        /// The action: "open", "write", …
        action: String,
        /// The path.
        path: PathUri,
        /// The system's error number.
        errno: i32,
    },
    /// A system call failed inside a sandbox, probably because of the sandbox.
    #[error("Operation not permitted: {action} {}: {}", display(path), errno_message(*errno))]
    Denied {
        /// The action.
        action: String,
        /// The path.
        path: PathUri,
        /// The system's error number.
        errno: i32,
    },
    /// A directory, FIFO, socket or device where a regular file is needed.
    #[error("{} is {found}, not a regular file", display(path))]
    NotRegularFile {
        /// The path.
        path: PathUri,
        /// What it is instead, with an article.
        found: String,
    },
    /// The path contains a symbolic link, and `followSymlinks` is false.
    #[error("{} has a symbolic link in it, and followSymlinks is false", display(path))]
    SymlinkRefused {
        /// The path.
        path: PathUri,
    },
    /// A number or a length in the request is out of range.
    #[error("{what} is {value}, but must be {allowed}")]
    OutOfRange {
        /// The parameter.
        what: String,
        /// Its value.
        value: u64,
        /// The allowed values.
        allowed: String,
    },
    /// The file is larger than one response may carry.
    #[error("{} is larger than {limit} bytes; read it in blocks", display(path))]
    TooLarge {
        /// The path.
        path: PathUri,
        /// The limit, in bytes.
        limit: u64,
    },
    /// The response needs more [memory](super::AnswerMemory) than is reserved. Never leaves a
    /// [`FileConnection`](super::FileConnection).
    #[error("the answer carries {bytes} bytes")]
    NeedsMemory {
        /// Bytes that the response would carry.
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
    /// A search or watch with this id is running.
    #[error("{what} `{id}` is in use")]
    IdTaken {
        /// "searchId" or "watchId".
        what: String,
        /// The id.
        id: String,
    },
    /// The connection has too many open handles, searches or watches.
    #[error("more than {limit} {what} on one connection; close some")]
    TooMany {
        /// What there are too many of.
        what: String,
        /// Their maximum.
        limit: u64,
    },
    /// A read from a handle for writing, or the reverse.
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
        /// Why the first block failed.
        cause: Box<FileError>,
    },
    /// `preserve` is set, and the directory is one that it protects, or contains one.
    #[error("{}: refusing to remove {what}{}", display(path), other_place(path, place))]
    Preserved {
        /// The path.
        path: PathUri,
        /// Why the place is preserved.
        what: Preserved,
        /// The preserved place.
        place: PathUri,
    },
    /// The request contradicts itself or the state of the tree.
    #[error("{}: {reason}", display(path))]
    Refused {
        /// The path.
        path: PathUri,
        /// The reason.
        reason: String,
    },
    /// A limit of the system or of the server was reached.
    #[error("{}: {reason}", display(path))]
    Limit {
        /// The path.
        path: PathUri,
        /// The limit.
        reason: String,
    },
    /// A pattern does not parse or is too large.
    #[error("invalid pattern `{pattern}`: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The reason.
        reason: String,
    },
    /// The request's sandbox cannot be set up; nothing ran.
    #[error("the sandbox cannot be enforced: {reason}")]
    Sandbox {
        /// The reason.
        reason: String,
    },
    /// The client cancelled the request or disconnected.
    #[error("request cancelled")]
    Cancelled,
    /// The helper process failed.
    #[error("file helper failed: {reason}")]
    Helper {
        /// The reason.
        reason: String,
    },
}

impl FileError {
    /// A failed system call.
    pub(crate) fn os(action: &str, path: &PathUri, errno: Errno) -> Self {
        Self::Os { action: action.into(), path: path.clone(), errno: errno.raw_os_error() }
    }

    /// A failed call of the standard library.
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

    /// The error kind to report.
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
            Self::Preserved { .. } => ErrorKind::Preserved,
            Self::Torn { cause, .. } => cause.kind(),
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Sandbox { .. } => ErrorKind::SandboxUnavailable,
            Self::Helper { .. } | Self::NeedsMemory { .. } => ErrorKind::Internal,
        }
    }

    /// The error code to report: a system error is an internal error, unless the request caused it.
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
            | Self::Preserved { .. }
            | Self::Pattern { .. }
            | Self::Sandbox { .. } => code::INVALID_REQUEST,
        }
    }

    /// Converts the error for a sandboxed request: reports a denial where a sandbox would cause this
    /// errno (a read-only mount, a mount boundary, a mount point, a missing permission).
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

/// Names the preserved place if it is not the path itself.
fn other_place(path: &PathUri, place: &PathUri) -> String {
    if path == place { String::new() } else { format!(", {}", display(place)) }
}

/// The system's message for an error number.
pub(crate) fn errno_message(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error codes from before there were kinds.
    fn code_of_errno(errno: i32) -> i64 {
        match Errno::from_raw_os_error(errno) {
            Errno::NOENT => code::NOT_FOUND,
            Errno::ACCESS | Errno::PERM | Errno::INVAL => code::INVALID_REQUEST,
            _ => code::INTERNAL_ERROR,
        }
    }

    #[test]
    fn every_errno_has_a_code_and_a_matching_kind() {
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
