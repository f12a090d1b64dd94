//! How single entries and patterns are resolved, against a file system in memory.

use std::path::Path;

use codex_exec_server_protocol::{AccessMode, FileSystemEntry};
use codex_linux_sandbox::decide::facts::Mount;
use codex_linux_sandbox::decide::policy::{PolicyError, Resolved};

use super::decisions::{Entry, Tree, context, place, resolved, tried};
use super::support::{glob, project, root};

/// A denial through a link applies to the current target; only a grant must not follow a link that a
/// sandbox created.
#[test]
fn denial_through_an_earlier_sandbox_link_holds() {
    let tree = Tree::new([
        ("/w/lnk", Entry::Link("/out")),
        ("/w/up", Entry::Link("d/../lnk")),
        ("/w/d", Entry::Directory),
        ("/out/s", Entry::File("")),
    ]);
    for name in ["/w/lnk", "/w/up", "/w/d/../lnk"] {
        let asked = context(vec![root(AccessMode::Read), place(name, AccessMode::Deny)]);
        let Ok(Resolved::Restricted(policy)) = tried(&tree, &asked, &["/w"]) else {
            panic!("{name}");
        };
        assert_eq!(policy.access.access(Path::new("/out/s")), AccessMode::Deny, "{name}");
        assert!(policy.pinned_links.is_empty(), "nothing can be changed inside");
    }
}

#[test]
fn entries_through_per_process_proc_are_refused() {
    let mut tree = Tree::new([
        ("/proc/self", Entry::Link("7")),
        ("/proc/mounts", Entry::Link("self/mounts")),
        ("/proc/7/mounts", Entry::File("")),
        ("/proc/7/root", Entry::Link("/")),
        ("/proc/7/environ", Entry::File("")),
        ("/proc/cpuinfo", Entry::File("")),
        ("/proc/sys/kernel", Entry::Directory),
        ("/alias/7/environ", Entry::File("")),
        ("/alias/cpuinfo", Entry::File("")),
        ("/one/environ", Entry::File("")),
        ("/dev/fd", Entry::Link("/proc/self/fd")),
        ("/etc/x", Entry::File("")),
        ("/w", Entry::Directory),
    ]);
    let mount = |id, file_system, root: &str, point: &str, kind: &str| Mount {
        id,
        file_system,
        root: root.into(),
        point: point.into(),
        kind: kind.to_owned(),
    };
    tree.mounts = vec![
        mount(1, (8, 1), "/", "/", "ext4"),
        mount(2, (0, 4), "/", "/proc", "proc"),
        mount(3, (0, 4), "/", "/alias", "proc"),
        mount(4, (0, 4), "/7", "/one", "proc"),
    ];
    let refused = |entry: FileSystemEntry| {
        let asked = context(vec![root(AccessMode::Read), entry]);
        matches!(tried(&tree, &asked, &[]), Err(PolicyError::Process { .. }))
    };
    for access in [AccessMode::Deny, AccessMode::Read, AccessMode::Write] {
        for path in [
            "/proc/self",
            "/proc/7/environ",
            "/proc/7/root/etc/x",
            "/proc/self/root/etc",
            "/proc/self/missing",
            "/proc/mounts",
            "/dev/fd/0",
            "/alias/7",
            "/one/environ",
        ] {
            assert!(refused(place(path, access)), "{path}");
        }
        for path in ["/proc", "/proc/cpuinfo", "/proc/sys/kernel", "/alias/cpuinfo", "/etc/x"] {
            assert!(!refused(place(path, access)), "{path}");
        }
    }
    for pattern in ["/proc/*/environ", "/proc/self/root/etc/*", "/proc/7/e*"] {
        assert!(refused(glob(pattern)), "{pattern}");
    }
    // Another `/proc` does not show what the sandbox's own shows.
    let asked = context(vec![root(AccessMode::Read), place("/alias/cpuinfo", AccessMode::Deny)]);
    let policy = resolved(&tree, &asked);
    assert_eq!(policy.access.access(Path::new("/proc/cpuinfo")), AccessMode::Read);
    assert_eq!(policy.access.access(Path::new("/alias/cpuinfo")), AccessMode::Deny);
}

#[test]
fn patterns_continue_below_a_match_where_something_is_granted() {
    let tree = Tree::new([
        ("/w/x.env/sub/y.env", Entry::File("")),
        ("/w/x.env/sub/z", Entry::File("")),
        ("/w/x.env/other/y.env", Entry::File("")),
        ("/w/x.env/sub/deep.env/z", Entry::File("")),
    ]);
    let policy = resolved(
        &tree,
        &context(vec![
            root(AccessMode::Read),
            glob("**/*.env"),
            place("/w/x.env/sub", AccessMode::Write),
        ]),
    );
    for (path, access) in [
        ("/w/x.env", AccessMode::Deny),
        ("/w/x.env/sub", AccessMode::Write),
        ("/w/x.env/sub/z", AccessMode::Write),
        ("/w/x.env/sub/y.env", AccessMode::Deny),
        ("/w/x.env/sub/deep.env/z", AccessMode::Deny),
        ("/w/x.env/other/y.env", AccessMode::Deny),
    ] {
        assert_eq!(policy.access.access(Path::new(path)), access, "{path}");
    }
    assert!(policy.region(Path::new("/w/x.env/other/y.env")).is_none(), "nothing to look for");
}

/// A mount that the table does not list could show any file.
#[test]
fn path_on_an_unknown_mount_is_refused() {
    let mut tree = Tree::new([("/w/den", Entry::Directory)]);
    tree.mounts = vec![Mount {
        id: 9,
        file_system: (0, 1),
        root: "/x".into(),
        point: "/y".into(),
        kind: "ext4".to_owned(),
    }];
    let asked = context(vec![project(AccessMode::Write), place("/w/den", AccessMode::Deny)]);
    assert!(matches!(tried(&tree, &asked, &[]), Err(PolicyError::Mounts(_))));
}
