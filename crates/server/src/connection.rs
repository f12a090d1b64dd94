//! One connection: its lifecycle, and the one place where methods are told apart.
//!
//! Messages are taken in order. What a request does to a process is queued with that process's
//! owner before the next message is looked at, so requests that name the same process take effect
//! in the order they came; their answers are awaited by tasks of their own, so none of them delays
//! another.
//!
//! Invariant: every request is answered once, if the connection lasts: a [`Request`] that is dropped
//! without an answer, by a panic at whatever stage, sends an error.

use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_host::files::Reservation;
use codex_exec_host::{buffer, pool};
use codex_exec_rpc::{Connection, Outbound, Slot, Transfer, TransportError};
use codex_exec_server_protocol::environment::EnvironmentStatusResponse;
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::session::{InitializeParams, InitializeResponse};
use codex_exec_server_protocol::{
    Call, Encode, ErrorKind, FileMethod, Incoming, Method, Notice, RequestId, RpcError, call,
    encode, file_methods, notice, parse_params,
};
use futures_util::FutureExt;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::answers::AnswerMemory;
use crate::auth::Principal;
use crate::files::Files;
use crate::http;
use crate::server::Server;
use crate::session::{Attachment, Holder, Session};

#[cfg(test)]
mod panics;

/// Where a connection is in its life.
enum Stage {
    /// Nothing was said yet.
    New,
    /// `initialize` was answered.
    Greeted(Attached),
    /// `initialized` has come.
    Ready(Attached),
}

/// A connection's hold on its session.
#[derive(Clone)]
pub(crate) struct Attached {
    pub session: Arc<Session>,
    pub attachment: Attachment,
}

/// What a request carries until it is answered. Dropped before that, it answers with an error.
pub(crate) struct Request {
    id: RequestId,
    outbound: Outbound,
    answered: bool,
    /// What the answer takes of the memory for large ones, until it is written.
    memory: Option<Reservation>,
    /// Its share of what a connection may have under way.
    _share: Share,
}

/// An answer of more bytes is encoded only when it can be sent.
const LARGE: usize = 16 << 10;

/// An answer of more bytes is encoded elsewhere.
const VAST: usize = 256 << 10;

struct Share {
    _count: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
    /// Of what the server has for large messages.
    _memory: Option<codex_exec_rpc::Share>,
    /// Where requests run one at a time: that it is this one's turn.
    _turn: Option<OwnedSemaphorePermit>,
}

/// A message and the memory it takes.
struct Held {
    message: Bytes,
    _memory: Reservation,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Request {
    /// Has the answer hold this memory until it is written.
    pub(crate) fn hold(&mut self, memory: Option<Reservation>) {
        self.memory = memory;
    }

    pub(crate) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Sends the answer; waits while the client does not read. What is large waits as what it is
    /// and becomes a message only when there is room for that: many answers that wait may share the
    /// bytes they carry, their messages would not.
    pub(crate) async fn answer<R: Encode + Send + Sync + 'static>(
        self,
        result: Result<R, RpcError>,
    ) -> bool {
        let message = match result {
            Ok(result) if result.size_hint() > LARGE => {
                return self.respond(Box::new(result)).await;
            }
            Ok(result) => encode::response(&self.id, &result),
            Err(error) => encode::error(&self.id, &error),
        };
        let Ok(slot) = self.outbound.reserve(message.len()).await else { return false };
        self.send(slot, message);
        true
    }

    /// Sends the answer into the room there is for it.
    fn send(mut self, slot: Slot, message: impl Into<Bytes>) {
        let message = message.into();
        slot.send(match self.memory.take() {
            Some(memory) => Bytes::from_owner(Held { message, _memory: memory }),
            None => message,
        });
        self.answered = true;
    }

    /// Sends a result, as [`answer`](Self::answer) does, and drops it after that. One that takes long
    /// to encode is left to a thread that nobody else waits for.
    pub(crate) async fn respond<A, R>(self, result: A) -> bool
    where
        A: Deref<Target = R> + Send + Sync + 'static,
        R: Encode,
    {
        let hint = result.size_hint();
        let Ok(slot) = self.outbound.reserve(hint).await else { return false };
        let id = self.id.clone();
        let encode = move || {
            let buffer = buffer::with_capacity(64 + hint).unwrap_or_default();
            (encode::response_in(buffer, &id, &*result), result)
        };
        let encoded = match hint > VAST {
            true => pool::blocking(encode).await,
            false => Ok(encode()),
        };
        // Dropping the request answers it.
        let Ok((message, _result)) = encoded else { return false };
        self.send(slot, buffer::into_bytes(message));
        true
    }

