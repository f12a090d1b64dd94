//! Policies and capabilities in, the steps of a plan out.

use codex_exec_server_protocol::{
    AccessMode, NetworkPolicy, PermissionProfile, SandboxContext, SpecialPath,
};
use codex_linux_sandbox::decide::policy::Surroundings;
use codex_linux_sandbox::plan::{Base, Operation};
use codex_linux_sandbox::{Assurance, Capabilities, Config, PrepareError, Sandbox};

use super::decisions::{Entry, Tree, context, path_entry};
use super::support::{project, root, special};

fn planner(capabilities: Capabilities) -> Sandbox {
    planner_below(None, capabilities)
}

fn planner_below(ceiling: Option<SandboxContext>, capabilities: Capabilities) -> Sandbox {
    Sandbox::new({
        let mut config = Config::new("/codex");
        config.capabilities = Some(capabilities);
        config.ceiling = ceiling;
        config
    })
    .unwrap()
}

fn able() -> Capabilities {
    Capabilities {
        user_namespace: true,
        mount_namespace: true,
        pid_namespace: true,
        network_namespace: true,
        landlock_abi: 7,
        seccomp: true,
        process_limit_for_root: true,
        cgroup_v2: true,
    }
}

/// The steps as one word and a path each.
pub(crate) fn steps(tree: &Tree, context: &SandboxContext) -> (Base, Vec<String>) {
    steps_of(&planner(able()), tree, context)
}

fn steps_of(planner: &Sandbox, tree: &Tree, context: &SandboxContext) -> (Base, Vec<String>) {
    let planned = planner.plan_with(context, Surroundings::default(), tree).unwrap().unwrap();
    let planned_tree = &planned.enforcement().tree;
    let steps = planned_tree.operations.iter().map(|operation| {
        let word = match operation {
            Operation::Skeleton { .. } => "skeleton",
            Operation::Bind { writable: true, .. } => "write",
            Operation::Bind { .. } => "read",
            Operation::Mask { .. } => "mask",
            Operation::PinnedLink { .. } => "pin",
            Operation::Placeholder { .. } => "hold",
            Operation::Proc => "proc",
            Operation::Terminals => "terminals",
            Operation::SharedMemory => "memory",
        };
        format!("{word} {}", operation.path(&planned_tree.placeholders).display())
    });
    (planned_tree.base, steps.collect())
}

/// A device that a policy names is no less there than one that it leaves out, under a ceiling as without one.
#[test]
fn a_sandbox_has_the_usual_devices_unless_an_entry_denies_them() {
    let tree = Tree::new([("/dev/null", Entry::File("")), ("/w/.git", Entry::Directory)]);
    let accesses = [None, Some(AccessMode::Read), Some(AccessMode::Write), Some(AccessMode::Deny)];
    let naming = |access: Option<AccessMode>, above: Option<AccessMode>| {
        let device = access.map(|access| path_entry("/dev/null", access));
        let around = above.map(|access| path_entry("/dev", access));
        context([root(AccessMode::Read)].into_iter().chain(around).chain(device).collect())
    };
    for asked in accesses {
        for above in [None, Some(AccessMode::Read)] {
            let alone = steps(&tree, &naming(asked, above)).1;
            let is_there = alone.contains(&"write /dev/null".to_owned());
            assert_eq!(is_there, asked != Some(AccessMode::Deny), "{asked:?} {alone:?}");
            for most in accesses {
                let planner = planner_below(Some(naming(most, None)), able());
                let both = steps_of(&planner, &tree, &naming(asked, above)).1;
                let is_there = both.contains(&"write /dev/null".to_owned());
                let denied = [asked, most].contains(&Some(AccessMode::Deny));
                assert_eq!(is_there, !denied, "{asked:?} below {most:?}: {both:?}");
            }
        }
    }
}

