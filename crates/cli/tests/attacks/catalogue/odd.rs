//! Attempts that need a special setup.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;

use super::{
    Access, Way, assert_all_fail, attempt, both, judge_in, narrow, read_only, runtime, send, wide,
    world::World,
};
use crate::generator::policy::{Name, Policy};
use crate::program::attacker;
use crate::server::{self, UNPRIVILEGED, User};
use crate::support::{Running, codex};

#[test]
fn catalogue_a_denied_path_longer_than_any_path_stays_denied() {
    let name = "d".repeat(200);
    let (mut path, mut setup, mut way) = ("{W}".to_owned(), Vec::new(), Vec::new());
    setup.push("chdir {W}".to_owned());
    way.push("chdir {W}".to_owned());
    for _ in 0..25 {
        path.push('/');
        path.push_str(&name);
        setup.push(format!("mkdir {name}"));
        setup.push(format!("chdir {name}"));
        way.push(format!("chdir {name}"));
    }
    setup.push("write key longsecretq".into());
    way.extend(["read key".into(), "list .".into(), "append key attack".into()]);
    let (setup, way): (Vec<&str>, Vec<&str>) =
        (setup.iter().map(String::as_str).collect(), way.iter().map(String::as_str).collect());
    let denied: Vec<_> = [path.clone(), format!("{path}/key")]
        .iter()
        .map(|path| {
            attempt("a long path", wide().with(path, Access::Deny))
                .setup(&setup)
                .may_be_refused()
                .run(&way)
                .secret("longsecretq")
        })
        .collect();
    assert_all_fail(&denied);
}

