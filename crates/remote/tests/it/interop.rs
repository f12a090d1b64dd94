//! Against a server that is not ours: the program named by `CODEX_INTEROP_BIN`, if it is set.

use std::process::Stdio;
use std::time::Duration;

use codex_exec_client::ExecCommand;
use tokio::process::Command;

use crate::cloud::Cloud;
use crate::session::client;

#[tokio::test(flavor = "multi_thread")]
async fn another_implementation_serves_our_harness() {
    let Ok(binary) = std::env::var("CODEX_INTEROP_BIN") else {
        eprintln!("skipped: CODEX_INTEROP_BIN is not set");
        return;
    };
    let cloud = Cloud::start().await;
    let home = tempfile::tempdir().unwrap();
    let _server = Command::new(binary)
        .args(["exec-server", "--remote", &cloud.base().to_string()])
        .args(["--environment-id", crate::cloud::ENVIRONMENT])
        .env("CODEX_HOME", home.path())
        .env("CODEX_API_KEY", "sk-interop")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let session = async {
        cloud.upgraded(1).await;
        let first = client(&cloud).await;
        let output = first.run(ExecCommand::shell("printf out; exit 3")).await.unwrap();
        assert_eq!((output.status.code, &*output.stdout), (3, &b"out"[..]));
        let flood = ExecCommand::shell("head -c 4194304 /dev/zero | tr '\\0' x");
        assert_eq!(first.run(flood).await.unwrap().stdout.len(), 4 << 20);
        // A second stream on the same socket, and then the socket drops under both.
        let second = client(&cloud).await;
        assert_eq!(second.run(ExecCommand::shell("echo 2")).await.unwrap().stdout, b"2\n");
        let slow = first.spawn(ExecCommand::shell("sleep 2; echo late")).await.unwrap();
        cloud.drop_sockets();
        let output = slow.wait_with_output().await.unwrap();
        assert_eq!(output.stdout, b"late\n");
    };
    tokio::time::timeout(Duration::from_secs(60), session).await.unwrap();
    assert_eq!(cloud.seen("/register")[0].headers["authorization"], "Bearer sk-interop");
}
