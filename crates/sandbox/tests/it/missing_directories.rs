//! Paths through directories that do not exist, and `..` after them.

use std::path::Path;

use codex_exec_server_protocol::{
    AccessMode, FileSystemPolicy, NetworkPolicy, PermissionProfile, SandboxContext,
};
use codex_linux_sandbox::decide::policy::{
    PolicyError, Resolved, ServerState, Surroundings, resolve,
};
use codex_linux_sandbox::{Limits, OwnFiles};

use super::decisions::*;
use super::support::{project, root};

/// On the host the path leads nowhere while `x` is missing, but anyone may create it.
#[test]
fn server_files_behind_missing_directories_are_protected() {
    let own = OwnFiles {
        denied: vec!["/w/x/../home/auth.json".into(), "/w/y/../later/auth.json".into()],
        read_only: vec!["/w/x/../codex".into()],
    };
    let tree = Tree::new([("/w/home/auth.json", Entry::File("")), ("/w/codex", Entry::File(""))]);
    let state = ServerState { own_files: &own, ..server() };
    let limits = Limits::default();
    let network_only = SandboxContext::new(PermissionProfile::Managed {
        file_system: FileSystemPolicy::Unrestricted,
        network: NetworkPolicy::Restricted,
    });
    for asked in [context(vec![root(AccessMode::Read), project(AccessMode::Write)]), network_only] {
        let resolved = resolve(&asked, Surroundings::default(), &tree, &limits, state).unwrap();
        let access = match &resolved {
            Resolved::Restricted(policy) | Resolved::NetworkOnly(policy) => &policy.access,
            Resolved::Unrestricted => panic!(),
        };
        assert_eq!(access.access(Path::new("/w/home/auth.json")), AccessMode::Deny);
        let Resolved::Restricted(policy) = &resolved else { continue };
        assert_eq!(access.access(Path::new("/w/codex")), AccessMode::Read);
        for missing in [&["x"][..], &["y"], &["later", "auth.json"]] {
            let held = policy.protected.iter().any(|name| name.missing == missing);
            assert!(held, "{missing:?} of {:?}", policy.protected);
        }
    }
}

/// What a grant opens does not depend on what a command creates; a denial holds whatever it creates.
#[test]
fn entries_behind_missing_directories_grant_nothing() {
    let tree = Tree::new([
        ("/etc/link", Entry::Link("/w/nope/../target")),
        ("/w/target/x", Entry::File("")),
        ("/ro/link", Entry::Link("nope/../target")),
        ("/ro/target/x", Entry::File("")),
    ]);
    let tried_with = |path: &str, access: AccessMode| {
        let entries = vec![project(AccessMode::Write), path_entry(path, access)];
        tried(&tree, &context(entries), &[])
    };
    for access in [AccessMode::Read, AccessMode::Write] {
        let refused = tried_with("/etc/link", access);
        assert!(
            matches!(&refused, Err(PolicyError::Unreachable { name, at, .. })
                if name == Path::new("/etc/link") && at == Path::new("/w/nope")),
            "{refused:?}"
        );
        // Nothing inside can create what is missing.
        let Ok(Resolved::Restricted(policy)) = tried_with("/ro/link", access) else { panic!() };
        assert_eq!(policy.access.access(Path::new("/ro/target/x")), AccessMode::Deny);
        assert_eq!(policy.missing_roots, []);
    }
    let Ok(Resolved::Restricted(policy)) = tried_with("/etc/link", AccessMode::Deny) else {
        panic!()
    };
    assert_eq!(policy.access.access(Path::new("/w/target/x")), AccessMode::Deny);
    assert!(policy.protected.iter().any(|name| name.missing == ["nope"]), "{:?}", policy.protected);
}
