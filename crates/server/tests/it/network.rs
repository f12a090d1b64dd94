//! The managed network of a process: its variables, its proxies, what they ask and report.
//!
//! The tests speak to the proxies themselves, at the ports that the process sees.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use codex_exec_server_protocol::ErrorKind;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::support::*;

/// A `networkProxy` whose proxy has these members, too.
pub(crate) fn network(mut members: Value) -> Value {
    let mut proxy = json!({
        "enabled": true, "enableSocks5": true, "enableSocks5Udp": false, "allowUpstreamProxy": false,
        "dangerouslyAllowAllUnixSockets": false, "mode": "full", "allowLocalBinding": false,
    });
    proxy.as_object_mut().unwrap().append(members.as_object_mut().unwrap());
    json!({"proxy": proxy})
}

/// A `networkProxy` that asks about undecided hosts.
pub(crate) fn asking(members: Value) -> Value {
    let mut network = network(members);
    network["policyDecisionTimeoutMs"] = json!(1_000_000);
    network
}

/// The proxies of a process, as its variables name them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proxies {
    pub http: SocketAddr,
    pub socks: SocketAddr,
}

/// Starts a process that waits for its stdin, behind these proxies.
pub(crate) async fn behind(client: &mut Client, id: &str, network: Value) -> Proxies {
    let script = r#"echo "${HTTP_PROXY#http://} ${ALL_PROXY#socks5h://} ready"; cat"#;
    client.start(sh(id, script).piped().with("networkProxy", network)).await.unwrap();
    let output = client.until(id, "ready").await.text();
    let mut ports = output.split(' ').map(str::parse);
    Proxies { http: ports.next().unwrap().unwrap(), socks: ports.next().unwrap().unwrap() }
}

/// A web server on a free port of this address. Counts its connections.
pub(crate) async fn target(address: &str) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    match stream.read_u8().await {
                        Ok(byte) => head.push(byte),
                        Err(_) => return,
                    }
                }
                let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    (port, count)
}

/// Sends a head and returns everything that comes back.
pub(crate) async fn exchange(proxy: SocketAddr, head: &str) -> String {
    let mut stream = TcpStream::connect(proxy).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let reading = timeout(PATIENCE, stream.read_to_end(&mut answer));
    reading.await.expect("the proxy does not answer").unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn get_head(authority: &str) -> String {
    format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n")
}

pub(crate) async fn get(proxy: SocketAddr, authority: &str) -> String {
    exchange(proxy, &get_head(authority)).await
}

pub(crate) fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
}

/// The body of a refusal.
pub(crate) fn blocked(answer: &str) -> Value {
    assert_eq!(status(answer), 403, "{answer}");
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// Opens a tunnel; the status of the answer, and the tunnel.
pub(crate) async fn connect(proxy: SocketAddr, authority: &str) -> (u16, TcpStream) {
    let mut stream = TcpStream::connect(proxy).await.unwrap();
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap());
    }
    (status(&String::from_utf8_lossy(&answer)), stream)
}

/// Asks the SOCKS5 proxy for a connection; the code of its reply, and the connection.
pub(crate) async fn socks(proxy: SocketAddr, host: &str, port: u16) -> (u8, TcpStream) {
    let mut stream = TcpStream::connect(proxy).await.unwrap();
    let mut request = vec![5, 1, 0, 5, 1, 0, 3, host.len() as u8];
    request.extend(host.as_bytes());
    request.extend(port.to_be_bytes());
    stream.write_all(&request).await.unwrap();
    let mut reply = [0; 12];
    timeout(PATIENCE, stream.read_exact(&mut reply)).await.unwrap().unwrap();
    assert_eq!(reply[..3], [5, 0, 5]);
    (reply[3], stream)
}

/// The next notification of this method. Others are dropped.
pub(crate) async fn next(client: &mut Client, method: &str) -> Value {
    loop {
        let notice = client.notification().await;
        if notice["method"] == method {
            return notice;
        }
    }
}

