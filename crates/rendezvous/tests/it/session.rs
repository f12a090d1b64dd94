//! Real endpoints at both sides: what they say arrives, and the service cannot read it.

use std::time::Duration;

use bytes::Bytes;
use codex_exec_relay_core::{
    Authorization, Config, Event, Executor, ExecutorMode, Harness, HarnessMode, StreamId, Verdict,
};
use futures_util::{FutureExt, SinkExt, StreamExt};
use serde_json::json;
use tokio::time::{Instant, sleep_until};
use tokio_websockets::Message;

use crate::util::*;

/// An environment and a harness with a stream between them, through a service.
pub(crate) struct Session {
    pub world: World,
    pub token: String,
    registration: String,
    urls: (String, String),
    sockets: (Option<Client>, Option<Client>),
    executor: Executor,
    harness: Harness,
    stream: StreamId,
    pub got: (Vec<Bytes>, Vec<Bytes>),
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

impl Session {
    async fn open(world: World) -> Self {
        let token = world.token();
        Self::between(world, None, token).await
    }

    /// The harness at another node, if there is one.
    pub(crate) async fn between(world: World, other: Option<&World>, token: String) -> Self {
        let (url, registration) = world.register("e1", &token).await;
        let mode = ExecutorMode::Noise {
            identity: identity(0),
            environment_id: "e1".into(),
            registration_id: registration.clone(),
        };
        let executor = Executor::new(Config::default(), mode, Box::new(Rng(1))).unwrap();
        let environment = world.websocket(&url).await.unwrap();
        let (status, answer) = other.unwrap_or(&world).connect("e1", &token, 1).await;
        assert_eq!(status, 200);
        let executor_key: codex_exec_remote::NoiseKeyJson =
            serde_json::from_value(answer["executor_public_key"].clone()).unwrap();
        let mode = HarnessMode::Noise {
            identity: identity(1),
            executor_key: executor_key.0,
            environment_id: "e1".into(),
            registration_id: registration.clone(),
            authorization: Authorization::new(text(&answer["harness_key_authorization"])),
        };
        let mut harness = Harness::new(Config::default(), mode, Box::new(Rng(2))).unwrap();
        let link = other.unwrap_or(&world).websocket(&text(&answer["url"])).await.unwrap();
        let stream = harness.open(now()).unwrap();
        let mut session = Self {
            world,
            token,
            registration,
            urls: (url, text(&answer["url"])),
            sockets: (Some(environment), Some(link)),
            executor,
            harness,
            stream,
            got: Default::default(),
        };
        session.executor.handle_connected(now());
        session.harness.handle_connected(now());
        session
    }

    /// Drives both sides until `done`.
    async fn until(&mut self, done: impl Fn(&Self) -> bool) {
        loop {
            self.events().await;
            if done(self) {
                return;
            }
            if let Some(socket) = &mut self.sockets.0 {
                while let Some(frame) = self.executor.poll_transmit(now()) {
                    let _ = socket.send(Message::binary(frame)).await;
                }
            }
            if let Some(socket) = &mut self.sockets.1 {
                while let Some(frame) = self.harness.poll_transmit(now()) {
                    let _ = socket.send(Message::binary(frame)).await;
                }
            }
            let wake = [self.executor.poll_timeout(), self.harness.poll_timeout()];
            let wake = wake.into_iter().flatten().min().map(Instant::from_std);
            let wake = wake.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                frame = receive(&mut self.sockets.0) => {
                    let _ = self.executor.handle_frame(now(), frame);
                }
                frame = receive(&mut self.sockets.1) => {
                    let _ = self.harness.handle_frame(now(), frame);
                }
                () = sleep_until(wake) => {
                    self.executor.handle_timeout(now());
                    self.harness.handle_timeout(now());
                }
            }
        }
    }

