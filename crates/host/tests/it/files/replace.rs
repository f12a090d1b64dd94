//! `atomic` and `replaceAtomic`: the old file or the new one, never a part, no litter.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};

use codex_exec_server_protocol::files::*;

use super::*;

fn commit(id: &str) -> FsCloseParams {
    FsCloseParams { commit: true, ..FsCloseParams::new(id) }
}

fn open(f: &Fixture, id: &str, name: &str) -> Result<FsOpenResponse, FileError> {
    f.run(FsOpenParams::new(id, f.path(name), FsOpenMode::ReplaceAtomic))
}

#[test]
fn nothing_shows_until_the_commit() {
    let f = Fixture::new();
    f.file("x", "old");
    for name in ["x", "new"] {
        open(&f, "h", name).unwrap();
        f.run(FsWriteBlockParams::new("h", 0, b"fresh".to_vec())).unwrap();
        assert_eq!(
            f.names("").contains(&"new".to_owned()),
            name != "x" && f.native("new").exists()
        );
        assert_eq!(f.names("").iter().filter(|name| name.starts_with('.')).count(), 0);
        if name == "x" {
            assert_eq!(f.content("x"), b"old");
        }
        f.run(commit("h")).unwrap();
        assert_eq!(f.content(name), b"fresh");
    }
    assert_eq!(f.names(""), ["new", "x"]);
}

#[test]
fn without_a_commit_the_old_file_stays_and_nothing_else() {
    let f = Fixture::new();
    f.file("x", "old");
    for name in ["x", "new"] {
        open(&f, "h", name).unwrap();
        f.run(FsWriteBlockParams::new("h", 1 << 20, b"fresh".to_vec())).unwrap();
        f.run(FsCloseParams::new("h")).unwrap();
        // And when the connection is dropped.
        let executor = Executor::new(Arc::new(FilesConfig::default()));
        run(&executor, FsOpenParams::new("h", f.path(name), FsOpenMode::ReplaceAtomic)).unwrap();
        run(&executor, FsWriteBlockParams::new("h", 0, b"fresh".to_vec())).unwrap();
        drop(executor);
    }
    assert_eq!(f.names(""), ["x"]);
    assert_eq!(f.content("x"), b"old");
}

#[test]
fn mode_and_owner_of_the_old_file_are_kept() {
    let f = Fixture::new();
    let path = f.file("x", "old");
    if is_root() {
        std::os::unix::fs::chown(f.native("x"), Some(1234), Some(4321)).unwrap();
    }
    chmod(&f.native("x"), 0o4751);
    let before = std::fs::metadata(f.native("x")).unwrap();
    let write = FsWriteFileParams::new(path.clone(), b"new".to_vec());
    f.run(FsWriteFileParams { atomic: true, mode: Some(0o600), ..write }).unwrap();
    let middle = std::fs::metadata(f.native("x")).unwrap();
    open(&f, "h", "x").unwrap();
    f.run(commit("h")).unwrap();
    let after = std::fs::metadata(f.native("x")).unwrap();
    let facts = |m: &std::fs::Metadata| (m.uid(), m.gid(), m.mode());
    assert_eq!(facts(&before), facts(&middle));
    assert_eq!(facts(&before), facts(&after));
    assert_ne!(before.ino(), middle.ino());
}

#[test]
fn an_owner_that_cannot_be_kept_is_an_error_and_nothing_happened() {
    let f = Fixture::new();
    chmod(&f.root, 0o777);
    let path = f.file("x", "old");
    chmod(path.as_path(), 0o666);
    as_nobody(|| {
        let write = FsWriteFileParams::new(path.clone(), b"new".to_vec());
        let (code, message) = f.fails(FsWriteFileParams { atomic: true, ..write.clone() });
        assert_eq!(code, INVALID);
        assert!(message.contains("owner"), "{message}");
        assert_eq!(f.content("x"), b"old");
        assert_eq!(f.names(""), ["x"]);
        f.run(write).unwrap();
        assert_eq!(f.content("x"), b"new");
    });
}

#[test]
fn a_file_that_may_not_be_written_may_not_be_replaced() {
    let f = Fixture::new();
    chmod(&f.root, 0o777);
    let path = f.file("x", "old");
    chmod(path.as_path(), 0o444);
    as_nobody(|| {
        let write = FsWriteFileParams::new(path.clone(), b"new".to_vec());
        assert_eq!(f.code(FsWriteFileParams { atomic: true, ..write }), INVALID);
    });
    assert_eq!(f.content("x"), b"old");
}

#[test]
fn a_running_program_can_be_replaced() {
    let f = Fixture::new();
    let path = f.path("sleep");
    std::fs::copy("/bin/sleep", f.native("sleep")).unwrap();
    let mut child = std::process::Command::new(f.native("sleep")).arg("60").spawn().unwrap();
    let write = FsWriteFileParams::new(path, b"new".to_vec());
    let in_place = f.run(write.clone());
    let replaced = f.run(FsWriteFileParams { atomic: true, ..write });
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(in_place.unwrap_err().to_string().contains("Text file busy"));
    replaced.unwrap();
    assert_eq!(f.content("sleep"), b"new");
    assert_eq!(mode_of(&f.native("sleep")) & 0o111, 0o111);
}

#[test]
fn readers_see_one_or_the_other() {
    let f = Fixture::new();
    let path = f.file("x", vec![b'a'; 40_000]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reads = 0;
            while !done.load(Ordering::Relaxed) || reads < 50 {
                let data = f.run(FsReadFileParams::new(path.clone())).unwrap().data;
                assert_eq!(data.len(), 40_000);
                assert!(data.iter().all(|byte| *byte == data[0]), "a mix of two files");
                reads += 1;
            }
        });
        for at in 0..100u8 {
            let write = FsWriteFileParams::new(path.clone(), vec![at; 40_000]);
            f.run(FsWriteFileParams { atomic: true, ..write }).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(f.names(""), ["x"]);
}
