//! One connection: its lifecycle, and the dispatch of methods to handlers.
//!
//! Messages are handled in order. A request to a process is queued with the process's owner before the
//! next message is parsed, so requests to the same process take effect in the order in which they
//! arrive. A separate task awaits each response, so no request delays another.
//!
//! Invariant: every request gets exactly one response while the connection lasts: a [`Request`] that is
//! dropped without one, by a panic at any stage, sends an error.

use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_host::files::{PersistentHandles, Reservation};
use codex_exec_host::{buffer, pool};
use codex_exec_rpc::{Connection, Outbound, Slot, Transfer, TransportError};
use codex_exec_server_protocol::environment::EnvironmentStatusResponse;
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::session::{
    InitializeParams, InitializeResponse, Role, SessionDetachedNotification,
};
use codex_exec_server_protocol::{
    Call, Encode, ErrorKind, FileMethod, Incoming, Method, Notification, RequestId, RpcError, call,
    encode, file_methods, notification, parse_params,
};
use futures_util::FutureExt;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::audit::{self, Caller};
use crate::auth::Principal;
use crate::client_calls::ClientCalls;
use crate::entry::Pass;
use crate::files::Files;
use crate::http;
use crate::metrics::Metrics;
use crate::response_memory::ResponseMemory;
use crate::server::Server;
use crate::session::{Holder, Part, Session};
use crate::spans::Span;

#[cfg(test)]
mod panics;

/// The stage of the handshake.
enum Stage {
    /// Before `initialize`.
    New,
    /// After the response to `initialize`, before `initialized`.
    AwaitingInitialized(Attached),
    /// After `initialized`.
    Ready(Attached),
}

/// The session that a connection is attached to.
#[derive(Clone)]
pub(crate) struct Attached {
    pub session: Arc<Session>,
    pub part: Part,
}

/// A request without a response yet. Dropping it sends an error response.
pub(crate) struct Request {
    id: RequestId,
    outbound: Outbound,
    responded: bool,
    /// Its record in the audit log, written when this is dropped.
    audit: Option<Box<audit::Entry>>,
    /// Its span, exported when this is dropped.
    span: Option<Box<Span>>,
    metrics: Option<Arc<Metrics>>,
    /// Memory of a large response, held until the response is written.
    memory: Option<Reservation>,
    /// Its part of the connection's limits on pending requests.
    _permits: Permits,
}

/// A larger response is encoded only when there is room to send it, in bytes.
const LARGE_RESPONSE: usize = 16 << 10;

/// A larger response is encoded on the pool, not on the lane, in bytes.
const HUGE_RESPONSE: usize = 256 << 10;

/// Longest name of a session, in bytes.
const MAX_SESSION_NAME: usize = 256;

/// Whether a client that only watches may ask for it.
fn is_viewing(method: Method) -> bool {
    matches!(
        method,
        Method::ProcessRead
            | Method::ProcessList
            | Method::ProcessScreen
            | Method::SessionList
            | Method::EnvironmentInfo
            | Method::EnvironmentStatus
    )
}

struct Permits {
    _count: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
    /// Of the server's memory for large messages.
    _memory: Option<codex_exec_rpc::Share>,
    /// The turn of this request, if requests run one at a time.
    _turn: Option<OwnedSemaphorePermit>,
}

/// A message, and the memory reserved for it.
struct ReservedMessage {
    message: Bytes,
    _memory: Reservation,
}

impl AsRef<[u8]> for ReservedMessage {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Request {
    /// Makes the response hold this memory until it is written.
    pub(crate) fn hold_memory(&mut self, memory: Option<Reservation>) {
        self.memory = memory;
    }

    pub(crate) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Who sent it, for the audit log; `None` without one.
    pub(crate) fn caller(&self) -> Option<Caller> {
        self.audit.as_ref().map(|audit| audit.caller())
    }

    /// Notes the outcome for the audit log and the span.
    fn record(&mut self, error: Option<&RpcError>) {
        if let Some(audit) = &mut self.audit {
            audit.respond(error);
        }
        if let Some(span) = &mut self.span {
            span.respond(error);
        }
    }

