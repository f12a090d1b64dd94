//! The frame codec: one frame per binary websocket message.
//!
//! Invariant: a decoded [`Frame`] is valid. Everything that the protocol calls invalid is a
//! [`FrameError`] here and never reaches an endpoint; damaged bytes never panic. Decoding copies no
//! payload.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::{encode_varint, encoded_len_varint};

use crate::config::FrameLimits;
use crate::id::StreamId;
use crate::proto::{self, relay_message_frame::Body as WireBody};

/// The only protocol version.
pub const VERSION: u32 = 1;

/// One frame.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    /// The stream it belongs to.
    pub stream_id: StreamId,
    /// Highest contiguous segment received; 0 also when there is none yet.
    pub ack: u32,
    /// Bit `i` says that segment `ack + 1 + i` has arrived.
    pub ack_bits: u32,
    /// What the frame is for.
    pub body: Body,
    /// W3C trace context: `traceparent`.
    pub traceparent: Option<String>,
    /// W3C trace context: `tracestate`.
    pub tracestate: Option<String>,
}

/// What a frame is for.
#[derive(Clone, PartialEq, Eq)]
pub enum Body {
    /// One segment of the stream.
    Data(Data),
    /// An acknowledgement that no other frame carries.
    Ack,
    /// Announces a stream, or continues one over a new socket.
    Resume {
        /// The number of the sender's next new segment.
        next_seq: u32,
    },
    /// Ends the stream.
    Reset {
        /// Why; never empty.
        reason: String,
    },
    /// Shows that the sender is alive.
    Heartbeat,
    /// A message of the Noise handshake.
    Handshake {
        /// The message; never empty.
        payload: Bytes,
    },
}

/// One segment.
#[derive(Clone, PartialEq, Eq)]
pub struct Data {
    /// The segment's number in the stream, from 0.
    pub seq: u32,
    /// Its place in its message, from 0.
    pub segment_index: u32,
    /// How many segments its message has.
    pub segment_count: u32,
    /// A record, or a part of a clear message; never empty.
    pub payload: Bytes,
}

/// The kind of a frame's body, without its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BodyKind {
    /// [`Body::Data`].
    Data,
    /// [`Body::Ack`].
    Ack,
    /// [`Body::Resume`].
    Resume,
    /// [`Body::Reset`].
    Reset,
    /// [`Body::Heartbeat`].
    Heartbeat,
    /// [`Body::Handshake`].
    Handshake,
}

