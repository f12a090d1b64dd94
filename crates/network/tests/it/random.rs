//! Random rules and random requests over every protocol, through the real proxy: the audit and the
//! answer have to be what the model says.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use codex_exec_network::decide::Mode;
use codex_exec_network::{Proxy, Reply};
use tokio::net::UdpSocket;

use crate::decisions::{NAMES, rules};
use crate::model::{Model, Request};
use crate::socks::{addressed, ask, datagram, named};
use crate::world::{World, body, request as http_request, status};

const PATTERNS: &[&str] = &[
    "a.com",
    "*.a.com",
    "**.a.com",
    "f*.org",
    "b.org",
    "localhost",
    "127.0.0.1",
    "10.1.2.3",
    "93.184.216.34",
    "*.*",
    "**.com",
    "?.com",
    "::ffff:10.1.2.3",
];
const ADDRESSES: &[&str] =
    &["127.0.0.1", "10.1.2.3", "93.184.216.34", "::1", "::ffff:10.1.2.3", "2606:4700::1"];
const PROTOCOLS: &[&str] = &["http", "https_connect", "socks5_tcp", "socks5_udp"];
const ANSWERS: &[(&str, &str)] =
    &[("allow", ""), ("deny", "denied"), ("deny", "my own words"), ("ask", "later")];

const LOOPBACK: (IpAddr, IpAddr) =
    (IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST));

pub(crate) struct Dice(pub fastrand::Rng);

impl Dice {
    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.0.usize(..of.len())]
    }

    fn patterns(&mut self, most: usize) -> Vec<String> {
        (0..self.0.usize(..=most)).map(|_| (*self.one(PATTERNS)).to_owned()).collect()
    }

    pub(crate) fn model(&mut self) -> Model {
        let mut allow = self.patterns(4);
        if self.0.bool() {
            allow.push("*".into());
        }
        Model {
            allow,
            deny: self.patterns(1),
            review: self.patterns(1),
            local: self.0.u8(..4) == 0,
            limited: self.0.u8(..4) == 0,
            can_ask: self.0.bool(),
        }
    }

    pub(crate) fn request(&mut self) -> Request {
        let protocol = *self.one(PROTOCOLS);
        let (host, address) = match self.0.u8(..3) {
            0 => {
                let address: IpAddr = self.one(ADDRESSES).parse().unwrap();
                (address.to_string(), Some(address))
            }
            _ => ((*self.one(NAMES)).to_owned(), None),
        };
        let lookup = match self.0.u8(..5) {
            0 => None,
            _ => Some(
                (0..self.0.usize(1..3)).map(|_| self.one(ADDRESSES).parse().unwrap()).collect(),
            ),
        };
        Request {
            protocol,
            host,
            address,
            // Port 1 refuses connections, so the verdict shows and nothing else happens.
            port: *self.one(&[1, 443]),
            method: (protocol == "http")
                .then(|| *self.one(&["GET", "HEAD", "POST", "OPTIONS", "PUT"])),
            answer: *self.one(ANSWERS),
            lookup,
        }
    }
}

pub(crate) fn teach(world: &World, request: &Request) {
    let mut names = world.internet.names.lock().unwrap();
    names.clear();
    if let Some(addresses) = &request.lookup {
        names.insert(request.host.clone(), addresses.clone());
    }
    let reason = request.answer.1.to_owned();
    let reply = match request.answer.0 {
        "allow" => Reply::Allow,
        "deny" => Reply::Deny { reason },
        _ => Reply::Ask { reason },
    };
    let mut replies = world.controller.replies.lock().unwrap();
    replies.clear();
    replies.insert(request.host.clone(), Ok(reply));
}

