//! Frames between a server and its helper.
//!
//! Format: `u32` length of the head, `u32` length of the payload (both little-endian), the head in
//! MessagePack, the raw payload. File contents are always in the payload, so they are neither encoded
//! nor copied.
//!
//! Invariant: neither side allocates for a frame longer than [`MAX_HEAD`] and [`MAX_PAYLOAD`].

use std::io::{self, Read, Write};

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::files::operation::Payload;
use crate::files::{Event, FileError, Operation, Outcome};

/// Maximum length of a head, in bytes; the longest is a listing of 50,000 long names.
pub(super) const MAX_HEAD: usize = 128 << 20;
/// Maximum length of a payload, in bytes; more than the largest file that is read or written at once.
pub(super) const MAX_PAYLOAD: usize = 1 << 30;
/// Events of one operation that the helper may send before the server has acknowledged the first.
pub(super) const WINDOW: usize = 16;
/// The same for a watch, whose events may be large.
pub(super) const WATCH_WINDOW: usize = 2;

/// Messages to the helper.
#[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
pub(super) enum Request {
    /// Run this operation, with at most `room` bytes in its outcome; reply with the same id.
    Run { id: u64, room: u64, operation: Box<Operation> },
    /// Cancel this operation.
    Cancel { id: u64 },
    /// Acknowledges one event; the helper may send another.
    Taken { id: u64 },
}

/// Messages from the helper.
#[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
pub(super) enum Reply {
    /// An event of a running operation.
    Event { id: u64, event: Event },
    /// The result of an operation.
    Done { id: u64, result: Result<Outcome, FileError> },
}

impl Payload for Request {
    fn take_payload(&mut self) -> Bytes {
        match self {
            Self::Run { operation, .. } => operation.take_payload(),
            _ => Bytes::new(),
        }
    }

    fn put_payload(&mut self, bytes: Bytes) {
        if let Self::Run { operation, .. } = self {
            operation.put_payload(bytes);
        }
    }
}

impl Payload for Reply {
    fn take_payload(&mut self) -> Bytes {
        match self {
            Self::Done { result: Ok(outcome), .. } => outcome.take_payload(),
            _ => Bytes::new(),
        }
    }

    fn put_payload(&mut self, bytes: Bytes) {
        if let Self::Done { result: Ok(outcome), .. } = self {
            outcome.put_payload(bytes);
        }
    }
}

/// A frame, ready to write: lengths and head, then the payload.
pub(super) struct Frame {
    head: Vec<u8>,
    payload: Bytes,
}

impl Frame {
    pub(super) fn new<T: Payload + Serialize>(mut message: T) -> io::Result<Self> {
        let payload = message.take_payload();
        let mut head = vec![0; 8];
        rmp_serde::encode::write_named(&mut head, &message).map_err(invalid)?;
        let head_len = bounded(head.len() - 8, MAX_HEAD)?;
        let payload_len = bounded(payload.len(), MAX_PAYLOAD)?;
        head[..4].copy_from_slice(&head_len.to_le_bytes());
        head[4..8].copy_from_slice(&payload_len.to_le_bytes());
        Ok(Self { head, payload })
    }

    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.head)?;
        out.write_all(&self.payload)?;
        out.flush()
    }

    pub(super) async fn write_async(&self, out: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        out.write_all(&self.head).await?;
        out.write_all(&self.payload).await?;
        out.flush().await
    }
}