    /// Sends the answer at once if there is room for it, and else when there is.
    pub(crate) fn answer_soon<R: Encode + Send + Sync + 'static>(
        self,
        result: Result<R, RpcError>,
    ) {
        let len = result.as_ref().map_or(LARGE, Encode::size_hint);
        let Some(slot) = self.outbound.try_reserve(len) else {
            tokio::spawn(async move { self.answer(result).await });
            return;
        };
        let message = match &result {
            Ok(result) => encode::response(&self.id, result),
            Err(error) => encode::error(&self.id, error),
        };
        self.send(slot, message);
    }

    /// Answers when `result` is there, without anybody waiting for it.
    pub(crate) fn answer_later<R: Encode + Send + Sync + 'static>(
        self,
        result: impl Future<Output = Result<R, RpcError>> + Send + 'static,
    ) {
        self.answer_later_holding(async move { (result.await, None) });
    }

    /// The same for an answer that holds memory until it is written.
    pub(crate) fn answer_later_holding<R: Encode + Send + Sync + 'static>(
        mut self,
        result: impl Future<Output = (Result<R, RpcError>, Option<Reservation>)> + Send + 'static,
    ) {
        tokio::spawn(async move {
            tokio::select! {
                (result, memory) = result => {
                    self.hold(memory);
                    self.answer(result).await;
                }
                // Nobody is left to answer to; what waits need not wait any longer.
                () = self.outbound.closed() => {}
            }
        });
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.answered || self.outbound.is_closed() {
            return;
        }
        tracing::debug!(id = %self.id, "request dropped without a response");
        let error =
            RpcError::internal(ErrorKind::Internal, "the server failed to handle this request");
        self.outbound.send_now(encode::error(&self.id, &error));
    }
}

/// Serves a connection until it ends.
pub(crate) async fn serve(server: Server, principal: Principal, mut connection: Connection) {
    let transfer = connection.transfer();
    let mut serving = Serving::new(server, principal, connection.outbound().clone(), &transfer);
    let (shutdown, evicted) = (serving.server.clone(), serving.holder.evicted.clone());
    let work = async {
        loop {
            match connection.next().await {
                Some(Ok(message)) => {
                    let memory = connection.take_share();
                    serving.message(&message, memory).await;
                    if !matches!(serving.stage, Stage::New) {
                        connection.lift_limit();
                    }
                }
                Some(Err(error @ TransportError::TooLong { .. })) => {
                    serving.malformed(error.to_string()).await;
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "connection failed");
                    break;
                }
                None => break,
            }
        }
    };
    // A panic ends the connection, and not the session with it.
    let work = AssertUnwindSafe(work).catch_unwind();
    // Whatever it waits for, a client that does not read included.
    tokio::select! {
        biased;
        () = shutdown.shutting_down() => {}
        () = evicted.cancelled() => {}
        () = transfer.revoked() => {
            tracing::info!("closed a connection that held memory which others waited for");
        }
        ended = work => if ended.is_err() {
            tracing::error!("the task of a connection panicked");
        },
    }
    serving.end();
}

macro_rules! dispatch_files {
    ($(#[$doc:meta] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        impl Serving {
            async fn file(&self, request: Request, method: FileMethod, params: Option<&RawValue>) {
                match method {
                    $(FileMethod::$operation => match parse_params::<$params>(params) {
                        Ok(params) => self.files.call(request, params),
                        Err(error) => {
                            request.answer::<$response>(Err(error)).await;
                        }
                    },)*
                }
            }
        }
    };
}

file_methods!(dispatch_files);

struct Serving {
    server: Server,
    stage: Stage,
    files: Files,
    http: http::Requests,
    outbound: Outbound,
    holder: Holder,
    answers: AnswerMemory,
    count: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// One permit, if requests run one at a time.
    turn: Option<Arc<Semaphore>>,
}

