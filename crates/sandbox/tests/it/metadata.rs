//! Protected metadata, decided against a file system in memory.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;
use codex_linux_sandbox::decide::policy::{PolicyError, ProtectedName, Resolved, ResolvedPolicy};

use super::decisions::{Entry, Tree, context, path_entry, resolved, tried};
use super::support::{project, root};

#[test]
fn metadata_is_protected() {
    let tree = Tree::new([
        ("/w/.git", Entry::File("gitdir: ../other/.git/worktrees/w\n")),
        ("/w/.codex", Entry::Directory),
        ("/other/.git/worktrees/w", Entry::Directory),
        ("/data/.git/config", Entry::File("")),
    ]);
    let policy = resolved(
        &tree,
        &context(vec![
            root(AccessMode::Read),
            project(AccessMode::Write),
            path_entry("/data", AccessMode::Write),
            path_entry("/other", AccessMode::Write),
        ]),
    );
    let access = |path: &str| policy.access.access(Path::new(path));
    assert_eq!(access("/w/x"), AccessMode::Write);
    for path in ["/w/.git", "/w/.codex/x", "/other/.git/worktrees/w/HEAD", "/data/.git/config"] {
        assert_eq!(access(path), AccessMode::Read, "{path}");
    }
    let protected: Vec<PathBuf> =
        policy.protected.iter().map(|name| name.parent.join(&name.missing[0])).collect();
    assert_eq!(protected, [Path::new("/w/.agents")]);
    // An entry that names them decides.
    let policy = resolved(
        &tree,
        &context(vec![
            project(AccessMode::Write),
            path_entry("/w/.git", AccessMode::Write),
            path_entry("/w/.agents", AccessMode::Write),
        ]),
    );
    assert_eq!(policy.access.access(Path::new("/w/.git")), AccessMode::Write);
    assert!(policy.protected.is_empty());
}

#[test]
fn git_targets_are_protected_even_before_they_exist() {
    let tree = Tree::new([
        ("/w/tree/.git", Entry::File("gitdir: ../main/.git/worktrees/tree\n")),
        ("/w/main/.git/worktrees/tree/commondir", Entry::File("../..\n")),
        ("/w/dangling/.git", Entry::File("gitdir: ../elsewhere/git\n")),
        ("/w/link/.git", Entry::Link("../later")),
    ]);
    let roots = ["/w", "/w/tree", "/w/dangling", "/w/link"];
    let policy =
        resolved(&tree, &context(roots.map(|root| path_entry(root, AccessMode::Write)).to_vec()));
    for path in ["/w/main/.git", "/w/main/.git/hooks/x", "/w/tree/.git", "/w/dangling/.git"] {
        assert_eq!(policy.access.access(Path::new(path)), AccessMode::Read, "{path}");
    }
    let missing: Vec<PathBuf> = policy
        .protected
        .iter()
        .map(|name| name.missing.iter().fold(name.parent.clone(), |path, name| path.join(name)))
        .collect();
    for path in ["/w/elsewhere/git", "/w/later"] {
        assert!(missing.contains(&PathBuf::from(path)), "{path} of {missing:?}");
    }
    assert!(policy.pinned_links.contains_key(Path::new("/w/link/.git")));
}

#[test]
fn targets_of_links_in_metadata_are_protected() {
    let tree = Tree::new([
        ("/w/.git/hooks", Entry::Link("../hk")),
        ("/w/.git/config", Entry::Link("../way/cfg")),
        ("/w/.git/config.worktree", Entry::Link("/w/later/cfg")),
        ("/w/.git/info/attributes", Entry::Link("../../attributes")),
        ("/w/.git/objects/info/alternates", Entry::Link("/w/alternates")),
        ("/w/.git/refs/heads/main", Entry::Link("/w/deeper")),
        ("/w/.git/named", Entry::Link("/w/named")),
        ("/w/.git/out", Entry::Link("/out/x")),
        ("/w/.git/loop", Entry::Link("loop")),
        ("/w/.codex/config.toml", Entry::Link("../codex.toml")),
        ("/w/.agents/skills", Entry::Link("../skills")),
        ("/w/tree/.git", Entry::File("gitdir: ../main/.git/worktrees/tree\n")),
        ("/w/main/.git/worktrees/tree/commondir", Entry::File("../..\n")),
        ("/w/main/.git/hooks/update", Entry::Link("/w/scripts/update")),
        ("/w/hk/post-commit", Entry::Link("../scripts/post")),
        ("/w/way", Entry::Link("real")),
        ("/w/real/cfg", Entry::File("")),
        ("/w/attributes", Entry::File("")),
        ("/w/alternates", Entry::File("")),
        ("/w/deeper", Entry::File("")),
        ("/w/named/x", Entry::File("")),
        ("/w/codex.toml", Entry::File("")),
        ("/w/skills/one", Entry::File("")),
        ("/w/scripts/post", Entry::File("")),
        ("/w/scripts/update", Entry::File("")),
        ("/out/x", Entry::File("")),
    ]);
    let entries = ["/w", "/w/tree", "/w/named"].map(|root| path_entry(root, AccessMode::Write));
    let asked = context(entries.to_vec());
    // In the first request, and after its own sandboxes have written to the workspace.
    for written in [&[][..], &["/w"]] {
        let resolved = tried(&tree, &asked, written);
        let Ok(Resolved::Restricted(policy)) = resolved else { panic!("{resolved:?}") };
        for (path, access) in [
            ("/w/hk", AccessMode::Read),
            ("/w/hk/new", AccessMode::Read),
            ("/w/scripts/post", AccessMode::Read),
            ("/w/scripts/update", AccessMode::Read),
            ("/w/real/cfg", AccessMode::Read),
            ("/w/attributes", AccessMode::Read),
            ("/w/alternates", AccessMode::Read),
            ("/w/codex.toml", AccessMode::Read),
            ("/w/skills/one", AccessMode::Read),
            ("/out/x", AccessMode::Deny),
            // Not directly inside, beside what is protected, or named by an entry.
            ("/w/deeper", AccessMode::Write),
            ("/w/scripts/other", AccessMode::Write),
            ("/w/real/other", AccessMode::Write),
            ("/w/named/x", AccessMode::Write),
        ] {
            assert_eq!(policy.access.access(Path::new(path)), access, "{path}");
        }
        assert!(policy.pinned_links.contains_key(Path::new("/w/way")));
        let later = policy.protected.iter().any(|name| name.missing == ["later", "cfg"]);
        assert!(later, "{:?}", policy.protected);
    }
}

