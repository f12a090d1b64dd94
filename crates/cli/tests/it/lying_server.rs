//! A server that lies: a proxy in front of a real one that changes, breaks, repeats and invents responses,
//! and an HTTP service that does the same as a registry and as an issuer.
//!
//! The lies are a function of the seed. After the first lie, a connection without traffic is closed, so that a
//! client that waits for a message that was never sent ends.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_websockets::{ClientBuilder, Limits, Message, ServerBuilder};

/// A connection that was lied to and has no traffic for this long is closed.
const IDLE: Duration = Duration::from_millis(700);
/// Responses to one client, so that nothing it asks for is endless.
const MOST_RESPONSES: usize = 3_000;

/// What the server lies about.
#[derive(Debug, Clone)]
pub(crate) enum Lies {
    /// Anything, at random.
    Random(u64),
    /// Responds to this method with this result, and to others with the truth.
    Result(String, Value),
    /// Changes the responses to this method whose numbers are in this range, and tells the truth otherwise.
    Change(&'static str, Range<usize>, fn(&mut Value)),
    /// Invents a result for every request of these methods.
    Invent(&'static [&'static str], fn(&str) -> Value),
}

/// The running server. It ends with its runtime.
#[derive(Debug, Clone)]
pub(crate) struct LyingServer {
    pub address: SocketAddr,
    /// The methods that clients called, and the targets of HTTP requests.
    pub called: Arc<Mutex<Vec<String>>>,
}

/// What a lie needs to know.
#[derive(Debug, Clone)]
struct Setting {
    /// The URL of the real server.
    real: String,
    lies: Lies,
    /// A path of the client's machine that nothing may change. Requests that contain it are refused, because
    /// the real server is on the same machine.
    forbidden: String,
    address: SocketAddr,
    called: Arc<Mutex<Vec<String>>>,
}

impl LyingServer {
    pub(crate) async fn start(real: &str, lies: Lies, forbidden: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let called = Arc::new(Mutex::new(Vec::new()));
        let setting = Setting {
            real: real.to_owned(),
            lies,
            forbidden: forbidden.to_owned(),
            address,
            called: called.clone(),
        };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, setting.clone()));
            }
        });
        Self { address, called }
    }
}

async fn serve(stream: TcpStream, setting: Setting) {
    let mut head = [0; 4096];
    let mut len = 0;
    while !head[..len].windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.peek(&mut head).await {
            Ok(0) | Err(_) => return,
            Ok(more) if more > len => len = more,
            Ok(_) => tokio::task::yield_now().await,
        }
    }
    let text = String::from_utf8_lossy(&head[..len]).to_ascii_lowercase();
    match text.contains("upgrade: websocket") {
        true => relay(stream, setting).await,
        false => answer(stream, setting).await,
    };
}

/// Relays one connection to the real server, with lies.
async fn relay(stream: TcpStream, setting: Setting) -> Option<()> {
    let (_, mut client) = ServerBuilder::new().accept(stream).await.ok()?;
    let uri = setting.real.parse().unwrap();
    let builder = ClientBuilder::from_uri(uri).limits(Limits::unlimited());
    let (mut server, _) = builder.connect().await.ok()?;
    let mut liar = Liar::new(&setting);
    let mut methods: HashMap<String, String> = HashMap::new();
    for _ in 0..MOST_RESPONSES {
        tokio::select! {
            message = client.next() => {
                let message = message?.ok()?;
                let Some(text) = message.as_text() else { continue };
                let request: Value = serde_json::from_str(text).ok()?;
                if let Some(method) = request["method"].as_str() {
                    methods.insert(request["id"].to_string(), method.to_owned());
                    setting.called.lock().unwrap().push(method.to_owned());
                }
                if text.contains(&setting.forbidden) {
                    let error = json!({"code": -32603, "message": "refused"});
                    let error = json!({"id": request["id"], "error": error});
                    client.send(Message::text(error.to_string())).await.ok()?;
                    continue;
                }
                server.send(message).await.ok()?;
            }
            message = server.next() => {
                let message = message?.ok()?;
                let Some(text) = message.as_text() else { continue };
                let truth: Value = serde_json::from_str(text).ok()?;
                let method = methods.get(&truth["id"].to_string()).cloned().unwrap_or_default();
                for said in liar.said(truth, &method) {
                    client.send(said?).await.ok()?;
                }
            }
            () = tokio::time::sleep(IDLE), if liar.lied => break,
        }
    }
    let _ = client.close().await;
    Some(())
}

