//! One interface to both kinds of endpoint of the relay core, for the pump.

use std::time::Instant;

use bytes::Bytes;
use codex_exec_relay_core::{
    Event, Executor, FrameError, Generation, Harness, SendError, StreamId, Verdict,
};

/// An endpoint of the relay core.
pub(crate) trait Endpoint: Send {
    fn handle_connected(&mut self, now: Instant);
    fn handle_disconnected(&mut self, now: Instant);
    fn handle_frame(&mut self, now: Instant, bytes: Bytes) -> Result<(), FrameError>;
    fn handle_timeout(&mut self, now: Instant);
    /// Returns whether the stream still waited for the verdict.
    fn authorize(
        &mut self,
        now: Instant,
        stream: &StreamId,
        which: Generation,
        verdict: Verdict,
    ) -> bool;
    fn send(&mut self, stream: &StreamId, message: Bytes) -> Result<(), SendError>;
    fn close(&mut self, stream: &StreamId);
    fn reset(&mut self, stream: &StreamId, reason: &str);
    /// Checks that the peer is alive. False if this peer may not respond.
    fn probe(&mut self, stream: &StreamId) -> bool;
    /// Sends a heartbeat while this side reads nothing.
    fn heartbeat(&mut self);
    fn poll_transmit(&mut self, now: Instant) -> Option<Bytes>;
    fn poll_event(&mut self) -> Option<Event>;
    fn poll_timeout(&self) -> Option<Instant>;
}

/// The methods that have the same name and signature in both.
macro_rules! delegate_to_inherent {
    () => {
        fn handle_connected(&mut self, now: Instant) {
            self.handle_connected(now);
        }
        fn handle_disconnected(&mut self, now: Instant) {
            self.handle_disconnected(now);
        }
        fn handle_frame(&mut self, now: Instant, bytes: Bytes) -> Result<(), FrameError> {
            self.handle_frame(now, bytes)
        }
        fn handle_timeout(&mut self, now: Instant) {
            self.handle_timeout(now);
        }
        fn poll_transmit(&mut self, now: Instant) -> Option<Bytes> {
            self.poll_transmit(now)
        }
        fn poll_event(&mut self) -> Option<Event> {
            self.poll_event()
        }
        fn poll_timeout(&self) -> Option<Instant> {
            self.poll_timeout()
        }
    };
}

impl Endpoint for Executor {
    delegate_to_inherent!();

    fn authorize(
        &mut self,
        now: Instant,
        stream: &StreamId,
        which: Generation,
        verdict: Verdict,
    ) -> bool {
        let in_time = self.authorize(now, stream, which, verdict).is_ok();
        if !in_time {
            tracing::debug!(%stream, "the verdict on a harness's key came too late");
        }
        in_time
    }
    fn send(&mut self, stream: &StreamId, message: Bytes) -> Result<(), SendError> {
        self.send(stream, message)
    }
    fn close(&mut self, stream: &StreamId) {
        self.close(stream);
    }
    fn reset(&mut self, stream: &StreamId, reason: &str) {
        self.reset(stream, reason);
    }
    fn probe(&mut self, stream: &StreamId) -> bool {
        self.probe(stream)
    }
    /// An executor resets a stream that blocks reading, so it never pauses for long.
    fn heartbeat(&mut self) {}
}

/// A harness has one stream and no verdicts.
impl Endpoint for Harness {
    delegate_to_inherent!();

    fn authorize(&mut self, _: Instant, _: &StreamId, _: Generation, _: Verdict) -> bool {
        false
    }
    fn send(&mut self, _: &StreamId, message: Bytes) -> Result<(), SendError> {
        self.send(message)
    }
    fn close(&mut self, _: &StreamId) {
        self.close();
    }
    fn reset(&mut self, _: &StreamId, reason: &str) {
        self.reset(reason);
    }
    /// Only servers check their peers.
    fn probe(&mut self, _: &StreamId) -> bool {
        false
    }
    fn heartbeat(&mut self) {
        self.heartbeat();
    }
}
