//! MCP over streamable HTTP: one path, a session by header, responses as JSON or as a stream of events.
//!
//! A client that closes the stream of a request does not cancel it: its command runs on, and stays in the
//! session.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Frame, Incoming as Body};
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use crate::http_guard::HttpGuard;
use crate::message::{self, Incoming, Malformed, Replies};
use crate::session::{REVISIONS, Session};
use crate::workspace::Workspace;

/// The path of the endpoint.
const PATH: &str = "/mcp";
const SESSION_HEADER: &str = "mcp-session-id";
const REVISION_HEADER: &str = "mcp-protocol-version";
/// Messages of one request that wait to be sent.
const QUEUE: usize = 64;
/// How often an event stream without messages shows that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(15);

type Reply = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Why the server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The listener failed.
    #[error("cannot accept connections: {0}")]
    Accept(#[from] io::Error),
}

/// An MCP server for several clients.
#[derive(Debug, Clone)]
pub struct HttpServer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    workspace: Arc<Workspace>,
    guard: HttpGuard,
    sessions: Mutex<HashMap<String, Open>>,
}

/// A session, and when it was last used.
#[derive(Debug)]
struct Open {
    session: Session,
    used: Instant,
}

/// A refusal, before any message is answered.
struct Refusal(StatusCode, String);

impl HttpServer {
    /// Serves this workspace to whom the guard admits.
    pub fn new(workspace: Arc<Workspace>, guard: HttpGuard) -> Self {
        Self { shared: Arc::new(Shared { workspace, guard, sessions: Mutex::default() }) }
    }

