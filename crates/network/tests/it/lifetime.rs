//! Beginning and end of a proxy, its limits, and connections that are handed to it.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::socks::{ask, named};
use crate::world::{World, allow, read_head, request, status};

async fn connect(port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await
}

#[tokio::test]
async fn everything_ends_with_the_proxy() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let (http, socks) = (proxy.http_port(), proxy.socks_port().unwrap());
    let mut idle = connect(http).await.unwrap();
    let mut tunnel = connect(http).await.unwrap();
    tunnel
        .write_all(b"CONNECT good.com:443 HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    read_head(&mut tunnel).await.unwrap();
    read_head(&mut tunnel).await.unwrap();
    let mut upgraded = connect(http).await.unwrap();
    let upgrade = b"GET http://good.com/ HTTP/1.1\r\nHost: good.com\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
    upgraded.write_all(upgrade).await.unwrap();
    read_head(&mut upgraded).await.unwrap();
    let (code, _, mut socks_stream) = ask(&proxy, &named(1, "good.com", 443)).await;
    assert_eq!(code, 0);
    let (near, mut handed_over) = tokio::io::duplex(1024);
    let handle = proxy.handle();
    let served = tokio::spawn(async move { handle.serve_http(near, None).await });
    handed_over.write_all(b"GET http://good.com/ HTTP/1.1\r\n").await.unwrap();
    let handle = proxy.handle();
    proxy.close().await;
    served.await.unwrap();
    let mut rest = Vec::new();
    for stream in [&mut idle, &mut tunnel, &mut upgraded, &mut socks_stream] {
        // The end, or a reset if something had not been read.
        let _ = stream.read_to_end(&mut rest).await;
    }
    let _ = handed_over.read_to_end(&mut rest).await;
    for port in [http, socks] {
        assert_eq!(connect(port).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
    // A handle that is left serves nothing any more.
    let (near, mut far) = tokio::io::duplex(1024);
    handle.serve_http(near, None).await;
    assert_eq!(far.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn connections_can_be_handed_over() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
    let handle = proxy.handle();
    tokio::spawn(async move { handle.serve_http(near, None).await });
    far.write_all(b"GET http://good.com/x HTTP/1.1\r\nHost: good.com\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    far.read_to_string(&mut answer).await.unwrap();
    assert_eq!(status(&answer), 200);
    assert_eq!(world.notebook.take()[0].client, None);
    let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
    let handle = proxy.handle();
    tokio::spawn(async move { handle.serve_socks5(near, None).await });
    // UDP cannot reach such a client.
    far.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).await.unwrap();
    let mut reply = Vec::new();
    far.read_to_end(&mut reply).await.unwrap();
    assert_eq!(reply, [5, 0, 5, 7, 0, 1, 0, 0, 0, 0, 0, 0]);
}

#[tokio::test]
async fn without_socks_there_is_one_port() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.socks5 = false;
    let proxy = world.start(config).await;
    assert_eq!(proxy.socks_port(), None);
    assert_eq!(status(&request(proxy.http_port(), "GET http://good.com/", "good.com").await), 200);
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_others_to_end() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.limits.connections = 1;
    let proxy = world.start(config).await;
    let mut tunnel = connect(proxy.http_port()).await.unwrap();
    tunnel.write_all(b"CONNECT good.com:443 HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    read_head(&mut tunnel).await.unwrap();
    world.notebook.take();
    let (port, second) = (proxy.http_port(), world.notebook.clone());
    let waiting =
        tokio::spawn(async move { request(port, "GET http://good.com/", "good.com").await });
    let third = async { ask(&proxy, &named(1, "good.com", 443)).await.0 };
    tokio::pin!(third);
    // Nothing is judged while the tunnel lasts, however often everybody has had a turn.
    for _ in 0..200 {
        assert!(futures_util::poll!(&mut third).is_pending());
        tokio::task::yield_now().await;
    }
    assert_eq!(second.take(), []);
    drop(tunnel);
    let (waited, third) = tokio::join!(waiting, third);
    assert_eq!((status(&waited.unwrap()), third), (200, 0));
}

/// Time is paused: it runs only while everything waits.
#[tokio::test(start_paused = true)]
async fn silent_clients_are_let_go() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.limits.idle_timeout = Duration::from_secs(600);
    let proxy = world.start(config).await;
    for (port, bytes, seconds) in [
        (proxy.http_port(), &b"GET http://good.com/ HT"[..], 60),
        (proxy.socks_port().unwrap(), b"\x05\x01", 60),
        (proxy.http_port(), b"CONNECT good.com:443 HTTP/1.1\r\nHost: x\r\n\r\n", 600),
    ] {
        let mut stream = connect(port).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let started = tokio::time::Instant::now();
        let _ = stream.read_to_end(&mut Vec::new()).await;
        assert_eq!(started.elapsed().as_secs(), seconds, "{bytes:?}");
    }
}