/// Makes lies.
struct Liar {
    random: Rng,
    lies: Lies,
    /// How many of 100 responses are lies.
    percent: u32,
    forbidden: String,
    /// How often the method of [`Lies::Change`] was answered.
    asked: usize,
    /// Whether anything that was said is not the truth.
    lied: bool,
}

impl Liar {
    fn new(setting: &Setting) -> Self {
        let seed = if let Lies::Random(seed) = setting.lies { seed } else { 0 };
        let mut random = Rng::with_seed(seed);
        let percent = [4, 10, 25, 60][random.usize(..4)];
        let (lies, forbidden) = (setting.lies.clone(), setting.forbidden.clone());
        Self { random, lies, percent, forbidden, asked: 0, lied: false }
    }

    /// What is sent instead of the truth; `None` closes the connection.
    fn said(&mut self, mut truth: Value, method: &str) -> Vec<Option<Message>> {
        let text = |value: &Value| Some(Message::text(value.to_string()));
        match &self.lies {
            Lies::Result(about, result) => {
                if about == method && truth.get("id").is_some() {
                    truth = json!({"id": truth["id"], "result": result});
                    self.lied = true;
                }
                return vec![text(&truth)];
            }
            Lies::Change(about, which, change) => {
                if *about == method && truth.get("result").is_some() {
                    if which.contains(&self.asked) {
                        change(&mut truth["result"]);
                        self.lied = true;
                    }
                    self.asked += 1;
                }
                return vec![text(&truth)];
            }
            Lies::Invent(about, invent) => {
                if about.contains(&method) {
                    truth = json!({"id": truth["id"], "result": invent(method)});
                    self.lied = true;
                }
                return vec![text(&truth)];
            }
            Lies::Random(_) => {}
        }
        // A client whose handshake always fails would show little.
        let percent = if method == "initialize" { self.percent / 4 } else { self.percent };
        if self.random.u32(..100) >= percent {
            return vec![text(&truth)];
        }
        self.lied = true;
        match self.random.u32(..100) {
            0..70 => {
                let inside = if truth.get("result").is_some() { "result" } else { "params" };
                for _ in 0..self.random.usize(1..4) {
                    self.change(&mut truth[inside], "");
                }
                vec![text(&truth)]
            }
            70..76 => {
                truth["result"] = self.any(3);
                vec![text(&truth)]
            }
            76..84 => {
                let (code, message) = (self.number(), self.string("message"));
                let data = json!({"kind": self.string("kind")});
                let error = json!({"code": code, "message": message, "data": data});
                vec![text(&json!({"id": truth["id"], "error": error}))]
            }
            84..88 => {
                truth["id"] = self.any(1);
                vec![text(&truth)]
            }
            88..92 => vec![text(&truth), text(&truth)],
            92..95 => {
                let names = ["process/output", "process/exited", "process/closed", "fs/changed"];
                let name = names[self.random.usize(..names.len())];
                let params = json!({
                    "processId": self.any(0), "seq": self.number(), "stream": self.string(""),
                    "chunk": self.string("chunk"), "exitCode": self.number(),
                });
                vec![text(&json!({"method": name, "params": params})), text(&truth)]
            }
            95..97 => vec![Some(Message::text(self.string("")))],
            97..99 => vec![Some(Message::binary(vec![0xff, 0, 0x1b, b'['])), text(&truth)],
            _ => vec![None],
        }
    }

