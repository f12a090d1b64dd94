//! Outgoing messages: each is serialized once, directly to bytes, never through a tree of values.
//!
//! Types with bulk bytes implement [`Encode::encode_into`] by hand, so that base64 goes directly into the
//! message, without an intermediate string or a second scan for escapes. A test compares each of them with
//! serde's output.

use serde::Serialize;

use crate::base64_bytes::Base64Bytes;
use crate::envelope::RequestId;
use crate::error::RpcError;
use crate::methods::{Call, Notification, ServerCall};
use crate::process::{ExecOutputDeltaNotification, ProcessOutputChunk, ReadResponse, WriteParams};
use crate::resources::{EndedBy, Usage};

/// A part of a message that can write itself as JSON.
pub trait Encode: Serialize {
    /// Appends the JSON text.
    fn encode_into(&self, out: &mut Vec<u8>) {
        json(self, out);
    }

    /// The approximate length of that text.
    fn size_hint(&self) -> usize {
        128
    }
}

/// Implements [`Encode`] with serde for these types.
macro_rules! by_serde {
    ($($ty:ty),* $(,)?) => { $(impl $crate::encode::Encode for $ty {})* };
}
pub(crate) use by_serde;

/// Encodes a request.
pub fn request<C: Call>(id: &RequestId, params: &C::Params) -> Vec<u8> {
    named_request(id, C::METHOD.name(), params)
}

/// Encodes a request of the server to the client.
pub fn server_request<C: ServerCall>(id: &RequestId, params: &C::Params) -> Vec<u8> {
    named_request(id, C::NAME, params)
}

fn named_request(id: &RequestId, method: &str, params: &impl Encode) -> Vec<u8> {
    let mut out = Vec::with_capacity(96 + params.size_hint());
    out.extend_from_slice(b"{\"id\":");
    json(id, &mut out);
    out.extend_from_slice(b",\"method\":\"");
    out.extend_from_slice(method.as_bytes());
    out.extend_from_slice(b"\",\"params\":");
    params.encode_into(&mut out);
    out.push(b'}');
    out
}

/// Encodes a successful response.
pub fn response<R: Encode + ?Sized>(id: &RequestId, result: &R) -> Vec<u8> {
    response_in(Vec::with_capacity(64 + result.size_hint()), id, result)
}

/// Encodes a successful response into the caller's buffer, which it clears first.
pub fn response_in<R: Encode + ?Sized>(mut out: Vec<u8>, id: &RequestId, result: &R) -> Vec<u8> {
    out.clear();
    out.extend_from_slice(b"{\"id\":");
    json(id, &mut out);
    out.extend_from_slice(b",\"result\":");
    result.encode_into(&mut out);
    out.push(b'}');
    out
}

/// Encodes an error response.
pub fn error(id: &RequestId, error: &RpcError) -> Vec<u8> {
    let mut out = Vec::with_capacity(96 + error.message.len());
    out.extend_from_slice(b"{\"error\":");
    json(error, &mut out);
    out.extend_from_slice(b",\"id\":");
    json(id, &mut out);
    out.push(b'}');
    out
}

/// Encodes a notification.
pub fn notification<N: Notification>(params: &N::Params) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + params.size_hint());
    out.extend_from_slice(b"{\"method\":\"");
    out.extend_from_slice(N::NAME.as_bytes());
    out.extend_from_slice(b"\",\"params\":");
    params.encode_into(&mut out);
    out.push(b'}');
    out
}

pub(crate) fn json<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) {
    // Writing to a Vec cannot fail, and every type of this crate serializes: their maps have
    // string keys and no float is carried.
    if let Err(error) = serde_json::to_writer(out, value) {
        unreachable!("protocol types serialize: {error}");
    }
}

pub(crate) fn member(name: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

/// `"name":"base64"`.
pub(crate) fn base64_member(name: &str, bytes: &Base64Bytes, out: &mut Vec<u8>) {
    member(name, out);
    out.push(b'"');
    bytes.encode_into(out);
    out.push(b'"');
}

impl Encode for ExecOutputDeltaNotification {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        member("processId", out);
        json(&self.process_id, out);
        out.push(b',');
        chunk_members(self.seq, self.stream, &self.chunk, out);
        out.push(b'}');
    }

    fn size_hint(&self) -> usize {
        96 + self.process_id.0.len() + self.chunk.encoded_len()
    }
}

