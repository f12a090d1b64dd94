//! Clients that do not keep up, and long streams: the process waits, the server's memory stays bounded,
//! and no byte is lost.

use std::time::Duration;

use codex_exec_rpc::WebsocketDial;
use codex_exec_serving::{Connection, OutboundConfig};
use serde::Deserialize;
use serde_json::json;

use crate::support::*;

/// Bytes that the process has written.
fn written(pid: u32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    let line = io.lines().find(|line| line.starts_with("wchar")).unwrap();
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Bytes that the process has written once it waits.
pub(crate) async fn written_until_it_waits(pid: u32) -> u64 {
    let waits = || {
        let wchan = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap();
        wchan.contains("pipe_write")
    };
    let mut before = u64::MAX;
    let waiting = async {
        loop {
            let now = written(pid);
            if now == before && waits() {
                return now;
            }
            before = now;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("it writes without end")
}

/// A notification, borrowed: a stream of millions of bytes passes through it.
#[derive(Deserialize)]
struct Notice<'a> {
    method: &'a str,
    #[serde(borrow)]
    params: Params<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Params<'a> {
    seq: u64,
    chunk: Option<&'a str>,
    exit_code: Option<i32>,
}

/// Follows one stream and compares it with a repeated pattern.
struct Follow {
    pattern: Vec<u8>,
    bytes: usize,
    seq: u64,
    exit_code: Option<i32>,
}

impl Follow {
    fn new(pattern: Vec<u8>) -> Self {
        Self { pattern, bytes: 0, seq: 0, exit_code: None }
    }

    /// Handles a message; true if it was the last.
    fn take(&mut self, text: &str) -> bool {
        let notice: Notice<'_> = serde_json::from_str(text).unwrap();
        self.seq += 1;
        assert_eq!(notice.params.seq, self.seq);
        match notice.method {
            "process/output" => self.compare(&unbase64(notice.params.chunk.unwrap())),
            "process/exited" => self.exit_code = notice.params.exit_code,
            _ => return true,
        }
        false
    }

    fn compare(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let at = self.bytes % self.pattern.len();
            let len = bytes.len().min(self.pattern.len() - at);
            assert!(bytes[..len] == self.pattern[at..at + len], "at byte {}", self.bytes);
            bytes = &bytes[len..];
            self.bytes += len;
        }
    }

    async fn until_closed(&mut self, client: &mut Client) {
        while !self.take(&client.text().await.unwrap()) {}
    }
}

/// A pattern of prime length.
fn pattern() -> Vec<u8> {
    let mut state = 1u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(1_048_573).collect()
}

/// One stream of 64 MiB, or of 1 GiB if `CODEX_TEST_LONG` is set, every byte checked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_stream_arrives_whole() {
    let total: usize =
        if std::env::var_os("CODEX_TEST_LONG").is_some() { 1 << 30 } else { 64 << 20 };
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), pattern()).unwrap();
    let script = format!(r#"while cat "$FILE"; do :; done 2>/dev/null | head -c {total}"#);
    client.start(sh("p", &script).env("FILE", file.path())).await.unwrap();
    let mut follow = Follow::new(pattern());
    follow.until_closed(&mut client).await;
    assert_eq!((follow.bytes, follow.exit_code), (total, Some(0)));
}

#[tokio::test]
async fn ten_thousand_tiny_writes_arrive() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script = "i=0; while [ $i -lt 10000 ]; do echo $i; i=$((i+1)); done";
    let all = client.run(sh("p", script)).await;
    let expected: String = (0..10_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(all.text(), expected);
}

