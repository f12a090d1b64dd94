//! A client that speaks plain JSON, in memory or over a real websocket, so that tests see what any peer
//! sees.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use codex_exec_server_protocol::ErrorKind;
use codex_exec_serving::{Connection, Server, ServerConfig, WebSocketAuth, WebSocketListener};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_websockets::{ClientBuilder, Limits, MaybeTlsStream, Message, WebSocketStream};

/// How long a test waits for an event before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server with the default configuration.
pub(crate) fn server() -> Server {
    server_with(|_| {})
}

pub(crate) fn server_with(change: impl FnOnce(&mut ServerConfig)) -> Server {
    let mut config = ServerConfig::default();
    change(&mut config);
    Server::new(config).unwrap()
}

/// Makes the server listen on loopback.
pub(crate) async fn listen(server: &Server) -> SocketAddr {
    listen_with(server, WebSocketAuth::Open).await
}

pub(crate) async fn listen_with(server: &Server, auth: WebSocketAuth) -> SocketAddr {
    let listener = WebSocketListener::bind("127.0.0.1:0".parse().unwrap(), auth).await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = server.clone();
    tokio::spawn(async move { listener.serve(&server).await });
    address
}

pub(crate) type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

pub(crate) async fn socket(address: SocketAddr) -> Socket {
    let uri = format!("ws://{address}/").parse().unwrap();
    let builder = ClientBuilder::from_uri(uri).limits(Limits::unlimited());
    builder.connect().await.unwrap().0
}

enum Transport {
    Memory(Box<Connection>),
    WebSocket(Box<Socket>),
}

/// An error response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ErrorResponse {
    pub code: i64,
    pub message: String,
}

pub(crate) struct Client {
    transport: Transport,
    last_id: i64,
    answers: HashMap<String, Result<Value, ErrorResponse>>,
    /// Kinds of the error responses.
    kinds: HashMap<String, ErrorKind>,
    notices: VecDeque<Value>,
}

/// The events of a process, checked to be numbered without a gap.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    /// The order of events: `stdout`, `stderr`, `pty`, `exited`, `closed`, without repeats.
    pub order: Vec<&'static str>,
    pub exit_code: i64,
    pub last_seq: u64,
}

impl Published {
    pub(crate) fn text(&self) -> String {
        let all = [&self.stdout[..], &self.stderr, &self.pty].concat();
        String::from_utf8(all).unwrap()
    }

    /// Adds a notification; true if it was the last one.
    pub(crate) fn take(&mut self, notice: &Value) -> bool {
        let params = &notice["params"];
        let seq = params["seq"].as_u64().unwrap();
        assert_eq!(seq, self.last_seq + 1, "a number is missing or repeated: {notice}");
        self.last_seq = seq;
        let kind = match notice["method"].as_str().unwrap() {
            "process/output" => {
                let bytes = unbase64(params["chunk"].as_str().unwrap());
                assert!(!bytes.is_empty(), "an empty chunk");
                let (kind, to) = match params["stream"].as_str().unwrap() {
                    "stdout" => ("stdout", &mut self.stdout),
                    "stderr" => ("stderr", &mut self.stderr),
                    "pty" => ("pty", &mut self.pty),
                    other => panic!("stream {other}"),
                };
                to.extend(bytes);
                kind
            }
            "process/exited" => {
                self.exit_code = params["exitCode"].as_i64().unwrap();
                "exited"
            }
            "process/closed" => "closed",
            other => panic!("notification {other}"),
        };
        assert!(!self.order.contains(&"closed"), "something after closed: {notice}");
        if self.order.last() != Some(&kind) {
            self.order.push(kind);
        }
        kind == "closed"
    }
}

impl Client {
    pub(crate) fn memory(server: &Server) -> Self {
        Self::new(Transport::Memory(Box::new(server.connect())))
    }

    pub(crate) async fn websocket(address: SocketAddr) -> Self {
        Self::over(socket(address).await)
    }

    pub(crate) fn over(socket: Socket) -> Self {
        Self::new(Transport::WebSocket(Box::new(socket)))
    }

    /// A client in memory after its handshake.
    pub(crate) async fn ready(server: &Server) -> Self {
        let mut client = Self::memory(server);
        client.handshake(json!({"clientName": "test"})).await.unwrap();
        client
    }

    fn new(transport: Transport) -> Self {
        Self {
            transport,
            last_id: 0,
            answers: HashMap::new(),
            kinds: HashMap::new(),
            notices: VecDeque::new(),
        }
    }

