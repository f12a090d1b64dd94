//! A client that drops its connection, reconnects, reads what it missed, and records every event by its
//! number.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use fastrand::Rng;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_websockets::{ClientBuilder, Limits, MaybeTlsStream, Message, WebSocketStream};

use super::machine::TIMEOUT;

/// How long a session may stay attached to an abandoned connection. The server drops a silent connection
/// after 90 s by itself; a resume makes it ping at once.
const TAKEOVER: Duration = Duration::from_secs(30);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// The recorded events of one process.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Output by its number.
    pub chunks: BTreeMap<u64, (String, Vec<u8>)>,
    pub exit: Option<(u64, i64)>,
    pub closed: Option<u64>,
}

impl Seen {
    /// The last number before the first gap.
    fn complete(&self) -> u64 {
        let mut last = 0;
        let known = |seq| {
            self.chunks.contains_key(&seq)
                || self.exit.is_some_and(|(exit, _)| exit == seq)
                || self.closed == Some(seq)
        };
        while known(last + 1) {
            last += 1;
        }
        last
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.closed.is_some_and(|closed| self.complete() == closed)
    }

    pub(crate) fn stream(&self, name: &str) -> Vec<u8> {
        let of_stream = self.chunks.values().filter(|(stream, _)| stream == name);
        of_stream.flat_map(|(_, bytes)| bytes.iter().copied()).collect()
    }

    fn output(&mut self, seq: u64, stream: &str, chunk: &str) -> anyhow::Result<()> {
        let bytes = base64_simd::STANDARD.decode_to_vec(chunk)?;
        let new = (stream.to_owned(), bytes);
        if let Some(before) = self.chunks.insert(seq, new.clone()) {
            ensure!(before == new, "number {seq} was sent twice, with different content");
        }
        Ok(())
    }
}

/// How a connection is dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Disconnect {
    Close,
    Reset,
    /// The socket stays open, unread.
    Silence,
}

