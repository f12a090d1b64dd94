//! Wires: ordered frames between two nodes, with flow control.
//!
//! NATS gives a sender no feedback and drops messages for a slow reader. Each end of a wire therefore grants
//! the other a window of bytes, and returns credit as frames are delivered. Frames are numbered: a wire that
//! has lost one is closed.
//!
//! Invariant: a wire delivers every frame once and in order, or it is closed, which its user sees like a
//! dropped socket. At each end at most one window of bytes waits.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_nats::{Client, Subject};
use bytes::{BufMut, Bytes, BytesMut};
use codex_exec_rpc::CloseReason;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::socket::{ENDED, GOING_AWAY, REASONS};

/// Bytes charged for a frame besides its length, so that tiny ones are bounded too.
const OVERHEAD: usize = 128;

/// The id of a wire, the same at both ends.
pub(crate) type WireId = u128;

// The first byte of a message to a node.
pub(crate) const FRAME: u8 = 0;
pub(crate) const CREDIT: u8 = 1;
pub(crate) const CLOSE: u8 = 2;

/// The NATS subject of a node.
pub(crate) fn subject_of(node: &str) -> Subject {
    Subject::from(format!("codex-rendezvous.node.{node}"))
}

/// All wires that end at this node.
#[derive(Debug)]
pub(crate) struct Wires {
    client: Client,
    own_subject: Subject,
    window: usize,
    stall: Duration,
    metrics: Arc<Metrics>,
    table: Mutex<HashMap<WireId, Entry>>,
}

#[derive(Debug)]
struct Entry {
    end: Arc<WireEnd>,
    inbound: mpsc::UnboundedSender<Bytes>,
    expected: u32,
}

/// This node's end of a wire.
#[derive(Debug)]
pub(crate) struct WireEnd {
    id: WireId,
    peer: Arc<str>,
    /// The peer's connection generation; it changes when the peer loses NATS, and its wires.
    peer_generation: AtomicU64,
    /// The environment, at the harness's end.
    environment: Option<String>,
    registration: String,
    /// Bytes that may still be sent.
    room: Semaphore,
    /// Bytes received and not released.
    held: AtomicUsize,
    reason: OnceLock<CloseReason>,
    closed: CancellationToken,
}

impl WireEnd {
    fn close(&self, reason: CloseReason) {
        let _ = self.reason.set(reason);
        self.room.close();
        self.closed.cancel();
    }

    /// Sets the peer's generation when the wire was opened.
    pub(crate) fn set_peer_generation(&self, generation: u64) {
        self.peer_generation.store(generation, Relaxed);
    }
}

