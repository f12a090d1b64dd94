//! The file requests of one connection: their order, handles, searches and watches.
//!
//! Invariant: everything belongs to the connection and ends with it, except [persistent
//! handles](PersistentHandles) and changes that have begun, which the next connection waits for.
//! Blocking work runs on the [pool](crate::pool), and watches on their own threads, never on runtime
//! threads; those answer only from caches ([`FileConnection::call_if_cached`]). Dropping a call cancels
//! it.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::ops::{ControlFlow, Deref};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use codex_exec_server_protocol::files::FsDone;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::pool;

use super::watches::{EVENTS, WatchId, Watches};
use super::{
    AnswerMemory, Cancel, Event, Executor, FileError, FileNotification, FileRequest, FilesConfig,
    HelperClient, Operation, Outcome, PersistentHandles, Reservation, SMALL_ANSWER, Turn, Turns,
    handles,
};

/// Where a request runs.
#[derive(Debug, Clone)]
pub enum Backend {
    /// In this process: the request is not restricted.
    Here,
    /// In a helper that runs under the request's sandbox.
    Helper(HelperClient),
}

/// Where notifications go. A sink may wait; then the search or watch waits too.
pub trait EventSink: Send + Sync + 'static {
    /// Queues one notification. Resolves to false if the connection is gone.
    fn deliver(
        &self,
        notification: FileNotification,
    ) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}

impl EventSink for mpsc::Sender<FileNotification> {
    fn deliver(
        &self,
        notification: FileNotification,
    ) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async move { self.send(notification).await.is_ok() })
    }
}

/// A response. Send it, then drop this: notifications of a new watch wait for that.
#[derive(Debug)]
pub struct Answer<T> {
    response: T,
    /// Dropping it releases the notifications of a watch.
    _sent: Option<oneshot::Sender<()>>,
    memory: Option<Reservation>,
}

impl<T> Answer<T> {
    /// The memory reserved for a large response; hold it until the response has been sent.
    pub fn take_memory(&mut self) -> Option<Reservation> {
        self.memory.take()
    }

    /// The response alone; notifications are released at once.
    pub fn into_response(self) -> T {
        self.response
    }
}

impl<T> Deref for Answer<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.response
    }
}

/// The file requests of one connection. Dropping it closes its handles and stops its watches.
pub struct FileConnection(Arc<Inner>);

struct Inner {
    executor: Arc<Executor>,
    /// The connection's own queue, used while it has no session.
    turns: Turns,
    /// The backend of each handle.
    routes: Mutex<HashMap<String, Backend>>,
    searches: Mutex<HashMap<String, Cancel>>,
    watches: Arc<Watches>,
    sink: Arc<dyn EventSink>,
    memory: Arc<dyn AnswerMemory>,
    /// Handles that survive the connection.
    persistent: OnceLock<Arc<PersistentHandles>>,
    /// The client has gone: what has not begun never begins.
    has_ended: AtomicBool,
}

/// Ends a connection's requests.
#[derive(Clone)]
pub struct RequestsEnd(Arc<Inner>);

impl RequestsEnd {
    /// Keeps requests that have not begun from ever beginning. Call this before dropping any of them: its turn
    /// passes to the next one, which must not take effect without those before it.
    pub fn end(&self) {
        self.0.has_ended.store(true, Ordering::Release);
    }
}

impl fmt::Debug for RequestsEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestsEnd").finish_non_exhaustive()
    }
}

impl fmt::Debug for FileConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileConnection").finish_non_exhaustive()
    }
}

impl FileConnection {
    /// A connection without open handles. Notifications go to `sink`; large responses wait for
    /// `memory`.
    pub fn new(
        config: Arc<FilesConfig>,
        sink: Arc<dyn EventSink>,
        memory: Arc<dyn AnswerMemory>,
    ) -> Self {
        Self(Arc::new(Inner {
            watches: Arc::new(Watches::new(config.max_watches)),
            executor: Arc::new(Executor::with_changes_in(config, memory.changes())),
            turns: Turns::default(),
            routes: Mutex::default(),
            searches: Mutex::default(),
            sink,
            memory,
            persistent: OnceLock::new(),
            has_ended: AtomicBool::new(false),
        }))
    }

    /// What ends the requests of this connection once its client has gone.
    pub fn requests_end(&self) -> RequestsEnd {
        RequestsEnd(self.0.clone())
    }

    /// Sets the session's table of persistent handles and queue of requests. Without it, the connection
    /// has no persistent handles and its own queue.
    pub fn persist_handles_in(&self, persistent: Arc<PersistentHandles>) {
        // A connection has one session.
        let _ = self.0.persistent.set(persistent);
    }

