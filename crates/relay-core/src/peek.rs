//! What a router needs of a frame: its stream, its kind, and whether its sender acknowledges.
//!
//! [`peek`] reads the tags of the outer message only, without allocation or copy, and never a body. It
//! accepts every frame that [`crate::Frame::decode`] accepts, with the same result; it also accepts frames
//! with an invalid body, which the endpoints check.

use crate::config::FrameLimits;
use crate::frame::{BodyKind, FrameError, VERSION};

/// A frame's address and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peek<'a> {
    /// The stream it belongs to.
    pub stream_id: &'a str,
    /// What kind of body it has.
    pub kind: BodyKind,
    /// Whether the frame shows that its sender acknowledges: it is an ack frame, or has an ack or ack
    /// bits above 0.
    pub acknowledges: bool,
}

/// Reads the address and the kind of a frame.
pub fn peek<'a>(bytes: &'a [u8], limits: &FrameLimits) -> Result<Peek<'a>, FrameError> {
    if bytes.len() > limits.max_frame_len {
        return Err(FrameError::TooLong { len: bytes.len(), max: limits.max_frame_len });
    }
    let mut rest = bytes;
    let mut version = 0u32;
    let (mut ack, mut ack_bits) = (0u32, 0u32);
    let mut stream_id: &[u8] = &[];
    let mut kind = None;
    while !rest.is_empty() {
        let tag = varint(&mut rest).ok_or(FrameError::Damaged(0))?;
        let field = u32::try_from(tag >> 3).map_err(|_| FrameError::Damaged(0))?;
        let damaged = FrameError::Damaged(field);
        let wire_type = tag & 7;
        let expected = match field {
            0 => return Err(damaged),
            1 | 3 | 4 => Some(0),
            2 | 5..=12 => Some(2),
            _ => None,
        };
        if expected.is_some_and(|expected| expected != wire_type) {
            return Err(damaged);
        }
        let contents = match value(&mut rest, field, wire_type, 0).ok_or(damaged)? {
            Value::Varint(value) => {
                match field {
                    1 => version = value as u32,
                    3 => ack = value as u32,
                    4 => ack_bits = value as u32,
                    _ => {}
                }
                continue;
            }
            Value::Bytes(contents) => contents,
            Value::Skipped => continue,
        };
        match field {
            2 => stream_id = contents,
            5 => kind = Some(BodyKind::Data),
            6 => kind = Some(BodyKind::Ack),
            7 => kind = Some(BodyKind::Resume),
            8 => kind = Some(BodyKind::Reset),
            9 => kind = Some(BodyKind::Heartbeat),
            10 => kind = Some(BodyKind::Handshake),
            _ => {}
        }
    }
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    if stream_id.is_empty() || stream_id.len() > limits.max_stream_id_len {
        return Err(FrameError::StreamId { len: stream_id.len(), max: limits.max_stream_id_len });
    }
    let stream_id = std::str::from_utf8(stream_id).map_err(|_| FrameError::Damaged(2))?;
    let kind = kind.ok_or(FrameError::NoBody)?;
    let acknowledges = kind == BodyKind::Ack || ack > 0 || ack_bits > 0;
    Ok(Peek { stream_id, kind, acknowledges })
}

enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Skipped,
}

/// How deep groups may nest; as deep as the decoder follows them.
const MAX_DEPTH: usize = 100;

fn value<'a>(rest: &mut &'a [u8], field: u32, wire_type: u64, depth: usize) -> Option<Value<'a>> {
    match wire_type {
        0 => return varint(rest).map(Value::Varint),
        1 => take(rest, 8)?,
        2 => {
            let len = usize::try_from(varint(rest)?).ok()?;
            return take(rest, len).map(Value::Bytes);
        }
        // A group, of which only unknown fields can be made: everything up to its end.
        3 if depth < MAX_DEPTH => loop {
            let tag = varint(rest)?;
            let inner = u32::try_from(tag >> 3).ok().filter(|inner| *inner > 0)?;
            if tag & 7 == 4 {
                return (inner == field).then_some(Value::Skipped);
            }
            value(rest, inner, tag & 7, depth + 1)?;
        },
        5 => take(rest, 4)?,
        _ => return None,
    };
    Some(Value::Skipped)
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    Some(head)
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for (index, &byte) in rest.iter().take(10).enumerate() {
        if index == 9 && byte > 1 {
            return None;
        }
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            *rest = &rest[index + 1..];
            return Some(value);
        }
    }
    None
}
