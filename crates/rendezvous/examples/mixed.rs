//! Mixed load in real time, over loopback: environments and harnesses disconnect, crash and reconnect,
//! and so do nodes.
//!
//! ```text
//! cargo run --release -p codex-rendezvous --example mixed -- [SECONDS [NODES [ENVIRONMENTS [STREAMS]]]]
//! ```
//!
//! By default ten minutes with three nodes, 200 environments and 1,000 streams. One
//! node stores its state in a directory; several share a nats-server, which must be installed, and
//! all but the first are killed at random. Nodes are separate processes, whose memory use is
//! reported; a message that is lost, duplicated or misrouted makes the program panic.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a tool that may stop anywhere")]

#[path = "../tests/it/drive.rs"]
mod drive;
#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/it/nats_server.rs"]
mod nats_server;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use codex_rendezvous::{
    Config, NatsOptions, NatsTokens, Right, Scope, ServeOptions, StoreOptions, TokenFile,
    TokenStore,
};
use drive::{Load, Net, Plan, Rng};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use nats_server::NatsServer;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_websockets::{ClientBuilder, WebSocketStream};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if arguments.first().is_some_and(|first| first == "--node") {
        runtime.block_on(node(&arguments[1]));
        return ExitCode::SUCCESS;
    }
    let number =
        |at: usize, default| arguments.get(at).map_or(default, |text| text.parse().unwrap());
    // Whatever panics, wherever it does, ends everything.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(1);
    }));
    let plan = Plan {
        environments: number(2, 200),
        streams: number(3, 1000),
        messages: 200,
        life: (5000, 60_000),
        away: 5000,
        pause: 5000,
        deaths: 10,
        again: true,
    };
    runtime.block_on(mixed(Duration::from_secs(number(0, 600)), number(1, 3) as usize, plan))
}

// --- nodes ---

async fn node(store: &str) {
    let store = match store.strip_prefix("nats://") {
        Some(_) => StoreOptions::Nats(NatsOptions { servers: store.parse().unwrap(), replicas: 1 }),
        None => StoreOptions::Directory(store.into()),
    };
    let options = ServeOptions { listen: "127.0.0.1:0".parse().unwrap(), store, tls: None };
    let mut config = Config::default();
    config.calls_per_minute = 1_000_000;
    let announce = |url: &str| {
        println!("{url}");
        Ok(())
    };
    codex_rendezvous::serve(options, config, announce, std::future::pending()).await.unwrap();
}

struct Node {
    child: Child,
    address: String,
}

impl Node {
    fn start(store: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--node", store])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { child, address: url.trim().trim_start_matches("http://").to_owned() }
    }

    fn memory_mib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// --- the clients ---

/// Any node will do.
struct Nodes {
    all: Arc<Mutex<Vec<Node>>>,
    token: String,
    turn: AtomicU64,
}

impl Nodes {
    fn any(&self) -> String {
        let all = self.all.lock().unwrap();
        let turn = Rng(self.turn.fetch_add(1, Relaxed)).next();
        all[(turn % all.len() as u64) as usize].address.clone()
    }

    async fn connect(&self) -> Option<TcpStream> {
        let socket = TcpStream::connect(self.any()).await.ok()?;
        socket.set_nodelay(true).ok()?;
        Some(socket)
    }
}

impl Net for Nodes {
    type Io = TcpStream;

    async fn call(&self, path: &str, body: Value) -> Option<(u16, Value)> {
        let call = async {
            let socket = TokioIo::new(self.connect().await?);
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(socket).await.ok()?;
            let connection = tokio::spawn(connection);
            let request = hyper::Request::post(path)
                .header("host", "rendezvous.test")
                .header("authorization", format!("Bearer {}", self.token))
                .body(Full::new(Bytes::from(body.to_string())))
                .unwrap();
            let answer = sender.send_request(request).await.ok()?;
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await.ok()?.to_bytes();
            connection.abort();
            Some((status, serde_json::from_slice(&body).ok()?))
        };
        timeout(Duration::from_secs(30), call).await.ok().flatten()
    }