/// git resolves it relative to the name's directory, not the file's.
#[test]
fn git_pointer_behind_a_link_is_read_like_git() {
    let tree = Tree::new([
        ("/w/.git", Entry::Link("meta/pointer")),
        ("/w/meta/pointer", Entry::File("gitdir: real\n")),
        ("/w/meta/real/hooks", Entry::Directory),
        ("/w/real/hooks", Entry::Directory),
    ]);
    let policy =
        resolved(&tree, &context(vec![root(AccessMode::Read), project(AccessMode::Write)]));
    for path in ["/w/real/hooks", "/w/meta/real/hooks", "/w/meta/pointer"] {
        assert_eq!(policy.access.access(Path::new(path)), AccessMode::Read, "{path}");
    }
    assert_eq!(policy.access.access(Path::new("/w/meta/other")), AccessMode::Write);
}

#[test]
fn git_pointer_is_read_like_git() {
    for (text, target) in [
        ("gitdir: real \n", "/w/real "),
        ("gitdir: real\t", "/w/real\t"),
        ("gitdir:  real\n", "/w/ real"),
        ("gitdir: re\nal\n", "/w/re\nal"),
        ("gitdir: real\r\n\n", "/w/real"),
        ("gitdir: ./a/../real\n", "/w/real"),
    ] {
        let mut tree = Tree::new([("/w/.git", Entry::File(text)), ("/w/a", Entry::Directory)]);
        tree.nodes.insert(target.into(), Entry::Directory);
        let policy = resolved(&tree, &context(vec![project(AccessMode::Write)]));
        let access = policy.access.access(&Path::new(target).join("hooks"));
        assert_eq!(access, AccessMode::Read, "{text:?}");
    }
}

/// A link may lead to a directory around the repository: what is protected inside stays protected, and
/// a directory that an entry names keeps the entry's access.
#[test]
fn link_to_a_directory_around_the_repository_keeps_it_usable() {
    let tree = Tree::new([
        ("/w/.git", Entry::File("gitdir: /w/sub/main/.git/worktrees/one")),
        ("/w/sub/main/.git/worktrees/one/commondir", Entry::File("../..\n")),
        ("/w/sub/main/.git/hooks/pre-commit", Entry::File("")),
        ("/w/sub/main/.git/hooks/lnk", Entry::Link("/w/sub")),
        ("/w/sub/b", Entry::Directory),
    ]);
    let mut asked = context(vec![project(AccessMode::Write)]);
    asked.workspace_roots = ["/w", "/w/sub/b", "/w/sub"].map(|root| root.parse().unwrap()).to_vec();
    let policy = resolved(&tree, &asked);
    let paths = policy.regions.iter().map(|(path, _)| path.to_str().unwrap());
    assert!(
        paths.clone().all(|path| path == "/" || !path.ends_with('/')),
        "{:?}",
        paths.collect::<Vec<_>>()
    );
    for path in ["/w/sub/main/.git", "/w/sub/main/.git/hooks/pre-commit"] {
        assert_eq!(policy.access.access(Path::new(path)), AccessMode::Read, "{path}");
    }
    for path in ["/w/sub", "/w/sub/b", "/w/sub/main"] {
        assert_eq!(policy.access.access(Path::new(path)), AccessMode::Write, "{path}");
    }
}

