//! Classic escapes: system calls, other processes, sockets.

use super::{Attempt, assert_all_fail, attempt, narrow, read_only, wide};
use crate::server::User;

/// No policy lets any of these succeed.
const NEVER: &[&str] = &[
    // First: later ones open some.
    "descriptors",
    "ptrace-me",
    "ptrace-seize {SERVER}",
    "vm-read {SERVER}",
    "vm-read 1",
    "pidfd-getfd {SERVER}",
    "pidfd-getfd 1",
    "kill {SERVER} 0",
    "tgkill {SERVER} 0",
    "pidfd-signal {SERVER} 0",
    "open /proc/{SERVER}/mem r",
    "open /proc/1/mem rw",
    "list /proc/{SERVER}/fd",
    "read /proc/{SERVER}/environ",
    "read /proc/{SERVER}/root{OUT}/f",
    "every-process root{W}/den/key",
    "every-process root/..{W}/den/key",
    "every-process cwd/../den/key",
    "io-uring",
    "bpf",
    "userfaultfd",
    "keyctl",
    "add-key",
    "request-key",
    "perf",
    "fanotify",
    "by-handle {W}/f {W}",
    "tiocsti",
    "tiocsti-high",
    "tioclinux",
    "unshare 0x10000000",
    "unshare 0x00020000",
    "unshare 0x40000000",
    "unshare 0x20000000",
    "unshare 0x08000000",
    "unshare 0x04000000",
    "unshare 0x02000000",
    "unshare 0x80",
    "clone 0x10000000",
    "clone 0x00020000",
    "clone 0x40000000",
    "clone 0x20000000",
    "clone 0x12000000",
    "clone3 0x10000000",
    "clone3 0x00020000",
    "setns /proc/1/ns/mnt",
    "setns /proc/self/ns/user",
    "setns /proc/self/ns/net",
    "mount {W}/sub",
    "mount-proc {W}/sub",
    "bind-mount {OUT} {W}/sub",
    "bind-mount / {W}/sub",
    "bind-mount {W}/sub {W}/.git",
    "remount {W}/.git",
    "remount /",
    "private /",
    "move-mount {W}/.git {W}/sub",
    "move-mount-new {W}/.git {W}/sub",
    "umount {W}/.git",
    "umount {W}/den",
    "umount /proc",
    "umount /",
    "open-tree /",
    "open-tree {W}/.git",
    "open-tree-attr {W}/.git",
    "fsopen",
    "fspick /",
    "mount-setattr {W}/.git",
    "mount-setattr /",
    "chroot {W}",
    "chroot /..",
    "pivot-root {W}",
    "module",
    "kexec",
    "syslog",
    "hostname",
    "set-time",
    "quota",
    "swapoff /dev/none",
    "acct {W}/acct",
    "setuid 1",
    "setgid 1",
    "setgroups 1",
    "mknod-block {W}/block",
    "mknod-char {W}/char",
    "immutable {W}/.git",
    "inotify {W}/den/key",
    "list {W}/den",
    "statfs {W}/den/key",
    "stat {W}/den/key",
    "readlink {W}/den/key",
    "open /proc/sys/kernel/core_pattern w",
    "open /proc/sys/kernel/hostname w",
    "open /proc/sys/vm/drop_caches w",
    "open /proc/sysrq-trigger w",
    "open /proc/self/oom_score_adj x",
    "open /proc/1/oom_score_adj w",
    "open /proc/self/uid_map w",
    "open /proc/self/setgroups w",
    "open /sys/kernel/uevent_helper w",
    "open /sys/kernel/mm/transparent_hugepage/enabled w",
    "open /sys/power/state w",
    "mkdir /sys/fs/cgroup/attack",
    "open /sys/fs/cgroup/cgroup.procs w",
    "open /dev/mem r",
    "open /dev/kmsg w",
    "open /dev/vda r",
    "open /dev/fuse rw",
    "open /dev/kvm rw",
    "open /dev/loop-control rw",
    "mq-read /attack",
];

/// Sockets that no restricted network has: internet, raw, packet, netlink, vsock, Bluetooth, the
/// kernel's cryptography, XDP; and of the unix kind whatever could name a socket of the host.
const NO_NETWORK: &[&str] = &[
    "socket 2 1",
    "socket 2 2",
    "socket 2 3 1",
    "socket 10 1",
    "socket 10 2",
    "socket 10 3 58",
    "socket 16 3 0",
    "socket 17 3",
    "socket 17 2",
    "socket 40 1",
    "socket 31 3",
    "socket 38 5",
    "socket 44 3",
    "socket 1 2",
    "bind-inet",
    "connect-inet 127.0.0.1 {PORT}",
    "connect-inet ::1 {PORT}",
    "bind-unix {W}/socket",
    "bind-unix @attack",
    "connect-unix @attack",
    "connect-unix /run/systemd/private",
];

/// With the network enabled these are refused still.
const WITH_NETWORK: &[&str] = &[
    "socket 17 3",
    "socket 17 2",
    "socket 2 3 1",
    "socket 40 1",
    "socket 31 3",
    "socket 38 5",
    "socket 44 3",
    "socket 10 3 58",
];

/// Legitimate operations that programs need.
const ALLOWED: &[&str] = &[
    "socketpair",
    "mkdir {W}/made",
    "write {W}/made/f x",
    "rename {W}/made/f {W}/made/g",
    "link {W}/made/g {W}/made/h",
    "symlink g {W}/made/l",
    "read {W}/made/l",
    "exchange {W}/made/g {W}/made/h",
    "chmod 700 {W}/made/g",
    "utimes {W}/made/g",
    "truncate {W}/made/g 0",
    "temporary {W}/made {W}/made/t x",
    "mkfifo {W}/made/p",
    "copy {W}/made/h {W}/made/c",
    "lock {W}/made/c",
    "inotify {W}/made",
    "kill 0 0",
    "open /dev/null rw",
    "open /dev/zero r",
    "read {W}/.git/config",
    "exec /bin/true",
];

fn attempts() -> Vec<Attempt> {
    let mut all = Vec::new();
    for step in NEVER {
        all.push(attempt(step, wide()).control(ALLOWED).run(&[step]).fails());
    }
    // In one process each, and the policies differ in how the tree is built.
    for policy in [narrow(), wide().networked()] {
        all.push(attempt("all of them", policy).control(ALLOWED).run(NEVER).fails());
    }
    let never_readable: Vec<&str> =
        NEVER.iter().copied().filter(|it| !it.contains("den")).collect();
    all.push(attempt("all of them, read-only", read_only()).run(&never_readable).fails());
    for step in NO_NETWORK {
        all.push(attempt(step, wide()).control(ALLOWED).run(&[step]).fails());
    }
    all.push(attempt("no network", narrow()).control(ALLOWED).run(NO_NETWORK).fails());
    let allowed = ["socket 2 1", "socket 10 1", "socket 1 1", "bind-inet", "socketpair"];
    let networked = attempt("odd sockets", wide().networked()).control(&allowed);
    all.push(networked.run(WITH_NETWORK).fails());
    // Identities that are not there.
    all.push(attempt("root", wide()).run(&["setuid 0", "setgid 0"]).fails().only(User::Nobody));
    all
}

#[test]
fn catalogue_classic_escapes_fail() {
    assert_all_fail(&attempts());
}