#[test]
fn plans_match_their_policies() {
    let tree = Tree::new([
        ("/dev/null", Entry::File("")),
        ("/w/.git", Entry::Directory),
        ("/w/a/ro", Entry::Directory),
        ("/w/no/yes", Entry::Directory),
        ("/usr/bin", Entry::Directory),
        ("/bin", Entry::Link("usr/bin")),
    ]);
    let read_only = SandboxContext::new(PermissionProfile::read_only());
    assert_eq!(
        steps(&tree, &read_only),
        (
            Base::ReadOnlyHost,
            ["skeleton /dev", "write /dev/null", "terminals /dev/pts", "proc /proc"]
                .map(str::to_owned)
                .to_vec()
        )
    );
    let (base, steps_taken) = steps(
        &tree,
        &context(vec![
            root(AccessMode::Read),
            project(AccessMode::Write),
            path_entry("/w/a/ro", AccessMode::Read),
            path_entry("/w/no", AccessMode::Deny),
            path_entry("/w/no/yes", AccessMode::Write),
        ]),
    );
    assert_eq!(base, Base::ReadOnlyHost);
    assert_eq!(
        steps_taken,
        [
            "skeleton /dev",
            "write /dev/null",
            "terminals /dev/pts",
            "memory /dev/shm",
            "proc /proc",
            "write /w",
            "hold /w/.agents",
            "hold /w/.codex",
            "read /w/.git",
            "write /w/a",
            "read /w/a/ro",
            "skeleton /w/no",
            "write /w/no/yes",
        ]
    );
    let (base, steps_taken) = steps(
        &tree,
        &context(vec![special(SpecialPath::Minimal, AccessMode::Read), project(AccessMode::Write)]),
    );
    assert_eq!(base, Base::Empty);
    assert_eq!(steps_taken[0], "skeleton /");
    assert!(steps_taken.contains(&"read /usr".to_owned()));
    assert!(!steps_taken.iter().any(|step| step.ends_with("/bin")));
}

#[test]
fn keys_differ_by_restrictions() {
    let tree = Tree::new([("/w", Entry::Directory), ("/w/x", Entry::File(""))]);
    let planner = planner(able());
    let plan = |tree: &Tree, context: &SandboxContext| {
        planner.plan_with(context, Surroundings::default(), tree).unwrap()
    };
    let read_only = SandboxContext::new(PermissionProfile::read_only());
    assert!(plan(&tree, &read_only).unwrap().restricts_files());
    let denies = context(vec![root(AccessMode::Read), path_entry("/w/x", AccessMode::Deny)]);
    let external = PermissionProfile::External { network: NetworkPolicy::Restricted };
    assert!(!plan(&tree, &SandboxContext::new(external)).unwrap().restricts_files());
    assert!(plan(&tree, &SandboxContext::new(PermissionProfile::Disabled)).is_none());
    let key = plan(&tree, &denies).unwrap().key();
    assert_eq!(key, plan(&tree, &denies).unwrap().key());
    assert_ne!(key, plan(&tree, &read_only).unwrap().key());
    // Another inode at the same path is another key.
    let replaced =
        Tree::new([("/a", Entry::Directory), ("/w", Entry::Directory), ("/w/x", Entry::File(""))]);
    assert_ne!(key, plan(&replaced, &denies).unwrap().key());
}

