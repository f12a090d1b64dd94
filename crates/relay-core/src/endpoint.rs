//! The streams on one physical socket, for both kinds of endpoint.
//!
//! Invariant: a stream with something to send is in the ring exactly once, so streams take turns frame by
//! frame, and each waits for at most one frame of every other stream.

pub(crate) mod executor;
pub(crate) mod harness;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use bytes::Bytes;

use crate::config::{Config, ConfigError};
use crate::error::{CloseCause, ProtocolError, SendError};
use crate::event::Event;
use crate::frame::{Body, Frame};
use crate::id::StreamId;
use crate::stream::{Stream, StreamStats};

/// The reason in every reset that an endpoint sends by itself; it reveals nothing to the peer.
pub const PROTOCOL_ERROR: &str = "noise_relay_protocol_error";
/// The reason in the reset of a stream that was closed after its last message.
pub const FINISHED: &str = "closed";
/// Bytes of a peer's reset reason that are kept.
const MAX_REASON_LEN: usize = 256;

/// The streams of one endpoint.
pub(crate) struct Streams {
    config: Config,
    /// The latest time seen; time never runs backwards inside the endpoint.
    clock: Option<Instant>,
    connected: bool,
    streams: BTreeMap<StreamId, Box<Stream>>,
    /// Streams with something to send, in turn.
    ring: VecDeque<StreamId>,
    /// Resets for streams that have ended or never existed.
    pending_resets: VecDeque<Bytes>,
    events: VecDeque<Event>,
    ended: EndedIds,
    /// Bytes of unfinished messages over all streams.
    assembling: usize,
}

