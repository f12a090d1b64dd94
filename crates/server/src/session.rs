//! Sessions: the processes of a client, with and without a connection.
//!
//! ```text
//!              create                detach                TTL expires
//!  (none) ───────────────▶ Attached ────────▶ Detached ───────────────────▶ ended: all killed
//!                           │ ▲                  │
//!                           │ └──────────────────┘ resume
//!                           └─▶ attached to another connection: resume while the old connection does
//!                               not answer a ping
//! ```
//!
//! "Attached" is about the holder, the one connection that processes wait for. Beside it a session has any number
//! of guests. The TTL runs while there is neither.
//!
//! Invariant: a session has at most one holder, and its processes end with it. Only the principal that
//! opened it can resume or join it; to others it does not exist. Its id is a secret: logs have a number instead.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use codex_exec_host::files::{FilesConfig, PersistentHandles};
use codex_exec_host::process::{ClientId, Group, ProcessHandle, ProcessHost, Reader};
use codex_exec_rpc::{Outbound, Peer};
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::session::{AttachParams, Role};
use codex_exec_server_protocol::{ErrorKind, RpcError};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::Principal;
use crate::client_calls::ClientCalls;
use crate::limits::{Ledger, Quota, Whose};
use crate::managed_network::RulesHandle;
use crate::metrics::Metrics;
use crate::shell_snapshots::ShellSnapshots;
use crate::sink::NotificationSink;

/// How often shutdown polls whether a process has exited after SIGTERM.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How often it polls whether a process that has exited is closed, too: for 2 s.
const POLLS_AFTER_EXIT: u32 = 200;

/// All sessions of a server.
#[derive(Debug, Clone)]
pub(crate) struct Sessions {
    host: ProcessHost,
    /// What the processes of one session may use.
    quota: Quota,
    metrics: Option<Arc<Metrics>>,
    by_id: Arc<Mutex<HashMap<String, Arc<Session>>>>,
    last_group: Arc<AtomicU64>,
    last_client: Arc<AtomicU64>,
    /// The server drains. Set while `by_id` is locked.
    refuses_new: Arc<AtomicBool>,
    /// Sessions whose processes are being killed.
    ending: TaskTracker,
}

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    id: String,
    /// Its name, for people.
    name: Option<String>,
    /// Who opened it.
    owner: Principal,
    group: Group,
    state: Mutex<State>,
    /// The rules of the proxies of its running processes.
    network_rules: Mutex<HashMap<ProcessId, RulesHandle>>,
    /// File handles that outlive a connection; they close with the session.
    persistent_handles: OnceLock<Arc<PersistentHandles>>,
    shell_snapshots: Arc<ShellSnapshots>,
    ledger: Ledger,
    metrics: Option<Arc<Metrics>>,
}

#[derive(Debug)]
struct State {
    processes: HashMap<ProcessId, ProcessHandle>,
    /// The number of processes at which closed ones are removed.
    prune_at: usize,
    presence: Presence,
    /// The connection that is or was last attached.
    holder: Holder,
    /// The connections beside the holder.
    guests: HashMap<ClientId, Holder>,
    /// Counts every connection that comes, so that a TTL knows whether one came while it ran.
    arrivals: u64,
    /// The client that processes ask and report to; gone while the session is detached.
    client: Weak<ClientCalls>,
    detach_ttl: Duration,
    /// Counts connections, so that an old connection neither ends the session of its successor nor
    /// receives its events.
    attachment: Attachment,
}

#[derive(Debug, PartialEq, Eq)]
enum Presence {
    Attached,
    Detached,
    Ended,
}

/// The number of a connection within its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attachment(u64);

/// A connection that is attached to a session or asks for one.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub id: ClientId,
    pub principal: Principal,
    pub peer: Peer,
    /// Closes the connection when another takes its session over.
    pub evicted: CancellationToken,
    /// Whether another client asked for that, so that this one should not come back.
    pub taken: Arc<AtomicBool>,
    /// Whether the client knows roles, and what is sent only to such clients.
    pub knows_roles: bool,
}

impl Holder {
    /// Closes the connection for good.
    fn take(&self) {
        self.taken.store(true, Ordering::Release);
        self.evicted.cancel();
    }
}

