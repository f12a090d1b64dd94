//! The threads that start processes.
//!
//! They live as long as the host: a parent-death signal follows the *thread* that spawned, so a
//! thread of a pool that ends when idle would take its children with it. There are a few, so that
//! one program on a stalled disk does not keep all others from starting.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::{io, thread};

use rustix::process::Pid;
use tokio::sync::oneshot;

use super::orphans::Orphans;
use super::spawn::{self, SpawnError, SpawnRequest, Spawned, Stack, Surroundings};
use super::warden::Warden;

struct Job {
    request: SpawnRequest,
    done: oneshot::Sender<Result<Spawned, SpawnError>>,
}

/// A handle to the spawning threads; they end when the last is dropped.
#[derive(Debug, Clone)]
pub(super) struct Spawner {
    jobs: Arc<Jobs>,
}

/// What is still to be started. Each new job wakes one thread and no other.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// The side of the queue that jobs are put in.
#[derive(Debug)]
struct Jobs(Arc<Queue>);

impl Drop for Jobs {
    fn drop(&mut self) {
        lock(&self.0.state).closed = true;
        self.0.filled.notify_all();
    }
}

impl Queue {
    fn push(&self, job: Job) {
        lock(&self.state).jobs.push_back(job);
        self.filled.notify_one();
    }

    /// Waits for a job; `None` once there will be no more.
    fn pop(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.filled.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Job")
    }
}

impl Spawner {
    pub(super) fn start(
        threads: usize,
        warden: &Warden,
        orphans: &Orphans,
        nofile: Option<libc::rlimit>,
    ) -> io::Result<Self> {
        let queue = Arc::<Queue>::default();
        let jobs = Jobs(queue.clone());
        for n in 0..threads {
            let mut stack = Stack::new()?;
            let (queue, warden, orphans) = (queue.clone(), warden.clone(), orphans.clone());
            thread::Builder::new().name(format!("exec-spawn-{n}")).spawn(move || {
                while let Some(Job { request, done }) = queue.pop() {
                    // If whoever asked has gone, nothing is started, or nothing is left running.
                    if !done.is_closed()
                        && let Err(Ok(spawned)) =
                            done.send(spawn(&request, &warden, &orphans, nofile, &mut stack))
                    {
                        if let Some(pid) = Pid::from_raw(spawned.pid) {
                            warden.reaped(pid);
                            orphans.reaped(pid);
                        }
                        spawned.kill_and_reap();
                    }
                }
            })?;
        }
        Ok(Self { jobs: Arc::new(jobs) })
    }

    /// Starts a process on one of the threads.
    pub(super) async fn spawn(&self, request: SpawnRequest) -> Result<Spawned, SpawnError> {
        let (done, answer) = oneshot::channel();
        let gone = || SpawnError::System {
            step: "spawning thread",
            source: io::Error::other("the host is shutting down"),
        };
        self.jobs.0.push(Job { request, done });
        answer.await.map_err(|_| gone())?
    }
}

fn spawn(
    request: &SpawnRequest,
    warden: &Warden,
    orphans: &Orphans,
    nofile: Option<libc::rlimit>,
    stack: &mut Stack,
) -> Result<Spawned, SpawnError> {
    let setup = |source| SpawnError::System { step: "roster", source };
    let entry = warden.entry().map_err(setup)?;
    if let Some(entry) = &entry {
        entry.place.set_tidies_up(request.tidies_up);
    }
    let surroundings = Surroundings { place: entry.as_ref().map(|entry| &entry.place), nofile };
    orphans.starting(request.group);
    let spawned = spawn::spawn(request, surroundings, stack);
    let pid = spawned.as_ref().ok().and_then(|spawned| Pid::from_raw(spawned.pid));
    orphans.started(request.group, pid);
    let spawned = spawned?;
    if let Some(entry) = entry {
        warden.started(spawned.pid, entry);
    }
    Ok(spawned)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
