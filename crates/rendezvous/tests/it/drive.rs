//! Mixed load: environments that echo, harnesses that count, and everybody dropping out.
//!
//! Every harness sends numbered messages and gets each one back. Sockets are dropped at random at
//! both sides; environments and harnesses die and begin anew. A stream that has shown that it
//! acknowledges has to deliver every message once, in order, from its own peer, and may end only
//! with the death of its environment. Whatever else happens is a panic.
//!
//! Used in virtual time over memory (`load.rs`) and in real time over TCP (the `mixed` example).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use codex_exec_relay_core::{
    Authorization, Config, Entropy, EntropyError, Event, Executor, ExecutorMode, Harness,
    HarnessMode, NoiseIdentity, StreamId, Verdict,
};
use codex_exec_remote::NoiseKeyJson;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_websockets::{Message, WebSocketStream};

/// The way to a service, which may be gone for a moment.
pub(crate) trait Net: Send + Sync + 'static {
    type Io: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The response to a call; `None` if the node did not respond.
    fn call(&self, path: &str, body: Value) -> impl Future<Output = Option<(u16, Value)>> + Send;

    /// A websocket, or the status of the refusal; `None` if the node did not respond.
    fn open(
        &self,
        url: &str,
    ) -> impl Future<Output = Result<WebSocketStream<Self::Io>, Option<u16>>> + Send;
}

/// Who does what, and how often it goes wrong. Times in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub environments: u64,
    pub streams: u64,
    /// Messages of one stream.
    pub messages: u32,
    /// A socket lives for so long, and up to so much longer.
    pub life: (u64, u64),
    /// An environment stays away for up to so long; a harness for half of it.
    pub away: u64,
    /// A harness says nothing for up to so long.
    pub pause: u64,
    /// One in this many lost sockets also kills its client; 0 kills none.
    pub deaths: u64,
    /// Whether a harness goes on with another stream when it is done.
    pub again: bool,
}

/// What has happened.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub drops: AtomicU64,
    pub deaths: AtomicU64,
    pub fresh_starts: AtomicU64,
    pub finished: AtomicU64,
    pub messages: AtomicU64,
    pub bytes: AtomicU64,
}

pub(crate) struct Load<N> {
    pub net: N,
    pub plan: Plan,
    pub tally: Tally,
    pub over: AtomicBool,
    /// How often each environment has died.
    lives: Vec<AtomicU64>,
}

