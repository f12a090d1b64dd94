//! A sandboxed process with a network connects to its own server and asks for a process without a sandbox.

use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::skipped::runs_as_root;
use crate::support::{Client, Running, codex, eventually};

/// The user id of `nobody`.
const UNPRIVILEGED: u32 = 65_534;

/// The server's proxies connect for sandboxed processes, and so does `http/request` for a client.
#[tokio::test]
async fn a_server_with_a_networked_sandbox_does_not_connect_to_itself() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let url = server.url.replace("ws://", "http://");
    for (round, refused) in [(1, false), (2, true)] {
        let params = json!({"requestId": format!("r{round}"), "method": "GET", "url": url});
        let answer = client.call("http/request", params).await;
        let status = answer["result"]["status"].as_i64().unwrap_or_else(|| panic!("{answer}"));
        assert_eq!(status == 403, refused, "{answer}");
        let mut params = crate::support::start(&format!("p{round}"), "true");
        params["sandbox"] = json!({"type": "read-only", "network_access": true});
        client.call("process/start", params).await;
        client.closed(&format!("p{round}")).await;
    }
}

/// Connects, and sends the upgrade and all requests that start a process which creates a file outside every
/// sandbox. Prints the status line of the response.
const ATTACK: &str = r#"
import ctypes, json, os, socket, struct, sys, time
way, host, port, marker = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def frame(message):
    text = json.dumps(message).encode()
    length = struct.pack('>BH', 0x80 | 126, len(text)) if len(text) > 125 else bytes([0x80 | len(text)])
    return b'\x81' + length + bytes(4) + text

def payload(marker):
    request = ('GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n'
               'Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n')
    start = {'processId': 'p', 'argv': ['/bin/sh', '-c', 'echo out > ' + marker],
             'cwd': 'file:///', 'env': {}, 'tty': False}
    return request.encode() + b''.join(frame(message) for message in [
        {'id': 1, 'method': 'initialize', 'params': {'clientName': 'attack'}},
        {'method': 'initialized'},
        {'id': 2, 'method': 'process/start', 'params': start}])

def make(protocol=0):
    if host.startswith('/'):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM, protocol)

def connect(s):
    try:
        s.connect(host if host.startswith('/') else (host, port))
    except (FileNotFoundError, PermissionError):
        if not host.startswith('/'):
            raise
        print('unreachable', flush=True)
        os._exit(0)
    s.sendall(payload(marker))
    return s

def answer(s):
    s.settimeout(20)
    try:
        print((s.recv(65536).split(b'\r\n')[0] or b'closed').decode(), flush=True)
    except ConnectionError as error:
        print('closed', flush=True)
    time.sleep(0.3)

if way == 'plain':
    answer(connect(make()))
elif way == 'leave':
    for _ in range(20):
        if os.fork() == 0:
            connect(make())
            os._exit(0)
    print('left', flush=True)
    time.sleep(1)
elif way == 'heir':
    if os.fork():
        time.sleep(2)
        os._exit(0)
    s = connect(make())
    if os.fork():
        os._exit(0)
    answer(s)
elif way == 'daemon':
    if os.fork():
        time.sleep(2)
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    answer(connect(make()))
elif way == 'hidden':
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
    try:
        answer(connect(make()))
    except PermissionError:
        print('kept from connecting', flush=True)
elif way == 'in-flight':
    a, b = socket.socketpair()
    s = connect(make())
    socket.send_fds(a, [b'x'], [s.fileno()])
    s.close()
    time.sleep(0.3)
    _, (fd,), _, _ = socket.recv_fds(b, 1, 1)
    answer(socket.socket(fileno=fd))
elif way == 'while-connecting':
    # Nobody inside holds the socket while the outer process connects it.
    import threading
    libc = ctypes.CDLL(None)
    address = struct.pack('=H', socket.AF_INET) + struct.pack('>H', port) + socket.inet_aton(host) + bytes(8)
    for turn in range(300):
        a, b = socket.socketpair()
        n = make().detach()
        socket.send_fds(a, [b'x'], [n])
        connecting = threading.Thread(target=lambda: libc.connect(n, address, len(address)))
        connecting.start()
        for _ in range(turn * 20):
            pass
        os.close(n)
        connecting.join()
        _, (fd,), _, _ = socket.recv_fds(b, 1, 1)
        s = socket.socket(fileno=fd)
        s.settimeout(20)
        try:
            s.sendall(payload(marker))
            line = s.recv(65536).split(b'\r\n')[0]
        except OSError:
            line = b''
        if b'101' in line:
            print('admitted', flush=True)
            time.sleep(0.3)
            break
        s.close()
    else:
        print('HTTP/1.1 403 Forbidden', flush=True)
