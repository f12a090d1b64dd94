//! A spare: a process that waits to become the next sandbox. It has already executed, which takes half
//! of the time that a sandbox needs to start.
//!
//! Invariant: there is at most one, from the first sandbox on; it is used once, or killed at shutdown.
//! If it cannot be used, the sandbox starts the usual way.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Mode, OFlags};

use crate::pool;
use crate::sandbox::{Executable, Launch, Spare, SpareLaunch};

use super::child::Child;
use super::confinement::command;
use super::helper::GROUP;
use super::host::ProcessHost;
use super::keeper::OrderLimits;
use super::leftovers::Group;
use super::spawner::SpawnRequest;

/// The spare of a host. Clones share their state.
#[derive(Debug, Clone, Default)]
pub(super) struct Spares(Arc<Mutex<State>>);

#[derive(Debug, Default)]
enum State {
    #[default]
    None,
    Starting,
    Ready(Box<WaitingSpare>),
    /// The host is shutting down, or spares are disabled.
    Ended,
}

/// A spare that is ready.
#[derive(Debug)]
pub(super) struct WaitingSpare {
    program: Executable,
    child: Child,
    spare: Spare,
}

impl Spares {
    /// Never keeps a spare.
    pub(super) fn none() -> Self {
        Self(Arc::new(Mutex::new(State::Ended)))
    }

    /// Takes the spare, if it runs this program.
    pub(super) fn take(&self, program: &Executable) -> Option<WaitingSpare> {
        let mut state = self.lock();
        match &*state {
            State::Ready(ready) if ready.program.path() == program.path() => {}
            _ => return None,
        }
        match std::mem::take(&mut *state) {
            State::Ready(ready) => Some(*ready),
            _ => None,
        }
    }

    /// Starts a new spare in the background, unless there is one.
    pub(super) fn replenish(&self, host: &ProcessHost, program: Executable) {
        {
            let mut state = self.lock();
            if !matches!(*state, State::None) {
                return;
            }
            *state = State::Starting;
        }
        let (spares, host) = (self.clone(), host.clone());
        tokio::spawn(async move {
            let started = start(&host, program).await;
            let rejected = spares.store(started);
            if let Some(unwanted) = rejected {
                // Killing blocks, which a runtime thread must not do.
                let _ = pool::blocking(move || drop(unwanted)).await;
            }
        });
    }

    /// Stores a started spare; returns it if it is no longer wanted.
    fn store(&self, started: Option<WaitingSpare>) -> Option<WaitingSpare> {
        let mut state = self.lock();
        match (&*state, started) {
            (State::Ended, started) => started,
            (_, Some(ready)) => {
                *state = State::Ready(Box::new(ready));
                None
            }
            (_, None) => {
                *state = State::None;
                None
            }
        }
    }

    /// Kills the spare and starts no more. Blocks.
    pub(super) fn shut_down(&self) {
        let last = std::mem::replace(&mut *self.lock(), State::Ended);
        drop(last);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl WaitingSpare {
    /// Turns the spare into this sandbox; `None` if it has died.
    pub(super) fn activate(
        mut self,
        launch: &Launch,
        stdio: &[OwnedFd; 3],
        tty: bool,
        group: Group,
    ) -> Option<Child> {
        let streams = [stdio[0].as_fd(), stdio[1].as_fd(), stdio[2].as_fd()];
        self.child.set_group(group);
        if !launch.cleanup.is_empty() {
            self.child.set_cleans_up();
        }
        match self.spare.activate(launch, streams, tty) {
            Ok(()) => Some(self.child),
            Err(error) => {
                tracing::debug!(%error, "a spare sandbox process failed");
                pool::spawn_detached(move || drop(self.child));
                None
            }
        }
    }
}

async fn start(host: &ProcessHost, program: Executable) -> Option<WaitingSpare> {
    let SpareLaunch { program, args, descriptor, spare } = Spare::launch(&program).ok()?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let null = || rustix::fs::open("/dev/null", flags, Mode::empty());
    let request = SpawnRequest {
        group: GROUP,
        command: command(&program, &args, &[]).ok()?,
        stdio: [null().ok()?, null().ok()?, null().ok()?],
        tty: false,
        pass: vec![descriptor.fd],
        cleans_up: false,
        limits: OrderLimits::default(),
    };
    let child = host.spawn(request).await;
    let child = child
        .inspect_err(|error| tracing::debug!(%error, "cannot start a spare sandbox process"))
        .ok()?;
    Some(WaitingSpare { program, child, spare })
}
