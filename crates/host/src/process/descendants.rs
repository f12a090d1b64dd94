//! Kills a process with all its descendants, including those that left its group.
//!
//! Everything that a program starts is below its [keeper](super::keeper) in the process tree, daemons
//! included. A tree that still forks cannot be walked, so this code stops every process it finds until
//! it finds no new one, and then kills them. It repeats that until the keeper has ended, which it does
//! when no descendant is left.
//!
//! A process that forks and exits in a loop is gone before it can be signalled. So the keeper is
//! stopped meanwhile: it reaps nothing, the pids and group ids of exited children stay reserved, and
//! whole groups can be killed, which no fork escapes. If this process is killed while the keeper is
//! stopped, the kernel resumes it by its parent-death signal.
//!
//! Invariant: no pid is signalled that may have been reused. A stopped keeper reaps no child; any other
//! descendant is signalled through a pidfd that was opened before it was verified as a descendant.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::keeper::{CLEANUP_TIMEOUT, KeeperHandle};

/// Passes over the tree before it is killed as far as it is known. Each pass stops all processes it
/// finds, so only those that fork faster than we read survive one.
const MAX_PASSES: usize = 64;

/// Checks, 100 µs apart, whether a keeper has stopped.
const STOP_CHECKS: usize = 50;

/// How long to retry killing processes that cannot be signalled because they belong to another user.
const UNSIGNALLABLE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to retry killing processes that can be signalled and do not die: they wait for a device, or
/// fork faster than they can be killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// Kills everything below these keepers, which then end. Blocks.
pub(super) fn kill_all(mut keepers: Vec<KeeperHandle>) {
    let began = Instant::now();
    let mut signalled = began;
    let mut pause = 1;
    // A keeper kills only its children, over and over, but it goes on if this process cannot: without
    // descriptors, or after it has given up.
    keepers.iter().for_each(KeeperHandle::begin_kill);
    loop {
        keepers.retain(|keeper| !keeper.has_ended(0));
        for keeper in &keepers {
            let cleaning_up = keeper.cleaning_up.filter(|_| began.elapsed() < CLEANUP_TIMEOUT);
            if kill_descendants(keeper.pid, cleaning_up, || !keeper.has_ended(0)) {
                signalled = Instant::now();
            }
        }
        // A keeper without descendants ends at once.
        if keepers.iter().all(|keeper| keeper.has_ended(pause)) {
            return;
        }
        if signalled.elapsed() > UNSIGNALLABLE_TIMEOUT || began.elapsed() > KILL_TIMEOUT {
            let keepers: Vec<_> = keepers.iter().map(|keeper| keeper.pid).collect();
            tracing::warn!(?keepers, "cannot kill processes below these keepers");
            return;
        }
        pause = (pause * 2).min(100);
    }
}

/// Kills everything below `root` once, as far as it is seen; neither `root` itself nor `cleaning_up`, a
/// child of `root` that exits by itself once its descendants have. `is_root` is called after each use
/// of the root's pid, to check that it was not reused. Returns whether there was anything to kill.
pub(super) fn kill_descendants(
    root: Pid,
    cleaning_up: Option<Pid>,
    is_root: impl Fn() -> bool,
) -> bool {
    let mut killed = false;
    if let Some(stopped) = StoppedKeeper::stop(root, &is_root) {
        killed |= stopped.kill_children(cleaning_up);
    }
    let mut members = HashMap::new();
    for _ in 0..MAX_PASSES {
        if !stop_new_descendants(root, cleaning_up, &is_root, &mut members) {
            break;
        }
    }
    for (&pid, member) in &members {
        if Some(pid) == cleaning_up {
            // It may have been stopped.
            signal(member, Signal::CONT);
        } else {
            killed |= signal(member, Signal::KILL);
        }
    }
    killed
}

/// Kills the children of a child of ours, which then exits by itself.
pub(super) fn kill_children_of(cleaning_up: Pid) {
    for child in children(cleaning_up) {
        if let Some(child) = open_descendant(cleaning_up, Edge { parent: cleaning_up, child }) {
            signal(&child, Signal::KILL);
        }
    }
    // We have not reaped it, so the pid is still its own. It may have been stopped.
    let _ = rustix::process::kill_process(cleaning_up, Signal::CONT);
}

