//! The sending half of a stream: segments in flight, lost and acknowledged.
//!
//! A segment's bytes are built once; a retransmission sends the same bytes under the same number. A peer
//! is *proven* once it has acknowledged anything. Until then the window does not limit sending, nothing is
//! retransmitted, and only a small tail of the sent segments is retained.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::config::Config;
use crate::error::ProtocolError;

#[derive(Clone, Copy, PartialEq, Eq)]
enum SegmentState {
    InFlight,
    Lost,
    Acked,
}

struct Sent {
    payload: Bytes,
    segment_index: u32,
    segment_count: u32,
    /// The number of its last transmission, counted over the stream.
    transmission: u64,
    sent_at: Instant,
    retransmitted: bool,
    state: SegmentState,
}

/// A segment to retransmit.
pub(crate) struct Retransmit {
    pub(crate) seq: u32,
    pub(crate) segment_index: u32,
    pub(crate) segment_count: u32,
    pub(crate) payload: Bytes,
}

#[derive(Default)]
pub(crate) struct SendWindow {
    /// The next unsent segment. Wider than a seq, so that the last seq has a successor.
    next: u64,
    /// The first segment not covered by the peer's cumulative acknowledgement.
    unacked: u64,
    /// Retained segments, the last just before `next`. Segments between `unacked` and the first retained
    /// one were dropped while the peer was unproven.
    sent: VecDeque<Sent>,
    /// Payload bytes retained and not acknowledged.
    bytes: usize,
    lost: usize,
    transmissions: u64,
    proven: bool,
    rtt: Option<Rtt>,
    /// The timeout after backing off, until a round trip is measured again: on a slow path every segment
    /// may be sent twice, which measures nothing.
    backed_off: Option<Duration>,
}

impl SendWindow {
    pub(crate) fn next_seq(&self) -> u32 {
        u32::try_from(self.next).unwrap_or(u32::MAX)
    }

    pub(crate) fn is_proven(&self) -> bool {
        self.proven
    }

    /// Whether data was sent to a peer that is not proven.
    pub(crate) fn is_unproven_with_data(&self) -> bool {
        !self.proven && self.next > 0
    }

    /// Segments sent and not acknowledged, and their retained bytes.
    pub(crate) fn in_flight(&self) -> (u64, usize) {
        (self.next - self.unacked, self.bytes)
    }

    /// Whether an acknowledgement is due from a proven peer.
    pub(crate) fn is_waiting(&self) -> bool {
        self.proven && self.unacked < self.next
    }

    /// Whether every unacknowledged segment is retained.
    pub(crate) fn can_retransmit_all(&self) -> bool {
        self.unacked >= self.first_retained()
    }

    /// Whether a new segment of up to `len` bytes may be sent.
    pub(crate) fn has_room(&self, len: usize, config: &Config) -> bool {
        let (segments, bytes) = self.in_flight();
        !self.proven
            || segments == 0
            || (segments < u64::from(config.window_segments) && bytes + len <= config.window_bytes)
    }

    /// The number for a new segment.
    pub(crate) fn claim_seq(&self) -> Result<u32, ProtocolError> {
        u32::try_from(self.next).map_err(|_| ProtocolError::SequenceExhausted)
    }

    /// Records a new segment that is sent under the number from [`Self::claim_seq`].
    pub(crate) fn on_sent(
        &mut self,
        payload: Bytes,
        segment_index: u32,
        segment_count: u32,
        config: &Config,
        now: Instant,
    ) {
        self.transmissions += 1;
        self.next += 1;
        self.bytes += payload.len();
        self.sent.push_back(Sent {
            payload,
            segment_index,
            segment_count,
            transmission: self.transmissions,
            sent_at: now,
            retransmitted: false,
            state: SegmentState::InFlight,
        });
        if !self.proven {
            while self.sent.len() > config.unproven_segments || self.bytes > config.unproven_bytes {
                let Some(forgotten) = self.sent.pop_front() else { break };
                self.bytes -= forgotten.payload.len();
            }
        }
    }

    /// Applies the acknowledgement of an inbound frame; `explicit` if it is an ack frame. Returns whether
    /// it acknowledged anything new.
    pub(crate) fn on_ack(
        &mut self,
        ack: u32,
        ack_bits: u32,
        explicit: bool,
        now: Instant,
    ) -> Result<bool, ProtocolError> {
        let says_something = explicit || ack > 0 || ack_bits > 0;
        if !self.proven && !says_something {
            return Ok(false);
        }
        self.proven = true;
        if self.next == 0 && ack == 0 && ack_bits == 0 {
            return Ok(false);
        }
        let highest = u64::from(ack) + u64::from(u32::BITS - ack_bits.leading_zeros());
        if highest >= self.next {
            return Err(ProtocolError::AckOfUnsent { seq: highest });
        }

        let mut newest = None;
        let mut progress = false;
        while self.unacked <= u64::from(ack) {
            progress = true;
            if self.unacked >= self.first_retained() {
                newest = newest.max(self.acked(0, now));
                self.sent.pop_front();
            }
            self.unacked += 1;
        }
        for bit in 0..u32::BITS {
            if ack_bits & (1 << bit) == 0 {
                continue;
            }
            let seq = u64::from(ack) + 1 + u64::from(bit);
            let Some(index) = seq.checked_sub(self.first_retained()) else { continue };
            let transmission = self.acked(index as usize, now);
            progress |= transmission.is_some();
            newest = newest.max(transmission);
        }
        // A segment sent before one that has arrived, and not acknowledged itself, is lost.
        if let Some(newest) = newest {
            for sent in &mut self.sent {
                if sent.state == SegmentState::InFlight && sent.transmission < newest {
                    sent.state = SegmentState::Lost;
                    self.lost += 1;
                }
            }
        }
        if self.sent.is_empty() {
            self.sent = VecDeque::new();
        }
        Ok(progress)
    }

