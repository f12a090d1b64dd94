//! The transparent network, by packets: what is judged, what is cut, what is passed on.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Mutex;
use std::time::Duration;

use codex_exec_network::decide::Mode;
use smoltcp::socket::tcp::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::decisions::rules as model_rules;
use crate::model::matches;
use crate::packets::{Client, packet, panicked, query, watch_panics};
use crate::random::{Dice, seed, teach};
use crate::world::{Notebook, World, allow, rules};

/// A server that hands its connections to the test.
pub(crate) async fn listening(world: &World) -> mpsc::UnboundedReceiver<TcpStream> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    *world.internet.origin.lock().unwrap() = Some(listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if sender.send(stream).is_err() {
                return;
            }
        }
    });
    receiver
}

/// A hello for this name in one record.
pub(crate) fn hello(name: &str) -> Vec<u8> {
    let mut extension = (name.len() as u16 + 3).to_be_bytes().to_vec();
    extension.push(0);
    extension.extend((name.len() as u16).to_be_bytes());
    extension.extend(name.as_bytes());
    let mut body = [&[3u8, 3][..], &[9; 32], &[0, 0, 2, 0x13, 1, 1, 0]].concat();
    body.extend((extension.len() as u16 + 4).to_be_bytes());
    body.extend([0, 0]);
    body.extend((extension.len() as u16).to_be_bytes());
    body.extend(extension);
    let mut record = vec![0x16, 3, 1];
    record.extend((body.len() as u16 + 4).to_be_bytes());
    record.extend([1, 0]);
    record.extend((body.len() as u16).to_be_bytes());
    record.extend(body);
    record
}

#[tokio::test]
async fn names_are_judged_and_connected_to_where_they_were_judged() {
    let world = World::new().await;
    let proxy = world.start(world.config(rules(&["good.com"], &["bad.com"], &[]))).await;
    let mut client = Client::of(&proxy);
    for v6 in [false, true] {
        let address = client.look_up("good.com", v6).await.unwrap();
        let connection = client.connect((address, 80).into());
        assert!(client.accepted(connection).await);
        client.send(connection, b"GET /x HTTP/1.1\r\nHost: good.com\r\n\r\n", 7).await;
        client.until(|client| (client.socket(connection).recv_queue() > 15).then_some(())).await;
        let head = client.socket(connection).recv(|data| (0, data[..12].to_vec())).unwrap();
        assert_eq!(head, b"HTTP/1.1 200");
        let [record] = &world.notebook.take()[..] else { panic!() };
        assert_eq!((record.host.as_str(), record.port), ("good.com", 80));
        assert_eq!((record.protocol.as_str(), record.decision.as_str()), ("socks5_tcp", "allow"));
        let connected = std::mem::take(&mut *world.internet.connected.lock().unwrap());
        assert_eq!(connected, ["93.184.216.34:80".parse().unwrap()]);
    }
    assert_eq!(client.look_up("bad.com", false).await, None);
    let address = client.look_up("new.com", false).await.unwrap();
    let refused = client.connect((address, 80).into());
    assert!(!client.accepted(refused).await);
    let words = Notebook::words(&world.notebook.take());
    assert_eq!(words, [("deny", "baseline_policy", "not_allowed".into())]);
    assert_eq!(world.internet.connected(), Vec::<String>::new());
    assert!(!world.internet.looked_up.lock().unwrap().contains(&"new.com".to_owned()));
}

