//! Draining: the server opens no new sessions, lets those that it has finish, and then stops.
//!
//! ```text
//!          drain                 no session in use
//! serving ───────▶ draining ──────────────────────────▶ drained ──▶ shutdown
//!                   │    ▲                                 ▲
//!                   └────┘ drain: another deadline         │
//!                   └──────────────────────────────────────┘ deadline
//! ```
//!
//! The listeners keep accepting: a client whose connection drops can still resume its session.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::server::Server;

/// How often to look whether a session is still in use.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Longest deadline, so that no clock overflows.
const MAX_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long those who wait for the end of a drain may take to hear of it.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a server drains, and how that ended.
#[derive(Debug)]
pub(crate) struct Drain {
    state: watch::Sender<State>,
    /// Those who wait for the end, until they have passed it on: the server does not stop before.
    waiting: TaskTracker,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Serving,
    Draining { since: Instant, until: Instant },
    Drained(Drained),
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Drained {
    /// Sessions that were still in use.
    pub cut_sessions: usize,
}

/// A drain that is under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draining {
    pub elapsed: Duration,
    /// Until the deadline.
    pub left: Duration,
}

impl Drain {
    pub(crate) fn new() -> Self {
        Self { state: watch::Sender::new(State::Serving), waiting: TaskTracker::new() }
    }

    /// The drain that is under way; `None` if there is none.
    pub(crate) fn current(&self) -> Option<Draining> {
        match *self.state.borrow() {
            State::Serving => None,
            State::Draining { since, until } => Some(Draining {
                elapsed: since.elapsed(),
                left: until.saturating_duration_since(Instant::now()),
            }),
            State::Drained(_) => Some(Draining { elapsed: Duration::ZERO, left: Duration::ZERO }),
        }
    }

    /// Waits until a drain has ended. The server stops only after the token was dropped.
    pub(crate) async fn ended(&self) -> (Drained, TaskTrackerToken) {
        let token = self.waiting.token();
        let mut state = self.state.subscribe();
        loop {
            if let State::Drained(drained) = *state.borrow_and_update() {
                return (drained, token);
            }
            if state.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Server {
    /// Opens no new sessions from now on, so that [`drained`](Self::drained) resolves once all sessions have
    /// finished, or after `deadline`. Of several calls the deadline of the last one counts.
    pub fn drain(&self, deadline: Duration) {
        self.sessions().refuse_new();
        let now = Instant::now();
        let until = now + deadline.min(MAX_DEADLINE);
        self.drain_state().state.send_modify(|state| {
            *state = match *state {
                State::Serving => State::Draining { since: now, until },
                State::Draining { since, .. } => State::Draining { since, until },
                drained @ State::Drained(_) => drained,
            };
        });
        tracing::info!(?deadline, "draining");
    }

    /// Whether the server opens no new sessions.
    pub fn is_draining(&self) -> bool {
        self.drain_state().current().is_some()
    }

    /// Resolves when the server has drained: every session has ended, or has neither a connection nor a
    /// process, or the deadline has passed. For ever pending while the server does not
    /// [drain](Self::drain).
    pub async fn drained(&self) {
        let mut state = self.drain_state().state.subscribe();
        let cut_sessions = loop {
            let current = *state.borrow_and_update();
            let until = match current {
                State::Serving => None,
                State::Draining { until, .. } => Some(until),
                State::Drained(_) => return,
            };
            let Some(until) = until else {
                if state.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            };
            match self.sessions().in_use() {
                0 => break 0,
                in_use if Instant::now() >= until => break in_use,
                _ => {}
            }
            tokio::select! {
                _ = state.changed() => {}
                () = sleep(POLL_INTERVAL) => {}
                () = sleep_until(until) => {}
            }
        };
        tracing::info!(cut_sessions, "drained");
        let drain = self.drain_state();
        drain.state.send_replace(State::Drained(Drained { cut_sessions }));
        drain.waiting.close();
        let _ = timeout(REPORT_TIMEOUT, drain.waiting.wait()).await;
    }
}
