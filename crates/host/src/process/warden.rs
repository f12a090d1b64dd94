//! The warden: a small process that outlives a killed server just long enough to take along what
//! the server had started.
//!
//! `kill -9` leaves a server no last word, and a parent-death signal reaches only direct children:
//! the compiler below the make below the shell would go on. So children announce themselves on a
//! pipe before they execute anything, the server announces what they leave behind, takes back
//! whoever is reaped, and when the pipe ends the warden kills every tree that is still announced,
//! and exits.
//!
//! The pipe does not end before a child that has announced itself has its session: until it has
//! closed its descriptors, which comes after that, it holds the pipe too.
//!
//! The warden is this same executable, re-entered (see [`main_if_reentered`]), in a session of its
//! own, so that a signal to the server's process group does not take both.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, thread};

use rustix::process::Pid;

use super::descendants::{self, Stat};
use super::orphans::Orphans;

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

/// One announcement: short enough for a pipe to take it whole or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    /// A pid announces, its negative takes back.
    pid: i32,
    /// When an orphan was started; 0 for a process that leads a session of its own.
    start: u64,
}

impl Record {
    const LEN: usize = 16;

    /// A process that is about to lead a session of its own.
    pub(super) fn started(pid: i32) -> Self {
        Self { pid, start: 0 }
    }

    /// A process that is being reaped.
    pub(super) fn reaped(pid: i32) -> Self {
        Self { pid: -pid, start: 0 }
    }

    /// Allocates nothing: a child that shares our memory calls it.
    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&self.pid.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.start.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let [a, b, c, d, _, _, _, _, start @ ..] = bytes;
        Self { pid: i32::from_ne_bytes([a, b, c, d]), start: u64::from_ne_bytes(start) }
    }

    fn write_to(self, pipe: &OwnedFd) {
        // A warden that has died is replaced, and its successor told all of it; one that does not
        // read must not stop us.
        let _ = rustix::io::write(pipe, &self.to_bytes());
    }
}

/// Follows the announcements to their end, then kills what is left.
fn watch(mut announcements: impl Read) {
    let mut alive = HashMap::new();
    let mut record = [0; Record::LEN];
    while announcements.read_exact(&mut record).is_ok() {
        let Record { pid, start } = Record::from_bytes(record);
        if pid > 0 {
            alive.insert(pid, start);
        } else {
            alive.remove(&pid.wrapping_neg());
        }
    }
    for (&pid, &start) in &alive {
        let Some(pid) = Pid::from_raw(pid) else { continue };
        // Only if it is what was announced, and not a later process of the same number.
        let same = match start {
            0 => Stat::of(pid).is_some_and(|stat| stat.session == Some(pid)),
            start => Stat::of(pid).is_some_and(|stat| stat.start == start),
        };
        if same {
            descendants::kill_tree(pid);
        }
    }
    // What was left behind too late for the server to hear of it, but stayed in its session.
    for pid in everybody() {
        let session = Stat::of(pid).and_then(|stat| stat.session);
        if session.is_some_and(|id| alive.get(&id.as_raw_nonzero().get()) == Some(&0)) {
            descendants::kill_tree(pid);
        }
    }
}

fn everybody() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// Where announcements are written; replaced when the warden is.
pub(super) type Pipe = Arc<OwnedFd>;

/// The server's side: the pipe, and who is announced on it.
#[derive(Debug, Clone, Default)]
pub(super) struct Warden {
    pipe: Arc<Mutex<Option<Pipe>>>,
    /// Pid and start. Locked before `pipe`, and while `pipe` is replaced.
    alive: Arc<Mutex<HashMap<i32, u64>>>,
}

impl Warden {
    /// No warden; children get a parent-death signal.
    pub(super) fn none() -> Self {
        Self::default()
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

    /// Where a child announces itself.
    pub(super) fn pipe(&self) -> Option<Pipe> {
        lock(&self.pipe).clone()
    }

    /// A process has announced itself on this pipe, which may not be the newest any more.
    pub(super) fn started(&self, pid: i32, on: Option<&Pipe>) {
        let mut alive = lock(&self.alive);
        alive.insert(pid, 0);
        if let Some(newest) = self.pipe()
            && !on.is_some_and(|on| Arc::ptr_eq(on, &newest))
        {
            Record::started(pid).write_to(&newest);
        }
    }

    /// A process became ours when the one that started it died.
    pub(super) fn adopted(&self, pid: Pid, start: u64) {
        let pid = pid.as_raw_nonzero().get();
        lock(&self.alive).insert(pid, start);
        self.tell(Record { pid, start });
    }

    /// A process is being reaped: its pid may be another's from now on.
    pub(super) fn reaped(&self, pid: Pid) {
        let pid = pid.as_raw_nonzero().get();
        lock(&self.alive).remove(&pid);
        self.tell(Record::reaped(pid));
    }

    /// Lets the warden end without killing anything.
    pub(super) fn dismiss(&self) {
        let mut alive = lock(&self.alive);
        for (pid, _) in alive.drain() {
            self.tell(Record::reaped(pid));
        }
        *lock(&self.pipe) = None;
    }

    fn tell(&self, record: Record) {
        if let Some(pipe) = self.pipe() {
            record.write_to(&pipe);
        }
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
        if let Some(pid) = pid_of(&child) {
            orphans.ignore(pid);
        }
        // A warden that is stopped must stop neither us nor a child that announces itself.
        rustix::io::ioctl_fionbio(&writer, true)?;
        // Those who were announced to the one before.
        let mut writer = writer;
        let alive = lock(&self.alive);
        for (&pid, &start) in alive.iter() {
            writer.write_all(&Record { pid, start }.to_bytes())?;
        }
        *lock(&self.pipe) = Some(Arc::new(OwnedFd::from(writer)));
        drop(alive);
        Ok(child)
    }

    /// Waits for the warden to end and starts another, until dismissed.
    fn keep(&self, mut child: Child, executable: &Path, orphans: &Orphans) {
        loop {
            let _ = child.wait();
            if let Some(pid) = pid_of(&child) {
                orphans.ignore_no_more(pid);
            }
            if self.pipe().is_none() || !fs::exists(executable).unwrap_or(false) {
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

fn pid_of(child: &Child) -> Option<Pid> {
    Pid::from_raw(child.id().cast_signed())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_went() {
        for record in [
            Record::started(1),
            Record::reaped(32_768),
            Record { pid: i32::MAX, start: u64::MAX - 1 },
        ] {
            assert_eq!(Record::from_bytes(record.to_bytes()), record);
        }
    }
}
