//! The routing table of one environment: which harness owns which stream. Pure, without sockets.
//!
//! Invariant: a stream has one owner, the harness that claimed it, and its frames pass only between that
//! harness and the environment. A stream that is not in the table does not exist.
//!
//! ```text
//!            resume or handshake of a harness
//!   (none) ────────────────────────────────▶ attached ──reset by either side──▶ (none)
//!                                              │    ▲
//!            the harness's socket is lost,     │    │ resume of the same harness
//!            and both sides acknowledge        ▼    │
//!                                             orphaned ──grace over──▶ (none), with a reset
//! ```

use std::collections::HashMap;
use std::sync::Arc;

use codex_exec_relay_core::{BodyKind, Peek};
use tokio::time::Instant;

/// One socket of a harness.
pub(crate) type HarnessSocketId = u64;

/// What to do with a frame of a harness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FromHarness {
    Forward,
    /// Drop it and count it.
    Drop(Dropped),
    /// Send the harness a reset with this reason.
    Refuse(&'static str),
}

/// What to do with a frame of the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FromExecutor {
    To(HarnessSocketId),
    /// The same, and it ends a stream whose handshake was never answered.
    RefusesHandshake(HarnessSocketId),
    Drop(Dropped),
    /// No harness has claimed the stream.
    Unknown,
}

/// Why a frame was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// Not a frame.
    Invalid,
    /// The stream belongs to another harness.
    NotOwned,
    /// The stream is unknown, and the frame needs no reply.
    Unknown,
    /// The other side is disconnected for now.
    Away,
}

#[derive(Debug)]
struct Entry {
    harness: Arc<str>,
    socket: Option<HarnessSocketId>,
    orphaned: Option<Instant>,
    harness_acks: bool,
    executor_acks: bool,
    /// The harness has sent a handshake that the environment has not answered.
    handshakes: bool,
}

impl Entry {
    /// Whether both sides acknowledge, so that the stream survives a dropped socket.
    fn survives(&self) -> bool {
        self.harness_acks && self.executor_acks
    }
}

/// Limits on the number of streams.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableLimits {
    pub streams: usize,
    pub streams_per_socket: usize,
}

/// The streams of one environment.
#[derive(Debug)]
pub(crate) struct Table {
    limits: TableLimits,
    streams: HashMap<Box<str>, Entry>,
}

