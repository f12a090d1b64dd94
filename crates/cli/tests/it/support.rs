//! A running server, and a websocket client of it that speaks plain JSON.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use http::header::AUTHORIZATION;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_websockets::{ClientBuilder, Limits, MaybeTlsStream, Message, WebSocketStream};

/// How long a test waits for an event before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The program, without the tester's own settings.
pub(crate) fn codex() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_codex"));
    command.env_remove("RUST_LOG").env_remove("COLUMNS").env_remove("NO_COLOR");
    command
}

/// A server on a free port. Killed when dropped.
pub(crate) struct Running {
    pub child: Child,
    pub url: String,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with(codex().arg("exec-server").args(arguments))
    }

    pub(crate) fn start_with(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let url = line.strip_suffix('\n').expect("a whole line").to_owned();
        let address = url.strip_prefix("ws://").unwrap();
        address.parse::<std::net::SocketAddr>().unwrap();
        Self { child, url, stdout }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// Waits for the exit; asserts that nothing more was printed.
    pub(crate) fn ended(mut self) -> ExitStatus {
        let status = wait(&mut self.child);
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "", "one line on stdout and nothing else, ever");
        status
    }

    pub(crate) async fn client(&self) -> Client {
        let mut client = self.uninitialized_client().await;
        client.handshake(json!({"clientName": "test"})).await;
        client
    }

    /// A client that sends this token.
    pub(crate) async fn client_with_token(&self, token: &str) -> Client {
        let value = format!("Bearer {token}").parse().unwrap();
        let builder = ClientBuilder::from_uri(self.url.parse().unwrap())
            .limits(Limits::unlimited())
            .add_header(AUTHORIZATION, value)
            .unwrap();
        let socket = builder.connect().await.unwrap().0;
        let mut client = Client { socket, notices: VecDeque::new(), last_id: 0 };
        client.handshake(json!({"clientName": "test"})).await;
        client
    }

    /// A client that connects to another address of the server.
    pub(crate) async fn client_at(&self, url: &str) -> Client {
        let builder = ClientBuilder::from_uri(url.parse().unwrap()).limits(Limits::unlimited());
        let socket = builder.connect().await.unwrap().0;
        let mut client = Client { socket, notices: VecDeque::new(), last_id: 0 };
        client.handshake(json!({"clientName": "test"})).await;
        client
    }

    /// A client before its handshake.
    pub(crate) async fn uninitialized_client(&self) -> Client {
        self.uninitialized_client_with(None).await
    }

    /// The same, with a token if one is given.
    pub(crate) async fn uninitialized_client_with(&self, token: Option<&str>) -> Client {
        let uri = self.url.parse().unwrap();
        let mut builder = ClientBuilder::from_uri(uri).limits(Limits::unlimited());
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse().unwrap();
            builder = builder.add_header("authorization".parse().unwrap(), value).unwrap();
        }
        Client { socket: builder.connect().await.unwrap().0, notices: VecDeque::new(), last_id: 0 }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a child, but not forever.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < until, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

pub(crate) struct Client {
    pub socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    notices: VecDeque<Value>,
    last_id: i64,
}

