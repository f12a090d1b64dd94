//! Lanes: event-loop threads that each serve a share of the connections, from the socket to the
//! process.
//!
//! A keystroke passes a reader, the owner of a process and a writer. On one thread, that is three
//! turns of a loop; spread over the threads of a pool, each step wakes another thread, which costs
//! more than everything else about the keystroke. So a connection stays on its lane, with everything
//! that it starts; long work (files, searches, starting a program) runs on threads made for that.
//!
//! File work has its own pool (`codex_exec_host::pool`). Other blocking work, such as the lookup of a
//! host name, uses the lane's runtime pool. The lane starts that pool's first thread at once and keeps
//! it, so the work finds a thread even if the system gives no more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{io, thread};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Maximum threads of a lane's runtime pool. They are few, because they never exit.
const BLOCKING_THREADS: usize = 64;

/// Longer than any server runs; `Duration::MAX` would overflow where the runtime adds it to the time.
const KEEP_ALIVE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The lanes of a listener. Dropping this ends them and the tasks on them.
#[derive(Debug)]
pub(crate) struct Lanes {
    handles: Vec<Handle>,
    next: AtomicUsize,
    _shutdown: DropGuard,
}

impl Lanes {
    /// Starts `count` threads; 0 runs everything on the caller's runtime.
    pub(crate) fn start(count: usize) -> io::Result<Self> {
        let shutdown = CancellationToken::new();
        let handles = (0..count).map(|n| lane(n, shutdown.clone())).collect::<io::Result<_>>()?;
        Ok(Self { handles, next: AtomicUsize::new(0), _shutdown: shutdown.drop_guard() })
    }

    /// The next lane, round robin.
    pub(crate) fn next(&self) -> Handle {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        match self.handles.len() {
            0 => Handle::current(),
            count => self.handles[next % count].clone(),
        }
    }
}

fn lane(n: usize, shutdown: CancellationToken) -> io::Result<Handle> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .thread_name(format!("exec-lane-{n}-blocking"))
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(KEEP_ALIVE)
        .build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new().name(format!("exec-lane-{n}")).spawn(move || {
        runtime.block_on(shutdown.cancelled());
        runtime.shutdown_background();
    })?;
    // Without a thread the runtime would panic later, if it needs one and the system gives none.
    drop(handle.spawn_blocking(|| ()));
    Ok(handle)
}
