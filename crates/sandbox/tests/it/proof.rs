//! The tree of every kind of policy, as processes inside see it: what the inner process verifies before
//! it runs anything, checked again from inside.

use std::path::Path;

use codex_exec_server_protocol::{AccessMode, NetworkPolicy, PermissionProfile};

use super::support::*;

/// Every kind of tree: based on the host's or empty, with and without network, denials, patterns and
/// protected missing names.
fn profiles(world: &World) -> Vec<(&'static str, PermissionProfile)> {
    let den = at(&world.work.join("den"), AccessMode::Deny);
    let PermissionProfile::Managed { file_system, .. } = minimal() else { unreachable!() };
    let with_network = PermissionProfile::Managed { file_system, network: NetworkPolicy::Enabled };
    let narrow = managed(vec![
        special(codex_exec_server_protocol::SpecialPath::Minimal, AccessMode::Read),
        project(AccessMode::Write),
        den.clone(),
        at(&world.work.join("den/open"), AccessMode::Read),
        glob("**/.env"),
    ]);
    vec![
        ("read-only", PermissionProfile::read_only()),
        ("workspace", workspace()),
        ("minimal", minimal()),
        ("minimal with network", with_network),
        ("narrow", narrow),
        ("writable", managed(vec![root(AccessMode::Write), den])),
    ]
}

struct Mount {
    path: String,
    options: String,
    kind: String,
}

fn mounts(table: &str) -> Vec<Mount> {
    let parse = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let dash = words.iter().position(|word| *word == "-").unwrap();
        Mount {
            path: words[4].to_owned(),
            options: words[5].to_owned(),
            kind: words[dash + 1].to_owned(),
        }
    };
    table.lines().map(parse).collect()
}

#[test]
fn every_profile_passes_the_mount_verification() {
    for user in users() {
        let world = World::new(user);
        std::fs::create_dir_all(world.work.join("den/open")).unwrap();
        std::fs::create_dir(world.work.join("sub")).unwrap();
        std::fs::write(world.work.join("sub/.env"), "").unwrap();
        world.own();
        for (name, profile) in profiles(&world) {
            let done = world.shell(profile.clone(), "stat -c '%d:%i' / /.. /../..");
            let seen: Vec<&str> = done.ok().out.lines().collect();
            assert!(seen.len() == 3 && seen.iter().all(|it| *it == seen[0]), "{name}: {seen:?}");
            let table = world.shell(profile, "cat /proc/self/mountinfo").ok().out.clone();
            let mounts = mounts(&table);
            let from_nothing = matches!(name, "minimal" | "minimal with network" | "narrow");
            let roots = mounts.iter().filter(|mount| mount.path == "/").count();
            assert_eq!(roots, 1, "{user:?} {name}: something lies on the root\n{table}");
            for mount in &mounts {
                let has = |option: &str| mount.options.split(',').any(|it| it == option);
                assert!(has("nosuid"), "{user:?} {name}: {}\n{table}", mount.path);
                let in_dev = mount.path.starts_with("/dev/");
                assert!(has("nodev") || in_dev, "{user:?} {name}: {}\n{table}", mount.path);
                let path = Path::new(&mount.path);
                let may_be_written = path.starts_with(&world.work)
                    || matches!(mount.path.as_str(), "/dev/pts" | "/dev/shm")
                    // Below what was mounted on top of it.
                    || (!from_nothing && mount.path == "/dev" && mount.kind == "tmpfs")
                    || name == "writable";
                assert!(has("ro") || may_be_written, "{user:?} {name}: {}\n{table}", mount.path);
                if from_nothing {
                    let known =
                        ["/proc", "/dev", "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64"];
                    let granted = mount.path == "/"
                        || known.iter().any(|known| path.starts_with(known))
                        || path.starts_with(&world.work)
                        || path.starts_with(program().parent().unwrap());
                    assert!(granted, "{user:?} {name}: {} is not granted\n{table}", mount.path);
                }
            }
            // Nothing inside can write to the kernel's file systems.
            let last = |path: &str| mounts.iter().rev().find(|mount| mount.path == path);
            for path in ["/proc", "/sys"] {
                let read_only =
                    last(path).is_none_or(|m| m.options.split(',').any(|it| it == "ro"));
                assert!(read_only, "{user:?} {name}: {path}\n{table}");
            }
        }
    }
}
