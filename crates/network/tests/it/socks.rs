//! The SOCKS5 proxy.

use std::net::{Ipv4Addr, SocketAddr};

use codex_exec_network::Proxy;
use codex_exec_network::decide::Mode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use crate::world::{Notebook, World, allow, read_head, rules};

/// A request with a name.
pub(crate) fn named(command: u8, name: &str, port: u16) -> Vec<u8> {
    let mut message = vec![5, command, 0, 3, name.len() as u8];
    message.extend(name.as_bytes());
    message.extend(port.to_be_bytes());
    message
}

/// A request with an address.
pub(crate) fn addressed(command: u8, address: SocketAddr) -> Vec<u8> {
    let mut message = vec![5, command, 0];
    match address {
        SocketAddr::V4(v4) => {
            message.push(1);
            message.extend(v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            message.push(4);
            message.extend(v6.ip().octets());
        }
    }
    message.extend(address.port().to_be_bytes());
    message
}

/// Greets, sends the request, and returns the code of the reply with the bound address.
pub(crate) async fn ask(proxy: &Proxy, request: &[u8]) -> (u8, SocketAddr, TcpStream) {
    let mut stream =
        TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.socks_port().unwrap())).await.unwrap();
    stream.write_all(&[5, 2, 2, 0]).await.unwrap();
    let mut method = [0; 2];
    stream.read_exact(&mut method).await.unwrap();
    assert_eq!(method, [5, 0]);
    stream.write_all(request).await.unwrap();
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).await.unwrap();
    assert_eq!((reply[0], reply[2], reply[3]), (5, 0, 1));
    let ip = Ipv4Addr::new(reply[4], reply[5], reply[6], reply[7]);
    (reply[1], (ip, u16::from_be_bytes([reply[8], reply[9]])).into(), stream)
}

#[tokio::test]
async fn connections_pass_or_are_refused() {
    let world = World::new().await;
    world.internet.name("inside.com", &["10.0.0.1"]);
    let rules = rules(&["good.com", "93.184.216.50", "localhost", "inside.com"], &["bad.com"], &[]);
    let proxy = world.start(world.config(rules)).await;
    let public: SocketAddr = "93.184.216.50:2222".parse().unwrap();
    for request in [
        named(1, "good.com", 2222),
        named(1, "GOOD.com.", 2222),
        addressed(1, public),
        named(1, "93.184.216.50", 2222),
        named(1, "1572395058", 2222),
        named(1, "localhost", world.origin.port()),
    ] {
        let (code, bound, mut stream) = ask(&proxy, &request).await;
        assert_eq!(code, 0);
        assert!(bound.port() != 0);
        stream.write_all(b"GET /in HTTP/1.1\r\n\r\n").await.unwrap();
        assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
        let [record] = &world.notebook.take()[..] else { panic!() };
        assert_eq!((record.protocol.as_str(), record.method.as_deref()), ("socks5_tcp", None));
    }
    let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    for (request, reason) in [
        (named(1, "bad.com", 80), Some("denied")),
        (named(1, "new.com", 80), Some("not_allowed")),
        (named(1, "inside.com", 80), Some("not_allowed_local")),
        (addressed(1, local(80)), Some("not_allowed_local")),
        (addressed(1, "[::1]:80".parse().unwrap()), Some("not_allowed_local")),
        (addressed(1, "[::ffff:127.0.0.1]:80".parse().unwrap()), Some("not_allowed_local")),
        (named(1, "2130706433", 80), Some("not_allowed_local")),
        // Names that are none.
        (named(1, "", 80), None),
        (named(1, "a b", 80), None),
        (named(1, "good.com\0.bad.com", 80), None),
        (named(1, "good.com:80", 80), None),
        (named(1, "u@good.com", 80), None),
        (named(1, "[::1]", 80), None),
        (named(1, " good.com", 80), None),
    ] {
        let (code, _, mut stream) = ask(&proxy, &request).await;
        assert_eq!(code, 2, "{request:?}");
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        let reasons: Vec<_> =
            world.notebook.take().into_iter().map(|record| record.reason).collect();
        assert_eq!(reasons, reason.map(str::to_owned).into_iter().collect::<Vec<_>>());
    }
    let (code, _, _) = ask(&proxy, &named(1, "good.com", 1)).await;
    assert_eq!(code, 5, "unreachable");
    for command in [2, 9] {
        let (code, _, _) = ask(&proxy, &named(command, "good.com", 80)).await;
        assert_eq!(code, 7, "not a command");
    }
}

#[tokio::test]
async fn clients_that_need_authentication_are_turned_away() {
    let world = World::new().await;
    let proxy = world.allowing(&["*"]).await;
    for (greeting, answer) in [
        (&[5u8, 1, 2][..], &[5u8, 255][..]),
        (&[5, 0], &[5, 255]),
        (&[4, 1, 0, 80, 127, 0, 0, 1, 0], &[]),
        (b"GET / HTTP/1.1\r\n\r\n", &[]),
    ] {
        let mut stream =
            TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.socks_port().unwrap())).await.unwrap();
        stream.write_all(greeting).await.unwrap();
        let mut received = Vec::new();
        let _ = stream.read_to_end(&mut received).await;
        assert_eq!(received, answer);
    }
}

