//! Peers that have not initialized: silent, slow and many.

use std::time::Duration;

use codex_exec_serving::{EntryConfig, Server, WebSocketListener};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use crate::support::*;

fn strict(change: impl FnOnce(&mut EntryConfig)) -> Server {
    server_with(|config| {
        config.entry.waiting = 8;
        config.entry.waiting_grace = Duration::from_millis(20);
        change(&mut config.entry);
    })
}

/// Whether the server ends this connection.
async fn is_closed(socket: &mut (impl AsyncReadExt + Unpin)) -> bool {
    let mut rest = Vec::new();
    // An end or a reset.
    timeout(PATIENCE, socket.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn sessions_and_new_clients_are_served_amid_a_flood_of_silent_peers() {
    let server = strict(|_| {});
    let address = listen(&server).await;
    let mut before = Client::websocket(address).await;
    before.handshake(json!({"clientName": "before"})).await.unwrap();
    let mut silent = Vec::new();
    for round in 0..10 {
        for _ in 0..20 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut during = Client::websocket(address).await;
        during.handshake(json!({"clientName": "during"})).await.unwrap();
        for client in [&mut before, &mut during] {
            let status = client.call("environment/status", json!({})).await.unwrap();
            assert_eq!(status["status"], "ready", "round {round}");
        }
    }
    // All but the last few had to make room.
    for socket in &mut silent[..192] {
        assert!(is_closed(socket).await);
    }
    assert!(before.call("environment/status", json!({})).await.is_ok());
    server.shut_down().await;
}

#[tokio::test]
async fn peers_that_do_not_initialize_in_time_are_closed() {
    let server = strict(|entry| {
        entry.waiting = 100;
        entry.initialize_timeout = Duration::from_millis(300);
    });
    let address = listen(&server).await;
    let mut held = Client::websocket(address).await;
    held.handshake(json!({"clientName": "held"})).await.unwrap();
    let mut silent = TcpStream::connect(address).await.unwrap();
    assert!(is_closed(&mut silent).await, "silent");
    let mut health = TcpStream::connect(address).await.unwrap();
    health.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert!(is_closed(&mut health).await, "asks for health and stays");
    let (slow, mut writing) = TcpStream::connect(address).await.unwrap().into_split();
    let mut slow = slow;
    let trickle = tokio::spawn(async move {
        for byte in b"GET / HTTP/1.1\r\nHost: x\r\nX: ".iter().chain(std::iter::repeat(&b'x')) {
            if writing.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(is_closed(&mut slow).await, "slow");
    trickle.abort();
    // Websockets: one that says nothing, one whose requests fail, one that only pings.
    let mut idle = Client::websocket(address).await;
    assert_eq!(idle.text().await, None);
    let mut talks = Client::websocket(address).await;
    let answered = talks.call("process/list", json!({})).await;
    assert!(answered.is_err());
    assert_eq!(talks.text().await, None);
    // The one that has initialized stays.
    assert!(held.call("environment/status", json!({})).await.is_ok());
    server.shut_down().await;
}

#[tokio::test]
async fn connections_beyond_the_limit_get_503() {
    let server = strict(|entry| entry.connections = 3);
    let address = listen(&server).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = Client::websocket(address).await;
        client.handshake(json!({"clientName": "one"})).await.unwrap();
        clients.push(client);
    }
    for _ in 0..5 {
        let mut refused = TcpStream::connect(address).await.unwrap();
        let mut answer = Vec::new();
        timeout(PATIENCE, refused.read_to_end(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 503 "), "{answer:?}");
    }
    clients.truncate(2);
    // Once one has gone, there is room.
    loop {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let mut answer = [0; 12];
        if socket.read_exact(&mut answer).await.is_ok() && answer == *b"HTTP/1.1 200" {
            break;
        }
    }
    for client in &mut clients {
        assert!(client.call("environment/status", json!({})).await.is_ok());
    }
    server.shut_down().await;
}

#[tokio::test]
async fn a_unix_socket_serves_and_is_removed_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let server = server();
    let listener = WebSocketListener::bind_unix(&path).unwrap();
    assert_eq!(listener.url().unwrap().to_string(), format!("unix:{}", path.display()));
    let serving = server.clone();
    let serving = tokio::spawn(async move { listener.serve(&serving).await });
    let mut socket = UnixStream::connect(&path).await.unwrap();
    socket.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    socket.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, *b"HTTP/1.1 200");
    server.shut_down().await;
    serving.await.unwrap();
    assert!(!path.exists());
}
