//! A hostile proxy: it splits, merges and delays bytes, swallows the last ones, and cuts connections, orderly
//! or by a reset. Its seed determines everything that it does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The plan of a proxy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub seed: u64,
    /// How many connections it cuts.
    pub cuts: usize,
    /// Maximum bytes before a cut.
    pub most: i64,
}

/// The upstream of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// A server, to which a client has one connection at a time.
    Server,
    /// A rendezvous, which serves HTTP and websockets. Only websockets are cut, some of them after a
    /// silence.
    Rendezvous,
}

#[derive(Debug)]
pub(crate) struct Proxy {
    pub url: String,
    cut: Arc<AtomicUsize>,
    /// The next client has no session yet.
    new_client: Arc<AtomicBool>,
}

impl Behind {
    /// Enough bytes for a connection to become a session. A relay stream begins with the handshake of
    /// its encryption.
    fn opening(self) -> i64 {
        match self {
            Self::Server => 8_000,
            Self::Rendezvous => 24_000,
        }
    }
}

impl Proxy {
    /// A proxy for the server at this `ws://` URL.
    pub(crate) fn start(url: &str, plan: Plan) -> Self {
        let server = url.strip_prefix("ws://").unwrap();
        Self::before(server, "ws", Behind::Server, plan)
    }

    /// A proxy for the rendezvous at this `http://` URL.
    pub(crate) fn start_relay(url: &str, plan: Plan) -> Self {
        let server = url.strip_prefix("http://").unwrap();
        Self::before(server, "http", Behind::Rendezvous, plan)
    }

    fn before(server: &str, scheme: &str, behind: Behind, plan: Plan) -> Self {
        let server: SocketAddr = server.parse().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let cut = Arc::new(AtomicUsize::new(0));
        let new_client = Arc::new(AtomicBool::new(true));
        let (count, new) = (cut.clone(), new_client.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(serve(listener, server, behind, plan, count, new));
        });
        Self { url, cut, new_client }
    }

    /// Lets the next connection live until it has a session: without one, a client cannot resume.
    pub(crate) fn expect_new_client(&self) {
        self.new_client.store(true, Ordering::Relaxed);
    }

    /// How many connections it has cut.
    pub(crate) fn cut(&self) -> usize {
        self.cut.load(Ordering::Relaxed)
    }
}

async fn serve(
    listener: std::net::TcpListener,
    server: SocketAddr,
    behind: Behind,
    plan: Plan,
    cut: Arc<AtomicUsize>,
    new_client: Arc<AtomicBool>,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let mut doomed = 0;
    while let Ok((client, _)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(server).await else { return };
        let lives = doomed == plan.cuts || behind == Behind::Rendezvous && !upgrades(&client).await;
        let budget = match random.u8(0..10) {
            _ if lives => i64::MAX,
            _ if new_client.swap(false, Ordering::Relaxed) => {
                behind.opening() + random.i64(0..plan.most)
            }
            // Some are cut during the handshake.
            0 => random.i64(0..2_000),
            _ => random.i64(2_000..plan.most),
        };
        doomed += usize::from(!lives);
        let silent = behind == Behind::Rendezvous && random.u8(0..8) == 0;
        let silence = Duration::from_millis(if silent { random.u64(0..1_500) } else { 0 });
        let (cut, mut random) = (cut.clone(), random.fork());
        let passing = async move {
            pass(client, server, budget, silence, &mut random).await;
            if !lives {
                cut.fetch_add(1, Ordering::Relaxed);
            }
        };
        match behind {
            // One at a time, since a client has one connection at a time.
            Behind::Server => passing.await,
            Behind::Rendezvous => drop(tokio::spawn(passing)),
        }
    }
}

/// Whether a connection starts with a websocket upgrade, rather than with another HTTP request.
async fn upgrades(client: &TcpStream) -> bool {
    let mut first = [0];
    matches!(client.peek(&mut first).await, Ok(1)) && first == *b"G"
}

/// Forwards bytes both ways until the budget is spent.
async fn pass(
    mut client: TcpStream,
    mut server: TcpStream,
    budget: i64,
    silence: Duration,
    random: &mut fastrand::Rng,
) {
    let (reset, left) = (random.bool(), AtomicI64::new(budget));
    let (mut up, mut down) = (random.fork(), random.fork());
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    {
        let (client_in, client_out) = client.split();
        let (server_in, server_out) = server.split();
        tokio::select! {
            () = copy(client_in, server_out, &left, &mut up) => {}
            () = copy(server_in, client_out, &left, &mut down) => {}
        }
    }
    if !silence.is_zero() {
        tokio::time::sleep(silence).await;
    }
    if reset {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    left: &AtomicI64,
    random: &mut fastrand::Rng,
) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        // Merges what arrives meanwhile.
        if random.u8(0..16) == 0 {
            tokio::time::sleep(Duration::from_micros(random.u64(0..2_000))).await;
        }
        let Ok(len @ 1..) = from.read(&mut buffer).await else { return };
        let before = left.fetch_sub(len as i64, Ordering::Relaxed).max(0);
        // Swallows what exceeds the budget.
        let mut rest = &buffer[..len.min(usize::try_from(before).unwrap_or(usize::MAX))];
        while !rest.is_empty() {
            let most = if random.u8(0..8) == 0 { random.usize(1..64) } else { rest.len() };
            let (piece, more) = rest.split_at(most.min(rest.len()));
            if to.write_all(piece).await.is_err() {
                return;
            }
            rest = more;
        }
        if before <= len as i64 {
            return;
        }
    }
}
