//! The task that owns the connection: it reads and dispatches messages, and reconnects.
//!
//! Invariant: nothing here waits for a consumer, except for that of a process that holds the connection
//! ([`OnSlowConsumer::HoldConnection`](crate::OnSlowConsumer)) or whose unread output exceeds the limit
//! on disk.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::Connection;
use codex_exec_server_protocol::environment::EnvironmentStatusParams;
use codex_exec_server_protocol::process::{OutputStream, ProcessId};
use codex_exec_server_protocol::resources::{EndedBy, Usage};
use codex_exec_server_protocol::session::InitializeParams;
use codex_exec_server_protocol::{
    Base64Bytes, DecodeLimits, ErrorKind, Incoming, Notification, RequestId, call, notification,
};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::backoff::ReconnectPolicy;
use crate::channel::Channel;
use crate::dialer::Dialer;
use crate::error::{ExecServerError, Lost};
use crate::handshake::{HandshakeError, handshake};
use crate::heartbeat::{Due, Silence};
use crate::process::ExitStatus;
use crate::shared::{ChannelState, ConnectionStatus, Shared};

/// How often a client that does not read its connection pings, so that the server sees it alive.
const HOLD_PING_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Driver {
    pub(crate) shared: Arc<Shared>,
    pub(crate) dialer: Arc<dyn Dialer>,
    pub(crate) policy: ReconnectPolicy,
    /// Sent again on each reconnect, with the session's id.
    pub(crate) initialize: InitializeParams,
    pub(crate) initialize_timeout: Duration,
    /// True once the client is closed or dropped.
    pub(crate) closing: watch::Receiver<bool>,
}

/// Why the driver stopped reading a connection.
enum ConnectionEnd {
    /// The client is closing.
    Closing,
    /// The connection dropped.
    Dropped(String),
    /// Another client took the session.
    Taken,
    /// The peer broke the protocol.
    Broken(ExecServerError),
}

impl Driver {
    pub(crate) async fn run(mut self, mut connection: Connection, mut channel: Arc<Channel>) {
        loop {
            let end = self.serve(&mut connection, &channel).await;
            channel.fail();
            let reason = match end {
                ConnectionEnd::Closing => {
                    let reason = "closed by this client".to_owned();
                    self.shared.close(&ExecServerError::Closed { reason });
                    drop((connection, channel));
                    self.dialer.closed().await;
                    return;
                }
                ConnectionEnd::Broken(error) => {
                    self.shared.close(&error);
                    return;
                }
                ConnectionEnd::Taken => {
                    self.shared.close(&Lost::Taken.into());
                    return;
                }
                ConnectionEnd::Dropped(reason) => reason,
            };
            drop(connection);
            let mut closing = self.closing.clone();
            let reconnected = tokio::select! {
                reconnected = self.reconnect(reason, channel.epoch) => reconnected,
                _ = closing.wait_for(|closing| *closing) => {
                    Err(ExecServerError::Closed { reason: "closed by this client".to_owned() })
                }
            };
            match reconnected {
                Ok(new) => (connection, channel) = new,
                Err(error) => {
                    self.shared.close(&error);
                    return;
                }
            }
        }
    }

    async fn serve(
        &mut self,
        connection: &mut Connection,
        channel: &Arc<Channel>,
    ) -> ConnectionEnd {
        let heartbeat = self.shared.tuning.heartbeat;
        let mut silence = heartbeat.map(|config| Silence::new(config, Instant::now()));
        loop {
            let deadline = silence.as_ref().map(Silence::deadline);
            let silent = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let message = tokio::select! {
                biased;
                message = connection.next() => Some(message),
                _ = self.closing.wait_for(|closing| *closing) => return ConnectionEnd::Closing,
                () = silent => None,
            };
            let Some(message) = message else {
                let due = silence.as_mut().map(|silence| silence.due(Instant::now()));
                match self.on_silence(due.unwrap_or(Due::Nothing), channel) {
                    Some(end) => return end,
                    None => continue,
                }
            };
            if silence.as_mut().is_some_and(|silence| silence.heard(Instant::now())) {
                self.shared.status.send_replace(ConnectionStatus::Connected);
            }
            let message = match message {
                Some(Ok(message)) => message,
                Some(Err(error)) if error.is_fatal() => {
                    return ConnectionEnd::Dropped(error.to_string());
                }
                Some(Err(error)) => {
                    channel.response_lost(&error.to_string());
                    continue;
                }
                None => {
                    return ConnectionEnd::Dropped("the server closed the connection".to_owned());
                }
            };
            if is_taken(&message) {
                return ConnectionEnd::Taken;
            }
            if let Err(detail) = self.handle(&message, channel).await {
                return ConnectionEnd::Broken(ExecServerError::protocol(
                    format!("cannot parse a message from {}", self.shared.endpoint),
                    detail,
                ));
            }
            // The time that a consumer needed is not the server's.
            if let Some(silence) = &mut silence {
                silence.heard(Instant::now());
            }
        }
    }

