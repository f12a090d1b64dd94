//! Enforcement without namespaces: exact, or refused.

use std::path::Path;

use codex_exec_server_protocol::{AccessMode, NetworkPolicy, PermissionProfile, SpecialPath};

use super::support::*;

fn run(world: &World, permissions: PermissionProfile, argv: &[&str]) -> Done {
    let context = world.context(permissions);
    finish(world.server(&context, &world.work, argv).env("TEST_LANDLOCK_ONLY", "1"))
}

#[test]
fn expressible_policies_are_enforced() {
    for user in users() {
        let world = World::new(user);
        let program = program();
        let attempt = |permissions: PermissionProfile, words: &[&str]| {
            let mut argv = vec![program.to_str().unwrap(), "attempt"];
            argv.extend(words);
            run(&world, permissions, &argv)
        };
        let read_only = PermissionProfile::read_only;
        run(&world, read_only(), &["sh", "-c", "cat ../outside/secret > /dev/null"]).ok();
        let (secret, new) = (world.path("outside/secret"), world.path("work/new"));
        let server = std::process::id().to_string();
        for words in [
            &["write", &secret][..],
            &["write", &new],
            &["mkdir", &new],
            &["truncate", &secret],
            &["reopen-for-writing", &secret],
            &["connect-inet"],
            &["socket", "16", "3"],
            &["ptrace"],
            &["unshare"],
            &["mount", "/"],
            &["kill", &server],
            &["open-descriptors"],
        ] {
            attempt(read_only(), words).kept_from();
        }
        run(&world, read_only(), &["cat", &format!("/proc/{server}/environ")]).kept_from();
        assert_eq!(run(&world, read_only(), &["sh", "-c", "exit 7"]).code, 7);
        let external = PermissionProfile::External { network: NetworkPolicy::Restricted };
        run(&world, external.clone(), &["sh", "-c", "echo x > x"]).ok();
        attempt(external, &["connect-inet"]).kept_from();
    }
}

#[test]
fn inexpressible_policies_are_refused() {
    for user in users() {
        let world = World::new(user);
        let place = |name: &str, access| at(&world.base.join(name), access);
        for policy in [
            workspace(),
            PermissionProfile::workspace_write(),
            managed(vec![root(AccessMode::Read), place("outside", AccessMode::Deny)]),
            managed(vec![place("work", AccessMode::Write), place("work/x", AccessMode::Read)]),
        ] {
            let done = run(&world, policy, &["true"]);
            assert_eq!(done.code, REFUSED, "{done:?}");
            assert!(done.err.contains("Landlock alone cannot"), "{done:?}");
            assert!(done.err.contains("allow user namespaces"), "{done:?}");
        }
    }
}

#[test]
fn kernel_trees_are_never_writable() {
    let steering = "/proc/sys/kernel/core_pattern";
    for user in users() {
        let world = World::new(user);
        // A grant around them cannot exclude them, and is refused.
        for policy in [
            managed(vec![root(AccessMode::Write)]),
            managed(vec![at(Path::new("/"), AccessMode::Write)]),
        ] {
            let done = run(&world, policy, &["true"]);
            assert_eq!(done.code, REFUSED, "{done:?}");
            assert!(done.err.contains("with `/` writable"), "{done:?}");
            assert!(done.err.contains("grant write access only to the directories"), "{done:?}");
        }
        // A grant of them, or inside of them, grants reading only, as with namespaces.
        let before = std::fs::read(steering).unwrap();
        for named in ["/proc", "/proc/sys", "/proc/sys/kernel", steering, "/sys", "/sys/kernel"] {
            let entries = || vec![root(AccessMode::Read), at(Path::new(named), AccessMode::Write)];
            // If it succeeded, it would write back the current content.
            let file = if named.starts_with("/sys") { "/sys/kernel/profiling" } else { steering };
            let script = format!("cat {file} >/dev/null && exec 3<>{file}");
            run(&world, managed(entries()), &["sh", "-c", &script]).kept_from();
            world.run(managed(entries()), ["sh", "-c", &script]).kept_from();
            run(&world, managed(entries()), &["cat", file]).ok();
        }
        assert_eq!(std::fs::read(steering).unwrap(), before);
    }
}

#[test]
fn unnamed_devices_are_not_accessible() {
    for user in users() {
        let world = World::new(user);
        let named = |path: &str| {
            let mut entries = vec![special(SpecialPath::Minimal, AccessMode::Read)];
            entries.push(at(&world.work, AccessMode::Read));
            entries.push(at(Path::new(path), AccessMode::Read));
            managed(entries)
        };
        let read = ["sh", "-c", "exec 3</dev/ptmx"];
        run(&world, named("/usr"), &read).kept_from();
        run(&world, named("/dev"), &read).kept_from();
        run(&world, named("/dev/ptmx"), &read).ok();
        run(&world, named("/usr"), &["sh", "-c", "echo x > /dev/null"]).ok();
    }
}
