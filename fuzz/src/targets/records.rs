//! Encrypted records: a relay that drops, repeats, reorders and damages frames, as the input says.

use std::time::Instant;

use bytes::Bytes;
use codex_exec_relay_core::{
    Authorization, Config, EntropyError, Event, Executor, ExecutorMode, Harness, HarnessMode,
    NoiseIdentity, Verdict,
};

/// The messages that the harness sends.
const SENT: [&[u8]; 4] = [b"one", b"the second message", b"3", b"four and some more"];

/// Nothing is delivered but what was sent, in order and once; a damaged handshake opens nothing.
pub(super) fn check(script: &[u8]) -> u64 {
    let now = Instant::now();
    let executor_key = NoiseIdentity::generate(&mut seeded(1)).expect("the source does not fail");
    let mode = HarnessMode::Noise {
        identity: NoiseIdentity::generate(&mut seeded(2)).expect("the source does not fail"),
        executor_key: executor_key.public_key(),
        environment_id: "env".into(),
        registration_id: "reg".into(),
        authorization: Authorization::new("let me in".into()),
    };
    let executor = ExecutorMode::Noise {
        identity: executor_key,
        environment_id: "env".into(),
        registration_id: "reg".into(),
    };
    let executor = Executor::new(Config::default(), executor, Box::new(seeded(3)));
    let harness = Harness::new(Config::default(), mode, Box::new(seeded(4)));
    let (mut executor, mut harness) = (executor.expect("valid"), harness.expect("valid"));
    executor.handle_connected(now);
    harness.handle_connected(now);
    harness.open(now).expect("the first stream");
    let mut relay = Relay { script, kind: 0 };
    let mut delivered: Vec<Bytes> = Vec::new();
    let mut sent = false;
    for _ in 0..4 {
        let up: Vec<_> = std::iter::from_fn(|| harness.poll_transmit(now)).collect();
        for frame in relay.carry(&up) {
            let _ = executor.handle_frame(now, frame);
        }
        while let Some(event) = executor.poll_event() {
            match event {
                Event::AuthorizeRequest { stream, generation, authorization, .. } => {
                    assert_eq!(authorization.expose(), "let me in", "a forged authorization");
                    let _ = executor.authorize(now, &stream, generation, Verdict::Allowed);
                }
                Event::Message { message, .. } => delivered.push(message),
                _ => {}
            }
        }
        let down: Vec<_> = std::iter::from_fn(|| executor.poll_transmit(now)).collect();
        for frame in relay.carry(&down) {
            let _ = harness.handle_frame(now, frame);
        }
        while let Some(event) = harness.poll_event() {
            assert!(!matches!(event, Event::Message { .. }), "a message that was never sent");
            if matches!(event, Event::Opened { .. }) && !sent {
                sent = true;
                for message in SENT {
                    let _ = harness.send(Bytes::from_static(message));
                }
            }
        }
    }
    let expected = SENT.iter().take(delivered.len());
    assert!(delivered.len() <= SENT.len() && delivered.iter().eq(expected), "{delivered:?}");
    relay.kind * 8 + delivered.len() as u64
}

struct Relay<'a> {
    script: &'a [u8],
    kind: u64,
}

impl Relay<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.script.split_first()?;
        self.script = rest;
        Some(*first)
    }

    /// What of these frames arrives, and how. Without a script, everything does.
    fn carry(&mut self, frames: &[Bytes]) -> Vec<Bytes> {
        let mut arriving = frames.to_vec();
        while let Some(step) = self.next().filter(|step| *step != 0) {
            let at = usize::from(self.next().unwrap_or(0));
            let Some(index) = at.checked_rem(arriving.len()) else { break };
            self.kind |= 1 << (step % 6);
            match step % 6 {
                0 => drop(arriving.remove(index)),
                1 => arriving.push(arriving[index].clone()),
                2 => arriving.swap(0, index),
                3 => arriving[index].truncate(usize::from(self.next().unwrap_or(0))),
                _ => {
                    let mut bytes = arriving[index].to_vec();
                    let high = usize::from(self.next().unwrap_or(0)) << 8;
                    let place = (high | usize::from(self.next().unwrap_or(0))) % bytes.len().max(1);
                    let change = self.next().unwrap_or(1);
                    if let Some(byte) = bytes.get_mut(place) {
                        *byte ^= change;
                    }
                    arriving[index] = bytes.into();
                }
            }
        }
        arriving
    }
}

/// A source of bytes that are the same each time.
fn seeded(seed: u64) -> impl FnMut(&mut [u8]) -> Result<(), EntropyError> + Send {
    let mut rng = fastrand::Rng::with_seed(seed);
    move |dest| {
        rng.fill(dest);
        Ok(())
    }
}
