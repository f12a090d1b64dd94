//! `fs/walk`.

use codex_exec_server_protocol::files::*;

use super::*;

fn walk(f: &Fixture, options: FsWalkOptions) -> FsWalkResponse {
    f.run(FsWalkParams::new(f.path(""), options)).unwrap()
}

fn names(f: &Fixture, answer: &FsWalkResponse) -> Vec<String> {
    let root = f.root.as_path();
    let name = |entry: &FsWalkEntry| {
        let below = entry.path.as_path().strip_prefix(root).unwrap().to_str().unwrap();
        format!("{below}{}", if entry.kind == FsEntryKind::Directory { "/" } else { "" })
    };
    answer.entries.iter().map(name).collect()
}

fn tree(f: &Fixture) {
    for name in ["b/x/deep/er", "b/a", "a/z", "c", ".hid/x", ".dot"] {
        f.file(name, "");
    }
}

#[test]
fn breadth_first_and_sorted() {
    for f in Fixture::both_ways() {
        tree(&f);
        let answer = walk(&f, FsWalkOptions::default());
        assert_eq!(
            names(&f, &answer),
            [
                ".dot",
                ".hid/",
                "a/",
                "b/",
                "c",
                ".hid/x",
                "a/z",
                "b/a",
                "b/x/",
                "b/x/deep/",
                "b/x/deep/er"
            ]
        );
        assert!(!answer.truncated && answer.errors.is_empty());
        let pruned =
            walk(&f, FsWalkOptions { prune_hidden_directories: true, ..Default::default() });
        assert_eq!(
            names(&f, &pruned),
            [".dot", ".hid/", "a/", "b/", "c", "a/z", "b/a", "b/x/", "b/x/deep/", "b/x/deep/er"]
        );
    }
}

#[test]
fn limits_truncate_except_depth() {
    let f = Fixture::new();
    tree(&f);
    let shallow = walk(&f, FsWalkOptions { max_depth: 0, ..Default::default() });
    assert_eq!(names(&f, &shallow), [".dot", ".hid/", "a/", "b/", "c"]);
    assert!(!shallow.truncated);
    let one = walk(&f, FsWalkOptions { max_depth: 1, ..Default::default() });
    assert_eq!(names(&f, &one).last().unwrap(), "b/x/");
    for max_entries in 1..=12 {
        let answer = walk(&f, FsWalkOptions { max_entries, ..Default::default() });
        assert_eq!(answer.entries.len(), 11.min(max_entries as usize));
        assert_eq!(answer.truncated, max_entries < 11, "{max_entries}");
    }
    for max_directories in 1..=7 {
        let answer = walk(&f, FsWalkOptions { max_directories, ..Default::default() });
        // The root, four below it, and one below that.
        assert_eq!(answer.truncated, max_directories < 6, "{max_directories}");
    }
}

#[test]
fn limits_have_limits() {
    let f = Fixture::new();
    for options in [
        FsWalkOptions { max_depth: 65, ..Default::default() },
        FsWalkOptions { max_directories: 10_001, ..Default::default() },
        FsWalkOptions { max_entries: 50_001, ..Default::default() },
        FsWalkOptions { max_directories: 0, ..Default::default() },
        FsWalkOptions { max_entries: 0, ..Default::default() },
    ] {
        assert_eq!(f.code(FsWalkParams::new(f.path(""), options.clone())), INVALID);
        assert_eq!(f.code(FsWalkParams::new(f.path("none"), options)), INVALID);
    }
    let walk = |path| FsWalkParams::new(path, FsWalkOptions::default());
    assert_eq!(f.code(walk(f.path("none"))), NOT_FOUND);
}

#[test]
fn root_that_is_not_a_directory_has_no_entries() {
    let f = Fixture::new();
    f.file("directory/x", "");
    f.file("file", "");
    f.fifo("fifo");
    f.link("directory", "link");
    f.link("nowhere", "broken");
    let walk = |name, follow_directory_symlinks| {
        let options = FsWalkOptions { follow_directory_symlinks, ..Default::default() };
        f.run(FsWalkParams::new(f.path(name), options)).unwrap()
    };
    for name in ["file", "fifo", "link"] {
        assert_eq!(walk(name, false), FsWalkResponse::default(), "{name}");
    }
    for follow_directory_symlinks in [false, true] {
        let options = FsWalkOptions { follow_directory_symlinks, ..Default::default() };
        assert_eq!(f.code(FsWalkParams::new(f.path("broken"), options)), NOT_FOUND);
    }
    assert_eq!(names(&f, &walk("link", true)), ["link/x"]);
}