    async fn open(&self, url: &str) -> Result<WebSocketStream<TcpStream>, Option<u16>> {
        let open = async {
            let socket = self.connect().await.ok_or(None)?;
            let builder = ClientBuilder::new().uri(url).unwrap();
            match builder.connect_on(socket).await {
                Ok((socket, _)) => Ok(socket),
                Err(tokio_websockets::Error::Upgrade(
                    tokio_websockets::upgrade::Error::DidNotSwitchProtocols(status),
                )) => Err(Some(status)),
                Err(_) => Err(None),
            }
        };
        timeout(Duration::from_secs(30), open).await.unwrap_or(Err(None))
    }
}

async fn token(book: &TokenStore) -> String {
    let can = vec![Right::Register, Right::Connect];
    book.create(Scope::Any, can, 0, None).await.unwrap().0.expose().to_owned()
}

async fn mixed(duration: Duration, nodes: usize, plan: Plan) -> ExitCode {
    let dir = std::env::temp_dir().join(format!("rendezvous-mixed-{}", std::process::id()));
    let server = if nodes > 1 { Some(NatsServer::start().await) } else { None };
    let (store, book) = match &server {
        Some(server) => {
            let book = NatsTokens::connect(&server.options()).await.unwrap();
            (format!("nats://{}", server.address), TokenStore::Nats(book))
        }
        None => {
            (dir.to_str().unwrap().to_owned(), TokenStore::File(TokenFile::new(Path::new(&dir))))
        }
    };
    let all: Vec<Node> = (0..nodes).map(|_| Node::start(&store)).collect();
    let all = Arc::new(Mutex::new(all));
    let net = Nodes { all: all.clone(), token: token(&book).await, turn: AtomicU64::new(0) };
    let load = Load::new(net, plan);
    for number in 0..plan.environments {
        tokio::spawn(drive::environment(load.clone(), number));
    }
    for number in 0..plan.streams {
        tokio::spawn(drive::harness(load.clone(), number));
    }
    let kills = Arc::new(AtomicU64::new(0));
    if nodes > 1 {
        let (all, kills, store) = (all.clone(), kills.clone(), store.clone());
        tokio::spawn(async move {
            let mut rng = Rng(4711);
            loop {
                sleep(Duration::from_millis(15_000 + rng.next() % 15_000)).await;
                // The first lives, so that its memory can be watched.
                let at = 1 + (rng.next() % (nodes as u64 - 1)) as usize;
                let dead = all.lock().unwrap().get_mut(at).map(|node| node.child.kill());
                assert!(dead.is_some());
                kills.fetch_add(1, Relaxed);
                sleep(Duration::from_millis(2000 + rng.next() % 3000)).await;
                let store = store.clone();
                let fresh = tokio::task::spawn_blocking(move || Node::start(&store)).await.unwrap();
                drop(std::mem::replace(&mut all.lock().unwrap()[at], fresh));
            }
        });
    }
    let (started, mut samples) = (Instant::now(), Vec::new());
    while started.elapsed() < duration {
        sleep(Duration::from_secs(5)).await;
        let memory = all.lock().unwrap()[0].memory_mib();
        samples.push(memory);
        println!(
            "{:4} s: {memory} MiB, {} nodes killed, {:?}",
            started.elapsed().as_secs(),
            kills.load(Relaxed),
            load.tally
        );
    }
    // The first third is for getting there.
    let steady = samples.split_off(samples.len() / 3);
    let (before, after) = steady.split_at(steady.len() / 2);
    let most = |samples: &[u64]| samples.iter().copied().max().unwrap_or(0);
    println!("memory of the first node: at most {} MiB, then {} MiB", most(before), most(after));
    let _ = std::fs::remove_dir_all(dir);
    // Half as much again, or 16 MiB, is noise; a leak of this traffic would be far more.
    let flat = most(after) <= most(before) * 3 / 2 + 16;
    println!("{}", if flat { "nothing lost, doubled or crossed" } else { "memory grows" });
    if flat { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
