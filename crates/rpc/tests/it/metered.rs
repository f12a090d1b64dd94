//! Large messages of many connections within one budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use codex_exec_rpc::{Budget, Connection, ConnectionConfig, websocket_config, websocket_limits};
use futures_util::{FutureExt, SinkExt};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};
use tokio_websockets::{ClientBuilder, Message, ServerBuilder, WebSocketStream};

const SMALL: usize = 256 << 10;
const LONGEST: usize = 4 << 20;

fn config() -> ConnectionConfig {
    let (message_bytes, oversize_slack) = (LONGEST, 0);
    ConnectionConfig { message_bytes, oversize_slack, ..ConnectionConfig::default() }
}

/// A server's connection, and the bytes of its client.
fn serve(budget: &Budget) -> (Connection, DuplexStream) {
    let (server, client) = duplex(100_000);
    let (server, meter) = budget.meter(server, LONGEST);
    let server = ServerBuilder::new()
        .config(websocket_config())
        .limits(websocket_limits(&config()))
        .serve(server);
    (Connection::metered_websocket(server, meter, &config()), client)
}

fn connect(budget: &Budget) -> (Connection, WebSocketStream<DuplexStream>) {
    let (connection, client) = serve(budget);
    (connection, ClientBuilder::new().take_over(client))
}

fn text(len: usize) -> Message {
    Message::text("x".repeat(len))
}

#[tokio::test]
async fn large_message_waits_for_budget_while_small_ones_pass() {
    let budget = Budget::new(2 * LONGEST);
    let (mut first, mut client) = connect(&budget);
    let (sent, received) = tokio::join!(client.send(text(LONGEST / 2 + 1)), first.next());
    sent.unwrap();
    assert_eq!(received.unwrap().unwrap().len(), LONGEST / 2 + 1);
    let share = first.take_share();
    assert_eq!(budget.left(), LONGEST - 2);
    // A message of the same size on another connection does not fit, and is not read.
    let (mut second, mut other) = connect(&budget);
    let sending = tokio::spawn(async move {
        other.send(text(LONGEST / 2 + 1)).await.unwrap();
        other
    });
    let mut waiting = Box::pin(second.next());
    assert!(waiting.as_mut().now_or_never().is_none());
    tokio::task::yield_now().await;
    assert!(waiting.as_mut().now_or_never().is_none());
    // Small ones pass, on a third connection.
    let (mut third, mut small) = connect(&budget);
    let (sent, received) = tokio::join!(small.send(text(SMALL)), third.next());
    sent.unwrap();
    assert_eq!(received.unwrap().unwrap().len(), SMALL);
    assert!(third.take_share().is_none());
    drop(share);
    assert_eq!(waiting.await.unwrap().unwrap().len(), LONGEST / 2 + 1);
    // A share that is not taken is dropped with the next message.
    let mut other = sending.await.unwrap();
    other.send(text(1)).await.unwrap();
    assert_eq!(second.next().await.unwrap().unwrap().len(), 1);
    assert_eq!(budget.left(), 2 * LONGEST);
}

#[tokio::test]
async fn message_larger_than_budget_takes_all_but_the_reserve() {
    let budget = Budget::new(1000);
    let (mut connection, mut client) = connect(&budget);
    for _ in 0..3 {
        let (sent, received) = tokio::join!(client.send(text(LONGEST)), connection.next());
        sent.unwrap();
        assert_eq!(received.unwrap().unwrap().len(), LONGEST);
        assert_eq!(budget.left(), 250);
        drop(connection.take_share());
        assert_eq!(budget.left(), 1000);
    }
    // The share returns with its connection, whether or not the message was read.
    let sending = client.send(text(LONGEST));
    let mut half = Box::pin(connection.next());
    assert!(half.as_mut().now_or_never().is_none());
    drop((sending.now_or_never(), half));
    drop((connection, client));
    while budget.left() < 1000 {
        tokio::task::yield_now().await;
    }
}

/// A generator of numbers: the same for the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    /// A random mask; zero for a payload so long that masking it would slow the test down.
    fn mask(&mut self, len: usize) -> [u8; 4] {
        if len > 300_000 { [0; 4] } else { (self.below(1 << 31) as u32).to_le_bytes() }
    }
}

/// A masked frame, as a client sends it.
pub(crate) fn frame(opcode: u8, is_final: bool, payload: &[u8]) -> Vec<u8> {
    // A mask of zeros leaves the payload as it is.
    frame_with_mask(opcode, is_final, payload, [0; 4])
}

