//! Signs of life: whether whoever is at the other end of a connection still answers.
//!
//! A socket whose network has gone stays open, and what is written to it disappears in buffers, so
//! only something heard from the peer shows that it lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

use crate::outbound::Queued;

/// The peer of a connection, to be asked whether it lives. Keeps no connection open.
#[derive(Debug, Clone)]
pub struct Peer {
    pub(crate) queue: mpsc::WeakUnboundedSender<Queued>,
    pub(crate) signs: Arc<Signs>,
}

/// What a transport notes of its peer.
#[derive(Debug, Default)]
pub(crate) struct Signs {
    /// Whether the transport has pings. Without them, a peer lives as long as its connection.
    pings: AtomicBool,
    /// Whether the transport is being read: the silence of a peer that nobody listens to says nothing.
    listening: AtomicBool,
    /// How many keep the transport from being read all the same.
    deaf: AtomicIsize,
    /// Counts what was heard, pongs included.
    heard: AtomicU64,
    /// Whether a write waits for the peer's side to take what was sent before.
    writing: AtomicBool,
    /// Counts writes that were done.
    written: AtomicU64,
    /// Told of everything heard, and of the end.
    news: Notify,
}

impl Signs {
    pub(crate) fn has_pings(&self) {
        self.pings.store(true, Ordering::Relaxed);
    }

    pub(crate) fn listening(&self, listening: bool) {
        self.listening.store(listening, Ordering::Relaxed);
    }

    pub(crate) fn deaf(&self, more: isize) {
        self.deaf.fetch_add(more, Ordering::Relaxed);
    }

    fn is_listened_to(&self) -> bool {
        self.listening.load(Ordering::Relaxed) && self.deaf.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn heard(&self) {
        self.heard.fetch_add(1, Ordering::Relaxed);
        self.news.notify_waiters();
    }

    pub(crate) fn writing(&self) {
        self.writing.store(true, Ordering::Relaxed);
    }

    pub(crate) fn written(&self, all: bool) {
        self.written.fetch_add(1, Ordering::Relaxed);
        self.writing.store(!all, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self) {
        self.news.notify_waiters();
    }
}

impl Peer {
    /// Pings the peer and waits until it is heard, for at most `patience`; false once the connection
    /// has ended. A peer that cannot be pinged, or whose messages this side does not read just now,
    /// counts as alive, and so does one that is behind and takes what waits for it.
    pub async fn answers(&self, patience: Duration) -> bool {
        let heard = self.signs.heard.load(Ordering::Relaxed);
        let written = self.signs.written.load(Ordering::Relaxed);
        let writing = self.signs.writing.load(Ordering::Relaxed);
        // No sender is held while waiting, for senders keep the connection open.
        match self.queue.upgrade() {
            Some(queue) if !queue.is_closed() => {
                if !self.signs.pings.load(Ordering::Relaxed) {
                    return true;
                }
                let _ = queue.send(Queued::Ping);
            }
            _ => return false,
        }
        let sign = async {
            loop {
                let news = self.signs.news.notified();
                if self.signs.heard.load(Ordering::Relaxed) != heard {
                    return true;
                }
                if self.has_ended() {
                    return false;
                }
                news.await;
            }
        };
        timeout(patience, sign).await.unwrap_or_else(|_| {
            let taken = writing && self.signs.written.load(Ordering::Relaxed) != written;
            !self.signs.is_listened_to() || taken
        })
    }

    fn has_ended(&self) -> bool {
        self.queue.upgrade().is_none_or(|queue| queue.is_closed())
    }
}
