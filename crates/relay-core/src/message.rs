//! Whole messages out of records and segments.
//!
//! [`Deframer`] reads the Noise channel's byte stream (4-byte big-endian length, then the message);
//! [`Reassembler`] joins the segments of clear messages. Neither holds memory between messages, and
//! neither reserves more than it has received plus one step.

use bytes::{Buf, Bytes, BytesMut};

use crate::error::ProtocolError;
use crate::frame::Data;

pub(crate) const LENGTH_LEN: usize = 4;
/// Most memory reserved ahead of bytes that were only announced.
const RESERVE_STEP: usize = 1024 * 1024;

#[derive(Default)]
pub(crate) struct Deframer {
    buffer: BytesMut,
}

impl Deframer {
    /// Where the next record's plaintext is appended.
    pub(crate) fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    pub(crate) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// The next whole message, if there is one.
    pub(crate) fn next(&mut self, max: usize) -> Result<Option<Bytes>, ProtocolError> {
        let Some(&head) = self.buffer.first_chunk::<LENGTH_LEN>() else {
            if self.buffer.is_empty() {
                self.buffer = BytesMut::new();
            }
            return Ok(None);
        };
        let len = u32::from_be_bytes(head) as usize;
        if len == 0 || len > max {
            return Err(ProtocolError::MessageLength { len, max });
        }
        let whole = LENGTH_LEN + len;
        if self.buffer.len() < whole {
            let missing = whole - self.buffer.len();
            self.buffer.reserve(missing.min(RESERVE_STEP));
            return Ok(None);
        }
        let mut message = self.buffer.split_to(whole).freeze();
        message.advance(LENGTH_LEN);
        Ok(Some(message))
    }
}

#[derive(Default)]
pub(crate) struct Reassembler {
    buffer: BytesMut,
    /// Index and count of the segment that must come next; `None` between messages.
    expected: Option<(u32, u32)>,
}

impl Reassembler {
    pub(crate) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Adds the next segment in order; returns the message that it completes.
    pub(crate) fn push(&mut self, data: Data, max: usize) -> Result<Option<Bytes>, ProtocolError> {
        let Data { seq, segment_index, segment_count, payload } = data;
        let fits = match self.expected {
            None => segment_index == 0,
            Some(expected) => expected == (segment_index, segment_count),
        };
        if !fits {
            return Err(ProtocolError::Segments { seq });
        }
        let len = self.buffer.len() + payload.len();
        if len > max {
            return Err(ProtocolError::MessageLength { len, max });
        }
        if segment_count == 1 {
            return Ok(Some(payload));
        }
        self.buffer.extend_from_slice(&payload);
        if segment_index + 1 < segment_count {
            self.expected = Some((segment_index + 1, segment_count));
            return Ok(None);
        }
        self.expected = None;
        Ok(Some(std::mem::take(&mut self.buffer).freeze()))
    }
}