fn frame_with_mask(opcode: u8, is_final: bool, payload: &[u8], mask: [u8; 4]) -> Vec<u8> {
    let mut frame = vec![opcode | if is_final { 0x80 } else { 0 }];
    match payload.len() {
        len @ ..126 => frame.push(0x80 | len as u8),
        len @ ..65_536 => {
            frame.push(0x80 | 126);
            frame.extend((len as u16).to_be_bytes());
        }
        len => {
            frame.push(0x80 | 127);
            frame.extend((len as u64).to_be_bytes());
        }
    }
    frame.extend(mask);
    let from = frame.len();
    frame.extend_from_slice(payload);
    if mask != [0; 4] {
        for (at, byte) in frame[from..].iter_mut().enumerate() {
            *byte ^= mask[at % 4];
        }
    }
    frame
}

/// Twenty connections send messages of every size, whole and in fragments, split anywhere: all arrive
/// unchanged, and the large ones held at any time never exceed the budget.
#[tokio::test]
async fn twenty_connections_share_one_budget() {
    const BUDGET: usize = 12 << 20;
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    eprintln!("SEED={seed}");
    let budget = Budget::new(BUDGET);
    let held = Arc::new(AtomicUsize::new(0));
    let mut all = tokio::task::JoinSet::new();
    for n in 0..20 {
        let mut random = Random(seed * 100 + n);
        let (mut connection, client) = serve(&budget);
        let messages: Vec<Vec<u8>> = (0..6)
            .map(|at| {
                let longest = [100, SMALL * 2, LONGEST][random.below(3)];
                let len = random.below(longest);
                vec![b'a' + (n as u8 + at) % 26; len]
            })
            .collect();
        let mut bytes = Vec::new();
        for message in &messages {
            let mut rest = &message[..];
            let mut opcode = 1;
            while random.below(3) > 0 {
                let (piece, after) = rest.split_at(random.below(rest.len() + 1));
                let mask = random.mask(piece.len());
                bytes.extend(frame_with_mask(opcode, false, piece, mask));
                bytes.extend(frame(9, true, b"ping"));
                (rest, opcode) = (after, 0);
            }
            bytes.extend(frame_with_mask(opcode, true, rest, random.mask(rest.len())));
        }
        let (mut from_server, mut to_server) = tokio::io::split(client);
        all.spawn(async move {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(1 + random.below(90_000)));
                to_server.write_all(now).await.unwrap();
                rest = later;
            }
            // Pongs go nowhere.
            tokio::io::copy(&mut from_server, &mut tokio::io::sink()).await.unwrap();
        });
        let held = held.clone();
        all.spawn(async move {
            let mut random = Random(seed + n);
            for message in messages {
                let got = connection.next().await.unwrap().unwrap();
                assert!(got == message, "{} of {}", got.len(), message.len());
                // Slightly more than a small message may be read before the wait.
                let large = got.len() > SMALL + (64 << 10);
                let share = connection.take_share();
                assert!(share.is_some() || !large, "{} bytes", got.len());
                let cost = if share.is_some() { 2 * got.len() } else { 0 };
                let now = held.fetch_add(cost, Ordering::SeqCst) + cost;
                assert!(now <= BUDGET, "{now}");
                for _ in 0..random.below(20) {
                    tokio::task::yield_now().await;
                }
                held.fetch_sub(cost, Ordering::SeqCst);
                drop(share);
            }
        });
    }
    let ended = async {
        while let Some(ended) = all.join_next().await {
            ended.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("a deadlock");
    assert_eq!(budget.left(), BUDGET);
}

/// Records the largest read buffer that a decoder offers.
struct Spy<T> {
    io: T,
    most: Arc<AtomicUsize>,
}

impl<T: AsyncRead + Unpin> AsyncRead for Spy<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.most.fetch_max(buf.remaining(), Ordering::Relaxed);
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Spy<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// A decoder keeps its buffer while its connection is open, so the buffer must stay small for frames of
/// every length, including sequences in which each frame is just under twice as long as the last.
#[tokio::test]
async fn decoder_buffer_stays_small_for_any_frame_length() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    eprintln!("SEED={seed}");
    let mut random = Random(seed);
    let mut lengths: Vec<usize> =
        (0..12).map(|n| ((40_000 << n) - random.below(9)).min(LONGEST)).collect();
    for _ in 0..20 {
        let longest = [300, 140_000, LONGEST][random.below(3)];
        lengths.push(random.below(longest));
    }
    lengths.extend([131_071, 131_072, 131_073, 262_144, 262_145, LONGEST]);
    let most = Arc::new(AtomicUsize::new(0));
    let (server, mut client) = duplex(100_000);
    // Shares return only with the connection here, and the budget is never exhausted.
    let budget = Budget::new(1 << 30);
    let (io, _meter) = budget.meter(server, LONGEST);
    let mut server = ServerBuilder::new()
        .config(websocket_config())
        .limits(websocket_limits(&config()))
        .serve(Spy { io, most: most.clone() });
    let pattern = b"abcdefghijklmnopqrstuvwxyz0123456".repeat(LONGEST / 32);
    let messages: Vec<Vec<u8>> = lengths.iter().map(|&len| pattern[..len].to_vec()).collect();
    let bytes: Vec<u8> = messages
        .iter()
        .flat_map(|message| frame_with_mask(1, true, message, random.mask(message.len())))
        .collect();
    let sending = tokio::spawn(async move {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(1 + random.below(90_000)));
            client.write_all(now).await.unwrap();
            rest = later;
        }
        client
    });
    for message in messages {
        let got = futures_util::StreamExt::next(&mut server).await.unwrap().unwrap();
        assert!(got.is_text() && got.as_payload()[..] == message[..], "{} bytes", message.len());
    }
    sending.await.unwrap();
    let most = most.load(Ordering::Relaxed);
    assert!(most <= 512 << 10, "{most}");
}

