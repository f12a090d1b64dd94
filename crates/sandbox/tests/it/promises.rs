//! What is allowed works, and works as outside.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, symlink};

use codex_exec_server_protocol::{
    AccessMode, FileSystemPolicy, NetworkPolicy, PermissionProfile, SpecialPath,
};

use super::support::*;
use crate::skipped::runs_as_root;

#[test]
fn granted_access_works() {
    for user in users() {
        let world = World::new(user);
        for policy in [workspace(), minimal(), PermissionProfile::workspace_write()] {
            world
                .shell(
                    policy,
                    "set -e; echo a > a; cat a; mkdir -p d/e; mv a d/e/b; ln d/e/b c; ln -s c l; \
                     cat l; mkfifo f; chmod 600 c; rm -r d c l f; echo x > /dev/null; \
                     head -c 3 /dev/urandom > r; rm r; test -r /proc/self/status",
                )
                .ok();
            assert_eq!(std::fs::read_dir(&world.work).unwrap().count(), 0, "{user:?}");
        }
        let done = world.shell(PermissionProfile::read_only(), "cat ../outside/secret; pwd");
        assert_eq!(done.ok().out, format!("secret{}\n", world.work.display()));
    }
}

#[test]
fn existing_hard_links_are_written_through() {
    for user in users() {
        let world = World::new(user);
        let (inside, outside) = (world.work.join("inside"), world.outside.join("secret"));
        std::fs::hard_link(&outside, &inside).unwrap();
        world.shell(workspace(), "printf new > inside").ok();
        assert_eq!(std::fs::read_to_string(&outside).unwrap(), "new");
        let (a, b) = (std::fs::metadata(&inside).unwrap(), std::fs::metadata(&outside).unwrap());
        assert_eq!((a.ino(), a.nlink()), (b.ino(), 2), "{user:?}");
    }
}

#[test]
fn socket_pairs_still_work() {
    for user in users() {
        let world = World::new(user);
        for kind in ["1", "5"] {
            world.attempt(PermissionProfile::read_only(), &["socketpair", kind]).ok();
        }
        let enabled = managed_with(vec![root(AccessMode::Read)], NetworkPolicy::Enabled);
        world.attempt(enabled.clone(), &["socket", "2", "1"]).ok();
        world.attempt(enabled.clone(), &["socket", "10", "2"]).ok();
        world.attempt(enabled.clone(), &["socket", "17", "3"]).kept_from();
        let done = world.shell(enabled, "readlink /proc/self/ns/net");
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        assert_eq!(done.ok().out.trim(), own.to_str().unwrap());
    }
}

#[test]
fn metadata_stays_read_only() {
    for user in users() {
        let world = World::new(user);
        let git = world.work.join(".git");
        std::fs::create_dir_all(git.join("hooks")).unwrap();
        std::fs::write(git.join("config"), "config").unwrap();
        std::fs::create_dir(world.work.join(".codex")).unwrap();
        world.own();
        let policy = workspace();
        world.shell(policy.clone(), "cat .git/config && echo ok > file").ok();
        for script in [
            "echo x > .git/config",
            "echo x > .git/hooks/pre-commit",
            "mkdir .git/new",
            "rm -rf .git/hooks",
            "mv .git moved",
            "rmdir .codex",
            "echo x > .codex/x",
            "mkdir .agents",
            "echo x > .agents",
            "ln -s /tmp .agents",
            "mkdir other && mv other .agents",
        ] {
            world.shell(policy.clone(), script).kept_from();
        }
        assert_eq!(std::fs::read_to_string(git.join("config")).unwrap(), "config");
        assert!(!world.work.join(".agents").exists());
        // Unless an entry names it.
        let named = managed(vec![
            root(AccessMode::Read),
            project(AccessMode::Write),
            at(&git, AccessMode::Write),
            at(&world.work.join(".agents"), AccessMode::Write),
        ]);
        world.shell(named, "echo new > .git/config; mkdir .agents && rmdir .agents").ok();
        assert_eq!(std::fs::read_to_string(git.join("config")).unwrap(), "new\n");
    }
}

#[test]
fn target_of_a_git_pointer_file_is_protected() {
    for user in users() {
        let world = World::new(user);
        let real = world.work.join("main/.git/worktrees/x");
        std::fs::create_dir_all(real.join("hooks")).unwrap();
        let tree = world.work.join("tree");
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(world.work.join(".git"), "gitdir: main/.git/worktrees/x\n").unwrap();
        world.own();
        for script in [
            "echo x > .git",
            "rm .git",
            "echo x > main/.git/worktrees/x/hooks/y",
            "mv main moved",
            "mv main/.git main/moved",
            "rm -rf main/.git/worktrees",
        ] {
            world.shell(workspace(), script).kept_from();
        }
        world.shell(workspace(), "echo ok > main/file").ok();
        assert!(real.join("hooks").is_dir());
    }
}

