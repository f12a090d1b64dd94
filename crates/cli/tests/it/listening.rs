//! Where a server listens: Unix sockets, TLS, vsock, several at once, sockets of systemd; and who may enter.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::process::Signal;

use crate::skipped::runs_as_root;
use crate::support::{PATIENCE, codex, eventually, send, wait};

/// A server with any addresses. Killed when dropped.
struct Listening {
    child: Child,
    urls: Vec<String>,
}

impl Listening {
    fn start(arguments: &[&str], addresses: usize) -> Self {
        Self::start_with(codex().arg("exec-server").args(arguments), addresses)
    }

    fn start_with(command: &mut Command, addresses: usize) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let urls = lines.take(addresses).map(Result::unwrap).collect();
        Self { child, urls }
    }

    fn stop(mut self) {
        send(self.child.id(), Signal::TERM);
        assert!(wait(&mut self.child).success());
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `echo hello` on this server.
fn run_on(url: &str, change: impl FnOnce(&mut Command)) -> Output {
    let mut command = codex();
    command.args(["run", "--patience", "0", "--on", url]);
    command.env_remove("CODEX_EXEC_SERVER_TOKEN").env_remove("CODEX_CA_CERTIFICATE");
    change(&mut command);
    command.args(["--", "echo", "hello"]).stdin(Stdio::null()).output().unwrap()
}

fn works(url: &str) {
    let output = run_on(url, |_| ());
    assert_eq!(output.stdout, b"hello\n", "{url}: {output:?}");
}

fn fails_to_start(arguments: &[&str], why: &str) {
    let output = codex().arg("exec-server").args(arguments).stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains(why), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

#[test]
fn a_unix_socket_is_private_replaced_if_stale_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let url = format!("unix:{}", path.display());
    drop(UnixListener::bind(&path).unwrap());
    let server = Listening::start(&["--listen", &url], 1);
    assert_eq!(server.urls, [url.as_str()]);
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);
    works(&url);
    let by_variable = codex()
        .args(["run", "--", "echo", "hello"])
        .env("CODEX_EXEC_SERVER_URL", &url)
        .output()
        .unwrap();
    assert_eq!(by_variable.stdout, b"hello\n");
    fails_to_start(&["--listen", &url], "another server listens there");
    works(&url);
    server.stop();
    assert!(!path.exists());
    // A server that was killed leaves a file, which the next one replaces.
    let mut killed = Listening::start(&["--listen", &url], 1);
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    assert!(path.exists());
    let next = Listening::start(&["--listen", &url], 1);
    works(&url);
    next.stop();
}

#[test]
fn another_user_is_refused_on_a_unix_socket_even_if_the_file_lets_it() {
    if !runs_as_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let path = directory.path().join("socket");
    let url = format!("unix:{}", path.display());
    let _server = Listening::start(&["--listen", &url], 1);
    let connect = "import socket, sys
s = socket.socket(socket.AF_UNIX)
try:
    s.connect(sys.argv[1])
except PermissionError:
    print('no permission')
    sys.exit()
s.sendall(b'GET /readyz HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
print(s.recv(12).decode())";
    let as_user = |uid: u32| {
        let output = Command::new("python3")
            .args(["-c", connect, path.to_str().unwrap()])
            .uid(uid)
            .current_dir("/")
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(as_user(65_534), "no permission\n");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    assert_eq!(as_user(65_534), "HTTP/1.1 403\n");
    assert_eq!(as_user(0), "HTTP/1.1 200\n");
}

#[test]
fn several_addresses_are_printed_in_order_and_all_serve() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let unix = format!("unix:{}", path.display());
    let arguments = ["--listen", "ws://127.0.0.1:0", "--listen", &unix, "--listen", "ws://[::1]:0"];
    let server = Listening::start(&arguments, 3);
    assert!(server.urls[0].starts_with("ws://127.0.0.1:"), "{:?}", server.urls);
    assert_eq!(server.urls[1], unix);
    assert!(server.urls[2].starts_with("ws://[::1]:"), "{:?}", server.urls);
    server.urls.iter().for_each(|url| works(url));
    server.stop();
    fails_to_start(&["--listen", "stdio", "--listen", &unix], "cannot be combined");
    assert!(!path.exists());
}

#[test]
fn an_address_beyond_loopback_needs_authentication() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "0123456789abcdef").unwrap();
    let auth = ["--ws-auth", "capability-token", "--ws-token-file", token.to_str().unwrap()];
    for open in ["ws://0.0.0.0:0", "ws://[::]:0"] {
        fails_to_start(&["--listen", open], "--insecure-open");
        Listening::start(&["--listen", open, "--insecure-open"], 1).stop();
        Listening::start(&[&["--listen", open], &auth[..]].concat(), 1).stop();
    }
    fails_to_start(&["--listen", "ws://127.0.0.1:0", "--listen", "ws://0.0.0.0:0"], "0.0.0.0");
    let unix = format!("unix:{}", directory.path().join("socket").display());
    fails_to_start(&[&["--listen", &unix], &auth[..]].concat(), "--ws-auth needs");
    fails_to_start(&["--listen", "wss://127.0.0.1:0"], "--tls-cert");
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o620)).unwrap();
    fails_to_start(&[&["--listen", "ws://127.0.0.1:0"], &auth[..]].concat(), "chmod 600");
}