    /// Does what is due after some silence.
    fn on_silence(&self, due: Due, channel: &Arc<Channel>) -> Option<ConnectionEnd> {
        match due {
            Due::Nothing => None,
            Due::Probe => {
                let channel = channel.clone();
                // In a task: the queue to a silent server may be full.
                tokio::spawn(async move {
                    let asked =
                        channel.send::<call::EnvironmentStatus>(&EnvironmentStatusParams {});
                    if let Ok(response) = asked.await {
                        // An error is an answer, too.
                        let _ = response.await;
                    }
                });
                None
            }
            Due::Report(since) => {
                let since = since.into_std();
                self.shared.status.send_replace(ConnectionStatus::Unresponsive { since });
                None
            }
            Due::GiveUp => Some(ConnectionEnd::Dropped("the server does not answer".to_owned())),
        }
    }

    async fn handle(&mut self, message: &Bytes, channel: &Arc<Channel>) -> Result<(), String> {
        match Incoming::parse(message, &DecodeLimits::default()).map_err(|e| e.to_string())? {
            Incoming::Response { id, result } => {
                if !channel.respond(&id, Ok(result)) {
                    tracing::debug!(%id, "response to an unknown request");
                }
            }
            Incoming::Error { id: RequestId::UNKNOWN, error } => {
                tracing::warn!(%error, "the server could not parse a message of this client");
            }
            Incoming::Error { id, error } => {
                if !channel.respond(&id, Err(error)) {
                    tracing::debug!(%id, "error response to an unknown request");
                }
            }
            Incoming::Notification { method, params } => {
                let params = params.map_or("{}", |params| params.get());
                self.handle_notification(&method, params, message, channel)
                    .await
                    .map_err(|e| e.to_string())?;
            }
            Incoming::Request { id, method, params, .. } => {
                self.shared.answers.answer(id, &method, params, channel.outbound());
            }
        }
        Ok(())
    }

    async fn handle_notification(
        &mut self,
        method: &str,
        params: &str,
        message: &Bytes,
        channel: &Arc<Channel>,
    ) -> Result<(), serde_json::Error> {
        match method {
            notification::ProcessOutput::NAME => {
                let output: OutputNotification = serde_json::from_str(params)?;
                let Some(tracked) = self.shared.tracked(&output.process_id) else { return Ok(()) };
                let bytes = output.chunk.0;
                self.wait_for_room(|cx| tracked.poll_room(cx, bytes.len()), channel).await;
                tracked.feed(|sequencer| sequencer.output(output.seq, output.stream, bytes));
            }
            notification::ProcessExited::NAME => {
                let exited: ExitedNotification = serde_json::from_str(params)?;
                if let Some(tracked) = self.shared.tracked(&exited.process_id) {
                    let status = ExitStatus {
                        code: exited.exit_code.unwrap_or(-1),
                        sandbox_denied: exited.sandbox_denied.unwrap_or(false),
                        ended_by: exited.ended_by,
                        usage: exited.usage,
                    };
                    tracked.feed(|sequencer| sequencer.exited(exited.seq, status));
                }
            }
            notification::ProcessClosed::NAME => {
                let closed: ClosedNotification = serde_json::from_str(params)?;
                if let Some(tracked) = self.shared.tracked(&closed.process_id) {
                    tracked.feed(|sequencer| sequencer.closed(closed.seq));
                }
            }
            other => self.shared.subscriptions.publish(other, message),
        }
        Ok(())
    }

