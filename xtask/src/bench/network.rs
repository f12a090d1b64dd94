//! The managed network: what its proxies add to a start, to a connection and to a byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::client::{Client, start};
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

const STREAM_MIB: usize = 512;

fn proxy() -> String {
    let proxy = json!({
        "enabled": true, "enableSocks5": true, "enableSocks5Udp": false, "allowUpstreamProxy": false,
        "dangerouslyAllowAllUnixSockets": false, "mode": "full", "allowLocalBinding": false,
        "domains": {"127.0.0.1": "allow"},
    });
    format!(r#","pipeStdin":true,"networkProxy":{}"#, json!({"proxy": proxy}))
}

fn added(measured: Duration, floor: Duration) -> f64 {
    (measured.as_secs_f64() - floor.as_secs_f64()) * 1e3
}

/// start → closed of `/bin/true` with proxies, against the same without. The ratio is what they add, in
/// milliseconds.
pub(crate) async fn start_to_closed(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "start→closed with proxies, added ms, p50";
    if !report.wants(name) {
        return Ok(());
    }
    let server = Target::exec_server()?;
    let mut client = Client::initialize(&server.url).await?;
    let (with, mut measured, mut floor) = (proxy(), Vec::new(), Vec::new());
    for n in 0..200 * effort {
        for (more, times) in [(with.as_str(), &mut measured), ("", &mut floor)] {
            let began = Instant::now();
            client.send(start(&format!("{n}-{}", more.len()), &["/bin/true"], more)).await?;
            client.until("process/closed").await?;
            times.push(began.elapsed());
        }
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = added(measured, floor);
    report.figure(name, &microseconds(measured), &microseconds(floor), ratio, Goal::AtMost(1.0));
    Ok(())
}

/// A server with a process behind proxies, and what it connects to.
struct Setup {
    _server: Target,
    _client: Client,
    /// The HTTP proxy of the process.
    proxy: SocketAddr,
    target: SocketAddr,
}

impl Setup {
    /// `serve` gets each connection to the target.
    async fn new(serve: impl Fn(TcpStream) + Send + 'static) -> anyhow::Result<Self> {
        let server = Target::exec_server()?;
        let mut client = Client::initialize(&server.url).await?;
        let script = "printf %s ${HTTP_PROXY#http://}; cat";
        client.send(start("p", &["/bin/sh", "-c", script], &proxy())).await?;
        let message: Value = serde_json::from_slice(&client.until("process/output").await?)?;
        let chunk = message["params"]["chunk"].as_str().context("no output")?;
        let bytes = base64_simd::STANDARD.decode_to_vec(chunk).ok().context("no base64")?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let target = listener.local_addr()?;
        thread::spawn(move || listener.incoming().flatten().for_each(serve));
        let proxy = std::str::from_utf8(&bytes)?.parse()?;
        Ok(Self { _server: server, _client: client, proxy, target })
    }
}

fn connect(target: SocketAddr, proxy: Option<SocketAddr>) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(proxy.unwrap_or(target))?;
    stream.set_nodelay(true)?;
    if proxy.is_some() {
        write!(stream, "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        ensure!(head.starts_with(b"HTTP/1.1 200"), "the proxy refused");
    }
    Ok(stream)
}

/// A connection and one byte there and back, through the proxy and directly. The ratio is what the proxy
/// adds, in milliseconds.
pub(crate) async fn connections(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "connection through the proxy, added ms, p50";
    if !report.wants(name) {
        return Ok(());
    }
    let setup = Setup::new(|mut stream| {
        let mut byte = [0];
        if stream.read_exact(&mut byte).is_ok() {
            let _ = stream.write_all(&byte);
        }
    });
    let setup = setup.await?;
    let (proxy, target) = (setup.proxy, setup.target);
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..500 * effort {
        for (proxy, times) in [(Some(proxy), &mut measured), (None, &mut floor)] {
            let began = Instant::now();
            let mut stream = connect(target, proxy)?;
            stream.write_all(b"x")?;
            stream.read_exact(&mut [0])?;
            times.push(began.elapsed());
        }
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = added(measured, floor);
    report.figure(name, &microseconds(measured), &microseconds(floor), ratio, Goal::AtMost(0.3));
    Ok(())
}

/// Bytes through a tunnel, against a direct connection over loopback.
pub(crate) async fn stream(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "512 MiB through the proxy";
    if !report.wants(name) {
        return Ok(());
    }
    let block = vec![0; 64 << 10];
    let setup = Setup::new(move |mut stream| {
        for _ in 0..STREAM_MIB << 4 {
            if stream.write_all(&block).is_err() {
                break;
            }
        }
    });
    let setup = setup.await?;
    let (proxy, target) = (setup.proxy, setup.target);
    let (mut measured, mut floor, mut buffer) = (Vec::new(), Vec::new(), vec![0; 64 << 10]);
    for _ in 0..3 * effort {
        for (proxy, times) in [(Some(proxy), &mut measured), (None, &mut floor)] {
            let began = Instant::now();
            let mut stream = connect(target, proxy)?;
            let mut bytes = 0;
            while bytes < STREAM_MIB << 20 {
                let read = stream.read(&mut buffer)?;
                ensure!(read > 0, "the stream ended after {bytes} bytes");
                bytes += read;
            }
            times.push(began.elapsed());
        }
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let rate = |time: Duration| format!("{:.0} MiB/s", STREAM_MIB as f64 / time.as_secs_f64());
    let ratio = floor.as_secs_f64() / measured.as_secs_f64();
    report.figure(name, &rate(measured), &rate(floor), ratio, Goal::AtLeast(0.5));
    Ok(())
}
