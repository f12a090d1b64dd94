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
fn tokens_are_created_listed_and_revoked_and_survive_a_kill() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("data");
    let text = data.to_str().unwrap();
    let service = Service::start(&data, "127.0.0.1:0");
    let address = service.address().to_owned();
    let narrow = token(&data, &["--environment", "box", "--can", "register", "--expires", "30d"]);
    let manager = token(&data, &["--all", "--can", "manage"]);
    let listed = stdout(&run(&["rendezvous", "token", "list", "--data", text], ""));
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(listed.contains("box") && !listed.contains(&narrow), "{listed}");
    assert!(listed.contains("in 30d") || listed.contains("in 29d"), "{listed}");

    let misspelt = dir.path().join("misspelt");
    let none = run(&["rendezvous", "token", "list", "--data", misspelt.to_str().unwrap()], "");
    assert!(!none.status.success() && !misspelt.exists());

    assert!(register(&service, "box", &narrow).contains(" 200 "));
    assert!(register(&service, "other", &narrow).contains(" 403 "));
    // Killed, not stopped; the next one has all the data.
    drop(service);
    let service = Service::start(&data, &address);
    let registry = ["--registry", &service.url];
    let list = |token: &str| run(&[&["environments", "list"], &registry[..]].concat(), token);
    let by_the_other_variable = codex()
        .args([&["environments", "list"], &registry[..]].concat())
        .env_remove("CODEX_API_KEY")
        .env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &manager)
        .output()
        .unwrap();
    assert!(stdout(&by_the_other_variable).contains("box"));
    let shown = stdout(&list(&manager));
    assert!(shown.contains("box") && shown.contains("offline, last seen"), "{shown}");
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

/// A service on a small disk, which can be filled.
struct SmallDisk {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
    service: String,
    token: String,
}

