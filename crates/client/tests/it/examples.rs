//! The programs in `examples/`, run as they are against this project's server.

use std::path::PathBuf;
use std::process::Stdio;

use codex_exec_serving::ServerConfig;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::embedded::listening;
use crate::support::soon;

/// An example, built beside this test: `target/debug/deps/it-…` and `target/debug/examples/…`.
fn example(name: &str) -> Command {
    let test: PathBuf = std::env::current_exe().unwrap();
    let directory = test.parent().and_then(|deps| deps.parent()).unwrap();
    let mut command = Command::new(directory.join("examples").join(name));
    command.kill_on_drop(true).stdin(Stdio::null());
    command
}

#[tokio::test]
async fn run_command() {
    let server = listening(ServerConfig::default()).await;
    let mut command = example("run_command");
    command.args([&server.url(), "sh", "-c", "echo out; echo err >&2; exit 3"]);
    let output = soon(command.output()).await.unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    let output = soon(example("run_command").arg("ws://127.0.0.1:1").output()).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("check that the server runs"));
    server.server.shut_down().await;
}

#[tokio::test]
async fn interactive_pty() {
    let server = listening(ServerConfig::default()).await;
    let mut command = example("interactive_pty");
    command.arg(server.url()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"echo $((40 + 2)); exit 4\n").await.unwrap();
    let output = soon(child.wait_with_output()).await.unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("42\r\n"), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("[exit code 4]"), "{output:?}");
    server.server.shut_down().await;
}

#[tokio::test]
async fn upload_build_download() {
    let server = listening(ServerConfig::default()).await;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir_all(at("project/src")).unwrap();
    std::fs::write(at("project/src/words"), "built\n").unwrap();
    let mut command = example("upload_build_download");
    command.args([server.url(), at("project"), at("there")]);
    command.args(["mkdir out && tr a-z A-Z < src/words > out/result", "out/result", &at("result")]);
    let output = soon(command.output()).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read_to_string(at("result")).unwrap(), "BUILT\n");
    server.server.shut_down().await;
}
