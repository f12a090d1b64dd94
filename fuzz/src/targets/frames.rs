//! Frames of the relay: the codec of endpoints, and the router's cheaper reader.

use bytes::Bytes;
use codex_exec_relay_core::{BodyKind, Frame, FrameLimits, peek};

use super::kind_of;

/// What the codec takes, the router reads in the same way, and the codec writes without a change of meaning.
pub(super) fn check(bytes: &[u8]) -> u64 {
    let limits = FrameLimits::default();
    let bytes = Bytes::copy_from_slice(bytes);
    let peeked = peek(&bytes, &limits);
    let frame = match Frame::decode(bytes.clone(), &limits) {
        Ok(frame) => frame,
        Err(error) => return kind_of(error) * 2 + u64::from(peeked.is_ok()),
    };
    let peeked = peeked.expect("a router refuses a frame that endpoints take");
    assert_eq!(peeked.stream_id, frame.stream_id.as_str());
    assert_eq!(peeked.kind, frame.body.kind());
    let acknowledges = frame.body.kind() == BodyKind::Ack || frame.ack > 0 || frame.ack_bits > 0;
    assert_eq!(peeked.acknowledges, acknowledges);
    let written = frame.encode();
    assert!(written.len() <= bytes.len() + 16, "a frame grew from {} bytes", bytes.len());
    assert!(Frame::decode(written, &limits).is_ok_and(|again| again == frame));
    let tight = FrameLimits { max_frame_len: bytes.len() - 1, ..limits };
    assert!(Frame::decode(bytes.clone(), &tight).is_err() && peek(&bytes, &tight).is_err());
    kind_of(frame.body.kind())
}
