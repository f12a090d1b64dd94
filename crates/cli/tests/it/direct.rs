//! Remote mode without sign-in or relay, against a scripted registry: the direct transport signed for
//! AWS, executor credentials on stdin, proxies. Also the flags that are refused or ignored.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::{SinkExt, StreamExt};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_websockets::{Message, ServerBuilder, WebSocketStream};

use crate::support::{PATIENCE, Running, codex, send, wait};
use crate::tls::Authority;

/// A request that the registry received.
#[derive(Debug, Clone)]
struct Received {
    head: String,
    body: String,
}

impl Received {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (own, value) = line.split_once(':')?;
            own.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    fn is_upgrade(&self) -> bool {
        self.header("upgrade").is_some()
    }
}

type Socket = WebSocketStream<TcpStream>;

/// Responds to registrations and upgrades by a script; without one, with success.
struct Registry {
    address: SocketAddr,
    received: mpsc::UnboundedReceiver<Received>,
    sockets: mpsc::UnboundedReceiver<Socket>,
    script: Arc<Mutex<Script>>,
}

#[derive(Default)]
struct Script {
    /// Responses to the next registrations.
    registrations: VecDeque<(u16, Value)>,
    /// Statuses of the next upgrades.
    upgrades: VecDeque<u16>,
}

impl Registry {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, received) = mpsc::unbounded_channel();
        let (opened, sockets) = mpsc::unbounded_channel();
        let script: Arc<Mutex<Script>> = Arc::default();
        let scripted = script.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (seen, opened) = (seen.clone(), opened.clone());
                tokio::spawn(respond(socket, address, seen, opened, scripted.clone()));
            }
        });
        Self { address, received, sockets, script }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn good(address: SocketAddr) -> Value {
        json!({"environment_id": "env_1", "registration_id": "reg_1",
            "transport": "direct_jsonrpc_v1", "url": format!("ws://{address}/socket?secret=4711"),
            "security_profile": "noise_hybrid_ik_v1", "executor_registration_id": "reg_1"})
    }

    async fn next(&mut self) -> Received {
        self.received.recv().await.unwrap()
    }

    /// A server in direct mode, with AWS credentials.
    fn direct(&self) -> Command {
        let mut command = self.remote(&["--remote-transport", "direct", "--aws-sigv4"]);
        command.args(["--aws-region", "us-east-1"]);
        command.env("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE").env("AWS_SECRET_ACCESS_KEY", "hunter2");
        command
    }

    fn remote(&self, more: &[&str]) -> Command {
        let mut command = bare();
        command.args(["--remote", &self.url(), "--environment-id", "env_1"]).args(more);
        command
    }
}