/// Sends the request; says whether the client was told of a refusal. `None`: it is told nothing.
async fn send(proxy: &Proxy, request: &Request) -> Option<bool> {
    let host = if request.host.contains(':') {
        format!("[{}]", request.host)
    } else {
        request.host.clone()
    };
    let authority = format!("{host}:{}", request.port);
    match request.protocol {
        "http" => {
            let line = format!("{} http://{authority}/", request.method.unwrap());
            let answer = http_request(proxy.http_port(), &line, &authority).await;
            // HEAD has no body, the others say why.
            let told = body(&answer).contains("\"status\":\"blocked\"");
            assert!(request.method == Some("HEAD") || told == (status(&answer) == 403), "{answer}");
            Some(status(&answer) == 403)
        }
        "https_connect" => {
            let line = format!("CONNECT {authority}");
            let mut stream =
                tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port()))
                    .await
                    .unwrap();
            let head = format!("{line} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
            tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await.unwrap();
            Some(status(&crate::world::read_head(&mut stream).await.unwrap()) == 403)
        }
        "socks5_tcp" => {
            let message = match request.address {
                Some(address) => addressed(1, (address, request.port).into()),
                None => named(1, &request.host, request.port),
            };
            Some(ask(proxy, &message).await.0 == 2)
        }
        _ => {
            let (code, relay, control) =
                ask(proxy, &addressed(3, "0.0.0.0:0".parse().unwrap())).await;
            assert_eq!(code, 0);
            let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            client.send_to(&datagram(&request.host, request.port, b"x"), relay).await.unwrap();
            // The caller waits for the audit; the association has to last until then.
            tokio::spawn(async move {
                let mut control = control;
                let _ = tokio::io::AsyncReadExt::read(&mut control, &mut [0]).await;
                drop(client);
            });
            None
        }
    }
}

/// The seed of a random test: `$SEED` to repeat a failure, else a new one.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("SEED").ok();
    given.and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..))
}

#[tokio::test]
async fn the_proxy_decides_as_the_model_does() {
    let seed = seed();
    let mut dice = Dice(fastrand::Rng::with_seed(seed));
    let world = World::new().await;
    for _ in 0..60 {
        let model = dice.model();
        let mut config = world.config(rules(&model));
        config.mode = if model.limited { Mode::Limited } else { Mode::Full };
        config.ask_timeout = model.can_ask.then_some(Duration::from_secs(3600));
        let proxy = world.start(config).await;
        let mut permitted = HashSet::new();
        for _ in 0..25 {
            let request = dice.request();
            teach(&world, &request);
            let refused = send(&proxy, &request).await;
            let records = world.notebook.next().await;
            let last = records.last().unwrap();
            let context = format!("SEED={seed} {model:?} {request:?} {records:?}");
            let expected = model.judge(&request);
            let found = (last.decision.as_str(), last.reason.clone(), last.source.as_str());
            assert_eq!(found, expected, "{context}");
            assert_eq!(last.host, request.host, "{context}");
            assert_eq!(
                (last.port, last.protocol.as_str()),
                (request.port, request.protocol),
                "{context}"
            );
            assert_eq!(
                last.method.as_deref(),
                request.method.or((request.protocol == "https_connect").then_some("CONNECT")),
                "{context}"
            );
            if let Some(refused) = refused {
                assert_eq!(refused, expected.0 != "allow", "{context}");
            }
            if expected.0 == "allow" {
                permitted.extend(request.address);
                match request.host.as_str() {
                    "localhost" => permitted.extend([LOOPBACK.0, LOOPBACK.1]),
                    _ if request.address.is_none() => {
                        permitted.extend(request.lookup.into_iter().flatten());
                    }
                    _ => {}
                }
            }
        }
        proxy.close().await;
        world.notebook.take();
        // Tunnels and datagrams connect after the answer. Only what was judged may be connected to.
        let connected = std::mem::take(&mut *world.internet.connected.lock().unwrap());
        for address in connected.iter().filter(|_| !model.local) {
            assert!(
                permitted.contains(&address.ip()),
                "SEED={seed} {model:?} {address} {permitted:?}"
            );
        }
    }
}