/// Why a frame was dropped. It affects only that frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame is longer than [`FrameLimits::max_frame_len`].
    #[error("frame of {len} bytes is longer than {max}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The bytes are not the protobuf message of a frame.
    #[error("not a relay frame")]
    Malformed(#[from] prost::DecodeError),
    /// A field of the frame, by its protobuf number, is truncated or of the wrong type.
    #[error("field {0} is cut short or damaged")]
    Damaged(u32),
    /// The frame has a version other than [`VERSION`].
    #[error("version {0} is not {VERSION}")]
    Version(u32),
    /// The stream id is empty, or longer than [`FrameLimits::max_stream_id_len`].
    #[error("stream id of {len} bytes is not within 1..={max}")]
    StreamId {
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The frame has no body, or one of an unknown kind.
    #[error("no body")]
    NoBody,
    /// A data frame has no payload.
    #[error("data without payload")]
    EmptyData,
    /// A segment contradicts itself: its index is not below its count, or above its number.
    #[error("invalid segment: {index} of {count} at seq {seq}")]
    Segment {
        /// The segment's number.
        seq: u32,
        /// Its place in its message.
        index: u32,
        /// How many segments its message has.
        count: u32,
    },
    /// A reset has no reason.
    #[error("reset without a reason")]
    EmptyReset,
    /// A handshake has no payload.
    #[error("handshake without payload")]
    EmptyHandshake,
}

impl Frame {
    /// A frame without trace context.
    pub fn new(stream_id: StreamId, ack: u32, ack_bits: u32, body: Body) -> Self {
        Self { stream_id, ack, ack_bits, body, traceparent: None, tracestate: None }
    }

    /// Reads and validates one binary websocket message; payloads share its memory.
    pub fn decode(bytes: Bytes, limits: &FrameLimits) -> Result<Self, FrameError> {
        if bytes.len() > limits.max_frame_len {
            return Err(FrameError::TooLong { len: bytes.len(), max: limits.max_frame_len });
        }
        let wire = proto::RelayMessageFrame::decode(bytes)?;
        if wire.version != VERSION {
            return Err(FrameError::Version(wire.version));
        }
        let stream_id = stream_id(&wire.stream_id, limits)?;
        let body = match wire.body.ok_or(FrameError::NoBody)? {
            WireBody::Data(data) => Body::Data(Data::from_wire(data)?),
            WireBody::AckFrame(_) => Body::Ack,
            WireBody::Resume(resume) => Body::Resume { next_seq: resume.next_seq },
            WireBody::Reset(reset) if reset.reason.is_empty() => {
                return Err(FrameError::EmptyReset);
            }
            WireBody::Reset(reset) => Body::Reset { reason: reset.reason },
            WireBody::Heartbeat(_) => Body::Heartbeat,
            WireBody::Handshake(handshake) if handshake.payload.is_empty() => {
                return Err(FrameError::EmptyHandshake);
            }
            WireBody::Handshake(handshake) => Body::Handshake { payload: handshake.payload },
        };
        Ok(Self {
            stream_id,
            ack: wire.ack,
            ack_bits: wire.ack_bits,
            body,
            traceparent: wire.traceparent,
            tracestate: wire.tracestate,
        })
    }

    /// The bytes of one binary websocket message.
    pub fn encode(&self) -> Bytes {
        let body = match &self.body {
            Body::Data(data) => WireBody::Data(proto::RelayData {
                seq: data.seq,
                segment_index: data.segment_index,
                segment_count: data.segment_count,
                payload: data.payload.clone(),
            }),
            Body::Ack => WireBody::AckFrame(proto::RelayAck {}),
            Body::Resume { next_seq } => {
                WireBody::Resume(proto::RelayResume { next_seq: *next_seq })
            }
            Body::Reset { reason } => WireBody::Reset(proto::RelayReset { reason: reason.clone() }),
            Body::Heartbeat => WireBody::Heartbeat(proto::RelayHeartbeat {}),
            Body::Handshake { payload } => {
                WireBody::Handshake(proto::RelayHandshake { payload: payload.clone() })
            }
        };
        let wire = proto::RelayMessageFrame {
            version: VERSION,
            stream_id: self.stream_id.as_str().to_owned(),
            ack: self.ack,
            ack_bits: self.ack_bits,
            traceparent: self.traceparent.clone(),
            tracestate: self.tracestate.clone(),
            body: Some(body),
        };
        Bytes::from(wire.encode_to_vec())
    }
}

impl Data {
    fn from_wire(data: proto::RelayData) -> Result<Self, FrameError> {
        if data.payload.is_empty() {
            return Err(FrameError::EmptyData);
        }
        // A segment's message starts `segment_index` segments before it, so not before 0.
        if data.segment_index >= data.segment_count || data.segment_index > data.seq {
            return Err(FrameError::Segment {
                seq: data.seq,
                index: data.segment_index,
                count: data.segment_count,
            });
        }
        Ok(Self {
            seq: data.seq,
            segment_index: data.segment_index,
            segment_count: data.segment_count,
            payload: data.payload,
        })
    }
}

impl Body {
    /// The kind of this body.
    pub fn kind(&self) -> BodyKind {
        match self {
            Self::Data(_) => BodyKind::Data,
            Self::Ack => BodyKind::Ack,
            Self::Resume { .. } => BodyKind::Resume,
            Self::Reset { .. } => BodyKind::Reset,
            Self::Heartbeat => BodyKind::Heartbeat,
            Self::Handshake { .. } => BodyKind::Handshake,
        }
    }
}

pub(crate) fn stream_id(name: &str, limits: &FrameLimits) -> Result<StreamId, FrameError> {
    let error = FrameError::StreamId { len: name.len(), max: limits.max_stream_id_len };
    if name.len() > limits.max_stream_id_len {
        return Err(error);
    }
    StreamId::new(name).ok_or(error)
}

/// The header of a data frame: everything but its payload.
#[derive(Clone, Copy)]
pub(crate) struct DataHead {
    pub(crate) ack: u32,
    pub(crate) ack_bits: u32,
    pub(crate) seq: u32,
    pub(crate) segment_index: u32,
    pub(crate) segment_count: u32,
}

/// Begins a data frame to which the caller appends a payload of `payload_len` bytes. The payload comes
/// last, so a record is encrypted in the send buffer. The bytes equal those of [`Frame::encode`].
pub(crate) fn begin_data(stream_id: &str, head: DataHead, payload_len: usize) -> BytesMut {
    let fields = [(1, head.seq), (2, head.segment_index), (3, head.segment_count)];
    let data_len = fields.iter().map(|&(_, value)| uint32_len(value)).sum::<usize>()
        + 1
        + encoded_len_varint(payload_len as u64)
        + payload_len;
    let total = uint32_len(VERSION)
        + 1
        + encoded_len_varint(stream_id.len() as u64)
        + stream_id.len()
        + uint32_len(head.ack)
        + uint32_len(head.ack_bits)
        + 1
        + encoded_len_varint(data_len as u64)
        + data_len;

    let mut out = BytesMut::with_capacity(total);
    put_uint32(&mut out, 1, VERSION);
    put_len(&mut out, 2, stream_id.len());
    out.put_slice(stream_id.as_bytes());
    put_uint32(&mut out, 3, head.ack);
    put_uint32(&mut out, 4, head.ack_bits);
    put_len(&mut out, 5, data_len);
    for (field, value) in fields {
        put_uint32(&mut out, field, value);
    }
    put_len(&mut out, 4, payload_len);
    out
}

/// Length of a uint32 field with a one-byte tag; proto3 leaves zeros out.
fn uint32_len(value: u32) -> usize {
    if value == 0 { 0 } else { 1 + encoded_len_varint(u64::from(value)) }
}

fn put_uint32(out: &mut BytesMut, field: u8, value: u32) {
    if value != 0 {
        out.put_u8(field << 3);
        encode_varint(u64::from(value), out);
    }
}

fn put_len(out: &mut BytesMut, field: u8, len: usize) {
    out.put_u8(field << 3 | 2);
    encode_varint(len as u64, out);
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("stream_id", &self.stream_id)
            .field("ack", &self.ack)
            .field("ack_bits", &self.ack_bits)
            .field("body", &self.body)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data(data) => data.fmt(f),
            Self::Ack => f.write_str("Ack"),
            Self::Resume { next_seq } => write!(f, "Resume({next_seq})"),
            Self::Reset { reason } => write!(f, "Reset({} bytes)", reason.len()),
            Self::Heartbeat => f.write_str("Heartbeat"),
            Self::Handshake { payload } => write!(f, "Handshake({} bytes)", payload.len()),
        }
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seq, segment_index, segment_count, payload } = self;
        write!(f, "Data({seq}, {segment_index}/{segment_count}, {} bytes)", payload.len())
    }
}
