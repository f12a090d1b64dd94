//! `atomic` and `replaceAtomic`: the old file or the new one, never a part, and no temporary file.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};

use codex_exec_server_protocol::files::*;
use proptest::prelude::*;

use super::*;
use crate::skipped::runs_as_root;

fn commit(id: &str) -> FsCloseParams {
    FsCloseParams { commit: true, ..FsCloseParams::new(id) }
}

fn open(f: &Fixture, id: &str, name: &str) -> Result<FsOpenResponse, FileError> {
    f.run(FsOpenParams::new(id, f.path(name), FsOpenMode::ReplaceAtomic))
}

#[test]
fn replacement_is_invisible_until_commit() {
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
fn without_commit_only_the_old_file_stays() {
    let f = Fixture::new();
    f.file("x", "old");
    for name in ["x", "new"] {
        open(&f, "h", name).unwrap();
        f.run(FsWriteBlockParams::new("h", 1 << 20, b"fresh".to_vec())).unwrap();
        f.run(FsCloseParams::new("h")).unwrap();
        // Also when the connection is dropped.
        let executor = Executor::new(Arc::new(FilesConfig::default()));
        run(&executor, FsOpenParams::new("h", f.path(name), FsOpenMode::ReplaceAtomic)).unwrap();
        run(&executor, FsWriteBlockParams::new("h", 0, b"fresh".to_vec())).unwrap();
        drop(executor);
    }
    assert_eq!(f.names(""), ["x"]);
    assert_eq!(f.content("x"), b"old");
}

#[test]
fn replacement_keeps_mode_and_owner() {
    let f = Fixture::new();
    let path = f.file("x", "old");
    if runs_as_root() {
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
fn owner_that_cannot_be_kept_is_an_error_without_effect() {
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
fn unwritable_file_cannot_be_replaced() {
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
fn running_program_can_be_replaced() {
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
fn readers_see_the_old_or_the_new_file() {
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

fn free_blocks(f: &Fixture) -> u64 {
    rustix::fs::statvfs(&f.root).unwrap().f_bfree
}

#[test]
fn block_on_a_full_disk_discards_the_replacement() {
    on_a_small_disk(|f| {
        f.file("x", "old");
        let before = free_blocks(f);
        open(f, "h", "x").unwrap();
        f.run(FsWriteBlockParams::new("h", 0, vec![1; 128 << 10])).unwrap();
        let full = f.run(FsWriteBlockParams::new("h", 128 << 10, vec![2; 256 << 10]));
        assert_eq!(kind(full), ErrorKind::DiskFull);
        assert_eq!(free_blocks(f), before, "what was written of it has gone");
        for (refused, what) in [
            (f.run(FsWriteBlockParams::new("h", 0, b"fits".to_vec())), "a block after it"),
            (f.run(commit("h")), "a commit"),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DiskFull, "{what}");
            assert!(error.to_string().contains("`h`"), "{error}");
        }
        assert_eq!(f.code(commit("h")), NOT_FOUND, "the commit has closed it");
        assert_eq!((f.content("x"), f.names("")), (b"old".to_vec(), vec!["x".to_owned()]));
        // The id and the space are free for another attempt.
        open(f, "h", "x").unwrap();
        f.run(FsWriteBlockParams::new("h", 0, b"new".to_vec())).unwrap();
        f.run(commit("h")).unwrap();
        assert_eq!(f.content("x"), b"new");
    });
}

#[test]
fn refused_block_discards_the_replacement() {
    let f = Fixture::new();
    f.file("x", "old");
    for refused in [
        FsWriteBlockParams::new("h", u64::MAX, b"far".to_vec()),
        FsWriteBlockParams::new("h", 0, vec![1; (1 << 20) + 1]),
    ] {
        open(&f, "h", "x").unwrap();
        f.run(FsWriteBlockParams::new("h", 0, b"new".to_vec())).unwrap();
        assert_eq!(f.code(refused), INVALID);
        assert_eq!(f.code(commit("h")), INVALID);
        assert_eq!((f.content("x"), f.names("")), (b"old".to_vec(), vec!["x".to_owned()]));
    }
}

/// An action of a client on one of a few handles and files.
#[derive(Debug, Clone)]
enum Step {
    Open { handle: usize, file: usize },
    Write { handle: usize, offset: u64, len: usize },
    Close { handle: usize, commit: bool },
}

const FILES: [&str; 3] = ["a", "b", "c"];
const HANDLES: [&str; 4] = ["1", "2", "3", "4"];

fn step() -> impl Strategy<Value = Step> {
    let handle = 0..HANDLES.len();
    // Four handles of up to 160 KiB on a disk of 256 KiB: many blocks fail, many do not.
    let offset = prop_oneof![9 => 0..(80u64 << 10), 1 => Just(u64::MAX)];
    prop_oneof![
        2 => (handle.clone(), 0..FILES.len()).prop_map(|(handle, file)| Step::Open { handle, file }),
        4 => (handle.clone(), offset, 0..80usize << 10)
            .prop_map(|(handle, offset, len)| Step::Write { handle, offset, len }),
        2 => (handle, proptest::bool::weighted(0.8))
            .prop_map(|(handle, commit)| Step::Close { handle, commit }),
    ]
}

/// A handle in the model.
struct Model {
    file: usize,
    /// `None` once a block has failed.
    content: Option<Vec<u8>>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Whatever fails, a file has its old content or all blocks of a commit that succeeded, and nothing
    /// else is on the disk.
    #[test]
    fn only_complete_replacements_are_committed(steps in proptest::collection::vec(step(), 1..60)) {
        on_a_small_disk(|f| {
            let mut handles: [Option<Model>; HANDLES.len()] = Default::default();
            let mut files: [Option<Vec<u8>>; FILES.len()] = Default::default();
            for (at, step) in steps.iter().enumerate() {
                match *step {
                    Step::Open { handle, file } => {
                        let opened = open(f, HANDLES[handle], FILES[file]).is_ok();
                        assert_eq!(opened, handles[handle].is_none());
                        handles[handle].get_or_insert(Model { file, content: Some(Vec::new()) });
                    }
                    Step::Write { handle, offset, len } => {
                        let chunk = vec![at as u8 + 1; len];
                        let block = FsWriteBlockParams::new(HANDLES[handle], offset, chunk.clone());
                        let written = f.run(block).is_ok();
                        let Some(model) = &mut handles[handle] else {
                            assert!(!written, "to no handle");
                            continue;
                        };
                        assert!(!written || model.content.is_some(), "after a failed block");
                        if !written {
                            model.content = None;
                        } else if let Some(content) = model.content.as_mut().filter(|_| len > 0) {
                            let (start, end) = (offset as usize, offset as usize + len);
                            content.resize(content.len().max(end), 0);
                            content[start..end].copy_from_slice(&chunk);
                        }
                    }
                    Step::Close { handle, commit } => {
                        let id = HANDLES[handle];
                        let closed = f.run(FsCloseParams { commit, ..FsCloseParams::new(id) });
                        match handles[handle].take() {
                            Some(Model { file, content: Some(content) }) if commit => {
                                closed.unwrap();
                                files[file] = Some(content);
                            }
                            _ => assert_eq!(closed.is_err(), commit),
                        }
                    }
                }
                let named = FILES.iter().zip(&files).filter(|(_, content)| content.is_some());
                assert_eq!(f.names(""), named.map(|(name, _)| *name).collect::<Vec<_>>());
                for (name, content) in FILES.iter().zip(&files) {
                    assert!(content.as_ref().is_none_or(|content| f.content(name) == *content));
                }
            }
        });
    }
}
