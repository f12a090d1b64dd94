//! From a [`Command`] to a running process: an order, carried out by a [keeper](super::keeper).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use codex_exec_server_protocol::ErrorKind;
use parking_lot::Mutex;

use super::command::Command;
use super::keeper::{
    Keeper, LongOrder, MAX_INLINE_ORDER, MemoryPool, Order, OrderLocation, OwnKeeper, Parent,
    UnstartedKeeper,
};
use super::leftovers::Group;
use super::warden::Warden;

/// What a child is started with besides its [`Command`].
#[derive(Debug)]
pub(super) struct SpawnRequest {
    /// With whom it is killed in the end.
    pub group: Group,
    /// What to execute.
    pub command: Command,
    /// Its descriptors 0, 1 and 2.
    pub stdio: [OwnedFd; 3],
    /// Descriptor 0 is a terminal, to be the controlling one.
    pub tty: bool,
    /// Further descriptors to pass: the first becomes 3, the second 4, and so on.
    pub pass: Vec<Arc<OwnedFd>>,
    /// It ends by itself when this process does, and has to tidy up before.
    pub cleans_up: bool,
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
    /// Something before that failed.
    #[error("cannot start a process ({step}): {source}")]
    System {
        /// What was attempted.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl SpawnError {
    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Cwd(error) => ErrorKind::of_chdir(error),
            Self::Exec(error) => ErrorKind::of_exec(error),
            Self::System { source, .. } => ErrorKind::of_system(source),
        }
    }
}

/// Who starts processes. Clones are the same.
#[derive(Debug, Clone)]
pub(super) enum Spawner {
    /// This process itself.
    Own(Arc<Mutex<MemoryPool>>),
    /// The warden.
    Warden(Warden),
}

impl Spawner {
    /// Starts a process, and waits until it executes its program. If this is dropped meanwhile, nothing
    /// is left of it.
    pub(super) async fn spawn(&self, request: SpawnRequest) -> Result<Keeper, SpawnError> {
        let system = |source| SpawnError::System { step: "keeper", source };
        let SpawnRequest { command, stdio, tty, pass, cleans_up, .. } = request;
        let (order, socket) = Order::new(&command, stdio, pass, tty, cleans_up).map_err(system)?;
        let parent = match self {
            Self::Own(memory_pool) => {
                Parent::Own { _own: start_here(memory_pool, &order).map_err(system)? }
            }
            Self::Warden(warden) => {
                warden.send_order(&order).await.map_err(system)?;
                Parent::Warden { warden: warden.clone(), known: None }
            }
        };
        // The keeper has its own; whoever waits for the ends of these must not wait for ours.
        drop(order);
        Keeper::wait_started(socket, parent, cleans_up).await
    }
}

fn start_here(memory_pool: &Mutex<MemoryPool>, order: &Order) -> io::Result<OwnKeeper> {
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
    Ok(OwnKeeper::new(unstarted.start(location, &order.descriptors)?))
}
