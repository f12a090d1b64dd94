//! Starts a [`Command`] by sending an order to a [keeper](super::keeper).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use codex_exec_server_protocol::ErrorKind;
use parking_lot::Mutex;

use super::command::Command;
use super::keeper::{
    Keeper, LongOrder, MAX_INLINE_ORDER, MemoryPool, Order, OrderLimits, OrderLocation, OwnKeeper,
    Parent, UnstartedKeeper, keeper_socket,
};
use super::leftovers::Group;
use super::warden::Warden;

/// A child to start.
#[derive(Debug)]
pub(super) struct SpawnRequest {
    /// The group it is killed with.
    pub group: Group,
    /// What to execute.
    pub command: Command,
    /// Its descriptors 0, 1 and 2.
    pub stdio: [OwnedFd; 3],
    /// Descriptor 0 is a terminal, to become the controlling terminal.
    pub tty: bool,
    /// Further descriptors to pass: the first becomes number 3, the second 4, and so on.
    pub pass: Vec<Arc<OwnedFd>>,
    /// The child exits by itself when this process does, and must clean up before that.
    pub cleans_up: bool,
    /// Limits that the child sets itself.
    pub limits: OrderLimits,
}

/// Why no process was started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The working directory cannot be entered.
    #[error("cannot enter the working directory: {0}")]
    Cwd(#[source] io::Error),
    /// The program cannot be executed.
    #[error("cannot execute the program: {0}")]
    Exec(#[source] io::Error),
    /// An earlier step failed.
    #[error("cannot start a process ({step}): {source}")]
    System {
        /// The step.
        step: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

impl SpawnError {
    /// The error kind to report.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Cwd(error) => ErrorKind::of_chdir(error),
            Self::Exec(error) => ErrorKind::of_exec(error),
            Self::System { source, .. } => ErrorKind::of_system(source),
        }
    }
}

/// Starts processes. Clones share their state.
#[derive(Debug, Clone)]
pub(super) enum Spawner {
    /// This process itself.
    Own(Arc<Mutex<MemoryPool>>),
    /// The warden.
    Warden(Warden),
}

impl Spawner {
    /// Starts a process and waits until it has executed its program. If this future is dropped, the
    /// process is killed.
    pub(super) async fn spawn(&self, request: SpawnRequest) -> Result<Keeper, SpawnError> {
        let system = |source| SpawnError::System { step: "keeper", source };
        let SpawnRequest { command, stdio, tty, pass, cleans_up, limits, .. } = request;
        let order = Order::new(&command, stdio, pass, tty, cleans_up, limits).map_err(system)?;
        let (socket, parent) = match self {
            Self::Own(memory_pool) => {
                let (own, socket) = start_here(memory_pool, &order).map_err(system)?;
                (socket, Parent::Own { _own: own })
            }
            Self::Warden(warden) => {
                let socket = warden.send_order(&order).await.map_err(system)?;
                // While the program starts on another processor.
                warden.add_waiting();
                (socket, Parent::Warden { warden: warden.clone(), known: None })
            }
        };
        // The keeper has its own copies; close ours, or their readers would wait for them.
        drop(order);
        Keeper::wait_started(socket, parent, cleans_up).await
    }
}

/// Starts a keeper below this process; returns it with our end of its socket.
fn start_here(memory_pool: &Mutex<MemoryPool>, order: &Order) -> io::Result<(OwnKeeper, OwnedFd)> {
    let (ours, theirs) = keeper_socket()?;
    let mut unstarted = UnstartedKeeper::new(&mut memory_pool.lock())?;
    let bytes = &order.bytes;
    let location = if bytes.len() <= MAX_INLINE_ORDER {
        unstarted.order()[..bytes.len()].copy_from_slice(bytes);
        OrderLocation::Inline(bytes.len())
    } else {
        let mut long = LongOrder::new(bytes.len());
        long.bytes()[..bytes.len()].copy_from_slice(bytes);
        OrderLocation::Separate(long)
    };
    Ok((OwnKeeper::new(unstarted.start(location, &theirs, &order.descriptors)?), ours))
}