pub(crate) async fn answer(client: &mut Client, question: &Value, result: Value) {
    client.send(json!({"id": question["id"], "result": result}).to_string()).await;
}

#[tokio::test]
async fn variables_replace_those_of_the_environment() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for (id, members, any, bypass, local) in [
        ("both", json!({}), "socks5h", "", "0"),
        (
            "http",
            json!({"enableSocks5": false, "allowLocalBinding": true}),
            "http",
            "localhost,127.0.0.1,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16",
            "1",
        ),
    ] {
        let process = sh(id, "env").env("HTTP_PROXY", "http://other:1").env("no_proxy", "*");
        let output = client.run(process.with("networkProxy", network(members))).await.text();
        let variables: BTreeMap<_, _> =
            output.lines().filter_map(|line| line.split_once('=')).collect();
        for name in ["HTTP_PROXY", "https_proxy", "npm_config_proxy", "DOCKER_HTTPS_PROXY"] {
            assert!(variables[name].starts_with("http://127.0.0.1:"), "{name} in {output}");
        }
        let all = variables["ALL_PROXY"];
        assert!(all.starts_with(&format!("{any}://127.0.0.1:")), "{output}");
        assert_eq!(all == variables["HTTP_PROXY"], any == "http");
        assert_eq!((variables["no_proxy"], variables["NO_PROXY"]), (bypass, bypass));
        assert_eq!(variables["CODEX_NETWORK_PROXY_ACTIVE"], "1");
        assert_eq!(variables["CODEX_NETWORK_ALLOW_LOCAL_BINDING"], local);
    }
}

#[tokio::test]
async fn proxies_end_when_the_process_exits() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let rules = json!({"domains": {"127.0.0.1": "allow"}});
    // A child of the process keeps its output open.
    let script = r#"echo "${HTTP_PROXY#http://} ready"; sleep 1000 & read line"#;
    let process = sh("p", script).piped().with("networkProxy", network(rules));
    client.start(process).await.unwrap();
    let mut events = client.until("p", "ready").await;
    let proxy: SocketAddr = events.text().split(' ').next().unwrap().parse().unwrap();
    let (code, mut tunnel) = connect(proxy, &format!("127.0.0.1:{port}")).await;
    let (mut far, _) = listener.accept().await.unwrap();
    far.write_all(b"hello").await.unwrap();
    let mut hello = [0; 5];
    tunnel.read_exact(&mut hello).await.unwrap();
    assert_eq!((code, &hello), (200, b"hello"));
    client.write("p", "\n").await;
    while events.order.last() != Some(&"exited") {
        let notice = client.notification().await;
        if notice["method"] != "network/policyDecision" {
            events.take(&notice);
        }
    }
    let mut rest = Vec::new();
    let ended = timeout(PATIENCE, tunnel.read_to_end(&mut rest)).await;
    assert!(ended.is_ok() && rest.is_empty(), "the tunnel is still open");
    let refused = async {
        while TcpStream::connect(proxy).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, refused).await.expect("the proxy still listens");
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    client.collect_until_closed("p", events).await;
}

#[tokio::test]
async fn configurations_that_cannot_be_carried_out_start_nothing() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let without = |member: &str| {
        let mut network = network(json!({}));
        network["proxy"].as_object_mut().unwrap().remove(member);
        network
    };
    let mut no_time = network(json!({}));
    no_time["policyDecisionTimeoutMs"] = json!(0);
    let config = "invalid network proxy config: ";
    for (network, message) in [
        (json!({}), "missing field `proxy`".to_owned()),
        (without("enabled"), "missing field `enabled`".to_owned()),
        (without("allowLocalBinding"), "missing field `allowLocalBinding`".to_owned()),
        (no_time, "network policy decision callback timeout must be nonzero".to_owned()),
        (
            network(json!({"enabled": false})),
            format!("{config}executor-local network proxy launch requires an enabled proxy"),
        ),
        (
            network(json!({"domains": {"http://x": "allow"}})),
            format!("{config}unsupported domain pattern syntax: http://x"),
        ),
        (
            network(json!({"matchPorts": true, "domains": {"x:y": "allow"}})),
            format!("{config}invalid port in domain pattern: y"),
        ),
    ] {
        let process = sh("p", "echo ran").with("networkProxy", network);
        let refused = client.start(process).await.unwrap_err();
        assert_eq!(refused, ErrorResponse { code: -32602, message });
    }
    let masked = network(json!({"credentialMasking": true}));
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    std::fs::write(&file, "").unwrap();
    let broken = server_with(|config| config.environment.codex_home = Some(file));
    let mut other = Client::ready(&broken).await;
    let process = sh("p", "echo ran").with("networkProxy", masked);
    let failed = other.start(process).await.unwrap_err();
    assert_eq!(failed.code, -32603, "{failed:?}");
    assert!(failed.message.starts_with("cannot start the network proxy: "), "{failed:?}");
    client.nothing_more().await;
    other.nothing_more().await;
}

