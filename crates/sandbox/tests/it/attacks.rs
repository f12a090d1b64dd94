//! A table of attacks, each a real program, each run as every user. None may succeed.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use codex_exec_server_protocol::{AccessMode, PermissionProfile};

use super::support::*;
use crate::skipped::runs_as_root;

/// Attacks that no policy allows; `{out}` is a directory outside, `{work}` the workspace.
const ANYWHERE: &[&[&str]] = &[
    &["write", "{out}/new"],
    &["write", "{out}/secret"],
    &["write", "{work}/../outside/secret"],
    &["write", "{work}/link-to-file"],
    &["write", "{work}/link-to-directory/new"],
    &["write", "{work}/deep/link-to-directory/secret"],
    &["truncate", "{work}/link-to-file"],
    &["mkdir", "{out}/new"],
    &["remove", "{out}/secret"],
    &["rmdir", "{out}"],
    &["rename", "{out}/secret", "{work}/taken"],
    &["rename", "{work}/file", "{out}/given"],
    &["link", "{out}/secret", "{work}/linked"],
    &["link", "{work}/file", "{out}/linked"],
    &["symlink", "/etc", "{out}/symlink"],
    &["chmod", "{out}/secret"],
    &["mkfifo", "{out}/fifo"],
    &["mknod", "{work}/device"],
    &["mknod", "{out}/device"],
    &["write-through-o-path", "{out}/secret"],
    &["reopen-for-writing", "{out}/secret"],
    &["write-other-root", "{out}/secret"],
    &["write", "/proc/self/root{out}/secret"],
    &["write", "/proc/self/cwd/../outside/secret"],
    &["write", "/proc/1/root{out}/secret"],
    &["write-proc-sys"],
    &["write-own-mem"],
    &["swap-race", "{work}", "{out}/secret"],
    &["write", "/sys/kernel/mm/transparent_hugepage/enabled"],
    &["write", "/dev/new"],
    &["connect-inet"],
    &["connect-unix", "{out}/socket"],
    &["bind-unix", "{work}/socket"],
    // Families: UNIX datagrams, INET, INET6, INET raw, NETLINK, PACKET, ALG, VSOCK, BLUETOOTH, XDP.
    &["socket", "1", "2"],
    &["socket", "2", "1"],
    &["socket", "2", "2"],
    &["socket", "2", "3"],
    &["socket", "10", "1"],
    &["socket", "16", "3"],
    &["socket", "17", "3"],
    &["socket", "38", "5"],
    &["socket", "40", "1"],
    &["socket", "31", "3"],
    &["socket", "44", "3"],
    &["ptrace"],
    &["process_vm_readv"],
    &["io_uring"],
    &["unshare"],
    &["clone-newuser"],
    &["clone3"],
    &["setns"],
    &["mount", "{work}"],
    &["umount", "/proc"],
    &["umount", "{work}"],
    &["remount", "/"],
    &["open_tree"],
    &["mount_setattr"],
    &["chroot", "{work}"],
    &["pivot_root"],
    &["keyctl"],
    &["add_key"],
    &["userfaultfd"],
    &["bpf"],
    &["perf_event_open"],
    &["open_by_handle_at"],
    &["init_module"],
    &["kexec_load"],
    #[cfg(target_arch = "x86_64")]
    &["x32-ptrace"],
    &["tiocsti"],
    &["tiocsti-high-bits"],
    &["tioclinux"],
    &["kill", "{server}"],
    &["kill-all"],
    &["sethostname"],
    &["count-pids"],
    &["open-descriptors"],
    &["gain-by-no-new-privs"],
];

/// Attacks that must fail because they are refused, not because they are malformed.
const REFUSED_AS_SUCH: &[&str] = &[
    "socket",
    "connect-inet",
    "connect-unix",
    "bind-unix",
    "ptrace",
    "process_vm_readv",
    "io_uring",
    "unshare",
    "clone-newuser",
    "setns",
    "mount",
    "umount",
    "remount",
    "open_tree",
    "mount_setattr",
    "chroot",
    "pivot_root",
    "keyctl",
    "add_key",
    "userfaultfd",
    "bpf",
    "perf_event_open",
    "open_by_handle_at",
    "init_module",
    "kexec_load",
    "tiocsti",
    "tiocsti-high-bits",
    "tioclinux",
    "sethostname",
];

fn attacked_world(user: User) -> World {
    let world = World::new(user);
    std::fs::create_dir(world.work.join("deep")).unwrap();
    std::fs::write(world.work.join("file"), "file").unwrap();
    symlink(world.outside.join("secret"), world.work.join("link-to-file")).unwrap();
    symlink(&world.outside, world.work.join("link-to-directory")).unwrap();
    symlink(&world.outside, world.work.join("deep/link-to-directory")).unwrap();
    world.own();
    world
}

fn attack(user: User, name: &str, permissions: &PermissionProfile) {
    let world = attacked_world(user);
    let _listener = UnixListener::bind(world.outside.join("socket")).unwrap();
    let open = PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(world.outside.join("socket"), open).unwrap();
    for words in ANYWHERE {
        let words: Vec<String> = words
            .iter()
            .map(|word| {
                word.replace("{out}", world.outside.to_str().unwrap())
                    .replace("{work}", world.work.to_str().unwrap())
                    .replace("{server}", &std::process::id().to_string())
            })
            .collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let done = world.attempt(permissions.clone(), &words);
        assert!(
            done.code != 0 && done.code != REFUSED && done.code != FAILED && done.code < 130,
            "{user:?}, {name}, {words:?}: {done:?}"
        );
        if REFUSED_AS_SUCH.contains(&words[0]) {
            assert_eq!(done.code, libc::EPERM, "{user:?}, {name}, {words:?}: {done:?}");
        }
        let secret = std::fs::read_to_string(world.outside.join("secret")).unwrap();
        assert_eq!(secret, "secret", "{user:?}, {name}, {words:?}");
    }
    let mut left: Vec<_> =
        std::fs::read_dir(&world.outside).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["secret", "socket"], "{user:?}, {name}");
}

