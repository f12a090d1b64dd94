//! Measures the transparent network against a direct connection on loopback, in one run:
//! `cargo run --release -p codex-exec-network --example transparent`. Needs a TUN device that we may use.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use codex_exec_network::rules::{List, Rules};
use codex_exec_network::{Config, Connector, Namespace, Observer, Proxy, Record};
use futures_util::future::BoxFuture;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

const BYTES: usize = 1 << 30;
const CONNECTIONS: u32 = 500;
const ROUNDS: usize = 3;

const SINK: u8 = 1;
const SOURCE: u8 = 2;
const ECHO: u8 = 3;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match &arguments[1..] {
        [word, address] if word == "client" => {
            for figures in measure(address)? {
                writeln!(io::stdout(), "{} {} {}", figures[0], figures[1], figures[2])?;
            }
            Ok(())
        }
        _ => compare(),
    }
}

/// Upload and download in bytes per second, and seconds per connection; several times.
fn measure(address: &str) -> io::Result<Vec<[f64; 3]>> {
    let block = vec![0; 256 * 1024];
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let mut stream = TcpStream::connect(address)?;
        let started = Instant::now();
        stream.write_all(&[SINK])?;
        for _ in 0..BYTES / block.len() {
            stream.write_all(&block)?;
        }
        stream.shutdown(std::net::Shutdown::Write)?;
        stream.read_exact(&mut [0])?;
        let up = BYTES as f64 / started.elapsed().as_secs_f64();
        let mut stream = TcpStream::connect(address)?;
        let started = Instant::now();
        stream.write_all(&[SOURCE])?;
        let mut buffer = block.clone();
        let mut received = 0;
        while received < BYTES {
            received += stream.read(&mut buffer)?;
        }
        let down = BYTES as f64 / started.elapsed().as_secs_f64();
        let target = stream.peer_addr()?;
        let started = Instant::now();
        for _ in 0..CONNECTIONS {
            let mut stream = TcpStream::connect(target)?;
            stream.write_all(&[ECHO])?;
            stream.read_exact(&mut [0])?;
        }
        rounds.push([up, down, started.elapsed().as_secs_f64() / f64::from(CONNECTIONS)]);
    }
    Ok(rounds)
}

fn serve(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || answer(stream));
    }
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    let mut block = vec![0; 256 * 1024];
    match kind[0] {
        SINK => {
            while stream.read(&mut block)? > 0 {}
            stream.write_all(&[0])
        }
        SOURCE => (0..BYTES / block.len()).try_for_each(|_| stream.write_all(&block)),
        _ => stream.write_all(&[0]),
    }
}

fn compare() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || serve(&listener));
    let direct = measure(&address.to_string())?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let transparent = runtime.block_on(through_namespace(address))?;
    let median = |rounds: &[[f64; 3]], of: usize| {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[of]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let mut out = io::stdout();
    writeln!(out, "{:22}{:>12}{:>14}{:>8}", "", "direct", "transparent", "ratio")?;
    for (of, name) in [(0, "upload, MB/s"), (1, "download, MB/s")] {
        let (floor, ours) = (median(&direct, of) / 1e6, median(&transparent, of) / 1e6);
        writeln!(out, "{name:22}{floor:>12.0}{ours:>14.0}{:>8.2}", ours / floor)?;
    }
    let (floor, ours) = (median(&direct, 2) * 1e6, median(&transparent, 2) * 1e6);
    writeln!(out, "{:22}{floor:>12.0}{ours:>14.0}{:>8.2}", "connection, µs", ours / floor)?;
    Ok(())
}

async fn through_namespace(address: SocketAddr) -> io::Result<Vec<[f64; 3]>> {
    let mut rules = Rules::default();
    rules.add(List::Allow, "bench.example").map_err(io::Error::other)?;
    let mut config = Config::new(rules);
    config.connector = Arc::new(Loopback(address));
    let proxy = Proxy::start(config, None, Arc::new(Nobody)).await?;
    let dir = tempfile::tempdir()?;
    let (near, far) = UnixStream::pair()?;
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let child = command
        .args(["--net", "--mount", "python3", "-c", include_str!("../tests/it/namespace.py")])
        .arg(std::env::current_exe()?)
        .args(["client", &format!("bench.example:{}", address.port())])
        .env("RESOLV_CONF", dir.path().join("resolv.conf"))
        .stdin(OwnedFd::from(far))
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut text = [0; 256];
    let vectors = &mut [IoSliceMut::new(&mut text)];
    recvmsg(&near, vectors, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let tun = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let tun = tun.ok_or_else(|| io::Error::other("no TUN device that we may use"))?;
    let namespace = Namespace::new(tun);
    proxy.handle().serve_namespace(namespace)?;
    (&near).write_all(&[1])?;
    let output = tokio::task::spawn_blocking(move || child.wait_with_output())
        .await
        .map_err(io::Error::other)??;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rounds = text.lines().map(|line| {
        let mut words = line.split(' ').map(|word| word.parse().unwrap_or(f64::NAN));
        std::array::from_fn(|_| words.next().unwrap_or(f64::NAN))
    });
    let rounds: Vec<_> = rounds.collect();
    if rounds.len() == ROUNDS { Ok(rounds) } else { Err(io::Error::other("the client failed")) }
}

/// Every name leads to a public address, and that to one port on loopback.
struct Loopback(SocketAddr);

impl Connector for Loopback {
    fn look_up<'a>(&'a self, _: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Ok(vec![Ipv4Addr::new(93, 184, 216, 34).into()]) })
    }

    fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<tokio::net::TcpStream>> {
        Box::pin(tokio::net::TcpStream::connect(self.0))
    }
}

struct Nobody;

impl Observer for Nobody {
    fn observe(&self, _: Record) {}
}