#[tokio::test]
async fn addresses_without_a_name_are_refused_even_if_everything_is_allowed() {
    let world = World::new().await;
    let mut everything = allow(&["*"]);
    everything.allow_local_binding = true;
    let proxy = world.start(world.config(everything)).await;
    let mut client = Client::of(&proxy);
    for target in ["198.18.77.7:80", "[fd63:6f64:6578::7777]:80"] {
        let connection = client.connect(target.parse().unwrap());
        assert!(!client.accepted(connection).await);
        let words = Notebook::words(&world.notebook.take());
        assert_eq!(words, [("deny", "proxy_state", "not_allowed_local".into())]);
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

#[tokio::test]
async fn errors_of_the_target_reach_the_program() {
    let world = World::new().await;
    let mut everything = allow(&["*"]);
    everything.allow_local_binding = true;
    let proxy = world.start(world.config(everything)).await;
    let mut client = Client::of(&proxy);
    let address = client.look_up("good.com", false).await.unwrap();
    let refused = client.connect((address, 1).into());
    assert!(!client.accepted(refused).await, "refused by the target");
    // No address at all.
    for v6 in [false, true] {
        let address = client.look_up("unknown.com", v6).await.unwrap();
        client.connect((address, 80).into());
        let error = client.next_other().await;
        match v6 {
            false => assert_eq!((error[9], error[20], error[21]), (1, 3, 1), "host unreachable"),
            true => assert_eq!((error[6], error[40], error[41]), (58, 1, 3), "host unreachable"),
        }
    }
}

/// The handshake is not completed before the verdict, and a proxy that ends resets what it has.
#[tokio::test]
async fn connections_wait_for_the_verdict() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.ask_timeout = Some(Duration::from_secs(3600));
    let proxy = world.start(config).await;
    let mut client = Client::of(&proxy);
    let good = client.look_up("good.com", false).await.unwrap();
    let open = client.connect((good, 80).into());
    assert!(client.accepted(open).await);
    let asked = client.look_up("asked.com", false).await.unwrap();
    let waiting = client.connect((asked, 80).into());
    let controller = world.controller.clone();
    client.until(|_| (!controller.asked.lock().unwrap().is_empty()).then_some(())).await;
    // Another connection is served meanwhile.
    let other = client.connect((good, 80).into());
    assert!(client.accepted(other).await);
    assert_eq!(client.socket(waiting).state(), State::SynSent);
    proxy.close().await;
    for connection in [open, waiting, other] {
        client
            .until(|client| (client.socket(connection).state() == State::Closed).then_some(()))
            .await;
    }
}

#[tokio::test]
async fn connections_that_name_another_host_are_cut() {
    let world = World::new().await;
    let mut origin = listening(&world).await;
    let everything = rules(&["good.com", "other.com", "93.184.216.34"], &["bad.com"], &[]);
    let proxy = world.start(world.config(everything)).await;
    let mut client = Client::of(&proxy);
    let good = client.look_up("good.com", false).await.unwrap();
    let literal: IpAddr = "93.184.216.34".parse().unwrap();
    let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    for (address, bytes, cut) in [
        (good, hello("good.com"), None),
        (good, hello("GOOD.com"), None),
        (good, request("good.com:443"), None),
        (good, b"GET / HTTP/1.0\r\n\r\n".to_vec(), None),
        (good, b"SSH-2.0-x\r\n".to_vec(), None),
        (good, hello("other.com"), Some(("other.com", "host_mismatch"))),
        (good, hello("bad.com"), Some(("bad.com", "host_mismatch"))),
        (good, request("other.com"), Some(("other.com", "host_mismatch"))),
        (good, b"\x16\x03\x01\x00\x04\x02\0\0\0".to_vec(), Some(("good.com", "host_mismatch"))),
        // To an address: the name has to be allowed, too.
        (literal, hello("other.com"), None),
        (literal, request("93.184.216.34"), None),
        (literal, hello("bad.com"), Some(("bad.com", "denied"))),
        (literal, request("new.com"), Some(("new.com", "not_allowed"))),
    ] {
        let connection = client.connect((address, 443).into());
        assert!(client.accepted(connection).await);
        let mut far = origin.recv().await.unwrap();
        world.notebook.take();
        client.send(connection, &bytes, 11).await;
        match cut {
            None => {
                let mut received = vec![0; bytes.len()];
                let reading = far.read_exact(&mut received);
                tokio::select! {
                    read = reading => drop(read.unwrap()),
                    () = client.until(|_| None::<()>) => unreachable!(),
                }
                assert_eq!(received, bytes);
                assert!(client.socket(connection).may_send());
            }
            Some(expected) => {
                client
                    .until(|client| {
                        (client.socket(connection).state() == State::Closed).then_some(())
                    })
                    .await;
                let mut received = Vec::new();
                let _ = far.read_to_end(&mut received).await;
                assert_eq!(received, b"", "{bytes:?}");
                let records = world.notebook.take();
                let last = records.last().unwrap();
                assert_eq!((last.host.as_str(), last.reason.as_str()), expected, "{bytes:?}");
                assert_eq!(last.decision.as_str(), "deny");
            }
        }
    }
}

#[tokio::test]
async fn a_server_may_speak_first_and_either_side_may_end_first() {
    let world = World::new().await;
    let mut origin = listening(&world).await;
    let proxy = world.allowing(&["good.com"]).await;
    let mut client = Client::of(&proxy);
    let good = client.look_up("good.com", false).await.unwrap();
    let connection = client.connect((good, 22).into());
    assert!(client.accepted(connection).await);
    let mut far = origin.recv().await.unwrap();
    far.write_all(b"SSH-2.0-server\r\n").await.unwrap();
    client.until(|client| (client.socket(connection).recv_queue() == 16).then_some(())).await;
    // The client ends its direction; the server answers afterwards.
    client.send(connection, b"SSH-2.0-client\r\n", 99).await;
    client.socket(connection).close();
    let answering = tokio::spawn(async move {
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        far.write_all(b"bye").await.unwrap();
        received
    });
    assert_eq!(client.read_to_end(connection).await, b"SSH-2.0-server\r\nbye");
    assert_eq!(answering.await.unwrap(), b"SSH-2.0-client\r\n");
    // The server ends its direction; the client sends afterwards.
    let connection = client.connect((good, 22).into());
    assert!(client.accepted(connection).await);
    let mut far = origin.recv().await.unwrap();
    far.write_all(b"{}").await.unwrap();
    far.shutdown().await.unwrap();
    assert_eq!(client.read_to_end(connection).await, b"{}");
    client.send(connection, b"{late}", 99).await;
    client.socket(connection).close();
    let mut received = Vec::new();
    tokio::select! {
        read = far.read_to_end(&mut received) => drop(read.unwrap()),
        () = client.until(|_| None::<()>) => unreachable!(),
    }
    assert_eq!(received, b"{late}");
}

/// Megabytes both ways, with a reader that stops now and then: nothing is lost, and nothing piles up.
#[tokio::test]
async fn bytes_arrive_in_order_and_wait_for_their_reader() {
    let world = World::new().await;
    let mut origin = listening(&world).await;
    let proxy = world.allowing(&["good.com"]).await;
    for mtu in [1280, 65_535] {
        let (mut client, tun) = Client::new(mtu);
        let namespace = codex_exec_network::Namespace::new(tun);
        proxy.handle().serve_namespace(namespace).unwrap();
        let good = client.look_up("good.com", true).await.unwrap();
        let connection = client.connect((good, 9).into());
        assert!(client.accepted(connection).await);
        let far = origin.recv().await.unwrap();
        let (mut reader, mut writer) = far.into_split();
        tokio::spawn(async move { tokio::io::copy(&mut reader, &mut writer).await });
        let mut dice = fastrand::Rng::with_seed(u64::try_from(mtu).unwrap());
        let bytes: Vec<u8> = (0..3_000_000).map(|_| dice.u8(..)).collect();
        let (mut sent, mut received) = (0, Vec::new());
        client
            .until(|client| {
                let socket = client.socket(connection);
                if sent < bytes.len() {
                    sent += socket.send_slice(&bytes[sent..]).unwrap();
                }
                if dice.u8(..3) > 0 {
                    let most = dice.usize(1..40_000);
                    let taken = socket.recv(|data| {
                        let length = data.len().min(most);
                        (length, data[..length].to_vec())
                    });
                    received.extend(taken.unwrap());
                }
                (received.len() == bytes.len()).then_some(())
            })
            .await;
        assert!(received == bytes);
    }
}

#[tokio::test]
async fn limited_mode_refuses_what_it_cannot_read() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.mode = Mode::Limited;
    let proxy = world.start(config).await;
    let mut client = Client::of(&proxy);
    let good = client.look_up("good.com", false).await.unwrap();
    for (port, reason) in [(80, "method_not_allowed"), (443, "mitm_required")] {
        let connection = client.connect((good, port).into());
        assert!(!client.accepted(connection).await);
        assert_eq!(world.notebook.take().last().unwrap().reason, reason);
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

#[tokio::test]
async fn other_datagrams_and_echoes_are_unreachable() {
    let world = World::new().await;
    let proxy = world.allowing(&["*"]).await;
    let mut client = Client::of(&proxy);
    let error = client.datagram("8.8.8.8:443".parse().unwrap(), b"quic").await;
    assert_eq!((error[9], error[20], error[21]), (1, 3, 3), "port unreachable");
    let error = client.datagram("[2606:4700::1]:443".parse().unwrap(), b"quic").await;
    assert_eq!((error[6], error[40], error[41]), (58, 1, 4), "port unreachable");
    client.send_packet(&packet("8.8.8.8".parse().unwrap(), 1, &[8, 0, 0, 0, 0, 1, 0, 1]));
    let error = client.next_other().await;
    assert_eq!((error[9], error[20], error[21]), (1, 3, 1), "host unreachable");
    client.send_packet(&packet("2606:4700::1".parse().unwrap(), 58, &[128, 0, 0, 0, 0, 1, 0, 1]));
    let error = client.next_other().await;
    assert_eq!((error[6], error[40], error[41]), (58, 1, 3), "address unreachable");
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

#[tokio::test]
async fn dns_is_answered_over_tcp_and_on_sockets_that_were_handed_over() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let udp = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let tcp = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (udp_address, tcp_address) = (udp.local_addr().unwrap(), tcp.local_addr().unwrap());
    let (mut client, tun) = Client::new(1500);
    let mut namespace = codex_exec_network::Namespace::new(tun);
    namespace.dns_udp.push(udp);
    namespace.dns_tcp.push(tcp);
    proxy.handle().serve_namespace(namespace).unwrap();
    let expected = client.look_up("good.com", false).await.unwrap();
    let query = query("good.com", 1);
    let framed = [&(query.len() as u16).to_be_bytes()[..], &query].concat();
    let address =
        |answer: &[u8]| IpAddr::from(<[u8; 4]>::try_from(&answer[answer.len() - 4..]).unwrap());
    // To an address that is no nameserver, in small pieces.
    let connection = client.connect("192.0.2.1:53".parse().unwrap());
    assert!(client.accepted(connection).await);
    client.send(connection, &framed, 3).await;
    client.socket(connection).close();
    assert_eq!(address(&client.read_to_end(connection).await), expected);
    let socket = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    socket.send_to(&query, udp_address).await.unwrap();
    let mut buffer = [0; 512];
    let length = socket.recv(&mut buffer).await.unwrap();
    assert_eq!(address(&buffer[..length]), expected);
    let mut stream = TcpStream::connect(tcp_address).await.unwrap();
    stream.write_all(&framed).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!(address(&answer), expected);
    assert_eq!(world.notebook.take(), []);
    assert_eq!(*world.internet.looked_up.lock().unwrap(), Vec::<String>::new());
}

/// More connections than there are places wait; the others go on.
#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.limits.connections = 2;
    let proxy = world.start(config).await;
    let mut client = Client::of(&proxy);
    let good = client.look_up("good.com", false).await.unwrap();
    let connections = [80, 80, 80].map(|port| client.connect((good, port).into()));
    let open = |client: &mut Client| {
        let states = connections.map(|connection| client.socket(connection).state());
        states.into_iter().filter(|state| *state == State::Established).count()
    };
    client.until(|client| (open(client) == 2).then_some(())).await;
    assert_eq!(world.internet.connected().len(), 2);
    let first = connections
        .into_iter()
        .find(|connection| client.socket(*connection).state() == State::Established)
        .unwrap();
    client.socket(first).abort();
    // The SYN that was dropped is sent again.
    client
        .until(|client| (world.internet.connected().len() == 3 && open(client) == 2).then_some(()))
        .await;
}

/// Random rules, names and addresses: the audit and the handshake are what the model says.
#[tokio::test]
async fn the_stack_decides_as_the_model_does() {
    let seed = seed();
    let mut dice = Dice(fastrand::Rng::with_seed(seed));
    let world = World::new().await;
    for _ in 0..30 {
        let model = dice.model();
        let mut config = world.config(model_rules(&model));
        config.mode = if model.limited { Mode::Limited } else { Mode::Full };
        config.ask_timeout = model.can_ask.then_some(Duration::from_secs(3600));
        let proxy = world.start(config).await;
        let mut client = Client::of(&proxy);
        let mut permitted = HashSet::new();
        for _ in 0..20 {
            let mut request = dice.request();
            if request.host == "localhost" {
                continue;
            }
            (request.protocol, request.method) = ("socks5_tcp", None);
            teach(&world, &request);
            let context = format!("SEED={seed} {model:?} {request:?}");
            let address = match request.address {
                Some(address) => address,
                None => {
                    let found = client.look_up(&request.host, dice.0.bool()).await;
                    let denied = model.deny.iter().any(|pattern| matches(pattern, &request.host));
                    assert_eq!(found.is_none(), denied, "{context}");
                    let Some(found) = found else { continue };
                    found
                }
            };
            let connection = client.connect((address, request.port).into());
            let notebook = world.notebook.clone();
            let records = Mutex::new(Vec::new());
            client
                .until(|_| {
                    let mut records = records.lock().unwrap();
                    records.extend(notebook.take());
                    (!records.is_empty()).then_some(())
                })
                .await;
            let records = records.into_inner().unwrap();
            let last = records.last().unwrap();
            let expected = model.judge(&request);
            let found = (last.decision.as_str(), last.reason.clone(), last.source.as_str());
            assert_eq!(found, expected, "{context} {records:?}");
            assert_eq!((last.host.as_str(), last.port), (request.host.as_str(), request.port));
            let passed = expected.0 == "allow";
            let addresses: Vec<_> = match request.address {
                Some(address) => vec![address],
                None => request.lookup.clone().unwrap_or_default(),
            };
            if !passed {
                assert!(!client.accepted(connection).await, "{context}");
            } else if request.port != 1 && addresses.iter().any(|address| !address.is_loopback()) {
                assert!(client.accepted(connection).await, "{context}");
            }
            if passed {
                permitted.extend(addresses);
            }
            client.socket(connection).abort();
        }
        proxy.close().await;
        world.notebook.take();
        let connected = std::mem::take(&mut *world.internet.connected.lock().unwrap());
        for address in connected.iter().filter(|_| !model.local) {
            assert!(permitted.contains(&address.ip()), "SEED={seed} {model:?} {address}");
        }
    }
}

/// Packets of every kind and damage, also such as belong to an open connection: the stack goes on.
#[tokio::test]
async fn hostile_packets_harm_nothing_but_their_own_connection() {
    let seed = seed();
    let mut dice = fastrand::Rng::with_seed(seed);
    watch_panics();
    let world = World::new().await;
    let proxy = world.allowing(&["good.com", "8.8.8.8", "2606:4700::1"]).await;
    let mut client = Client::of(&proxy);
    let good = client.look_up("good.com", false).await.unwrap();
    let untouched = client.connect((good, 80).into());
    assert!(client.accepted(untouched).await);
    let targets: Vec<IpAddr> =
        [good, "8.8.8.8".parse().unwrap(), "2606:4700::1".parse().unwrap()].into();
    for round in 0..20_000 {
        let target = targets[dice.usize(..targets.len())];
        // Few ports, so that segments meet connections; sequence numbers near those of others.
        let mut payload: Vec<u8> = (0..dice.usize(..80)).map(|_| dice.u8(..)).collect();
        if payload.len() >= 20 && dice.u8(..8) > 0 {
            let port = 60_000 + dice.u16(..8);
            payload[..2].copy_from_slice(&port.to_be_bytes());
            let to: u16 = *dice.choice(&[53, 80, 443]).unwrap();
            payload[2..4].copy_from_slice(&to.to_be_bytes());
            payload[4..8].copy_from_slice(&dice.u32(..4).wrapping_sub(2).to_be_bytes());
            payload[12] = (dice.u8(4..8)) << 4;
            payload[13] =
                *dice.choice(&[0x02, 0x02, 0x10, 0x11, 0x18, 0x04, 0x12, 0xff, 0]).unwrap();
        }
        let protocol = *dice.choice(&[6, 6, 6, 6, 17, 1, 58, 0, 43, 255]).unwrap();
        let mut bytes = packet(target, protocol, &payload);
        if dice.u8(..4) == 0 {
            for _ in 0..3 {
                let at = dice.usize(..bytes.len());
                bytes[at] = dice.u8(..);
            }
            bytes.truncate(dice.usize(1..=bytes.len()));
        }
        // The client answers nothing of it: its own sockets are elsewhere.
        client.send_packet(&bytes);
        if round % 64 == 0 {
            client.until(|_| Some(())).await;
        }
    }
    client.send(untouched, b"GET /u HTTP/1.1\r\nHost: good.com\r\n\r\n", 99).await;
    client.until(|client| (client.socket(untouched).recv_queue() > 15).then_some(())).await;
    let fresh = client.connect((good, 80).into());
    assert!(client.accepted(fresh).await, "SEED={seed}");
    assert!(!panicked(), "SEED={seed}");
}

/// Random segments with the right numbers for a live connection, damaged in flags, window and length.
#[tokio::test]
async fn hostile_segments_of_a_live_connection_do_not_stop_the_stack() {
    let seed = seed();
    let mut dice = fastrand::Rng::with_seed(seed);
    watch_panics();
    let world = World::new().await;
    let proxy = world.allowing(&["8.8.8.8"]).await;
    let (mut client, tun) = Client::new(1500);
    let namespace = codex_exec_network::Namespace::new(tun);
    proxy.handle().serve_namespace(namespace).unwrap();
    let target: IpAddr = "8.8.8.8".parse().unwrap();
    for attempt in 0..200u16 {
        let port = 10_000 + attempt;
        let segment = |seq: u32, ack: u32, flags: u8, window: u16, data: &[u8]| {
            let mut bytes = port.to_be_bytes().to_vec();
            bytes.extend(80u16.to_be_bytes());
            bytes.extend(seq.to_be_bytes());
            bytes.extend(ack.to_be_bytes());
            bytes.extend([5 << 4, flags]);
            bytes.extend(window.to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(data);
            packet(target, 6, &bytes)
        };
        let start = dice.u32(..);
        client.send_packet(&segment(start, 0, 2, 65_535, b""));
        let theirs = client.synchronized(port).await;
        for _ in 0..dice.usize(..40) {
            let near = |dice: &mut fastrand::Rng, base: u32| {
                base.wrapping_add(match dice.u8(..4) {
                    0 => dice.u32(..),
                    1 => dice.u32(..300_000),
                    _ => dice.u32(..8).wrapping_sub(3),
                })
            };
            let (seq, ack) = (near(&mut dice, start), near(&mut dice, theirs));
            let flags = *dice.choice(&[0x10, 0x18, 0x10, 0x11, 0x12, 0x14, 0x01, 0x30]).unwrap();
            let data = vec![b'G'; *dice.choice(&[0, 1, 30, 1400]).unwrap()];
            let window = *dice.choice(&[0, 1, 1000, 65_535]).unwrap();
            client.send_packet(&segment(seq, ack, flags, window, &data));
        }
        client.until(|_| Some(())).await;
    }
    let fresh = client.connect((target, 80).into());
    assert!(client.accepted(fresh).await, "SEED={seed}");
    assert!(!panicked(), "SEED={seed}");
}
