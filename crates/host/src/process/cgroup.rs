//! The control groups of programs, on a machine that delegates one to the server.
//!
//! ```text
//! the delegated group
//! ├─ codex-exec-PID-server     the server, if there are controllers: a group that has them for its
//! │                            children must have no process of its own
//! └─ codex-exec-PID            everything that this server starts
//!    ├─ warden                 the warden, the keepers, and programs without limits
//!    └─ program-N              a program with limits, which enters it before it executes
//! ```
//!
//! The process tree finds every descendant except one that entered a PID namespace of somebody else: its
//! parent is then the first process of that namespace. A control group has no such exception. Programs
//! without limits cost nothing: the warden enters its group, and all that it starts is born there.
//!
//! Delegated means that the manager of the groups gave this one away: it carries systemd's mark
//! (`Delegate=yes`), or belongs to the user that runs the server. Any other group is left alone, although
//! root could write to it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use codex_exec_server_protocol::resources::{Resource, ResourceLimits};
use parking_lot::Mutex;
use rustix::process::Pid;

use crate::sandbox::mountinfo;

/// How long the processes of a killed group may take to end before its directory stays behind.
const PATIENCE: Duration = Duration::from_secs(2);

/// The controllers that limits need. Huge pages are not counted as memory, and so have one of their own.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "hugetlb"];

/// The period of `cpu.max`, in microseconds.
const CPU_PERIOD: u64 = 100_000;

/// A group below the delegated one, in which this process, the warden, has entered a group of its own.
#[derive(Debug)]
pub(super) struct Cgroup {
    parent: PathBuf,
    server: Pid,
    directory: PathBuf,
}

fn directory_of_programs(parent: &Path, server: Pid) -> PathBuf {
    parent.join(format!("codex-exec-{}", server.as_raw_nonzero()))
}

fn directory_of_server(parent: &Path, server: Pid) -> PathBuf {
    parent.join(format!("codex-exec-{}-server", server.as_raw_nonzero()))
}

/// The delegated group that a server is in, or has left for [`directory_of_server`].
fn delegated(server: Pid) -> Option<PathBuf> {
    let own = own_directory()?;
    let parent = match own.parent() {
        Some(parent) if directory_of_server(parent, server) == own => parent.to_owned(),
        _ => own,
    };
    is_delegated(&parent).then_some(parent)
}

impl Cgroup {
    /// Enters the group of this server's programs; `None` where no group is delegated.
    pub(super) fn enter(server: Pid) -> Option<Self> {
        let parent = delegated(server)?;
        let directory = directory_of_programs(&parent, server);
        remove_empty(&parent, &directory);
        let own = directory.join("warden");
        let entered =
            create(&directory).and_then(|()| create(&own)).and_then(|()| move_into(&own, 0));
        match entered {
            Ok(()) => {
                if let Err(error) = enable_controllers(&directory, '+') {
                    tracing::warn!(%error, "cannot enable the controllers of the delegated cgroup");
                }
                Some(Self { parent, server, directory })
            }
            Err(error) => {
                tracing::warn!(%error, directory = %directory.display(), "cannot use the delegated cgroup");
                None
            }
        }
    }

    /// Leaves the group, kills all that is in it, and removes it.
    pub(super) fn kill(self) {
        let server = directory_of_server(&self.parent, self.server);
        let left_parent = server.is_dir();
        let outside = if left_parent { &server } else { &self.parent };
        // Without this the next line would be the last one of this process.
        if move_into(outside, 0).is_err() {
            return;
        }
        let _ = fs::write(self.directory.join("cgroup.kill"), "1");
        let until = Instant::now() + PATIENCE;
        while remove_tree(&self.directory).is_err() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        if left_parent {
            restore(&self.parent, self.server);
        }
    }
}

/// Gives the delegated group back as it was: without controllers for its children, and with its processes.
fn restore(parent: &Path, server: Pid) {
    let directory = directory_of_server(parent, server);
    let _ = enable_controllers(parent, '-');
    for pid in fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default().lines() {
        let _ = fs::write(parent.join("cgroup.procs"), pid);
    }
    let _ = fs::remove_dir(directory);
}