impl Encode for ReadResponse {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"chunks\":[");
        for (at, ProcessOutputChunk { seq, stream, chunk }) in self.chunks.iter().enumerate() {
            out.extend_from_slice(if at == 0 { b"{" } else { b",{" });
            chunk_members(*seq, *stream, chunk, out);
            out.push(b'}');
        }
        // The members after `chunks` are small; serde writes them, without its opening brace.
        out.extend_from_slice(b"],");
        let tail = ReadTail {
            next_seq: self.next_seq,
            exited: self.exited,
            exit_code: self.exit_code,
            closed: self.closed,
            failure: self.failure.as_deref(),
            sandbox_denied: self.sandbox_denied,
            dropped_bytes: Some(self.dropped_bytes).filter(|&n| n > 0),
            ended_by: self.ended_by,
            usage: self.usage,
        };
        let brace = out.len();
        json(&tail, out);
        out.remove(brace);
    }

    fn size_hint(&self) -> usize {
        256 + self.chunks.iter().map(|c| 64 + c.chunk.encoded_len()).sum::<usize>()
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReadTail<'a> {
    next_seq: u64,
    exited: bool,
    exit_code: Option<i32>,
    closed: bool,
    failure: Option<&'a str>,
    sandbox_denied: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_by: Option<EndedBy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

fn chunk_members(
    seq: u64,
    stream: crate::process::OutputStream,
    chunk: &Base64Bytes,
    out: &mut Vec<u8>,
) {
    member("seq", out);
    json(&seq, out);
    out.extend_from_slice(b",\"stream\":\"");
    out.extend_from_slice(stream.as_str().as_bytes());
    out.extend_from_slice(b"\",");
    base64_member("chunk", chunk, out);
}

impl Encode for WriteParams {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        member("processId", out);
        json(&self.process_id, out);
        out.push(b',');
        base64_member("chunk", &self.chunk, out);
        if let Some(write_id) = &self.write_id {
            out.push(b',');
            member("writeId", out);
            json(write_id, out);
        }
        if self.close_stdin {
            out.extend_from_slice(b",\"closeStdin\":true");
        }
        out.push(b'}');
    }

    fn size_hint(&self) -> usize {
        128 + self.process_id.0.len() + self.chunk.encoded_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::OutputStream;
    use proptest::prelude::*;

    fn same<T: Encode>(value: &T) {
        let mut direct = Vec::new();
        value.encode_into(&mut direct);
        let serde = serde_json::to_string(value).unwrap();
        assert_eq!(String::from_utf8(direct).unwrap(), serde);
        assert!(serde.len() <= value.size_hint() + 64, "{} > {}", serde.len(), value.size_hint());
    }

    proptest! {
        #[test]
        fn manual_encoding_matches_serde(
            id in "\\PC{0,8}",
            write_id in proptest::option::of("\\PC{0,8}"),
            close_stdin: bool,
            seq: u64,
            bytes: Vec<u8>,
            dropped_bytes in 0u64..3,
            exit_code in proptest::option::of(-1i32..300),
            failure in proptest::option::of("\\PC{0,8}"),
        ) {
            let chunk = Base64Bytes::from(bytes);
            same(&ExecOutputDeltaNotification {
                process_id: id.as_str().into(),
                seq,
                stream: OutputStream::Pty,
                chunk: chunk.clone(),
            });
            same(&WriteParams {
                process_id: id.as_str().into(),
                chunk: chunk.clone(),
                write_id,
                close_stdin,
            });
            for count in 0..3 {
                let chunk = ProcessOutputChunk { seq, stream: OutputStream::Stderr, chunk: chunk.clone() };
                same(&ReadResponse {
                    chunks: vec![chunk; count],
                    next_seq: seq,
                    exited: close_stdin,
                    exit_code,
                    closed: false,
                    failure: failure.clone(),
                    sandbox_denied: true,
                    dropped_bytes,
                    ended_by: close_stdin.then_some(EndedBy::Wall),
                    usage: exit_code.map(|_| Usage { cpu_us: seq, ..Usage::default() }),
                });
            }
        }
    }
}