/// A server without the variables and the home directory of the user who runs the tests.
fn bare() -> Command {
    let mut command = codex();
    for (name, _) in std::env::vars() {
        let upper = name.to_ascii_uppercase();
        if upper.starts_with("AWS_") || upper.starts_with("CODEX_") || upper.ends_with("_PROXY") {
            command.env_remove(name);
        }
    }
    command.env("HOME", "/nonexistent").env("CODEX_HOME", "/nonexistent").arg("exec-server");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn respond(
    mut socket: TcpStream,
    address: SocketAddr,
    seen: mpsc::UnboundedSender<Received>,
    opened: mpsc::UnboundedSender<Socket>,
    script: Arc<Mutex<Script>>,
) {
    let mut bytes = Vec::new();
    let (head, body) = loop {
        if socket.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let received = Received { head: head.to_owned(), body: body.to_owned() };
        let length = received.header("content-length").map_or(0, |length| length.parse().unwrap());
        if body.len() >= length {
            break (received.head, received.body);
        }
    };
    let received = Received { head, body };
    let is_upgrade = received.is_upgrade();
    let key = received.header("sec-websocket-key").unwrap_or_default().to_owned();
    seen.send(received).unwrap();
    let (status, text) = if is_upgrade {
        let status = script.lock().unwrap().upgrades.pop_front().unwrap_or(101);
        if status == 101 {
            let accept = accept_for(&key);
            let head = format!(
                "HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\
                 sec-websocket-accept: {accept}\r\n\r\n"
            );
            socket.write_all(head.as_bytes()).await.unwrap();
            let _ = opened.send(ServerBuilder::new().serve(socket));
            return;
        }
        (status, String::new())
    } else {
        let answer = script.lock().unwrap().registrations.pop_front();
        let (status, body) = answer.unwrap_or_else(|| (200, Registry::good(address)));
        (status, body.to_string())
    };
    let length = text.len();
    let answer = format!(
        "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{text}"
    );
    let _ = socket.write_all(answer.as_bytes()).await;
}

/// `Sec-WebSocket-Accept` for a key.
fn accept_for(key: &str) -> String {
    let mut sha1 = ring::digest::Context::new(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY);
    sha1.update(key.as_bytes());
    sha1.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    base64_simd::STANDARD.encode_to_string(sha1.finish())
}

/// The exit code of a program, and its stderr.
fn exit_and_stderr(mut child: Child) -> (Option<i32>, String) {
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (wait(&mut child).code(), text)
}

async fn exit_of(child: Child) -> (Option<i32>, String) {
    let pid = child.id();
    let ending = tokio::task::spawn_blocking(move || exit_and_stderr(child));
    match tokio::time::timeout(PATIENCE, ending).await {
        Ok(exited) => exited.unwrap(),
        Err(_) => {
            send(pid, Signal::KILL);
            panic!("the program does not exit");
        }
    }
}

async fn call(socket: &mut Socket, id: i64, method: &str, params: Value) -> Value {
    let request = json!({"id": id, "method": method, "params": params});
    socket.send(Message::text(request.to_string())).await.unwrap();
    loop {
        let message = socket.next().await.unwrap().unwrap();
        let answer: Value = serde_json::from_str(message.as_text().unwrap()).unwrap();
        if answer["id"] == id {
            return answer["result"].clone();
        }
    }
}

#[tokio::test]
async fn direct_transport_registers_once_signs_requests_and_resumes_sessions() {
    let mut registry = Registry::start().await;
    let child = registry.direct().env("AWS_SESSION_TOKEN", "tok").spawn().unwrap();
    let register = registry.next().await;
    assert!(register.head.starts_with("POST /cloud/environment/env_1/direct/register "));
    assert_eq!(register.body, r#"{"transport":"direct_jsonrpc_v1"}"#);
    assert_eq!(register.header("x-amz-security-token"), Some("tok"));
    let signed = register.header("authorization").unwrap();
    assert!(signed.starts_with("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/"), "{signed}");
    assert!(signed.contains("/us-east-1/execute-api/aws4_request, "), "{signed}");
    let names = "SignedHeaders=content-type;host;x-amz-date;x-amz-security-token, ";
    assert!(signed.contains(names), "{signed}");

    let mut session = Value::Null;
    for round in 0..2 {
        let upgrade = registry.next().await;
        assert!(upgrade.is_upgrade(), "no second registration: {upgrade:?}");
        assert!(upgrade.head.starts_with("GET /socket?secret=4711 "), "{upgrade:?}");
        let signed = upgrade.header("authorization").unwrap();
        let names = "SignedHeaders=host;x-amz-date;x-amz-security-token, ";
        assert!(signed.contains(names), "{signed}");
        assert_eq!(upgrade.header("x-request-id"), None);
        let mut socket = registry.sockets.recv().await.unwrap();
        let hello = json!({"clientName": "far", "resumeSessionId": session});
        let answer = call(&mut socket, 1, "initialize", hello).await;
        session = answer["sessionId"].clone();
        assert!(session.is_string(), "round {round}: {answer}");
        socket.send(Message::text(r#"{"method":"initialized"}"#)).await.unwrap();
        let status = call(&mut socket, 2, "environment/status", json!({})).await;
        assert_eq!(status["status"], "ready");
        if round == 0 {
            // The server retries after a 5xx, too.
            registry.script.lock().unwrap().upgrades.push_back(503);
            drop(socket);
            assert!(registry.next().await.is_upgrade());
        }
    }
    send(child.id(), Signal::TERM);
    let (code, stderr) = exit_of(child).await;
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("hunter2") && !stderr.contains("4711"), "{stderr}");
}

#[tokio::test]
async fn direct_transport_exits_if_registration_or_upgrade_is_refused() {
    let good = |address| Registry::good(address);
    let mut registry = Registry::start().await;
    let address = registry.address;
    let without = |name: &str| {
        let mut answer = good(address);
        answer.as_object_mut().unwrap().remove(name);
        answer
    };
    let with = |name: &str, value: &str| {
        let mut answer = good(address);
        answer[name] = json!(value);
        answer
    };
    let error = json!({"error": {"code": "nope", "message": "because"}});
    for (status, answer, expected) in [
        (200, without("url"), "missing field `url`"),
        (200, without("transport"), "missing field `transport`"),
        (200, without("registration_id"), "missing field `registration_id`"),
        (200, without("environment_id"), "missing field `environment_id`"),
        (200, with("environment_id", "env_2"), "different environment id"),
        (200, with("transport", "v2"), "unsupported direct transport \"v2\""),
        (200, with("url", ""), "incomplete direct connection data"),
        (200, with("registration_id", ""), "incomplete direct connection data"),
        (200, with("url", "ws://far.test/x?secret=4711"), "not wss://"),
        (401, error.clone(), "HTTP 401: nope: because"),
        (403, error.clone(), "HTTP 403: nope: because"),
        (500, error.clone(), "HTTP 500"),
    ] {
        registry.script.lock().unwrap().registrations.push_back((status, answer));
        let (code, text) = exit_of(registry.direct().spawn().unwrap()).await;
        assert_eq!(code, Some(1), "{expected}: {text}");
        assert!(text.contains(expected) && !text.contains("4711"), "{expected}: {text}");
    }
    registry.script.lock().unwrap().upgrades.push_back(401);
    let (code, text) = exit_of(registry.direct().spawn().unwrap()).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("HTTP 401") && text.contains("/socket"), "{text}");
    assert!(!text.contains("4711"), "{text}");
    while let Ok(received) = registry.received.try_recv() {
        assert!(received.header("authorization").is_some_and(|value| value.starts_with("AWS4-")));
    }
}

fn frame(token: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let frame = json!({"version": 1, "environment_id": "env_1", "token": token,
        "expires_at": now + 3600});
    format!("{frame}\n")
}

#[tokio::test]
async fn a_bearer_token_on_stdin_signs_the_registration() {
    let mut registry = Registry::start().await;
    let flags = ["--registration-bearer-stdin", "--exit-on-stdin-close"];
    let mut child = registry.remote(&flags).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"tok-a\nignored\n").unwrap();
    let register = registry.next().await;
    assert!(register.head.starts_with("POST /cloud/environment/env_1/register "), "{register:?}");
    assert_eq!(register.header("authorization"), Some("Bearer tok-a"));
    assert!(registry.next().await.is_upgrade());
    drop(stdin);
    assert_eq!(exit_of(child).await.0, Some(0));

    let mut child =
        registry.remote(&flags[..1]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"tok-b").unwrap();
    let (code, shown) = exit_of(child).await;
    assert_eq!(code, Some(1));
    assert!(shown.contains("ends with a newline") && !shown.contains("tok-b"), "{shown}");
}

/// A ChatGPT token with these claims about its account.
fn chatgpt_token(account: &Value) -> String {
    let payload = json!({"exp": 1, "https://api.openai.com/auth": account}).to_string();
    format!("e30.{}.c2ln", base64_simd::URL_SAFE_NO_PAD.encode_to_string(payload))
}

#[tokio::test]
async fn a_chatgpt_token_on_stdin_signs_the_registration_over_https() {
    let (authority, mut registry) = (Authority::new(), Registry::start().await);
    let port = authority.front("localhost", registry.address).await;
    let https = format!("https://localhost:{port}");
    let command = |base: &str, more: &[&str]| {
        let mut command = bare();
        command.args(["--remote", base, "--environment-id", "env_1", "--chatgpt-token-stdin"]);
        command.args(more).env("CODEX_CA_CERTIFICATE", authority.file()).stdin(Stdio::piped());
        command
    };
    let account = json!({"chatgpt_account_id": "acc", "chatgpt_account_is_fedramp": true});
    for (account, flags, fedramp) in [
        (account, &["--exit-on-stdin-close"][..], Some("true")),
        (json!({}), &["--chatgpt-account-id", "acc", "--exit-on-stdin-close"], None),
    ] {
        let mut child = command(&https, flags).spawn().unwrap();
        let token = chatgpt_token(&account);
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{token}").unwrap();
        let register = registry.next().await;
        let line = "POST /cloud/environment/env_1/register ";
        assert!(register.head.starts_with(line), "{register:?}");
        assert_eq!(register.header("authorization"), Some(&*format!("Bearer {token}")));
        assert_eq!(register.header("chatgpt-account-id"), Some("acc"));
        assert_eq!(register.header("x-openai-fedramp"), fedramp);
        let upgrade = registry.next().await;
        assert!(upgrade.is_upgrade() && upgrade.header("authorization").is_none(), "{upgrade:?}");
        drop(stdin);
        let (code, shown) = exit_of(child).await;
        assert_eq!(code, Some(0), "{shown}");
        assert!(!shown.contains(&token), "{shown}");
    }
    let mine = chatgpt_token(&json!({"chatgpt_account_id": "acc"}));
    for (base, flags, expected) in [
        (registry.url(), &[][..], "without https"),
        (https.clone(), &["--chatgpt-account-id", "other"], "is not the account"),
    ] {
        let mut child = command(&base, flags).spawn().unwrap();
        writeln!(child.stdin.take().unwrap(), "{mine}").unwrap();
        let (code, shown) = exit_of(child).await;
        assert_eq!(code, Some(1), "{expected}: {shown}");
        assert!(shown.contains(expected) && !shown.contains(&mine), "{expected}: {shown}");
    }
    // A file would keep it.
    let child = command(&https, &[]).stdin(Stdio::null()).spawn().unwrap();
    let (code, shown) = exit_of(child).await;
    assert!(code == Some(1) && shown.contains("a pipe or a socket"), "{shown}");
    assert!(registry.received.try_recv().is_err(), "nothing was sent");
}

#[tokio::test]
async fn executor_credentials_on_stdin_replace_each_other() {
    let mut registry = Registry::start().await;
    let mut command = registry.remote(&["--executor-credential-stdin"]);
    // The sign-in of the user is not read.
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(frame("tok-a").as_bytes()).unwrap();
    let register = registry.next().await;
    assert!(register.head.starts_with("POST /cloud/environment/env_1/register "), "{register:?}");
    assert_eq!(register.header("authorization"), Some("Bearer tok-a"));
    let upgrade = registry.next().await;
    assert_eq!(upgrade.header("authorization"), None, "the URL is the credential");
    let id = upgrade.header("x-request-id").unwrap();
    let digits = id.strip_prefix("req_").unwrap();
    assert!(digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()), "{id}");
    let socket = registry.sockets.recv().await.unwrap();

    // The next registration uses the token of the next frame.
    stdin.write_all(frame("tok-b").as_bytes()).unwrap();
    registry.script.lock().unwrap().upgrades.push_back(401);
    drop(socket);
    let refused = registry.next().await;
    assert!(refused.is_upgrade());
    assert_ne!(refused.header("x-request-id"), Some(id), "new each time");
    let again = registry.next().await;
    assert!(again.head.starts_with("POST "), "{again:?}");
    assert_eq!(again.header("authorization"), Some("Bearer tok-b"));
    assert!(registry.next().await.is_upgrade());
    let _socket = registry.sockets.recv().await.unwrap();
    drop(stdin);
    let (code, stderr) = exit_of(child).await;
    assert_eq!(code, Some(0), "end of stdin: {stderr}");
    assert!(!stderr.contains("tok-"), "{stderr}");
}

