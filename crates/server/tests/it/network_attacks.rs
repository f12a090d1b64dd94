//! Attacks on the rules of a managed network, at the proxies of a process: other spellings and ports,
//! smuggled hosts, datagrams; and random rules and requests against a model.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::network::{
    answer, asking, behind, blocked, connect, exchange, get, network, next, socks, status, target,
};
use crate::support::*;

/// Spellings of this machine, none of which the rules allow by name.
#[tokio::test]
async fn no_spelling_of_a_local_address_passes_a_wildcard() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (port, hits) = target("0.0.0.0").await;
    let proxies = behind(&mut client, "p", network(json!({"domains": {"*": "allow"}}))).await;
    for host in [
        "127.0.0.1",
        "localhost",
        "LOCALHOST.",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[::ffff:7f00:1]",
        "169.254.169.254",
        "10.0.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "[fe80::1]",
        "[fd00::1]",
        // Looked up, and leads nowhere: that counts as local.
        "rebind.invalid",
    ] {
        let refused = blocked(&get(proxies.http, &format!("{host}:{port}")).await);
        assert_eq!(refused["reason"], "not_allowed_local", "{host}");
        assert_eq!(connect(proxies.http, &format!("{host}:{port}")).await.0, 403, "{host}");
        let bare = host.trim_matches(['[', ']']);
        assert_eq!(socks(proxies.socks, bare, port).await.0, 2, "{host}");
    }
    assert_eq!(hits.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn ports_of_rules_count_only_if_asked_for() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (port, hits) = target("127.0.0.1").await;
    let (other, other_hits) = target("127.0.0.1").await;
    let rules = |match_ports: bool| json!({"domains": {format!("127.0.0.1:{port}"): "allow"}, "matchPorts": match_ports});
    let strict = behind(&mut client, "strict", network(rules(true))).await;
    let wire = behind(&mut client, "wire", network(rules(false))).await;
    for proxies in [strict, wire] {
        assert_eq!(status(&get(proxies.http, &format!("127.0.0.1:{port}")).await), 200);
    }
    assert_eq!(connect(strict.http, &format!("127.0.0.1:{other}")).await.0, 403);
    assert_eq!(socks(strict.socks, "127.0.0.1", other).await.0, 2);
    assert_eq!(status(&get(strict.http, &format!("127.0.0.1:{other}")).await), 403);
    assert_eq!(other_hits.load(Ordering::SeqCst), 0);
    assert_eq!(status(&get(wire.http, &format!("127.0.0.1:{other}")).await), 200);
    assert_eq!((hits.load(Ordering::SeqCst), other_hits.load(Ordering::SeqCst)), (2, 1));
}

/// Requests that name two hosts reach the one that was judged, or none.
#[tokio::test]
async fn smuggled_hosts_reach_nothing_that_is_not_allowed() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (good, _) = target("127.0.0.1").await;
    let (bad, bad_hits) = target("127.0.0.2").await;
    let proxies =
        behind(&mut client, "p", network(json!({"domains": {"127.0.0.1": "allow"}}))).await;
    for head in [
        format!("GET http://127.0.0.1:{good}/ HTTP/1.1\r\nHost: 127.0.0.2:{bad}\r\n"),
        format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:{good}\r\nHost: 127.0.0.2:{bad}\r\n"),
        format!(
            "GET http://127.0.0.1:{good}@127.0.0.2:{bad}/ HTTP/1.1\r\nHost: 127.0.0.1:{good}\r\n"
        ),
        format!("GET http://127.0.0.2:{bad}/ HTTP/1.1\r\nHost: 127.0.0.1:{good}\r\n"),
        format!(
            "GET http://127.0.0.1:{good}/ HTTP/1.1\r\nHost: 127.0.0.1:{good}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n"
        ),
    ] {
        let smuggled = format!("0\r\n\r\nGET http://127.0.0.2:{bad}/ HTTP/1.1\r\nHost: x\r\n\r\n");
        exchange(proxies.http, &format!("{head}Connection: close\r\n\r\n{smuggled}")).await;
        assert_eq!(bad_hits.load(Ordering::SeqCst), 0, "{head}");
    }
    // A tunnel is judged by its request line alone.
    let mut stream = TcpStream::connect(proxies.http).await.unwrap();
    let head = format!("CONNECT 127.0.0.2:{bad} HTTP/1.1\r\nHost: 127.0.0.1:{good}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!((&answer[..], bad_hits.load(Ordering::SeqCst)), (&b"HTTP/1.1 403"[..], 0));
}

