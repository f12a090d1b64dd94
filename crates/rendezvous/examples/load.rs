//! Figures of the rendezvous, over loopback: frames forwarded, against a bare websocket-to-websocket
//! proxy on the same library in the same run, and the memory of idle environments.
//!
//! ```text
//! cargo run --release -p codex-rendezvous --example load [FRAMES [ENVIRONMENTS]]
//! ```
//!
//! What is measured runs in a process of its own with one thread; this one drives it. Two nodes are
//! measured too, on a nats-server, which has to be installed.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a tool that may stop anywhere")]

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/it/nats_server.rs"]
mod nats_server;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use codex_exec_relay_core::{Body, Data, Entropy, EntropyError, Frame, NoiseIdentity, StreamId};
use codex_exec_remote::NoiseKeyJson;
use codex_rendezvous::{
    Config, FileStore, NatsOptions, NatsStore, NatsTokens, Right, Scope, Service, Store, TokenFile,
    TokenStore,
};
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_websockets::{ClientBuilder, MaybeTlsStream, Message, ServerBuilder, WebSocketStream};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

const PAYLOAD: usize = 60 << 10;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let first = arguments.first().map(String::as_str);
    let one_thread = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match first {
        Some("--serve") => one_thread().block_on(serve(&arguments[1])),
        Some("--proxy") => one_thread().block_on(proxy()),
        _ => {
            let number = |at: usize, default| {
                arguments.get(at).map_or(default, |text: &String| text.parse().unwrap())
            };
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(measure(number(0, 20_000), number(1, 1_000)));
        }
    }
}

// --- what is measured ---

async fn serve(data: &str) {
    let mut config = Config::default();
    config.calls_per_minute = 1_000_000;
    let store = if data.starts_with("nats://") {
        let options = NatsOptions { servers: data.parse().unwrap(), replicas: 1 };
        Store::Nats(Arc::new(NatsStore::connect(&options, &config).await.unwrap()))
    } else {
        Store::File(Arc::new(FileStore::open(data.as_ref(), config.clock.now()).unwrap()))
    };
    let service = Service::new(config, store);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    service.serve(listener, None).await;
}

/// Two websockets, and each one's messages to the other: the floor.
async fn proxy() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    let accept = async || {
        let socket = listener.accept().await.unwrap().0;
        socket.set_nodelay(true).unwrap();
        let config = tokio_websockets::Config::default().flush_threshold(64 << 10);
        ServerBuilder::new().config(config).accept(socket).await.unwrap().1
    };
    let (mut to, mut from) = (accept().await, accept().await);
    loop {
        tokio::select! {
            Some(Ok(message)) = from.next() => to.send(message).await.unwrap(),
            Some(Ok(message)) = to.next() => from.send(message).await.unwrap(),
            else => return,
        }
    }
}

// --- who measures ---

struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self { child, address: address.trim().to_owned() }
    }

    fn memory_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn measure(frames: usize, environments: usize) {
    let dir = std::env::temp_dir().join(format!("rendezvous-load-{}", std::process::id()));
    let data = dir.to_str().unwrap();
    let token = token(&TokenStore::File(TokenFile::new(&dir))).await;

    let mut best = (0f64, 0f64);
    for round in 0..3 {
        let proxy = Process::start(&["--proxy"]);
        let url = format!("ws://{}", proxy.address);
        let to = open(&url).await;
        let from = open(&url).await;
        let bare = throughput(from, to, frames).await;
        drop(proxy);
        let service = Process::start(&["--serve", data]);
        let (to, from) = pair(&service.address, &service.address, &token, "load").await;
        let ours = throughput(from, to, frames).await;
        println!(
            "round {round}: bare proxy {bare:.0} MiB/s, rendezvous {ours:.0} MiB/s, {:.2}x",
            ours / bare
        );
        best = (best.0.max(bare), best.1.max(ours));
    }
    println!("best: {:.2}x of a bare proxy (floor 0.60)", best.1 / best.0);

    idle(data, &token, environments, "each synced to disk").await;
    std::fs::remove_dir_all(dir).unwrap();

    let server = nats_server::NatsServer::start().await;
    let nats = format!("nats://{}", server.address);
    let book = TokenStore::Nats(NatsTokens::connect(&server.options()).await.unwrap());
    let token = self::token(&book).await;
    let mut best = 0f64;
    for _ in 0..3 {
        let nodes = [Process::start(&["--serve", &nats]), Process::start(&["--serve", &nats])];
        let (to, from) = pair(&nodes[0].address, &nodes[1].address, &token, "load").await;
        best = best.max(throughput(from, to, frames).await);
    }
    println!("from one node to another by NATS: {best:.0} MiB/s");
    idle(&nats, &token, environments, "each kept in NATS").await;
}