#[tokio::test]
async fn invalid_executor_credentials_end_the_server() {
    let registry = Registry::start().await;
    for (input, expected) in [
        (String::new(), "closed"),
        ("nonsense\n".to_owned(), "invalid executor credential frame"),
        ("x".repeat(17_000), "exceeds the size limit"),
        (frame("t").replace("env_1", "env_2"), "different environment"),
        (frame("t") + "nonsense\n", "invalid executor credential frame"),
    ] {
        let mut command = registry.remote(&["--executor-credential-stdin"]);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let _ = stdin.write_all(input.as_bytes());
        if input.is_empty() {
            drop(stdin);
        } else {
            // The server exits though stdin stays open.
            child.stdin = Some(stdin);
        }
        let (code, text) = exit_of(child).await;
        assert_eq!(code, Some(1), "{expected}: {text}");
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn conflicting_flags_are_refused() {
    let remote = ["--remote", "http://127.0.0.1:1", "--environment-id", "e"];
    let token = ["--ws-auth", "capability-token", "--ws-token-sha256"];
    let hash = "a".repeat(64);
    let auth = [&token[..], &[&hash]].concat();
    let direct = ["--remote-transport", "direct"];
    for (arguments, code, expected) in [
        ([&remote[..], &direct].concat(), 2, "--aws-sigv4"),
        (
            [&remote[..], &["--aws-sigv4"]].concat(),
            1,
            "--aws-sigv4 requires --remote-transport direct",
        ),
        (vec!["--aws-sigv4"], 2, "--environment-id"),
        (vec!["--aws-profile", "p"], 2, "--remote"),
        (vec!["--aws-region", "p"], 2, "--remote"),
        (vec!["--aws-service", "p"], 2, "--remote"),
        ([&remote[..], &["--aws-region", "r"]].concat(), 2, "--aws-sigv4"),
        (direct.to_vec(), 2, "--environment-id"),
        ([&remote[..], &["--remote-transport", "nope"]].concat(), 2, "nope"),
        (vec!["--executor-credential-stdin"], 2, "--environment-id"),
        (
            [&remote[..], &direct, &["--aws-sigv4", "--executor-credential-stdin"]].concat(),
            2,
            "cannot be used with",
        ),
        (
            [&remote[..], &direct, &["--aws-sigv4", "--use-agent-identity-auth"]].concat(),
            2,
            "cannot be used with",
        ),
        (
            [&remote[..], &["--executor-credential-stdin", "--use-agent-identity-auth"]].concat(),
            2,
            "cannot be used with",
        ),
        (vec!["--chatgpt-token-stdin"], 2, "--environment-id"),
        ([&remote[..], &["--chatgpt-account-id", "a"]].concat(), 2, "--chatgpt-token-stdin"),
        (
            [&remote[..], &["--chatgpt-token-stdin", "--registration-bearer-stdin"]].concat(),
            2,
            "cannot be used with",
        ),
        (
            [&remote[..], &["--chatgpt-token-stdin", "--executor-credential-stdin"]].concat(),
            2,
            "cannot be used with",
        ),
        (
            [&remote[..], &["--chatgpt-token-stdin", "--use-agent-identity-auth"]].concat(),
            2,
            "cannot be used with",
        ),
        (
            [&remote[..], &direct, &["--aws-sigv4", "--chatgpt-token-stdin"]].concat(),
            2,
            "cannot be used with",
        ),
        ([&remote[..], &direct, &["--aws-sigv4"]].concat(), 1, "no AWS region"),
        (
            [&remote[..], &direct, &["--aws-sigv4", "--aws-region", "r"]].concat(),
            1,
            "no AWS credentials",
        ),
        (
            vec![
                "--remote",
                "http://far.test",
                "--environment-id",
                "e",
                "--remote-transport",
                "direct",
                "--aws-sigv4",
                "--aws-region",
                "r",
            ],
            1,
            "https",
        ),
        (
            [&["forward", "--connect", "ws://127.0.0.1:1"], &remote[..], &direct, &["--aws-sigv4"]]
                .concat(),
            1,
            "does not support forward",
        ),
        ([&remote[..], &auth].concat(), 1, "--ws-auth cannot be used with --remote"),
        ([&["--listen", "stdio"], &auth[..]].concat(), 1, "--ws-auth needs a websocket listener"),
        (
            [&["forward", "--connect", "ws://127.0.0.1:1"], &remote[..], &auth].concat(),
            2,
            "--ws-auth",
        ),
        (vec!["--linux-sandbox-pid-namespace", "other"], 2, "isolate, inherit"),
        (vec!["--enable", ""], 2, "--enable"),
    ] {
        let (status, text) = exit_and_stderr(bare().args(&arguments).spawn().unwrap());
        assert_eq!(status, Some(code), "{arguments:?}: {text}");
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}

/// A service file that was written for another implementation starts this one.
#[tokio::test]
async fn configuration_flags_are_accepted() {
    let flags = [
        "-c",
        "model=\"o3\"",
        "--config",
        "features.x=true",
        "-c",
        "nonsense",
        "--enable",
        "shell_snapshot_v2",
        "--disable",
        "network_proxy",
        "--strict-config",
        "--linux-sandbox-pid-namespace",
        "isolate",
        "--proxy-private-ips-via-upstream",
        "--concurrent-requests",
        "1",
    ];
    Running::start(&flags).client().await;
    // Before the subcommand, too.
    let mut command = codex();
    command.args(&flags[..11]).arg("exec-server");
    Running::start_with(&mut command).client().await;
    for value in ["true", "false"] {
        let mut command = bare();
        command.env("CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM", value);
        Running::start_with(&mut command).client().await;
    }
    let mut registry = Registry::start().await;
    let mut command = bare();
    command.args(["forward", "--connect", "ws://127.0.0.1:1", "--remote", &registry.url()]);
    command.args(["--environment-id", "env_1", "--executor-credential-stdin"]).args(&flags[..14]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.as_mut().unwrap().write_all(frame("tok").as_bytes()).unwrap();
    assert_eq!(registry.next().await.header("authorization"), Some("Bearer tok"));
    assert!(registry.next().await.is_upgrade());
    drop(child.stdin.take());
    assert_eq!(exit_of(child).await.0, Some(0));
}

/// The server connects to the registry and to the rendezvous only through the proxy.
#[tokio::test]
async fn remote_mode_uses_the_proxy_of_the_environment() {
    let mut proxy = Registry::start().await;
    // The script does not open tunnels; the test checks only the requests.
    let mut command = bare();
    command.args(["--remote", "http://127.0.0.1:9", "--environment-id", "env_1"]);
    command.env("CODEX_API_KEY", "key").env("HTTP_PROXY", proxy.url());
    let child = command.spawn().unwrap();
    let register = proxy.next().await;
    let line = "POST http://127.0.0.1:9/cloud/environment/env_1/register HTTP/1.1";
    assert!(register.head.starts_with(line), "{register:?}");
    assert_eq!(register.header("authorization"), Some("Bearer key"));
    let tunnel = proxy.next().await;
    let line = format!("CONNECT {} HTTP/1.1", proxy.address);
    assert!(tunnel.head.starts_with(&line), "{tunnel:?}");
    send(child.id(), Signal::TERM);
    assert_eq!(exit_of(child).await.0, Some(0));
}

/// `http/request` uses the proxy and the certificate authority of the server's environment.
#[tokio::test]
async fn http_requests_use_the_proxy_and_authority_of_the_environment() {
    let mut proxy = Registry::start().await;
    let mut command = bare();
    command.env("http_proxy", proxy.url()).env("NO_PROXY", "direct.test").env("EMPTY", "");
    let server = Running::start_with(&mut command);
    let mut client = server.client().await;
    let request = |url: &str, headers: Value| {
        json!({"method": "GET", "url": url, "headers": headers, "requestId": "r",
            "redirectPolicy": "stop", "streamResponse": false})
    };
    client.call("http/request", request("http://far.test/a?b", json!([]))).await;
    assert!(proxy.next().await.head.starts_with("GET http://far.test/a?b HTTP/1.1\r\n"));
    let direct = client.call("http/request", request("http://direct.test/", json!([]))).await;
    assert_eq!(direct["error"]["code"], -32603, "{direct}");
    assert!(proxy.received.try_recv().is_err());
    let empty = json!([{"name": "a", "value": "Bearer ", "valueEnvVar": "EMPTY"}]);
    let empty = client.call("http/request", request("http://far.test/", empty)).await;
    assert_eq!(empty["error"]["code"], -32602, "{empty}");
    drop(server);

    let (authority, origin) = (Authority::new(), Registry::start().await);
    let url = format!("https://localhost:{}/", authority.front("localhost", origin.address).await);
    for (authority, trusted) in
        [(Some(authority.file()), true), (None, false), (Some("/none".into()), false)]
    {
        let mut command = bare();
        if let Some(authority) = authority {
            command.env("CODEX_CA_CERTIFICATE", authority);
        }
        let server = Running::start_with(&mut command);
        let mut client = server.client().await;
        let answer = client.call("http/request", request(&url, json!([]))).await;
        assert_eq!(answer["result"]["status"] == 200, trusted, "{answer}");
    }
}
