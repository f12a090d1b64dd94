//! Two connections joined in memory.

use codex_exec_rpc::{Closed, Connection, ConnectionConfig, OutboundConfig};
use futures_util::FutureExt;

fn small() -> ConnectionConfig {
    ConnectionConfig {
        outbound: OutboundConfig { queue_bytes: 1000 },
        ..ConnectionConfig::default()
    }
}

#[tokio::test]
async fn memory_pair_passes_messages_and_reports_the_close() {
    let (mut left, mut right) = Connection::pair(&ConnectionConfig::default());
    left.outbound().send("a").await.unwrap();
    right.outbound().send("b").await.unwrap();
    assert_eq!(right.next().await.unwrap().unwrap(), "a");
    assert_eq!(left.next().await.unwrap().unwrap(), "b");
    drop(left);
    assert!(right.next().await.is_none());
    assert_eq!(right.outbound().send("c").await, Err(Closed));
}

#[tokio::test]
async fn a_full_queue_makes_the_sender_wait_until_the_peer_reads() {
    let (left, mut right) = Connection::pair(&small());
    left.outbound().send(vec![b'x'; 600]).await.unwrap();
    let second = left.outbound().send(vec![b'y'; 600]);
    tokio::pin!(second);
    assert!(second.as_mut().now_or_never().is_none());
    right.next().await.unwrap().unwrap();
    second.await.unwrap();
    assert_eq!(right.next().await.unwrap().unwrap()[0], b'y');
}

#[tokio::test]
async fn one_message_larger_than_the_queue_passes_alone() {
    let (left, mut right) = Connection::pair(&small());
    left.outbound().send(vec![b'x'; 5000]).await.unwrap();
    assert!(left.outbound().send("y").now_or_never().is_none());
    assert_eq!(right.next().await.unwrap().unwrap().len(), 5000);
}

#[tokio::test]
async fn tiny_messages_are_bounded_in_number() {
    let (left, _right) = Connection::pair(&small());
    let sent = (0..100).take_while(|_| left.outbound().send("").now_or_never().is_some()).count();
    assert!((1..=1000 / 100).contains(&sent), "{sent}");
}

#[tokio::test]
async fn sender_waiting_for_room_fails_when_the_peer_closes() {
    let (left, right) = Connection::pair(&small());
    left.outbound().send(vec![b'x'; 5000]).await.unwrap();
    let waiting = tokio::spawn({
        let outbound = left.outbound().clone();
        async move { outbound.send("y").await }
    });
    drop(right);
    assert_eq!(waiting.await.unwrap(), Err(Closed));
}
