//! What an operator sees: metrics and the audit log.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::commands::{Server, codex, output};
use crate::support::{PATIENCE, Running, eventually, send};

/// A port that was free a moment ago.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn get(address: &str, path: &str) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

fn value(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let address = free_address();
    let server = Server::with(&["--metrics", &address]);
    assert!(get(&address, "/").starts_with("HTTP/1.1 404"));
    output(server.codex("run").args(["--", "echo", "hello"])).success();
    let limited = ["--timeout", "200ms", "--", "sleep", "60"];
    assert_eq!(output(server.codex("run").args(limited)).code, Some(124));
    assert_eq!(output(server.codex("run").args(["--", "/no/such"])).code, Some(127));
    let host = server.url.strip_prefix("ws://").unwrap();
    let mut browser = TcpStream::connect(host).unwrap();
    write!(browser, "GET / HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\n\r\n").unwrap();
    browser.read_exact(&mut [0; 8]).unwrap();
    eventually("all connections are closed", || {
        value(&get(&address, "/metrics"), "codex_exec_connections") == 0.0
    })
    .await;
    let page = get(&address, "/metrics");
    for (name, expected) in [
        ("connections_total", 3.0),
        ("processes", 0.0),
        ("start_seconds_count", 2.0),
        ("start_seconds_bucket{le=\"+Inf\"}", 2.0),
        ("start_failures_total{kind=\"programNotFound\"}", 1.0),
        ("limits_reached_total{limit=\"wall\"}", 1.0),
        ("limits_reached_total{limit=\"oom\"}", 0.0),
        ("refused_peers_total{reason=\"origin\"}", 1.0),
    ] {
        assert_eq!(value(&page, &format!("codex_exec_{name}")), expected, "{name}");
    }
    assert!(value(&page, "codex_exec_received_bytes_total") > 300.0);
    assert!(value(&page, "codex_exec_sent_bytes_total") > 300.0);
    let open = output(codex().args(["exec-server", "--metrics", "0.0.0.0:0"]));
    open.failed(1, "use a loopback address");
}

#[test]
fn the_examples_of_the_documentation_are_records() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operating.md");
    let page = fs::read_to_string(page).unwrap();
    let lines = page.lines().filter(|line| line.starts_with('{'));
    let records: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 2);
    for record in records {
        assert!(record["principal"].is_string() && record["method"].is_string(), "{record}");
    }
}

fn records(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "{text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn the_audit_log_tells_who_did_what_and_no_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("audit.jsonl");
    let server = Server::with(&["--audit-log", log.to_str().unwrap()]);
    assert_eq!(fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
    let secret = "hunter2-in-the-environment";
    let run =
        ["-e", &format!("PASSWORD={secret}"), "--", "sh", "-c", "cat; echo $PASSWORD; exit 3"];
    let said = crate::commands::output_of(server.codex("run").args(run), b"hunter2-content");
    assert_eq!(said.code, Some(3));
    let file = directory.path().join("file");
    fs::write(&file, "hunter2-of-a-file").unwrap();
    output(server.codex("cat").arg(format!(":{}", file.display()))).success();
    output(server.codex("run").args(["--sandbox", "read-only", "--", "/no/such"]));
    eventually("all is logged", || {
        records(&log).iter().filter(|r| r["method"] == "initialize").count() == 3
    })
    .await;
    let find = |method: &str, path: &str, expected: &Value| {
        let all = records(&log);
        let found = all.iter().find(|record| record["method"] == method);
        let found = found.unwrap_or_else(|| panic!("no {method} in {all:#?}"));
        assert_eq!(found.pointer(path), Some(expected), "{found:#}");
    };
    find("process/start", "/argv/2", &json!("cat; echo $PASSWORD; exit 3"));
    find("process/start", "/outcome", &json!("ok"));
    find("process/start", "/principal", &json!("anyone"));
    find("process/exited", "/exitCode", &json!(3));
    let all = records(&log);
    let read = all.iter().find(|record| record["paths"][0].as_str().is_some()).unwrap();
    assert!(read["paths"][0].as_str().unwrap().ends_with("/file"), "{read}");
    let sandboxed = all.iter().find(|record| record["policy"].is_object()).unwrap();
    assert_ne!(sandboxed["outcome"], "ok", "{sandboxed}");
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.contains("hunter2"), "{text}");

    // After a rotation, the next records are in a new file.
    let rotated = directory.path().join("audit.1");
    fs::rename(&log, &rotated).unwrap();
    send(server.pid(), Signal::HUP);
    eventually("it is opened again", || log.exists()).await;
    output(server.codex("run").args(["--", "true"])).success();
    eventually("it is written", || !records(&log).is_empty()).await;
    assert_eq!(records(&rotated).len(), all.len());

    // What others can read is no audit log.
    let public = directory.path().join("public");
    fs::write(&public, "").unwrap();
    fs::set_permissions(&public, fs::Permissions::from_mode(0o644)).unwrap();
    let refused = codex().args(["exec-server", "--audit-log"]).arg(&public).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
}

