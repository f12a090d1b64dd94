//! A method for every request that a caller makes by itself.
//!
//! These are the bare requests. [`spawn`](ExecServerClient::spawn) and
//! [`files`](ExecServerClient::files) are what most callers want.

use codex_exec_server_protocol::call;
use codex_exec_server_protocol::environment::{EnvironmentStatusParams, EnvironmentStatusResponse};
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::http::{HttpRequestParams, HttpRequestResponse};
use codex_exec_server_protocol::process::*;

use crate::client::ExecServerClient;
use crate::error::ExecServerError;

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident $call:ident $params:ty => $response:ty;)*) => {
        impl ExecServerClient {
            $(
                $(#[$doc])*
                pub async fn $name(&self, params: $params) -> Result<$response, ExecServerError> {
                    self.call::<call::$call>(params).await
                }
            )*
        }
    };
}

calls! {
    /// `process/start`, without a handle: output comes by [`process_read`](Self::process_read).
    process_start ProcessStart ExecParams => ExecResponse;
    /// `process/read`. One that waits is made again after a reconnect.
    process_read ProcessRead ReadParams => ReadResponse;
    /// `process/write`. Made again after a reconnect if it has a `write_id`.
    process_write ProcessWrite WriteParams => WriteResponse;
    /// `process/signal`.
    process_signal ProcessSignal SignalParams => SignalResponse;
    /// `process/terminate`.
    process_terminate ProcessTerminate TerminateParams => TerminateResponse;
    /// `process/resize` (extension).
    process_resize ProcessResize ResizeParams => ResizeResponse;

    /// `fs/readFile`.
    fs_read_file FsReadFile FsReadFileParams => FsReadFileResponse;
    /// `fs/open`.
    fs_open FsOpen FsOpenParams => FsOpenResponse;
    /// `fs/readBlock`.
    fs_read_block FsReadBlock FsReadBlockParams => FsReadBlockResponse;
    /// `fs/writeBlock`.
    fs_write_block FsWriteBlock FsWriteBlockParams => FsWriteBlockResponse;
    /// `fs/close`.
    fs_close FsClose FsCloseParams => FsCloseResponse;
    /// `fs/writeFile`.
    fs_write_file FsWriteFile FsWriteFileParams => FsWriteFileResponse;
    /// `fs/createDirectory`.
    fs_create_directory FsCreateDirectory FsCreateDirectoryParams => FsCreateDirectoryResponse;
    /// `fs/getMetadata`.
    fs_get_metadata FsGetMetadata FsGetMetadataParams => FsGetMetadataResponse;
    /// `fs/canonicalize`.
    fs_canonicalize FsCanonicalize FsCanonicalizeParams => FsCanonicalizeResponse;
    /// `fs/readDirectory`.
    fs_read_directory FsReadDirectory FsReadDirectoryParams => FsReadDirectoryResponse;
    /// `fs/walk`.
    fs_walk FsWalk FsWalkParams => FsWalkResponse;
    /// `fs/remove`.
    fs_remove FsRemove FsRemoveParams => FsRemoveResponse;
    /// `fs/copy`.
    fs_copy FsCopy FsCopyParams => FsCopyResponse;
    /// `fs/watchMissing`; [subscribe](Self::subscribe) to `fs/missingChanged` first.
    fs_watch_missing FsWatchMissing FsWatchMissingParams => FsWatchMissingResponse;
    /// `fs/rename` (extension).
    fs_rename FsRename FsRenameParams => FsRenameResponse;
    /// `fs/symlink` (extension).
    fs_symlink FsSymlink FsSymlinkParams => FsSymlinkResponse;
    /// `fs/setMode` (extension).
    fs_set_mode FsSetMode FsSetModeParams => FsSetModeResponse;
    /// `fs/search` (extension).
    fs_search FsSearch FsSearchParams => FsSearchResponse;
    /// `fs/cancelSearch` (extension).
    fs_cancel_search FsCancelSearch FsCancelSearchParams => FsCancelSearchResponse;
    /// `fs/glob` (extension).
    fs_glob FsGlob FsGlobParams => FsGlobResponse;
    /// `fs/watch` (extension); [subscribe](Self::subscribe) to `fs/changed` first. A watch ends with
    /// its connection: [`Files::watch`](crate::Files::watch) makes it again.
    fs_watch FsWatch FsWatchParams => FsWatchResponse;
    /// `fs/unwatch` (extension).
    fs_unwatch FsUnwatch FsUnwatchParams => FsUnwatchResponse;

    /// `http/request`; for a streamed body see [`http_stream`](Self::http_stream).
    http_request HttpRequest HttpRequestParams => HttpRequestResponse;
}

impl ExecServerClient {
    /// `environment/status`: whether the server is ready.
    pub async fn environment_status(&self) -> Result<EnvironmentStatusResponse, ExecServerError> {
        self.call::<call::EnvironmentStatus>(EnvironmentStatusParams {}).await
    }

    /// `process/list` (extension): the session's processes.
    pub async fn process_list(&self) -> Result<ListResponse, ExecServerError> {
        if !self.capabilities().process_list {
            return Err(ExecServerError::Unsupported {
                what: "list its processes".to_owned(),
                instead: "keep the ids of those you start".to_owned(),
            });
        }
        self.call::<call::ProcessList>(ListParams {}).await
    }
}