#[test]
fn catalogue_an_inherited_file_is_read_and_no_more() {
    let mut failures = Vec::new();
    for &user in User::all() {
        for profile in ["read-only", "workspace-write"] {
            for steps in [
                ["chmod-fd 0 777", "fchmod 777 /dev/stdin"],
                ["write /proc/self/fd/0 attack", "truncate /proc/self/fd/0 0"],
                ["chmod 777 /proc/self/fd/0", "chmod 777 /dev/stdin"],
                ["utimes /proc/self/fd/0", "setxattr /proc/self/fd/0"],
                ["chown 1 1 /proc/self/fd/0", "fchmod 777 /proc/self/fd/0"],
                ["link-follow /proc/self/fd/0 {W}/taken", "chmod 777 {W}/taken"],
                ["truncate-fd 0", "write-fd 0 attack"],
            ] {
                let world = World::new(user);
                let (input, output) = (world.path("{OUT}/f"), world.path("{OUT}/d/f"));
                let look = |path: &std::path::Path| {
                    let found = path.metadata().unwrap();
                    (found.mode(), found.uid(), found.nlink(), std::fs::read(path).unwrap())
                };
                let (before, mode) = (look(&input), look(&output).0);
                let mut command = codex();
                command.args(["sandbox", "--profile", profile, "--"]).arg(attacker());
                command.arg("read /dev/stdin").args(steps.map(|step| world.expand(step)));
                command.current_dir(world.path("{W}")).stdin(File::open(&input).unwrap());
                command.stdout(File::options().append(true).open(&output).unwrap());
                if user == User::Nobody {
                    command.uid(UNPRIVILEGED).gid(UNPRIVILEGED).env("HOME", "/nonexistent");
                }
                let status = command.stderr(Stdio::null()).status().unwrap();
                let said = std::fs::read_to_string(&output).unwrap();
                let content = String::from_utf8(before.3.clone()).unwrap();
                assert!(said.contains(&content), "the control: {status}: {said}");
                if look(&input) != before || look(&output).0 != mode {
                    failures.push(format!("{user:?} {profile} {steps:?}: {said}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Open for neither reading nor writing: access mode 3, for which the kernel requires both permissions, and
/// `O_PATH`, which names a file of any kind.
#[test]
fn catalogue_a_stream_that_is_open_for_nothing_opens_nothing() {
    use std::os::unix::fs::MetadataExt;
    for &user in User::all() {
        for profile in ["read-only", "workspace-write"] {
            let world = World::new(user);
            let socket = world.path("{OUT}/socket");
            let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let link = world.path("{OUT}/link");
            std::os::unix::fs::symlink("f", &link).unwrap();
            for path in [world.path("{OUT}/f"), socket, link] {
                let attributes = || {
                    let found = std::fs::symlink_metadata(&path).unwrap();
                    (
                        found.mode(),
                        found.mtime(),
                        found.mtime_nsec(),
                        found.ctime(),
                        found.ctime_nsec(),
                    )
                };
                let before = attributes();
                let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW;
                let opened = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap();
                let mut command = codex();
                command.args(["sandbox", "--profile", profile, "--"]).arg(attacker());
                command.args(["chmod 777 /proc/self/fd/0"]);
                command.current_dir(world.path("{W}")).stdin(opened);
                if user == User::Nobody {
                    command.uid(UNPRIVILEGED).gid(UNPRIVILEGED).env("HOME", "/nonexistent");
                }
                let output = command.output().unwrap();
                assert!(!output.status.success(), "{user:?} {profile}: {path:?}");
                assert_eq!(attributes(), before, "{user:?} {profile}: {path:?}");
            }
            let input = world.path("{OUT}/f");
            let before = std::fs::read(&input).unwrap();
            let flags = rustix::fs::OFlags::RWMODE;
            let opened = rustix::fs::open(&input, flags, rustix::fs::Mode::empty()).unwrap();
            let mut command = codex();
            command.args(["sandbox", "--profile", profile, "--"]).arg(attacker());
            command.args(["write /proc/self/fd/0 attack", "truncate /proc/self/fd/0 0"]);
            command.current_dir(world.path("{W}")).stdin(opened);
            if user == User::Nobody {
                command.uid(UNPRIVILEGED).gid(UNPRIVILEGED).env("HOME", "/nonexistent");
            }
            let output = command.output().unwrap();
            assert_eq!(std::fs::read(&input).unwrap(), before, "{user:?} {profile}");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("access mode 3"), "{user:?} {profile}: {said}");
        }
    }
}

#[test]
fn catalogue_shared_memory_of_the_host_is_not_there() {
    let mut failures = Vec::new();
    for &user in User::all() {
        let server = user.server();
        // A workspace in it is confined by its policy.
        for (policy, steps) in [
            (wide(), ["read {W}/den/key", "read {W}/x.key"]),
            (narrow(), ["read {W}/den/key", "read {OUT}/f"]),
            (wide(), ["append {W}/.git/config attack", "mkdir {W}/.codex"]),
            (wide(), ["append {OUT}/f attack", "chmod 777 {OUT}"]),
            (narrow(), ["list {W}/den", "list {OUT}"]),
        ] {
            for way in [Way::Process, Way::Files] {
                let mut world = World::below("/dev/shm", user);
                world.served_by(&server);
                let made = attempt(&format!("{user:?} {steps:?}"), policy.clone());
                let made = made.may_be_refused().by(way, 0, &steps);
                let judged = runtime().block_on(judge_in(&world, &made, &server));
                failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
            }
        }
        // Other files in it are not visible.
        let shared = World::below("/dev/shm", user);
        let mut world = World::new(user);
        world.served_by(&server);
        for policy in [wide(), narrow()] {
            let (file, base) = (shared.expand("{OUT}/f"), shared.expand("{B}"));
            let secret = std::fs::read_to_string(&file).unwrap();
            let name = base.rsplit('/').next().unwrap();
            let made = attempt(&format!("{user:?} the host's /dev/shm"), policy)
                .run(&[&format!("read {file}"), "list /dev/shm", &format!("append {file} x")])
                // The model expects the same texts in its own world.
                .secret(name);
            let judged = runtime().block_on(judge_in(&world, &made, &server));
            failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
            assert_eq!(std::fs::read_to_string(&file).unwrap(), secret);
        }
        failures.extend(system_v(user, &server));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// System V segments and POSIX queues, which have their own namespaces.
fn system_v(user: User, server: &Running) -> Vec<String> {
    let text = c"segmentsecretq";
    // SAFETY: the segment is attached, written within its size, and detached again.
    let id = unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, 4096, 0o666 | libc::IPC_CREAT);
        assert!(id >= 0);
        let memory = libc::shmat(id, std::ptr::null(), 0);
        std::ptr::copy_nonoverlapping(text.as_ptr(), memory.cast(), text.count_bytes() + 1);
        libc::shmdt(memory);
        id
    };
    let made = attempt(&format!("{user:?} a segment of the host"), wide())
        .run(&[&format!("shm-read-id {id}"), "read /proc/sysvipc/shm"])
        .secret("segmentsecretq");
    let world = World::new(user);
    let judged = runtime().block_on(judge_in(&world, &made, server));
    // SAFETY: the segment made above.
    unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
    judged.into_iter().collect()
}

#[test]
fn catalogue_a_server_does_not_run_what_replaces_its_own_program() {
    let mut failures = Vec::new();
    for &user in User::all() {
        for steps in [
            vec!["rename {W}/codex {W}/old", "copy {W}/evil {W}/codex", "chmod 755 {W}/codex"],
            vec!["unlink {W}/codex", "rename {W}/evil {W}/codex"],
            vec!["rename {W}/evil {W}/codex"],
            vec!["exchange {W}/evil {W}/codex"],
            vec!["unlink {W}/codex", "symlink evil {W}/codex"],
            vec!["truncate {W}/codex 0", "copy {W}/evil {W}/codex"],
        ] {
            let mut world = World::new(user);
            let program = world.path("{W}/codex");
            let program = program.as_path();
            let copied = Command::new("strip")
                .arg("-o")
                .args([program, Path::new(env!("CARGO_BIN_EXE_codex"))])
                .status();
            assert!(copied.expect("strip, which comes with cc").success());
            let evil = world.path("{W}/evil");
            let script = world.expand("#!/bin/sh\necho attack > {OUT}/pwned\n");
            std::fs::write(&evil, script).unwrap();
            for path in [program, &evil] {
                std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
                user.give(path);
            }
            let server = user.server_of(Command::new(program), &[]);
            world.served_by(&server);
            let use_it = ["read {W}/f"];
            let made = attempt(&format!("{user:?} {steps:?}"), wide())
                .run(&steps)
                .run(&use_it)
                .run(&use_it)
                .files(&use_it)
                .and(narrow())
                .by(Way::Process, 1, &use_it)
                .by(Way::Files, 1, &use_it);
            let judged = runtime().block_on(judge_in(&world, &made, &server));
            failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// In a fresh workspace `.codex` is a placeholder, which each sandbox locks; an attacker whose workspace is
/// another directory can create one that looks like it.
#[test]
fn catalogue_a_lock_inside_holds_up_no_other_sandbox() {
    let mut failures = Vec::new();
    for &user in User::all() {
        for held in [
            ["mkdir-mode 1755 {W}/.codex", "lock {W}/.codex"],
            ["mkdir-mode 1755 {W}/missing", "lock {W}/missing"],
            ["stat {W}", "lock {W}/.agents"],
            ["stat {W}", "lock {W}"],
            ["stat {W}", "lock {W}/den"],
            ["stat {W}", "lock {W}/.git"],
        ] {
            let server = user.server();
            let mut world = World::new(user);
            world.served_by(&server);
            let policy: Policy = wide().with("{W}/missing", Access::Deny).within(&world);
            let mut other = policy.clone();
            if held[0] != "stat {W}" {
                other.roots.clear();
                other.entries.truncate(1);
                other = other.with("{W}", Access::Write).within(&world);
            }
            let steps = held.map(|step| world.expand(step));
            if let Some(failure) =
                runtime().block_on(hold_up(&server, &world, &steps, &other, &policy))
            {
                failures.push(format!("{user:?} {held:?}: {failure}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Executes steps under one policy, and runs another process under the second while the first waits.
async fn hold_up(
    server: &Running,
    world: &World,
    steps: &[String; 2],
    holds: &Policy,
    next: &Policy,
) -> Option<String> {
    let mut client = server.client().await;
    let program = attacker().to_str().unwrap().to_owned();
    let argv = [&program, &steps[0], &steps[1], "wait"];
    let start = json!({"processId": "holds", "argv": argv, "cwd": holds.cwd, "env": {},
                       "tty": false, "pipeStdin": true, "sandbox": holds.wire()});
    let answer = client.call("process/start", start).await;
    assert_eq!(answer["result"]["processId"], "holds", "{answer}");
    // Until both steps have been done.
    let mut said = String::new();
    while !said.contains("\n#2 ") {
        said.push_str(&client.lines("holds", 1).await);
    }
    let mut others = server.client().await;
    let step = [world.expand("read {W}/f")];
    let again = async {
        send(&mut others, Way::Process, next, &step).await;
        send(&mut others, Way::Files, next, &step).await;
    };
    let ended = tokio::time::timeout(Duration::from_secs(15), again).await;
    client.call("process/terminate", json!({"processId": "holds"})).await;
    ended.is_err().then(|| format!("the next sandbox does not start; {said:?}"))
}

#[test]
fn catalogue_leases_are_refused() {
    let steps = ["lease {W}/f", "lease {RO}/f", "lease {W}/.git/config"];
    let attempts: Vec<_> = [wide(), narrow().with("{RO}", Access::Read)]
        .into_iter()
        .map(|policy| attempt("leases", policy).control(&["lock {W}/f"]).run(&steps).fails())
        .collect();
    assert_all_fail(&attempts);
}

#[test]
fn catalogue_patterns_hold_to_the_depth_they_are_given() {
    let mut attempts = Vec::new();
    for depth in [1, 2, 3] {
        let mut policy = wide();
        policy.glob_depth = Some(depth);
        policy.entries.retain(|entry| !matches!(entry.name, Name::Path(_)));
        let steps = ["read {W}/x.key", "read {W}/sub/x.key", "read {W}/sub/deep/y.key"];
        let steps = &steps[..depth as usize];
        attempts.push(attempt(&format!("depth {depth}"), policy.clone()).run(steps));
        attempts.push(attempt(&format!("depth {depth}, by requests"), policy).files(steps));
    }
    assert_all_fail(&attempts);
}

/// The server's user may enter them; the generator also has directories of another user.
#[test]
fn catalogue_directories_that_cannot_be_listed_hide_what_they_hold() {
    let mut attempts = Vec::new();
    let steps =
        ["read {W}/sub/f", "copy {W}/sub/f {W}/taken", "list {W}/sub", "read {W}/sub/deep/y.key"];
    for pattern in ["**/f", "*.key", "sub/*", "{W}/sub/**", "{W}/**/f"] {
        let closed = read_only().globs(pattern).globs("**/y.key");
        for mut attempt in both(pattern, &closed, &steps) {
            attempt = attempt.setup(&["chmod 311 {W}/sub"]).control(&["stat {W}/den"]);
            attempts.push(attempt.only_unprivileged());
        }
    }
    for (name, directory) in [(".git", "{W}/.git"), (".git/hooks", "{W}/.git/hooks")] {
        let link = format!("symlink {{W}}/cfg {directory}/pre-push");
        let close = format!("chmod 311 {directory}");
        let setup = ["write {W}/cfg tlinkedq", &*link, &*close];
        let steps = ["append {W}/cfg attack", "rename {W}/sub {W}/cfg", "unlink {W}/cfg"];
        attempts.push(attempt(name, wide()).setup(&setup).may_be_refused().run(&steps));
    }
    assert_all_fail(&attempts);
}

/// Links swapped by one process while requests and another process use them.
#[test]
fn catalogue_links_swapped_while_others_use_them_lead_nowhere() {
    let mut failures = Vec::new();
    for &user in User::all() {
        let server = user.server();
        let mut world = World::new(user);
        world.served_by(&server);
        world.prepare(&[
            "symlink {OUT} {W}/l".to_owned(),
            "mkdir {W}/a".into(),
            "write {W}/a/f x".into(),
        ]);
        let policy = narrow().within(&world);
        let made = attempt(&format!("{user:?} races"), narrow());
        let race = world.expand("race 4000 {W}/a {W}/l {W}/a/f attack");
        let judged = runtime().block_on(async {
            let (mut one, mut two) = (server.client().await, server.client().await);
            let steps = [race];
            let wire = policy.wire();
            let swapping = server::run(&mut one, &steps, &wire, &policy.cwd, None);
            let using = async {
                let mut all = String::new();
                for _ in 0..40 {
                    for step in [
                        "read {W}/a/f",
                        "write {W}/a/f",
                        "list {W}/a",
                        "mkdir {W}/a/n/m",
                        "chmod 777 {W}/a/f",
                        "copy {W}/a {W}/taken",
                        "unlink {W}/a/d",
                    ] {
                        let step = [world.expand(step)];
                        all.push_str(&send(&mut two, Way::Files, &policy, &step).await.0);
                    }
                }
                all
            };
            // Judged by the output, and by the disk afterwards.
            let model = crate::generator::model::Model::new(
                std::slice::from_ref(&policy),
                crate::generator::snapshot::Snapshot::take(world.base()),
            );
            let (swapped, used) = tokio::join!(swapping, using);
            let now = crate::generator::snapshot::Snapshot::take(world.base());
            model.violation(&now, &(swapped.said + &used))
        });
        failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