/// Protecting it would take the root away; not protecting it would leave everything open.
#[test]
fn metadata_leading_to_a_writable_directory_around_the_root_is_refused() {
    let refused = |nodes: Vec<(&'static str, Entry)>, writable: &[&str]| {
        let tree = Tree::new(nodes.into_iter().chain([("/p/w/x", Entry::File(""))]));
        let entries = writable.iter().map(|path| path_entry(path, AccessMode::Write));
        let mut asked = context(std::iter::once(root(AccessMode::Read)).chain(entries).collect());
        asked.workspace_roots = vec!["/p/w".parse().unwrap()];
        match tried(&tree, &asked, &[]) {
            Err(PolicyError::Unreachable { name, at, .. }) => Some((name, at)),
            Ok(_) => None,
            other => panic!("{other:?}"),
        }
    };
    let to = |name: &str, at: &str| Some((PathBuf::from(name), PathBuf::from(at)));
    let (root, around) = (&["/p/w"][..], &["/p/w", "/p"][..]);
    let pointer = || vec![("/p/w/.git", Entry::File("gitdir: .\n"))];
    assert_eq!(refused(pointer(), root), to("/p/w/.", "/p/w"));
    assert_eq!(refused(pointer(), &["/p"]), to("/p/w/.", "/p/w"), "no entry names the root");
    for name in ["/p/w/.git", "/p/w/.agents", "/p/w/.codex"] {
        assert_eq!(refused(vec![(name, Entry::Link("."))], root), to(name, "/p/w"));
        assert_eq!(refused(vec![(name, Entry::Link(".."))], around), to(name, "/p"));
        // What cannot be written needs no protection.
        assert_eq!(refused(vec![(name, Entry::Link(".."))], root), None, "{name}");
    }
    let shared = || vec![("/p/w/.git/commondir", Entry::File("..\n"))];
    assert_eq!(refused(shared(), root), to("/p/w/.git/..", "/p/w"));
    for name in ["/p/w/.git/hooks", "/p/w/.git/info", "/p/w/.git/objects/info"] {
        assert_eq!(refused(vec![(name, Entry::Link("/p/w"))], root), to(name, "/p/w"));
    }
    // git does not use it by that name.
    assert_eq!(refused(vec![("/p/w/.git/other", Entry::Link("/p/w"))], root), None);
    // The root is the hooks directory.
    let hooks = vec![("/p/hooks/.git", Entry::File("gitdir: ..\n"))];
    let tree = Tree::new(hooks);
    let mut asked = context(vec![path_entry("/p/hooks", AccessMode::Write)]);
    asked.workspace_roots = vec!["/p/hooks".parse().unwrap()];
    assert!(tried(&tree, &asked, &[]).is_err());
}

/// `missing/..` leads nowhere, until a placeholder or a command creates the missing name: then it leads
/// to what is behind it.
#[test]
fn targets_behind_missing_directories_are_protected() {
    let missing = |policy: &ResolvedPolicy| -> Vec<PathBuf> {
        let path =
            |name: &ProtectedName| name.parent.join(name.missing.iter().collect::<PathBuf>());
        policy.protected.iter().map(path).collect()
    };
    for (name, lead) in [
        ("/w/.git", Entry::File("gitdir: nope/../gd\n")),
        ("/w/.git", Entry::File("gitdir: nope/a/b/../../../gd\n")),
        ("/w/.git", Entry::Link("nope/../gd")),
        ("/w/.git", Entry::Link("sub/nope/../../gd")),
        ("/w/.git", Entry::Link("nope/../link")),
        ("/w/.git/commondir", Entry::File("../nope/../gd")),
        ("/w/.git/hooks", Entry::Link("../nope/../gd")),
        ("/w/.git/objects/info", Entry::Link("../../nope/../gd")),
        ("/w/.git/hooks/pre-commit", Entry::Link("../../nope/../gd")),
        ("/w/.codex", Entry::Link("nope/../gd")),
        ("/w/.agents/x", Entry::Link("../nope/../gd")),
    ] {
        for exists in [false, true] {
            let lead = match lead {
                Entry::File(text) => Entry::File(text),
                Entry::Link(target) => Entry::Link(target),
                _ => unreachable!(),
            };
            let mut nodes = vec![
                (name, lead),
                ("/w/sub", Entry::Directory),
                ("/w/link", Entry::Link("nope/../gd")),
            ];
            if exists {
                nodes.push(("/w/gd/hooks", Entry::Directory));
            }
            let tree = Tree::new(nodes);
            let policy =
                resolved(&tree, &context(vec![root(AccessMode::Read), project(AccessMode::Write)]));
            let held = missing(&policy);
            let holds_missing = held.iter().any(|path| path.iter().any(|name| name == "nope"));
            assert!(holds_missing, "{name}: {held:?}");
            if exists {
                assert_eq!(policy.access.access(Path::new("/w/gd/hooks/x")), AccessMode::Read);
            } else {
                assert!(held.contains(&"/w/gd".into()), "{name}: {held:?}");
            }
        }
    }
}
