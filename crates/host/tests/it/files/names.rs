//! `fs/rename` and `fs/symlink`.

use codex_exec_server_protocol::files::*;

use super::*;

#[test]
fn rename_moves_files_and_respects_overwrite() {
    let f = Fixture::new();
    f.file("a", "a");
    f.file("b", "b");
    f.file("dir/x", "x");
    f.link("a", "link");
    let rename = |from: &str, to: &str| FsRenameParams::new(f.path(from), f.path(to));
    let careful = |from: &str, to: &str| FsRenameParams { overwrite: false, ..rename(from, to) };
    let (code, message) = f.fails(careful("a", "b"));
    assert_eq!((code, message.contains("File exists")), (INTERNAL, true), "{message}");
    f.run(rename("a", "b")).unwrap();
    assert_eq!(f.content("b"), b"a");
    f.run(rename("link", "moved")).unwrap();
    assert!(f.native("moved").is_symlink());
    f.run(careful("dir", "dir2")).unwrap();
    assert_eq!(f.content("dir2/x"), b"x");
    assert_eq!(f.code(rename("none", "x")), NOT_FOUND);
    assert_eq!(f.code(rename("b", "none/x")), NOT_FOUND);
    assert_eq!(f.code(rename("dir2", "dir2/in")), INVALID);
    assert_eq!(f.code(FsRenameParams::new("/".parse().unwrap(), f.path("x"))), INVALID);
}

#[test]
fn symlink_stores_its_target_unchanged() {
    let f = Fixture::new();
    for (target, said) in
        [("rel/../x", "rel/../x"), ("/abs", "/abs"), ("file:///a%20b", "/a b"), ("FILE:///a", "/a")]
    {
        f.run(FsSymlinkParams::new(f.path("link"), target)).unwrap();
        assert_eq!(std::fs::read_link(f.native("link")).unwrap(), Path::new(said));
        assert_eq!(f.code(FsSymlinkParams::new(f.path("link"), target)), INTERNAL);
        std::fs::remove_file(f.native("link")).unwrap();
    }
    f.run(FsSymlinkParams::new(f.path("link"), "file:///%FF")).unwrap();
    assert_eq!(std::fs::read_link(f.native("link")).unwrap().as_os_str().as_bytes(), b"/\xff");
    for target in ["", "a\0b", "file://host/x"] {
        assert_eq!(f.code(FsSymlinkParams::new(f.path("l"), target)), INVALID, "{target:?}");
    }
}