/// Kills the process group of a child that is not reaped meanwhile, unless it is our own group.
pub(super) fn kill_group_of(child: Pid) {
    let own = Stat::of(rustix::process::getpid()).and_then(|stat| stat.group);
    if let Some(group) = Stat::of(child).and_then(|stat| stat.group)
        && Some(group) != own
    {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

/// Resumes keepers below a warden that have been stopped.
pub(super) fn resume_keepers_of(warden: Pid) {
    for keeper in children(warden) {
        let Ok(pidfd) = rustix::process::pidfd_open(keeper, PidfdFlags::empty()) else { continue };
        let stat = Stat::of(keeper);
        if stat.is_some_and(|stat| stat.is_stopped && stat.parent == Some(warden)) {
            signal(&pidfd, Signal::CONT);
        }
    }
}

/// A stopped keeper, which reaps nothing. Dropping this resumes it, even if it had been stopped before.
struct StoppedKeeper {
    keeper: Pid,
    pidfd: OwnedFd,
    /// The keeper's own process group, which must survive.
    group: Option<Pid>,
}

impl StoppedKeeper {
    /// `None` if the keeper does not stop at once, for example because it is starting its program.
    fn stop(keeper: Pid, is_keeper: impl Fn() -> bool) -> Option<Self> {
        let pidfd = rustix::process::pidfd_open(keeper, PidfdFlags::empty()).ok()?;
        if !is_keeper() || !signal(&pidfd, Signal::STOP) {
            return None;
        }
        // From here on every way out resumes it.
        let mut stopped = Self { keeper, pidfd, group: None };
        stopped.group = Stat::of(keeper)?.group;
        for _ in 0..STOP_CHECKS {
            if Stat::of(keeper)?.is_stopped {
                return Some(stopped);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        None
    }

    /// Kills the keeper's children with their groups, and the orphans that it adopts by that, in a
    /// bounded number of passes; not `cleaning_up`. Returns whether there was any.
    fn kill_children(&self, cleaning_up: Option<Pid>) -> bool {
        let mut seen: HashSet<_> = cleaning_up.into_iter().collect();
        let spared = [self.group, cleaning_up.and_then(|cleaning_up| Stat::of(cleaning_up)?.group)];
        let mut killed = false;
        for _ in 0..MAX_PASSES {
            let mut new = children(self.keeper);
            #[cfg(test)]
            tests::delay_after_listing(new.iter().copied());
            new.retain(|pid| seen.insert(*pid));
            if new.is_empty() {
                break;
            }
            for &child in &new {
                killed |= rustix::process::kill_process(child, Signal::KILL).is_ok();
            }
            let groups: HashSet<Pid> =
                new.iter().filter_map(|&child| Stat::of(child)?.group).collect();
            for group in groups.into_iter().filter(|&group| !spared.contains(&Some(group))) {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
        }
        killed
    }
}

impl Drop for StoppedKeeper {
    fn drop(&mut self) {
        signal(&self.pidfd, Signal::CONT);
    }
}

/// Stops every descendant that is not in `members` yet, except `cleaning_up`; returns whether there was
/// any.
fn stop_new_descendants(
    root: Pid,
    cleaning_up: Option<Pid>,
    is_root: impl Fn() -> bool,
    members: &mut HashMap<Pid, OwnedFd>,
) -> bool {
    let found = edges(root);
    #[cfg(test)]
    tests::delay_after_listing(found.iter().map(|edge| edge.child));
    if !is_root() {
        return false;
    }
    let mut found_new = false;
    for edge in found {
        if members.contains_key(&edge.child) {
            continue;
        }
        found_new = true;
        if let Some(member) = open_descendant(root, edge) {
            if Some(edge.child) != cleaning_up {
                signal(&member, Signal::STOP);
            }
            members.insert(edge.child, member);
        }
    }
    found_new
}

/// Opens a pidfd of a descendant, if the pid is still that descendant's.
fn open_descendant(root: Pid, edge: Edge) -> Option<OwnedFd> {
    let opened = rustix::process::pidfd_open(edge.child, PidfdFlags::empty());
    // If its parent has died meanwhile, the root has adopted it.
    let parent = Stat::of(edge.child).and_then(|stat| stat.parent);
    let ours = parent.is_some_and(|parent| parent == edge.parent || parent == root);
    match opened {
        Ok(pidfd) => ours.then_some(pidfd),
        // Out of descriptors: accept a small risk rather than a survivor.
        Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) if ours => {
            let _ = rustix::process::kill_process(edge.child, Signal::KILL);
            None
        }
        Err(_) => None,
    }
}

fn signal(pidfd: &OwnedFd, signal: Signal) -> bool {
    match rustix::process::pidfd_send_signal(pidfd, signal) {
        Ok(()) => true,
        Err(Errno::SRCH) => false,
        Err(error) => {
            tracing::debug!(%error, "cannot signal a descendant");
            false
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Edge {
    parent: Pid,
    child: Pid,
}

/// All processes below `root` that one pass can see.
pub(super) fn descendants(root: Pid) -> Vec<Pid> {
    edges(root).into_iter().map(|edge| edge.child).collect()
}

/// The same with their parents; parents before their children.
fn edges(root: Pid) -> Vec<Edge> {
    let mut found: Vec<Edge> = Vec::new();
    let mut seen = HashSet::from([root]);
    let mut at = 0;
    let mut parent = root;
    loop {
        for child in children(parent) {
            if seen.insert(child) {
                found.push(Edge { parent, child });
            }
        }
        let Some(next) = found.get(at) else { break };
        parent = next.child;
        at += 1;
    }
    found
}

/// The children of all threads of a process; empty if it is gone.
pub(super) fn children(pid: Pid) -> Vec<Pid> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())) else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| parse_pids(&list))
        .collect()
}

fn parse_pids(list: &str) -> Vec<Pid> {
    list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    is_stopped: bool,
    parent: Option<Pid>,
    group: Option<Pid>,
}

impl Stat {
    /// `None` if the process is gone.
    fn of(pid: Pid) -> Option<Self> {
        let text = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Self::parse(&text)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // The name, in parentheses, may contain anything.
        let end = text.iter().rposition(|&b| b == b')')?;
        let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let is_stopped = fields.next()? == "T";
        // For a process that is being reaped, some are 0 or -1.
        let mut pid = || {
            let number: i32 = fields.next()?.parse().ok()?;
            Some(Pid::from_raw(number.max(0)))
        };
        Some(Self { is_stopped, parent: pid()?, group: pid()? })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::{Group, Launch, ProcessConfig, ProcessHost, StartError, environment};
    use super::*;

    /// Delays each pass over a tree until everything it has found has exited.
    static DELAY: AtomicBool = AtomicBool::new(false);

    pub(super) fn delay_after_listing(found: impl Iterator<Item = Pid>) {
        let runs = |pid: Pid| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
            stat.is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") T "))
        };
        if DELAY.load(Ordering::Relaxed) {
            for pid in found {
                while runs(pid) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    #[tokio::test]
    async fn processes_that_fork_and_exit_are_killed_by_their_group() {
        DELAY.store(true, Ordering::Relaxed);
        let directory = tempfile::tempdir().unwrap();
        let end = directory.path().join("end");
        // Each process starts the next and exits; the last one would create a file.
        let script = format!(
            "r() {{ if [ $1 -gt 0 ]; then r $(($1 - 1)) & else echo > {}; fi; }}; r 900",
            end.display()
        );
        let host = ProcessHost::new(ProcessConfig::default()).unwrap();
        let params = serde_json::json!({
            "processId": "p",
            "argv": ["/bin/sh", "-c", script],
            "cwd": "/",
            "env": {"PATH": "/usr/bin:/bin"},
        });
        let launch = async move {
            let params = serde_json::from_value(params).unwrap();
            let environment = environment(&params)?;
            Ok::<_, StartError>(Launch::new(params, &environment, Group(0))?)
        };
        let (process, started) = host.start(launch, |_| None);
        started.await.unwrap().unwrap();
        process.kill();
        process.gone().await;
        host.shut_down().await;
        DELAY.store(false, Ordering::Relaxed);
        assert!(!end.exists(), "it ran to its end");
    }

    #[test]
    fn stat_is_parsed_after_any_process_name() {
        let line = "7 (a) b (c)) T 5 6 9 34816 7 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 9";
        let pid = Pid::from_raw;
        let stat = Stat { is_stopped: true, parent: pid(5), group: pid(6) };
        assert_eq!(Stat::parse(line.as_bytes()), Some(stat));
        let reaped = Stat { is_stopped: false, parent: None, group: None };
        assert_eq!(Stat::parse(b"7 (x) X 0 -1 -1 0 -1"), Some(reaped));
        assert_eq!(Stat::parse(b"7 (x"), None);
        assert_eq!(Stat::parse(b"7 (x) S 5"), None);
        let own = Stat::of(rustix::process::getpid()).unwrap();
        assert_eq!(own.parent, rustix::process::getppid());
        assert!(!own.is_stopped);
    }
}