/// Reads the next message; `None` at the end of the input, which must be between two frames.
pub(super) fn read<T: Payload + DeserializeOwned>(input: &mut impl Read) -> io::Result<Option<T>> {
    let mut lengths = [0; 8];
    let mut got = 0;
    while got < lengths.len() {
        match input.read(&mut lengths[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let (head_len, payload_len) = check_lengths(lengths)?;
    let mut part = |len: usize| {
        let mut bytes = Vec::with_capacity(len);
        if input.by_ref().take(len as u64).read_to_end(&mut bytes)? < len {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        Ok(bytes)
    };
    let (head, payload) = (part(head_len)?, part(payload_len)?);
    decode(&head, payload.into()).map(Some)
}

/// Like [`read`].
pub(super) async fn read_async<T: Payload + DeserializeOwned>(
    input: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<T>> {
    let mut lengths = [0; 8];
    let first = input.read(&mut lengths).await?;
    if first == 0 {
        return Ok(None);
    }
    input.read_exact(&mut lengths[first..]).await?;
    let (head_len, payload_len) = check_lengths(lengths)?;
    let head = read_part(input, head_len).await?;
    let payload = read_part(input, payload_len).await?;
    decode(&head, payload).map(Some)
}

async fn read_part(input: &mut (impl AsyncRead + Unpin), len: usize) -> io::Result<Bytes> {
    let mut bytes = BytesMut::with_capacity(len);
    let mut input = input.take(len as u64);
    while bytes.len() < len {
        if input.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(bytes.freeze())
}

fn check_lengths(lengths: [u8; 8]) -> io::Result<(usize, usize)> {
    let [a, b, c, d, e, f, g, h] = lengths;
    let head = u32::from_le_bytes([a, b, c, d]) as usize;
    let payload = u32::from_le_bytes([e, f, g, h]) as usize;
    bounded(head, MAX_HEAD)?;
    bounded(payload, MAX_PAYLOAD)?;
    Ok((head, payload))
}

fn decode<T: Payload + DeserializeOwned>(head: &[u8], payload: Bytes) -> io::Result<T> {
    let mut message: T = rmp_serde::from_slice(head).map_err(invalid)?;
    message.put_payload(payload);
    Ok(message)
}

fn bounded(len: usize, limit: usize) -> io::Result<u32> {
    match u32::try_from(len) {
        Ok(short) if len <= limit => Ok(short),
        _ => Err(invalid(format!("a frame part of {len} bytes is longer than {limit}"))),
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use codex_exec_server_protocol::PathUri;
    use codex_exec_server_protocol::files::*;
    use proptest::prelude::*;

    fn path() -> PathUri {
        PathUri::from_native(b"/d/\xff x").unwrap()
    }

    fn round_trip<T: Payload + Serialize + DeserializeOwned>(message: T) -> T {
        let mut bytes = Vec::new();
        Frame::new(message).unwrap().write(&mut bytes).unwrap();
        let mut input = &bytes[..];
        let back = read(&mut input).unwrap().unwrap();
        assert!(input.is_empty());
        back
    }

    #[test]
    fn file_contents_are_sent_as_payload_without_a_copy() {
        let data = Bytes::from(vec![7; 1 << 20]);
        let operation =
            Box::new(Operation::WriteFile(FsWriteFileParams::new(path(), data.clone())));
        let frame =
            Frame::new(Request::Run { id: 1, room: u64::MAX, operation: operation.clone() })
                .unwrap();
        assert!(frame.head.len() < 200);
        assert_eq!(frame.payload.as_ptr(), data.as_ptr());
        let Request::Run { operation: back, .. } =
            round_trip(Request::Run { id: 1, room: u64::MAX, operation: operation.clone() })
        else {
            panic!("another message");
        };
        assert_eq!(back, operation);
    }

    #[test]
    fn replies_round_trip() {
        let outcomes = [
            Ok(Outcome::Remove(FsDone {})),
            Ok(Outcome::ReadBlock(FsReadBlockResponse { chunk: vec![1, 2].into(), eof: true })),
            Ok(Outcome::GetMetadata(FsGetMetadataResponse {
                nlink: Some(2),
                ..Default::default()
            })),
            Ok(Outcome::ReadDirectory(FsReadDirectoryResponse {
                entries: vec![FsReadDirectoryEntry {
                    file_name: "x".into(),
                    is_directory: false,
                    is_file: true,
                    file_name_uri: Some(path()),
                }],
                truncated: true,
                dead_links: vec!["y".into()],
            })),
            Ok(Outcome::Walk(FsWalkResponse {
                entries: vec![FsWalkEntry { path: path(), kind: FsEntryKind::File }],
                errors: vec![FsPathError { path: path(), message: "no".into() }],
                truncated: false,
            })),
            Err(FileError::Os { action: "open".into(), path: path(), errno: 2 }),
            Err(FileError::Cancelled),
        ];
        for result in outcomes {
            let reply = round_trip(Reply::Done { id: 9, result: result.clone() });
            assert_eq!(reply, Reply::Done { id: 9, result });
        }
        let changed = FsChangedNotification {
            watch_id: -3,
            changes: vec![FsChange { path: path(), kind: FsChangeKind::Removed }],
            overflow: true,
            ended: None,
        };
        let event = Event::Notify(crate::files::FileNotification::Changed(changed));
        let reply = round_trip(Reply::Event { id: 1, event: event.clone() });
        assert_eq!(reply, Reply::Event { id: 1, event });
    }

    #[test]
    fn oversized_frame_is_refused_before_it_is_read() {
        for (head, payload) in [(u32::MAX, 0), (1, u32::MAX)] {
            let mut bytes = head.to_le_bytes().to_vec();
            bytes.extend(payload.to_le_bytes());
            let error = read::<Reply>(&mut &bytes[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    proptest! {
        #[test]
        fn damaged_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            head in 0u32..300,
        ) {
            if bytes.len() >= 8 {
                bytes[..4].copy_from_slice(&head.to_le_bytes());
                bytes[4..8].fill(0);
            }
            let _ = read::<Request>(&mut &bytes[..]);
            let _ = read::<Reply>(&mut &bytes[..]);
        }

        #[test]
        fn truncated_frame_is_an_error(cut in 1usize..100) {
            let operation =
                Box::new(Operation::WriteFile(FsWriteFileParams::new(path(), vec![1; 40])));
            let mut bytes = Vec::new();
            Frame::new(Request::Run { id: 1, room: u64::MAX, operation }).unwrap().write(&mut bytes).unwrap();
            let cut = cut.min(bytes.len() - 1);
            prop_assert!(read::<Request>(&mut &bytes[..cut]).is_err());
        }
    }
}
