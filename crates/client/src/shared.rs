//! The state that a client's handles and its driver share: the current channel, the processes, the
//! subscriptions.
//!
//! Invariant: the channel state goes up → down → up … and finally to dead, and never leaves dead. Every
//! later call fails with the same error.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use codex_exec_server_protocol::environment::EnvironmentInfo;
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::{Call, Effect};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::channel::{Channel, ChannelError};
use crate::error::{ExecServerError, Lost};
use crate::options::ClientTuning;
use crate::policy::Answers;
use crate::process::SharedSequencer;
use crate::subscriptions::Subscriptions;

/// The state of a client's connection, see
/// [`ExecServerClient::status`](crate::ExecServerClient::status).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConnectionStatus {
    /// The connection is up.
    Connected,
    /// The connection is up, but the server has sent nothing since this time, although it was asked
    /// ([`ClientTuning::heartbeat`](crate::ClientTuning::heartbeat)).
    Unresponsive {
        /// The time of the last message.
        since: std::time::Instant,
    },
    /// The connection is lost and the client is reconnecting.
    Reconnecting {
        /// The current or next attempt, from 1.
        attempt: u32,
        /// Why the last attempt failed, or why the connection was lost.
        reason: String,
    },
    /// The connection ended for good.
    Closed(ExecServerError),
}

#[derive(Clone)]
pub(crate) enum ChannelState {
    Up(Arc<Channel>),
    Down,
    Dead(ExecServerError),
}

pub(crate) struct Shared {
    pub(crate) tuning: ClientTuning,
    pub(crate) endpoint: String,
    pub(crate) channel: watch::Sender<ChannelState>,
    pub(crate) status: watch::Sender<ConnectionStatus>,
    pub(crate) subscriptions: Subscriptions,
    /// Responses to the server's requests.
    pub(crate) answers: Answers,
    pub(crate) session: Mutex<Option<String>>,
    pub(crate) info: Mutex<Arc<EnvironmentInfo>>,
    processes: Mutex<HashMap<ProcessId, Arc<SharedSequencer>>>,
    names: Mutex<ProcessNames>,
    /// Counts ids; with the random prefix they are unique among clients.
    ids: AtomicU64,
    prefix: String,
}

/// The process ids that may exist in this client's session.
#[derive(Default)]
struct ProcessNames {
    /// The ids that this client has started, up to [`MAX_NAMES`].
    used: HashSet<ProcessId>,
    /// Any other id may exist, too.
    any: bool,
}

/// The most ids to remember.
const MAX_NAMES: usize = 4096;

impl Shared {
    pub(crate) fn new(tuning: ClientTuning, endpoint: String, channel: Arc<Channel>) -> Self {
        Self {
            tuning,
            endpoint,
            channel: watch::Sender::new(ChannelState::Up(channel)),
            status: watch::Sender::new(ConnectionStatus::Connected),
            subscriptions: Subscriptions::default(),
            answers: Answers::default(),
            session: Mutex::new(None),
            info: Mutex::default(),
            processes: Mutex::default(),
            names: Mutex::default(),
            ids: AtomicU64::new(0),
            prefix: format!("{:012x}", fastrand::u64(..1 << 48)),
        }
    }

