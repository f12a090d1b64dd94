//! Silence, clock jumps and long idle times, with a paused clock.

use std::time::Duration;

use codex_exec_remote::RelayConfig;
use codex_exec_rpc::Connection;
use tokio::time::Instant;

use crate::cloud::{Cloud, Mangle};
use crate::ends::{Served, environment, link, serve};

struct Ends {
    cloud: Cloud,
    served: Served,
    harness: Connection,
    executor: Connection,
}

/// Both ends, having spoken, under a clock that from now on moves only when all is idle.
async fn ends() -> Ends {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    let harness = link(&cloud).dial().await.unwrap();
    let executor = served.connections.recv().await.unwrap();
    let mut ends = Ends { cloud, served, harness, executor };
    ends.speak().await;
    tokio::time::pause();
    ends
}

impl Ends {
    async fn speak(&mut self) {
        for n in 0..5 {
            self.harness.outbound().send(format!("out {n}")).await.unwrap();
            let heard = self.executor.next().await.unwrap().unwrap();
            assert_eq!(&heard[..], format!("out {n}").as_bytes());
            self.executor.outbound().send(format!("back {n}")).await.unwrap();
            let heard = self.harness.next().await.unwrap().unwrap();
            assert_eq!(&heard[..], format!("back {n}").as_bytes());
        }
    }
}

#[tokio::test]
async fn stream_survives_a_day_of_silence() {
    let mut ends = ends().await;
    tokio::time::sleep(Duration::from_secs(86_400)).await;
    ends.speak().await;
    assert_eq!(ends.cloud.seen("/connect").len(), 1, "over the same sockets");
    ends.served.stop().await.unwrap();
}

#[tokio::test]
async fn stream_survives_a_clock_jump() {
    let mut ends = ends().await;
    for jump in [1, 29, 31, 61, 3600, 86_400 * 365] {
        tokio::time::advance(Duration::from_secs(jump)).await;
        ends.speak().await;
    }
    assert_eq!(ends.cloud.seen("/connect").len(), 1, "over the same sockets");
    ends.served.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rendezvous_without_pongs_is_dropped_after_90_s() {
    let cloud = Cloud::start().await;
    cloud.script(|script| script.deaf = true);
    let served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    cloud.script(|script| script.deaf = false);
    let connected = Instant::now();
    cloud.upgraded(2).await;
    let silent = connected.elapsed();
    assert!(silent >= Duration::from_secs(90), "a ping after 30 s, 60 s for its pong: {silent:?}");
    assert_eq!(cloud.seen("/register").len(), 1, "the same URL is dialled again");
    tokio::time::resume();
    link(&cloud).dial().await.unwrap();
    served.stop().await.unwrap();
}

#[tokio::test]
async fn harness_gives_up_without_a_handshake_reply() {
    let cloud = Cloud::start().await;
    let served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    cloud.script(|script| script.mangle = Some(Mangle::new(|_, _| vec![])));
    let harness = link(&cloud);
    let dialling = tokio::spawn(async move { harness.dial().await });
    cloud.upgraded(2).await;
    tokio::time::pause();
    let error = dialling.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("no secure channel"), "{error}");
    tokio::time::resume();
    cloud.script(|script| script.mangle = None);
    link(&cloud).dial().await.unwrap();
    served.stop().await.unwrap();
}
