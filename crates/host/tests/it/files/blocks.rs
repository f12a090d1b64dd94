//! `fs/open`, `fs/readBlock`, `fs/writeBlock`, `fs/close`.

use std::os::unix::fs::PermissionsExt;

use codex_exec_server_protocol::files::*;
use proptest::prelude::*;

use super::*;

fn open(
    f: &Fixture,
    id: &str,
    path: &PathUri,
    mode: FsOpenMode,
) -> Result<FsOpenResponse, FileError> {
    f.run(FsOpenParams::new(id, path.clone(), mode))
}

#[test]
fn blocks_are_read_at_any_offset_and_report_eof() {
    let f = Fixture::new();
    let path = f.file("x", "0123456789");
    assert_eq!(open(&f, "h", &path, FsOpenMode::Read).unwrap().handle_id, "h");
    for (offset, len, chunk, eof) in [
        (0, 4, "0123", false),
        (0, 10, "0123456789", false),
        (0, 11, "0123456789", true),
        (7, 100, "789", true),
        (10, 1, "", true),
        (1 << 40, 1, "", true),
        (3, 1 << 20, "3456789", true),
    ] {
        let block = f.run(FsReadBlockParams::new("h", offset, len)).unwrap();
        assert_eq!((&block.chunk[..], block.eof), (chunk.as_bytes(), eof), "{offset} {len}");
    }
    f.run(FsCloseParams::new("h")).unwrap();
    assert_eq!(f.code(FsReadBlockParams::new("h", 0, 1)), NOT_FOUND);
    f.run(FsCloseParams::new("h")).unwrap();
}

#[test]
fn lengths_and_offsets_have_limits() {
    let f = Fixture::new();
    let path = f.file("x", "abc");
    open(&f, "r", &path, FsOpenMode::Read).unwrap();
    for (offset, len) in [(0, 0), (0, (1 << 20) + 1), (0, u64::MAX), (u64::MAX, 1), (1 << 63, 1)] {
        assert_eq!(f.code(FsReadBlockParams::new("r", offset, len)), INVALID, "{offset} {len}");
    }
    // An invalid request is not a failed read.
    assert_eq!(f.run(FsReadBlockParams::new("r", 0, 3)).unwrap().chunk[..], b"abc"[..]);
    open(&f, "w", &f.path("y"), FsOpenMode::Replace).unwrap();
    assert_eq!(f.code(FsWriteBlockParams::new("w", 0, vec![0; (1 << 20) + 1])), INVALID);
    assert_eq!(f.code(FsWriteBlockParams::new("w", u64::MAX - 1, vec![0; 2])), INVALID);
    f.run(FsWriteBlockParams::new("w", 0, vec![0; 1 << 20])).unwrap();
    f.run(FsWriteBlockParams::new("w", 5, vec![])).unwrap();
}

#[test]
fn handles_are_limited_in_number_and_unique() {
    let f = Fixture::new();
    let path = f.file("x", "abc");
    let name = |at: usize| format!("{at:032}");
    for at in 0..128 {
        open(&f, &name(at), &path, FsOpenMode::Read).unwrap();
    }
    let (code, message) = f.fails(FsOpenParams::new("one more", path.clone(), FsOpenMode::Read));
    assert_eq!(code, INVALID);
    assert!(message.contains("128"), "{message}");
    f.run(FsCloseParams::new(name(5))).unwrap();
    open(&f, "one more", &path, FsOpenMode::Read).unwrap();
    f.run(FsCloseParams::new(name(6))).unwrap();
    let taken = FsOpenParams::new("one more", path.clone(), FsOpenMode::Read);
    assert_eq!(f.code(taken), INVALID);
    let long = FsOpenParams::new("n".repeat(33), path.clone(), FsOpenMode::Read);
    assert_eq!(f.code(long), INVALID);
    // A failed open reserves no id.
    assert_eq!(f.code(FsOpenParams::new("n", f.path("none"), FsOpenMode::Read)), NOT_FOUND);
    open(&f, "n", &path, FsOpenMode::Read).unwrap();
}

#[test]
fn unknown_handles_are_errors_but_can_be_closed() {
    let f = Fixture::new();
    assert_eq!(f.code(FsReadBlockParams::new("h", 0, 1)), NOT_FOUND);
    assert_eq!(f.code(FsWriteBlockParams::new("h", 0, vec![1])), NOT_FOUND);
    f.run(FsCloseParams::new("h")).unwrap();
    let commit = FsCloseParams { commit: true, ..FsCloseParams::new("h") };
    assert_eq!(f.code(commit), NOT_FOUND, "a commit that was none has to be known");
}

#[test]
fn handle_is_for_reading_or_for_writing() {
    let f = Fixture::new();
    let path = f.file("x", "abc");
    open(&f, "r", &path, FsOpenMode::Read).unwrap();
    assert_eq!(f.code(FsWriteBlockParams::new("r", 0, vec![1])), INVALID);
    for mode in [FsOpenMode::Replace, FsOpenMode::ReplaceAtomic] {
        open(&f, "w", &path, mode).unwrap();
        assert_eq!(f.code(FsReadBlockParams::new("w", 0, 1)), INVALID);
        f.run(FsCloseParams::new("w")).unwrap();
    }
}