impl SmallDisk {
    fn start(dir: &TempDir) -> Self {
        // Each line of its stdin is a command, and each line of its stdout a reply.
        let script = r#"
            set -eu
            mount -t tmpfs -o size=64k tmpfs "$1"
            "$0" rendezvous token create --data "$1/data" --all --can register,manage
            "$0" rendezvous serve --listen 127.0.0.1:0 --data "$1/data" &
            trap 'kill $!' EXIT
            while read -r line; do
                case "$line" in
                    fill) dd if=/dev/zero of="$1/fill" bs=1k 2> /dev/null || true ;;
                    free) rm "$1/fill" ;;
                esac
                echo "$line"
            done
        "#;
        let mut unshare = Command::new("unshare");
        if !rustix::process::geteuid().is_root() {
            unshare.args(["--user", "--map-root-user"]);
        }
        let mut child = unshare
            .args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_codex")])
            .arg(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = || {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            line.trim_end().to_owned()
        };
        let (token, service) = (line(), line());
        assert!(token.starts_with("crt_") && service.starts_with("http://"), "{service}");
        Self { child, said, service, token }
    }

    fn tell(&mut self, command: &str) {
        use std::io::Write;
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), command);
    }

    fn register(&self, id: &str) -> String {
        use std::io::{Read, Write};
        let address = self.service.strip_prefix("http://").unwrap();
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        write!(
            socket,
            "POST /cloud/executor/{id}/register HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\
             Authorization: Bearer {}\r\nConnection: close\r\n\r\n",
            self.token
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // At the end of its input it stops the service and exits.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn a_full_disk_is_reported_and_changes_nothing() {
    let dir = TempDir::new().unwrap();
    let mut disk = SmallDisk::start(&dir);
    assert!(disk.register("before").starts_with("HTTP/1.1 200 "));
    disk.tell("fill");
    // The last block of the file may have room for a few.
    let refused = (0..100).map(|number| (number, disk.register(&format!("e{number}"))));
    let (number, refused) =
        refused.into_iter().find(|(_, answer)| !answer.starts_with("HTTP/1.1 200 ")).unwrap();
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert!(refused.contains("store_unavailable") && refused.contains("disk"), "{refused}");
    disk.tell("free");
    assert!(disk.register("after").starts_with("HTTP/1.1 200 "));
    // A failed registration is not stored.
    let id = format!("e{number}");
    let shown = run(&["environments", "show", &id, "--registry", &disk.service], &disk.token);
    let said = String::from_utf8(shown.stderr).unwrap();
    assert!(said.contains("404"), "{said}");
}

/// A nats-server on a free port, with its own directory.
struct Nats {
    child: Child,
    url: String,
    _dir: TempDir,
}

impl Nats {
    fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let child = Command::new("nats-server")
            .args(["-js", "-a", "127.0.0.1", "-p", "-1", "-sd"])
            .arg(dir.path().join("data"))
            .arg("--ports_file_dir")
            .arg(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("install the nats-server package");
        let mut nats = Self { child, url: String::new(), _dir: dir };
        let file = nats._dir.path().join(format!("nats-server_{}.ports", nats.child.id()));
        while nats.url.is_empty() {
            assert!(nats.child.try_wait().unwrap().is_none(), "nats-server ended");
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let ports: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
            nats.url = ports["nats"][0].as_str().unwrap_or_default().to_owned();
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        nats
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs the package nats-server"]
fn several_nodes_on_nats_form_one_service() {
    let nats = Nats::start();
    let node = || {
        let mut child = codex()
            .args(["rendezvous", "serve", "--listen", "127.0.0.1:0"])
            .env("CODEX_RENDEZVOUS_NATS", &nats.url)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Service { child, url: url.trim_end().to_owned() }
    };
    let (one, mut other) = (node(), node());
    let on = ["--nats", &nats.url];
    let make = |more: &[&str]| {
        let args = [&["rendezvous", "token", "create"], &on[..], more].concat();
        stdout(&run(&args, "")).trim_end().to_owned()
    };
    let (token, manager) = (
        make(&["--environment", "box", "--can", "register,connect"]),
        make(&["--all", "--can", "manage"]),
    );
    assert!(register(&one, "box", &token).contains(" 200 "));
    let shown = stdout(&run(&["environments", "list", "--registry", &other.url], &manager));
    assert!(shown.contains("box") && shown.contains("offline, last seen"), "{shown}");
    let listed = stdout(&run(&[&["rendezvous", "token", "list"], &on[..]].concat(), ""));
    assert_eq!(listed.lines().count(), 3, "{listed}");
    let id = listed.lines().find(|line| line.contains("box")).unwrap();
    let id = id.split_whitespace().next().unwrap();
    let revoke = [&["rendezvous", "token", "revoke"], &on[..], &[id]].concat();
    assert!(run(&revoke, "").status.success());
    assert_eq!(run(&revoke, "").status.code(), Some(1));
    for node in [&one, &other] {
        assert!(register(node, "box", &token).contains(" 401 "));
    }
    let kill = Command::new("kill").arg(other.child.id().to_string()).status().unwrap();
    assert!(kill.success());
    assert_eq!(other.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_node_does_not_start_without_nats() {
    // Nothing listens there.
    let nats = "nats://user:hunter2@127.0.0.1:1";
    for args in [&["serve", "--listen", "127.0.0.1:0"][..], &["token", "list"]] {
        let args = [&["rendezvous"], args, &["--nats", nats]].concat();
        let output = run(&args, "");
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("cannot use NATS") && !said.contains("hunter2"), "{said}");
    }
}

#[test]
fn sigterm_stops_the_service_with_exit_code_0() {
    let dir = TempDir::new().unwrap();
    let mut service = Service::start(&dir.path().join("data"), "127.0.0.1:0");
    let kill = Command::new("kill").arg(service.child.id().to_string()).status().unwrap();
    assert!(kill.success());
    assert_eq!(service.child.wait().unwrap().code(), Some(0));
}

#[test]
fn wrong_command_lines_exit_with_2() {
    for args in [
        &["rendezvous"][..],
        &["rendezvous", "serve", "--listen", "nowhere"],
        &["rendezvous", "serve", "--tls-cert", "x"],
        &["rendezvous", "serve", "--public-url", "ftp://x"],
        &["rendezvous", "serve", "--nats", "http://x"],
        &["rendezvous", "serve", "--nats-replicas", "3"],
        &["rendezvous", "token", "create", "--all", "--can", "fly"],
        &["rendezvous", "token", "create", "--all", "--can", "connect", "--expires", "soon"],
        &[
            "rendezvous",
            "token",
            "create",
            "--can",
            "connect",
            "--environment",
            "a",
            "--prefix",
            "b",
        ],
        &["rendezvous", "token", "create", "--can", "connect", "--environment", "a", "--all"],
        // Without rights, and without environments.
        &["rendezvous", "token", "create", "--environment", "a"],
        &["rendezvous", "token", "create", "--can", "connect"],
        &["environments", "show"],
    ] {
        assert_eq!(run(args, "").status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_token_expires_in_90_days_unless_told_otherwise_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let make = |more: &[&str]| {
        let data = data.to_str().unwrap();
        let base = ["rendezvous", "token", "create", "--data", data, "--all", "--can", "connect"];
        let made = run(&[&base[..], more].concat(), "");
        assert!(made.status.success(), "{made:?}");
        String::from_utf8_lossy(&made.stderr).into_owned()
    };
    assert_eq!(make(&[]), "");
    assert_eq!(make(&["--expires", "30d"]), "");
    assert!(make(&["--expires", "never"]).contains("never expires"));
    let list = ["rendezvous", "token", "list", "--data", data.to_str().unwrap()];
    let listed = stdout(&run(&list, ""));
    let ends: Vec<&str> =
        listed.lines().skip(1).filter_map(|line| line.rsplit("  ").next()).collect();
    // A second may have passed.
    let counts = |what: &[&str]| ends.iter().filter(|end| what.contains(end)).count();
    assert_eq!(counts(&["in 90d", "in 89d"]), 1, "{listed}");
    assert_eq!(counts(&["in 30d", "in 29d"]), 1, "{listed}");
    assert_eq!(counts(&["never"]), 1, "{listed}");
}