#[tokio::test]
async fn managed_network_members_have_no_effect_without_a_sandbox() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let process = sh("p", "echo ${HTTP_PROXY-none}")
        .with("managedNetwork", json!({"loopbackPorts": [80], "allowLocalBinding": true}))
        .with("enforceManagedNetwork", true);
    assert_eq!(client.start(process).await.unwrap()["sandboxType"], "none");
    assert_eq!(client.until_closed("p").await.text(), "none\n");
}

#[tokio::test]
async fn every_judged_request_is_reported() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (port, _) = target("127.0.0.1").await;
    let rules = json!({
        "domains": {"127.0.0.1": "allow", "bad.example": "deny"}, "mode": "limited",
    });
    let proxies = behind(&mut client, "p", network(rules)).await;
    let local = format!("127.0.0.1:{port}");
    assert_eq!(status(&get(proxies.http, &local).await), 200);
    assert_eq!(blocked(&get(proxies.http, "bad.example").await)["reason"], "denied");
    assert_eq!(connect(proxies.http, "other.example:443").await.0, 403);
    assert_eq!(socks(proxies.socks, "bad.example", 443).await.0, 2);
    let post = get_head(&local).replace("GET", "POST");
    assert_eq!(blocked(&exchange(proxies.http, &post).await)["reason"], "method_not_allowed");
    let unix = get_head("x.example").replace("\r\n\r\n", "\r\nx-unix-socket: /x\r\n\r\n");
    assert_eq!(status(&exchange(proxies.http, &unix).await), 501);
    let mut expected = vec![
        json!(["domain", "allow", "baseline_policy", "allow", "http", "127.0.0.1", port, "GET"]),
        json!(["domain", "deny", "baseline_policy", "denied", "http", "bad.example", 80, "GET"]),
        json!([
            "domain",
            "deny",
            "baseline_policy",
            "not_allowed",
            "https_connect",
            "other.example",
            443,
            "CONNECT"
        ]),
        json!([
            "domain",
            "deny",
            "baseline_policy",
            "denied",
            "socks5_tcp",
            "bad.example",
            443,
            null
        ]),
        json!(["domain", "allow", "baseline_policy", "allow", "http", "127.0.0.1", port, "POST"]),
        json!([
            "non_domain",
            "deny",
            "mode_guard",
            "method_not_allowed",
            "http",
            "127.0.0.1",
            port,
            "POST"
        ]),
        json!([
            "non_domain",
            "deny",
            "proxy_state",
            "unix_socket_unsupported",
            "http",
            "unix-socket",
            0,
            "GET"
        ]),
    ];
    for expected in expected.drain(..) {
        let notice = next(&mut client, "network/policyDecision").await;
        assert!(notice.get("id").is_none(), "a notification");
        let record = &notice["params"];
        let members =
            ["scope", "decision", "source", "reason", "protocol", "host", "port", "method"];
        let told: Vec<_> = members.iter().map(|member| record[member].clone()).collect();
        assert_eq!(Value::from(told), expected);
        assert_eq!((&record["processId"], &record["policyOverride"]), (&json!("p"), &json!(false)));
        assert!(record["client"].as_str().unwrap().starts_with("127.0.0.1:"), "{record}");
        let timestamp = record["timestamp"].as_str().unwrap();
        assert!(timestamp.len() == 24 && timestamp.ends_with('Z'), "{timestamp}");
    }
}

