//! Process handles against a scripted server: order, windows, input.

use std::time::Duration;

use codex_exec_client::{
    ExecCommand, ExecServerClient, ExecServerError, OnSlowConsumer, OutputStream, Process,
    ProcessEvent,
};
use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::support::{Fake, base64, connect, go, soon, unbase64};

async fn spawn(
    client: &ExecServerClient,
    fake: &mut Fake,
    command: ExecCommand,
) -> (Process, String) {
    let spawning = go({
        let client = client.clone();
        async move { client.spawn(command).await }
    });
    let id = fake.accept_start().await;
    (spawning.await.unwrap().unwrap(), id)
}

async fn text(process: &mut Process) -> String {
    match soon(process.next_event()).await {
        Some(ProcessEvent::Output { bytes, .. }) => String::from_utf8(bytes.to_vec()).unwrap(),
        other => format!("{other:?}"),
    }
}

#[tokio::test]
async fn a_start_sends_the_commands_settings() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let command = ExecCommand::new(["ls", "-l"]).env("A", "b").arg("x").arg0("dir");
    let _spawning = go(async move { client.spawn(command).await });
    let asked = fake.expect("process/start").await;
    let params = &asked.params;
    assert_eq!(params["argv"], json!(["ls", "-l", "x"]));
    assert_eq!(params["cwd"], "file:///srv", "where the server is");
    assert_eq!((&params["env"], &params["arg0"]), (&json!({"A": "b"}), &json!("dir")));
    assert_eq!(params["envPolicy"]["inherit"], "all");
    assert!(params.get("retain").is_none(), "no extension that the server does not have");
}

#[tokio::test(start_paused = true)]
async fn early_late_and_repeated_events_are_delivered_in_order_once() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let spawning = go(async move { client.spawn(ExecCommand::new(["x"])).await });
    let asked = fake.expect("process/start").await;
    let id = asked.params["processId"].as_str().unwrap().to_owned();
    // Before the response, out of order, twice.
    fake.closed(&id, 4).await;
    fake.output(&id, 2, "b").await;
    fake.output(&id, 2, "b").await;
    fake.exited(&id, 3, 7).await;
    fake.reply(&asked, json!({"processId": id, "sandboxType": "linuxSeccomp"})).await;
    let mut process = spawning.await.unwrap().unwrap();
    assert_eq!(process.wait().await.unwrap().code, 7);
    // The first event is missing, so the client reads it after a while.
    let read = fake.expect("process/read").await;
    assert_eq!(read.params["afterSeq"], 0);
    let chunks = json!([{"seq": 1, "stream": "stderr", "chunk": base64(b"a")}]);
    fake.reply(
        &read,
        json!({"chunks": chunks, "nextSeq": 2, "exited": true, "exitCode": 7,
        "closed": true, "failure": null}),
    )
    .await;
    let first = process.next_event().await.unwrap();
    assert!(matches!(first, ProcessEvent::Output { stream: OutputStream::Stderr, .. }));
    assert_eq!(text(&mut process).await, "b");
    assert!(matches!(process.next_event().await, Some(ProcessEvent::Exited(_))));
    assert!(matches!(process.next_event().await, Some(ProcessEvent::Closed)));
    assert!(process.next_event().await.is_none());
}

#[tokio::test]
async fn events_of_an_older_server_without_numbers_are_delivered() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let (process, id) = spawn(&client, &mut fake, ExecCommand::new(["x"])).await;
    assert_eq!(process.sandbox_type(), None);
    fake.output(&id, 1, "hi").await;
    fake.notify("process/exited", json!({"processId": id, "seq": 2, "exitCode": 0})).await;
    fake.notify("process/closed", json!({"processId": id})).await;
    let waiting = go(process.wait_with_output());
    let read = fake.expect("process/read").await;
    assert_eq!(read.params["afterSeq"], 2);
    fake.reply(
        &read,
        json!({"chunks": [], "nextSeq": 3, "exited": true, "exitCode": 0, "closed": true,
        "failure": null}),
    )
    .await;
    assert_eq!(soon(waiting).await.unwrap().unwrap().stdout, b"hi");
}

#[tokio::test]
async fn a_full_window_delays_no_other_process_and_refetches_nothing() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let (mut slow, slow_id) = spawn(&client, &mut fake, ExecCommand::new(["x"]).window(1000)).await;
    let (mut quick, quick_id) = spawn(&client, &mut fake, ExecCommand::new(["y"])).await;
    let piece = "s".repeat(800);
    for seq in 1..=5 {
        fake.output(&slow_id, seq, &piece).await;
    }
    fake.output(&quick_id, 1, "quick").await;
    assert_eq!(text(&mut quick).await, "quick");

    for _ in 1..=5 {
        assert_eq!(soon(text(&mut slow)).await, piece);
    }
    let call = go(async move { client.environment_status().await });
    let asked = fake.expect("environment/status").await;
    fake.reply(&asked, json!({"status": "ready"})).await;
    soon(call).await.unwrap().unwrap();
}

#[tokio::test]
async fn hold_connection_stops_reading_at_a_full_window() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let command =
        ExecCommand::new(["x"]).window(1000).on_slow_consumer(OnSlowConsumer::HoldConnection);
    let (mut slow, id) = spawn(&client, &mut fake, command).await;
    let piece = "s".repeat(800);
    for seq in 1..=3 {
        fake.output(&id, seq, &piece).await;
    }
    let call = go(async move { client.environment_status().await });
    let asked = fake.expect("environment/status").await;
    fake.reply(&asked, json!({"status": "ready"})).await;
    tokio::task::yield_now().await;
    assert!(!call.is_finished(), "behind what is not taken");
    for _ in 0..3 {
        assert_eq!(text(&mut slow).await, piece);
    }
    soon(call).await.unwrap().unwrap();
}

