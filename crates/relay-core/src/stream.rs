//! One stream, as both kinds of endpoint have it.
//!
//! Invariant: messages are delivered and sent only in [`Phase::Open`]; an error that a method returns ends
//! this stream and no other.

use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;

use crate::config::{Config, TAG_LEN};
use crate::error::{CloseCause, ProtocolError, SendError};
use crate::event::Event;
use crate::frame::{Body, Data, DataHead, Frame, begin_data};
use crate::id::{Generation, StreamId};
use crate::inbound::ReceiveWindow;
use crate::message::{Deframer, Reassembler};
use crate::noise::{Initiator, RecordCipher, Responder};
use crate::outbound::SendWindow;
use crate::queue::MessageQueue;
use crate::retry_timer::{Expiry, RetryTimer, exponential_backoff};

/// Where a stream is in its life. The clear mode starts in `Open`.
///
/// ```text
///  executor:  first message read         verdict: allowed, answer written
///             ────────────────▶ Authorizing ─────────────────────┐
///                                    │ denied, no verdict         ▼
///                                    │ in time, socket lost ▶  Open ──▶ gone: the id is refused
///                                    ▼                            ▲     for a while after
///                                  gone                           │
///  harness:   first message written   Opening ────────────────────┘
///             ────────────────▶          │      answer read
///                                        └──▶ gone: refused, no answer in time, socket lost
/// ```
///
/// `Open` has a second axis. Attached to a physical socket it sends; detached (the socket is
/// gone, the peer is known to acknowledge) it keeps everything until the socket is back or
/// `detach_timeout` has passed. A peer not known to acknowledge has no detached state.
pub(crate) enum Phase {
    /// The executor waits for a verdict on the harness's key.
    Authorizing { responder: Responder, deadline: Instant },
    /// The harness waits for the handshake's answer.
    Opening { initiator: Initiator, deadline: Instant },
    /// Messages flow.
    Open(Channel),
    /// A placeholder while one phase is replaced by the next.
    Transitioning,
}

pub(crate) enum Channel {
    Noise { cipher: RecordCipher, deframer: Deframer },
    Clear(Reassembler),
}

/// Counters of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamStats {
    /// Whether messages flow.
    pub open: bool,
    /// Whether the peer has shown that it acknowledges, so that the stream survives a reconnect.
    pub peer_acknowledges: bool,
    /// Bytes accepted by `send` and not yet sent.
    pub queued_bytes: usize,
    /// Segments sent and not acknowledged.
    pub in_flight_segments: u64,
    /// Bytes retained for retransmission.
    pub in_flight_bytes: usize,
    /// Segments held out of order.
    pub held_segments: usize,
    /// Bytes held out of order.
    pub held_bytes: usize,
    /// Bytes of an unfinished inbound message.
    pub assembling_bytes: usize,
}

pub(crate) struct Stream {
    pub(crate) id: StreamId,
    pub(crate) generation: Generation,
    pub(crate) phase: Phase,
    /// Digest of the handshake message taken from the peer.
    pub(crate) handshake_seen: Option<[u8; 32]>,
    /// Whether the endpoint's ring of streams with something to send holds this one.
    pub(crate) in_ring: bool,
    /// A handshake message to send.
    handshake: Option<Bytes>,
    send_resume: bool,
    send_heartbeat: bool,
    /// The driver waits for a frame from the peer.
    probed: bool,
    closing: bool,
    queue: MessageQueue,
    outbound: SendWindow,
    inbound: ReceiveWindow,
    /// Runs until acknowledgements make progress.
    retransmit: RetryTimer,
    /// Runs until a gap in the received segments is filled.
    gap: RetryTimer,
    /// Runs until a frame arrives after this side reconnected.
    resume: RetryTimer,
    /// Runs until a peer that reconnected proves that it acknowledges. Before that, its losses can be
    /// neither detected nor repaired.
    proof: RetryTimer,
    needs_proof: bool,
    heartbeat_at: Option<Instant>,
    first_record_at: Option<Instant>,
    idle_at: Option<Instant>,
    detached_until: Option<Instant>,
}

impl Stream {
    pub(crate) fn new(id: StreamId, generation: Generation, phase: Phase) -> Self {
        Self {
            id,
            generation,
            phase,
            handshake_seen: None,
            in_ring: false,
            handshake: None,
            send_resume: false,
            send_heartbeat: false,
            probed: false,
            closing: false,
            queue: MessageQueue::default(),
            outbound: SendWindow::default(),
            inbound: ReceiveWindow::default(),
            retransmit: RetryTimer::default(),
            gap: RetryTimer::default(),
            resume: RetryTimer::default(),
            proof: RetryTimer::default(),
            needs_proof: false,
            heartbeat_at: None,
            first_record_at: None,
            idle_at: None,
            detached_until: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open(_))
    }