    /// A new id, unique among clients, of at most 32 bytes.
    pub(crate) fn fresh_id(&self, kind: &str) -> String {
        format!("{kind}{}-{}", self.prefix, self.ids.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Notes that the session may have processes from before this client.
    pub(crate) fn mark_resumed(&self) {
        self.names.lock().any = true;
    }

    /// Notes that this client starts a process with this id. True if the session cannot have one yet: the
    /// client generated the id, or only this client started processes in the session and none has it.
    pub(crate) fn claim(&self, id: &ProcessId) -> bool {
        if id.0.strip_prefix('p').is_some_and(|id| id.starts_with(&self.prefix)) {
            return true;
        }
        let mut names = self.names.lock();
        if names.used.len() >= MAX_NAMES {
            names.any = true;
        }
        !names.any && names.used.insert(id.clone())
    }

    pub(crate) fn info(&self) -> Arc<EnvironmentInfo> {
        self.info.lock().clone()
    }

    /// The current channel; waits for one.
    pub(crate) async fn channel(&self) -> Result<Arc<Channel>, ExecServerError> {
        let mut states = self.channel.subscribe();
        loop {
            match &*states.borrow_and_update() {
                ChannelState::Up(channel) => return Ok(channel.clone()),
                ChannelState::Dead(error) => return Err(error.clone()),
                ChannelState::Down => {}
            }
            if states.changed().await.is_err() {
                return Err(ExecServerError::Closed {
                    reason: "the client was dropped".to_owned(),
                });
            }
        }
    }

    /// The channel after that of `epoch`; waits for it.
    pub(crate) async fn channel_after(&self, epoch: u64) -> Result<Arc<Channel>, ExecServerError> {
        let mut states = self.channel.subscribe();
        loop {
            match &*states.borrow_and_update() {
                ChannelState::Up(channel) if channel.epoch > epoch => return Ok(channel.clone()),
                ChannelState::Dead(error) => return Err(error.clone()),
                _ => {}
            }
            if states.changed().await.is_err() {
                return Err(ExecServerError::Closed {
                    reason: "the client was dropped".to_owned(),
                });
            }
        }
    }

    /// Resolves when the channel of `epoch` has ended.
    pub(crate) async fn channel_lost(&self, epoch: u64) {
        let mut states = self.channel.subscribe();
        let lost =
            |state: &ChannelState| !matches!(state, ChannelState::Up(up) if up.epoch == epoch);
        // An error means that the client was dropped, and its channel with it.
        let _ = states.wait_for(lost).await;
    }

    /// Makes a request; repeats it after a reconnect if its effect allows that.
    pub(crate) async fn call<C: Call>(
        &self,
        params: &C::Params,
        effect: Effect,
        timeout: Option<Duration>,
    ) -> Result<C::Response, ExecServerError> {
        let mut channel = self.channel().await?;
        loop {
            match self.attempt::<C>(&channel, params, effect, timeout).await? {
                Ok(response) => return Ok(response),
                Err(ChannelError::NotSent) => {}
                Err(ChannelError::Interrupted) if effect != Effect::Once => {}
                Err(error) => return Err(call_error(C::METHOD.name(), error)),
            }
            channel = self.channel_after(channel.epoch).await?;
        }
    }

    /// Makes a request on this channel only, for state that is bound to it. Fails with
    /// [`Lost::Response`] if the channel has ended, before or after the request was sent.
    pub(crate) async fn call_on<C: Call>(
        &self,
        channel: &Arc<Channel>,
        params: &C::Params,
        effect: Effect,
        timeout: Option<Duration>,
    ) -> Result<C::Response, ExecServerError> {
        let result = self.attempt::<C>(channel, params, effect, timeout).await?;
        if let Err(ChannelError::NotSent | ChannelError::Interrupted) = result {
            // So that the caller's next attempt uses another channel.
            self.channel_lost(channel.epoch).await;
        }
        result.map_err(|error| call_error(C::METHOD.name(), error))
    }

    /// Makes a request once. The outer error is the timeout.
    async fn attempt<C: Call>(
        &self,
        channel: &Arc<Channel>,
        params: &C::Params,
        effect: Effect,
        timeout: Option<Duration>,
    ) -> Result<Result<C::Response, ChannelError>, ExecServerError> {
        let attempt = async {
            match channel.send::<C>(params).await {
                Ok(response) => response.await,
                Err(error) => Err(error),
            }
        };
        let Some(after) = timeout else { return Ok(attempt.await) };
        tokio::time::timeout(after, attempt).await.map_err(|_| ExecServerError::Timeout {
            method: C::METHOD.name(),
            after,
            changes: effect != Effect::Reads,
        })
    }

    pub(crate) fn track(&self, id: &ProcessId, tracked: &Arc<SharedSequencer>) -> bool {
        let mut processes = self.processes.lock();
        if processes.get(id).is_some_and(|other| !other.is_abandoned()) {
            return false;
        }
        let before = processes.insert(id.clone(), tracked.clone());
        drop(processes);
        if let Some(before) = before {
            // Ends its follower.
            before.feed(|sequencer| sequencer.fail(Lost::Process { process: id.clone() }.into()));
        }
        true
    }

    pub(crate) fn untrack(&self, id: &ProcessId) {
        self.processes.lock().remove(id);
    }

    /// Removes this process, unless another already has its id.
    pub(crate) fn untrack_if(&self, id: &ProcessId, tracked: &Arc<SharedSequencer>) {
        let mut processes = self.processes.lock();
        if processes.get(id).is_some_and(|other| Arc::ptr_eq(other, tracked)) {
            processes.remove(id);
        }
    }

    pub(crate) fn tracked(&self, id: &ProcessId) -> Option<Arc<SharedSequencer>> {
        self.processes.lock().get(id).cloned()
    }

    pub(crate) fn all_tracked(&self) -> Vec<Arc<SharedSequencer>> {
        self.processes.lock().values().cloned().collect()
    }

    /// Closes the client for good: every call and every process fails with `error`.
    pub(crate) fn close(&self, error: &ExecServerError) {
        let closed_now = self.channel.send_if_modified(|state| {
            if matches!(state, ChannelState::Dead(_)) {
                return false;
            }
            if let ChannelState::Up(channel) = state {
                channel.fail();
            }
            *state = ChannelState::Dead(error.clone());
            true
        });
        if closed_now {
            self.status.send_replace(ConnectionStatus::Closed(error.clone()));
            for tracked in self.all_tracked() {
                tracked.feed(|sequencer| sequencer.fail(error.clone()));
            }
            self.subscriptions.end();
        }
    }
}

pub(crate) fn call_error(method: &'static str, error: ChannelError) -> ExecServerError {
    match error {
        ChannelError::Server(error) => ExecServerError::server(method, error),
        ChannelError::Protocol(detail) => {
            ExecServerError::protocol(format!("cannot parse the response to {method}"), detail)
        }
        ChannelError::NotSent | ChannelError::Interrupted => Lost::Response { method }.into(),
    }
}
