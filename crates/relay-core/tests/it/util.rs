//! Seeded randomness, cached identities and a pair of endpoints with nothing in between.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use codex_exec_relay_core::*;

/// A small seeded generator (splitmix64). Not for secrets; for tests it is all there is.
#[derive(Clone)]
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// True `percent` times in a hundred.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

impl Entropy for Rng {
    fn fill(&mut self, dest: &mut [u8]) -> Result<(), EntropyError> {
        for chunk in dest.chunks_mut(8) {
            let bytes = self.next().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
        Ok(())
    }
}

pub(crate) const ENVIRONMENT: &str = "env_1";
pub(crate) const REGISTRATION: &str = "reg_1";

/// Identities are made once: only their generation is saved, every handshake is real.
pub(crate) fn identity(which: usize) -> NoiseIdentity {
    static CACHE: OnceLock<Vec<NoiseIdentity>> = OnceLock::new();
    CACHE.get_or_init(|| {
        (0..4).map(|seed| NoiseIdentity::generate(&mut Rng(1000 + seed)).unwrap()).collect()
    })[which]
        .clone()
}

pub(crate) fn executor_mode() -> ExecutorMode {
    ExecutorMode::Noise {
        identity: identity(0),
        environment_id: ENVIRONMENT.into(),
        registration_id: REGISTRATION.into(),
    }
}

pub(crate) fn harness_mode() -> HarnessMode {
    harness_mode_with(identity(0).public_key(), ENVIRONMENT, REGISTRATION, "let me in")
}

pub(crate) fn harness_mode_with(
    executor_key: NoisePublicKey,
    environment_id: &str,
    registration_id: &str,
    authorization: &str,
) -> HarnessMode {
    HarnessMode::Noise {
        identity: identity(1),
        executor_key,
        environment_id: environment_id.into(),
        registration_id: registration_id.into(),
        authorization: Authorization::new(authorization.into()),
    }
}

pub(crate) fn executor(config: Config) -> Executor {
    let mut executor = Executor::new(config, executor_mode(), Box::new(Rng(1))).unwrap();
    executor.handle_connected(t0());
    executor
}

pub(crate) fn harness(seed: u64, config: Config) -> Harness {
    harness_as(seed, config, harness_mode())
}

pub(crate) fn harness_as(seed: u64, config: Config, mode: HarnessMode) -> Harness {
    let mut harness = Harness::new(config, mode, Box::new(Rng(seed))).unwrap();
    harness.handle_connected(t0());
    harness
}

/// The moment every test starts at.
pub(crate) fn t0() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    // Room for clocks that go back.
    *START.get_or_init(|| Instant::now() + Duration::from_secs(3600))
}

pub(crate) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn frames_e(executor: &mut Executor, now: Instant) -> Vec<Bytes> {
    std::iter::from_fn(|| executor.poll_transmit(now)).collect()
}

pub(crate) fn frames_h(harness: &mut Harness, now: Instant) -> Vec<Bytes> {
    std::iter::from_fn(|| harness.poll_transmit(now)).collect()
}

pub(crate) fn events_e(executor: &mut Executor) -> Vec<Event> {
    std::iter::from_fn(|| executor.poll_event()).collect()
}

pub(crate) fn events_h(harness: &mut Harness) -> Vec<Event> {
    std::iter::from_fn(|| harness.poll_event()).collect()
}

pub(crate) fn decode(frame: &Bytes) -> Frame {
    Frame::decode(frame.clone(), &FrameLimits::default()).unwrap()
}

pub(crate) fn frame(stream: &StreamId, body: Body) -> Bytes {
    Frame::new(stream.clone(), 0, 0, body).encode()
}

pub(crate) fn data(stream: &StreamId, seq: u32, payload: &[u8]) -> Bytes {
    let payload = Bytes::copy_from_slice(payload);
    frame(stream, Body::Data(Data { seq, segment_index: 0, segment_count: 1, payload }))
}

/// The kinds of a list of frames, in order.
pub(crate) fn kinds(frames: &[Bytes]) -> Vec<BodyKind> {
    frames.iter().map(|frame| decode(frame).body.kind()).collect()
}