#[test]
fn vsock_is_listened_on_and_counts_as_beyond_loopback() {
    let port = 20_000 + std::process::id() % 10_000;
    let open = format!("vsock:{port}");
    if vsock_socket().is_none() {
        return fails_to_start(&["--listen", &open], "cannot listen on vsock:");
    }
    fails_to_start(&["--listen", &open], "--insecure-open");
    let server = Listening::start(&["--listen", &open, "--insecure-open"], 1);
    assert_eq!(server.urls, [open]);
    // Not every kernel can connect to itself by vsock.
    let output = run_on(&format!("vsock:1:{port}"), |_| ());
    if output.status.success() {
        assert_eq!(output.stdout, b"hello\n");
    }
    server.stop();
}

/// Whether there are sockets of this family.
fn vsock_socket() -> Option<rustix::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketType, socket};
    socket(AddressFamily::from_raw(40), SocketType::STREAM, None).ok()
}

/// Certificates: an authority, the server's, and two clients'.
struct Certificates {
    directory: tempfile::TempDir,
}

impl Certificates {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority =
            CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let write = |name: &str, text: String| {
            std::fs::write(directory.path().join(name), text).unwrap();
        };
        write("ca.pem", authority.pem());
        for name in ["server", "ann", "bob"] {
            let key = KeyPair::generate().unwrap();
            let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
            let params = CertificateParams::new(names).unwrap();
            write(&format!("{name}.pem"), params.signed_by(&key, &authority).unwrap().pem());
            write(&format!("{name}.key"), key.serialize_pem());
        }
        let key = KeyPair::generate().unwrap();
        let stranger = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        write("stranger.pem", stranger.self_signed(&key).unwrap().pem());
        write("stranger.key", key.serialize_pem());
        Self { directory }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    /// Runs a command on this server as this client, if it is one.
    fn run(&self, url: &str, client: Option<&str>) -> Output {
        run_on(url, |command| {
            command.env("CODEX_CA_CERTIFICATE", self.path("ca.pem"));
            if let Some(client) = client {
                command.arg("--client-cert").arg(self.path(&format!("{client}.pem")));
                command.arg("--client-key").arg(self.path(&format!("{client}.key")));
            }
        })
    }
}

