//! The registry's calls, and everything that is wrong about them.

use codex_rendezvous::{Right, Scope};
use futures_util::SinkExt;
use hyper::Method;
use hyper::header::ORIGIN;
use serde_json::{Value, json};

use crate::util::*;

fn code(answer: &Value) -> &str {
    answer["error"]["code"].as_str().unwrap()
}

#[tokio::test(start_paused = true)]
async fn register_connect_and_validate_succeed() {
    let world = World::new();
    let (token, connecting) = (world.token(), world.token_for(Scope::Any, &[Right::Connect]));
    let (url, registration) = world.register("e1", &token).await;
    assert!(url.starts_with("ws://rdv.test/rendezvous/v1?pass="), "{url}");
    let _environment = world.websocket(&url).await.unwrap();

    let (status, answer) = world.connect("e1", &connecting, 1).await;
    assert_eq!(status, 200);
    assert_eq!(answer["environment_id"], "e1");
    assert_eq!(answer["security_profile"], "noise_hybrid_ik_v1");
    assert_eq!(answer["executor_registration_id"], registration);
    assert_eq!(answer["executor_public_key"], key(0));
    let authorization = text(&answer["harness_key_authorization"]);
    assert!(authorization.len() <= 4096);

    let body = json!({
        "executor_registration_id": registration,
        "harness_public_key": key(1),
        "harness_key_authorization": authorization,
    });
    let path = "/cloud/environment/e1/validate";
    // The harness is named by its own token.
    let yes = json!({"valid": true, "principal": world.id_of(&connecting)});
    assert_eq!(world.post(path, &token, &body).await, (200, yes));
    // Once only.
    assert_eq!(world.post(path, &token, &body).await, (200, json!({"valid": false})));
}

#[tokio::test(start_paused = true)]
async fn authorization_is_bound_to_its_key_and_environment() {
    let mut world = World::new();
    let token = world.token();
    let (url, registration) = world.register("e1", &token).await;
    let _environment = world.websocket(&url).await.unwrap();
    let _other = world.online("e2", &token).await;
    let (_, answer) = world.connect("e1", &token, 1).await;
    let authorization = text(&answer["harness_key_authorization"]);
    let pass = text(&answer["url"]).split_once("pass=").unwrap().1.to_owned();
    let body = |registration: &str, who, authorization: &str| {
        json!({
            "executor_registration_id": registration,
            "harness_public_key": key(who),
            "harness_key_authorization": authorization,
        })
    };
    let (one, two) = ("/cloud/environment/e1/validate", "/cloud/environment/e2/validate");
    let no = (200, json!({"valid": false}));
    // Another environment, key, registration; another kind of ticket; damage.
    let good = body(&registration, 1, &authorization);
    assert_eq!(world.post(two, &token, &good).await, no);
    assert_eq!(world.post(one, &token, &body(&registration, 2, &authorization)).await, no);
    assert_eq!(world.post(one, &token, &body("reg_x", 1, &authorization)).await, no);
    assert_eq!(world.post(one, &token, &body(&registration, 1, &pass)).await, no);
    assert_eq!(world.post(one, &token, &body(&registration, 1, "")).await, no);
    let damaged = authorization.replacen('.', "x.", 1);
    assert_eq!(world.post(one, &token, &body(&registration, 1, &damaged)).await, no);
    // None of that used it up; a crash in between does not matter; time does.
    world.restart().await;
    let (_, again) = (world.pass_time(119), world.post(one, &token, &good).await);
    assert_eq!(again, (200, json!({"valid": true, "principal": world.id_of(&token)})));
    // Used before a crash is used after it.
    world.restart().await;
    assert_eq!(world.post(one, &token, &good).await, no);
}

#[tokio::test(start_paused = true)]
async fn authorization_expires() {
    let world = World::new();
    let token = world.token();
    let connecting = world.token_for(Scope::Any, &[Right::Connect]);
    let (url, registration) = world.register("e1", &token).await;
    let _environment = world.websocket(&url).await.unwrap();
    let validate = async |answer: &Value| {
        let body = json!({
            "executor_registration_id": registration,
            "harness_public_key": key(1),
            "harness_key_authorization": answer["harness_key_authorization"],
        });
        world.post("/cloud/environment/e1/validate", &token, &body).await.1["valid"] == true
    };
    let (_, late) = world.connect("e1", &token, 1).await;
    world.pass_time(120);
    assert!(!validate(&late).await);
    // With the token it was given for.
    let (_, revoked) = world.connect("e1", &connecting, 1).await;
    world.revoke(&connecting);
    assert!(!validate(&revoked).await);
    // With the registration.
    let (_, replaced) = world.connect("e1", &token, 1).await;
    world.register("e1", &token).await;
    assert!(!validate(&replaced).await);
}

