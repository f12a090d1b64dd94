//! The one table of methods: name, params, result, family, lane.
//!
//! The server's dispatch and the client's typed calls both come from it. A new method is one line
//! here, its types in the module of its family, and its handler.

use serde::de::DeserializeOwned;

use crate::encode::Encode;
use crate::environment::*;
use crate::files::*;
use crate::http::*;
use crate::process::*;
use crate::session::*;

/// Which wording the lifecycle errors use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// `initialize` itself.
    Session,
    /// `process/*`.
    Exec,
    /// `fs/*`.
    Filesystem,
    /// `http/*`.
    Http,
    /// `environment/info`.
    EnvironmentInfo,
    /// `environment/status`.
    EnvironmentStatus,
}

impl Family {
    /// As the lifecycle errors say it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Exec => "exec",
            Self::Filesystem => "filesystem",
            Self::Http => "http",
            Self::EnvironmentInfo => "environment info",
            Self::EnvironmentStatus => "environment status",
        }
    }
}

/// What a request may not overtake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Answered at once by the connection itself.
    Connection,
    /// In order among the requests that name the same process.
    Process,
    /// In order after every earlier file change of the connection; beside other reads.
    FileRead,
    /// In order after every earlier file request of the connection.
    FileWrite,
    /// After every earlier file change of the connection; nothing waits for it.
    FileScan,
    /// May take long or wait for something; overtakes and is overtaken.
    Free,
}

/// A request as both sides know it.
pub trait Call: 'static {
    /// Its row.
    const METHOD: Method;
    /// What is asked.
    type Params: Encode + DeserializeOwned + Send + 'static;
    /// What is answered.
    type Response: Encode + DeserializeOwned + Send + 'static;
}

/// A notification as both sides know it.
pub trait Notice: 'static {
    /// Its name.
    const NAME: &'static str;
    /// What is told.
    type Params: Encode + DeserializeOwned + Send + 'static;
}

