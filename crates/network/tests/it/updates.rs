//! Rules that are replaced while the proxy runs: what they do not allow any more is cut.

use std::net::Ipv4Addr;
use std::time::Duration;

use codex_exec_network::Reply;
use smoltcp::socket::tcp::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use crate::packets::Client;
use crate::socks::{addressed, ask, datagram, named};
use crate::world::{World, allow, read_head, request, rules, status};

async fn tunnel(port: u16, host: &str) -> TcpStream {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let head = format!("CONNECT {host}:443 HTTP/1.1\r\nHost: {host}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
    stream
}

async fn upgraded(port: u16, host: &str) -> TcpStream {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let head = format!(
        "GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 101 "));
    stream
}

/// Whether the connection has ended, one way or the other.
async fn ended(stream: &mut TcpStream) -> bool {
    !matches!(stream.read(&mut [0; 64]).await, Ok(1..))
}

#[tokio::test]
async fn connections_that_are_not_allowed_any_more_are_cut() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com", "other.com"]).await;
    let mut client = Client::of(&proxy);
    let mut doomed = Vec::new();
    let mut kept = Vec::new();
    for (host, streams) in [("other.com", &mut doomed), ("good.com", &mut kept)] {
        streams.push(tunnel(proxy.http_port(), host).await);
        streams.push(upgraded(proxy.http_port(), host).await);
        streams.push(ask(&proxy, &named(1, host, 443)).await.2);
    }
    let mut transparent = Vec::new();
    for host in ["good.com", "other.com"] {
        let address = client.look_up(host, false).await.unwrap();
        let connection = client.connect((address, 80).into());
        assert!(client.accepted(connection).await);
        transparent.push(connection);
    }
    proxy.handle().update_rules(rules(&["good.com"], &[], &[]));
    for stream in &mut doomed {
        assert!(ended(stream).await);
    }
    client
        .until(|client| (client.socket(transparent[1]).state() == State::Closed).then_some(()))
        .await;
    for stream in &mut kept {
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        assert!(!ended(stream).await);
    }
    assert_eq!(client.socket(transparent[0]).state(), State::Established);
    // New requests are judged by the new rules.
    let answer = request(proxy.http_port(), "GET http://other.com/", "other.com").await;
    assert_eq!(status(&answer), 403);
    proxy.handle().update_rules(allow(&["other.com"]));
    let answer = request(proxy.http_port(), "GET http://other.com/", "other.com").await;
    assert_eq!(status(&answer), 200);
}

#[tokio::test]
async fn what_the_controller_allowed_lasts_until_it_is_denied() {
    let world = World::new().await;
    let mut config = world.config(allow(&[]));
    config.ask_timeout = Some(Duration::from_secs(3600));
    world.controller.replies.lock().unwrap().insert("good.com".into(), Ok(Reply::Allow));
    let proxy = world.start(config).await;
    let mut stream = ask(&proxy, &named(1, "good.com", 443)).await.2;
    proxy.handle().update_rules(allow(&["other.com"]));
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
    proxy.handle().update_rules(rules(&[], &["good.com"], &[]));
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

/// A connection whose addresses were not judged is cut when local ones are not allowed any more.
#[tokio::test]
async fn connections_to_unjudged_addresses_are_cut() {
    let world = World::new().await;
    let mut open = allow(&["good.com"]);
    open.allow_local_binding = true;
    let proxy = world.start(world.config(open)).await;
    let mut stream = ask(&proxy, &named(1, "good.com", 443)).await.2;
    proxy.handle().update_rules(allow(&["good.com"]));
    assert!(ended(&mut stream).await);
}

#[tokio::test]
async fn answers_to_datagrams_end_with_the_permission() {
    let world = World::new().await;
    let doomed = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let kept = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let [doomed_port, kept_port] =
        [&doomed, &kept].map(|socket| socket.local_addr().unwrap().port());
    let proxy = world.allowing(&["localhost", "127.0.0.1"]).await;
    // Every datagram arrives here, whatever its target.
    *world.internet.datagrams.lock().unwrap() = Some(doomed.local_addr().unwrap());
    let (code, relay, _control) = ask(&proxy, &addressed(3, "0.0.0.0:0".parse().unwrap())).await;
    assert_eq!(code, 0);
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    client.send_to(&datagram("localhost", doomed_port, b"1"), relay).await.unwrap();
    doomed.recv_from(&mut [0; 8]).await.unwrap();
    client.send_to(&datagram("127.0.0.1", kept_port, b"2"), relay).await.unwrap();
    let (_, from) = doomed.recv_from(&mut [0; 8]).await.unwrap();
    doomed.send_to(b"before", from).await.unwrap();
    let mut buffer = [0; 64];
    let length = client.recv(&mut buffer).await.unwrap();
    assert!(buffer[..length].ends_with(b"before"));
    proxy.handle().update_rules(allow(&["127.0.0.1"]));
    // Both reach the relay on one socket, in this order.
    doomed.send_to(b"late", from).await.unwrap();
    kept.send_to(b"after", from).await.unwrap();
    let length = client.recv(&mut buffer).await.unwrap();
    assert!(buffer[..length].ends_with(b"after"), "{:?}", &buffer[..length]);
}
