//! Who may open a websocket, with which url, and for how long.

use codex_rendezvous::{Right, Scope};

use crate::util::*;

const BASE: &str = "ws://rdv.test/rendezvous/v1";

#[tokio::test(start_paused = true)]
async fn websocket_requires_a_pass() {
    let world = World::new();
    let token = world.token();
    let (url, _) = world.register("e1", &token).await;
    let _environment = world.websocket(&url).await.unwrap();
    let (_, answer) = world.connect("e1", &token, 1).await;
    let authorization = text(&answer["harness_key_authorization"]);
    let (payload, signature) = url.split_once("pass=").unwrap().1.split_once('.').unwrap();
    let (other, _) = authorization.split_once('.').unwrap();
    let wrong = [
        BASE.to_owned(),
        format!("{BASE}?pass="),
        format!("{BASE}?pass={payload}"),
        format!("{BASE}?pass={payload}."),
        format!("{BASE}?pass={other}.{signature}"),
        // Signed by us, but for something else.
        format!("{BASE}?pass={authorization}"),
    ];
    for url in wrong {
        assert_eq!(world.websocket(&url).await.unwrap_err(), 401);
    }
}

#[tokio::test(start_paused = true)]
async fn unused_pass_expires() {
    let world = World::with(|config| config.reconnect_window = config.url_lifetime / 2);
    let token = world.token();
    let (url, _) = world.register("e1", &token).await;
    world.pass_time(300);
    assert_eq!(world.websocket(&url).await.unwrap_err(), 403);
    let _environment = world.online("e1", &token).await;
    let (_, answer) = world.connect("e1", &token, 1).await;
    world.pass_time(300);
    assert_eq!(world.websocket(&text(&answer["url"])).await.unwrap_err(), 403);
}

#[tokio::test(start_paused = true)]
async fn connected_peer_may_reconnect_with_its_url() {
    let mut world = World::new();
    let token = world.token();
    let (url, _) = world.register("e1", &token).await;
    let mut socket = world.websocket(&url).await.unwrap();
    world.pass_time(100_000);
    let mut harness = world.harness("e1", &token, 1).await;
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut socket).await, "s resume");
    // A second socket takes over from the first.
    let mut second = world.websocket(&url).await.unwrap();
    assert_eq!(next(&mut socket).await, "closed 1000");
    send(&mut harness, claim("t")).await;
    assert_eq!(next(&mut second).await, "t resume");
    // After a crash of the service, too.
    world.restart().await;
    world.pass_time(599);
    let _third = world.websocket(&url).await.unwrap();
    // But not after a long time.
    world.restart().await;
    world.pass_time(600);
    assert_eq!(world.websocket(&url).await.unwrap_err(), 403);
}

#[tokio::test(start_paused = true)]
async fn harness_may_reconnect_after_a_service_crash() {
    let mut world = World::new();
    let token = world.token();
    let (url, _) = world.register("e1", &token).await;
    let mut socket = world.websocket(&url).await.unwrap();
    let (_, answer) = world.connect("e1", &token, 1).await;
    let (link, fresh) = (text(&answer["url"]), world.connect("e1", &token, 2).await.1);
    let mut harness = world.websocket(&link).await.unwrap();
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut socket).await, "s resume");
    // Long enough for it to be noted, and for its url to be over.
    world.pass_time(400);
    tokio::time::sleep(world.config.harness_record_interval).await;
    while world.noted_harnesses() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    world.restart().await;
    let _socket = world.websocket(&url).await.unwrap();
    let _harness = world.websocket(&link).await.unwrap();
    // One that was never here may not.
    assert_eq!(world.websocket(&text(&fresh["url"])).await.unwrap_err(), 403);
    world.restart().await;
    world.pass_time(600);
    assert_eq!(world.websocket(&link).await.unwrap_err(), 403);
}

#[tokio::test(start_paused = true)]
async fn replaced_registration_gets_no_websocket() {
    let world = World::new();
    let token = world.token();
    let (old, _) = world.register("e1", &token).await;
    let mut socket = world.websocket(&old).await.unwrap();
    let (_, answer) = world.connect("e1", &token, 1).await;
    let (new, _) = world.register("e1", &token).await;
    assert_eq!(next(&mut socket).await, "closed 1000");
    assert_eq!(world.websocket(&old).await.unwrap_err(), 409);
    assert_eq!(world.websocket(&text(&answer["url"])).await.unwrap_err(), 409);
    world.websocket(&new).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn revoked_token_closes_its_sockets() {
    let world = World::new();
    let environment = world.token_for(Scope::Any, &[Right::Register]);
    let ann = world.token_for(Scope::Any, &[Right::Connect]);
    let bob = world.token_for(Scope::Any, &[Right::Connect]);
    let mut socket = world.online("e1", &environment).await;
    let (_, answer) = world.connect("e1", &ann, 1).await;
    let url = text(&answer["url"]);
    let mut first = world.websocket(&url).await.unwrap();
    let mut second = world.harness("e1", &bob, 2).await;
    send(&mut first, claim("a")).await;
    assert_eq!(next(&mut socket).await, "a resume");
    send(&mut second, claim("b")).await;
    assert_eq!(next(&mut socket).await, "b resume");

    world.revoke(&ann);
    assert_eq!(next(&mut first).await, "closed 1008");
    assert_eq!(next(&mut socket).await, "a reset harness_disconnected");
    assert_eq!(world.websocket(&url).await.unwrap_err(), 403);
    send(&mut second, data("b", b"still here")).await;
    assert_eq!(next(&mut socket).await, "b data still here");

    world.revoke(&environment);
    assert_eq!(next(&mut socket).await, "closed 1008");
    assert_eq!(next(&mut second).await, "b reset environment_disconnected");
    assert_eq!(next(&mut second).await, "closed 1008");
    assert_eq!(world.metric("environments_online").await, 0);
}