    async fn events(&mut self) {
        while let Some(event) = self.executor.poll_event() {
            match event {
                Event::AuthorizeRequest { stream, generation, harness_key, authorization } => {
                    let key = codex_exec_remote::NoiseKeyJson(harness_key);
                    let body = json!({
                        "executor_registration_id": self.registration,
                        "harness_public_key": key,
                        "harness_key_authorization": authorization.expose(),
                    });
                    let path = "/cloud/environment/e1/validate";
                    let (_, answer) = self.world.post(path, &self.token, &body).await;
                    let allowed = answer["valid"] == true;
                    let verdict = if allowed { Verdict::Allowed } else { Verdict::Denied };
                    self.executor.authorize(now(), &stream, generation, verdict).unwrap();
                }
                Event::Message { message, .. } => self.got.0.push(message),
                Event::Opened { .. } | Event::Writable { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        while let Some(event) = self.harness.poll_event() {
            match event {
                Event::Message { message, .. } => self.got.1.push(message),
                Event::Opened { .. } | Event::Writable { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    pub(crate) async fn opened(&mut self) {
        self.until(|session| session.harness.stats().is_some_and(|stats| stats.open)).await;
    }

    pub(crate) fn say(&mut self, to_executor: &str, to_harness: &str) {
        self.harness.send(Bytes::copy_from_slice(to_executor.as_bytes())).unwrap();
        self.executor.send(&self.stream, Bytes::copy_from_slice(to_harness.as_bytes())).unwrap();
    }

    pub(crate) async fn heard(&mut self, count: usize) {
        self.until(|session| session.got.0.len() == count && session.got.1.len() == count).await;
    }

    /// Both sides know that the other acknowledges.
    pub(crate) async fn proven(&mut self) {
        self.say("ping", "pong");
        self.until(|session| {
            session.harness.stats().unwrap().peer_acknowledges
                && session.executor.stats(&session.stream).unwrap().peer_acknowledges
                && session.got.0.len() == 1
                && session.got.1.len() == 1
        })
        .await;
    }

    async fn reconnect_environment(&mut self) {
        self.drop_environment();
        let socket = self.world.websocket(&self.urls.0).await.unwrap();
        self.take_environment(socket);
    }

    async fn reconnect_harness(&mut self) {
        self.drop_harness();
        let socket = self.world.websocket(&self.urls.1).await.unwrap();
        self.take_harness(socket);
    }

    pub(crate) fn drop_environment(&mut self) {
        self.sockets.0 = None;
        self.executor.handle_disconnected(now());
    }

    pub(crate) fn drop_harness(&mut self) {
        self.sockets.1 = None;
        self.harness.handle_disconnected(now());
    }

    fn take_environment(&mut self, socket: Client) {
        self.sockets.0 = Some(socket);
        self.executor.handle_connected(now());
    }

    fn take_harness(&mut self, socket: Client) {
        self.sockets.1 = Some(socket);
        self.harness.handle_connected(now());
    }

    /// Comes back to a node, which may need a moment to take it.
    pub(crate) async fn environment_to(&mut self, node: &World) {
        let socket = node.websocket_when_ready(&self.urls.0).await;
        self.take_environment(socket);
    }

    pub(crate) async fn harness_to(&mut self, node: &World) {
        let socket = node.websocket_when_ready(&self.urls.1).await;
        self.take_harness(socket);
    }

    /// The close reason that the harness's socket received.
    pub(crate) async fn harness_closed(&mut self) -> String {
        let mut socket = self.sockets.1.take().unwrap();
        loop {
            let said = next(&mut socket).await;
            if said == "gone" || said.starts_with("closed") {
                self.harness.handle_disconnected(now());
                return said;
            }
        }
    }
}

async fn receive(socket: &mut Option<Client>) -> Bytes {
    let Some(open) = socket else { return std::future::pending().await };
    loop {
        match open.next().await {
            Some(Ok(message)) if message.is_binary() => return message.into_payload().into(),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => {
                *socket = None;
                return std::future::pending().await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn service_sees_only_ciphertext() {
    let mut session = Session::open(World::new()).await;
    session.opened().await;
    let secrets = [
        "the harness says: rm -rf /tmp/attack-at-dawn-4711",
        "the environment says: uid=0(root) hunter2-correct-horse",
    ];
    session.say(secrets[0], secrets[1]);
    // Large ones too, of which every piece could be recognised.
    let long: Vec<String> = secrets.iter().map(|secret| secret.repeat(4000)).collect();
    session.say(&long[0], &long[1]);
    session.heard(2).await;
    assert_eq!(session.got.0, [secrets[0].as_bytes(), long[0].as_bytes()]);
    assert_eq!(session.got.1, [secrets[1].as_bytes(), long[1].as_bytes()]);

    let mut seen = session.world.bytes.as_ref().unwrap().lock().unwrap().clone();
    assert!(seen.len() > long[0].len() + long[1].len(), "all of it was held");
    for entry in std::fs::read_dir(session.world.dir.path()).unwrap() {
        seen.extend(std::fs::read(entry.unwrap().path()).unwrap());
    }
    // What a client writes is masked by four bytes that stand before it: unmask in all phases.
    let words = ["attack-at-dawn-4711", "hunter2-correct-horse", "rm -rf", "uid=0(root)"];
    for word in words {
        let word = word.as_bytes();
        assert!(!is_in(&seen, word));
        assert!(!is_in(&seen, base64_simd::STANDARD.encode_to_string(word).as_bytes()));
        assert!(!is_masked_in(&seen, word), "{}", String::from_utf8_lossy(word));
    }
    // The search finds what is there: the stream's id passes in clear, masked and not.
    let id = session.stream.as_str().as_bytes();
    assert!(is_in(&seen, id) && is_masked_in(&seen, id));
}

/// Whether `word` is in `bytes` under any repeating mask of four bytes: a mask cancels out when
/// bytes that are four apart are compared.
fn is_masked_in(bytes: &[u8], word: &[u8]) -> bool {
    let differences = |bytes: &[u8]| -> Vec<u8> {
        bytes.iter().zip(&bytes[4..]).map(|(one, other)| one ^ other).collect()
    };
    let (bytes, word) = (differences(bytes), differences(word));
    // Short words could be there by chance under some mask; eight bytes could not.
    word.len() >= 8 && is_in(&bytes, &word)
}

#[tokio::test(start_paused = true)]
async fn dropped_sockets_lose_and_duplicate_nothing() {
    let mut session = Session::open(World::new()).await;
    session.opened().await;
    session.proven().await;
    let mut expected = (vec![Bytes::from("ping")], vec![Bytes::from("pong")]);
    for round in 0..12 {
        let (to, back) = (format!("to {round}").repeat(9000), format!("back {round}").repeat(9000));
        session.say(&to, &back);
        expected.0.push(to.into());
        expected.1.push(back.into());
        // In the middle of it.
        let _ = session.until(|session| session.got.0.len() > round + 1).now_or_never();
        match round % 3 {
            0 => session.reconnect_environment().await,
            1 => session.reconnect_harness().await,
            _ => {
                session.reconnect_harness().await;
                session.reconnect_environment().await;
            }
        }
        session.heard(round + 2).await;
    }
    assert!(session.got == expected);
}

#[tokio::test(start_paused = true)]
async fn service_crash_loses_and_duplicates_nothing() {
    let mut session = Session::open(World::new()).await;
    session.opened().await;
    session.proven().await;
    for round in 0..4 {
        session.say("before", "before");
        session.world.restart().await;
        // Whichever is ready first.
        if round % 2 == 0 {
            session.reconnect_environment().await;
            session.reconnect_harness().await;
        } else {
            session.reconnect_harness().await;
            session.reconnect_environment().await;
        }
        session.say("after", "after");
        session.heard(1 + 2 * (round + 1)).await;
    }
    let mut expected = vec![Bytes::from("ping")];
    for _ in 0..4 {
        expected.extend([Bytes::from("before"), Bytes::from("after")]);
    }
    assert_eq!(session.got.0, expected);
}
