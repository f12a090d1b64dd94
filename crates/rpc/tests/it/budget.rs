//! Large messages of many connections within one budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use codex_exec_rpc::{Budget, Connection, ConnectionConfig, websocket_config, websocket_limits};
use futures_util::{FutureExt, SinkExt};
use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
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
async fn a_large_message_waits_for_room_and_small_ones_pass() {
    let budget = Budget::new(2 * LONGEST);
    let (mut first, mut client) = connect(&budget);
    let (sent, received) = tokio::join!(client.send(text(LONGEST / 2 + 1)), first.next());
    sent.unwrap();
    assert_eq!(received.unwrap().unwrap().len(), LONGEST / 2 + 1);
    let share = first.take_share();
    assert_eq!(budget.left(), LONGEST - 2);
    // Of another connection a message of the same size does not fit, and is not read.
    let (mut second, mut other) = connect(&budget);
    let sending = tokio::spawn(async move {
        other.send(text(LONGEST / 2 + 1)).await.unwrap();
        other
    });
    let mut waiting = Box::pin(second.next());
    assert!(waiting.as_mut().now_or_never().is_none());
    tokio::task::yield_now().await;
    assert!(waiting.as_mut().now_or_never().is_none());
    // Small ones do, on a third.
    let (mut third, mut small) = connect(&budget);
    let (sent, received) = tokio::join!(small.send(text(SMALL)), third.next());
    sent.unwrap();
    assert_eq!(received.unwrap().unwrap().len(), SMALL);
    assert!(third.take_share().is_none());
    drop(share);
    assert_eq!(waiting.await.unwrap().unwrap().len(), LONGEST / 2 + 1);
    // A share that nobody has asked for goes with the next message.
    let mut other = sending.await.unwrap();
    other.send(text(1)).await.unwrap();
    assert_eq!(second.next().await.unwrap().unwrap().len(), 1);
    assert_eq!(budget.left(), 2 * LONGEST);
}

#[tokio::test]
async fn what_is_larger_than_the_budget_takes_all_of_it() {
    let budget = Budget::new(1000);
    let (mut connection, mut client) = connect(&budget);
    for _ in 0..3 {
        let (sent, received) = tokio::join!(client.send(text(LONGEST)), connection.next());
        sent.unwrap();
        assert_eq!(received.unwrap().unwrap().len(), LONGEST);
        assert_eq!(budget.left(), 0);
        drop(connection.take_share());
        assert_eq!(budget.left(), 1000);
    }
    // And gives it back with its connection, read or not.
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
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// A masked frame, as a client of any make may send it.
fn frame(opcode: u8, is_final: bool, payload: &[u8]) -> Vec<u8> {
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
    // A mask of zeros leaves the payload as it is.
    frame.extend([0; 4]);
    frame.extend_from_slice(payload);
    frame
}

/// Twenty connections send messages of every size, whole and in pieces, cut anywhere: all arrive as they
/// were sent, and the large ones that somebody has never take more than the budget.
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
                bytes.extend(frame(opcode, false, piece));
                bytes.extend(frame(9, true, b"ping"));
                (rest, opcode) = (after, 0);
            }
            bytes.extend(frame(opcode, true, rest));
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
                // A little more than small may have been read ahead of the wait.
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
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("they wait for each other");
    assert_eq!(budget.left(), BUDGET);
}
