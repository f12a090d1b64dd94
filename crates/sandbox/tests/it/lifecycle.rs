//! Starting, signalling, ending; and leaving nothing behind.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use codex_exec_server_protocol::{AccessMode, PermissionProfile};
use codex_linux_sandbox::decide::policy::Surroundings;
use codex_linux_sandbox::plan::Operation;
use codex_linux_sandbox::{Cleanup, Command, Config, Failure, Prepared, Request, Sandbox, Stage};

use super::support::*;
use crate::skipped::skipped;

#[path = "../support/spawn.rs"]
mod spawn;

/// Long enough for a loaded machine; reached only if something is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for something that has to come true.
#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never came: {what}");
        std::thread::yield_now();
    }
}

fn sandbox() -> Sandbox {
    Sandbox::new(Config::new(program())).unwrap()
}

fn start(
    sandbox: &Sandbox,
    world: &World,
    argv: &[&str],
    dress: impl FnOnce(&mut std::process::Command),
) -> (Child, Option<Failure>, Cleanup) {
    let argv: Vec<OsString> = argv.iter().map(Into::into).collect();
    let env = [("PATH".into(), "/usr/bin:/bin".into()), ("PS1".into(), "> ".into())];
    let command = Command::Program { argv: &argv, arg0: None, env: &env, cwd: &world.work };
    let context = world.context(workspace());
    let Prepared::Enforced(launch) = sandbox.prepare(&context, &Request::new(command)).unwrap()
    else {
        panic!("nothing to enforce");
    };
    let mut command = spawn::command(&launch);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    dress(&mut command);
    spawn::spawn(command, launch).unwrap()
}

#[test]
fn exit_codes_are_passed_through() {
    for user in users() {
        let world = World::new(user);
        for (script, code) in [
            ("exit 0", 0),
            ("exit 7", 7),
            ("exit 255", 255),
            ("kill -TERM $$", 128 + libc::SIGTERM),
            ("kill -KILL $$", 128 + libc::SIGKILL),
            ("kill -SEGV $$", 128 + libc::SIGSEGV),
            ("kill -PIPE $$", 128 + libc::SIGPIPE),
            ("kill 0", 128 + libc::SIGTERM),
            // An orphan that dies first is reaped, and is not taken for the target.
            ("(sh -c 'exit 3' &) ; exit 4", 4),
        ] {
            assert_eq!(world.shell(workspace(), script).code, code, "{user:?} {script}");
        }
    }
}

#[test]
fn program_lookup_matches_the_host() {
    for user in users() {
        let world = World::new(user);
        let script = world.work.join("script");
        std::fs::write(&script, "echo script $1\n").unwrap();
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        std::fs::write(world.work.join("plain"), "").unwrap();
        world.own();
        assert_eq!(world.run(workspace(), ["./script", "one"]).ok().out, "script one\n");
        for (argv, message) in [
            (["no-such-program"], "No such file"),
            (["./no-such-program"], "No such file"),
            (["./plain"], "Permission denied"),
            (["/etc"], "Permission denied"),
        ] {
            let done = world.run(workspace(), argv);
            assert_eq!(done.code, FAILED, "{done:?}");
            assert!(done.err.contains("starting the program"), "{done:?}");
            assert!(done.err.contains(message), "{done:?}");
        }
    }
}

#[test]
fn failures_name_their_stage() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let (mut child, failure, _) = start(&sandbox, &world, &["nothing"], |_| {});
    child.wait().unwrap();
    let failure = failure.unwrap();
    assert_eq!((failure.stage, failure.errno), (Stage::Execute, libc::ENOENT));
    assert!(failure.is_target() && !failure.is_race());
}

#[test]
fn process_group_can_be_signalled() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    for (signal, ending) in [
        (libc::SIGINT, "exit 51"),
        (libc::SIGTERM, "exit 51"),
        (libc::SIGHUP, "exit 51"),
        (libc::SIGUSR1, "exit 51"),
        (libc::SIGQUIT, "exit 51"),
    ] {
        let script = format!(
            "trap '{ending}' {signal}; sleep 600 >/dev/null 2>&1 & echo ready; \
             while :; do wait; done"
        );
        let (mut child, failure, _) = start(&sandbox, &world, &["sh", "-c", &script], |_| {});
        assert_eq!(failure, None);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        kill(-(child.id() as i32), signal);
        assert_eq!(child.wait().unwrap().code(), Some(51), "signal {signal}");
    }
    // Without a handler the target dies of it, and the exit code says so.
    let (mut child, _, _) =
        start(&sandbox, &world, &["sh", "-c", "echo ready; exec sleep 600"], |_| {});
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill(-(child.id() as i32), libc::SIGINT);
    assert_eq!(child.wait().unwrap().code(), Some(128 + libc::SIGINT));
}

