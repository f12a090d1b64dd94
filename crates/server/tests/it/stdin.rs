//! Input of processes.

use serde_json::{Value, json};

use crate::support::*;

#[tokio::test]
async fn without_a_pipe_stdin_is_empty_and_cannot_be_written() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let all = client.run(start("p", &["cat"])).await;
    assert_eq!((all.text(), all.exit_code), (String::new(), 0));
    client.start(start("q", &["sleep", "1000"])).await.unwrap();
    assert_eq!(client.write("q", "x").await, "stdinClosed");
    assert_eq!(client.close_stdin("q").await, "stdinClosed");
    assert_eq!(client.write("p", "x").await, "stdinClosed", "exited and closed");
}

#[tokio::test]
async fn a_pipe_is_written_in_order_and_closed_on_request() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    assert_eq!(client.write("p", "one ").await, "accepted");
    assert_eq!(client.write("p", "").await, "accepted");
    let last = json!({"processId": "p", "chunk": base64(b"two"), "closeStdin": true});
    let answer = client.call("process/write", last).await.unwrap();
    assert_eq!(answer, json!({"status": "accepted"}));
    assert_eq!(client.write("p", "three").await, "stdinClosed");
    let all = client.until_closed("p").await;
    assert_eq!((all.text(), all.exit_code), ("one two".into(), 0));
}

#[tokio::test]
async fn a_retried_write_is_written_once() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let write = |text: &str, id: &str, close: bool| json!({"processId": "p", "chunk": base64(text.as_bytes()), "writeId": id, "closeStdin": close});
    for (text, id) in [("a", "1"), ("b", "2"), ("a", "1"), ("b", "2"), ("changed", "1"), ("c", "3")]
    {
        let answer = client.call("process/write", write(text, id, false)).await.unwrap();
        assert_eq!(answer, json!({"status": "accepted"}));
    }
    // Pipelined, so that both are pending at once.
    let first = client.send_request("process/write", write("d", "4", false)).await;
    let again = client.send_request("process/write", write("d", "4", false)).await;
    assert_eq!(client.response(first).await, client.response(again).await);
    client.call("process/write", write("", "5", true)).await.unwrap();
    let retried = client.call("process/write", write("", "5", true)).await.unwrap();
    assert_eq!(
        retried,
        json!({"status": "accepted"}),
        "what was accepted stays so after the close"
    );
    let late = client.call("process/write", write("e", "6", false)).await.unwrap();
    assert_eq!(late, json!({"status": "stdinClosed"}));
    assert_eq!(client.until_closed("p").await.text(), "abcd");
}

#[tokio::test]
async fn the_last_4096_write_ids_are_remembered() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let write = |n: usize| json!({"processId": "p", "chunk": "eA==", "writeId": n.to_string()});
    for batch in 0..8 {
        let mut ids = Vec::new();
        for n in 0..512 {
            ids.push(client.send_request("process/write", write(batch * 512 + n)).await);
        }
        for id in ids {
            assert_eq!(client.response(id).await.unwrap()["status"], "accepted");
        }
    }
    client.call("process/write", write(0)).await.unwrap();
    client.close_stdin("p").await;
    assert_eq!(client.until_closed("p").await.stdout.len(), 4096);
}

#[tokio::test]
async fn a_process_that_never_reads_delays_no_other_request() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("deaf", "echo $$; exec sleep 1000").piped()).await.unwrap();
    client.start(start("cat", &["cat"]).piped()).await.unwrap();
    let pid = numbers(&client.until("deaf", "\n").await.text())[0];
    let megabyte = base64(&vec![b'x'; 1 << 20]);
    let mut asked = Vec::new();
    for _ in 0..5 {
        let write = json!({"processId": "deaf", "chunk": megabyte});
        asked.push(client.send_request("process/write", write).await);
    }
    assert_eq!(client.response(asked[0]).await.unwrap()["status"], "accepted");
    // Other processes, and other requests to the same one, are not delayed.
    assert_eq!(client.write("cat", "hello").await, "accepted");
    client.close_stdin("cat").await;
    assert_eq!(client.until_closed("cat").await.text(), "hello");
    client.read(json!({"processId": "deaf"})).await;
    client.call("process/list", json!({})).await.unwrap();
    assert!(!client.has_response(asked[4]), "accepted without bound");
    let running = client.call("process/terminate", json!({"processId": "deaf"})).await.unwrap();
    assert_eq!(running, json!({"running": true}));
    for id in asked.into_iter().skip(1) {
        let status = client.response(id).await.unwrap()["status"].clone();
        assert!(status == "accepted" || status == "stdinClosed", "{status}");
    }
    gone(pid).await;
}

/// A process that reads slowly gets every byte.
#[tokio::test]
async fn more_than_the_queue_holds_arrives_in_order() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "sleep 0.2; exec cksum").piped()).await.unwrap();
    let block: Vec<u8> = (0..=255u8).cycle().take(700_001).collect();
    let mut asked = Vec::new();
    for _ in 0..8 {
        let write = json!({"processId": "p", "chunk": base64(&block)});
        asked.push(client.send_request("process/write", write).await);
    }
    asked.push(
        client
            .send_request(
                "process/write",
                json!({"processId": "p", "chunk": "", "closeStdin": true}),
            )
            .await,
    );
    for id in asked {
        assert_eq!(client.response(id).await.unwrap()["status"], "accepted");
    }
    let all = client.until_closed("p").await;
    let expected = {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), block.repeat(8)).unwrap();
        let input = std::fs::File::open(file.path()).unwrap();
        std::process::Command::new("cksum").stdin(input).output().unwrap().stdout
    };
    assert_eq!(all.stdout, expected);
}

#[tokio::test]
async fn writing_to_a_closed_stdin_affects_no_other_request() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "exec <&-; echo closed; exec sleep 1000").piped()).await.unwrap();
    let mut seen = client.until("p", "closed").await;
    let mut status = client.write("p", "into the void").await;
    // The pipe is found broken when the bytes are written, which is after they are accepted.
    while status == "accepted" {
        status = client.write("p", "x").await;
    }
    assert_eq!(status, "stdinClosed");
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    seen = client.collect_until_closed("p", seen).await;
    assert_eq!(seen.exit_code, 137);
}

#[tokio::test]
async fn a_missing_write_id_and_a_null_one_are_the_same() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    for _ in 0..2 {
        let write = json!({"processId": "p", "chunk": "eA==", "writeId": Value::Null});
        client.call("process/write", write).await.unwrap();
        assert_eq!(client.write("p", "y").await, "accepted");
    }
    client.close_stdin("p").await;
    assert_eq!(client.until_closed("p").await.text(), "xyxy", "each is a write of its own");
}