#[tokio::test]
async fn datagrams_reach_allowed_hosts_only() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (good, bad) = (
        UdpSocket::bind("127.0.0.1:0").await.unwrap(),
        UdpSocket::bind("127.0.0.2:0").await.unwrap(),
    );
    let rules = json!({"enableSocks5Udp": true, "domains": {"127.0.0.1": "allow"}});
    let proxies = behind(&mut client, "p", network(rules)).await;
    let mut control = TcpStream::connect(proxies.socks).await.unwrap();
    control.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).await.unwrap();
    let mut reply = [0; 12];
    control.read_exact(&mut reply).await.unwrap();
    assert_eq!(reply[..6], [5, 0, 5, 0, 0, 1]);
    let relay = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([reply[10], reply[11]])));
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let datagram = |address: SocketAddr| {
        let SocketAddr::V4(address) = address else { panic!("{address}") };
        let mut datagram = vec![0, 0, 0, 1];
        datagram.extend(address.ip().octets());
        datagram.extend(address.port().to_be_bytes());
        datagram.extend(b"hi");
        datagram
    };
    // The refused one first: once the other has arrived, it has been judged.
    socket.send_to(&datagram(bad.local_addr().unwrap()), relay).await.unwrap();
    socket.send_to(&datagram(good.local_addr().unwrap()), relay).await.unwrap();
    let mut buffer = [0; 16];
    let (length, _) = timeout(PATIENCE, good.recv_from(&mut buffer)).await.unwrap().unwrap();
    assert_eq!(&buffer[..length], b"hi");
    let mut decisions = BTreeMap::new();
    while decisions.len() < 2 {
        let record = next(&mut client, "network/policyDecision").await["params"].clone();
        decisions.insert(record["host"].as_str().unwrap().to_owned(), record["decision"].clone());
    }
    assert_eq!(
        (&decisions["127.0.0.1"], &decisions["127.0.0.2"]),
        (&json!("allow"), &json!("deny"))
    );
    assert_eq!(bad.try_recv(&mut buffer).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

/// Random rules and requests through the proxies of a process, against a model of the rules.
#[tokio::test]
async fn random_requests_are_judged_like_the_model_does() {
    const PATTERNS: &[&str] = &[
        "127.0.0.1",
        "127.0.0.2",
        "127.0.0.3",
        "127.0.0.*",
        "127.0.0.?",
        "*",
        "localhost",
        "a.invalid",
        "*.a.invalid",
        "**.a.invalid",
        "b*.invalid",
    ];
    const HOSTS: &[&str] = &[
        "127.0.0.1",
        "127.0.0.2",
        "127.0.0.3",
        "localhost",
        "LocalHost",
        "a.invalid",
        "x.a.invalid",
        "A.Invalid.",
        "bb.invalid",
        "c.invalid",
    ];
    fn matches(pattern: &str, host: &str) -> bool {
        match pattern {
            "*" => true,
            "127.0.0.*" | "127.0.0.?" => host.starts_with("127.0.0."),
            "*.a.invalid" => host.ends_with(".a.invalid"),
            "**.a.invalid" => host == "a.invalid" || host.ends_with(".a.invalid"),
            "b*.invalid" => host.starts_with('b') && host.ends_with(".invalid"),
            exact => exact == host,
        }
    }
    let server = server();
    let (port, _) = target("0.0.0.0").await;
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..12 {
        let mut client = Client::ready(&server).await;
        let (mut domains, mut review) = (BTreeMap::new(), Vec::new());
        for _ in 0..random.usize(0..5) {
            let pattern = *random.choice(PATTERNS).unwrap();
            let permission = *random.choice(&["allow", "allow", "deny", "none"]).unwrap();
            let permission = if pattern == "*" { "allow" } else { permission };
            domains.insert(pattern, permission);
        }
        if random.u8(..4) == 0 {
            review.push(*random.choice(PATTERNS).unwrap());
        }
        let (local, asks, allows) = (random.bool(), random.bool(), random.bool());
        let rules =
            json!({"domains": domains, "reviewDomains": review, "allowLocalBinding": local});
        let network = if asks { asking(rules.clone()) } else { network(rules.clone()) };
        let proxies = behind(&mut client, "p", network).await;
        for _ in 0..8 {
            let written = *random.choice(HOSTS).unwrap();
            let host = written.to_lowercase().trim_end_matches('.').to_owned();
            let of = |permission: &str| {
                let mut patterns = domains.iter().filter(|(_, given)| **given == permission);
                patterns.any(|(pattern, _)| matches(pattern, &host))
            };
            let is_name = host.ends_with("invalid");
            let by_name = domains.get(host.as_str()) == Some(&"allow");
            let reviewed = review.iter().any(|pattern| matches(pattern, &host));
            let undecided = reviewed || !of("allow");
            let (expected, asked) = if of("deny") {
                ("denied", false)
            } else if !local && !is_name && !by_name {
                ("not_allowed_local", false)
            } else if undecided && !(asks && allows) {
                (if asks { "mine" } else { "not_allowed" }, asks)
            } else if is_name {
                continue; // Depends on a lookup.
            } else {
                ("passed", undecided)
            };
            let what =
                format!("seed {seed}: {written} under {rules}, asks {asks}, allows {allows}");
            let protocol = random.u8(..3);
            let request = tokio::spawn(async move {
                let authority = format!("{written}:{port}");
                match protocol {
                    0 => {
                        let answer = get(proxies.http, &authority).await;
                        match status(&answer) {
                            200 => "passed".to_owned(),
                            _ => blocked(&answer)["reason"].as_str().unwrap().to_owned(),
                        }
                    }
                    1 => connect(proxies.http, &authority).await.0.to_string(),
                    _ => socks(proxies.socks, written, port).await.0.to_string(),
                }
            });
            if asked {
                let question = next(&mut client, "network/policyRequest").await;
                assert_eq!(question["params"]["request"]["host"], *host, "{what}");
                let decision = match allows {
                    true => json!({"type": "allow"}),
                    false => json!({"type": "deny", "reason": "mine"}),
                };
                answer(&mut client, &question, json!({"decision": decision})).await;
            }
            let answer = request.await.unwrap();
            let expected = match (protocol, expected) {
                (0, reason) => reason,
                (1, "passed") => "200",
                (1, _) => "403",
                (_, "passed") => "0",
                (_, _) => "2",
            };
            assert_eq!(answer, expected, "{what}, protocol {protocol}");
            let record = next(&mut client, "network/policyDecision").await["params"].clone();
            assert_eq!(record["host"], *host, "{what}");
            assert_eq!(record["policyOverride"], asked && allows, "{what}");
        }
    }
}