/// A mount does not keep a device from being written, and Landlock cannot narrow what it allows around it.
#[test]
fn devices_that_must_be_read_only_below_a_writable_place_are_refused() {
    use AccessMode::{Deny, Read, Write};
    let tree = Tree::new([
        ("/dev/null", Entry::File("")),
        ("/dev/loop7", Entry::File("")),
        ("/dev/net/tun", Entry::File("")),
        ("/proc/version", Entry::File("")),
    ]);
    let none = Capabilities { landlock_abi: 0, ..able() };
    type Case<'a> = (&'a [(&'a str, AccessMode)], AccessMode, bool, bool);
    // Entries, access to the root; whether it is planned with Landlock, and without.
    let cases: &[Case<'_>] = &[
        (&[("/dev/loop7", Read)], Read, true, false),
        (&[("/dev/net", Read)], Read, true, false),
        (&[("/dev", Write), ("/dev/loop7", Write)], Read, true, true),
        (&[("/dev", Write), ("/dev/loop7", Read)], Read, false, false),
        (&[("/dev", Write), ("/dev/net", Read)], Read, false, false),
        (&[("/dev/net", Write), ("/dev/net/tun", Read)], Read, false, false),
        (&[("/dev/net", Write), ("/dev/net/tun", Deny)], Read, true, true),
        (&[("/dev/loop7", Read)], Write, false, false),
        (&[("/dev", Deny)], Read, false, false),
        (&[("/proc", Deny)], Read, false, false),
        (&[("/proc/version", Deny)], Read, true, true),
    ];
    for (entries, root_access, with, without) in cases {
        for (capabilities, expected) in [(&able(), *with), (&none, *without)] {
            let mut all = vec![root(*root_access)];
            all.extend(entries.iter().map(|(path, access)| path_entry(path, *access)));
            let asked = SandboxContext { assurance: Some(Assurance::Namespaces), ..context(all) };
            let planned =
                planner(capabilities.clone()).plan_with(&asked, Surroundings::default(), &tree);
            match planned {
                Ok(_) => assert!(expected, "{root_access:?} {entries:?}"),
                Err(error @ PrepareError::Unsupported { .. }) => {
                    assert!(!expected, "{root_access:?} {entries:?}: {error}");
                    let (last, _) = entries.last().unwrap();
                    assert!(error.to_string().contains(last), "{error}");
                }
                Err(error) => panic!("{root_access:?} {entries:?}: {error}"),
            }
        }
    }
}

#[test]
fn machines_without_capabilities_refuse() {
    let tree = Tree::new([("/w", Entry::Directory)]);
    let writes = context(vec![root(AccessMode::Read), project(AccessMode::Write)]);
    let reads = SandboxContext::new(PermissionProfile::read_only());
    let refused = |capabilities: Capabilities, context: &SandboxContext| match planner(capabilities)
        .plan_with(context, Surroundings::default(), &tree)
    {
        Err(error @ PrepareError::Unsupported { .. }) => {
            assert!(error.is_unenforceable());
            error.to_string()
        }
        other => panic!("{other:?}"),
    };
    let permitting = |context: &SandboxContext| SandboxContext {
        assurance: Some(Assurance::Landlock),
        ..context.clone()
    };
    let (writes, reads) = (permitting(&writes), permitting(&reads));
    let without = Capabilities { user_namespace: false, ..able() };
    assert!(planner(without.clone()).plan_with(&reads, Surroundings::default(), &tree).is_ok());
    assert!(refused(without.clone(), &writes).contains("allow user namespaces"));
    let old = Capabilities { landlock_abi: 3, ..without.clone() };
    assert!(refused(old, &reads).contains("this is version 3"));
    assert!(refused(Capabilities::none(), &reads).contains("missing: user namespace"));
    let confined = Capabilities { mount_namespace: false, ..able() };
    assert!(refused(confined, &writes).contains("allow mounting inside user namespaces"));
    for check in Capabilities::none().checks() {
        assert!(!check.available && check.remedy.is_some(), "{check:?}");
    }
    // Without user namespaces nothing is known about what is tried inside one.
    let unknown = Capabilities { user_namespace: false, ..Capabilities::none() }.checks();
    let remedy = |name| unknown.iter().find(|check| check.name == name).unwrap().remedy.clone();
    assert_eq!(remedy("process limit for root"), remedy("user namespace"));
    assert!(able().checks().iter().all(|check| check.available && check.remedy.is_none()));
}

#[test]
fn probe_finds_an_assurance_on_this_machine() {
    let probed = Capabilities::probe();
    assert!(probed.assurance().is_some(), "{probed:?}");
}
