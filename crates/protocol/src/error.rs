//! The JSON-RPC error object: its codes, and the kinds that are more precise than the codes.
//!
//! Invariant: programs decide by [`ErrorKind`] or by code, never by the message, which is for people and may
//! change at any time.

use std::fmt;
use std::io;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Malformed message, lifecycle violation, duplicate or unknown process, refused input.
pub const INVALID_REQUEST: i64 = -32600;
/// No such method.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// Params do not decode, or name something that this host does not have.
pub const INVALID_PARAMS: i64 = -32602;
/// The host failed: a spawn, an I/O error.
pub const INTERNAL_ERROR: i64 = -32603;
/// A file, directory or file handle does not exist.
pub const NOT_FOUND: i64 = -32004;
/// Another live connection holds the session.
pub const SESSION_ATTACHED: i64 = -32010;

/// Declares the kinds: variant, name in JSON, and the codes it is sent with.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $variant:ident $name:literal [$($code:ident)*];)*) => {
        /// What went wrong, for programs. Sent as `error.data.kind`.
        ///
        /// Kinds without [codes](Self::codes) are never sent: a client uses them for failures on its own
        /// side.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[doc = $doc])* $variant,)*
            /// A kind that this version does not know, or an error without one. Never sent.
            Unknown,
        }

        impl ErrorKind {
            /// Every kind with a name.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the wire.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Unknown => "unknown",
                }
            }

            /// What it means, in a sentence.
            #[cfg(feature = "schema")]
            pub(crate) fn summary(self) -> String {
                match self {
                    $(Self::$variant => concat!($($doc),*).trim_ascii().to_owned(),)*
                    Self::Unknown => String::new(),
                }
            }

            /// The codes it is sent with, the usual one first; empty if it is never sent.
            pub const fn codes(self) -> &'static [i64] {
                match self {
                    $(Self::$variant => &[$($code),*],)*
                    Self::Unknown => &[],
                }
            }
        }
    };
}