    pub(crate) fn stats(&self) -> StreamStats {
        let (in_flight_segments, in_flight_bytes) = self.outbound.in_flight();
        let (held_segments, held_bytes) = self.inbound.held();
        StreamStats {
            open: self.is_open(),
            peer_acknowledges: self.outbound.is_proven(),
            queued_bytes: self.queue.bytes(),
            in_flight_segments,
            in_flight_bytes,
            held_segments,
            held_bytes,
            assembling_bytes: self.assembling(),
        }
    }

    pub(crate) fn assembling(&self) -> usize {
        match &self.phase {
            Phase::Open(Channel::Noise { deframer, .. }) => deframer.len(),
            Phase::Open(Channel::Clear(reassembler)) => reassembler.len(),
            _ => 0,
        }
    }

    // --- commands ---

    /// Announces the stream to the rendezvous.
    pub(crate) fn announce(&mut self) {
        self.send_resume = true;
    }

    pub(crate) fn send_handshake(&mut self, message: Vec<u8>) {
        self.handshake = Some(message.into());
    }

    /// Messages flow from here on.
    pub(crate) fn open(&mut self, channel: Channel, config: &Config, now: Instant) {
        self.phase = Phase::Open(channel);
        self.heartbeat_at = Some(now + config.heartbeat_interval);
        self.idle_at = config.idle_timeout.map(|timeout| now + timeout);
    }

    pub(crate) fn expect_first_record(&mut self, config: &Config, now: Instant) {
        self.first_record_at = config.first_record_timeout.map(|timeout| now + timeout);
    }

    pub(crate) fn send(&mut self, message: Bytes, config: &Config) -> Result<(), SendError> {
        let max = match &self.phase {
            Phase::Open(Channel::Noise { .. }) => config.max_message_len,
            // A peer that may not know segments gets a message whole or not at all.
            Phase::Open(Channel::Clear(_)) if self.outbound.is_proven() => config.max_message_len,
            Phase::Open(Channel::Clear(_)) => config.max_payload_len().min(config.max_message_len),
            _ => return Err(SendError::NotOpen),
        };
        if self.closing {
            return Err(SendError::NotOpen);
        }
        let len = message.len();
        if len == 0 || len > max {
            return Err(SendError::MessageLength { len, max });
        }
        if self.queue.push(message, config.send_buffer) { Ok(()) } else { Err(SendError::Blocked) }
    }

