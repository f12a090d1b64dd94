//! A service, and what tests say to it.

use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use codex_exec_relay_core::{Body, Data, Frame, FrameLimits, StreamId};
use codex_exec_remote::NoiseKeyJson;
use codex_rendezvous::{Clock, Config, FileStore, Right, Scope, Service, Store, TokenFile};
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};
use tokio_websockets::{ClientBuilder, Message, WebSocketStream};

pub(crate) use crate::drive::{Rng, identity, text};

/// The moment every test starts at.
pub(crate) const START: u64 = 1_800_000_000;

pub(crate) type Client = WebSocketStream<DuplexStream>;

/// A service with a data directory, and every byte it has seen or said.
pub(crate) struct World {
    pub dir: TempDir,
    pub service: Service,
    pub config: Config,
    pub now: Arc<AtomicU64>,
    /// `None` where they would be too many.
    pub bytes: Option<Arc<Mutex<Vec<u8>>>>,
    pub pipe: usize,
    /// Where the service runs.
    pub runtime: tokio::runtime::Handle,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let now = Arc::new(AtomicU64::new(START));
        let clock = {
            let now = now.clone();
            Clock::new(move || UNIX_EPOCH + Duration::from_secs(now.load(Relaxed)))
        };
        let mut config = Config::default();
        config.clock = clock;
        change(&mut config);
        let service = Self::service(&dir, &config);
        let runtime = tokio::runtime::Handle::current();
        Self { dir, service, config, now, bytes: Some(Arc::default()), pipe: 1 << 16, runtime }
    }

    fn service(dir: &TempDir, config: &Config) -> Service {
        let store = FileStore::open(dir.path(), config.clock.now()).unwrap();
        Service::new(config.clone(), Store::File(Arc::new(store)))
    }

    /// Kills the service without closing anything, and starts another on the same directory.
    pub(crate) async fn restart(&mut self) {
        // The lock goes with the last of its tasks.
        let copy = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        self.dir = copy;
        self.service = Self::service(&self.dir, &self.config);
    }

    pub(crate) fn pass_time(&self, seconds: u64) {
        self.now.fetch_add(seconds, Relaxed);
    }

    pub(crate) fn tokens(&self) -> TokenFile {
        TokenFile::new(self.dir.path())
    }

    /// A token for everything.
    pub(crate) fn token(&self) -> String {
        self.token_for(Scope::Any, &[Right::Register, Right::Connect, Right::Manage])
    }

    pub(crate) fn token_for(&self, scope: Scope, can: &[Right]) -> String {
        let made = self.tokens().create(scope, can.to_vec(), START, None).unwrap();
        made.0.expose().to_owned()
    }

    /// The id of a token.
    pub(crate) fn id_of(&self, token: &str) -> String {
        use ring::digest::{SHA256, digest};
        let digest: String =
            digest(&SHA256, token.as_bytes()).as_ref().iter().map(|b| format!("{b:02x}")).collect();
        let all = self.tokens().list().unwrap();
        all.into_iter().find(|record| record.digest == digest).unwrap().id
    }

    pub(crate) fn revoke(&self, token: &str) {
        assert!(self.tokens().revoke(&self.id_of(token)).unwrap());
    }

    /// How many lines of the journal are about harnesses.
    pub(crate) fn noted_harnesses(&self) -> usize {
        let journal = std::fs::read_to_string(self.dir.path().join("state.log")).unwrap();
        journal.lines().filter(|line| line.contains("\"harness\":")).count()
    }

    /// A connection to the service.
    pub(crate) fn pipe(&self) -> DuplexStream {
        let (ours, theirs) = duplex(self.pipe);
        let service = self.service.clone();
        let spied = Spied { inner: theirs, bytes: self.bytes.clone() };
        self.runtime.spawn(async move {
            service.serve_connection(spied, IpAddr::V4(Ipv4Addr::LOCALHOST), false).await;
        });
        ours
    }

    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        token: Option<&str>,
        body: impl Into<Bytes>,
        header: Option<(HeaderName, &str)>,
    ) -> (u16, String) {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(self.pipe())).await.unwrap();
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header(HOST, "rdv.test");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some((name, value)) = header {
            request = request.header(name, HeaderValue::from_str(value).unwrap());
        }
        let request = request.body(Full::new(body.into())).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    pub(crate) async fn post(&self, path: &str, token: &str, body: &Value) -> (u16, Value) {
        let text = body.to_string();
        let (status, body) = self.request(Method::POST, path, Some(token), text, None).await;
        (status, serde_json::from_str(&body).unwrap())
    }

    pub(crate) async fn get(&self, path: &str, token: Option<&str>) -> (u16, String) {
        self.request(Method::GET, path, token, "", None).await
    }

    /// Registers an environment: its url and its registration's id.
    pub(crate) async fn register(&self, environment: &str, token: &str) -> (String, String) {
        let path = format!("/cloud/environment/{environment}/register");
        let (status, answer) = self.post(&path, token, &register_body()).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["environment_id"], environment);
        assert_eq!(answer["security_profile"], "noise_hybrid_ik_v1");
        (text(&answer["url"]), text(&answer["executor_registration_id"]))
    }

    pub(crate) async fn connect(&self, environment: &str, token: &str, who: usize) -> (u16, Value) {
        let path = format!("/cloud/environment/{environment}/connect");
        self.post(&path, token, &json!({"harness_public_key": key(who)})).await
    }

    /// Opens a websocket, or gives the status of the refusal.
    pub(crate) async fn websocket(&self, url: &str) -> Result<Client, u16> {
        let builder = ClientBuilder::new().uri(url).unwrap();
        match builder.connect_on(self.pipe()).await {
            Ok((socket, _)) => Ok(socket),
            Err(tokio_websockets::Error::Upgrade(
                tokio_websockets::upgrade::Error::DidNotSwitchProtocols(status),
            )) => Err(status),
            Err(other) => panic!("{other}"),
        }
    }

    /// Opens a websocket, again while the service cannot take it for the moment.
    pub(crate) async fn websocket_when_ready(&self, url: &str) -> Client {
        loop {
            match self.websocket(url).await {
                Ok(socket) => return socket,
                Err(503) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// An environment that is online, and its socket.
    pub(crate) async fn online(&self, environment: &str, token: &str) -> Client {
        let (url, _) = self.register(environment, token).await;
        self.websocket(&url).await.unwrap()
    }

    /// A harness's socket.
    pub(crate) async fn harness(&self, environment: &str, token: &str, who: usize) -> Client {
        let (status, answer) = self.connect(environment, token, who).await;
        assert_eq!(status, 200, "{answer}");
        self.websocket(&text(&answer["url"])).await.unwrap()
    }

    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.get("/metrics", None).await;
        let line = text.lines().find(|line| {
            line.strip_prefix("codex_rendezvous_").is_some_and(|line| line.starts_with(name))
        });
        line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
    }
}

pub(crate) fn register_body() -> Value {
    json!({"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key(0)})
}

pub(crate) fn key(which: usize) -> Value {
    serde_json::to_value(NoiseKeyJson(identity(which).public_key())).unwrap()
}

// --- frames ---

pub(crate) fn frame(stream: &str, body: Body) -> Message {
    Message::binary(Frame::new(StreamId::new(stream).unwrap(), 0, 0, body).encode())
}

pub(crate) fn claim(stream: &str) -> Message {
    frame(stream, Body::Resume { next_seq: 0 })
}

pub(crate) fn data(stream: &str, payload: &[u8]) -> Message {
    let payload = Bytes::copy_from_slice(payload);
    frame(stream, Body::Data(Data { seq: 0, segment_index: 0, segment_count: 1, payload }))
}

/// What came, in short: `s data hello`, `s reset why`, `closed 1000`, `gone`.
pub(crate) async fn next(socket: &mut Client) -> String {
    loop {
        let message = match socket.next().await {
            Some(Ok(message)) => message,
            Some(Err(_)) | None => return "gone".to_owned(),
        };
        if let Some((code, _)) = message.as_close() {
            return format!("closed {}", u16::from(code));
        }
        if !message.is_binary() {
            continue;
        }
        let bytes = Bytes::from(message.into_payload());
        let frame = Frame::decode(bytes, &FrameLimits::default()).unwrap();
        let id = &frame.stream_id;
        return match frame.body {
            Body::Data(data) if data.payload.len() > 100 => format!("{id} data …"),
            Body::Data(data) => format!("{id} data {}", String::from_utf8_lossy(&data.payload)),
            Body::Reset { reason } => format!("{id} reset {reason}"),
            other => format!("{id} {}", format!("{:?}", other.kind()).to_lowercase()),
        };
    }
}

pub(crate) async fn send(socket: &mut Client, message: Message) {
    socket.send(message).await.unwrap();
}

/// Everything that was read from or written to a pipe.
struct Spied {
    inner: DuplexStream,
    bytes: Option<Arc<Mutex<Vec<u8>>>>,
}

impl AsyncRead for Spied {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buf);
        if let Some(bytes) = &self.bytes {
            bytes.lock().unwrap().extend_from_slice(&buf.filled()[before..]);
        }
        result
    }
}

impl AsyncWrite for Spied {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        if let (Poll::Ready(Ok(written)), Some(bytes)) = (&result, &self.bytes) {
            bytes.lock().unwrap().extend_from_slice(&buf[..*written]);
        }
        result
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

pub(crate) fn is_in(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

/// The time of day as the service takes it, for what is not a [`World`].
pub(crate) fn system_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}