/// The part of a connection in its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Holder(ClientId, Attachment),
    Guest(ClientId, Role),
}

impl Part {
    pub(crate) fn client(self) -> ClientId {
        match self {
            Self::Holder(client, _) | Self::Guest(client, _) => client,
        }
    }

    pub(crate) fn role(self) -> Role {
        match self {
            Self::Holder(..) => Role::Holder,
            Self::Guest(_, role) => role,
        }
    }

    /// As which its reads count.
    pub(crate) fn reader(self) -> Reader {
        match self {
            Self::Holder(..) => Reader::Subscriber,
            Self::Guest(client, _) => Reader::Guest(client),
        }
    }
}

/// Why a connection cannot attach now.
enum Refusal {
    Ended,
    Held(Holder, Attachment),
}

/// Why a process was not started.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InsertError {
    /// Another process has the id.
    Taken,
    /// The session has ended.
    Ended,
}

impl Sessions {
    pub(crate) fn new(host: ProcessHost, quota: Quota, metrics: Option<Arc<Metrics>>) -> Self {
        Self {
            host,
            quota,
            metrics,
            by_id: Arc::default(),
            last_group: Arc::default(),
            last_client: Arc::default(),
            refuses_new: Arc::default(),
            ending: TaskTracker::new(),
        }
    }

