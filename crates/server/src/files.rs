//! The handlers of `fs/*`.
//!
//! A request takes its place in the connection's order, and in the queue of those that may run at
//! once, before the next message is looked at. Both queues are in order of arrival, so the oldest
//! request that is not done can always run.

use std::pin::Pin;
use std::sync::Arc;

use codex_exec_host::files::{
    EventSink, FileConnection, FileNotification, FileRequest, PersistentHandles,
};
use codex_exec_rpc::Outbound;
use codex_exec_server_protocol::{Encode, RpcError, Touches, encode, notice};
use futures_util::FutureExt;
use tokio::sync::Semaphore;

use crate::answers::AnswerMemory;
use crate::connection::Request;
use crate::sandbox::Confiner;
use crate::server::Server;

/// The filesystem requests of one connection.
pub(crate) struct Files {
    connection: FileConnection,
    confiner: Confiner,
    running: Arc<Semaphore>,
}

impl Files {
    pub(crate) fn new(server: &Server, outbound: Outbound, answers: AnswerMemory) -> Self {
        let config = server.config();
        let sink = Arc::new(Notifications(outbound));
        Self {
            connection: FileConnection::new(config.files.clone(), sink, Arc::new(answers)),
            confiner: server.confiner().clone(),
            running: Arc::new(Semaphore::new(config.concurrent_requests)),
        }
    }

    /// The session is known: it keeps handles that outlive this connection.
    pub(crate) fn attached(&self, kept: Arc<PersistentHandles>) {
        self.connection.persist_handles_in(kept);
    }

    /// Runs a request and answers it, after those it may not overtake.
    pub(crate) fn call<R>(&self, mut request: Request, mut params: R)
    where
        R: FileRequest + Clone,
        R::Response: Encode + Sync,
    {
        let sandbox = params.take_sandbox();
        if sandbox.is_none()
            && let Some(result) = self.connection.call_if_cached(&params)
        {
            return request.answer_soon(result.map_err(RpcError::from));
        }
        let sandbox = sandbox.filter(|_| R::METHOD.touches() == Touches::Paths);
        let backend = self.confiner.backend(sandbox, params.only_reads());
        let result = self.connection.call_in(backend, params);
        // Polled once, it stands in the queue.
        let mut permit = Box::pin(self.running.clone().acquire_owned());
        let first = permit.as_mut().now_or_never();
        tokio::spawn(async move {
            let outbound = request.outbound().clone();
            let work = async move {
                let permit = match first {
                    Some(permit) => permit,
                    None => permit.await,
                };
                (result.await, permit)
            };
            // Held until the answer is sent: what waits for a client that does not read is bounded.
            let (result, _permit) = tokio::select! {
                done = work => done,
                // Nobody is left to answer to: dropping the work cancels it.
                () = outbound.closed() => return,
            };
            match result {
                // Dropped after it is sent: what it announces may only follow then.
                Ok(mut answer) => {
                    request.hold(answer.take_memory());
                    request.respond(answer).await;
                }
                Err(error) => {
                    request.answer::<R::Response>(Err(RpcError::from(error))).await;
                }
            }
        });
    }
}

/// Notifications about files, on their way to the client.
struct Notifications(Outbound);

impl EventSink for Notifications {
    fn deliver(
        &self,
        notification: FileNotification,
    ) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        let message = match &notification {
            FileNotification::SearchMatches(params) => {
                encode::notification::<notice::FsSearchMatches>(params)
            }
            FileNotification::Changed(params) => encode::notification::<notice::FsChanged>(params),
            FileNotification::MissingChanged(params) => {
                encode::notification::<notice::FsMissingChanged>(params)
            }
        };
        Box::pin(async move { self.0.send(message).await.is_ok() })
    }
}