kinds! {
    /// Not a message of the protocol, or over a limit of one; an unexpected notification.
    MalformedMessage "malformedMessage" [INVALID_REQUEST];
    /// A method before `initialize` or `initialized`.
    NotInitialized "notInitialized" [INVALID_REQUEST];
    /// A second `initialize`.
    AlreadyInitialized "alreadyInitialized" [INVALID_REQUEST];
    /// No such method.
    MethodNotFound "methodNotFound" [METHOD_NOT_FOUND];
    /// Params that do not decode, are out of range or contradict each other.
    InvalidParams "invalidParams" [INVALID_PARAMS INVALID_REQUEST INTERNAL_ERROR];
    /// Something that this server, or the file system, does not offer.
    Unsupported "unsupported" [INVALID_PARAMS INTERNAL_ERROR];
    /// No session has this id: it has ended, or never was.
    UnknownSession "unknownSession" [INVALID_REQUEST];
    /// The server is about to stop, and opens no new sessions.
    Draining "draining" [INVALID_REQUEST];
    /// Another connection holds the session.
    SessionAttached "sessionAttached" [SESSION_ATTACHED];
    /// The connection has a role in its session that only reads.
    ViewOnly "viewOnly" [INVALID_REQUEST];
    /// The session ended while the request was under way.
    SessionEnded "sessionEnded" [INTERNAL_ERROR INVALID_REQUEST];
    /// The session has a process of this id.
    ProcessExists "processExists" [INVALID_REQUEST];
    /// The session has no process of this id, or no longer.
    UnknownProcess "unknownProcess" [INVALID_REQUEST];
    /// The process has no terminal.
    NoTerminal "noTerminal" [INVALID_REQUEST];
    /// There is no such program, or not the interpreter that it names.
    ProgramNotFound "programNotFound" [INTERNAL_ERROR];
    /// The program is there and cannot be executed.
    ProgramNotExecutable "programNotExecutable" [INTERNAL_ERROR];
    /// The working directory does not exist, or is no directory.
    WorkingDirectoryMissing "workingDirectoryMissing" [INTERNAL_ERROR];
    /// The working directory cannot be entered, or not in this sandbox.
    WorkingDirectoryDenied "workingDirectoryDenied" [INTERNAL_ERROR INVALID_PARAMS];
    /// The sandbox cannot be enforced here; nothing ran.
    SandboxUnavailable "sandboxUnavailable" [INVALID_PARAMS INVALID_REQUEST INTERNAL_ERROR];
    /// The server's operator does not permit it to any client.
    OperatorPolicy "operatorPolicy" [INVALID_PARAMS];
    /// The sandbox does not permit it.
    DeniedBySandbox "deniedBySandbox" [INVALID_REQUEST];
    /// The path does not exist.
    PathNotFound "pathNotFound" [NOT_FOUND];
    /// No file handle has this id.
    UnknownFileHandle "unknownFileHandle" [NOT_FOUND];
    /// A file handle, search, watch or HTTP request of this id is open.
    IdInUse "idInUse" [INVALID_REQUEST INVALID_PARAMS];
    /// The system does not permit it.
    PermissionDenied "permissionDenied" [INVALID_REQUEST];
    /// Something of that name exists.
    AlreadyExists "alreadyExists" [INTERNAL_ERROR];
    /// A component of the path is not a directory.
    NotADirectory "notADirectory" [INTERNAL_ERROR];
    /// A directory where none is expected.
    IsADirectory "isADirectory" [INTERNAL_ERROR];
    /// A directory, FIFO, socket or device where a regular file is needed.
    NotARegularFile "notARegularFile" [INVALID_REQUEST];
    /// The directory is not empty.
    DirectoryNotEmpty "directoryNotEmpty" [INTERNAL_ERROR];
    /// A symbolic link under `followSymlinks: false`.
    SymlinkRefused "symlinkRefused" [INVALID_REQUEST];
    /// Too many levels of symbolic links, or a name that is too long.
    InvalidPath "invalidPath" [INTERNAL_ERROR];
    /// The file system is mounted read-only.
    ReadOnlyFileSystem "readOnlyFileSystem" [INTERNAL_ERROR];
    /// The two paths are on different file systems.
    CrossDevice "crossDevice" [INTERNAL_ERROR];
    /// It is in use: a mount point, an executable that runs.
    Busy "busy" [INTERNAL_ERROR];
    /// A file larger than one answer, or than the file system takes.
    TooLarge "tooLarge" [INVALID_REQUEST INTERNAL_ERROR];
    /// No space is left on the device.
    DiskFull "diskFull" [INTERNAL_ERROR];
    /// The user's disk quota is used up.
    QuotaExceeded "quotaExceeded" [INTERNAL_ERROR];
    /// A limit of the server or of the system: handles, watches, retained output, processes, memory.
    LimitReached "limitReached" [INVALID_REQUEST INVALID_PARAMS INTERNAL_ERROR];
    /// A filesystem request that makes no sense on what is there, such as a copy of a directory into
    /// itself.
    Refused "refused" [INVALID_REQUEST];
    /// `preserve` is set, and the directory is one that it protects.
    Preserved "preserved" [INVALID_REQUEST];
    /// The request was cancelled.
    Cancelled "cancelled" [INTERNAL_ERROR];
    /// `http/request` got no answer, or not all of it.
    HttpFailed "httpFailed" [INTERNAL_ERROR];
    /// A configuration file of the server cannot be used.
    InvalidConfig "invalidConfig" [INTERNAL_ERROR];
    /// Any other error of the system.
    IoError "ioError" [INTERNAL_ERROR];
    /// The server failed; its log says more.
    Internal "internal" [INTERNAL_ERROR];

    /// Nothing listens at the address.
    ConnectionRefused "connectionRefused" [];
    /// No connection came about.
    Unreachable "unreachable" [];
    /// The server or the registry refused the token or sign-in.
    TokenRefused "tokenRefused" [];
    /// The registry knows the environment, and its server is not connected.
    EnvironmentOffline "environmentOffline" [];
    /// The registry does not know the environment.
    EnvironmentNotFound "environmentNotFound" [];
    /// The command that was to be the server ended before the session began.
    CommandEnded "commandEnded" [];
    /// The connection ended before the answer came, or was closed.
    ConnectionLost "connectionLost" [];
    /// No answer came in time.
    TimedOut "timedOut" [];
    /// Output or notifications were dropped before they could be read.
    OutputLost "outputLost" [];
    /// The process takes no input.
    StdinClosed "stdinClosed" [];
    /// The peer does not speak the protocol, or broke it.
    ProtocolViolation "protocolViolation" [];
}

impl ErrorKind {
    /// The kind with this name; [`Unknown`](Self::Unknown) if this version does not know it.
    pub fn from_name(name: &str) -> Self {
        Self::ALL.iter().copied().find(|kind| kind.name() == name).unwrap_or(Self::Unknown)
    }

