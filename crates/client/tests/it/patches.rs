//! Patches whose writes fail: what is rolled back, and what the error says.

use codex_exec_client::{ExecServerClient, Patch, PatchError, PatchReport};
use serde_json::{Value, json};

use crate::support::{Fake, base64, connect, go, soon, unbase64};

const UPDATE: &str = "*** Begin Patch\n*** Update File: a\n@@\n-old\n+new\n*** End Patch";
const ADD: &str = "*** Begin Patch\n*** Add File: d/a\n+new\n*** End Patch";

type Applying = tokio::task::JoinHandle<Result<PatchReport, PatchError>>;

fn apply(client: ExecServerClient, patch: &'static str) -> Applying {
    go(async move {
        let patch = Patch::parse(patch).unwrap();
        client.files().apply_patch(&patch, &"/srv".parse().unwrap()).await
    })
}

fn file(content: &str, links: u64) -> Value {
    json!({"isDirectory": false, "isFile": true, "size": content.len(), "nlink": links})
}

/// Responds to a metadata request and a read.
async fn read(server: &mut Fake, content: &str, links: u64) {
    loop {
        let asked = server.next_request().await;
        if asked.method == "fs/readFile" {
            let answer = json!({"dataBase64": base64(content.as_bytes())});
            return server.reply(&asked, answer).await;
        }
        if asked.method == "fs/canonicalize" {
            server.reply(&asked, json!({"path": asked.params["path"]})).await;
            continue;
        }
        assert_eq!(asked.method, "fs/getMetadata");
        server.reply(&asked, file(content, links)).await;
    }
}

/// Refuses a write with a full disk; returns the refused content.
async fn full(server: &mut Fake, atomic: bool) -> Vec<u8> {
    let asked = server.expect("fs/writeFile").await;
    assert_eq!(asked.params["atomic"] == true, atomic, "{asked:?}");
    server.refuse(&asked, -32603, "write /srv/a: No space left on device").await;
    unbase64(&asked.params["dataBase64"])
}

#[tokio::test]
async fn a_file_is_replaced_atomically_if_the_server_can() {
    let (client, mut server, _dialled) = connect(json!({"fsAtomicWrite": true})).await;
    let applying = apply(client, UPDATE);
    read(&mut server, "old\n", 1).await;
    assert_eq!(full(&mut server, true).await, b"new\n");
    let error = soon(applying).await.unwrap().unwrap_err();
    assert!(matches!(error, PatchError::Unchanged(_)), "{error}");
    assert!(error.to_string().ends_with("nothing was changed"), "{error}");
}

#[tokio::test]
async fn a_file_that_cannot_be_replaced_is_written_in_place() {
    let (client, mut server, _dialled) = connect(json!({"fsAtomicWrite": true})).await;
    let applying = apply(client, UPDATE);
    read(&mut server, "old\n", 1).await;
    let asked = server.expect("fs/writeFile").await;
    server.refuse(&asked, -32600, "keep the owner of (write it without atomic) /srv/a").await;
    let asked = server.expect("fs/writeFile").await;
    assert_eq!(asked.params["atomic"], Value::Null);
    server.reply(&asked, json!({})).await;
    assert_eq!(soon(applying).await.unwrap().unwrap().to_string(), "M a\n");
}

#[tokio::test]
async fn a_partly_written_file_is_restored() {
    // A server without atomic writes, and a file with another name.
    for (capabilities, links) in [(json!({}), 1), (json!({"fsAtomicWrite": true}), 2)] {
        let (client, mut server, _dialled) = connect(capabilities).await;
        let applying = apply(client, UPDATE);
        read(&mut server, "old\n", links).await;
        full(&mut server, false).await;
        read(&mut server, "ne", links).await;
        let asked = server.expect("fs/writeFile").await;
        assert_eq!(unbase64(&asked.params["dataBase64"]), b"old\n");
        server.reply(&asked, json!({})).await;
        let error = soon(applying).await.unwrap().unwrap_err();
        assert!(matches!(error, PatchError::Unchanged(_)), "{error}");
    }
}

#[tokio::test]
async fn the_error_names_a_file_that_may_be_damaged() {
    let (client, mut server, _dialled) = connect(json!({})).await;
    let applying = apply(client, UPDATE);
    read(&mut server, "old\n", 1).await;
    full(&mut server, false).await;
    read(&mut server, "", 1).await;
    assert_eq!(full(&mut server, false).await, b"old\n");
    let error = soon(applying).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("done: nothing; not done: M a; a may be damaged"), "{error}");
    assert!(!error.contains("nothing was changed"), "{error}");
}

#[tokio::test]
async fn a_partly_written_new_file_is_removed_with_its_directory() {
    let (client, mut server, _dialled) = connect(json!({})).await;
    let applying = apply(client, ADD);
    let asked = server.expect("fs/canonicalize").await;
    assert_eq!(asked.params["path"], "file:///srv/d");
    server.refuse(&asked, -32004, "No such file or directory").await;
    let asked = server.expect("fs/canonicalize").await;
    server.reply(&asked, json!({"path": "file:///srv"})).await;
    for _ in 0..3 {
        // First the file, and whether it is a link; then its directory.
        let asked = server.expect("fs/getMetadata").await;
        server.refuse(&asked, -32004, "stat: No such file or directory").await;
    }
    let asked = server.expect("fs/getMetadata").await;
    assert_eq!(asked.params["path"], "file:///srv");
    server.reply(&asked, json!({"isDirectory": true, "isFile": false})).await;
    let asked = server.expect("fs/createDirectory").await;
    server.reply(&asked, json!({})).await;
    full(&mut server, false).await;
    read(&mut server, "n", 1).await;
    for path in ["file:///srv/d/a", "file:///srv/d"] {
        let asked = server.expect("fs/remove").await;
        assert_eq!(
            (&asked.params["path"], &asked.params["recursive"]),
            (&json!(path), &json!(false))
        );
        server.reply(&asked, json!({})).await;
    }
    let error = soon(applying).await.unwrap().unwrap_err();
    assert!(matches!(error, PatchError::Unchanged(_)), "{error}");
}

/// A server that reports neither inodes nor link counts: the client cannot recognize the second name of a
/// file, but must not overwrite what the first step wrote.
#[tokio::test]
async fn a_file_that_changed_through_another_name_is_not_overwritten() {
    const TWICE: &str =
        "*** Begin Patch\n*** Update File: a\n@@\n+x\n*** Update File: b\n@@\n+y\n*** End Patch";
    let (client, mut server, _dialled) = connect(json!({})).await;
    let applying = apply(client, TWICE);
    let mut content = b"old\n".to_vec();
    let mut reads = 0;
    while reads < 3 {
        let asked = server.next_request().await;
        let answer = match asked.method.as_str() {
            "fs/canonicalize" => json!({"path": asked.params["path"]}),
            "fs/getMetadata" => json!({"isDirectory": false, "isFile": true}),
            "fs/readFile" => {
                reads += 1;
                json!({"dataBase64": base64(&content)})
            }
            "fs/writeFile" => {
                content = unbase64(&asked.params["dataBase64"]);
                json!({})
            }
            other => panic!("{other}"),
        };
        server.reply(&asked, answer).await;
    }
    let error = soon(applying).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("done: M a; not done: M b"), "{error}");
    assert!(error.contains("perhaps through another name"), "{error}");
    assert_eq!(content, b"old\nx\n");
}