    /// Sends the response; waits while the client does not read. A large result is encoded only when
    /// there is room: waiting results may share their bytes, their messages would not. Returns false if
    /// the connection has closed.
    pub(crate) async fn respond<R: Encode + Send + Sync + 'static>(
        mut self,
        result: Result<R, RpcError>,
    ) -> bool {
        self.record(result.as_ref().err());
        let message = match result {
            Ok(result) if result.size_hint() > LARGE_RESPONSE => {
                return self.send_result(Box::new(result)).await;
            }
            Ok(result) => encode::response(&self.id, &result),
            Err(error) => encode::error(&self.id, &error),
        };
        let Ok(slot) = self.outbound.reserve(message.len()).await else { return false };
        self.send(slot, message);
        true
    }

    /// Sends the encoded response into its reserved slot.
    fn send(mut self, slot: Slot, message: impl Into<Bytes>) {
        let message = message.into();
        if let Some(metrics) = &self.metrics {
            metrics.sent(message.len());
        }
        if let Some(audit) = &mut self.audit {
            audit.sent(message.len());
        }
        slot.send(match self.memory.take() {
            Some(memory) => Bytes::from_owner(ReservedMessage { message, _memory: memory }),
            None => message,
        });
        self.responded = true;
    }

    /// Sends a result as [`respond`](Self::respond) does, and drops it afterwards. Encodes a huge one on
    /// the pool.
    pub(crate) async fn send_result<A, R>(mut self, result: A) -> bool
    where
        A: Deref<Target = R> + Send + Sync + 'static,
        R: Encode,
    {
        self.record(None);
        let hint = result.size_hint();
        let Ok(slot) = self.outbound.reserve(hint).await else { return false };
        let id = self.id.clone();
        let encode = move || {
            let buffer = buffer::with_capacity(64 + hint).unwrap_or_default();
            (encode::response_in(buffer, &id, &*result), result)
        };
        let encoded = match hint > HUGE_RESPONSE {
            true => pool::blocking(encode).await,
            false => Ok(encode()),
        };
        // Dropping the request sends an error.
        let Ok((message, _result)) = encoded else { return false };
        self.send(slot, buffer::into_bytes(message));
        true
    }

    /// Sends the response at once if there is room, else from a task that waits for room.
    pub(crate) fn respond_without_waiting<R: Encode + Send + Sync + 'static>(
        mut self,
        result: Result<R, RpcError>,
    ) {
        self.record(result.as_ref().err());
        let len = result.as_ref().map_or(LARGE_RESPONSE, Encode::size_hint);
        let Some(slot) = self.outbound.try_reserve(len) else {
            tokio::spawn(async move { self.respond(result).await });
            return;
        };
        let message = match &result {
            Ok(result) => encode::response(&self.id, result),
            Err(error) => encode::error(&self.id, error),
        };
        self.send(slot, message);
    }

    /// Sends the response from a task once `result` resolves.
    pub(crate) fn respond_later<R: Encode + Send + Sync + 'static>(
        self,
        result: impl Future<Output = Result<R, RpcError>> + Send + 'static,
    ) {
        self.respond_later_with_memory(async move { (result.await, None) });
    }

    /// Like [`respond_later`](Self::respond_later), for a response that holds memory until it is written.
    pub(crate) fn respond_later_with_memory<R: Encode + Send + Sync + 'static>(
        mut self,
        result: impl Future<Output = (Result<R, RpcError>, Option<Reservation>)> + Send + 'static,
    ) {
        tokio::spawn(async move {
            tokio::select! {
                (result, memory) = result => {
                    self.hold_memory(memory);
                    self.respond(result).await;
                }
                // The client has gone: dropping the work cancels it.
                () = self.outbound.closed() => {}
            }
        });
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.responded || self.outbound.is_closed() {
            return;
        }
        tracing::debug!(id = %self.id, "request dropped without a response");
        let error =
            RpcError::internal(ErrorKind::Internal, "the server failed to handle this request");
        self.record(Some(&error));
        self.outbound.send_now(encode::error(&self.id, &error));
    }
}

