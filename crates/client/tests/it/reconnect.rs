//! Dropped connections, against a scripted server: what the client repeats, and what it reports.

use std::time::Duration;

use codex_exec_client::protocol::files::FsWatchParams;
use codex_exec_client::protocol::process::ProcessSignal;
use codex_exec_client::protocol::process::{ReadParams, SignalParams};
use codex_exec_client::{
    ConnectionStatus, ErrorKind, ExecCommand, ExecServerClient, ExecServerError, Lost, ProcessEvent,
};
use futures_util::StreamExt;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use crate::support::{Fake, base64, connect, go, soon};

/// Accepts the next connection and resumes the session on it.
async fn resumed(dialled: &mut mpsc::UnboundedReceiver<Fake>) -> Fake {
    let mut fake = soon(dialled.recv()).await.unwrap();
    let asked = fake.accept_initialize(json!({"processCloseStdin": true})).await;
    assert_eq!(asked.params["resumeSessionId"], "s1");
    fake
}

#[tokio::test]
async fn missed_output_is_read_and_repeats_are_delivered_once() {
    let (client, mut fake, mut dialled) = connect(json!({})).await;
    let spawning = go({
        let client = client.clone();
        async move { client.spawn(ExecCommand::new(["x"])).await }
    });
    let id = fake.accept_start().await;
    let mut process = spawning.await.unwrap().unwrap();
    fake.output(&id, 1, "one").await;
    assert!(matches!(process.next_event().await, Some(ProcessEvent::Output { .. })));
    drop(fake);

    let mut fake = resumed(&mut dialled).await;
    fake.output(&id, 4, "four").await;
    let read = fake.expect("process/read").await;
    assert_eq!(read.params["afterSeq"], 1);
    let chunk = |seq: u64, text: &str| json!({"seq": seq, "stream": "stdout", "chunk": base64(text.as_bytes())});
    let chunks = json!([chunk(2, "two"), chunk(3, "three"), chunk(4, "four")]);
    fake.reply(&read, json!({"chunks": chunks, "nextSeq": 5, "exited": false, "closed": false}))
        .await;
    let read = fake.expect("process/read").await;
    assert_eq!(read.params["afterSeq"], 4);
    fake.reply(&read, json!({"chunks": [], "nextSeq": 5, "exited": false, "closed": false})).await;
    fake.exited(&id, 5, 0).await;
    fake.closed(&id, 6).await;
    let output = soon(process.wait_with_output()).await.unwrap();
    assert_eq!(output.stdout, b"twothreefour");
}

#[tokio::test]
async fn unacknowledged_writes_are_repeated_in_order_with_their_ids() {
    let (client, mut fake, mut dialled) = connect(json!({})).await;
    let spawning = go(async move { client.spawn(ExecCommand::new(["x"]).pipe_stdin()).await });
    fake.accept_start().await;
    let mut process = spawning.await.unwrap().unwrap();
    let mut stdin = process.take_stdin().unwrap();
    for text in ["a", "b", "c", "d"] {
        stdin.write_all(text.as_bytes()).await.unwrap();
    }
    let first = fake.expect("process/write").await;
    fake.reply(&first, json!({"status": "accepted"})).await;
    let mut lost = Vec::new();
    for _ in 0..3 {
        lost.push(fake.expect("process/write").await.params);
    }
    drop(fake);

    let mut fake = resumed(&mut dialled).await;
    let mut again = Vec::new();
    while again.len() < 3 {
        let asked = fake.next_request().await;
        match asked.method.as_str() {
            "process/write" => {
                fake.reply(&asked, json!({"status": "accepted"})).await;
                again.push(asked.params);
            }
            _ => fake.reply(&asked, json!({"chunks": [], "nextSeq": 1})).await,
        }
    }
    assert_eq!(again, lost);
    soon(stdin.flush()).await.unwrap();
}