macro_rules! methods {
    (
        requests { $($(#[$doc:meta])* $call:ident $name:literal $params:ty => $response:ty, $family:ident, $lane:ident;)* }
        notifications { $($(#[$ndoc:meta])* $notice:ident $nname:literal $nparams:ty;)* }
    ) => {
        /// A row of the table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Method {
            $($(#[$doc])* $call,)*
        }

        impl Method {
            /// Every row.
            pub const ALL: &'static [Self] = &[$(Self::$call,)*];

            /// The row of that name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$call),)*
                    _ => None,
                }
            }

            /// The name on the wire.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$call => $name,)*
                }
            }

            /// Which lifecycle error it gets.
            pub fn family(self) -> Family {
                match self {
                    $(Self::$call => Family::$family,)*
                }
            }

            /// What it may not overtake.
            pub fn lane(self) -> Lane {
                match self {
                    $(Self::$call => Lane::$lane,)*
                }
            }
        }

        /// One type a request, for typed calls.
        pub mod call {
            use super::*;
            $(
                $(#[$doc])*
                #[derive(Debug, Clone, Copy)]
                pub struct $call;
                impl Call for $call {
                    const METHOD: Method = Method::$call;
                    type Params = $params;
                    type Response = $response;
                }
            )*
        }

        /// One type a notification.
        pub mod notice {
            use super::*;
            $(
                $(#[$ndoc])*
                #[derive(Debug, Clone, Copy)]
                pub struct $notice;
                impl Notice for $notice {
                    const NAME: &'static str = $nname;
                    type Params = $nparams;
                }
            )*
        }
    };
}

methods! {
    requests {
        /// Opens or resumes a session.
        Initialize "initialize" InitializeParams => InitializeResponse, Session, Connection;

        /// Starts a process.
        ProcessStart "process/start" ExecParams => ExecResponse, Exec, Process;
        /// Reads output, or waits for it.
        ProcessRead "process/read" ReadParams => ReadResponse, Exec, Process;
        /// Writes to stdin.
        ProcessWrite "process/write" WriteParams => WriteResponse, Exec, Process;
        /// Signals the process group.
        ProcessSignal "process/signal" SignalParams => SignalResponse, Exec, Process;
        /// Kills the group and all descendants.
        ProcessTerminate "process/terminate" TerminateParams => TerminateResponse, Exec, Process;
        /// Sets the terminal's size (extension).
        ProcessResize "process/resize" ResizeParams => ResizeResponse, Exec, Process;
        /// Lists the session's processes (extension).
        ProcessList "process/list" ListParams => ListResponse, Exec, Connection;

        /// What the server is and can do.
        EnvironmentInfo "environment/info" EnvironmentInfoParams => crate::environment::EnvironmentInfo, EnvironmentInfo, Connection;
        /// Whether it is ready.
        EnvironmentStatus "environment/status" EnvironmentStatusParams => EnvironmentStatusResponse, EnvironmentStatus, Connection;

        /// The whole content of a file.
        FsReadFile "fs/readFile" FsReadFileParams => FsReadFileResponse, Filesystem, FileRead;
        /// Opens a handle.
        FsOpen "fs/open" FsOpenParams => FsOpenResponse, Filesystem, FileWrite;
        /// Reads through a handle.
        FsReadBlock "fs/readBlock" FsReadBlockParams => FsReadBlockResponse, Filesystem, FileRead;
        /// Writes through a handle.
        FsWriteBlock "fs/writeBlock" FsWriteBlockParams => FsWriteBlockResponse, Filesystem, FileWrite;
        /// Closes a handle, or commits it (extension).
        FsClose "fs/close" FsCloseParams => FsCloseResponse, Filesystem, FileWrite;
        /// Replaces the content of a file.
        FsWriteFile "fs/writeFile" FsWriteFileParams => FsWriteFileResponse, Filesystem, FileWrite;
        /// Makes a directory.
        FsCreateDirectory "fs/createDirectory" FsCreateDirectoryParams => FsCreateDirectoryResponse, Filesystem, FileWrite;
        /// What a path is.
        FsGetMetadata "fs/getMetadata" FsGetMetadataParams => FsGetMetadataResponse, Filesystem, FileRead;
        /// A path with every link resolved.
        FsCanonicalize "fs/canonicalize" FsCanonicalizeParams => FsCanonicalizeResponse, Filesystem, FileRead;
        /// The names in a directory.
        FsReadDirectory "fs/readDirectory" FsReadDirectoryParams => FsReadDirectoryResponse, Filesystem, FileRead;
        /// A tree, breadth-first.
        FsWalk "fs/walk" FsWalkParams => FsWalkResponse, Filesystem, FileScan;
        /// Removes a name, or a tree.
        FsRemove "fs/remove" FsRemoveParams => FsRemoveResponse, Filesystem, FileWrite;
        /// Copies a file, a link or a tree.
        FsCopy "fs/copy" FsCopyParams => FsCopyResponse, Filesystem, FileWrite;
        /// Tells once when a missing path appears.
        FsWatchMissing "fs/watchMissing" FsWatchMissingParams => FsWatchMissingResponse, Filesystem, FileRead;
        /// Moves a name (extension).
        FsRename "fs/rename" FsRenameParams => FsRenameResponse, Filesystem, FileWrite;
        /// Makes a symbolic link (extension).
        FsSymlink "fs/symlink" FsSymlinkParams => FsSymlinkResponse, Filesystem, FileWrite;
        /// Sets permission bits (extension).
        FsSetMode "fs/setMode" FsSetModeParams => FsSetModeResponse, Filesystem, FileWrite;
        /// Searches file contents (extension).
        FsSearch "fs/search" FsSearchParams => FsSearchResponse, Filesystem, FileScan;
        /// Ends a search (extension).
        FsCancelSearch "fs/cancelSearch" FsCancelSearchParams => FsCancelSearchResponse, Filesystem, Free;
        /// Finds names (extension).
        FsGlob "fs/glob" FsGlobParams => FsGlobResponse, Filesystem, FileScan;
        /// Tells changes of a tree (extension).
        FsWatch "fs/watch" FsWatchParams => FsWatchResponse, Filesystem, FileRead;
        /// Ends a watch (extension).
        FsUnwatch "fs/unwatch" FsUnwatchParams => FsUnwatchResponse, Filesystem, FileWrite;

        /// An HTTP request from the server's place in the network.
        HttpRequest "http/request" HttpRequestParams => HttpRequestResponse, Http, Free;
    }
    notifications {
        /// The client is ready for everything else.
        Initialized "initialized" InitializedParams;
        /// Output of a process.
        ProcessOutput "process/output" ExecOutputDeltaNotification;
        /// A process was reaped.
        ProcessExited "process/exited" ExecExitedNotification;
        /// A process's last event.
        ProcessClosed "process/closed" ExecClosedNotification;
        /// A missing path has appeared.
        FsMissingChanged "fs/missingChanged" FsMissingChangedNotification;
        /// Lines a search has found (extension).
        FsSearchMatches "fs/search/matches" FsSearchMatchesNotification;
        /// Changes of a watched tree (extension).
        FsChanged "fs/changed" FsChangedNotification;
        /// A piece of a streamed HTTP body.
        HttpRequestBodyDelta "http/request/bodyDelta" HttpRequestBodyDeltaNotification;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for &method in Method::ALL {
            assert_eq!(Method::from_name(method.name()), Some(method));
        }
        assert_eq!(Method::from_name("nope/x"), None);
    }
}