/// Serves a connection until it closes.
pub(crate) async fn serve(
    server: Server,
    principal: Principal,
    pass: Option<Arc<Pass>>,
    mut connection: Connection,
) {
    let transfer = connection.transfer();
    let _open = server.count_open();
    let _counted = server.metrics().map(Metrics::connection);
    let mut state =
        ConnectionState::new(server, principal, connection.outbound().clone(), &transfer);
    let (server, holder) = (state.server.clone(), state.holder.clone());
    let outbound = connection.outbound().clone();
    let work = async {
        loop {
            match connection.next().await {
                Some(Ok(message)) => {
                    let memory = connection.take_share();
                    state.handle_message(&message, memory).await;
                    if !matches!(state.stage, Stage::New) {
                        connection.lift_limit();
                        if let Some(pass) = &pass {
                            pass.initialized();
                        }
                    }
                }
                Some(Err(error @ TransportError::TooLong { .. })) => {
                    state.reject_malformed(error.to_string()).await;
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "connection failed");
                    break;
                }
                None => break,
            }
        }
    };
    // A panic ends the connection but not its session.
    let work = AssertUnwindSafe(work).catch_unwind();
    // These end the connection whatever it waits for, even a client that does not read.
    tokio::select! {
        biased;
        () = server.shutting_down() => {
            // Processes that were given time to end have said something in it.
            let config = server.config();
            let timeout = config.stop_grace.min(config.connection.close_timeout);
            let _ = tokio::time::timeout(timeout, outbound.drained()).await;
        }
        () = holder.evicted.cancelled() => if holder.taken.load(Ordering::Acquire) {
            outbound.send_now(encode::notification::<notification::SessionDetached>(
                &SessionDetachedNotification {},
            ));
            let timeout = server.config().connection.close_timeout;
            let _ = tokio::time::timeout(timeout, outbound.drained()).await;
        },
        () = must_leave(pass.as_deref()) => {
            tracing::debug!("closed a connection that did not initialize");
        }
        () = transfer.revoked() => {
            tracing::info!("closed a connection that held memory which others waited for");
        }
        ended = work => if ended.is_err() {
            tracing::error!("the task of a connection panicked");
        },
    }
    state.detach();
}

/// Resolves if a connection of a listener has not initialized in time.
async fn must_leave(pass: Option<&Pass>) {
    match pass {
        Some(pass) => pass.must_leave().await,
        None => std::future::pending().await,
    }
}

macro_rules! dispatch_files {
    ($(#[$doc:meta] $operation:ident $call:ident $function:ident $name:literal
        $params:ty => $response:ty,
        $order:ident, $touches:ident, $capability:ident, $effect:expr;)*) => {
        impl ConnectionState {
            async fn handle_file(&self, request: Request, method: FileMethod, params: Option<&RawValue>) {
                match method {
                    $(FileMethod::$operation => match parse_params::<$params>(params) {
                        Ok(params) => self.files.call(request, params),
                        Err(error) => {
                            request.respond::<$response>(Err(error)).await;
                        }
                    },)*
                }
            }
        }
    };
}

file_methods!(dispatch_files);

struct ConnectionState {
    server: Server,
    stage: Stage,
    files: Files,
    http: http::Requests,
    outbound: Outbound,
    /// Requests of the server to this client.
    calls: Arc<ClientCalls>,
    holder: Holder,
    /// Who is at the other end, for the audit log.
    caller: Caller,
    response_memory: ResponseMemory,
    count: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// One permit, if requests run one at a time.
    turn: Option<Arc<Semaphore>>,
}

impl ConnectionState {
    fn new(server: Server, principal: Principal, outbound: Outbound, transfer: &Transfer) -> Self {
        let evicted = CancellationToken::new();
        let response_memory = ResponseMemory::new(&server, transfer);
        let caller = server.audit().map(|_| Caller::new(&principal)).unwrap_or_default();
        Self {
            caller,
            holder: Holder {
                id: server.sessions().new_client(),
                principal,
                peer: outbound.peer(),
                evicted,
                taken: Arc::default(),
                knows_roles: false,
            },
            count: Arc::new(Semaphore::new(server.config().pending_requests)),
            bytes: Arc::new(Semaphore::new(server.config().pending_bytes)),
            turn: (server.config().concurrent_requests == 1).then(|| Arc::new(Semaphore::new(1))),
            files: Files::new(&server, outbound.clone(), response_memory.clone()),
            http: http::Requests::new(server.config(), server.http_requests().clone()),
            response_memory,
            server,
            stage: Stage::New,
            calls: ClientCalls::new(outbound.clone()),
            outbound,
        }
    }