/// A target with its own group, such as a shell with job control, receives the server's signals too.
#[test]
fn signals_reach_a_target_that_left_the_group() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let python = "import os,signal,sys,time\n\
                  os.setpgid(0, 0)\n\
                  signal.signal(signal.SIGINT, lambda *_: os._exit(52))\n\
                  print('ready', flush=True)\n\
                  while True: time.sleep(0.01)";
    let (mut child, failure, _) = start(&sandbox, &world, &["python3", "-c", python], |_| {});
    if failure.is_some() {
        return skipped("there is no Python here");
    }
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill(-(child.id() as i32), libc::SIGINT);
    assert_eq!(child.wait().unwrap().code(), Some(52));
}

#[test]
fn sandbox_can_be_stopped_and_resumed() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let (mut child, _, _) =
        start(&sandbox, &world, &["sh", "-c", "echo ready; read x; exit 5"], |_| {});
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill(-(child.id() as i32), libc::SIGSTOP);
    kill(-(child.id() as i32), libc::SIGCONT);
    child.stdin.take().unwrap().write_all(b"x\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

#[test]
fn killing_the_child_kills_everything_inside() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let alive = world.work.join("alive");
    let script =
        "(setsid sh -c 'while :; do echo x > alive; sleep 0.01; done' &); echo ready; sleep 60";
    let (mut child, _, cleanup) = start(&sandbox, &world, &["sh", "-c", script], |_| {});
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    eventually("a descendant that left the group", || alive.exists());
    kill(child.id() as i32, libc::SIGKILL);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    // The pipe ends only when the last process that holds it is gone.
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    cleanup.run();
    assert_eq!(names(&world.work), ["alive"]);
}

#[test]
fn background_processes_end_with_the_target() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let script = "(setsid sleep 600 &); exit 6";
    let (mut child, _, _) = start(&sandbox, &world, &["sh", "-c", script], |_| {});
    let mut out = child.stdout.take().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(6));
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
}

/// Only the target decides when its streams end.
#[test]
fn streams_end_when_the_target_closes_them() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let (mut child, _, _) =
        start(&sandbox, &world, &["sh", "-c", "exec >&- 2>&-; read x; exit 8"], |_| {});
    let mut rest = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_end(&mut rest).unwrap();
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(8));
    assert!(rest.is_empty());
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: no pointers; the process is a child of this one, or its group.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// A server with one sandboxed process that waits; and the pid of the server's child.
fn waiting_server(world: &World, policy: PermissionProfile) -> (Child, i32) {
    let context = world.context(policy);
    let mut command = world.server(&context, &world.work, ["sleep", "600"]);
    let mut server = command.env("TEST_ANNOUNCE", "1").spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let pid = line.trim().strip_prefix("pid ").expect("the pid").parse().unwrap();
    (server, pid)
}

const PLACEHOLDERS: [&str; 3] = [".agents", ".codex", ".git"];

#[test]
fn no_placeholder_is_left_after_the_target_ends() {
    for user in users() {
        let world = World::new(user);
        let (mut server, pid) = waiting_server(&world, workspace());
        assert_eq!(names(&world.work), PLACEHOLDERS, "{user:?}");
        kill(-pid, libc::SIGTERM);
        assert_eq!(server.wait().unwrap().code(), Some(128 + libc::SIGTERM));
        assert!(names(&world.work).is_empty(), "{user:?}");
    }
}

#[test]
fn no_placeholder_is_left_after_the_child_is_killed() {
    for user in users() {
        let world = World::new(user);
        let (mut server, pid) = waiting_server(&world, workspace());
        kill(-pid, libc::SIGKILL);
        assert_eq!(server.wait().unwrap().code(), Some(128 + libc::SIGKILL));
        assert!(names(&world.work).is_empty(), "{user:?}");
    }
}

#[test]
fn no_placeholder_is_left_after_the_server_is_killed() {
    for user in users() {
        let world = World::new(user);
        let (mut server, _) = waiting_server(&world, workspace());
        server.kill().unwrap();
        server.wait().unwrap();
        eventually("no litter", || names(&world.work).is_empty());
    }
}