    /// Changes one value somewhere inside.
    fn change(&mut self, value: &mut Value, key: &str) {
        let deeper = self.random.u32(..100) < 92;
        match value {
            Value::Object(map) if deeper && !map.is_empty() => {
                let at = self.random.usize(..map.len());
                let Some(key) = map.keys().nth(at).cloned() else { return };
                match self.random.u32(..100) {
                    0..6 => drop(map.remove(&key)),
                    _ => self.change(&mut map[&key], &key),
                }
            }
            Value::Array(list) if deeper && !list.is_empty() => {
                let at = self.random.usize(..list.len());
                match self.random.u32(..100) {
                    0..6 => list.clear(),
                    6..20 => {
                        let mut copies = vec![list[at].clone(); self.random.usize(1..100)];
                        copies.iter_mut().for_each(|copy| self.change(copy, key));
                        list.extend(copies);
                    }
                    _ => self.change(&mut list[at], key),
                }
            }
            Value::String(text) if deeper => {
                *text = match (key, text.is_empty()) {
                    // Truncated base64.
                    ("chunk" | "data", false) => text[..text.len() - 1].to_owned(),
                    _ => self.string(key),
                }
            }
            Value::Number(_) if deeper => *value = self.number(),
            Value::Bool(is) if deeper => *is = !*is,
            other => *other = self.any(2),
        }
    }

    fn any(&mut self, depth: usize) -> Value {
        match self.random.u32(..if depth == 0 { 4 } else { 6 }) {
            0 => Value::Null,
            1 => Value::Bool(self.random.bool()),
            2 => self.number(),
            3 => Value::String(self.string("")),
            4 => (0..self.random.usize(..4)).map(|_| self.any(depth - 1)).collect(),
            _ => {
                let keys = ["path", "entries", "fileName", "sessionId", "cwd", "\u{1b}[2J"];
                let mut map = Map::new();
                for _ in 0..self.random.usize(..4) {
                    let key = keys[self.random.usize(..keys.len())];
                    map.insert(key.to_owned(), self.any(depth - 1));
                }
                map.into()
            }
        }
    }

    fn number(&mut self) -> Value {
        match self.random.u32(..9) {
            0 => json!(u64::MAX),
            1 => json!(i64::MIN),
            2 => json!(-1),
            3 => json!(0),
            4 => json!(1e308),
            5 => json!(1.5),
            6 => json!(i64::MAX),
            7 => json!(u64::from(u32::MAX) + 1),
            _ => json!(self.random.u64(..10_000)),
        }
    }

    fn string(&mut self, key: &str) -> String {
        let outside = &self.forbidden;
        let evil = [
            "..".to_owned(),
            ".".to_owned(),
            String::new(),
            "../outside/evil".to_owned(),
            "../../outside/evil".to_owned(),
            "a/../../outside/evil".to_owned(),
            "link".to_owned(),
            "to-precious".to_owned(),
            format!("{outside}/evil"),
            "nul\0name".to_owned(),
            ".ssh".to_owned(),
            "\u{1b}[2J\u{1b}]0;evil\u{7}".to_owned(),
            "\u{9b}2Jc1".to_owned(),
            "abc\u{202e}txt.exe\u{2066}".to_owned(),
            "line\r\nforged: yes\u{8}\u{7f}".to_owned(),
            "x".repeat(5000),
        ];
        let uris = [
            format!("file://{outside}/evil"),
            "file:///".to_owned(),
            "file:///a/%2e%2e/%2e%2e/outside/evil".to_owned(),
            "file:///a%00b".to_owned(),
            "file:///a%2Fb".to_owned(),
            "file:///%1b%5b2J%c2%9b%e2%80%ae".to_owned(),
            "file://host/x".to_owned(),
        ];
        let uri = matches!(key, "path" | "fileNameUri" | "cwd" | "userHomeDir" | "tempDir");
        match uri && self.random.u32(..4) > 0 {
            true => uris[self.random.usize(..uris.len())].clone(),
            false => evil[self.random.usize(..evil.len())].clone(),
        }
    }
}

