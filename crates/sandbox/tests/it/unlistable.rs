//! Directories that can be entered but not listed: what a pattern matches there, or a link leads to, cannot be
//! found, and nothing in them is left open for that.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::{AccessMode, FileSystemEntry};
use codex_linux_sandbox::Limits;
use codex_linux_sandbox::decide::glob::Glob;
use codex_linux_sandbox::decide::policy::{PolicyError, Resolved, Surroundings, resolve};
use proptest::prelude::*;

use super::decisions::{Entry, Tree, context, path_entry, resolved, server};
use super::support::{glob, project, root};

/// The mode of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Open,
    Unlistable,
    Closed,
}

const PATTERNS: [&str; 9] =
    ["**/k", "k", "a/*", "*/k", "/w/**/k", "/w/*/b/k", "a/b/k", "**/b", "/w/a/**"];

fn any_directory() -> impl Strategy<Value = PathBuf> {
    proptest::collection::vec("[abc]", 1..4).prop_map(|names| Path::new("/w").join(names.join("/")))
}

fn any_mode() -> impl Strategy<Value = Mode> {
    prop_oneof![4 => Just(Mode::Open), 3 => Just(Mode::Unlistable), 1 => Just(Mode::Closed)]
}

fn any_access() -> impl Strategy<Value = AccessMode> {
    prop_oneof![Just(AccessMode::Read), Just(AccessMode::Write), Just(AccessMode::Deny)]
}

/// The access of a path: the nearest entry or match decides, and denies if both are equally near.
fn oracle(path: &Path, entries: &[(PathBuf, AccessMode)], patterns: &[&str]) -> AccessMode {
    for above in path.ancestors() {
        let matched = patterns.iter().any(|pattern| {
            let base = if pattern.starts_with('/') { "/" } else { "/w" };
            let below = above.strip_prefix(base).ok().filter(|below| below.iter().count() > 0);
            below.is_some_and(|below| Glob::parse(pattern).unwrap().matches(below.iter()))
        });
        let named = entries.iter().filter(|(at, _)| at == above).map(|(_, access)| *access);
        if matched {
            return AccessMode::Deny;
        }
        if let Some(access) = named.max() {
            return access;
        }
    }
    AccessMode::Read
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_match_is_left_open_in_a_directory_that_cannot_be_listed(
        directories in proptest::collection::btree_map(any_directory(), any_mode(), 1..8),
        named in proptest::collection::vec((any_directory(), any_access()), 0..4),
        patterns in proptest::sample::subsequence(PATTERNS.to_vec(), 1..3),
    ) {
        let mut tree = Tree::new([("/w/k", Entry::File(""))]);
        for (path, mode) in &directories {
            for above in path.ancestors() {
                tree.nodes.entry(above.to_owned()).or_insert(Entry::Directory);
                tree.nodes.entry(above.join("k")).or_insert(Entry::File(""));
            }
            let entry = match mode {
                Mode::Open => Entry::Directory,
                Mode::Unlistable => Entry::Unlistable,
                Mode::Closed => Entry::Closed,
            };
            tree.nodes.insert(path.clone(), entry);
        }
        // Entries for what exists: others only create placeholders.
        let named: Vec<(PathBuf, AccessMode)> =
            named.into_iter().filter(|(path, _)| tree.nodes.contains_key(path)).collect();
        let mut entries: Vec<FileSystemEntry> = vec![root(AccessMode::Read)];
        entries.extend(named.iter().map(|(at, access)| path_entry(at.to_str().unwrap(), *access)));
        entries.extend(patterns.iter().map(|pattern| glob(pattern)));
        let context = context(entries);
        let around = Surroundings::default();
        let is = |path: &Path, mode: Mode| directories.get(path) == Some(&mode);
        let policy = match resolve(&context, around, &tree, &Limits::default(), server()) {
            Ok(Resolved::Restricted(policy)) => policy,
            Err(PolicyError::GlobUnlistable(at)) => {
                prop_assert!(is(&at, Mode::Unlistable), "{at:?} can be listed");
                prop_assert!(named.iter().any(|(path, _)| *path == at), "{at:?} could be covered");
                return Ok(());
            }
            // What a sandboxed process could change.
            Err(PolicyError::Unreachable { at, .. }) => {
                let writable = |above: &Path| named.contains(&(above.to_owned(), AccessMode::Write));
                prop_assert!(at.ancestors().any(writable), "{at:?} is not writable");
                return Ok(());
            }
            other => panic!("{other:?}"),
        };
        for path in tree.nodes.keys().filter(|path| path.starts_with("/w/")) {
            let above = || path.ancestors().skip(1);
            if above().any(|above| is(above, Mode::Closed)) {
                continue;
            }
            let (expected, found) = (oracle(path, &named, &patterns), policy.access.access(path));
            if above().any(|above| is(above, Mode::Unlistable)) || is(path, Mode::Unlistable) {
                // Denied as well, where the pattern could match something beside what is known.
                prop_assert!(found == expected || found == AccessMode::Deny, "{path:?}: {found:?}");
            } else {
                prop_assert_eq!(found, expected, "{:?}", path);
            }
        }
    }
}

#[test]
fn a_literal_component_needs_no_listing() {
    let tree = Tree::new([
        ("/home", Entry::Unlistable),
        ("/home/u/x.key", Entry::File("")),
        ("/home/u/f", Entry::File("")),
        ("/w/f", Entry::File("")),
    ]);
    let policy = resolved(&tree, &context(vec![root(AccessMode::Read), glob("/home/u/*.key")]));
    assert_eq!(policy.access.access(Path::new("/home/u/x.key")), AccessMode::Deny);
    assert_eq!(policy.access.access(Path::new("/home/u/f")), AccessMode::Read);
    // What an entry grants below stays, and is searched.
    let entries = vec![
        root(AccessMode::Read),
        path_entry("/home/u", AccessMode::Read),
        glob("/**/*.key"),
        glob("/home/*/none"),
    ];
    let policy = resolved(&tree, &context(entries));
    assert_eq!(policy.access.access(Path::new("/home/u/x.key")), AccessMode::Deny);
    assert_eq!(policy.access.access(Path::new("/home/u/f")), AccessMode::Read);
    assert_eq!(policy.access.access(Path::new("/home/other")), AccessMode::Deny);
}

#[test]
fn metadata_whose_links_cannot_be_found_is_refused() {
    for name in [".git", ".agents", ".codex", ".git/hooks"] {
        for (entry, refused) in
            [(Entry::Unlistable, true), (Entry::Closed, false), (Entry::Directory, false)]
        {
            let mut tree = Tree::new([("/w/.git/config", Entry::File(""))]);
            let path = Path::new("/w").join(name);
            tree.nodes.insert(path.clone(), entry);
            let entries = [root(AccessMode::Read), project(AccessMode::Write)];
            // Also where a pattern denies the directory, because matches in it cannot be found.
            for more in [None, Some(glob("**/*.key"))] {
                let context = context(entries.iter().cloned().chain(more).collect());
                let around = Surroundings::default();
                match resolve(&context, around, &tree, &Limits::default(), server()) {
                    Err(PolicyError::Unreachable { at, .. }) if refused => assert_eq!(at, path),
                    Ok(_) if !refused => {}
                    // Closed, it hides whether it is a worktree's, and what the pattern matches.
                    Err(PolicyError::Unreachable { at, .. }) if !refused => assert_eq!(at, path),
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }
}
