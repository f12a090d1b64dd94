//! The environment of a child, end to end. The server's own is that of this test: cargo sets
//! `CARGO_MANIFEST_DIR` and friends.

use std::collections::BTreeMap;

use codex_exec_server_protocol::Method;
use serde_json::{Value, json};

use crate::support::*;

async fn env(client: &mut Client, env: Value, policy: Value) -> BTreeMap<String, String> {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let id = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
    let start = start(&id, &["/usr/bin/env", "-0"]).with("env", env).with("envPolicy", policy);
    let all = client.run(start).await;
    assert_eq!(all.exit_code, 0, "{all:?}");
    let text = all.text();
    let pairs = text.split_terminator('\0').map(|pair| pair.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn names(env: &BTreeMap<String, String>) -> Vec<&str> {
    env.keys().map(String::as_str).collect()
}

#[tokio::test]
async fn without_a_policy_nothing_is_inherited() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let none = env(&mut client, json!({}), Value::Null).await;
    assert_eq!(none, BTreeMap::new());
    let mine = json!({"A": "1", "EMPTY": "", "MY_API_KEY": "k", "x": "é\n="});
    let same = env(&mut client, mine.clone(), Value::Null).await;
    assert_eq!(json!(same), mine);
}

#[tokio::test]
async fn an_environment_policy_inherits_the_listed_variables() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    let all = env(&mut client, json!({"A": "1"}), json!({"inherit": "all"})).await;
    assert_eq!(all.get("CARGO_MANIFEST_DIR"), Some(&own));
    assert_eq!(all["A"], "1");
    let by_default = env(&mut client, json!({}), json!({})).await;
    assert_eq!(by_default.get("CARGO_MANIFEST_DIR"), Some(&own));

    let core = env(&mut client, json!({}), json!({"inherit": "core"})).await;
    assert!(core.contains_key("PATH"));
    assert!(!names(&core).iter().any(|name| name.starts_with("CARGO")), "{:?}", names(&core));

    let none = json!({"inherit": "none", "set": {"S": "set", "BOTH": "set"}});
    let none = env(&mut client, json!({"BOTH": "env"}), none).await;
    assert_eq!(json!(none), json!({"S": "set", "BOTH": "env"}), "env is laid over it");
}

#[tokio::test]
async fn globs_match_variables_without_regard_to_case() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let dropped = json!({"inherit": "all", "exclude": ["cargo_pkg_*"]});
    let dropped = env(&mut client, json!({}), dropped).await;
    assert!(!names(&dropped).iter().any(|name| name.starts_with("CARGO_PKG_")));
    assert!(dropped.contains_key("CARGO_MANIFEST_DIR"));

    let kept = json!({"inherit": "all", "includeOnly": ["cargo_manifest_dir", "X*"], "set": {"XY": "1", "Z": "2"}});
    let kept = env(&mut client, json!({"LAID": "over"}), kept).await;
    assert_eq!(names(&kept), ["CARGO_MANIFEST_DIR", "LAID", "XY"]);
}

#[tokio::test]
async fn variables_set_by_the_client_stay_and_server_credentials_never_pass() {
    let server = server();
    let mut client = Client::ready(&server).await;
    // The client decides about variables that it sets itself.
    let set = json!({"inherit": "none", "set": {"GITHUB_TOKEN": "t"}});
    let set = env(&mut client, json!({"A_SECRET": "s"}), set).await;
    assert_eq!(json!(set), json!({"GITHUB_TOKEN": "t", "A_SECRET": "s"}));

    let never = json!({
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": "x",
        "NODE_REPL_AUTH_TOKEN": "x",
        "OPENAI_FEDERATION_RULE_ID": "x",
        "OPENAI_IDENTITY_TOKEN_FILE": "x",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT": "x",
        "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE": "x",
    });
    assert_eq!(env(&mut client, never.clone(), Value::Null).await, BTreeMap::new());
    let policy = json!({"inherit": "none", "set": never, "ignoreDefaultExcludes": true});
    assert_eq!(env(&mut client, never, policy).await, BTreeMap::new());
}

/// A client sends a method only to a server that announces it.
#[tokio::test]
async fn every_extension_method_has_a_capability() {
    let mut client = Client::ready(&server()).await;
    let info = client.call("environment/info", json!({})).await.unwrap();
    let capabilities = serde_json::from_str(&info["capabilities"].to_string()).unwrap();
    for method in Method::all() {
        assert!(method.is_offered(&capabilities), "{}", method.name());
    }
}