    /// Queues the request now and returns the work to await or spawn. Call this in the order the
    /// requests arrived; the futures may be polled in any order. A future that is dropped lets those behind it
    /// run, unless [`RequestsEnd::end`] was called before.
    ///
    /// Ignores the request's `sandbox`, which has determined `backend`. Requests on a handle run where
    /// the handle was opened, whatever `backend` is.
    pub fn call<R: FileRequest>(
        &self,
        backend: Backend,
        request: R,
    ) -> impl Future<Output = Result<Answer<R::Response>, FileError>> + Send + use<R> {
        self.call_in(std::future::ready(Ok(backend)), request)
    }

    /// Like [`call`](Self::call), with a backend that is determined when it is the request's turn: an
    /// earlier request may change what its policy means.
    pub fn call_in<R: FileRequest, B>(
        &self,
        backend: B,
        mut request: R,
    ) -> impl Future<Output = Result<Answer<R::Response>, FileError>> + Send + use<R, B>
    where
        B: Future<Output = Result<Backend, FileError>> + Send + 'static,
    {
        request.take_sandbox();
        let operation: Operation = request.into();
        let mut turn = self.0.turns().take(operation.order());
        let inner = self.0.clone();
        async move {
            turn.wait().await;
            if inner.has_ended.load(Ordering::Acquire) {
                // Those before it may have been dropped; this one will be.
                std::future::pending::<()>().await;
            }
            let performed = inner.perform(backend.await?, operation, turn).await?;
            let Performed { outcome, sent, memory } = performed;
            Ok(Answer { response: R::response(outcome)?, _sent: sent, memory })
        }
    }

    /// Runs an unrestricted request on this thread if nothing blocks: it is its turn, it is small, and
    /// its result is cached. Otherwise returns `None`; then use [`call`](Self::call).
    pub fn call_if_cached<R: FileRequest + Clone>(
        &self,
        request: &R,
    ) -> Option<Result<R::Response, FileError>> {
        let operation: Operation = request.clone().into();
        let turn = self.0.turns().take(operation.order());
        if !turn.ready() {
            return None;
        }
        Some(self.0.executor.execute_if_cached(&operation)?.and_then(R::response))
    }
}

impl Drop for FileConnection {
    fn drop(&mut self) {
        self.0.watches.stop_all();
        self.0.searches.lock().values().for_each(Cancel::cancel);
    }
}

/// The outcome of an operation.
struct Performed {
    outcome: Outcome,
    /// Drop it when the response has been sent.
    sent: Option<oneshot::Sender<()>>,
    memory: Option<Reservation>,
}

impl Inner {
    fn turns(&self) -> &Turns {
        self.persistent.get().map_or(&self.turns, |persistent| persistent.turns())
    }

    async fn perform(
        &self,
        backend: Backend,
        operation: Operation,
        turn: Turn,
    ) -> Result<Performed, FileError> {
        let memory = match operation.answer_bytes(self.executor.config()) {
            0..=SMALL_ANSWER => None,
            bytes => Some(self.memory.reserve(bytes).await),
        };
        if let Some(persistent) = self.persistent_table(&backend, &operation)? {
            let on_handle = persistent.turn(&operation).await;
            let running = pool::blocking(move || {
                let _turns = (turn, on_handle);
                persistent.execute(operation)
            });
            let outcome = running.await.unwrap_or_else(|error| {
                Err(FileError::Helper { reason: format!("operation failed: {error}") })
            });
            return Ok(Performed { outcome: outcome?, sent: None, memory });
        }
        let outcome = match &operation {
            Operation::ReadFile(_) | Operation::ReadDirectory(_) => {
                return self.run_in_reserved_memory(&backend, operation, turn).await;
            }
            Operation::Open(params) => {
                let handle_id = params.handle_id.clone();
                self.reserve_route(&handle_id, &backend)?;
                let opened = self.run(&backend, operation, turn).await;
                if opened.is_err() {
                    self.routes.lock().remove(&handle_id);
                }
                opened
            }
            Operation::ReadBlock(params) => {
                let handle_id = params.handle_id.clone();
                let backend = self.route(&handle_id)?;
                let read = self.run(&backend, operation, turn).await;
                if matches!(&read, Err(FileError::Os { .. } | FileError::Denied { .. })) {
                    self.routes.lock().remove(&handle_id);
                }
                read
            }
            Operation::WriteBlock(params) => {
                let backend = self.route(&params.handle_id)?;
                self.run(&backend, operation, turn).await
            }
            Operation::Close(params) => {
                let backend = self.routes.lock().remove(&params.handle_id).unwrap_or(Backend::Here);
                self.run(&backend, operation, turn).await
            }
            Operation::Search(params) => {
                let search_id = params.search_id.clone();
                self.search(&backend, search_id, operation, turn).await
            }
            Operation::CancelSearch(params) => {
                if let Some(cancel) = self.searches.lock().get(&params.search_id) {
                    cancel.cancel();
                }
                Ok(Outcome::CancelSearch(FsDone {}))
            }
            Operation::Watch(params) => {
                let id = WatchId::Path(params.watch_id);
                return self.watch(backend, id, operation, turn).await;
            }
            Operation::WatchMissing(params) => {
                let id = WatchId::Missing(params.watch_id);
                return self.watch(backend, id, operation, turn).await;
            }
            Operation::Unwatch(params) => {
                self.watches.stop(WatchId::Path(params.watch_id)).await;
                Ok(Outcome::Unwatch(FsDone {}))
            }
            _ => self.run(&backend, operation, turn).await,
        };
        Ok(Performed { outcome: outcome?, sent: None, memory })
    }

