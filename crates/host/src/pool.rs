//! Threads for work that may block: files, policies, large messages.
//!
//! Invariant: the pool runs all work it accepts, and the caller that awaits it learns the outcome. The
//! pool starts `MIN_THREADS` threads up front and keeps them, so work waits, and is not refused, when
//! the system allows no more threads. While all threads are busy the pool adds more, up to
//! `MAX_THREADS`; an added thread ends after `IDLE_TIMEOUT` without work. A panic ends the work, not
//! the thread.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;

/// Threads that never end.
const MIN_THREADS: usize = 4;

/// Upper limit of threads. Work may wait for a client that does not read (a streamed search), so this
/// is far more than the number of processors.
const MAX_THREADS: usize = 512;

/// How long a thread beyond [`MIN_THREADS`] waits for work before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

static POOL: Pool = Pool::new();

/// Why work produced no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// The work panicked.
    #[error("the work panicked")]
    Panicked,
    /// The pool has no thread and the system allows no new one.
    #[error("the system allows this process no more threads")]
    NoThreads,
}

/// Starts the [`MIN_THREADS`] permanent threads of this process's pool, unless they run already. Call
/// it when a server starts, while the system still allows threads.
pub(crate) fn start_threads() -> io::Result<()> {
    POOL.start_threads()
}

/// Runs blocking work on a pool thread. The work runs to completion even if this future is dropped.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkError> {
    POOL.run(work).await
}

/// Runs blocking work without waiting for it.
pub(crate) fn spawn_detached(work: impl FnOnce() + Send + 'static) {
    POOL.submit(Box::new(work));
}

type Work = Box<dyn FnOnce() + Send>;

struct Pool {
    state: Mutex<State>,
    /// Notified for each piece of queued work.
    queued: Condvar,
}

struct State {
    queue: VecDeque<Work>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
}

impl Pool {
    const fn new() -> Self {
        let state = State { queue: VecDeque::new(), threads: 0, idle: 0 };
        Self { state: Mutex::new(state), queued: Condvar::new() }
    }

    fn start_threads(&'static self) -> io::Result<()> {
        let mut state = self.lock();
        while state.threads < MIN_THREADS {
            self.grow(&mut state)?;
        }
        Ok(())
    }

    fn run<T: Send + 'static>(
        &'static self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, WorkError>> + Send {
        let (done, result) = oneshot::channel();
        let submitted = self.submit(Box::new(move || {
            // The receiver is gone if the caller stopped waiting.
            let _ = done.send(work());
        }));
        async move {
            if !submitted {
                return Err(WorkError::NoThreads);
            }
            // A panic drops the sender.
            result.await.map_err(|_| WorkError::Panicked)
        }
    }

    /// Queues work; false if there is no thread to run it.
    fn submit(&'static self, work: Work) -> bool {
        let mut state = self.lock();
        state.queue.push_back(work);
        if state.queue.len() > state.idle && state.threads < MAX_THREADS {
            let grown = self.grow(&mut state);
            if grown.is_err() && state.threads == 0 {
                let refused = state.queue.pop_back();
                // Drop outside the lock: destructors in the work may use the pool.
                drop(state);
                drop(refused);
                return false;
            }
        }
        drop(state);
        self.queued.notify_one();
        true
    }

    fn grow(&'static self, state: &mut State) -> io::Result<()> {
        let permanent = state.threads < MIN_THREADS;
        thread::Builder::new()
            .name("exec-blocking".into())
            .spawn(move || self.run_thread(permanent))?;
        state.threads += 1;
        Ok(())
    }

    /// Body of a pool thread.
    fn run_thread(&self, permanent: bool) {
        while let Some(work) = self.next(permanent) {
            // The panic hook has reported the panic; the caller gets it as an error.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }

    /// Waits for work; `None` if this thread should end.
    fn next(&self, permanent: bool) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.queue.pop_front() {
                return Some(work);
            }
            state.idle += 1;
            let idle_for_long = if permanent {
                self.queued.wait(&mut state);
                false
            } else {
                self.queued.wait_for(&mut state, IDLE_TIMEOUT).timed_out()
            };
            state.idle -= 1;
            if idle_for_long && state.queue.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Barrier};

    #[tokio::test]
    async fn panic_is_an_error_and_keeps_the_thread() {
        static POOL: Pool = Pool::new();
        POOL.start_threads().unwrap();
        for _ in 0..2 * MIN_THREADS {
            let panicked = POOL.run(|| -> u8 { panic!("on purpose") }).await;
            assert_eq!(panicked, Err(WorkError::Panicked));
        }
        assert!(POOL.lock().threads >= MIN_THREADS);
        assert_eq!(POOL.run(|| 7).await, Ok(7));
    }

    #[tokio::test]
    async fn work_that_waits_for_other_work_gets_a_thread() {
        static POOL: Pool = Pool::new();
        let count = 3 * MIN_THREADS;
        let together = Arc::new(Barrier::new(count));
        let all: Vec<_> = (0..count)
            .map(|_| {
                let together = together.clone();
                POOL.run(move || together.wait().is_leader())
            })
            .collect();
        let mut leaders = 0;
        for one in all {
            leaders += usize::from(one.await.unwrap());
        }
        assert_eq!(leaders, 1);
    }

    #[tokio::test]
    async fn work_runs_though_its_future_is_dropped() {
        static POOL: Pool = Pool::new();
        let (ran, receiver) = oneshot::channel();
        drop(POOL.run(move || ran.send(())));
        receiver.await.unwrap();
    }
}
