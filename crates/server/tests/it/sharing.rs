//! Several clients on one session: who sees what, who may do what, and which size a terminal has.

use std::time::Duration;

use codex_exec_screen::Screen;
use codex_exec_server_protocol::ErrorKind;
use codex_exec_serving::{Server, ServerConfig, WebSocketAuth};
use fastrand::Rng;
use serde_json::{Value, json};

use crate::support::*;

/// Seeds of the model test; `SHARING_SEED` replays one.
const SEEDS: u64 = 6;

fn lasting_server() -> Server {
    server_with(|config: &mut ServerConfig| config.detach_ttl = Duration::from_secs(1000))
}

fn joining(session: &str, role: &str, take: bool) -> Value {
    let attach = json!({"role": role, "events": ["p"], "take": take});
    json!({"clientName": "test", "resumeSessionId": session, "attach": attach})
}

async fn join(server: &Server, session: &str, role: &str) -> Client {
    let mut client = Client::memory(server);
    let response = client.call("initialize", joining(session, role, false)).await.unwrap();
    assert_eq!(response["role"], role);
    client.send(r#"{"method":"initialized"}"#).await;
    client
}

/// A client that watches the terminal `p`: everything since it came, in order.
struct Watcher {
    client: Client,
    role: &'static str,
    screen: Screen,
    seq: u64,
    /// Bytes of output since the first one of the process.
    bytes: usize,
    resizes: u64,
    size: Option<((u16, u16), bool)>,
}

impl Watcher {
    /// Joins and repaints; `bytes` have been written so far.
    async fn new(mut client: Client, role: &'static str, bytes: usize) -> Self {
        let screen = client.call("process/screen", json!({"processId": "p"})).await.unwrap();
        let (rows, cols) = size_of(&screen["size"]);
        let mut painted = Screen::new(rows, cols);
        painted.feed(&unbase64(screen["repaint"].as_str().unwrap()));
        let seq = screen["seq"].as_u64().unwrap();
        let resizes = screen["resizes"].as_u64().unwrap();
        Self { client, role, screen: painted, seq, bytes, resizes, size: None }
    }

    /// Takes events until `bytes` of output have been seen and the terminal has this size.
    async fn until(&mut self, bytes: usize, size: (u16, u16)) {
        while self.bytes < bytes || self.screen.size() != size {
            let notice = self.client.notification().await;
            self.take(&notice);
        }
    }

    fn take(&mut self, notice: &Value) {
        let params = &notice["params"];
        match notice["method"].as_str().unwrap() {
            "process/output" => {
                let seq = params["seq"].as_u64().unwrap();
                // What came before the screen was asked for is on it already.
                if seq <= self.seq {
                    return;
                }
                assert_eq!(seq, self.seq + 1, "a chunk is missing");
                self.seq = seq;
                let output = unbase64(params["chunk"].as_str().unwrap());
                self.bytes += output.len();
                self.screen.feed(&output);
            }
            "process/resized" => {
                let resizes = params["resizes"].as_u64().unwrap();
                if resizes > self.resizes {
                    self.resizes = resizes;
                    let (rows, cols) = size_of(&params["size"]);
                    self.screen.resize(rows, cols);
                }
            }
            other => panic!("{other}"),
        }
    }
}

fn size_of(size: &Value) -> (u16, u16) {
    (size["rows"].as_u64().unwrap() as u16, size["cols"].as_u64().unwrap() as u16)
}

/// Output that a terminal program could write, escape sequences cut anywhere.
fn typed(rng: &mut Rng) -> Vec<u8> {
    let pieces = [
        "text ",
        "\r\n",
        "\x1b[31m",
        "\x1b[?1049h",
        "\x1b[?1049l",
        "\x1b[5;3H",
        "\x1b[2J",
        "\x1b[6n",
        "\x1b[2;4r",
        "漢字",
        "\x1b(0lqk\x1b(B",
        "\x1b[K",
        "\x1b7",
        "\x1b8",
        "\x1b[?25l",
        "\x1b[c",
        "\x1b]2;t\x07",
        "\x1b[0m",
    ];
    let whole: String = (0..rng.usize(1..12)).map(|_| pieces[rng.usize(..pieces.len())]).collect();
    whole.into_bytes()
}

/// The size that the terminal should have: the model of `Sizes`.
fn effective(sizes: &[((u16, u16), bool)], before: (u16, u16)) -> (u16, u16) {
    match sizes.iter().rev().find(|(_, mine)| *mine) {
        Some((size, _)) => *size,
        None => sizes
            .iter()
            .map(|(size, _)| *size)
            .reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)))
            .unwrap_or(before),
    }
}

