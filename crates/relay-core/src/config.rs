//! Every limit and timeout of the relay core.
//!
//! Invariant: with a [`Config`] that passed [`Config::validate`], an endpoint never builds a frame or a
//! record that a peer with the same limits would refuse.

use std::time::Duration;

/// Bytes of authentication tag on a record.
pub(crate) const TAG_LEN: usize = 16;
/// The longest Noise message, in bytes; longer ones never reach the cipher.
pub(crate) const MAX_NOISE_LEN: usize = 65_535;
/// Room for everything in a data frame but the stream id and the payload.
pub(crate) const FRAME_OVERHEAD: usize = 64;

/// Size limits of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLimits {
    /// Longest frame accepted or built, in bytes. Default 256 KiB.
    pub max_frame_len: usize,
    /// Longest stream id accepted, in bytes. Default 128 (a UUID has 36).
    pub max_stream_id_len: usize,
}

impl Default for FrameLimits {
    fn default() -> Self {
        Self { max_frame_len: 256 * 1024, max_stream_id_len: 128 }
    }
}

/// Limits and timeouts of an endpoint. Start from `Config::default()` and change fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Size limits of a frame.
    pub frame: FrameLimits,

    /// Concurrent streams of an executor, handshakes included (default 128); more are refused.
    pub max_streams: usize,
    /// How many ended streams' ids stay refused (default 1,024); the oldest is forgotten first.
    pub remembered_streams: usize,
    /// Resets that wait to be sent for streams that no longer exist (default 256); more are dropped.
    pub max_pending_resets: usize,

    /// Handshakes that wait for a verdict at once (default 32); more are refused.
    pub max_pending_authorizations: usize,
    /// How long a verdict may take before the stream is closed. Default 10 s.
    pub authorization_timeout: Duration,
    /// Longest authorization, in bytes. Default 4,096.
    pub max_authorization_len: usize,
    /// Failed handshakes on one physical socket before the endpoint asks to close it. Default 8.
    pub max_failed_handshakes: u32,
    /// How long a harness waits for the handshake reply. Default 30 s.
    pub handshake_timeout: Duration,
    /// How long an executor keeps an open stream without its first record (default 60 s; `None` is
    /// without limit). A replayed first message can open a stream but never write to it.
    pub first_record_timeout: Option<Duration>,

    /// Plaintext bytes in one record. Default 60 KiB.
    pub record_len: usize,
    /// Payload bytes in one segment of a clear message. Default 60 KiB.
    pub segment_len: usize,
    /// Longest message, in bytes. Default 64 MiB.
    pub max_message_len: usize,
    /// Bytes of unfinished inbound messages over all streams (default 256 MiB); the stream that
    /// exceeds it is reset.
    pub max_assembling_bytes: usize,
    /// Unsent bytes of a stream above which `send` returns `Blocked`. Default 1 MiB.
    pub send_buffer: usize,

    /// Out-of-order segments held, and how far ahead one may be (default 64); others are dropped.
    pub reorder_segments: u32,
    /// Out-of-order bytes held (default 1 MiB); segments above it are dropped.
    pub reorder_bytes: usize,
    /// Unacknowledged segments in flight to a proven peer. Default 64.
    pub window_segments: u32,
    /// Unacknowledged bytes in flight to a proven peer. Default 1 MiB.
    pub window_bytes: usize,
    /// Sent segments retained for a peer that is not proven. Default 16.
    pub unproven_segments: usize,
    /// Sent bytes retained for a peer that is not proven. Default 256 KiB.
    pub unproven_bytes: usize,

    /// How long an acknowledgement waits for another frame to carry it. Default 20 ms.
    pub ack_delay: Duration,
    /// Segments after which an acknowledgement is sent without delay. Default 8.
    pub ack_every: u32,
    /// Retransmission timeout until a round trip is measured. Default 1 s.
    pub initial_retransmit: Duration,
    /// Shortest retransmission timeout. Default 500 ms.
    pub min_retransmit: Duration,
    /// Longest retransmission timeout; each timeout doubles it up to this. Default 30 s.
    pub max_retransmit: Duration,
    /// Timeouts in a row before a stream is closed as stalled. Default 8, about two minutes.
    pub max_retries: u32,
    /// How long a detached stream waits for a new physical socket. Default 5 min.
    pub detach_timeout: Duration,
    /// How often a stream without other traffic sends a heartbeat. Default 30 s.
    pub heartbeat_interval: Duration,
    /// How long a stream may receive nothing before it is closed. Default `None`, without limit, since
    /// not every peer sends heartbeats.
    pub idle_timeout: Option<Duration>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            frame: FrameLimits::default(),
            max_streams: 128,
            remembered_streams: 1024,
            max_pending_resets: 256,
            max_pending_authorizations: 32,
            authorization_timeout: Duration::from_secs(10),
            max_authorization_len: 4096,
            max_failed_handshakes: 8,
            handshake_timeout: Duration::from_secs(30),
            first_record_timeout: Some(Duration::from_secs(60)),
            record_len: 60 * 1024,
            segment_len: 60 * 1024,
            max_message_len: 64 * 1024 * 1024,
            max_assembling_bytes: 256 * 1024 * 1024,
            send_buffer: 1024 * 1024,
            reorder_segments: 64,
            reorder_bytes: 1024 * 1024,
            window_segments: 64,
            window_bytes: 1024 * 1024,
            unproven_segments: 16,
            unproven_bytes: 256 * 1024,
            ack_delay: Duration::from_millis(20),
            ack_every: 8,
            initial_retransmit: Duration::from_secs(1),
            min_retransmit: Duration::from_millis(500),
            max_retransmit: Duration::from_secs(30),
            max_retries: 8,
            detach_timeout: Duration::from_secs(300),
            heartbeat_interval: Duration::from_secs(30),
            idle_timeout: None,
        }
    }
}

/// Why a configuration was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A field has a value that it cannot have, alone or beside the others.
    #[error("{field} is {value}, outside {min}..={max}")]
    OutOfRange {
        /// The field of [`Config`], by its path.
        field: &'static str,
        /// The value it has.
        value: usize,
        /// The least value it may have.
        min: usize,
        /// The greatest value it may have.
        max: usize,
    },
}

impl Config {
    /// Payload bytes that fit in one frame.
    pub(crate) fn max_payload_len(&self) -> usize {
        self.frame.max_frame_len.saturating_sub(FRAME_OVERHEAD + self.frame.max_stream_id_len)
    }

    /// Checks the fields that depend on each other or on the cipher.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let check = |field, value, min, max| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError::OutOfRange { field, value, min, max })
            }
        };
        check("frame.max_frame_len", self.frame.max_frame_len, 16 * 1024, 16 * 1024 * 1024)?;
        check("frame.max_stream_id_len", self.frame.max_stream_id_len, 36, 1024)?;
        let payload = self.max_payload_len();
        check("record_len", self.record_len, 1, (MAX_NOISE_LEN.min(payload)) - TAG_LEN)?;
        check("segment_len", self.segment_len, 1, payload)?;
        check("max_message_len", self.max_message_len, 1, u32::MAX as usize)?;
        check("window_segments", self.window_segments as usize, 1, self.reorder_segments as usize)?;
        check("window_bytes", self.window_bytes, 1, self.reorder_bytes)?;
        check("reorder_segments", self.reorder_segments as usize, 1, 1 << 16)?;
        check("max_authorization_len", self.max_authorization_len, 1, 8 * 1024)?;
        check("ack_every", self.ack_every as usize, 1, u32::MAX as usize)?;
        Ok(())
    }
}
