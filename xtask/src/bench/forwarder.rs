//! A relay that only forwards frames, so that a comparison with a plain websocket shows the cost of remote
//! mode at its two ends.
//!
//! It is its own registry, accepts every client, and has one environment and one harness at a time.

use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, bail};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{FutureExt, SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio_websockets::{Config, Message, ServerBuilder, WebSocketStream};

type Sink = SplitSink<WebSocketStream<TcpStream>, Message>;
/// The sink of one end.
type End = Arc<Mutex<Option<Sink>>>;

const EXECUTOR: &str = "/executor";
const HARNESS: &str = "/harness";

#[derive(Debug, Clone, Default)]
struct Forwarder {
    address: String,
    executor: End,
    harness: End,
    executor_key: Arc<Mutex<Value>>,
}

pub(crate) fn serve() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        writeln!(std::io::stdout(), "http://{address}")?;
        let forwarder = Forwarder { address, ..Forwarder::default() };
        loop {
            let (socket, _) = listener.accept().await?;
            socket.set_nodelay(true)?;
            tokio::spawn(forwarder.clone().accept(socket));
        }
    })
}

impl Forwarder {
    async fn accept(self, socket: TcpStream) -> anyhow::Result<()> {
        let mut first = [0; 4];
        while socket.peek(&mut first).await? < first.len() {}
        if &first == b"POST" {
            return self.handle_registry_call(socket).await;
        }
        let config = Config::default().flush_threshold(64 << 10);
        let (request, socket) = ServerBuilder::new().config(config).accept(socket).await?;
        let (sink, stream) = socket.split();
        let (here, there) = match request.uri().path() {
            EXECUTOR => (&self.executor, &self.harness),
            _ => (&self.harness, &self.executor),
        };
        *here.lock().await = Some(sink);
        forward(stream, there).await
    }

    /// One call of the registry.
    async fn handle_registry_call(self, mut socket: TcpStream) -> anyhow::Result<()> {
        let mut request = Vec::new();
        let (head, body) = loop {
            if socket.read_buf(&mut request).await? == 0 {
                bail!("a request that ends early");
            }
            let Some(end) = request.windows(4).position(|window| window == b"\r\n\r\n") else {
                continue;
            };
            let head = std::str::from_utf8(&request[..end])?.to_ascii_lowercase();
            let len = head.lines().find_map(|line| line.strip_prefix("content-length:"));
            let len: usize = len.context("no length")?.trim().parse()?;
            if let Some(body) = request.get(end + 4..end + 4 + len) {
                break (head, body);
            }
        };
        let path = head.split(' ').nth(1).context("no path")?;
        let response = self.registry(path, serde_json::from_slice(body)?).await?.to_string();
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json";
        let response = format!("{head}\r\ncontent-length: {}\r\n\r\n{response}", response.len());
        Ok(socket.write_all(response.as_bytes()).await?)
    }

    async fn registry(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let mut words = path.rsplit('/');
        let (call, environment) = (words.next(), words.next());
        let granted = |end: &str| {
            json!({
                "environment_id": environment,
                "url": format!("ws://{}{end}", self.address),
                "security_profile": "noise_hybrid_ik_v1",
                "executor_registration_id": "registration",
            })
        };
        let mut executor_key = self.executor_key.lock().await;
        Ok(match call {
            Some("register") => {
                *executor_key = body["executor_public_key"].clone();
                granted(EXECUTOR)
            }
            Some("connect") => {
                let mut response = granted(HARNESS);
                response["executor_public_key"] = executor_key.clone();
                response["harness_key_authorization"] = "authorization".into();
                response
            }
            Some("validate") => json!({ "valid": true }),
            _ => bail!("no such call"),
        })
    }
}

/// Forwards frames, all that are ready before each flush.
async fn forward(
    mut from: SplitStream<WebSocketStream<TcpStream>>,
    to: &End,
) -> anyhow::Result<()> {
    while let Some(first) = from.next().await {
        let mut to = to.lock().await;
        let mut next = Some(first);
        while let Some(message) = next {
            let message = message?;
            if let (Some(sink), true) = (to.as_mut(), message.is_binary()) {
                sink.feed(message).await?;
            }
            next = from.next().now_or_never().flatten();
        }
        if let Some(sink) = to.as_mut() {
            sink.flush().await?;
        }
    }
    Ok(())
}
