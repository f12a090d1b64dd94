//! Policies that no client should send.

use std::os::unix::fs::symlink;

use codex_exec_server_protocol::{
    AccessMode, FileSystemPath, MissingPathBehavior, PermissionProfile, SandboxContext, SpecialPath,
};

use super::support::*;

/// An empty policy grants nothing, so nothing can even start.
#[test]
fn empty_policy_is_refused() {
    for user in users() {
        let world = World::new(user);
        let done = world.run(managed(vec![]), ["true"]);
        assert_eq!(done.code, REFUSED, "{done:?}");
        assert!(done.err.contains("not readable under this policy"), "{done:?}");
    }
}

#[test]
fn contradictions_are_resolved_by_precedence() {
    for user in users() {
        let world = World::new(user);
        let place = |access| at(&world.outside, access);
        let policy = managed(vec![
            root(AccessMode::Read),
            place(AccessMode::Read),
            place(AccessMode::Deny),
            place(AccessMode::Write),
        ]);
        world.shell(policy.clone(), "cat ../outside/secret").kept_from();
        world.shell(policy, "echo x > ../outside/x").kept_from();
    }
}

#[test]
fn unusual_roots_are_handled() {
    for user in users() {
        let world = World::new(user);
        let (file, link) = (world.base.join("file"), world.base.join("link"));
        std::fs::write(&file, "").unwrap();
        symlink(&world.outside, &link).unwrap();
        std::fs::create_dir_all(world.work.join("a/b")).unwrap();
        world.own();
        let policy = managed(vec![
            root(AccessMode::Read),
            at(&file, AccessMode::Write),
            at(&link, AccessMode::Write),
            at(&world.work.join("a"), AccessMode::Write),
            at(&world.work.join("a/b"), AccessMode::Write),
            at(&world.base.join("missing"), AccessMode::Write),
            at(&world.base.join("missing/below"), AccessMode::Read),
            at(&world.base.join("file/below"), AccessMode::Deny),
            at(&world.base.join("loop"), AccessMode::Read),
        ]);
        symlink("loop", world.base.join("loop")).unwrap();
        world
            .shell(
                policy.clone(),
                "echo x > ../file && echo x > ../outside/x && echo x > ../link/y && echo x > a/b/c",
            )
            .ok();
        for script in ["echo x > x", "echo x > ../missing", "mkdir ../missing", "rm ../file"] {
            world.shell(policy.clone(), script).kept_from();
        }
    }
}

#[test]
fn skipped_path_does_not_protect_its_name() {
    for user in users() {
        let world = World::new(user);
        let mut entry = at(&world.work.join("later"), AccessMode::Deny);
        let strict = managed(vec![
            root(AccessMode::Read),
            at(&world.work, AccessMode::Write),
            entry.clone(),
        ]);
        world.shell(strict, "mkdir later").kept_from();
        entry.missing_path_behavior = Some(MissingPathBehavior::Skip);
        let lax = managed(vec![root(AccessMode::Read), at(&world.work, AccessMode::Write), entry]);
        world.shell(lax, "mkdir later").ok();
    }
}

#[test]
fn globs_beyond_their_limits_are_refused() {
    let world = World::new(User::Own);
    for n in 0..100 {
        let directory = world.work.join(format!("{n}"));
        std::fs::create_dir(&directory).unwrap();
        for m in 0..100 {
            std::fs::write(directory.join(format!("{m}.key")), "").unwrap();
        }
    }
    let policy = |pattern| managed(vec![root(AccessMode::Read), glob(pattern)]);
    let done = world.run(policy("*.key"), ["true"]);
    assert_eq!(done.code, REFUSED, "{done:?}");
    assert!(done.err.contains("match more than 4096 files"), "{done:?}");
    // A hundred are fine, and so is denying the directories.
    world.run(policy("7/*.key"), ["cat", "8/1.key"]).ok();
    world.run(policy("7/*.key"), ["cat", "7/1.key"]).kept_from();
    world.run(policy("[0-9]*/"), ["cat", "8/1.key"]).kept_from();
}

#[test]
fn unenforceable_patterns_are_refused() {
    let world = World::new(User::Own);
    for (pattern, message) in
        [("!x", "negated"), ("", "empty"), ("[x", "not closed"), ("../x", "`..`")]
    {
        let done = world.run(managed(vec![root(AccessMode::Read), glob(pattern)]), ["true"]);
        assert!(done.code == REFUSED && done.err.contains(message), "{pattern} {done:?}");
    }
    let mut allows = glob("x");
    allows.access = AccessMode::Write;
    let done = world.run(managed(vec![root(AccessMode::Read), allows]), ["true"]);
    assert!(done.code == REFUSED && done.err.contains("can only deny"), "{done:?}");
    let leaves = SpecialPath::ProjectRoots { subpath: Some("../..".into()) };
    let done = world
        .run(managed(vec![root(AccessMode::Read), special(leaves, AccessMode::Write)]), ["true"]);
    assert!(done.code == REFUSED && done.err.contains("leaves the workspace"), "{done:?}");
}

