//! The filesystem messages. Each golden text is what we write; [`reads_as`] adds spellings that are
//! only accepted.

use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{Method, Order, PathUri};

use crate::golden::{golden, reads_as, refuses};

fn path(text: &str) -> PathUri {
    text.parse().unwrap()
}

#[test]
fn whole_files() {
    let mut read = FsReadFileParams::new(path("/a b"));
    golden(&read, r#"{"path":"file:///a%20b"}"#);
    reads_as(r#"{"path":"/a b","followSymlinks":null,"sandbox":null,"new":{"x":1}}"#, &read);
    read.follow_symlinks = false;
    golden(&read, r#"{"path":"file:///a%20b","followSymlinks":false}"#);
    golden(&FsReadFileResponse { data: b"hi".to_vec().into() }, r#"{"dataBase64":"aGk="}"#);

    let mut write = FsWriteFileParams::new(path("/f"), b"hi".to_vec());
    golden(&write, r#"{"path":"file:///f","dataBase64":"aGk="}"#);
    reads_as(r#"{"path":"/f","dataBase64":"aGk=","atomic":null,"mode":null}"#, &write);
    (write.follow_symlinks, write.atomic, write.mode) = (false, true, Some(0o640));
    golden(
        &write,
        r#"{"path":"file:///f","dataBase64":"aGk=","followSymlinks":false,"atomic":true,"mode":416}"#,
    );
    golden(&FsWriteFileResponse {}, "{}");
    refuses::<FsWriteFileParams>(r#"{"path":"/f","dataBase64":"aGk"}"#);
    refuses::<FsWriteFileParams>(r#"{"path":"/f"}"#);
}

#[test]
fn blocks() {
    let open = FsOpenParams::new("h1", path("/f"), FsOpenMode::Read);
    golden(&open, r#"{"handleId":"h1","path":"file:///f"}"#);
    reads_as(r#"{"handleId":"h1","path":"file:///f","mode":"read"}"#, &open);
    reads_as(r#"{"handleId":"h1","path":"file:///f","mode":null}"#, &open);
    golden(
        &FsOpenParams::new("h1", path("/f"), FsOpenMode::Replace),
        r#"{"handleId":"h1","path":"file:///f","mode":"replace"}"#,
    );
    golden(
        &FsOpenParams::new("h1", path("/f"), FsOpenMode::ReplaceAtomic),
        r#"{"handleId":"h1","path":"file:///f","mode":"replaceAtomic"}"#,
    );
    golden(
        &FsOpenParams {
            permissions: Some(0o600),
            ..FsOpenParams::new("h1", path("/f"), FsOpenMode::Replace)
        },
        r#"{"handleId":"h1","path":"file:///f","mode":"replace","permissions":384}"#,
    );
    golden(
        &FsOpenParams {
            keep: true,
            ..FsOpenParams::new("h1", path("/f"), FsOpenMode::ReplaceAtomic)
        },
        r#"{"handleId":"h1","path":"file:///f","mode":"replaceAtomic","keep":true}"#,
    );
    refuses::<FsOpenParams>(r#"{"handleId":"h1","path":"file:///f","mode":"append"}"#);
    golden(&FsOpenResponse { handle_id: "h1".into() }, r#"{"handleId":"h1"}"#);
    golden(&FsReadBlockParams::new("h1", 7, 4096), r#"{"handleId":"h1","offset":7,"len":4096}"#);
    refuses::<FsReadBlockParams>(r#"{"handleId":"h1","offset":-1,"len":4096}"#);
    golden(
        &FsReadBlockResponse { chunk: b"hi".to_vec().into(), eof: true },
        r#"{"chunk":"aGk=","eof":true}"#,
    );
    golden(
        &FsWriteBlockParams::new("h1", 7, b"hi".to_vec()),
        r#"{"handleId":"h1","offset":7,"chunk":"aGk="}"#,
    );
    golden(&FsCloseParams::new("h1"), r#"{"handleId":"h1"}"#);
    golden(
        &FsCloseParams { commit: true, ..FsCloseParams::new("h1") },
        r#"{"handleId":"h1","commit":true}"#,
    );
}

#[test]
fn names() {
    let mut make = FsCreateDirectoryParams::new(path("/d"));
    golden(&make, r#"{"path":"file:///d","recursive":true}"#);
    reads_as(r#"{"path":"/d"}"#, &make);
    (make.recursive, make.follow_symlinks) = (false, false);
    golden(&make, r#"{"path":"file:///d","recursive":false,"followSymlinks":false}"#);

    golden(&FsGetMetadataParams::new(path("/d")), r#"{"path":"file:///d"}"#);
    let mut found = FsGetMetadataResponse {
        is_file: true,
        size: 3,
        created_at_ms: 1,
        modified_at_ms: 2,
        ..Default::default()
    };
    golden(
        &found,
        r#"{"isDirectory":false,"isFile":true,"isSymlink":false,"size":3,"createdAtMs":1,"modifiedAtMs":2}"#,
    );
    found.mode = Some(0o644);
    found.uid = Some(0);
    found.gid = Some(0);
    found.inode = Some(12);
    found.nlink = Some(1);
    found.device = Some(7);
    golden(
        &found,
        r#"{"isDirectory":false,"isFile":true,"isSymlink":false,"size":3,"createdAtMs":1,"modifiedAtMs":2,"mode":420,"uid":0,"gid":0,"inode":12,"nlink":1,"device":7}"#,
    );
    golden(&FsCanonicalizeParams::new(path("/d")), r#"{"path":"file:///d"}"#);
    golden(&FsCanonicalizeResponse { path: path("/e") }, r#"{"path":"file:///e"}"#);
    golden(&FsReadDirectoryParams::new(path("/d")), r#"{"path":"file:///d"}"#);
    let plain = FsReadDirectoryEntry {
        file_name: "a".into(),
        is_directory: true,
        is_file: false,
        file_name_uri: None,
    };
    golden(
        &FsReadDirectoryResponse { entries: vec![plain], ..Default::default() },
        r#"{"entries":[{"fileName":"a","isDirectory":true,"isFile":false}]}"#,
    );
    let odd = FsReadDirectoryEntry {
        file_name: "\u{fffd}".into(),
        is_directory: false,
        is_file: true,
        file_name_uri: Some(path("file:///d/%FF")),
    };
    golden(
        &FsReadDirectoryResponse {
            entries: vec![odd],
            truncated: true,
            dead_links: vec!["l".into()],
        },
        "{\"entries\":[{\"fileName\":\"\u{fffd}\",\"isDirectory\":false,\"isFile\":true,\"fileNameUri\":\"file:///d/%FF\"}],\"truncated\":true,\"deadLinks\":[\"l\"]}",
    );

    let remove = FsRemoveParams::new(path("/d"));
    golden(&remove, r#"{"path":"file:///d","recursive":true,"force":true}"#);
    reads_as(r#"{"path":"file:///d"}"#, &remove);
    reads_as(r#"{"path":"file:///d","recursive":null,"force":null}"#, &remove);
    golden(
        &FsCopyParams::new(path("/a"), path("/b"), false),
        r#"{"sourcePath":"file:///a","destinationPath":"file:///b","recursive":false}"#,
    );
    refuses::<FsCopyParams>(r#"{"sourcePath":"file:///a","destinationPath":"file:///b"}"#);
    let mut atomic = FsCopyParams::new(path("/a"), path("/b"), false);
    atomic.atomic = true;
    golden(
        &atomic,
        r#"{"sourcePath":"file:///a","destinationPath":"file:///b","recursive":false,"atomic":true}"#,
    );
    golden(
        &FsRenameParams::new(path("/a"), path("/b")),
        r#"{"sourcePath":"file:///a","destinationPath":"file:///b"}"#,
    );
    golden(&FsSymlinkParams::new(path("/a"), "../b"), r#"{"path":"file:///a","target":"../b"}"#);
    golden(&FsSetModeParams::new(path("/a"), 0o755), r#"{"path":"file:///a","mode":493}"#);
}

#[test]
fn walks() {
    golden(
        &FsWalkParams::new(path("/"), FsWalkOptions::default()),
        r#"{"path":"file:///","options":{"maxDepth":64,"maxDirectories":10000,"maxEntries":50000,"followDirectorySymlinks":false}}"#,
    );
    let pruned = FsWalkOptions { prune_hidden_directories: true, ..Default::default() };
    golden(
        &pruned,
        r#"{"maxDepth":64,"maxDirectories":10000,"maxEntries":50000,"followDirectorySymlinks":false,"pruneHiddenDirectories":true}"#,
    );
    golden(
        &FsWalkResponse {
            entries: vec![
                FsWalkEntry { path: path("/d"), kind: FsEntryKind::Directory },
                FsWalkEntry { path: path("/f"), kind: FsEntryKind::File },
            ],
            errors: vec![FsPathError { path: path("/x"), message: "no".into() }],
            truncated: false,
        },
        r#"{"entries":[{"path":"file:///d","kind":"directory"},{"path":"file:///f","kind":"file"}],"errors":[{"path":"file:///x","message":"no"}],"truncated":false}"#,
    );
    refuses::<FsWalkParams>(r#"{"path":"file:///"}"#);
}

#[test]
fn searches() {
    let mut search = FsSearchParams::new(path("/s"), "a.c");
    golden(&search, r#"{"path":"file:///s","pattern":"a.c"}"#);
    search.search_id = Some("s1".into());
    search.literal = true;
    search.include = vec!["*.rs".into()];
    search.respect_gitignore = false;
    search.before_context = 2;
    search.max_matches = Some(5);
    golden(
        &search,
        r#"{"searchId":"s1","path":"file:///s","pattern":"a.c","literal":true,"include":["*.rs"],"respectGitignore":false,"beforeContext":2,"maxMatches":5}"#,
    );
    let line = FsSearchLine {
        line_number: 3,
        kind: FsSearchLineKind::Match,
        text: "xabc".into(),
        ranges: vec![FsSearchRange { start: 1, end: 4 }],
        text_truncated: false,
    };
    golden(
        &FsSearchMatchesNotification {
            search_id: "s1".into(),
            seq: 1,
            files: vec![FsSearchFile { path: path("/s/f"), lines: vec![line] }],
        },
        r#"{"searchId":"s1","seq":1,"files":[{"path":"file:///s/f","lines":[{"lineNumber":3,"kind":"match","text":"xabc","ranges":[{"start":1,"end":4}]}]}]}"#,
    );
    golden(
        &FsSearchResponse { matches: 1, files_matched: 1, files_searched: 9, ..Default::default() },
        r#"{"files":[],"matches":1,"filesMatched":1,"filesSearched":9,"truncated":false,"errors":[]}"#,
    );
    golden(&FsCancelSearchParams::new("s1"), r#"{"searchId":"s1"}"#);
    golden(
        &FsGlobParams::new(path("/s"), ["**/*.rs"]),
        r#"{"path":"file:///s","patterns":["**/*.rs"]}"#,
    );
    golden(&FsGlobResponse::default(), r#"{"entries":[],"truncated":false,"errors":[]}"#);
}

#[test]
fn watches() {
    golden(
        &FsWatchMissingParams::new(4, vec![path("/m")], None),
        r#"{"watchId":4,"missing":["file:///m"],"present":null}"#,
    );
    golden(&FsWatchMissingResponse { watching: true }, r#"{"watching":true}"#);
    golden(&FsMissingChangedNotification { watch_id: 4 }, r#"{"watchId":4}"#);
    golden(&FsWatchParams::new(5, path("/w")), r#"{"watchId":5,"path":"file:///w"}"#);
    golden(&FsUnwatchParams::new(5), r#"{"watchId":5}"#);
    golden(
        &FsChangedNotification {
            watch_id: 5,
            changes: vec![FsChange { path: path("/w/f"), kind: FsChangeKind::Removed }],
            overflow: true,
            ended: None,
        },
        r#"{"watchId":5,"changes":[{"path":"file:///w/f","kind":"removed"}],"overflow":true}"#,
    );
}

#[test]
fn invalid_paths_are_rejected() {
    for bad in ["", "a", "./a", "file://host/x", "file:///a%00b", "http://x/y", "file:a"] {
        refuses::<FsReadFileParams>(&format!(r#"{{"path":"{bad}"}}"#));
        refuses::<FsCopyParams>(&format!(
            r#"{{"sourcePath":"/a","destinationPath":"{bad}","recursive":true}}"#
        ));
    }
}

#[test]
fn every_request_takes_a_sandbox() {
    let text = r#"{"path":"file:///a","sandbox":{"type":"read-only"}}"#;
    let read: FsReadFileParams = serde_json::from_str(text).unwrap();
    let sandbox = read.sandbox.clone().unwrap();
    let again = serde_json::to_string(&read).unwrap();
    let again: FsReadFileParams = serde_json::from_str(&again).unwrap();
    assert_eq!(again.sandbox.unwrap().permissions, sandbox.permissions);
    let params = r#""path":"/a","sourcePath":"/a","destinationPath":"/b","recursive":true,"handleId":"h","offset":0,"len":1,"chunk":"","dataBase64":"","watchId":1,"missing":[],"pattern":"x","patterns":[],"searchId":"s","target":"t","mode":"read","options":{"maxDepth":1,"maxDirectories":1,"maxEntries":1,"followDirectorySymlinks":false}"#;
    macro_rules! all {
        ($($ty:ty),*) => {$(
            let params = if stringify!($ty).contains("Mode") || stringify!($ty).contains("WriteFile") {
                params.replace("\"mode\":\"read\"", "\"mode\":1")
            } else {
                params.to_owned()
            };
            let with: $ty = serde_json::from_str(&format!(r#"{{{params},"sandbox":{{"type":"read-only"}}}}"#)).unwrap();
            assert!(with.sandbox.is_some(), stringify!($ty));
            let null: $ty = serde_json::from_str(&format!(r#"{{{params},"sandbox":null}}"#)).unwrap();
            assert!(null.sandbox.is_none(), stringify!($ty));
        )*};
    }
    all!(
        FsReadFileParams,
        FsOpenParams,
        FsReadBlockParams,
        FsWriteBlockParams,
        FsCloseParams,
        FsWriteFileParams,
        FsCreateDirectoryParams,
        FsGetMetadataParams,
        FsCanonicalizeParams,
        FsReadDirectoryParams,
        FsWalkParams,
        FsRemoveParams,
        FsCopyParams,
        FsWatchMissingParams,
        FsRenameParams,
        FsSymlinkParams,
        FsSetModeParams,
        FsSearchParams,
        FsCancelSearchParams,
        FsGlobParams,
        FsWatchParams,
        FsUnwatchParams
    );
}

#[test]
fn scans_block_no_other_request() {
    for name in ["fs/walk", "fs/search", "fs/glob"] {
        let Some(Method::File(method)) = Method::from_name(name) else { panic!("{name}") };
        assert_eq!(method.order(), Order::Scan, "{name}");
    }
}