    /// Sends `initialize` and `initialized`; returns the session's id.
    pub(crate) async fn handshake(&mut self, params: Value) -> Result<String, ErrorResponse> {
        let result = self.call("initialize", params).await?;
        self.send(r#"{"method":"initialized"}"#).await;
        Ok(result["sessionId"].as_str().unwrap().to_owned())
    }

    /// Resumes a session that was opened in memory.
    pub(crate) async fn resume(server: &Server, session: &str) -> Self {
        Self::resume_by(session, async || Self::memory(server)).await
    }

    /// Resumes a session that was opened over a websocket.
    pub(crate) async fn resume_at(address: SocketAddr, session: &str) -> Self {
        Self::resume_by(session, async || Self::websocket(address).await).await
    }

    /// Resumes once the server has seen the end of the previous connection.
    async fn resume_by(session: &str, connect: impl AsyncFn() -> Self) -> Self {
        let params = json!({"clientName": "test", "resumeSessionId": session});
        loop {
            let mut client = connect().await;
            match client.handshake(params.clone()).await {
                Ok(id) => {
                    assert_eq!(id, session);
                    return client;
                }
                Err(refused) => assert_eq!(refused.code, -32010, "{refused:?}"),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Sends text as it is.
    pub(crate) async fn send(&mut self, text: impl Into<String>) {
        let text = text.into();
        let sending = async {
            match &mut self.transport {
                Transport::Memory(connection) => connection.outbound().send(text).await.unwrap(),
                Transport::WebSocket(socket) => socket.send(Message::text(text)).await.unwrap(),
            }
        };
        timeout(PATIENCE, sending).await.expect("the server does not read");
    }

    pub(crate) async fn send_binary(&mut self, bytes: Vec<u8>) {
        let Transport::WebSocket(socket) = &mut self.transport else { panic!("a websocket") };
        socket.send(Message::binary(bytes)).await.unwrap();
    }

    /// The next message as text; `None` at the end of the connection.
    pub(crate) async fn text(&mut self) -> Option<String> {
        let receiving = async {
            match &mut self.transport {
                Transport::Memory(connection) => {
                    let message = connection.next().await?.unwrap();
                    Some(String::from_utf8(message.to_vec()).unwrap())
                }
                Transport::WebSocket(socket) => loop {
                    let message = socket.next().await?.ok()?;
                    if let Some(text) = message.as_text() {
                        return Some(text.to_owned());
                    }
                    assert!(!message.is_binary(), "messages go out as text");
                },
            }
        };
        timeout(PATIENCE, receiving).await.expect("nothing came")
    }

    async fn receive(&mut self) -> Option<()> {
        let text = self.text().await?;
        let message: Value = serde_json::from_str(&text).unwrap();
        assert!(message.get("jsonrpc").is_none(), "{text}");
        if message.get("method").is_some() {
            self.notices.push_back(message);
            return Some(());
        }
        if let Some(error) = message.get("error") {
            self.kinds.insert(message["id"].to_string(), kind_of(error));
        }
        let answer = match message.get("error") {
            None => Ok(message["result"].clone()),
            Some(error) => Err(ErrorResponse {
                code: error["code"].as_i64().unwrap(),
                message: error["message"].as_str().unwrap().to_owned(),
            }),
        };
        let before = self.answers.insert(message["id"].to_string(), answer);
        assert!(before.is_none(), "answered twice: {text}");
        Some(())
    }

    /// Sends a request without waiting for its response.
    pub(crate) async fn send_request(&mut self, method: &str, params: Value) -> i64 {
        self.last_id += 1;
        let message = json!({"id": self.last_id, "method": method, "params": params});
        self.send(message.to_string()).await;
        self.last_id
    }

    /// Waits for the response to the request with this id (as JSON).
    pub(crate) async fn response(&mut self, id: impl Into<Value>) -> Result<Value, ErrorResponse> {
        let id = id.into().to_string();
        loop {
            if let Some(answer) = self.answers.remove(&id) {
                return answer;
            }
            self.receive().await.expect("the connection ended");
        }
    }

    /// Whether the response has arrived already.
    pub(crate) fn has_response(&self, id: i64) -> bool {
        self.answers.contains_key(&id.to_string())
    }

    pub(crate) async fn call(
        &mut self,
        method: &str,
        params: Value,
    ) -> Result<Value, ErrorResponse> {
        let id = self.send_request(method, params).await;
        self.response(id).await
    }

    /// Makes a request that fails; returns the kind of its error.
    pub(crate) async fn kind(&mut self, method: &str, params: Value) -> ErrorKind {
        let id = self.send_request(method, params.clone()).await;
        match self.response(id).await {
            Ok(result) => panic!("{method} {params} is answered with {result}"),
            Err(_) => self.kind_of_response(id),
        }
    }

    /// The kind of the error response to a request.
    pub(crate) fn kind_of_response(&self, id: i64) -> ErrorKind {
        self.kinds[&id.to_string()]
    }

    /// The next notification.
    pub(crate) async fn notification(&mut self) -> Value {
        loop {
            if let Some(notice) = self.notices.pop_front() {
                return notice;
            }
            self.receive().await.expect("the connection ended");
        }
    }

    /// The next notification; `None` once the server has closed the connection.
    pub(crate) async fn notification_or_end(&mut self) -> Option<Value> {
        while self.notices.is_empty() {
            self.receive().await?;
        }
        self.notices.pop_front()
    }

    pub(crate) async fn start(&mut self, start: Start) -> Result<Value, ErrorResponse> {
        self.call("process/start", start.0).await
    }

    pub(crate) async fn write(&mut self, process: &str, bytes: impl AsRef<[u8]>) -> String {
        let chunk = base64(bytes.as_ref());
        let answer = self.call("process/write", json!({"processId": process, "chunk": chunk}));
        answer.await.unwrap()["status"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn close_stdin(&mut self, process: &str) -> String {
        let params = json!({"processId": process, "chunk": "", "closeStdin": true});
        let answer = self.call("process/write", params).await.unwrap();
        answer["status"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn read(&mut self, params: Value) -> Value {
        self.call("process/read", params).await.unwrap()
    }

    /// The events of the process until it closes. Queues notifications of other processes.
    pub(crate) async fn until_closed(&mut self, process: &str) -> Published {
        self.collect_until_closed(process, Published::default()).await
    }

    pub(crate) async fn collect_until_closed(
        &mut self,
        process: &str,
        mut all: Published,
    ) -> Published {
        let mut others = VecDeque::new();
        loop {
            let notice = self.notification().await;
            if notice["params"]["processId"] != process {
                others.push_back(notice);
            } else if all.take(&notice) {
                others.append(&mut self.notices);
                self.notices = others;
                return all;
            }
        }
    }

    /// The events of the process until its output contains `text`.
    pub(crate) async fn until(&mut self, process: &str, text: &str) -> Published {
        let mut all = Published::default();
        self.collect_until(process, text, &mut all).await;
        all
    }

    pub(crate) async fn collect_until(&mut self, process: &str, text: &str, all: &mut Published) {
        while !all.text().contains(text) {
            let notice = self.notification().await;
            assert_eq!(notice["params"]["processId"], process);
            let ended = all.take(&notice);
            assert!(!ended || all.text().contains(text), "ended without {text:?}: {all:?}");
        }
    }

    /// Starts a process and waits for its end.
    pub(crate) async fn run(&mut self, start: Start) -> Published {
        let id = start.0["processId"].as_str().unwrap().to_owned();
        self.start(start).await.unwrap();
        self.until_closed(&id).await
    }

    /// Reads a closed process until the server no longer knows it; returns that error.
    pub(crate) async fn until_forgotten(&mut self, process_id: &str) -> ErrorResponse {
        let asking = async {
            loop {
                match self.call("process/read", json!({"processId": process_id})).await {
                    Ok(read) => assert_eq!(read["closed"], true),
                    Err(refused) => break refused,
                }
            }
        };
        timeout(PATIENCE, asking).await.expect("it is never forgotten")
    }

    /// Checks that the connection receives nothing but the response to this request.
    pub(crate) async fn nothing_more(&mut self) {
        self.call("environment/status", json!({})).await.unwrap();
        assert_eq!(self.notices, VecDeque::<Value>::new());
    }

    pub(crate) async fn close(mut self) {
        if let Transport::WebSocket(socket) = &mut self.transport {
            let _ = socket.close().await;
        }
    }
}

/// Params of `process/start`.
pub(crate) struct Start(pub Value);

/// The kind of an error response; fails unless it matches the code.
fn kind_of(error: &Value) -> ErrorKind {
    let kind = ErrorKind::from_name(error["data"]["kind"].as_str().unwrap_or_default());
    assert!(kind.codes().contains(&error["code"].as_i64().unwrap()), "{error}");
    kind
}

/// A process in `/` with the usual `PATH`.
pub(crate) fn start(id: &str, argv: &[&str]) -> Start {
    Start(json!({
        "processId": id,
        "argv": argv,
        "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"},
        "tty": false,
    }))
}

/// A shell script.
pub(crate) fn sh(id: &str, script: &str) -> Start {
    start(id, &["/bin/sh", "-c", script])
}

impl Start {
    pub(crate) fn with(mut self, member: &str, value: impl Into<Value>) -> Self {
        self.0[member] = value.into();
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<Path>) -> Self {
        self.0["env"][name] = value.as_ref().to_str().unwrap().into();
        self
    }

    pub(crate) fn piped(self) -> Self {
        self.with("pipeStdin", true)
    }

    pub(crate) fn tty(self) -> Self {
        self.with("tty", true)
    }
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}

pub(crate) fn unbase64(text: &str) -> Vec<u8> {
    base64_simd::STANDARD.decode_to_vec(text).unwrap()
}

/// The bytes of all chunks of a `process/read`.
pub(crate) fn bytes_of(read: &Value) -> Vec<u8> {
    let chunks = read["chunks"].as_array().unwrap();
    chunks.iter().flat_map(|chunk| unbase64(chunk["chunk"].as_str().unwrap())).collect()
}

/// Whether a process exists and is not a zombie.
pub(crate) fn is_running(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => {
            let state = stat.rsplit_once(") ").unwrap().1.as_bytes()[0];
            state != b'Z' && state != b'X'
        }
        Err(_) => false,
    }
}

/// Waits until the process has gone.
pub(crate) async fn gone(pid: u32) {
    eventually(&format!("process {pid} has gone"), || !is_running(pid)).await;
}

/// Polls a condition that has no event to wait for.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(PATIENCE, waiting).await.is_ok(), "never: {what}");
}

/// The numbers in a text, such as pids.
pub(crate) fn numbers(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}