    /// The id of a new connection.
    pub(crate) fn new_client(&self) -> ClientId {
        ClientId(self.last_client.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates a session, attached to `holder`, unless the server drains.
    pub(crate) fn create(
        &self,
        detach_ttl: Duration,
        name: Option<String>,
        holder: Holder,
    ) -> Result<(Arc<Session>, Attachment), RpcError> {
        let session = Arc::new(Session {
            id: uuid::Uuid::new_v4().to_string(),
            name,
            owner: holder.principal.clone(),
            group: Group(self.last_group.fetch_add(1, Ordering::Relaxed)),
            state: Mutex::new(State {
                processes: HashMap::new(),
                prune_at: 64,
                presence: Presence::Attached,
                holder,
                guests: HashMap::new(),
                arrivals: 0,
                client: Weak::new(),
                detach_ttl,
                attachment: Attachment(0),
            }),
            network_rules: Mutex::default(),
            persistent_handles: OnceLock::new(),
            shell_snapshots: Arc::default(),
            ledger: Ledger::new(Whose::Session, self.quota),
            metrics: self.metrics.clone(),
        });
        let mut by_id = self.by_id.lock();
        if self.refuses_new.load(Ordering::Relaxed) {
            let message = "the server is being drained and opens no new sessions; connect to another one, \
                           or try again later";
            return Err(RpcError::invalid_request(ErrorKind::Draining, message));
        }
        by_id.insert(session.id.clone(), session.clone());
        drop(by_id);
        Ok((session, Attachment(0)))
    }

    /// Creates no more sessions.
    pub(crate) fn refuse_new(&self) {
        let _by_id = self.by_id.lock();
        self.refuses_new.store(true, Ordering::Relaxed);
    }

    /// How many sessions have a connection, or a process that runs or can be read.
    pub(crate) fn in_use(&self) -> usize {
        let all: Vec<_> = self.by_id.lock().values().cloned().collect();
        let in_use =
            |session: &&Arc<Session>| session.connections() > 0 || !session.processes().is_empty();
        all.iter().filter(in_use).count()
    }

    /// How many processes of all sessions run.
    pub(crate) async fn running_processes(&self) -> usize {
        let all: Vec<_> = self.by_id.lock().values().cloned().collect();
        let infos = all.iter().flat_map(|session| session.processes());
        let infos = infos.map(|process| async move { process.info().await });
        let infos = futures_util::future::join_all(infos).await;
        infos.iter().flatten().filter(|info| !info.exited).count()
    }

    /// Attaches to a detached session of the same principal, or takes it over from a silent connection: one
    /// that does not answer a ping within `timeout` loses the session.
    pub(crate) async fn resume(
        &self,
        id: &str,
        detach_ttl: Option<Duration>,
        newcomer: Holder,
        take: bool,
        timeout: Duration,
    ) -> Result<(Arc<Session>, Attachment), RpcError> {
        let session = self.of_principal(id, &newcomer.principal)?;
        if take {
            session.evict_all();
        }
        let mut attached = session.try_attach(None, detach_ttl, &newcomer);
        if let Err(Refusal::Held(holder, attachment)) = &attached
            && !holder.peer.responds_within(timeout).await
        {
            let number = session.group.0;
            tracing::info!(session = number, "took the session over from a silent connection");
            attached = session.try_attach(Some(*attachment), detach_ttl, &newcomer);
        }
        match attached {
            Ok(attachment) => Ok((session, attachment)),
            Err(Refusal::Ended) => Err(unknown_session(id)),
            Err(Refusal::Held(..)) => Err(RpcError::session_attached(format!(
                "session {id} is attached to another connection; close that one first"
            ))),
        }
    }

    /// Joins a session of the same principal beside its holder.
    pub(crate) fn join(
        &self,
        id: &str,
        attach: &AttachParams,
        detach_ttl: Option<Duration>,
        newcomer: Holder,
    ) -> Result<Arc<Session>, RpcError> {
        let session = self.of_principal(id, &newcomer.principal)?;
        if attach.take {
            session.evict_all();
        }
        let mut state = session.state.lock();
        if state.presence == Presence::Ended {
            return Err(unknown_session(id));
        }
        state.arrivals += 1;
        state.guests.insert(newcomer.id, newcomer);
        if let Some(ttl) = detach_ttl.filter(|_| attach.role != Role::View) {
            state.detach_ttl = ttl;
        }
        drop(state);
        Ok(session)
    }

    /// The session with this id, if this principal opened it.
    fn of_principal(&self, id: &str, principal: &Principal) -> Result<Arc<Session>, RpcError> {
        let session = self.by_id.lock().get(id).cloned();
        let session = session.filter(|session| session.owner == *principal);
        session.ok_or_else(|| unknown_session(id))
    }

    /// All sessions that this principal opened, oldest first.
    pub(crate) fn all_of(&self, principal: &Principal) -> Vec<Arc<Session>> {
        let mut all: Vec<_> = self.by_id.lock().values().cloned().collect();
        all.retain(|session| session.owner == *principal);
        all.sort_by_key(|session| session.group.0);
        all
    }

    /// Detaches a closed connection from its session, unless another has replaced it. If it was the last one,
    /// the processes run on until the session's TTL expires.
    pub(crate) fn detach(&self, session: Arc<Session>, part: Part) {
        let mut state = session.state.lock();
        match part {
            Part::Holder(_, attachment) if state.is_attached(attachment) => {
                state.presence = Presence::Detached;
                state.client = Weak::new();
                for process in state.processes.values() {
                    process.detach();
                }
            }
            Part::Guest(client, _) if state.guests.remove(&client).is_some() => {}
            _ => return,
        }
        for process in state.processes.values() {
            process.leave(vec![part.client()]);
        }
        if state.presence != Presence::Detached || !state.guests.is_empty() {
            return;
        }
        let (ttl, arrivals) = (state.detach_ttl, state.arrivals);
        drop(state);
        let sessions = self.clone();
        tokio::spawn(async move {
            sleep(ttl).await;
            sessions.end_if(&session, |state| state.arrivals == arrivals).await;
        });
    }

    /// How many sessions have a connection, and how many have none.
    pub(crate) fn counts(&self) -> [usize; 2] {
        let all: Vec<_> = self.by_id.lock().values().cloned().collect();
        let attached = all.iter().filter(|session| session.connections() > 0).count();
        [attached, all.len() - attached]
    }

    /// Sends SIGTERM to every process and waits until all have exited.
    pub(crate) async fn terminate_all(&self) {
        let all: Vec<_> = self.by_id.lock().values().cloned().collect();
        let all: Vec<_> = all.iter().flat_map(|session| session.processes()).collect();
        for process in &all {
            process.stop();
        }
        for process in all {
            // The close follows the last output, unless a descendant holds the streams open.
            let mut polls_after_exit = 0;
            while let Ok(info) = process.info().await
                && !info.closed
                && polls_after_exit < POLLS_AFTER_EXIT
            {
                polls_after_exit += u32::from(info.exited);
                sleep(EXIT_POLL_INTERVAL).await;
            }
        }
    }

    /// Ends every session and kills every process.
    pub(crate) async fn end_all(&self) {
        let all: Vec<_> = self.by_id.lock().values().cloned().collect();
        futures_util::future::join_all(all.iter().map(|session| self.end_if(session, |_| true)))
            .await;
        // Sessions whose TTL has just expired.
        self.ending.close();
        self.ending.wait().await;
        self.host.shut_down().await;
    }

    async fn end_if(&self, session: &Arc<Session>, condition: impl FnOnce(&State) -> bool) {
        let _ending = self.ending.token();
        let processes = {
            let mut state = session.state.lock();
            if state.presence == Presence::Ended || !condition(&state) {
                return;
            }
            state.presence = Presence::Ended;
            std::mem::take(&mut state.processes)
        };
        self.by_id.lock().remove(&session.id);
        let captures = session.shell_snapshots.end();
        for process in processes.values() {
            process.kill();
        }
        futures_util::future::join_all(processes.values().map(ProcessHandle::gone)).await;
        captures.await;
        self.host.end_group(session.group).await;
    }
}

impl Session {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn group(&self) -> Group {
        self.group
    }

    /// What its processes use of its budget.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The states of its login shells.
    pub(crate) fn shell_snapshots(&self) -> &Arc<ShellSnapshots> {
        &self.shell_snapshots
    }

    /// Attaches a connection if none is attached, or in place of `silent`, which is closed.
    fn try_attach(
        &self,
        silent: Option<Attachment>,
        detach_ttl: Option<Duration>,
        newcomer: &Holder,
    ) -> Result<Attachment, Refusal> {
        let mut state = self.state.lock();
        match state.presence {
            Presence::Ended => return Err(Refusal::Ended),
            Presence::Attached if silent == Some(state.attachment) => {
                state.holder.evicted.cancel();
                state.drop_holder();
            }
            Presence::Attached => {
                return Err(Refusal::Held(state.holder.clone(), state.attachment));
            }
            Presence::Detached => {}
        }
        state.presence = Presence::Attached;
        state.attachment.0 += 1;
        state.arrivals += 1;
        state.holder = newcomer.clone();
        state.client = Weak::new();
        if let Some(ttl) = detach_ttl {
            state.detach_ttl = ttl;
        }
        Ok(state.attachment)
    }

    /// Detaches every connection, for a client that takes the session.
    fn evict_all(&self) {
        let mut state = self.state.lock();
        let guests = std::mem::take(&mut state.guests);
        guests.values().for_each(Holder::take);
        let mut gone: Vec<ClientId> = guests.into_keys().collect();
        let held = state.presence == Presence::Attached;
        if held {
            state.holder.take();
            state.presence = Presence::Detached;
            gone.push(state.holder.id);
        }
        for process in state.processes.values() {
            if held {
                process.detach();
            }
            // All at once, so that the terminal keeps its size until the newcomer gives another.
            process.leave(gone.clone());
        }
    }

    /// Its name, for people.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// How many connections it has.
    pub(crate) fn connections(&self) -> usize {
        let state = self.state.lock();
        state.guests.len() + usize::from(state.presence == Presence::Attached)
    }

    /// The rules of the proxies of its running processes.
    pub(crate) fn network_rules(&self) -> MutexGuard<'_, HashMap<ProcessId, RulesHandle>> {
        self.network_rules.lock()
    }

    /// The file handles that outlive a connection.
    pub(crate) fn persistent_handles(&self, config: &Arc<FilesConfig>) -> Arc<PersistentHandles> {
        self.persistent_handles
            .get_or_init(|| Arc::new(PersistentHandles::new(config.clone())))
            .clone()
    }

    /// Sends the events and the questions of every process to this connection.
    pub(crate) fn attach_all(&self, attachment: Attachment, client: &Arc<ClientCalls>) {
        let mut state = self.state.lock();
        if state.is_attached(attachment) {
            state.client = Arc::downgrade(client);
        }
        for process in state.processes.values() {
            let sink = self.sink(client.outbound(), state.holder.knows_roles);
            state.attach(process, attachment, sink);
        }
    }

    /// Sends the events of these processes to a guest, too.
    pub(crate) fn join_events(
        &self,
        guest: ClientId,
        role: Role,
        events: &[ProcessId],
        outbound: &Outbound,
    ) {
        for process in events.iter().filter_map(|id| self.process(id)) {
            process.join(guest, Box::new(self.sink(outbound, true)), paces(role));
        }
    }

    fn sink(&self, outbound: &Outbound, knows_roles: bool) -> NotificationSink {
        NotificationSink::new(outbound.clone(), self.metrics.clone(), knows_roles)
    }

    /// The client that is attached now.
    pub(crate) fn client(&self) -> Weak<ClientCalls> {
        self.state.lock().client.clone()
    }

    /// Sends the events of one process to the connection that started it, unless another has replaced it.
    pub(crate) fn attach(&self, process: &ProcessHandle, part: Part, outbound: &Outbound) {
        let state = self.state.lock();
        match part {
            Part::Holder(_, attachment) => {
                let sink = self.sink(outbound, state.holder.knows_roles);
                state.attach(process, attachment, sink);
            }
            Part::Guest(client, role) if state.guests.contains_key(&client) => {
                process.join(client, Box::new(self.sink(outbound, true)), paces(role));
            }
            Part::Guest(..) => process.detach(),
        }
    }

    /// Starts a process under `id`, unless another process has it.
    pub(crate) fn insert(
        &self,
        id: &ProcessId,
        start: impl FnOnce() -> ProcessHandle,
    ) -> Result<ProcessHandle, InsertError> {
        let mut state = self.state.lock();
        if state.presence == Presence::Ended {
            return Err(InsertError::Ended);
        }
        if state.processes.get(id).is_some_and(|process| !process.is_gone()) {
            return Err(InsertError::Taken);
        }
        if state.processes.len() >= state.prune_at {
            state.processes.retain(|_, process| !process.is_gone());
            state.prune_at = (state.processes.len() * 2).max(64);
        }
        let process = start();
        state.processes.insert(id.clone(), process.clone());
        Ok(process)
    }

    /// The process with this id.
    pub(crate) fn process(&self, id: &ProcessId) -> Option<ProcessHandle> {
        self.state.lock().processes.get(id).filter(|process| !process.is_gone()).cloned()
    }

    /// All processes that can still be read.
    pub(crate) fn processes(&self) -> Vec<ProcessHandle> {
        let state = self.state.lock();
        state.processes.values().filter(|process| !process.is_gone()).cloned().collect()
    }
}

impl State {
    fn is_attached(&self, attachment: Attachment) -> bool {
        self.presence == Presence::Attached && self.attachment == attachment
    }

