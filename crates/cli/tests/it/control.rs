//! The control socket: status, drain, and who may use it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::commands::{CommandOutput, output};
use crate::skipped::runs_as_root;
use crate::support::{Client, PATIENCE, Running, codex, is_running, numbers, start, wait};

struct World {
    _directory: tempfile::TempDir,
    base: PathBuf,
    socket: PathBuf,
}

impl World {
    fn new() -> Self {
        // Not below /tmp, which some policies make writable.
        let directory = tempfile::Builder::new().prefix("control-").tempdir_in("/var/tmp").unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).unwrap();
        Self { _directory: directory, socket: base.join("control.sock"), base }
    }

    fn server(&self, arguments: &[&str]) -> Running {
        let mut command = codex();
        command.args(["exec-server", "--control"]).arg(&self.socket).args(arguments);
        Running::start_with(&mut command)
    }

    fn control(&self, subcommand: &str, arguments: &[&str]) -> Command {
        let mut command = codex();
        command.args(["exec-server", subcommand, "--control"]).arg(&self.socket).args(arguments);
        command
    }

    fn status(&self) -> Value {
        let text = output(&mut self.control("status", &["--json"])).success();
        serde_json::from_str(&text).unwrap()
    }

    /// A drain that waits for the end of the server, once the server has begun to drain.
    fn drain(&self, deadline: &str) -> Waiting {
        let mut command = self.control("drain", &["--json", "--deadline", deadline]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let status: Value = serde_json::from_str(&line).unwrap();
        assert!(status["draining"].is_object(), "{status}");
        Waiting { child, stdout }
    }
}

