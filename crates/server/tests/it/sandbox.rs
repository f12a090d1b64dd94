//! A sandbox that loses a race: a path was replaced between planning and building.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::*;

/// A fake sandbox executable: counts its calls, reports the first `overtaken` times that a path was
/// replaced, and afterwards confines nothing.
fn executable(directory: &Path, overtaken: usize) -> PathBuf {
    let path = directory.join("executable");
    let calls = directory.join("calls");
    // A failure on the status pipe: the step, the error number (ESTALE), the subject.
    let script = format!(
        "#!/bin/sh\n\
         echo call >> {calls}\n\
         test $(wc -l < {calls}) -gt {overtaken} && exec echo ran 4>&-\n\
         printf '\\006\\164\\000\\000\\000/x was replaced meanwhile' >&4\n\
         exit 126\n",
        calls = calls.display()
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

fn calls(directory: &Path) -> usize {
    std::fs::read_to_string(directory.join("calls")).unwrap_or_default().lines().count()
}

fn read_only() -> Value {
    json!({"permissions": {"type": "read-only"}, "cwd": "file:///"})
}

async fn client(directory: &Path, overtaken: usize) -> Client {
    let executable = executable(directory, overtaken);
    let server = server_with(|config| {
        config.sandbox_executable = Some(executable);
        // A script cannot be a spare.
        config.process.spare_sandbox = false;
    });
    Client::ready(&server).await
}

#[tokio::test]
async fn a_sandbox_that_lost_a_race_is_built_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut client = client(directory.path(), 1).await;
    let done = client.run(start("p", &["true"]).with("sandbox", read_only())).await;
    assert_eq!((done.text().as_str(), done.exit_code), ("ran\n", 0));
    assert_eq!(calls(directory.path()), 2);
}

#[tokio::test]
async fn a_sandbox_that_keeps_losing_races_fails() {
    let directory = tempfile::tempdir().unwrap();
    let mut client = client(directory.path(), 1000).await;
    let refused =
        client.start(start("p", &["true"]).with("sandbox", read_only())).await.unwrap_err();
    assert_eq!(refused.code, -32602);
    assert!(refused.message.contains("/x was replaced meanwhile"), "{refused:?}");
    assert_eq!(calls(directory.path()), 2);
    let params = json!({"path": "file:///x", "dataBase64": "", "sandbox": read_only()});
    let refused = client.call("fs/writeFile", params).await.unwrap_err();
    assert_eq!(refused.code, -32600);
    assert!(refused.message.contains("/x was replaced meanwhile"), "{refused:?}");
    assert_eq!(calls(directory.path()), 4);
}