/// A peer announces a message that takes most of the budget, then sends little or nothing. A waiting
/// connection is served once that peer is too far behind.
#[tokio::test(start_paused = true)]
async fn peer_that_stalls_mid_message_loses_its_share() {
    for trickle in [0, 1, 1000, 10_000] {
        let budget = Budget::new(2 * LONGEST);
        let (mut stalled, mut bytes) = serve(&budget);
        let head = frame(1, true, &vec![b'x'; LONGEST]);
        bytes.write_all(&head[..20_000]).await.unwrap();
        // Without other waiters the peer may be slow.
        let patient = tokio::time::timeout(Duration::from_secs(45), stalled.next());
        assert!(patient.await.is_err());
        assert_eq!(budget.left(), LONGEST / 2);
        let stalled = tokio::spawn(async move { stalled.next().await });
        let trickling = tokio::spawn(async move {
            for at in 0.. {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let from = 20_000 + at * trickle;
                if bytes.write_all(&head[from..from + trickle]).await.is_err() {
                    return;
                }
            }
        });
        let (mut waiting, mut client) = connect(&budget);
        let sending = tokio::spawn(async move {
            client.send(text(LONGEST)).await.unwrap();
            client
        });
        let served = tokio::time::timeout(Duration::from_secs(40), waiting.next()).await;
        assert_eq!(served.unwrap().unwrap().unwrap().len(), LONGEST);
        let error = stalled.await.unwrap().unwrap().unwrap_err();
        assert!(error.to_string().contains("too slow"), "{error}");
        trickling.abort();
        sending.await.unwrap();
    }
}

/// A slow peer that keeps sending keeps its connection, however many others wait.
#[tokio::test(start_paused = true)]
async fn slow_but_progressing_peer_keeps_its_connection() {
    let budget = Budget::new(2 * LONGEST);
    let (mut slow, mut bytes) = serve(&budget);
    let sending = tokio::spawn(async move {
        for part in frame(1, true, &vec![b'x'; LONGEST]).chunks(600_000) {
            bytes.write_all(part).await.unwrap();
            tokio::time::sleep(Duration::from_secs(9)).await;
        }
        bytes
    });
    let (mut waiting, mut client) = connect(&budget);
    let other = tokio::spawn(async move {
        // After the first has its share.
        tokio::time::sleep(Duration::from_secs(1)).await;
        client.send(text(LONGEST)).await.unwrap();
        client
    });
    let receiving = async {
        assert_eq!(slow.next().await.unwrap().unwrap().len(), LONGEST);
        drop(slow.take_share());
    };
    let (_, served) = tokio::join!(receiving, waiting.next());
    assert_eq!(served.unwrap().unwrap().len(), LONGEST);
    drop((sending.await.unwrap(), other.await.unwrap()));
}

/// The limit applies after earlier messages were handled, even if all bytes arrive at once.
#[tokio::test]
async fn long_message_passes_once_the_limit_is_lifted() {
    const LIMIT: usize = 64 << 10;
    for len in [LIMIT, LIMIT + 1, SMALL + 1, LONGEST] {
        for lift in [true, false] {
            let budget = Budget::new(2 * LONGEST);
            let (server, mut client) = duplex(100_000);
            let (server, meter) = budget.meter(server, LONGEST);
            meter.limit(LIMIT);
            let server = ServerBuilder::new().limits(websocket_limits(&config())).serve(server);
            let mut connection = Connection::metered_websocket(server, meter, &config());
            let bytes = [frame(1, true, b"first"), frame(1, true, &vec![b'x'; len])].concat();
            let sending = tokio::spawn(async move {
                let _ = client.write_all(&bytes).await;
                client
            });
            assert_eq!(connection.next().await.unwrap().unwrap(), "first");
            if lift {
                connection.lift_limit();
            }
            match connection.next().await.unwrap() {
                Ok(got) => assert!(got.len() == len && (lift || len <= LIMIT), "{len} {lift}"),
                Err(error) => assert!(!lift && len > LIMIT && error.is_fatal(), "{len}: {error}"),
            }
            drop(connection);
            drop(sending.await.unwrap());
            while budget.left() < 2 * LONGEST {
                tokio::task::yield_now().await;
            }
        }
    }
}
