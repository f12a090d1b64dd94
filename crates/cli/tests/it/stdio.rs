//! `--listen stdio`: one connection, one message per line.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::*;

struct Piped {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Drop for Piped {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Piped {
    fn start(listen: &str) -> Self {
        let mut command = codex();
        command.args(["exec-server", "--listen", listen]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.stdin.as_mut().unwrap(), "{message}").unwrap();
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Does the handshake and starts a process; returns its pid.
    fn with_process(&mut self) -> u32 {
        self.send(&json!({"id": 1, "method": "initialize", "params": {"clientName": "test"}}));
        assert!(self.receive()["result"]["sessionId"].is_string());
        self.send(&json!({"method": "initialized"}));
        let start = start("p", "echo $$; exec sleep 1000");
        self.send(&json!({"id": 2, "method": "process/start", "params": start}));
        assert_eq!(self.receive()["result"]["processId"], "p");
        let chunk = self.receive()["params"]["chunk"].as_str().unwrap().to_owned();
        let text = base64_simd::STANDARD.decode_to_vec(chunk).unwrap();
        numbers(&String::from_utf8(text).unwrap())[0]
    }
}

#[tokio::test]
async fn messages_are_lines_and_end_of_input_stops_the_server() {
    for listen in ["stdio", "stdio://"] {
        let mut server = Piped::start(listen);
        let pid = server.with_process();
        server.send(&json!("nonsense"));
        assert_eq!(server.receive()["error"]["code"], -32600);
        // Blank lines are ignored.
        writeln!(server.stdin.as_mut().unwrap(), "\n  \r\n").unwrap();
        server.send(&json!({"id": 3, "method": "environment/status"}));
        assert_eq!(server.receive(), json!({"id": 3, "result": {"status": "ready"}}));
        assert!(is_running(pid));
        server.stdin = None;
        assert_eq!(wait(&mut server.child).code(), Some(0));
        assert!(!is_running(pid), "it is gone before the server is");
    }
}

#[tokio::test]
async fn requests_before_the_end_of_input_get_responses() {
    for _ in 0..20 {
        let mut server = Piped::start("stdio");
        let mut input = server.stdin.take().unwrap();
        let mut text = String::new();
        text.push_str(
            "{\"id\":1,\"method\":\"initialize\",\"params\":{\"clientName\":\"test\"}}\n",
        );
        text.push_str("{\"method\":\"initialized\"}\n");
        for id in 2..50 {
            text.push_str(&format!("{{\"id\":{id},\"method\":\"environment/info\"}}\n"));
        }
        // The last line has no newline.
        text.push_str("{\"id\":50,\"method\":\"environment/status\"}");
        input.write_all(text.as_bytes()).unwrap();
        drop(input);
        let mut output = String::new();
        server.stdout.read_to_string(&mut output).unwrap();
        let ids: Vec<i64> = output
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].as_i64().unwrap())
            .collect();
        assert_eq!(ids, (1..=50).collect::<Vec<_>>());
        assert_eq!(wait(&mut server.child).code(), Some(0));
    }
}

#[tokio::test]
async fn a_line_over_64_mib_ends_it() {
    let mut server = Piped::start("stdio");
    let pid = server.with_process();
    let mut input = server.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        let block = vec![b'x'; 1 << 20];
        for _ in 0..66 {
            // The server may be gone before all is written.
            if input.write_all(&block).is_err() {
                break;
            }
        }
        input
    });
    assert_eq!(wait(&mut server.child).code(), Some(0));
    let _input = writer.join().unwrap();
    assert!(!is_running(pid));
}

#[tokio::test]
async fn a_line_of_almost_64_mib_is_taken() {
    let mut server = Piped::start("stdio");
    let fill = "x".repeat((64 << 20) - 100);
    let mut input = server.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        writeln!(input, r#"{{"id":1,"method":"nope","x":"{fill}"}}"#).unwrap();
        input
    });
    assert_eq!(server.receive()["error"]["code"], -32601);
    drop(writer.join().unwrap());
    assert_eq!(wait(&mut server.child).code(), Some(0));
}

#[tokio::test]
async fn signals_stop_a_stdio_server() {
    for (signal, code) in [(Signal::TERM, Some(0)), (Signal::INT, Some(0)), (Signal::KILL, None)] {
        let mut server = Piped::start("stdio");
        let pid = server.with_process();
        send(server.child.id(), signal);
        assert_eq!(wait(&mut server.child).code(), code);
        all_gone(&[pid]).await;
    }
}

/// The reader of the responses has gone, so the server exits.
#[tokio::test]
async fn a_stdio_server_stops_when_its_output_is_closed() {
    let mut server = Piped::start("stdio");
    let pid = server.with_process();
    let stdout = std::mem::replace(&mut server.stdout, BufReader::new(other_pipe()));
    drop(stdout);
    let mut input = server.stdin.take().unwrap();
    let _ = writeln!(input, r#"{{"id":3,"method":"environment/status"}}"#);
    assert_eq!(wait(&mut server.child).code(), Some(0));
    assert!(!is_running(pid));
}

/// Another child's stdout, to replace the server's.
fn other_pipe() -> ChildStdout {
    let mut child = std::process::Command::new("true").stdout(Stdio::piped()).spawn().unwrap();
    let stdout = child.stdout.take().unwrap();
    child.wait().unwrap();
    stdout
}