/// A client that never reads: the queues bound what the process can write, and when the client reads
/// again nothing is missing.
#[tokio::test]
async fn a_client_that_does_not_read_makes_the_process_wait() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "echo $$; exec yes 0123456789abcde")).await.unwrap();
    let first = client.until("p", "\n").await;
    let line = first.text().lines().next().unwrap().to_owned();
    let pid = numbers(&line)[0];
    let written = written_until_it_waits(pid).await;
    // The connection's queue, the process's queue, a chunk, and the kernel's pipe, which grows for a
    // process that fills it.
    assert!(written < (512 + 512 + 256 + 64 + 1024) << 10, "{written} bytes");
    // Another connection is not delayed.
    let mut other = Client::ready(&server).await;
    assert_eq!(other.run(sh("q", "echo hi")).await.text(), "hi\n");

    let mut all = Follow::new(b"0123456789abcde\n".to_vec());
    all.seq = first.last_seq;
    all.compare(&first.stdout[line.len() + 1..]);
    while all.bytes < 16 << 20 {
        all.take(&client.text().await.unwrap());
    }
    let terminate = json!({"id": "t", "method": "process/terminate", "params": {"processId": "p"}});
    client.send(terminate.to_string()).await;
    loop {
        let text = client.text().await.unwrap();
        if text.starts_with("{\"id\"") {
            assert_eq!(text, r#"{"id":"t","result":{"running":true}}"#);
        } else if all.take(&text) {
            break;
        }
    }
    assert_eq!(all.exit_code, Some(137));
}

/// The same over a real socket, with the kernel's buffers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_websocket_is_bounded_too() {
    let server = server_with(|config| config.connection.keep_alive = None);
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    client.start(sh("p", "echo $$; exec yes 0123456789abcde")).await.unwrap();
    let first = client.until("p", "\n").await;
    let line = first.text().lines().next().unwrap().to_owned();
    let written = written_until_it_waits(numbers(&line)[0]).await;
    // The kernel's receive buffer depends on the system: a few MiB.
    assert!(written < 32 << 20, "{written} bytes");
    let mut all = Follow::new(b"0123456789abcde\n".to_vec());
    all.seq = first.last_seq;
    all.compare(&first.stdout[line.len() + 1..]);
    while all.bytes < written as usize + (4 << 20) {
        all.take(&client.text().await.unwrap());
    }
}

/// Responses wait for the client like notifications: repeated requests without reading do not make the
/// server collect them.
#[tokio::test]
async fn unread_responses_do_not_empty_the_process() {
    let server = server_with(|config| {
        config.process.retain_bytes = 1 << 20;
        config.connection.outbound = OutboundConfig { queue_bytes: 64 << 10 };
    });
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "echo $$; exec yes 0123456789abcde")).await.unwrap();
    let pid = numbers(client.until("p", "\n").await.text().lines().next().unwrap())[0];
    for _ in 0..200 {
        client.send_request("process/read", json!({"processId": "p"})).await;
    }
    let written = written_until_it_waits(pid).await;
    assert!(written < 24 << 20, "{written} bytes");
}

/// The server keeps an ended process until its client has received all of it.
#[tokio::test]
async fn a_slow_client_gets_the_exit_however_late() {
    let server = server_with(|config| {
        config.process.closed_linger = Duration::ZERO;
        config.connection.outbound = OutboundConfig { queue_bytes: 64 << 10 };
    });
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "echo $$; exec head -c 300000 /dev/zero")).await.unwrap();
    let mut all = client.until("p", "\n").await;
    let pid = numbers(all.text().lines().next().unwrap())[0];
    gone(pid).await;
    // A process whose client has received everything is removed meanwhile.
    let mut prompt = Client::ready(&server).await;
    prompt.run(sh("q", "")).await;
    prompt.until_forgotten("q").await;
    all = client.collect_until_closed("p", all).await;
    assert_eq!(all.stdout.len(), 300_000 + pid.to_string().len() + 1);
    assert_eq!(all.exit_code, 0);
}

/// A server that shuts down does not wait for a client that does not read.
#[tokio::test]
async fn a_stalled_client_does_not_delay_shutdown() {
    let server = server_with(|config| {
        config.connection.outbound = OutboundConfig { queue_bytes: 16 << 10 };
    });
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "echo $$; exec yes")).await.unwrap();
    let pid = numbers(client.until("p", "\n").await.text().lines().next().unwrap())[0];
    written_until_it_waits(pid).await;
    for _ in 0..20 {
        client.send_request("environment/info", json!({})).await;
    }
    tokio::time::timeout(PATIENCE, server.shut_down()).await.expect("it hangs");
    assert!(!is_running(pid));
}