    /// Accepts connections for ever; call [`end`](Self::end) afterwards.
    pub async fn serve(&self, listener: TcpListener) -> Result<Infallible, HttpError> {
        let config = &self.shared.workspace.config;
        let room = Arc::new(Semaphore::new(config.max_connections));
        let sweeping = self.clone();
        let sweeper = AbortOnDrop(tokio::spawn(async move { sweeping.sweep().await }));
        loop {
            let permit = room.clone().acquire_owned().await;
            let (stream, _) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_one_connection(&error) => continue,
                Err(error) => {
                    drop(sweeper);
                    return Err(error.into());
                }
            };
            let (server, timeout) = (self.clone(), config.head_timeout);
            tokio::spawn(async move {
                let _permit = permit;
                let is_admitted = server.shared.guard.admits(&stream).await;
                let service = service_fn(|request| {
                    let server = server.clone();
                    async move { Ok::<_, Infallible>(server.respond(request, is_admitted).await) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(timeout)
                    .serve_connection(TokioIo::new(stream), service);
                if let Err(error) = connection.await {
                    tracing::debug!(%error, "an HTTP connection failed");
                }
            });
        }
    }

    /// Ends every session, and what its commands left running.
    pub async fn end(&self) {
        let sessions: Vec<Open> =
            self.shared.sessions.lock().drain().map(|(_, open)| open).collect();
        for open in sessions {
            open.session.end().await;
        }
    }

    /// Ends unused sessions.
    async fn sweep(&self) {
        let idle = self.shared.workspace.config.session_idle;
        let mut tick = tokio::time::interval((idle / 8).max(Duration::from_secs(1)));
        loop {
            tick.tick().await;
            let unused = {
                let mut sessions = self.shared.sessions.lock();
                let is_unused =
                    |open: &Open| open.used.elapsed() > idle && !open.session.has_running();
                let ids: Vec<String> = sessions
                    .iter()
                    .filter(|(_, open)| is_unused(open))
                    .map(|(id, _)| id.clone())
                    .collect();
                ids.into_iter().filter_map(|id| sessions.remove(&id)).collect::<Vec<_>>()
            };
            for open in unused {
                open.session.end().await;
            }
        }
    }

    async fn respond(&self, request: Request<Body>, is_admitted: bool) -> Reply {
        let result = match is_admitted {
            true => self.route(request).await,
            false => Err(Refusal(
                StatusCode::FORBIDDEN,
                "processes in a sandbox of this server are refused".to_owned(),
            )),
        };
        match result {
            Ok(reply) => reply,
            Err(Refusal(status, message)) => {
                let error = message::error(&Value::Null, message::INVALID_REQUEST, &message);
                let mut reply = json_reply(status, &error);
                if status == StatusCode::METHOD_NOT_ALLOWED {
                    reply.headers_mut().insert(ALLOW, HeaderValue::from_static("POST, DELETE"));
                }
                if status == StatusCode::UNAUTHORIZED {
                    let challenge = HeaderValue::from_static("Bearer");
                    reply.headers_mut().insert(hyper::header::WWW_AUTHENTICATE, challenge);
                }
                reply
            }
        }
    }

    async fn route(&self, request: Request<Body>) -> Result<Reply, Refusal> {
        let refuse = |(status, why): (StatusCode, &str)| Refusal(status, why.to_owned());
        self.shared.guard.check(request.headers()).map_err(refuse)?;
        if request.uri().path() != PATH {
            return Err(Refusal(StatusCode::NOT_FOUND, format!("the endpoint is {PATH}")));
        }
        if let Some(revision) = header(request.headers(), REVISION_HEADER)
            && !REVISIONS.contains(&revision)
        {
            return Err(Refusal(StatusCode::BAD_REQUEST, "unknown revision of MCP".to_owned()));
        }
        match *request.method() {
            Method::POST => self.post(request).await,
            Method::DELETE => {
                let id = header(request.headers(), SESSION_HEADER).unwrap_or_default();
                let open = self.shared.sessions.lock().remove(id);
                let open = open.ok_or_else(unknown_session)?;
                open.session.end().await;
                Ok(empty(StatusCode::NO_CONTENT))
            }
            // This server sends nothing that no request asked for.
            _ => Err(Refusal(StatusCode::METHOD_NOT_ALLOWED, "send messages by POST".to_owned())),
        }
    }

    async fn post(&self, request: Request<Body>) -> Result<Reply, Refusal> {
        let (head, body) = request.into_parts();
        let content_type = header(&head.headers, CONTENT_TYPE.as_str()).unwrap_or_default();
        if !content_type.trim_start().to_ascii_lowercase().starts_with("application/json") {
            let why = "messages are application/json".to_owned();
            return Err(Refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        let limit = self.shared.workspace.config.max_message_bytes;
        let text = match Limited::new(body, limit).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                let why = format!("a message is longer than {limit} bytes");
                return Err(Refusal(StatusCode::PAYLOAD_TOO_LARGE, why));
            }
            Err(_) => {
                return Err(Refusal(StatusCode::BAD_REQUEST, "the body ended early".to_owned()));
            }
        };
        let messages = match message::parse(&text) {
            Ok(messages) => messages,
            Err(malformed) => {
                return Ok(json_reply(StatusCode::BAD_REQUEST, &malformed.response()));
            }
        };
        let (session, new_id) = self.session(&head.headers, &messages).await?;
        let (replies, queue) = Replies::channel(QUEUE);
        let wants_response =
            messages.iter().any(|message| matches!(message, Ok(Incoming::Request { .. }) | Err(_)));
        let accept = header(&head.headers, ACCEPT.as_str()).unwrap_or_default();
        let as_events = accept.contains("text/event-stream") && new_id.is_none();
        let work = async move {
            for message in messages {
                session.handle(message, &replies).await;
            }
        };
        if !wants_response {
            work.await;
            return Ok(empty(StatusCode::ACCEPTED));
        }
        // A task of its own: the end of the connection ends neither a call nor its command.
        tokio::spawn(work);
        let mut reply = match as_events {
            true => events(queue),
            false => json_reply(StatusCode::OK, &last(queue).await),
        };
        if let Some(id) = new_id.and_then(|id| HeaderValue::from_str(&id).ok()) {
            reply.headers_mut().insert(SESSION_HEADER, id);
        }
        Ok(reply)
    }

    /// The session of a request: a new one for `initialize`, otherwise the one that it names.
    async fn session(
        &self,
        headers: &HeaderMap,
        messages: &[Result<Incoming, Malformed>],
    ) -> Result<(Session, Option<String>), Refusal> {
        let opens = messages.iter().any(|message| {
            matches!(message, Ok(Incoming::Request { method, .. }) if method == "initialize")
        });
        if !opens {
            let Some(id) = header(headers, SESSION_HEADER) else {
                let why = format!("the header {SESSION_HEADER} is missing; initialize first");
                return Err(Refusal(StatusCode::BAD_REQUEST, why));
            };
            let mut sessions = self.shared.sessions.lock();
            let open = sessions.get_mut(id).ok_or_else(unknown_session)?;
            open.used = Instant::now();
            return Ok((open.session.clone(), None));
        }
        let id = uuid::Uuid::new_v4().to_string();
        let session = Session::new(self.shared.workspace.clone());
        let evicted = {
            let mut sessions = self.shared.sessions.lock();
            let evicted = match sessions.len() >= self.shared.workspace.config.max_sessions {
                true => {
                    let oldest = sessions.iter().min_by_key(|(_, open)| open.used);
                    let oldest = oldest.map(|(id, _)| id.clone());
                    oldest.and_then(|id| sessions.remove(&id))
                }
                false => None,
            };
            let open = Open { session: session.clone(), used: Instant::now() };
            sessions.insert(id.clone(), open);
            evicted
        };
        if let Some(evicted) = evicted {
            evicted.session.end().await;
        }
        Ok((session, Some(id)))
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Whether a failure to accept concerns one connection and not the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

fn unknown_session() -> Refusal {
    Refusal(StatusCode::NOT_FOUND, "the session has ended; initialize again".to_owned())
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::new()).boxed_unsync());
    *reply.status_mut() = status;
    reply
}

fn json_reply(status: StatusCode, value: &Value) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from(value.to_string())).boxed_unsync());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// The response, for a client that wants no progress.
async fn last(mut queue: mpsc::Receiver<Value>) -> Value {
    let mut last = Value::Null;
    while let Some(message) = queue.recv().await {
        last = message;
    }
    last
}

/// The messages as server-sent events.
fn events(queue: mpsc::Receiver<Value>) -> Reply {
    let frames = stream::unfold(queue, |mut queue| async move {
        let text = match tokio::time::timeout(HEARTBEAT, queue.recv()).await {
            Ok(Some(message)) => format!("event: message\ndata: {message}\n\n"),
            Ok(None) => return None,
            Err(_) => ": waiting\n\n".to_owned(),
        };
        Some((Ok(Frame::data(Bytes::from(text))), queue))
    });
    let mut reply = Response::new(BodyExt::boxed_unsync(StreamBody::new(Box::pin(frames))));
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    reply
}
