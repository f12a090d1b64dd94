//! A system that gives no more threads: requests wait for existing threads, and get responses.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::support::*;

/// Limits this process to its existing threads. The limit is per user and exempts root, so root becomes a
/// user without other processes.
fn allow_no_more_threads() {
    use rustix::fs::Uid;
    let maximum = getrlimit(Resource::Nproc).maximum;
    setrlimit(Resource::Nproc, Rlimit { current: Some(1), maximum }).unwrap();
    if rustix::process::geteuid().is_root() {
        let uid = Uid::from_raw(61_234);
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
    }
    std::thread::Builder::new().spawn(|| ()).expect_err("no more threads");
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn without_more_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        // Too large to be read and encoded on the lane.
        std::fs::write(&file, vec![7; 300 << 10]).unwrap();
        let server = server();
        let mut client = Client::ready(&server).await;
        allow_no_more_threads();
        let path = format!("file://{}", file.display());
        let other = format!("file://{}", directory.path().join("other").display());
        let mut asked = Vec::new();
        for _ in 0..16 {
            asked.push(client.send_request("fs/readFile", json!({"path": path})).await);
            let write = json!({"path": other, "dataBase64": "aGVsbG8=", "atomic": true});
            asked.push(client.send_request("fs/writeFile", write).await);
            asked.push(
                client.send_request("fs/readDirectory", json!({"path": "file:///proc"})).await,
            );
            let search = json!({"path": path, "pattern": "x"});
            asked.push(client.send_request("fs/search", search).await);
        }
        for id in asked {
            client.response(id).await.unwrap();
        }
        // A watch needs a thread, so it fails with an error.
        let watch = client.call("fs/watch", json!({"watchId": 1, "path": path})).await;
        assert_eq!(watch.unwrap_err().code, -32603);
    });
}

#[test]
fn requests_get_responses_when_no_thread_can_be_started() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "threads::without_more_threads", "--ignored", "--test-threads", "1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    let failed = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains("1 passed"), "{said}\n{failed}");
}
