//! Liveness: whether the peer of a connection still responds.
//!
//! A socket stays open after its network fails, and writes to it disappear in buffers, so only data from
//! the peer shows that it is alive.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{self, Instant};

use crate::outbound::Queued;

/// How long a peer counts as alive while it takes nothing and this side does not read from it.
const UNREAD_GRACE: Duration = Duration::from_secs(60);

/// The peer of a connection, for liveness checks. Does not keep the connection open.
#[derive(Debug, Clone)]
pub struct Peer {
    pub(crate) queue: mpsc::WeakUnboundedSender<Queued>,
    pub(crate) liveness: Arc<Liveness>,
}

/// What a transport knows of its peer.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    /// Whether the transport has pings. Without them, a peer lives as long as its connection.
    pings: AtomicBool,
    /// A transport's own way to ping, which bypasses the outbound queue.
    custom_ping: OnceLock<CustomPing>,
    /// Whether the transport is being read; otherwise the peer's silence means nothing.
    listening: AtomicBool,
    /// How many [`NotReading`](crate::NotReading) guards are alive.
    not_reading: AtomicIsize,
    /// Messages received, pongs included.
    heard: AtomicU64,
    /// Whether a write is under way.
    writing: AtomicBool,
    /// Writes completed.
    written: AtomicU64,
    /// The counts of messages and writes when the grace period began, and when that was.
    grace_began: Mutex<Option<((u64, u64), Instant)>>,
    /// Notified of every message received, and of the close.
    changed: Notify,
}

struct CustomPing(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for CustomPing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CustomPing")
    }
}

/// Reports activity of the peer, for transports that the caller makes.
#[derive(Debug, Clone)]
pub struct PeerActivity(pub(crate) Arc<Liveness>);

impl PeerActivity {
    /// Records that the peer answered a ping, or counts as alive without an answer.
    pub fn note(&self) {
        self.0.heard();
    }
}

impl Liveness {
    /// Sets the transport's own ping; such a transport is always read.
    pub(crate) fn set_ping(&self, ping: impl Fn() + Send + Sync + 'static) {
        let _ = self.custom_ping.set(CustomPing(Box::new(ping)));
        self.listening(true);
        self.has_pings();
    }

    pub(crate) fn has_pings(&self) {
        self.pings.store(true, Ordering::Relaxed);
    }

    pub(crate) fn listening(&self, listening: bool) {
        self.listening.store(listening, Ordering::Relaxed);
    }

    pub(crate) fn not_reading(&self, more: isize) {
        self.not_reading.fetch_add(more, Ordering::Relaxed);
    }

    fn is_read(&self) -> bool {
        self.listening.load(Ordering::Relaxed) && self.not_reading.load(Ordering::Relaxed) == 0
    }

    /// Whether a peer that is not being read still counts as alive: until [`UNREAD_GRACE`] has passed
    /// without a message from it or a write to it.
    fn is_in_grace_period(&self) -> bool {
        let counts = (self.heard.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed));
        let mut grace_began = self.grace_began.lock();
        match *grace_began {
            Some((before, since)) if before == counts => since.elapsed() < UNREAD_GRACE,
            _ => {
                *grace_began = Some((counts, Instant::now()));
                true
            }
        }
    }

    pub(crate) fn heard(&self) {
        self.heard.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    pub(crate) fn writing(&self) {
        self.writing.store(true, Ordering::Relaxed);
    }

    pub(crate) fn written(&self, all: bool) {
        self.written.fetch_add(1, Ordering::Relaxed);
        self.writing.store(!all, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self) {
        self.changed.notify_waiters();
    }
}

impl Peer {
    /// Pings the peer and waits up to `timeout` for any message from it; false if the connection has
    /// ended. A peer counts as alive without a reply if it cannot be pinged, if it takes queued output,
    /// or if this side does not read from it at present, the last for at most a minute in which it takes
    /// nothing.
    pub async fn responds_within(&self, timeout: Duration) -> bool {
        let heard = self.liveness.heard.load(Ordering::Relaxed);
        let written = self.liveness.written.load(Ordering::Relaxed);
        let writing = self.liveness.writing.load(Ordering::Relaxed);
        // No sender is held while waiting, for senders keep the connection open.
        match self.queue.upgrade() {
            Some(queue) if !queue.is_closed() => {
                if !self.liveness.pings.load(Ordering::Relaxed) {
                    return true;
                }
                match self.liveness.custom_ping.get() {
                    Some(CustomPing(ping)) => ping(),
                    None => drop(queue.send(Queued::Ping)),
                }
            }
            _ => return false,
        }
        let sign = async {
            loop {
                let changed = self.liveness.changed.notified();
                if self.liveness.heard.load(Ordering::Relaxed) != heard {
                    return true;
                }
                if self.has_ended() {
                    return false;
                }
                changed.await;
            }
        };
        time::timeout(timeout, sign).await.unwrap_or_else(|_| {
            let taken = writing && self.liveness.written.load(Ordering::Relaxed) != written;
            taken || (!self.liveness.is_read() && self.liveness.is_in_grace_period())
        })
    }

    fn has_ended(&self) -> bool {
        self.queue.upgrade().is_none_or(|queue| queue.is_closed())
    }
}