pub(crate) struct Client {
    url: String,
    session: String,
    socket: Option<Socket>,
    /// Sockets left open on purpose.
    silent: Vec<Socket>,
    last_id: i64,
    pub seen: HashMap<String, Seen>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Client {
    pub(crate) async fn connect(url: &str) -> anyhow::Result<Self> {
        let mut client = Self {
            url: url.to_owned(),
            session: String::new(),
            socket: None,
            silent: Vec::new(),
            last_id: 0,
            seen: HashMap::new(),
        };
        client.open().await?;
        Ok(client)
    }

    async fn open(&mut self) -> anyhow::Result<()> {
        let until = tokio::time::Instant::now() + TAKEOVER;
        loop {
            let builder = ClientBuilder::new().uri(&self.url)?.limits(Limits::unlimited());
            let (socket, _) = builder.connect().await?;
            self.socket = Some(socket);
            let mut params = json!({"clientName": "torture"});
            if !self.session.is_empty() {
                params["resumeSessionId"] = json!(self.session);
            }
            let response = self.call("initialize", params).await?;
            if let Some(session) = response["result"]["sessionId"].as_str() {
                self.session = session.to_owned();
                return self.send(json!({"method": "initialized"})).await;
            }
            // The server has not noticed yet that the last connection is gone.
            ensure!(response["error"]["code"] == -32010, "no session: {response}");
            ensure!(tokio::time::Instant::now() < until, "never free: {response}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn send(&mut self, value: Value) -> anyhow::Result<()> {
        let socket = self.socket.as_mut().context("not connected")?;
        Ok(socket.send(Message::text(value.to_string())).await?)
    }

    /// Receives and records the next message.
    async fn receive(&mut self) -> anyhow::Result<Value> {
        let socket = self.socket.as_mut().context("not connected")?;
        let receiving = async {
            loop {
                let message = socket.next().await.context("the connection ended")??;
                if let Some(text) = message.as_text() {
                    return anyhow::Ok(serde_json::from_str::<Value>(text)?);
                }
            }
        };
        let received = tokio::time::timeout(TIMEOUT, receiving).await;
        let message = received.with_context(|| format!("nothing came: {}", self.summary()))??;
        self.record(&message)?;
        Ok(message)
    }

    /// Whether everything of a process is known.
    pub(crate) fn is_complete(&self, id: &str) -> bool {
        self.seen.get(id).is_some_and(Seen::is_complete)
    }

    /// A summary of the recorded events.
    fn summary(&self) -> String {
        let rows = self.seen.iter().map(|(id, seen)| {
            let (exit, closed) = (seen.exit, seen.closed);
            format!("{id} is known up to {}, exit {exit:?}, closed {closed:?}", seen.complete())
        });
        rows.collect::<Vec<_>>().join("; ")
    }

    fn record(&mut self, message: &Value) -> anyhow::Result<()> {
        let Some(method) = message["method"].as_str() else { return Ok(()) };
        let params = &message["params"];
        let id = params["processId"].as_str().context("no process")?;
        let seq = params["seq"].as_u64().context("no number")?;
        let seen = self.seen.entry(id.to_owned()).or_default();
        match method {
            "process/output" => {
                let (stream, chunk) = (&params["stream"], &params["chunk"]);
                let (stream, chunk) = (stream.as_str().context("")?, chunk.as_str().context("")?);
                seen.output(seq, stream, chunk)?;
            }
            "process/exited" => {
                seen.exit = Some((seq, params["exitCode"].as_i64().context("no code")?));
            }
            "process/closed" => seen.closed = Some(seq),
            other => bail!("an unknown notification: {other}"),
        }
        Ok(())
    }

    pub(crate) async fn call(&mut self, method: &str, params: Value) -> anyhow::Result<Value> {
        self.last_id += 1;
        let id = self.last_id;
        self.send(json!({"id": id, "method": method, "params": params})).await?;
        loop {
            let message = self.receive().await?;
            if message["id"] == id {
                return Ok(message);
            }
        }
    }

    /// Sends all requests before it reads responses, which may arrive in any order.
    pub(crate) async fn call_all(
        &mut self,
        requests: Vec<(&str, Value)>,
    ) -> anyhow::Result<Vec<Value>> {
        let first = self.last_id + 1;
        for (method, params) in &requests {
            self.last_id += 1;
            let request = json!({"id": self.last_id, "method": method, "params": params});
            self.send(request).await?;
        }
        let mut responses = HashMap::new();
        while responses.len() < requests.len() {
            let message = self.receive().await?;
            if let Some(id) = message["id"].as_i64() {
                ensure!(responses.insert(id, message).is_none(), "request {id} was answered twice");
            }
        }
        let responses =
            (first..=self.last_id).map(|id| responses.remove(&id).context("another id"));
        responses.collect()
    }

    /// Drops the connection, reconnects, and reads what was missed.
    pub(crate) async fn reconnect(&mut self, disconnect: Disconnect) -> anyhow::Result<()> {
        let mut socket = self.socket.take().context("not connected")?;
        match disconnect {
            Disconnect::Close => drop(socket),
            Disconnect::Reset => {
                if let MaybeTlsStream::Plain(tcp) = socket.get_ref() {
                    tcp.set_zero_linger()?;
                }
                drop(socket);
            }
            Disconnect::Silence => {
                // In the middle of something, as when a network fails.
                self.last_id += 1;
                let waiting = json!({"id": self.last_id, "method": "process/list", "params": {}});
                socket.send(Message::text(waiting.to_string())).await?;
                self.silent.push(socket);
            }
        }
        self.open().await?;
        let ids: Vec<String> = self.seen.keys().cloned().collect();
        for id in ids {
            self.catch_up(&id).await?;
        }
        Ok(())
    }

    /// Reads without waiting.
    pub(crate) async fn catch_up(&mut self, id: &str) -> anyhow::Result<()> {
        self.read(id, 0, None).await.map(drop)
    }

    /// Sends one read and records its result. Returns whether it had new output.
    pub(crate) async fn read(
        &mut self,
        id: &str,
        wait_ms: u64,
        max_bytes: Option<u64>,
    ) -> anyhow::Result<bool> {
        let seen = self.seen.entry(id.to_owned()).or_default();
        if seen.is_complete() {
            return Ok(false);
        }
        let after = seen.complete();
        let mut params = json!({"processId": id, "afterSeq": after, "waitMs": wait_ms});
        if let Some(max_bytes) = max_bytes {
            params["maxBytes"] = json!(max_bytes);
        }
        let response = self.call("process/read", params).await?;
        let result = &response["result"];
        let chunks = result["chunks"].as_array().with_context(|| format!("{id}: {response}"))?;
        ensure!(result["failure"].is_null(), "{id}: {}", result["failure"]);
        let dropped = result["droppedBytes"].as_u64().unwrap_or(0);
        ensure!(dropped == 0, "{id}: {dropped} bytes were dropped");
        let next = result["nextSeq"].as_u64().context("no nextSeq")?;
        let seen = self.seen.entry(id.to_owned()).or_default();
        for chunk in chunks {
            let (stream, bytes) = (chunk["stream"].as_str(), chunk["chunk"].as_str());
            let seq = chunk["seq"].as_u64().context("no number")?;
            seen.output(seq, stream.context("")?, bytes.context("")?)?;
        }
        // Numbers without output belong to the exit and, last, to the close.
        let cut = max_bytes.is_some() && !chunks.is_empty();
        if !cut && seen.exit.is_none() && result["exited"] == true {
            let closed = result["closed"] == true;
            let code = result["exitCode"].as_i64().context("no code")?;
            let mut free = (1..next).rev().filter(|seq| !seen.chunks.contains_key(seq));
            if closed {
                seen.closed = free.next();
            }
            seen.exit = free.next().map(|seq| (seq, code));
        } else if !cut && result["closed"] == true {
            seen.closed = Some(next - 1);
        }
        Ok(!chunks.is_empty())
    }

    /// Waits for an event of any process.
    pub(crate) async fn listen(&mut self, rng: &mut Rng, slow: bool) -> anyhow::Result<()> {
        if slow {
            tokio::time::sleep(Duration::from_millis(rng.u64(..15))).await;
        }
        self.receive().await.map(drop)
    }
}
