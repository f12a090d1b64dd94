//! `fs/copy`.

use std::os::unix::fs::MetadataExt;

use codex_exec_server_protocol::files::*;
use proptest::prelude::*;

use super::*;

fn copy(f: &Fixture, from: &str, to: &str, recursive: bool) -> Result<FsDone, FileError> {
    f.run(FsCopyParams::new(f.path(from), f.path(to), recursive))
}

#[test]
fn tree_is_copied_with_modes_and_links_without_special_files() {
    let f = Fixture::new();
    f.file("from/a/file", "content");
    f.file("from/run", "#!");
    f.dir("from/empty");
    f.file("from/locked/inside", "x");
    f.link("a/file", "from/rel");
    f.link("/nowhere", "from/broken");
    f.link("a", "from/dir-link");
    f.fifo("from/fifo");
    f.socket("from/socket");
    std::fs::write(f.native(b"from/\xff"), "bytes").unwrap();
    chmod(&f.native("from/run"), 0o751);
    chmod(&f.native("from/a/file"), 0o400);
    chmod(&f.native("from/locked"), 0o555);
    chmod(&f.native("from/empty"), 0o1777);
    copy(&f, "from", "to", true).unwrap();
    assert_eq!(f.content("to/a/file"), b"content");
    assert_eq!(f.content("to/locked/inside"), b"x");
    assert_eq!(std::fs::read(f.native(b"to/\xff")).unwrap(), b"bytes");
    for (name, mode) in [("run", 0o751), ("a/file", 0o400), ("locked", 0o555), ("empty", 0o1777)] {
        assert_eq!(mode_of(&f.native(format!("to/{name}"))), mode, "{name}");
    }
    for (name, target) in [("rel", "a/file"), ("broken", "/nowhere"), ("dir-link", "a")] {
        assert_eq!(std::fs::read_link(f.native(format!("to/{name}"))).unwrap(), Path::new(target));
    }
    assert!(!f.native("to/fifo").exists() && !f.native("to/socket").exists());
    chmod(&f.native("from/locked"), 0o755);
    chmod(&f.native("to/locked"), 0o755);
}

#[test]
fn copy_into_an_existing_tree_merges_and_writes_through_no_link() {
    let f = Fixture::new();
    f.file("from/file", "new");
    f.file("from/sub/x", "new");
    f.link("file", "from/link");
    f.file("outside", "precious");
    f.file("to/kept", "kept");
    f.link("../outside", "to/file");
    f.file("to/link", "was a file");
    copy(&f, "from", "to", true).unwrap();
    assert_eq!(f.content("outside"), b"precious");
    assert_eq!(f.content("to/file"), b"new");
    assert!(!f.native("to/file").is_symlink());
    assert!(f.native("to/link").is_symlink());
    assert_eq!(f.content("to/kept"), b"kept");
    // A link in place of a directory is refused.
    f.dir("elsewhere");
    f.run(FsRemoveParams::new(f.path("to/sub"))).unwrap();
    f.link("../elsewhere", "to/sub");
    assert!(copy(&f, "from", "to", true).is_err());
    assert!(f.names("elsewhere").is_empty());
}

#[test]
fn single_files_and_links_are_copied() {
    let f = Fixture::new();
    f.file("file", "content");
    chmod(&f.native("file"), 0o640);
    f.file("there", "longer than the other");
    std::fs::hard_link(f.native("there"), f.native("there2")).unwrap();
    copy(&f, "file", "there", false).unwrap();
    assert_eq!((f.content("there2"), mode_of(&f.native("there"))), (b"content".to_vec(), 0o640));
    f.link("file", "link");
    copy(&f, "link", "link2", false).unwrap();
    assert_eq!(std::fs::read_link(f.native("link2")).unwrap(), Path::new("file"));
    copy(&f, "link", "there", false).unwrap();
    assert!(f.native("there").is_symlink());
    f.file("target", "old");
    f.link("target", "to-target");
    copy(&f, "file", "to-target", false).unwrap();
    assert_eq!(f.content("target"), b"content", "a link the client names is followed");
    copy(&f, "link", "dir/x", false).unwrap_err();
}

