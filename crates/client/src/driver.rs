//! The task that owns the connection: it reads messages, hands them on, and makes the connection
//! again when it drops.
//!
//! Invariant: nothing here waits for a consumer, except for a process that asked to hold the
//! connection ([`WhenSlow::Hold`](crate::WhenSlow)) or has more output waiting than may be on disk.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::Connection;
use codex_exec_server_protocol::process::{OutputStream, ProcessId};
use codex_exec_server_protocol::session::InitializeParams;
use codex_exec_server_protocol::{
    Base64Bytes, DecodeLimits, ErrorKind, Incoming, Notification, RequestId, RpcError, encode,
    notification,
};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::backoff::ReconnectPolicy;
use crate::dialer::Dialer;
use crate::error::{ExecServerError, Lost};
use crate::handshake::{HandshakeError, handshake};
use crate::link::Link;
use crate::process::ExitStatus;
use crate::shared::{ConnectionStatus, LinkState, Shared};

/// How often a client that holds its connection shows that it lives.
const HOLDING_BEAT: Duration = Duration::from_secs(1);

pub(crate) struct Driver {
    pub(crate) shared: Arc<Shared>,
    pub(crate) dialer: Arc<dyn Dialer>,
    pub(crate) policy: ReconnectPolicy,
    /// To be sent again; the session's id is filled in.
    pub(crate) initialize: InitializeParams,
    pub(crate) initialize_timeout: Duration,
    /// True once the client is closed or dropped.
    pub(crate) closing: watch::Receiver<bool>,
}

/// Why a connection is not read any more.
enum End {
    /// The client wants it.
    Closing,
    /// It dropped.
    Dropped(String),
    /// The peer broke the protocol.
    Broken(ExecServerError),
}

impl Driver {
    pub(crate) async fn run(mut self, mut connection: Connection, mut link: Arc<Link>) {
        loop {
            let end = self.serve(&mut connection, &link).await;
            link.fail();
            let reason = match end {
                End::Closing => {
                    let reason = "closed by this client".to_owned();
                    self.shared.die(&ExecServerError::Closed { reason });
                    drop((connection, link));
                    self.dialer.farewell().await;
                    return;
                }
                End::Broken(error) => {
                    self.shared.die(&error);
                    return;
                }
                End::Dropped(reason) => reason,
            };
            drop(connection);
            let mut closing = self.closing.clone();
            let again = tokio::select! {
                again = self.reconnect(reason, link.epoch) => again,
                _ = closing.wait_for(|closing| *closing) => {
                    Err(ExecServerError::Closed { reason: "closed by this client".to_owned() })
                }
            };
            match again {
                Ok(made) => (connection, link) = made,
                Err(error) => {
                    self.shared.die(&error);
                    return;
                }
            }
        }
    }

    async fn serve(&mut self, connection: &mut Connection, link: &Arc<Link>) -> End {
        loop {
            let message = tokio::select! {
                message = connection.next() => message,
                _ = self.closing.wait_for(|closing| *closing) => return End::Closing,
            };
            let message = match message {
                Some(Ok(message)) => message,
                Some(Err(error)) if error.is_fatal() => return End::Dropped(error.to_string()),
                Some(Err(error)) => {
                    link.answer_lost(&error.to_string());
                    continue;
                }
                None => return End::Dropped("the server closed the connection".to_owned()),
            };
            if let Err(detail) = self.handle(&message, link).await {
                return End::Broken(ExecServerError::protocol(
                    format!("cannot parse a message from {}", self.shared.endpoint),
                    detail,
                ));
            }
        }
    }