elif way == 'vsock':
    try:
        s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        print('a socket', flush=True)
    except OSError:
        print('no such socket', flush=True)
elif way == 'chown':
    s = make()
    try:
        os.fchown(s.fileno(), 1000, 1000)
    except PermissionError:
        answer(connect(s))
elif way == 'mptcp':
    try:
        s = make(262)
    except OSError:
        s = make()
    answer(connect(s))
elif way == 'device':
    s = make()
    s.setsockopt(socket.SOL_SOCKET, 25, b'lo\0')
    answer(connect(s))
"#;

const REFUSED: &str = "HTTP/1.1 403 Forbidden\n";
const ADMITTED: &str = "HTTP/1.1 101 Switching Protocols\n";

struct World {
    _directory: tempfile::TempDir,
    base: PathBuf,
    nobody: bool,
    attempts: usize,
}

impl World {
    fn new(nobody: bool) -> Self {
        let directory = tempfile::Builder::new().prefix("back-").tempdir_in("/var/tmp").unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::create_dir(base.join("outside")).unwrap();
        std::fs::set_permissions(base.join("outside"), PermissionsExt::from_mode(0o777)).unwrap();
        std::fs::write(base.join("attack.py"), ATTACK).unwrap();
        Self { _directory: directory, base, nobody, attempts: 0 }
    }

    fn server(&self, listen: &str) -> Running {
        let mut command = codex();
        if self.nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        Running::start_with(command.args(["exec-server", "--listen", listen, "--insecure-open"]))
    }

    /// A server that also listens on a Unix socket at this path.
    fn server_with_socket(&self, path: &Path) -> Running {
        let mut command = codex();
        if self.nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        command.args(["exec-server", "--listen", "ws://127.0.0.1:0", "--listen"]);
        Running::start_with(command.arg(format!("unix:{}", path.display())))
    }

    /// The output of the attack, and whether it succeeded.
    async fn attack(
        &mut self,
        client: &mut Client,
        sandbox: Option<Value>,
        way: &str,
        (host, port): (&str, u16),
    ) -> (String, bool) {
        self.attempts += 1;
        let marker = self.base.join(format!("outside/{}", self.attempts));
        let id = format!("attack-{}", self.attempts);
        let script = self.base.join("attack.py");
        let mut params = json!({
            "processId": id,
            "argv": ["python3", script, way, host, port.to_string(), marker],
            "cwd": "file:///",
            "env": {"PATH": "/usr/bin:/bin"},
            "tty": false,
        });
        if let Some(sandbox) = sandbox {
            params["sandbox"] = sandbox;
        }
        let answer = client.call("process/start", params).await;
        assert!(answer["result"].is_object(), "{answer}");
        let (said, _) = client.closed(&id).await;
        if said == ADMITTED {
            eventually("it comes out", || marker.exists()).await;
        }
        // A later request of the same kind has completed, so the attack's last one has too.
        let control = format!("echo out > {}.control", marker.display());
        let id = format!("control-{}", self.attempts);
        let params = json!({
            "processId": id,
            "argv": ["/bin/sh", "-c", control],
            "cwd": "file:///",
            "env": {"PATH": "/usr/bin:/bin"},
            "tty": false,
        });
        let answer = client.call("process/start", params).await;
        assert!(answer["result"].is_object(), "{answer}");
        client.closed(&id).await;
        assert!(marker.with_extension("control").exists());
        (said, marker.exists())
    }
}

fn port(server: &Running) -> u16 {
    server.url.rsplit_once(':').unwrap().1.parse().unwrap()
}

/// A policy that allows reading and the network, but no writing.
fn networked() -> Value {
    json!({"permissions": {"type": "read-only", "network_access": true}, "cwd": "file:///"})
}