/// A limit on the size of files stands for a full disk.
#[tokio::test]
async fn a_required_audit_log_that_cannot_be_written_refuses_work() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("audit.jsonl");
    let limited = "ulimit -f 1; exec \"$@\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", limited, "sh"]).arg(codex().get_program());
    command.args(["exec-server", "--audit-required", "--audit-log"]).arg(&log);
    // Nor can the server say so in its own log.
    command.stderr(fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let server = crate::support::Running::start_with(&mut command);
    let mut client = server.client().await;
    // The file may have 512 or 1024 bytes.
    let mut refused = None;
    for n in 0..100 {
        let params = json!({"path": format!("file:///no/such/{n}")});
        let answer = client.call("fs/getMetadata", params).await;
        let kind = answer["error"]["data"]["kind"].as_str().unwrap().to_owned();
        if kind != "pathNotFound" {
            refused = Some(kind);
            break;
        }
    }
    assert!(matches!(refused.as_deref(), Some("tooLarge" | "diskFull")), "{refused:?}");
    let started = client.call("process/start", crate::support::start("p", "true")).await;
    let kind = &started["error"]["data"]["kind"];
    assert!(kind == "tooLarge" || kind == "diskFull", "{started}");
    // With room again, after a rotation, it works.
    fs::remove_file(&log).unwrap();
    send(server.pid(), Signal::HUP);
    eventually("it is opened again", || log.exists()).await;
    // This one is refused, too, and its record is the first to be written.
    client.call("fs/getMetadata", json!({"path": "file:///"})).await;
    eventually("it is written", || !records(&log).is_empty()).await;
    assert!(records(&log)[0]["lost"].as_u64().unwrap() > 0);
    let answer = client.call("fs/getMetadata", json!({"path": "file:///"})).await;
    assert!(answer["result"].is_object(), "{answer}");
}

#[tokio::test]
async fn terminals_are_recorded_and_replayed() {
    let directory = tempfile::tempdir().unwrap();
    let record = |input: bool| {
        let mut arguments = vec!["--record", directory.path().to_str().unwrap()];
        arguments.extend(input.then_some("--record-input"));
        Running::start(&arguments)
    };
    let casts = || {
        let entries = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut casts: Vec<_> = entries.collect();
        casts.sort();
        casts
    };
    for input in [false, true] {
        let server = record(input);
        let mut client = server.client().await;
        assert_eq!(client.run("p", "echo no terminal").await.1, 0);
        let script =
            "printf 'name? '; read name; printf '\\033[1mhello %s\\033[0m\\n' \"$name\"; exit 3";
        let mut params = crate::support::start("t", script);
        params["tty"] = json!(true);
        client.call("process/start", params).await;
        let write = json!({"processId": "t", "chunk": "c2VjcmV0Cg=="});
        client.call("process/write", write).await;
        assert_eq!(client.closed("t").await.1, 3);
        let expected = if input { 2 } else { 1 };
        let ended = || {
            casts().len() == expected
                && fs::read_to_string(&casts()[expected - 1]).unwrap().contains("\"x\"")
        };
        eventually("it is recorded", ended).await;
    }
    let casts = casts();
    for (cast, input) in casts.iter().zip([false, true]) {
        assert_eq!(fs::metadata(cast).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(cast).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["version"], 3);
        assert_eq!(lines[0]["term"], json!({"cols": 80, "rows": 24}));
        assert_eq!(lines.iter().any(|line| line[1] == "i"), input, "{text}");
        assert_eq!(lines.last().unwrap()[2], "3");
        let replayed = output(codex().args(["replay", "--speed", "100"]).arg(cast)).success();
        assert!(replayed.contains("name? ") && replayed.contains("\u{1b}[1mhello secret"));
    }
    let bad = output(codex().args(["replay", "/etc/hostname"]));
    assert_eq!(bad.code, Some(1));
}