#[tokio::test(start_paused = true)]
async fn tokens_permit_only_their_rights() {
    let world = World::new();
    let register = world.token_for(Scope::Environment("e1".into()), &[Right::Register]);
    let connect = world.token_for(Scope::Prefix("e".into()), &[Right::Connect]);
    let body = register_body();
    let path = "/cloud/environment/e1/register";
    for wrong in ["", "crt_wrong", &connect[..20], &format!("{register}x")] {
        let (status, answer) = world.post(path, wrong, &body).await;
        assert_eq!((status, code(&answer)), (401, "unauthorized"));
    }
    let (status, _) = world.request(Method::POST, path, None, body.to_string(), None).await;
    assert_eq!(status, 401);
    let (status, answer) = world.post(path, &connect, &body).await;
    assert_eq!((status, code(&answer)), (403, "forbidden"));
    let (status, _) = world.post("/cloud/environment/e2/register", &register, &body).await;
    assert_eq!(status, 403);
    assert_eq!(world.post(path, &register, &body).await.0, 200);
    assert_eq!(world.connect("e1", &register, 1).await.0, 403);
    assert_eq!(world.connect("x1", &connect, 1).await.0, 403);
    for path in ["/cloud/environments", "/cloud/environment/e1"] {
        assert_eq!(world.get(path, Some(&register)).await.0, 403);
    }
}

#[tokio::test(start_paused = true)]
async fn revoked_token_is_refused_at_once() {
    let world = World::new();
    let token = {
        let can = vec![Right::Register];
        let made = world.tokens().create(Scope::Any, can, START, Some(START + 60)).unwrap();
        made.0.expose().to_owned()
    };
    world.register("e1", &token).await;
    world.pass_time(59);
    world.register("e1", &token).await;
    world.pass_time(1);
    let (status, _) = world.post("/cloud/environment/e1/register", &token, &register_body()).await;
    assert_eq!(status, 401);
    let token = world.token();
    world.register("e1", &token).await;
    world.revoke(&token);
    let (status, _) = world.post("/cloud/environment/e1/register", &token, &register_body()).await;
    assert_eq!(status, 401);
    assert!(!world.tokens().revoke("tok_none").unwrap());
}

#[tokio::test(start_paused = true)]
async fn offline_environment_cannot_be_reached() {
    let world = World::new();
    let token = world.token();
    let (status, answer) = world.connect("e1", &token, 1).await;
    assert_eq!((status, code(&answer)), (404, "environment_not_found"));
    let (url, _) = world.register("e1", &token).await;
    let (status, answer) = world.connect("e1", &token, 1).await;
    assert_eq!((status, code(&answer)), (409, "environment_offline"));
    let mut socket = world.websocket(&url).await.unwrap();
    assert_eq!(world.connect("e1", &token, 1).await.0, 200);
    socket.close().await.unwrap();
    while world.metric("environments_online").await > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.connect("e1", &token, 1).await.0, 409);
}

#[tokio::test(start_paused = true)]
async fn invalid_requests_are_rejected() {
    let world = World::with(|config| config.body_bytes = 4096);
    let token = world.token();
    let register = "/cloud/environment/e1/register";
    let mut more = register_body();
    more["executor_public_key"]["more"] = json!(1);
    let mut short = register_body();
    short["executor_public_key"]["x25519_public_key"] = json!("AAAA");
    let mut profile = register_body();
    profile["security_profile"] = json!("none");
    let mut suite = register_body();
    suite["executor_public_key"]["suite"] = json!("x");
    let bodies =
        [json!({}), json!([]), json!({"security_profile": 1}), more, short, profile, suite];
    for body in bodies {
        let (status, answer) = world.post(register, &token, &body).await;
        assert_eq!((status, code(&answer)), (400, "invalid_request"), "{body}");
    }
    for (body, status) in [("", 400), ("{", 400), (&*"x".repeat(5000), 413)] {
        let body = body.to_owned();
        let answer = world.request(Method::POST, register, Some(&token), body, None).await;
        assert_eq!(answer.0, status);
    }
    let page = Some((ORIGIN, "https://evil.example"));
    for path in ["/healthz", register, "/rendezvous/v1", "/cloud/environments"] {
        assert_eq!(world.request(Method::GET, path, Some(&token), "", page.clone()).await.0, 403);
    }
    assert_eq!(world.get(register, Some(&token)).await.0, 405);
    assert_eq!(world.get("/rendezvous/v1?pass=x", None).await.0, 426);
    assert_eq!(world.get("/cloud/environment/a%20b", Some(&token)).await.0, 400);
    assert_eq!(world.get("/nothing", Some(&token)).await.0, 404);
    assert_eq!(world.get("/healthz", None).await, (200, "ok\n".into()));
    assert_eq!(world.get("/readyz", None).await, (200, "ok\n".into()));
}

