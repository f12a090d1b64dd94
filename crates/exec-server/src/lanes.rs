//! Threads that each serve their share of the connections, from the socket to the process.
//!
//! A keystroke passes a reader, the owner of a process and a writer. On one thread, that is three
//! turns of a loop; spread over the threads of a pool, each step wakes another thread, which costs
//! more than everything else about the keystroke. So a connection stays on the lane it was put on,
//! with everything that it starts; what takes long (files, searches, the starting of a program) runs
//! on threads made for that.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::{io, thread};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

/// The lanes of a listener. Dropped, they end with what is still on them.
#[derive(Debug)]
pub(crate) struct Lanes {
    handles: Vec<Handle>,
    next: AtomicUsize,
    _end: DropGuard,
}

impl Lanes {
    /// So many threads; none means that whoever asks is served where they are.
    pub(crate) fn start(count: usize) -> io::Result<Self> {
        let end = CancellationToken::new();
        let handles = (0..count).map(|n| lane(n, end.clone())).collect::<io::Result<_>>()?;
        Ok(Self { handles, next: AtomicUsize::new(0), _end: end.drop_guard() })
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

fn lane(n: usize, end: CancellationToken) -> io::Result<Handle> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .thread_name(format!("exec-lane-{n}-blocking"))
        .build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new().name(format!("exec-lane-{n}")).spawn(move || {
        runtime.block_on(end.cancelled());
        runtime.shutdown_background();
    })?;
    Ok(handle)
}