#[tokio::test]
async fn one_dead_subscriber_affects_no_other() {
    let server = server();
    let address = listen(&server).await;
    let mut dead = Client::websocket(address).await;
    dead.handshake(json!({"clientName": "test"})).await.unwrap();
    dead.start(sh("p", "echo $$; exec yes")).await.unwrap();
    let pid = numbers(dead.until("p", "\n").await.text().lines().next().unwrap())[0];
    written_until_it_waits(pid).await;
    let mut alive = Client::websocket(address).await;
    alive.handshake(json!({"clientName": "test"})).await.unwrap();
    let all = alive.run(sh("p", "seq 100000")).await;
    assert_eq!(all.stdout.len(), 588_895);
}

#[tokio::test]
async fn with_on_full_drop_the_process_continues_and_drops_are_counted() {
    for spool_above in [u64::MAX, 0] {
        let server = server_with(|config| {
            config.detach_ttl = Duration::from_secs(1000);
            config.process.spool_above = spool_above;
        });
        let mut client = Client::memory(&server);
        let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
        let script = "echo $$; read go; exec seq 1000000";
        let retain = json!({"bytes": 1 << 20, "onFull": "drop"});
        client.start(sh("p", script).piped().with("retain", retain)).await.unwrap();
        let first = client.until("p", "\n").await;
        let pid = numbers(&first.text())[0];
        client
            .send_request("process/write", json!({"processId": "p", "chunk": base64(b"go\n")}))
            .await;
        drop(client);
        gone(pid).await;
        let mut client = Client::resume(&server, &session).await;
        let wait = json!({"processId": "p", "afterSeq": 1_000_000, "waitMs": u64::MAX});
        assert_eq!(client.read(wait).await["closed"], true);
        let (mut after, mut bytes, mut dropped) = (first.last_seq, Vec::new(), 0);
        loop {
            let read = client
                .read(json!({"processId": "p", "afterSeq": after, "maxBytes": 100_000}))
                .await;
            dropped += read["droppedBytes"].as_u64().unwrap_or(0);
            bytes.extend(bytes_of(&read));
            after = read["nextSeq"].as_u64().unwrap() - 1;
            if read["chunks"].as_array().unwrap().is_empty() {
                break;
            }
        }
        let expected: String = (1..=1_000_000).map(|n| format!("{n}\n")).collect();
        assert_eq!(dropped as usize + bytes.len(), expected.len());
        // As much as requested, less at most one chunk that did not fit.
        let least = (1 << 20) - (256 << 10);
        assert!((least..=1 << 20).contains(&bytes.len()), "{}", bytes.len());
        assert!(expected.as_bytes().ends_with(&bytes), "the newest is what is kept");
    }
}

#[tokio::test]
async fn more_output_can_be_retained_than_fits_in_memory() {
    let server = server_with(|config| {
        config.detach_ttl = Duration::from_secs(1000);
        config.process.retain_bytes = 64 << 10;
        config.process.spool_above = 1 << 20;
    });
    let mut client = Client::memory(&server);
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    let retain = json!({"bytes": 20 << 20});
    let script = "echo $$; read go; exec seq 1000000";
    client.start(sh("p", script).piped().with("retain", retain)).await.unwrap();
    let first = client.until("p", "\n").await;
    let pid = numbers(&first.text())[0];
    client.send_request("process/write", json!({"processId": "p", "chunk": base64(b"go\n")})).await;
    drop(client);
    // The process need not wait, since all of its output fits.
    gone(pid).await;
    let mut client = Client::resume(&server, &session).await;
    let mut bytes = Vec::new();
    let mut after = first.last_seq;
    loop {
        let params =
            json!({"processId": "p", "afterSeq": after, "maxBytes": 1 << 20, "waitMs": u64::MAX});
        let read = client.read(params).await;
        assert_eq!(read.get("droppedBytes"), None);
        bytes.extend(bytes_of(&read));
        after = read["nextSeq"].as_u64().unwrap() - 1;
        if read["chunks"].as_array().unwrap().is_empty() && read["closed"] == true {
            break;
        }
    }
    let expected: String = (1..=1_000_000).map(|n| format!("{n}\n")).collect();
    assert!(bytes == expected.as_bytes(), "{} of {} bytes", bytes.len(), expected.len());
}