#[test]
fn git_link_is_pinned() {
    for user in users() {
        let world = World::new(user);
        std::fs::create_dir(world.work.join("real")).unwrap();
        symlink("real", world.work.join(".git")).unwrap();
        world.own();
        for script in ["rm .git", "mv .git x", "ln -sfn other .git", "echo x > .git/x", "mv real x"]
        {
            world.shell(workspace(), script).kept_from();
        }
        world.shell(workspace(), "ls .git && echo ok > file").ok();
    }
}

/// A read-only or denied path keeps its name even if a directory above it could be moved.
#[test]
fn protected_paths_cannot_be_renamed() {
    for user in users() {
        let world = World::new(user);
        let kept = world.work.join("a/b/kept");
        std::fs::create_dir_all(&kept).unwrap();
        world.own();
        for access in [AccessMode::Read, AccessMode::Deny] {
            let policy = managed(vec![
                root(AccessMode::Read),
                project(AccessMode::Write),
                at(&kept, access),
            ]);
            for script in ["mv a x", "mv a/b x", "rm -rf a", "mkdir a/b/kept/x", "mv a/b/kept x"] {
                world.shell(policy.clone(), script).kept_from();
            }
            world.shell(policy, "echo x > a/b/file && rm a/b/file").ok();
        }
    }
}

#[test]
fn most_specific_nested_entry_decides() {
    for user in users() {
        let world = World::new(user);
        for directory in ["ro/rw/no/ro", "no/yes"] {
            std::fs::create_dir_all(world.work.join(directory)).unwrap();
        }
        std::fs::write(world.work.join("ro/rw/no/ro/file"), "deep").unwrap();
        std::fs::write(world.work.join("no/file"), "hidden").unwrap();
        world.own();
        let place = |name: &str, access| at(&world.work.join(name), access);
        let policy = managed(vec![
            root(AccessMode::Read),
            project(AccessMode::Write),
            place("ro", AccessMode::Read),
            place("ro/rw", AccessMode::Write),
            place("ro/rw/no", AccessMode::Deny),
            place("ro/rw/no/ro", AccessMode::Read),
            place("no", AccessMode::Deny),
            place("no/yes", AccessMode::Write),
        ]);
        world
            .shell(
                policy.clone(),
                "echo x > f && echo x > ro/rw/f && cat ro/rw/no/ro/file && echo x > no/yes/f",
            )
            .ok();
        for script in [
            "echo x > ro/f",
            "ls ro/rw/no",
            "echo x > ro/rw/no/f",
            "echo x > ro/rw/no/ro/f",
            "cat no/file",
            "ls no",
            "echo x > no/f",
        ] {
            world.shell(policy.clone(), script).kept_from();
        }
    }
}

#[test]
fn temporary_directories_are_writable_as_granted() {
    for user in users() {
        let world = World::new(user);
        let temporary = world.base.join("temporary");
        std::fs::create_dir(&temporary).unwrap();
        world.own();
        let policy =
            managed(vec![root(AccessMode::Read), special(SpecialPath::Tmpdir, AccessMode::Write)]);
        let context = world.context(policy);
        let argv = ["sh", "-c", "echo x > \"$TMPDIR/x\""];
        let mut server = world.server(&context, &world.work, argv);
        finish(server.env("TMPDIR", &temporary)).ok();
        assert!(temporary.join("x").exists());
        finish(&mut world.server(&context, &world.work, argv)).kept_from();
    }
}

#[test]
fn shared_memory_is_private_to_a_sandbox() {
    for user in users() {
        let world = World::new(user);
        let name = format!("/dev/shm/sandbox-test-{}", std::process::id());
        world.shell(workspace(), &format!("echo x > {name} && cat {name}")).ok();
        assert!(!std::path::Path::new(&name).exists());
        world.shell(PermissionProfile::read_only(), &format!("echo x > {name}")).kept_from();
    }
}

#[test]
fn external_isolation_restricts_the_network_only() {
    for user in users() {
        let world = World::new(user);
        let external = PermissionProfile::External { network: NetworkPolicy::Restricted };
        world.shell(external.clone(), "echo x > ../outside/new").ok();
        world.attempt(external, &["connect-inet"]).kept_from();
    }
}

