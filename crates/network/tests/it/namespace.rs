//! The transparent network under real programs, in a namespace with a real TUN device.

use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};

use codex_exec_network::{Namespace, Proxy};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::opened::{H1, TOKEN, opening};
use crate::skipped::skipped;
use crate::world::{Notebook, World, rules};

struct Programs {
    child: Child,
    control: UnixStream,
    replies: BufReader<UnixStream>,
    _dir: tempfile::TempDir,
}

impl Programs {
    /// A namespace that this proxy serves. `None`: this machine has no TUN device that we may use.
    fn start(proxy: &Proxy, mtu: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let mut command = Command::new("unshare");
        if !rustix::process::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        let mut child = command
            .args(["--net", "--mount", "python3", "-c", include_str!("namespace.py")])
            .env("RESOLV_CONF", dir.path().join("resolv.conf"))
            .env("TUN_MTU", mtu)
            .stdin(OwnedFd::from(far))
            .spawn()
            .unwrap();
        let tun = match receive_descriptor(&near) {
            Ok(tun) => tun,
            Err(why) => {
                child.wait().unwrap();
                skipped(&why);
                return None;
            }
        };
        let replies = BufReader::new(near.try_clone().unwrap());
        let programs = Self { child, control: near, replies, _dir: dir };
        let namespace = Namespace::new(tun);
        proxy.handle().serve_namespace(namespace).unwrap();
        Some(programs)
    }