impl Serving {
    fn new(server: Server, principal: Principal, outbound: Outbound, transfer: &Transfer) -> Self {
        let evicted = CancellationToken::new();
        let answers = AnswerMemory::new(server.config(), server.answer_budget(), transfer);
        Self {
            holder: Holder { principal, peer: outbound.peer(), evicted },
            count: Arc::new(Semaphore::new(server.config().pending_requests)),
            bytes: Arc::new(Semaphore::new(server.config().pending_bytes)),
            turn: (server.config().concurrent_requests == 1).then(|| Arc::new(Semaphore::new(1))),
            files: Files::new(&server, outbound.clone(), answers.clone()),
            answers,
            server,
            stage: Stage::New,
            http: http::Requests::default(),
            outbound,
        }
    }

    async fn message(&mut self, message: &Bytes, memory: Option<codex_exec_rpc::Share>) {
        match Incoming::parse(message, &self.server.config().decode) {
            Ok(Incoming::Request { id, method, params, trace }) => {
                tracing::debug!(%id, method, ?trace, "request");
                let request = self.request(id, &method, message.len(), memory).await;
                // What panics answers by being dropped; the requests after it go on.
                let _ =
                    AssertUnwindSafe(self.dispatch(request, &method, params)).catch_unwind().await;
            }
            Ok(Incoming::Notification { method, .. }) => self.notification(&method).await,
            // The server asks nothing, so nothing answers it.
            Ok(Incoming::Response { id, .. } | Incoming::Error { id, .. }) => {
                tracing::debug!(%id, "response to an unknown request");
            }
            Err(error) => self.malformed(error.to_string()).await,
        }
    }

    /// Waits until the connection may have one more request under way.
    async fn request(
        &self,
        id: RequestId,
        method: &str,
        len: usize,
        memory: Option<codex_exec_rpc::Share>,
    ) -> Request {
        // These wait for their process, which may be waiting for a later request: they take their turn
        // and give it up at once.
        let waits =
            matches!(Method::from_name(method), Some(Method::ProcessRead | Method::ProcessWrite));
        let len = len.min(self.server.config().pending_bytes);
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        let mut share = pin!(async {
            // The semaphores live as long as `self` and are never closed.
            let closed = "the semaphore is never closed";
            let count = self.count.clone().acquire_owned().await.expect(closed);
            let bytes = self.bytes.clone().acquire_many_owned(len).await.expect(closed);
            let turn = match &self.turn {
                Some(turn) => Some(turn.clone().acquire_owned().await.expect(closed)),
                None => None,
            };
            let turn = turn.filter(|_| !waits);
            Share { _count: count, _bytes: bytes, _memory: memory, _turn: turn }
        });
        let share = match share.as_mut().now_or_never() {
            Some(share) => share,
            None => {
                let _not_reading = self.outbound.not_reading();
                share.await
            }
        };
        Request {
            id,
            outbound: self.outbound.clone(),
            answered: false,
            memory: None,
            _share: share,
        }
    }

    async fn malformed(&self, message: String) {
        tracing::debug!(message, "malformed message");
        let error = RpcError::invalid_request(ErrorKind::MalformedMessage, message);
        let _ = self.outbound.send(encode::error(&RequestId::UNKNOWN, &error)).await;
    }

    async fn notification(&mut self, method: &str) {
        if method != notice::Initialized::NAME {
            return self.malformed(format!("unexpected notification `{method}`")).await;
        }
        self.stage = match std::mem::replace(&mut self.stage, Stage::New) {
            Stage::Greeted(attached) => Stage::Ready(attached),
            stage => {
                let early = matches!(stage, Stage::New);
                self.stage = stage;
                if early {
                    self.malformed("`initialized` came before `initialize`".into()).await;
                }
                return;
            }
        };
    }

    async fn dispatch(&mut self, request: Request, name: &str, params: Option<&RawValue>) {
        let Some(method) = Method::from_name(name) else {
            request.answer::<InitializeResponse>(Err(RpcError::method_not_found(name))).await;
            return;
        };
        if method == Method::Initialize {
            return self.initialize(request, params).await;
        }
        let attached = match &self.stage {
            Stage::Ready(attached) => attached.clone(),
            stage => {
                let missing = match stage {
                    Stage::New => "call initialize",
                    _ => "send initialized",
                };
                let family = method.family().as_str();
                let message = format!("client must {missing} before using {family} methods");
                let error = RpcError::invalid_request(ErrorKind::NotInitialized, message);
                request.answer::<InitializeResponse>(Err(error)).await;
                return;
            }
        };
        self.handle(request, method, params, attached).await;
    }

