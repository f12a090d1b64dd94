//! Killing a process with everything it started, also what left its group.
//!
//! Every child is the reaper of its own descendants (see `spawn`), so all of them hang below it in
//! the process tree while it lives, daemons included. A tree that still forks cannot be walked:
//! what is found is stopped first, until nothing new turns up, and then killed.

use std::collections::HashSet;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

/// How often the tree is looked at before it is killed as far as it is known. Each look stops
/// everything found, so only what forks faster than we read survives one.
const LOOKS: usize = 32;

/// Kills `root` (our own child, not reaped) with its group and every descendant.
pub(super) fn kill_tree(root: Pid) {
    let mut members = HashSet::from([root]);
    let _ = rustix::process::kill_process(root, Signal::STOP);
    for _ in 0..LOOKS {
        let found = descendants(root);
        let mut new = false;
        for pid in found {
            if members.insert(pid.child) {
                new = true;
                signal_child(pid, Signal::STOP);
            }
        }
        if !new {
            break;
        }
    }
    // The tree stands still now; its members' pids cannot be reused before their parents, who are
    // stopped too, reap them.
    for pid in members.iter().filter(|&&pid| pid != root) {
        let _ = rustix::process::kill_process(*pid, Signal::KILL);
    }
    let _ = rustix::process::kill_process_group(root, Signal::KILL);
    let _ = rustix::process::kill_process(root, Signal::KILL);
}

#[derive(Debug, Clone, Copy)]
struct Link {
    parent: Pid,
    child: Pid,
}

/// Every process below `root`, as far as one pass can see.
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

pub(super) fn parse_pids(list: &str) -> Vec<Pid> {
    list.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Signals a process only if it is still the child it was found as: a pid may have been reused.
fn signal_child(link: Link, signal: Signal) {
    let Ok(pidfd) = rustix::process::pidfd_open(link.child, PidfdFlags::empty()) else { return };
    if children(link.parent).contains(&link.child) {
        match rustix::process::pidfd_send_signal(&pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => tracing::debug!(%error, "could not signal a descendant"),
        }
    }
}
