//! The commands that a session started, by handle.
//!
//! Invariant: a command in the table is read until its output ends, whether or not a call waits for it, so no
//! command is lost or blocked because a client gave up. The table is bounded: running commands are refused
//! above the limit, ended ones are forgotten, oldest first.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_client::{
    ExecCommand, ExitStatus, Process, ProcessEvent, ProcessEvents, ProcessStdin,
};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::McpConfig;
use crate::output_log::OutputLog;
use crate::workspace::Workspace;

/// What is known about a command.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    /// How often something happened; a waiter waits for a change.
    changes: u64,
    /// The exit status, once it has exited.
    pub(crate) exit: Option<ExitStatus>,
    /// Its output has ended.
    pub(crate) closed: bool,
    /// Why no more can be learned about it.
    pub(crate) failure: Option<String>,
    /// Some output was lost on the way.
    pub(crate) lost: bool,
}

impl State {
    /// Whether it is over, as far as this server can know.
    pub(crate) fn has_ended(&self) -> bool {
        self.exit.is_some() || self.failure.is_some()
    }
}

/// A command of the session.
pub(crate) struct Entry {
    pub(crate) handle: String,
    /// The command as the model wrote it.
    pub(crate) command: String,
    pub(crate) started: Instant,
    pub(crate) process: Process,
    pub(crate) stdin: tokio::sync::Mutex<Option<ProcessStdin>>,
    pub(crate) log: Mutex<OutputLog>,
    /// The offset at which the next `output` without one begins.
    pub(crate) cursor: Mutex<u64>,
    state: watch::Sender<State>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl Entry {
    pub(crate) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Waits until the command has ended and its output is read, at most for `wait`. After the exit, output
    /// that another process holds open is waited for no longer than `drain`.
    pub(crate) async fn wait_for_end(&self, wait: Duration, drain: Duration) {
        let mut states = self.state.subscribe();
        let deadline = Instant::now() + wait;
        let exited = states.wait_for(State::has_ended);
        if tokio::time::timeout_at(deadline, exited).await.is_err() {
            return;
        }
        let drained = deadline.min(Instant::now() + drain);
        let closed = states.wait_for(|state| state.closed || state.failure.is_some());
        let _ = tokio::time::timeout_at(drained, closed).await;
    }

    /// Waits until there is output after `offset` or the command has ended, at most for `wait`.
    pub(crate) async fn wait_for_output(&self, offset: u64, wait: Duration) {
        let mut states = self.state.subscribe();
        let ready = states.wait_for(|state| {
            self.log.lock().end() > offset || state.closed || state.failure.is_some()
        });
        let _ = tokio::time::timeout(wait, ready).await;
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        self.state.send_modify(|state| {
            state.changes += 1;
            change(state);
        });
    }

    /// Reads the output until it ends.
    async fn collect(self: Arc<Self>, mut events: ProcessEvents) {
        while let Some(event) = events.next().await {
            match event {
                ProcessEvent::Output { bytes, .. } => {
                    self.log.lock().push(&bytes);
                    self.update(|_| {});
                }
                ProcessEvent::Lost(_) => self.update(|state| state.lost = true),
                ProcessEvent::Exited(status) => self.update(|state| state.exit = Some(status)),
                ProcessEvent::Closed => self.update(|state| state.closed = true),
                ProcessEvent::Failed(error) => {
                    self.update(|state| state.failure = Some(error.to_string()));
                }
            }
        }
    }
}

/// The commands of a session, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    entries: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    entries: VecDeque<Arc<Entry>>,
    count: u64,
    /// Commands that are being started.
    starting: usize,
}

impl Processes {
    /// Starts a command under the policy of the workspace.
    pub(crate) async fn start(
        &self,
        workspace: &Workspace,
        command: ExecCommand,
        shown: String,
    ) -> Result<Arc<Entry>, String> {
        let config = &workspace.config;
        let handle = self.reserve(config)?;
        let _starting = Starting(self);
        let spawned = workspace.client.spawn(workspace.confine(command)).await;
        let mut process = spawned.map_err(|error| error.to_string())?;
        let stdin = process.take_stdin();
        let events = process.take_events();
        let entry = Arc::new(Entry {
            handle,
            command: shown,
            started: Instant::now(),
            process,
            stdin: tokio::sync::Mutex::new(stdin),
            log: Mutex::new(OutputLog::new(config.kept_output_bytes)),
            cursor: Mutex::new(0),
            state: watch::Sender::new(State::default()),
        });
        let mut table = self.entries.lock();
        table.entries.push_back(entry.clone());
        table.forget_oldest(config.max_ended);
        drop(table);
        if let Some(events) = events {
            tokio::spawn(entry.clone().collect(events));
        }
        Ok(entry)
    }

    fn reserve(&self, config: &McpConfig) -> Result<String, String> {
        let mut table = self.entries.lock();
        let running = table.entries.iter().filter(|entry| !entry.state().has_ended()).count();
        if running + table.starting >= config.max_running {
            return Err(format!(
                "{} commands are running already, as many as this server allows; end one with the \
                 tool `kill`",
                config.max_running
            ));
        }
        table.starting += 1;
        table.count += 1;
        Ok(format!("p{}", table.count))
    }

    pub(crate) fn get(&self, handle: &str) -> Result<Arc<Entry>, String> {
        let table = self.entries.lock();
        let found = table.entries.iter().find(|entry| entry.handle == handle);
        found.cloned().ok_or_else(|| {
            format!(
                "no command has the handle `{}`; the tool `list` shows those that there are",
                crate::workspace::shown(handle)
            )
        })
    }

    pub(crate) fn list(&self) -> Vec<Arc<Entry>> {
        self.entries.lock().entries.iter().cloned().collect()
    }

    pub(crate) fn has_running(&self) -> bool {
        let table = self.entries.lock();
        table.starting > 0 || table.entries.iter().any(|entry| !entry.state().has_ended())
    }

    /// Kills every command that still runs.
    pub(crate) async fn kill_all(&self) {
        let running = self.list().into_iter().filter(|entry| !entry.state().closed);
        let kills = running.map(|entry| async move {
            if let Err(error) = entry.process.terminate().await {
                tracing::debug!(%error, "cannot kill a command at the end of its session");
            }
        });
        futures_util::future::join_all(kills).await;
    }
}

/// A command that is being started, and counts as running.
struct Starting<'a>(&'a Processes);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.0.entries.lock().starting -= 1;
    }
}

impl Table {
    fn forget_oldest(&mut self, max_ended: usize) {
        let ended = |entry: &Arc<Entry>| entry.state().has_ended();
        let mut extra = self.entries.iter().filter(|entry| ended(entry)).count();
        self.entries.retain(|entry| {
            let forget = extra > max_ended && ended(entry);
            extra -= usize::from(forget);
            !forget
        });
    }
}
