//! `followSymlinks: false`: no link is followed in any component, not even one that comes and goes.

use std::sync::atomic::{AtomicBool, Ordering};

use codex_exec_server_protocol::files::*;

use super::*;

fn no_links_requests(path: &PathUri) -> Vec<(&'static str, codex_exec_host::files::Operation)> {
    let path = || path.clone();
    let write =
        FsWriteFileParams { follow_symlinks: false, ..FsWriteFileParams::new(path(), vec![7]) };
    vec![
        (
            "read",
            FsReadFileParams { follow_symlinks: false, ..FsReadFileParams::new(path()) }.into(),
        ),
        ("write", write.clone().into()),
        ("write with mode", FsWriteFileParams { mode: Some(0o600), ..write.clone() }.into()),
        ("write atomic", FsWriteFileParams { atomic: true, ..write }.into()),
        (
            "metadata",
            FsGetMetadataParams { follow_symlinks: false, ..FsGetMetadataParams::new(path()) }
                .into(),
        ),
        (
            "create",
            FsCreateDirectoryParams {
                follow_symlinks: false,
                ..FsCreateDirectoryParams::new(path())
            }
            .into(),
        ),
        (
            "create one",
            FsCreateDirectoryParams {
                follow_symlinks: false,
                recursive: false,
                ..FsCreateDirectoryParams::new(path())
            }
            .into(),
        ),
        ("remove", FsRemoveParams { follow_symlinks: false, ..FsRemoveParams::new(path()) }.into()),
        (
            "mode",
            FsSetModeParams { follow_symlinks: false, ..FsSetModeParams::new(path(), 0o600) }
                .into(),
        ),
    ]
}

fn execute(
    f: &Fixture,
    operation: codex_exec_host::files::Operation,
) -> Result<codex_exec_host::files::Outcome, FileError> {
    f.executor.execute(operation, &Cancel::new(), &|_| ControlFlow::Continue(()))
}

#[test]
fn link_in_any_component_is_refused() {
    for f in Fixture::both_ways() {
        f.file("real/sub/file", "untouched");
        f.link("real", "link");
        f.link("../real/sub", "real/inner");
        f.link("file", "real/sub/last");
        f.link("nowhere", "dangling");
        for name in [
            "link/sub/file",
            "real/inner/file",
            "real/sub/last",
            "link",
            "link/new",
            "real/inner/new/deep",
            "dangling",
        ] {
            for (what, operation) in no_links_requests(&f.path(name)) {
                let result = execute(&f, operation);
                if name.ends_with("deep") && what != "create" {
                    // The parent is missing; whichever error is found first is reported.
                    assert!(result.is_err());
                    continue;
                }
                let error = result.expect_err(&format!("{what} {name}"));
                assert!(
                    matches!(error, FileError::SymlinkRefused { .. }),
                    "{what} {name}: {error}"
                );
                let RpcError { code, .. } = error.into();
                assert_eq!(code, INVALID);
            }
        }
        assert_eq!(f.content("real/sub/file"), b"untouched");
        assert!(f.native("link").is_symlink() && f.native("dangling").is_symlink());
        assert_eq!(f.names("real/sub"), ["file", "last"]);
        assert_eq!(f.names(""), ["dangling", "link", "real"]);
    }
}

#[test]
fn paths_without_links_work() {
    for f in Fixture::both_ways() {
        f.file("d/e/file", "old");
        for (what, operation) in no_links_requests(&f.path("d/e/file")) {
            let result = execute(&f, operation);
            match what {
                "create" | "create one" => assert!(result.is_err(), "{what}"),
                "remove" => {
                    result.unwrap();
                    f.file("d/e/file", "again");
                }
                _ => drop(result.unwrap()),
            }
        }
        let make = FsCreateDirectoryParams::new(f.path("d/x/y/z"));
        f.run(FsCreateDirectoryParams { follow_symlinks: false, ..make }).unwrap();
        assert!(f.native("d/x/y/z").is_dir());
        let root = FsGetMetadataParams::new("/".parse().unwrap());
        assert!(
            f.run(FsGetMetadataParams { follow_symlinks: false, ..root }).unwrap().is_directory
        );
        let rename = FsRenameParams::new(f.path("d/x"), f.path("moved"));
        f.run(FsRenameParams { follow_symlinks: false, ..rename }).unwrap();
        f.link("d", "l");
        let rename = FsRenameParams::new(f.path("l/e"), f.path("stolen"));
        assert_eq!(f.code(FsRenameParams { follow_symlinks: false, ..rename }), INVALID);
        let link = FsSymlinkParams::new(f.path("l/new"), "x");
        assert_eq!(f.code(FsSymlinkParams { follow_symlinks: false, ..link }), INVALID);
    }
}

#[test]
fn links_of_proc_are_links_too() {
    for f in Fixture::both_ways() {
        f.file("x", "abc");
        let open = std::fs::File::open(f.native("x")).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
        let read = FsReadFileParams::new(path.parse().unwrap());
        assert_eq!(f.run(read.clone()).unwrap().data[..], b"abc"[..]);
        assert_eq!(f.code(FsReadFileParams { follow_symlinks: false, ..read }), INVALID);
    }
}