    /// Waits for room. Meanwhile sends pings, often enough that the server does not give the session to
    /// another connection.
    async fn wait_for_room(
        &mut self,
        mut poll_room: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<()>,
        channel: &Arc<Channel>,
    ) {
        let keep_alive = self.shared.tuning.connection.keep_alive;
        let interval = keep_alive.map(|keep_alive| keep_alive.idle.min(HOLD_PING_INTERVAL));
        loop {
            let ping = async {
                match interval {
                    Some(interval) => sleep(interval).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = poll_fn(&mut poll_room) => return,
                _ = self.closing.wait_for(|closing| *closing) => return,
                () = channel.outbound().closed() => return,
                () = ping => channel.outbound().ping(),
            }
        }
    }

    /// Dials again and resumes the session.
    async fn reconnect(
        &mut self,
        reason: String,
        epoch: u64,
    ) -> Result<(Connection, Arc<Channel>), ExecServerError> {
        let reason = match self.dialer.failure_detail().await {
            Some(detail) => format!("{reason}; {detail}"),
            None => reason,
        };
        let session = self.shared.session.lock().clone();
        let lost = |reason: String| -> ExecServerError {
            Lost::Session { session: session.clone(), reason }.into()
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
        self.shared.channel.send_replace(ChannelState::Down);
        self.initialize.resume_session_id = Some(id.clone());
        if let Some(attach) = &mut self.initialize.attach {
            // Clients that joined since then stay.
            attach.take = false;
        }

        let began = Instant::now();
        let mut reason = reason;
        for attempt in 0.. {
            self.shared.status.send_replace(ConnectionStatus::Reconnecting {
                attempt: attempt + 1,
                reason: reason.clone(),
            });
            let wait = self.policy.delay(attempt);
            if began.elapsed() + wait > self.policy.give_up_after {
                break;
            }
            sleep(wait).await;
            let remaining = self.policy.give_up_after.saturating_sub(began.elapsed());
            match timeout(remaining, self.attempt(epoch + 1)).await {
                Ok(Ok(made)) => return Ok(made),
                Ok(Err(AttemptError::Transient(error))) => reason = error,
                Ok(Err(AttemptError::Permanent(error))) => return Err(lost(error)),
                Err(_) => break,
            }
            tracing::debug!(attempt, %reason, "reconnect attempt failed");
        }
        Err(lost(format!(
            "no connection within {} s after the last one was lost ({reason})",
            self.policy.give_up_after.as_secs_f32()
        )))
    }

    async fn attempt(&mut self, epoch: u64) -> Result<(Connection, Arc<Channel>), AttemptError> {
        let dialled = timeout(self.policy.attempt_timeout, self.dialer.dial()).await;
        let mut connection = match dialled {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) if error.is_permanent() => {
                return Err(AttemptError::Permanent(error.to_string()));
            }
            Ok(Err(error)) => return Err(AttemptError::Transient(error.to_string())),
            Err(_) => return Err(AttemptError::Transient("connecting timed out".to_owned())),
        };
        let limit = self.initialize_timeout.min(self.policy.attempt_timeout);
        let response = match handshake(&mut connection, &self.initialize, limit).await {
            Ok(response) => response,
            // The server has not yet detected that the old connection is dead.
            Err(HandshakeError::Server(error))
                if error.kind == Some(ErrorKind::SessionAttached) =>
            {
                return Err(AttemptError::Transient(error.message));
            }
            Err(HandshakeError::Server(error)) => {
                return Err(AttemptError::Permanent(format!(
                    "the server refused to resume it ({})",
                    error.message
                )));
            }
            Err(HandshakeError::Ended(reason)) => {
                return Err(AttemptError::Transient(format!("the new connection ended: {reason}")));
            }
            Err(HandshakeError::Timeout(_)) => {
                return Err(AttemptError::Transient("no response to initialize".to_owned()));
            }
            Err(HandshakeError::Protocol(reason)) => {
                return Err(AttemptError::Permanent(format!(
                    "the peer is not an exec-server ({reason})"
                )));
            }
        };
        if response.session_id != self.initialize.resume_session_id {
            return Err(AttemptError::Permanent(
                "the server started a new session instead of resuming it".to_owned(),
            ));
        }
        if let Some(info) = response.environment_info {
            *self.shared.info.lock() = Arc::new(info);
        }
        let channel = Channel::new(epoch, connection.outbound().clone());
        // Before the channel is used, so that no event of the new connection counts as the next one
        // while older ones are missing.
        for tracked in self.shared.all_tracked() {
            tracked.feed(crate::process::EventSequencer::reconnected);
        }
        self.shared.channel.send_replace(ChannelState::Up(channel.clone()));
        self.shared.status.send_replace(ConnectionStatus::Connected);
        Ok((connection, channel))
    }
}

/// Whether the message says that another client took the session.
fn is_taken(message: &Bytes) -> bool {
    // Short, so that large messages are not parsed twice.
    message.len() < 256
        && matches!(
            Incoming::parse(message, &DecodeLimits::default()),
            Ok(Incoming::Notification { method, .. })
                if method == notification::SessionDetached::NAME
        )
}

/// Why an attempt to reconnect failed.
enum AttemptError {
    /// A later attempt may succeed.
    Transient(String),
    /// No later attempt can succeed.
    Permanent(String),
}

/// `process/output` of any revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OutputNotification {
    process_id: ProcessId,
    #[serde(default)]
    seq: Option<u64>,
    stream: OutputStream,
    chunk: Base64Bytes,
}

/// `process/exited` of any revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExitedNotification {
    process_id: ProcessId,
    #[serde(default)]
    seq: Option<u64>,
    #[serde(default)]
    exit_code: Option<i32>,
    #[serde(default)]
    sandbox_denied: Option<bool>,
    #[serde(default)]
    ended_by: Option<EndedBy>,
    #[serde(default)]
    usage: Option<Usage>,
}

/// `process/closed` of any revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClosedNotification {
    process_id: ProcessId,
    #[serde(default)]
    seq: Option<u64>,
}