#[test]
fn helpers_run_inside_with_a_minimal_environment() {
    for user in users() {
        let world = World::new(user);
        let context = world.context(PermissionProfile::read_only());
        let mut server = std::process::Command::new(program());
        server
            .arg("run")
            .arg(serde_json::to_string(&context).unwrap())
            .arg(&world.work)
            .args(["--helper", "copy"]);
        world.clothe(&mut server);
        server.env("TMPDIR", "/tmp").env("HTTP_PROXY", "http://proxy");
        let done = finish(&mut server);
        let stands = "mounts stand true\n".repeat(2);
        assert_eq!(done.ok().out, format!("env PATH TMPDIR\nwrite false\n{stands}"), "{done:?}");
    }
}

/// From the moment that the tree was verified, whenever it is checked.
#[test]
fn helper_notices_a_removed_mount() {
    for user in users() {
        let world = World::new(user);
        let context = serde_json::to_string(&world.context(workspace())).unwrap();
        let mut server = std::process::Command::new(program());
        server.arg("run").arg(context).arg(&world.work).args(["--helper", "copy"]);
        world.clothe(&mut server);
        server.stdin(std::process::Stdio::piped()).env("TEST_ANNOUNCE", "1");
        let mut server = server.spawn().unwrap();
        let mut err = BufReader::new(server.stderr.take().unwrap());
        err.read_line(&mut String::new()).unwrap();
        // What held the name goes, and the mount on it.
        std::fs::remove_dir(world.work.join(".git")).unwrap();
        drop(server.stdin.take());
        let out = server.wait_with_output().unwrap().stdout;
        let out = String::from_utf8(out).unwrap();
        assert!(out.ends_with(&"mounts stand false\n".repeat(2)), "{user:?} {out}");
    }
}

#[test]
fn root_writes_files_of_others_without_changing_owners() {
    if !runs_as_root() {
        return;
    }
    let mut world = World::new(User::Nobody);
    world.user = User::Own;
    let mode = std::os::unix::fs::PermissionsExt::from_mode;
    let (theirs, set_id) = (world.work.join("theirs"), world.work.join("set-id"));
    for file in [&theirs, &set_id] {
        std::fs::write(file, "").unwrap();
    }
    world.user = User::Nobody;
    world.own();
    world.user = User::Own;
    std::fs::set_permissions(&theirs, mode(0o600)).unwrap();
    std::fs::set_permissions(&set_id, mode(0o4755)).unwrap();
    std::fs::set_permissions(&world.work, mode(0o700)).unwrap();
    world
        .shell(workspace(), "set -e; echo x > x; cat x; echo y > theirs; chmod 644 theirs; rm x")
        .ok();
    let owner = std::fs::metadata(&theirs).unwrap();
    assert_eq!((owner.uid(), owner.mode() & 0o7777), (65_534, 0o644));
    for script in
        ["chown 1000 theirs", "chown 0 theirs", "chgrp 1000 theirs", "echo > y; chown 1 y"]
    {
        world.shell(workspace(), script).kept_from();
    }
    // The control: its own file may stay its own.
    world.shell(workspace(), "chown 0:0 y").ok();
    // A program that would run with its owner's rights loses that once it is changed; without
    // namespaces this depends on a capability that root has.
    let write = ["sh", "-c", "echo x >> set-id"];
    let only = managed(vec![root(AccessMode::Read), at(&set_id, AccessMode::Write)]);
    for (policy, landlock_only) in [(workspace(), false), (only, true)] {
        std::fs::set_permissions(&set_id, mode(0o4755)).unwrap();
        let mut server = world.server(&world.context(policy), &world.work, write);
        if landlock_only {
            server.env("TEST_LANDLOCK_ONLY", "1");
        }
        finish(&mut server).ok();
        assert_eq!(std::fs::metadata(&set_id).unwrap().mode() & 0o7777, 0o755);
    }
}

#[test]
fn readable_device_cannot_be_written() {
    // A device that only root may open, and that every machine has.
    let device = std::path::Path::new("/dev/kmsg");
    if !runs_as_root() {
        return;
    }
    let world = World::new(User::Own);
    let write = |outer, access| {
        let policy = managed(vec![outer, project(AccessMode::Write), at(device, access)]);
        world.shell(policy, "echo '<7>sandbox test' > /dev/kmsg")
    };
    write(root(AccessMode::Read), AccessMode::Read).kept_from();
    for outer in [root(AccessMode::Read), root(AccessMode::Write)] {
        write(outer, AccessMode::Write).ok();
    }
    // No rule takes back what one for the whole disk grants.
    assert_eq!(write(root(AccessMode::Write), AccessMode::Read).code, REFUSED);
    world.shell(workspace(), "echo x > /dev/null; head -c 4 /dev/zero > /dev/full").kept_from();
    world.shell(workspace(), "echo x > /dev/null && head -c 4 /dev/urandom > /dev/null").ok();
}