impl Table {
    pub(crate) fn new(limits: TableLimits) -> Self {
        Self { limits, streams: HashMap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether the harness has streams here, attached or orphaned.
    pub(crate) fn knows(&self, harness: &str) -> bool {
        self.streams.values().any(|entry| &*entry.harness == harness)
    }

    pub(crate) fn harness_frame(
        &mut self,
        socket: HarnessSocketId,
        harness: &Arc<str>,
        frame: Peek<'_>,
    ) -> FromHarness {
        let claims = matches!(frame.kind, BodyKind::Resume | BodyKind::Handshake);
        if let Some(entry) = self.streams.get_mut(frame.stream_id) {
            if entry.socket != Some(socket) {
                // Resumed over another socket, perhaps before the loss of the old one was noticed.
                if entry.harness != *harness || frame.kind != BodyKind::Resume {
                    return FromHarness::Drop(Dropped::NotOwned);
                }
                entry.socket = Some(socket);
                entry.orphaned = None;
            }
            entry.harness_acks |= frame.acknowledges;
            match frame.kind {
                // Another handshake on a stream that is open ends it.
                BodyKind::Handshake => entry.handshakes = true,
                BodyKind::Reset => drop(self.streams.remove(frame.stream_id)),
                _ => {}
            }
            return FromHarness::Forward;
        }
        match frame.kind {
            _ if claims => {}
            BodyKind::Ack | BodyKind::Reset => return FromHarness::Drop(Dropped::Unknown),
            _ => return FromHarness::Refuse("unknown_stream"),
        }
        let own = self.streams.values().filter(|entry| entry.socket == Some(socket)).count();
        if self.streams.len() >= self.limits.streams || own >= self.limits.streams_per_socket {
            return FromHarness::Refuse("too_many_streams");
        }
        let entry = Entry {
            harness: harness.clone(),
            socket: Some(socket),
            orphaned: None,
            harness_acks: frame.acknowledges,
            // A resume with an acknowledgement continues a stream that another node, or this one before
            // a restart, has routed: its environment acknowledges.
            executor_acks: frame.acknowledges && frame.kind == BodyKind::Resume,
            handshakes: frame.kind == BodyKind::Handshake,
        };
        self.streams.insert(frame.stream_id.into(), entry);
        FromHarness::Forward
    }

    pub(crate) fn executor_frame(&mut self, frame: Peek<'_>) -> FromExecutor {
        let Some(entry) = self.streams.get_mut(frame.stream_id) else {
            return match frame.kind {
                BodyKind::Ack | BodyKind::Reset => FromExecutor::Drop(Dropped::Unknown),
                _ => FromExecutor::Unknown,
            };
        };
        entry.executor_acks |= frame.acknowledges;
        let (socket, handshakes) = (entry.socket, entry.handshakes);
        match frame.kind {
            BodyKind::Reset => drop(self.streams.remove(frame.stream_id)),
            BodyKind::Handshake | BodyKind::Data => entry.handshakes = false,
            _ => {}
        }
        match socket {
            None => FromExecutor::Drop(Dropped::Away),
            Some(socket) if handshakes && frame.kind == BodyKind::Reset => {
                FromExecutor::RefusesHandshake(socket)
            }
            Some(socket) => FromExecutor::To(socket),
        }
    }

    /// Removes a stream that the service ends.
    pub(crate) fn remove(&mut self, stream: &str) {
        self.streams.remove(stream);
    }

    /// Detaches a harness's socket. Returns the streams that end with it; others wait.
    pub(crate) fn socket_gone(&mut self, socket: HarnessSocketId, now: Instant) -> Vec<Box<str>> {
        for entry in self.streams.values_mut().filter(|entry| entry.socket == Some(socket)) {
            entry.socket = None;
            entry.orphaned = Some(now);
        }
        self.take(|entry| entry.socket.is_none() && !entry.survives())
    }

    /// Removes the streams that have waited for their harness since `before` or longer.
    pub(crate) fn expire(&mut self, before: Instant) -> Vec<Box<str>> {
        self.take(|entry| entry.orphaned.is_some_and(|since| since <= before))
    }

    /// Removes all streams of a harness's socket.
    pub(crate) fn revoke_socket(&mut self, socket: HarnessSocketId) -> Vec<Box<str>> {
        self.take(|entry| entry.socket == Some(socket))
    }

    /// Removes the streams that end with the environment's socket, with the sockets to notify.
    pub(crate) fn executor_gone(&mut self) -> Vec<(HarnessSocketId, Box<str>)> {
        self.take_attached(|entry| !entry.survives())
    }

    /// Removes all streams, with the sockets to notify.
    pub(crate) fn clear(&mut self) -> Vec<(HarnessSocketId, Box<str>)> {
        self.take_attached(|_| true)
    }

    fn take(&mut self, which: impl Fn(&Entry) -> bool) -> Vec<Box<str>> {
        self.streams.extract_if(|_, entry| which(entry)).map(|(stream, _)| stream).collect()
    }

    fn take_attached(
        &mut self,
        which: impl Fn(&Entry) -> bool,
    ) -> Vec<(HarnessSocketId, Box<str>)> {
        self.streams
            .extract_if(|_, entry| which(entry))
            .filter_map(|(stream, entry)| Some((entry.socket?, stream)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn table() -> (Table, Arc<str>, Arc<str>) {
        let table = Table::new(TableLimits { streams: 3, streams_per_socket: 2 });
        (table, "ann".into(), "bob".into())
    }

    fn frame(stream_id: &str, kind: BodyKind) -> Peek<'_> {
        Peek { stream_id, kind, acknowledges: kind == BodyKind::Ack }
    }

    #[test]
    fn stream_belongs_to_the_harness_that_claimed_it() {
        let (mut table, ann, bob) = table();
        let data = |id| frame(id, BodyKind::Data);
        assert_eq!(table.harness_frame(1, &ann, data("s")), FromHarness::Refuse("unknown_stream"));
        assert_eq!(table.executor_frame(data("s")), FromExecutor::Unknown);
        let claim = frame("s", BodyKind::Resume);
        assert_eq!(table.harness_frame(1, &ann, claim), FromHarness::Forward);
        assert_eq!(table.harness_frame(1, &ann, data("s")), FromHarness::Forward);
        for kind in [BodyKind::Data, BodyKind::Resume, BodyKind::Handshake, BodyKind::Reset] {
            let verdict = table.harness_frame(2, &bob, frame("s", kind));
            assert_eq!(verdict, FromHarness::Drop(Dropped::NotOwned), "{kind:?}");
        }
        assert_eq!(table.executor_frame(data("s")), FromExecutor::To(1));
        assert_eq!(table.executor_frame(frame("s", BodyKind::Reset)), FromExecutor::To(1));
        assert_eq!(table.executor_frame(data("s")), FromExecutor::Unknown);
    }

    #[test]
    fn stream_limits_are_enforced() {
        let (mut table, ann, bob) = table();
        let claim = |id| frame(id, BodyKind::Resume);
        let refused = FromHarness::Refuse("too_many_streams");
        assert_eq!(table.harness_frame(1, &ann, claim("a")), FromHarness::Forward);
        assert_eq!(table.harness_frame(1, &ann, claim("b")), FromHarness::Forward);
        assert_eq!(table.harness_frame(1, &ann, claim("c")), refused);
        assert_eq!(table.harness_frame(2, &bob, claim("c")), FromHarness::Forward);
        assert_eq!(table.harness_frame(2, &bob, claim("d")), refused);
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn only_streams_acking_both_ways_survive_a_socket() {
        let now = Instant::now();
        let (mut table, ann, _) = table();
        for stream in ["plain", "acking"] {
            table.harness_frame(1, &ann, frame(stream, BodyKind::Resume));
        }
        table.harness_frame(1, &ann, frame("acking", BodyKind::Ack));
        table.harness_frame(1, &ann, frame("plain", BodyKind::Ack));
        table.executor_frame(frame("acking", BodyKind::Ack));
        assert_eq!(table.executor_gone(), [(1, "plain".into())]);
        assert_eq!(table.socket_gone(1, now), []);
        assert_eq!(
            table.executor_frame(frame("acking", BodyKind::Data)),
            FromExecutor::Drop(Dropped::Away)
        );
        // Resumed over another socket.
        assert_eq!(
            table.harness_frame(2, &ann, frame("acking", BodyKind::Resume)),
            FromHarness::Forward
        );
        assert_eq!(table.executor_frame(frame("acking", BodyKind::Data)), FromExecutor::To(2));
        // Not resumed again.
        assert_eq!(table.socket_gone(2, now), []);
        assert_eq!(table.expire(now - Duration::from_secs(1)), []);
        assert_eq!(table.expire(now), ["acking".into()]);
    }

    #[test]
    fn resumed_stream_counts_as_acknowledging() {
        let (mut table, ann, _) = table();
        let again = Peek { stream_id: "s", kind: BodyKind::Resume, acknowledges: true };
        assert_eq!(table.harness_frame(1, &ann, again), FromHarness::Forward);
        assert_eq!(table.executor_gone(), []);
        assert_eq!(table.socket_gone(1, Instant::now()), []);
    }

    #[test]
    fn stream_without_acks_ends_with_its_harness() {
        let (mut table, ann, _) = table();
        table.harness_frame(1, &ann, frame("s", BodyKind::Handshake));
        assert!(table.knows("ann") && !table.knows("bob"));
        assert_eq!(table.socket_gone(1, Instant::now()), ["s".into()]);
        assert!(!table.knows("ann"));
    }
}