struct Waiting {
    child: std::process::Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Waiting {
    fn finish(mut self) -> CommandOutput {
        let code = wait(&mut self.child).code();
        let (mut out, mut err) = (String::new(), String::new());
        self.stdout.read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        CommandOutput { code, out, err }
    }
}

/// A session that ends with its connection, if nothing in it runs.
async fn short_session(server: &Running) -> Client {
    let mut client = server.uninitialized_client().await;
    client.handshake(json!({"clientName": "test", "detachTtlMs": 0})).await;
    client
}

#[tokio::test]
async fn status_shows_what_the_server_does() {
    let world = World::new();
    let server = world.server(&["--server-limit", "processes=7", "--max-connections", "99"]);
    assert_eq!(world.socket.metadata().unwrap().mode() & 0o7777, 0o600);
    let mut client = server.client().await;
    client.start("p", "echo started; exec sleep 1000").await;
    client.lines("p", 1).await;
    let (_, code) = client.run("q", "true").await;
    assert_eq!(code, 0);
    let status = world.status();
    for (member, expected) in [
        ("/pid", json!(server.pid())),
        ("/version", json!(env!("CARGO_PKG_VERSION"))),
        ("/listeners", json!([server.url])),
        ("/connections", json!(1)),
        ("/sessions", json!({"attached": 1, "detached": 0})),
        ("/processes", json!(1)),
        ("/limits", json!({"connections": 99, "processes": 7})),
    ] {
        assert_eq!(status.pointer(member), Some(&expected), "{member} in {status:#}");
    }
    assert!(status["uptimeMs"].is_u64() && status.get("draining").is_none(), "{status:#}");
    let text = output(&mut world.control("status", &[])).success();
    for words in [&server.url[..], "1 of at most 99", "1 attached, 0 detached", "1 of at most 7"] {
        assert!(text.contains(words), "{words} in {text}");
    }
    server.signal(Signal::TERM);
    assert!(server.ended().success());
    assert!(!world.socket.exists());
    output(&mut world.control("status", &[])).failed(1, "cannot reach a server");
    output(codex().args(["exec-server", "status"])).failed(1, "--control PATH");
}

#[tokio::test]
async fn a_drained_server_lets_its_sessions_finish_and_opens_no_new_ones() {
    let world = World::new();
    let server = world.server(&[]);
    let mut client = server.uninitialized_client().await;
    let session = client.handshake(json!({"clientName": "test", "detachTtlMs": 600_000})).await;
    let mut params = start("p", "read line; echo got $line; exit 3");
    params["pipeStdin"] = json!(true);
    client.call("process/start", params).await;
    let waiting = world.drain("1h");
    assert!(world.status()["draining"]["elapsedMs"].is_u64());

    // No new session, by kind; nor is the server ready.
    let mut other = server.uninitialized_client().await;
    let answer = other.call("initialize", json!({"clientName": "late"})).await;
    assert_eq!(answer["error"]["data"]["kind"], "draining", "{answer}");
    drop(other);
    assert!(ready(&server).starts_with("HTTP/1.1 503"));

    // A session that is there works, also after a lost connection.
    drop(client);
    let mut client = server.uninitialized_client().await;
    let resumed = json!({"clientName": "test", "resumeSessionId": session, "detachTtlMs": 0});
    client.handshake(resumed).await;
    let (_, code) = client.run("q", "exit 4").await;
    assert_eq!(code, 4);
    let write = json!({"processId": "p", "chunk": "aGkK"});
    let answer = client.call("process/write", write).await;
    assert_eq!(answer["result"]["status"], "accepted", "{answer}");
    let (said, code) = client.closed("p").await;
    assert_eq!((said.as_str(), code), ("got hi\n", 3));
    drop(client);
    let end = waiting.finish();
    assert_eq!((end.code, end.out.as_str()), (Some(0), "{\"cutSessions\":0}\n"), "{end:?}");
    assert!(server.ended().success());
    assert!(!world.socket.exists());
}

fn ready(server: &Running) -> String {
    let address = server.url.strip_prefix("ws://").unwrap();
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    write!(socket, "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test]
async fn the_deadline_of_a_drain_ends_processes_as_a_stop_does() {
    let world = World::new();
    let server = world.server(&["--stop-grace", "30s"]);
    let mut client = short_session(&server).await;
    let script = "trap 'echo ending; exit 0' TERM; sleep 600 >/dev/null 2>&1 & echo $$; \
                  while :; do wait; done";
    client.start("p", script).await;
    let pid = numbers(&client.lines("p", 1).await)[0];
    // The last deadline counts.
    let waiting = world.drain("1h");
    output(&mut world.control("drain", &["--deadline", "0", "--no-wait"])).success();
    let (said, code) = client.closed("p").await;
    // The shell may report its `sleep`, which got SIGTERM as well.
    assert!(said.ends_with("ending\n") && code == 0, "it got SIGTERM and time: {said}, {code}");
    let end = waiting.finish();
    end.failed(1, "1 session was still in use");
    assert_eq!(end.out, "{\"cutSessions\":1}\n");
    assert!(server.ended().success());
    assert!(!is_running(pid));
}

#[tokio::test]
async fn a_signal_stops_a_server_that_drains() {
    let world = World::new();
    let server = world.server(&[]);
    let mut client = short_session(&server).await;
    client.start("p", "exec sleep 1000").await;
    let waiting = world.drain("1h");
    server.signal(Signal::TERM);
    assert!(server.ended().success());
    waiting.finish().failed(1, "the server did not answer");
}

/// Random sessions under a drain: it ends when the last one that is in use ends, and not before.
#[tokio::test]
async fn random_sessions_hold_a_drain_until_the_last_has_finished() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let world = World::new();
        let server = world.server(&[]);
        let mut held: Vec<(Client, bool)> = Vec::new();
        for n in 0..random.usize(1..6) {
            let mut client = short_session(&server).await;
            let runs = random.bool();
            if runs {
                client.start(&format!("p{n}"), "echo on; exec sleep 1000").await;
                client.lines(&format!("p{n}"), 1).await;
            }
            held.push((client, runs));
        }
        let mut waiting = world.drain("1h");
        random.shuffle(&mut held);
        while let Some((client, _)) = held.pop() {
            let running = held.iter().filter(|(_, runs)| *runs).count();
            drop(client);
            // Its session ends with its connection, and its process with the session.
            if held.is_empty() {
                break;
            }
            let until = std::time::Instant::now() + PATIENCE;
            loop {
                let status = world.status();
                let sessions = status["sessions"]["attached"].as_u64().unwrap();
                if (sessions, &status["processes"]) == (held.len() as u64, &json!(running)) {
                    break;
                }
                assert!(std::time::Instant::now() < until, "seed {seed}: {status:#}");
                tokio::task::yield_now().await;
            }
            assert!(waiting.child.try_wait().unwrap().is_none(), "seed {seed}: ended early");
        }
        let end = waiting.finish();
        assert_eq!((end.code, end.out.as_str()), (Some(0), "{\"cutSessions\":0}\n"), "seed {seed}");
        assert!(server.ended().success());
    }
}

#[test]
fn requests_that_make_no_sense_change_nothing() {
    let world = World::new();
    let _server = world.server(&[]);
    for request in ["", "{}\n", "x\n", "{\"request\":\"stop\"}\n", "{\"request\":\"drain\"}\n"] {
        let mut socket = UnixStream::connect(&world.socket).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(request.as_bytes()).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["response"], "error", "{request:?}: {answer}");
    }
    assert!(world.status().get("draining").is_none());
    let second = output(codex().args(["exec-server", "--control"]).arg(&world.socket));
    second.failed(1, "another server listens there");
}