/// Whatever the client answers, and whether it is allowed then.
#[tokio::test]
async fn undecided_hosts_are_asked_about_each_time() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (port, hits) = target("127.0.0.1").await;
    let rules = json!({
        "allowLocalBinding": true, "domains": {"127.0.0.2": "deny", "127.0.0.3": "allow"},
        "reviewDomains": ["127.0.0.3"],
    });
    let proxies = behind(&mut client, "p", asking(rules)).await;
    let local = format!("127.0.0.1:{port}");
    let deny = |reason: &str| json!({"result": {"decision": {"type": "deny", "reason": reason}}});
    let ask = json!({"result": {"decision": {"type": "ask", "reason": "later"}}});
    let allow = json!({"result": {"decision": {"type": "allow"}}});
    let error = json!({"error": {"code": -32601, "message": "no"}});
    for (count, (response, expected)) in [
        (allow.clone(), ("allow", "not_allowed")),
        (deny("why not"), ("deny", "why not")),
        (allow, ("allow", "not_allowed")),
        (ask, ("ask", "later")),
        (error, ("deny", "not_allowed")),
        (json!({"result": {"decision": "allow"}}), ("deny", "not_allowed")),
        (json!({"result": null}), ("deny", "not_allowed")),
        (deny("line\nbreak"), ("deny", "not_allowed")),
        (deny(&"x".repeat(1025)), ("deny", "not_allowed")),
    ]
    .into_iter()
    .enumerate()
    {
        let asked = tokio::spawn({
            let local = local.clone();
            async move { get(proxies.http, &local).await }
        });
        let question = next(&mut client, "network/policyRequest").await;
        let request = json!({"protocol": "http", "host": "127.0.0.1", "port": port});
        let params = json!({"processId": "p", "request": request});
        assert_eq!((&question["id"], &question["params"]), (&json!(count + 1), &params));
        let mut message = response;
        message["id"] = question["id"].clone();
        client.send(message.to_string()).await;
        let answer = asked.await.unwrap();
        if expected.0 == "allow" {
            assert_eq!(status(&answer), 200, "{answer}");
        } else {
            let blocked = blocked(&answer);
            let told = (blocked["decision"].as_str().unwrap(), blocked["reason"].as_str().unwrap());
            assert_eq!((told, &blocked["source"]), (expected, &json!("decider")));
        }
        let record = next(&mut client, "network/policyDecision").await["params"].clone();
        assert_eq!(record["source"], "decider");
        assert_eq!(
            (&record["decision"], &record["reason"]),
            (&json!(expected.0), &json!(expected.1))
        );
        assert_eq!(record["policyOverride"], expected.0 == "allow");
    }
    assert_eq!(hits.load(Ordering::SeqCst), 2);
    // Denied hosts are not asked about; reviewed ones are, even if they are allowed.
    assert_eq!(blocked(&get(proxies.http, "127.0.0.2").await)["reason"], "denied");
    let reviewed = tokio::spawn(async move { socks(proxies.socks, "127.0.0.3", port).await.0 });
    let question = next(&mut client, "network/policyRequest").await;
    assert_eq!(question["params"]["request"]["protocol"], "socks5_tcp");
    answer(&mut client, &question, json!({"decision": {"type": "deny", "reason": "no"}})).await;
    assert_eq!(reviewed.await.unwrap(), 2);
    // A response to nothing, and a second one, are ignored.
    answer(&mut client, &question, json!({"decision": {"type": "allow"}})).await;
    client.call("environment/status", json!({})).await.unwrap();
}

