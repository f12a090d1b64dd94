//! A server in a delegated control group ends what left the process tree, too.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};

use rustix::fs::XattrFlags;
use rustix::process::Signal;

use crate::skipped::{runs_as_root, skipped};
use crate::support::*;

/// A control group of this test.
pub(crate) struct Group(PathBuf);

impl Group {
    pub(crate) fn new(name: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let Some(mount) = mount.and_then(|line| line.split(' ').nth(1)) else {
            skipped("there is no unified hierarchy of control groups");
            return None;
        };
        let directory = PathBuf::from(mount).join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        Some(Self(directory))
    }

    /// Marks it as systemd does for `Delegate=yes`.
    pub(crate) fn delegate(&self) {
        rustix::fs::setxattr(&self.0, "user.delegate", b"1", XattrFlags::empty()).unwrap();
    }

    pub(crate) fn server(&self) -> Running {
        let enter = "echo 0 > \"$1\"/cgroup.procs; shift; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", enter, "sh"]).arg(&self.0);
        command.arg(codex().get_program()).arg("exec-server");
        Running::start_with(&mut command)
    }

    pub(crate) fn below(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A PID namespace that is not below any server. Killed when dropped.
struct Namespace(Child);

impl Namespace {
    async fn new() -> (Self, u32) {
        let mut unshare = Command::new("unshare");
        let child = unshare.args(["--pid", "--fork", "--kill-child", "sleep", "1000"]).spawn();
        let namespace = Self(child.unwrap());
        let first = || children(namespace.0.id()).first().map(|&(pid, _)| pid);
        eventually("it has a first process", || first().is_some()).await;
        let first = first().unwrap();
        (namespace, first)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Has a program of the server leave a daemon in that namespace, where it is the child of `first`.
async fn escape(client: &mut Client, first: u32) -> u32 {
    let script = format!(
        "exec nsenter --target {first} --pid setsid --fork sleep 1000 >/dev/null 2>&1 </dev/null"
    );
    assert_eq!(client.run("escape", &script).await.1, 0);
    eventually("the daemon has left the tree", || !children(first).is_empty()).await;
    children(first)[0].0
}

#[tokio::test]
async fn a_delegated_group_ends_with_its_server_wherever_its_processes_hide() {
    if !runs_as_root() {
        return;
    }
    let Some(group) = Group::new("delegated") else { return };
    group.delegate();
    for signal in [Signal::KILL, Signal::TERM] {
        let server = group.server();
        let mut client = server.client().await;
        let (_namespace, first) = Namespace::new().await;
        let daemon = escape(&mut client, first).await;
        assert!(is_running(daemon));
        server.signal(signal);
        server.ended();
        all_gone(&[daemon]).await;
        assert!(is_running(first), "what the server did not start goes on");
        eventually("its group is removed", || group.below().is_empty()).await;
    }
}

#[tokio::test]
async fn a_group_that_is_not_delegated_is_left_alone() {
    if !runs_as_root() {
        return;
    }
    let Some(group) = Group::new("plain") else { return };
    let server = group.server();
    let mut client = server.client().await;
    assert_eq!(client.run("p", "echo here").await, ("here\n".into(), 0));
    assert_eq!(group.below(), Vec::<PathBuf>::new());
    let warden = warden(server.pid()).unwrap();
    drop(server);
    all_gone(&[warden]).await;
}