/// The expected result for a tree without unreadable directories, by the plainest code.
#[derive(Debug, Default, PartialEq)]
struct Plain {
    listed: Vec<String>,
    /// Names that are not UTF-8.
    nameless: usize,
    /// Names of any kind except dangling links.
    read: u32,
    truncated: bool,
}

fn plainly(root: &std::path::Path, options: &FsWalkOptions) -> Plain {
    let mut plain = Plain::default();
    let mut visited = std::collections::HashSet::new();
    let mut level = vec![root.to_owned()];
    for depth in 0..=options.max_depth {
        let mut next = Vec::new();
        for directory in std::mem::take(&mut level) {
            if !visited.insert(std::fs::canonicalize(&directory).unwrap()) {
                continue;
            }
            let entries = std::fs::read_dir(&directory).unwrap();
            let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            for path in paths {
                if std::fs::metadata(&path).is_err() {
                    continue;
                }
                if plain.read == options.max_entries {
                    plain.truncated = true;
                    return plain;
                }
                plain.read += 1;
                let Some(name) = path.strip_prefix(root).unwrap().to_str() else {
                    plain.nameless += 1;
                    continue;
                };
                let itself = std::fs::symlink_metadata(&path).unwrap();
                let target = std::fs::metadata(&path);
                let is_directory = itself.is_dir()
                    || options.follow_directory_symlinks && target.is_ok_and(|t| t.is_dir());
                if !is_directory && !itself.is_file() {
                    continue;
                }
                plain.listed.push(format!("{name}{}", if is_directory { "/" } else { "" }));
                let hidden = path.file_name().unwrap().as_encoded_bytes().starts_with(b".");
                if is_directory && !(hidden && options.prune_hidden_directories) {
                    next.push(path);
                }
            }
        }
        level = next;
        if depth == options.max_depth {
            break;
        }
    }
    plain
}

#[test]
fn random_trees_are_listed_like_a_plain_walk() {
    for seed in 0..60 {
        let f = Fixture::new();
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut directories: Vec<Vec<u8>> = vec![Vec::new()];
        for at in 0..rng.usize(1..40) {
            let mut path = rng.choice(&directories).unwrap().clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(if rng.u8(..4) == 0 { &b"."[..] } else { b"" });
            path.extend(format!("{}{at}", rng.alphabetic()).bytes());
            path.extend(if rng.u8(..8) == 0 { &b"\xff"[..] } else { b"" });
            let native = f.native(&path);
            match rng.u8(..8) {
                0..3 => {
                    std::fs::create_dir(&native).unwrap();
                    // Nothing is listed below a name that is not UTF-8.
                    if std::str::from_utf8(&path).is_ok() {
                        directories.push(path);
                    }
                }
                3..5 => std::fs::write(&native, "").unwrap(),
                5 => std::os::unix::fs::symlink("nowhere", &native).unwrap(),
                _ => {
                    let to = f.native(rng.choice(&directories).unwrap());
                    std::os::unix::fs::symlink(to, &native).unwrap();
                }
            }
        }
        let options = FsWalkOptions {
            max_depth: rng.u32(..5),
            follow_directory_symlinks: rng.bool(),
            prune_hidden_directories: rng.bool(),
            ..Default::default()
        };
        let all = plainly(&f.root, &options).read;
        for max_entries in (1..=all + 1).chain([50_000]) {
            let options = FsWalkOptions { max_entries, ..options.clone() };
            let plain = plainly(&f.root, &options);
            let answer = walk(&f, options.clone());
            assert_eq!(names(&f, &answer), plain.listed, "seed {seed}, {options:?}");
            assert_eq!(answer.errors.len(), plain.nameless, "seed {seed}, {options:?}");
            assert_eq!(answer.truncated, plain.truncated, "seed {seed}, {options:?}");
        }
    }
}

