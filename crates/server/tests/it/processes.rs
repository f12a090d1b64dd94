//! What a process publishes, and how it is started.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::support::*;

/// A message without its member `usage`, which varies.
fn without_usage(message: &str) -> String {
    match message.split_once(",\"usage\":{") {
        Some((before, rest)) => format!("{before}{}", rest.split_once('}').unwrap().1),
        None => message.to_owned(),
    }
}

#[tokio::test]
async fn output_exit_and_close_are_published_exactly() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    let start = sh("p", "echo hi; sleep 0.1; echo err >&2; sleep 0.1; exit 3");
    client.send_request("process/start", start.0).await;
    for expected in [
        r#"{"id":2,"result":{"processId":"p","sandboxType":"none"}}"#,
        r#"{"method":"process/output","params":{"processId":"p","seq":1,"stream":"stdout","chunk":"aGkK"}}"#,
        r#"{"method":"process/output","params":{"processId":"p","seq":2,"stream":"stderr","chunk":"ZXJyCg=="}}"#,
        r#"{"method":"process/exited","params":{"processId":"p","seq":3,"exitCode":3,"sandboxDenied":false}}"#,
        r#"{"method":"process/closed","params":{"processId":"p","seq":4}}"#,
    ] {
        assert_eq!(without_usage(&client.text().await.unwrap()), expected);
    }
    client.send_request("process/read", json!({"processId": "p"})).await;
    assert_eq!(
        without_usage(&client.text().await.unwrap()),
        r#"{"id":3,"result":{"chunks":[{"seq":1,"stream":"stdout","chunk":"aGkK"},{"seq":2,"stream":"stderr","chunk":"ZXJyCg=="}],"nextSeq":5,"exited":true,"exitCode":3,"closed":true,"failure":null,"sandboxDenied":false}}"#
    );
}

#[tokio::test]
async fn a_process_without_output_exits_and_closes() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let all = client.run(start("p", &["true"])).await;
    assert_eq!((all.order, all.exit_code, all.last_seq), (vec!["exited", "closed"], 0, 2));
    let all = client.run(start("", &["false"])).await;
    assert_eq!((all.exit_code, all.last_seq), (1, 2), "an empty id is an id");
}

#[tokio::test]
async fn late_output_of_a_grandchild_comes_after_the_exit_and_before_the_close() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let gate = directory.path().join("gate");
    make_fifo(&gate);
    let script = r#"(read line < "$GATE"; echo late; echo later >&2) & echo early; exit 7"#;
    client.start(sh("p", script).env("GATE", &gate)).await.unwrap();
    let mut all = Published::default();
    while !all.order.contains(&"exited") {
        let notice = client.notification().await;
        assert!(!all.take(&notice));
    }
    assert_eq!((all.text(), all.exit_code), ("early\n".into(), 7));
    let read = client.read(json!({"processId": "p"})).await;
    assert_eq!((&read["exited"], &read["closed"]), (&json!(true), &json!(false)));
    std::fs::write(&gate, "go\n").unwrap();
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.stdout, b"early\nlate\n");
    assert_eq!(all.stderr, b"later\n");
    assert_eq!(all.order.last(), Some(&"closed"));
}

fn make_fifo(path: &std::path::Path) {
    let status = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(status.success());
}

/// Output in the pipe at the exit is not lost, whatever the timing.
#[tokio::test]
async fn output_before_the_exit_is_never_lost() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for n in 0..60 {
        let id = format!("p{n}");
        let all = client.run(sh(&id, "head -c 60000 /dev/zero; printf end >&2")).await;
        assert_eq!((all.stdout.len(), &all.stderr[..]), (60_000, &b"end"[..]));
        assert_eq!(all.order.last(), Some(&"closed"));
    }
}

#[tokio::test]
async fn binary_output_passes_unchanged() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("p", &["cat"]).piped()).await.unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(100_003).collect();
    assert_eq!(client.write("p", &bytes).await, "accepted");
    client.close_stdin("p").await;
    assert_eq!(client.until_closed("p").await.stdout, bytes);
}

