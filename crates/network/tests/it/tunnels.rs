//! What is checked inside the tunnels of both proxies: their first bytes, if the proxy is to do so.

use std::net::{IpAddr, Ipv4Addr};

use codex_exec_network::Proxy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::random::seed;
use crate::socks;
use crate::transparent::{hello, listening};
use crate::world::{World, read_head, rules};

const ALLOWED: [&str; 3] = ["good.com", "other.com", "93.184.216.34"];

/// A tunnel to this host, and the words that its records have.
async fn tunnel(proxy: &Proxy, socks: bool, host: &str) -> (TcpStream, &'static str) {
    if socks {
        let (code, _, stream) = socks::ask(proxy, &socks::named(1, host, 443)).await;
        assert_eq!(code, 0);
        return (stream, "socks5_tcp");
    }
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port())).await.unwrap();
    let request = format!("CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
    (stream, "https_connect")
}

fn request(host: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes()
}

/// Random tunnels and first bytes in random pieces: a tunnel goes on exactly if its bytes are for its host, or for
/// an allowed one if it leads to an address, and the target gets every byte or none.
#[tokio::test]
async fn tunnels_are_for_the_host_that_they_were_judged_for() {
    let seed = seed();
    let mut dice = fastrand::Rng::with_seed(seed);
    let world = World::new().await;
    let mut origin = listening(&world).await;
    let mut config = world.config(rules(&ALLOWED, &["bad.com"], &[]));
    config.check_tunnels = true;
    let proxy = world.start(config).await;
    for round in 0..200 {
        let (host, socks) = (ALLOWED[dice.usize(..3)], dice.bool());
        let named = ["good.com", "other.com", "bad.com", "new.com"][dice.usize(..4)];
        let is_address = host.parse::<IpAddr>().is_ok();
        let elsewhere = match named {
            _ if named == host => None,
            _ if !is_address => Some((named, "host_mismatch")),
            "bad.com" => Some((named, "denied")),
            "new.com" => Some((named, "not_allowed")),
            _ => None,
        };
        let (bytes, expected) = match dice.u8(..8) {
            0 | 1 => (hello(named), elsewhere),
            2 | 3 => (request(named), elsewhere),
            4 => (b"SSH-2.0-x\r\nGET / HTTP/1.1\r\nHost: bad.com\r\n\r\n".to_vec(), None),
            5 => (b"\0\0\0\x08\x04\xd2\x16\x2f".to_vec(), None),
            6 => {
                let alert = [b"\x15\x03\x01\0\x02\x01\x70".to_vec(), hello(named)].concat();
                (alert, Some((host, "host_mismatch")))
            }
            _ => {
                let spelled = [b" ".to_vec(), request(named)].concat();
                (spelled, Some((host, "host_mismatch")))
            }
        };
        let context = format!("SEED={seed} round {round}: {host} {}", bytes.escape_ascii());
        let (mut near, protocol) = tunnel(&proxy, socks, host).await;
        let mut far = origin.recv().await.unwrap();
        world.notebook.take();
        // The server may speak first.
        far.write_all(b"220 ").await.unwrap();
        let mut greeting = [0; 4];
        near.read_exact(&mut greeting).await.unwrap();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(dice.usize(1..=rest.len()));
            rest = after;
            // A tunnel that was cut takes no more.
            let _ = near.write_all(piece).await;
            tokio::task::yield_now().await;
        }
        let Some((name, reason)) = expected else {
            let mut received = vec![0; bytes.len()];
            far.read_exact(&mut received).await.unwrap();
            assert_eq!(received, bytes, "{context}");
            // Either side may end first.
            let (mut first, mut second) = if dice.bool() { (near, far) } else { (far, near) };
            first.shutdown().await.unwrap();
            assert_eq!(second.read(&mut [0; 9]).await.unwrap(), 0, "{context}");
            second.write_all(b"bye").await.unwrap();
            drop(second);
            let mut last = Vec::new();
            first.read_to_end(&mut last).await.unwrap();
            assert_eq!(last, b"bye", "{context}");
            continue;
        };
        let mut received = Vec::new();
        // No longer than it takes to see that all of it arrived.
        let _ = far.take(bytes.len() as u64).read_to_end(&mut received).await;
        let whole = received.windows(2).any(|two| two == b"\r\n" || two == b"\x16\x03");
        assert!(!whole, "{context}: {}", received.escape_ascii());
        let _ = near.read_to_end(&mut Vec::new()).await;
        let record = world.notebook.take().pop().unwrap();
        assert_eq!((record.host.as_str(), record.reason.as_str()), (name, reason), "{context}");
        assert_eq!((record.protocol.as_str(), record.decision.as_str()), (protocol, "deny"));
        assert_eq!(record.method.as_deref(), (!socks).then_some("CONNECT"));
    }
}

/// The wire contract: without the extension, tunnels are passed on untouched.
#[tokio::test]
async fn tunnels_are_left_alone_unless_they_are_to_be_checked() {
    let world = World::new().await;
    let mut origin = listening(&world).await;
    let proxy = world.start(world.config(rules(&ALLOWED, &["bad.com"], &[]))).await;
    for (socks, bytes) in [(true, hello("bad.com")), (false, request("bad.com"))] {
        let (mut near, _) = tunnel(&proxy, socks, "good.com").await;
        let mut far = origin.recv().await.unwrap();
        near.write_all(&bytes).await.unwrap();
        let mut received = vec![0; bytes.len()];
        far.read_exact(&mut received).await.unwrap();
        assert_eq!(received, bytes);
    }
}

/// What the target says first reaches the client while its first bytes are awaited, its end included.
#[tokio::test]
async fn a_target_may_speak_and_end_before_the_client_does() {
    let world = World::new().await;
    let mut origin = listening(&world).await;
    let mut config = world.config(rules(&ALLOWED, &[], &[]));
    config.check_tunnels = true;
    let proxy = world.start(config).await;
    for socks in [true, false] {
        let (mut near, _) = tunnel(&proxy, socks, "good.com").await;
        let mut far = origin.recv().await.unwrap();
        let bytes = vec![7; 300_000];
        let speaking = bytes.clone();
        let speaker = tokio::spawn(async move {
            far.write_all(&speaking).await.unwrap();
            far.shutdown().await.unwrap();
            far
        });
        let mut received = Vec::new();
        near.read_to_end(&mut received).await.unwrap();
        assert!(received == bytes);
        let mut far = speaker.await.unwrap();
        near.write_all(&hello("good.com")).await.unwrap();
        near.shutdown().await.unwrap();
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, hello("good.com"));
    }
}