#[tokio::test]
async fn a_watch_registers_again_and_reports_an_overflow() {
    let (client, mut fake, mut dialled) = connect(json!({"fsWatch": true})).await;
    let params = FsWatchParams::new(0, "/a".parse().unwrap());
    let watching = go(async move { client.files().watch(params).await });
    let asked = fake.expect("fs/watch").await;
    let id = asked.params["watchId"].clone();
    fake.reply(&asked, json!({})).await;
    let mut watch = soon(watching).await.unwrap().unwrap();
    let change = |name: &str| json!({"path": format!("file:///a/{name}"), "kind": "created"});
    let other = json!({"watchId": -1, "changes": [change("other")]});
    fake.notify("fs/changed", other).await;
    fake.notify("fs/changed", json!({"watchId": id, "changes": [change("one")]})).await;
    let told = soon(watch.next()).await.unwrap().unwrap();
    assert_eq!(
        (told.changes[0].path.to_string().as_str(), told.overflow),
        ("file:///a/one", false)
    );
    drop(fake);

    let mut fake = resumed(&mut dialled).await;
    let again = fake.expect("fs/watch").await;
    assert_eq!(again.params, asked.params);
    // This connection dies too, before the response: the client has to check whether the watch exists.
    drop(fake);
    let mut fake = resumed(&mut dialled).await;
    let asked = fake.expect("fs/unwatch").await;
    fake.reply(&asked, json!({})).await;
    let asked = fake.expect("fs/watch").await;
    fake.reply(&asked, json!({})).await;
    let told = soon(watch.next()).await.unwrap().unwrap();
    assert!(told.changes.is_empty() && told.overflow, "{told:?}");
    fake.notify("fs/changed", json!({"watchId": id, "changes": [change("two")]})).await;
    assert_eq!(soon(watch.next()).await.unwrap().unwrap().changes.len(), 1);
    fake.notify("fs/changed", json!({"watchId": id, "changes": [], "ended": "it is gone"})).await;
    let error = soon(watch.next()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("it is gone"), "{error}");
    assert!(soon(watch.next()).await.is_none());
    assert_eq!(fake.expect("fs/unwatch").await.params["watchId"], id);
}

#[tokio::test]
async fn reads_are_repeated_and_other_requests_may_have_taken_effect() {
    let (client, mut fake, mut dialled) = connect(json!({})).await;
    let reading = go({
        let client = client.clone();
        let params = ReadParams {
            process_id: "p".into(),
            after_seq: Some(3),
            max_bytes: None,
            wait_ms: Some(60_000),
        };
        async move { client.process_read(params).await }
    });
    fake.expect("process/read").await;
    let signalling = go({
        let client = client.clone();
        let params = SignalParams { process_id: "p".into(), signal: ProcessSignal::Interrupt };
        async move { client.process_signal(params).await }
    });
    fake.expect("process/signal").await;
    drop(fake);

    let error = soon(signalling).await.unwrap().unwrap_err();
    assert!(matches!(error, ExecServerError::Lost(Lost::Response { method: "process/signal" })));
    assert!(error.may_have_taken_effect(), "{error}");
    let mut fake = resumed(&mut dialled).await;
    let asked = fake.expect("process/read").await;
    assert_eq!((&asked.params["afterSeq"], &asked.params["waitMs"]), (&json!(3), &json!(60_000)));
    fake.reply(&asked, json!({"chunks": [], "nextSeq": 4})).await;
    assert_eq!(soon(reading).await.unwrap().unwrap().next_seq, 4);
}

#[tokio::test]
async fn a_call_without_a_connection_waits_for_one() {
    let (client, fake, mut dialled) = connect(json!({})).await;
    let mut status = client.status();
    drop(fake);
    soon(status.wait_for(|now| matches!(now, ConnectionStatus::Reconnecting { .. })))
        .await
        .unwrap();
    let signalling = go(async move {
        let params = SignalParams { process_id: "p".into(), signal: ProcessSignal::Interrupt };
        client.process_signal(params).await
    });
    let mut fake = resumed(&mut dialled).await;
    let asked = fake.expect("process/signal").await;
    fake.reply(&asked, json!({})).await;
    soon(signalling).await.unwrap().unwrap();
}

/// The result of a start whose response was lost and whose repetition is refused with this message.
async fn repeated_start(words: &str, kind: Option<&str>) -> Result<(), ExecServerError> {
    let (client, mut fake, mut dialled) = connect(json!({})).await;
    let spawning = go(async move { client.spawn(ExecCommand::new(["x"])).await });
    let first = fake.expect("process/start").await;
    drop(fake);
    let mut fake = resumed(&mut dialled).await;
    let again = fake.expect("process/start").await;
    assert_eq!(again.params, first.params);
    match kind {
        Some(kind) => fake.refuse_as(&again, -32600, words, kind).await,
        None => fake.refuse(&again, -32600, words).await,
    }
    soon(spawning).await.unwrap().map(drop)
}

