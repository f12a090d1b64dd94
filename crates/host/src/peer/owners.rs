//! The processes that hold a socket, found in `/proc`.
//!
//! Invariant: all facts about a process are read through one open `/proc/PID` directory. Once the
//! process has exited that directory yields nothing, even if its pid is reused.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Dir, Mode, OFlags};

use super::admission::{AdmissionPolicy, KnownProcess, Owners, Restrictions};
use crate::sandbox::is_sandbox;

/// All processes that hold the socket, with their ancestors.
pub(super) fn find(inode: u32, admission: &AdmissionPolicy) -> io::Result<Owners> {
    let name = format!("socket:[{inode}]");
    let mut owners = Owners::default();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Some(process) = Process::open(pid) else { continue };
        if !process.holds(name.as_bytes()) {
            continue;
        }
        owners.holders.push(pid);
        // It may have exited since; then it is a holder without known facts.
        if let Some(known_process) = process.known_process(admission) {
            owners.known.insert(pid, known_process);
            add_ancestors(known_process.parent, admission, &mut owners);
        }
    }
    Ok(owners)
}

fn add_ancestors(mut next: Option<i32>, admission: &AdmissionPolicy, owners: &mut Owners) {
    while let Some(pid) = next
        && !owners.known.contains_key(&pid)
        && let Some(known_process) =
            Process::open(pid).and_then(|process| process.known_process(admission))
    {
        owners.known.insert(pid, known_process);
        next = known_process.parent;
    }
}

/// The restrictions of this process.
pub(super) fn own_restrictions() -> io::Result<Restrictions> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let restrictions = Process::open(own).and_then(|own| Some(own.restrictions(&own.status()?)));
    match restrictions {
        Some(restrictions @ Restrictions { user_namespace: Some(_), seccomp_filters: Some(_) }) => {
            Ok(restrictions)
        }
        _ => Err(io::Error::other("/proc does not describe this process")),
    }
}

/// A process, by its open `/proc/PID` directory.
struct Process(OwnedFd);

impl Process {
    fn open(pid: i32) -> Option<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).ok().map(Self)
    }

    /// Whether one of its descriptors is this socket.
    fn holds(&self, name: &[u8]) -> bool {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(fds) = rustix::fs::openat(&self.0, "fd", flags, Mode::empty()) else { return false };
        let Ok(entries) = Dir::read_from(&fds) else { return false };
        entries.flatten().any(|entry| {
            rustix::fs::readlinkat(&fds, entry.file_name(), Vec::new())
                .is_ok_and(|link| link.as_bytes() == name)
        })
    }

    fn known_process(&self, admission: &AdmissionPolicy) -> Option<KnownProcess> {
        let status = self.status()?;
        let parent: i32 = field(&status, "PPid")?;
        let restricted =
            admission.is_restricted(&self.restrictions(&status)) || self.serves_a_sandbox();
        Some(KnownProcess { parent: (parent != 0).then_some(parent), restricted })
    }

    /// Whether this is the outer process of a sandbox. It is not confined, but it connects on behalf of
    /// the processes inside, and may hide its own hold on the socket meanwhile. It is recognized by its
    /// arguments; a process that fakes them only gets itself refused.
    fn serves_a_sandbox(&self) -> bool {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let mut text = Vec::new();
        let read = rustix::fs::openat(&self.0, "cmdline", flags, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|file| io::Read::read_to_end(&mut std::fs::File::from(file), &mut text));
        // If the arguments cannot be read, assume it is one.
        read.is_err() || is_sandbox(text.split(|byte| *byte == 0))
    }

    fn restrictions(&self, status: &str) -> Restrictions {
        let user_namespace = rustix::fs::readlinkat(&self.0, "ns/user", Vec::new());
        Restrictions {
            user_namespace: user_namespace.ok().map(|link| link.as_bytes().to_vec()),
            // Kernels before 5.9 do not count filters; `Seccomp` still tells none from some.
            seccomp_filters: field(status, "Seccomp_filters").or_else(|| field(status, "Seccomp")),
        }
    }

    fn status(&self) -> Option<String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.0, "status", flags, Mode::empty()).ok()?;
        // The process name may be any bytes; its line is not used.
        let mut text = Vec::new();
        io::Read::read_to_end(&mut std::fs::File::from(file), &mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }
}

fn field<T: std::str::FromStr>(status: &str, name: &str) -> Option<T> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_field_is_matched_by_its_whole_name() {
        let status = "Name:\tPPid:\t9\nPPid:\t7\nSeccomp:\t2\nSeccomp_filters:\t3\n";
        assert_eq!(field::<i32>(status, "PPid"), Some(7));
        assert_eq!(field::<u32>(status, "Seccomp"), Some(2));
        assert_eq!(field::<u32>(status, "Seccomp_filters"), Some(3));
        assert_eq!(field::<u32>(status, "NoNewPrivs"), None);
    }
}
