//! `fs/remove`.

use codex_exec_server_protocol::files::*;

use super::*;

#[test]
fn files_links_special_files_and_trees_are_removed() {
    for f in Fixture::both_ways() {
        f.file("keep/file", "kept");
        for (name, follow_symlinks) in [("yes", true), ("no", false)] {
            f.file(&format!("{name}/tree/a/b/c"), "");
            f.fifo(&format!("{name}/fifo"));
            f.socket(&format!("{name}/socket"));
            f.link("../keep", &format!("{name}/tree/a/link"));
            f.link("../../keep/file", &format!("{name}/tree/file-link"));
            std::fs::write(f.native([name.as_bytes(), b"/tree/\xff"].concat()), "").unwrap();
            f.file(&format!("{name}/file"), "");
            for entry in ["tree", "fifo", "socket", "file"] {
                let remove = FsRemoveParams::new(f.path(format!("{name}/{entry}")));
                f.run(FsRemoveParams { follow_symlinks, ..remove }).unwrap();
            }
            assert!(f.names(name).is_empty());
        }
        let link = f.link("keep", "link");
        f.run(FsRemoveParams::new(link.clone())).unwrap();
        assert!(!link.as_path().is_symlink());
        f.link("keep", "link");
        f.run(FsRemoveParams::new(f.path("link/file"))).unwrap();
        assert!(f.names("keep").is_empty(), "links on the way are followed");
    }
}

#[test]
fn recursive_and_force_are_respected() {
    let f = Fixture::new();
    f.file("full/file", "");
    f.dir("empty");
    let flat =
        |name: &str| FsRemoveParams { recursive: false, ..FsRemoveParams::new(f.path(name)) };
    let (code, message) = f.fails(flat("full"));
    assert_eq!(code, INTERNAL);
    assert!(message.contains("Directory not empty"), "{message}");
    f.run(flat("empty")).unwrap();
    f.run(flat("full/file")).unwrap();
    let strict = |name: &str| FsRemoveParams { force: false, ..FsRemoveParams::new(f.path(name)) };
    for name in ["none", "none/below"] {
        assert_eq!(f.code(strict(name)), NOT_FOUND);
        f.run(FsRemoveParams::new(f.path(name))).unwrap();
    }
    f.run(strict("full")).unwrap();
    assert!(f.names("").is_empty());
    let root = FsRemoveParams::new("/".parse().unwrap());
    assert_eq!(f.code(root), INVALID);
}

#[test]
fn trees_of_any_depth_and_width_are_removed() {
    let f = Fixture::new();
    let mut at = f.native("deep");
    std::fs::create_dir(&at).unwrap();
    for level in 0..400 {
        std::fs::write(at.join("file"), "").unwrap();
        if level % 100 == 0 {
            std::fs::create_dir(at.join("a-side")).unwrap();
            std::fs::write(at.join("a-side/file"), "").unwrap();
        }
        at = at.join("d");
        std::fs::create_dir(&at).unwrap();
    }
    f.dir("wide");
    for at in 0..9000 {
        std::fs::File::create(f.native(format!("wide/{at}"))).unwrap();
    }
    for at in 0..50 {
        f.dir(&format!("wide/d{at}"));
    }
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open_files();
    f.run(FsRemoveParams::new(f.path("deep"))).unwrap();
    f.run(FsRemoveParams::new(f.path("wide"))).unwrap();
    assert!(f.names("").is_empty());
    // Other tests run beside this one, so this is a bound, not a count.
    assert!(open_files() < before + 200);
}

#[test]
fn unremovable_files_stay() {
    let f = Fixture::new();
    chmod(&f.root, 0o755);
    f.file("d/file", "x");
    as_nobody(|| {
        for name in ["d", "d/file"] {
            let (code, message) = f.fails(FsRemoveParams::new(f.path(name)));
            assert_eq!(code, INVALID);
            assert!(message.contains("Permission denied"), "{message}");
        }
    });
    assert_eq!(f.content("d/file"), b"x");
}

#[test]
fn cancelled_removal_stops() {
    let f = Fixture::new();
    f.file("d/file", "");
    let cancel = Cancel::new();
    cancel.cancel();
    let remove = FsRemoveParams::new(f.path("d"));
    let result = f.executor.execute(remove.into(), &cancel, &|_| ControlFlow::Continue(()));
    assert_eq!(result.unwrap_err(), FileError::Cancelled);
    assert!(f.native("d/file").exists());
}