    /// Marks a retained segment as acknowledged; returns its transmission number if that is new.
    fn acked(&mut self, index: usize, now: Instant) -> Option<u64> {
        let sent = self.sent.get_mut(index)?;
        match sent.state {
            SegmentState::Acked => return None,
            SegmentState::Lost => self.lost -= 1,
            SegmentState::InFlight => {}
        }
        sent.state = SegmentState::Acked;
        self.bytes -= sent.payload.len();
        sent.payload = Bytes::new();
        // For a segment sent twice it is unknown which transmission arrived.
        if !sent.retransmitted {
            let sample = now.saturating_duration_since(sent.sent_at);
            self.rtt = Some(Rtt::update(self.rtt, sample));
            self.backed_off = None;
        }
        Some(sent.transmission)
    }

    /// Marks everything in flight as lost, if the peer is proven.
    pub(crate) fn mark_lost(&mut self) {
        if !self.proven {
            return;
        }
        for sent in &mut self.sent {
            if sent.state == SegmentState::InFlight {
                sent.state = SegmentState::Lost;
                self.lost += 1;
            }
        }
    }

    pub(crate) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Takes the first lost segment, which the caller sends now.
    pub(crate) fn take_lost(&mut self, now: Instant) -> Option<Retransmit> {
        if self.lost == 0 {
            return None;
        }
        let first = self.first_retained();
        let index = self.sent.iter().position(|sent| sent.state == SegmentState::Lost)?;
        self.lost -= 1;
        self.transmissions += 1;
        let sent = &mut self.sent[index];
        sent.state = SegmentState::InFlight;
        sent.transmission = self.transmissions;
        sent.sent_at = now;
        sent.retransmitted = true;
        Some(Retransmit {
            seq: u32::try_from(first + index as u64).ok()?,
            segment_index: sent.segment_index,
            segment_count: sent.segment_count,
            payload: sent.payload.clone(),
        })
    }

    /// The current retransmission timeout.
    pub(crate) fn retransmit_after(&self, config: &Config) -> Duration {
        let measured =
            self.rtt.map_or(config.initial_retransmit, |rtt| rtt.smoothed + 4 * rtt.variance);
        self.backed_off.unwrap_or(measured).clamp(config.min_retransmit, config.max_retransmit)
    }

    /// Handles a retransmission timeout: marks everything in flight as lost and doubles the timeout.
    pub(crate) fn on_retransmit_timeout(&mut self, config: &Config) -> Duration {
        self.backed_off = Some(self.retransmit_after(config).saturating_mul(2));
        self.mark_lost();
        self.retransmit_after(config)
    }

    fn first_retained(&self) -> u64 {
        self.next - self.sent.len() as u64
    }
}

/// Round trip, smoothed as in RFC 6298.
#[derive(Clone, Copy)]
struct Rtt {
    smoothed: Duration,
    variance: Duration,
}

impl Rtt {
    fn update(before: Option<Self>, sample: Duration) -> Self {
        match before {
            None => Self { smoothed: sample, variance: sample / 2 },
            Some(Self { smoothed, variance }) => Self {
                variance: variance * 3 / 4 + smoothed.abs_diff(sample) / 4,
                smoothed: smoothed * 7 / 8 + sample / 8,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_end_at_the_maximum_without_wrapping() {
        let config = Config::default();
        let now = Instant::now();
        let last = u64::from(u32::MAX);
        let mut window = SendWindow { next: last, unacked: last, ..SendWindow::default() };
        assert_eq!(window.claim_seq(), Ok(u32::MAX));
        window.on_sent(Bytes::from_static(b"x"), 0, 1, &config, now);
        assert_eq!(window.claim_seq(), Err(ProtocolError::SequenceExhausted));
        assert_eq!(window.on_ack(u32::MAX, 0, false, now), Ok(true));
        assert_eq!(window.in_flight(), (0, 0));
        assert_eq!(window.claim_seq(), Err(ProtocolError::SequenceExhausted));
    }

    #[test]
    fn ack_bits_retransmit_only_the_gap() {
        let config = Config::default();
        let now = Instant::now();
        let mut window = SendWindow::default();
        for _ in 0..6 {
            window.on_sent(Bytes::from_static(b"x"), 0, 1, &config, now);
        }
        // 0 and 1 arrived, 2 did not, 3 and 4 did; 5 may still be on its way.
        assert_eq!(window.on_ack(1, 0b0110, true, now), Ok(true));
        assert_eq!(window.take_lost(now).map(|again| again.seq), Some(2));
        assert!(window.take_lost(now).is_none());
        // The same acknowledgement again does not send it a third time.
        assert_eq!(window.on_ack(1, 0b0110, true, now), Ok(false));
        assert!(!window.has_lost());
    }

    #[test]
    fn unproven_peer_retains_a_bounded_tail() {
        let config = Config { unproven_segments: 4, ..Config::default() };
        let now = Instant::now();
        let mut window = SendWindow::default();
        for _ in 0..100 {
            assert!(window.has_room(1 << 20, &config));
            window.on_sent(Bytes::from_static(b"x"), 0, 1, &config, now);
        }
        assert_eq!(window.in_flight().1, 4);
        assert!(!window.is_waiting() && !window.can_retransmit_all());
        window.mark_lost();
        assert!(!window.has_lost());
        // The peer proves itself late: everything it has not acknowledged is retained.
        assert_eq!(window.on_ack(96, 0, false, now), Ok(true));
        assert!(window.is_waiting() && window.can_retransmit_all());
    }
}
