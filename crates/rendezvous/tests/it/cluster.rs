//! Several nodes on a real nats-server: every node serves every client, and any node may die.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_relay_core::{Body, Frame, FrameLimits};
use codex_rendezvous::{
    Clock, Config, NatsStore, NatsTokens, Right, Scope, Service, Store, TokenStore,
};
use futures_util::{FutureExt, SinkExt, StreamExt};
use serde_json::{Value, json};

use crate::nats_server::NatsServer;
use crate::session::Session;
use crate::util::*;

/// A node, in a runtime of its own so that it can die without a word.
pub(crate) struct Node {
    world: World,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Node {
    /// A second handle to the same node.
    fn at(&self) -> World {
        World {
            dir: tempfile::tempdir().unwrap(),
            service: self.world.service.clone(),
            config: self.world.config.clone(),
            now: self.world.now.clone(),
            bytes: None,
            pipe: self.world.pipe,
            runtime: self.world.runtime.clone(),
        }
    }

    pub(crate) async fn start(server: &NatsServer, change: impl FnOnce(&mut Config)) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let mut config = Config::default();
        config.clock = Clock::default();
        change(&mut config);
        let options = server.options();
        let service = {
            let config = config.clone();
            runtime.spawn(async move {
                let store = NatsStore::connect(&options, &config).await.unwrap();
                Service::new(config, Store::Nats(Arc::new(store)))
            })
        };
        let service = service.await.unwrap();
        let world = World {
            dir: tempfile::tempdir().unwrap(),
            service,
            config,
            now: Arc::default(),
            bytes: None,
            pipe: 1 << 16,
            runtime: runtime.handle().clone(),
        };
        Self { world, runtime: Some(runtime) }
    }

    fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

impl std::ops::Deref for Node {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

async fn nodes<const N: usize>(server: &NatsServer, change: fn(&mut Config)) -> [Node; N] {
    let mut all = Vec::new();
    for _ in 0..N {
        all.push(Node::start(server, change).await);
    }
    all.try_into().unwrap_or_else(|_| unreachable!("as many as were started"))
}

pub(crate) async fn tokens(server: &NatsServer) -> TokenStore {
    TokenStore::Nats(NatsTokens::connect(&server.options()).await.unwrap())
}

pub(crate) async fn token(server: &NatsServer) -> String {
    let can = vec![Right::Register, Right::Connect, Right::Manage];
    let made = tokens(server).await.create(Scope::Any, can, system_now(), None).await.unwrap();
    made.0.expose().to_owned()
}

/// Asks until the answer is the one that has to come.
async fn until<T>(mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn validation(registration: &str, answer: &Value) -> Value {
    json!({
        "executor_registration_id": registration,
        "harness_public_key": key(1),
        "harness_key_authorization": answer["harness_key_authorization"],
    })
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn any_node_serves_any_client() {
    let server = NatsServer::start().await;
    let [a, b, c] = nodes(&server, |_| {}).await;
    let token = token(&server).await;
    // Registered at one, online at another, reached from a third, seen from all.
    let (url, registration) = a.register("e:1", &token).await;
    let mut environment = b.websocket(&url).await.unwrap();
    let (status, answer) = c.connect("e:1", &token, 1).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["executor_registration_id"], registration);
    let mut harness = c.websocket(&text(&answer["url"])).await.unwrap();
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut environment).await, "s resume");
    send(&mut harness, data("s", b"to")).await;
    assert_eq!(next(&mut environment).await, "s data to");
    send(&mut environment, data("s", b"back")).await;
    assert_eq!(next(&mut harness).await, "s data back");
    for node in [&a, &b, &c] {
        let (status, shown) = node.get("/cloud/environment/e:1", Some(&token)).await;
        let shown: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!((status, &shown["online"]), (200, &json!(true)));
        assert_eq!((&shown["harnesses"], &shown["streams"]), (&json!(1), &json!(1)));
        let (_, listed) = node.get("/cloud/environments", Some(&token)).await;
        assert_eq!(serde_json::from_str::<Value>(&listed).unwrap()["environments"][0], shown);
    }
    // The longest frame passes; an invalid frame is dropped; no harness reaches another's stream.
    send(&mut harness, data("s", &vec![0; (256 << 10) - 32])).await;
    assert_eq!(next(&mut environment).await, "s data …");
    send(&mut harness, data("s", &vec![0; 300 << 10])).await;
    send(&mut harness, tokio_websockets::Message::text("{}")).await;
    let mut thief = a.harness("e:1", &token, 2).await;
    send(&mut thief, claim("s")).await;
    send(&mut thief, data("s", b"forged")).await;
    send(&mut thief, claim("t")).await;
    assert_eq!(next(&mut environment).await, "t resume");
    send(&mut harness, data("s", b"mine")).await;
    assert_eq!(next(&mut environment).await, "s data mine");
    // An authorization holds once, at whichever node.
    let body = validation(&registration, &answer);
    let path = "/cloud/environment/e:1/validate";
    let (one, other) = tokio::join!(a.post(path, &token, &body), c.post(path, &token, &body));
    let valid = [&one.1["valid"], &other.1["valid"]];
    assert!(valid.contains(&&json!(true)) && valid.contains(&&json!(false)), "{valid:?}");
    assert_eq!(b.post(path, &token, &body).await.1["valid"], false);
    // A harness that goes takes its streams with it, at the other node too.
    drop(harness);
    assert_eq!(next(&mut environment).await, "s reset harness_disconnected");
    // An environment that is removed at one node is gone from all.
    let gone = a.request(hyper::Method::DELETE, "/cloud/environment/e:1", Some(&token), "", None);
    assert_eq!(gone.await.0, 200);
    assert_eq!(next(&mut environment).await, "closed 1008");
    assert_eq!(next(&mut thief).await, "t reset environment_disconnected");
    assert_eq!(next(&mut thief).await, "closed 1008");
    assert_eq!(c.connect("e:1", &token, 1).await.0, 404);
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn newer_registration_replaces_the_older_across_nodes() {
    let server = NatsServer::start().await;
    let [a, b, c] = nodes(&server, |_| {}).await;
    let token = token(&server).await;
    let (old, _) = a.register("e1", &token).await;
    let mut environment = a.websocket(&old).await.unwrap();
    let mut near = a.harness("e1", &token, 1).await;
    let mut far = c.harness("e1", &token, 2).await;
    for (harness, stream) in [(&mut near, "n"), (&mut far, "f")] {
        send(harness, claim(stream)).await;
        assert_eq!(next(&mut environment).await, format!("{stream} resume"));
    }
    let mut newer = b.online("e1", &token).await;
    assert_eq!(next(&mut environment).await, "closed 1000");
    assert_eq!(next(&mut near).await, "n reset environment_disconnected");
    assert_eq!(next(&mut near).await, "closed 1000");
    assert_eq!(next(&mut far).await, "f reset environment_disconnected");
    assert_eq!(next(&mut far).await, "closed 1000");
    for node in [&a, &b, &c] {
        assert_eq!(node.websocket(&old).await.unwrap_err(), 409);
    }
    let mut again = a.harness("e1", &token, 1).await;
    send(&mut again, claim("s")).await;
    assert_eq!(next(&mut newer).await, "s resume");
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn revoked_token_closes_its_sockets_on_every_node() {
    let server = NatsServer::start().await;
    let [a, b] = nodes(&server, |_| {}).await;
    let book = tokens(&server).await;
    let make = async |can| {
        let made = book.create(Scope::Any, vec![can], system_now(), None).await.unwrap();
        (made.0.expose().to_owned(), made.1.id)
    };
    let (register, register_id) = make(Right::Register).await;
    let (connect, connect_id) = make(Right::Connect).await;
    assert_eq!(book.list().await.unwrap().len(), 2);
    let mut environment = a.online("e1", &register).await;
    let mut near = a.harness("e1", &connect, 1).await;
    let mut far = b.harness("e1", &connect, 2).await;
    assert!(book.revoke(&connect_id).await.unwrap());
    assert!(!book.revoke(&connect_id).await.unwrap());
    assert_eq!(next(&mut near).await, "closed 1008");
    assert_eq!(next(&mut far).await, "closed 1008");
    assert_eq!(b.connect("e1", &connect, 1).await.0, 401);
    assert!(book.revoke(&register_id).await.unwrap());
    assert_eq!(next(&mut environment).await, "closed 1008");
    assert_eq!(book.list().await.unwrap(), []);
}

/// Revoking a token closes its sockets, and no others, among sockets of this many tokens (`TOKENS` for more), on both
/// nodes; prints how long it took.
#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn revocation_finds_its_sockets_among_those_of_many_tokens() {
    let count = std::env::var("TOKENS").map_or(500, |text| text.parse().unwrap());
    let server = NatsServer::start().await;
    let nodes: [Node; 2] = nodes(&server, |config| {
        // The sockets that are not read do not answer pings.
        config.pong_within = Duration::from_secs(3600);
    })
    .await;
    let book = tokens(&server).await;
    let register = token(&server).await;
    let (mut environments, mut open) = (Vec::new(), Vec::new());
    for n in 0..count {
        let made = book.create(Scope::Any, vec![Right::Connect], system_now(), None).await.unwrap();
        // An environment has room for 256.
        let environment = format!("e{}", n / 250);
        if n % 250 == 0 {
            environments.push(nodes[0].online(&environment, &register).await);
        }
        let harness = nodes[n % 2].harness(&environment, made.0.expose(), n % 4).await;
        open.push((made.1.id, harness));
    }
    let mut random = fastrand::Rng::with_seed(count as u64);
    let mut slowest = Duration::ZERO;
    for _ in 0..10 {
        let (id, mut harness) = open.swap_remove(random.usize(..open.len()));
        let start = std::time::Instant::now();
        assert!(book.revoke(&id).await.unwrap());
        assert_eq!(next(&mut harness).await, "closed 1008");
        slowest = slowest.max(start.elapsed());
    }
    eprintln!("{count} tokens: the slowest of ten revocations took {slowest:?}");
    for (_, harness) in &mut open {
        // A ping, at most.
        while let Some(message) = harness.next().now_or_never() {
            assert!(!message.unwrap().unwrap().is_close());
        }
    }
}

/// What one node permits counts at the others: three nodes permit no more than one, but for what happens while they
/// tell each other.
#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn limits_hold_across_nodes() {
    const LIMIT: usize = 200;
    let server = NatsServer::start().await;
    let nodes: [Node; 3] = nodes(&server, |config| {
        config.failures_per_minute = LIMIT as u32;
        config.calls_per_minute = LIMIT as u32;
    })
    .await;
    let token = token(&server).await;
    let body = register_body();
    for (seed, credential, permitted) in [(1, "wrong", 401), (2, &*token, 200)] {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut taken, mut refusing) = (0, [false; 3]);
        while refusing != [true; 3] {
            let at = random.usize(..3);
            let node = nodes[at].at();
            match node.post("/cloud/environment/e1/register", credential, &body).await.0 {
                429 => refusing[at] = true,
                status => {
                    assert_eq!(status, permitted);
                    taken += 1;
                    refusing[at] = false;
                }
            }
        }
        // Each by itself would permit the limit.
        assert!((LIMIT..2 * LIMIT).contains(&taken), "seed {seed}: {taken}");
    }
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn environment_moves_between_nodes_with_its_streams() {
    let server = NatsServer::start().await;
    let [a, b, c] = nodes(&server, |_| {}).await;
    let token = token(&server).await;
    let mut session = Session::between(b.at(), Some(&c), token).await;
    session.opened().await;
    session.proven().await;
    let mut expected = vec![Bytes::from("ping")];
    for (round, node) in [&a, &c, &b].into_iter().enumerate() {
        let before = format!("before {round}").repeat(20_000);
        session.say(&before, &before);
        session.drop_environment();
        session.environment_to(node).await;
        // Clients of the former home are closed with 1012.
        assert_eq!(session.harness_closed().await, "closed 1012");
        session.harness_to(&a).await;
        session.say("after", "after");
        expected.extend([before.into(), Bytes::from("after")]);
        session.heard(expected.len()).await;
    }
    assert!(session.got.0 == expected);
    assert_eq!(session.got.1[1..], expected[1..]);
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn node_crash_during_traffic_loses_nothing() {
    let server = NatsServer::start().await;
    let [mut a, mut b, c] = nodes(&server, |config| {
        config.peer_ping = Duration::from_millis(100);
    })
    .await;
    let token = token(&server).await;
    let mut session = Session::between(a.at(), Some(&b), token).await;
    session.opened().await;
    session.proven().await;
    let long = "0123456789".repeat(50_000);
    // The harness's node.
    session.say(&long, &long);
    let _ = session.heard(2).now_or_never();
    b.kill();
    assert_eq!(session.harness_closed().await, "gone");
    session.harness_to(&c).await;
    session.heard(2).await;
    // The environment's; the harness's notices, by itself.
    session.world = c.at();
    session.say(&long, &long);
    let _ = session.heard(3).now_or_never();
    a.kill();
    session.drop_environment();
    assert_eq!(session.harness_closed().await, "closed 1012");
    // Back before its environment is, and waiting for it.
    session.harness_to(&c).await;
    let d = Node::start(&server, |_| {}).await;
    session.environment_to(&d).await;
    assert_eq!(session.harness_closed().await, "closed 1012");
    session.harness_to(&c).await;
    session.heard(3).await;
    assert!(session.got.0[1..].iter().chain(&session.got.1[1..]).all(|got| *got == long));
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn slow_reader_is_bounded_across_nodes() {
    let server = NatsServer::start().await;
    let [a, b] = nodes(&server, |config| {
        config.queue_bytes = 64 << 10;
        config.wire_bytes = 64 << 10;
        config.stall_timeout = Duration::from_millis(300);
    })
    .await;
    let token = token(&server).await;
    let mut environment = a.online("e1", &token).await;
    let mut slow = b.harness("e1", &token, 1).await;
    let mut quick = b.harness("e1", &token, 2).await;
    for (harness, stream) in [(&mut slow, "slow"), (&mut quick, "quick")] {
        send(harness, claim(stream)).await;
        assert_eq!(next(&mut environment).await, format!("{stream} resume"));
    }
    // More than all queues, windows and pipes together: goes on only since the slow one is dropped.
    for _ in 0..200 {
        send(&mut environment, data("slow", &[7; 10 << 10])).await;
    }
    send(&mut environment, data("quick", b"still here")).await;
    assert_eq!(next(&mut quick).await, "quick data still here");
    assert_eq!(next(&mut environment).await, "slow reset harness_disconnected");
    let mut got = 0;
    let last = loop {
        let said = next(&mut slow).await;
        if said != "slow data …" {
            break said;
        }
        got += 1;
    };
    assert!(got < 60 && (last == "closed 1008" || last == "gone"), "{got} {last}");
    // In the other direction: an environment that does not read is closed, and the harness notified.
    let (mut sink, mut stream) = quick.split();
    let flood = async {
        loop {
            let _ = sink.send(data("quick", &[7; 10 << 10])).await;
        }
    };
    let notified = async {
        while let Some(Ok(message)) = stream.next().await {
            let frame = Frame::decode(message.into_payload().into(), &FrameLimits::default());
            if matches!(frame.unwrap().body, Body::Reset { .. }) {
                return;
            }
        }
    };
    tokio::select! {
        () = flood => {}
        () = notified => {}
    }
    drop(environment);
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn cluster_recovers_from_a_nats_outage() {
    let mut server = NatsServer::start().await;
    let [a, b] = nodes(&server, |config| config.peer_ping = Duration::from_millis(100)).await;
    let token = token(&server).await;
    let mut environment = a.online("e1", &token).await;
    let mut near = a.harness("e1", &token, 1).await;
    let mut far = b.harness("e1", &token, 2).await;
    for (harness, stream) in [(&mut near, "n"), (&mut far, "f")] {
        send(harness, claim(stream)).await;
        assert_eq!(next(&mut environment).await, format!("{stream} resume"));
    }
    assert_eq!(a.get("/readyz", None).await, (200, "ok\n".to_owned()));
    server.kill();
    for node in [&a, &b] {
        let (_, said) = until(async || {
            Some(node.get("/readyz", None).await).filter(|(status, _)| *status == 503)
        })
        .await;
        assert!(said.contains("store_unavailable"), "{said}");
        assert_eq!(node.get("/healthz", None).await.0, 200);
    }
    let (status, answer) = b.connect("e1", &token, 1).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("store_unavailable")));
    let path = "/cloud/environment/e2/register";
    assert_eq!(b.post(path, &token, &register_body()).await.0, 503);
    // Streams within one node continue; streams between nodes are closed with 1012.
    assert_eq!(next(&mut far).await, "closed 1012");
    assert_eq!(next(&mut environment).await, "f reset harness_disconnected");
    send(&mut near, data("n", b"still")).await;
    assert_eq!(next(&mut environment).await, "n data still");
    server.restart();
    for node in [&a, &b] {
        until(async || (node.get("/readyz", None).await.0 == 200).then_some(())).await;
    }
    let mut far = until(async || {
        let (status, answer) = b.connect("e1", &token, 2).await;
        if status != 200 {
            return None;
        }
        b.websocket(&text(&answer["url"])).await.ok()
    })
    .await;
    send(&mut far, claim("g")).await;
    assert_eq!(next(&mut environment).await, "g resume");
    send(&mut environment, data("g", b"as before")).await;
    assert_eq!(next(&mut far).await, "g data as before");
    // Changes are followed again.
    let mut newer = until(async || {
        let (status, answer) =
            b.post("/cloud/environment/e1/register", &token, &register_body()).await;
        if status != 200 {
            return None;
        }
        b.websocket(&text(&answer["url"])).await.ok()
    })
    .await;
    assert_eq!(next(&mut environment).await, "closed 1000");
    let mut last = a.harness("e1", &token, 1).await;
    send(&mut last, claim("h")).await;
    assert_eq!(next(&mut newer).await, "h resume");
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn stopping_node_closes_sockets_with_1012() {
    let server = NatsServer::start().await;
    let [a, b] = nodes(&server, |config| config.drain = Duration::from_millis(50)).await;
    let token = token(&server).await;
    let mut environment = a.online("e1", &token).await;
    let mut harness = b.harness("e1", &token, 1).await;
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut environment).await, "s resume");
    let draining = {
        let service = b.service.clone();
        b.world.runtime.spawn(async move { service.drain().await })
    };
    assert_eq!(next(&mut harness).await, "closed 1012");
    assert_eq!(next(&mut environment).await, "s reset harness_disconnected");
    drop(harness);
    draining.await.unwrap();
    let draining = {
        let service = a.service.clone();
        a.world.runtime.spawn(async move { service.drain().await })
    };
    assert_eq!(next(&mut environment).await, "closed 1012");
    drop(environment);
    draining.await.unwrap();
}
