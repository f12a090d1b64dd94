//! The threads that start processes.
//!
//! They live as long as the host: a parent-death signal follows the *thread* that spawned, so a
//! thread of a pool that ends when idle would take its children with it. There are a few, so that
//! one program on a stalled disk does not keep all others from starting.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, mpsc};
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
    jobs: mpsc::Sender<Job>,
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
        let (jobs, queue) = mpsc::channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for n in 0..threads {
            let mut stack = Stack::new()?;
            let (queue, warden, orphans) = (queue.clone(), warden.clone(), orphans.clone());
            thread::Builder::new().name(format!("exec-spawn-{n}")).spawn(move || {
                loop {
                    let job = lock(&queue).recv();
                    let Ok(Job { request, done }) = job else { break };
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
        Ok(Self { jobs })
    }

    /// Starts a process on one of the threads.
    pub(super) async fn spawn(&self, request: SpawnRequest) -> Result<Spawned, SpawnError> {
        let (done, answer) = oneshot::channel();
        let gone = || SpawnError::System {
            step: "spawning thread",
            source: io::Error::other("the host is shutting down"),
        };
        self.jobs.send(Job { request, done }).map_err(|_| gone())?;
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
    // Held while the child may write to it.
    let pipe = warden.pipe();
    let surroundings = Surroundings { warden: pipe.as_ref().map(AsRawFd::as_raw_fd), nofile };
    orphans.starting(request.group);
    let spawned = spawn::spawn(request, &surroundings, stack);
    let pid = spawned.as_ref().ok().and_then(|spawned| Pid::from_raw(spawned.pid));
    orphans.started(request.group, pid);
    let spawned = spawned?;
    warden.started(spawned.pid, pipe.as_ref());
    Ok(spawned)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
