//! The warden: a small process that outlives a killed server just long enough to take along what
//! the server had started.
//!
//! `kill -9` leaves a server no last word, and a parent-death signal reaches only direct children:
//! the compiler below the make below the shell would go on. So children announce themselves on a
//! pipe before they execute anything, the server takes them back when they are reaped, and when the
//! pipe ends the warden kills every tree that is still announced, and exits.
//!
//! The warden is this same executable, re-entered (see [`main_if_reentered`]), in a session of its
//! own, so that a signal to the server's process group does not take both.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, thread};

use rustix::process::Pid;

use super::descendants;
use super::orphans::Orphans;
use super::spawner::WardenPipe;

/// The word that makes the executable a warden.
const WORD: &str = "__exec-warden";

/// Becomes the warden and never returns, if that is what this process was started as.
///
/// To be called first thing in `main`, before any thread exists.
pub fn main_if_reentered() {
    if std::env::args_os().nth(1).is_some_and(|word| word == WORD) {
        watch(io::stdin().lock());
        std::process::exit(0);
    }
}

/// Follows the announcements to their end, then kills what is left.
fn watch(mut announcements: impl Read) {
    let mut alive = HashSet::new();
    let mut record = [0; size_of::<i32>()];
    while announcements.read_exact(&mut record).is_ok() {
        // A pid announces, its negative takes back.
        let pid = i32::from_ne_bytes(record);
        if pid > 0 {
            alive.insert(pid);
        } else {
            alive.remove(&pid.wrapping_neg());
        }
    }
    for pid in alive.into_iter().filter_map(Pid::from_raw) {
        // Only if it is what was announced: the leader of its own session.
        if rustix::process::getsid(Some(pid)) == Ok(pid) {
            descendants::kill_tree(pid);
        }
    }
}

/// The server's side: the pipe, and who is announced on it.
#[derive(Debug, Clone)]
pub(super) struct Warden {
    pipe: WardenPipe,
    alive: Arc<Mutex<HashSet<i32>>>,
}

impl Warden {
    /// No warden; children get a parent-death signal.
    pub(super) fn none() -> Self {
        Self { pipe: WardenPipe::default(), alive: Arc::default() }
    }

    /// Starts a warden, and another whenever it should die.
    pub(super) fn start(executable: &Path, orphans: &Orphans) -> io::Result<Self> {
        let warden = Self::none();
        let child = warden.launch(executable, orphans)?;
        let (keeper, executable, orphans) =
            (warden.clone(), executable.to_owned(), orphans.clone());
        thread::Builder::new()
            .name("exec-warden".into())
            .spawn(move || keeper.keep(child, &executable, &orphans))?;
        Ok(warden)
    }

    pub(super) fn pipe(&self) -> &WardenPipe {
        &self.pipe
    }

    /// A process has announced itself.
    pub(super) fn started(&self, pid: i32) {
        lock(&self.alive).insert(pid);
    }

    /// A process was reaped: its pid may be another's from now on.
    pub(super) fn reaped(&self, pid: i32) {
        lock(&self.alive).remove(&pid);
        let pipe = lock(&self.pipe).clone();
        if let Some(pipe) = pipe {
            let _ = rustix::io::write(&*pipe, &(-pid).to_ne_bytes());
        }
    }

    /// Lets the warden end without killing anything.
    pub(super) fn dismiss(&self) {
        for pid in lock(&self.alive).drain() {
            let pipe = lock(&self.pipe).clone();
            if let Some(pipe) = pipe {
                let _ = rustix::io::write(&*pipe, &(-pid).to_ne_bytes());
            }
        }
        *lock(&self.pipe) = None;
    }

    fn launch(&self, executable: &Path, orphans: &Orphans) -> io::Result<Child> {
        let (reader, writer) = io::pipe()?;
        let mut command = Command::new(executable);
        command
            .arg0("codex-exec-warden")
            .arg(WORD)
            .env_clear()
            .current_dir("/")
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // SAFETY: `setsid` is a bare system call, allowed between fork and exec.
        unsafe { command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into)) };
        let child = command.spawn()?;
        if let Some(pid) = Pid::from_raw(child.id().cast_signed()) {
            orphans.ignore(pid);
        }
        // A warden that is stopped must stop neither us nor a child that announces itself.
        rustix::io::ioctl_fionbio(&writer, true)?;
        // Those who announced themselves to the one before.
        let mut writer = writer;
        let alive = lock(&self.alive);
        for pid in alive.iter() {
            writer.write_all(&pid.to_ne_bytes())?;
        }
        *lock(&self.pipe) = Some(Arc::new(OwnedFd::from(writer)));
        drop(alive);
        Ok(child)
    }

    /// Waits for the warden to end and starts another, until dismissed.
    fn keep(&self, mut child: Child, executable: &Path, orphans: &Orphans) {
        loop {
            let _ = child.wait();
            if lock(&self.pipe).is_none() || !fs::exists(executable).unwrap_or(false) {
                return;
            }
            tracing::warn!("the warden has died; starting another");
            match self.launch(executable, orphans) {
                Ok(next) => child = next,
                Err(error) => {
                    tracing::error!(%error, "cannot start a warden");
                    *lock(&self.pipe) = None;
                    return;
                }
            }
            // Something that kills it at once must not make us spin.
            thread::sleep(Duration::from_millis(100));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