#[tokio::test]
async fn an_id_is_taken_while_the_process_starts_runs_and_lingers() {
    let server = server_with(|config| {
        config.process.closed_linger = std::time::Duration::from_secs(1000);
    });
    let mut client = Client::ready(&server).await;
    // Also while it is starting: neither request has a response when the other arrives.
    let first = client.send_request("process/start", start("p", &["cat"]).piped().0).await;
    let second = client.send_request("process/start", start("p", &["cat"]).piped().0).await;
    client.response(first).await.unwrap();
    assert_eq!(client.response(second).await.unwrap_err().code, -32600);
    assert_eq!(client.start(sh("p", "")).await.unwrap_err().code, -32600);
    client.close_stdin("p").await;
    client.until_closed("p").await;
    assert_eq!(client.start(sh("p", "")).await.unwrap_err().code, -32600, "it lingers");
}

#[tokio::test]
async fn an_id_is_free_once_the_process_is_forgotten() {
    let server = server_with(|config| config.process.closed_linger = std::time::Duration::ZERO);
    let mut client = Client::ready(&server).await;
    client.run(sh("p", "")).await;
    let unknown = client.until_forgotten("p").await;
    assert_eq!(unknown, ErrorResponse { code: -32600, message: "unknown process id p".into() });
    assert_eq!(client.run(sh("p", "echo again")).await.text(), "again\n");
}

#[tokio::test]
async fn a_failed_start_frees_its_id() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for _ in 0..50 {
        assert_eq!(client.start(start("p", &["/nope"])).await.unwrap_err().code, -32603);
    }
    assert_eq!(client.run(sh("p", "echo hi")).await.text(), "hi\n");
}

#[tokio::test]
async fn the_list_contains_every_process_of_the_session() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let mut other = Client::ready(&server).await;
    other.start(start("hers", &["cat"]).piped()).await.unwrap();
    client.start(start("a", &["cat"]).piped()).await.unwrap();
    client.start(sh("b", "echo $$; exit 4").tty()).await.unwrap();
    let b = client.until_closed("b").await;
    let list = client.call("process/list", json!({})).await.unwrap();
    let lines = list["processes"].as_array().unwrap();
    let ids: Vec<_> = lines.iter().map(|line| line["processId"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "b"]);
    let line = &lines[1];
    assert_eq!(line["pid"], numbers(&b.text())[0]);
    assert_eq!(line["argv"], json!(["/bin/sh", "-c", "echo $$; exit 4"]));
    assert_eq!(line["cwd"], "file:///");
    assert_eq!((&line["tty"], &line["exited"]), (&json!(true), &json!(true)));
    assert_eq!((&line["exitCode"], &line["closed"]), (&json!(4), &json!(true)));
    assert_eq!(line["nextSeq"], b.last_seq + 1);
    assert!(line["startedAtMs"].as_u64().unwrap() > 1_700_000_000_000);
    let line = &lines[0];
    assert_eq!((&line["tty"], &line["exited"]), (&json!(false), &json!(false)));
    assert_eq!((&line["exitCode"], &line["closed"]), (&json!(null), &json!(false)));
    assert_eq!(line["nextSeq"], 1);
}

#[tokio::test]
async fn sessions_do_not_see_each_other() {
    let server = server();
    let mut one = Client::ready(&server).await;
    let mut two = Client::ready(&server).await;
    one.start(start("p", &["cat"]).piped()).await.unwrap();
    two.start(start("p", &["cat"]).piped()).await.unwrap();
    assert_eq!(one.write("p", "one").await, "accepted");
    assert_eq!(two.write("p", "two").await, "accepted");
    one.close_stdin("p").await;
    assert_eq!(one.until_closed("p").await.text(), "one");
    two.close_stdin("p").await;
    assert_eq!(two.until_closed("p").await.text(), "two");
}

fn status(text: &str) -> HashMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k, v.trim())).collect()
}

#[tokio::test]
async fn a_child_starts_with_default_signals_and_none_blocked() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for start in
        [start("p", &["cat", "/proc/self/status"]), start("t", &["cat", "/proc/self/status"]).tty()]
    {
        let text = client.run(start).await.text();
        let status = status(&text);
        for set in ["SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd"] {
            assert_eq!(status[set], "0000000000000000", "{set}");
        }
    }
}