fn create(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Moves a process, or with 0 this one, into a group.
fn move_into(directory: &Path, pid: i32) -> io::Result<()> {
    fs::write(directory.join("cgroup.procs"), pid.to_string())
}

/// Gives (`+`) the children of a group the controllers that it has itself, or takes (`-`) them.
fn enable_controllers(directory: &Path, sign: char) -> io::Result<()> {
    for controller in useful_controllers(directory)? {
        fs::write(directory.join("cgroup.subtree_control"), format!("{sign}{controller}"))?;
    }
    Ok(())
}

fn useful_controllers(directory: &Path) -> io::Result<Vec<&'static str>> {
    let available = fs::read_to_string(directory.join("cgroup.controllers"))?;
    let is_available = |name: &&str| available.split_ascii_whitespace().any(|one| one == *name);
    Ok(CONTROLLERS.into_iter().filter(is_available).collect())
}

/// Removes a group and the groups directly below it. The kernel removes no group that has a process.
fn remove_tree(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Removes the groups of earlier servers that were killed together with their wardens. This server's own may have
/// groups for programs that are about to start.
fn remove_empty(parent: &Path, own: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_group = entry.file_name().as_encoded_bytes().starts_with(b"codex-exec-");
        if is_group && entry.path() != own {
            let _ = remove_tree(&entry.path());
        }
    }
}

/// The groups of programs with limits, as the server sees them. Clones share their state.
#[derive(Debug, Clone, Default)]
pub(super) struct ProgramGroups(Option<Arc<Groups>>);

#[derive(Debug)]
struct Groups {
    /// The group of everything that this server starts.
    directory: PathBuf,
    last: AtomicU64,
    /// Groups that had processes when their programs were given up.
    stale: Mutex<Vec<PathBuf>>,
}

impl ProgramGroups {
    /// Prepares the delegated group, if there is one. Call it in the server before it starts its warden, which
    /// enters the group: the first program may start before that.
    pub(super) fn prepare() -> Self {
        let server = rustix::process::getpid();
        let Some(parent) = delegated(server) else { return Self::default() };
        if useful_controllers(&parent).is_ok_and(|names| !names.is_empty())
            && let Err(error) = leave(&parent, server)
        {
            // Other processes are in the group, too.
            tracing::debug!(%error, "cannot use the controllers of the delegated cgroup");
            restore(&parent, server);
        }
        let directory = directory_of_programs(&parent, server);
        // An earlier process may have had this number.
        let _ = remove_tree(&directory);
        let made = create(&directory).and_then(|()| enable_controllers(&directory, '+'));
        if let Err(error) = made {
            tracing::warn!(%error, directory = %directory.display(), "cannot use the delegated cgroup");
        }
        Self(Some(Arc::new(Groups { directory, last: AtomicU64::new(0), stale: Mutex::default() })))
    }

    /// Makes a group for a program, if these limits need one and there can be one.
    pub(super) fn create(&self, limits: &ResourceLimits) -> Option<ProgramGroup> {
        let groups = self.0.clone()?;
        let needed = [Resource::Cpu, Resource::Cpus, Resource::Memory, Resource::Pids];
        if needed.iter().all(|&resource| limits.get(resource).is_none()) {
            return None;
        }
        groups.stale.lock().retain(|directory| fs::remove_dir(directory).is_err());
        let n = groups.last.fetch_add(1, Ordering::Relaxed);
        let directory = groups.directory.join(format!("program-{n}"));
        let made = fs::create_dir(&directory)
            .and_then(|()| fs::OpenOptions::new().write(true).open(directory.join("cgroup.procs")));
        match made {
            Ok(entry) => {
                let mut group = ProgramGroup {
                    directory,
                    entry: Arc::new(entry.into()),
                    enforced: Vec::new(),
                    groups,
                };
                group.limit(limits);
                Some(group)
            }
            Err(error) => {
                tracing::warn!(%error, directory = %directory.display(), "cannot make a cgroup");
                None
            }
        }
    }
}

/// Moves the server out of the delegated group, so that this may give its controllers to its children.
fn leave(parent: &Path, server: Pid) -> io::Result<()> {
    let directory = directory_of_server(parent, server);
    create(&directory)?;
    move_into(&directory, 0)?;
    enable_controllers(parent, '+')
}

