//! Questions to the controller.

use std::time::Duration;

use codex_exec_network::{NoReply, Reply};

use crate::world::{Notebook, World, body, exchange, request, rules, status};

fn deny(reason: &str) -> Result<Reply, NoReply> {
    Ok(Reply::Deny { reason: reason.into() })
}

#[tokio::test]
async fn undecided_hosts_are_asked_about_every_time() {
    let world = World::new().await;
    world.internet.name("inside.com", &["10.0.0.1"]);
    world.internet.name("new.com", &["93.184.216.36"]);
    world.internet.name("looked.at.com", &["93.184.216.37"]);
    let mut config =
        world.config(rules(&["good.com", "looked.at.com"], &["bad.com"], &["*.at.com", "bad.com"]));
    config.ask_timeout = Some(Duration::from_secs(60));
    let proxy = world.start(config).await;
    world.controller.replies.lock().unwrap().extend([
        ("new.com".into(), Ok(Reply::Allow)),
        ("looked.at.com".into(), Ok(Reply::Allow)),
        ("inside.com".into(), Ok(Reply::Allow)),
        ("no.com".into(), deny("because é")),
        ("ask.com".into(), Ok(Reply::Ask { reason: "later".into() })),
        ("error.com".into(), Err(NoReply)),
        ("newline.com".into(), deny("a\nb")),
    ]);
    let blocked = |host: &str, reason: &str, decision: &str, source: &str, message: &str| {
        format!(
            r#"{{"status":"blocked","host":"{host}","reason":"{reason}","decision":"{decision}","source":"{source}","protocol":"http","port":80,"message":"{message}"}}"#
        )
    };
    let policy = "Request blocked by network policy.";
    let list = "Domain not in allowlist.";
    let local = "Sandbox policy blocks local/private network addresses.";
    for (host, expected, word, over) in [
        ("new.com", None, ("allow", "decider", "not_allowed"), true),
        ("looked.at.com", None, ("allow", "decider", "not_allowed"), true),
        (
            "no.com",
            Some(blocked("no.com", "because é", "deny", "decider", policy)),
            ("deny", "decider", "because é"),
            false,
        ),
        (
            "ask.com",
            Some(blocked("ask.com", "later", "ask", "decider", policy)),
            ("ask", "decider", "later"),
            false,
        ),
        (
            "error.com",
            Some(blocked("error.com", "not_allowed", "deny", "decider", list)),
            ("deny", "decider", "not_allowed"),
            false,
        ),
        (
            "newline.com",
            Some(blocked("newline.com", "not_allowed", "deny", "decider", list)),
            ("deny", "decider", "not_allowed"),
            false,
        ),
        (
            "inside.com",
            Some(blocked("inside.com", "not_allowed_local", "deny", "baseline_policy", local)),
            ("deny", "baseline_policy", "not_allowed_local"),
            false,
        ),
    ] {
        let answer = request(proxy.http_port(), &format!("GET http://{host}/"), host).await;
        match expected {
            Some(expected) => {
                assert_eq!((status(&answer), body(&answer)), (403, expected.as_str()));
            }
            None => assert_eq!(status(&answer), 200, "{answer}"),
        }
        let records = world.notebook.take();
        assert_eq!(Notebook::words(&records), [(word.0, word.1, word.2.to_owned())]);
        assert_eq!(records[0].policy_override, over);
    }
    let asked = |controller: &crate::world::Controller| {
        std::mem::take(&mut *controller.asked.lock().unwrap())
    };
    assert_eq!(asked(&world.controller).len(), 7);
    // Not about what the rules decide.
    for host in ["good.com", "bad.com", "127.0.0.1", "localhost"] {
        request(proxy.http_port(), &format!("GET http://{host}/"), host).await;
    }
    assert_eq!(asked(&world.controller), []);
    // Again on the same connection, and by another protocol.
    exchange(
        proxy.http_port(),
        b"GET http://new.com/ HTTP/1.1\r\nHost: new.com\r\n\r\n\
          GET http://new.com/ HTTP/1.1\r\nHost: new.com\r\n\r\n\
          CONNECT no.com:8443 HTTP/1.1\r\nHost: no.com\r\nConnection: close\r\n\r\n",
    )
    .await;
    let asked = asked(&world.controller);
    let asked: Vec<_> =
        asked.iter().map(|q| (q.protocol.as_str(), q.host.as_str(), q.port)).collect();
    assert_eq!(
        asked,
        [("http", "new.com", 80), ("http", "new.com", 80), ("https_connect", "no.com", 8443)]
    );
}

#[tokio::test]
async fn without_a_time_to_answer_nothing_is_asked() {
    let world = World::new().await;
    let proxy = world.start(world.config(rules(&["good.com"], &[], &["good.com"]))).await;
    let answer = request(proxy.http_port(), "GET http://good.com/", "good.com").await;
    assert!(
        body(&answer)
            .contains(r#""reason":"not_allowed","decision":"deny","source":"baseline_policy""#),
        "{answer}"
    );
    assert_eq!(*world.controller.asked.lock().unwrap(), []);
}

/// Time is paused: it runs only while everything waits.
#[tokio::test(start_paused = true)]
async fn silence_is_a_refusal_after_the_timeout_and_its_grace() {
    let world = World::new().await;
    let mut config = world.config(rules(&[], &[], &[]));
    config.ask_timeout = Some(Duration::from_millis(700));
    let proxy = world.start(config).await;
    let started = tokio::time::Instant::now();
    let answer = request(proxy.http_port(), "GET http://silent.com/", "silent.com").await;
    assert!(
        body(&answer).contains(r#""reason":"not_allowed","decision":"deny","source":"decider""#),
        "{answer}"
    );
    assert_eq!(started.elapsed().as_millis(), 5700);
}
