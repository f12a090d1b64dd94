//! The framed socket as the relay and the rendezvous use it, over an in-memory pipe.

use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::socket::{Framing, Received, SocketConfig, SocketReader, start};
use codex_exec_rpc::{
    KeepAlive, KeepAliveTimer, Outbound, OutboundConfig, TransportError, outbound,
};
use futures_util::{FutureExt, SinkExt, StreamExt};
use tokio::io::{DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_websockets::{ClientBuilder, CloseCode, Limits, Message, ServerBuilder, WebSocketStream};

struct Socket {
    reader: SocketReader<DuplexStream>,
    outbound: Outbound,
    writer: JoinHandle<()>,
    client: WebSocketStream<DuplexStream>,
}

/// A binary socket with a queue of `queue_bytes`, over a pipe of `buffer` bytes.
fn connect(queue_bytes: usize, buffer: usize, timer: Option<KeepAliveTimer>) -> Socket {
    let (server, client) = duplex(buffer);
    let server = ServerBuilder::new().config(codex_exec_rpc::websocket_config()).serve(server);
    let client = ClientBuilder::new().limits(Limits::unlimited()).take_over(client);
    let (outbound, queue) = outbound(OutboundConfig { queue_bytes });
    let close_timeout = Duration::from_secs(5);
    let config = SocketConfig { framing: Framing::Binary, keep_alive: timer, close_timeout };
    let (reader, writer) = start(server, (outbound.clone(), queue), config);
    Socket { reader, outbound, writer: tokio::spawn(writer), client }
}

fn random(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize
}

#[tokio::test]
async fn messages_of_any_length_arrive_once_and_in_order() {
    for seed in 1..=8 {
        let Socket { outbound, mut client, reader: _reader, .. } = connect(100_000, 5000, None);
        let mut state = seed;
        let messages: Vec<Bytes> = (0..200_u8)
            .map(|n| {
                let len = match random(&mut state) % 4 {
                    0 => 0,
                    1 => random(&mut state) % 100,
                    2 => random(&mut state) % 10_000,
                    _ => random(&mut state) % 200_000,
                };
                Bytes::from(vec![n; len])
            })
            .collect();
        let sent = messages.clone();
        let sending = tokio::spawn(async move {
            for message in sent {
                outbound.send(message).await.unwrap();
                if random(&mut state).is_multiple_of(3) {
                    tokio::task::yield_now().await;
                }
            }
            outbound.drained().await;
        });
        for message in messages {
            let received = client.next().await.unwrap().unwrap();
            assert!(received.is_binary(), "seed {seed}");
            assert!(received.into_payload()[..] == message[..], "seed {seed}");
        }
        sending.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_peer_frees_room_as_it_takes_messages() {
    const MESSAGE: usize = 32 << 10;
    let Socket { outbound, mut client, reader: _reader, .. } = connect(1 << 20, 1000, None);
    let mut queued = 0;
    while let Some(slot) = outbound.try_reserve(MESSAGE) {
        slot.send(vec![0; MESSAGE]);
        queued += 1;
    }
    assert_eq!(queued, 31, "the queue is full");
    let mut waiting = Box::pin(outbound.reserve(MESSAGE));
    assert!(waiting.as_mut().now_or_never().is_none());
    // Four of them, not the whole queue.
    for _ in 0..4 {
        assert_eq!(client.next().await.unwrap().unwrap().as_payload().len(), MESSAGE);
    }
    tokio::time::timeout(Duration::from_secs(1), waiting).await.expect("room").unwrap();
}

#[tokio::test]
async fn close_follows_queued_messages_and_carries_the_first_reason() {
    let Socket { mut reader, outbound, writer, mut client } = connect(100_000, 1000, None);
    for n in 0..50_u8 {
        outbound.send(vec![n; 1000]).await.unwrap();
    }
    outbound.close((1012, "service restart"));
    outbound.close((1000, "too late"));
    assert!(reader.next().await.is_none(), "nothing more is read");
    for n in 0..50_u8 {
        assert_eq!(client.next().await.unwrap().unwrap().as_payload()[..], [n; 1000]);
    }
    let close = client.next().await.unwrap().unwrap();
    assert_eq!(close.as_close(), Some((CloseCode::SERVICE_RESTART, "service restart")));
    client.close().await.unwrap();
    writer.await.unwrap();
    assert!(outbound.is_closed());
}

#[tokio::test(start_paused = true)]
async fn close_times_out_when_the_peer_does_not_read() {
    let Socket { reader: _reader, outbound, writer, client: _client } = connect(10_000, 100, None);
    outbound.send(vec![0; 1000]).await.unwrap();
    let began = Instant::now();
    outbound.close((1000, ""));
    writer.await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn periodic_pings_are_sent_despite_incoming_traffic() {
    let timer = KeepAliveTimer::periodic(KeepAlive::default());
    let Socket { mut reader, mut client, outbound: _outbound, .. } =
        connect(10_000, 10_000, Some(timer));
    let began = Instant::now();
    let reading = tokio::spawn(async move {
        while let Some(Ok(Received::Binary(_))) = reader.next().await {}
        reader
    });
    for _ in 0..12 {
        client.send(Message::binary("traffic".as_bytes())).await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    for _ in 0..4 {
        assert!(client.next().await.unwrap().unwrap().is_ping());
    }
    assert_eq!(began.elapsed(), Duration::from_secs(120));
    drop(client);
    reading.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn paused_socket_pings_without_declaring_the_peer_silent() {
    let timer = KeepAliveTimer::periodic(KeepAlive::default());
    let Socket { mut reader, mut client, outbound: _outbound, .. } =
        connect(10_000, 10_000, Some(timer));
    let began = Instant::now();
    let pausing = tokio::time::timeout(Duration::from_secs(1000), reader.pause());
    pausing.await.expect_err("the socket goes on");
    for _ in 0..33 {
        assert!(client.next().await.unwrap().unwrap().is_ping());
    }
    // The pongs are read first. After that the client reads nothing and leaves the ping at 1,020 s unanswered.
    let read = reader.next().await.unwrap();
    assert!(matches!(read, Err(TransportError::Silent { .. })), "{read:?}");
    assert_eq!(began.elapsed(), Duration::from_secs(1080));
}