#[tokio::test]
async fn a_child_has_three_descriptors() {
    let server = server();
    let mut client = Client::ready(&server).await;
    // A few other processes, whose descriptors could leak.
    for n in 0..5 {
        client.start(start(&format!("cat{n}"), &["cat"]).piped()).await.unwrap();
    }
    // `ls` itself opens the directory it lists.
    for start in
        [start("p", &["ls", "/proc/self/fd"]), start("t", &["ls", "-C", "/proc/self/fd"]).tty()]
    {
        let text = client.run(start).await.text();
        assert_eq!(numbers(&text), [0, 1, 2, 3], "{text}");
    }
    let script = "for fd in 0 1 2; do readlink /proc/$$/fd/$fd; done";
    let text = client.run(sh("kinds", script)).await.text();
    let kinds: Vec<_> = text.lines().map(|l| l.split(':').next().unwrap()).collect();
    assert_eq!(kinds, ["/dev/null", "pipe", "pipe"]);
}

#[tokio::test]
async fn a_child_leads_its_own_session_and_group() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let text = client.run(sh("p", "echo $$; cat /proc/$$/stat")).await.text();
    let (pid, stat) = text.split_once('\n').unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let (group, session, terminal) = (fields[2], fields[3], fields[4]);
    assert_eq!((group, session, terminal), (pid, pid, "0"));
}

#[tokio::test]
async fn a_child_runs_in_its_working_directory() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let odd = directory.path().join("a b\u{e9}");
    std::fs::create_dir(&odd).unwrap();
    let pwd = |id: &str, cwd: &str| start(id, &["/bin/pwd"]).with("cwd", cwd);
    let encoded = format!("file://{}/a%20b%C3%A9", directory.path().display());
    let expected = format!("{}\n", odd.display());
    assert_eq!(client.run(pwd("1", &encoded)).await.text(), expected);
    assert_eq!(client.run(pwd("2", odd.to_str().unwrap())).await.text(), expected, "native path");
}

#[tokio::test]
async fn a_directory_with_a_name_that_is_not_utf8_can_be_the_cwd() {
    use std::os::unix::ffi::OsStringExt;
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let name = std::ffi::OsString::from_vec(b"x\xff".to_vec());
    std::fs::create_dir(directory.path().join(&name)).unwrap();
    let cwd = format!("file://{}/x%FF", directory.path().display());
    let all = client.run(start("p", &["/bin/pwd"]).with("cwd", cwd)).await;
    assert!(all.stdout.ends_with(b"/x\xff\n"), "{all:?}");
}

#[tokio::test]
async fn a_program_sees_the_arg0_it_was_given() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script = "tr '\\0' '|' < /proc/$$/cmdline";
    let text = client.run(sh("p", script).with("arg0", "other name")).await.text();
    assert_eq!(text, format!("other name|-c|{script}|"));
    let text = client.run(sh("q", script).with("arg0", "")).await.text();
    assert_eq!(text, format!("|-c|{script}|"), "an empty one is one");
}

#[tokio::test]
async fn a_program_is_found_in_the_childs_path() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let program = |sub: &str, text: &str, mode: u32| {
        let sub = directory.path().join(sub);
        std::fs::create_dir_all(&sub).unwrap();
        let file = sub.join("only-here");
        std::fs::write(&file, format!("#!/bin/sh\necho {text}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        sub
    };
    let good = program("good", "good", 0o755);
    let barred = program("barred", "barred", 0o644);
    let path = |dirs: &[&std::path::Path]| std::env::join_paths(dirs).unwrap();
    let run = |id: &str, path: std::ffi::OsString| start(id, &["only-here"]).env("PATH", path);
    let nowhere = std::path::Path::new("/nope");
    let all = client.run(run("1", path(&[nowhere, &barred, &good]))).await;
    assert_eq!(all.text(), "good\n", "past what is not there and what may not be executed");
    let refused = client.start(run("2", path(&[nowhere]))).await.unwrap_err();
    assert!(refused.message.contains("os error 2"), "{refused:?}");
    let refused = client.start(run("3", path(&[&barred, nowhere]))).await.unwrap_err();
    assert!(refused.message.contains("os error 13"), "{refused:?}");
    let no_path = start("4", &["sh", "-c", "echo found"]).with("env", json!({}));
    assert_eq!(client.run(no_path).await.text(), "found\n", "without a PATH, the usual places");
    let here = start("5", &["./only-here"]).with("cwd", good.to_str().unwrap());
    assert_eq!(client.run(here).await.text(), "good\n", "relative to the cwd");
}
