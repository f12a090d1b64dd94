//! The server's memory while a client does not read.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio_websockets::Message;

use crate::support::*;

/// Peak memory of a process, in bytes.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    u64::from(numbers(line)[0]) << 10
}

/// A client starts a process that writes without end, requests all output repeatedly, and reads nothing. The
/// server holds the retained output (8 MiB) and the send queue once, not once per request.
#[tokio::test]
async fn a_client_that_never_reads_does_not_make_the_server_grow() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    client.start("p", "echo $$; exec yes 0123456789abcde").await;
    let mut text = String::new();
    // Until the retained output is full.
    for _ in 0..400 {
        let notice = client.notification().await;
        text.push_str(
            notice["params"]["chunk"].as_str().unwrap_or_default().get(..12).unwrap_or(""),
        );
    }
    let before = peak(server.pid());
    for _ in 0..400 {
        client.send_request("process/read", json!({"processId": "p"})).await;
    }
    let grown = settled_peak(&server).await - before;
    assert!(grown < 64 << 20, "grew by {grown} bytes");
}

/// Clients request large responses of every kind and read none. The responses share one bound (256 MiB),
/// small requests get responses meanwhile, and later clients get everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_large_responses_share_one_bound() {
    const FILE: u64 = 16 << 20;
    const BLOCK: u64 = 1 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large");
    std::fs::File::create(&path).unwrap().set_len(FILE).unwrap();
    let path = format!("file://{}", path.display());
    let server = Running::start(&[]);
    let mut random = fastrand::Rng::with_seed(12);
    let mut clients = Vec::new();
    for _ in 0..9 {
        let mut client = server.client().await;
        client.call("fs/open", json!({"handleId": "h", "path": path})).await;
        client.run("p", "head -c 2000000 /dev/zero").await;
        clients.push(client);
    }
    let mut last = clients.swap_remove(random.usize(..clients.len()));
    let mut ask = async |client: &mut Client| {
        let mut asked = Vec::new();
        for _ in 0..20 {
            let (method, params, len) = match random.u8(..6) {
                0..3 => ("fs/readFile", json!({"path": path}), FILE),
                3..5 => {
                    let offset = random.u64(..FILE - BLOCK);
                    let params = json!({"handleId": "h", "offset": offset, "len": BLOCK});
                    ("fs/readBlock", params, BLOCK)
                }
                _ => ("process/read", json!({"processId": "p"}), 2_000_000),
            };
            asked.push((client.send_request(method, params).await, len));
        }
        asked
    };
    for client in &mut clients {
        ask(client).await;
    }
    let peak = settled_peak(&server).await;
    // The bound, cached buffers, retained output, and the server itself.
    assert!(peak < 600 << 20, "had {} MiB", peak >> 20);
    let small = json!({"path": format!("file://{}", directory.path().display())});
    let mut other = server.client().await;
    let metadata = other.call("fs/getMetadata", small).await;
    assert_eq!(metadata["result"]["isDirectory"], true, "{metadata}");
    // Also a larger response, for which unread responses leave a reserve.
    let block = json!({"handleId": "h", "offset": 0, "len": BLOCK});
    let block = last.call("fs/readBlock", block).await;
    assert_eq!(decoded_len(&block["result"]["chunk"]), BLOCK);
    let mut asked = HashMap::<i64, u64>::from_iter(ask(&mut last).await);
    drop(clients);
    while !asked.is_empty() {
        let message = last.notification().await;
        let result = &message["result"];
        let bytes = match result["chunks"].as_array() {
            Some(chunks) => chunks.iter().map(|chunk| decoded_len(&chunk["chunk"])).sum(),
            None if result["chunk"].is_string() => decoded_len(&result["chunk"]),
            None => decoded_len(&result["dataBase64"]),
        };
        let id = message["id"].as_i64().unwrap();
        assert_eq!(asked.remove(&id), Some(bytes), "answer {id}");
    }
}

/// Idle connections hold nothing of a large message that they sent.
#[tokio::test]
async fn idle_connections_return_the_memory_of_their_messages() {
    const CLIENTS: u64 = 6;
    const MESSAGE: u64 = 20 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = format!("file://{}/x", directory.path().display());
    let server = Running::start(&[]);
    let params = json!({"path": path, "dataBase64": "A".repeat(MESSAGE as usize)});
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = server.client().await;
        let answer = client.call("fs/writeFile", params.clone()).await;
        assert!(answer["error"].is_null(), "{answer}");
        clients.push(client);
    }
    let held = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        u64::from(numbers(line)[0]) << 10
    };
    eventually("the memory is given back", || held() < CLIENTS * MESSAGE / 2).await;
}

/// Before `initialize`, the server reads no long message.
#[tokio::test]
async fn long_messages_before_initialize_are_refused() {
    let server = Running::start(&[]);
    for (len, answered) in [(60_000, true), (70_000, false), (300_000, false)] {
        let mut client = server.uninitialized_client().await;
        let name = "n".repeat(len);
        let params = json!({"clientName": name});
        let message = json!({"id": 1, "method": "initialize", "params": params}).to_string();
        // The server may close the connection before all of it is sent.
        let _ = client.socket.send(Message::text(message)).await;
        let answer = client.socket.next().await;
        let text =
            answer.and_then(Result::ok).and_then(|answer| Some(answer.as_text()?.to_owned()));
        assert_eq!(text.is_some_and(|text| text.contains("sessionId")), answered, "{len} bytes");
    }
}

/// The number of bytes in this base64.
fn decoded_len(text: &serde_json::Value) -> u64 {
    let text = text.as_str().unwrap();
    let padding = text.bytes().rev().take_while(|&byte| byte == b'=').count();
    (text.len() / 4 * 3 - padding) as u64
}

/// Peak memory of the server, once it stops growing.
async fn settled_peak(server: &Running) -> u64 {
    let mut last = 0;
    loop {
        // Long enough for a server that would collect responses.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = peak(server.pid());
        if now == last {
            return now;
        }
        last = now;
    }
}