/// Answers one HTTP request as a registry or an issuer would, with lies.
async fn answer(mut stream: TcpStream, setting: Setting) -> Option<()> {
    let mut head = Vec::new();
    let end = loop {
        if let Some(at) = head.windows(4).position(|end| end == b"\r\n\r\n") {
            break at + 4;
        }
        stream.read_buf(&mut head).await.ok().filter(|len| *len > 0)?;
    };
    let text = String::from_utf8_lossy(&head).into_owned();
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    while head.len() < end + length.unwrap_or(0) {
        stream.read_buf(&mut head).await.ok().filter(|len| *len > 0)?;
    }
    let target = text.split(' ').nth(1).unwrap_or_default().to_owned();
    let asked = {
        let mut called = setting.called.lock().unwrap();
        called.push(target.clone());
        called.len() as u64
    };
    let mut liar = Liar::new(&setting);
    // Another lie for every request.
    liar.random = Rng::with_seed(liar.random.u64(..).wrapping_add(asked));
    let mut value = truth(&target, setting.address);
    let mut status = "200 OK";
    match &setting.lies {
        Lies::Result(about, result) if target.contains(about) => value = result.clone(),
        Lies::Change(about, _, change) if target.contains(about) => change(&mut value),
        Lies::Random(_) => match liar.random.u32(..100) {
            0..60 => (0..liar.random.usize(1..5)).for_each(|_| liar.change(&mut value, "")),
            60..66 => value = liar.any(3),
            66..80 => {
                status = ["400 Bad", "401 No", "500 Oh", "302 There"][liar.random.usize(..4)];
                let (one, two) = (liar.string(""), liar.string(""));
                value = match liar.random.bool() {
                    true => json!({"error": {"code": one, "message": two}}),
                    false => json!({"error": one, "error_description": two}),
                };
            }
            _ => {}
        },
        _ => {}
    }
    let body = value.to_string();
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(response.as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}

/// What an honest registry or issuer would answer.
fn truth(target: &str, address: SocketAddr) -> Value {
    let environment = json!({
        "environment_id": "laptop", "online": true, "online_since": 1_790_000_000u64,
        "last_seen": 1_790_000_000u64, "registered": 1_780_000_000u64,
        "executor_registration_id": "r1", "security_profile": "noise", "token": "tok",
        "harnesses": 1, "streams": 2,
    });
    let at = |path: &str| format!("http://{address}{path}");
    match target {
        _ if target.contains("openid-configuration") => json!({
            "authorization_endpoint": at("/oauth/authorize"),
            "token_endpoint": at("/oauth/token"),
            "device_authorization_endpoint": at("/oauth/device/code"),
        }),
        _ if target.contains("device") => json!({
            "device_code": "d", "user_code": "ABCD-EFGH", "verification_uri": at("/device"),
            "expires_in": 3, "interval": 1,
        }),
        _ if target.contains("token") => json!({
            "access_token": "a.b.c", "refresh_token": "r", "id_token": id_token("me@example.com"),
        }),
        _ if target.contains("/cloud/environments") => json!({"environments": [environment]}),
        _ if target.contains("connect") => json!({
            "environment_id": "laptop", "url": format!("ws://{address}/relay"),
            "security_profile": "noise", "executor_registration_id": "r1",
            "executor_public_key": {}, "harness_key_authorization": "h",
        }),
        _ => environment,
    }
}

/// A token whose claims have this address. The client does not check signatures.
pub(crate) fn id_token(email: &str) -> String {
    let part = |value: Value| base64_simd::URL_SAFE_NO_PAD.encode_to_string(value.to_string());
    format!("{}.{}.c2ln", part(json!({"alg": "none"})), part(json!({"email": email})))
}