/// Clients come, type, resize, go and are thrown out, in memory and by websocket. A client that stays has seen every
/// byte, and the screen of one that came late equals that of the first.
#[tokio::test]
async fn shared_terminals_match_the_model() {
    let seeds = match std::env::var("SHARING_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => (0..SEEDS).collect(),
    };
    for seed in seeds {
        eprintln!("seed {seed}");
        let mut rng = Rng::with_seed(seed);
        let server = lasting_server();
        let address = listen_with(&server, WebSocketAuth::Open).await;
        // A session belongs to one principal: those over websockets have another than those in memory.
        let in_memory = rng.bool();
        let connect = async || match in_memory {
            true => Client::memory(&server),
            false => Client::websocket(address).await,
        };
        let mut holder = connect().await;
        let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
        let script = "stty raw -echo; printf ready; exec cat";
        let started = sh("p", script).tty().with("size", json!({"rows": 24, "cols": 80}));
        holder.start(started).await.unwrap();
        holder.until("p", "ready").await;
        let mut total = "ready".len();
        let mut size = (24, 80);
        // The holder's size counts while it is there.
        let mut holder = Some(holder);
        let mut order: Vec<usize> = Vec::new();
        let mut watchers: Vec<Option<Watcher>> = Vec::new();
        // The clients that have given a size, the latest last; the holder is `usize::MAX`.
        order.push(usize::MAX);
        for _ in 0..30 {
            let here: Vec<usize> = (0..watchers.len()).filter(|n| watchers[*n].is_some()).collect();
            let controllers: Vec<usize> = here
                .iter()
                .copied()
                .filter(|n| watchers[*n].as_ref().is_some_and(|w| w.role == "control"))
                .collect();
            match rng.u8(..10) {
                0 | 1 if here.len() < 5 => {
                    let role = ["control", "view"][rng.usize(..2)];
                    let mut client = connect().await;
                    client.handshake(joining(&session, role, false)).await.unwrap();
                    watchers.push(Some(Watcher::new(client, role, total).await));
                }
                2 if !here.is_empty() => {
                    let gone = here[rng.usize(..here.len())];
                    order.retain(|n| *n != gone);
                    // Half of them say goodbye, the others drop.
                    if let Some(watcher) = watchers[gone].take()
                        && rng.bool()
                    {
                        watcher.client.close().await;
                    }
                }
                3 if holder.is_some() => {
                    holder = None;
                    order.retain(|n| *n != usize::MAX);
                }
                4 if rng.bool() => {
                    // One client takes the session; all others are told, and closed.
                    let mut client = connect().await;
                    client.handshake(joining(&session, "control", true)).await.unwrap();
                    let newcomer = Watcher::new(client, "control", total).await;
                    for mut loser in watchers.iter_mut().filter_map(Option::take) {
                        let mut told = false;
                        while let Some(notice) = loser.client.notification_or_end().await {
                            told |= notice["method"] == "session/detached";
                        }
                        assert!(told, "seed {seed}");
                    }
                    holder = None;
                    order.clear();
                    watchers.push(Some(newcomer));
                }
                5 | 6 if !controllers.is_empty() => {
                    let n = controllers[rng.usize(..controllers.len())];
                    let (rows, cols) = (rng.u16(2..40), rng.u16(2..120));
                    let mine = rng.u8(..4) == 0;
                    let fit = if mine { "mine" } else { "smallest" };
                    let params = json!({"processId": "p", "rows": rows, "cols": cols, "fit": fit});
                    let watcher = watchers[n].as_mut().unwrap();
                    let answer = watcher.client.call("process/resize", params).await.unwrap();
                    watcher.size = Some(((rows, cols), mine));
                    order.retain(|known| *known != n);
                    order.push(n);
                    let expected = effective(&sizes(&order, &watchers), size);
                    assert_eq!(size_of(&answer["size"]), expected, "seed {seed}");
                }
                _ => {
                    let bytes = typed(&mut rng);
                    match (&mut holder, controllers.is_empty()) {
                        (_, false) => {
                            let n = controllers[rng.usize(..controllers.len())];
                            let client = &mut watchers[n].as_mut().unwrap().client;
                            assert_eq!(client.write("p", &bytes).await, "accepted");
                            total += bytes.len();
                        }
                        (Some(holder), true) => {
                            assert_eq!(holder.write("p", &bytes).await, "accepted");
                            total += bytes.len();
                            // With nobody else watching, a newcomer must not come before the echo.
                            echoed(holder, total).await;
                        }
                        (None, true) => {}
                    }
                }
            }
            // The server sees the end of a connection in its own time.
            let mut witness = connect().await;
            witness.handshake(json!({"clientName": "witness"})).await.unwrap();
            let expected = watchers.iter().flatten().count() + usize::from(holder.is_some());
            loop {
                let listed = witness.call("session/list", json!({})).await.unwrap();
                if listed["sessions"][0]["connections"] == expected {
                    break;
                }
            }
            size = effective(&sizes(&order, &watchers), size);
            for watcher in watchers.iter_mut().flatten() {
                watcher.until(total, size).await;
            }
            let mut screens = watchers.iter().flatten().map(|watcher| &watcher.screen);
            if let Some(first) = screens.next() {
                for other in screens {
                    assert_eq!(first.text(), other.text(), "seed {seed}");
                    assert!(first == other, "seed {seed}: the screens differ");
                }
            }
        }
        // A client that is not even watching kills it, and everyone sees the end.
        let mut killer = connect().await;
        let attach = json!({"role": "control"});
        let params = json!({"clientName": "test", "resumeSessionId": session, "attach": attach});
        killer.handshake(params).await.unwrap();
        let killed = killer.call("process/terminate", json!({"processId": "p"})).await.unwrap();
        assert_eq!(killed["running"], true);
        for watcher in watchers.iter_mut().flatten() {
            let mut last = String::new();
            while last != "process/closed" {
                last = watcher.client.notification().await["method"].as_str().unwrap().to_owned();
            }
        }
        let read = read_to_end(&mut killer).await;
        assert_eq!(read["exitCode"], 137, "its output and exit code are kept");
        server.shut_down().await;
    }
}

