//! The rules of `process/read`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::*;

/// A `cat` that has published each of these as one chunk.
async fn cat_with(client: &mut Client, id: &str, chunks: &[&str]) {
    client.start(start(id, &["cat"]).piped()).await.unwrap();
    let mut all = Published::default();
    let mut text = String::new();
    for chunk in chunks {
        client.write(id, chunk).await;
        text.push_str(chunk);
        client.collect_until(id, &text, &mut all).await;
    }
    assert_eq!(all.last_seq, chunks.len() as u64);
}

fn seqs(read: &Value) -> Vec<u64> {
    let chunks = read["chunks"].as_array().unwrap();
    chunks.iter().map(|chunk| chunk["seq"].as_u64().unwrap()).collect()
}

const FOREVER: u64 = u64::MAX;

#[tokio::test]
async fn reads_return_chunks_after_a_number_repeatedly() {
    let server = server();
    let mut client = Client::ready(&server).await;
    cat_with(&mut client, "p", &["aaa", "bb", "c"]).await;
    for _ in 0..2 {
        for params in [json!({"processId": "p"}), json!({"processId": "p", "afterSeq": null})] {
            let read = client.read(params).await;
            assert_eq!(seqs(&read), [1, 2, 3]);
            assert_eq!(bytes_of(&read), b"aaabbc");
            assert_eq!(read["nextSeq"], 4);
            assert_eq!((&read["exited"], &read["exitCode"]), (&json!(false), &Value::Null));
            assert_eq!((&read["closed"], &read["failure"]), (&json!(false), &Value::Null));
            assert_eq!(read["sandboxDenied"], false);
            assert_eq!(read.get("droppedBytes"), None);
        }
    }
    for (after, expected) in [(0, &[1, 2, 3][..]), (1, &[2, 3]), (2, &[3]), (3, &[]), (1000, &[])] {
        let read = client.read(json!({"processId": "p", "afterSeq": after})).await;
        assert_eq!(seqs(&read), expected);
        assert_eq!(read["nextSeq"], 4);
    }
    let read = client.read(json!({"processId": "p", "afterSeq": u64::MAX, "waitMs": 1})).await;
    assert_eq!((seqs(&read), &read["nextSeq"]), (vec![], &json!(4)));
}

#[tokio::test]
async fn max_bytes_splits_between_chunks_and_returns_at_least_one() {
    let server = server();
    let mut client = Client::ready(&server).await;
    cat_with(&mut client, "p", &["aaa", "bb", "c"]).await;
    for (max, after, expected, next) in [
        (0, 0, &[1][..], 2),
        (2, 0, &[1], 2),
        (3, 0, &[1], 2),
        (4, 0, &[1], 2),
        (5, 0, &[1, 2], 3),
        (6, 0, &[1, 2, 3], 4),
        (1000, 0, &[1, 2, 3], 4),
        (1, 1, &[2], 3),
        (3, 1, &[2, 3], 4),
        (1, 3, &[], 4),
    ] {
        let read = client.read(json!({"processId": "p", "afterSeq": after, "maxBytes": max})).await;
        assert_eq!(seqs(&read), expected, "maxBytes {max} after {after}");
        assert_eq!(read["nextSeq"], next, "maxBytes {max} after {after}");
    }
    // With maxBytes, nextSeq follows the last chunk even if an exit follows.
    client.close_stdin("p").await;
    let mut waited = client.read(json!({"processId": "p", "afterSeq": 4, "waitMs": FOREVER})).await;
    assert_eq!(waited["closed"], true);
    waited = client.read(json!({"processId": "p", "maxBytes": 1000})).await;
    assert_eq!((seqs(&waited), &waited["nextSeq"]), (vec![1, 2, 3], &json!(4)));
    waited = client.read(json!({"processId": "p"})).await;
    assert_eq!((seqs(&waited), &waited["nextSeq"]), (vec![1, 2, 3], &json!(6)));
    waited = client.read(json!({"processId": "p", "afterSeq": 3, "maxBytes": 1000})).await;
    assert_eq!((seqs(&waited), &waited["nextSeq"]), (vec![], &json!(6)));
}