#[test]
fn response_is_at_most_four_mebibytes() {
    let f = Fixture::new();
    // Other characters than ASCII take three times the space in a URI.
    for at in 0..9000u32 {
        std::fs::File::create(f.native(format!("{at:05}{}", "é".repeat(100)))).unwrap();
    }
    let answer = walk(&f, FsWalkOptions::default());
    assert!(answer.truncated);
    let json = serde_json::to_vec(&answer).unwrap();
    assert!(json.len() <= 4 << 20, "{}", json.len());
    assert!(json.len() > 4_000_000, "{}: it is used, too", json.len());
}

#[test]
fn links_to_directories_are_followed_once_if_requested() {
    for f in Fixture::both_ways() {
        f.file("real/file", "");
        f.link("real", "link");
        f.link("..", "real/up");
        f.link("real/file", "to-file");
        f.link("nowhere", "broken");
        f.fifo("fifo");
        let answer = walk(&f, FsWalkOptions::default());
        assert_eq!(names(&f, &answer), ["real/", "real/file"]);
        let follow = FsWalkOptions { follow_directory_symlinks: true, ..Default::default() };
        let answer = walk(&f, follow);
        assert_eq!(
            names(&f, &answer),
            ["link/", "real/", "link/file", "link/up/"],
            "the same directory by another name is not read again"
        );
        assert!(!answer.truncated);
    }
}

#[test]
fn unreadable_directories_are_reported_and_the_walk_continues() {
    let f = Fixture::new();
    chmod(&f.root, 0o755);
    f.file("a/closed/x", "");
    f.file("b/open", "");
    chmod(&f.native("a/closed"), 0o700);
    as_nobody(|| {
        let answer = walk(&f, FsWalkOptions::default());
        assert_eq!(names(&f, &answer), ["a/", "b/", "a/closed/", "b/open"]);
        let [error] = &answer.errors[..] else { panic!("{:?}", answer.errors) };
        assert_eq!(error.path, f.path("a/closed"));
        assert!(error.message.contains("Permission denied"), "{}", error.message);
        // The same for a root; and these errors do not count towards the limit.
        let root = FsWalkParams::new(f.path("a/closed"), FsWalkOptions::default());
        let root = f.run(root).unwrap();
        assert_eq!((root.entries.len(), &root.errors), (0, &answer.errors));
        let tight = walk(&f, FsWalkOptions { max_entries: 4, ..Default::default() });
        assert_eq!((&tight.entries, tight.truncated), (&answer.entries, false));
    });
}

#[test]
fn overlong_paths_and_names_that_are_not_utf8_are_errors() {
    let f = Fixture::new();
    // Deeper than any path can name: created level by level, relative to a descriptor.
    let name = "d".repeat(250);
    let mut at =
        rustix::fs::open(&f.root, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    for _ in 0..20 {
        rustix::fs::mkdirat(&at, &name, rustix::fs::Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, &name, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
            .unwrap();
    }
    std::fs::write(f.native(b"z\xff"), "").unwrap();
    let answer = walk(&f, FsWalkOptions::default());
    let [bytes, error] = &answer.errors[..] else { panic!("{:?}", answer.errors) };
    assert_eq!(bytes.path, f.path("z\u{fffd}"));
    assert!(error.message.contains("File name too long"));
    assert!(error.path.as_bytes().len() >= 4096);
    assert!(!answer.truncated);
    // They can be removed too.
    f.run(FsRemoveParams::new(f.path(&name))).unwrap();
    assert!(!f.native(&name).exists());
}

#[test]
fn tree_removed_during_a_walk_ends_it_without_error() {
    let f = Fixture::new();
    for round in 0..20 {
        for at in 0..40 {
            f.file(&format!("t{round}/d{at}/e/file"), "");
        }
        let path = f.path(format!("t{round}"));
        std::thread::scope(|scope| {
            scope.spawn(|| std::fs::remove_dir_all(path.as_path()).unwrap());
            if let Ok(answer) = f.run(FsWalkParams::new(path.clone(), FsWalkOptions::default())) {
                for error in answer.errors {
                    assert!(error.message.contains("No such file"), "{}", error.message);
                }
            }
        });
    }
}

#[test]
fn cancelled_walk_stops() {
    let f = Fixture::new();
    tree(&f);
    let cancel = Cancel::new();
    cancel.cancel();
    let params = FsWalkParams::new(f.path(""), FsWalkOptions::default());
    let result = f.executor.execute(params.into(), &cancel, &|_| ControlFlow::Continue(()));
    assert_eq!(result.unwrap_err(), FileError::Cancelled);
}