    /// Runs an operation that finds out only by itself how much its response carries: a large one is
    /// built after memory for it has been reserved.
    async fn run_in_reserved_memory(
        &self,
        backend: &Backend,
        operation: Operation,
        turn: Turn,
    ) -> Result<Performed, FileError> {
        let turn = Arc::new(turn);
        let (mut room, mut memory) = (SMALL_ANSWER, None);
        loop {
            match self.run_within(room, backend, operation.clone(), turn.clone()).await {
                Err(FileError::NeedsMemory { bytes }) => {
                    // It may grow meanwhile, and files of /proc report no size.
                    room = bytes.saturating_add(bytes / 8).max(2 * room);
                    drop(memory.take());
                    memory = Some(self.memory.reserve(room).await);
                }
                outcome => return Ok(Performed { outcome: outcome?, sent: None, memory }),
            }
        }
    }

    /// The table of persistent handles, if the operation belongs there.
    fn persistent_table(
        &self,
        backend: &Backend,
        operation: &Operation,
    ) -> Result<Option<Arc<PersistentHandles>>, FileError> {
        let handle_id = match operation {
            Operation::Open(params) if params.keep => {
                handles::check_id(&params.handle_id, self.executor.config())?;
                let (Backend::Here, Some(persistent)) = (backend, self.persistent.get()) else {
                    let reason = "a sandboxed file handle cannot outlive its connection".into();
                    return Err(FileError::Refused { path: params.path.clone(), reason });
                };
                if self.routes.lock().contains_key(&params.handle_id) {
                    let handle_id = params.handle_id.clone();
                    return Err(FileError::HandleTaken { handle_id });
                }
                return Ok(Some(persistent.clone()));
            }
            Operation::ReadBlock(params) => &params.handle_id,
            Operation::WriteBlock(params) => &params.handle_id,
            Operation::Close(params) => &params.handle_id,
            _ => return Ok(None),
        };
        if self.routes.lock().contains_key(handle_id) {
            return Ok(None);
        }
        Ok(self.persistent.get().filter(|persistent| persistent.has(handle_id)).cloned())
    }

    /// Reserves a handle id: ids are unique, and limited in number, across all backends.
    fn reserve_route(&self, handle_id: &str, backend: &Backend) -> Result<(), FileError> {
        let config = self.executor.config();
        handles::check_id(handle_id, config)?;
        let mut routes = self.routes.lock();
        if routes.contains_key(handle_id) {
            return Err(FileError::HandleTaken { handle_id: handle_id.into() });
        }
        if routes.len() >= config.max_handles {
            return Err(handles::too_many_handles(config));
        }
        routes.insert(handle_id.into(), backend.clone());
        Ok(())
    }

    fn route(&self, handle_id: &str) -> Result<Backend, FileError> {
        let unknown = || FileError::UnknownHandle { handle_id: handle_id.into() };
        self.routes.lock().get(handle_id).cloned().ok_or_else(unknown)
    }

    /// Runs an operation without events.
    async fn run(
        &self,
        backend: &Backend,
        operation: Operation,
        turn: Turn,
    ) -> Result<Outcome, FileError> {
        self.run_within(u64::MAX, backend, operation, turn).await
    }