    /// The one match. Params are parsed here, once, into their type.
    async fn handle(
        &mut self,
        request: Request,
        method: Method,
        params: Option<&RawValue>,
        attached: Attached,
    ) {
        use crate::process;
        let server = &self.server;
        let session = &attached.session;
        macro_rules! parsed {
            ($call:ty) => {
                match parse_params::<<$call as Call>::Params>(params) {
                    Ok(params) => params,
                    Err(error) => {
                        request.answer::<<$call as Call>::Response>(Err(error)).await;
                        return;
                    }
                }
            };
        }
        match method {
            Method::Initialize => {}
            Method::ProcessStart => {
                let params = parsed!(call::ProcessStart);
                process::start(server, &attached, request, params);
            }
            Method::ProcessRead => {
                let params = parsed!(call::ProcessRead);
                let answer = process::read(session, params, self.answers.clone());
                request.answer_later_holding(answer);
            }
            Method::ProcessWrite => {
                let answer = process::write(session, parsed!(call::ProcessWrite));
                request.answer_later(answer);
            }
            Method::ProcessSignal => {
                let answer = process::signal(session, &parsed!(call::ProcessSignal));
                request.answer_later(answer);
            }
            Method::ProcessTerminate => {
                let answer = process::terminate(session, &parsed!(call::ProcessTerminate));
                request.answer_later(answer);
            }
            Method::ProcessResize => {
                let answer = process::resize(session, &parsed!(call::ProcessResize));
                request.answer_later(answer);
            }
            Method::ProcessList => request.answer_later(process::list(session)),
            Method::EnvironmentInfo => {
                request.answer(Ok(server.environment_info())).await;
            }
            Method::EnvironmentStatus => {
                request.answer(Ok(EnvironmentStatusResponse { status: "ready".into() })).await;
            }
            Method::HttpRequest => {
                let params = parsed!(call::HttpRequest);
                self.http.call(request, params, self.answers.clone());
            }
            Method::File(method) => self.file(request, method, params).await,
        }
    }

    async fn initialize(&mut self, request: Request, params: Option<&RawValue>) {
        let result = self.open_session(params).await;
        let attached = match result {
            Ok(attached) => attached,
            Err(error) => {
                request.answer::<InitializeResponse>(Err(error)).await;
                return;
            }
        };
        let kept = attached.session.kept_handles(&self.server.config().files);
        self.files.attached(kept);
        self.stage = Stage::Greeted(attached.clone());
        let response = InitializeResponse {
            session_id: Some(attached.session.id().to_owned()),
            environment_info: Some(self.server.environment_info()),
        };
        // Events of a resumed session follow the answer.
        if request.answer(Ok(response)).await {
            attached.session.attach_all(attached.attachment, &self.outbound);
        }
    }

    async fn open_session(&self, params: Option<&RawValue>) -> Result<Attached, RpcError> {
        if !matches!(self.stage, Stage::New) {
            let message = "initialize was already called on this connection";
            return Err(RpcError::invalid_request(ErrorKind::AlreadyInitialized, message));
        }
        let params: InitializeParams = parse_params(params)?;
        let config = self.server.config();
        let asked = params.detach_ttl_ms.map(Duration::from_millis);
        let asked = asked.map(|ttl| ttl.min(config.max_detach_ttl));
        let sessions = self.server.sessions();
        let (session, attachment) = match &params.resume_session_id {
            Some(id) => {
                let holder = self.holder.clone();
                sessions.resume(id, asked, holder, config.takeover_patience).await?
            }
            None => sessions.create(asked.unwrap_or(config.detach_ttl), self.holder.clone()),
        };
        tracing::info!(client = params.client_name, session = session.id(), "session attached");
        Ok(Attached { session, attachment })
    }

    fn end(self) {
        if let Stage::Greeted(attached) | Stage::Ready(attached) = self.stage {
            tracing::info!(session = attached.session.id(), "session detached");
            self.server.sessions().detach(attached.session, attached.attachment);
        }
    }
}
