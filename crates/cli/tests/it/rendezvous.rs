//! `codex rendezvous` and `codex environments`.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

fn codex() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_codex"));
    command.env_remove("CODEX_API_KEY").env_remove("RUST_LOG");
    command
}

fn run(args: &[&str], token: &str) -> Output {
    codex().args(args).env("CODEX_API_KEY", token).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

struct Service {
    child: Child,
    url: String,
}

impl Service {
    fn start(data: &Path, listen: &str) -> Self {
        let mut child = codex()
            .args(["rendezvous", "serve", "--listen", listen, "--data"])
            .arg(data)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { child, url: url.trim_end().to_owned() }
    }

    fn address(&self) -> &str {
        self.url.strip_prefix("http://").unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn token(data: &Path, more: &[&str]) -> String {
    let data = data.to_str().unwrap();
    let args = [&["rendezvous", "token", "create", "--data", data], more].concat();
    let printed = stdout(&run(&args, ""));
    let token = printed.strip_suffix('\n').unwrap();
    assert!(token.starts_with("crt_") && !token.contains(char::is_whitespace), "{printed:?}");
    token.to_owned()
}

/// POST without a body, as an executor of the older revision registers.
fn register(service: &Service, id: &str, token: &str) -> String {
    use std::io::{Read, Write};
    let mut socket = std::net::TcpStream::connect(service.address()).unwrap();
    write!(
        socket,
        "POST /cloud/executor/{id}/register HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\
         Authorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap().to_owned()
}

#[test]
fn tokens_are_made_listed_revoked_and_survive_a_kill() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("data");
    let text = data.to_str().unwrap();
    let service = Service::start(&data, "127.0.0.1:0");
    let address = service.address().to_owned();
    let narrow = token(&data, &["--environment", "box", "--can", "register", "--expires", "30d"]);
    let manager = token(&data, &["--can", "manage"]);
    let listed = stdout(&run(&["rendezvous", "token", "list", "--data", text], ""));
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(listed.contains("box") && !listed.contains(&narrow), "{listed}");
    assert!(listed.contains("in 30d") || listed.contains("in 29d"), "{listed}");

    assert!(register(&service, "box", &narrow).contains(" 200 "));
    assert!(register(&service, "other", &narrow).contains(" 403 "));
    // Killed, not stopped; the next one knows everything.
    drop(service);
    let service = Service::start(&data, &address);
    let registry = ["--registry", &service.url];
    let list = |token: &str| run(&[&["environments", "list"], &registry[..]].concat(), token);
    let shown = stdout(&list(&manager));
    assert!(shown.contains("box") && shown.contains("offline, seen"), "{shown}");
    let json = stdout(&run(
        &[&["environments", "show", "box", "--json"], &registry[..]].concat(),
        &manager,
    ));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["environment_id"], &json["online"]), (&"box".into(), &false.into()));

    let id = listed.lines().find(|line| line.contains("box")).unwrap();
    let id = id.split_whitespace().next().unwrap();
    let revoke = ["rendezvous", "token", "revoke", "--data", text, id];
    assert!(run(&revoke, "").status.success());
    assert_eq!(run(&revoke, "").status.code(), Some(1));
    assert!(register(&service, "box", &narrow).contains(" 401 "));

    stdout(&run(&[&["environments", "remove", "box"], &registry[..]].concat(), &manager));
    assert!(!stdout(&list(&manager)).contains("box"));
    let refused = list(&narrow);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("401") && !said.contains(&narrow), "{said}");
}

#[test]
fn told_to_stop_it_stops_in_good_order() {
    let dir = TempDir::new().unwrap();
    let mut service = Service::start(&dir.path().join("data"), "127.0.0.1:0");
    let kill = Command::new("kill").arg(service.child.id().to_string()).status().unwrap();
    assert!(kill.success());
    assert_eq!(service.child.wait().unwrap().code(), Some(0));
}

#[test]
fn wrong_command_lines() {
    for args in [
        &["rendezvous"][..],
        &["rendezvous", "serve", "--listen", "nowhere"],
        &["rendezvous", "serve", "--tls-cert", "x"],
        &["rendezvous", "serve", "--public-url", "ftp://x"],
        &["rendezvous", "token", "create", "--can", "fly"],
        &["rendezvous", "token", "create", "--expires", "soon"],
        &["rendezvous", "token", "create", "--environment", "a", "--prefix", "b"],
        &["environments", "show"],
    ] {
        assert_eq!(run(args, "").status.code(), Some(2), "{args:?}");
    }
}