    /// Like `run`, with a limit on the [bytes of the outcome](Executor::execute_within).
    async fn run_within(
        &self,
        room: u64,
        backend: &Backend,
        operation: Operation,
        turn: impl Send + 'static,
    ) -> Result<Outcome, FileError> {
        let (events, _none) = mpsc::channel(1);
        self.run_with(backend, (room, operation), turn, Cancel::new(), events).await
    }

    async fn run_with(
        &self,
        backend: &Backend,
        (room, operation): (u64, Operation),
        turn: impl Send + 'static,
        cancel: Cancel,
        events: mpsc::Sender<Event>,
    ) -> Result<Outcome, FileError> {
        match backend {
            Backend::Here => {
                let _cancel_if_dropped = cancel.drop_guard();
                let executor = self.executor.clone();
                let running = pool::blocking(move || {
                    // Held until the work is done, even if the caller stops waiting.
                    let _turn = turn;
                    let emit = |event| send_blocking(&events, event);
                    executor.execute_within(room, operation, &cancel, &emit)
                });
                running.await.unwrap_or_else(|error| {
                    Err(FileError::Helper { reason: format!("operation failed: {error}") })
                })
            }
            Backend::Helper(helper) => {
                let _turn = turn;
                helper.run(room, operation, &cancel, &events).await.map_err(FileError::in_sandbox)
            }
        }
    }

    async fn search(
        &self,
        backend: &Backend,
        search_id: Option<String>,
        operation: Operation,
        turn: Turn,
    ) -> Result<Outcome, FileError> {
        let cancel = Cancel::new();
        let _registered_search =
            search_id.map(|id| self.register_search(id, cancel.clone())).transpose()?;
        let (events, mut incoming) = mpsc::channel(EVENTS);
        let running = self.run_with(backend, (u64::MAX, operation), turn, cancel.clone(), events);
        tokio::pin!(running);
        let result = loop {
            tokio::select! {
                biased;
                Some(event) = incoming.recv() => self.deliver(event, &cancel).await,
                result = &mut running => break result,
            }
        };
        // All matches are sent before the response.
        while let Ok(event) = incoming.try_recv() {
            self.deliver(event, &cancel).await;
        }
        result
    }

    fn register_search(
        &self,
        id: String,
        cancel: Cancel,
    ) -> Result<RegisteredSearch<'_>, FileError> {
        let limit = self.executor.config().max_searches;
        let mut searches = self.searches.lock();
        if searches.contains_key(&id) {
            return Err(FileError::IdTaken { what: "searchId".into(), id });
        }
        if searches.len() >= limit {
            let what = "running searches".into();
            return Err(FileError::TooMany { what, limit: limit as u64 });
        }
        searches.insert(id.clone(), cancel);
        Ok(RegisteredSearch { searches: &self.searches, id })
    }

    async fn deliver(&self, event: Event, cancel: &Cancel) {
        if let Event::Notify(notification) = event
            && !self.sink.deliver(notification).await
        {
            cancel.cancel();
        }
    }

    async fn watch(
        &self,
        backend: Backend,
        id: WatchId,
        operation: Operation,
        turn: Turn,
    ) -> Result<Performed, FileError> {
        let executor = self.executor.clone();
        let run = move |cancel: Cancel, events| {
            let (done, ended) = oneshot::channel();
            match backend {
                Backend::Here => {
                    let run = move || {
                        let emit = |event| send_blocking(&events, event);
                        let _ = done.send(executor.execute(operation, &cancel, &emit));
                    };
                    // If there is no thread, `done` is dropped with the closure, and the caller
                    // notices.
                    let _ = std::thread::Builder::new().name("fs-watch".into()).spawn(run);
                }
                Backend::Helper(helper) => {
                    tokio::spawn(async move {
                        let result = helper.run(u64::MAX, operation, &cancel, &events).await;
                        let _ = done.send(result.map_err(FileError::in_sandbox));
                    });
                }
            }
            ended
        };
        let (outcome, sent) = self.watches.start(id, run, self.sink.clone()).await?;
        drop(turn);
        Ok(Performed { outcome, sent: Some(sent), memory: None })
    }
}

/// Frees a search id when dropped.
struct RegisteredSearch<'a> {
    searches: &'a Mutex<HashMap<String, Cancel>>,
    id: String,
}

impl Drop for RegisteredSearch<'_> {
    fn drop(&mut self) {
        self.searches.lock().remove(&self.id);
    }
}

fn send_blocking(events: &mpsc::Sender<Event>, event: Event) -> ControlFlow<()> {
    match events.blocking_send(event) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    }
}
