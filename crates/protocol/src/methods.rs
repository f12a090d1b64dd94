//! The table of methods. A row declares everything about its method; both sides derive the rest.
//!
//! | derived from the rows | in |
//! | --- | --- |
//! | [`Method`], [`FileMethod`], [`call`], the documented table | this crate |
//! | the client's typed calls | `codex-exec-client`, `calls.rs` |
//! | the server's dispatch of `fs/*` | `codex-exec-server`, `connection.rs` |
//! | operations, outcomes and what runs them | `codex-exec-host`, `files/operation.rs` |
//!
//! A new filesystem method needs its row here, its types in `files`, its line in
//! `host/src/files/executor.rs` and the code that line calls; the compiler or a test reports a missing part.

use serde::de::DeserializeOwned;

use crate::SandboxContext;
use crate::discovery::*;
use crate::encode::Encode;
use crate::environment::*;
use crate::environment_config::*;
use crate::files::*;
use crate::http::*;
use crate::network::*;
use crate::process::*;
use crate::session::*;

/// The family of a method, which its lifecycle errors name.
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
    /// `environmentConfig/*`.
    EnvironmentConfig,
    /// `capabilityRoots/*` and `capabilities/*`.
    CapabilityDiscovery,
}

impl Family {
    /// The name in lifecycle errors.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Exec => "exec",
            Self::Filesystem => "filesystem",
            Self::Http => "http",
            Self::EnvironmentInfo => "environment info",
            Self::EnvironmentStatus => "environment status",
            Self::EnvironmentConfig => "environment config",
            Self::CapabilityDiscovery => "capability discovery",
        }
    }
}

/// The order of file requests on one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Begins after every earlier change; runs concurrently with other reads.
    Read,
    /// Begins after every earlier read and change.
    Change,
    /// Begins after every earlier change; no later request waits for it.
    Scan,
    /// Begins at once.
    Free,
}

/// What a file request accesses, which decides whether a sandbox policy applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Touches {
    /// Paths, which a policy restricts.
    Paths,
    /// An open handle; the policy applied when it was opened.
    Handle,
    /// No file.
    Nothing,
}

/// The effect of repeating a request, which decides whether a client may repeat it after its connection
/// failed before the response arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// The request changes nothing.
    Reads,
    /// The request is idempotent.
    Repeatable,
    /// The request must not be executed twice.
    Once,
}

/// A request type, for both sides.
pub trait Call: 'static {
    /// Its row in the table.
    const METHOD: Method;
    /// The type of its params.
    type Params: Encode + DeserializeOwned + Send + 'static;
    /// The type of its result.
    type Response: Encode + DeserializeOwned + Send + 'static;

    /// The effect of repeating this request.
    fn effect(params: &Self::Params) -> Effect;
}

/// A filesystem request, which may carry a sandbox policy.
pub trait FileCall: Call {
    /// The policy that restricts the request; `None` is unrestricted.
    fn sandbox(params: &mut Self::Params) -> &mut Option<SandboxContext>;

    /// The params with this policy, if one is given.
    fn with_sandbox(mut params: Self::Params, sandbox: Option<&SandboxContext>) -> Self::Params {
        if let Some(sandbox) = sandbox {
            *Self::sandbox(&mut params) = Some(sandbox.clone());
        }
        params
    }
}

/// A type of request that the server sends to the client, for both sides.
pub trait ServerCall: 'static {
    /// Its method name.
    const NAME: &'static str;
    /// The type of its params.
    type Params: Encode + DeserializeOwned + Send + 'static;
    /// The type of its result.
    type Response: Encode + DeserializeOwned + Send + 'static;
}

/// A notification type, for both sides.
pub trait Notification: 'static {
    /// Its method name.
    const NAME: &'static str;
    /// The type of its params.
    type Params: Encode + DeserializeOwned + Send + 'static;
}