/// Asks a control socket to drain; prints what came of it.
const ATTACK: &str = r#"
import socket, sys
s = socket.socket(socket.AF_UNIX)
try:
    s.connect(sys.argv[1])
    s.sendall(b'{"request":"drain","deadlineMs":0}\n')
    s.settimeout(20)
    print(s.recv(65536).decode().split(',')[0] or 'closed')
except OSError as error:
    print('unreachable')
"#;

fn attack(id: &str, sandbox: Option<Value>, socket: &Path) -> Value {
    let mut params = start(id, "");
    params["argv"] = json!(["python3", "-c", ATTACK, socket]);
    if let Some(sandbox) = sandbox {
        params["sandbox"] = sandbox;
    }
    params
}

#[tokio::test]
async fn no_sandboxed_process_reaches_the_control_socket() {
    let world = World::new();
    let server = world.server(&[]);
    let mut client = server.client().await;
    // Another name of the same file, which is not hidden.
    let link = world.base.join("link.sock");
    std::fs::hard_link(&world.socket, &link).unwrap();
    let cwd = format!("file://{}", world.base.display());
    let mut reached = 0;
    for (n, (kind, network, path)) in ["read-only", "workspace-write"]
        .into_iter()
        .flat_map(|kind| [false, true].map(|network| (kind, network)))
        .flat_map(|(kind, network)| [&world.socket, &link].map(|path| (kind, network, path)))
        .enumerate()
    {
        let permissions = json!({"type": kind, "network_access": network});
        let policy = json!({"permissions": permissions, "cwd": cwd});
        let id = format!("attack-{n}");
        let answer = client.call("process/start", attack(&id, Some(policy.clone()), path)).await;
        assert!(answer["result"].is_object(), "{answer}");
        let (said, _) = client.closed(&id).await;
        match said.trim() {
            "unreachable" => {}
            // By the other name it is a socket like any other, and the server looks who connects.
            "{\"response\":\"error\"" if path == &link => reached += 1,
            said => panic!("{policy} {}: {said}", path.display()),
        }
    }
    assert!(reached > 0, "the link leads to the server");
    assert!(world.status().get("draining").is_none());
    // Without a sandbox it is the operator.
    client.send_request("process/start", attack("free", None, &world.socket)).await;
    assert!(server.ended().success());
}

#[test]
fn another_user_is_refused_even_if_the_file_lets_it() {
    if !runs_as_root() {
        return;
    }
    let world = World::new();
    let _server = world.server(&[]);
    std::fs::set_permissions(&world.socket, PermissionsExt::from_mode(0o666)).unwrap();
    let output = Command::new("python3")
        .args(["-c", ATTACK, world.socket.to_str().unwrap()])
        .uid(65_534)
        .current_dir("/")
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("{\"response\":\"error\""), "{said}");
    assert!(world.status().get("draining").is_none());
}
