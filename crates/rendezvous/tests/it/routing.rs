//! Routing of frames, and what happens to streams when a side disconnects.

use std::time::Duration;

use codex_exec_relay_core::Body;
use futures_util::SinkExt;
use tokio_websockets::Message;

use crate::util::*;

fn ack(stream: &str) -> Message {
    frame(stream, Body::Ack)
}

#[tokio::test(start_paused = true)]
async fn many_harnesses_share_one_environment() {
    let world = World::new();
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    let mut other = world.online("e2", &token).await;
    let mut ann = world.harness("e1", &token, 1).await;
    let mut bob = world.harness("e1", &token, 2).await;
    for (harness, stream) in [(&mut ann, "a"), (&mut bob, "b")] {
        send(harness, claim(stream)).await;
        assert_eq!(next(&mut environment).await, format!("{stream} resume"));
    }
    send(&mut environment, data("b", b"for bob")).await;
    send(&mut environment, data("a", b"for ann")).await;
    assert_eq!(next(&mut ann).await, "a data for ann");
    assert_eq!(next(&mut bob).await, "b data for bob");
    // No other harness or environment can write to, claim or end a stream.
    send(&mut bob, data("a", b"forged")).await;
    send(&mut bob, claim("a")).await;
    send(&mut bob, frame("a", Body::Reset { reason: "forged".into() })).await;
    send(&mut other, data("a", b"forged")).await;
    send(&mut other, frame("a", Body::Reset { reason: "forged".into() })).await;
    send(&mut bob, data("b", b"honest")).await;
    assert_eq!(next(&mut environment).await, "b data honest");
    send(&mut environment, data("a", b"still hers")).await;
    assert_eq!(next(&mut ann).await, "a data still hers");
    assert_eq!(world.metric("frames_dropped_total{why=\"not_owned\"}").await, 3);
    // A reset ends the stream for both.
    send(&mut ann, frame("a", Body::Reset { reason: "bye".into() })).await;
    assert_eq!(next(&mut environment).await, "a reset bye");
    send(&mut ann, data("a", b"more")).await;
    assert_eq!(next(&mut ann).await, "a reset unknown_stream");
}

#[tokio::test(start_paused = true)]
async fn invalid_frames_are_dropped() {
    let world = World::new();
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    let mut harness = world.harness("e1", &token, 1).await;
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut environment).await, "s resume");
    send(&mut harness, Message::text("{}")).await;
    send(&mut harness, Message::binary(&b""[..])).await;
    send(&mut harness, Message::binary(&b"\xff\xff"[..])).await;
    send(&mut harness, data("s", &vec![0; 300 << 10])).await;
    send(&mut environment, Message::text("{}")).await;
    send(&mut environment, data("s", &vec![0; 300 << 10])).await;
    // The longest frame passes.
    let room = (256 << 10) - 32;
    send(&mut harness, data("s", &vec![0; room])).await;
    assert_eq!(next(&mut environment).await, "s data …");
    send(&mut environment, data("s", b"and back")).await;
    assert_eq!(next(&mut harness).await, "s data and back");
    assert_eq!(world.metric("frames_dropped_total{why=\"invalid\"}").await, 6);
    // What is longer than any message ends its own socket only.
    let _ = harness.send(Message::binary(vec![0; 2 << 20])).await;
    assert_eq!(next(&mut environment).await, "s reset harness_disconnected");
}

#[tokio::test(start_paused = true)]
async fn stream_and_harness_limits_are_enforced() {
    let world = World::with(|config| {
        config.streams_per_harness = 2;
        config.harnesses_per_environment = 1;
    });
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    let mut harness = world.harness("e1", &token, 1).await;
    for stream in ["a", "b", "c"] {
        send(&mut harness, claim(stream)).await;
    }
    assert_eq!(next(&mut harness).await, "c reset too_many_streams");
    assert_eq!(next(&mut environment).await, "a resume");
    let (_, answer) = world.connect("e1", &token, 2).await;
    assert_eq!(world.websocket(&text(&answer["url"])).await.unwrap_err(), 409);
}

#[tokio::test(start_paused = true)]
async fn newer_registration_ends_the_older_streams() {
    let world = World::new();
    let token = world.token();
    let mut old = world.online("e1", &token).await;
    let mut harness = world.harness("e1", &token, 1).await;
    // Even one that acknowledges: the other side of it is gone.
    for message in [claim("s"), ack("s")] {
        send(&mut harness, message).await;
        next(&mut old).await;
    }
    send(&mut old, ack("s")).await;
    assert_eq!(next(&mut harness).await, "s ack");
    let mut new = world.online("e1", &token).await;
    assert_eq!(next(&mut old).await, "closed 1000");
    assert_eq!(next(&mut harness).await, "s reset environment_disconnected");
    assert_eq!(next(&mut harness).await, "closed 1000");
    let mut harness = world.harness("e1", &token, 1).await;
    send(&mut harness, claim("t")).await;
    assert_eq!(next(&mut new).await, "t resume");
}

