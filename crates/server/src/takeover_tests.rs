//! Takeover of attached sessions: a model of connections that respond, fall silent and close, over
//! websockets in memory and on a paused clock.

use std::time::Duration;

use codex_exec_rpc::Connection;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, duplex, split};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{interval, sleep};
use tokio_websockets::{ClientBuilder, Message, ServerBuilder, WebSocketStream};

use crate::auth::Principal;
use crate::{Server, ServerConfig};

const SESSION_ATTACHED: i64 = -32010;

/// An action of a test's client.
enum Action {
    Request(Value, oneshot::Sender<Result<Value, i64>>),
    /// Stop reading, and ping like a client with a slow consumer.
    Hold,
    /// Stop reading, after this many requests.
    Flood(usize),
}

/// A client over a network that can be cut without either side noticing.
struct Client {
    actions: mpsc::UnboundedSender<Action>,
    cut: watch::Sender<bool>,
    ended: watch::Receiver<bool>,
    last_id: u64,
}

impl Client {
    fn new(server: &Server, principal: Principal) -> Self {
        let (here, near) = duplex(64 << 10);
        let (far, there) = duplex(64 << 10);
        let cut = watch::Sender::new(false);
        let (near, far) = (split(near), split(far));
        let (cut_up, cut_down) = (cut.subscribe(), cut.subscribe());
        tokio::spawn(async move {
            tokio::select! {
                () = forward_bytes(near.0, far.1, cut_up) => {}
                () = forward_bytes(far.0, near.1, cut_down) => {}
            }
        });
        let served = ServerBuilder::new().serve(there);
        let connection = Connection::websocket(served, &server.config().connection);
        server.serve_as(principal, None, connection);
        let (actions, received) = mpsc::unbounded_channel();
        let (ending, ended) = watch::channel(false);
        let socket = ClientBuilder::new().take_over(here);
        tokio::spawn(async move {
            run_client(socket, received).await;
            ending.send_replace(true);
        });
        Self { actions, cut, ended, last_id: 0 }
    }

    async fn request(&mut self, method: &str, params: Value) -> Result<Value, i64> {
        self.last_id += 1;
        let (response, received) = oneshot::channel();
        let request = json!({"id": self.last_id, "method": method, "params": params});
        self.actions.send(Action::Request(request, response)).ok();
        received.await.unwrap_or(Err(0))
    }

    /// Opens a new session or resumes one; returns its id.
    async fn open(&mut self, resumed: Option<&str>) -> Result<String, i64> {
        let params = json!({"clientName": "test", "resumeSessionId": resumed});
        let response = self.request("initialize", params).await?;
        Ok(response["sessionId"].as_str().unwrap().to_owned())
    }
}

/// Forwards bytes, except while the network is cut: then nothing moves and nothing closes.
async fn forward_bytes(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut cut: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 4 << 10];
    loop {
        if cut.wait_for(|cut| !cut).await.is_err() {
            return;
        }
        let n = tokio::select! {
            biased;
            changed = cut.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            read = from.read(&mut buffer) => read.unwrap_or(0),
        };
        if n == 0 || to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

/// Runs a client until its connection closes or its handle is dropped.
async fn run_client(
    mut socket: WebSocketStream<DuplexStream>,
    mut actions: mpsc::UnboundedReceiver<Action>,
) {
    let mut waiting = Vec::new();
    loop {
        tokio::select! {
            action = actions.recv() => match action {
                None => {
                    let _ = socket.close().await;
                    return;
                }
                Some(Action::Request(request, response)) => {
                    waiting.push((request["id"].clone(), response));
                    let _ = socket.send(Message::text(request.to_string())).await;
                }
                Some(Action::Hold) => break,
                Some(Action::Flood(count)) => {
                    let initialized = json!({"method": "initialized"}).to_string();
                    let _ = socket.feed(Message::text(initialized)).await;
                    for id in 0..count {
                        let asked = json!({"id": id, "method": "environment/info", "params": {}});
                        let _ = socket.feed(Message::text(asked.to_string())).await;
                    }
                    break;
                }
            },
            message = socket.next() => {
                let Some(Ok(message)) = message else { return };
                let Some(text) = message.as_text() else { continue };
                let response: Value = serde_json::from_str(text).unwrap();
                let Some(at) = waiting.iter().position(|(id, _)| *id == response["id"]) else {
                    continue;
                };
                let (_, waiter) = waiting.swap_remove(at);
                let _ = waiter.send(match response.get("error") {
                    Some(error) => Err(error["code"].as_i64().unwrap()),
                    None => Ok(response["result"].clone()),
                });
            }
        }
    }
    let mut ping = interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            action = actions.recv() => if action.is_none() { return },
            _ = ping.tick() => if socket.send(Message::ping("")).await.is_err() { return },
        }
    }
}