/// Passes the rows of all methods but `fs/*` to the macro `$derive`.
///
/// Columns: the request, its client method (`by_hand` if that does more than a bare call), its name, params
/// and response; family; the capability that announces it (`always` for none); its effect.
#[macro_export]
macro_rules! request_methods {
    ($derive:ident) => {
        $derive! {
            /// Opens or resumes a session.
            Initialize initialize by_hand "initialize" InitializeParams => InitializeResponse,
                Session, always, |_| Once;
            /// Starts a process.
            ProcessStart process_start typed "process/start" ExecParams => ExecResponse,
                Exec, always, |_| Once;
            /// Reads output, or waits for it.
            ProcessRead process_read typed "process/read" ReadParams => ReadResponse,
                Exec, always, |_| Reads;
            /// Writes to stdin.
            ProcessWrite process_write typed "process/write" WriteParams => WriteResponse,
                Exec, always, |write| if write.write_id.is_some() { Repeatable } else { Once };
            /// Signals the process group.
            ProcessSignal process_signal typed "process/signal" SignalParams => SignalResponse,
                Exec, always, |_| Once;
            /// Kills the group and all descendants.
            ProcessTerminate process_terminate typed "process/terminate" TerminateParams
                => TerminateResponse,
                Exec, always, |_| Repeatable;
            /// Sets the terminal's size (extension).
            ProcessResize process_resize typed "process/resize" ResizeParams => ResizeResponse,
                Exec, process_resize, |_| Repeatable;
            /// Returns what repaints a terminal (extension).
            ProcessScreen process_screen typed "process/screen" ScreenParams => ScreenResponse,
                Exec, process_screen, |_| Reads;
            /// Lists the session's processes (extension).
            ProcessList process_list by_hand "process/list" ListParams => ListResponse,
                Exec, process_list, |_| Reads;
            /// Lists the sessions of the client's principal (extension).
            SessionList session_list by_hand "session/list" SessionListParams => SessionListResponse,
                Session, session_sharing, |_| Reads;
            /// Replaces the host rules of a process's network proxy (extension).
            NetworkUpdateRules network_update_rules typed "network/updateRules" NetworkUpdateRulesParams
                => NetworkUpdateRulesResponse,
                Exec, network_update_rules, |_| Repeatable;
            /// Describes the server and what it offers.
            EnvironmentInfo environment_info by_hand "environment/info" EnvironmentInfoParams
                => $crate::environment::EnvironmentInfo,
                EnvironmentInfo, always, |_| Reads;
            /// Reports whether the server is ready.
            EnvironmentStatus environment_status by_hand "environment/status" EnvironmentStatusParams
                => EnvironmentStatusResponse,
                EnvironmentStatus, always, |_| Reads;
            /// Reads parts of the server's own configuration files.
            EnvironmentConfigRead environment_config_read typed "environmentConfig/read"
                EnvironmentConfigReadParams => EnvironmentConfigReadResponse,
                EnvironmentConfig, environment_config_read, |_| Reads;
            /// Finds the skills and plugins below given directories.
            CapabilityRootsDiscover capability_roots_discover typed "capabilityRoots/discoverV1"
                CapabilityRootsDiscoverParams => CapabilityRootsDiscoverResponse,
                CapabilityDiscovery, capability_discovery_sandbox, |_| Reads;
            /// Finds the skills and plugins that are installed on the server.
            CapabilitiesDiscover capabilities_discover typed "capabilities/discoverV2"
                CapabilitiesDiscoverParams => CapabilitiesDiscoverResponse,
                CapabilityDiscovery, capability_discovery_v2, |_| Reads;
            /// Makes an HTTP request from the server's network.
            HttpRequest http_request typed "http/request" HttpRequestParams => HttpRequestResponse,
                Http, always, |_| Once;
        }
    };
}