/// The group of one program. Dropping it removes it.
#[derive(Debug)]
pub(super) struct ProgramGroup {
    directory: PathBuf,
    /// `cgroup.procs`, open for writing.
    entry: Arc<OwnedFd>,
    enforced: Vec<Resource>,
    groups: Arc<Groups>,
}

impl ProgramGroup {
    fn limit(&mut self, limits: &ResourceLimits) {
        let set = |name: &str, value: String| fs::write(self.directory.join(name), value);
        let mut enforced = Vec::new();
        if let Some(bytes) = limits.memory_bytes
            && set("memory.max", bytes.to_string()).is_ok()
            // All of them or none: half a program is of no use.
            && set("memory.oom.group", "1".into()).is_ok()
        {
            // Absent without swap or huge pages.
            let _ = set("memory.swap.max", "0".into());
            for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                if name.starts_with("hugetlb.") && name.ends_with("B.max") {
                    let _ = set(&name, bytes.to_string());
                }
            }
            enforced.push(Resource::Memory);
        }
        if let Some(pids) = limits.pids
            && set("pids.max", pids.to_string()).is_ok()
        {
            enforced.push(Resource::Pids);
        }
        if let Some(milli) = limits.cpus_milli {
            let quota = milli.saturating_mul(CPU_PERIOD / 1000);
            if set("cpu.max", format!("{quota} {CPU_PERIOD}")).is_ok() {
                enforced.push(Resource::Cpus);
            }
        }
        if limits.cpu_ms.is_some() && self.cpu_us().is_some() {
            enforced.push(Resource::Cpu);
        }
        self.enforced = enforced;
    }

    /// Whether this group enforces the limit, or counts for it.
    pub(super) fn enforces(&self, resource: Resource) -> bool {
        self.enforced.contains(&resource)
    }

    /// Whether something has to look at what it counts.
    pub(super) fn polled(&self) -> bool {
        self.enforces(Resource::Cpu)
    }

    /// What a process writes `0` to in order to enter.
    pub(super) fn entry(&self) -> Arc<OwnedFd> {
        self.entry.clone()
    }

    /// Kills everything in it, wherever it is in the process tree.
    pub(super) fn kill(&self) {
        let _ = fs::write(self.directory.join("cgroup.kill"), "1");
    }

    /// CPU time of everything that ever was in it, in microseconds.
    pub(super) fn cpu_us(&self) -> Option<u64> {
        self.value("cpu.stat", "usage_usec")
    }

    /// The most memory at once, in bytes. Kernels before 5.19 do not say.
    pub(super) fn peak_memory(&self) -> Option<u64> {
        fs::read_to_string(self.directory.join("memory.peak")).ok()?.trim().parse().ok()
    }

    /// Whether the kernel has killed something because of the limit on memory.
    pub(super) fn was_out_of_memory(&self) -> bool {
        self.value("memory.events", "oom_kill").is_some_and(|count| count > 0)
    }

    /// Whether the kernel has refused a fork because of the limit on processes.
    pub(super) fn refused_a_fork(&self) -> bool {
        self.value("pids.events", "max").is_some_and(|count| count > 0)
    }

    fn value(&self, file: &str, name: &str) -> Option<u64> {
        value_of(&fs::read_to_string(self.directory.join(file)).ok()?, name)
    }
}

impl Drop for ProgramGroup {
    fn drop(&mut self) {
        if fs::remove_dir(&self.directory).is_err() && self.directory.is_dir() {
            self.groups.stale.lock().push(std::mem::take(&mut self.directory));
        }
    }
}

/// A number of a file with a name and a number per line.
fn value_of(text: &str, name: &str) -> Option<u64> {
    let mut words = text.lines().filter_map(|line| line.split_once(' '));
    words.find(|(found, _)| *found == name)?.1.trim().parse().ok()
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
    fn values_are_found_by_their_whole_name() {
        let events = "low 0\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(value_of(events, "oom"), Some(3));
        assert_eq!(value_of(events, "oom_kill"), Some(2));
        assert_eq!(value_of(events, "max"), None);
    }

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