    async fn handle_message(&mut self, message: &Bytes, memory: Option<codex_exec_rpc::Share>) {
        match Incoming::parse(message, &self.server.config().decode) {
            Ok(Incoming::Request { id, method, params, trace }) => {
                tracing::debug!(%id, method, ?trace, "request");
                let mut request = self.admit_request(id, &method, message.len(), memory).await;
                if let Some(metrics) = self.server.metrics() {
                    metrics.received(message.len());
                }
                if let Some(spans) = self.server.spans() {
                    request.span = spans.begin(trace.as_ref(), &method);
                }
                if let Some(log) = self.server.audit() {
                    request.audit = log.entry(&self.caller, &method, params, message.len());
                    if let Some(refusal) = log.refusal() {
                        request.respond::<InitializeResponse>(Err(refusal)).await;
                        return;
                    }
                }
                // A panic drops the request, which sends an error; later requests are not affected.
                let _ =
                    AssertUnwindSafe(self.dispatch(request, &method, params)).catch_unwind().await;
            }
            Ok(Incoming::Notification { method, .. }) => self.handle_notification(&method).await,
            Ok(Incoming::Response { id, result }) => self.handle_response(&id, Ok(result)),
            Ok(Incoming::Error { id, error }) => self.handle_response(&id, Err(error)),
            Err(error) => self.reject_malformed(error.to_string()).await,
        }
    }

    fn handle_response(&self, id: &RequestId, response: Result<&RawValue, RpcError>) {
        if !self.calls.complete(id, response) {
            tracing::debug!(%id, "response to an unknown request");
        }
    }

    /// Waits until the connection's limits allow one more pending request.
    async fn admit_request(
        &self,
        id: RequestId,
        method: &str,
        len: usize,
        memory: Option<codex_exec_rpc::Share>,
    ) -> Request {
        // These wait for their process, which may wait for a later request: they take their turn in order
        // and give it up at once.
        let waits =
            matches!(Method::from_name(method), Some(Method::ProcessRead | Method::ProcessWrite));
        let len = len.min(self.server.config().pending_bytes);
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        let mut permits = pin!(async {
            // The semaphores live as long as `self` and are never closed.
            let closed = "the semaphore is never closed";
            let count = self.count.clone().acquire_owned().await.expect(closed);
            let bytes = self.bytes.clone().acquire_many_owned(len).await.expect(closed);
            let turn = match &self.turn {
                Some(turn) => Some(turn.clone().acquire_owned().await.expect(closed)),
                None => None,
            };
            let turn = turn.filter(|_| !waits);
            Permits { _count: count, _bytes: bytes, _memory: memory, _turn: turn }
        });
        let permits = match permits.as_mut().now_or_never() {
            Some(permits) => permits,
            None => {
                let _not_reading = self.outbound.not_reading();
                permits.await
            }
        };
        Request {
            id,
            outbound: self.outbound.clone(),
            responded: false,
            audit: None,
            span: None,
            metrics: self.server.metrics().cloned(),
            memory: None,
            _permits: permits,
        }
    }

    async fn reject_malformed(&self, message: String) {
        tracing::debug!(message, "malformed message");
        let error = RpcError::invalid_request(ErrorKind::MalformedMessage, message);
        let _ = self.outbound.send(encode::error(&RequestId::UNKNOWN, &error)).await;
    }

    async fn handle_notification(&mut self, method: &str) {
        if method != notification::Initialized::NAME {
            return self.reject_malformed(format!("unexpected notification `{method}`")).await;
        }
        self.stage = match std::mem::replace(&mut self.stage, Stage::New) {
            Stage::AwaitingInitialized(attached) => Stage::Ready(attached),
            stage => {
                let early = matches!(stage, Stage::New);
                self.stage = stage;
                if early {
                    self.reject_malformed("`initialized` came before `initialize`".into()).await;
                }
                return;
            }
        };
    }