#[tokio::test(start_paused = true)]
async fn failure_limit_does_not_block_valid_tokens() {
    let world = World::with(|config| config.failures_per_minute = 3);
    let token = world.token();
    let body = register_body();
    let path = "/cloud/environment/e1/register";
    for _ in 0..3 {
        assert_eq!(world.post(path, "wrong", &body).await.0, 401);
    }
    let (status, answer) = world.post(path, "wrong", &body).await;
    assert_eq!((status, code(&answer)), (429, "rate_limited"));
    assert_eq!(world.websocket("ws://x/rendezvous/v1?pass=a.b").await.unwrap_err(), 429);
    world.register("e1", &token).await;
    tokio::time::advance(std::time::Duration::from_secs(60)).await;
    assert_eq!(world.post(path, "wrong", &body).await.0, 401);
}

#[tokio::test(start_paused = true)]
async fn calls_per_token_are_limited() {
    let world = World::with(|config| config.calls_per_minute = 2);
    let (token, other) = (world.token(), world.token());
    for _ in 0..2 {
        world.register("e1", &token).await;
    }
    let (status, _) = world.post("/cloud/environment/e1/register", &token, &register_body()).await;
    assert_eq!(status, 429);
    world.register("e1", &other).await;
}

#[tokio::test(start_paused = true)]
async fn older_revision_registers_and_connects() {
    let world = World::new();
    let token = world.token();
    let none = Value::Null;
    let (status, answer) = world.post("/cloud/executor/x1/register", &token, &none).await;
    assert_eq!((status, &answer["executor_id"]), (200, &json!("x1")));
    let mut executor = world.websocket(&text(&answer["url"])).await.unwrap();
    // Never by falling back.
    let (status, refused) = world.connect("x1", &token, 1).await;
    assert_eq!((status, code(&refused)), (409, "security_profile_mismatch"));
    let (status, answer) = world.post("/cloud/executor/x1/connect", &token, &none).await;
    assert_eq!((status, &answer["executor_id"]), (200, &json!("x1")));
    let mut harness = world.websocket(&text(&answer["url"])).await.unwrap();
    send(&mut harness, claim("s")).await;
    send(&mut harness, data("s", b"there")).await;
    assert_eq!(next(&mut executor).await, "s resume");
    assert_eq!(next(&mut executor).await, "s data there");
    send(&mut executor, data("s", b"and back")).await;
    assert_eq!(next(&mut harness).await, "s data and back");

    let _environment = world.online("e1", &token).await;
    let (status, refused) = world.post("/cloud/executor/e1/connect", &token, &none).await;
    assert_eq!((status, code(&refused)), (409, "security_profile_mismatch"));
}

#[tokio::test(start_paused = true)]
async fn listing_shows_online_environments_and_since_when() {
    let world = World::new();
    let token = world.token();
    let narrow = world.token_for(Scope::Prefix("b".into()), &[Right::Manage]);
    let mut socket = world.online("a1", &token).await;
    world.pass_time(100);
    world.register("b1", &token).await;
    let list = async |token: &str| -> Value {
        let (status, text) = world.get("/cloud/environments", Some(token)).await;
        assert_eq!(status, 200);
        serde_json::from_str::<Value>(&text).unwrap()["environments"].take()
    };
    let all = list(&token).await;
    assert_eq!(all.as_array().unwrap().len(), 2);
    assert_eq!(all[0]["environment_id"], "a1");
    assert_eq!((&all[0]["online"], &all[0]["online_since"]), (&json!(true), &json!(START)));
    assert_eq!(all[0]["last_seen"], START + 100);
    assert_eq!((&all[1]["online"], &all[1]["registered"]), (&json!(false), &json!(START + 100)));
    let own = list(&narrow).await;
    assert_eq!(own.as_array().unwrap().len(), 1);

    let delete = async |id: &str, token: &str| {
        let path = format!("/cloud/environment/{id}");
        world.request(Method::DELETE, &path, Some(token), "", None).await.0
    };
    assert_eq!(delete("a1", &narrow).await, 403);
    assert_eq!(delete("a1", &token).await, 200);
    assert_eq!(delete("a1", &token).await, 404);
    assert_eq!(next(&mut socket).await, "closed 1008");
    assert_eq!(world.get("/cloud/environment/a1", Some(&token)).await.0, 404);
    assert_eq!(world.get("/cloud/environment/b1", Some(&narrow)).await.0, 200);
}