#[tokio::test(start_paused = true)]
async fn dropped_environment_ends_streams_without_acks() {
    let world = World::new();
    let token = world.token();
    let (url, _) = world.register("e1", &token).await;
    let mut environment = world.websocket(&url).await.unwrap();
    let mut harness = world.harness("e1", &token, 1).await;
    for message in [claim("plain"), claim("acking"), ack("acking")] {
        send(&mut harness, message).await;
        next(&mut environment).await;
    }
    send(&mut environment, ack("acking")).await;
    assert_eq!(next(&mut harness).await, "acking ack");
    drop(environment);
    assert_eq!(next(&mut harness).await, "plain reset environment_disconnected");
    // Back within the grace period: the other goes on.
    tokio::time::sleep(Duration::from_secs(59)).await;
    let mut environment = world.websocket(&url).await.unwrap();
    send(&mut environment, data("acking", b"again")).await;
    assert_eq!(next(&mut harness).await, "acking data again");
    // Away for longer: over.
    drop(environment);
    assert_eq!(next(&mut harness).await, "acking reset environment_disconnected");
    assert_eq!(next(&mut harness).await, "closed 1000");
    assert_eq!(world.connect("e1", &token, 1).await.0, 409);
}

#[tokio::test(start_paused = true)]
async fn environment_is_notified_of_a_dropped_harness() {
    let world = World::new();
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    let (_, answer) = world.connect("e1", &token, 1).await;
    let url = text(&answer["url"]);
    let mut harness = world.websocket(&url).await.unwrap();
    for message in [claim("plain"), claim("acking"), ack("acking")] {
        send(&mut harness, message).await;
        next(&mut environment).await;
    }
    send(&mut environment, ack("acking")).await;
    assert_eq!(next(&mut harness).await, "acking ack");
    drop(harness);
    assert_eq!(next(&mut environment).await, "plain reset harness_disconnected");
    // A known harness reconnects long after its URL was issued; an unknown one cannot.
    world.pass_time(1000);
    tokio::time::sleep(Duration::from_secs(30)).await;
    let mut stranger = world.harness("e1", &token, 2).await;
    send(&mut stranger, claim("acking")).await;
    let mut harness = world.websocket(&url).await.unwrap();
    send(&mut harness, frame("acking", Body::Resume { next_seq: 5 })).await;
    assert_eq!(next(&mut environment).await, "acking resume");
    send(&mut environment, data("acking", b"again")).await;
    assert_eq!(next(&mut harness).await, "acking data again");
    drop(harness);
    assert_eq!(next(&mut environment).await, "acking reset harness_disconnected");
}

#[tokio::test(start_paused = true)]
async fn slow_harness_blocks_its_environment_until_closed() {
    let mut world = World::with(|config| config.queue_bytes = 256 << 10);
    world.pipe = 16 << 10;
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    let mut slow = world.harness("e1", &token, 1).await;
    let mut quick = world.harness("e1", &token, 2).await;
    for (harness, stream) in [(&mut slow, "s"), (&mut quick, "q")] {
        send(harness, claim(stream)).await;
        next(&mut environment).await;
    }
    // The slow one reads nothing: what is queued for it is bounded, then the environment waits.
    let mut sent = 0;
    let payload = vec![7; 60 << 10];
    let waits = tokio::time::timeout(Duration::from_secs(5), async {
        loop {
            environment.send(data("s", &payload)).await.unwrap();
            sent += 1;
        }
    });
    waits.await.unwrap_err();
    assert!((4..12).contains(&sent), "{sent}");
    // It reads again in time: nothing was lost.
    let mut environment = {
        let (back, environment) = tokio::join!(
            async {
                for _ in 0..sent {
                    assert_eq!(next(&mut slow).await, "s data …");
                }
            },
            async {
                environment.flush().await.unwrap();
                environment
            }
        );
        let () = back;
        environment
    };
    // Now it reads nothing for good: it is closed, the others go on.
    let writing = async {
        for _ in 0..20 {
            environment.send(data("s", &payload)).await.unwrap();
        }
        send(&mut environment, data("q", b"for the quick")).await;
        environment
    };
    let (mut environment, got) = tokio::join!(writing, next(&mut quick));
    assert_eq!(got, "q data for the quick");
    assert_eq!(next(&mut environment).await, "s reset harness_disconnected");
    drop(slow);
}