/// Passes the rows of the filesystem methods to the macro `$derive`.
///
/// Columns: the operation, the request, its client method, its name, params and response; its order; what it
/// accesses; the capability that announces it (`always` for none); its effect.
#[macro_export]
macro_rules! file_methods {
    ($derive:ident) => {
        $derive! {
            /// Reads a whole file.
            ReadFile FsReadFile fs_read_file "fs/readFile" FsReadFileParams => FsReadFileResponse,
                Read, Paths, always, |_| Reads;
            /// Opens a handle.
            Open FsOpen fs_open "fs/open" FsOpenParams => FsOpenResponse,
                Change, Paths, always, |open| if open.mode.is_read() { Reads } else { Once };
            /// Reads through a handle.
            ReadBlock FsReadBlock fs_read_block "fs/readBlock" FsReadBlockParams
                => FsReadBlockResponse,
                Read, Handle, always, |_| Reads;
            /// Writes through a handle.
            WriteBlock FsWriteBlock fs_write_block "fs/writeBlock" FsWriteBlockParams
                => FsWriteBlockResponse,
                Change, Handle, always, |_| Once;
            /// Closes a handle, or commits it (extension).
            Close FsClose fs_close "fs/close" FsCloseParams => FsCloseResponse,
                Change, Handle, always, |close| if close.commit { Once } else { Repeatable };
            /// Replaces the content of a file.
            WriteFile FsWriteFile fs_write_file "fs/writeFile" FsWriteFileParams
                => FsWriteFileResponse,
                Change, Paths, always, |_| Once;
            /// Makes a directory.
            CreateDirectory FsCreateDirectory fs_create_directory "fs/createDirectory" FsCreateDirectoryParams
                => FsCreateDirectoryResponse,
                Change, Paths, always, |make| if make.recursive { Repeatable } else { Once };
            /// Returns the metadata of a path.
            GetMetadata FsGetMetadata fs_get_metadata "fs/getMetadata" FsGetMetadataParams
                => FsGetMetadataResponse,
                Read, Paths, always, |_| Reads;
            /// Resolves every link of a path.
            Canonicalize FsCanonicalize fs_canonicalize "fs/canonicalize" FsCanonicalizeParams
                => FsCanonicalizeResponse,
                Read, Paths, always, |_| Reads;
            /// Lists a directory.
            ReadDirectory FsReadDirectory fs_read_directory "fs/readDirectory" FsReadDirectoryParams
                => FsReadDirectoryResponse,
                Read, Paths, always, |_| Reads;
            /// Lists a tree, breadth-first.
            Walk FsWalk fs_walk "fs/walk" FsWalkParams => FsWalkResponse,
                Scan, Paths, always, |_| Reads;
            /// Removes a file or a tree.
            Remove FsRemove fs_remove "fs/remove" FsRemoveParams => FsRemoveResponse,
                Change, Paths, always, |_| Once;
            /// Copies a file, a link or a tree.
            Copy FsCopy fs_copy "fs/copy" FsCopyParams => FsCopyResponse,
                Change, Paths, always, |copy| if copy.atomic { Repeatable } else { Once };
            /// Notifies once when a missing path appears.
            WatchMissing FsWatchMissing fs_watch_missing "fs/watchMissing" FsWatchMissingParams
                => FsWatchMissingResponse,
                Read, Paths, fs_watch_missing, |_| Once;
            /// Renames a path (extension).
            Rename FsRename fs_rename "fs/rename" FsRenameParams => FsRenameResponse,
                Change, Paths, fs_rename_link_mode, |_| Once;
            /// Makes a symbolic link (extension).
            Symlink FsSymlink fs_symlink "fs/symlink" FsSymlinkParams => FsSymlinkResponse,
                Change, Paths, fs_rename_link_mode, |_| Once;
            /// Sets permission bits (extension).
            SetMode FsSetMode fs_set_mode "fs/setMode" FsSetModeParams => FsSetModeResponse,
                Change, Paths, fs_rename_link_mode, |_| Repeatable;
            /// Searches file contents (extension).
            Search FsSearch fs_search "fs/search" FsSearchParams => FsSearchResponse,
                Scan, Paths, fs_search, |_| Reads;
            /// Ends a search (extension).
            CancelSearch FsCancelSearch fs_cancel_search "fs/cancelSearch" FsCancelSearchParams
                => FsCancelSearchResponse,
                Free, Nothing, fs_search, |_| Reads;
            /// Finds paths by pattern (extension).
            Glob FsGlob fs_glob "fs/glob" FsGlobParams => FsGlobResponse,
                Scan, Paths, fs_glob, |_| Reads;
            /// Notifies of changes in a tree (extension).
            Watch FsWatch fs_watch "fs/watch" FsWatchParams => FsWatchResponse,
                Read, Paths, fs_watch, |_| Once;
            /// Ends a watch (extension).
            Unwatch FsUnwatch fs_unwatch "fs/unwatch" FsUnwatchParams => FsUnwatchResponse,
                Change, Nothing, fs_watch, |_| Repeatable;
        }
    };
}

