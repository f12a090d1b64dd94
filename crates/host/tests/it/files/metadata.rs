//! `fs/getMetadata`, `fs/canonicalize`, `fs/setMode`.

use std::os::unix::fs::MetadataExt;

use codex_exec_server_protocol::files::*;

use super::*;

#[test]
fn metadata_of_a_link_describes_its_target() {
    let f = Fixture::new();
    let file = f.file("file", "12345");
    chmod(file.as_path(), 0o640);
    std::fs::hard_link(f.native("file"), f.native("other")).unwrap();
    f.dir("dir");
    f.link("file", "to-file");
    f.link("dir", "to-dir");
    f.link("to-dir", "to-link");
    let get = |name: &str| f.run(FsGetMetadataParams::new(f.path(name))).unwrap();
    for (name, directory, file, link) in [
        ("file", false, true, false),
        ("dir", true, false, false),
        ("to-file", false, true, true),
        ("to-dir", true, false, true),
        ("to-link", true, false, true),
    ] {
        let found = get(name);
        let facts = (found.is_directory, found.is_file, found.is_symlink);
        assert_eq!(facts, (directory, file, link), "{name}");
    }
    let (found, real) = (get("to-file"), std::fs::metadata(f.native("file")).unwrap());
    assert_eq!(found.size, 5);
    assert_eq!(found.modified_at_ms, real.mtime() * 1000 + real.mtime_nsec() / 1_000_000);
    if let Ok(born) = real.created() {
        let born = born.duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
        assert_eq!(found.created_at_ms as u128, born);
    }
    assert_eq!(found.mode, Some(0o640));
    assert_eq!((found.uid, found.gid), (Some(real.uid()), Some(real.gid())));
    assert_eq!((found.inode, found.nlink), (Some(real.ino()), Some(2)));
}

#[test]
fn special_files_are_neither_file_nor_directory_and_do_not_block() {
    let f = Fixture::new();
    for path in [f.fifo("fifo"), f.socket("socket"), "/dev/null".parse().unwrap()] {
        for follow_symlinks in [true, false] {
            let found = f
                .run(FsGetMetadataParams {
                    follow_symlinks,
                    ..FsGetMetadataParams::new(path.clone())
                })
                .unwrap();
            assert!(!found.is_directory && !found.is_file && !found.is_symlink);
        }
    }
}

#[test]
fn missing_path_is_not_found() {
    let f = Fixture::new();
    f.link("nowhere", "dangling");
    f.link("round", "round");
    for name in ["none", "none/below", "dangling"] {
        assert_eq!(f.code(FsGetMetadataParams::new(f.path(name))), NOT_FOUND, "{name}");
        assert_eq!(f.code(FsCanonicalizeParams::new(f.path(name))), NOT_FOUND, "{name}");
    }
    assert_eq!(f.code(FsGetMetadataParams::new(f.path("round"))), INTERNAL);
    assert_eq!(f.code(FsCanonicalizeParams::new(f.path("round"))), INTERNAL);
    let through = f.file("file", "").join("below").unwrap();
    assert_eq!(f.code(FsGetMetadataParams::new(through)), INTERNAL);
}

#[test]
fn names_that_are_not_utf8_round_trip() {
    let f = Fixture::new();
    std::fs::create_dir(f.native(b"d\xff")).unwrap();
    std::fs::write(f.native(b"d\xff/\xfe x"), "1").unwrap();
    f.link(f.native(b"d\xff"), "link");
    let found = f.run(FsCanonicalizeParams::new(f.path(b"link/\xfe x"))).unwrap().path;
    assert_eq!(found, f.path(b"d\xff/\xfe x"));
    assert!(found.to_string().ends_with("/d%FF/%FE%20x"));
    assert!(f.run(FsGetMetadataParams::new(found.clone())).unwrap().is_file);
    assert_eq!(f.run(FsReadFileParams::new(found)).unwrap().data[..], b"1"[..]);
}

#[test]
fn modes_are_set_on_link_targets() {
    let f = Fixture::new();
    f.file("file", "");
    let link = f.link("file", "link");
    f.run(FsSetModeParams::new(link.clone(), 0o751)).unwrap();
    assert_eq!(mode_of(&f.native("file")), 0o751);
    assert_eq!(f.code(FsSetModeParams::new(link.clone(), 0o10000)), INVALID);
    assert_eq!(
        f.code(FsSetModeParams { follow_symlinks: false, ..FsSetModeParams::new(link, 0) }),
        INVALID
    );
    assert_eq!(f.code(FsSetModeParams::new(f.path("none"), 0o600)), NOT_FOUND);
}
