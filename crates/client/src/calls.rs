//! A method for every request of the protocol.
//!
//! Most callers use [`spawn`](ExecServerClient::spawn) and [`files`](ExecServerClient::files) instead of
//! these bare requests: a bare `process_start` has no handle, so its output comes from `process_read`; a
//! bare watch ends with its connection and needs a [subscription](ExecServerClient::subscribe) first.

use codex_exec_server_protocol::discovery::*;
use codex_exec_server_protocol::environment::{EnvironmentStatusParams, EnvironmentStatusResponse};
use codex_exec_server_protocol::environment_config::*;
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::http::{HttpRequestParams, HttpRequestResponse};
use codex_exec_server_protocol::network::*;
use codex_exec_server_protocol::process::*;
use codex_exec_server_protocol::session::{SessionListParams, SessionListResponse};
use codex_exec_server_protocol::{call, file_methods, request_methods};

use crate::client::ExecServerClient;
use crate::error::ExecServerError;

macro_rules! bare_call {
    (typed $name:literal $summary:literal $function:ident $call:ident $params:ty => $response:ty) => {
        impl ExecServerClient {
            #[doc = concat!("`", $name, "`:", $summary)]
            pub async fn $function(&self, params: $params) -> Result<$response, ExecServerError> {
                self.call::<call::$call>(params).await
            }
        }
    };
    // Written out below, or part of something larger.
    (by_hand $($rest:tt)*) => {};
}

macro_rules! request_calls {
    ($(#[doc = $summary:literal] $call:ident $function:ident $kind:ident $name:literal
        $params:ty => $response:ty, $family:ident, $capability:ident, $effect:expr;)*) => {
        $(bare_call!($kind $name $summary $function $call $params => $response);)*
    };
}

macro_rules! file_calls {
    ($(#[doc = $summary:literal] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        $(bare_call!(typed $name $summary $function $call $params => $response);)*
    };
}

request_methods!(request_calls);
file_methods!(file_calls);

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
                instead: "keep the ids of the processes you start".to_owned(),
            });
        }
        self.call::<call::ProcessList>(ListParams {}).await
    }

    /// `session/list` (extension): the sessions of this client's principal that have processes.
    pub async fn session_list(&self) -> Result<SessionListResponse, ExecServerError> {
        if !self.capabilities().session_sharing {
            return Err(ExecServerError::Unsupported {
                what: "list sessions".to_owned(),
                instead: "keep the ids of the sessions you open".to_owned(),
            });
        }
        self.call::<call::SessionList>(SessionListParams {}).await
    }
}