/// Waits until the last process of a sandbox that was killed is gone, which holds the lock.
fn until_let_go(placeholder: &Path) {
    let lock = File::open(placeholder).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
}

/// The worst case, both killed at once: the next sandbox reuses what is left, and removes it.
#[test]
fn placeholder_left_by_a_crash_is_reused() {
    for user in users() {
        let world = World::new(user);
        let (mut server, pid) = waiting_server(&world, workspace());
        kill(server.id() as i32, libc::SIGSTOP);
        kill(-pid, libc::SIGKILL);
        server.kill().unwrap();
        server.wait().unwrap();
        assert_eq!(names(&world.work), PLACEHOLDERS);
        PLACEHOLDERS.iter().for_each(|name| until_let_go(&world.work.join(name)));
        world.shell(workspace(), "mkdir .git").kept_from();
        assert!(names(&world.work).is_empty(), "{user:?}");
    }
}

/// Directories pass their set-group-ID bit and their default ACL on to what is created in them, which
/// may leave a placeholder that its owner can neither enter nor list.
#[test]
fn placeholders_are_recognized_whatever_a_directory_passes_on() {
    let mut state = 11u64;
    let mut bits = move |mask: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32 & mask
    };
    for user in users() {
        for round in 0..24 {
            let world = World::new(user);
            let mode = 0o755 | bits(0o2000);
            std::fs::set_permissions(&world.work, PermissionsExt::from_mode(mode)).unwrap();
            let rights = [bits(7), bits(7), bits(7)];
            if round % 3 > 0 {
                set_default_acl(&world.work, rights);
            }
            // Left by a sandbox that was killed, of this or of an earlier version.
            let left = 0o1000 | bits(0o2755);
            if round % 2 > 0 {
                std::fs::create_dir(world.work.join(".git")).unwrap();
                world.own();
                let left = PermissionsExt::from_mode(left);
                std::fs::set_permissions(world.work.join(".git"), left).unwrap();
            }
            let missing = world.work.join("a/b/c");
            let policy = managed(vec![
                root(AccessMode::Read),
                project(AccessMode::Write),
                at(&missing, AccessMode::Deny),
            ]);
            let done = world.shell(policy, "test -d .git && ! touch .git/x && ! mkdir a/b/c");
            let told = format!("{user:?} {mode:o} {rights:?} {left:o}: {done:?}");
            assert_eq!(done.code, 0, "{told}");
            assert_eq!(names(&world.work), [""; 0], "{told}");
        }
    }
}

/// Limits what is created in a directory to these rights of owner, group and others.
fn set_default_acl(directory: &Path, rights: [u32; 3]) {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights) in [1u16, 4, 0x20].into_iter().zip(rights) {
        list.extend(tag.to_le_bytes());
        list.extend((rights as u16).to_le_bytes());
        list.extend(u32::MAX.to_le_bytes());
    }
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(directory, "system.posix_acl_default", &list, flags).unwrap();
}

/// The processes of a sandbox count for the user outside too: one sandbox must leave some to others.
#[test]
fn sandbox_gets_at_most_half_of_the_users_processes() {
    for user in users() {
        let world = World::new(user);
        for (own, inside) in [("4000", "2000"), ("30000", "8192")] {
            let script = "awk '/Max processes/ { print $3, $4 }' /proc/self/limits";
            for landlock_only in [false, true] {
                let policy = if landlock_only { read_only() } else { workspace() };
                let server =
                    world.server(&world.context(policy), &world.work, ["sh", "-c", script]);
                let mut limited = std::process::Command::new("prlimit");
                limited.arg(format!("--nproc={own}:{own}")).arg(server.get_program());
                limited.args(server.get_args());
                world.clothe(&mut limited);
                if landlock_only {
                    limited.env("TEST_LANDLOCK_ONLY", "1");
                }
                let done = finish(&mut limited);
                assert_eq!(done.out, format!("{inside} {inside}\n"), "{user:?}: {done:?}");
            }
        }
    }
}

fn read_only() -> PermissionProfile {
    managed(vec![root(AccessMode::Read)])
}