impl Wires {
    pub(crate) fn new(
        client: Client,
        node: &str,
        window: usize,
        stall: Duration,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let own_subject = subject_of(node);
        Arc::new(Self { client, own_subject, window, stall, metrics, table: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<WireId, Entry>> {
        self.table.lock()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Wires whose harness is at this node.
    pub(crate) fn outbound_count(&self) -> usize {
        self.lock().values().filter(|entry| entry.end.environment.is_some()).count()
    }

    /// Opens this node's end of a wire. `environment` is set at the harness's end.
    pub(crate) fn open(
        self: &Arc<Self>,
        id: WireId,
        peer: &str,
        environment: Option<String>,
        registration: String,
    ) -> (WireSender, WireReceiver) {
        let end = Arc::new(WireEnd {
            id,
            peer: peer.into(),
            peer_generation: AtomicU64::new(0),
            environment,
            registration,
            room: Semaphore::new(self.window),
            held: AtomicUsize::new(0),
            reason: OnceLock::new(),
            closed: CancellationToken::new(),
        });
        let (sender, inbound) = mpsc::unbounded_channel();
        self.lock().insert(id, Entry { end: end.clone(), inbound: sender, expected: 0 });
        let to = subject_of(peer);
        let wires = self.clone();
        let sending =
            WireSender { end: end.clone(), wires: wires.clone(), to: to.clone(), number: 0 };
        (sending, WireReceiver { end, wires, to, inbound, unreported: 0 })
    }

    /// Handles a message about a wire from another node. Never waits.
    pub(crate) fn handle(&self, message: &Bytes, from: Option<Subject>) {
        let Some((kind, id, rest)) = parse(message) else { return };
        let mut table = self.lock();
        let Some(entry) = table.get_mut(&id) else {
            drop(table);
            // Closed here already; the other end does not know yet.
            if let (FRAME, Some(from)) = (kind, from) {
                self.publish_in_background(from, close_message(id, GOING_AWAY));
            }
            return;
        };
        match (kind, rest.len()) {
            (FRAME, 4..) => {
                let number = u32::from_be_bytes([rest[0], rest[1], rest[2], rest[3]]);
                let frame = rest.slice(4..);
                let held = entry.end.held.fetch_add(self.cost(frame.len()), Relaxed);
                let broken = number != entry.expected || held > self.window;
                entry.expected = entry.expected.wrapping_add(1);
                if broken || entry.inbound.send(frame).is_err() {
                    tracing::warn!("a wire between nodes lost frames; closing it");
                    let from = subject_of(&entry.end.peer);
                    if let Some(entry) = table.remove(&id) {
                        entry.end.close(GOING_AWAY);
                    }
                    drop(table);
                    self.publish_in_background(from, close_message(id, GOING_AWAY));
                }
            }
            (CREDIT, 4) => {
                let bytes = u32::from_be_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
                let most = self.window.saturating_sub(entry.end.room.available_permits());
                entry.end.room.add_permits(bytes.min(most));
            }
            (CLOSE, 1) => {
                let reason = REASONS.get(usize::from(rest[0])).copied().unwrap_or(ENDED);
                if let Some(entry) = table.remove(&id) {
                    entry.end.close(reason);
                }
            }
            _ => {}
        }
    }

    /// Closes a wire at this end and notifies the other.
    async fn close(&self, end: &WireEnd, to: &Subject, reason: CloseReason) {
        if self.lock().remove(&end.id).is_none() {
            return;
        }
        end.close(reason);
        let published = self.client.publish(to.clone(), close_message(end.id, reason));
        // Without NATS the other end notices by itself.
        let _ = timeout(Duration::from_secs(1), published).await;
    }

    /// Closes the wires for which `which` gives a reason.
    fn close_where(&self, which: impl Fn(&WireEnd) -> Option<CloseReason>) {
        self.lock().retain(|_, entry| match which(&entry.end) {
            Some(reason) => {
                entry.end.close(reason);
                let message = close_message(entry.end.id, reason);
                self.publish_in_background(subject_of(&entry.end.peer), message);
                false
            }
            None => true,
        });
    }

    /// Closes all wires after a loss of NATS, which loses frames in flight.
    pub(crate) fn close_all(&self) {
        self.close_where(|_| Some(GOING_AWAY));
    }

    /// Closes the wires of harnesses here, which have to connect to another node.
    pub(crate) fn close_outbound(&self) {
        self.close_where(|end| end.environment.is_some().then_some(GOING_AWAY));
    }

    /// Closes the wires to a node that is gone or has another generation.
    pub(crate) fn close_peer(&self, peer: &str, generation: Option<u64>) {
        self.close_where(|end| {
            let other = generation != Some(end.peer_generation.load(Relaxed));
            (&*end.peer == peer && other).then_some(GOING_AWAY)
        });
    }

    /// Closes the wires of harnesses here to the former home of an environment that has moved. After a new
    /// registration or a removal, the home closes the wires itself.
    pub(crate) fn close_moved(&self, environment: &str, registration: &str, home: &str) {
        self.close_where(|end| {
            let stale = end.environment.as_deref() == Some(environment)
                && end.registration == registration
                && &*end.peer != home;
            stale.then_some(GOING_AWAY)
        });
    }

    /// Whether a harness here has a wire to that environment.
    pub(crate) fn has_wire_to(&self, environment: &str) -> bool {
        self.lock().values().any(|entry| entry.end.environment.as_deref() == Some(environment))
    }

    /// The environments to which harnesses here have wires.
    pub(crate) fn environments(&self) -> BTreeSet<String> {
        self.lock().values().filter_map(|entry| entry.end.environment.clone()).collect()
    }

    /// The nodes at the other ends.
    pub(crate) fn peers(&self) -> BTreeSet<Arc<str>> {
        self.lock().values().map(|entry| entry.end.peer.clone()).collect()
    }

    fn cost(&self, len: usize) -> usize {
        (len + OVERHEAD).min(self.window)
    }

    fn publish_in_background(&self, to: Subject, message: Bytes) {
        let client = self.client.clone();
        tokio::spawn(async move {
            let _ = timeout(Duration::from_secs(1), client.publish(to, message)).await;
        });
    }
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct WireSender {
    end: Arc<WireEnd>,
    wires: Arc<Wires>,
    to: Subject,
    number: u32,
}

impl WireSender {
    pub(crate) fn end(&self) -> &Arc<WireEnd> {
        &self.end
    }

    /// Sends a frame, waiting for room; `false` if the wire is closed, or the other end gave no credit for
    /// too long and it is closed now.
    pub(crate) async fn send(&mut self, frame: &Bytes) -> bool {
        let cost = u32::try_from(self.wires.cost(frame.len())).unwrap_or(u32::MAX);
        match timeout(self.wires.stall, self.end.room.acquire_many(cost)).await {
            Ok(Ok(room)) => room.forget(),
            Ok(Err(_)) => return false,
            Err(_) => {
                self.close(GOING_AWAY).await;
                return false;
            }
        }
        let mut message = header(FRAME, self.end.id, 4 + frame.len());
        message.put_u32(self.number);
        message.put_slice(frame);
        self.number = self.number.wrapping_add(1);
        let from = self.wires.own_subject.clone();
        let sent = self.wires.client.publish_with_reply(self.to.clone(), from, message.freeze());
        tokio::select! {
            sent = sent => sent.is_ok(),
            () = self.end.closed.cancelled() => false,
        }
    }

    /// Closes the wire.
    pub(crate) async fn close(&self, reason: CloseReason) {
        self.wires.close(&self.end, &self.to, reason).await;
    }

    /// Resolves once the wire is closed.
    pub(crate) fn closed(&self) -> impl Future<Output = ()> + use<> {
        self.end.closed.clone().cancelled_owned()
    }
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct WireReceiver {
    end: Arc<WireEnd>,
    wires: Arc<Wires>,
    to: Subject,
    inbound: mpsc::UnboundedReceiver<Bytes>,
    unreported: usize,
}

impl WireReceiver {
    /// The next frame; `None` once the wire is closed and every frame was returned.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        let frame = self.inbound.recv().await?;
        self.wires.metrics.between_nodes(frame.len());
        Some(frame)
    }

    /// Returns credit for a delivered frame of this length.
    pub(crate) async fn release(&mut self, len: usize) {
        let cost = self.wires.cost(len);
        self.end.held.fetch_sub(cost, Relaxed);
        self.unreported += cost;
        // Credit is sent per quarter of the window, not for every frame.
        if self.unreported * 4 >= self.wires.window {
            let mut message = header(CREDIT, self.end.id, 4);
            message
                .put_u32(u32::try_from(std::mem::take(&mut self.unreported)).unwrap_or(u32::MAX));
            let published = self.wires.client.publish(self.to.clone(), message.freeze());
            tokio::select! {
                _ = published => {}
                () = self.end.closed.cancelled() => {}
            }
        }
    }

    /// Why the wire was closed.
    pub(crate) fn reason(&self) -> CloseReason {
        self.end.reason.get().copied().unwrap_or(GOING_AWAY)
    }
}

fn header(kind: u8, id: WireId, more: usize) -> BytesMut {
    let mut message = BytesMut::with_capacity(17 + more);
    message.put_u8(kind);
    message.put_u128(id);
    message
}

fn close_message(id: WireId, reason: CloseReason) -> Bytes {
    let mut message = header(CLOSE, id, 1);
    let number = REASONS.iter().position(|known| *known == reason).unwrap_or(0);
    message.put_u8(u8::try_from(number).unwrap_or(0));
    message.freeze()
}

fn parse(message: &Bytes) -> Option<(u8, WireId, Bytes)> {
    let id: [u8; 16] = message.get(1..17)?.try_into().ok()?;
    Some((message[0], WireId::from_be_bytes(id), message.slice(17..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_messages_round_trip() {
        for reason in REASONS {
            let message = close_message(7, reason);
            let (kind, id, rest) = parse(&message).unwrap();
            assert_eq!((kind, id, REASONS[usize::from(rest[0])]), (CLOSE, 7, reason));
        }
        assert!(parse(&Bytes::from_static(&[0; 16])).is_none());
    }
}
