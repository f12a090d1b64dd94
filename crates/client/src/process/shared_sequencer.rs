//! An [`EventSequencer`] shared between the driver, which feeds it, and its consumers, which wait for
//! events.

use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::sequencer::{EventSequencer, Need};

/// What happens when a process writes faster than its consumer reads, and its window is full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnSlowConsumer {
    /// Other processes are not affected. A server with the capability `processRetainUntilRead` retains
    /// the output that does not fit, and the client reads it again later. For any other server the client
    /// spools it to a temporary file, up to
    /// [`ClientTuning::spill_limit`](crate::ClientTuning::spill_limit), and then
    /// [stops reading](Self::HoldConnection). A process whose output was never taken does not wait: a
    /// later consumer gets [`ProcessEvent::Lost`](crate::ProcessEvent::Lost) for output that is gone.
    #[default]
    Refetch,
    /// The client does not read the connection until there is room, so the process waits, as at a full
    /// pipe, and nothing is lost; but everything else on the connection waits too. For a connection with
    /// a single process whose output is consumed.
    HoldConnection,
}

pub(crate) struct SharedSequencer {
    state: Mutex<State>,
    pub(crate) on_slow_consumer: OnSlowConsumer,
}

struct State {
    sequencer: EventSequencer,
    /// The handle was dropped.
    abandoned: bool,
    consumers: Vec<Waker>,
    /// The task that reads missed events.
    follower: Option<Waker>,
    /// The driver, if it waits for room.
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

    /// Inspects the sequencer.
    pub(crate) fn peek<R>(&self, look: impl FnOnce(&EventSequencer) -> R) -> R {
        look(&self.state.lock().sequencer)
    }

    /// Changes the sequencer and wakes its waiters.
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

    /// Takes something from the sequencer, or waits until `take` returns some.
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

    /// Waits for room for this many bytes, if the connection has to wait for it.
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

    /// Waits until the need differs from `until`; `None` when the process has ended.
    pub(crate) fn poll_need(&self, cx: &mut Context<'_>, until: Need) -> Poll<Option<Need>> {
        let mut state = self.state.lock();
        // A process that waits for acknowledgements still gets them after its handle is dropped.
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

    /// Discards events from now on. True if the process still needs acknowledgements.
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
    /// The follower's waker, if it has something to do. It may also wait for a need to go away, so every
    /// change wakes it while there is a need.
    fn take_follower(&mut self) -> Option<Waker> {
        let waits = self.sequencer.need() == Need::Nothing && self.sequencer.end().is_none();
        if waits { None } else { self.follower.take() }
    }
}
