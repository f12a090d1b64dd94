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
            [".dot", "a/", "b/", "c", "a/z", "b/a", "b/x/", "b/x/deep/", "b/x/deep/er"]
        );
    }
}

#[test]
fn limits_cut_and_say_so_but_depth_is_no_cut() {
    let f = Fixture::new();
    tree(&f);
    let shallow = walk(&f, FsWalkOptions { max_depth: 0, ..Default::default() });
    assert_eq!(names(&f, &shallow), [".dot", ".hid/", "a/", "b/", "c"]);
    assert!(!shallow.truncated);
    let one = walk(&f, FsWalkOptions { max_depth: 1, ..Default::default() });
    assert_eq!(names(&f, &one).last().unwrap(), "b/x/");
    for max_entries in 0..=12 {
        let answer = walk(&f, FsWalkOptions { max_entries, ..Default::default() });
        assert_eq!(answer.entries.len(), 11.min(max_entries as usize));
        assert_eq!(answer.truncated, max_entries < 11, "{max_entries}");
    }
    for max_directories in 0..=7 {
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
    ] {
        assert_eq!(f.code(FsWalkParams::new(f.path(""), options)), INVALID);
    }
    let walk = |path| FsWalkParams::new(path, FsWalkOptions::default());
    assert_eq!(f.code(walk(f.path("none"))), NOT_FOUND);
    assert_eq!(f.code(walk(f.file("file", ""))), INTERNAL);
}

#[test]
fn the_answer_is_at_most_four_mebibytes() {
    let f = Fixture::new();
    // Bytes that are no text triple in a URI.
    for at in 0..9000u32 {
        let mut name = format!("{at:05}").into_bytes();
        name.extend([0xff; 200]);
        std::fs::File::create(f.native(name)).unwrap();
    }
    let answer = walk(&f, FsWalkOptions::default());
    assert!(answer.truncated);
    let json = serde_json::to_vec(&answer).unwrap();
    assert!(json.len() <= 4 << 20, "{}", json.len());
    assert!(json.len() > 4_000_000, "{}: it is used, too", json.len());
}

#[test]
fn links_are_what_they_lead_to_and_followed_once_if_asked() {
    for f in Fixture::both_ways() {
        f.file("real/file", "");
        f.link("real", "link");
        f.link("..", "real/up");
        f.link("real/file", "to-file");
        f.link("nowhere", "broken");
        f.fifo("fifo");
        let answer = walk(&f, FsWalkOptions::default());
        assert_eq!(names(&f, &answer), ["link/", "real/", "to-file", "real/file", "real/up/"]);
        let follow = FsWalkOptions { follow_directory_symlinks: true, ..Default::default() };
        let answer = walk(&f, follow);
        assert_eq!(
            names(&f, &answer),
            ["link/", "real/", "to-file", "link/file", "link/up/"],
            "the same directory by another name is not read again"
        );
        assert!(!answer.truncated);
    }
}

#[test]
fn what_cannot_be_read_is_told_and_the_rest_goes_on() {
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
    });
}

#[test]
fn paths_too_long_to_be_used_are_errors_and_bytes_survive() {
    let f = Fixture::new();
    // Deeper than any path can name: made relative to a descriptor, level by level.
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
    assert_eq!(answer.entries[1].path, f.path(b"z\xff"));
    let [error] = &answer.errors[..] else { panic!("{:?}", answer.errors) };
    assert!(error.message.contains("File name too long"));
    assert!(error.path.as_bytes().len() >= 4096);
    assert!(!answer.truncated);
    // And they can be removed.
    f.run(FsRemoveParams::new(f.path(&name))).unwrap();
    assert!(!f.native(&name).exists());
}

#[test]
fn a_tree_that_goes_away_ends_the_walk_quietly() {
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
fn a_cancelled_walk_stops() {
    let f = Fixture::new();
    tree(&f);
    let cancel = Cancel::new();
    cancel.cancel();
    let params = FsWalkParams::new(f.path(""), FsWalkOptions::default());
    let result = f.executor.execute(params.into(), &cancel, &|_| ControlFlow::Continue(()));
    assert_eq!(result.unwrap_err(), FileError::Cancelled);
}
