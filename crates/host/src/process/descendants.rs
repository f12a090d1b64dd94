//! Killing a process with everything it started, also what left its group.
//!
//! Every child is the reaper of its own descendants (see `spawn`), so all of them hang below it in
//! the process tree while it lives, daemons included. A tree that still forks cannot be walked:
//! what is found is stopped first, until nothing new turns up, and then killed.
//!
//! Invariant: no number is signalled that may have become another process's. A descendant is held
//! by a descriptor that was opened before it was seen to be one, and signalled through that.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

/// How often the tree is looked at before it is killed as far as it is known. Each look stops
/// everything found, so only what forks faster than we read survives one.
const LOOKS: usize = 64;

/// Kills `root` with its group and every descendant. Nobody may reap `root` meanwhile.
pub(super) fn kill_tree(root: Pid) {
    let mut members = HashMap::new();
    let mut killed = false;
    let _ = rustix::process::kill_process(root, Signal::STOP);
    for _ in 0..LOOKS {
        if stop_new(root, &mut members) {
            killed = false;
        } else if killed {
            break;
        } else {
            // The tree stands still. But the death of some wakes others (a group whose last tie to
            // its session dies is continued by the kernel), so look once more after it: what forked
            // in between hangs below the root now.
            for member in members.values() {
                signal(member, Signal::KILL);
            }
            killed = true;
        }
    }
    for member in members.values() {
        signal(member, Signal::KILL);
    }
    let _ = rustix::process::kill_process_group(root, Signal::KILL);
    let _ = rustix::process::kill_process(root, Signal::KILL);
}

/// Stops every descendant that was not known; tells whether there was any.
fn stop_new(root: Pid, members: &mut HashMap<Pid, OwnedFd>) -> bool {
    let mut news = false;
    for link in descendants(root) {
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
    let ours = Stat::of(link.child).is_some_and(|stat| {
        stat.parent.is_some_and(|parent| parent == link.parent || parent == root)
    });
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
fn children(pid: Pid) -> Vec<Pid> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())) else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| parse_pids(&list))
        .collect()
}

pub(super) fn parse_pids(list: &str) -> Vec<Pid> {
    list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// What `/proc/PID/stat` tells of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub parent: Option<Pid>,
    pub session: Option<Pid>,
    /// When it was started, in the kernel's ticks: with its pid, what tells it from all others.
    pub start: u64,
}

impl Stat {
    /// `None` if it has gone.
    pub(super) fn of(pid: Pid) -> Option<Self> {
        let text = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Self::parse(&text)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // The name, in parentheses, may hold anything.
        let end = text.iter().rposition(|&b| b == b')')?;
        let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
        let mut fields = rest.split_ascii_whitespace().skip(1);
        let parent = Pid::from_raw(fields.next()?.parse().ok()?);
        let session = Pid::from_raw(fields.nth(1)?.parse().ok()?);
        let start = fields.nth(15)?.parse().ok()?;
        Some(Self { parent, session, start })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_is_read_past_any_name() {
        let line = "7 (a) b (c)) S 5 7 6 34816 7 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 9";
        let pid = |n| Pid::from_raw(n);
        assert_eq!(
            Stat::parse(line.as_bytes()),
            Some(Stat { parent: pid(5), session: pid(6), start: 4242 })
        );
        assert_eq!(Stat::parse(b"7 (x"), None);
        assert_eq!(Stat::parse(b"7 (x) S 5"), None);
        let own = rustix::process::getpid();
        let stat = Stat::of(own).unwrap();
        assert_eq!(stat.parent, rustix::process::getppid());
        // SAFETY: takes a number and gives one back. It is 0 where the leader of the session lives
        // outside the PID namespace, which is why it is not asked of rustix.
        let session = unsafe { libc::getsid(0) };
        assert_eq!(stat.session, pid(session));
        assert!(stat.start > 0);
    }
}