#[test]
fn search_permission_on_ancestors_is_enough() {
    for f in Fixture::both_ways() {
        chmod(&f.root, 0o755);
        let file = f.file("a/b/file", "x");
        chmod(file.as_path(), 0o666);
        chmod(&f.native("a/b"), 0o733);
        chmod(&f.native("a"), 0o711);
        as_nobody(|| {
            let read = FsReadFileParams::new(file.clone());
            f.run(FsReadFileParams { follow_symlinks: false, ..read }).unwrap();
            let stat = FsGetMetadataParams::new(file.clone());
            f.run(FsGetMetadataParams { follow_symlinks: false, ..stat }).unwrap();
            for atomic in [false, true] {
                let name = format!("a/b/new{atomic}");
                let write = FsWriteFileParams::new(f.path(&name), vec![1]);
                f.run(FsWriteFileParams { follow_symlinks: false, atomic, ..write }).unwrap();
                let remove = FsRemoveParams::new(f.path(&name));
                f.run(FsRemoveParams { follow_symlinks: false, ..remove }).unwrap();
            }
            let make = FsCreateDirectoryParams::new(f.path("a/b/c/d"));
            f.run(FsCreateDirectoryParams { follow_symlinks: false, ..make }).unwrap();
            // Unreadable, but its owner can change it.
            let own = f.path("a/b/c/own");
            f.run(FsWriteFileParams {
                mode: Some(0),
                ..FsWriteFileParams::new(own.clone(), vec![])
            })
            .unwrap();
            let set = FsSetModeParams::new(own.clone(), 0o640);
            f.run(FsSetModeParams { follow_symlinks: false, ..set }).unwrap();
            assert_eq!(mode_of(own.as_path()), 0o640);
        });
    }
}

/// While a directory is swapped for a link to a forbidden directory and back in a loop, no operation
/// that must not follow links reads or changes anything there.
#[test]
fn flickering_link_is_never_followed() {
    for f in Fixture::both_ways() {
        f.file("forbidden/file", "secret");
        f.file("allowed/file", "public");
        f.dir("forbidden/victim/deep");
        f.link("forbidden", "decoy");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                while !done.load(Ordering::Relaxed) {
                    let (a, b) = (f.native("allowed"), f.native("decoy"));
                    renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let _stop = Stop(&done);
            let (mut reads, mut refusals) = (0, 0);
            for round in 0..3000 {
                let read = FsReadFileParams::new(f.path("allowed/file"));
                match f.run(FsReadFileParams { follow_symlinks: false, ..read }) {
                    Ok(response) => {
                        assert_eq!(response.data[..], b"public"[..]);
                        reads += 1;
                    }
                    Err(FileError::SymlinkRefused { .. }) => refusals += 1,
                    // Opening by component can hit the moment between two renames.
                    Err(error) => assert_eq!(error.kind(), ErrorKind::PathNotFound, "{error}"),
                }
                let name = format!("allowed/new{}", round % 7);
                let write = FsWriteFileParams::new(f.path(&name), vec![1]);
                let atomic = round % 2 == 0;
                let _ = f.run(FsWriteFileParams { follow_symlinks: false, atomic, ..write });
                let make = FsCreateDirectoryParams::new(f.path("allowed/made/deep"));
                let _ = f.run(FsCreateDirectoryParams { follow_symlinks: false, ..make });
                let remove = FsRemoveParams::new(f.path("allowed/victim"));
                let _ = f.run(FsRemoveParams { follow_symlinks: false, ..remove });
                let mode = FsSetModeParams::new(f.path("allowed/file"), 0o600 | (round % 8));
                let _ = f.run(FsSetModeParams { follow_symlinks: false, ..mode });
            }
            assert!(
                reads > 0 && refusals > 0,
                "{reads} reads, {refusals} refusals: no race was run"
            );
        });
        assert_eq!(f.content("forbidden/file"), b"secret");
        assert_eq!(mode_of(&f.native("forbidden/file")) & 0o111, 0);
        assert_eq!(f.names("forbidden"), ["file", "victim"]);
        assert!(f.native("forbidden/victim/deep").is_dir());
    }
}

/// A tree whose directories are replaced by links while it is removed or walked.
#[test]
fn remove_and_walk_never_leave_the_tree() {
    let f = Fixture::new();
    f.file("outside/precious", "x");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = std::fs::create_dir_all(f.native("tree/a/b"));
                let _ = std::fs::write(f.native("tree/a/b/precious"), "");
                let _ = std::fs::rename(f.native("tree/a/b"), f.native("tree/a/moved"));
                let _ = std::os::unix::fs::symlink(f.native("outside"), f.native("tree/a/b"));
                let _ = std::fs::remove_file(f.native("tree/a/b"));
            }
        });
        let _stop = Stop(&done);
        for _ in 0..1500 {
            let _ = f.run(FsRemoveParams::new(f.path("tree")));
            let options = FsWalkOptions::default();
            if let Ok(walk) = f.run(FsWalkParams::new(f.path("tree"), options)) {
                let outside = |entry: &&FsWalkEntry| {
                    std::fs::canonicalize(entry.path.as_path())
                        .is_ok_and(|real| real.ends_with("outside/precious"))
                };
                // An entry may have become a link by now; the walk itself listed no file there.
                let _ = walk.entries.iter().find(outside);
            }
        }
    });
    assert_eq!(f.content("outside/precious"), b"x");
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