#[tokio::test]
async fn a_start_whose_response_was_lost_succeeds() {
    repeated_start("process p already exists", None).await.unwrap();
}

#[tokio::test]
async fn a_start_that_is_refused_twice_is_refused() {
    let error = repeated_start("no", None).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Server { method: "process/start", .. }), "{error}");
}

#[tokio::test]
async fn a_repeated_start_is_judged_by_the_errors_kind_not_its_message() {
    repeated_start("Prozess vorhanden", Some("processExists")).await.unwrap();
    for kind in ["sessionEnded", "invalidParams", "ofTomorrow"] {
        let error = repeated_start("process p already exists", Some(kind)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::from_name(kind), "{error}");
    }
}

#[tokio::test]
async fn the_kind_decides_that_a_process_is_unknown() {
    for (words, kind, gone) in
        [("nix da", "unknownProcess", true), ("unknown process id p", "ofTomorrow", false)]
    {
        let (client, mut fake, mut dialled) = connect(json!({})).await;
        let mut process = running(&client, &mut fake).await;
        drop(fake);
        let mut fake = resumed(&mut dialled).await;
        let read = fake.expect("process/read").await;
        fake.refuse_as(&read, -32600, words, kind).await;
        match soon(process.next_event()).await {
            Some(ProcessEvent::Failed(ExecServerError::Lost(Lost::Process { .. }))) => {
                assert!(gone, "{kind}");
            }
            Some(ProcessEvent::Failed(error)) => {
                assert_eq!((error.kind(), gone), (ErrorKind::Unknown, false), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}

async fn running(client: &ExecServerClient, fake: &mut Fake) -> codex_exec_client::Process {
    let spawning = go({
        let client = client.clone();
        async move { client.spawn(ExecCommand::new(["x"])).await }
    });
    fake.accept_start().await;
    spawning.await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_lost_session_fails_every_call_and_process() {
    let (client, mut fake, mut dialled) = connect(json!({})).await;
    let mut process = running(&client, &mut fake).await;
    drop(fake);
    let mut fake = dialled.recv().await.unwrap();
    let asked = fake.expect("initialize").await;
    fake.refuse(&asked, -32600, "unknown session id s1").await;
    match process.next_event().await {
        Some(ProcessEvent::Failed(ExecServerError::Lost(Lost::Session { session, reason }))) => {
            assert_eq!(session.as_deref(), Some("s1"));
            assert!(reason.contains("unknown session id s1"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(process.next_event().await.is_none());
    process.wait().await.unwrap_err();
    client.environment_status().await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn resuming_is_retried_while_the_server_holds_the_session() {
    let (client, fake, mut dialled) = connect(json!({})).await;
    drop(fake);
    let began = tokio::time::Instant::now();
    let held = go(async move {
        let mut times = 0;
        while let Some(mut fake) = dialled.recv().await {
            let asked = fake.expect("initialize").await;
            fake.refuse(&asked, -32010, "attached to another connection").await;
            times += 1;
        }
        times
    });
    let error = client.environment_status().await.unwrap_err();
    assert!(error.to_string().contains("attached to another connection"), "{error}");
    let took = began.elapsed();
    assert!(took > Duration::from_secs(110) && took <= Duration::from_secs(120), "{took:?}");
    drop(client);
    let times = held.await.unwrap();
    assert!((20..45).contains(&times), "waits grow: {times}");
}

#[tokio::test(start_paused = true)]
async fn a_new_session_instead_of_the_old_one_is_a_loss() {
    let (client, fake, mut dialled) = connect(json!({})).await;
    drop(fake);
    let mut fake = dialled.recv().await.unwrap();
    let asked = fake.expect("initialize").await;
    fake.reply(&asked, json!({"sessionId": "other"})).await;
    let error = client.environment_status().await.unwrap_err();
    assert!(matches!(error, ExecServerError::Lost(Lost::Session { .. })), "{error}");
}

#[tokio::test]
async fn closing_the_client_ends_a_reconnect() {
    let (client, fake, dialled) = connect(json!({})).await;
    drop((fake, dialled));
    soon(client.close()).await;
    let error = client.environment_status().await.unwrap_err();
    assert!(matches!(error, ExecServerError::Closed { .. }), "{error}");
}