#[tokio::test]
async fn tls_with_client_certificates_admits_only_their_holders() {
    let files = Certificates::new();
    let (cert, key, ca) =
        (files.path("server.pem"), files.path("server.key"), files.path("ca.pem"));
    let tls = ["--listen", "wss://0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key];
    fails_to_start(&tls, "--tls-client-ca");
    let server = Listening::start(&[&tls[..], &["--tls-client-ca", &ca]].concat(), 1);
    let url = server.urls[0].replace("0.0.0.0", "127.0.0.1");
    assert!(url.starts_with("wss://127.0.0.1:"));
    assert_eq!(files.run(&url, Some("ann")).stdout, b"hello\n");
    assert!(!files.run(&url, None).status.success());
    assert!(!files.run(&url, Some("stranger")).status.success());
    // A client that trusts another authority refuses the server.
    assert!(!run_on(&url, |_| ()).status.success());
    // A new certificate is used after SIGHUP; one that cannot be read leaves the old one.
    let renewed = Certificates::new();
    std::fs::write(&cert, "nonsense").unwrap();
    send(server.child.id(), Signal::HUP);
    assert_eq!(files.run(&url, Some("ann")).stdout, b"hello\n");
    for name in ["server.pem", "server.key"] {
        std::fs::copy(renewed.path(name), files.path(name)).unwrap();
    }
    send(server.child.id(), Signal::HUP);
    let trusts_new = || {
        let output = run_on(&url, |command| {
            command.env("CODEX_CA_CERTIFICATE", renewed.path("ca.pem"));
            command.args(["--client-cert", &files.path("ann.pem")]);
            command.args(["--client-key", &files.path("ann.key")]);
        });
        output.stdout == b"hello\n"
    };
    eventually("the new certificate is used", trusts_new).await;
    server.stop();
}

#[test]
fn a_session_is_resumed_only_with_the_certificate_that_opened_it() {
    let files = Certificates::new();
    let (cert, key, ca) =
        (files.path("server.pem"), files.path("server.key"), files.path("ca.pem"));
    let server = Listening::start(
        &[
            "--listen",
            "wss://127.0.0.1:0",
            "--tls-cert",
            &cert,
            "--tls-key",
            &key,
            "--tls-client-ca",
            &ca,
        ],
        1,
    );
    // Each with its own names for sessions; bob knows ann's.
    let (home, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let command = |who: &str, arguments: &[&str]| {
        let home = if who == "bob" { &copy } else { &home };
        let mut command = codex();
        command.args(arguments).args(["--on", &server.urls[0], "--patience", "0"]);
        command.args(["--client-cert", &files.path(&format!("{who}.pem"))]);
        command.args(["--client-key", &files.path(&format!("{who}.key"))]);
        command.env("CODEX_CA_CERTIFICATE", &ca).env("XDG_STATE_HOME", home.path());
        command.env("HOME", home.path()).env("CODEX_HOME", home.path());
        command
    };
    let started = command("ann", &["run", "--detach", "job"])
        .args(["--", "sh", "-c", "echo kept; exec sleep 1000"])
        .output()
        .unwrap();
    assert!(started.status.success(), "{started:?}");
    let copied =
        Command::new("cp").arg("-a").arg(home.path().join("codex")).arg(copy.path()).status();
    assert!(copied.unwrap().success());
    let bob = command("bob", &["logs", "job"]).output().unwrap();
    assert!(!bob.status.success() && bob.stdout.is_empty(), "{bob:?}");
    assert!(String::from_utf8_lossy(&bob.stderr).contains("is gone"), "{bob:?}");
    let ann = command("ann", &["logs", "job"]).output().unwrap();
    assert_eq!(ann.stdout, b"kept\n", "{ann:?}");
    server.stop();
}

/// Passes these sockets as systemd does: from number 3 on, with the variables set in the process that the server
/// becomes.
fn activate(sockets: &[&dyn AsRawFd], names: &str) -> Command {
    let script = "import os, sys
sockets = [int(number) for number in sys.argv[2].split()]
for index, socket in enumerate(sockets):
    os.dup2(socket, 3 + index)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(sockets)), LISTEN_FDNAMES=sys.argv[3])
os.execv(sys.argv[1], [sys.argv[1], 'exec-server'])";
    let numbers: Vec<String> =
        sockets.iter().map(|socket| socket.as_raw_fd().to_string()).collect();
    let mut command = Command::new("python3");
    command.args(["-c", script, env!("CARGO_BIN_EXE_codex"), &numbers.join(" "), names]);
    command
}

fn inheritable(socket: &impl std::os::fd::AsFd) {
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).unwrap();
}

#[test]
fn sockets_of_systemd_are_served_and_readiness_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    // High numbers, so that moving one does not close another.
    let tcp = high(&TcpListener::bind("127.0.0.1:0").unwrap());
    let unix = high(&UnixListener::bind(&path).unwrap());
    let notify_path = directory.path().join("notify");
    let notify = UnixDatagram::bind(&notify_path).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = activate(&[&tcp, &unix], "web:local");
    let mut server = Listening::start_with(command.env("NOTIFY_SOCKET", &notify_path), 2);
    drop((tcp, unix));
    assert!(server.urls[0].starts_with("ws://127.0.0.1:"), "{:?}", server.urls);
    assert_eq!(server.urls[1], format!("unix:{}", path.display()));
    let mut state = [0; 64];
    let length = notify.recv(&mut state).unwrap();
    assert_eq!(&state[..length], b"READY=1");
    server.urls.iter().for_each(|url| works(url));
    // No child gets the variables or the sockets.
    let script = "env | grep -E '^(LISTEN_|NOTIFY_)'; ls /proc/self/fd | wc -l";
    let output = codex().args(["run", "--on", &server.urls[0], "--", "sh", "-c", script]).output();
    let output = String::from_utf8(output.unwrap().stdout).unwrap();
    assert_eq!(output.trim(), "4", "standard streams and the directory");
    send(server.child.id(), Signal::TERM);
    let length = notify.recv(&mut state).unwrap();
    assert_eq!(&state[..length], b"STOPPING=1");
    assert!(wait(&mut server.child).success());
    assert!(path.exists(), "systemd's own file stays");
    // An open address is refused here too, and so is what is not a listener.
    let open = high(&TcpListener::bind("0.0.0.0:0").unwrap());
    let output = activate(&[&open], "").output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("--insecure-open"));
    let (pair, _other) = UnixStream::pair().unwrap();
    let output = activate(&[&high(&pair)], "").output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("Accept=no"), "{output:?}");
}

