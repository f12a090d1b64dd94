//! Sessions: what outlives a connection, and for how long.

use std::net::SocketAddr;
use std::time::Duration;

use codex_exec_serving::Server;
use serde_json::{Value, json};

use crate::backpressure::written_until_it_waits;
use crate::exits::tree;
use crate::support::*;

/// A server whose sessions do not expire while a test runs.
fn server_without_expiry() -> Server {
    server_with(|config| config.detach_ttl = Duration::from_secs(1000))
}

async fn connected_client(server: &Server) -> (Client, String) {
    let mut client = Client::memory(server);
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    (client, session)
}

fn resume(session: &str) -> Value {
    json!({"clientName": "test", "resumeSessionId": session})
}

/// Waits until the session and its processes are gone.
async fn ended(server: &Server, session: &str, pids: impl IntoIterator<Item = u32>) {
    for pid in pids {
        gone(pid).await;
    }
    let refused = Client::memory(server).call("initialize", resume(session)).await.unwrap_err();
    let message = format!("unknown session id {session}");
    assert_eq!(refused, ErrorResponse { code: -32600, message });
}

/// Reads everything after a number to the end.
async fn read_all(client: &mut Client, process: &str, mut after: u64) -> (Vec<u8>, Value) {
    let mut bytes = Vec::new();
    loop {
        let params = json!({"processId": process, "afterSeq": after, "waitMs": 1_000_000});
        let read = client.read(params).await;
        for chunk in read["chunks"].as_array().unwrap() {
            let seq = chunk["seq"].as_u64().unwrap();
            assert!(seq > after);
            after = seq;
        }
        assert_eq!(read.get("droppedBytes"), None, "lost");
        bytes.extend(bytes_of(&read));
        after = after.max(read["nextSeq"].as_u64().unwrap() - 1);
        if read["closed"] == true {
            return (bytes, read);
        }
    }
}

#[tokio::test]
async fn a_session_is_resumed_with_its_processes_and_numbers() {
    let server = server_without_expiry();
    let (mut client, session) = connected_client(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    client.write("p", "one").await;
    let all = client.until("p", "one").await;
    assert_eq!(all.last_seq, 1);
    drop(client);
    let mut client = Client::resume(&server, &session).await;
    let read = client.read(json!({"processId": "p"})).await;
    assert_eq!((bytes_of(&read), &read["nextSeq"]), (b"one".to_vec(), &json!(2)));
    client.write("p", "two").await;
    client.close_stdin("p").await;
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.text(), "onetwo", "numbers go on where they were");
    assert_eq!(client.start(sh("p", "")).await.unwrap_err().code, -32600, "its id is still taken");
}

#[tokio::test]
async fn a_session_is_resumed_over_a_websocket() {
    resumed_over_a_websocket(server_without_expiry()).await;
}

/// Each connection gets the next lane, so a resumed session has its processes on another lane.
#[tokio::test]
async fn a_session_is_resumed_on_another_lane() {
    let server = server_with(|config| {
        config.lanes = 2;
        config.detach_ttl = Duration::from_secs(1000);
    });
    resumed_over_a_websocket(server.clone()).await;
    server.shut_down().await;
}

async fn resumed_over_a_websocket(server: Server) {
    let address = listen(&server).await;
    let mut client = Client::websocket(address).await;
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    client.write("p", "one").await;
    client.until("p", "one").await;
    client.close().await;
    let mut client = loop {
        let mut client = Client::websocket(address).await;
        match client.handshake(resume(&session)).await {
            Ok(_) => break client,
            Err(refused) => assert_eq!(refused.code, -32010),
        }
    };
    client.close_stdin("p").await;
    let (bytes, last) = read_all(&mut client, "p", 0).await;
    assert_eq!((bytes, &last["exitCode"]), (b"one".to_vec(), &json!(0)));
}