impl Streams {
    pub(crate) fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            clock: None,
            connected: false,
            streams: BTreeMap::new(),
            ring: VecDeque::new(),
            pending_resets: VecDeque::new(),
            events: VecDeque::new(),
            ended: EndedIds::default(),
            assembling: 0,
        })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The time to work with: `now`, or the latest time seen if the clock went back.
    pub(crate) fn advance_clock(&mut self, now: Instant) -> Instant {
        let now = self.clock.map_or(now, |latest| latest.max(now));
        self.clock = Some(now);
        now
    }

    pub(crate) fn len(&self) -> usize {
        self.streams.len()
    }

    pub(crate) fn count(&self, which: impl Fn(&Stream) -> bool) -> usize {
        self.streams.values().filter(|stream| which(stream)).count()
    }

    pub(crate) fn get(&self, id: &StreamId) -> Option<&Stream> {
        self.streams.get(id).map(|stream| &**stream)
    }

    pub(crate) fn get_mut(&mut self, id: &StreamId) -> Option<&mut Stream> {
        self.streams.get_mut(id).map(|stream| &mut **stream)
    }

    pub(crate) fn stats(&self, id: &StreamId) -> Option<StreamStats> {
        self.get(id).map(Stream::stats)
    }

    pub(crate) fn has_ended(&self, id: &StreamId) -> bool {
        self.ended.ids.contains(id)
    }

    pub(crate) fn insert(&mut self, stream: Stream) {
        let id = stream.id.clone();
        self.streams.insert(id.clone(), Box::new(stream));
        self.wake(&id);
    }

    pub(crate) fn emit(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if event.is_none() && self.events.capacity() > 64 {
            self.events = VecDeque::new();
        }
        event
    }

    // --- physical socket ---

    pub(crate) fn handle_connected(&mut self, now: Instant) {
        if self.connected {
            self.handle_disconnected(now);
        }
        self.connected = true;
        for stream in self.streams.values_mut() {
            stream.attach(&self.config, now);
        }
        self.wake_all();
    }

    pub(crate) fn handle_disconnected(&mut self, now: Instant) {
        if !self.connected {
            return;
        }
        self.connected = false;
        self.pending_resets.clear();
        let mut over = Vec::new();
        for stream in self.streams.values_mut() {
            if !stream.detach(&self.config, now) {
                over.push(stream.id.clone());
            }
        }
        for id in over {
            self.close(&id, CloseCause::Disconnected);
        }
    }

    // --- inbound ---

    /// A frame, not a handshake, for a stream that exists.
    pub(crate) fn handle_stream_frame(&mut self, frame: Frame, now: Instant) {
        let id = frame.stream_id.clone();
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if let Body::Reset { reason } = frame.body {
            let mut end = reason.len().min(MAX_REASON_LEN);
            while !reason.is_char_boundary(end) {
                end -= 1;
            }
            self.remove(&id);
            let reason = reason[..end].to_owned();
            self.events.push_back(Event::Reset { stream: id, reason });
            return;
        }
        let before = stream.assembling();
        let result = stream.on_frame(frame, &self.config, now, &mut self.events);
        self.assembling = self.assembling - before + stream.assembling();
        let max = self.config.max_assembling_bytes;
        let result = match result {
            Ok(()) if self.assembling > max => Err(ProtocolError::AssemblingLimit { max }),
            other => other,
        };
        match result {
            Ok(()) => self.finish_or_wake(&id),
            Err(error) => self.close(&id, error.into()),
        }
    }

    // --- commands ---

    pub(crate) fn send(&mut self, id: &StreamId, message: Bytes) -> Result<(), SendError> {
        let stream = self.streams.get_mut(id).ok_or(SendError::NotOpen)?;
        stream.send(message, &self.config)?;
        self.wake(id);
        Ok(())
    }

    pub(crate) fn finish(&mut self, id: &StreamId) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.close();
            self.finish_or_wake(id);
        }
    }

    pub(crate) fn probe(&mut self, id: &StreamId) -> bool {
        let probed = self.streams.get_mut(id).is_some_and(|stream| stream.probe());
        self.wake(id);
        probed
    }

    pub(crate) fn heartbeat(&mut self, id: &StreamId) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.heartbeat();
            self.wake(id);
        }
    }

    /// Ends a stream on the driver's request, without an event.
    pub(crate) fn reset(&mut self, id: &StreamId, reason: &str) {
        if let Some(stream) = self.remove(id) {
            let reason = if reason.is_empty() { PROTOCOL_ERROR } else { reason };
            self.queue_reset(stream.reset_frame(reason));
        }
    }

    /// Ends a stream from this side: the peer gets a reset, the driver an event.
    pub(crate) fn close(&mut self, id: &StreamId, cause: CloseCause) {
        let Some(stream) = self.remove(id) else { return };
        let reason = if cause == CloseCause::Finished { FINISHED } else { PROTOCOL_ERROR };
        self.queue_reset(stream.reset_frame(reason));
        self.events.push_back(Event::Closed { stream: id.clone(), cause });
    }

    /// Tells the peer that there is no such stream.
    pub(crate) fn refuse(&mut self, id: &StreamId) {
        let body = Body::Reset { reason: PROTOCOL_ERROR.to_owned() };
        self.queue_reset(Frame::new(id.clone(), 0, 0, body).encode());
    }

    fn queue_reset(&mut self, frame: Bytes) {
        // A dropped reset is harmless: a peer that continues gets another.
        if self.connected && self.pending_resets.len() < self.config.max_pending_resets {
            self.pending_resets.push_back(frame);
        }
    }

    fn remove(&mut self, id: &StreamId) -> Option<Box<Stream>> {
        let stream = self.streams.remove(id)?;
        self.assembling -= stream.assembling();
        self.ended.remember(id.clone(), self.config.remembered_streams);
        Some(stream)
    }

    // --- outbound ---

    /// Puts a stream into the ring if it has something to send.
    pub(crate) fn wake(&mut self, id: &StreamId) {
        if let Some(stream) = self.streams.get_mut(id)
            && !stream.in_ring
            && stream.wants_transmit(&self.config)
        {
            stream.in_ring = true;
            self.ring.push_back(id.clone());
        }
    }

    fn wake_all(&mut self) {
        for (id, stream) in &mut self.streams {
            if !stream.in_ring && stream.wants_transmit(&self.config) {
                stream.in_ring = true;
                self.ring.push_back(id.clone());
            }
        }
    }

    /// Ends a stream that is finished, or puts it into the ring.
    fn finish_or_wake(&mut self, id: &StreamId) {
        if self.get(id).is_some_and(Stream::is_finished) {
            self.close(id, CloseCause::Finished);
        } else {
            self.wake(id);
        }
    }

    pub(crate) fn poll_transmit(&mut self, now: Instant) -> Option<Bytes> {
        while self.connected {
            if let Some(reset) = self.pending_resets.pop_front() {
                return Some(reset);
            }
            let id = self.ring.pop_front()?;
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.in_ring = false;
            match stream.transmit(&self.config, now) {
                Ok(frame) => {
                    if stream.take_writable(&self.config) {
                        self.events.push_back(Event::Writable { stream: id.clone() });
                    }
                    self.finish_or_wake(&id);
                    if frame.is_some() {
                        return frame;
                    }
                }
                Err(error) => self.close(&id, error.into()),
            }
        }
        None
    }

    // --- time ---

    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.streams.values().filter_map(|stream| stream.next_timeout()).min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let mut over = Vec::new();
        for stream in self.streams.values_mut() {
            if stream.next_timeout().is_some_and(|at| at <= now)
                && let Err(cause) = stream.on_timeout(&self.config, now)
            {
                over.push((stream.id.clone(), cause));
            }
        }
        for (id, cause) in over {
            self.close(&id, cause);
        }
        self.wake_all();
    }
}

/// The ids of streams that ended most recently.
#[derive(Default)]
struct EndedIds {
    order: VecDeque<StreamId>,
    ids: BTreeSet<StreamId>,
}

impl EndedIds {
    fn remember(&mut self, id: StreamId, limit: usize) {
        if self.ids.insert(id.clone()) {
            self.order.push_back(id);
        }
        while self.order.len() > limit
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }
}