impl Client {
    pub(crate) async fn handshake(&mut self, params: Value) -> String {
        let answer = self.call("initialize", params).await;
        self.socket.send(Message::text(r#"{"method":"initialized"}"#)).await.unwrap();
        answer["result"]["sessionId"].as_str().unwrap().to_owned()
    }

    async fn receive(&mut self) -> Value {
        let receiving = async {
            loop {
                let message = self.socket.next().await.expect("the connection ended").unwrap();
                if let Some(text) = message.as_text() {
                    return serde_json::from_str(text).unwrap();
                }
            }
        };
        tokio::time::timeout(PATIENCE, receiving).await.expect("nothing came")
    }

    pub(crate) async fn send_request(&mut self, method: &str, params: Value) -> i64 {
        self.last_id += 1;
        let text = json!({"id": self.last_id, "method": method, "params": params}).to_string();
        self.socket.send(Message::text(text)).await.unwrap();
        self.last_id
    }

    /// Makes a request; returns the whole response, result or error.
    pub(crate) async fn call(&mut self, method: &str, params: Value) -> Value {
        let id = self.send_request(method, params).await;
        loop {
            let message = self.receive().await;
            if message["id"] == id {
                return message;
            }
            self.notices.push_back(message);
        }
    }

    pub(crate) async fn notification(&mut self) -> Value {
        match self.notices.pop_front() {
            Some(notice) => notice,
            None => self.receive().await,
        }
    }

    pub(crate) async fn start(&mut self, id: &str, script: &str) {
        let answer = self.call("process/start", start(id, script)).await;
        assert_eq!(answer["result"]["processId"], id, "{answer}");
    }

    /// Output of a process until it has this many lines.
    pub(crate) async fn lines(&mut self, id: &str, count: usize) -> String {
        let mut text = String::new();
        while text.lines().count() < count || !text.ends_with('\n') {
            let notice = self.notification().await;
            assert_eq!(notice["params"]["processId"], id);
            assert_ne!(notice["method"], "process/closed", "{text}");
            text.push_str(&chunk(&notice));
        }
        text
    }

    /// Runs a script; returns its output and exit code.
    pub(crate) async fn run(&mut self, id: &str, script: &str) -> (String, i64) {
        self.start(id, script).await;
        self.closed(id).await
    }

    /// The output of a process until it closes, without what its network reports.
    pub(crate) async fn closed_quietly(&mut self, id: &str) -> String {
        let mut text = String::new();
        loop {
            let notice = self.notification().await;
            match notice["method"].as_str().unwrap() {
                _ if notice["params"]["processId"] != id => {}
                "process/closed" => return text,
                "process/output" => text.push_str(&chunk(&notice)),
                _ => {}
            }
        }
    }

    pub(crate) async fn closed(&mut self, id: &str) -> (String, i64) {
        let (mut text, mut code) = (String::new(), -1);
        loop {
            let notice = self.notification().await;
            if notice["params"]["processId"] != id {
                continue;
            }
            match notice["method"].as_str().unwrap() {
                "process/closed" => return (text, code),
                "process/exited" => code = notice["params"]["exitCode"].as_i64().unwrap(),
                _ => text.push_str(&chunk(&notice)),
            }
        }
    }
}

pub(crate) fn start(id: &str, script: &str) -> Value {
    json!({
        "processId": id,
        "argv": ["/bin/sh", "-c", script],
        "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"},
        "tty": false,
    })
}

fn chunk(notice: &Value) -> String {
    let text = notice["params"]["chunk"].as_str().unwrap_or_default();
    String::from_utf8(base64_simd::STANDARD.decode_to_vec(text).unwrap()).unwrap()
}

pub(crate) fn numbers(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

/// The state letter of a process; `None` if it has gone.
pub(crate) fn state(pid: u32) -> Option<u8> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.as_bytes()[0])
}

pub(crate) fn is_running(pid: u32) -> bool {
    !matches!(state(pid), None | Some(b'Z' | b'X'))
}

pub(crate) fn is_stopped(pid: u32) -> bool {
    state(pid) == Some(b'T')
}

pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn all_gone(pids: &[u32]) {
    for &pid in pids {
        eventually(&format!("process {pid} has gone"), || !is_running(pid)).await;
    }
}

/// The children of a process, with their command lines.
pub(crate) fn children(pid: u32) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return found };
    for task in tasks.flatten() {
        let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in numbers(&list) {
            let line = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            found.push((child, String::from_utf8_lossy(&line).replace('\0', " ")));
        }
    }
    found
}

/// The server's warden. Keepers, which share its memory, have its command line too.
pub(crate) fn warden(server: u32) -> Option<u32> {
    let mut children = children(server).into_iter().map(|(pid, _)| pid);
    children.find(|pid| comm(*pid) == "exec-warden")
}

fn comm(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Everything below a process, with command lines.
pub(crate) fn all_below(pid: u32) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    for (child, line) in children(pid) {
        found.extend(all_below(child));
        found.push((child, line));
    }
    found
}

/// The same, without wardens and keepers.
pub(crate) fn below(pid: u32) -> Vec<(u32, String)> {
    let mut found = all_below(pid);
    found.retain(|(pid, _)| !["exec-warden", "exec-keeper"].contains(&&*comm(*pid)));
    found
}