#[tokio::test]
async fn limited_mode_refuses_before_and_after_the_host_rules() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.mode = Mode::Limited;
    let proxy = world.start(config).await;
    for (name, port, expected) in [
        ("good.com", 80, vec![("deny", "mode_guard", "method_not_allowed")]),
        ("new.com", 80, vec![("deny", "mode_guard", "method_not_allowed")]),
        (
            "good.com",
            443,
            vec![("allow", "baseline_policy", "allow"), ("deny", "mode_guard", "mitm_required")],
        ),
        ("new.com", 443, vec![("deny", "baseline_policy", "not_allowed")]),
    ] {
        let (code, _, _) = ask(&proxy, &named(1, name, port)).await;
        assert_eq!(code, 2);
        let expected: Vec<_> = expected.into_iter().map(|(a, b, c)| (a, b, c.to_owned())).collect();
        assert_eq!(Notebook::words(&world.notebook.take()), expected);
    }
}

/// A datagram to a name.
pub(crate) fn datagram(name: &str, port: u16, payload: &[u8]) -> Vec<u8> {
    let mut message = named(0, name, port);
    message[..3].fill(0);
    message.extend(payload);
    message
}

#[tokio::test]
async fn datagrams_are_judged_one_by_one() {
    let world = World::new().await;
    let far = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    *world.internet.datagrams.lock().unwrap() = Some(far.local_addr().unwrap());
    let proxy =
        world.start(world.config(rules(&["good.com", "localhost"], &["bad.com"], &[]))).await;
    let (code, relay, control) = ask(&proxy, &addressed(3, "0.0.0.0:0".parse().unwrap())).await;
    assert_eq!((code, relay.ip()), (0, Ipv4Addr::LOCALHOST.into()));
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    for (message, expected) in [
        (datagram("good.com", 53, b"1"), Some(("allow", "allow"))),
        (datagram("bad.com", 53, b"2"), Some(("deny", "denied"))),
        (datagram("new.com", 53, b"3"), Some(("deny", "not_allowed"))),
        (datagram("127.0.0.1", 53, b"4"), Some(("deny", "not_allowed_local"))),
        (datagram("localhost", far.local_addr().unwrap().port(), b"5"), Some(("allow", "allow"))),
    ] {
        client.send_to(&message, relay).await.unwrap();
        let records = world.notebook.next().await;
        assert_eq!(records[0].protocol.as_str(), "socks5_udp");
        let words = (records[0].decision.as_str(), records[0].reason.as_str());
        assert_eq!(Some(words), expected);
    }
    // Fragments and nonsense are dropped without a word; so is what another client sends.
    let mut fragment = datagram("good.com", 53, b"6");
    fragment[2] = 1;
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    for message in [&fragment[..], b"", b"\0\0\0\x09", b"\0\0\0\x03\xffshort"] {
        client.send_to(message, relay).await.unwrap();
    }
    stranger.send_to(&datagram("good.com", 53, b"7"), relay).await.unwrap();
    client.send_to(&datagram("good.com", 53, b"8"), relay).await.unwrap();
    let mut arrived = Vec::new();
    let mut buffer = [0; 64];
    let mut from = None;
    while !arrived.contains(&b'8') {
        let (length, sender) = far.recv_from(&mut buffer).await.unwrap();
        assert_eq!(length, 1);
        arrived.push(buffer[0]);
        from = Some(sender);
    }
    arrived.sort_unstable();
    assert_eq!(arrived, b"158");
    // Answers come from where a datagram was sent to, and nowhere else.
    let from = from.unwrap();
    let sender = SocketAddr::from((Ipv4Addr::LOCALHOST, from.port()));
    stranger.send_to(b"spoofed", sender).await.unwrap();
    far.send_to(b"answer", sender).await.unwrap();
    let (length, _) = client.recv_from(&mut buffer).await.unwrap();
    assert_eq!(&buffer[..8], [&[0, 0, 0, 1][..], &[127, 0, 0, 1]].concat());
    assert_eq!(&buffer[10..length], b"answer");
    // The association ends with its connection: its port is free again.
    drop(control);
    while UdpSocket::bind(relay).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn datagrams_can_be_switched_off() {
    let world = World::new().await;
    let association = addressed(3, "0.0.0.0:0".parse().unwrap());
    let mut config = world.config(allow(&["*"]));
    config.socks5_udp = false;
    let proxy = world.start(config).await;
    assert_eq!(ask(&proxy, &association).await.0, 7);
    // In limited mode the association is made and nothing passes.
    let mut config = world.config(allow(&["good.com"]));
    config.mode = Mode::Limited;
    let proxy = world.start(config).await;
    let (code, relay, _control) = ask(&proxy, &association).await;
    assert_eq!(code, 0);
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    client.send_to(&datagram("good.com", 443, b"x"), relay).await.unwrap();
    let words = Notebook::words(&world.notebook.next().await);
    assert_eq!(words, [("deny", "mode_guard", "method_not_allowed".into())]);
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}