#[test]
fn nothing_is_reached_from_read_only() {
    for user in users() {
        attack(user, "read-only", &PermissionProfile::read_only());
    }
}

#[test]
fn nothing_is_reached_from_workspace_write() {
    for user in users() {
        attack(user, "workspace-write", &PermissionProfile::workspace_write());
    }
}

#[test]
fn nothing_is_reached_from_a_minimal_tree() {
    for user in users() {
        attack(user, "minimal", &minimal());
    }
}

/// Denied files can be read by no route.
#[test]
fn denied_files_cannot_be_read() {
    for user in users() {
        let world = attacked_world(user);
        std::fs::write(world.work.join(".env"), "token").unwrap();
        std::fs::write(world.work.join("deep/.env"), "token").unwrap();
        symlink(".env", world.work.join("alias")).unwrap();
        world.own();
        for (name, policy) in [
            (
                "named",
                vec![
                    root(AccessMode::Read),
                    project(AccessMode::Write),
                    at(&world.outside, AccessMode::Deny),
                    glob("**/.env"),
                ],
            ),
            (
                "never granted",
                vec![
                    special(codex_exec_server_protocol::SpecialPath::Minimal, AccessMode::Read),
                    at(program().parent().unwrap(), AccessMode::Read),
                    project(AccessMode::Write),
                    glob(".env"),
                ],
            ),
        ] {
            for words in [
                &["read", "{out}/secret"][..],
                &["list", "{out}"],
                &["read", "{work}/../outside/secret"],
                &["read", "{work}/link-to-file"],
                &["read", "{work}/link-to-directory/secret"],
                &["read", "/proc/self/root{out}/secret"],
                &["read", "/proc/1/root{out}/secret"],
                &["reopen-for-writing", "{out}/secret"],
                &["rename", "{out}/secret", "{work}/taken"],
                &["link", "{out}/secret", "{work}/linked"],
                &["read", "{work}/.env"],
                &["read", "{work}/alias"],
                &["read", "{work}/deep/.env"],
                &["write", "{work}/.env"],
                &["remove", "{work}/.env"],
                &["rename", "{work}/.env", "{work}/readable"],
                &["link", "{work}/.env", "{work}/readable"],
                &["chmod", "{work}/.env"],
            ] {
                let words: Vec<String> = words
                    .iter()
                    .map(|word| {
                        word.replace("{out}", world.outside.to_str().unwrap())
                            .replace("{work}", world.work.to_str().unwrap())
                    })
                    .collect();
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let done = world.attempt(managed(policy.clone()), &words);
                assert!((1..130).contains(&done.code), "{user:?}, {name}, {words:?}: {done:?}");
            }
            // The directory around it cannot be moved to where the pattern would not find it next time.
            world.shell(managed(policy.clone()), "mv deep moved").kept_from();
            world.shell(managed(policy), "cat deep/.env moved/.env").kept_from();
        }
    }
}

#[test]
fn setuid_programs_gain_nothing() {
    if !runs_as_root() {
        return;
    }
    let world = World::new(User::Nobody);
    let tool = world.base.join("id");
    std::fs::copy("/usr/bin/id", &tool).unwrap();
    give_to_root(&tool);
    std::fs::set_permissions(&tool, PermissionsExt::from_mode(0o4755)).unwrap();
    let done = world.run(PermissionProfile::read_only(), [tool.as_os_str(), "-u".as_ref()]);
    assert_eq!(done.ok().out.trim(), "65534");
    world.attempt(PermissionProfile::read_only(), &["setuid-root"]).kept_from();
}

#[test]
fn fork_bomb_reaches_its_limit() {
    for user in users() {
        let world = World::new(user);
        let program = program();
        let argv = [program.as_os_str(), "attempt".as_ref(), "fork-bomb".as_ref()];
        let context = world.context(PermissionProfile::read_only());
        let done = finish(world.server(&context, &world.work, argv).env("TEST_PROCESSES", "64"));
        assert_eq!(done.code, libc::EAGAIN, "{user:?}: {done:?}");
    }
}

/// One sandbox gets half of what is counted per user.
#[test]
fn pending_signals_are_bounded() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Sigpending);
    let half = limit.current.or(limit.maximum).map(|limit| limit / 2).unwrap();
    for user in users() {
        let world = World::new(user);
        let program = program();
        let argv = [program.as_os_str(), "attempt".as_ref(), "queue-signals".as_ref()];
        let context = world.context(PermissionProfile::read_only());
        let done = finish(&mut world.server(&context, &world.work, argv));
        assert_eq!(done.code, 0, "{user:?}: {done:?}");
        let queued: u64 = done.out.trim().parse().unwrap();
        assert!(queued > 0 && queued <= half, "{user:?}: {queued} of {half}");
    }
}

#[test]
fn server_is_not_visible_inside() {
    for user in users() {
        let world = World::new(user);
        let done = world.shell(
            PermissionProfile::read_only(),
            "ps -e -o pid= 2>/dev/null | wc -l; cat /proc/*/environ | tr '\\0' '\\n'; ls /proc/self/fd",
        );
        assert!(done.out.contains("SERVER_SECRET"), "the environment given is the target's own");
        let parent = format!("cat /proc/{}/environ", std::process::id());
        world.shell(PermissionProfile::read_only(), &parent).kept_from();
    }
}