/// A server whose sessions outlive every pause of the clock, and that sends no pings by itself.
fn server() -> Server {
    let mut config =
        ServerConfig { detach_ttl: Duration::from_secs(1 << 30), ..Default::default() };
    config.connection.keep_alive = None;
    Server::new(config).unwrap()
}

/// Lets the tasks that can run do so.
async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Responsive,
    Holding,
    Silent,
    Ended,
}

struct ModelClient {
    client: Client,
    principal: Principal,
    state: State,
    /// The session that the model expects it to have.
    session: Option<usize>,
}

fn principal(random: &mut fastrand::Rng) -> Principal {
    let signed = |name: &str| Principal::Signed { issuer: None, subject: Some(name.to_owned()) };
    let certified =
        |key: u8, token| Principal::Certified { key: [key; 32], token: Box::new(token) };
    match random.u8(0..8) {
        0 => Principal::Anyone,
        6 => Principal::Harness { id: "ann".to_owned() },
        7 => Principal::Harness { id: "bob".to_owned() },
        1 => signed("ann"),
        2 => signed("bob"),
        3 => Principal::User { uid: 1000 },
        4 => certified(1, Principal::Anyone),
        _ => certified(random.u8(1..=2), signed("ann")),
    }
}

/// Random connections, and a model of who may attach to which session.
async fn run_model(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let server = server();
    let mut clients: Vec<ModelClient> = Vec::new();
    // Each with its owner.
    let mut sessions: Vec<(String, Principal)> = Vec::new();
    for step in 0..60 {
        let at = format!("seed {seed}, step {step}");
        match random.u8(0..8) {
            0 => {
                let principal = principal(&mut random);
                let mut client = Client::new(&server, principal.clone());
                sessions.push((client.open(None).await.unwrap(), principal.clone()));
                let session = Some(sessions.len() - 1);
                clients.push(ModelClient { client, principal, state: State::Responsive, session });
            }
            1 | 2 if !clients.is_empty() => {
                let one = random.choice(&mut clients).unwrap();
                if matches!(one.state, State::Responsive | State::Holding) {
                    one.client.cut.send_replace(true);
                    one.state = State::Silent;
                }
            }
            3 if !clients.is_empty() => {
                let one = random.choice(&mut clients).unwrap();
                if one.state == State::Responsive {
                    one.client.actions.send(Action::Hold).ok().unwrap();
                    one.state = State::Holding;
                }
            }
            4 if !clients.is_empty() => {
                let index = random.usize(..clients.len());
                if clients[index].state == State::Responsive {
                    drop(clients.swap_remove(index));
                    settle().await;
                }
            }
            _ if !sessions.is_empty() => {
                let session = random.usize(..sessions.len());
                // Some at once: at most one may win.
                let mut newcomers: Vec<ModelClient> = (0..random.usize(1..=3))
                    .map(|_| {
                        // Often the owner, so that sessions are resumed.
                        let principal = match random.bool() {
                            true => sessions[session].1.clone(),
                            false => principal(&mut random),
                        };
                        let client = Client::new(&server, principal.clone());
                        ModelClient { client, principal, state: State::Responsive, session: None }
                    })
                    .collect();
                let holder = clients.iter().position(|one| one.session == Some(session));
                let (id, owner) = &sessions[session];
                let is_free = holder.is_none_or(|holder| clients[holder].state == State::Silent);
                let may = |newcomer: &ModelClient| newcomer.principal == *owner && is_free;
                let opened = futures_util::future::join_all(
                    newcomers.iter_mut().map(|newcomer| newcomer.client.open(Some(id))),
                )
                .await;
                let could = newcomers.iter().filter(|newcomer| may(newcomer)).count();
                let got = opened.iter().filter(|opened| opened.is_ok()).count();
                assert_eq!(got, could.min(1), "{at}: {opened:?}");
                let mut winner = None;
                for (mut newcomer, opened) in newcomers.into_iter().zip(opened) {
                    match opened {
                        Ok(opened) => {
                            assert!(may(&newcomer), "{at}");
                            assert_eq!(opened, *id, "{at}");
                            newcomer.session = Some(session);
                            winner = Some(newcomer);
                        }
                        // To others the session does not exist.
                        Err(code) if newcomer.principal == *owner => {
                            assert_eq!(code, SESSION_ATTACHED, "{at}");
                        }
                        Err(code) => assert_eq!(code, -32600, "{at}"),
                    }
                }
                if let Some(winner) = winner {
                    if let Some(holder) = holder {
                        clients[holder].state = State::Ended;
                        clients[holder].session = None;
                    }
                    clients.push(winner);
                }
            }
            _ => {}
        }
        // The server serves every responsive client, and has closed each that lost its session.
        for one in &mut clients {
            match one.state {
                State::Responsive => {
                    let response =
                        one.client.request("initialize", json!({"clientName": "twice"})).await;
                    assert_eq!(response, Err(-32600), "{at}");
                }
                State::Ended => {
                    one.client.cut.send_replace(false);
                    one.client.ended.wait_for(|ended| *ended).await.unwrap();
                }
                State::Holding | State::Silent => assert!(!*one.client.ended.borrow(), "{at}"),
            }
        }
        clients.retain(|one| one.state != State::Ended);
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn only_the_owner_resumes_a_session_and_only_if_no_live_connection_holds_it() {
    for seed in 0..40 {
        run_model(seed).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_answers_within_the_timeout_keeps_its_session() {
    let server = server();
    let mut holder = Client::new(&server, Principal::Anyone);
    let session = holder.open(None).await.unwrap();
    holder.cut.send_replace(true);
    let mut newcomer = Client::new(&server, Principal::Anyone);
    let back = async {
        sleep(server.config().takeover_timeout / 2).await;
        holder.cut.send_replace(false);
    };
    let (opened, ()) = tokio::join!(newcomer.open(Some(&session)), back);
    assert_eq!(opened, Err(SESSION_ATTACHED));
    assert_eq!(holder.request("initialize", json!({"clientName": "twice"})).await, Err(-32600));
}

#[tokio::test(start_paused = true)]
async fn a_holder_with_a_full_queue_does_not_count_as_silent() {
    let server = server();
    let mut holder = Client::new(&server, Principal::Anyone);
    let session = holder.open(None).await.unwrap();
    holder.actions.send(Action::Flood(8000)).ok().unwrap();
    settle().await;
    for _ in 0..3 {
        let mut newcomer = Client::new(&server, Principal::Anyone);
        assert_eq!(newcomer.open(Some(&session)).await, Err(SESSION_ATTACHED));
    }
    // The server cannot distinguish it from a client without a network, but does not wait for ever.
    holder.cut.send_replace(true);
    sleep(Duration::from_secs(60)).await;
    let mut newcomer = Client::new(&server, Principal::Anyone);
    assert_eq!(newcomer.open(Some(&session)).await, Ok(session));
}
