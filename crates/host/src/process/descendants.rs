//! Killing a process with everything it started, also what left its group.
//!
//! Everything that a program starts is below its [keeper](super::keeper) in the process tree, daemons
//! included. A tree that still forks cannot be walked: what is found is stopped first, until nothing
//! new turns up, and then killed. That is done again until the keeper has ended, which it does when
//! nothing is left.
//!
//! Invariant: no number is signalled that may have become another process's. A descendant is held
//! by a descriptor that was opened before it was seen to be one, and signalled through that.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::keeper::Grip;

/// How often the tree is looked at before it is killed as far as it is known. Each look stops
/// everything found, so only what forks faster than we read survives one.
const LOOKS: usize = 64;

/// How long it is tried to kill what does not die: it waits for a device, or belongs to another user.
const PATIENCE: Duration = Duration::from_secs(10);

/// Kills everything below these keepers; they have ended then. Blocks.
pub(super) fn end(mut keepers: Vec<Grip>) {
    let until = Instant::now() + PATIENCE;
    let mut pause = 1;
    loop {
        keepers.retain(|keeper| !keeper.has_ended(0));
        for keeper in &keepers {
            sweep(keeper.pid, || !keeper.has_ended(0));
        }
        // Whoever has nothing left to keep ends within a moment.
        if keepers.iter().all(|keeper| keeper.has_ended(pause)) {
            return;
        }
        if Instant::now() > until {
            let keepers: Vec<_> = keepers.iter().map(|keeper| keeper.pid).collect();
            tracing::warn!(?keepers, "processes below these cannot be killed");
            return;
        }
        pause = (pause * 2).min(100);
    }
}

/// Kills everything below `root` once, as far as it is seen, but not `root`. It is asked whether that
/// number is still that of who is meant after it was used.
pub(super) fn sweep(root: Pid, is_root: impl Fn() -> bool) {
    // Somebody may have stopped it, who would not reap then.
    if let Ok(pidfd) = rustix::process::pidfd_open(root, PidfdFlags::empty())
        && is_root()
    {
        signal(&pidfd, Signal::CONT);
    }
    let mut members = HashMap::new();
    for _ in 0..LOOKS {
        if !stop_new(root, &is_root, &mut members) {
            break;
        }
    }
    for member in members.values() {
        signal(member, Signal::KILL);
    }
}

/// Stops every descendant that was not known; tells whether there was any.
fn stop_new(root: Pid, is_root: impl Fn() -> bool, members: &mut HashMap<Pid, OwnedFd>) -> bool {
    let found = descendants(root);
    if !is_root() {
        return false;
    }
    let mut news = false;
    for link in found {
        if members.contains_key(&link.child) {
            continue;
        }
        news = true;
        if let Some(member) = hold(root, link) {
            signal(&member, Signal::STOP);
            members.insert(link.child, member);
        }
    }
    news
}

/// A descriptor of a descendant, if that is still who has the number.
fn hold(root: Pid, link: Link) -> Option<OwnedFd> {
    let opened = rustix::process::pidfd_open(link.child, PidfdFlags::empty());
    // One whose parent has died in between belongs to the root by now.
    let ours = parent(link.child).is_some_and(|parent| parent == link.parent || parent == root);
    match opened {
        Ok(pidfd) => ours.then_some(pidfd),
        // Out of descriptors: better a small risk than a survivor.
        Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) if ours => {
            let _ = rustix::process::kill_process(link.child, Signal::KILL);
            None
        }
        Err(_) => None,
    }
}

fn signal(pidfd: &OwnedFd, signal: Signal) {
    match rustix::process::pidfd_send_signal(pidfd, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::debug!(%error, "could not signal a descendant"),
    }
}

#[derive(Debug, Clone, Copy)]
struct Link {
    parent: Pid,
    child: Pid,
}

/// Every process below `root`, as far as one pass can see; parents before their children.
fn descendants(root: Pid) -> Vec<Link> {
    let mut found: Vec<Link> = Vec::new();
    let mut seen = HashSet::from([root]);
    let mut at = 0;
    let mut parent = root;
    loop {
        for child in children(parent) {
            if seen.insert(child) {
                found.push(Link { parent, child });
            }
        }
        let Some(next) = found.get(at) else { break };
        parent = next.child;
        at += 1;
    }
    found
}

/// The children of all threads of a process; none if it has gone.
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

/// The parent of a process; `None` if it has gone.
fn parent(pid: Pid) -> Option<Pid> {
    let text = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    parse_parent(&text)
}

fn parse_parent(text: &[u8]) -> Option<Pid> {
    // The name, in parentheses, may hold anything.
    let end = text.iter().rposition(|&b| b == b')')?;
    let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
    Pid::from_raw(rest.split_ascii_whitespace().nth(1)?.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_read_past_any_name() {
        let line = "7 (a) b (c)) S 5 7 6 34816 7 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 9";
        assert_eq!(parse_parent(line.as_bytes()), Pid::from_raw(5));
        assert_eq!(parse_parent(b"7 (x"), None);
        assert_eq!(parse_parent(b"7 (x) S"), None);
        assert_eq!(parent(rustix::process::getpid()), rustix::process::getppid());
    }
}
