//! Subscriptions to notifications, each with its own bounded queue.
//!
//! Invariant: a subscription that is not read costs its queue and nothing else; notifications that do
//! not fit are counted, and the stream reports the count at that position.

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use codex_exec_server_protocol::{DecodeLimits, Incoming, Notification};
use futures_util::Stream;
use parking_lot::Mutex;

use crate::error::{ExecServerError, Lost};

/// A stream of the notifications of one kind, from
/// [`ExecServerClient::subscribe`](crate::ExecServerClient::subscribe). Ends when the client closes.
///
/// Notifications are bound to a connection: after a reconnect, the request that causes them has to be
/// sent again, as [`Files::watch`](crate::Files::watch) does.
pub struct Notifications<N: Notification> {
    queue: Arc<Mutex<Queue>>,
    notification: PhantomData<fn(N)>,
}

struct Queue {
    items: VecDeque<Item>,
    capacity: usize,
    ended: bool,
    waker: Option<Waker>,
}

enum Item {
    Message(Bytes),
    Dropped(u64),
}

#[derive(Default)]
pub(crate) struct Subscriptions {
    subscriptions: Mutex<Vec<Subscription>>,
}

struct Subscription {
    name: &'static str,
    queue: Weak<Mutex<Queue>>,
}

impl Subscriptions {
    pub(crate) fn subscribe<N: Notification>(&self, capacity: usize) -> Notifications<N> {
        let queue = Arc::new(Mutex::new(Queue {
            items: VecDeque::new(),
            capacity: capacity.max(1),
            ended: false,
            waker: None,
        }));
        let mut subscriptions = self.subscriptions.lock();
        subscriptions.retain(|subscription| subscription.queue.strong_count() > 0);
        subscriptions.push(Subscription { name: N::NAME, queue: Arc::downgrade(&queue) });
        Notifications { queue, notification: PhantomData }
    }

    /// Queues a notification for every subscription to its name.
    pub(crate) fn publish(&self, name: &str, message: &Bytes) {
        for subscription in
            self.subscriptions.lock().iter().filter(|subscription| subscription.name == name)
        {
            if let Some(queue) = subscription.queue.upgrade() {
                queue.lock().push(message);
            }
        }
    }

    pub(crate) fn end(&self) {
        for subscription in self.subscriptions.lock().drain(..) {
            if let Some(queue) = subscription.queue.upgrade() {
                let mut queue = queue.lock();
                queue.ended = true;
                queue.wake();
            }
        }
    }
}

impl Queue {
    fn push(&mut self, message: &Bytes) {
        if self.items.len() < self.capacity {
            self.items.push_back(Item::Message(message.clone()));
        } else if let Some(Item::Dropped(count)) = self.items.back_mut() {
            *count += 1;
        } else {
            self.items.push_back(Item::Dropped(1));
        }
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl<N: Notification> Stream for Notifications<N> {
    type Item = Result<N::Params, ExecServerError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut queue = self.queue.lock();
        match queue.items.pop_front() {
            Some(Item::Message(message)) => Poll::Ready(Some(parse::<N>(&message))),
            Some(Item::Dropped(count)) => {
                Poll::Ready(Some(Err(Lost::Notifications { name: N::NAME, count }.into())))
            }
            None if queue.ended => Poll::Ready(None),
            None => {
                queue.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

fn parse<N: Notification>(message: &[u8]) -> Result<N::Params, ExecServerError> {
    let bad = |detail: String| ExecServerError::protocol(format!("reading {}", N::NAME), detail);
    match Incoming::parse(message, &DecodeLimits::default()) {
        Ok(Incoming::Notification { params, .. }) => {
            codex_exec_server_protocol::parse_params(params).map_err(|error| bad(error.message))
        }
        Ok(_) => Err(bad("not a notification".to_owned())),
        Err(error) => Err(bad(error.to_string())),
    }
}

impl<N: Notification> fmt::Debug for Notifications<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifications").field("name", &N::NAME).finish_non_exhaustive()
    }
}