#[tokio::test]
async fn events_while_detached_can_be_read_later() {
    let server = server_without_expiry();
    let (mut client, session) = connected_client(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let done = directory.path().join("done");
    let script = r#"read line; echo "$line"; echo more; echo done > "$DONE"; exit 6"#;
    client.start(sh("p", script).piped().env("DONE", &done)).await.unwrap();
    // The response is not awaited.
    client
        .send_request("process/write", json!({"processId": "p", "chunk": base64(b"input\n")}))
        .await;
    drop(client);
    eventually("it is done", || done.exists()).await;
    let mut client = Client::resume(&server, &session).await;
    let (bytes, last) = read_all(&mut client, "p", 0).await;
    assert_eq!((bytes, &last["exitCode"]), (b"input\nmore\n".to_vec(), &json!(6)));
}

#[tokio::test]
async fn many_small_writes_while_detached_are_all_retained() {
    let server = server_with(|config| {
        config.detach_ttl = Duration::from_secs(1000);
        config.process.retain_chunks = 5;
    });
    let (mut client, session) = connected_client(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let done = directory.path().join("done");
    // The server reads each write separately, unless it is slower.
    let script = r#"read line; for n in 1 2 3 4 5 6 7 8 9 10 11 12; do
        echo $n; sleep 0.02; done; echo done > "$DONE""#;
    let retain = json!({"bytes": 100_000, "onFull": "drop"});
    let start = sh("p", script).piped().env("DONE", &done).with("retain", retain);
    client.start(start).await.unwrap();
    client.send_request("process/write", json!({"processId": "p", "chunk": base64(b"go\n")})).await;
    drop(client);
    eventually("it is done", || done.exists()).await;
    let mut client = Client::resume(&server, &session).await;
    let (bytes, _) = read_all(&mut client, "p", 0).await;
    assert_eq!(String::from_utf8(bytes).unwrap(), "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n");
}

#[tokio::test]
async fn a_session_that_is_held_cannot_be_resumed() {
    let server = server_without_expiry();
    let (mut client, session) = connected_client(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let mut thief = Client::memory(&server);
    let refused = thief.call("initialize", resume(&session)).await.unwrap_err();
    assert_eq!(refused.code, -32010);
    // The holder is not affected, and the other may open its own session.
    client.write("p", "mine").await;
    client.close_stdin("p").await;
    assert_eq!(client.until_closed("p").await.text(), "mine");
    let own = thief.handshake(json!({"clientName": "test"})).await.unwrap();
    assert_ne!(own, session);
}

#[tokio::test]
async fn resuming_an_unknown_session_is_refused() {
    let server = server_without_expiry();
    let mut client = Client::memory(&server);
    for id in ["nope", "", "00000000-0000-0000-0000-000000000000"] {
        let refused = client.call("initialize", resume(id)).await.unwrap_err();
        let message = format!("unknown session id {id}");
        assert_eq!(refused, ErrorResponse { code: -32600, message });
    }
}

#[tokio::test]
async fn an_expired_session_is_removed_and_its_processes_killed() {
    for over_websocket in [false, true] {
        let server = server_with(|config| config.detach_ttl = Duration::from_millis(100));
        let mut client = match over_websocket {
            false => Client::memory(&server),
            true => Client::websocket(listen(&server).await).await,
        };
        let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
        let (pids, _) = tree(&mut client, "p").await;
        client.start(sh("t", "echo $$; exec sleep 1000").tty()).await.unwrap();
        let terminal = numbers(&client.until("t", "\n").await.text())[0];
        drop(client);
        ended(&server, &session, pids.into_iter().chain([terminal])).await;
    }
}

#[tokio::test]
async fn a_ttl_of_zero_ends_a_session_at_once() {
    let server = server_with(|config| config.detach_ttl = Duration::ZERO);
    let (mut client, session) = connected_client(&server).await;
    let (pids, _) = tree(&mut client, "p").await;
    drop(client);
    ended(&server, &session, pids).await;
}

#[tokio::test]
async fn a_client_may_request_its_own_ttl() {
    let server = server_without_expiry();
    let mut client = Client::memory(&server);
    let short = json!({"clientName": "test", "detachTtlMs": 0});
    let session = client.handshake(short).await.unwrap();
    let (pids, _) = tree(&mut client, "p").await;
    drop(client);
    ended(&server, &session, pids).await;

    let server = server_with(|config| {
        config.detach_ttl = Duration::ZERO;
        config.max_detach_ttl = Duration::from_secs(1000);
    });
    let mut client = Client::memory(&server);
    let long = json!({"clientName": "test", "detachTtlMs": u64::MAX});
    let session = client.handshake(long).await.unwrap();
    drop(client);
    Client::resume(&server, &session).await;
}

#[tokio::test]
async fn a_resumed_session_does_not_expire_by_the_old_ttl() {
    let server = server_with(|config| config.detach_ttl = Duration::from_millis(150));
    let (mut client, session) = connected_client(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    drop(client);
    let mut client = Client::resume(&server, &session).await;
    // Longer than the TTL of the first connection.
    client.run(sh("q", "sleep 0.4")).await;
    client.write("p", "alive").await;
    client.close_stdin("p").await;
    let (bytes, _) = read_all(&mut client, "p", 0).await;
    assert_eq!(bytes, b"alive");
}

#[tokio::test]
async fn full_retention_makes_the_process_wait_and_a_resume_loses_nothing() {
    const TOTAL: usize = 3_000_000;
    let server = server_with(|config| {
        config.detach_ttl = Duration::from_secs(1000);
    });
    let (mut client, session) = connected_client(&server).await;
    let script = format!("echo $$; read go; seq 1 10000000 | head -c {TOTAL}");
    // A client that only reads, and ignores notifications.
    let retain = json!({"bytes": 1 << 20, "until": "read"});
    client.start(sh("p", &script).piped().with("retain", retain)).await.unwrap();
    let first = client.until("p", "\n").await;
    let pid = numbers(&first.text())[0];
    let go = client
        .send_request("process/write", json!({"processId": "p", "chunk": base64(b"go\n")}))
        .await;
    client.response(go).await.unwrap();
    drop(client);
    // It fills the retained output and waits: `head` sleeps in a write to its pipe.
    let children = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let waits = |pid: &u32| {
        let stack = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        stack.contains("pipe_write")
    };
    eventually("it waits", || {
        let all = numbers(&children());
        !all.is_empty() && all.iter().all(waits)
    })
    .await;
    let mut client = Client::resume(&server, &session).await;
    let listed = client.call("process/list", json!({})).await.unwrap();
    assert_eq!(listed["processes"][0]["exited"], false);
    let (bytes, last) = read_all(&mut client, "p", first.last_seq).await;
    let expected: String = (1..=500_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(bytes.len(), TOTAL);
    assert!(bytes == expected.as_bytes()[..TOTAL], "every byte, in order");
    assert_eq!(last["exitCode"], 0);
}

/// A connection dies in the middle of a stream: output in flight is lost with it, and a resumed client reads
/// it again.
#[tokio::test]
async fn a_connection_lost_in_the_middle_of_a_stream_loses_nothing() {
    const TOTAL: usize = 20_000_000;
    let server = server_without_expiry();
    let address = listen(&server).await;
    let mut client = Client::websocket(address).await;
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    let script = format!("seq 1 100000000 | head -c {TOTAL}");
    client.start(sh("p", &script)).await.unwrap();
    let mut all = Published::default();
    for round in 1..=4 {
        while all.stdout.len() < round * 2_000_000 {
            let notice = client.notification().await;
            assert!(!all.take(&notice));
        }
        drop(client);
        client = loop {
            let mut client = Client::websocket(address).await;
            match client.handshake(resume(&session)).await {
                Ok(_) => break client,
                Err(refused) => assert_eq!(refused.code, -32010),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        // Catch up; notifications meanwhile have the same numbers or later ones.
        let after = all.last_seq;
        let read = client.read(json!({"processId": "p", "afterSeq": after})).await;
        assert_eq!(read.get("droppedBytes"), None);
        for chunk in read["chunks"].as_array().unwrap() {
            let notice = json!({"method": "process/output", "params": chunk});
            all.take(&notice);
        }
        // Skip notifications of output that was already read.
        loop {
            let notice = client.notification().await;
            if notice["params"]["seq"].as_u64().unwrap() > all.last_seq {
                all.take(&notice);
                break;
            }
        }
    }
    let all = client.collect_until_closed("p", all).await;
    let expected: String = (1..=3_000_000).map(|n| format!("{n}\n")).collect();
    assert!(all.stdout == expected.as_bytes()[..TOTAL], "every byte, in order");
}

/// A proxy in front of a server. On demand it swallows what the server sends, like a peer with endless
/// buffers. Dropping it cuts its connections.
struct Swallowing {
    address: SocketAddr,
    swallow: tokio::sync::watch::Sender<bool>,
    _proxy: tokio_util::task::AbortOnDropHandle<()>,
}

impl Swallowing {
    async fn before(server: SocketAddr) -> Self {
        use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (swallow, swallows) = tokio::sync::watch::channel(false);
        let proxy = tokio::spawn(async move {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut server = tokio::net::TcpStream::connect(server).await.unwrap();
            let (mut from_client, mut to_client) = client.split();
            let (mut from_server, mut to_server) = server.split();
            let back = async {
                let mut buffer = vec![0; 64 << 10];
                loop {
                    let len = from_server.read(&mut buffer).await.unwrap_or(0);
                    if len == 0 {
                        break;
                    }
                    if !*swallows.borrow() {
                        to_client.write_all(&buffer[..len]).await.unwrap();
                    }
                }
            };
            let _ = tokio::join!(copy(&mut from_client, &mut to_server), back);
        });
        let proxy = tokio_util::task::AbortOnDropHandle::new(proxy);
        Self { address, swallow, _proxy: proxy }
    }
}

/// A client with default settings loses nothing, however much lay in the buffers between it and the server:
/// output counts as received once the client has answered a ping.
#[tokio::test]
async fn output_lost_in_large_buffers_is_read_after_a_resume() {
    let server = server_without_expiry();
    let address = listen(&server).await;
    let proxy = Swallowing::before(address).await;
    let mut client = Client::websocket(proxy.address).await;
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    let script = "echo $$; read go; exec seq 1 3000000";
    client.start(sh("p", script).piped()).await.unwrap();
    let first = client.until("p", "\n").await;
    let pid = numbers(&first.text())[0];
    proxy.swallow.send_replace(true);
    client.send_request("process/write", json!({"processId": "p", "chunk": base64(b"go\n")})).await;
    written_until_it_waits(pid).await;
    drop((proxy, client));
    let mut client = Client::resume_at(address, &session).await;
    let (bytes, last) = read_all(&mut client, "p", first.last_seq).await;
    let expected: String = (1..=3_000_000).map(|n| format!("{n}\n")).collect();
    assert!(bytes == expected.as_bytes(), "{} of {} bytes", bytes.len(), expected.len());
    assert_eq!(last["exitCode"], 0);
}

#[tokio::test]
async fn a_pending_start_survives_the_end_of_its_connection() {
    let server = server_without_expiry();
    for n in 0..30 {
        let (mut client, session) = connected_client(&server).await;
        let id = format!("p{n}");
        client.send_request("process/start", sh(&id, "echo hi; cat; exit 4").piped().0).await;
        client
            .send_request("process/write", json!({"processId": id, "chunk": base64(b"there")}))
            .await;
        client
            .send_request(
                "process/write",
                json!({"processId": id, "chunk": "", "closeStdin": true}),
            )
            .await;
        drop(client);
        let mut client = Client::resume(&server, &session).await;
        let (bytes, last) = read_all(&mut client, &id, 0).await;
        assert_eq!(
            (String::from_utf8(bytes).unwrap(), &last["exitCode"]),
            ("hi\nthere".into(), &json!(4))
        );
    }
}

#[tokio::test]
async fn a_retry_after_a_resume_is_written_once() {
    let server = server_without_expiry();
    let (mut client, session) = connected_client(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let write = json!({"processId": "p", "chunk": base64(b"once"), "writeId": "w"});
    client.send_request("process/write", write.clone()).await;
    drop(client);
    let mut client = Client::resume(&server, &session).await;
    assert_eq!(client.call("process/write", write).await, Ok(json!({"status": "accepted"})));
    client.close_stdin("p").await;
    assert_eq!(read_all(&mut client, "p", 0).await.0, b"once");
}

#[tokio::test]
async fn a_long_poll_ends_with_its_connection_and_not_with_the_session() {
    let server = server_without_expiry();
    let (mut client, session) = connected_client(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    for _ in 0..10 {
        client.send_request("process/read", json!({"processId": "p", "waitMs": u64::MAX})).await;
    }
    drop(client);
    let mut client = Client::resume(&server, &session).await;
    client.write("p", "x").await;
    client.close_stdin("p").await;
    assert_eq!(read_all(&mut client, "p", 0).await.0, b"x");
}

#[tokio::test]
async fn a_websocket_close_is_answered_during_a_long_poll() {
    let server = server_with(|config| {
        config.detach_ttl = Duration::from_secs(1000);
        config.connection.close_timeout = Duration::from_secs(1000);
    });
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    client.send_request("process/read", json!({"processId": "p", "waitMs": u64::MAX})).await;
    client.nothing_more().await;
    tokio::time::timeout(PATIENCE, client.close()).await.expect("the close is answered");
}

/// The server keeps a process that closed while detached for as long as its session.
#[tokio::test]
async fn a_process_that_closed_while_detached_can_still_be_read() {
    let server = server_with(|config| {
        config.detach_ttl = Duration::from_secs(1000);
        // Long enough for the server to notice that the connection is gone.
        config.process.closed_linger = Duration::from_secs(2);
    });
    let (mut client, session) = connected_client(&server).await;
    client.start(sh("p", "read line; echo $$").piped()).await.unwrap();
    let pid = client.call("process/list", json!({})).await.unwrap()["processes"][0]["pid"].clone();
    let pid = pid.as_u64().unwrap() as u32;
    client.send_request("process/write", json!({"processId": "p", "chunk": base64(b"\n")})).await;
    drop(client);
    gone(pid).await;
    // A process whose client has received everything is removed meanwhile.
    let mut prompt = Client::ready(&server).await;
    prompt.run(sh("q", "")).await;
    prompt.until_forgotten("q").await;
    let mut client = Client::resume(&server, &session).await;
    let (bytes, _) = read_all(&mut client, "p", 0).await;
    assert_eq!(bytes, format!("{pid}\n").as_bytes());
}