    /// Accepts no more messages and ends after the last is sent.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.closing && self.queue.is_empty() && !self.outbound.is_waiting()
    }

    /// Checks that the peer is alive by a resume, which it answers with an acknowledgement. False for a
    /// peer that is not proven, which may not answer.
    pub(crate) fn probe(&mut self) -> bool {
        let responds = self.is_open() && self.outbound.is_proven() && self.detached_until.is_none();
        self.send_resume |= responds;
        self.probed |= responds;
        responds
    }

    /// Queues a heartbeat.
    pub(crate) fn heartbeat(&mut self) {
        self.send_heartbeat |= self.is_open() && self.detached_until.is_none();
    }

    // --- physical socket ---

    /// Handles the loss of the socket. Returns whether the stream can wait for another.
    pub(crate) fn detach(&mut self, config: &Config, now: Instant) -> bool {
        if !self.is_open() || !self.outbound.is_proven() || !self.outbound.can_retransmit_all() {
            return false;
        }
        self.detached_until = Some(now + config.detach_timeout);
        self.send_heartbeat = false;
        self.send_resume = false;
        self.probed = false;
        self.retransmit.restart();
        self.gap.restart();
        self.resume.restart();
        true
    }

    /// Resumes over a new socket: announces the position and retransmits what may be lost.
    pub(crate) fn attach(&mut self, config: &Config, now: Instant) {
        if self.detached_until.take().is_none() {
            return;
        }
        self.send_resume = true;
        self.inbound.on_new_socket();
        self.outbound.mark_lost();
        self.resume.set(true, config.initial_retransmit, now);
        self.heartbeat_at = Some(now + config.heartbeat_interval);
        self.idle_at = config.idle_timeout.map(|timeout| now + timeout);
        self.arm(config, now);
    }

    // --- inbound ---

    /// Handles any frame but a handshake or a reset.
    pub(crate) fn on_frame(
        &mut self,
        frame: Frame,
        config: &Config,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), ProtocolError> {
        if !self.is_open() {
            return match frame.body {
                Body::Data(_) => Err(ProtocolError::DataBeforeHandshake),
                _ => Ok(()),
            };
        }
        if let Some(at) = &mut self.idle_at {
            *at = now + config.idle_timeout.unwrap_or_default();
        }
        if std::mem::take(&mut self.probed) {
            events.push_back(Event::PeerResponded { stream: self.id.clone() });
        }
        let explicit = matches!(frame.body, Body::Ack);
        if self.outbound.on_ack(frame.ack, frame.ack_bits, explicit, now)? {
            self.retransmit.restart();
        }
        self.resume.restart();
        match frame.body {
            Body::Data(data) => self.on_data(data, config, now, events)?,
            Body::Resume { next_seq } => {
                // The peer has a new socket, so frames in flight to the old one are lost. The reply
                // is an acknowledgement and never a resume: two resumes, once duplicated by the
                // relay, would trigger each other without end.
                self.outbound.mark_lost();
                self.inbound.request_ack();
                self.needs_proof |= next_seq > 0;
            }
            Body::Ack | Body::Heartbeat | Body::Reset { .. } | Body::Handshake { .. } => {}
        }
        self.arm(config, now);
        Ok(())
    }

    fn on_data(
        &mut self,
        data: Data,
        config: &Config,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), ProtocolError> {
        let mut next = self.inbound.push(data, config, now);
        if next.is_some() {
            self.gap.restart();
        }
        while let Some(data) = next {
            self.deliver(data, config, events)?;
            next = self.inbound.pop_ready();
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        data: Data,
        config: &Config,
        events: &mut VecDeque<Event>,
    ) -> Result<(), ProtocolError> {
        let max = config.max_message_len;
        match &mut self.phase {
            Phase::Open(Channel::Noise { cipher, deframer }) => {
                cipher.open(data.seq, &data.payload, deframer.buffer())?;
                self.first_record_at = None;
                while let Some(message) = deframer.next(max)? {
                    events.push_back(Event::Message { stream: self.id.clone(), message });
                }
            }
            Phase::Open(Channel::Clear(reassembler)) => {
                if let Some(message) = reassembler.push(data, max)? {
                    events.push_back(Event::Message { stream: self.id.clone(), message });
                }
            }
            _ => return Err(ProtocolError::DataBeforeHandshake),
        }
        Ok(())
    }

    // --- outbound ---

    pub(crate) fn wants_transmit(&self, config: &Config) -> bool {
        self.send_resume
            || self.handshake.is_some()
            || self.send_heartbeat
            || (self.is_open()
                && (self.inbound.wants_ack() || self.outbound.has_lost() || self.may_send(config)))
    }

    fn may_send(&self, config: &Config) -> bool {
        !self.queue.is_empty() && self.outbound.has_room(config.record_len + TAG_LEN, config)
    }

    /// The next frame to send. Clears the pending work that it covers.
    pub(crate) fn transmit(
        &mut self,
        config: &Config,
        now: Instant,
    ) -> Result<Option<Bytes>, ProtocolError> {
        let mut says_ack = false;
        let frame = if self.send_resume {
            self.send_resume = false;
            Some(self.control(Body::Resume { next_seq: self.outbound.next_seq() }))
        } else if let Some(payload) = self.handshake.take() {
            Some(self.control(Body::Handshake { payload }))
        } else if !self.is_open() {
            None
        } else if let Some(again) = self.outbound.take_lost(now) {
            let head = self.head(again.seq, again.segment_index, again.segment_count);
            let mut out = begin_data(self.id.as_str(), head, again.payload.len());
            out.extend_from_slice(&again.payload);
            Some(out.freeze())
        } else if self.may_send(config) {
            self.transmit_new(config, now)?
        } else if self.inbound.wants_ack() {
            says_ack = true;
            Some(self.control(Body::Ack))
        } else if self.send_heartbeat {
            Some(self.control(Body::Heartbeat))
        } else {
            None
        };
        if frame.is_some() && self.is_open() {
            self.inbound.on_ack_sent(says_ack);
            self.send_heartbeat = false;
            self.heartbeat_at = Some(now + config.heartbeat_interval);
            self.arm(config, now);
        }
        Ok(frame)
    }

    fn transmit_new(
        &mut self,
        config: &Config,
        now: Instant,
    ) -> Result<Option<Bytes>, ProtocolError> {
        let seq = self.outbound.claim_seq()?;
        let proven = self.outbound.is_proven();
        let plain_head = self.head(seq, 0, 1);
        let (frame, payload_len, segment_index, segment_count) = match &mut self.phase {
            Phase::Open(Channel::Noise { cipher, .. }) => {
                let len = self.queue.record_len(config.record_len);
                let mut out = begin_data(self.id.as_str(), plain_head, len + TAG_LEN);
                let start = out.len();
                self.queue.take_record(len, &mut out);
                out.resize(start + len + TAG_LEN, 0);
                cipher.seal(seq, &mut out[start..])?;
                (out.freeze(), len + TAG_LEN, 0, 1)
            }
            Phase::Open(Channel::Clear(_)) => {
                let Some((payload, segment_index, segment_count)) =
                    self.queue.take_segment(proven, config.segment_len)
                else {
                    return Ok(None);
                };
                let head = DataHead { segment_index, segment_count, ..plain_head };
                let mut out = begin_data(self.id.as_str(), head, payload.len());
                out.extend_from_slice(&payload);
                (out.freeze(), payload.len(), segment_index, segment_count)
            }
            _ => return Ok(None),
        };
        // The retained payload is a slice of the frame, not a copy.
        let payload = frame.slice(frame.len() - payload_len..);
        self.outbound.on_sent(payload, segment_index, segment_count, config, now);
        Ok(Some(frame))
    }

    /// Whether a blocked sender may continue; reported once.
    pub(crate) fn take_writable(&mut self, config: &Config) -> bool {
        self.queue.take_writable(config.send_buffer)
    }

    /// The frame that ends the stream.
    pub(crate) fn reset_frame(&self, reason: &str) -> Bytes {
        self.control(Body::Reset { reason: reason.to_owned() })
    }

    fn control(&self, body: Body) -> Bytes {
        let (ack, ack_bits) = self.inbound.ack();
        Frame::new(self.id.clone(), ack, ack_bits, body).encode()
    }

    fn head(&self, seq: u32, segment_index: u32, segment_count: u32) -> DataHead {
        let (ack, ack_bits) = self.inbound.ack();
        DataHead { ack, ack_bits, seq, segment_index, segment_count }
    }

    // --- time ---

    fn arm(&mut self, config: &Config, now: Instant) {
        let after = self.outbound.retransmit_after(config);
        self.retransmit.set(self.outbound.is_waiting(), after, now);
        self.gap.set(self.inbound.has_gap(), config.initial_retransmit, now);
        let proof = self.needs_proof && self.outbound.is_unproven_with_data();
        self.proof.set(proof, config.initial_retransmit, now);
    }

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let always = match &self.phase {
            Phase::Authorizing { deadline, .. } | Phase::Opening { deadline, .. } => {
                Some(*deadline)
            }
            _ => self.first_record_at,
        };
        let rest = match self.detached_until {
            Some(until) => [Some(until), None, None, None, None, None, None],
            None => [
                self.idle_at,
                self.heartbeat_at,
                self.inbound.ack_at(),
                self.retransmit.at(),
                self.gap.at(),
                self.resume.at(),
                self.proof.at(),
            ],
        };
        rest.into_iter().flatten().chain(always).min()
    }

    pub(crate) fn on_timeout(&mut self, config: &Config, now: Instant) -> Result<(), CloseCause> {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        match &self.phase {
            Phase::Authorizing { deadline, .. } if *deadline <= now => {
                return Err(CloseCause::AuthorizationTimeout);
            }
            Phase::Opening { deadline, .. } if *deadline <= now => {
                return Err(CloseCause::HandshakeTimeout);
            }
            _ => {}
        }
        if due(self.first_record_at) {
            return Err(CloseCause::FirstRecordTimeout);
        }
        if let Some(until) = self.detached_until {
            return if until <= now { Err(CloseCause::DetachTimeout) } else { Ok(()) };
        }
        if due(self.idle_at) {
            return Err(CloseCause::Idle);
        }
        if due(self.heartbeat_at) {
            self.send_heartbeat = true;
            self.heartbeat_at = Some(now + config.heartbeat_interval);
        }
        self.inbound.on_timeout(now);
        let outbound = &mut self.outbound;
        let wait = |_| outbound.on_retransmit_timeout(config);
        if self.retransmit.on_timeout(config, now, wait) == Expiry::GiveUp {
            return Err(CloseCause::Stalled);
        }
        match self.gap.on_timeout(config, now, exponential_backoff(config)) {
            Expiry::NotDue => {}
            Expiry::Retry => self.inbound.request_ack(),
            Expiry::GiveUp => return Err(CloseCause::Stalled),
        }
        match self.resume.on_timeout(config, now, exponential_backoff(config)) {
            Expiry::NotDue => {}
            Expiry::Retry => {
                self.send_resume = true;
                self.inbound.request_ack();
            }
            Expiry::GiveUp => return Err(CloseCause::Stalled),
        }
        if self.proof.on_timeout(config, now, exponential_backoff(config)) == Expiry::GiveUp {
            return Err(CloseCause::Stalled);
        }
        Ok(())
    }
}