    /// Forgets the holder; its processes retain their output.
    fn drop_holder(&self) {
        for process in self.processes.values() {
            process.detach();
            process.leave(vec![self.holder.id]);
        }
    }

    fn attach(&self, process: &ProcessHandle, attachment: Attachment, sink: NotificationSink) {
        if self.is_attached(attachment) {
            process.attach(Box::new(sink));
        }
    }
}

fn unknown_session(id: &str) -> RpcError {
    RpcError::invalid_request(ErrorKind::UnknownSession, format!("unknown session id {id}"))
}

/// Whether a process without a holder waits for a guest. One that only views changes nothing.
fn paces(role: Role) -> bool {
    role != Role::View
}

#[cfg(test)]
mod tests {
    use codex_exec_rpc::{Connection, ConnectionConfig};

    use super::*;
    use crate::{Server, ServerConfig};

    #[tokio::test]
    async fn a_start_in_an_ended_session_fails_as_session_ended() {
        let server = Server::new(ServerConfig::default()).unwrap();
        let (connection, _peer) = Connection::pair(&ConnectionConfig::default());
        let holder = Holder {
            id: server.sessions().new_client(),
            principal: Principal::Embedder,
            peer: connection.outbound().peer(),
            evicted: CancellationToken::new(),
            taken: Arc::default(),
            knows_roles: false,
        };
        let (session, _) = server.sessions().create(Duration::ZERO, None, holder).unwrap();
        server.sessions().end_all().await;
        let refused = session.insert(&"p".into(), || unreachable!("nothing starts"));
        assert_eq!(refused.err(), Some(InsertError::Ended));
    }
}