fn sizes(order: &[usize], watchers: &[Option<Watcher>]) -> Vec<((u16, u16), bool)> {
    let size = |n: &usize| match *n {
        usize::MAX => Some(((24, 80), false)),
        n => watchers[n].as_ref().and_then(|watcher| watcher.size),
    };
    order.iter().filter_map(size).collect()
}

/// Waits until the process has written this much.
async fn echoed(client: &mut Client, total: usize) {
    let (mut after, mut bytes) = (0, 0);
    while bytes < total {
        let params = json!({"processId": "p", "afterSeq": after, "waitMs": 1_000_000});
        let read = client.read(params).await;
        bytes += bytes_of(&read).len();
        after = read["nextSeq"].as_u64().unwrap() - 1;
    }
}

async fn read_to_end(client: &mut Client) -> Value {
    let mut after = 0;
    loop {
        let params = json!({"processId": "p", "afterSeq": after, "waitMs": 1_000_000});
        let read = client.read(params).await;
        if read["closed"] == true {
            return read;
        }
        after = read["nextSeq"].as_u64().unwrap() - 1;
    }
}

#[tokio::test]
async fn a_client_that_asks_for_no_role_still_excludes_its_like() {
    let server = lasting_server();
    let mut holder = Client::memory(&server);
    let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
    let resume = json!({"clientName": "test", "resumeSessionId": session});
    let _guest = join(&server, &session, "control").await;
    let refused = Client::memory(&server).call("initialize", resume.clone()).await.unwrap_err();
    assert_eq!(refused.code, -32010);
    drop(holder);
    // The guest is no holder, so the place is free.
    Client::resume(&server, &session).await;
}

