//! Memory for large messages of honest and hostile clients, in both directions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::{
    Account, Budget, Connection, ConnectionConfig, Outbound, Share, Transfer, websocket_config,
    websocket_limits,
};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_websockets::{ClientBuilder, Message, ServerBuilder, WebSocketStream};

use crate::metered::{Random, frame};

const LONGEST: usize = 4 << 20;

/// In each direction: 18 MiB for every account, 6 MiB for first shares of at most 1 MiB.
const BUDGET: usize = 24 << 20;

/// Lengths that need a share, and for which a first share is enough.
const LITTLE: std::ops::Range<usize> = (257 << 10)..(512 << 10);

/// A server that answers `get N` with N bytes, and anything else with `ok`.
#[derive(Clone)]
struct Server {
    messages: Budget,
    answers: Budget,
    /// Bytes that messages and responses take now, and the most they ever took.
    held: Arc<[AtomicUsize; 2]>,
    most: Arc<[AtomicUsize; 2]>,
}

/// Memory in use, and the share that covers it.
struct Held {
    bytes: Vec<u8>,
    cost: usize,
    direction: usize,
    server: Server,
    _share: Share,
}

impl Held {
    fn new(server: &Server, direction: usize, bytes: Vec<u8>, cost: usize, share: Share) -> Self {
        let now = server.held[direction].fetch_add(cost, Ordering::SeqCst) + cost;
        server.most[direction].fetch_max(now, Ordering::SeqCst);
        Self { bytes, cost, direction, server: server.clone(), _share: share }
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.server.held[self.direction].fetch_sub(self.cost, Ordering::SeqCst);
    }
}

impl Server {
    fn new() -> Self {
        Self {
            messages: Budget::new(BUDGET),
            answers: Budget::new(BUDGET),
            held: Arc::default(),
            most: Arc::default(),
        }
    }

    fn connect(&self) -> DuplexStream {
        let config = ConnectionConfig {
            message_bytes: LONGEST,
            oversize_slack: 0,
            // Only the budget may end a connection in these tests.
            keep_alive: None,
            ..ConnectionConfig::default()
        };
        let (socket, client) = duplex(64 << 10);
        let (socket, meter) = self.messages.meter(socket, LONGEST);
        let socket = ServerBuilder::new()
            .config(websocket_config())
            .limits(websocket_limits(&config))
            .serve(socket);
        let connection = Connection::metered_websocket(socket, meter, &config);
        tokio::spawn(self.clone().serve(connection));
        client
    }

    async fn serve(self, mut connection: Connection) {
        let transfer: Transfer = connection.transfer();
        let account = self.answers.account(&transfer);
        let outbound = connection.outbound().clone();
        let work = async {
            while let Some(Ok(message)) = connection.next().await {
                let asked = message.strip_prefix(b"get ").map(<[u8]>::to_vec);
                let Some(asked) = asked else {
                    let share = connection.take_share().expect("a large message has one");
                    let cost = 2 * message.len();
                    let held = Held::new(&self, 0, Vec::new(), cost, share);
                    let outbound = outbound.clone();
                    tokio::spawn(async move {
                        sleep(Duration::from_millis(20)).await;
                        let _ = outbound.send("ok").await;
                        drop(held);
                    });
                    continue;
                };
                let len = String::from_utf8(asked).unwrap().parse().unwrap();
                tokio::spawn(self.clone().answer(len, account.clone(), outbound.clone()));
            }
        };
        tokio::select! {
            () = work => {}
            () = transfer.revoked() => {}
        }
    }

    async fn answer(self, len: usize, account: Account, outbound: Outbound) {
        let work = async {
            let share = account.take(2 * len as u64).await;
            let held = Held::new(&self, 1, vec![b'x'; len], 2 * len, share);
            if let Ok(slot) = outbound.reserve(len).await {
                slot.send(Bytes::from_owner(held));
            }
        };
        tokio::select! {
            () = work => {}
            () = outbound.closed() => {}
        }
    }