/// Far more input than the server buffers, to a process that echoes it: the server's ping gets its pong only
/// behind input that it does not read.
#[tokio::test]
async fn input_and_output_beyond_every_bound_do_not_wait_for_each_other() {
    const BLOCK: usize = 64 << 10;
    const BLOCKS: usize = 256;
    let server = server_with(|config| {
        config.process.retain_bytes = 128 << 10;
        config.pending_bytes = 256 << 10;
    });
    let address = listen(&server).await;
    let dial = WebsocketDial::new(format!("ws://{address}/"));
    let config = server.config().connection;
    let mut client = Connection::dial(&dial, &config).await.unwrap();
    let outbound = client.outbound().clone();
    let writing = tokio::spawn(async move {
        for text in [
            r#"{"id":-1,"method":"initialize","params":{"clientName":"test"}}"#.to_owned(),
            r#"{"method":"initialized"}"#.to_owned(),
            json!({"id": -2, "method": "process/start", "params": sh("p", "cat").piped().0})
                .to_string(),
        ] {
            outbound.send(text).await.unwrap();
        }
        for n in 0..BLOCKS {
            let chunk = base64(&[n as u8; BLOCK]);
            let params = json!({"processId": "p", "chunk": chunk});
            let message = json!({"id": n, "method": "process/write", "params": params});
            outbound.send(message.to_string()).await.unwrap();
        }
    });
    let reading = async {
        let mut all = Published::default();
        let mut answers = 0;
        while all.stdout.len() < BLOCK * BLOCKS || answers < BLOCKS + 2 {
            let message = client.next().await.unwrap().unwrap();
            let message: serde_json::Value = serde_json::from_slice(&message).unwrap();
            match message.get("method") {
                Some(_) => drop(all.take(&message)),
                None => answers += usize::from(message.get("result").is_some()),
            }
        }
        all.stdout
    };
    let stdout = tokio::time::timeout(PATIENCE, reading).await.expect("each waits for the other");
    assert!(stdout.chunks(BLOCK).enumerate().all(|(n, block)| block == [n as u8; BLOCK]));
    writing.await.unwrap();
}

/// Large messages of many connections share the server's memory for them: those without memory wait in
/// their sockets, small requests pass, and all get responses.
#[tokio::test]
async fn large_messages_of_twenty_connections_wait_for_memory_and_get_responses() {
    let server = server_with(|config| config.message_memory = 4 << 20);
    let address = listen(&server).await;
    let mut holder = Client::websocket(address).await;
    holder.handshake(json!({"clientName": "test"})).await.unwrap();
    holder.start(start("p", &["/bin/sleep", "1000"]).piped()).await.unwrap();
    // One message keeps its share until its response is sent.
    let chunk = base64(&vec![7; 3 << 20]);
    holder.send_request("process/write", json!({"processId": "p", "chunk": chunk})).await;
    let other =
        holder.send_request("process/write", json!({"processId": "p", "chunk": "eA=="})).await;
    let directory = tempfile::tempdir().unwrap();
    let path = |n: usize| directory.path().join(n.to_string());
    let mut writing = tokio::task::JoinSet::new();
    for n in 0..20 {
        let path = path(n);
        writing.spawn(async move {
            let mut client = Client::websocket(address).await;
            client.handshake(json!({"clientName": "test"})).await.unwrap();
            let small = json!({"path": "file:///"});
            client.call("fs/getMetadata", small.clone()).await.unwrap();
            let data = base64(&vec![n as u8; 1_000_000 + n]);
            let write = json!({"path": format!("file://{}", path.display()), "dataBase64": data});
            client.call("fs/writeFile", write).await.unwrap();
            client.call("fs/getMetadata", small).await.unwrap();
        });
    }
    holder.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    holder.response(other).await.unwrap();
    while let Some(ended) = writing.join_next().await {
        ended.unwrap();
    }
    for n in 0..20 {
        assert!(std::fs::read(path(n)).unwrap() == vec![n as u8; 1_000_000 + n]);
    }
}