#[tokio::test]
async fn a_client_that_only_views_changes_nothing() {
    let server = lasting_server();
    let mut holder = Client::memory(&server);
    let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
    holder.start(start("p", &["cat"]).tty()).await.unwrap();
    let mut viewer = join(&server, &session, "view").await;
    let named = json!({"processId": "p"});
    for (method, params) in [
        ("process/write", json!({"processId": "p", "chunk": "eA=="})),
        ("process/signal", json!({"processId": "p", "signal": "kill"})),
        ("process/terminate", named.clone()),
        ("process/resize", json!({"processId": "p", "rows": 1, "cols": 1})),
        ("process/start", json!({"processId": "q"})),
        ("fs/readFile", json!({"path": "/etc/passwd"})),
        ("http/request", json!({})),
    ] {
        assert_eq!(viewer.kind(method, params).await, ErrorKind::ViewOnly, "{method}");
    }
    for method in ["process/read", "process/screen", "process/list", "session/list"] {
        viewer.call(method, named.clone()).await.unwrap();
    }
    let kind = Client::memory(&server).kind("initialize", joining(&session, "view", true)).await;
    assert_eq!(kind, ErrorKind::InvalidParams, "it cannot take the session");
    assert_eq!(holder.write("p", "x").await, "accepted");
}

/// How long a session lasts without a connection is not for a client to decide that only views.
#[tokio::test(start_paused = true)]
async fn a_client_that_only_views_does_not_shorten_the_session() {
    let server = lasting_server();
    for role in ["view", "control"] {
        let mut holder = Client::memory(&server);
        let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
        let mut guest = Client::memory(&server);
        let mut params = joining(&session, role, false);
        params["detachTtlMs"] = json!(1);
        guest.call("initialize", params).await.unwrap();
        guest.close().await;
        holder.close().await;
        // The period that the guest asked for is over.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let resume = json!({"clientName": "test", "resumeSessionId": session});
        let resumed = Client::memory(&server).call("initialize", resume).await;
        assert_eq!(resumed.is_ok(), role == "view", "{role}");
    }
}

/// Output that the holder has yet to read stays, although a client that only views has received it.
#[tokio::test]
async fn a_client_that_only_views_costs_the_holder_no_output() {
    let server = server_with(|config: &mut ServerConfig| {
        config.detach_ttl = Duration::from_secs(1000);
        config.process.retain_bytes = 256 << 10;
    });
    let mut holder = Client::memory(&server);
    let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
    let total = 3_000_000;
    holder.start(sh("p", &format!("read go; head -c {total} /dev/zero")).piped()).await.unwrap();
    let mut viewer = join(&server, &session, "view").await;
    assert_eq!(holder.write("p", "\n").await, "accepted");
    holder.close().await;
    let mut seen = 0;
    while seen < 200_000 {
        let notice = viewer.notification().await;
        seen += notice["params"]["chunk"].as_str().map_or(0, |chunk| unbase64(chunk).len());
    }
    let mut holder = Client::resume(&server, &session).await;
    let (mut after, mut bytes) = (0, 0);
    loop {
        let params = json!({"processId": "p", "afterSeq": after, "waitMs": 1_000_000});
        let read = holder.read(params).await;
        assert!(read.get("droppedBytes").is_none(), "{bytes} of {total}");
        bytes += bytes_of(&read).len();
        after = read["nextSeq"].as_u64().unwrap() - 1;
        if read["closed"] == true {
            break;
        }
    }
    assert_eq!(bytes, total);
}