/// An address of this machine other than loopback, if it has one.
fn other_address() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip().to_string())
}

fn users() -> Vec<bool> {
    if runs_as_root() { vec![false, true] } else { vec![false] }
}

#[tokio::test]
async fn a_sandboxed_process_cannot_connect_to_its_server() {
    for nobody in users() {
        let mut world = World::new(nobody);
        let server = world.server("ws://127.0.0.1:0");
        let mut client = server.client().await;
        let at = ("127.0.0.1", port(&server));
        let is_root = rustix::process::geteuid().is_root() && !nobody;
        let ways = ["plain", "heir", "daemon", "hidden", "in-flight", "mptcp", "device"];
        for way in ways.into_iter().chain(["while-connecting"]) {
            let said = world.attack(&mut client, Some(networked()), way, at).await;
            // Without privileges the outer process cannot inspect the socket, and makes no connection.
            let hides = way == "hidden" && !is_root;
            let expected = if hides { "kept from connecting\n" } else { REFUSED };
            assert_eq!(said, (expected.to_owned(), false), "{way}, nobody: {nobody}");
        }
        let said = world.attack(&mut client, Some(networked()), "leave", at).await;
        assert_eq!(said, ("left\n".to_owned(), false), "nobody: {nobody}");
        // With the capability, root's sandboxes could change the owner of a socket.
        if is_root {
            let said = world.attack(&mut client, Some(networked()), "chown", at).await;
            assert_eq!(said, (REFUSED.to_owned(), false), "chown");
        }
    }
}

/// The file of the socket is hidden; by another name of the same file the connection is refused, whoever of the
/// sandbox holds it.
#[tokio::test]
async fn a_sandboxed_process_cannot_connect_to_the_unix_socket_of_its_server() {
    for nobody in users() {
        let mut world = World::new(nobody);
        let outside = world.base.join("outside");
        let socket = outside.join("socket");
        let server = world.server_with_socket(&socket);
        eventually("it listens", || socket.exists()).await;
        let other = outside.join("other-name");
        let linked = std::fs::hard_link(&socket, &other);
        linked.unwrap();
        let mut client = server.client().await;
        let entry = |path: Value, access: &str| json!({"path": path, "access": access});
        let root = json!({"type": "special", "value": {"kind": "root"}});
        let uri = format!("file://{}", outside.display());
        let entries =
            [entry(root.clone(), "read"), entry(json!({"type": "path", "path": uri}), "write")];
        let writes = json!({"permissions": {"type": "managed", "network": "enabled",
            "file_system": {"type": "restricted", "entries": entries}}, "cwd": "file:///"});
        let (direct, linked) = (socket.to_str().unwrap(), other.to_str().unwrap());
        // Without a sandbox both names lead to the server.
        for path in [direct, linked] {
            let said = world.attack(&mut client, None, "plain", (path, 0)).await;
            assert_eq!(said, (ADMITTED.to_owned(), true), "nobody: {nobody}");
        }
        let said = world.attack(&mut client, Some(writes.clone()), "plain", (direct, 0)).await;
        assert_eq!(said, ("unreachable\n".to_owned(), false), "nobody: {nobody}");
        let said = world.attack(&mut client, Some(networked()), "plain", (linked, 0)).await;
        assert_eq!(said, ("unreachable\n".to_owned(), false), "not writable, nobody: {nobody}");
        for way in ["plain", "heir", "daemon", "in-flight"] {
            let said = world.attack(&mut client, Some(writes.clone()), way, (linked, 0)).await;
            assert_eq!(said, (REFUSED.to_owned(), false), "{way}, nobody: {nobody}");
        }
        let said = world.attack(&mut client, Some(writes.clone()), "leave", (linked, 0)).await;
        assert_eq!(said, ("left\n".to_owned(), false), "nobody: {nobody}");
        // Others are still served.
        let said = world.attack(&mut client, None, "plain", (direct, 0)).await;
        assert_eq!(said, (ADMITTED.to_owned(), true), "nobody: {nobody}");
        // There is no vsock in a sandbox, with or without a network.
        for sandbox in [networked(), writes, json!({"type": "read-only"})] {
            let said = world.attack(&mut client, Some(sandbox), "vsock", ("-", 0)).await;
            assert_eq!(said, ("no such socket\n".to_owned(), false));
        }
    }
}

