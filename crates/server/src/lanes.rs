//! Threads that each serve their share of the connections, from the socket to the process.
//!
//! A keystroke passes a reader, the owner of a process and a writer. On one thread, that is three
//! turns of a loop; spread over the threads of a pool, each step wakes another thread, which costs
//! more than everything else about the keystroke. So a connection stays on the lane it was put on,
//! with everything that it starts; what takes long (files, searches, the starting of a program) runs
//! on threads made for that.
//!
//! Files and the like have a pool of their own (`codex_exec_host::pool`). What little is left to a
//! lane's own pool, such as the lookup of a host name, finds a thread there however few the system
//! gives: the first is made with the lane, and stays.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{io, thread};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Threads of a lane's own pool. They are few, because they stay.
const BLOCKING_THREADS: usize = 64;

/// Longer than any server runs; the runtime adds it to the time of day.
const KEEP_ALIVE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The lanes of a listener. Dropped, they end with what is still on them.
#[derive(Debug)]
pub(crate) struct Lanes {
    handles: Vec<Handle>,
    next: AtomicUsize,
    _shutdown: DropGuard,
}

impl Lanes {
    /// So many threads; none means that whoever asks is served where they are.
    pub(crate) fn start(count: usize) -> io::Result<Self> {
        let shutdown = CancellationToken::new();
        let handles = (0..count).map(|n| lane(n, shutdown.clone())).collect::<io::Result<_>>()?;
        Ok(Self { handles, next: AtomicUsize::new(0), _shutdown: shutdown.drop_guard() })
    }

    /// The lane that is next in turn.
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
    // Without any thread the runtime would panic later, when one is needed and not to be had.
    drop(handle.spawn_blocking(|| ()));
    Ok(handle)
}