async fn token(book: &TokenStore) -> String {
    let can = vec![Right::Register, Right::Connect];
    book.create(Scope::Any, can, 0, None).await.unwrap().0.expose().to_owned()
}

async fn idle(store: &str, token: &str, environments: usize, how: &str) {
    let service = Process::start(&["--serve", store]);
    let empty = service.memory_kib();
    let started = Instant::now();
    let mut idle = Vec::new();
    for number in 0..environments {
        let answer =
            call(&service.address, &format!("e{number}/register"), token, &registration()).await;
        idle.push(open(answer["url"].as_str().unwrap()).await);
    }
    let elapsed = started.elapsed();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let full = service.memory_kib();
    println!(
        "{environments} idle environments: {:.1} MiB ({:.1} MiB empty), {:.1} KiB each; all there after {elapsed:.1?}, {how}",
        full as f64 / 1024.0,
        empty as f64 / 1024.0,
        full.saturating_sub(empty) as f64 / environments as f64,
    );
}

async fn throughput(mut from: Socket, mut to: Socket, frames: usize) -> f64 {
    let claim = Frame::new(StreamId::new("s").unwrap(), 0, 0, Body::Resume { next_seq: 0 });
    from.send(Message::binary(claim.encode())).await.unwrap();
    to.next().await.unwrap().unwrap();
    let payload = Bytes::from(vec![7; PAYLOAD]);
    let data = Data { seq: 0, segment_index: 0, segment_count: 1, payload };
    let frame = Frame::new(StreamId::new("s").unwrap(), 0, 0, Body::Data(data)).encode();
    let started = Instant::now();
    let writing = tokio::spawn(async move {
        for _ in 0..frames {
            from.feed(Message::binary(frame.clone())).await.unwrap();
        }
        from.flush().await.unwrap();
        from
    });
    for _ in 0..frames {
        to.next().await.unwrap().unwrap();
    }
    let seconds = started.elapsed().as_secs_f64();
    drop(writing.await.unwrap());
    (frames * PAYLOAD) as f64 / f64::from(1 << 20) / seconds
}

/// An environment at one address and a harness at another.
async fn pair(home: &str, address: &str, token: &str, id: &str) -> (Socket, Socket) {
    let answer = call(home, &format!("{id}/register"), token, &registration()).await;
    let environment = open(answer["url"].as_str().unwrap()).await;
    let body = json!({"harness_public_key": registration()["executor_public_key"]});
    let answer = call(address, &format!("{id}/connect"), token, &body).await;
    (environment, open(answer["url"].as_str().unwrap()).await)
}

async fn open(url: &str) -> Socket {
    let config = tokio_websockets::Config::default().flush_threshold(64 << 10);
    ClientBuilder::new().uri(url).unwrap().config(config).connect().await.unwrap().0
}

async fn call(address: &str, what: &str, token: &str, body: &Value) -> Value {
    let socket = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = hyper::Request::post(format!("/cloud/environment/{what}"))
        .header("host", address)
        .header("authorization", format!("Bearer {token}"))
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let answer = sender.send_request(request).await.unwrap();
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    connection.abort();
    assert!(status.is_success(), "{status} {}", String::from_utf8_lossy(&body));
    serde_json::from_slice(&body).unwrap()
}

struct Counting(u8);

impl Entropy for Counting {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        for byte in bytes {
            self.0 = self.0.wrapping_mul(5).wrapping_add(3);
            *byte = self.0;
        }
        Ok(())
    }
}

fn registration() -> Value {
    let key = NoiseIdentity::generate(&mut Counting(1)).unwrap().public_key();
    json!({"security_profile": "noise_hybrid_ik_v1", "executor_public_key": NoiseKeyJson(key)})
}