#[tokio::test]
async fn a_sandboxed_process_cannot_connect_by_another_address_of_the_machine() {
    for nobody in users() {
        let mut world = World::new(nobody);
        let everywhere = world.server("ws://0.0.0.0:0");
        let mut client = everywhere.client().await;
        let mut hosts = vec!["127.0.0.1".to_owned(), "127.0.0.2".to_owned(), "0.0.0.0".to_owned()];
        hosts.extend(other_address());
        for host in hosts {
            let at = (host.as_str(), port(&everywhere));
            let said = world.attack(&mut client, Some(networked()), "plain", at).await;
            assert_eq!(said, (REFUSED.to_owned(), false), "{host}, nobody: {nobody}");
        }
        if std::net::TcpListener::bind("[::1]:0").is_err() {
            continue;
        }
        let everywhere = world.server("ws://[::]:0");
        let mut client = everywhere.client().await;
        for host in ["::1", "::ffff:127.0.0.1", "127.0.0.1"] {
            let at = (host, port(&everywhere));
            let said = world.attack(&mut client, Some(networked()), "plain", at).await;
            assert_eq!(said, (REFUSED.to_owned(), false), "{host}, nobody: {nobody}");
        }
    }
}

#[tokio::test]
async fn other_processes_connect_while_a_sandbox_has_the_network() {
    for nobody in users() {
        let mut world = World::new(nobody);
        let server = world.server("ws://127.0.0.1:0");
        let mut client = server.client().await;
        let at = ("127.0.0.1", port(&server));
        // Outside a sandbox the attack succeeds.
        let said = world.attack(&mut client, None, "plain", at).await;
        assert_eq!(said, (ADMITTED.to_owned(), true));
        let mut params = crate::support::start("alive", "echo up; exec sleep 100");
        params["sandbox"] = networked();
        client.call("process/start", params).await;
        client.lines("alive", 1).await;
        // A process of the server without a sandbox, and its daemon.
        for way in ["plain", "heir", "daemon"] {
            let said = world.attack(&mut client, None, way, at).await;
            assert_eq!(said, (ADMITTED.to_owned(), true), "{way}, nobody: {nobody}");
        }
        // Other processes: this test, and a sandbox of another program.
        let (text, code) = server.client().await.run("p", "echo hello").await;
        assert_eq!((text.as_str(), code), ("hello\n", 0));
        let said = outsider(&world.base, at.1);
        assert_eq!(said, ADMITTED, "nobody: {nobody}");
        // The server's own sandboxes still cannot connect.
        let said = world.attack(&mut client, Some(networked()), "plain", at).await;
        assert_eq!(said, (REFUSED.to_owned(), false), "nobody: {nobody}");
    }
}

/// Without namespaces, only its filter distinguishes a sandbox from the server.
#[tokio::test]
async fn a_process_confined_by_landlock_alone_cannot_connect_to_its_server() {
    for nobody in users() {
        let mut world = World::new(nobody);
        let home = world.base.join("home");
        let mut command = crate::assurance::without_namespaces(&home, nobody);
        command.args(["exec-server", "--sandbox-assurance", "landlock"]);
        let server = Running::start_with(&mut command);
        let mut client = server.client().await;
        let at = ("127.0.0.1", port(&server));
        for way in ["plain", "daemon"] {
            let said = world.attack(&mut client, Some(networked()), way, at).await;
            assert_eq!(said, (REFUSED.to_owned(), false), "{way}, nobody: {nobody}");
        }
        let said = world.attack(&mut client, None, "plain", at).await;
        assert_eq!(said, (ADMITTED.to_owned(), true), "nobody: {nobody}");
    }
}

/// The attack from a sandbox that the server has not started.
fn outsider(base: &Path, port: u16) -> String {
    let mut command = codex();
    command.args(["sandbox", "--network", "--", "python3"]).arg(base.join("attack.py"));
    command.args(["plain", "127.0.0.1", &port.to_string()]).arg(base.join("outside/outsider"));
    let output = command.env("PATH", "/usr/bin:/bin").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}
