//! The control group of all programs, on a machine that delegates one to the server.
//!
//! The process tree finds every descendant except one that entered a PID namespace of somebody else: its
//! parent is then the first process of that namespace. A control group has no such exception. Nothing is
//! asked of the kernel per program: the warden enters the group, and all that it starts is born there.
//!
//! Delegated means that whoever manages the groups gave this one away: it carries systemd's mark
//! (`Delegate=yes`), or belongs to the user that runs the server. Any other group is left alone, although
//! root could write to it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::sandbox::mountinfo;

/// How long the processes of a killed group may take to end before its directory stays behind.
const PATIENCE: Duration = Duration::from_secs(2);

/// A group below the delegated one, which this process has entered.
#[derive(Debug)]
pub(super) struct Cgroup {
    parent: PathBuf,
    directory: PathBuf,
}

impl Cgroup {
    /// Enters the group of this server's programs; `None` where no group is delegated.
    pub(super) fn enter(server: Pid) -> Option<Self> {
        let parent = own_directory()?;
        if !is_delegated(&parent) {
            return None;
        }
        remove_empty(&parent);
        let directory = parent.join(format!("codex-exec-{}", server.as_raw_nonzero()));
        let entered = match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => move_into(&directory),
        };
        match entered {
            Ok(()) => Some(Self { parent, directory }),
            Err(error) => {
                tracing::warn!(%error, directory = %directory.display(), "cannot use the delegated cgroup");
                None
            }
        }
    }

    /// Leaves the group, kills all that is in it, and removes it.
    pub(super) fn kill(self) {
        // Without this the next line would be the last one of this process.
        if move_into(&self.parent).is_err() {
            return;
        }
        let _ = fs::write(self.directory.join("cgroup.kill"), "1");
        let until = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.directory).is_err() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn move_into(directory: &Path) -> io::Result<()> {
    fs::write(directory.join("cgroup.procs"), "0")
}

/// Removes the groups of earlier servers that were killed together with their wardens. The kernel removes
/// no group that has a process.
fn remove_empty(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"codex-exec-") {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn is_delegated(directory: &Path) -> bool {
    let marked = |name: &str| {
        let mut value = [0; 8];
        let len = rustix::fs::getxattr(directory, name, &mut value[..]);
        len.is_ok_and(|len| value.get(..len) == Some(b"1"))
    };
    let user = rustix::process::geteuid();
    let owned = || fs::metadata(directory).is_ok_and(|found| found.uid() == user.as_raw());
    marked("user.delegate") || marked("trusted.delegate") || (!user.is_root() && owned())
}

/// The directory of the group that this process is in.
fn own_directory() -> Option<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    directory_of(&groups, &mounts)
}

/// The same, from the texts of `/proc/PID/cgroup` and `/proc/PID/mountinfo`.
fn directory_of(groups: &str, mounts: &[u8]) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mountinfo::parse(mounts)?.iter().find_map(|mount| {
        if mount.kind != b"cgroup2" {
            return None;
        }
        let below = Path::new(group).strip_prefix(&mount.root).ok()?;
        let outside = below.iter().any(|name| name == OsStr::new(".."));
        (!outside).then(|| mount.point.join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str = "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_directory_is_found_by_the_mount_that_shows_it() {
        let of = |groups, mounts: &str| directory_of(groups, mounts.as_bytes());
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(of("0::/a/b\n", UNIFIED), path("/sys/fs/cgroup/a/b"));
        let hybrid = "5:memory:/x\n0::/a\n";
        assert_eq!(of(hybrid, UNIFIED), path("/sys/fs/cgroup/a"));
        assert_eq!(of("5:memory:/x\n", UNIFIED), None, "no unified hierarchy");
        let container = UNIFIED.replace(" / /sys", " /pod/one /sys");
        assert_eq!(of("0::/pod/one/sub\n", &container), path("/sys/fs/cgroup/sub"));
        assert_eq!(of("0::/pod/two\n", &container), None, "the mount does not show it");
        assert_eq!(of("0::/../two\n", UNIFIED), None, "a group outside of the namespace");
        assert_eq!(of("0::/a\n", "30 22 0:26 / /t rw - tmpfs tmpfs rw\n"), None);
    }
}