/// Passes the rows of the notifications to the macro `$derive`.
///
/// Columns: the notification, its name and params. `initialized` comes from the client, all others from the
/// server.
#[macro_export]
macro_rules! notification_methods {
    ($derive:ident) => {
        $derive! {
            /// The client is ready for everything else.
            Initialized "initialized" InitializedParams;
            /// Output of a process.
            ProcessOutput "process/output" ExecOutputDeltaNotification;
            /// A process was reaped.
            ProcessExited "process/exited" ExecExitedNotification;
            /// A process's last event.
            ProcessClosed "process/closed" ExecClosedNotification;
            /// A terminal has another size (extension).
            ProcessResized "process/resized" ProcessResizedNotification;
            /// Another client took the session (extension).
            SessionDetached "session/detached" SessionDetachedNotification;
            /// A missing path has appeared.
            FsMissingChanged "fs/missingChanged" FsMissingChangedNotification;
            /// Lines a search has found (extension).
            FsSearchMatches "fs/search/matches" FsSearchMatchesNotification;
            /// Changes of a watched tree (extension).
            FsChanged "fs/changed" FsChangedNotification;
            /// A piece of a streamed HTTP body.
            HttpRequestBodyDelta "http/request/bodyDelta" HttpRequestBodyDeltaNotification;
            /// What was decided about a request to a process's proxy.
            NetworkPolicyDecision "network/policyDecision" NetworkPolicyDecisionNotification;
        }
    };
}

macro_rules! capability {
    (always) => {
        None
    };
    ($capability:ident) => {
        Some((stringify!($capability), |capabilities: &Capabilities| capabilities.$capability))
    };
}

macro_rules! requests {
    ($(#[doc = $doc:literal] $call:ident $function:ident $kind:ident $name:literal
        $params:ty => $response:ty, $family:ident, $capability:ident, $effect:expr;)*) => {
        /// A row of the table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Method {
            $(#[doc = $doc] $call,)*
            /// `fs/*`.
            File(FileMethod),
        }

        impl Method {
            /// The row of that name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$call),)*
                    _ => FileMethod::from_name(name).map(Self::File),
                }
            }

            /// Every row.
            pub fn all() -> impl Iterator<Item = Self> {
                [$(Self::$call,)*].into_iter().chain(FileMethod::ALL.iter().copied().map(Self::File))
            }

            /// The method name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$call => $name,)*
                    Self::File(method) => method.name(),
                }
            }

            /// Its family.
            pub fn family(self) -> Family {
                match self {
                    $(Self::$call => Family::$family,)*
                    Self::File(_) => Family::Filesystem,
                }
            }

            /// What it does, in a sentence.
            pub fn summary(self) -> &'static str {
                match self {
                    $(Self::$call => $doc.trim_ascii(),)*
                    Self::File(method) => method.summary(),
                }
            }

            fn capability(self) -> Option<Capability> {
                match self {
                    $(Self::$call => capability!($capability),)*
                    Self::File(method) => method.capability(),
                }
            }
        }

        $(impl Call for call::$call {
            const METHOD: Method = Method::$call;
            type Params = $params;
            type Response = $response;

            fn effect(params: &$params) -> Effect {
                let effect: fn(&$params) -> Effect = $effect;
                effect(params)
            }
        })*

        /// The types of the requests above, for `call`.
        mod request_types {
            $(#[doc = $doc] #[derive(Debug, Clone, Copy)] pub struct $call;)*
        }
    };
}

