//! Errors, distinguished by what the caller can do about them.
//!
//! Invariant: every message says what to do; none shows a token, the value of a variable or the content
//! of a file.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::DialError;
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::{ErrorKind, RpcError, error as code};

/// Why a call, a process handle or a transfer failed. Cheap to clone.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ExecServerError {
    /// The client cannot connect.
    #[error("cannot connect to {endpoint}: {cause}")]
    Connect {
        /// The server's address, without secrets.
        endpoint: String,
        /// Why the dial failed.
        #[source]
        cause: DialFailure,
    },

    /// The peer does not speak the protocol, or broke it.
    #[error("{during}: {detail}; check that the server is an exec-server of a supported version")]
    Protocol {
        /// What the client was doing.
        during: String,
        /// How the peer violated the protocol.
        detail: String,
    },

    /// The server responded with an error.
    #[error("the server refused {method}: {message}{}", hint(*.code))]
    Server {
        /// The method of the request.
        method: &'static str,
        /// One of the codes in [`protocol::error`](codex_exec_server_protocol::error).
        code: i64,
        /// The server's message, for people only.
        message: String,
        /// The kind of the error; [`ErrorKind::Unknown`] if the server sent none.
        kind: ErrorKind,
    },

    /// No response in time. A request that changes something may have taken effect.
    #[error(
        "no response to {method} within {} s; {}",
        after.as_secs_f32(),
        if *.changes {
            "it may have taken effect: check before you retry, or raise the timeout"
        } else {
            "try again, or raise the timeout"
        }
    )]
    Timeout {
        /// The method of the request.
        method: &'static str,
        /// The timeout.
        after: Duration,
        /// Whether the request changes something.
        changes: bool,
    },

    /// The client was closed, or its connection ended and it does not reconnect.
    #[error("the connection is closed: {reason}; connect again")]
    Closed {
        /// Why it is closed.
        reason: String,
    },

    /// Something is lost that no retry recovers.
    #[error(transparent)]
    Lost(#[from] Lost),

    /// The server lacks a capability that this needs.
    #[error("this server cannot {what}; {instead}")]
    Unsupported {
        /// What the caller asked for.
        what: String,
        /// What to do instead.
        instead: String,
    },

    /// The process does not accept input.
    #[error("process {process} takes no input: {why}")]
    Stdin {
        /// The process.
        process: ProcessId,
        /// Why, and what to do.
        why: &'static str,
    },

    /// The caller's argument is invalid; the message says how.
    #[error("{0}")]
    Invalid(String),

    /// A local file operation failed.
    #[error("{doing}: {cause}")]
    Local {
        /// What the client was doing.
        doing: String,
        /// The error of the system.
        #[source]
        cause: Arc<io::Error>,
    },
}

/// What is lost for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Lost {
    /// The session, and with it every process and all output that had not arrived.
    #[error(
        "session {} is lost: {reason}; its processes end and their unread output is gone; connect \
         again and start over",
        session.as_deref().unwrap_or("(unnamed)")
    )]
    Session {
        /// Its id, if the server sent one.
        session: Option<String>,
        /// Why it cannot be resumed.
        reason: String,
    },

    /// The part in a session that another client took; its processes keep running.
    #[error("another client took the session over; its processes keep running")]
    Taken,

    /// Output that the server dropped before the client could read it again.
    #[error(
        "{} of process {process} are lost: the server no longer retains them; read faster, or start it with a larger `retain`",
        amount(*.chunks, *.bytes)
    )]
    Output {
        /// The process that wrote it.
        process: ProcessId,
        /// The number of chunks.
        chunks: u64,
        /// The number of bytes, if the server counts them.
        bytes: Option<u64>,
    },

    /// Output that the client had spooled to disk for a slow consumer.
    #[error(
        "{bytes} bytes of output are lost: they were spooled to a temporary file that cannot be \
         read back ({why}); read faster, or check the disk"
    )]
    Spooled {
        /// The number of bytes.
        bytes: u64,
        /// The error of the system.
        why: String,
    },

    /// A process that the server no longer knows.
    #[error(
        "the server no longer knows process {process}: its exit code and any output after the last \
         event are lost; the server keeps results for a short time only, so read them sooner"
    )]
    Process {
        /// The process.
        process: ProcessId,
    },

    /// The response to a request that was pending when the connection died.
    #[error(
        "the connection was lost during {method}; it may have taken effect: check before you retry"
    )]
    Response {
        /// The method of the request.
        method: &'static str,
    },

    /// Notifications that arrived faster than the caller read them.
    #[error("{count} notifications of {name} were dropped because they were not read in time")]
    Notifications {
        /// The name of the notification.
        name: &'static str,
        /// How many were dropped.
        count: u64,
    },
}

/// Why a [`Dialer`](crate::Dialer) failed to connect.
#[derive(Clone)]
pub struct DialFailure {
    permanent: bool,
    kind: ErrorKind,
    source: Arc<dyn Error + Send + Sync>,
}

impl DialFailure {
    /// A failure after which the next attempt can succeed. Its kind is
    /// [`ErrorKind::Unreachable`].
    pub fn transient(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { permanent: false, kind: ErrorKind::Unreachable, source: source.into().into() }
    }

    /// A failure after which the client does not try again. Its kind is
    /// [`ErrorKind::Unreachable`].
    pub fn permanent(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { permanent: true, kind: ErrorKind::Unreachable, source: source.into().into() }
    }

    /// The same failure with this kind.
    #[must_use]
    pub fn of_kind(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }

    /// The kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether trying again is useless.
    pub fn is_permanent(&self) -> bool {
        self.permanent
    }
}

