//! A registry and a rendezvous on this machine, which do as the test says and keep what they saw.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base64_simd::STANDARD;
use bytes::Bytes;
use codex_exec_relay_core::{FrameLimits, peek};
use codex_exec_remote::BaseUrl;
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use ring::digest;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_websockets::{Message, ServerBuilder};

/// What is in the rendezvous URLs and must be nowhere else.
pub(crate) const URL_SECRET: &str = "rendezvous-secret-4711";
/// What a harness is authorized by.
pub(crate) const AUTHORIZATION: &str = "authorization-secret-0815";
/// The environment's id.
pub(crate) const ENVIRONMENT: &str = "env_1";

/// A request that came in.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
}

/// What the cloud does instead of what it should.
#[derive(Debug, Clone, Default)]
pub(crate) struct Script {
    /// Answers by the last word of the path: status and body.
    pub answers: HashMap<&'static str, (u16, String)>,
    /// Calls of that last word that are never answered.
    pub silent: Option<&'static str>,
    /// What `validate` says.
    pub deny: bool,
    /// Statuses for the next upgrades.
    pub refuse_upgrades: Vec<u16>,
    /// Where the URLs point, if not here.
    pub rendezvous: Option<SocketAddr>,
    /// What becomes of a frame on its way.
    pub mangle: Option<Mangle>,
    /// Sockets opened from now on are never read, so pings are not answered.
    pub deaf: bool,
}

/// A relay that is not to be trusted: what it makes of a frame, given whether the executor sent it.
#[derive(Clone)]
pub(crate) struct Mangle(Arc<Mutex<Mangler>>);

type Mangler = dyn FnMut(bool, Bytes) -> Vec<Bytes> + Send;

impl Mangle {
    pub(crate) fn new(with: impl FnMut(bool, Bytes) -> Vec<Bytes> + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(with)))
    }
}

impl std::fmt::Debug for Mangle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mangle")
    }
}

#[derive(Default)]
struct State {
    script: Script,
    seen: Vec<Seen>,
    executor_key: Value,
    registrations: usize,
    executor: Option<mpsc::Sender<Message>>,
    harnesses: HashMap<String, mpsc::Sender<Message>>,
}

/// The handle to it. It ends with the test.
#[derive(Clone)]
pub(crate) struct Cloud {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    upgrades: Arc<watch::Sender<usize>>,
    /// Cancelled to drop every websocket.
    drop_all: Arc<Mutex<CancellationToken>>,
}

