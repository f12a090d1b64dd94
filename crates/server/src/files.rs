//! The handlers of `fs/*`.
//!
//! A request enters the connection's order, and the queue for the limit on concurrent requests, before
//! the next message is parsed. Both are in order of arrival, so the oldest pending request can always
//! run.

use std::pin::Pin;
use std::sync::Arc;

use codex_exec_host::files::{
    EventSink, FileConnection, FileNotification, FileRequest, PersistentHandles,
};
use codex_exec_rpc::Outbound;
use codex_exec_server_protocol::{Encode, RpcError, Touches, encode, notification};
use futures_util::FutureExt;
use tokio::sync::Semaphore;

use crate::connection::Request;
use crate::response_memory::ResponseMemory;
use crate::sandbox::Confiner;
use crate::server::Server;

/// The filesystem requests of one connection.
pub(crate) struct Files {
    connection: FileConnection,
    confiner: Confiner,
    running: Arc<Semaphore>,
}

impl Files {
    pub(crate) fn new(
        server: &Server,
        outbound: Outbound,
        response_memory: ResponseMemory,
    ) -> Self {
        let config = server.config();
        let sink = Arc::new(Notifications(outbound));
        Self {
            connection: FileConnection::new(config.files.clone(), sink, Arc::new(response_memory)),
            confiner: server.confiner().clone(),
            running: Arc::new(Semaphore::new(config.concurrent_requests)),
        }
    }

    /// Attaches the session's persistent handles, which outlive this connection.
    pub(crate) fn attach(&self, handles: Arc<PersistentHandles>) {
        self.connection.persist_handles_in(handles);
    }

    /// Runs a request, after those that it must not overtake, and sends the response.
    pub(crate) fn call<R>(&self, mut request: Request, mut params: R)
    where
        R: FileRequest + Clone,
        R::Response: Encode + Sync,
    {
        let sandbox = params.take_sandbox();
        // Nothing bypasses the operator's policy.
        if sandbox.is_none()
            && !self.confiner.is_bounded()
            && let Some(result) = self.connection.call_if_cached(&params)
        {
            return request.respond_without_waiting(result.map_err(RpcError::from));
        }
        let sandbox = sandbox.filter(|_| R::METHOD.touches() == Touches::Paths);
        let backend = self.confiner.backend(sandbox, params.only_reads());
        let result = self.connection.call_in(backend, params);
        // Polling once enters the queue.
        let mut permit = Box::pin(self.running.clone().acquire_owned());
        let first = permit.as_mut().now_or_never();
        let requests_end = self.connection.requests_end();
        tokio::spawn(async move {
            let outbound = request.outbound().clone();
            let work = async move {
                let permit = match first {
                    Some(permit) => permit,
                    None => permit.await,
                };
                (result.await, permit)
            };
            tokio::pin!(work);
            // Held until the response is sent, so a client that does not read holds a bounded number.
            let (result, _permit) = tokio::select! {
                done = &mut work => done,
                // The client has gone: dropping the work cancels it, and what waits for it never begins.
                () = outbound.closed() => return requests_end.end(),
            };
            match result {
                // The result is dropped after it is sent: its notifications may follow only then.
                Ok(mut result) => {
                    request.hold_memory(result.take_memory());
                    request.send_result(result).await;
                }
                Err(error) => {
                    request.respond::<R::Response>(Err(RpcError::from(error))).await;
                }
            }
        });
    }
}

/// Sends notifications about files to the client.
struct Notifications(Outbound);

impl EventSink for Notifications {
    fn deliver(
        &self,
        notification: FileNotification,
    ) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        let message = match &notification {
            FileNotification::SearchMatches(params) => {
                encode::notification::<notification::FsSearchMatches>(params)
            }
            FileNotification::Changed(params) => {
                encode::notification::<notification::FsChanged>(params)
            }
            FileNotification::MissingChanged(params) => {
                encode::notification::<notification::FsMissingChanged>(params)
            }
        };
        Box::pin(async move { self.0.send(message).await.is_ok() })
    }
}