#[tokio::test]
async fn sessions_are_listed_by_name_to_their_principal_only() {
    let server = lasting_server();
    let address = listen_with(&server, WebSocketAuth::Open).await;
    let mut holder = Client::memory(&server);
    let named = json!({"clientName": "test", "sessionName": "build"});
    let session = holder.handshake(named).await.unwrap();
    holder.start(start("p", &["cat"]).tty()).await.unwrap();
    let mut same = Client::ready(&server).await;
    let listed = same.call("session/list", json!({})).await.unwrap();
    assert_eq!(listed["sessions"][0]["sessionName"], "build");
    assert_eq!(listed["sessions"][0]["sessionId"], session);
    assert_eq!(listed["sessions"][0]["connections"], 1);
    assert_eq!(listed["sessions"][0]["processes"][0]["processId"], "p");
    assert_eq!(listed["sessions"].as_array().unwrap().len(), 1, "sessions without processes");
    let mut other = Client::websocket(address).await;
    other.handshake(json!({"clientName": "test"})).await.unwrap();
    let listed = other.call("session/list", json!({})).await.unwrap();
    assert_eq!(listed["sessions"], json!([]));
    let mut thief = Client::websocket(address).await;
    let kind = thief.kind("initialize", joining(&session, "control", true)).await;
    assert_eq!(kind, ErrorKind::UnknownSession, "the holder keeps its session");
    assert_eq!(holder.write("p", "x").await, "accepted");
}

/// A guest that stops reading delays neither the process nor another guest, and finds out what it missed.
#[tokio::test]
async fn a_guest_that_does_not_read_delays_nobody() {
    let server = lasting_server();
    let mut holder = Client::memory(&server);
    let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
    // More than every queue on the way holds.
    let script = "read go; head -c 20000000 /dev/zero";
    holder.start(sh("p", script).piped()).await.unwrap();
    let mut stalled = join(&server, &session, "view").await;
    stalled.call("process/list", json!({})).await.unwrap();
    let mut reading = join(&server, &session, "control").await;
    drop(holder);
    reading.write("p", "\n").await;
    let all = reading.until_closed("p").await;
    assert_eq!(all.stdout.len(), 20_000_000, "a guest alone gets every byte");
    let mut seen = Vec::new();
    loop {
        let notice = stalled.notification().await;
        seen.push(notice["params"]["seq"].as_u64().unwrap());
        if notice["method"] == "process/closed" {
            break;
        }
    }
    assert!(seen.is_sorted(), "in order");
    assert!(seen.len() < all.last_seq as usize, "it missed something");
    let read = stalled.read(json!({"processId": "p", "afterSeq": 0})).await;
    assert!(read["droppedBytes"].as_u64().unwrap() > 0);
}

/// Reads of a guest must not release output that the holder has not acknowledged.
#[tokio::test]
async fn a_guest_acknowledges_nothing_for_the_holder() {
    let server = lasting_server();
    let mut holder = Client::memory(&server);
    let session = holder.handshake(json!({"clientName": "test"})).await.unwrap();
    let retain = json!({"bytes": 1000, "onFull": "wait", "until": "read"});
    let script = "head -c 1000 /dev/zero; head -c 1000 /dev/zero; echo end >&2";
    holder.start(sh("p", script).with("retain", retain)).await.unwrap();
    let mut guest = join(&server, &session, "control").await;
    let mut read = 0;
    while read < 1000 {
        let params = json!({"processId": "p", "afterSeq": 0, "waitMs": 1_000_000});
        read = bytes_of(&guest.read(params).await).len();
    }
    for _ in 0..3 {
        guest.read(json!({"processId": "p", "afterSeq": 1_000_000})).await;
    }
    let first = guest.read(json!({"processId": "p", "afterSeq": 0})).await;
    assert_eq!(bytes_of(&first).len(), 1000, "all of it is still there");
    assert!(first.get("droppedBytes").is_none());
    drop(holder);
    guest.close().await;
}
