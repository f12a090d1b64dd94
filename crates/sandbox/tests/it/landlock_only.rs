//! Without namespaces: exact, or refused.

use codex_exec_server_protocol::{AccessMode, NetworkPolicy, PermissionProfile};

use super::support::*;

fn run(world: &World, permissions: PermissionProfile, argv: &[&str]) -> Done {
    let context = world.context(permissions);
    finish(world.server(&context, &world.work, argv).env("TEST_LANDLOCK_ONLY", "1"))
}

#[test]
fn what_landlock_expresses_is_enforced() {
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
fn what_landlock_cannot_express_is_refused() {
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