/// An executor and a harness over a perfect wire.
pub(crate) struct Pair {
    pub executor: Executor,
    pub harness: Harness,
    pub stream: StreamId,
    pub now: Instant,
    /// Events not asked for by the setup.
    pub executor_events: Vec<Event>,
    pub harness_events: Vec<Event>,
}

impl Pair {
    /// A pair whose handshake is done.
    pub(crate) fn open(config: &Config) -> Self {
        let mut pair = Self::begin(executor(config.clone()), harness(2, config.clone()));
        pair.run();
        assert_eq!(pair.executor_events.pop(), Some(Event::Opened { stream: pair.stream.clone() }));
        assert_eq!(pair.harness_events.pop(), Some(Event::Opened { stream: pair.stream.clone() }));
        pair
    }

    /// A pair in the clear mode.
    pub(crate) fn open_clear(config: &Config) -> Self {
        let executor = Executor::new(config.clone(), ExecutorMode::Clear, Box::new(Rng(1)));
        let mut executor = executor.unwrap();
        executor.handle_connected(t0());
        let mut pair = Self::begin(executor, harness_as(2, config.clone(), HarnessMode::Clear));
        pair.run();
        assert_eq!(pair.executor_events.pop(), Some(Event::Opened { stream: pair.stream.clone() }));
        assert_eq!(pair.harness_events.pop(), Some(Event::Opened { stream: pair.stream.clone() }));
        pair
    }

    pub(crate) fn begin(executor: Executor, mut harness: Harness) -> Self {
        let stream = harness.open(t0()).unwrap();
        Self {
            executor,
            harness,
            stream,
            now: t0(),
            executor_events: Vec::new(),
            harness_events: Vec::new(),
        }
    }

    /// Carries frames both ways until there are none, and allows every request.
    pub(crate) fn run(&mut self) {
        loop {
            let mut moved = false;
            for frame in frames_h(&mut self.harness, self.now) {
                moved = true;
                self.executor.handle_frame(self.now, frame).unwrap();
            }
            self.drain_events();
            for frame in frames_e(&mut self.executor, self.now) {
                moved = true;
                let _ = self.harness.handle_frame(self.now, frame);
            }
            self.drain_events();
            if !moved {
                break;
            }
        }
    }

    pub(crate) fn drain_events(&mut self) {
        for event in events_e(&mut self.executor) {
            if let Event::AuthorizeRequest { stream, generation, .. } = &event {
                let verdict = Verdict::Allowed;
                self.executor.authorize(self.now, stream, *generation, verdict).unwrap();
            } else {
                self.executor_events.push(event);
            }
        }
        self.executor_events.extend(events_e(&mut self.executor));
        self.harness_events.extend(events_h(&mut self.harness));
    }

    /// Lets time pass, timers fire and frames flow.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.run();
            let next = [self.executor.poll_timeout(), self.harness.poll_timeout()];
            let Some(next) = next.into_iter().flatten().min().filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            self.executor.handle_timeout(self.now);
            self.harness.handle_timeout(self.now);
        }
        self.now = end;
    }

    pub(crate) fn executor_messages(&mut self) -> Vec<Bytes> {
        messages(&mut self.executor_events)
    }

    pub(crate) fn harness_messages(&mut self) -> Vec<Bytes> {
        messages(&mut self.harness_events)
    }

    /// A message each way and time for acknowledgements: both sides know that the other acks.
    pub(crate) fn prove(&mut self) {
        self.harness.send(Bytes::from_static(b"ping")).unwrap();
        self.executor.send(&self.stream, Bytes::from_static(b"pong")).unwrap();
        self.pass(ms(100));
        assert_eq!(self.executor_messages(), ["ping"]);
        assert_eq!(self.harness_messages(), ["pong"]);
        assert!(self.harness.stats().unwrap().peer_acknowledges);
        assert!(self.executor.stats(&self.stream).unwrap().peer_acknowledges);
    }
}

fn messages(events: &mut Vec<Event>) -> Vec<Bytes> {
    let mut messages = Vec::new();
    events.retain(|event| match event {
        Event::Message { message, .. } => {
            messages.push(message.clone());
            false
        }
        _ => true,
    });
    messages
}
