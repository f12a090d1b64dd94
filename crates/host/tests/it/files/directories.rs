//! `fs/readDirectory` and `fs/createDirectory`.

use codex_exec_server_protocol::files::*;

use super::*;

#[test]
fn listing_describes_link_targets_and_reports_dangling_links() {
    let f = Fixture::new();
    f.file("d/file", "");
    f.dir("d/sub");
    f.fifo("d/fifo");
    f.link("sub", "d/to-sub");
    f.link("file", "d/to-file");
    f.link("nowhere", "d/broken");
    f.link("round", "d/round");
    let answer = f.run(FsReadDirectoryParams::new(f.path("d"))).unwrap();
    assert_eq!(answer.dead_links, ["broken", "round"]);
    let entries = answer.entries;
    let facts: Vec<_> = entries
        .iter()
        .map(|e| (e.file_name.as_str(), e.is_directory, e.is_file, e.file_name_uri.is_some()))
        .collect();
    assert_eq!(
        facts,
        [
            ("fifo", false, false, false),
            ("file", false, true, false),
            ("sub", true, false, false),
            ("to-file", false, true, false),
            ("to-sub", true, false, false),
        ]
    );
}

#[test]
fn names_that_are_not_utf8_also_have_a_uri() {
    let f = Fixture::new();
    std::fs::write(f.native(b"a\xffb"), "").unwrap();
    let answer = f.run(FsReadDirectoryParams::new(f.path(""))).unwrap();
    let [entry] = &answer.entries[..] else { panic!("{answer:?}") };
    assert_eq!(entry.file_name, "a\u{fffd}b");
    let path = entry.file_name_uri.clone().unwrap();
    assert_eq!(path, f.path(b"a\xffb"));
    assert!(f.run(FsReadFileParams::new(path)).is_ok());
}

#[test]
fn listing_of_sixty_thousand_entries_is_truncated_at_fifty_thousand() {
    let f = Fixture::new();
    for at in 0..60_000 {
        std::fs::File::create(f.native(format!("{at:05}"))).unwrap();
    }
    let answer = f.run(FsReadDirectoryParams::new(f.path(""))).unwrap();
    assert_eq!((answer.entries.len(), answer.truncated), (50_000, true));
    let options = FsWalkOptions::default();
    let walk = f.run(FsWalkParams::new(f.path(""), options)).unwrap();
    assert!(walk.truncated);
    // A walk is cut in the order of names.
    let count = walk.entries.len();
    assert!(
        walk.entries
            .iter()
            .enumerate()
            .all(|(at, e)| e.path.file_name() == format!("{at:05}").as_bytes())
    );
    assert!(count <= 50_000);
    let just = Fixture::with({
        let mut config = FilesConfig::default();
        config.max_directory_entries = 3;
        config
    });
    for name in ["a", "b", "c"] {
        just.file(name, "");
    }
    let answer = just.run(FsReadDirectoryParams::new(just.path(""))).unwrap();
    assert_eq!((answer.entries.len(), answer.truncated), (3, false));
}

#[test]
fn only_directories_can_be_listed() {
    let f = Fixture::new();
    let file = f.file("file", "");
    let fifo = f.fifo("fifo");
    assert_eq!(f.code(FsReadDirectoryParams::new(file)), INTERNAL);
    assert_eq!(f.code(FsReadDirectoryParams::new(fifo)), INTERNAL);
    assert_eq!(f.code(FsReadDirectoryParams::new(f.path("none"))), NOT_FOUND);
    let closed = f.dir("closed");
    chmod(closed.as_path(), 0o711);
    chmod(&f.root, 0o755);
    as_nobody(|| assert_eq!(f.code(FsReadDirectoryParams::new(closed.clone())), INVALID));
}

#[test]
fn directories_are_created_with_their_parents_if_recursive() {
    for f in Fixture::both_ways() {
        for follow_symlinks in [true, false] {
            let base = format!("base{follow_symlinks}");
            f.dir(&base);
            let make = |name: &str, recursive| FsCreateDirectoryParams {
                recursive,
                follow_symlinks,
                ..FsCreateDirectoryParams::new(f.path(format!("{base}/{name}")))
            };
            assert_eq!(f.code(make("a/b/c", false)), NOT_FOUND);
            f.run(make("a/b/c", true)).unwrap();
            f.run(make("a/b/c", true)).unwrap();
            let (code, message) = f.fails(make("a/b/c", false));
            assert_eq!(code, INTERNAL);
            assert!(message.contains("File exists"), "{message}");
            f.run(make("a/b/d", false)).unwrap();
            f.file(&format!("{base}/file"), "");
            assert_eq!(f.code(make("file", true)), INTERNAL);
            assert_eq!(f.code(make("file/x", true)), INTERNAL);
        }
        f.run(FsCreateDirectoryParams::new("/".parse().unwrap())).unwrap();
        f.dir("real");
        f.link("real", "link");
        f.run(FsCreateDirectoryParams::new(f.path("link/made"))).unwrap();
        assert!(f.native("real/made").is_dir());
    }
}

/// Number of JSON values in a value.
fn values(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    1 + match value {
        Value::Array(values) => values.iter().map(self::values).sum::<usize>(),
        Value::Object(members) => members.values().map(self::values).sum(),
        _ => 0,
    }
}

#[test]
fn no_response_exceeds_the_json_value_limit() {
    let most = codex_exec_server_protocol::DecodeLimits::default().values - 16;
    let f = Fixture::new();
    // Every path matches, and each match is three values.
    f.file("many/x", format!("{}\n", "x".repeat(100)).repeat(1200));
    let search = f.run(FsSearchParams::new(f.path("many"), "x")).unwrap();
    assert!(search.truncated && search.matches > 500, "{}", search.matches);
    assert!(values(&serde_json::to_value(&search).unwrap()) <= most);
    // Names that are not UTF-8 have one more member.
    std::fs::create_dir(f.native("full")).unwrap();
    for at in 0..50_000 {
        let name = [format!("full/{at}").as_bytes(), b"\xff"].concat();
        std::fs::File::create(f.native(name)).unwrap();
    }
    for at in 0..10_050 {
        f.link("nowhere", &format!("full/dead{at}"));
    }
    let listed = f.run(FsReadDirectoryParams::new(f.path("full"))).unwrap();
    assert_eq!((listed.entries.len(), listed.dead_links.len()), (50_000, 10_000));
    assert!(listed.truncated);
    assert!(values(&serde_json::to_value(&listed).unwrap()) <= most);
}