#[tokio::test(start_paused = true)]
async fn silent_socket_is_pinged_then_closed() {
    let world = World::new();
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    // Reading answers pings: it lasts.
    let lasts = tokio::time::timeout(Duration::from_secs(600), next(&mut environment));
    lasts.await.unwrap_err();
    assert_eq!(world.metric("environments_online").await, 1);
    // Not reading does not.
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(world.metric("environments_online").await, 0);
}

#[tokio::test(start_paused = true)]
async fn unclaimed_streams_are_refused_after_the_grace_period() {
    let world = World::new();
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    send(&mut environment, data("old", b"hello?")).await;
    let quiet = tokio::time::timeout(Duration::from_secs(20), next(&mut environment));
    quiet.await.unwrap_err();
    tokio::time::sleep(Duration::from_secs(50)).await;
    send(&mut environment, data("old", b"hello?")).await;
    assert_eq!(next(&mut environment).await, "old reset harness_disconnected");
}

#[tokio::test(start_paused = true)]
async fn client_gone_before_the_upgrade_releases_its_seat() {
    use tokio::io::AsyncWriteExt;
    let world = World::new();
    let token = world.token();
    let (url, _) = world.register("e1", &token).await;
    let path = url.strip_prefix("ws://rdv.test").unwrap();
    for _ in 0..3 {
        let mut pipe = world.pipe();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: rdv.test\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        pipe.write_all(request.as_bytes()).await.unwrap();
        drop(pipe);
    }
    while world.metric("connections").await > 1 || world.metric("environments_online").await > 0 {
        tokio::task::yield_now().await;
    }
    world.websocket(&url).await.unwrap();
}

fn handshake(stream: &str) -> Message {
    frame(stream, Body::Handshake { payload: (&b"not a handshake"[..]).into() })
}

fn refusal(stream: &str) -> Message {
    frame(stream, Body::Reset { reason: "handshake_failed".into() })
}

/// How a socket ends, after the refusals that may come before that.
async fn closed(socket: &mut Client) -> String {
    loop {
        let end = next(socket).await;
        if !end.ends_with(" reset handshake_failed") {
            return end;
        }
    }
}

/// An environment closes its socket after eight failed handshakes: the harness that sends them loses its own
/// before that, and the others keep theirs.
#[tokio::test(start_paused = true)]
async fn harness_whose_handshakes_fail_is_cut_off_and_not_its_environment() {
    let world = World::new();
    let (good, bad) = (world.token(), world.token());
    let mut environment = world.online("e1", &good).await;
    let mut other = world.online("e2", &good).await;
    let mut ann = world.harness("e1", &good, 1).await;
    let mut eve = world.harness("e1", &bad, 2).await;
    send(&mut ann, handshake("a")).await;
    assert_eq!(next(&mut environment).await, "a handshake");
    send(&mut environment, handshake("a")).await;
    assert_eq!(next(&mut ann).await, "a handshake");
    let mut failures = 0;
    // Also over several sockets, with other keys.
    for round in 0..4 {
        let stream = format!("e{round}");
        send(&mut eve, handshake(&stream)).await;
        assert_eq!(next(&mut environment).await, format!("{stream} handshake"));
        send(&mut environment, refusal(&stream)).await;
        failures += 1;
        if round == 1 {
            assert_eq!(next(&mut eve).await, "e1 reset handshake_failed");
            eve = world.harness("e1", &bad, 3).await;
        } else if round < 3 {
            assert_eq!(next(&mut eve).await, format!("{stream} reset handshake_failed"));
        }
    }
    assert!(failures < 8, "the environment would close its socket");
    assert_eq!(closed(&mut eve).await, "closed 1008");
    let (_, answer) = world.connect("e1", &bad, 2).await;
    assert_eq!(world.websocket(&text(&answer["url"])).await.unwrap_err(), 429);
    assert_eq!(world.metric("cut_off_total").await, 1);
    // The other harness and the environment go on; elsewhere the token is as good as before.
    send(&mut ann, data("a", b"still there")).await;
    assert_eq!(next(&mut environment).await, "a data still there");
    let mut elsewhere = world.harness("e2", &bad, 2).await;
    send(&mut elsewhere, claim("s")).await;
    assert_eq!(next(&mut other).await, "s resume");
    // After the time it may try again, and one failure is enough.
    tokio::time::advance(Duration::from_secs(61)).await;
    let mut eve = world.harness("e1", &bad, 2).await;
    send(&mut eve, handshake("again")).await;
    assert_eq!(next(&mut environment).await, "again handshake");
    send(&mut environment, refusal("again")).await;
    assert_eq!(closed(&mut eve).await, "closed 1008");
    // A reset of a stream that was open blames no harness.
    for _ in 0..8 {
        send(&mut ann, claim("b")).await;
        assert_eq!(next(&mut environment).await, "b resume");
        send(&mut environment, refusal("b")).await;
        assert_eq!(next(&mut ann).await, "b reset handshake_failed");
    }
}