macro_rules! files {
    ($(#[doc = $doc:literal] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        /// A row of the filesystem methods.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum FileMethod {
            $(#[doc = $doc] $operation,)*
        }

        impl FileMethod {
            /// Every row.
            pub const ALL: &'static [Self] = &[$(Self::$operation,)*];

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$operation),)*
                    _ => None,
                }
            }

            /// The method name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$operation => $name,)*
                }
            }

            /// Its order.
            pub fn order(self) -> Order {
                match self {
                    $(Self::$operation => Order::$order,)*
                }
            }

            /// What it accesses.
            pub fn touches(self) -> Touches {
                match self {
                    $(Self::$operation => Touches::$touches,)*
                }
            }

            fn summary(self) -> &'static str {
                match self {
                    $(Self::$operation => $doc.trim_ascii(),)*
                }
            }

            fn capability(self) -> Option<Capability> {
                match self {
                    $(Self::$operation => capability!($capability),)*
                }
            }
        }

        $(
            impl Call for call::$call {
                const METHOD: Method = Method::File(FileMethod::$operation);
                type Params = $params;
                type Response = $response;

                fn effect(params: &$params) -> Effect {
                    let effect: fn(&$params) -> Effect = $effect;
                    effect(params)
                }
            }

            impl FileCall for call::$call {
                fn sandbox(params: &mut $params) -> &mut Option<SandboxContext> {
                    &mut params.sandbox
                }
            }
        )*

        mod file_types {
            $(#[doc = $doc] #[derive(Debug, Clone, Copy)] pub struct $call;)*
        }
    };
}

macro_rules! notifications {
    ($(#[doc = $doc:literal] $notification:ident $name:literal $params:ty;)*) => {
        /// One type per notification.
        pub mod notification {
            use super::*;
            $(
                #[doc = $doc]
                #[derive(Debug, Clone, Copy)]
                pub struct $notification;
                impl Notification for $notification {
                    const NAME: &'static str = $name;
                    type Params = $params;
                }
            )*
        }
    };
}

/// One type per request, for typed calls. The table makes the types, so they are re-exported by glob.
pub mod call {
    pub use super::file_types::*;
    pub use super::request_types::*;
}

/// The name of a capability, and its accessor.
type Capability = (&'static str, fn(&Capabilities) -> bool);

impl Method {
    /// Whether a server with these capabilities offers the method.
    pub fn is_offered(self, capabilities: &Capabilities) -> bool {
        self.capability().is_none_or(|(_, offered)| offered(capabilities))
    }

    /// The capability that announces it; `None` if every server offers it.
    pub fn capability_name(self) -> Option<&'static str> {
        self.capability().map(|(name, _)| name)
    }
}

use Effect::{Once, Reads, Repeatable};

request_methods!(requests);
file_methods!(files);

notification_methods!(notifications);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for method in Method::all() {
            assert_eq!(Method::from_name(method.name()), Some(method));
        }
        assert_eq!(Method::from_name("nope/x"), None);
    }

    #[test]
    fn a_method_is_offered_by_its_capability() {
        let (none, mut some) = (Capabilities::default(), Capabilities::default());
        some.fs_glob = true;
        let glob = Method::File(FileMethod::Glob);
        assert!(!glob.is_offered(&none) && glob.is_offered(&some));
        assert_eq!(glob.capability_name(), Some("fs_glob"));
        assert!(Method::ProcessStart.is_offered(&none));
    }
}
