//! Uploads and downloads where the source, the server or the connection is not what one hopes for.

use std::io::{PipeReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use codex_exec_client::{ExecServerClient, PathUri, TransferOptions};
use codex_exec_server::ServerConfig;
use serde_json::json;

use crate::ours::{embedded, listening};
use crate::support::{connect, go, soon};

fn uri(path: &Path) -> PathUri {
    PathUri::try_from(path).unwrap()
}

/// A pipe with something to read, by a name as shells give it to `<(…)`.
fn pipe(content: Vec<u8>) -> (PipeReader, PathBuf) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    std::thread::spawn(move || {
        // Whoever reads may leave early.
        let _ = writer.write_all(&content);
    });
    let name = format!("/proc/self/fd/{}", reader.as_raw_fd());
    (reader, name.into())
}

#[tokio::test]
async fn a_pipe_is_uploaded_to_its_end_however_much_that_is() {
    let listening = listening(ServerConfig::default()).await;
    let args = codex_exec_client::RemoteExecServerConnectArgs::new(listening.url(), "test");
    let remote = soon(ExecServerClient::connect_websocket(args)).await.unwrap();
    let (_server, local) = embedded().await;
    for client in [remote, local] {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("there");
        // The last is more than one message takes.
        for len in [0, 7, 262_144, 262_145, 52_000_000] {
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
async fn a_pipe_is_not_started_over_when_the_connection_drops() {
    for atomic in [true, false] {
        let capabilities = json!({"fileWriteStreaming": true, "fsAtomicWrite": atomic});
        let (client, mut server, mut dialled) = connect(capabilities.clone()).await;
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
        let mut server = soon(dialled.recv()).await.unwrap();
        server.welcome(capabilities).await;
        let error = soon(upload).await.unwrap().unwrap_err().to_string();
        assert!(error.contains("cannot be read again"), "{error}");
        let left = if atomic { "nothing was kept" } else { "/srv/x may hold a part of it" };
        assert!(error.contains(left), "{error}");
    }
}

#[tokio::test]
async fn a_stream_that_arrives_short_is_told() {
    let capabilities = json!({"fileWriteStreaming": true, "fsAtomicWrite": true});
    let (client, mut server, _dialled) = connect(capabilities).await;
    let (_open, name) = pipe(vec![7; 300_000]);
    let upload = go(async move {
        let options = TransferOptions::default();
        client.files().upload(&name, &"/srv/x".parse().unwrap(), &options).await
    });
    loop {
        let asked = soon(server.asked()).await;
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