#[test]
fn credentials_are_hidden_with_an_unrestricted_file_system() {
    let policies = [
        PermissionProfile::External { network: NetworkPolicy::Restricted },
        PermissionProfile::Managed {
            file_system: FileSystemPolicy::Unrestricted,
            network: NetworkPolicy::Restricted,
        },
    ];
    for (user, policy) in users().into_iter().flat_map(|user| policies.clone().map(|p| (user, p))) {
        let world = World::new(user);
        let own = world.outside.join("home/.codex");
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(own.join("auth.json"), "token").unwrap();
        std::os::unix::fs::symlink("outside/home", world.base.join("way")).unwrap();
        world.own();
        let context = world.context(policy);
        let run = |script: &str, landlock_only: bool| {
            let mut command = world.server(&context, &world.work, ["sh", "-c", script]);
            if landlock_only {
                command.env("TEST_LANDLOCK_ONLY", "1");
            }
            finish(command.env("TEST_OWN_FILE", world.base.join("way/.codex/auth.json")))
        };
        for script in [
            "cat ../outside/home/.codex/auth.json",
            "cat ../way/.codex/auth.json",
            "cp -r ../outside/home/.codex taken && cat taken/auth.json",
            "ln ../outside/home/.codex/auth.json taken-file && cat taken-file",
            "mv ../outside/home/.codex elsewhere",
            "mv ../outside/home elsewhere",
            "mv ../outside elsewhere",
            "mv ../outside/home/.codex/auth.json elsewhere",
            "rm ../way",
            "echo x > ../outside/home/.codex/auth.json",
        ] {
            let done = run(script, false);
            done.kept_from();
            assert!(!done.out.contains("token"), "{script}: {done:?}");
        }
        // All else is as it was.
        run("echo x > ../outside/new && echo x > ../outside/home/.codex/new", false).ok();
        run("ls /dev/ptmx /dev/shm > /dev/null && test ! -w /proc/sys/kernel/core_pattern", false)
            .ok();
        let refused = run("true", true);
        assert_eq!(refused.code, REFUSED, "{refused:?}");
        assert!(refused.err.contains("auth.json"), "{refused:?}");
    }
}

/// By its name in `/dev`, as scripts do. The mounts do not show it, and the command holds it already.
#[test]
fn output_file_can_be_reopened_for_writing() {
    for user in users() {
        let world = World::new(user);
        let output = world.outside.join("output");
        let policies =
            [(workspace(), true), (minimal(), false), (PermissionProfile::read_only(), true)];
        for (policy, reads) in policies {
            let run = |script: &str| {
                std::fs::write(&output, "before\n").unwrap();
                world.own();
                let file = std::fs::OpenOptions::new().append(true).open(&output).unwrap();
                let context = world.context(policy.clone());
                let mut command = world.server(&context, &world.work, ["sh", "-c", script]);
                let done = finish(command.stdout(file));
                (done, std::fs::read_to_string(&output).unwrap())
            };
            let (done, text) = run("echo again >> /dev/stdout && echo more >> /proc/self/fd/1");
            assert_eq!((done.code, text.as_str()), (0, "before\nagain\nmore\n"), "{done:?}");
            let (done, text) = run("echo anew > /dev/stdout");
            assert_eq!((done.code, text.as_str()), (0, "anew\n"), "{done:?}");
            // It is read only where the policy says so, and its name is not one to write by.
            assert_eq!(run("read line < /dev/stdout").0.code == 0, reads);
            run(&format!("echo x > {}", output.display())).0.kept_from();
        }
    }
}

#[test]
fn targets_of_git_links_cannot_be_written() {
    for user in users() {
        let world = World::new(user);
        let link = |target: &str, name: &str| {
            std::os::unix::fs::symlink(target, world.base.join(name)).unwrap();
        };
        for name in ["work/.git/info", "work/.codex", "work/hk", "work/src"] {
            std::fs::create_dir_all(world.base.join(name)).unwrap();
        }
        for name in ["work/cfg", "work/src/rules", "work/src/other"] {
            std::fs::write(world.base.join(name), "as it was").unwrap();
        }
        link("../hk", "work/.git/hooks");
        link("../cfg", "work/.git/config");
        link("../later", "work/.git/config.worktree");
        link("../src/rules", "work/.codex/rules");
        world.own();
        for script in [
            "echo x > hk/post-commit",
            "mkdir hk/new",
            "mv hk other",
            "echo x > cfg",
            "mv src/other cfg",
            "rm cfg",
            "echo x > later",
            "echo x > src/rules",
            "mv src other",
            "ln -sfn src .git/hooks",
        ] {
            world.shell(workspace(), script).kept_from();
        }
        world.shell(workspace(), "echo x > src/other && echo x > new").ok();
        assert_eq!(std::fs::read(world.base.join("work/cfg")).unwrap(), b"as it was");
        assert!(!world.base.join("work/later").exists());
    }
}