impl fmt::Debug for DialFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DialFailure")
            .field("permanent", &self.permanent)
            .field("kind", &self.kind)
            .field("source", &self.source.to_string())
            .finish()
    }
}

impl fmt::Display for DialFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for DialFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

impl From<DialError> for DialFailure {
    fn from(error: DialError) -> Self {
        let (permanent, kind) = (error.is_permanent(), dial_kind(&error));
        Self { permanent, kind, source: Arc::new(error) }
    }
}

/// The kind of a failure to dial.
pub(crate) fn dial_kind(error: &DialError) -> ErrorKind {
    match error {
        DialError::Tcp { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused => {
            ErrorKind::ConnectionRefused
        }
        DialError::Refused { .. } => ErrorKind::TokenRefused,
        DialError::NotWebsocket { .. } => ErrorKind::ProtocolViolation,
        DialError::Timeout { .. } => ErrorKind::TimedOut,
        DialError::Url { .. } | DialError::Token => ErrorKind::InvalidParams,
        DialError::Resolve { .. }
        | DialError::Tcp { .. }
        | DialError::Tls { .. }
        | DialError::Proxy { .. } => ErrorKind::Unreachable,
    }
}

impl ExecServerError {
    /// The kind of the error, for programs: the server's, or that of a local failure.
    /// [`ErrorKind::Unknown`] if the server sent none that this version knows.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { cause, .. } => cause.kind(),
            Self::Protocol { .. } => ErrorKind::ProtocolViolation,
            Self::Server { kind, .. } => *kind,
            Self::Timeout { .. } => ErrorKind::TimedOut,
            Self::Closed { .. } | Self::Lost(Lost::Response { .. }) => ErrorKind::ConnectionLost,
            Self::Lost(Lost::Session { .. }) => ErrorKind::SessionEnded,
            Self::Lost(Lost::Taken) => ErrorKind::SessionAttached,
            Self::Lost(Lost::Process { .. }) => ErrorKind::UnknownProcess,
            Self::Lost(Lost::Output { .. } | Lost::Spooled { .. } | Lost::Notifications { .. }) => {
                ErrorKind::OutputLost
            }
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::Stdin { .. } => ErrorKind::StdinClosed,
            Self::Invalid(_) => ErrorKind::InvalidParams,
            Self::Local { cause, .. } => ErrorKind::of_io(cause),
        }
    }

    /// The message for a person who does not know the protocol: the server's own words, without the name of
    /// a method.
    pub(crate) fn for_people(&self) -> String {
        match self {
            Self::Server { message, .. } => message.clone(),
            other => other.to_string(),
        }
    }

    /// The error code, if the server responded with an error.
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::Server { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the server reported that a file, directory or file handle does not exist.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(code::NOT_FOUND)
    }

    /// Whether the server does not know the method.
    pub fn is_method_not_found(&self) -> bool {
        self.code() == Some(code::METHOD_NOT_FOUND)
    }

    /// Whether the request may have taken effect although it failed.
    pub fn may_have_taken_effect(&self) -> bool {
        matches!(self, Self::Timeout { changes: true, .. }) || self.is_interrupted()
    }

    /// Whether the connection ended before the response arrived.
    pub(crate) fn is_interrupted(&self) -> bool {
        matches!(self, Self::Lost(Lost::Response { .. }))
    }

    /// An error response to `method`.
    pub(crate) fn server(method: &'static str, error: RpcError) -> Self {
        let kind = error.kind.unwrap_or(ErrorKind::Unknown);
        Self::Server { method, code: error.code, message: error.message, kind }
    }

    pub(crate) fn protocol(during: impl Into<String>, detail: impl fmt::Display) -> Self {
        Self::Protocol { during: during.into(), detail: detail.to_string() }
    }

    pub(crate) fn local(doing: impl Into<String>, cause: io::Error) -> Self {
        // Unwraps an error of this type that passed through an `io` trait.
        match cause.downcast::<Self>() {
            Ok(own) => own,
            Err(cause) => Self::Local { doing: doing.into(), cause: Arc::new(cause) },
        }
    }
}

impl From<ExecServerError> for io::Error {
    fn from(error: ExecServerError) -> Self {
        let kind = match &error {
            ExecServerError::Closed { .. } => io::ErrorKind::NotConnected,
            ExecServerError::Lost(_) => io::ErrorKind::ConnectionAborted,
            ExecServerError::Timeout { .. } => io::ErrorKind::TimedOut,
            ExecServerError::Stdin { .. } => io::ErrorKind::BrokenPipe,
            ExecServerError::Unsupported { .. } => io::ErrorKind::Unsupported,
            ExecServerError::Invalid(_) => io::ErrorKind::InvalidInput,
            ExecServerError::Connect { .. } => io::ErrorKind::ConnectionRefused,
            ExecServerError::Protocol { .. } => io::ErrorKind::InvalidData,
            ExecServerError::Server { code: code::NOT_FOUND, .. } => io::ErrorKind::NotFound,
            ExecServerError::Server { .. } => io::ErrorKind::Other,
            ExecServerError::Local { cause, .. } => cause.kind(),
        };
        Self::new(kind, error)
    }
}

/// What to do about an error with this code, if the code alone says it.
fn hint(code: i64) -> &'static str {
    match code {
        code::METHOD_NOT_FOUND => "; this server does not support it: see its capabilities",
        code::SESSION_ATTACHED => {
            "; another connection holds the session: close it, or wait until the server detects \
             that it is gone"
        }
        _ => "",
    }
}

fn amount(chunks: u64, bytes: Option<u64>) -> String {
    match bytes {
        Some(bytes) => format!("{bytes} bytes of output"),
        None if chunks == 1 => "1 chunk of output".to_owned(),
        None => format!("{chunks} chunks of output"),
    }
}