    /// The kind of a system error in a file operation.
    pub fn of_io(error: &io::Error) -> Self {
        use io::ErrorKind as Io;
        // These have no stable counterpart in the standard library.
        const ENFILE: i32 = 23;
        const EMFILE: i32 = 24;
        const ELOOP: i32 = 40;
        match error.raw_os_error() {
            Some(ENFILE | EMFILE) => return Self::LimitReached,
            Some(ELOOP) => return Self::InvalidPath,
            _ => {}
        }
        match error.kind() {
            Io::NotFound => Self::PathNotFound,
            Io::PermissionDenied => Self::PermissionDenied,
            Io::AlreadyExists => Self::AlreadyExists,
            Io::NotADirectory => Self::NotADirectory,
            Io::IsADirectory => Self::IsADirectory,
            Io::DirectoryNotEmpty => Self::DirectoryNotEmpty,
            Io::InvalidInput => Self::InvalidParams,
            Io::InvalidFilename => Self::InvalidPath,
            Io::ReadOnlyFilesystem => Self::ReadOnlyFileSystem,
            Io::CrossesDevices => Self::CrossDevice,
            Io::ResourceBusy | Io::ExecutableFileBusy => Self::Busy,
            Io::FileTooLarge => Self::TooLarge,
            Io::StorageFull => Self::DiskFull,
            Io::QuotaExceeded => Self::QuotaExceeded,
            Io::WouldBlock | Io::OutOfMemory | Io::TooManyLinks | Io::ArgumentListTooLong => {
                Self::LimitReached
            }
            Io::Unsupported => Self::Unsupported,
            _ => Self::IoError,
        }
    }

    /// The kind of an `execve` error, with the distinctions that shells make.
    pub fn of_exec(error: &io::Error) -> Self {
        match Self::of_io(error) {
            Self::PathNotFound => Self::ProgramNotFound,
            Self::LimitReached => Self::LimitReached,
            _ => Self::ProgramNotExecutable,
        }
    }

    /// The kind of an error on entering the working directory.
    pub fn of_chdir(error: &io::Error) -> Self {
        match Self::of_io(error) {
            Self::PathNotFound | Self::NotADirectory | Self::InvalidPath => {
                Self::WorkingDirectoryMissing
            }
            Self::LimitReached => Self::LimitReached,
            _ => Self::WorkingDirectoryDenied,
        }
    }

    /// The kind of an error that is not about a path: a shortage of resources, or an internal error.
    pub fn of_system(error: &io::Error) -> Self {
        match Self::of_io(error) {
            shortage @ (Self::LimitReached | Self::DiskFull | Self::QuotaExceeded) => shortage,
            _ => Self::Internal,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for ErrorKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ErrorKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::from_name(&String::deserialize(deserializer)?))
    }
}

/// The error object of a response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} (code {code})")]
pub struct RpcError {
    /// One of this module's constants, or a peer's own code.
    pub code: i64,
    /// The message for people; it says what to do if something can be done.
    pub message: String,
    /// The kind, for programs. `None` if the peer sent none, [`ErrorKind::Unknown`] if this version does
    /// not know it.
    #[serde(default, rename = "data", with = "data", skip_serializing_if = "data::is_empty")]
    pub kind: Option<ErrorKind>,
}

impl RpcError {
    fn new(code: i64, kind: ErrorKind, message: impl Into<String>) -> Self {
        debug_assert!(kind.codes().contains(&code), "{kind} is not sent with {code}");
        Self { code, message: message.into(), kind: Some(kind) }
    }

    /// An error with the code [`INVALID_REQUEST`].
    pub fn invalid_request(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(INVALID_REQUEST, kind, message)
    }

    /// An error with the code [`METHOD_NOT_FOUND`], for this method.
    pub fn method_not_found(method: &str) -> Self {
        let message = format!("unknown method `{method}`");
        Self::new(METHOD_NOT_FOUND, ErrorKind::MethodNotFound, message)
    }

    /// An error with the code [`INVALID_PARAMS`].
    pub fn invalid_params(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, kind, message)
    }

    /// An error with the code [`INTERNAL_ERROR`].
    pub fn internal(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(INTERNAL_ERROR, kind, message)
    }

    /// An error with the code [`NOT_FOUND`].
    pub fn not_found(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(NOT_FOUND, kind, message)
    }

    /// An error with the code [`SESSION_ATTACHED`].
    pub fn session_attached(message: impl Into<String>) -> Self {
        Self::new(SESSION_ATTACHED, ErrorKind::SessionAttached, message)
    }
}

/// `error.data`: an object with the member `kind`. Anything else that a peer puts there is ignored.
mod data {
    use serde::de::IgnoredAny;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::ErrorKind;

    #[derive(Serialize, Deserialize)]
    struct KindObject {
        kind: ErrorKind,
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Data {
        WithKind(KindObject),
        Other(IgnoredAny),
    }

    pub(super) fn is_empty(kind: &Option<ErrorKind>) -> bool {
        matches!(kind, None | Some(ErrorKind::Unknown))
    }