#[test]
fn replace_truncates_at_once_and_takes_blocks_in_any_order() {
    let f = Fixture::new();
    let path = f.file("x", "old");
    open(&f, "w", &path, FsOpenMode::Replace).unwrap();
    assert_eq!(f.content("x"), b"");
    f.run(FsWriteBlockParams::new("w", 6, b"789".to_vec())).unwrap();
    f.run(FsWriteBlockParams::new("w", 0, b"12".to_vec())).unwrap();
    assert_eq!(f.content("x"), b"12\0\0\0\x00789", "holes read as zeros");
    f.run(FsCloseParams { commit: true, ..FsCloseParams::new("w") }).unwrap();
    open(&f, "w", &f.path("new"), FsOpenMode::Replace).unwrap();
    assert_eq!(f.content("new"), b"");
}

#[test]
fn file_truncated_while_read_ends_at_its_new_size() {
    let f = Fixture::new();
    let path = f.file("x", [1; 5000]);
    open(&f, "h", &path, FsOpenMode::Read).unwrap();
    assert!(!f.run(FsReadBlockParams::new("h", 0, 4096)).unwrap().eof);
    std::fs::File::options().write(true).open(f.native("x")).unwrap().set_len(100).unwrap();
    let block = f.run(FsReadBlockParams::new("h", 4096, 4096)).unwrap();
    assert!(block.chunk.is_empty() && block.eof);
    assert_eq!(f.run(FsReadBlockParams::new("h", 0, 4096)).unwrap().chunk.len(), 100);
    // Removing the file does not affect the handle.
    std::fs::remove_file(f.native("x")).unwrap();
    assert_eq!(f.run(FsReadBlockParams::new("h", 0, 4096)).unwrap().chunk.len(), 100);
}

#[test]
fn failed_read_closes_the_handle() {
    let f = Fixture::new();
    // Can be opened, but reading our own address space at offset 0 fails.
    let path = "/proc/self/mem".parse().unwrap();
    open(&f, "h", &path, FsOpenMode::Read).unwrap();
    assert_eq!(f.code(FsReadBlockParams::new("h", 0, 16)), INTERNAL);
    assert_eq!(f.code(FsReadBlockParams::new("h", 0, 16)), NOT_FOUND);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn random_blocks_write_the_same_file_as_a_model(
        blocks in proptest::collection::vec((0usize..3000, proptest::collection::vec(any::<u8>(), 0..800)), 0..12),
        reads in proptest::collection::vec((0u64..5000, 1u64..2000), 0..8),
        atomic: bool,
    ) {
        let f = Fixture::new();
        let path = f.path("x");
        let mode = if atomic { FsOpenMode::ReplaceAtomic } else { FsOpenMode::Replace };
        open(&f, "w", &path, mode).unwrap();
        let mut model = Vec::new();
        for (at, block) in blocks {
            if !block.is_empty() {
                model.resize(model.len().max(at + block.len()), 0);
                model[at..at + block.len()].copy_from_slice(&block);
            }
            f.run(FsWriteBlockParams::new("w", at as u64, block)).unwrap();
        }
        f.run(FsCloseParams { commit: true, ..FsCloseParams::new("w") }).unwrap();
        prop_assert_eq!(f.content("x"), &model[..]);
        open(&f, "r", &path, FsOpenMode::Read).unwrap();
        for (offset, len) in reads {
            let block = f.run(FsReadBlockParams::new("r", offset, len)).unwrap();
            let start = (offset as usize).min(model.len());
            let end = (start + len as usize).min(model.len());
            prop_assert_eq!(&block.chunk[..], &model[start..end]);
            prop_assert_eq!(block.eof, ((end - start) as u64) < len);
        }
    }
}

#[test]
fn new_file_gets_its_permissions_before_its_content() {
    let f = Fixture::new();
    let bits = |name: &str| f.root.join(name).metadata().unwrap().permissions().mode() & 0o7777;
    for (name, mode) in [("plain", FsOpenMode::Replace), ("atomic", FsOpenMode::ReplaceAtomic)] {
        for wanted in [0o600, 0o777] {
            let mut params = FsOpenParams::new("h", f.path(name), mode);
            params.permissions = Some(wanted);
            f.run(params).unwrap();
            if mode == FsOpenMode::Replace {
                assert_eq!(bits(name), 0o600);
            }
            f.run(FsCloseParams { commit: true, ..FsCloseParams::new("h") }).unwrap();
            // The second time the file exists and keeps its mode.
            assert_eq!(bits(name), 0o600, "{name}");
        }
    }
    let mut params = FsOpenParams::new("h", f.path("x"), FsOpenMode::Replace);
    params.permissions = Some(0o10000);
    assert_eq!(f.code(params), INVALID);
}
