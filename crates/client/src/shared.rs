//! What a client's handles, its driver and its helpers share: the link of the moment, the tracked
//! processes, the subscriptions.
//!
//! Invariant: the link state goes up → down → up … and at last to dead, and never leaves dead.
//! Every call that starts after that fails with the same error.

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
use crate::process::SharedSequencer;
use crate::subscriptions::Subscriptions;

/// How a client's connection is, see
/// [`ExecServerClient::status`](crate::ExecServerClient::status).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConnectionStatus {
    /// Up.
    Connected,
    /// Lost, and being made again.
    Reconnecting {
        /// The attempt under way or waited for, from 1.
        attempt: u32,
        /// Why the last attempt failed, or why the connection was lost.
        reason: String,
    },
    /// Ended for good.
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
    pub(crate) session: Mutex<Option<String>>,
    pub(crate) info: Mutex<Arc<EnvironmentInfo>>,
    processes: Mutex<HashMap<ProcessId, Arc<SharedSequencer>>>,
    names: Mutex<ProcessNames>,
    /// Makes ids that are unique in this process and, with its random prefix, among clients.
    ids: AtomicU64,
    prefix: String,
}

/// ProcessNames of processes that this client's session may have.
#[derive(Default)]
struct ProcessNames {
    /// Those that were asked for, as long as they are not too many.
    used: HashSet<ProcessId>,
    /// The session may have any other name, too.
    any: bool,
}

/// More names than this are not remembered.
const MAX_NAMES: usize = 4096;

impl Shared {
    pub(crate) fn new(tuning: ClientTuning, endpoint: String, channel: Arc<Channel>) -> Self {
        Self {
            tuning,
            endpoint,
            channel: watch::Sender::new(ChannelState::Up(channel)),
            status: watch::Sender::new(ConnectionStatus::Connected),
            subscriptions: Subscriptions::default(),
            session: Mutex::new(None),
            info: Mutex::default(),
            processes: Mutex::default(),
            names: Mutex::default(),
            ids: AtomicU64::new(0),
            prefix: format!("{:012x}", fastrand::u64(..1 << 48)),
        }
    }

    /// An id that nobody else uses, at most 32 bytes.
    pub(crate) fn fresh_id(&self, kind: &str) -> String {
        format!("{kind}{}-{}", self.prefix, self.ids.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The session had processes before this client came.
    pub(crate) fn mark_resumed(&self) {
        self.names.lock().any = true;
    }

    /// Notes that a process of this name is asked for. True if the session cannot have one yet: the
    /// name is made here, or nobody but this client started processes in it, and none of this name.
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

    /// The link, as soon as there is one.
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

    /// The link after the one of that epoch, as soon as there is one.
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

    /// Resolves when the link of that epoch has ended.
    pub(crate) async fn channel_lost(&self, epoch: u64) {
        let mut states = self.channel.subscribe();
        let lost =
            |state: &ChannelState| !matches!(state, ChannelState::Up(up) if up.epoch == epoch);
        // An error means that the client is gone, and with it the link.
        let _ = states.wait_for(lost).await;
    }

    /// Makes a request, again after a reconnect if that does no harm.
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

    /// Makes a request on this very connection, for what belongs to it: [`Lost::Response`] if it has
    /// ended, whether before the request was sent or after.
    pub(crate) async fn call_on<C: Call>(
        &self,
        channel: &Arc<Channel>,
        params: &C::Params,
        effect: Effect,
        timeout: Option<Duration>,
    ) -> Result<C::Response, ExecServerError> {
        let answer = self.attempt::<C>(channel, params, effect, timeout).await?;
        if let Err(ChannelError::NotSent | ChannelError::Interrupted) = answer {
            // Whoever tries again finds another connection.
            self.channel_lost(channel.epoch).await;
        }
        answer.map_err(|error| call_error(C::METHOD.name(), error))
    }

    /// Makes a request once. The outer error is that there was no answer in time.
    async fn attempt<C: Call>(
        &self,
        channel: &Arc<Channel>,
        params: &C::Params,
        effect: Effect,
        timeout: Option<Duration>,
    ) -> Result<Result<C::Response, ChannelError>, ExecServerError> {
        let attempt = async {
            match channel.send::<C>(params).await {
                Ok(answer) => answer.await,
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
            // Its follower has nothing to do any more.
            before.feed(|sequencer| sequencer.fail(Lost::Process { process: id.clone() }.into()));
        }
        true
    }

    pub(crate) fn untrack(&self, id: &ProcessId) {
        self.processes.lock().remove(id);
    }

    /// Forgets this very process; another may have its name by now.
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

    /// The end: every call and every process learns of it.
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