/// A helper that only reads has nothing to protect, so it needs no placeholders; what is denied stays so.
#[test]
fn plan_for_reading_writes_and_creates_nothing() {
    let world = World::new(User::Own);
    std::fs::create_dir(world.work.join("den")).unwrap();
    let context = world.context(managed(vec![
        root(AccessMode::Read),
        project(AccessMode::Write),
        at(&world.work.join("den"), AccessMode::Deny),
        at(&world.work.join("den/missing"), AccessMode::Write),
        at(&world.base.join("missing"), AccessMode::Write),
    ]));
    let sandbox = sandbox();
    let planned = sandbox.plan(&context, Surroundings::default()).unwrap().unwrap();
    let reading = sandbox.for_reading(&planned).unwrap();
    assert_ne!(planned.key(), reading.key());
    assert_eq!(sandbox.for_reading(&planned).unwrap().key(), reading.key());
    assert!(!planned.enforcement().tree.placeholders.is_empty());
    let tree = &reading.enforcement().tree;
    assert_eq!(tree.placeholders, []);
    let den = world.work.join("den");
    let denies = |operation: &Operation| match operation {
        Operation::Mask { path, .. } | Operation::Skeleton { path, .. } => *path == den,
        _ => false,
    };
    assert!(tree.operations.iter().any(denies), "{:?}", tree.operations);
    let writes = |operation: &Operation| match operation {
        Operation::Bind { writable, device, .. } => *writable && !device,
        _ => false,
    };
    assert!(!tree.operations.iter().any(writes), "{:?}", tree.operations);
    assert!(!world.base.join("missing").exists());
}

/// A name stays protected until the last sandbox that protects it has ended.
#[test]
fn placeholders_are_shared() {
    for user in users() {
        let world = World::new(user);
        let (mut first, first_pid) = waiting_server(&world, workspace());
        let context = world.context(workspace());
        // Waits for a line, then tries to take the name.
        let script = "read x; mkdir .git && echo taken";
        let mut second = world.server(&context, &world.work, ["sh", "-c", script]);
        let mut second = second.stdin(Stdio::piped()).env("TEST_ANNOUNCE", "1").spawn().unwrap();
        let mut line = String::new();
        let mut err = BufReader::new(second.stderr.take().unwrap());
        err.read_line(&mut line).unwrap();
        kill(-first_pid, libc::SIGKILL);
        first.wait().unwrap();
        assert_eq!(names(&world.work), PLACEHOLDERS);
        second.stdin.take().unwrap().write_all(b"\n").unwrap();
        let done = second.wait_with_output().unwrap();
        assert!(!done.status.success(), "{user:?} {done:?}");
        assert!(names(&world.work).is_empty(), "{user:?}");
    }
}

/// A denied path that does not exist yet is protected with everything above it.
#[test]
fn missing_denied_paths_cannot_be_created() {
    for user in users() {
        let world = World::new(user);
        let policy = managed(vec![
            root(AccessMode::Read),
            at(&world.work, AccessMode::Write),
            at(&world.work.join("a/b/denied"), AccessMode::Deny),
        ]);
        world.shell(policy.clone(), "echo x > a/b/denied").kept_from();
        world.shell(policy.clone(), "ls a/b/denied").kept_from();
        world.shell(policy.clone(), "mv a x").kept_from();
        assert!(names(&world.work).is_empty(), "{user:?}");
        world.shell(policy, "echo x > a/b/other").ok();
        assert_eq!(names(&world.work), ["a"]);
        assert_eq!(names(&world.work.join("a/b")), ["other"]);
    }
}

/// Names below each other that are missing, as sandboxes of different policies protect them.
fn nested(world: &World) -> [PermissionProfile; 3] {
    ["a", "a/b/c", "a/d"].map(|name| {
        managed(vec![
            root(AccessMode::Read),
            at(&world.work, AccessMode::Write),
            at(&world.work.join(".git"), AccessMode::Write),
            at(&world.work.join(".agents"), AccessMode::Write),
            at(&world.work.join(".codex"), AccessMode::Write),
            at(&world.work.join(name), AccessMode::Deny),
        ])
    })
}

/// The last sandbox to end removes the parent directories, too, in whatever order they start and end.
#[test]
fn overlapping_sandboxes_leave_no_parent_directories() {
    for user in users() {
        let world = World::new(user);
        let policies = nested(&world);
        for order in [[0, 1, 2], [1, 1, 2], [2, 1, 0], [1, 0, 1]] {
            for ends in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
                let mut running: Vec<_> = order
                    .iter()
                    .map(|&n| Some(waiting_server(&world, policies[n].clone())))
                    .collect();
                assert_eq!(names(&world.work), ["a"]);
                for end in ends {
                    assert_eq!(names(&world.work), ["a"], "{user:?} {order:?} {ends:?}");
                    let (mut server, pid) = running[end].take().unwrap();
                    kill(-pid, libc::SIGTERM);
                    server.wait().unwrap();
                }
                assert!(names(&world.work).is_empty(), "{user:?} {order:?} {ends:?}");
            }
        }
    }
}