#[test]
fn unknown_kinds_grant_nothing_and_their_denial_is_an_error() {
    let world = World::new(User::Own);
    let unknown = || SpecialPath::Unknown(serde_json::json!({"kind": "moon"}));
    let policy = |access| managed(vec![root(AccessMode::Read), special(unknown(), access)]);
    world.shell(policy(AccessMode::Write), "echo x > x").kept_from();
    let done = world.run(policy(AccessMode::Deny), ["true"]);
    assert!(done.code == REFUSED && done.err.contains("unknown kind"), "{done:?}");
}

#[test]
fn policy_with_a_thousand_entries_is_enforced() {
    for user in users() {
        let world = World::new(user);
        let mut entries = vec![root(AccessMode::Read)];
        for n in 0..1000 {
            let path = world.base.join(format!("root-{n}"));
            std::fs::create_dir(&path).unwrap();
            let access = match n % 3 {
                0 => AccessMode::Read,
                1 => AccessMode::Write,
                _ => AccessMode::Deny,
            };
            entries.push(at(&path, access));
        }
        world.own();
        let policy = managed(entries);
        world.shell(policy.clone(), "echo x > ../root-1/x && ls ../root-0").ok();
        world.shell(policy.clone(), "echo x > ../root-0/x").kept_from();
        world.shell(policy, "ls ../root-2").kept_from();
    }
}

#[test]
fn working_directory_outside_every_root_is_refused() {
    for user in users() {
        let world = World::new(user);
        let context = world.context(minimal());
        let done = finish(&mut world.server(&context, &world.outside, ["true"]));
        assert_eq!(done.code, REFUSED, "{done:?}");
        // Readable is enough.
        let context = world.context(workspace());
        finish(&mut world.server(&context, &world.outside, ["true"])).ok();
        let nowhere = world.base.join("nowhere");
        let done = finish(&mut world.server(&context, &nowhere, ["true"]));
        assert_eq!(done.code, FAILED, "{done:?}");
        assert!(done.err.contains("working directory"), "{done:?}");
    }
}

#[test]
fn root_may_be_removed_while_the_process_runs() {
    for user in users() {
        let world = World::new(user);
        let doomed = world.base.join("doomed");
        std::fs::create_dir(&doomed).unwrap();
        world.own();
        let policy = managed(vec![root(AccessMode::Read), at(&doomed, AccessMode::Write)]);
        let context = world.context(policy);
        let script = "echo ready; read x; echo x > ../doomed/x; test ! -e ../doomed/x";
        let mut server = world.server(&context, &world.work, ["sh", "-c", script]);
        let mut server = server.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = std::io::BufReader::new(server.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        std::fs::remove_dir(&doomed).unwrap();
        std::io::Write::write_all(&mut server.stdin.take().unwrap(), b"\n").unwrap();
        assert!(server.wait().unwrap().success());
        assert!(!doomed.exists());
    }
}

/// The policy is relative to a directory that only the process names.
#[test]
fn policy_without_cwd_uses_the_process_directory() {
    for user in users() {
        let world = World::new(user);
        let context: SandboxContext = serde_json::from_str(
            r#"{"type":"workspace-write","exclude_slash_tmp":true,"exclude_tmpdir_env_var":true}"#,
        )
        .unwrap();
        finish(&mut program_with(&world, r#"{"type":"workspace-write"}"#, "echo x > x")).ok();
        assert!(context.project_root_is_cwd);
        // In the newest spelling no roots are no grant.
        let json = r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[
            {"path":{"type":"special","value":{"kind":"root"}},"access":"read"},
            {"path":{"type":"special","value":{"kind":"project_roots"}},"access":"write"}]}}}"#;
        finish(&mut program_with(&world, json, "echo x > y")).kept_from();
    }
}

fn program_with(world: &World, context: &str, script: &str) -> std::process::Command {
    let mut command = std::process::Command::new(program());
    command.arg("run").arg(context).arg(&world.work).args(["--", "sh", "-c", script]);
    world.clothe(&mut command);
    command
}

#[test]
fn unrestricted_policy_needs_no_sandbox() {
    let world = World::new(User::Own);
    let done = world.run(PermissionProfile::full_access(), ["true"]);
    assert_eq!(done.err, "unrestricted\n");
    let path = FileSystemPath::Special { value: SpecialPath::Root };
    assert!(matches!(path, FileSystemPath::Special { .. }));
}