#[test]
fn uncopyable_sources_and_destinations_are_refused() {
    let f = Fixture::new();
    f.fifo("fifo");
    f.socket("socket");
    f.file("dir/sub/x", "");
    f.file("file", "content");
    std::fs::hard_link(f.native("file"), f.native("same")).unwrap();
    f.link("dir/sub", "inside");
    f.link("file", "link");
    let code = |from: &str, to: &str, recursive| {
        f.fails(FsCopyParams::new(f.path(from), f.path(to), recursive))
    };
    for (from, to, recursive, wanted) in [
        ("fifo", "x", true, INVALID),
        ("socket", "x", true, INVALID),
        ("dir", "x", false, INVALID),
        ("dir", "dir", true, INVALID),
        ("dir", "dir/new", true, INVALID),
        ("dir", "dir/sub/new", true, INVALID),
        ("dir", "inside/new", true, INVALID),
        ("dir", "inside", true, INVALID),
        ("file", "file", false, INVALID),
        ("file", "same", false, INVALID),
        ("file", "link", false, INVALID),
        ("link", "link", false, INVALID),
        ("file", "dir", false, INVALID),
        ("file", "fifo", false, INVALID),
        ("none", "x", false, NOT_FOUND),
        ("file", "none/x", false, NOT_FOUND),
        ("dir", "file", true, INTERNAL),
        ("dir", "file/x", true, INTERNAL),
    ] {
        let (found, message) = code(from, to, recursive);
        assert_eq!(found, wanted, "{from} {to}: {message}");
    }
    let null = FsCopyParams::new("/dev/null".parse().unwrap(), f.path("x"), false);
    assert_eq!(f.code(null), INVALID);
    assert_eq!(f.content("file"), b"content");
    assert_eq!(f.names(""), ["dir", "fifo", "file", "inside", "link", "same", "socket"]);
}

#[test]
fn files_without_a_size_are_copied_whole() {
    let f = Fixture::new();
    f.run(FsCopyParams::new("/proc/version".parse().unwrap(), f.path("x"), false)).unwrap();
    assert_eq!(f.content("x"), std::fs::read("/proc/version").unwrap());
}

#[test]
fn holes_are_preserved_also_across_filesystems() {
    let f = Fixture::new();
    let path = f.native("sparse");
    let file = std::fs::File::create(&path).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"begin", 0).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"middle", 64 << 20).unwrap();
    file.set_len(128 << 20).unwrap();
    copy(&f, "sparse", "copy", false).unwrap();
    let found = std::fs::metadata(f.native("copy")).unwrap();
    assert_eq!(found.len(), 128 << 20);
    assert!(found.blocks() * 512 < 4 << 20, "{} blocks", found.blocks());
    let copied = std::fs::File::open(f.native("copy")).unwrap();
    let mut middle = [0; 6];
    std::os::unix::fs::FileExt::read_at(&copied, &mut middle, 64 << 20).unwrap();
    assert_eq!(&middle, b"middle");
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let data: Vec<u8> = (0..3_000_000u32).map(|at| at as u8).collect();
    f.file("big", &data);
    let to = uri(&shm.path().join("big"));
    f.run(FsCopyParams::new(f.path("big"), to.clone(), false)).unwrap();
    assert_eq!(std::fs::read(to.as_path()).unwrap(), data);
}

#[test]
fn set_id_bits_of_another_owner_are_not_copied() {
    let f = Fixture::new();
    chmod(&f.root, 0o777);
    f.file("tool", "x");
    chmod(&f.native("tool"), 0o6755);
    copy(&f, "tool", "own", false).unwrap();
    assert_eq!(mode_of(&f.native("own")), 0o6755);
    as_nobody(|| {
        copy(&f, "tool", "theirs", false).unwrap();
        assert_eq!(mode_of(&f.native("theirs")), 0o755);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_trees_are_copied(
        files in proptest::collection::btree_map("[a-c]{1,2}(/[d-f]{1,2}){0,3}", proptest::collection::vec(any::<u8>(), 0..50_000), 0..8),
    ) {
        let f = Fixture::new();
        f.dir("from");
        let mut made = Vec::new();
        for (name, data) in files {
            let native = f.native(format!("from/{name}"));
            // A name cannot be both a file and a directory.
            if std::fs::create_dir_all(native.parent().unwrap()).is_ok()
                && std::fs::write(&native, &data).is_ok()
            {
                made.push((name, data));
            }
        }
        copy(&f, "from", "to", true).unwrap();
        for (name, data) in made {
            prop_assert_eq!(&f.content(&format!("to/{name}")), &data);
        }
        let count = |name: &str| {
            let path = f.path(name);
            f.run(FsWalkParams::new(path, FsWalkOptions::default())).unwrap().entries.len()
        };
        prop_assert_eq!(count("from"), count("to"));
    }
}

/// Everything below a directory: its path, and its content if it is a file.
fn everything(root: &Path) -> std::collections::BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut all = std::collections::BTreeMap::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path.clone());
                all.insert(path, None);
            } else {
                all.insert(path.clone(), Some(std::fs::read(&path).unwrap()));
            }
        }
    }
    all
}