#[test]
fn parent_directories_left_by_a_crash_are_reused() {
    for user in users() {
        let world = World::new(user);
        let [_, policy, _] = nested(&world);
        let (mut server, pid) = waiting_server(&world, policy.clone());
        kill(server.id() as i32, libc::SIGSTOP);
        kill(-pid, libc::SIGKILL);
        server.kill().unwrap();
        server.wait().unwrap();
        assert_eq!(names(&world.work.join("a")), ["b"]);
        until_let_go(&world.work.join("a/b/c"));
        world.shell(policy, "mkdir a/b/c").kept_from();
        assert!(names(&world.work).is_empty(), "{user:?}");
    }
}

/// As by `git init`: on the host the name can be used, and what is put there stays.
#[test]
fn placeholder_name_can_be_used_outside() {
    for user in users() {
        let world = World::new(user);
        let (mut server, pid) = waiting_server(&world, workspace());
        let mut outside = std::process::Command::new("sh");
        outside.args(["-c", "mkdir .git/refs && echo x > .git/HEAD"]).current_dir(&world.work);
        world.clothe(&mut outside);
        finish(&mut outside).ok();
        // A sandbox that starts now protects it with its content.
        world.shell(workspace(), "cat .git/HEAD").ok();
        world.shell(workspace(), "echo y > .git/HEAD").kept_from();
        kill(-pid, libc::SIGTERM);
        server.wait().unwrap();
        assert_eq!(names(&world.work), [".git"], "{user:?}");
        assert_eq!(names(&world.work.join(".git")), ["HEAD", "refs"], "{user:?}");
        let mode = std::fs::metadata(world.work.join(".git")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755, "{user:?}");
    }
}

/// A workspace that is the home directory protects `.codex`, with the server's files in it.
#[test]
fn home_can_be_a_workspace() {
    for user in users() {
        let world = World::new(user);
        let context = world.context(workspace());
        let script = "echo x > file && ! mkdir .codex/x && ! echo x > .codex/auth.json";
        let mut command = world.server(&context, &world.work, ["sh", "-c", script]);
        finish(command.env("TEST_OWN_FILE", world.work.join(".codex/auth.json"))).ok();
        assert_eq!(names(&world.work), ["file"], "{user:?}");
        // A file in place of the directory stays.
        std::fs::write(world.work.join(".codex"), "mine").unwrap();
        world.own();
        for (script, works) in [
            ("grep -q mine .codex && echo x > file", true),
            ("rm .codex", false),
            ("mv .codex other", false),
            ("echo x > .codex", false),
        ] {
            let mut command = world.server(&context, &world.work, ["sh", "-c", script]);
            let own = world.work.join(".codex/auth.json");
            let done = finish(command.env("TEST_OWN_FILE", own));
            if works {
                done.ok()
            } else {
                done.kept_from()
            };
        }
        // Where it is not metadata, too.
        let context = world
            .context(managed(vec![root(AccessMode::Read), at(&world.base, AccessMode::Write)]));
        std::fs::create_dir(world.base.join("home")).unwrap();
        std::fs::write(world.base.join("home/.codex"), "mine").unwrap();
        world.own();
        for (script, works) in [
            ("echo x > ../home/file", true),
            ("rm ../home/.codex", false),
            ("mv ../home ../elsewhere", false),
        ] {
            let mut command = world.server(&context, &world.work, ["sh", "-c", script]);
            let own = world.base.join("home/.codex/auth.json");
            let done = finish(command.env("TEST_OWN_FILE", own));
            if works {
                done.ok()
            } else {
                done.kept_from()
            };
        }
    }
}

fn terminal() -> (File, OwnedFd) {
    let (mut master, mut slave) = (0, 0);
    let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let null = std::ptr::null_mut();
    // SAFETY: both numbers and the size live across the call.
    let made = unsafe {
        libc::openpty(
            &raw mut master,
            &raw mut slave,
            null,
            null.cast(),
            (&raw const size).cast_mut(),
        )
    };
    assert_eq!(made, 0);
    // SAFETY: just opened, and owned by nothing else.
    unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) }
}

