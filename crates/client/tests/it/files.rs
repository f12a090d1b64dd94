//! Files and patches on the server from [`server`]: this project's here, another one in `interop/`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use codex_exec_client::protocol::files::{FsEntryKind, FsRemoveParams, FsWalkOptions};
use codex_exec_client::{
    ExecServerClient, ExecServerError, Patch, PatchError, PathUri, TransferOptions, WalkItem,
};
use futures_util::TryStreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{server, soon};

/// Runs a test with a server, if there is one, and a directory.
async fn each(test: impl AsyncFn(ExecServerClient, PathUri, &Path)) {
    let Some((server, client)) = server().await else { return };
    let directory = tempfile::tempdir().unwrap();
    soon(test(client, uri(directory.path()), directory.path())).await;
    drop(server);
}

fn uri(path: &Path) -> PathUri {
    PathUri::try_from(path).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

#[tokio::test]
async fn small_and_large_files_are_read_and_written() {
    each(async |client, root, _| {
        let files = client.files();
        let path = root.join("a b").unwrap();
        for content in [Vec::new(), b"hello".to_vec(), pattern(20_000_000)] {
            files.write_file(&path, content.clone()).await.unwrap();
            assert!(files.read_file(&path).await.unwrap() == content);
            assert_eq!(files.metadata(&path).await.unwrap().size, content.len() as u64);
        }
        assert_eq!(files.canonicalize(&path).await.unwrap().file_name(), b"a b");
        let listed = files.read_directory(&root).await.unwrap();
        assert_eq!(listed.entries[0].file_name, "a b");
        assert!(files.exists(&path).await.unwrap());
        files.remove(FsRemoveParams::new(path.clone())).await.unwrap();
        assert!(!files.exists(&path).await.unwrap());
        let error = files.read_file(&path).await.unwrap_err();
        assert!(error.is_not_found(), "{error}");
    })
    .await;
}

#[tokio::test]
async fn files_are_streamed_both_ways() {
    each(async |client, root, _| {
        let path = root.join("stream").unwrap();
        // Sizes around one block, and of several blocks.
        for len in [0, 1, 262_143, 262_144, 262_145, 3_000_000] {
            let content = pattern(len);
            let mut writer = client.files().create(&path).await.unwrap();
            for piece in content.chunks(70_001) {
                writer.write_all(piece).await.unwrap();
            }
            writer.shutdown().await.unwrap();
            let mut reader = client.files().open(&path).await.unwrap();
            assert_eq!(reader.metadata().size, len as u64);
            let mut back = Vec::new();
            reader.read_to_end(&mut back).await.unwrap();
            assert!(back == content, "{len}");
        }
        let error = client.files().create(&root.join("no/such").unwrap()).await;
        if let Ok(mut writer) = error {
            // A server without block writes reports this at the end.
            writer.shutdown().await.unwrap_err();
        }
    })
    .await;
}

#[tokio::test]
async fn a_walk_finds_every_entry() {
    each(async |client, root, local| {
        std::fs::create_dir_all(local.join("a/b/.hidden")).unwrap();
        for name in ["1", "a/2", "a/b/3", "a/b/.hidden/4"] {
            std::fs::write(local.join(name), name).unwrap();
        }
        let walk = |options| client.files().walk(&root, options);
        let items: Vec<WalkItem> = walk(FsWalkOptions::default()).try_collect().await.unwrap();
        let count = |kind| {
            items.iter().filter(|i| matches!(i, WalkItem::Entry(e) if e.kind == kind)).count()
        };
        assert_eq!((count(FsEntryKind::File), count(FsEntryKind::Directory)), (4, 3), "{items:?}");
        let few = FsWalkOptions { max_entries: 2, ..FsWalkOptions::default() };
        assert_eq!(walk(few).try_collect::<Vec<_>>().await.unwrap().len(), 2);
        let missing = client.files().walk(&root.join("no").unwrap(), FsWalkOptions::default());
        assert!(missing.try_collect::<Vec<_>>().await.is_err());
    })
    .await;
}

#[tokio::test]
async fn a_tree_larger_than_one_response_is_walked_in_parts() {
    each(async |client, root, local| {
        for directory in 0..20 {
            let directory = local.join(format!("d{directory}"));
            std::fs::create_dir(&directory).unwrap();
            for file in 0..50 {
                std::fs::write(directory.join(format!("f{file}")), "").unwrap();
            }
        }
        // A response that would read more than five directories is truncated.
        let options = FsWalkOptions { max_directories: 5, ..FsWalkOptions::default() };
        let items: Vec<WalkItem> = client.files().walk(&root, options).try_collect().await.unwrap();
        let mut paths: Vec<_> = items.iter().map(|item| format!("{item:?}")).collect();
        paths.sort();
        paths.dedup();
        assert_eq!((items.len(), paths.len()), (20 + 20 * 50, 20 + 20 * 50));
    })
    .await;
}

#[tokio::test]
async fn trees_are_uploaded_and_downloaded() {
    each(async |client, root, _| {
        let here = tempfile::tempdir().unwrap();
        let source = here.path().join("source");
        std::fs::create_dir_all(source.join("deep/er")).unwrap();
        std::fs::create_dir(source.join("empty")).unwrap();
        std::fs::write(source.join("small"), "small").unwrap();
        std::fs::write(source.join("deep/er/large"), pattern(2_000_000)).unwrap();
        std::os::unix::fs::symlink("/nowhere", source.join("broken")).unwrap();

        let (seen, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let options = TransferOptions::default().on_progress({
            let (seen, most) = (seen.clone(), most.clone());
            move |at| {
                seen.fetch_add(1, Ordering::Relaxed);
                most.fetch_max(at.bytes, Ordering::Relaxed);
                assert!(at.files <= at.total_files && at.total_files == 2);
            }
        });
        let there = root.join("there").unwrap();
        let report = client.files().upload(&source, &there, &options).await.unwrap();
        assert_eq!((report.files, report.directories, report.bytes), (2, 4, 2_000_005));
        assert_eq!(report.skipped.len(), 1, "{report:?}");
        assert!(seen.load(Ordering::Relaxed) > 3);
        assert_eq!(most.load(Ordering::Relaxed), 2_000_005);

        let back = here.path().join("back");
        let report = client.files().download(&there, &back, &options).await.unwrap();
        assert_eq!((report.files, report.directories, report.bytes), (2, 4, 2_000_005));
        assert!(std::fs::read(back.join("deep/er/large")).unwrap() == pattern(2_000_000));
        assert!(back.join("empty").is_dir());

        let one = here.path().join("one");
        let small = there.join("small").unwrap();
        let alone = TransferOptions::default();
        client.files().download(&small, &one, &alone).await.unwrap();
        assert_eq!(std::fs::read(&one).unwrap(), b"small");
        let error = client.files().download(&small, "/no/such/place", &alone).await.unwrap_err();
        assert!(matches!(error, ExecServerError::Local { .. }), "{error}");
        let error = client.files().upload("/no/such/file", &there, &alone).await.unwrap_err();
        assert!(error.to_string().contains("cannot read /no/such/file"), "{error}");
        let left: Vec<_> = std::fs::read_dir(here.path()).unwrap().collect();
        assert_eq!(left.len(), 3, "no half download stays: {left:?}");
    })
    .await;
}

#[tokio::test]
async fn a_file_that_changes_while_it_is_copied_is_reported() {
    each(async |client, root, local| {
        let here = tempfile::tempdir().unwrap();
        let source = here.path().join("source");
        std::fs::write(&source, pattern(20_000_000)).unwrap();
        // The source grows once some of it has been copied.
        let growing = |source: std::path::PathBuf| {
            let once = std::sync::Once::new();
            TransferOptions::default().on_progress(move |at| {
                if at.bytes > 0 && at.bytes < at.total_bytes {
                    once.call_once(|| {
                        let file = std::fs::OpenOptions::new().append(true).open(&source);
                        file.and_then(|mut file| file.write_all(b"more")).unwrap();
                    });
                }
            })
        };
        let there = root.join("there").unwrap();
        std::fs::write(local.join("there"), "old").unwrap();
        let options = growing(source.clone());
        let error = client.files().upload(&source, &there, &options).await.unwrap_err();
        // A server that writes in place, like another implementation, can only report it.
        if client.capabilities().fs_atomic_write {
            assert!(error.to_string().contains("so the copy was discarded"), "{error}");
            assert_eq!(std::fs::read(local.join("there")).unwrap(), b"old");
        } else {
            assert!(error.to_string().contains("may mix both versions"), "{error}");
        }

        std::fs::write(local.join("remote"), pattern(20_000_000)).unwrap();
        let (remote, back) = (root.join("remote").unwrap(), here.path().join("back"));
        let options = growing(local.join("remote"));
        let error = client.files().download(&remote, &back, &options).await.unwrap_err();
        assert!(error.to_string().contains("so the copy was discarded"), "{error}");
        assert!(!back.exists());
        let left: Vec<_> = std::fs::read_dir(here.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing half-written is left: {left:?}");
    })
    .await;
}

#[tokio::test]
async fn a_patch_changes_files_and_reports_them() {
    each(async |client, root, local| {
        std::fs::create_dir(local.join("src")).unwrap();
        std::fs::write(local.join("src/app.py"), "def greet():\n    print(\"Hi\")\n").unwrap();
        std::fs::write(local.join("old.txt"), "x").unwrap();
        std::fs::write(local.join("twice"), "a\nb\n").unwrap();
        let patch = Patch::parse(
            "*** Begin Patch
*** Add File: notes/new.txt
+first line
+second line
*** Delete File: old.txt
*** Update File: src/app.py
*** Move to: src/main.py
@@ def greet():
-print(\"Hi\")
+    print(\"Hello\")
*** End of File
*** Update File: twice
@@
-a
+A
*** Update File: twice
@@
 A
-b
+B
*** End Patch",
        )
        .unwrap();
        let report = client.files().apply_patch(&patch, &root).await.unwrap();
        assert_eq!(
            report.to_string(),
            "A notes/new.txt\nD old.txt\nA src/main.py\nD src/app.py\nM twice\nM twice\n"
        );
        let read = |name: &str| std::fs::read_to_string(local.join(name)).unwrap();
        assert_eq!(read("notes/new.txt"), "first line\nsecond line\n");
        assert_eq!(read("src/main.py"), "def greet():\n    print(\"Hello\")\n");
        assert_eq!(read("twice"), "A\nB\n");
        assert!(!local.join("old.txt").exists() && !local.join("src/app.py").exists());
    })
    .await;
}

#[tokio::test]
async fn a_patch_that_does_not_fit_changes_nothing() {
    each(async |client, root, local| {
        std::fs::write(local.join("good"), "a\n").unwrap();
        std::fs::write(local.join("bad"), "b\n").unwrap();
        std::fs::create_dir(local.join("dir")).unwrap();
        let apply = async |body: &str| {
            let text = format!(
                "*** Begin Patch\n*** Update File: good\n@@\n-a\n+A\n{body}\n*** End Patch"
            );
            let patch = Patch::parse(&text).unwrap();
            client.files().apply_patch(&patch, &root).await.unwrap_err()
        };
        let error = apply("*** Update File: bad\n@@\n-nope\n+c").await;
        assert!(matches!(&error, PatchError::Mismatch { hunk: 1, .. }), "{error}");
        for body in
            ["*** Delete File: missing", "*** Update File: dir\n@@\n-x", "*** Delete File: dir"]
        {
            let error = apply(body).await;
            assert!(matches!(&error, PatchError::Target { .. }), "{error}");
        }
        assert_eq!(std::fs::read_to_string(local.join("good")).unwrap(), "a\n");
    })
    .await;
}

#[tokio::test]
async fn a_partly_applied_patch_reports_what_was_done() {
    each(async |client, root, local| {
        std::fs::write(local.join("file"), "a\n").unwrap();
        // A file in place of a directory is found only when the directory is created.
        let text =
            "*** Begin Patch\n*** Add File: one\n+1\n*** Add File: file/two\n+2\n*** End Patch";
        let patch = Patch::parse(text).unwrap();
        match client.files().apply_patch(&patch, &root).await.unwrap_err() {
            PatchError::Partial { done, undone, .. } => {
                assert_eq!((done.len(), undone.len()), (1, 1));
                assert!(local.join("one").exists());
            }
            // Some servers report it at the first request.
            PatchError::Target { .. } => assert!(!local.join("one").exists()),
            other => panic!("{other}"),
        }
    })
    .await;
}

#[tokio::test]
async fn patches_write_through_hard_links_and_keep_modes() {
    use std::os::unix::fs::PermissionsExt;
    each(async |client, root, local| {
        let (one, two) = (local.join("one"), local.join("two"));
        std::fs::write(&one, "a\n").unwrap();
        std::fs::set_permissions(&one, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::hard_link(&one, &two).unwrap();
        let patch = "*** Begin Patch\n*** Update File: one\n@@\n-a\n+b\n*** End Patch";
        client.files().apply_patch(&Patch::parse(patch).unwrap(), &root).await.unwrap();
        assert_eq!(std::fs::read(&two).unwrap(), b"b\n");
        let moved = "*** Begin Patch\n*** Update File: one\n*** Move to: three\n*** End Patch";
        client.files().apply_patch(&Patch::parse(moved).unwrap(), &root).await.unwrap();
        let mode = std::fs::metadata(local.join("three")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    })
    .await;
}
