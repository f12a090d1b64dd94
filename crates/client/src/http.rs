//! HTTP requests from the server's machine, with the body as a stream.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use codex_exec_server_protocol::http::{HttpRequestParams, HttpRequestResponse};
use codex_exec_server_protocol::{ErrorKind, call, notification};
use futures_util::{Stream, StreamExt};

use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Lost};
use crate::subscriptions::Notifications;

/// The body of an HTTP response as a stream, from [`ExecServerClient::http_stream`].
///
/// It is bound to its connection: if that drops, the stream ends with an error.
pub struct HttpBody {
    request_id: String,
    deltas: Notifications<notification::HttpRequestBodyDelta>,
    next: u64,
    /// Keeps the connection open.
    client: ExecServerClient,
    /// Resolves when the connection has ended.
    lost: Pin<Box<dyn Future<Output = ()> + Send>>,
    done: bool,
}

impl ExecServerClient {
    /// Makes a request and returns the head of its response, and the body as a stream. Replaces
    /// `request_id` and `stream_response` in `params`.
    pub async fn http_stream(
        &self,
        mut params: HttpRequestParams,
    ) -> Result<(HttpRequestResponse, HttpBody), ExecServerError> {
        params.request_id = self.fresh_id();
        params.stream_response = true;
        let request_id = params.request_id.clone();
        let deltas = self.subscribe();
        let epoch = self.shared.channel().await?.epoch;
        let head = self.call::<call::HttpRequest>(params).await?;
        let shared = self.shared.clone();
        let lost = Box::pin(async move { shared.channel_lost(epoch).await });
        let body =
            HttpBody { request_id, deltas, next: 1, client: self.clone(), lost, done: false };
        Ok((head, body))
    }
}

impl Stream for HttpBody {
    type Item = Result<Bytes, ExecServerError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.done {
                return Poll::Ready(None);
            }
            let delta = match self.deltas.poll_next_unpin(cx) {
                Poll::Ready(delta) => delta,
                Poll::Pending => {
                    ready!(self.lost.as_mut().poll(cx));
                    self.done = true;
                    let method = "http/request";
                    return Poll::Ready(Some(Err(Lost::Response { method }.into())));
                }
            };
            let delta = match delta {
                Some(Ok(delta)) if delta.request_id != self.request_id => continue,
                Some(Ok(delta)) => delta,
                Some(Err(error)) => {
                    self.done = true;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    self.done = true;
                    let method = "http/request";
                    return Poll::Ready(Some(Err(Lost::Response { method }.into())));
                }
            };
            self.done = delta.done || delta.error.is_some();
            if let Some(why) = delta.error {
                return Poll::Ready(Some(Err(ExecServerError::Server {
                    method: "http/request",
                    code: codex_exec_server_protocol::error::INTERNAL_ERROR,
                    message: format!("the body ended early: {why}"),
                    kind: ErrorKind::HttpFailed,
                })));
            }
            if delta.seq != self.next {
                self.done = true;
                let detail = format!("received piece {} instead of {}", delta.seq, self.next);
                return Poll::Ready(Some(Err(ExecServerError::protocol("reading a body", detail))));
            }
            self.next += 1;
            if !delta.delta.is_empty() {
                return Poll::Ready(Some(Ok(delta.delta.0)));
            }
        }
    }
}

impl fmt::Debug for HttpBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpBody")
            .field("request_id", &self.request_id)
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}