#[tokio::test]
async fn writes_have_ids_and_go_in_order_within_the_window() {
    let (client, mut fake, _dialled) = connect(json!({"processCloseStdin": true})).await;
    let (mut process, id) = spawn(&client, &mut fake, ExecCommand::new(["x"]).pipe_stdin()).await;
    let mut stdin = process.take_stdin().unwrap();
    let writing = go(async move {
        stdin.write_all(&vec![b'x'; 1 << 20]).await.unwrap();
        stdin.shutdown().await.unwrap();
    });
    let (mut ids, mut bytes) = (std::collections::HashSet::new(), 0);
    // The first write goes alone, since the process may still be starting.
    let first = fake.expect("process/write").await;
    fake.reply(&first, json!({"status": "starting"})).await;
    let mut asked = fake.expect("process/write").await;
    assert_eq!(asked.params["writeId"], first.params["writeId"]);
    loop {
        assert_eq!(asked.params["processId"], json!(id));
        assert!(ids.insert(asked.params["writeId"].as_str().unwrap().to_owned()));
        bytes += unbase64(&asked.params["chunk"]).len();
        fake.reply(&asked, json!({"status": "accepted"})).await;
        if asked.params["closeStdin"] == json!(true) {
            break;
        }
        asked = fake.expect("process/write").await;
    }
    assert_eq!(bytes, 1 << 20);
    soon(writing).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_writer_waits_for_input_to_be_accepted() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let (mut process, _) = spawn(&client, &mut fake, ExecCommand::new(["x"]).pipe_stdin()).await;
    let mut stdin = process.take_stdin().unwrap();
    let text = vec![b'x'; 1 << 20];
    let writing = tokio::time::timeout(Duration::from_secs(60), stdin.write_all(&text)).await;
    assert!(writing.is_err(), "256 KiB wait, no more");
    fake.expect("process/write").await;
}

#[tokio::test]
async fn refused_input_is_an_error() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let (mut process, _) = spawn(&client, &mut fake, ExecCommand::new(["x"]).pipe_stdin()).await;
    let mut stdin = process.take_stdin().unwrap();
    stdin.write_all(b"x").await.unwrap();
    let asked = fake.expect("process/write").await;
    fake.reply(&asked, json!({"status": "stdinClosed"})).await;
    let error = soon(stdin.flush()).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe, "{error}");
}

#[tokio::test]
async fn a_failed_start_leaves_nothing_behind() {
    let (client, mut fake, _dialled) = connect(json!({"processCloseStdin": true})).await;
    let command = || ExecCommand::new(["x"]).process_id("same").pipe_stdin();
    for _ in 0..2 {
        let spawning = go({
            let client = client.clone();
            async move { client.spawn(command()).await }
        });
        let asked = fake.expect("process/start").await;
        fake.refuse(&asked, -32603, "No such file or directory (os error 2)").await;
        let error = spawning.await.unwrap().unwrap_err();
        assert!(matches!(error, ExecServerError::Server { code: -32603, .. }), "{error}");
    }
}

#[tokio::test]
async fn a_process_can_have_only_one_handle() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let command = || ExecCommand::new(["x"]).process_id("one");
    let (_process, _) = spawn(&client, &mut fake, command()).await;
    let error = client.spawn(command()).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Invalid(_)), "{error}");
}

#[tokio::test]
async fn a_streamed_body_arrives_in_order_and_ends() {
    use codex_exec_client::protocol::http::HttpRequestParams;
    use futures_util::TryStreamExt;
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let params = json!({"method": "GET", "url": "http://example.org", "requestId": ""});
    let params: HttpRequestParams = serde_json::from_value(params).unwrap();
    let ask = |client: ExecServerClient, params: HttpRequestParams| {
        go(async move { client.http_stream(params).await })
    };
    let asking = ask(client.clone(), params.clone());
    let asked = fake.expect("http/request").await;
    let id = asked.params["requestId"].clone();
    assert_eq!(asked.params["streamResponse"], true);
    fake.reply(&asked, json!({"status": 200, "headers": [], "bodyBase64": ""})).await;
    let (head, body) = asking.await.unwrap().unwrap();
    assert_eq!(head.status, 200);
    for (seq, text, done) in [(1, "one", false), (2, "two", false), (3, "", true)] {
        let delta = base64(text.as_bytes());
        let other =
            json!({"requestId": "other", "seq": 9, "deltaBase64": "", "done": true, "error": null});
        fake.notify("http/request/bodyDelta", other).await;
        let piece =
            json!({"requestId": id, "seq": seq, "deltaBase64": delta, "done": done, "error": null});
        fake.notify("http/request/bodyDelta", piece).await;
    }
    let pieces: Vec<_> = soon(body.try_collect()).await.unwrap();
    assert_eq!(pieces, ["one", "two"]);

    // A dropped connection ends the body with an error.
    let asking = ask(client.clone(), params);
    let asked = fake.expect("http/request").await;
    fake.reply(&asked, json!({"status": 200, "headers": [], "bodyBase64": ""})).await;
    let (_, body) = asking.await.unwrap().unwrap();
    drop((fake, client, _dialled));
    let error = soon(body.try_collect::<Vec<_>>()).await.unwrap_err();
    assert!(error.may_have_taken_effect(), "{error}");
}
