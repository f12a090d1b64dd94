//! Websockets over an in-memory pipe.

use std::time::Duration;

use codex_exec_rpc::{
    Connection, ConnectionConfig, KeepAlive, OutboundConfig, TransportError, websocket_config,
    websocket_limits,
};
use futures_util::{FutureExt, SinkExt, StreamExt};
use tokio::io::{DuplexStream, duplex};
use tokio::time::Instant;
use tokio_websockets::{ClientBuilder, Message, ServerBuilder, WebSocketStream};

/// A server's connection and a bare client, over a pipe of `buffer` bytes.
fn connect(
    config: &ConnectionConfig,
    buffer: usize,
) -> (Connection, WebSocketStream<DuplexStream>) {
    let (server, client) = duplex(buffer);
    let server = ServerBuilder::new()
        .config(websocket_config())
        .limits(websocket_limits(config))
        .serve(server);
    let client =
        ClientBuilder::new().limits(tokio_websockets::Limits::unlimited()).take_over(client);
    (Connection::websocket(server, config), client)
}

#[tokio::test]
async fn text_and_binary_are_received_and_text_is_sent() {
    let (mut connection, mut client) = connect(&ConnectionConfig::default(), 1 << 16);
    client.send(Message::text("a")).await.unwrap();
    client.send(Message::binary("b".as_bytes())).await.unwrap();
    assert_eq!(connection.next().await.unwrap().unwrap(), "a");
    assert_eq!(connection.next().await.unwrap().unwrap(), "b");
    connection.outbound().send("c").await.unwrap();
    let message = client.next().await.unwrap().unwrap();
    assert_eq!(message.as_text(), Some("c"));
}

#[tokio::test]
async fn queued_messages_are_sent_before_the_close() {
    let (connection, mut client) = connect(&ConnectionConfig::default(), 1 << 16);
    for n in 0..100 {
        connection.outbound().send(n.to_string()).await.unwrap();
    }
    drop(connection);
    for n in 0..100 {
        assert_eq!(client.next().await.unwrap().unwrap().as_text(), Some(n.to_string().as_str()));
    }
    assert!(client.next().await.unwrap().unwrap().is_close());
}

#[tokio::test]
async fn a_close_by_the_peer_ends_the_connection() {
    let (mut connection, mut client) = connect(&ConnectionConfig::default(), 1 << 16);
    let closing = tokio::spawn(async move { client.close().await });
    assert!(connection.next().await.is_none());
    drop(connection);
    closing.await.unwrap().unwrap();
}

#[tokio::test]
async fn message_over_the_limit_is_reported_and_skipped() {
    let config = ConnectionConfig {
        message_bytes: 1000,
        oversize_slack: 1000,
        ..ConnectionConfig::default()
    };
    let (mut connection, mut client) = connect(&config, 1 << 16);
    client.send(Message::text("x".repeat(1001))).await.unwrap();
    client.send(Message::text("ok")).await.unwrap();
    let error = connection.next().await.unwrap().unwrap_err();
    assert!(matches!(error, TransportError::TooLong { len: 1001, limit: 1000 }), "{error}");
    assert_eq!(connection.next().await.unwrap().unwrap(), "ok");

    client.send(Message::text("x".repeat(2001))).await.unwrap();
    let error = connection.next().await.unwrap().unwrap_err();
    assert!(matches!(error, TransportError::TooLongToSkip { limit: 1000 }), "{error}");
    assert!(connection.next().await.is_none());
    drop(connection);
    assert!(client.next().await.unwrap().unwrap().is_close());
}

#[tokio::test(start_paused = true)]
async fn idle_peer_that_answers_pings_stays_connected() {
    let (mut connection, mut client) = connect(&ConnectionConfig::default(), 1 << 16);
    let reader = tokio::spawn(async move { connection.next().await.map(|m| m.unwrap()) });
    let began = Instant::now();
    for n in 1..=10 {
        // Reading a ping makes the library answer it.
        assert!(client.next().await.unwrap().unwrap().is_ping());
        client.flush().await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 30 * n);
    }
    client.send(Message::text("still here")).await.unwrap();
    assert_eq!(reader.await.unwrap().unwrap(), "still here");
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_dropped_60_s_after_the_ping() {
    let (mut connection, _client) = connect(&ConnectionConfig::default(), 1 << 16);
    let began = Instant::now();
    let error = connection.next().await.unwrap().unwrap_err();
    assert!(matches!(error, TransportError::Silent { .. }), "{error}");
    assert_eq!(began.elapsed(), Duration::from_secs(90));
}

#[tokio::test(start_paused = true)]
async fn peer_that_never_reads_is_bounded_and_dropped() {
    let config = ConnectionConfig {
        outbound: OutboundConfig { queue_bytes: 10_000 },
        keep_alive: Some(KeepAlive::default()),
        ..ConnectionConfig::default()
    };
    let (mut connection, _client) = connect(&config, 1000);
    let mut sent = 0;
    while connection.outbound().send(vec![b'x'; 1000]).now_or_never().is_some() {
        sent += 1;
        assert!(sent < 100, "the queue is bounded");
        tokio::task::yield_now().await;
    }
    let outbound = connection.outbound().clone();
    assert!(connection.next().await.unwrap().is_err(), "given up as silent");
    drop(connection);
    tokio::time::timeout(Duration::from_secs(6), outbound.closed()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn peer_that_pings_and_never_reads_is_blocked() {
    let config = ConnectionConfig {
        outbound: OutboundConfig { queue_bytes: 10_000 },
        ..ConnectionConfig::default()
    };
    let (mut connection, mut client) = connect(&config, 1000);
    let mut reader = tokio::spawn(async move { connection.next().await.is_some() });
    let mut pings = 0;
    // `poll_flush` of a client whose pings are not taken stays pending.
    loop {
        client.feed(Message::ping(vec![b'p'; 100])).await.unwrap();
        let flushed = tokio::time::timeout(Duration::from_millis(200), client.flush()).await;
        if flushed.is_err() {
            break;
        }
        pings += 1;
        assert!(pings < 10_000, "pongs would grow without bound");
    }
    assert!((&mut reader).now_or_never().is_none());
    reader.abort();
}

#[tokio::test]
async fn arrived_resolves_after_the_peer_answers_a_later_ping() {
    let (mut connection, mut client) = connect(&ConnectionConfig::default(), 1 << 16);
    let outbound = connection.outbound().clone();
    let reading = tokio::spawn(async move { while connection.next().await.is_some() {} });
    outbound.send("first").await.unwrap();
    let mut arrived = Box::pin(outbound.arrived());
    assert_eq!(client.next().await.unwrap().unwrap().as_text(), Some("first"));
    // The bytes of the ping may have arrived, but the client has not read it.
    assert!(arrived.as_mut().now_or_never().is_none());
    assert!(client.next().await.unwrap().unwrap().is_ping());
    client.flush().await.unwrap();
    arrived.await;
    // A side that does not read gets no pong: then written bytes count as arrived.
    let unheard = outbound.arrived();
    let not_reading = outbound.not_reading();
    unheard.await;
    outbound.arrived().await;
    drop(not_reading);
    let mut never = Box::pin(outbound.arrived());
    drop(client);
    reading.await.unwrap();
    outbound.closed().await;
    assert!(never.as_mut().now_or_never().is_none(), "the connection ended first");
}
