//! A [`EventSequencer`] shared between the connection, which feeds it, and its consumers, who wait for it.

use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::sequencer::{EventSequencer, Need};

/// What happens when output comes faster than it is taken and the process's window is full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnSlowConsumer {
    /// Other processes go on. A server with the capability `processRetainUntilRead` keeps what does
    /// not fit, and it is fetched again later. With any other it waits in a temporary file on this
    /// side, up to [`ClientTuning::spill_limit`](crate::ClientTuning::spill_limit); beyond that the
    /// connection is [held](Self::HoldConnection). If nobody has ever taken output the process does not wait:
    /// what is no longer there when somebody does is told as
    /// [`ProcessEvent::Lost`](crate::ProcessEvent::Lost).
    #[default]
    Refetch,
    /// The connection is not read until there is room, so that in the end the process waits, as at
    /// a full pipe, and nothing is ever lost; but everything else on the connection waits too.
    /// For a connection with a single process, whose output is taken.
    HoldConnection,
}

pub(crate) struct SharedSequencer {
    state: Mutex<State>,
    pub(crate) on_slow_consumer: OnSlowConsumer,
}

struct State {
    sequencer: EventSequencer,
    /// Nobody will look at it any more.
    abandoned: bool,
    consumers: Vec<Waker>,
    /// The task that reads.
    follower: Option<Waker>,
    /// The connection, held for room.
    holder: Option<Waker>,
}

impl SharedSequencer {
    pub(crate) fn new(sequencer: EventSequencer, on_slow_consumer: OnSlowConsumer) -> Self {
        let state = State {
            sequencer,
            abandoned: false,
            consumers: Vec::new(),
            follower: None,
            holder: None,
        };
        Self { state: Mutex::new(state), on_slow_consumer }
    }

    /// Looks at it.
    pub(crate) fn peek<R>(&self, look: impl FnOnce(&EventSequencer) -> R) -> R {
        look(&self.state.lock().sequencer)
    }

    /// Feeds it, and wakes whoever waits.
    pub(crate) fn feed<R>(&self, change: impl FnOnce(&mut EventSequencer) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state.sequencer);
        let consumers = std::mem::take(&mut state.consumers);
        let follower = state.take_follower();
        drop(state);
        consumers.into_iter().for_each(Waker::wake);
        if let Some(follower) = follower {
            follower.wake();
        }
        result
    }

    /// Takes something out, or waits until there is something.
    pub(crate) fn poll_take<R>(
        &self,
        cx: &mut Context<'_>,
        take: impl FnOnce(&mut EventSequencer) -> Option<R>,
    ) -> Poll<R> {
        let mut state = self.state.lock();
        let Some(result) = take(&mut state.sequencer) else {
            if !state.consumers.iter().any(|waker| waker.will_wake(cx.waker())) {
                state.consumers.push(cx.waker().clone());
            }
            return Poll::Pending;
        };
        let (follower, holder) = (state.take_follower(), state.holder.take());
        drop(state);
        for waker in [follower, holder].into_iter().flatten() {
            waker.wake();
        }
        Poll::Ready(result)
    }

    /// Waits for room for that many bytes, if the connection is to be held.
    pub(crate) fn poll_room(&self, cx: &mut Context<'_>, len: usize) -> Poll<()> {
        let mut state = self.state.lock();
        if state.abandoned
            || !state
                .sequencer
                .holds_connection(len, self.on_slow_consumer == OnSlowConsumer::HoldConnection)
        {
            return Poll::Ready(());
        }
        state.holder = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Waits until a read is wanted; `None` when there is nothing more to follow.
    pub(crate) fn poll_need(&self, cx: &mut Context<'_>, until: Need) -> Poll<Option<Need>> {
        let mut state = self.state.lock();
        // An abandoned process that waits for acknowledgements is followed on, so that it can go on.
        let done = state.abandoned && !state.sequencer.acknowledges();
        if done || state.sequencer.end().is_some() {
            return Poll::Ready(None);
        }
        match state.sequencer.need() {
            need if need != until => Poll::Ready(Some(need)),
            _ => {
                state.follower = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.state.lock().abandoned
    }

    /// Nobody takes events any more. True if they still have to come here.
    pub(crate) fn abandon(&self) -> bool {
        let mut state = self.state.lock();
        state.abandoned = true;
        state.sequencer.delivery.discard_all();
        let goes_on = state.sequencer.acknowledges() && state.sequencer.end().is_none();
        let wakers = [state.follower.take(), state.holder.take()];
        drop(state);
        wakers.into_iter().flatten().for_each(Waker::wake);
        goes_on
    }
}

impl State {
    /// The follower's waker, if it has something to do now. What it waits for may be that a need
    /// goes away, so it is woken on every change while there is one.
    fn take_follower(&mut self) -> Option<Waker> {
        let waits = self.sequencer.need() == Need::Nothing && self.sequencer.end().is_none();
        if waits { None } else { self.follower.take() }
    }
}
