//! Requests take effect in order of arrival, and a waiting request delays no other.

use serde_json::json;

use crate::support::*;

/// The response to a start precedes every notification of its process, in many repetitions.
#[tokio::test]
async fn the_response_to_start_precedes_every_notification() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    for round in 0..50 {
        let mut answered = std::collections::HashSet::new();
        for n in 0..6 {
            let id = format!("{round}-{n}");
            let start = start(&id, &["echo", "hi"]).0;
            let request = json!({"id": id, "method": "process/start", "params": start});
            client.send(request.to_string()).await;
        }
        let mut closed = 0;
        while closed < 6 {
            let text = client.text().await.unwrap();
            let message: serde_json::Value = serde_json::from_str(&text).unwrap();
            match message["id"].as_str() {
                Some(id) => assert!(answered.insert(id.to_owned())),
                None => {
                    let id = message["params"]["processId"].as_str().unwrap();
                    assert!(answered.contains(id), "too early: {text}");
                    closed += usize::from(message["method"] == "process/closed");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_write_may_follow_its_start_without_waiting() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    for n in 0..100 {
        let id = format!("p{n}");
        let started = client.send_request("process/start", start(&id, &["cat"]).piped().0).await;
        let mut writes = Vec::new();
        for word in ["one ", "two ", "three"] {
            let write = json!({"processId": id, "chunk": base64(word.as_bytes())});
            writes.push(client.send_request("process/write", write).await);
        }
        let close = json!({"processId": id, "chunk": "", "closeStdin": true});
        writes.push(client.send_request("process/write", close).await);
        writes.push(client.send_request("process/read", json!({"processId": id})).await);
        client.response(started).await.unwrap();
        let read = client.response(writes.pop().unwrap()).await.unwrap();
        assert_eq!(read["failure"], json!(null));
        for write in writes {
            assert_eq!(client.response(write).await, Ok(json!({"status": "accepted"})));
        }
        assert_eq!(client.until_closed(&id).await.text(), "one two three");
    }
}

#[tokio::test]
async fn requests_to_a_failed_start_see_an_unknown_process() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for _ in 0..30 {
        let started = client.send_request("process/start", start("p", &["/nope"]).0).await;
        let write =
            client.send_request("process/write", json!({"processId": "p", "chunk": "eA=="})).await;
        let read =
            client.send_request("process/read", json!({"processId": "p", "waitMs": 100_000})).await;
        let terminate = client.send_request("process/terminate", json!({"processId": "p"})).await;
        assert_eq!(client.response(started).await.unwrap_err().code, -32603);
        assert_eq!(client.response(write).await, Ok(json!({"status": "unknownProcess"})));
        assert_eq!(client.response(read).await.unwrap_err().code, -32600);
        assert_eq!(client.response(terminate).await, Ok(json!({"running": false})));
    }
}

#[tokio::test]
async fn writes_are_applied_in_order_of_arrival() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let mut expected = String::new();
    for batch in 0..10 {
        let mut asked = Vec::new();
        for n in 0..1000 {
            let line = format!("{batch}.{n}\n");
            let write = json!({"processId": "p", "chunk": base64(line.as_bytes())});
            asked.push(client.send_request("process/write", write).await);
            expected.push_str(&line);
        }
        for id in asked {
            assert_eq!(client.response(id).await.unwrap()["status"], "accepted");
        }
    }
    client.close_stdin("p").await;
    assert_eq!(client.until_closed("p").await.text(), expected);
}

#[tokio::test]
async fn a_long_poll_delays_no_other_request() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let mut polls = Vec::new();
    for _ in 0..200 {
        polls.push(
            client
                .send_request("process/read", json!({"processId": "p", "waitMs": 1_000_000}))
                .await,
        );
    }
    client.call("environment/info", json!({})).await.unwrap();
    client.call("process/list", json!({})).await.unwrap();
    assert_eq!(client.run(sh("other", "echo hi")).await.text(), "hi\n");
    client.read(json!({"processId": "p"})).await;
    assert!(polls.iter().all(|&poll| !client.has_response(poll)));
    client.write("p", "x").await;
    for poll in polls {
        assert_eq!(bytes_of(&client.response(poll).await.unwrap()), b"x");
    }
}

