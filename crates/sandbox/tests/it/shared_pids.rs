//! Sandboxes without a PID namespace of their own: the processes of the host can be seen, and nothing else.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use codex_exec_server_protocol::{AccessMode, NetworkPolicy, PermissionProfile};

use super::support::*;

fn shared(server: &mut Command) -> &mut Command {
    server.env("TEST_SHARES_PIDS", "1")
}

fn attempt(world: &World, policy: &PermissionProfile, words: &[&str]) -> Done {
    let program = program();
    let argv = [&[program.to_str().unwrap(), "attempt"], words].concat();
    finish(shared(&mut world.server(&world.context(policy.clone()), &world.work, argv)))
}

fn shell(world: &World, policy: &PermissionProfile, script: &str) -> Done {
    let argv = ["sh", "-c", script];
    finish(shared(&mut world.server(&world.context(policy.clone()), &world.work, argv)))
}

/// The same without a sandbox.
fn attempt_outside(world: &World, words: &[&str]) -> Done {
    let mut command = Command::new(program());
    command.arg("attempt").args(words);
    world.clothe(&mut command);
    finish(&mut command)
}

/// A process of the same user outside, in a directory that the policy denies.
struct Victim(Child);

impl Victim {
    fn new(world: &World) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "echo ready; exec sleep 1000"]).current_dir(&world.outside);
        world.clothe(&mut command);
        let mut child = command.spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        Self(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn policies(world: &World) -> Vec<PermissionProfile> {
    let deny = at(&world.outside, AccessMode::Deny);
    let entries = |root_access| vec![root(root_access), project(AccessMode::Write), deny.clone()];
    vec![
        managed(entries(AccessMode::Read)),
        managed_with(entries(AccessMode::Read), NetworkPolicy::Enabled),
        managed(entries(AccessMode::Write)),
        minimal(),
    ]
}

#[test]
fn processes_of_the_host_are_seen_and_out_of_reach() {
    for user in users() {
        let world = World::new(user);
        let victim = Victim::new(&world);
        let pid = victim.pid();
        for policy in policies(&world) {
            shell(&world, &policy, &format!("test -d /proc/{pid} && test -d /proc/$$")).ok();
            let secret = format!("/proc/{pid}/cwd/secret");
            let by_root = format!("/proc/{pid}/root{}", world.path("outside/secret"));
            for words in [
                &["kill", &pid][..],
                &["read", &secret],
                &["read", &by_root],
                &["read", &format!("/proc/{pid}/environ")],
                &["read", &format!("/proc/{pid}/fd/0")],
                &["read", &format!("/proc/{pid}/exe")],
                &["read", &format!("/proc/{pid}/mem")],
                &["list", &format!("/proc/{pid}/root")],
                // Limits and scheduling of another process.
                &["raw", &libc::SYS_prlimit64.to_string(), &pid, "7", "0", "%16"],
                &["raw", &libc::SYS_sched_setscheduler.to_string(), &pid, "0", "%8"],
                &["raw", &libc::SYS_setpriority.to_string(), "0", &pid, "5"],
            ] {
                let done = attempt(&world, &policy, words);
                done.kept_from();
                if words[0] != "read" || !words[1].ends_with("mem") {
                    attempt_outside(&world, words).ok();
                }
                assert!(!done.out.contains("secret"), "{user:?} {policy:?} {words:?}: {done:?}");
            }
            // Its own process is as it always is.
            let own = "read line < /proc/self/environ; kill -0 $$; ls /proc/self/fd >/dev/null";
            shell(&world, &policy, own).ok();
        }
    }
}

#[test]
fn nothing_in_proc_can_be_changed() {
    for user in users() {
        let world = World::new(user);
        let victim = Victim::new(&world);
        for policy in policies(&world) {
            attempt(&world, &policy, &["write-proc-sys"]).kept_from();
            let score = format!("/proc/{}/oom_score_adj", victim.pid());
            attempt(&world, &policy, &["write", &score]).kept_from();
            attempt(&world, &policy, &["write", "/proc/self/oom_score_adj"]).kept_from();
        }
        // What an entry denies of it is denied.
        let denied = managed(vec![
            root(AccessMode::Read),
            project(AccessMode::Write),
            at(std::path::Path::new("/proc/version"), AccessMode::Deny),
        ]);
        attempt(&world, &denied, &["read", "/proc/version"]).kept_from();
        attempt(&world, &denied, &["read", "/proc/uptime"]).ok();
    }
}

/// The process has ended, or is a zombie.
fn is_gone(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

#[test]
fn what_a_command_leaves_ends_with_it() {
    for user in users() {
        let world = World::new(user);
        for policy in policies(&world) {
            let script = "setsid sh -c 'sleep 1000 & echo $! $$; exec sleep 1000' > pids 2>&1 & \
                          while ! test -s pids; do :; done; cat pids; exit 7";
            let done = shell(&world, &policy, script);
            assert_eq!(done.code, 7, "{user:?}: {done:?}");
            let pids: Vec<&str> = done.out.split_whitespace().collect();
            assert_eq!(pids.len(), 2, "{user:?}: {done:?}");
            assert!(pids.iter().all(|pid| is_gone(pid)), "{user:?}: {done:?}");
            std::fs::remove_file(world.work.join("pids")).unwrap();
            // No placeholder either.
            assert_eq!(std::fs::read_dir(&world.work).unwrap().count(), 0, "{user:?}");
        }
    }
}

#[test]
fn everything_ends_with_the_server() {
    for user in users() {
        let world = World::new(user);
        let argv = ["sh", "-c", "setsid sleep 1000 & echo $! $$; exec sleep 1000"];
        let mut server = world.server(&world.context(workspace()), &world.work, argv);
        let mut server = shared(&mut server).stdin(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        for pid in line.split_whitespace() {
            while !is_gone(pid) {
                assert!(std::time::Instant::now() < until, "{user:?}: {pid} is left");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }
}
