//! A sandboxed process with a network connects to its own server and asks for a process without a sandbox.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::skipped::{runs_as_root, skipped};
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
elif way.startswith('from '):
    _, source, end = way.split()
    s = make()
    level, option = (41, 78) if ':' in host else (0, 15)
    s.setsockopt(level, option, 1)  # IPV6_FREEBIND, IP_FREEBIND
    s.settimeout(1)
    try:
        s.bind((source, 0))
        connect(s)
    except OSError:
        print('no connection', flush=True)
        os._exit(0)
    if end == 'stay':
        answer(s)
    else:
        if end == 'reset':
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        s.close()
        print('left', flush=True)
        time.sleep(0.3)
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

/// A network namespace with random routes, and addresses in it that connections may come from.
struct Routes {
    commands: Vec<String>,
    sources: Vec<String>,
}

impl Routes {
    fn random(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut group = || random.u16(1..);
        let (a, b, c) = (group(), group(), group());
        let mut routes = Self {
            commands: vec![
                "ip link set lo up".into(),
                format!("ip -6 address add 2001:db8:{a:x}::1/64 dev lo nodad"),
                "ip address add 192.0.2.1/24 dev lo".into(),
            ],
            sources: ["::1", "127.0.0.1", "127.9.8.7", "192.0.2.1", "192.0.2.255", "192.0.2.9"]
                .map(str::to_owned)
                .to_vec(),
        };
        routes.sources.push(format!("2001:db8:{a:x}::1"));
        // Where packets are forwarded, the first address of each prefix is an anycast address.
        routes.sources.push(format!("2001:db8:{a:x}::"));
        let options = [
            ("echo 1 > /proc/sys/net/ipv6/conf/all/forwarding".to_owned(), format!("2001:db8:{a:x}::")),
            (format!("ip -6 route add local 2001:db8:{b:x}::/64 dev lo"), format!("2001:db8:{b:x}::5")),
            ("ip route add local 198.51.100.0/24 dev lo".to_owned(), "198.51.100.7".to_owned()),
            (
                format!(
                    "ip -6 route add local 2001:db8:{c:x}::/64 dev lo table 100 && ip -6 rule add lookup 100 pref 5"
                ),
                format!("2001:db8:{c:x}::6"),
            ),
            (
                "ip route add local 203.0.113.0/24 dev lo table 101 && ip rule add iif lo to 203.0.113.0/24 lookup 101 pref 6"
                    .to_owned(),
                "203.0.113.8".to_owned(),
            ),
            ("ip -6 route add blackhole 2001:db8:bad::/64".to_owned(), "2001:db8:bad::1".to_owned()),
        ];
        for (command, source) in options {
            if random.bool() {
                routes.commands.push(command);
            }
            routes.sources.push(source);
        }
        routes
    }
}

/// Whichever routes a machine has, and whichever source a sandboxed process chooses, it does not get in; and
/// from every source that connects at all, other processes do.
#[test]
fn a_sandboxed_process_cannot_connect_from_any_source() {
    if !runs_as_root() || !Path::new("/usr/bin/ip").exists() {
        return skipped("needs root and iproute2");
    }
    let mut refused = 0;
    for seed in 0..3 {
        let routes = Routes::random(seed);
        let world = World::new(seed % 2 == 1);
        // The thread enters the namespace of the server.
        let test = std::thread::spawn(move || attack_from_sources(world, &routes, seed));
        refused += test.join().unwrap();
    }
    assert!(refused > 3 * 3, "{refused} connections were refused");
}

/// Returns how many connections were refused.
fn attack_from_sources(mut world: World, routes: &Routes, seed: u64) -> usize {
    let user = if world.nobody { "setpriv --reuid=65534 --regid=65534 --clear-groups" } else { "" };
    let setup = routes.commands.join("\n");
    let run = format!(
        "set -e\n{setup}\nexec {user} \"$0\" exec-server --listen 'ws://[::]:0' --insecure-open"
    );
    let mut command = std::process::Command::new("unshare");
    command.args(["--net", "sh", "-c", &run]).arg(env!("CARGO_BIN_EXE_codex"));
    let server = Running::start_with(&mut command);
    let namespace = std::fs::File::open(format!("/proc/{}/ns/net", server.pid())).unwrap();
    let kind = Some(rustix::thread::LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let url = format!("ws://127.0.0.1:{}", port(&server));
    runtime.block_on(async {
        let mut client = server.client_at(&url).await;
        let (mut refused, mut random) = (0, fastrand::Rng::with_seed(seed));
        for source in &routes.sources {
            let to = (if source.contains(':') { "::1" } else { "127.0.0.1" }, port(&server));
            let way = format!("from {source} stay");
            let context = format!("seed {seed}, {source}, nobody: {}", world.nobody);
            let control = world.attack(&mut client, None, &way, to).await;
            let said = world.attack(&mut client, Some(networked()), &way, to).await;
            if control.1 {
                assert_eq!(said, (REFUSED.to_owned(), false), "{context}");
                refused += 1;
            } else {
                assert_eq!(control.0, "no connection\n", "{context}");
                assert!(!said.1, "{context}: {}", said.0);
            }
            let end = if random.bool() { "reset" } else { "close" };
            let way = format!("from {source} {end}");
            let said = world.attack(&mut client, Some(networked()), &way, to).await;
            assert!(!said.1, "{context}, {end}: {}", said.0);
        }
        refused
    })
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
