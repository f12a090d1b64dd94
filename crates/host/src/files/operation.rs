//! Filesystem requests as data, to run here or in another process.
//!
//! Invariant: an [`Operation`] carries everything it needs, except the transport of file contents and
//! the sandbox, which has already determined the helper.

use bytes::Bytes;
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{
    Call, Effect, FileMethod, Order, SandboxContext, call, file_methods,
};
use serde::{Deserialize, Serialize};

use super::FileError;
use super::executor::{OperationContext, Perform};

/// Part of the result of a running operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The response of an operation that continues to run (a watch).
    Started(Outcome),
    /// A notification for the client.
    Notify(FileNotification),
}

/// A notification for the client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileNotification {
    /// Matching lines: `fs/search/matches`.
    SearchMatches(FsSearchMatchesNotification),
    /// Changes of a watched path: `fs/changed`.
    Changed(FsChangedNotification),
    /// The only notification of an `fs/watchMissing`: `fs/missingChanged`.
    MissingChanged(FsMissingChangedNotification),
}

/// The params of a file request.
pub trait FileRequest: Into<Operation> + Send + 'static {
    /// The response.
    type Response: Send + 'static;

    /// The method.
    const METHOD: FileMethod;

    /// Removes and returns the sandbox of the request.
    fn take_sandbox(&mut self) -> Option<SandboxContext>;

    /// Whether the request changes no file.
    fn only_reads(&self) -> bool;

    /// Extracts the response from the outcome of this request's operation.
    fn response(outcome: Outcome) -> Result<Self::Response, FileError>;
}

macro_rules! operations {
    ($(#[$doc:meta] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        /// One filesystem request.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Operation {
            $(#[$doc] $operation($params),)*
        }

        /// The result of an operation: the response of its request.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Outcome {
            $(#[$doc] $operation($response),)*
        }

        impl Operation {
            /// The method.
            pub fn method(&self) -> FileMethod {
                match self {
                    $(Self::$operation(_) => FileMethod::$operation,)*
                }
            }

            /// Runs the operation.
            pub(super) fn perform(self, context: &OperationContext<'_>) -> Result<Outcome, FileError> {
                match self {
                    $(Self::$operation(params) => params.perform(context).map(Outcome::$operation),)*
                }
            }
        }

        $(
            impl From<$params> for Operation {
                fn from(params: $params) -> Self {
                    Self::$operation(params)
                }
            }

            impl FileRequest for $params {
                type Response = $response;
                const METHOD: FileMethod = FileMethod::$operation;

                fn take_sandbox(&mut self) -> Option<SandboxContext> {
                    self.sandbox.take()
                }

                fn only_reads(&self) -> bool {
                    // Opening a handle waits like a change, and changes nothing if it is for reading.
                    Self::METHOD.order() != Order::Change
                        || <call::$call as Call>::effect(self) == Effect::Reads
                }

                fn response(outcome: Outcome) -> Result<Self::Response, FileError> {
                    match outcome {
                        Outcome::$operation(response) => Ok(response),
                        _ => Err(mismatch()),
                    }
                }
            }
        )*
    };
}

fn mismatch() -> FileError {
    FileError::Helper { reason: "it replied with the wrong kind of result".into() }
}

file_methods!(operations);

impl Operation {
    /// Whether it responds with [`Event::Started`] and continues to run.
    pub fn is_watch(&self) -> bool {
        matches!(self, Self::Watch(_) | Self::WatchMissing(_))
    }

    /// Which earlier requests of its connection it waits for.
    pub fn order(&self) -> Order {
        self.method().order()
    }
}

/// A message with file contents that a transport can send separately.
pub(super) trait Payload {
    /// Takes the contents out.
    fn take_payload(&mut self) -> Bytes;
    /// Puts them back.
    fn put_payload(&mut self, bytes: Bytes);
}

impl Payload for Operation {
    fn take_payload(&mut self) -> Bytes {
        match self {
            Self::WriteFile(params) => std::mem::take(&mut params.data.0),
            Self::WriteBlock(params) => std::mem::take(&mut params.chunk.0),
            _ => Bytes::new(),
        }
    }

    fn put_payload(&mut self, bytes: Bytes) {
        match self {
            Self::WriteFile(params) => params.data.0 = bytes,
            Self::WriteBlock(params) => params.chunk.0 = bytes,
            _ => {}
        }
    }
}

impl Payload for Outcome {
    fn take_payload(&mut self) -> Bytes {
        match self {
            Self::ReadFile(response) => std::mem::take(&mut response.data.0),
            Self::ReadBlock(response) => std::mem::take(&mut response.chunk.0),
            _ => Bytes::new(),
        }
    }

    fn put_payload(&mut self, bytes: Bytes) {
        match self {
            Self::ReadFile(response) => response.data.0 = bytes,
            Self::ReadBlock(response) => response.chunk.0 = bytes,
            _ => {}
        }
    }
}
