//! The promise of this crate: killed connections cost no byte.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use codex_exec_client::{
    ExecCommand, ExecServerClient, Patch, PathUri, ProcessEvent, RemoteExecServerConnectArgs,
    TransferOptions,
};
use codex_exec_serving::{KeepAlive, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::embedded::listening;

/// The socket buffers of the proxy, per direction and side, in bytes.
const BUFFER: u32 = 256 << 10;

/// How connections are killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kills {
    /// Closed, half of them with a reset.
    Told,
    /// Kept open, but nothing passes any more.
    Silent,
}

/// Forwards connections to `upstream` and kills the first `kills` of them, each after a random number of
/// bytes up to `most`.
async fn proxy(
    upstream: SocketAddr,
    kills: usize,
    how: Kills,
    most: i64,
    seed: u64,
) -> (SocketAddr, Arc<AtomicUsize>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_send_buffer_size(BUFFER).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(64).unwrap();
    let address = listener.local_addr().unwrap();
    let killed = Arc::new(AtomicUsize::new(0));
    let count = killed.clone();
    tokio::spawn(async move {
        let mut random = fastrand::Rng::with_seed(seed);
        // Stays open for ever.
        let mut silent = Vec::new();
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpSocket::new_v4().unwrap();
            // If the proxy buffered more than a server retains, it would lose output that no client can read again.
            server.set_recv_buffer_size(BUFFER).unwrap();
            // The test has ended, and the server is gone.
            let Ok(server) = server.connect(upstream).await else { return };
            let doomed = count.load(Ordering::Relaxed) < kills;
            // Some die during the handshake, most in the middle of the stream.
            let budget = match random.u8(0..10) {
                _ if !doomed => i64::MAX,
                0 => random.i64(0..2_000),
                _ => random.i64(2_000..most),
            };
            let (mut client, mut server) = (client, server);
            pass(&mut client, &mut server, budget).await;
            match how {
                Kills::Silent if doomed => silent.push((client, server)),
                _ if random.bool() => {
                    client.set_zero_linger().unwrap();
                    server.set_zero_linger().unwrap();
                }
                _ => {}
            }
            if doomed {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    (address, killed)
}

/// Forwards bytes both ways until the budget is spent or one side has closed.
async fn pass(client: &mut TcpStream, server: &mut TcpStream, budget: i64) {
    let left = AtomicI64::new(budget);
    let (client_in, client_out) = client.split();
    let (server_in, server_out) = server.split();
    tokio::select! {
        () = copy(client_in, server_out, &left) => {}
        () = copy(server_in, client_out, &left) => {}
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, left: &AtomicI64) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match from.read(&mut buffer).await {
            Ok(n @ 1..) => {
                // The rest of the last read is lost, in either direction.
                let before = left.fetch_sub(n as i64, Ordering::Relaxed).max(0);
                let n = n.min(before as usize);
                if to.write_all(&buffer[..n]).await.is_err() || before <= n as i64 {
                    return;
                }
            }
            _ => return,
        }
    }
}

/// 64 MiB of numbered lines of 16 bytes.
const LINES: u64 = 4 << 20;

/// Both sides detect silence after a fraction of a second.
const SILENCE: KeepAlive =
    KeepAlive { idle: Duration::from_millis(100), timeout: Duration::from_millis(300) };

fn persistent(address: SocketAddr) -> RemoteExecServerConnectArgs {
    let mut args = RemoteExecServerConnectArgs::new(format!("ws://{address}"), "test");
    args.reconnect.first_delay = Duration::from_millis(2);
    args.reconnect.max_delay = Duration::from_millis(20);
    args
}

/// Connects; retries until the first connection has a session.
async fn connect(args: RemoteExecServerConnectArgs) -> ExecServerClient {
    loop {
        match ExecServerClient::connect_websocket(args.clone()).await {
            Ok(client) => return client,
            Err(error) => eprintln!("not yet: {error}"),
        }
    }
}

async fn survive(kills: usize, how: Kills, lines: u64, seed: u64) {
    let mut config = ServerConfig::default();
    config.takeover_timeout = SILENCE.timeout;
    // The server detects silence only when another connection asks for the session.
    config.connection.keep_alive = None;
    let listening = listening(config).await;
    let (address, killed) = proxy(listening.address, kills, how, 600_000, seed).await;
    let mut args = persistent(address);
    if how == Kills::Silent {
        args.tuning.connection.keep_alive = Some(SILENCE);
        args.initialize_timeout = Duration::from_secs(1);
        args.reconnect.give_up_after = Duration::from_secs(30);
    }
    let client = connect(args).await;

    let directory = tempfile::tempdir().unwrap();
    let received = directory.path().join("stdin");
    let script =
        format!("cat > '{}' & seq -f %015.0f 0 {}; wait; exit 7", received.display(), lines - 1);
    // A shell gives background jobs an empty stdin unless stdin is redirected.
    let script = format!("exec 3<&0; {}", script.replacen("cat >", "cat <&3 >", 1));
    let mut process = client.spawn(ExecCommand::shell(script).pipe_stdin()).await.unwrap();

    let mut stdin = process.take_stdin().unwrap();
    let writing = tokio::spawn(async move {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut written = Vec::new();
        let mut line = 0u64;
        while (written.len() as u64) < lines {
            let mut piece = Vec::new();
            for _ in 0..random.usize(1..200) {
                piece.extend_from_slice(format!("w{line:06}\n").as_bytes());
                line += 1;
            }
            stdin.write_all(&piece).await.unwrap();
            written.extend_from_slice(&piece);
            if random.u8(0..4) == 0 {
                stdin.flush().await.unwrap();
            }
        }
        stdin.shutdown().await.unwrap();
        written
    });

    let (mut at, mut exit) = (0u64, None);
    let mut rest = Vec::new();
    let mut closed = false;
    while let Some(event) = process.next_event().await {
        match event {
            ProcessEvent::Output { bytes, .. } => {
                rest.extend_from_slice(&bytes);
                let whole = rest.len() / 16 * 16;
                for line in rest[..whole].chunks(16) {
                    assert_eq!(line, format!("{at:015}\n").as_bytes(), "seed {seed}");
                    at += 1;
                }
                rest.drain(..whole);
            }
            ProcessEvent::Exited(status) => exit = Some(status.code),
            ProcessEvent::Closed => closed = true,
            other => panic!("{other:?}, seed {seed}"),
        }
    }
    assert_eq!((at, rest.len(), exit, closed), (lines, 0, Some(7), true), "seed {seed}");
    let written = writing.await.unwrap();
    assert!(std::fs::read(&received).unwrap() == written, "stdin, seed {seed}");
    assert_eq!(killed.load(Ordering::Relaxed), kills, "the stream outlived the kills, seed {seed}");
    listening.server.shut_down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_killed_connections_cost_no_byte() {
    let seed = std::env::var("KILL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    tokio::time::timeout(Duration::from_secs(300), survive(200, Kills::Told, LINES, seed))
        .await
        .expect("in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_cost_no_byte() {
    let surviving = survive(5, Kills::Silent, LINES / 32, 3);
    tokio::time::timeout(Duration::from_secs(120), surviving).await.expect("in time");
}

/// Uploads or downloads a file through connections that die after at most `most` bytes.
async fn transfer(kills: usize, most: i64, seed: u64, direction: Direction) {
    let listening = listening(ServerConfig::default()).await;
    let (address, killed) = proxy(listening.address, kills, Kills::Told, most, seed).await;
    let client = connect(persistent(address)).await;
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    let mut random = fastrand::Rng::with_seed(seed);
    let content: Vec<u8> = (0..random.usize(3_000_000..6_000_000)).map(|_| random.u8(..)).collect();
    std::fs::write(&to, "old").unwrap();
    let (furthest, went_back) = (AtomicU64::new(0), Arc::new(AtomicBool::new(false)));
    let told = went_back.clone();
    let options = TransferOptions::default().on_progress(move |at| {
        if furthest.fetch_max(at.bytes, Ordering::Relaxed) > at.bytes {
            told.store(true, Ordering::Relaxed);
        }
    });
    let uri = |path: &Path| PathUri::try_from(path).unwrap();
    let done = match direction {
        Direction::Up => {
            std::fs::write(&from, &content).unwrap();
            client.files().upload(&from, &uri(&to), &options).await
        }
        Direction::UpFromPipe => {
            let (_open, name) = crate::transfers::pipe(content.clone());
            client.files().upload(&name, &uri(&to), &options).await
        }
        Direction::Down => {
            std::fs::write(&from, &content).unwrap();
            client.files().download(&uri(&from), &to, &options).await
        }
    };
    let report = done.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    assert_eq!(report.bytes, content.len() as u64, "seed {seed}");
    assert!(std::fs::read(&to).unwrap() == content, "seed {seed}");
    assert!(!went_back.load(Ordering::Relaxed), "it started over, seed {seed}");
    assert_eq!(killed.load(Ordering::Relaxed), kills, "it outlived the kills, seed {seed}");
    // The attempts leave nothing else behind.
    let names = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(names, if direction == Direction::UpFromPipe { 1 } else { 2 }, "seed {seed}");
    listening.server.shut_down().await;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    UpFromPipe,
    Down,
}

/// Many connections that carry several blocks, then some that carry less than one.
async fn transfers(direction: Direction) {
    let seed = std::env::var("KILL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    for (kills, most) in [(10, 600_000), (40, 60_000)] {
        let transfer = transfer(kills, most, seed, direction);
        tokio::time::timeout(Duration::from_secs(120), transfer).await.expect("in time");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_download_continues_after_killed_connections() {
    transfers(Direction::Down).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_continues_after_killed_connections() {
    transfers(Direction::Up).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_of_a_pipe_continues_after_killed_connections() {
    transfers(Direction::UpFromPipe).await;
}

/// Applies a random patch through connections that die, and compares the files with the expected ones.
async fn patch_through_cuts(upstream: SocketAddr, seed: u64) {
    use std::os::unix::fs::PermissionsExt;
    let mut random = fastrand::Rng::with_seed(seed);
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let (mut sections, mut wanted) = (Vec::new(), std::collections::BTreeMap::new());
    let filler = |random: &mut fastrand::Rng| "a line of some length\n".repeat(random.usize(..200));
    for at in 0..random.usize(1..5) {
        let (name, rest) = (format!("file{at}"), filler(&mut random));
        let bits = [0o644, 0o600, 0o755][random.usize(..3)];
        let (old, new) = (format!("old {at}\n{rest}"), format!("new {at}\n{rest}"));
        if random.u8(..4) == 0 {
            let lines: String = new.lines().map(|line| format!("+{line}\n")).collect();
            sections.push(format!("*** Add File: sub/{name}\n{lines}"));
            wanted.insert(root.join("sub").join(&name), (new, None));
            continue;
        }
        std::fs::write(root.join(&name), &old).unwrap();
        let permissions = std::fs::Permissions::from_mode(bits);
        std::fs::set_permissions(root.join(&name), permissions).unwrap();
        let change = format!("@@\n-old {at}\n+new {at}\n");
        match random.u8(..6) {
            0 => sections.push(format!("*** Delete File: {name}\n")),
            // Two steps for one name: the first must not take effect after the second.
            1 => {
                sections
                    .push(format!("*** Delete File: {name}\n*** Add File: {name}\n+other {at}\n"));
                wanted.insert(root.join(&name), (format!("other {at}\n"), None));
            }
            2 => {
                let next = format!("@@\n-new {at}\n+newer {at}\n");
                sections.push(format!(
                    "*** Update File: {name}\n{change}*** Update File: {name}\n{next}"
                ));
                wanted.insert(root.join(&name), (format!("newer {at}\n{rest}"), Some(bits)));
            }
            3 => {
                sections.push(format!("*** Update File: {name}\n{change}"));
                wanted.insert(root.join(&name), (new, Some(bits)));
            }
            _ => {
                let to = format!("moved/{name}");
                sections.push(format!("*** Update File: {name}\n*** Move to: {to}\n{change}"));
                wanted.insert(root.join(to), (new, Some(bits)));
            }
        }
    }
    random.shuffle(&mut sections);
    let text = format!("*** Begin Patch\n{}*** End Patch\n", sections.concat());
    let patch = Patch::parse(&text).unwrap();
    let (address, _) = proxy(upstream, 4, Kills::Told, random.i64(3_000..12_000), seed).await;
    let client = connect(persistent(address)).await;
    let cwd = PathUri::try_from(root).unwrap();
    let applied = client.files().apply_patch(&patch, &cwd).await;
    if let Err(error) = applied {
        panic!("seed {seed}: {error}");
    }
    let mut found = std::collections::BTreeMap::new();
    for directory in [root.to_owned(), root.join("sub"), root.join("moved")] {
        for entry in std::fs::read_dir(directory).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_file() {
                let bits = path.metadata().unwrap().permissions().mode() & 0o7777;
                found.insert(path.clone(), (std::fs::read_to_string(path).unwrap(), bits));
            }
        }
    }
    assert!(found.keys().eq(wanted.keys()), "seed {seed}: {found:?}");
    for (path, (content, bits)) in &wanted {
        assert!(found[path].0 == *content, "seed {seed}: {path:?}");
        assert!(bits.is_none_or(|bits| found[path].1 == bits), "seed {seed}: {path:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_patch_through_killed_connections_is_exact() {
    let first = std::env::var("KILL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let listening = listening(ServerConfig::default()).await;
    for seed in first..first + 30 {
        let applied = patch_through_cuts(listening.address, seed);
        tokio::time::timeout(Duration::from_secs(60), applied).await.expect("in time");
    }
    listening.server.shut_down().await;
}