    async fn handle(&mut self, message: &Bytes, link: &Arc<Link>) -> Result<(), String> {
        match Incoming::parse(message, &DecodeLimits::default()).map_err(|e| e.to_string())? {
            Incoming::Response { id, result } => {
                if !link.answer(&id, Ok(result)) {
                    tracing::debug!(%id, "response to an unknown request");
                }
            }
            Incoming::Error { id: RequestId::UNKNOWN, error } => {
                tracing::warn!(%error, "the server could not parse a message of this client");
            }
            Incoming::Error { id, error } => {
                if !link.answer(&id, Err(error)) {
                    tracing::debug!(%id, "error response to an unknown request");
                }
            }
            Incoming::Notification { method, params } => {
                let params = params.map_or("{}", |params| params.get());
                self.notified(&method, params, message, link).await.map_err(|e| e.to_string())?;
            }
            Incoming::Request { id, method, .. } => {
                let answer = encode::error(&id, &RpcError::method_not_found(&method));
                // In a task: the way out may be full, and reading must go on.
                let outbound = link.outbound().clone();
                tokio::spawn(async move { outbound.send(answer).await });
            }
        }
        Ok(())
    }

    async fn notified(
        &mut self,
        method: &str,
        params: &str,
        message: &Bytes,
        link: &Arc<Link>,
    ) -> Result<(), serde_json::Error> {
        match method {
            notification::ProcessOutput::NAME => {
                let output: OutputNotice = serde_json::from_str(params)?;
                let Some(tracked) = self.shared.tracked(&output.process_id) else { return Ok(()) };
                let bytes = output.chunk.0;
                self.hold(|cx| tracked.poll_room(cx, bytes.len()), link).await;
                tracked.feed(|track| track.output(output.seq, output.stream, bytes));
            }
            notification::ProcessExited::NAME => {
                let exited: ExitedNotice = serde_json::from_str(params)?;
                if let Some(tracked) = self.shared.tracked(&exited.process_id) {
                    let status = ExitStatus {
                        code: exited.exit_code.unwrap_or(-1),
                        sandbox_denied: exited.sandbox_denied.unwrap_or(false),
                    };
                    tracked.feed(|track| track.exited(exited.seq, status));
                }
            }
            notification::ProcessClosed::NAME => {
                let closed: ClosedNotice = serde_json::from_str(params)?;
                if let Some(tracked) = self.shared.tracked(&closed.process_id) {
                    tracked.feed(|track| track.closed(closed.seq));
                }
            }
            other => self.shared.subscriptions.publish(other, message),
        }
        Ok(())
    }

