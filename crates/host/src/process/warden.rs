//! The warden: a small process that outlives a killed server just long enough to take along what
//! the server had started.
//!
//! `kill -9` leaves a server no last word, and a parent-death signal reaches only direct children:
//! the compiler below the make below the shell would go on. So server and warden share a table of
//! who is alive. Children enter themselves before they execute anything, the server enters what
//! they leave behind and takes out whoever is reaped. Nobody is woken for that: the warden waits for
//! the end of a pipe that nothing is written to and only the server holds. When it ends, the warden
//! kills every tree that is still in the table, and exits.
//!
//! A sandbox hears of the server's end itself, kills what is inside and removes what it has put into
//! the file system. It is given the time for that, and killed only if it takes too long.
//!
//! The pipe does not end before a child that has entered itself has its session: until it has
//! closed its descriptors, which comes after that, it holds the pipe too.
//!
//! The warden is this same executable, re-entered (see [`main_if_reentered`]), in a session of its
//! own, so that a signal to the server's process group does not take both.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use codex_linux_sandbox::Executable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::descendants::{self, Stat};
use super::orphans::Orphans;
use super::roster::{Entered, Place, Roster};

/// The word that makes the executable a warden.
const WORD: &str = "__exec-warden";

/// How long sandboxes may take to tidy up: much longer than they do on a busy machine.
const TIDYING: Duration = Duration::from_secs(10);

/// Becomes the warden and never returns, if that is what this process was started as.
///
/// To be called first thing in `main`, before any thread exists.
pub fn main_if_reentered() {
    if std::env::args_os().nth(1).is_some_and(|word| word == WORD) {
        // Executed by a descriptor, it would be called by that number.
        let _ = rustix::thread::set_name(c"codex-warden");
        watch(io::stdin().lock(), io::stdout().as_fd());
        std::process::exit(0);
    }
}

/// Waits for the end of the server, then kills what is left of it.
fn watch(mut lifeline: impl Read, roster: impl AsFd) {
    let _ = io::copy(&mut lifeline, &mut io::sink());
    let Ok(entered) = Roster::read(roster) else { return };
    let (tidying, others): (Vec<_>, Vec<_>) = entered.into_iter().partition(|one| one.tidies_up);
    kill(&others);
    wait_for(&tidying, Instant::now() + TIDYING);
    kill(&tidying);
}

/// Kills these with all they have started.
fn kill(entered: &[Entered]) {
    for one in entered {
        if let Some(pid) = still(one) {
            descendants::kill_tree(pid);
        }
    }
    // What was left behind too late for the server to hear of it, but stayed in its session.
    let leaders: HashSet<i32> =
        entered.iter().filter(|one| one.start == 0).map(|one| one.pid).collect();
    if leaders.is_empty() {
        return;
    }
    for pid in everybody() {
        let session = Stat::of(pid).and_then(|stat| stat.session);
        if session.is_some_and(|id| leaders.contains(&id.as_raw_nonzero().get())) {
            descendants::kill_tree(pid);
        }
    }
}

/// Its pid, if that is still who was entered, and not a later process of the same number.
fn still(entered: &Entered) -> Option<Pid> {
    let pid = Pid::from_raw(entered.pid)?;
    let stat = Stat::of(pid)?;
    let same = match entered.start {
        0 => stat.session == Some(pid),
        start => stat.start == start,
    };
    same.then_some(pid)
}

/// Waits until all of these have exited, or until then.
fn wait_for(entered: &[Entered], deadline: Instant) {
    for one in entered {
        let Some(pid) = Pid::from_raw(one.pid) else { continue };
        let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if still(one).is_none() {
            continue;
        }
        // Somebody may have stopped it.
        let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::CONT);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                _ => break,
            }
        }
    }
}

fn everybody() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// The server's side. Clones are handles to the same one.
#[derive(Debug, Clone, Default)]
pub(super) struct Warden(Option<Arc<Watched>>);

#[derive(Debug)]
struct Watched {
    roster: Roster,
    /// What ends with the server. `None` once the warden is dismissed, or cannot be had.
    lifeline: Mutex<Option<Arc<OwnedFd>>>,
    places: Mutex<HashMap<i32, Place>>,
}

