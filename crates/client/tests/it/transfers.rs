//! Uploads and downloads with unusual sources, servers and connections.

use std::fs::Permissions;
use std::io::{PipeReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use codex_exec_client::{ExecServerClient, PathUri, TransferOptions};
use codex_exec_serving::ServerConfig;
use serde_json::json;

use crate::embedded::{embedded, listening};
use crate::support::{connect, go, soon};

fn uri(path: &Path) -> PathUri {
    PathUri::try_from(path).unwrap()
}

/// A pipe with content, and its path as in `<(…)`.
pub(crate) fn pipe(content: Vec<u8>) -> (PipeReader, PathBuf) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    std::thread::spawn(move || {
        // The reader may close early.
        let _ = writer.write_all(&content);
    });
    let name = format!("/proc/self/fd/{}", reader.as_raw_fd());
    (reader, name.into())
}

#[tokio::test]
async fn a_pipe_of_any_length_is_uploaded_to_its_end() {
    let listening = listening(ServerConfig::default()).await;
    let args = codex_exec_client::RemoteExecServerConnectArgs::new(listening.url(), "test");
    let remote = soon(ExecServerClient::connect_websocket(args)).await.unwrap();
    let (_server, local) = embedded().await;
    for client in [remote, local] {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("there");
        // Sizes around one block, and of many blocks.
        for len in [0, 7, 262_144, 262_145, 5_000_000] {
            let mut content = b"one after another, ".repeat(len / 19 + 1);
            content.truncate(len);
            let (_open, name) = pipe(content.clone());
            let options = TransferOptions::default();
            let report = soon(client.files().upload(&name, &uri(&there), &options)).await.unwrap();
            assert_eq!((report.files, report.bytes), (1, len as u64));
            assert!(std::fs::read(&there).unwrap() == content, "{len}");
        }
    }
    listening.server.shut_down().await;
}

#[tokio::test]
async fn an_upload_of_a_pipe_does_not_start_over() {
    for atomic in [true, false] {
        let capabilities = json!({"fileWriteStreaming": true, "fsAtomicWrite": atomic});
        let (client, mut server, _dialled) = connect(capabilities).await;
        let (_open, name) = pipe(vec![7; 3_000_000]);
        let upload = go(async move {
            let options = TransferOptions::default();
            client.files().upload(&name, &"/srv/x".parse().unwrap(), &options).await
        });
        let opened = server.expect("fs/open").await;
        assert_eq!(opened.params["mode"], if atomic { "replaceAtomic" } else { "replace" });
        server.reply(&opened, json!({"handleId": opened.params["handleId"]})).await;
        server.expect("fs/writeBlock").await;
        drop(server);
        let error = soon(upload).await.unwrap().unwrap_err().to_string();
        assert!(error.contains("can be read only once"), "{error}");
        let left =
            if atomic { "the copy was discarded" } else { "/srv/x may contain a part of it" };
        assert!(error.contains(left), "{error}");
    }
}

#[tokio::test]
async fn an_upload_that_arrives_short_is_an_error() {
    let capabilities = json!({"fileWriteStreaming": true, "fsAtomicWrite": true});
    let (client, mut server, _dialled) = connect(capabilities).await;
    let (_open, name) = pipe(vec![7; 300_000]);
    let upload = go(async move {
        let options = TransferOptions::default();
        client.files().upload(&name, &"/srv/x".parse().unwrap(), &options).await
    });
    loop {
        let asked = soon(server.next_request()).await;
        if asked.method == "fs/getMetadata" {
            let answer = json!({"isDirectory": false, "isFile": true, "size": 262_144});
            server.reply(&asked, answer).await;
            break;
        }
        server.reply(&asked, json!({"handleId": asked.params["handleId"]})).await;
    }
    let error = soon(upload).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("has 262144 bytes, but 300000 were sent"), "{error}");
}