    /// Reconnects whenever its connection ends.
    async fn hostile(self, kind: Hostile) {
        loop {
            self.clone().hostile_once(kind).await;
            // Not at once, so that time can pass.
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Ends with its connection.
    async fn hostile_once(self, kind: Hostile) {
        let mut socket = self.connect();
        let ask = |len: usize| frame(1, true, format!("get {len}").as_bytes());
        let mut upload = frame(1, true, &[b'u'; 70_000]);
        // The length of a frame that is much longer than what follows.
        upload[1] = 0x80 | 127;
        upload[2..10].copy_from_slice(&(LONGEST as u64).to_be_bytes());
        let _ = match kind {
            Hostile::Unread | Hostile::LittleUnread => {
                let len = if kind == Hostile::Unread { LONGEST - 1 } else { LITTLE.start };
                for _ in 0..3 {
                    let _ = socket.write_all(&ask(len)).await;
                }
                while socket.write_all(&frame(9, true, b"alive")).await.is_ok() {
                    sleep(Duration::from_secs(5)).await;
                }
                Ok(())
            }
            Hostile::TricklingOut => {
                let _ = socket.write_all(&ask(LONGEST - 1)).await;
                let mut some = [0; 8 << 10];
                while socket.read(&mut some).await.is_ok_and(|len| len > 0) {
                    sleep(Duration::from_secs(1)).await;
                }
                Ok(())
            }
            Hostile::Stalled => {
                let _ = socket.write_all(&upload).await;
                socket.read_u8().await.map(drop)
            }
            Hostile::TricklingIn => {
                let _ = socket.write_all(&upload).await;
                while socket.write_all(&[b'u'; 70_000]).await.is_ok() {
                    sleep(Duration::from_secs(7)).await;
                }
                Ok(())
            }
        };
    }

    fn client(&self) -> WebSocketStream<DuplexStream> {
        ClientBuilder::new().take_over(self.connect())
    }

    fn assert_bound(&self) {
        for most in &*self.most {
            let most = most.load(Ordering::SeqCst);
            assert!(most <= BUDGET, "held {most} bytes");
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hostile {
    Unread,
    TricklingOut,
    TricklingIn,
    Stalled,
    LittleUnread,
}

#[derive(Debug, Clone, Copy)]
enum Request {
    Get(usize),
    Put(usize),
}

/// Sends a request and reads the whole response; `false` if the connection ends first.
async fn ask(client: &mut WebSocketStream<DuplexStream>, request: Request) -> bool {
    let (message, len) = match request {
        Request::Get(len) => (format!("get {len}"), len),
        Request::Put(len) => ("u".repeat(len), 2),
    };
    if client.send(Message::text(message)).await.is_err() {
        return false;
    }
    loop {
        match client.next().await {
            Some(Ok(message)) if message.is_text() => {
                assert_eq!(message.as_payload().len(), len);
                return true;
            }
            Some(Ok(_)) => {}
            _ => return false,
        }
    }
}

fn seed() -> u64 {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    eprintln!("SEED={seed}");
    seed
}

/// Starts clients that hold as much as they can, in every way; enough of them to take all memory but the
/// reserve.
fn holders(server: &Server, random: &mut Random, kinds: &[Hostile]) -> JoinSet<()> {
    let mut hostile = JoinSet::new();
    for kind in kinds {
        for _ in 0..4 + random.below(3) {
            hostile.spawn(server.clone().hostile(*kind));
        }
    }
    hostile
}

/// A small request of an account without shares is served before any holder is revoked.
#[tokio::test(start_paused = true)]
async fn small_requests_do_not_wait_for_large_holders() {
    let mut random = Random(seed());
    for _ in 0..4 {
        let server = Server::new();
        let large =
            [Hostile::Unread, Hostile::TricklingOut, Hostile::TricklingIn, Hostile::Stalled];
        let _hostile = holders(&server, &mut random, &large);
        // Lets all of them block on their sockets or on memory.
        sleep(Duration::from_millis(100)).await;
        let began = Instant::now();
        let mut honest = JoinSet::new();
        for _ in 0..1 + random.below(6) {
            let requests: Vec<_> = (0..1 + random.below(4))
                .map(|_| {
                    let len = LITTLE.start + random.below(LITTLE.len());
                    if random.below(2) == 0 { Request::Get(len) } else { Request::Put(len) }
                })
                .collect();
            let mut client = server.client();
            honest.spawn(async move {
                for request in requests {
                    assert!(ask(&mut client, request).await, "{request:?}: lost its connection");
                }
            });
        }
        timeout(Duration::from_secs(1800), honest.join_all()).await.expect("all are answered");
        // The paused clock advances only while every task waits, so this is time spent waiting.
        assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
        server.assert_bound();
    }
}

/// Despite hostile clients, every honest request completes, large ones included, no honest connection
/// ends, and memory stays within the budget.
#[tokio::test(start_paused = true)]
async fn every_honest_request_completes_despite_hostile_clients() {
    let mut random = Random(seed());
    for _ in 0..4 {
        let server = Server::new();
        let all = [
            Hostile::Unread,
            Hostile::TricklingOut,
            Hostile::TricklingIn,
            Hostile::Stalled,
            Hostile::LittleUnread,
        ];
        let kinds: Vec<_> = all.into_iter().filter(|_| random.below(4) > 0).collect();
        eprintln!("{kinds:?}");
        let _hostile = holders(&server, &mut random, &kinds);
        sleep(Duration::from_millis(100)).await;
        let mut honest = JoinSet::new();
        for _ in 0..1 + random.below(6) {
            let requests: Vec<_> = (0..3)
                .map(|_| {
                    let lengths = [100..101, LITTLE, (1 << 20)..LONGEST][random.below(3)].clone();
                    let len = lengths.start + random.below(lengths.len());
                    let put = random.below(2) == 0 && len > LITTLE.start;
                    if put { Request::Put(len) } else { Request::Get(len) }
                })
                .collect();
            let mut client = server.client();
            honest.spawn(async move {
                for request in requests {
                    assert!(ask(&mut client, request).await, "{request:?}: lost its connection");
                }
            });
        }
        timeout(Duration::from_secs(1800), honest.join_all()).await.expect("all are answered");
        server.assert_bound();
    }
}

/// Receives or sends one message of `len` bytes at a sixtieth of it per second, in small steps.
/// Returns whether all of it passed.
async fn slow(server: Server, request: Request, mut random: Random) -> bool {
    let mut socket = server.connect();
    let (ask, len) = match request {
        Request::Get(len) => (format!("get {len}"), len),
        Request::Put(len) => ("u".repeat(len), len),
    };
    let message = frame(1, true, ask.as_bytes());
    let mut left = len;
    if let Request::Get(_) = request {
        socket.write_all(&message).await.unwrap();
        // The header of the answer; its length has eight bytes, or two.
        let mut header = [0; 10];
        socket.read_exact(&mut header).await.unwrap();
    } else {
        socket.write_all(&message[..14]).await.unwrap();
    }
    while left > 0 {
        let millis = 50 + random.below(900);
        sleep(Duration::from_millis(millis as u64)).await;
        let part = (len * millis / 60_000 + 1).min(left);
        let passed = match request {
            Request::Get(_) => socket.read_exact(&mut vec![0; part]).await.map(drop),
            Request::Put(_) => socket.write_all(&vec![b'u'; part]).await,
        };
        if passed.is_err() {
            return false;
        }
        left -= part;
    }
    match request {
        Request::Get(_) => true,
        Request::Put(_) => socket.read_exact(&mut [0; 4]).await.is_ok(),
    }
}

/// Any number of connections that move nothing delay a large request by no more than the documented time,
/// and cost a client that moves a sixtieth per second nothing.
#[tokio::test(start_paused = true)]
async fn stalled_connections_delay_others_by_a_bounded_time() {
    let mut random = Random(seed());
    // Of the largest messages two fit.
    let slots = 2;
    for round in 0..24 {
        let server = Server::new();
        let is_put = round % 2 == 0;
        let request = |len| if is_put { Request::Put(len) } else { Request::Get(len) };
        let slow_clients = random.below(2);
        let stalled = random.below(90);
        let mut honest = JoinSet::new();
        for _ in 0..slow_clients {
            let slow = slow(server.clone(), request(LONGEST - 1), Random(random.0 ^ 1));
            honest.spawn(slow);
        }
        sleep(Duration::from_secs(random.below(20) as u64)).await;
        let kind = if is_put { Hostile::Stalled } else { Hostile::Unread };
        let mut hostile = JoinSet::new();
        for _ in 0..stalled {
            hostile.spawn(server.clone().hostile_once(kind));
        }
        sleep(Duration::from_millis(100)).await;
        let began = Instant::now();
        let mut client = server.client();
        assert!(ask(&mut client, request(LONGEST / 2)).await, "lost its connection");
        let rounds = stalled.div_ceil(slots - slow_clients);
        // Each has moved a sixtieth of its message into the buffers of its socket, worth a second.
        let bound = Duration::from_secs(20) + Duration::from_millis(2500) * rounds as u32;
        let waited = began.elapsed();
        assert!(waited <= bound, "{stalled} stalled, {slow_clients} slow: {waited:?} > {bound:?}");
        let slow = timeout(Duration::from_secs(1800), honest.join_all()).await;
        assert!(slow.expect("ends").iter().all(|passed| *passed), "a slow client was revoked");
        server.assert_bound();
    }
}

/// A slow client keeps its shares while only its own requests wait.
#[tokio::test(start_paused = true)]
async fn holder_keeps_its_connection_while_no_other_account_waits() {
    let budget = Budget::new(1000);
    let transfer = Transfer::default();
    let account = budget.account(&transfer);
    let first = account.take(700).await;
    assert!(timeout(Duration::from_secs(3600), account.take(700)).await.is_err());
    assert!(timeout(Duration::from_secs(1), transfer.revoked()).await.is_err());
    // A request of another account starts the clock.
    let other = budget.account(&Transfer::default());
    let waiting = tokio::spawn(async move { other.take(700).await });
    timeout(Duration::from_secs(1800), transfer.revoked())
        .await
        .expect("revoked while another account waits");
    drop(first);
    drop(waiting.await.unwrap());
    assert_eq!(budget.left(), 1000);
}

/// Requests outside the reserve are served in arrival order, whatever their size.
#[tokio::test(start_paused = true)]
async fn large_request_is_served_in_arrival_order() {
    let budget = Budget::new(2400);
    let account = || budget.account(&Transfer::default());
    let first = account().take(1000).await;
    let (large, later) = (account(), account());
    let large = tokio::spawn(async move { large.take(1800).await });
    let later = tokio::spawn(async move { later.take(500).await });
    tokio::task::yield_now().await;
    assert!(!large.is_finished() && !later.is_finished());
    // A small request of an account without shares overtakes them.
    let small = account();
    drop(timeout(Duration::from_secs(9), small.take(100)).await.expect("there is a reserve"));
    drop(first);
    let held = large.await.unwrap();
    tokio::task::yield_now().await;
    assert!(!later.is_finished());
    drop(held);
    drop(later.await.unwrap());
    assert_eq!(budget.left(), 2400);
}