#[tokio::test]
async fn a_read_waits_for_output() {
    let server = server();
    let mut client = Client::ready(&server).await;
    cat_with(&mut client, "p", &["a"]).await;
    let read = client
        .send_request("process/read", json!({"processId": "p", "afterSeq": 1, "waitMs": FOREVER}))
        .await;
    client.nothing_more().await;
    assert!(!client.has_response(read));
    client.write("p", "b").await;
    let read = client.response(read).await.unwrap();
    assert_eq!((seqs(&read), bytes_of(&read)), (vec![2], b"b".to_vec()));
}

#[tokio::test]
async fn a_read_without_output_returns_after_its_wait() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    for wait in [json!(null), json!(0), json!(1), json!(50)] {
        let read = client.read(json!({"processId": "p", "waitMs": wait})).await;
        assert_eq!(
            (seqs(&read), &read["nextSeq"], &read["exited"]),
            (vec![], &json!(1), &json!(false))
        );
    }
}

#[tokio::test]
async fn concurrent_waiting_reads_are_all_woken() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..100 {
        waiting.push(
            client.send_request("process/read", json!({"processId": "p", "waitMs": FOREVER})).await,
        );
    }
    client.write("p", "x").await;
    for id in waiting {
        assert_eq!(bytes_of(&client.response(id).await.unwrap()), b"x");
    }
}

/// Consecutive reads, each after the last number seen, miss nothing, whatever the timing.
#[tokio::test]
async fn no_wake_up_is_lost() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script = "i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i+1)); done";
    client.start(sh("p", script)).await.unwrap();
    let (mut after, mut bytes) = (0, Vec::new());
    loop {
        let read =
            client.read(json!({"processId": "p", "afterSeq": after, "waitMs": FOREVER})).await;
        bytes.extend(bytes_of(&read));
        after = read["nextSeq"].as_u64().unwrap() - 1;
        if read["closed"] == true {
            break;
        }
    }
    let expected: String = (0..2000).map(|n| format!("{n}\n")).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), expected);
}

/// A grandchild holds the pipe: after the exit was seen, a read waits for more output instead of returning
/// at once.
#[tokio::test]
async fn a_read_after_the_exit_waits_for_the_close() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let gate = directory.path().join("gate");
    assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
    let script = r#"(read line < "$GATE"; echo late) & exit 7"#;
    client.start(sh("p", script).env("GATE", &gate)).await.unwrap();
    let read = client.read(json!({"processId": "p", "waitMs": FOREVER})).await;
    assert_eq!((&read["exited"], &read["exitCode"]), (&json!(true), &json!(7)));
    assert_eq!((&read["closed"], &read["nextSeq"]), (&json!(false), &json!(2)));
    // A read returns for the exit once, unless the client has already seen it.
    let again = client.read(json!({"processId": "p", "waitMs": FOREVER})).await;
    assert_eq!(again["exited"], true);
    let after = json!({"processId": "p", "afterSeq": 1, "waitMs": FOREVER});
    let waiting = client.send_request("process/read", after).await;
    client.read(json!({"processId": "p", "afterSeq": 1})).await;
    assert!(!client.has_response(waiting), "it spins");
    std::fs::write(&gate, "go\n").unwrap();
    let late = client.response(waiting).await.unwrap();
    assert_eq!((seqs(&late), bytes_of(&late)), (vec![2], b"late\n".to_vec()));
    let closed = client.read(json!({"processId": "p", "afterSeq": 2, "waitMs": FOREVER})).await;
    assert_eq!((seqs(&closed), &closed["closed"]), (vec![], &json!(true)));
    assert_eq!(closed["nextSeq"], 4);
}