impl<N: Net> Load<N> {
    pub(crate) fn new(net: N, plan: Plan) -> Arc<Self> {
        let lives = (0..plan.environments).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { net, plan, tally: Tally::default(), over: AtomicBool::new(false), lives })
    }

    fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    fn lifetime(&self, rng: &mut Rng) -> Duration {
        Duration::from_millis(self.plan.life.0 + rng.next() % self.plan.life.1)
    }

    /// Whether a client dies now.
    fn dies(&self, rng: &mut Rng) -> bool {
        let dies = self.plan.deaths > 0 && rng.next().is_multiple_of(self.plan.deaths);
        self.tally.deaths.fetch_add(u64::from(dies), Relaxed);
        dies
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// Echoes what it gets, on the stream it came on.
pub(crate) async fn environment<N: Net>(load: Arc<Load<N>>, number: u64) {
    let id = format!("e{number}");
    let mut rng = Rng(number * 7919 + 1);
    'life: while !load.is_over() {
        let path = format!("/cloud/environment/{id}/register");
        let key = NoiseKeyJson(identity(0).public_key());
        let body = json!({"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key});
        let answer = match load.net.call(&path, body).await {
            Some((200, answer)) => answer,
            Some((status @ 400..500, answer)) => panic!("{status} {answer}"),
            _ => {
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let registration = text(&answer["executor_registration_id"]);
        let url = text(&answer["url"]);
        let mode = ExecutorMode::Noise {
            identity: identity(0),
            environment_id: id.clone(),
            registration_id: registration.clone(),
        };
        let seed = Box::new(Rng(rng.next()));
        let mut core = Executor::new(Config::default(), mode, seed).unwrap();
        let mut waiting: HashMap<StreamId, Vec<Bytes>> = HashMap::new();
        while !load.is_over() {
            let mut socket = match load.net.open(&url).await {
                Ok(socket) => socket,
                Err(Some(status @ 400..500)) => panic!("{id} was refused with {status}"),
                Err(_) => {
                    sleep(Duration::from_millis(200)).await;
                    continue;
                }
            };
            core.handle_connected(now());
            let end = Instant::now() + load.lifetime(&mut rng);
            loop {
                while let Some(event) = core.poll_event() {
                    match event {
                        Event::AuthorizeRequest {
                            stream,
                            generation,
                            harness_key,
                            authorization,
                        } => {
                            let body = json!({
                                "executor_registration_id": registration,
                                "harness_public_key": NoiseKeyJson(harness_key),
                                "harness_key_authorization": authorization.expose(),
                            });
                            let path = format!("/cloud/environment/{id}/validate");
                            let answer = load.net.call(&path, body).await;
                            let good = answer.is_some_and(|(_, answer)| answer["valid"] == true);
                            let verdict = if good { Verdict::Allowed } else { Verdict::Denied };
                            let _ = core.authorize(now(), &stream, generation, verdict);
                        }
                        Event::Message { stream, message } => {
                            waiting.entry(stream).or_default().push(message);
                        }
                        Event::Reset { stream, .. } | Event::Closed { stream, .. } => {
                            waiting.remove(&stream);
                        }
                        _ => {}
                    }
                }
                for (stream, messages) in &mut waiting {
                    let sent = messages
                        .iter()
                        .take_while(|message| core.send(stream, (*message).clone()).is_ok())
                        .count();
                    messages.drain(..sent);
                }
                while let Some(frame) = core.poll_transmit(now()) {
                    let _ = socket.send(Message::binary(frame)).await;
                }
                let wake = core.poll_timeout().map_or(end, |at| Instant::from_std(at).min(end));
                tokio::select! {
                    message = socket.next() => match message {
                        Some(Ok(message)) if message.is_binary() => {
                            if core.handle_frame(now(), message.into_payload().into()).is_err() {
                                break;
                            }
                        }
                        Some(Ok(_)) => {}
                        Some(Err(_)) | None => break,
                    },
                    () = sleep_until(wake) => core.handle_timeout(now()),
                }
                if Instant::now() >= end || load.is_over() {
                    break;
                }
            }
            let dies = load.dies(&mut rng);
            // Before the loss can be noticed.
            load.lives[number as usize].fetch_add(u64::from(dies), Relaxed);
            drop(socket);
            load.tally.drops.fetch_add(1, Relaxed);
            core.handle_disconnected(now());
            sleep(Duration::from_millis(rng.next() % load.plan.away)).await;
            if dies {
                continue 'life;
            }
        }
    }
}

/// Sends messages and waits for each to come back, all on one stream if it can.
pub(crate) async fn harness<N: Net>(load: Arc<Load<N>>, number: u64) {
    let mut rng = Rng(number * 104_729 + 3);
    let environment = number % load.plan.environments;
    let mut attempt = 0;
    while !load.is_over() {
        attempt += 1;
        let finished = stream(&load, environment, number, attempt, &mut rng).await;
        if finished {
            load.tally.finished.fetch_add(1, Relaxed);
            if !load.plan.again {
                return;
            }
        } else {
            load.tally.fresh_starts.fetch_add(1, Relaxed);
            sleep(Duration::from_millis(rng.next() % 2000)).await;
        }
    }
}

/// One stream, to its end; `false` if it had to end before.
async fn stream<N: Net>(
    load: &Load<N>,
    environment: u64,
    number: u64,
    attempt: u64,
    rng: &mut Rng,
) -> bool {
    let count = load.plan.messages;
    let lives = || load.lives[environment as usize].load(Relaxed);
    let life = lives();
    let id = format!("e{environment}");
    let own = identity(1 + (number % 3) as usize);
    let body = json!({"harness_public_key": NoiseKeyJson(own.public_key())});
    let answer = match load.net.call(&format!("/cloud/environment/{id}/connect"), body).await {
        Some((200, answer)) => answer,
        _ => return false,
    };
    let key: NoiseKeyJson = serde_json::from_value(answer["executor_public_key"].clone()).unwrap();
    let mode = HarnessMode::Noise {
        identity: own,
        executor_key: key.0,
        environment_id: id.clone(),
        registration_id: text(&answer["executor_registration_id"]),
        authorization: Authorization::new(text(&answer["harness_key_authorization"])),
    };
    let mut core = Harness::new(Config::default(), mode, Box::new(Rng(rng.next()))).unwrap();
    core.open(now()).unwrap();
    let url = text(&answer["url"]);
    let (mut sent, mut got, mut open) = (0, 0, false);
    let mut next_at = Instant::now();
    let say = |n: u32| {
        Bytes::from(format!("{number}/{attempt}/{n} ").repeat(1 + n as usize % 16 * 600 / 8))
    };
    while !load.is_over() {
        let mut socket = match load.net.open(&url).await {
            Ok(socket) => socket,
            Err(Some(status @ 400..500)) => {
                // Only before both sides have shown that they acknowledge, or after a death.
                assert!(got < 2 || lives() != life, "{number} to {id} was refused with {status}");
                return false;
            }
            Err(_) => {
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        core.handle_connected(now());
        let end = Instant::now() + load.lifetime(rng);
        loop {
            while let Some(event) = core.poll_event() {
                match event {
                    Event::Opened { .. } => open = true,
                    Event::Message { message, .. } => {
                        assert!(message == say(got), "lost, doubled or another's");
                        got += 1;
                        load.tally.messages.fetch_add(1, Relaxed);
                        load.tally.bytes.fetch_add(message.len() as u64, Relaxed);
                    }
                    Event::Reset { .. } | Event::Closed { .. } if got < 2 || lives() != life => {
                        return false;
                    }
                    Event::Writable { .. } => {}
                    other => panic!("{number} to {id}: {other:?} after {got} messages"),
                }
            }
            if got == count {
                core.close();
                while let Some(frame) = core.poll_transmit(now()) {
                    let _ = socket.send(Message::binary(frame)).await;
                }
                return true;
            }
            // The first two one by one; then up to eight under way.
            let ahead = if got < 2 { 1 } else { 8 };
            while open
                && sent < count
                && sent - got < ahead
                && next_at <= Instant::now()
                && core.send(say(sent)).is_ok()
            {
                sent += 1;
                // Bursts, and pauses.
                if rng.next().is_multiple_of(2) {
                    next_at += Duration::from_millis(rng.next() % load.plan.pause);
                }
            }
            while let Some(frame) = core.poll_transmit(now()) {
                let _ = socket.send(Message::binary(frame)).await;
            }
            let due = if next_at > Instant::now() { end.min(next_at) } else { end };
            let wake = core.poll_timeout().map_or(due, |at| Instant::from_std(at).min(due));
            tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(message)) if message.is_binary() => {
                        core.handle_frame(now(), message.into_payload().into()).unwrap();
                    }
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => break,
                },
                () = sleep_until(wake) => core.handle_timeout(now()),
            }
            if Instant::now() >= end || load.is_over() {
                break;
            }
        }
        drop(socket);
        load.tally.drops.fetch_add(1, Relaxed);
        core.handle_disconnected(now());
        if load.dies(rng) {
            return false;
        }
        sleep(Duration::from_millis(rng.next() % (load.plan.away / 2))).await;
    }
    true
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

/// A small seeded generator (splitmix64).
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Entropy for Rng {
    fn fill(&mut self, dest: &mut [u8]) -> Result<(), EntropyError> {
        for chunk in dest.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
        Ok(())
    }
}

pub(crate) fn identity(which: usize) -> NoiseIdentity {
    static CACHE: std::sync::OnceLock<Vec<NoiseIdentity>> = std::sync::OnceLock::new();
    let all = CACHE.get_or_init(|| {
        (0..4).map(|seed| NoiseIdentity::generate(&mut Rng(1000 + seed)).unwrap()).collect()
    });
    all[which].clone()
}