    /// Runs a command inside; its exit code and its output.
    fn run(&mut self, command: &[&str]) -> (i32, String) {
        writeln!(self.control, "{}", serde_json::to_string(command).unwrap()).unwrap();
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn python(&mut self, script: &str) -> String {
        let script = format!("import errno, os, socket, ssl\n{script}");
        let (code, output) = self.run(&["python3", "-c", &script]);
        assert_eq!(code, 0, "{output}");
        output.trim().to_owned()
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

fn receive_descriptor(socket: &UnixStream) -> Result<OwnedFd, String> {
    let mut text = [0; 256];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags).unwrap();
    let mut descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptors.next().ok_or_else(|| match received.bytes {
        0 => "the namespace could not be made".to_owned(),
        length => String::from_utf8_lossy(&text[..length]).into_owned(),
    })
}

/// A world in which the programs block a thread of the test, and the proxy has others.
async fn served(mtu: &str) -> Option<(World, Proxy, Programs)> {
    let world = World::new().await;
    let mut lists = rules(&["good.com", "*.good.com", "93.184.216.34"], &["bad.com"], &[]);
    lists.allow_local_binding = false;
    world.internet.name("www.good.com", &["93.184.216.34"]);
    let proxy = world.start(world.config(lists)).await;
    let programs = Programs::start(&proxy, mtu)?;
    Some((world, proxy, programs))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_reach_what_is_allowed_and_nothing_else() {
    let Some((world, _proxy, mut programs)) = served("65535").await else { return };
    let (code, output) = programs.run(&["getent", "hosts", "good.com"]);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("good.com"), "{output}");
    assert_eq!(programs.run(&["getent", "hosts", "bad.com"]), (2, String::new()));
    let curl = |url: &'static str| {
        ["curl", "--noproxy", "*", "--silent", "--show-error", "--max-time", "20", url]
    };
    let (code, output) = programs.run(&curl("http://good.com/page"));
    assert_eq!(code, 0, "{output}");
    assert!(output.starts_with("GET /page HTTP/1.1|Host: good.com|"), "{output}");
    let (code, output) = programs.run(&curl("http://93.184.216.34/literal"));
    assert_eq!(code, 0, "{output}");
    // Refused by the rules, with a reset; by DNS; by the target.
    let (code, output) = programs.run(&curl("http://new.com/"));
    assert_eq!(code, 7, "{output}");
    let (code, output) = programs.run(&curl("http://bad.com/"));
    assert_eq!(code, 6, "{output}");
    let (code, output) = programs.run(&curl("http://good.com:1/"));
    assert_eq!(code, 7, "{output}");
    // Another Host than the name that was connected to.
    let mut other = curl("http://good.com/").to_vec();
    other.extend(["--header", "Host: www.good.com"]);
    let (code, output) = programs.run(&other);
    assert!([52, 56].contains(&code), "{code} {output}");
    let mut reasons: Vec<_> = Notebook::words(&world.notebook.take());
    reasons.retain(|(decision, ..)| *decision != "allow");
    reasons.dedup();
    assert_eq!(
        reasons,
        [
            ("deny", "baseline_policy", "not_allowed".into()),
            ("deny", "proxy_state", "host_mismatch".into()),
        ]
    );
    let connected = world.internet.connected();
    assert!(connected.iter().all(|address| address.starts_with("93.184.216.34:")), "{connected:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_behave_as_on_a_network() {
    let Some((world, proxy, mut programs)) = served("1500").await else { return };
    let refused = programs.python(
        "def attempt(address, port):\n\
         \x20   try: socket.create_connection((address, port), 20)\n\
         \x20   except OSError as error: return errno.errorcode.get(error.errno, str(error))\n\
         print(attempt('new.com', 80), attempt('127.0.0.2', 80), attempt('10.0.0.1', 80))\n\
         print(attempt('198.18.99.99', 80), attempt('169.254.169.254', 80))",
    );
    assert_eq!(refused.split_whitespace().collect::<Vec<_>>(), ["ECONNREFUSED"; 5]);
    // UDP fails at once; there is no raw way out either.
    let udp = programs.python(
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         s.connect(('8.8.8.8', 443)); s.settimeout(20); s.send(b'quic')\n\
         try: s.recv(10)\n\
         except OSError as error: print(errno.errorcode[error.errno])",
    );
    assert_eq!(udp, "ECONNREFUSED");
    // Half-close both ways, and a body larger than every buffer.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    *world.internet.origin.lock().unwrap() = Some(listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                let mut received = Vec::new();
                stream.read_to_end(&mut received).await.unwrap();
                received.reverse();
                stream.write_all(&received).await.unwrap();
            });
        }
    });
    let length = programs.python(
        "data = os.urandom(5_000_000)\n\
         s = socket.create_connection(('good.com', 9), 20)\n\
         s.sendall(b'\\0' + data); s.shutdown(socket.SHUT_WR)\n\
         received = b''.join(iter(lambda: s.recv(1 << 16), b''))\n\
         print(len(received), received[::-1][1:] == data)",
    );
    assert_eq!(length, "5000001 True");
    // A hello for another name, sent by a TLS library.
    let tls = programs.python(
        "context = ssl.create_default_context(); context.check_hostname = False\n\
         context.verify_mode = ssl.CERT_NONE\n\
         try: context.wrap_socket(socket.create_connection(('good.com', 443), 20), server_hostname='www.good.com')\n\
         except OSError as error: print(errno.errorcode.get(error.errno, 'EOF'))",
    );
    assert!(["ECONNRESET", "EOF"].contains(&tls.as_str()), "{tls}");
    assert_eq!(world.notebook.take().last().unwrap().reason, "host_mismatch");
    drop(proxy);
    let (code, output) = programs.run(&[
        "python3",
        "-c",
        "import socket; socket.create_connection(('198.18.1.0', 80), 1)",
    ]);
    assert_ne!(code, 0, "{output}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_are_put_back_without_a_proxy_variable() {
    let opening = opening(H1, "api.github.com").await;
    let proxy = opening.world.start(opening.config.clone()).await;
    let Some(mut programs) = Programs::start(&proxy, "65535") else { return };
    let bundle = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(bundle.path(), opening.authority.pem()).unwrap();
    let header = format!("Authorization: Bearer {}", opening.standin);
    let (code, output) = programs.run(&[
        "curl",
        "--noproxy",
        "*",
        "--silent",
        "--show-error",
        "--max-time",
        "20",
        "--cacert",
        bundle.path().to_str().unwrap(),
        "--header",
        &header,
        "https://api.github.com/user",
    ]);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains(&format!("|authorization: Bearer {TOKEN}")), "{output}");
    let connected = opening.world.internet.connected();
    assert_eq!(connected, ["140.82.112.5:443"]);
}