#[tokio::test]
async fn without_asking_undecided_and_reviewed_hosts_are_refused() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let rules =
        json!({"domains": {"127.0.0.1": "allow"}, "reviewDomains": ["127.0.0.1", "x.example"]});
    let proxies = behind(&mut client, "p", network(rules)).await;
    for host in ["127.0.0.1", "x.example", "y.example"] {
        let blocked = blocked(&get(proxies.http, host).await);
        assert_eq!(
            (&blocked["reason"], &blocked["source"]),
            (&json!("not_allowed"), &json!("baseline_policy"))
        );
    }
}

#[tokio::test]
async fn the_connection_that_holds_the_session_is_asked() {
    let server = server_with(|config| config.detach_ttl = Duration::from_secs(1000));
    let mut client = Client::memory(&server);
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    let (port, hits) = target("127.0.0.1").await;
    let proxies = behind(&mut client, "p", asking(json!({"allowLocalBinding": true}))).await;
    let request =
        move || tokio::spawn(async move { get(proxies.http, &format!("127.0.0.1:{port}")).await });
    // The connection is lost while its answer is awaited: refused at once.
    let lost = request();
    assert_eq!(next(&mut client, "network/policyRequest").await["id"], 1);
    drop(client);
    assert_eq!(blocked(&lost.await.unwrap())["reason"], "not_allowed");
    // Nobody is there to ask.
    let detached = blocked(&request().await.unwrap());
    assert_eq!(
        (&detached["reason"], &detached["source"]),
        (&json!("not_allowed"), &json!("decider"))
    );
    assert_eq!(hits.load(Ordering::SeqCst), 0);
    let mut client = Client::resume(&server, &session).await;
    let resumed = request();
    let question = next(&mut client, "network/policyRequest").await;
    assert_eq!(question["id"], 1, "ids are counted on each connection");
    answer(&mut client, &question, json!({"decision": {"type": "allow"}})).await;
    assert_eq!(status(&resumed.await.unwrap()), 200);
    // The one record is about the last request: those of a detached client are not kept.
    let record = next(&mut client, "network/policyDecision").await["params"].clone();
    assert_eq!(record["policyOverride"], true);
    client.nothing_more().await;
}

#[tokio::test]
async fn secrets_are_masked_for_scripts_of_shells_only() {
    const SECRET: &str = "ghp_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2";
    let home = tempfile::tempdir().unwrap();
    let server = server_with(|config| config.environment.codex_home = Some(home.path().into()));
    let mut client = Client::ready(&server).await;
    let directory = home.path().join("proxy");
    let masked = || {
        network(json!({
            "credentialMasking": true,
            "credentialProviders": {
                "mine": {"env": ["MINE"], "patterns": ["m-[0-9]{8}"], "url_prefixes": ["https://x.example/"]},
                "broken": {"env": ["OTHER"], "patterns": ["("], "url_prefixes": ["https://x.example/"]},
            },
        }))
    };
    let mut seen = Vec::new();
    for (id, argv, is_masked) in [
        ("script", &["/bin/sh", "-c", "env"][..], true),
        ("again", &["/bin/sh", "-c", "env"], true),
        ("login", &["/bin/sh", "-lc", "env"], false),
        ("direct", &["env"], false),
    ] {
        let process = start(id, argv)
            .env("GH_TOKEN", SECRET)
            .env("REMOTE", format!("https://{SECRET}@github.com"))
            .env("MINE", "m-12345678")
            .env("OTHER", "m-12345678")
            .with("networkProxy", masked());
        let output = client.run(process).await.text();
        let variables: BTreeMap<_, _> =
            output.lines().filter_map(|line| line.split_once('=')).collect();
        assert_eq!(output.contains(SECRET), !is_masked, "{id}: {output}");
        let active = variables.get("CODEX_NETWORK_PROXY_CREDENTIAL_BROKER_ACTIVE");
        assert_eq!(active.is_some(), is_masked, "{id}");
        if is_masked {
            assert!(variables["GH_TOKEN"].starts_with("ghp_masked"), "{output}");
            assert_ne!(variables["MINE"], "m-12345678");
            assert!(variables["MINE"].starts_with("m-"));
            seen.push(variables["GH_TOKEN"].to_owned());
        }
        let bundle = Path::new(variables["SSL_CERT_FILE"]);
        assert_eq!(variables["CURL_CA_BUNDLE"], variables["SSL_CERT_FILE"]);
        assert_eq!(bundle.parent(), Some(&*directory));
        assert!(std::fs::read_to_string(bundle).unwrap().contains("BEGIN CERTIFICATE"));
    }
    assert_eq!(seen[0], seen[1], "a value keeps its stand-in");
    drop(client);
    server.shut_down().await;
    drop(server);
    let left = || std::fs::read_dir(&directory).unwrap().count();
    eventually("only the lock of the directory is left", || left() == 1).await;
}