    /// Waits for room. Meanwhile pings show the server that this side lives, often enough for one that
    /// is asked for the session by somebody else.
    async fn hold(
        &mut self,
        mut poll_room: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<()>,
        link: &Arc<Link>,
    ) {
        let keep_alive = self.shared.tuning.connection.keep_alive;
        let every = keep_alive.map(|keep_alive| keep_alive.idle.min(HOLDING_BEAT));
        loop {
            let beat = async {
                match every {
                    Some(every) => sleep(every).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = poll_fn(&mut poll_room) => return,
                _ = self.closing.wait_for(|closing| *closing) => return,
                () = link.outbound().closed() => return,
                () = beat => link.outbound().ping(),
            }
        }
    }

    /// Makes the connection again and resumes the session on it.
    async fn reconnect(
        &mut self,
        reason: String,
        epoch: u64,
    ) -> Result<(Connection, Arc<Link>), ExecServerError> {
        let reason = match self.dialer.obituary().await {
            Some(words) => format!("{reason}; {words}"),
            None => reason,
        };
        let session = self.shared.session.lock().clone();
        let lost = |why: String| -> ExecServerError {
            Lost::Session { session: session.clone(), reason: why }.into()
        };
        if !self.policy.enabled {
            return Err(ExecServerError::Closed {
                reason: format!("{reason}, and this client does not reconnect"),
            });
        }
        if !self.dialer.can_resume() {
            return Err(lost(format!(
                "{reason}, and a session over {} ends with its connection",
                self.shared.endpoint
            )));
        }
        let Some(id) = &session else {
            return Err(lost(format!(
                "{reason}, and this server does not support resuming sessions"
            )));
        };
        self.shared.link.send_replace(LinkState::Down);
        self.initialize.resume_session_id = Some(id.clone());

        let began = Instant::now();
        let mut why = reason;
        for attempt in 0.. {
            self.shared.status.send_replace(ConnectionStatus::Reconnecting {
                attempt: attempt + 1,
                reason: why.clone(),
            });
            let wait = self.policy.delay(attempt);
            if began.elapsed() + wait > self.policy.give_up_after {
                break;
            }
            sleep(wait).await;
            let left = self.policy.give_up_after.saturating_sub(began.elapsed());
            match timeout(left, self.attempt(epoch + 1)).await {
                Ok(Ok(made)) => return Ok(made),
                Ok(Err(Attempt::Again(error))) => why = error,
                Ok(Err(Attempt::Hopeless(error))) => return Err(lost(error)),
                Err(_) => break,
            }
            tracing::debug!(attempt, reason = %why, "reconnect attempt failed");
        }
        Err(lost(format!(
            "no connection within {} s after the last one was lost ({why})",
            self.policy.give_up_after.as_secs_f32()
        )))
    }

    async fn attempt(&mut self, epoch: u64) -> Result<(Connection, Arc<Link>), Attempt> {
        let dialled = timeout(self.policy.attempt_timeout, self.dialer.dial()).await;
        let mut connection = match dialled {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) if error.is_permanent() => {
                return Err(Attempt::Hopeless(error.to_string()));
            }
            Ok(Err(error)) => return Err(Attempt::Again(error.to_string())),
            Err(_) => return Err(Attempt::Again("connecting timed out".to_owned())),
        };
        let limit = self.initialize_timeout.min(self.policy.attempt_timeout);
        let response = match handshake(&mut connection, &self.initialize, limit).await {
            Ok(response) => response,
            // The server has not noticed yet that the old connection is dead.
            Err(HandshakeError::Server(error))
                if error.kind == Some(ErrorKind::SessionAttached) =>
            {
                return Err(Attempt::Again(error.message));
            }
            Err(HandshakeError::Server(error)) => {
                return Err(Attempt::Hopeless(format!(
                    "the server refused to resume it ({})",
                    error.message
                )));
            }
            Err(HandshakeError::Ended(why)) => {
                return Err(Attempt::Again(format!("the new connection ended: {why}")));
            }
            Err(HandshakeError::Timeout(_)) => {
                return Err(Attempt::Again("no response to initialize".to_owned()));
            }
            Err(HandshakeError::Protocol(why)) => {
                return Err(Attempt::Hopeless(format!("the peer is not an exec-server ({why})")));
            }
        };
        if response.session_id != self.initialize.resume_session_id {
            return Err(Attempt::Hopeless(
                "the server started a new session instead of resuming it".to_owned(),
            ));
        }
        if let Some(info) = response.environment_info {
            *self.shared.info.lock() = Arc::new(info);
        }
        let link = Link::new(epoch, connection.outbound().clone());
        // Before anyone can use the link, so that no event of the new connection is taken for the
        // next one while older ones are missing.
        for tracked in self.shared.all_tracked() {
            tracked.feed(crate::process::Track::reconnected);
        }
        self.shared.link.send_replace(LinkState::Up(link.clone()));
        self.shared.status.send_replace(ConnectionStatus::Connected);
        Ok((connection, link))
    }
}

/// What came of an attempt to reconnect.
enum Attempt {
    /// It may work later.
    Again(String),
    /// It will not.
    Hopeless(String),
}

/// `process/output` of any revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OutputNotice {
    process_id: ProcessId,
    #[serde(default)]
    seq: Option<u64>,
    stream: OutputStream,
    chunk: Base64Bytes,
}

/// `process/exited` of any revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExitedNotice {
    process_id: ProcessId,
    #[serde(default)]
    seq: Option<u64>,
    #[serde(default)]
    exit_code: Option<i32>,
    #[serde(default)]
    sandbox_denied: Option<bool>,
}

/// `process/closed` of any revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClosedNotice {
    process_id: ProcessId,
    #[serde(default)]
    seq: Option<u64>,
}
