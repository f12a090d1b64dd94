//! The world around a proxy: names with addresses, an origin server behind every public address, a
//! controller with prepared answers, and a notebook for the audit.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use codex_exec_network::address::is_public;
use codex_exec_network::rules::{List, Rules};
use codex_exec_network::{
    Config, Connector, Decider, NoReply, Observer, Proxy, Question, Record, Reply,
};
use futures_util::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

/// Public addresses lead to `origin`, unless the port is 1, which refuses.
#[derive(Default)]
pub(crate) struct Internet {
    pub names: Mutex<HashMap<String, Vec<IpAddr>>>,
    /// Names whose second lookup gives something else.
    pub rebound: Mutex<HashMap<String, Vec<IpAddr>>>,
    pub origin: Mutex<Option<SocketAddr>>,
    pub datagrams: Mutex<Option<SocketAddr>>,
    pub looked_up: Mutex<Vec<String>>,
    pub connected: Mutex<Vec<SocketAddr>>,
}

impl Internet {
    pub(crate) fn name(&self, name: &str, addresses: &[&str]) {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        self.names.lock().unwrap().insert(name.into(), addresses);
    }

    pub(crate) fn connected(&self) -> Vec<String> {
        self.connected.lock().unwrap().iter().map(ToString::to_string).collect()
    }
}

impl Connector for Internet {
    fn look_up<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.looked_up.lock().unwrap().push(name.to_owned());
        let found = self.names.lock().unwrap().get(name).cloned();
        if let Some(next) = self.rebound.lock().unwrap().remove(name) {
            self.names.lock().unwrap().insert(name.into(), next);
        }
        Box::pin(async move {
            match found {
                // A name without addresses is a server that never answers.
                Some(addresses) if addresses.is_empty() => std::future::pending().await,
                Some(addresses) => Ok(addresses),
                None => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        self.connected.lock().unwrap().push(address);
        let there = match (address.ip(), *self.origin.lock().unwrap()) {
            _ if address.port() == 1 => None,
            (ip, Some(origin)) if is_public(ip) => Some(origin),
            (ip, _) if ip.is_loopback() => Some(address),
            (_, origin) => origin,
        };
        Box::pin(
            async move { TcpStream::connect(there.ok_or(io::ErrorKind::ConnectionRefused)?).await },
        )
    }

    fn send<'a>(
        &'a self,
        socket: &'a UdpSocket,
        datagram: &'a [u8],
        address: SocketAddr,
    ) -> BoxFuture<'a, io::Result<usize>> {
        self.connected.lock().unwrap().push(address);
        let there = *self.datagrams.lock().unwrap();
        Box::pin(async move {
            match there {
                Some(there) => socket.send_to(datagram, there).await,
                None => Ok(datagram.len()),
            }
        })
    }
}

/// Keeps the audit.
#[derive(Default)]
pub(crate) struct Notebook {
    records: Mutex<Vec<Record>>,
    written: tokio::sync::Notify,
}

impl Observer for Notebook {
    fn observe(&self, record: Record) {
        self.records.lock().unwrap().push(record);
        self.written.notify_one();
    }
}

impl Notebook {
    pub(crate) fn take(&self) -> Vec<Record> {
        std::mem::take(&mut self.records.lock().unwrap())
    }

    /// Waits for records, for requests that get no answer.
    pub(crate) async fn next(&self) -> Vec<Record> {
        loop {
            let records = self.take();
            if !records.is_empty() {
                return records;
            }
            self.written.notified().await;
        }
    }

    /// Decision, source and reason of each record.
    pub(crate) fn words(records: &[Record]) -> Vec<(&'static str, &'static str, String)> {
        records
            .iter()
            .map(|record| (record.decision.as_str(), record.source.as_str(), record.reason.clone()))
            .collect()
    }
}

/// Answers by host. A host without an answer is never answered.
#[derive(Default)]
pub(crate) struct Controller {
    pub replies: Mutex<HashMap<String, Result<Reply, NoReply>>>,
    pub asked: Mutex<Vec<Question>>,
}

impl Decider for Controller {
    fn decide(&self, question: Question) -> BoxFuture<'_, Result<Reply, NoReply>> {
        let reply = self.replies.lock().unwrap().get(question.host.as_str()).cloned();
        self.asked.lock().unwrap().push(question);
        Box::pin(async move {
            match reply {
                Some(reply) => reply,
                None => std::future::pending().await,
            }
        })
    }
}

pub(crate) struct World {
    pub internet: Arc<Internet>,
    pub notebook: Arc<Notebook>,
    pub controller: Arc<Controller>,
    pub origin: SocketAddr,
}

impl World {
    pub(crate) async fn new() -> Self {
        let internet = Arc::new(Internet::default());
        let origin = origin().await;
        *internet.origin.lock().unwrap() = Some(origin);
        internet.name("good.com", &["93.184.216.34"]);
        internet.name("other.com", &["93.184.216.35"]);
        Self { internet, notebook: Arc::default(), controller: Arc::default(), origin }
    }

    pub(crate) fn config(&self, rules: Rules) -> Config {
        let mut config = Config::new(rules);
        config.connector = self.internet.clone();
        config
    }

    pub(crate) async fn start(&self, config: Config) -> Proxy {
        Proxy::start(config, Some(self.controller.clone()), self.notebook.clone()).await.unwrap()
    }

    /// A proxy that allows these patterns.
    pub(crate) async fn allowing(&self, patterns: &[&str]) -> Proxy {
        self.start(self.config(allow(patterns))).await
    }
}

pub(crate) fn allow(patterns: &[&str]) -> Rules {
    rules(patterns, &[], &[])
}

pub(crate) fn rules(allow: &[&str], deny: &[&str], review: &[&str]) -> Rules {
    let mut rules = Rules::default();
    for (list, patterns) in [(List::Allow, allow), (List::Deny, deny), (List::Review, review)] {
        for pattern in patterns {
            rules.add(list, pattern).unwrap();
        }
    }
    rules
}

/// A server that answers each request with its head, in which `|` ends a line; after an upgrade, with
/// the bytes it is sent.
pub(crate) async fn origin() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    address
}

async fn answer(mut stream: TcpStream) -> io::Result<()> {
    loop {
        let head = read_head(&mut stream).await?;
        if head.to_lowercase().contains("upgrade: echo") {
            let answer =
                "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
            stream.write_all(answer.as_bytes()).await?;
            let (mut reader, mut writer) = stream.split();
            tokio::io::copy(&mut reader, &mut writer).await?;
            return Ok(());
        }
        let body = head.replace("\r\n", "|");
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nX-Origin: yes\r\nKeep-Alive: 5\r\n\
             Proxy-Authenticate: Basic\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\n{body}"
        );
        stream.write_all(answer.as_bytes()).await?;
    }
}

/// Reads up to the end of a message's head.
pub(crate) async fn read_head(stream: &mut TcpStream) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8(head).unwrap())
}

/// Sends bytes to a port and reads until the other side closes.
pub(crate) async fn exchange(port: u16, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A reset after the answer is an end, too.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

/// A request that closes its connection.
pub(crate) async fn request(port: u16, line: &str, host: &str) -> String {
    exchange(
        port,
        format!("{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes(),
    )
    .await
}

pub(crate) fn status(answer: &str) -> u16 {
    answer
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .unwrap_or_else(|| panic!("{answer:?}"))
}

pub(crate) fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}