impl Cloud {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let cloud = Self {
            address: listener.local_addr().unwrap(),
            state: Arc::default(),
            upgrades: Arc::new(watch::Sender::new(0)),
            drop_all: Arc::default(),
        };
        let serving = cloud.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let _ = socket.set_nodelay(true);
                let cloud = serving.clone();
                let service = service_fn(move |request| {
                    let cloud = cloud.clone();
                    async move { Ok::<_, Infallible>(cloud.respond(request).await) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(socket), service)
                    .with_upgrades();
                tokio::spawn(connection);
            }
        });
        cloud
    }

    pub(crate) fn base(&self) -> BaseUrl {
        format!("http://{}/", self.address).parse().unwrap()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Changes what it does from now on.
    pub(crate) fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.state().script);
    }

    /// The requests so far whose path ends so.
    pub(crate) fn seen(&self, ending: &str) -> Vec<Seen> {
        self.state().seen.iter().filter(|seen| seen.path.ends_with(ending)).cloned().collect()
    }

    /// The forms that were posted so far.
    pub(crate) fn forms(&self) -> Vec<String> {
        let state = self.state();
        state.seen.iter().filter_map(|seen| seen.body.as_str().map(ToOwned::to_owned)).collect()
    }

    /// Resolves when that many websockets have been opened in all.
    pub(crate) async fn upgraded(&self, count: usize) {
        let mut upgrades = self.upgrades.subscribe();
        upgrades.wait_for(|opened| *opened >= count).await.unwrap();
    }

    /// Drops every websocket at once, without a close.
    pub(crate) fn drop_sockets(&self) {
        let mut drop_all = self.drop_all.lock().unwrap();
        std::mem::take(&mut *drop_all).cancel();
    }

    /// Sends a websocket message to the executor, as the rendezvous might.
    pub(crate) async fn to_executor(&self, message: Message) {
        let executor = self.state().executor.clone().expect("an executor");
        executor.send(message).await.unwrap();
    }

    /// Receives what the executor sends to this stream, as its harness would.
    pub(crate) fn harness_of(&self, stream: &str) -> mpsc::Receiver<Message> {
        let (sender, receiver) = mpsc::channel(64);
        self.state().harnesses.insert(stream.to_owned(), sender);
        receiver
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        if request.headers().contains_key(header::UPGRADE) {
            return self.upgrade(request);
        }
        if request.method() != Method::POST {
            return answer(404, String::new());
        }
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::String(text));
        let path = head.uri.path().to_owned();
        let word = path.rsplit('/').next().unwrap_or_default().to_owned();
        self.state().seen.push(Seen {
            path: path.clone(),
            headers: head.headers,
            body: body.clone(),
        });
        let script = self.state().script.clone();
        if script.silent == Some(word.as_str()) {
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
        if let Some((status, text)) = script.answers.get(word.as_str()) {
            return answer(*status, text.clone());
        }
        let rendezvous = script.rendezvous.unwrap_or(self.address);
        let url = |role: &str| format!("ws://{rendezvous}/relay/{role}?token={URL_SECRET}");
        let response = match path.trim_start_matches("/cloud/").split('/').collect::<Vec<_>>()[..] {
            ["environment", id, "register"] => {
                let mut state = self.state();
                state.registrations += 1;
                state.executor_key = body["executor_public_key"].clone();
                json!({"environment_id": id, "url": url("executor"),
                    "security_profile": "noise_hybrid_ik_v1",
                    "executor_registration_id": format!("reg_{}", state.registrations)})
            }
            ["environment", id, "connect"] => {
                let state = self.state();
                json!({"environment_id": id, "url": url("harness"),
                    "security_profile": "noise_hybrid_ik_v1",
                    "executor_registration_id": format!("reg_{}", state.registrations),
                    "executor_public_key": state.executor_key,
                    "harness_key_authorization": AUTHORIZATION})
            }
            ["environment", _, "validate"] => {
                let known = body["harness_key_authorization"] == AUTHORIZATION
                    && body["executor_registration_id"]
                        == format!("reg_{}", self.state().registrations)
                    && self.state().seen.iter().any(|seen| {
                        seen.path.ends_with("/connect")
                            && seen.body["harness_public_key"] == body["harness_public_key"]
                    });
                json!({"valid": known && !script.deny})
            }
            ["executor", id, "register"] => json!({"executor_id": id, "url": url("executor")}),
            _ => {
                return answer(
                    404,
                    json!({"error": {"code": "not_found", "message": "what?"}}).to_string(),
                );
            }
        };
        answer(200, response.to_string())
    }

    fn upgrade(&self, mut request: Request<Incoming>) -> Response<Full<Bytes>> {
        if !self.state().script.refuse_upgrades.is_empty() {
            let status = self.state().script.refuse_upgrades.remove(0);
            return answer(status, String::new());
        }
        assert!(request.uri().query().is_some_and(|query| query.contains(URL_SECRET)));
        let executor = request.uri().path().ends_with("/executor");
        let key = request.headers()[header::SEC_WEBSOCKET_KEY].clone();
        let mut sha1 = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
        sha1.update(key.as_bytes());
        sha1.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
        let accept = STANDARD.encode_to_string(sha1.finish());
        let upgrading = hyper::upgrade::on(&mut request);
        let cloud = self.clone();
        let dropped = self.drop_all.lock().unwrap().clone();
        tokio::spawn(async move {
            let Ok(io) = upgrading.await else { return };
            let socket = ServerBuilder::new().serve(TokioIo::new(io));
            tokio::select! {
                () = cloud.relay(socket, executor) => {}
                () = dropped.cancelled() => {}
            }
        });
        Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_ACCEPT, accept)
            .body(Full::default())
            .unwrap()
    }

    /// Passes frames between the roles, by their stream id, and looks at nothing else.
    async fn relay<T>(&self, socket: tokio_websockets::WebSocketStream<T>, executor: bool)
    where
        T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sink, mut stream) = socket.split();
        let (sender, mut queue) = mpsc::channel::<Message>(16);
        if executor {
            self.state().executor = Some(sender.clone());
        }
        self.upgrades.send_modify(|opened| *opened += 1);
        let writing = async {
            while let Some(message) = queue.recv().await {
                if sink.send(message).await.is_err() {
                    break;
                }
            }
        };
        let deaf = self.state().script.deaf;
        let reading = async {
            if deaf {
                std::future::pending::<()>().await;
            }
            while let Some(Ok(message)) = stream.next().await {
                if !message.is_binary() {
                    continue;
                }
                let payload = Bytes::from(message.into_payload());
                let Ok(peeked) = peek(&payload, &FrameLimits::default()) else { continue };
                let id = peeked.stream_id.to_owned();
                let target = {
                    let mut state = self.state();
                    if executor {
                        state.harnesses.get(&id).cloned()
                    } else {
                        state.harnesses.insert(id, sender.clone());
                        state.executor.clone()
                    }
                };
                let mangle = self.state().script.mangle.clone();
                let frames = match mangle {
                    Some(Mangle(mangle)) => mangle.lock().unwrap()(executor, payload),
                    None => vec![payload],
                };
                if let Some(target) = target {
                    for frame in frames {
                        let _ = target.send(Message::binary(frame)).await;
                    }
                }
            }
        };
        tokio::select! {
            () = writing => {}
            () = reading => {}
        }
    }
}

fn answer(status: u16, body: String) -> Response<Full<Bytes>> {
    Response::builder().status(status).body(Full::from(body)).unwrap()
}
