//! A scripted server: the test writes every response.

use std::time::Duration;

use codex_exec_client::{
    Connection, ConnectionConfig, DialFailure, DialFuture, Dialer, ExecServerClient,
    ExecServerClientConnectOptions, Jitter,
};
use codex_exec_serving::Server;
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc};

/// The server's end of a connection.
pub(crate) struct Fake {
    connection: Connection,
}

/// A received request.
#[derive(Debug)]
pub(crate) struct Request {
    pub id: Value,
    pub method: String,
    pub params: Value,
}

impl Fake {
    pub(crate) fn new(connection: Connection) -> Self {
        Self { connection }
    }

    /// The next message; `None` at the end.
    pub(crate) async fn message(&mut self) -> Option<Value> {
        let bytes = self.connection.next().await?.unwrap();
        Some(serde_json::from_slice(&bytes).unwrap())
    }

    /// The next request.
    pub(crate) async fn next_request(&mut self) -> Request {
        let message = self.message().await.expect("the client is still there");
        Request {
            id: message["id"].clone(),
            method: message["method"].as_str().unwrap().to_owned(),
            params: message["params"].clone(),
        }
    }

    /// The next request, which must have this method.
    pub(crate) async fn expect(&mut self, method: &str) -> Request {
        let asked = self.next_request().await;
        assert_eq!(asked.method, method, "{asked:?}");
        asked
    }

    pub(crate) async fn send(&mut self, message: Value) {
        self.connection.outbound().send(message.to_string()).await.unwrap();
    }

    pub(crate) async fn send_text(&mut self, message: &str) {
        self.connection.outbound().send(message.to_owned()).await.unwrap();
    }

    pub(crate) async fn reply(&mut self, asked: &Request, result: Value) {
        self.send(json!({"id": asked.id, "result": result})).await;
    }

    pub(crate) async fn refuse(&mut self, asked: &Request, code: i64, message: &str) {
        self.send(json!({"id": asked.id, "error": {"code": code, "message": message}})).await;
    }

    pub(crate) async fn refuse_as(
        &mut self,
        asked: &Request,
        code: i64,
        message: &str,
        kind: &str,
    ) {
        let error = json!({"code": code, "message": message, "data": {"kind": kind}});
        self.send(json!({"id": asked.id, "error": error})).await;
    }

    pub(crate) async fn notify(&mut self, method: &str, params: Value) {
        self.send(json!({"method": method, "params": params})).await;
    }

    pub(crate) async fn output(&mut self, process: &str, seq: u64, text: &str) {
        let chunk = base64(text.as_bytes());
        let params = json!({"processId": process, "seq": seq, "stream": "stdout", "chunk": chunk});
        self.notify("process/output", params).await;
    }

    pub(crate) async fn exited(&mut self, process: &str, seq: u64, code: i32) {
        let params =
            json!({"processId": process, "seq": seq, "exitCode": code, "sandboxDenied": false});
        self.notify("process/exited", params).await;
    }

    pub(crate) async fn closed(&mut self, process: &str, seq: u64) {
        self.notify("process/closed", json!({"processId": process, "seq": seq})).await;
    }

    /// Responds to `initialize`.
    pub(crate) async fn accept_initialize(&mut self, capabilities: Value) -> Request {
        let asked = self.expect("initialize").await;
        let info =
            json!({"cwd": "file:///srv", "platformOs": "linux", "capabilities": capabilities});
        self.reply(&asked, json!({"sessionId": "s1", "environmentInfo": info})).await;
        self.initialized().await;
        asked
    }

    pub(crate) async fn initialized(&mut self) {
        let message = self.message().await.unwrap();
        assert_eq!(message["method"], "initialized");
    }

    /// Responds to `process/start`; returns the process's id.
    pub(crate) async fn accept_start(&mut self) -> String {
        let asked = self.expect("process/start").await;
        self.reply(&asked, json!({"processId": asked.params["processId"]})).await;
        asked.params["processId"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    let json = serde_json::to_value(codex_exec_client::protocol::Base64Bytes::from(bytes)).unwrap();
    json.as_str().unwrap().to_owned()
}

pub(crate) fn unbase64(text: &Value) -> Vec<u8> {
    serde_json::from_value::<codex_exec_client::protocol::Base64Bytes>(text.clone())
        .unwrap()
        .to_vec()
}

/// A dialer for tests: the channel receives the server's end of each dialled connection.
pub(crate) struct FakeDialer {
    servers: mpsc::UnboundedSender<Fake>,
    /// Errors to return before the first connection.
    failures: Mutex<Vec<DialFailure>>,
}

impl FakeDialer {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Fake>) {
        let (servers, dialled) = mpsc::unbounded_channel();
        (Self { servers, failures: Mutex::default() }, dialled)
    }
}

impl Dialer for FakeDialer {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async {
            if let Some(failure) = self.failures.lock().await.pop() {
                return Err(failure);
            }
            let (ours, theirs) = Connection::pair(&ConnectionConfig::default());
            match self.servers.send(Fake::new(theirs)) {
                Ok(()) => Ok(ours),
                Err(_) => Err(DialFailure::transient("nobody listens")),
            }
        })
    }

    fn endpoint(&self) -> String {
        "the test".to_owned()
    }
}

pub(crate) fn options() -> ExecServerClientConnectOptions {
    let mut options = ExecServerClientConnectOptions::default();
    options.client_name = "test".into();
    options.reconnect.jitter = Jitter::new(|| 1.0);
    options
}

/// A client and its scripted server, and the channel of further connections.
pub(crate) async fn connect_with(
    options: ExecServerClientConnectOptions,
    capabilities: Value,
) -> (ExecServerClient, Fake, mpsc::UnboundedReceiver<Fake>) {
    let (dialer, mut dialled) = FakeDialer::new();
    let connecting = tokio::spawn(ExecServerClient::connect(dialer, options));
    let mut fake = dialled.recv().await.unwrap();
    fake.accept_initialize(capabilities).await;
    (connecting.await.unwrap().unwrap(), fake, dialled)
}

pub(crate) async fn connect(
    capabilities: Value,
) -> (ExecServerClient, Fake, mpsc::UnboundedReceiver<Fake>) {
    connect_with(options(), capabilities).await
}

/// Fails a test that hangs.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("in time")
}

/// The server for the tests of files, and a client of it.
pub(crate) async fn server() -> Option<(Server, ExecServerClient)> {
    Some(crate::embedded::embedded().await)
}

/// Runs a future in the background while the test scripts the server.
pub(crate) fn go<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    tokio::spawn(future)
}
