//! `fs/readFile` and `fs/writeFile`.

use std::os::unix::fs::MetadataExt;

use codex_exec_server_protocol::files::*;
use proptest::prelude::*;

use super::*;
use crate::skipped::runs_as_root;

#[test]
fn file_is_read_whole() {
    let f = Fixture::new();
    for size in [0, 1, 4095, 4096, 4097, 100_000, 3 << 20] {
        let data: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
        let path = f.file("x", &data);
        assert_eq!(f.run(FsReadFileParams::new(path)).unwrap().data[..], data[..], "{size}");
    }
}

#[test]
fn files_without_a_size_are_read() {
    let f = Fixture::new();
    let path = "/proc/self/status".parse().unwrap();
    let data = f.run(FsReadFileParams::new(path)).unwrap().data;
    assert!(data.starts_with(b"Name:"));
}

#[test]
fn file_of_exactly_the_limit_is_read() {
    let f = Fixture::with({
        let mut config = FilesConfig::default();
        config.max_read_file_bytes = 1000;
        config
    });
    assert!(f.run(FsReadFileParams::new(f.file("x", [0; 1000]))).is_ok());
    let (code, message) = f.fails(FsReadFileParams::new(f.file("x", [0; 1001])));
    assert_eq!(code, INVALID);
    assert!(message.contains("larger than 1000 bytes"), "{message}");
    // A file without a size is limited too.
    let status = "/proc/self/maps".parse().unwrap();
    assert_eq!(f.code(FsReadFileParams::new(status)), INVALID);
}

#[test]
fn six_hundred_mebibytes_are_refused_without_being_read() {
    let f = Fixture::new();
    let path = f.file("x", "");
    std::fs::OpenOptions::new()
        .write(true)
        .open(f.native("x"))
        .unwrap()
        .set_len(600 << 20)
        .unwrap();
    assert_eq!(f.code(FsReadFileParams::new(path)), INVALID);
}

#[test]
fn only_regular_files_are_read_and_written_and_nothing_blocks() {
    let f = Fixture::new();
    let (fifo, socket, dir) = (f.fifo("fifo"), f.socket("socket"), f.dir("dir"));
    let devices = ["/dev/null", "/dev/zero", "/dev/full", "/dev/tty"].map(|d| d.parse().unwrap());
    f.link("fifo", "to-fifo");
    let all = [fifo, socket, dir, f.path("to-fifo")];
    for path in all.into_iter().chain(devices) {
        for follow_symlinks in [true, false] {
            let read = FsReadFileParams { follow_symlinks, ..FsReadFileParams::new(path.clone()) };
            let (code, message) = f.fails(read);
            assert_eq!(code, INVALID, "{path}: {message}");
            for atomic in [true, false] {
                let write = FsWriteFileParams::new(path.clone(), b"x".to_vec());
                let write = FsWriteFileParams { follow_symlinks, atomic, ..write };
                let (code, message) = f.fails(write);
                assert_eq!(code, INVALID, "{path}: {message}");
            }
        }
        for mode in [FsOpenMode::Read, FsOpenMode::Replace, FsOpenMode::ReplaceAtomic] {
            let (code, message) = f.fails(FsOpenParams::new("h", path.clone(), mode));
            assert_eq!(code, INVALID, "{path} {mode:?}: {message}");
        }
    }
    assert_eq!(f.names(""), ["dir", "fifo", "socket", "to-fifo"]);
}

#[test]
fn unreachable_paths_report_the_systems_message() {
    let f = Fixture::new();
    let file = f.file("file", "x");
    f.link("loop", "loop");
    let long = "n".repeat(256);
    for (path, code, words) in [
        (f.path("none"), NOT_FOUND, "No such file or directory"),
        (f.path("none/x"), NOT_FOUND, "No such file or directory"),
        (file.join("below").unwrap(), INTERNAL, "Not a directory"),
        (f.path("loop"), INTERNAL, "Too many levels of symbolic links"),
        (f.path(&long), INTERNAL, "File name too long"),
        (f.path("d/".repeat(2100)), INTERNAL, "File name too long"),
    ] {
        let (found, message) = f.fails(FsReadFileParams::new(path.clone()));
        assert_eq!((found, message.contains(words)), (code, true), "{message}");
        if path != f.path("none") {
            let (found, message) = f.fails(FsWriteFileParams::new(path, vec![1]));
            assert_eq!((found, message.contains(words)), (code, true), "{message}");
        }
    }
}

#[test]
fn missing_parent_is_not_created() {
    let f = Fixture::new();
    for atomic in [false, true] {
        let write = FsWriteFileParams { atomic, ..FsWriteFileParams::new(f.path("a/b"), vec![]) };
        assert_eq!(f.code(write), NOT_FOUND);
    }
    assert!(f.names("").is_empty());
}

#[test]
fn writing_in_place_keeps_inode_links_owner_and_mode() {
    let f = Fixture::new();
    let path = f.file("x", "old content, longer");
    std::fs::hard_link(f.native("x"), f.native("y")).unwrap();
    chmod(&f.native("x"), 0o640);
    if runs_as_root() {
        std::os::unix::fs::chown(f.native("x"), Some(1234), Some(4321)).unwrap();
    }
    let before = std::fs::metadata(f.native("x")).unwrap();
    let write =
        FsWriteFileParams { mode: Some(0o777), ..FsWriteFileParams::new(path, b"new".to_vec()) };
    f.run(write).unwrap();
    let after = std::fs::metadata(f.native("x")).unwrap();
    assert_eq!(f.content("y"), b"new");
    let facts = |m: &std::fs::Metadata| (m.ino(), m.nlink(), m.uid(), m.gid(), m.mode());
    assert_eq!(facts(&before), facts(&after));
}