/// What a child needs to enter itself: its place, and the lifeline, held until it has done so.
#[derive(Debug)]
pub(super) struct Entry {
    pub place: Place,
    _lifeline: Option<Arc<OwnedFd>>,
}

impl Warden {
    /// No warden; children get a parent-death signal.
    pub(super) fn none() -> Self {
        Self::default()
    }

    /// Starts a warden, and another whenever it should die.
    pub(super) fn start(executable: &Path, orphans: &Orphans) -> io::Result<Self> {
        // Whoever is started later is the same, whatever has taken its name.
        let executable = Executable::open(executable)?;
        let watched = Arc::new(Watched {
            roster: Roster::new()?,
            lifeline: Mutex::default(),
            places: Mutex::default(),
        });
        let child = watched.launch(&executable, orphans)?;
        let (keeper, executable, orphans) = (watched.clone(), executable.clone(), orphans.clone());
        thread::Builder::new()
            .name("exec-warden".into())
            .spawn(move || keeper.keep(child, &executable, &orphans))?;
        Ok(Self(Some(watched)))
    }

    /// A place for a child to enter itself at; none without a warden.
    pub(super) fn entry(&self) -> io::Result<Option<Entry>> {
        let Some(watched) = &self.0 else { return Ok(None) };
        let place = watched.roster.reserve()?;
        Ok(Some(Entry { place, _lifeline: watched.lifeline() }))
    }

    /// The child has entered itself, and runs.
    pub(super) fn started(&self, pid: i32, entry: Entry) {
        if let Some(watched) = &self.0 {
            lock(&watched.places).insert(pid, entry.place);
        }
    }

    /// A process that was started ends by itself when we do, and has to tidy up before.
    pub(super) fn tidies_up(&self, pid: Pid) {
        let Some(watched) = &self.0 else { return };
        if let Some(place) = lock(&watched.places).get(&pid.as_raw_nonzero().get()) {
            place.set_tidies_up(true);
        }
    }

    /// A process became ours when the one that started it died.
    pub(super) fn adopted(&self, pid: Pid, start: u64) {
        let Some(watched) = &self.0 else { return };
        let pid = pid.as_raw_nonzero().get();
        match watched.roster.reserve() {
            Ok(place) => {
                place.enter(pid, start);
                lock(&watched.places).insert(pid, place);
            }
            Err(error) => tracing::error!(%error, pid, "an orphan could outlive this server"),
        }
    }

    /// A process is being reaped: its pid may be another's from now on.
    pub(super) fn reaped(&self, pid: Pid) {
        if let Some(watched) = &self.0 {
            lock(&watched.places).remove(&pid.as_raw_nonzero().get());
        }
    }

    /// Lets the warden end. Whoever is in the table still is being killed at this moment, by a thread
    /// that may not come to its end if we do; the warden sees to it.
    pub(super) fn dismiss(&self) {
        if let Some(watched) = &self.0 {
            *lock(&watched.lifeline) = None;
        }
    }
}

impl Watched {
    fn lifeline(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.lifeline).clone()
    }

    fn launch(&self, executable: &Executable, orphans: &Orphans) -> io::Result<Child> {
        let (reader, writer) = io::pipe()?;
        let mut command = Command::new(executable.name_after_fork());
        command
            .arg0("codex-exec-warden")
            .arg(WORD)
            .env_clear()
            .current_dir("/")
            .stdin(reader)
            .stdout(self.roster.shared()?)
            .stderr(Stdio::null());
        // SAFETY: `setsid` is a bare system call, allowed between fork and exec.
        unsafe { command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into)) };
        let child = command.spawn()?;
        if let Some(pid) = pid_of(&child) {
            orphans.ignore(pid);
        }
        *lock(&self.lifeline) = Some(Arc::new(OwnedFd::from(writer)));
        Ok(child)
    }

    /// Waits for the warden to end and starts another, until dismissed.
    fn keep(&self, mut child: Child, executable: &Executable, orphans: &Orphans) {
        loop {
            let _ = child.wait();
            if let Some(pid) = pid_of(&child) {
                orphans.ignore_no_more(pid);
            }
            if self.lifeline().is_none() {
                return;
            }
            tracing::warn!("the warden has died; starting another");
            match self.launch(executable, orphans) {
                Ok(next) => child = next,
                Err(error) => {
                    tracing::error!(%error, "cannot start a warden");
                    *lock(&self.lifeline) = None;
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