#[tokio::test]
async fn new_rules_cut_what_they_do_not_allow() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let rules = json!({"allowLocalBinding": true, "domains": {"127.0.0.1": "allow"}});
    let proxies = behind(&mut client, "p", asking(rules)).await;
    let mut tunnels = Vec::new();
    for kind in ["connect", "socks", "asked"] {
        let opening = tokio::spawn(async move {
            match kind {
                "connect" => connect(proxies.http, &format!("127.0.0.1:{port}")).await.1,
                "socks" => socks(proxies.socks, "127.0.0.1", port).await.1,
                _ => connect(proxies.http, &format!("localhost:{port}")).await.1,
            }
        });
        if kind == "asked" {
            let question = next(&mut client, "network/policyRequest").await;
            answer(&mut client, &question, json!({"decision": {"type": "allow"}})).await;
        }
        let (mut far, _) = listener.accept().await.unwrap();
        far.write_all(b"x").await.unwrap();
        let mut near = opening.await.unwrap();
        assert_eq!(near.read_u8().await.unwrap(), b'x');
        tunnels.push((near, far));
    }
    let update = |rules: Value| json!({"processId": "p", "rules": rules});
    let allowed = json!({"domains": {"127.0.0.1": "allow", "x.example": "allow"}});
    client.call("network/updateRules", update(allowed)).await.unwrap();
    for (near, far) in &mut tunnels {
        far.write_all(b"y").await.unwrap();
        assert_eq!(near.read_u8().await.unwrap(), b'y', "still allowed");
    }
    client.call("network/updateRules", update(json!({}))).await.unwrap();
    for (near, far) in &mut tunnels[..2] {
        let mut rest = Vec::new();
        let cut = timeout(PATIENCE, near.read_to_end(&mut rest)).await;
        assert!(cut.is_ok() && rest.is_empty(), "not cut");
        let _ = timeout(PATIENCE, far.read_to_end(&mut rest)).await.expect("not cut");
    }
    // What the client allowed lasts, until a rule denies it.
    let (near, far) = &mut tunnels[2];
    far.write_all(b"z").await.unwrap();
    assert_eq!(near.read_u8().await.unwrap(), b'z');
    client
        .call("network/updateRules", update(json!({"domains": {"localhost": "deny"}})))
        .await
        .unwrap();
    let mut rest = Vec::new();
    timeout(PATIENCE, near.read_to_end(&mut rest)).await.expect("not cut").unwrap();
    assert_eq!(blocked(&get(proxies.http, "localhost").await)["reason"], "denied");
    for (params, code) in [
        (update(json!({"domains": {"http://x": "allow"}})), -32602),
        (update(json!({"mode": "limited"})), -32602),
        (json!({"processId": "q", "rules": {}}), -32600),
    ] {
        assert_eq!(client.call("network/updateRules", params).await.unwrap_err().code, code);
    }
    client.start(sh("plain", "cat").piped()).await.unwrap();
    let plain = json!({"processId": "plain", "rules": {}});
    assert_eq!(client.call("network/updateRules", plain).await.unwrap_err().code, -32602);
}

#[tokio::test]
async fn an_unusable_question_kind_is_reported_with_its_kind() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let process = sh("p", "true").with("networkProxy", network(json!({"mode": "x"}))).0;
    assert_eq!(client.kind("process/start", process).await, ErrorKind::InvalidParams);
}
