//! Mixed load in virtual time, over memory; what it has to hold is in `drive.rs`.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::Value;
use tokio::io::DuplexStream;
use tokio::time::{Instant, sleep};

use crate::drive::{Load, Net, Plan, environment, harness};
use crate::util::*;

struct Memory {
    world: World,
    token: String,
}

impl Net for Memory {
    type Io = DuplexStream;

    async fn call(&self, path: &str, body: Value) -> Option<(u16, Value)> {
        Some(self.world.post(path, &self.token, &body).await)
    }

    async fn open(&self, url: &str) -> Result<Client, Option<u16>> {
        self.world.websocket(url).await.map_err(Some)
    }
}

async fn mixed(plan: Plan) {
    let mut world = World::with(|config| config.calls_per_minute = u32::MAX);
    world.bytes = None;
    // The time of day goes on with the tests' time.
    let (start, day) = (Instant::now(), world.now.clone());
    let token = world.token();
    let load = Load::new(Memory { world, token }, plan);
    let clock = tokio::spawn(async move {
        loop {
            day.store(START + start.elapsed().as_secs(), Relaxed);
            sleep(Duration::from_secs(1)).await;
        }
    });
    let all: Vec<_> =
        (0..plan.environments).map(|n| tokio::spawn(environment(load.clone(), n))).collect();
    let harnesses: Vec<_> =
        (0..plan.streams).map(|n| tokio::spawn(harness(load.clone(), n))).collect();
    for harness in harnesses {
        harness.await.unwrap();
    }
    load.over.store(true, Relaxed);
    for environment in all {
        environment.await.unwrap();
    }
    clock.abort();
    eprintln!("{:?} of virtual time: {:?}", start.elapsed(), load.tally);
    assert!(load.tally.drops.load(Relaxed) > plan.environments);
    assert_eq!(load.tally.finished.load(Relaxed), plan.streams);
    // Nothing is left behind.
    let world = &load.net.world;
    while world.metric("streams").await + world.metric("harnesses").await > 0 {
        sleep(Duration::from_secs(1)).await;
    }
}

const PLAN: Plan = Plan {
    environments: 4,
    streams: 16,
    messages: 30,
    life: (2000, 28_000),
    away: 20_000,
    pause: 10_000,
    deaths: 0,
    again: false,
};

#[tokio::test(start_paused = true)]
async fn small_mixed_load_succeeds() {
    mixed(PLAN).await;
}

#[tokio::test(start_paused = true)]
async fn small_mixed_load_survives_crashes() {
    mixed(Plan { deaths: 12, ..PLAN }).await;
}