/// The same socket under a number from 50 on, which a child inherits.
fn high(socket: &impl std::os::fd::AsFd) -> std::os::fd::OwnedFd {
    let high = rustix::io::fcntl_dupfd_cloexec(socket, 50).unwrap();
    inheritable(&high);
    high
}

#[test]
fn a_token_in_clear_is_warned_about_before_it_leaves() {
    // Nothing listens there: the warning does not wait for an answer.
    let output = run_on("ws://192.0.2.1:9", |command| {
        command.env("CODEX_EXEC_SERVER_TOKEN", "a-secret-token").env("http_proxy", "");
        command.args(["--timeout", "1"]);
    });
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("warning: the token goes to ws://192.0.2.1:9 unencrypted"), "{stderr}");
    assert!(!stderr.contains("a-secret-token"));
    let output = run_on("ws://127.0.0.1:9", |command| {
        command.env("CODEX_EXEC_SERVER_TOKEN", "a-secret-token");
    });
    assert!(!String::from_utf8(output.stderr).unwrap().contains("warning"));
}

/// With few descriptors and a flood of silent peers, a client that is in still starts processes.
#[tokio::test]
async fn descriptors_are_left_for_clients_that_are_in() {
    let mut command = Command::new("sh");
    let script = "ulimit -n 256; exec \"$0\" exec-server --max-waiting-connections 100000";
    command.args(["-c", script, env!("CARGO_BIN_EXE_codex")]);
    let server = crate::support::Running::start_with(&mut command);
    let mut client = server.client().await;
    let address = server.url.strip_prefix("ws://").unwrap();
    let silent: Vec<_> = (0..600).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    eventually("only the reserve is left", || open() >= 256 - 256 / 4).await;
    for process in 0..40 {
        let id = format!("p{process}");
        let answer = client.call("process/start", crate::support::start(&id, "true")).await;
        assert!(answer.get("result").is_some(), "{answer}");
        client.closed(&id).await;
    }
    drop(silent);
    drop(client);
    send(server.pid(), Signal::TERM);
    assert!(server.ended().success());
}

#[test]
fn session_ids_are_in_no_log() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut command = codex();
    command.arg("exec-server").env("RUST_LOG", "trace");
    command.stderr(std::fs::File::create(&log).unwrap());
    let server = Listening::start_with(&mut command, 1);
    let home = directory.path();
    let with_home = |arguments: &[&str]| {
        let mut command = codex();
        command.args(arguments).args(["--on", &server.urls[0]]).env("HOME", home);
        command.env("CODEX_HOME", home).env("XDG_STATE_HOME", home);
        command
    };
    let started = with_home(&["run", "--detach", "job"]).args(["--", "sleep", "1000"]).output();
    assert!(started.unwrap().status.success());
    assert!(with_home(&["logs", "job"]).output().unwrap().status.success());
    let ids = session_ids(home);
    assert!(!ids.is_empty(), "the client saves the id");
    server.stop();
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("session attached"), "{log}");
    for id in ids {
        assert!(!log.contains(&id), "{id} is in the log");
    }
}

/// Everything that looks like a session id in the files below a directory.
fn session_ids(directory: &Path) -> Vec<String> {
    let mut ids = Vec::new();
    let mut directories: Vec<PathBuf> = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "json") {
                let text = std::fs::read_to_string(path).unwrap();
                let words = text.split('"').filter(|word| {
                    word.len() == 36 && word.bytes().filter(|byte| *byte == b'-').count() == 4
                });
                ids.extend(words.map(str::to_owned));
            }
        }
    }
    ids
}
