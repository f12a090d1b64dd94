//! Filesystem requests as data, so that they can run here or in another process.
//!
//! Invariant: an [`Operation`] carries everything it needs but the file contents' transport and the
//! sandbox: whoever sends it to a helper has chosen the helper by the sandbox already.

use bytes::Bytes;
use codex_exec_server_protocol::SandboxContext;
use codex_exec_server_protocol::files::*;
use serde::{Deserialize, Serialize};

use super::FileError;

/// What a request may not overtake, and what may not overtake it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Begins after every earlier change; runs beside other reads.
    Read,
    /// Begins after every earlier read and change.
    Change,
    /// Begins after every earlier change; nothing waits for it.
    Scan,
    /// Begins at once.
    Free,
}

/// A part of a running operation's result, told while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The answer of an operation that goes on after it (a watch).
    Started(Outcome),
    /// Something for the client.
    Notify(FileNotification),
}

/// A notification for the client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileNotification {
    /// Lines found: `fs/search/matches`.
    SearchMatches(FsSearchMatchesNotification),
    /// Changes of a watched path: `fs/changed`.
    Changed(FsChangedNotification),
    /// The one word of a `fs/watchMissing`: `fs/missingChanged`.
    MissingChanged(FsMissingChangedNotification),
}

/// A request whose answer comes from the filesystem.
pub trait FileRequest: Into<Operation> + Send + 'static {
    /// Its answer.
    type Response: Send + 'static;

    /// Whether a policy can restrict it.
    fn touches_files(&self) -> bool;

    /// What the request is held to, taken off it.
    fn take_sandbox(&mut self) -> Option<SandboxContext>;

    /// The answer out of the outcome of this request's operation.
    fn response(outcome: Outcome) -> Result<Self::Response, FileError>;
}

macro_rules! operations {
    ($($name:ident $params:ty => $outcome:ident $response:ty, $order:ident;)*) => {
        /// One filesystem request.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Operation {
            $(#[doc = concat!("`", stringify!($params), "`")] $name($params),)*
        }

        impl Operation {
            /// Whether it answers by [`Event::Started`] and then runs on.
            pub fn is_watch(&self) -> bool {
                matches!(self, Self::Watch(_) | Self::WatchMissing(_))
            }

            /// Whether a policy can restrict it. A handle was opened under its own policy; the rest of
            /// these touches no file.
            pub fn touches_files(&self) -> bool {
                !matches!(
                    self,
                    Self::ReadBlock(_)
                        | Self::WriteBlock(_)
                        | Self::Close(_)
                        | Self::CancelSearch(_)
                        | Self::Unwatch(_)
                )
            }

            /// Where it stands among the requests of a connection.
            pub fn order(&self) -> Order {
                match self {
                    $(Self::$name(_) => Order::$order,)*
                }
            }
        }

        $(
            impl From<$params> for Operation {
                fn from(params: $params) -> Self {
                    Self::$name(params)
                }
            }

            impl FileRequest for $params {
                type Response = $response;

                fn touches_files(&self) -> bool {
                    Operation::from(self.clone()).touches_files()
                }

                fn take_sandbox(&mut self) -> Option<SandboxContext> {
                    self.sandbox.take()
                }

                fn response(outcome: Outcome) -> Result<Self::Response, FileError> {
                    operations!(@take $outcome outcome)
                }
            }
        )*
    };
    (@take Done $from:ident) => {
        match $from {
            Outcome::Done => Ok(FsDone {}),
            _ => Err(mismatch()),
        }
    };
    (@take $outcome:ident $from:ident) => {
        match $from {
            Outcome::$outcome(response) => Ok(response),
            _ => Err(mismatch()),
        }
    };
}

fn mismatch() -> FileError {
    FileError::Helper { reason: "it answered another question".into() }
}

operations! {
    ReadFile FsReadFileParams => ReadFile FsReadFileResponse, Read;
    Open FsOpenParams => Open FsOpenResponse, Change;
    ReadBlock FsReadBlockParams => ReadBlock FsReadBlockResponse, Read;
    WriteBlock FsWriteBlockParams => Done FsWriteBlockResponse, Change;
    Close FsCloseParams => Done FsCloseResponse, Change;
    WriteFile FsWriteFileParams => Done FsWriteFileResponse, Change;
    CreateDirectory FsCreateDirectoryParams => Done FsCreateDirectoryResponse, Change;
    GetMetadata FsGetMetadataParams => Metadata FsGetMetadataResponse, Read;
    Canonicalize FsCanonicalizeParams => Canonicalize FsCanonicalizeResponse, Read;
    ReadDirectory FsReadDirectoryParams => ReadDirectory FsReadDirectoryResponse, Read;
    Walk FsWalkParams => Walk FsWalkResponse, Scan;
    Remove FsRemoveParams => Done FsRemoveResponse, Change;
    Copy FsCopyParams => Done FsCopyResponse, Change;
    Rename FsRenameParams => Done FsRenameResponse, Change;
    Symlink FsSymlinkParams => Done FsSymlinkResponse, Change;
    SetMode FsSetModeParams => Done FsSetModeResponse, Change;
    Search FsSearchParams => Search FsSearchResponse, Scan;
    CancelSearch FsCancelSearchParams => Done FsCancelSearchResponse, Free;
    Glob FsGlobParams => Glob FsGlobResponse, Scan;
    WatchMissing FsWatchMissingParams => WatchMissing FsWatchMissingResponse, Read;
    Watch FsWatchParams => Done FsWatchResponse, Read;
    Unwatch FsUnwatchParams => Done FsUnwatchResponse, Change;
}

/// What an operation found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the answer of the operation of its name")]
pub enum Outcome {
    Done,
    ReadFile(FsReadFileResponse),
    Open(FsOpenResponse),
    ReadBlock(FsReadBlockResponse),
    Metadata(FsGetMetadataResponse),
    Canonicalize(FsCanonicalizeResponse),
    ReadDirectory(FsReadDirectoryResponse),
    Walk(FsWalkResponse),
    Search(FsSearchResponse),
    Glob(FsGlobResponse),
    WatchMissing(FsWatchMissingResponse),
}

/// File contents inside a message, so that a transport can send them beside it.
pub(super) trait Payload {
    /// Takes the contents out, leaving none.
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