#[test]
fn links_are_written_through_even_to_missing_targets() {
    let f = Fixture::new();
    f.file("real", "old");
    f.link("real", "l1");
    f.dir("d");
    f.link("../l1", "d/l2");
    f.link("d/new", "dangling");
    for atomic in [false, true] {
        let data = format!("{atomic}");
        let write = |name: &str| FsWriteFileParams {
            atomic,
            mode: atomic.then_some(0o600),
            ..FsWriteFileParams::new(f.path(name), data.clone().into_bytes())
        };
        f.run(write("d/l2")).unwrap();
        assert_eq!(f.content("real"), data.as_bytes());
        f.run(write("dangling")).unwrap();
        assert_eq!(f.content("d/new"), data.as_bytes());
        for link in ["l1", "d/l2", "dangling"] {
            assert!(f.native(link).is_symlink(), "{link} {atomic}");
        }
    }
    assert_eq!(f.names(""), ["d", "dangling", "l1", "real"]);
    assert_eq!(f.names("d"), ["l2", "new"]);
}

#[test]
fn mode_applies_exactly_and_only_to_new_files() {
    let f = Fixture::new();
    for (atomic, name) in [(false, "a"), (true, "b")] {
        for mode in [0o600, 0o666, 0o777, 0o444] {
            let path = f.path(format!("{name}{mode:o}"));
            let write = FsWriteFileParams {
                atomic,
                mode: Some(mode),
                ..FsWriteFileParams::new(path.clone(), vec![1])
            };
            f.run(write).unwrap();
            assert_eq!(mode_of(path.as_path()), mode, "{atomic}");
        }
        let write = FsWriteFileParams { atomic, ..FsWriteFileParams::new(f.path(name), vec![]) };
        f.run(write.clone()).unwrap();
        let plain = f.native("plain");
        std::fs::write(&plain, "").unwrap();
        assert_eq!(mode_of(&f.native(name)), mode_of(&plain), "as the umask says");
        assert_eq!(f.code(FsWriteFileParams { mode: Some(0o10000), ..write }), INVALID);
    }
}

#[test]
fn permission_denied_is_an_invalid_request() {
    let f = Fixture::new();
    chmod(&f.root, 0o755);
    let secret = f.file("secret", "x");
    chmod(secret.as_path(), 0o600);
    let closed = f.dir("closed");
    chmod(closed.as_path(), 0o700);
    as_nobody(|| {
        for path in [secret.clone(), closed.join("x").unwrap()] {
            let (code, message) = f.fails(FsReadFileParams::new(path.clone()));
            assert_eq!(code, INVALID);
            assert!(message.contains("Permission denied"), "{message}");
            for atomic in [false, true] {
                let write =
                    FsWriteFileParams { atomic, ..FsWriteFileParams::new(path.clone(), vec![]) };
                assert_eq!(f.code(write), INVALID);
            }
        }
        let read =
            FsReadFileParams { follow_symlinks: false, ..FsReadFileParams::new(secret.clone()) };
        assert_eq!(kind(f.run(read)), ErrorKind::PermissionDenied);
    });
    assert_eq!(f.content("secret"), b"x");
}

#[test]
fn full_disk_is_reported() {
    on_a_small_disk(|f| {
        let old = f.file("x", "old");
        let data = vec![7; 1 << 20];
        let full = |result: Result<FsDone, FileError>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DiskFull);
            let RpcError { code, message, .. } = error.into();
            assert_eq!(code, INTERNAL);
            assert!(message.contains("No space left on device"), "{message}");
        };
        let write = FsWriteFileParams::new(old.clone(), data.clone());
        full(f.run(FsWriteFileParams { atomic: true, ..write.clone() }));
        assert_eq!(f.content("x"), b"old", "the old file is whole");
        assert_eq!(f.names(""), ["x"], "and alone");

        f.run(FsOpenParams::new("h", f.path("blocks"), FsOpenMode::ReplaceAtomic)).unwrap();
        let mut written = Ok(FsDone {});
        for at in 0..8 {
            let block = FsWriteBlockParams::new("h", at << 16, vec![1; 1 << 16]);
            written = written.and_then(|_| f.run(block));
        }
        full(written);
        f.run(FsCloseParams::new("h")).unwrap();
        assert_eq!(f.names(""), ["x"]);

        full(f.run(write));
        // A copy that does not fit leaves nothing.
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::write(shm.path().join("big"), &data).unwrap();
        f.run(FsRemoveParams::new(old)).unwrap();
        full(f.run(FsCopyParams::new(uri(&shm.path().join("big")), f.path("copy"), false)));
        assert!(f.names("").is_empty());
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn written_content_is_read_back(
        first: Vec<u8>,
        second: Vec<u8>,
        atomic: bool,
        follow_symlinks: bool,
        name in "[^/\\x00]{1,40}",
    ) {
        prop_assume!(name != "." && name != ".." && name.len() < 256);
        let f = Fixture::new();
        for data in [first, second] {
            let write = FsWriteFileParams::new(f.path(&name), data.clone());
            f.run(FsWriteFileParams { atomic, follow_symlinks, ..write }).unwrap();
            let read = FsReadFileParams { follow_symlinks, ..FsReadFileParams::new(f.path(&name)) };
            prop_assert_eq!(&f.run(read).unwrap().data[..], &data[..]);
        }
        prop_assert_eq!(f.names("").len(), 1);
    }
}
