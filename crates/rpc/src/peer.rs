//! Liveness of life: whether whoever is at the other end of a connection still answers.
//!
//! A socket whose network has gone stays open, and what is written to it disappears in buffers, so
//! only something heard from the peer shows that it lives.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{self, Instant};

use crate::outbound::Queued;

/// How long a peer counts as alive that takes nothing, and whose messages this side does not read.
const UNREAD_GRACE: Duration = Duration::from_secs(60);

/// The peer of a connection, to be asked whether it lives. Keeps no connection open.
#[derive(Debug, Clone)]
pub struct Peer {
    pub(crate) queue: mpsc::WeakUnboundedSender<Queued>,
    pub(crate) liveness: Arc<Liveness>,
}

/// What a transport notes of its peer.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    /// Whether the transport has pings. Without them, a peer lives as long as its connection.
    pings: AtomicBool,
    /// How a transport pings that has its own way, past what waits to be sent.
    custom_ping: OnceLock<CustomPing>,
    /// Whether the transport is being read: the silence of a peer that nobody listens to says nothing.
    listening: AtomicBool,
    /// How many keep the transport from being read all the same.
    not_reading: AtomicIsize,
    /// Counts what was heard, pongs included.
    heard: AtomicU64,
    /// Whether a write waits for the peer's side to take what was sent before.
    writing: AtomicBool,
    /// Counts writes that were done.
    written: AtomicU64,
    /// What had been heard and written when the peer was first excused with these counts, and when.
    grace_began: Mutex<Option<((u64, u64), Instant)>>,
    /// Told of everything heard, and of the end.
    changed: Notify,
}

struct CustomPing(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for CustomPing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CustomPing")
    }
}

/// Where a transport of the caller's making notes that its peer was heard.
#[derive(Debug, Clone)]
pub struct PeerActivity(pub(crate) Arc<Liveness>);

impl PeerActivity {
    /// The peer has answered a ping, or counts as alive without an answer.
    pub fn note(&self) {
        self.0.heard();
    }
}

impl Liveness {
    /// The transport pings by this, and is always read.
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

    /// Whether a peer that nobody listens to may still count as alive: until it was found for
    /// [`UNREAD_GRACE`] that nothing comes from it and nothing goes to it.
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
    /// Pings the peer and waits until it is heard, for at most `timeout`; false once the connection
    /// has ended. A peer that cannot be pinged counts as alive, and so does one that is behind and takes
    /// what waits for it. So does one whose messages this side does not read just now, until it was
    /// asked about for a minute in which it took nothing either.
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