#[tokio::test]
async fn a_read_after_a_future_number_waits_for_the_close() {
    let server = server();
    let mut client = Client::ready(&server).await;
    cat_with(&mut client, "p", &["a"]).await;
    let waiting = client
        .send_request(
            "process/read",
            json!({"processId": "p", "afterSeq": 1000, "waitMs": FOREVER}),
        )
        .await;
    client.write("p", "b").await;
    client.read(json!({"processId": "p", "afterSeq": 1, "waitMs": FOREVER})).await;
    assert!(!client.has_response(waiting), "b is not from after 1000");
    client.close_stdin("p").await;
    let read = client.response(waiting).await.unwrap();
    assert_eq!((&read["chunks"], &read["closed"]), (&json!([]), &json!(true)));
    assert_eq!((&read["exitCode"], &read["nextSeq"]), (&json!(0), &json!(5)));
}

#[tokio::test]
async fn a_read_of_a_closed_process_returns_at_once() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.run(sh("p", "echo hi")).await;
    let read = client.read(json!({"processId": "p", "afterSeq": 1000, "waitMs": FOREVER})).await;
    assert_eq!((&read["closed"], &read["exitCode"]), (&json!(true), &json!(0)));
}

#[tokio::test]
async fn a_process_can_be_read_as_closed_until_it_is_forgotten() {
    let server = server_with(|config| config.process.closed_linger = Duration::ZERO);
    let mut client = Client::ready(&server).await;
    client.run(sh("p", "")).await;
    assert_eq!(client.until_forgotten("p").await.code, -32600);
}

/// Dropped output is counted to the byte.
#[tokio::test]
async fn dropped_bytes_are_counted() {
    let server = server_with(|config| config.process.retain_bytes = 10);
    let mut client = Client::ready(&server).await;
    cat_with(&mut client, "p", &["aaaa", "bbb", "cccc", "dd"]).await;
    // The last three are nine bytes; the first was dropped.
    let read = client.read(json!({"processId": "p"})).await;
    assert_eq!((seqs(&read), &read["droppedBytes"]), (vec![2, 3, 4], &json!(4)));
    let read = client.read(json!({"processId": "p", "afterSeq": 1})).await;
    assert_eq!((seqs(&read), read.get("droppedBytes")), (vec![2, 3, 4], None));
    let read = client.read(json!({"processId": "p", "maxBytes": 1})).await;
    assert_eq!((seqs(&read), &read["droppedBytes"]), (vec![2], &json!(4)));
}

#[tokio::test]
async fn the_number_of_chunks_is_bounded_too() {
    let server = server_with(|config| config.process.retain_chunks = 3);
    let mut client = Client::ready(&server).await;
    cat_with(&mut client, "p", &["a", "b", "c", "d", "e"]).await;
    let read = client.read(json!({"processId": "p"})).await;
    assert_eq!((seqs(&read), &read["droppedBytes"]), (vec![3, 4, 5], &json!(2)));
}

/// `until: "read"` retains the requested number of bytes until a read, and then the process continues.
#[tokio::test]
async fn retain_until_read_retains_the_requested_bytes() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let numbers: String = (1..=300_000).map(|n| format!("{n}\n")).collect();
    for kept in [1, 2, 7, 4096, 65_537, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 600_000] {
        let id = format!("p{kept}");
        let total = kept * 2 + 5;
        let retain = json!({"bytes": kept, "until": "read"});
        let script = format!("seq 1 300000 | head -c {total}");
        client.start(sh(&id, &script).with("retain", retain)).await.unwrap();
        // A read from the beginning acknowledges nothing.
        let filled = async {
            loop {
                let held = bytes_of(&client.read(json!({"processId": id, "afterSeq": 0})).await);
                assert!(held.len() <= kept, "{} of {kept}", held.len());
                if held.len() == kept {
                    break held;
                }
            }
        };
        let held = tokio::time::timeout(PATIENCE, filled).await.expect("it stalls");
        assert!(held == numbers.as_bytes()[..kept], "{kept}");
        let (mut after, mut all) = (0, Vec::new());
        while all.len() < total {
            let params = json!({"processId": id, "afterSeq": after, "waitMs": 1_000_000});
            let read = client.read(params).await;
            assert_eq!(read.get("droppedBytes"), None);
            after = seqs(&read).last().copied().unwrap_or(after);
            all.extend(bytes_of(&read));
        }
        assert!(all == numbers.as_bytes()[..total], "{kept}");
    }
}