/// With one request at a time, responses come in the order of the requests; a request that waits for a
/// process delays no other.
#[tokio::test]
async fn one_request_at_a_time_gets_responses_in_order() {
    let server = server_with(|config| config.concurrent_requests = 1);
    let mut client = Client::ready(&server).await;
    client.call("process/start", start("p", &["sleep", "1000"]).piped().0).await.unwrap();
    let waits = json!({"processId": "p", "waitMs": 600_000});
    let waiting = client.send_request("process/read", waits).await;
    // More than the pipe of its stdin holds.
    let much = json!({"processId": "p", "chunk": base64(&vec![b'x'; 2 << 20])});
    client.send_request("process/write", much.clone()).await;
    client.send_request("process/write", much).await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    for seed in 0..20u64 {
        let mut requests = Vec::new();
        for n in 0..8u64 {
            let mixed = (seed * 8 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
            requests.push(match mixed {
                0 | 1 => {
                    // Without the limit, this response would come last.
                    let params = json!({"method": "GET", "url": url, "headers": [], "timeoutMs": 30,
                        "requestId": format!("{seed}-{n}"), "streamResponse": false});
                    client.send_request("http/request", params).await
                }
                2 | 3 => client.send_request("fs/readFile", json!({"path": "/etc/passwd"})).await,
                4 => client.send_request("fs/getMetadata", json!({"path": "/"})).await,
                5 => {
                    let id = format!("{seed}-{n}");
                    client.send_request("process/start", start(&id, &["true"]).0).await
                }
                6 => client.send_request("process/list", json!({})).await,
                _ => client.send_request("environment/status", json!({})).await,
            });
        }
        let mut responses = Vec::new();
        while responses.len() < requests.len() {
            let message: serde_json::Value =
                serde_json::from_str(&client.text().await.unwrap()).unwrap();
            responses.extend(message["id"].as_i64().filter(|id| requests.contains(id)));
        }
        assert_eq!(responses, requests, "seed {seed}");
    }
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    assert_eq!(client.response(waiting).await.unwrap()["exitCode"], 137);
}

/// Of the changes that a connection asked for before it was cut, some take effect and then no more: in the files, and
/// in a file that is replaced block by block.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_leaves_the_first_of_its_changes() {
    const CASES: u64 = 60;
    let cases = std::env::var("CUT_CASES").map_or(CASES, |text| text.parse().unwrap());
    let server = server();
    let address = listen(&server).await;
    for seed in 0..cases {
        let mut random = fastrand::Rng::with_seed(seed);
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let uri = |name: &str| format!("file://{}", at(name).display());
        let mut client = Client::websocket(address).await;
        let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
        let pairs = random.usize(4..30);
        for n in 0..pairs {
            std::fs::write(at(&format!("a{n}")), vec![b'x'; random.usize(0..200_000)]).unwrap();
        }
        std::fs::write(at("replaced"), "old").unwrap();
        let block = base64(&[b'n'; 50_000]);
        let mut requests = Vec::new();
        for n in 0..pairs {
            let (from, to) = (format!("a{n}"), format!("b{n}"));
            let copy =
                json!({"sourcePath": uri(&from), "destinationPath": uri(&to), "recursive": false});
            requests.push(("fs/copy", copy));
            requests.push(("fs/remove", json!({"path": uri(&from)})));
        }
        let changes = requests.len();
        let open = json!({"handleId": "h", "path": uri("replaced"), "mode": "replaceAtomic"});
        requests.push(("fs/open", open));
        for n in 0..8 {
            let write = json!({"handleId": "h", "offset": n * 50_000, "chunk": block});
            requests.push(("fs/writeBlock", write));
        }
        requests.push(("fs/close", json!({"handleId": "h", "commit": true})));
        // The order of the two kinds differs.
        if random.bool() {
            requests.rotate_left(changes);
        }
        let mut ids = Vec::new();
        for (method, params) in requests {
            ids.push(client.send_request(method, params).await);
        }
        let answered = random.usize(..ids.len());
        client.response(ids[answered]).await.unwrap();
        drop(client);
        // Waits for what has begun.
        let mut next = Client::resume_at(address, &session).await;
        next.call("fs/getMetadata", json!({"path": uri("replaced")})).await.unwrap();
        next.call("fs/remove", json!({"path": uri("nothing")})).await.unwrap();
        let state: Vec<bool> = (0..pairs)
            .flat_map(|n| [at(&format!("b{n}")).exists(), !at(&format!("a{n}")).exists()])
            .collect();
        let done = state.iter().take_while(|done| **done).count();
        assert!(state[done..].iter().all(|done| !done), "seed {seed}: {state:?}");
        let replaced = std::fs::read(at("replaced")).unwrap();
        let is_whole = replaced == b"old" || replaced == [b'n'; 400_000];
        assert!(is_whole, "seed {seed}: {} bytes", replaced.len());
        next.close().await;
    }
}