    async fn dispatch(&mut self, request: Request, name: &str, params: Option<&RawValue>) {
        let Some(method) = Method::from_name(name) else {
            request.respond::<InitializeResponse>(Err(RpcError::method_not_found(name))).await;
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
                request.respond::<InitializeResponse>(Err(error)).await;
                return;
            }
        };
        if attached.part.role() == Role::View && !is_viewing(method) {
            let message =
                format!("this connection only watches its session, which does not permit {name}");
            let error = RpcError::invalid_request(ErrorKind::ViewOnly, message);
            request.respond::<InitializeResponse>(Err(error)).await;
            return;
        }
        self.handle(request, method, params, attached).await;
    }

    /// Dispatches to the handler. Parses params here, once, into their type.
    async fn handle(
        &mut self,
        request: Request,
        method: Method,
        params: Option<&RawValue>,
        attached: Attached,
    ) {
        use crate::{environment, process};
        let server = &self.server;
        let session = &attached.session;
        macro_rules! parsed {
            ($call:ty) => {
                match parse_params::<<$call as Call>::Params>(params) {
                    Ok(params) => params,
                    Err(error) => {
                        request.respond::<<$call as Call>::Response>(Err(error)).await;
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
                let reader = attached.part.reader();
                let response = process::read(session, params, reader, self.response_memory.clone());
                request.respond_later_with_memory(response);
            }
            Method::ProcessWrite => {
                let response = process::write(session, parsed!(call::ProcessWrite));
                request.respond_later(response);
            }
            Method::ProcessSignal => {
                let response = process::signal(session, &parsed!(call::ProcessSignal));
                request.respond_later(response);
            }
            Method::ProcessTerminate => {
                let response = process::terminate(session, &parsed!(call::ProcessTerminate));
                request.respond_later(response);
            }
            Method::ProcessResize => {
                let client = attached.part.client();
                let response = process::resize(session, client, &parsed!(call::ProcessResize));
                request.respond_later(response);
            }
            Method::ProcessScreen => {
                let response = process::screen(session, &parsed!(call::ProcessScreen));
                request.respond_later(response);
            }
            Method::SessionList => {
                let sessions = server.sessions().all_of(&self.holder.principal);
                let response = process::list_sessions(sessions, self.response_memory.clone());
                request.respond_later_with_memory(response);
            }
            Method::ProcessList => {
                let response = process::list(session, self.response_memory.clone());
                request.respond_later_with_memory(response);
            }
            Method::NetworkUpdateRules => {
                let response = process::update_rules(session, &parsed!(call::NetworkUpdateRules));
                request.respond(response).await;
            }
            Method::EnvironmentInfo => {
                request.respond(Ok(server.environment_info())).await;
            }
            Method::EnvironmentStatus => {
                request.respond(Ok(EnvironmentStatusResponse { status: "ready".into() })).await;
            }
            Method::EnvironmentConfigRead => {
                let params = parsed!(call::EnvironmentConfigRead);
                let response =
                    environment::config(server.clone(), params, self.response_memory.clone());
                request.respond_later_with_memory(response);
            }
            Method::CapabilityRootsDiscover => {
                let params = parsed!(call::CapabilityRootsDiscover);
                let response =
                    environment::roots(server.clone(), params, self.response_memory.clone());
                request.respond_later_with_memory(response);
            }
            Method::CapabilitiesDiscover => {
                let params = parsed!(call::CapabilitiesDiscover);
                let response =
                    environment::installed(server.clone(), params, self.response_memory.clone());
                request.respond_later_with_memory(response);
            }
            Method::HttpRequest => {
                let params = parsed!(call::HttpRequest);
                if let Some(policy) = &server.config().policy {
                    let variables = params.headers.iter();
                    let variables = variables.filter_map(|header| header.value_env_var.as_deref());
                    if let Err(error) = policy.check_http(variables) {
                        request.respond::<<call::HttpRequest as Call>::Response>(Err(error)).await;
                        return;
                    }
                }
                self.http.call(request, params, self.response_memory.clone());
            }
            Method::File(method) => self.handle_file(request, method, params).await,
        }
    }

    async fn initialize(&mut self, request: Request, params: Option<&RawValue>) {
        let result = self.open_session(params).await;
        let (attached, events) = match result {
            Ok(opened) => opened,
            Err(error) => {
                request.respond::<InitializeResponse>(Err(error)).await;
                return;
            }
        };
        // Those of a guest end with its connection.
        let handles = match attached.part {
            Part::Holder(..) => attached.session.persistent_handles(&self.server.config().files),
            Part::Guest(..) => Arc::new(PersistentHandles::new(self.server.config().files.clone())),
        };
        self.files.attach(handles);
        self.stage = Stage::AwaitingInitialized(attached.clone());
        if self.server.audit().is_some() {
            self.caller = self.caller.in_session(attached.session.id());
        }
        let mut request = request;
        if let Some(audit) = &mut request.audit {
            audit.set_caller(self.caller.clone());
        }
        let response = InitializeResponse {
            session_id: Some(attached.session.id().to_owned()),
            environment_info: Some(self.server.environment_info()),
            role: self.holder.knows_roles.then(|| attached.part.role()),
        };
        // Events of a resumed session follow the response.
        if request.respond(Ok(response)).await {
            match attached.part {
                Part::Holder(_, attachment) => {
                    attached.session.attach_all(attachment, &self.calls);
                }
                Part::Guest(client, role) => {
                    attached.session.join_events(client, role, &events, &self.outbound);
                }
            }
        }
    }

    /// Opens, resumes or joins a session. Returns the processes whose events a guest receives, too.
    async fn open_session(
        &mut self,
        params: Option<&RawValue>,
    ) -> Result<(Attached, Vec<ProcessId>), RpcError> {
        if !matches!(self.stage, Stage::New) {
            let message = "initialize was already called on this connection";
            return Err(RpcError::invalid_request(ErrorKind::AlreadyInitialized, message));
        }
        let params: InitializeParams = parse_params(params)?;
        let invalid = |message| RpcError::invalid_params(ErrorKind::InvalidParams, message);
        if params.session_name.as_ref().is_some_and(|name| name.len() > MAX_SESSION_NAME) {
            let message = format!("sessionName has more than {MAX_SESSION_NAME} bytes");
            return Err(invalid(message));
        }
        self.holder.knows_roles = params.attach.is_some();
        let attach = params.attach.unwrap_or_default();
        if attach.take && attach.role == Role::View {
            let message = "attach.take needs the role holder or control: view changes nothing";
            return Err(invalid(message.to_owned()));
        }
        let config = self.server.config();
        let requested_ttl = params.detach_ttl_ms.map(Duration::from_millis);
        let requested_ttl = requested_ttl.map(|ttl| ttl.min(config.max_detach_ttl));
        let sessions = self.server.sessions();
        let (holder, client) = (self.holder.clone(), self.holder.id);
        let (session, part) = match (&params.resume_session_id, attach.role) {
            (Some(id), Role::Holder) => {
                let timeout = config.takeover_timeout;
                let resumed = sessions.resume(id, requested_ttl, holder, attach.take, timeout);
                let (session, attachment) = resumed.await?;
                (session, Part::Holder(client, attachment))
            }
            (Some(id), role) => {
                let session = sessions.join(id, &attach, requested_ttl, holder)?;
                (session, Part::Guest(client, role))
            }
            (None, Role::Holder) => {
                let ttl = requested_ttl.unwrap_or(config.detach_ttl);
                let (session, attachment) = sessions.create(ttl, params.session_name, holder)?;
                (session, Part::Holder(client, attachment))
            }
            (None, _) => {
                let message = "a new session has a holder; leave out attach.role, or name the \
                               session to join as resumeSessionId";
                return Err(invalid(message.to_owned()));
            }
        };
        let number = session.group().0;
        tracing::info!(client = params.client_name, session = number, "session attached");
        Ok((Attached { session, part }, attach.events))
    }

    fn detach(self) {
        if let Stage::AwaitingInitialized(attached) | Stage::Ready(attached) = self.stage {
            tracing::info!(session = attached.session.group().0, "session detached");
            self.server.sessions().detach(attached.session, attached.part);
        }
    }
}
