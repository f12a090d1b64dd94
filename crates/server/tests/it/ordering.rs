//! Requests take effect in the order they came, and nothing that waits delays another.

use serde_json::json;

use crate::support::*;

/// The answer to a start is the first word about its process, over and over again.
#[tokio::test]
async fn the_answer_to_start_precedes_every_notification() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.greet(json!({"clientName": "test"})).await.unwrap();
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
    client.greet(json!({"clientName": "test"})).await.unwrap();
    for n in 0..100 {
        let id = format!("p{n}");
        let started = client.ask("process/start", start(&id, &["cat"]).piped().0).await;
        let mut writes = Vec::new();
        for word in ["one ", "two ", "three"] {
            let write = json!({"processId": id, "chunk": base64(word.as_bytes())});
            writes.push(client.ask("process/write", write).await);
        }
        let close = json!({"processId": id, "chunk": "", "closeStdin": true});
        writes.push(client.ask("process/write", close).await);
        writes.push(client.ask("process/read", json!({"processId": id})).await);
        client.answer(started).await.unwrap();
        let read = client.answer(writes.pop().unwrap()).await.unwrap();
        assert_eq!(read["failure"], json!(null));
        for write in writes {
            assert_eq!(client.answer(write).await, Ok(json!({"status": "accepted"})));
        }
        assert_eq!(client.until_closed(&id).await.text(), "one two three");
    }
}

#[tokio::test]
async fn requests_to_a_start_that_fails_are_those_to_an_unknown_process() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for _ in 0..30 {
        let started = client.ask("process/start", start("p", &["/nope"]).0).await;
        let write = client.ask("process/write", json!({"processId": "p", "chunk": "eA=="})).await;
        let read = client.ask("process/read", json!({"processId": "p", "waitMs": 100_000})).await;
        let terminate = client.ask("process/terminate", json!({"processId": "p"})).await;
        assert_eq!(client.answer(started).await.unwrap_err().code, -32603);
        assert_eq!(client.answer(write).await, Ok(json!({"status": "unknownProcess"})));
        assert_eq!(client.answer(read).await.unwrap_err().code, -32600);
        assert_eq!(client.answer(terminate).await, Ok(json!({"running": false})));
    }
}

#[tokio::test]
async fn writes_are_applied_in_the_order_they_came() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let mut expected = String::new();
    for batch in 0..10 {
        let mut asked = Vec::new();
        for n in 0..1000 {
            let line = format!("{batch}.{n}\n");
            let write = json!({"processId": "p", "chunk": base64(line.as_bytes())});
            asked.push(client.ask("process/write", write).await);
            expected.push_str(&line);
        }
        for id in asked {
            assert_eq!(client.answer(id).await.unwrap()["status"], "accepted");
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
        polls
            .push(client.ask("process/read", json!({"processId": "p", "waitMs": 1_000_000})).await);
    }
    client.call("environment/info", json!({})).await.unwrap();
    client.call("process/list", json!({})).await.unwrap();
    assert_eq!(client.run(sh("other", "echo hi")).await.text(), "hi\n");
    client.read(json!({"processId": "p"})).await;
    assert!(polls.iter().all(|&poll| !client.has_answer(poll)));
    client.write("p", "x").await;
    for poll in polls {
        assert_eq!(bytes_of(&client.answer(poll).await.unwrap()), b"x");
    }
}

/// With one request at a time, answers come in the order of the requests; but what waits for a process
/// lets the others pass.
#[tokio::test]
async fn one_request_at_a_time_is_answered_in_order() {
    let server = server_with(|config| config.concurrent_requests = 1);
    let mut client = Client::ready(&server).await;
    client.call("process/start", start("p", &["sleep", "1000"]).piped().0).await.unwrap();
    let waits = json!({"processId": "p", "waitMs": 600_000});
    let waiting = client.ask("process/read", waits).await;
    // More than its stdin takes.
    let much = json!({"processId": "p", "chunk": base64(&vec![b'x'; 2 << 20])});
    client.ask("process/write", much.clone()).await;
    client.ask("process/write", much).await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    for seed in 0..20u64 {
        let mut asked = Vec::new();
        for n in 0..8u64 {
            let mixed = (seed * 8 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
            asked.push(match mixed {
                0 | 1 => {
                    // Answered last of all if nothing held the others back.
                    let params = json!({"method": "GET", "url": url, "headers": [], "timeoutMs": 30,
                        "requestId": format!("{seed}-{n}"), "streamResponse": false});
                    client.ask("http/request", params).await
                }
                2 | 3 => client.ask("fs/readFile", json!({"path": "/etc/passwd"})).await,
                4 => client.ask("fs/getMetadata", json!({"path": "/"})).await,
                5 => {
                    let id = format!("{seed}-{n}");
                    client.ask("process/start", start(&id, &["true"]).0).await
                }
                6 => client.ask("process/list", json!({})).await,
                _ => client.ask("environment/status", json!({})).await,
            });
        }
        let mut answered = Vec::new();
        while answered.len() < asked.len() {
            let message: serde_json::Value =
                serde_json::from_str(&client.text().await.unwrap()).unwrap();
            answered.extend(message["id"].as_i64().filter(|id| asked.contains(id)));
        }
        assert_eq!(answered, asked, "seed {seed}");
    }
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    assert_eq!(client.answer(waiting).await.unwrap()["exitCode"], 137);
}
