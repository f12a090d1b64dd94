//! Mixed load in virtual time: sockets of environments and harnesses go and come back.
//!
//! Every harness sends numbered messages and gets each one back. Sockets are dropped at random at
//! both sides, and environments stay away for a while. A stream that has shown that it
//! acknowledges has to deliver every message once, in order, from its own peer.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use codex_exec_relay_core::{
    Authorization, Config, Event, Executor, ExecutorMode, Harness, HarnessMode, StreamId, Verdict,
};
use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_websockets::Message;

use crate::util::*;

struct Load {
    world: World,
    token: String,
    over: AtomicBool,
    drops: AtomicUsize,
    retries: AtomicUsize,
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

/// A moment between two drops of a socket, 2 to 30 s.
fn lifetime(rng: &mut Rng) -> Duration {
    Duration::from_millis(2000 + random(rng) % 28_000)
}

fn random(rng: &mut Rng) -> u64 {
    let mut bytes = [0; 8];
    codex_exec_relay_core::Entropy::fill(rng, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Echoes what it gets, on the stream it came on.
async fn environment(load: Arc<Load>, number: u64) {
    let id = format!("e{number}");
    let mut rng = Rng(number * 7919 + 1);
    let (url, registration) = load.world.register(&id, &load.token).await;
    let mode = ExecutorMode::Noise {
        identity: identity(0),
        environment_id: id.clone(),
        registration_id: registration.clone(),
    };
    let mut core = Executor::new(Config::default(), mode, Box::new(Rng(number))).unwrap();
    let mut waiting: HashMap<StreamId, Vec<Bytes>> = HashMap::new();
    while !load.over.load(Relaxed) {
        let mut socket = load.world.websocket(&url).await.unwrap();
        core.handle_connected(now());
        let end = Instant::now() + lifetime(&mut rng);
        loop {
            while let Some(event) = core.poll_event() {
                match event {
                    Event::AuthorizeRequest { stream, generation, harness_key, authorization } => {
                        let body = json!({
                            "executor_registration_id": registration,
                            "harness_public_key": codex_rendezvous::WireKey::from(harness_key),
                            "harness_key_authorization": authorization.expose(),
                        });
                        let path = format!("/cloud/environment/{id}/validate");
                        let (_, answer) = load.world.post(&path, &load.token, &body).await;
                        assert_eq!(answer["valid"], true);
                        let _ = core.authorize(now(), &stream, generation, Verdict::Allowed);
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
                let sent =
                    messages.iter().take_while(|m| core.send(stream, (*m).clone()).is_ok()).count();
                messages.drain(..sent);
            }
            while let Some(frame) = core.poll_transmit(now()) {
                let _ = socket.send(Message::binary(frame)).await;
            }
            let wake = core.poll_timeout().map_or(end, |at| Instant::from_std(at).min(end));
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
            if Instant::now() >= end || load.over.load(Relaxed) {
                break;
            }
        }
        drop(socket);
        load.drops.fetch_add(1, Relaxed);
        core.handle_disconnected(now());
        // Away for up to 20 s; the grace period is 60 s.
        sleep(Duration::from_millis(random(&mut rng) % 20_000)).await;
    }
}

/// Sends `count` messages and waits for each to come back, all on one stream if it can.
async fn harness(load: Arc<Load>, environment: u64, number: u64, count: u32) {
    let mut rng = Rng(number * 104_729 + 3);
    let mut attempt = 0;
    'stream: loop {
        attempt += 1;
        assert!(attempt < 200, "no stream ever lasted");
        if attempt > 1 {
            load.retries.fetch_add(1, Relaxed);
            sleep(Duration::from_secs(1)).await;
        }
        let id = format!("e{environment}");
        let (status, answer) =
            load.world.connect(&id, &load.token, 1 + (number % 3) as usize).await;
        if status != 200 {
            continue;
        }
        let key: codex_rendezvous::WireKey =
            serde_json::from_value(answer["executor_public_key"].clone()).unwrap();
        let mode = HarnessMode::Noise {
            identity: identity(1 + (number % 3) as usize),
            executor_key: key.key().clone(),
            environment_id: id,
            registration_id: text(&answer["executor_registration_id"]),
            authorization: Authorization::new(text(&answer["harness_key_authorization"])),
        };
        let seed = number * 1000 + attempt;
        let mut core = Harness::new(Config::default(), mode, Box::new(Rng(seed))).unwrap();
        core.open(now()).unwrap();
        let url = text(&answer["url"]);
        let (mut sent, mut got, mut open) = (0, 0, false);
        let mut next_at = Instant::now();
        let say = |n: u32| {
            Bytes::from(format!("{number}/{attempt}/{n} ").repeat(1 + n as usize % 16 * 600 / 8))
        };
        loop {
            let Ok(mut socket) = load.world.websocket(&url).await else { continue 'stream };
            core.handle_connected(now());
            let end = Instant::now() + lifetime(&mut rng);
            loop {
                while let Some(event) = core.poll_event() {
                    match event {
                        Event::Opened { .. } => open = true,
                        Event::Message { message, .. } => {
                            assert!(message == say(got), "lost, doubled or another's");
                            got += 1;
                        }
                        // Only before both sides have shown that they acknowledge.
                        Event::Reset { .. } | Event::Closed { .. } if got < 2 => continue 'stream,
                        Event::Writable { .. } => {}
                        other => panic!("{other:?} after {got} messages"),
                    }
                }
                if got == count {
                    core.close();
                    while let Some(frame) = core.poll_transmit(now()) {
                        let _ = socket.send(Message::binary(frame)).await;
                    }
                    return;
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
                    // Bursts, and pauses of up to 10 s.
                    if random(&mut rng).is_multiple_of(2) {
                        next_at += Duration::from_millis(random(&mut rng) % 10_000);
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
                if Instant::now() >= end {
                    break;
                }
            }
            drop(socket);
            load.drops.fetch_add(1, Relaxed);
            core.handle_disconnected(now());
            sleep(Duration::from_millis(random(&mut rng) % 10_000)).await;
        }
    }
}

async fn mixed(environments: u64, streams: u64, messages: u32) {
    let mut world = World::with(|config| config.calls_per_minute = u32::MAX);
    world.bytes = None;
    // The time of day goes on with the tests' time.
    let (start, day) = (Instant::now(), world.now.clone());
    let token = world.token();
    let load = Arc::new(Load {
        world,
        token,
        over: AtomicBool::new(false),
        drops: AtomicUsize::new(0),
        retries: AtomicUsize::new(0),
    });
    let clock = tokio::spawn(async move {
        loop {
            day.store(START + start.elapsed().as_secs(), Relaxed);
            sleep(Duration::from_secs(1)).await;
        }
    });
    let all: Vec<_> =
        (0..environments).map(|n| tokio::spawn(environment(load.clone(), n))).collect();
    let harnesses: Vec<_> = (0..streams)
        .map(|n| tokio::spawn(harness(load.clone(), n % environments, n, messages)))
        .collect();
    for harness in harnesses {
        harness.await.unwrap();
    }
    load.over.store(true, Relaxed);
    for environment in all {
        environment.await.unwrap();
    }
    clock.abort();
    let (drops, retries) = (load.drops.load(Relaxed), load.retries.load(Relaxed));
    eprintln!("{:?} of virtual time, {drops} drops, {retries} fresh starts", start.elapsed());
    assert!(drops > environments as usize);
    // Nothing is left behind.
    while load.world.metric("streams").await + load.world.metric("harnesses").await > 0 {
        sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_little_mixed_load() {
    mixed(4, 16, 30).await;
}

/// Ten minutes and more of 200 environments and 1,000 streams:
/// `cargo test -p codex-rendezvous --test it -- --ignored`
#[tokio::test(start_paused = true)]
#[ignore = "takes minutes"]
async fn much_mixed_load() {
    mixed(200, 1000, 240).await;
}