#[test]
fn tree_that_does_not_fit_leaves_nothing() {
    on_a_small_disk(|f| {
        let source = tempfile::tempdir_in("/dev/shm").unwrap();
        for name in ["a", "b", "c", "d"] {
            let directory = source.path().join(name).join("below");
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("file"), vec![7; 100 << 10]).unwrap();
            // The copy is not writable either.
            chmod(&directory, 0o500);
        }
        for existing in [false, true] {
            if existing {
                f.dir("to/b");
            }
            let before = everything(&f.root);
            let copied = f.run(FsCopyParams::new(uri(source.path()), f.path("to"), true));
            assert_eq!(kind(copied), ErrorKind::DiskFull);
            assert_eq!(everything(&f.root), before);
        }
        for name in ["a", "b", "c", "d"] {
            chmod(&source.path().join(name).join("below"), 0o700);
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Copies one random tree over another: where a file meets a directory the copy is refused, and the
    /// destination has the same names as before.
    #[test]
    fn refused_copy_leaves_no_part_of_its_tree(
        source in proptest::collection::vec(("[abc](/[abc]){0,3}", any::<bool>()), 1..12),
        destination in proptest::collection::vec(("[abc](/[abc]){0,3}", any::<bool>()), 0..6),
    ) {
        let f = Fixture::new();
        for (root, entries) in [("from", &source), ("to", &destination)] {
            for (path, is_file) in entries {
                let path = f.native(format!("{root}/{path}"));
                let above = path.parent().unwrap();
                // Skip names that conflict with an earlier one.
                if std::fs::create_dir_all(above).is_err() || path.exists() {
                    continue;
                }
                match is_file {
                    true => std::fs::write(&path, format!("{root} {path:?}")).unwrap(),
                    false => std::fs::create_dir(&path).unwrap(),
                }
            }
        }
        let (from, to) = (f.native("from"), f.native("to"));
        let wanted = everything(&from);
        let before = if to.exists() { everything(&to) } else { Default::default() };
        let copied = copy(&f, "from", "to", true);
        let after = if to.exists() { everything(&to) } else { Default::default() };
        let source_of = |path: &Path| from.join(path.strip_prefix(&to).unwrap());
        let conflict = before.iter().any(|(path, content)| {
            wanted.get(&source_of(path)).is_some_and(|from| from.is_some() != content.is_some())
        });
        prop_assert_eq!(copied.is_err(), conflict);
        if conflict {
            prop_assert!(after.keys().eq(before.keys()), "{:?} {:?}", before, after);
        }
        for (path, content) in &after {
            let (new, old) = (wanted.get(&source_of(path)), before.get(path));
            let expected = if conflict { [old, new] } else { [new.or(old), None] };
            prop_assert!(expected.contains(&Some(content)), "{path:?}");
        }
        if !conflict {
            let names = wanted.keys().map(|path| to.join(path.strip_prefix(&from).unwrap()));
            let mut names: Vec<PathBuf> = names.chain(before.into_keys()).collect();
            names.sort();
            names.dedup();
            prop_assert!(after.keys().eq(&names));
        }
    }
}

/// What is at one end of an atomic copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Nothing,
    File,
    HardLink,
    Link,
    LinkToLink,
    LinkToNothing,
    LinkToFifo,
    Fifo,
    Socket,
    Directory,
}

fn ends() -> impl Strategy<Value = End> {
    proptest::sample::select(vec![
        End::Nothing,
        End::File,
        End::HardLink,
        End::Link,
        End::LinkToLink,
        End::LinkToNothing,
        End::LinkToFifo,
        End::Fifo,
        End::Socket,
        End::Directory,
    ])
}

/// Creates this at `name`; a link's target is `name-target`.
fn plant(f: &Fixture, name: &str, end: End, content: &[u8], mode: u32) {
    let target = format!("{name}-target");
    let file = |name: &str| {
        std::fs::write(f.native(name), content).unwrap();
        chmod(&f.native(name), mode);
    };
    match end {
        End::Nothing => {}
        End::File => file(name),
        End::HardLink => {
            file(name);
            std::fs::hard_link(f.native(name), f.native(&target)).unwrap();
        }
        End::Link => {
            file(&target);
            f.link(&target, name);
        }
        End::LinkToLink => {
            file(&target);
            f.link(&target, &format!("{name}-between"));
            f.link(format!("{name}-between"), name);
        }
        End::LinkToNothing => drop(f.link(&target, name)),
        End::LinkToFifo => {
            f.fifo(&target);
            f.link(&target, name);
        }
        End::Fifo => drop(f.fifo(name)),
        End::Socket => drop(f.socket(name)),
        End::Directory => drop(f.dir(name)),
    }
}

/// Every name with its type, mode and content.
fn kinds(f: &Fixture) -> std::collections::BTreeMap<PathBuf, (String, u32, Vec<u8>)> {
    let entries = std::fs::read_dir(&f.root).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| {
            let metadata = path.symlink_metadata().unwrap();
            let content = match metadata.is_file() {
                true => std::fs::read(&path).unwrap(),
                false => Vec::new(),
            };
            let leads = std::fs::read_link(&path).unwrap_or_default();
            let kind = format!("{:?} {leads:?}", metadata.file_type());
            (path, (kind, metadata.mode() & 0o7777, content))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// From any source to any destination: the result is a complete copy at the path that the
    /// destination leads to, or an error without any change.
    #[test]
    fn atomic_copy_is_complete_or_absent(
        from in ends(),
        to in ends(),
        content in proptest::collection::vec(any::<u8>(), 0..50_000),
        bits in (0u32..0o10000, 0u32..0o1000),
    ) {
        let f = Fixture::new();
        let (source_bits, old_bits) = (bits.0 | 0o400, bits.1 | 0o600);
        plant(&f, "from", from, &content, source_bits);
        plant(&f, "to", to, b"old", old_bits);
        let before = kinds(&f);
        let mut params = FsCopyParams::new(f.path("from"), f.path("to"), false);
        params.atomic = true;
        let copied = f.run(params);
        let after = kinds(&f);
        let fits = matches!(from, End::File | End::HardLink) && !matches!(
            to, End::LinkToFifo | End::Fifo | End::Socket | End::Directory
        );
        prop_assert_eq!(copied.is_ok(), fits, "{:?} {:?} {:?}", from, to, copied);
        let mut wanted = before.clone();
        if fits {
            let name = match to {
                End::Link | End::LinkToLink | End::LinkToNothing => "to-target",
                _ => "to",
            };
            let is_new = !before.contains_key(&f.native(name));
            let bits = if is_new { source_bits & 0o777 } else { old_bits };
            let kind = before[&f.native("from")].0.clone();
            wanted.insert(f.native(name), (kind, bits, content));
        }
        prop_assert_eq!(after, wanted);
    }
}

#[test]
fn atomic_copy_that_does_not_fit_keeps_the_old_file() {
    on_a_small_disk(|f| {
        let source = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::write(source.path().join("file"), vec![7; 300 << 10]).unwrap();
        for existing in [false, true] {
            if existing {
                f.file("to", "old");
            }
            let before = everything(&f.root);
            let file = uri(&source.path().join("file"));
            let mut params = FsCopyParams::new(file, f.path("to"), false);
            params.atomic = true;
            assert_eq!(kind(f.run(params)), ErrorKind::DiskFull);
            assert_eq!(everything(&f.root), before);
        }
    });
}

#[test]
fn atomic_copy_needs_one_regular_file_other_than_itself() {
    let f = Fixture::new();
    f.file("dir/x", "x");
    f.file("file", "content");
    std::fs::hard_link(f.native("file"), f.native("same")).unwrap();
    f.link("file", "link");
    for (from, to) in [("dir", "new"), ("file", "file"), ("file", "same"), ("file", "link")] {
        let mut params = FsCopyParams::new(f.path(from), f.path(to), true);
        params.atomic = true;
        assert_eq!(f.code(params), INVALID, "{from} {to}");
    }
    assert_eq!(f.content("file"), b"content");
    assert_eq!(f.names(""), ["dir", "file", "link", "same"]);
}
