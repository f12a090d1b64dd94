//! Infers the kinds of errors from servers that send none: another implementation, and older versions of
//! this one.
//!
//! Invariant: this is the only place that reads an error's message. A kind that a server sends is never
//! changed, even if this version does not know it.

use std::io;

use codex_exec_server_protocol::error as code;
use codex_exec_server_protocol::{ErrorKind, Family, Method, RpcError};

/// Gives an error without a kind the kind that its code and message imply.
pub(crate) fn with_inferred_kind(method: Method, mut error: RpcError) -> RpcError {
    if error.kind.is_none() {
        error.kind = recognize(method, error.code, &error.message);
    }
    error
}

/// The methods that a row applies to.
#[derive(Clone, Copy)]
enum Methods {
    All,
    One(Method),
    Files,
}

/// The messages that a row applies to.
#[derive(Clone, Copy)]
enum MessagePattern {
    Any,
    StartsWith(&'static str),
    EndsWith(&'static str),
    Contains(&'static str),
}

/// The kind that a row implies.
#[derive(Clone, Copy)]
enum Meaning {
    Kind(ErrorKind),
    /// The kind of the system error at the end of the message.
    Errno(fn(&io::Error) -> ErrorKind),
}

/// The first row that matches decides.
const TABLE: &[(Methods, i64, MessagePattern, Meaning)] = {
    use ErrorKind::*;
    use Meaning::{Errno, Kind};
    use MessagePattern::{Any, Contains, EndsWith, StartsWith};
    use Methods::{All, Files, One};
    const START: Methods = One(Method::ProcessStart);
    const OPENING: Methods = One(Method::Initialize);
    &[
        (All, code::METHOD_NOT_FOUND, Any, Kind(MethodNotFound)),
        (All, code::SESSION_ATTACHED, Any, Kind(SessionAttached)),
        (All, code::INVALID_REQUEST, StartsWith("client must "), Kind(NotInitialized)),
        (OPENING, code::INVALID_REQUEST, StartsWith("unknown session id"), Kind(UnknownSession)),
        (OPENING, code::INVALID_REQUEST, StartsWith("initialize "), Kind(AlreadyInitialized)),
        (START, code::INVALID_REQUEST, EndsWith("already exists"), Kind(ProcessExists)),
        (START, code::INVALID_REQUEST, EndsWith("already in use"), Kind(ProcessExists)),
        // A message that does not name the directory may still be about it.
        (START, code::INTERNAL_ERROR, Contains("working directory"), Errno(ErrorKind::of_chdir)),
        (START, code::INTERNAL_ERROR, Contains("candidates found in PATH"), Kind(ProgramNotFound)),
        (START, code::INTERNAL_ERROR, Any, Errno(ErrorKind::of_exec)),
        (
            START,
            code::INVALID_PARAMS,
            StartsWith("working directory "),
            Kind(WorkingDirectoryDenied),
        ),
        // A read fails with this code only for an unknown process.
        (One(Method::ProcessRead), code::INVALID_REQUEST, Any, Kind(UnknownProcess)),
        (All, code::INVALID_REQUEST, StartsWith("unknown process id"), Kind(UnknownProcess)),
        (Files, code::NOT_FOUND, StartsWith("unknown file handle"), Kind(UnknownFileHandle)),
        (Files, code::NOT_FOUND, Any, Kind(PathNotFound)),
        (Files, code::INVALID_REQUEST, StartsWith("file handle "), Kind(IdInUse)),
        (Files, code::INVALID_REQUEST, EndsWith(" is not a file"), Kind(NotARegularFile)),
        (Files, code::INVALID_REQUEST, Any, Errno(ErrorKind::of_io)),
        (Files, code::INTERNAL_ERROR, Any, Errno(ErrorKind::of_io)),
        (One(Method::HttpRequest), code::INTERNAL_ERROR, Any, Kind(HttpFailed)),
        (All, code::INVALID_PARAMS, Any, Kind(InvalidParams)),
    ]
};

fn recognize(method: Method, code: i64, message: &str) -> Option<ErrorKind> {
    TABLE.iter().filter(|row| row.1 == code && row.0.includes(method)).find_map(
        |(_, _, pattern, meaning)| match meaning {
            _ if !pattern.matches(message) => None,
            Meaning::Kind(kind) => Some(*kind),
            Meaning::Errno(kind_of) => Some(kind_of(&system_error(message)?)),
        },
    )
}

impl Methods {
    fn includes(self, method: Method) -> bool {
        match self {
            Self::All => true,
            Self::One(one) => one == method,
            Self::Files => method.family() == Family::Filesystem,
        }
    }
}

impl MessagePattern {
    fn matches(self, message: &str) -> bool {
        match self {
            Self::Any => true,
            Self::StartsWith(text) => message.starts_with(text),
            Self::EndsWith(text) => message.ends_with(text),
            Self::Contains(text) => message.contains(text),
        }
    }
}

/// The system error at the end of a Rust program's message: `… (os error 2)`.
fn system_error(message: &str) -> Option<io::Error> {
    let (_, number) = message.strip_suffix(')')?.rsplit_once("(os error ")?;
    Some(io::Error::from_raw_os_error(number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use codex_exec_server_protocol::FileMethod;

    use super::*;
    use ErrorKind::*;
    use Method::*;

    /// Errors of the released program (0.166.0), and their kinds.
    const RELEASED: &[(Method, i64, &str, Option<ErrorKind>)] = &[
        (
            ProcessRead,
            -32600,
            "client must call initialize before using exec methods",
            Some(NotInitialized),
        ),
        (
            Initialize,
            -32600,
            "initialize may only be sent once per connection",
            Some(AlreadyInitialized),
        ),
        (Initialize, -32600, "unknown session id nope", Some(UnknownSession)),
        (ProcessStart, -32600, "process a already exists", Some(ProcessExists)),
        (ProcessStart, -32603, "No such file or directory (os error 2)", Some(ProgramNotFound)),
        (ProcessStart, -32603, "Permission denied (os error 13)", Some(ProgramNotExecutable)),
        (ProcessStart, -32603, "Exec format error (os error 8)", Some(ProgramNotExecutable)),
        (ProcessStart, -32603, "Not a directory (os error 20)", Some(ProgramNotExecutable)),
        (
            ProcessStart,
            -32603,
            "Unable to spawn x because:\nNo viable candidates found in PATH \"/bin\"",
            Some(ProgramNotFound),
        ),
        (ProcessStart, -32602, "argv must not be empty", Some(InvalidParams)),
        (ProcessStart, -32603, "nul byte found in provided data", None),
        (ProcessRead, -32600, "unknown process id none", Some(UnknownProcess)),
        (
            ProcessResize,
            -32601,
            "exec-server stub does not implement `process/resize` yet",
            Some(MethodNotFound),
        ),
        (
            File(FileMethod::ReadFile),
            -32004,
            "No such file or directory (os error 2)",
            Some(PathNotFound),
        ),
        (File(FileMethod::ReadFile), -32600, "path `/srv` is not a file", Some(NotARegularFile)),
        (
            File(FileMethod::ReadFile),
            -32600,
            "Permission denied (os error 13)",
            Some(PermissionDenied),
        ),
        (
            File(FileMethod::ReadDirectory),
            -32603,
            "Not a directory (os error 20)",
            Some(NotADirectory),
        ),
        (
            File(FileMethod::Remove),
            -32603,
            "Directory not empty (os error 39)",
            Some(DirectoryNotEmpty),
        ),
        (
            File(FileMethod::CreateDirectory),
            -32603,
            "File exists (os error 17)",
            Some(AlreadyExists),
        ),
        (File(FileMethod::WriteFile), -32603, "Is a directory (os error 21)", Some(IsADirectory)),
        (
            File(FileMethod::WriteFile),
            -32603,
            "No space left on device (os error 28)",
            Some(DiskFull),
        ),
        (File(FileMethod::Open), -32600, "file handle `h` already exists", Some(IdInUse)),
        (File(FileMethod::ReadBlock), -32004, "unknown file handle `h`", Some(UnknownFileHandle)),
        (File(FileMethod::Walk), -32600, "filesystem walk limits must be greater than zero", None),
        (
            HttpRequest,
            -32603,
            "http/request failed: error sending request for url (http://127.0.0.1:1/)",
            Some(HttpFailed),
        ),
    ];

    /// Errors of this project's servers before they sent kinds.
    const OLDER: &[(Method, i64, &str, Option<ErrorKind>)] = &[
        (ProcessStart, -32600, "process id p is already in use", Some(ProcessExists)),
        (
            ProcessStart,
            -32603,
            "cannot start `x`: cannot execute the program: No such file or directory (os error 2)",
            Some(ProgramNotFound),
        ),
        (
            ProcessStart,
            -32603,
            "cannot start `x`: cannot enter the working directory: No such file or directory (os error 2)",
            Some(WorkingDirectoryMissing),
        ),
        (
            ProcessStart,
            -32602,
            "working directory `/x` is not readable under this policy",
            Some(WorkingDirectoryDenied),
        ),
        (Initialize, -32010, "session s is attached to another connection", Some(SessionAttached)),
    ];

    #[test]
    fn errors_without_kinds_are_recognized() {
        for &(method, code, message, kind) in RELEASED.iter().chain(OLDER) {
            let error = RpcError { code, message: message.to_owned(), kind: None };
            let known = with_inferred_kind(method, error.clone());
            assert_eq!(known.kind, kind, "{method:?} {error}");
            assert_eq!((known.code, known.message), (error.code, error.message));
        }
    }

    #[test]
    fn a_sent_kind_is_not_changed_by_the_message() {
        for &(method, code, message, _) in RELEASED {
            for kind in [Busy, Unknown] {
                let error = RpcError { code, message: message.to_owned(), kind: Some(kind) };
                assert_eq!(with_inferred_kind(method, error).kind, Some(kind), "{message}");
            }
        }
    }

    #[test]
    fn messages_of_other_methods_imply_no_kind() {
        for method in [EnvironmentInfo, ProcessList, File(FileMethod::ReadFile)] {
            for words in ["process a already exists", "unknown session id nope"] {
                assert_eq!(recognize(method, -32600, words), None, "{method:?} {words}");
            }
        }
        for message in ["", ")", "(os error 2", "(os error x)", "os error 2)", "(os error 2) so"] {
            assert_eq!(recognize(File(FileMethod::WriteFile), -32603, message), None, "{message}");
        }
    }
}