fn mode(path: impl AsRef<Path>) -> u32 {
    path.as_ref().metadata().unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: impl AsRef<Path>, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn unreadable_parts_of_a_tree_are_reported_and_the_rest_is_copied() {
    let (_server, client) = embedded().await;
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::create_dir_all(source.join("sub")).unwrap();
    std::fs::write(source.join("sub/file"), "x").unwrap();
    symlink("sub/file", source.join("followed")).unwrap();
    symlink("sub", source.join("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(source.join("sub/socket")).unwrap();
    // A regular file that cannot be read.
    symlink("/proc/self/mem", source.join("unreadable")).unwrap();

    let [up, down, within] = ["up", "down", "within"].map(|name| directory.path().join(name));
    let options = TransferOptions::default();
    let files = client.files();
    let uploaded = files.upload(&source, &uri(&up), &options).await.unwrap();
    let downloaded = files.download(&uri(&source), &down, &options).await.unwrap();
    let copied = files.copy_within(&uri(&source), &uri(&within), &options).await.unwrap();
    for (report, copy) in [(uploaded, up), (downloaded, down), (copied, within)] {
        assert_eq!((report.files, report.directories), (2, 2), "{report:?}");
        let mut skipped = report.skipped;
        skipped.sort();
        let shown = source.display();
        let told = [
            format!("{shown}/link: a link to a directory"),
            format!("{shown}/sub/socket: not a regular file"),
        ];
        assert_eq!(skipped, told);
        assert_eq!(report.failed.len(), 1, "{:?}", report.failed);
        assert!(report.failed[0].contains("unreadable"), "{:?}", report.failed);
        let mut names: Vec<_> =
            std::fs::read_dir(&copy).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["followed", "sub"]);
        assert_eq!(std::fs::read(copy.join("sub/file")).unwrap(), b"x");
    }

    // A broken link, and a directory that only root may read.
    std::fs::remove_file(source.join("unreadable")).unwrap();
    symlink("nowhere", source.join("dangling")).unwrap();
    std::fs::create_dir(source.join("barred")).unwrap();
    set_mode(source.join("barred"), 0);
    let barred = std::fs::read_dir(source.join("barred")).is_err();
    let again = uri(&directory.path().join("again"));
    let report = client.files().upload(&source, &again, &options).await.unwrap();
    assert!(report.skipped.iter().any(|told| told.contains("a broken link")), "{report:?}");
    assert_eq!((report.files, report.failed.len()), (2, usize::from(barred)), "{report:?}");
    let [back, beside] = ["back", "beside"].map(|name| directory.path().join(name));
    let downloaded = files.download(&uri(&source), &back, &options).await.unwrap();
    let copied = files.copy_within(&uri(&source), &uri(&beside), &options).await.unwrap();
    for report in [downloaded, copied] {
        assert!(report.skipped.iter().any(|told| told.contains("a broken link")), "{report:?}");
        assert_eq!((report.files, report.failed.len()), (2, usize::from(barred)), "{report:?}");
    }
}

#[tokio::test]
async fn new_files_get_the_permissions_of_their_source() {
    let (_server, client) = embedded().await;
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::create_dir_all(source.join("closed")).unwrap();
    // The second takes several blocks.
    for (name, len, bits) in [("secret", 1, 0o600), ("large", 300_000, 0o640), ("run", 1, 0o751)] {
        std::fs::write(source.join(name), vec![7; len]).unwrap();
        set_mode(source.join(name), bits);
    }
    std::fs::write(source.join("closed/file"), "x").unwrap();
    set_mode(source.join("closed"), 0o555);
    set_mode(&source, 0o700);
    let [up, down, within] = ["up", "down", "within"].map(|name| directory.path().join(name));
    let copy_all = async || {
        let (files, options) = (client.files(), TransferOptions::default());
        files.upload(&source, &uri(&up), &options).await.unwrap();
        files.download(&uri(&source), &down, &options).await.unwrap();
        files.copy_within(&uri(&source), &uri(&within), &options).await.unwrap();
    };
    copy_all().await;
    for copy in [&up, &down, &within] {
        for name in ["secret", "large", "run", "closed", "closed/file", ""] {
            assert_eq!(mode(copy.join(name)), mode(source.join(name)), "{name}");
        }
    }
    // An existing file keeps its own permissions.
    for name in ["secret", "run"] {
        set_mode(source.join(name), 0o644);
    }
    for copy in [&up, &down, &within] {
        set_mode(copy, 0o750);
    }
    copy_all().await;
    for copy in [&up, &down, &within] {
        let modes = ["secret", "large", "run", ""].map(|name| mode(copy.join(name)));
        assert_eq!(modes, [0o600, 0o640, 0o751, 0o750]);
    }
    for tree in [&source, &up, &down, &within] {
        set_mode(tree.join("closed"), 0o755);
    }
}

#[tokio::test]
async fn a_private_file_is_private_from_its_first_byte() {
    let capabilities =
        json!({"fileWriteStreaming": true, "fsAtomicWrite": true, "fsRenameLinkMode": true});
    let (client, mut server, _dialled) = connect(capabilities).await;
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    for len in [1, 300_000] {
        std::fs::write(&secret, vec![7; len]).unwrap();
        set_mode(&secret, 0o600);
        let (client, secret) = (client.clone(), secret.clone());
        let upload = go(async move {
            let options = TransferOptions::default();
            client.files().upload(&secret, &"/srv/x".parse().unwrap(), &options).await
        });
        let first = soon(server.next_request()).await;
        let bits = match first.method.as_str() {
            "fs/open" => &first.params["permissions"],
            _ => &first.params["mode"],
        };
        assert_eq!(*bits, 0o600, "{}", first.method);
        server.reply(&first, json!({"handleId": first.params["handleId"]})).await;
        // Blocks, the close, and the check of the size.
        let mut more = len > 1;
        while more {
            let asked = soon(server.next_request()).await;
            let answer = json!({"isDirectory": false, "isFile": true, "size": len});
            server.reply(&asked, answer).await;
            more = asked.method != "fs/getMetadata";
        }
        soon(upload).await.unwrap().unwrap();
    }
}
