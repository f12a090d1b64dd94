//! What the server costs while a client does not read.

use std::time::Duration;

use serde_json::json;

use crate::support::*;

/// The most memory a process ever had, in bytes.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    u64::from(numbers(line)[0]) << 10
}

/// A client that starts what writes without end, asks for all of it again and again, and reads
/// nothing. The server holds what it retains for the process (8 MiB) and the way out once, not once
/// for each request.
#[tokio::test]
async fn a_client_that_asks_and_never_reads_does_not_make_the_server_grow() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    client.start("p", "echo $$; exec yes 0123456789abcde").await;
    let mut text = String::new();
    // Until the ring is full.
    for _ in 0..400 {
        let notice = client.notice().await;
        text.push_str(
            notice["params"]["chunk"].as_str().unwrap_or_default().get(..12).unwrap_or(""),
        );
    }
    let before = peak(server.pid());
    for _ in 0..400 {
        client.ask("process/read", json!({"processId": "p"})).await;
    }
    // Long enough for a server that would collect answers to do so.
    let mut last = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = peak(server.pid());
        if now == last {
            break;
        }
        last = now;
    }
    let grown = peak(server.pid()) - before;
    assert!(grown < 64 << 20, "grew by {grown} bytes");
}