    pub(super) fn serialize<S: Serializer>(
        kind: &Option<ErrorKind>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        kind.map(|kind| KindObject { kind }).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<ErrorKind>, D::Error> {
        Ok(match Data::deserialize(deserializer)? {
            Data::WithKind(KindObject { kind }) => Some(kind),
            Data::Other(IgnoredAny) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> RpcError {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn error_kinds_round_trip() {
        for &kind in ErrorKind::ALL {
            let error = RpcError { code: 1, message: "no".into(), kind: Some(kind) };
            let text = serde_json::to_string(&error).unwrap();
            let name = kind.name();
            assert_eq!(text, format!(r#"{{"code":1,"message":"no","data":{{"kind":"{name}"}}}}"#));
            assert_eq!(parse(&text), error);
            assert!(name.chars().all(|c| c.is_ascii_alphabetic()), "{name}");
            assert!(name.starts_with(|c: char| c.is_ascii_lowercase()), "{name}");
            // The name is the variant's, in the other case.
            assert_eq!(format!("{kind:?}").to_lowercase(), name.to_lowercase());
        }
    }

    #[test]
    fn foreign_error_data_is_ignored() {
        for data in ["null", "1", "\"x\"", "[]", "[{}]", "{}", r#"{"a":{"kind":"busy"}}"#] {
            let error = parse(&format!(r#"{{"code":-1,"message":"m","data":{data}}}"#));
            assert_eq!((error.code, error.kind), (-1, None), "{data}");
        }
        for kind in ["null", "5", "{}", "[\"busy\"]", "true"] {
            let text = format!(r#"{{"code":-1,"message":"m","data":{{"kind":{kind}}}}}"#);
            assert_eq!(parse(&text).kind, None, "{kind}");
        }
        let more = r#"{"code":-1,"message":"m","data":{"x":[1.5,{"y":null}],"kind":"busy"}}"#;
        assert_eq!(parse(more).kind, Some(ErrorKind::Busy));
        assert_eq!(parse(r#"{"code":-1,"message":"m"}"#).kind, None);
    }

    #[test]
    fn unknown_error_kind_is_not_forwarded() {
        let error = parse(r#"{"code":-1,"message":"m","data":{"kind":"ofTomorrow"}}"#);
        assert_eq!(error.kind, Some(ErrorKind::Unknown));
        assert_eq!(serde_json::to_string(&error).unwrap(), r#"{"code":-1,"message":"m"}"#);
    }

    #[test]
    fn os_errors_map_to_kinds() {
        for (errno, kind) in [
            (2, ErrorKind::PathNotFound),
            (1, ErrorKind::PermissionDenied),
            (13, ErrorKind::PermissionDenied),
            (11, ErrorKind::LimitReached),
            (12, ErrorKind::LimitReached),
            (16, ErrorKind::Busy),
            (17, ErrorKind::AlreadyExists),
            (18, ErrorKind::CrossDevice),
            (20, ErrorKind::NotADirectory),
            (21, ErrorKind::IsADirectory),
            (22, ErrorKind::InvalidParams),
            (23, ErrorKind::LimitReached),
            (24, ErrorKind::LimitReached),
            (26, ErrorKind::Busy),
            (27, ErrorKind::TooLarge),
            (28, ErrorKind::DiskFull),
            (30, ErrorKind::ReadOnlyFileSystem),
            (36, ErrorKind::InvalidPath),
            (39, ErrorKind::DirectoryNotEmpty),
            (40, ErrorKind::InvalidPath),
            (122, ErrorKind::QuotaExceeded),
            (7, ErrorKind::LimitReached),
            (5, ErrorKind::IoError),
            (95, ErrorKind::Unsupported),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(ErrorKind::of_io(&error), kind, "{error}");
        }
        let kinds = |errno| {
            let error = io::Error::from_raw_os_error(errno);
            (ErrorKind::of_exec(&error), ErrorKind::of_chdir(&error), ErrorKind::of_system(&error))
        };
        use ErrorKind::*;
        assert_eq!(kinds(2), (ProgramNotFound, WorkingDirectoryMissing, Internal));
        assert_eq!(kinds(8), (ProgramNotExecutable, WorkingDirectoryDenied, Internal));
        assert_eq!(kinds(11), (LimitReached, LimitReached, LimitReached));
        assert_eq!(kinds(13), (ProgramNotExecutable, WorkingDirectoryDenied, Internal));
        assert_eq!(kinds(20), (ProgramNotExecutable, WorkingDirectoryMissing, Internal));
        assert_eq!(kinds(28), (ProgramNotExecutable, WorkingDirectoryDenied, DiskFull));
    }
}
