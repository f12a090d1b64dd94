//! Processes with a terminal.

use serde_json::json;

use crate::support::*;

#[tokio::test]
async fn a_terminal_is_the_controlling_terminal_with_24_rows_and_80_columns() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script = "tty; stty size; echo $$; cat /proc/$$/stat; test -t 0 && test -t 1 && test -t 2";
    let all = client.run(sh("p", script).tty()).await;
    assert_eq!((all.exit_code, &all.order[..]), (0, &["pty", "exited", "closed"][..]));
    let text = all.text();
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("/dev/pts/"), "{text}");
    assert_eq!(lines[1], "24 80");
    let fields: Vec<_> = lines[3].rsplit_once(") ").unwrap().1.split(' ').collect();
    let (group, session, terminal, foreground) = (fields[2], fields[3], fields[4], fields[5]);
    assert_eq!((group, session, foreground), (lines[2], lines[2], lines[2]));
    assert_ne!(terminal, "0");
}

#[tokio::test]
async fn a_terminals_size_can_be_set_and_changed() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script =
        "stty size; trap 'stty size; echo changed' WINCH; echo go; while :; do read line; done";
    let start = sh("p", script).tty().with("size", json!({"rows": 5, "cols": 7}));
    client.start(start).await.unwrap();
    let mut all = client.until("p", "go").await;
    assert!(all.text().contains("5 7\r\n"), "{all:?}");
    let resize = json!({"processId": "p", "rows": 50, "cols": 132});
    assert_eq!(
        client.call("process/resize", resize).await,
        Ok(json!({"size": {"rows": 50, "cols": 132}}))
    );
    client.collect_until("p", "50 132\r\nchanged", &mut all).await;
}

#[tokio::test]
async fn a_process_without_a_terminal_cannot_be_resized() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let resize = |id: &str| json!({"processId": id, "rows": 50, "cols": 132});
    assert_eq!(client.call("process/resize", resize("p")).await.unwrap_err().code, -32600);
    client.run(sh("t", "").tty()).await;
    assert_eq!(client.call("process/resize", resize("t")).await.unwrap_err().code, -32600);
}

#[tokio::test]
async fn input_to_a_terminal_is_echoed_and_read() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).tty()).await.unwrap();
    assert_eq!(client.write("p", "hi\n").await, "accepted");
    let mut all = client.until("p", "hi\r\nhi\r\n").await;
    assert_eq!(client.close_stdin("p").await, "accepted");
    all = client.collect_until_closed("p", all).await;
    assert_eq!((all.text(), all.exit_code), ("hi\r\nhi\r\n".into(), 0));
}

#[tokio::test]
async fn closing_a_terminals_stdin_sends_its_eof_character() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client
        .start(sh("p", "stty eof '^A' -echo; echo set; cat; read line; echo \"$line\"").tty())
        .await
        .unwrap();
    let all = client.until("p", "set").await;
    client.close_stdin("p").await;
    // The terminal stays open afterwards, and the next read gets more input.
    assert_eq!(client.write("p", "more\n").await, "accepted");
    let all = client.collect_until_closed("p", all).await;
    assert_eq!((all.text(), all.exit_code), ("set\r\nmore\r\n".into(), 0));
}

#[tokio::test]
async fn control_characters_reach_the_foreground() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "stty -echo; echo go; exec cat").tty()).await.unwrap();
    let all = client.until("p", "go").await;
    client.write("p", "\u{3}").await;
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.exit_code, 130);
}

/// With job control the foreground job has its own group: `interrupt` has to reach it, and the interactive
/// shell has to survive.
#[tokio::test]
async fn an_interrupt_reaches_the_job_in_the_foreground() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let start = start("p", &["/bin/sh", "-i"]).tty().env("PS1", "").env("ENV", "");
    client.start(start).await.unwrap();
    // The input may be echoed, so it must not contain the awaited text.
    client.write("p", "stty -echo; echo g''o\n").await;
    let mut all = client.until("p", "go\r\n").await;
    client.write("p", "sh -c 'echo job=$$; exec sleep 1000'\n").await;
    while !all.text().rsplit("job=").next().unwrap().contains("\r\n")
        || !all.text().contains("job=")
    {
        let notice = client.notification().await;
        all.take(&notice);
    }
    let job = numbers(all.text().rsplit("job=").next().unwrap())[0];
    assert!(is_running(job));
    let interrupt = json!({"processId": "p", "signal": "interrupt"});
    client.call("process/signal", interrupt).await.unwrap();
    gone(job).await;
    client.write("p", "echo ali''ve\n").await;
    client.collect_until("p", "alive\r\n", &mut all).await;
    client.write("p", "exit 9\n").await;
    assert_eq!(client.collect_until_closed("p", all).await.exit_code, 9);
}

#[tokio::test]
async fn long_output_of_a_terminal_arrives_whole() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let all = client.run(start("p", &["seq", "200000"]).tty()).await;
    let expected: String = (1..=200_000).map(|n| format!("{n}\r\n")).collect();
    assert!(all.pty == expected.as_bytes(), "{} of {} bytes", all.pty.len(), expected.len());
    assert_eq!(all.exit_code, 0);
}

#[tokio::test]
async fn a_terminal_closes_with_its_last_process() {
    let server = server();
    let mut client = Client::ready(&server).await;
    // The grandchild ignores the hangup at the exit of the session leader.
    let script = "trap '' HUP; (sleep 0.3; echo late) & echo early";
    let all = client.run(sh("p", script).tty()).await;
    assert_eq!(all.order.last(), Some(&"closed"));
    assert!(all.text().starts_with("early\r\n"), "{all:?}");
}
