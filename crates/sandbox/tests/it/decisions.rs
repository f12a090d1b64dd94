//! Deciding, against a file system in memory and a simple oracle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use codex_exec_server_protocol::{AccessMode, FileSystemEntry, PermissionProfile, SandboxContext};
use codex_linux_sandbox::decide::facts::{Facts, Identity, Mount, Node, NodeKind};
use codex_linux_sandbox::decide::policy::{
    PolicyError, Resolved, ResolvedPolicy, ServerState, Surroundings, resolve,
};
use codex_linux_sandbox::decide::writable_history::WritableHistory;
use codex_linux_sandbox::{Limits, OwnFiles};
use proptest::prelude::*;

use super::plans::steps;
use super::support::{at, glob, managed, project, root};

#[derive(Default)]
pub(crate) struct Tree {
    pub nodes: BTreeMap<PathBuf, Entry>,
    looks: Cell<usize>,
    pub mounts: Vec<Mount>,
}

pub(crate) enum Entry {
    Directory,
    /// A directory that may not be entered.
    Closed,
    Unlistable,
    File(&'static str),
    Link(&'static str),
}

impl Tree {
    pub(crate) fn new(entries: impl IntoIterator<Item = (&'static str, Entry)>) -> Self {
        let mut tree = Self::default();
        tree.nodes.insert("/".into(), Entry::Directory);
        for (path, entry) in entries {
            for above in Path::new(path).ancestors().skip(1) {
                tree.nodes.entry(above.to_owned()).or_insert(Entry::Directory);
            }
            tree.nodes.insert(path.into(), entry);
        }
        tree
    }
}

impl Facts for Tree {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        self.looks.set(self.looks.get() + 1);
        let closed = |above: &Path| matches!(self.nodes.get(above), Some(Entry::Closed));
        if path.ancestors().skip(1).any(closed) {
            return Err(io::Error::from_raw_os_error(libc::EACCES));
        }
        let position = self.nodes.keys().position(|known| known == path);
        let inode = position.ok_or(io::ErrorKind::NotFound)? as u64;
        let kind = match &self.nodes[path] {
            Entry::Directory | Entry::Closed | Entry::Unlistable => NodeKind::Directory,
            Entry::File(_) => NodeKind::File,
            Entry::Link(_) => NodeKind::Link,
        };
        let around = self.mounts.iter().filter(|mount| path.starts_with(&mount.point));
        let mount = around.max_by_key(|mount| mount.point.as_os_str().len());
        let mount = mount.map_or(1, |mount| mount.id);
        Ok(Node { kind, identity: Identity { device: (0, 1), inode, mount } })
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        match self.nodes.get(path) {
            Some(Entry::Link(target)) => Ok(target.into()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn mounts(&self) -> io::Result<Vec<Mount>> {
        Ok(self.mounts.clone())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        if matches!(self.nodes.get(path), Some(Entry::Closed | Entry::Unlistable)) {
            return Err(io::Error::from_raw_os_error(libc::EACCES));
        }
        let all = self.nodes.keys();
        all.filter(|known| known.parent() == Some(path))
            .map(|known| Ok((known.file_name().unwrap().to_owned(), self.lookup(known)?.kind)))
            .collect()
    }

    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>> {
        match self.nodes.get(path) {
            Some(Entry::File(text)) => Ok(text.as_bytes().to_vec()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

/// A server without own files that has run nothing yet.
pub(crate) fn server() -> ServerState<'static> {
    static OWN_FILES: LazyLock<OwnFiles> = LazyLock::new(OwnFiles::default);
    static WRITTEN: LazyLock<WritableHistory> = LazyLock::new(WritableHistory::default);
    ServerState { own_files: &OWN_FILES, writable_history: &WRITTEN, ceiling: None }
}

pub(crate) fn context(entries: Vec<FileSystemEntry>) -> SandboxContext {
    SandboxContext::in_workspace(managed(entries), "/w".parse().unwrap())
}

pub(crate) fn resolved(tree: &Tree, context: &SandboxContext) -> ResolvedPolicy {
    match resolve(context, Surroundings::default(), tree, &Limits::default(), server()).unwrap() {
        Resolved::Restricted(policy) => *policy,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn path_entry(path: &str, access: AccessMode) -> FileSystemEntry {
    at(Path::new(path), access)
}

fn any_path() -> impl Strategy<Value = String> {
    proptest::collection::vec("[abc]", 0..5).prop_map(|names| format!("/{}", names.join("/")))
}

/// The documented rule: ancestors, the most specific, precedence.
fn oracle(entries: &[(String, AccessMode)], path: &str) -> AccessMode {
    let is_ancestor =
        |above: &str| above == "/" || path == above || path.starts_with(&format!("{above}/"));
    let depth = |path: &str| path.split('/').filter(|name| !name.is_empty()).count();
    let matching: Vec<_> = entries.iter().filter(|(above, _)| is_ancestor(above)).collect();
    let Some(deepest) = matching.iter().map(|(above, _)| depth(above)).max() else {
        return AccessMode::Deny;
    };
    let equals: Vec<AccessMode> =
        matching.iter().filter(|(above, _)| depth(above) == deepest).map(|(_, a)| *a).collect();
    [AccessMode::Deny, AccessMode::Write, AccessMode::Read]
        .into_iter()
        .find(|access| equals.contains(access))
        .unwrap_or(AccessMode::Deny)
}

proptest! {
    #[test]
    fn deciding_entry_matches_the_oracle(
        entries in proptest::collection::vec(
            (any_path(), prop_oneof![
                Just(AccessMode::Read), Just(AccessMode::Write), Just(AccessMode::Deny)
            ]),
            0..12,
        ),
        paths in proptest::collection::vec(any_path(), 1..20),
    ) {
        let tree = Tree::new([]);
        let policy = resolved(
            &tree,
            &context(entries.iter().map(|(path, access)| path_entry(path, *access)).collect()),
        );
        for path in &paths {
            prop_assert_eq!(
                policy.access.access(Path::new(path)),
                oracle(&entries, path),
                "{}", path
            );
        }
    }
}

#[test]
fn links_are_resolved_before_deciding() {
    let tree = Tree::new([
        ("/w", Entry::Directory),
        ("/real/data", Entry::Directory),
        ("/link", Entry::Link("real")),
        ("/w/up", Entry::Link("../link/data")),
    ]);
    let policy = resolved(
        &tree,
        &context(vec![
            path_entry("/link/data", AccessMode::Write),
            path_entry("/w/up", AccessMode::Deny),
        ]),
    );
    assert_eq!(policy.access.access(Path::new("/real/data/x")), AccessMode::Deny);
    assert_eq!(policy.regions.len(), 1);
}

#[test]
fn without_workspace_roots_nothing_is_granted() {
    let tree = Tree::new([("/w", Entry::Directory)]);
    let mut asked = context(vec![root(AccessMode::Read), project(AccessMode::Write)]);
    asked.workspace_roots.clear();
    assert_eq!(resolved(&tree, &asked).access.access(Path::new("/w")), AccessMode::Read);
    asked.cwd = None;
    let result = resolve(&asked, Surroundings::default(), &tree, &Limits::default(), server());
    assert_eq!(result, Err(PolicyError::CwdNeeded));
    let relative = SandboxContext::new(managed(vec![root(AccessMode::Read), glob("*.key")]));
    let result = resolve(&relative, Surroundings::default(), &tree, &Limits::default(), server());
    assert_eq!(result, Err(PolicyError::CwdNeeded));
    let absolute = SandboxContext::new(managed(vec![root(AccessMode::Read), glob("/w/*.key")]));
    assert!(
        resolve(&absolute, Surroundings::default(), &tree, &Limits::default(), server()).is_ok()
    );
}

#[test]
fn no_entry_opens_files_of_the_server() {
    let tree = Tree::new([
        ("/w/codex", Entry::File("")),
        ("/w/token", Entry::File("")),
        ("/state/sessions/a.json", Entry::File("")),
        ("/link", Entry::Link("/state")),
        ("/other", Entry::Directory),
    ]);
    let own = OwnFiles {
        denied: ["/w/token", "/link/sessions", "/missing"].map(PathBuf::from).to_vec(),
        read_only: vec!["/w/codex".into()],
    };
    let access = |entries: Vec<FileSystemEntry>, path: &str| {
        let state = ServerState { own_files: &own, ..server() };
        let resolved =
            resolve(&context(entries), Surroundings::default(), &tree, &Limits::default(), state);
        let Ok(Resolved::Restricted(policy)) = resolved else { panic!("{resolved:?}") };
        for (path, region) in &policy.regions {
            assert_eq!(policy.access.access(path), region.access, "{}", path.display());
        }
        policy.access.access(Path::new(path))
    };
    use AccessMode::{Deny, Read, Write};
    for most in [Read, Write] {
        for path in ["/w/token", "/state/sessions", "/state/sessions/a.json"] {
            assert_eq!(access(vec![root(most)], path), Deny, "{path}");
            assert_eq!(access(vec![path_entry(path, most)], path), Deny, "{path}");
            assert_eq!(access(vec![root(most), path_entry(path, most)], path), Deny, "{path}");
            assert_eq!(
                access(vec![path_entry("/state", most), path_entry(path, most)], path),
                Deny
            );
        }
        assert_eq!(access(vec![root(most)], "/other"), most);
        assert_eq!(access(vec![root(most)], "/state"), most);
        assert_eq!(access(vec![root(most)], "/w/codex"), Read);
        assert_eq!(access(vec![root(Read), path_entry("/w/codex", most)], "/w/codex"), Read);
        assert_eq!(access(vec![root(Read), path_entry("/w", most)], "/w/codex"), Read);
    }
    assert_eq!(access(vec![path_entry("/w/codex", Write)], "/w/codex"), Read);
    assert_eq!(access(vec![root(Read), path_entry("/w/codex", Deny)], "/w/codex"), Deny);
    assert_eq!(access(vec![path_entry("/other", Read)], "/w/codex"), Deny);
}

#[test]
fn patterns_expand_to_existing_files() {
    let tree = Tree::new([
        ("/w/.env", Entry::File("")),
        ("/w/a/.env", Entry::File("")),
        ("/w/a/b/c/.env", Entry::File("")),
        ("/w/a/link", Entry::Link("/w")),
        ("/x/.env", Entry::File("")),
    ]);
    let denied = |pattern: &str, depth: Option<u32>| -> Vec<String> {
        let mut asked = context(vec![root(AccessMode::Read), glob(pattern)]);
        if let PermissionProfile::Managed {
            file_system: codex_exec_server_protocol::FileSystemPolicy::Restricted(restricted),
            ..
        } = &mut asked.permissions
        {
            restricted.glob_scan_max_depth = depth.and_then(std::num::NonZeroU32::new);
        }
        let policy = resolved(&tree, &asked);
        let denied = policy.regions.iter().filter(|(_, region)| region.access == AccessMode::Deny);
        denied.map(|(path, _)| path.to_str().unwrap().to_owned()).collect()
    };
    assert_eq!(denied("**/.env", None), ["/w/.env", "/w/a/.env", "/w/a/b/c/.env"]);
    assert_eq!(denied("**/.env", Some(2)), ["/w/.env", "/w/a/.env"]);
    assert_eq!(denied("a/.env", Some(1)), ["/w/a/.env"]);
    assert_eq!(denied("/x/.env", Some(1)), ["/x/.env"]);
    assert_eq!(denied("a/", None), ["/w/a"]);
    assert_eq!(denied("*.nothing", None), Vec::<String>::new());
    // A link that the pattern names is followed; one that a search finds is not.
    assert_eq!(denied("a/link/a/.env", None), ["/w/a/.env"]);
    assert_eq!(denied("/w/a/link/**/.env", None), denied("**/.env", None));
    assert_eq!(denied("*/link/.env", None), ["/w/.env"]);
    assert_eq!(denied("a/*/a/.env", None), Vec::<String>::new());
}

/// The link stays unchanged, whoever created it.
#[test]
fn link_named_by_a_pattern_is_pinned() {
    let tree = Tree::new([
        ("/w/real/x.env", Entry::File("")),
        ("/w/conf", Entry::Link("real")),
        ("/w/gone", Entry::Link("nowhere")),
    ]);
    let policy = resolved(
        &tree,
        &context(vec![
            root(AccessMode::Read),
            path_entry("/w", AccessMode::Write),
            glob("/w/conf/*.env"),
            glob("/w/gone/*.env"),
        ]),
    );
    assert_eq!(policy.access.access(Path::new("/w/real/x.env")), AccessMode::Deny);
    assert!(policy.pinned_links.contains_key(Path::new("/w/conf")), "{:?}", policy.pinned_links);
}

#[test]
fn each_path_is_looked_up_once() {
    let tree = Tree::new([("/w", Entry::Directory), ("/deep/a/b/c", Entry::Directory)]);
    let entries = (0..500).map(|n| path_entry(&format!("/deep/a/b/c/{n}"), AccessMode::Read));
    resolved(&tree, &context(entries.collect()));
    assert!(tree.looks.get() < 600, "{}", tree.looks.get());
}

/// What resolving says, for a server whose sandboxes have written to `writable_history`.
pub(crate) fn tried(
    tree: &Tree,
    context: &SandboxContext,
    writable_history: &[&str],
) -> Result<Resolved, PolicyError> {
    let mut known = WritableHistory::default();
    writable_history.iter().for_each(|path| known.add(path.into()));
    let state = ServerState { writable_history: &known, ..server() };
    resolve(context, Surroundings::default(), tree, &Limits::default(), state)
}

fn is_link(result: &Result<Resolved, PolicyError>, expected: &str) -> bool {
    matches!(result, Err(PolicyError::Link { link, .. }) if link == Path::new(expected))
}

fn is_unreachable(result: &Result<Resolved, PolicyError>, expected: &str) -> bool {
    matches!(result, Err(PolicyError::Unreachable { at, .. }) if at == Path::new(expected))
}

#[test]
fn grant_through_a_link_that_a_sandbox_could_create_is_refused() {
    let tree = Tree::new([
        ("/w/link", Entry::Link("/etc")),
        ("/w/deep/er", Entry::Link("../../etc")),
        ("/etc/app", Entry::Directory),
        ("/srv/link", Entry::Link("/etc")),
    ]);
    for access in [AccessMode::Read, AccessMode::Write] {
        for (named, link) in [("/w/link", "/w/link"), ("/w/deep/er/app", "/w/deep/er")] {
            let asked = context(vec![project(AccessMode::Write), path_entry(named, access)]);
            assert!(is_link(&tried(&tree, &asked, &[]), link), "{named} {access:?}");
        }
        // Where it makes no difference the link may lead anywhere.
        let asked = context(vec![
            project(AccessMode::Write),
            path_entry("/etc", AccessMode::Read),
            path_entry("/srv/link/app", AccessMode::Read),
        ]);
        assert!(tried(&tree, &asked, &["/"]).is_ok());
        // Nothing inside can write there, under this policy or another.
        let asked = context(vec![project(AccessMode::Write), path_entry("/srv/link/app", access)]);
        assert!(tried(&tree, &asked, &["/tmp"]).is_ok());
        assert!(is_link(&tried(&tree, &asked, &["/srv"]), "/srv/link"));
    }
}

#[test]
fn link_on_the_way_to_a_denied_path_is_pinned() {
    let tree = Tree::new([
        ("/w/a/link", Entry::Link("../real")),
        ("/w/real/key", Entry::File("")),
        ("/w/.env", Entry::Link("real/other")),
        ("/w/real/other", Entry::File("")),
    ]);
    let asked = context(vec![
        project(AccessMode::Write),
        path_entry("/w/a/link/key", AccessMode::Deny),
        glob(".env"),
    ]);
    let policy = resolved(&tree, &asked);
    for denied in ["/w/real/key", "/w/real/other"] {
        assert_eq!(policy.access.access(Path::new(denied)), AccessMode::Deny);
    }
    let pinned: Vec<&Path> = policy.pinned_links.keys().map(PathBuf::as_path).collect();
    assert_eq!(pinned, [Path::new("/w/.env"), Path::new("/w/a/link")]);
}

#[test]
fn removable_obstacle_is_refused() {
    let tree = Tree::new([
        ("/w/closed", Entry::Closed),
        ("/w/closed/key", Entry::File("")),
        ("/w/file", Entry::File("")),
        ("/root", Entry::Closed),
        ("/root/key", Entry::File("")),
        ("/second", Entry::Closed),
    ]);
    let with = |entry| context(vec![project(AccessMode::Write), entry]);
    let denied = |path| with(path_entry(path, AccessMode::Deny));
    assert!(is_unreachable(&tried(&tree, &denied("/w/closed/key"), &[]), "/w/closed"));
    assert!(is_unreachable(&tried(&tree, &denied("/w/file/key"), &[]), "/w/file"));
    assert!(is_unreachable(&tried(&tree, &with(glob("**/key")), &[]), "/w/closed"));
    // Its `.git` cannot be looked at.
    let second = with(path_entry("/second", AccessMode::Write));
    assert!(is_unreachable(&tried(&tree, &second, &[]), "/second"));
    // Nothing inside can change the mode of a directory that is not writable there.
    assert!(tried(&tree, &denied("/root/key"), &[]).is_ok());
    assert!(is_unreachable(&tried(&tree, &denied("/root/key"), &["/root"]), "/root"));
}

#[test]
fn patterns_are_expanded_completely_or_refused() {
    let deep = "/w/".to_owned() + &"d/".repeat(40) + ".env";
    let tree = Tree::new([(&*deep.leak(), Entry::File(""))]);
    let asked = context(vec![project(AccessMode::Write), glob("**/.env")]);
    assert!(matches!(tried(&tree, &asked, &[]), Err(PolicyError::GlobDepth(_))));
}

#[test]
fn files_mounted_twice_are_protected_under_both_paths() {
    let mount = |id, file_system, root: &str, point: &str, kind: &str| Mount {
        id,
        file_system,
        root: root.into(),
        point: point.into(),
        kind: kind.to_owned(),
    };
    let mut tree = Tree::new([
        ("/w/den/key", Entry::File("")),
        ("/w/.git", Entry::Directory),
        ("/tmp/alias/den/key", Entry::File("")),
        ("/tmp/alias/.git", Entry::Directory),
        ("/tmp/part", Entry::File("")),
        ("/tmp/proc/1", Entry::Directory),
        ("/sys/kernel", Entry::Directory),
        ("/w/root/dev/pts/3", Entry::File("")),
        ("/w/queues/one", Entry::File("")),
    ]);
    tree.mounts = vec![
        mount(1, (8, 1), "/", "/", "ext4"),
        mount(2, (8, 1), "/w", "/tmp/alias", "ext4"),
        mount(3, (8, 1), "/w/den/key", "/tmp/part", "ext4"),
        mount(4, (0, 4), "/", "/tmp/proc", "proc"),
        mount(5, (0, 5), "/", "/sys", "sysfs"),
        mount(6, (0, 6), "/", "/w/root/dev/pts", "devpts"),
        mount(7, (0, 7), "/", "/w/queues", "mqueue"),
    ];
    let asked = context(vec![
        root(AccessMode::Write),
        project(AccessMode::Write),
        path_entry("/w/den", AccessMode::Deny),
    ]);
    let policy = resolved(&tree, &asked);
    for (path, access) in [
        ("/tmp/alias/den/key", AccessMode::Deny),
        ("/tmp/part", AccessMode::Deny),
        ("/tmp/proc/1", AccessMode::Deny),
        ("/tmp/alias/.git", AccessMode::Read),
        ("/sys/kernel", AccessMode::Read),
        ("/w/root/dev/pts/3", AccessMode::Read),
        ("/w/queues/one", AccessMode::Read),
        ("/w/root/dev", AccessMode::Write),
        ("/tmp/alias", AccessMode::Write),
    ] {
        assert_eq!(policy.access.access(Path::new(path)), access, "{path}");
    }
    let protected = policy.protected.iter().any(|name| {
        name.parent == Path::new("/tmp/alias") && name.missing == [OsString::from(".codex")]
    });
    assert!(protected, "{:?}", policy.protected);
}

#[test]
fn server_files_are_protected_with_their_links_and_before_they_exist() {
    let tree = Tree::new([
        ("/w/token", Entry::Link("../real/token")),
        ("/real/token", Entry::File("")),
        ("/w/home", Entry::Directory),
    ]);
    let own = OwnFiles {
        denied: vec!["/w/token".into(), "/w/home/.codex/auth.json".into()],
        read_only: Vec::new(),
    };
    let state = ServerState { own_files: &own, ..server() };
    let asked = context(vec![root(AccessMode::Read), project(AccessMode::Write)]);
    let limits = Limits::default();
    let resolved = resolve(&asked, Surroundings::default(), &tree, &limits, state).unwrap();
    let Resolved::Restricted(policy) = resolved else { panic!() };
    assert_eq!(policy.access.access(Path::new("/real/token")), AccessMode::Deny);
    assert!(policy.pinned_links.contains_key(Path::new("/w/token")));
    let planted = policy.protected.iter().any(|name| name.parent == Path::new("/w/home"));
    assert!(planted, "{:?}", policy.protected);
}

#[test]
fn only_needed_writable_roots_are_created() {
    let tree = Tree::new([("/w/.git", Entry::Directory), ("/srv", Entry::Directory)]);
    for (path, created) in [("/srv/new", true), ("/w/build.log", false), ("/w/.git/index", false)] {
        let asked = context(vec![project(AccessMode::Write), path_entry(path, AccessMode::Write)]);
        let policy = resolved(&tree, &asked);
        assert_eq!(!policy.missing_roots.is_empty(), created, "{path}");
    }
}

#[test]
fn name_below_too_many_missing_ones_is_refused() {
    let pointer = format!("gitdir: {}git\n", "a/".repeat(3_000));
    let tree = Tree::new([("/w/.git", Entry::File(pointer.leak()))]);
    let asked = context(vec![project(AccessMode::Write)]);
    assert!(is_unreachable(&tried(&tree, &asked, &[]), "/w"));
    let denied = format!("/w/{}x", "a/".repeat(100));
    let asked = context(vec![project(AccessMode::Write), path_entry(&denied, AccessMode::Deny)]);
    assert!(is_unreachable(&tried(&tree, &asked, &[]), "/w"));
}

#[test]
fn directory_left_by_dot_dot_is_pinned() {
    let tree = Tree::new([
        ("/w/lk", Entry::Link("d/e/../../sec")),
        ("/w/d/e", Entry::Directory),
        ("/w/sec/f", Entry::File("")),
        ("/w/.git", Entry::File("gitdir: d/g/../gd\n")),
        ("/w/d/g", Entry::Directory),
        ("/w/d/gd", Entry::Directory),
        ("/out/lk", Entry::Link("../w/d/e/../../sec")),
    ]);
    let asked = context(vec![project(AccessMode::Write), path_entry("/w/lk", AccessMode::Deny)]);
    let policy = resolved(&tree, &asked);
    for kept in ["/w/d/e", "/w/d", "/w/d/g"] {
        assert!(policy.pinned_directories.contains(Path::new(kept)), "{kept}");
    }
    // A grant through such a path is refused.
    let asked = context(vec![project(AccessMode::Write), path_entry("/out/lk", AccessMode::Write)]);
    assert!(is_link(&tried(&tree, &asked, &[]), "/w/d/e"));
}

#[test]
fn pinned_directory_stays_denied() {
    for denied in ["/w/den", "/w/den/deep"] {
        let tree = Tree::new([
            ("/w/den/deep/key", Entry::File("")),
            ("/w/git", Entry::Directory),
            ("/w/.git", Entry::Link("den/deep/../../git")),
        ]);
        let entries = vec![
            project(AccessMode::Write),
            path_entry(denied, AccessMode::Deny),
            path_entry("/w/den/deep/key", AccessMode::Read),
        ];
        let (_, steps) = steps(&tree, &context(entries));
        let at = |path: &str| {
            let here = steps.iter().filter(|step| step.ends_with(&format!(" {path}")));
            here.cloned().collect::<Vec<_>>()
        };
        assert_eq!(at(denied), [format!("skeleton {denied}")], "{steps:?}");
        assert_eq!(at("/w/den/deep/key"), ["read /w/den/deep/key"], "{steps:?}");
        if denied == "/w/den/deep" {
            assert_eq!(at("/w/den"), ["write /w/den"], "it keeps its name: {steps:?}");
        }
    }
}

#[test]
fn link_is_checked_under_every_alias_of_its_directory() {
    let mount = |id, root: &str, point: &str| Mount {
        id,
        file_system: (8, 1),
        root: root.into(),
        point: point.into(),
        kind: "ext4".to_owned(),
    };
    let mut tree = Tree::new([
        ("/a/lk", Entry::Link("../vic")),
        ("/al/lk", Entry::Link("../vic")),
        ("/vic/s", Entry::File("")),
    ]);
    tree.mounts = vec![mount(1, "/", "/"), mount(2, "/a", "/al")];
    let through =
        |access| context(vec![path_entry("/al", AccessMode::Write), path_entry("/a/lk/s", access)]);
    assert!(is_link(&tried(&tree, &through(AccessMode::Write), &[]), "/a/lk"));
    let narrow = context(vec![path_entry("/a/lk/s", AccessMode::Write)]);
    assert!(is_link(&tried(&tree, &narrow, &["/al"]), "/a/lk"));
    let policy = resolved(&tree, &through(AccessMode::Deny));
    assert!(policy.pinned_links.contains_key(Path::new("/al/lk")), "{:?}", policy.pinned_links);
}