fn on_terminal(command: &mut std::process::Command, slave: &OwnedFd) {
    let stream = || Stdio::from(slave.try_clone().unwrap());
    command.stdin(stream()).stdout(stream()).stderr(stream());
    // SAFETY: system calls; they run after the one that makes the session.
    unsafe {
        command.pre_exec(|| {
            // Ignored by whatever the tests run in the background of.
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
}

/// What a terminal shows, read as far as it was looked at.
struct Screen {
    master: File,
    seen: Vec<u8>,
}

impl Screen {
    fn new(master: File) -> Self {
        Self { master, seen: Vec::new() }
    }

    fn type_in(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Reads until a text appears; returns what came before it.
    fn until(&mut self, text: &str) -> String {
        let mut chunk = [0; 4096];
        loop {
            let found = self.seen.windows(text.len()).position(|window| window == text.as_bytes());
            if let Some(at) = found {
                let before = self.seen.drain(..at + text.len()).take(at).collect::<Vec<u8>>();
                return String::from_utf8_lossy(&before).into_owned();
            }
            match self.master.read(&mut chunk) {
                Ok(n @ 1..) => self.seen.extend(&chunk[..n]),
                _ => panic!("{text:?} never came: {}", String::from_utf8_lossy(&self.seen)),
            }
        }
    }
}

#[test]
fn terminals_work() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let (master, slave) = terminal();
    let script = "trap 'stty size' WINCH; test -t 0 && test -t 1 && echo isatty; \
                  echo through > /dev/tty; stty size; tty; sleep 600 & while :; do wait; done";
    let (mut child, failure, _) =
        start(&sandbox, &world, &["sh", "-c", script], |command| on_terminal(command, &slave));
    assert_eq!(failure, None);
    drop(slave);
    let mut screen = Screen::new(master);
    let seen = screen.until("24 80");
    assert!(seen.contains("isatty") && seen.contains("through"), "{seen:?}");
    let size = libc::winsize { ws_row: 50, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = screen.master.as_raw_fd();
    // SAFETY: the size lives across the call.
    let resized = unsafe { libc::ioctl(terminal, libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(resized, 0);
    screen.until("50 120");
    // Control-C from the terminal.
    screen.type_in("\x03");
    assert_eq!(child.wait().unwrap().code(), Some(128 + libc::SIGINT));
}

/// Its own name is in the host's `/dev/pts`, which is not there.
#[test]
fn terminal_has_a_path() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let (master, slave) = terminal();
    let script = "tty && echo named > $(tty) && ! chmod 777 $(tty) && echo done-$((1 + 1))";
    let (mut child, failure, _) =
        start(&sandbox, &world, &["sh", "-c", script], |command| on_terminal(command, &slave));
    assert_eq!(failure, None);
    drop(slave);
    let seen = Screen::new(master).until("done-2");
    assert!(seen.contains("/dev/console\r\n") && seen.contains("named"), "{seen:?}");
    assert!(child.wait().unwrap().success());
    // Without a terminal there is nothing by that name.
    for user in users() {
        let world = World::new(user);
        for policy in [workspace(), minimal(), PermissionProfile::read_only()] {
            world.shell(policy, "test ! -e /dev/console && ! tty").ok();
        }
    }
}

#[test]
fn job_control_works() {
    let sandbox = sandbox();
    let world = World::new(User::Own);
    let (master, slave) = terminal();
    let argv = ["bash", "--norc", "--noprofile", "-i"];
    let (mut child, failure, _) =
        start(&sandbox, &world, &argv, |command| on_terminal(command, &slave));
    if failure.is_some() {
        return skipped("there is no bash here");
    }
    drop(slave);
    let mut screen = Screen::new(master);
    let seen = screen.until("> ");
    assert!(!seen.contains("no job control"), "{seen:?}");
    // The echo of the command does not end a line with that word; the job does.
    screen.type_in("sh -c 'echo up; exec sleep 600'\n");
    screen.until("up\r\n");
    screen.type_in("\x1a");
    screen.until("Stopped");
    screen.until("> ");
    screen.type_in("disown -a; exit 9\n");
    let _ = screen.master.read_to_end(&mut screen.seen);
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

/// A private set of terminals: other sessions' are not there, new ones can be made.
#[test]
fn terminals_of_others_are_not_visible() {
    for user in users() {
        let world = World::new(user);
        let (_master, _slave) = terminal();
        let done = world.shell(workspace(), "ls /dev/pts");
        assert_eq!(done.ok().out.trim(), "ptmx", "{user:?}");
        let done = world.run(workspace(), ["script", "-qc", "tty", "/dev/null"]);
        if done.code != FAILED {
            assert!(done.ok().out.contains("/dev/pts/0"), "{user:?} {done:?}");
        }
    }
}
