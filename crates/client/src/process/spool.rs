//! A queue of output on disk.
//!
//! Invariant: memory is bounded by one page of writes and one of reads, plus the current chunk; disk
//! usage by the queued bytes, rounded up to a segment. The files have no names, so nothing is left of
//! them however this program ends.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use bytes::Bytes;
use codex_exec_server_protocol::process::OutputStream;

/// Size at which a new file starts, in bytes. A file is deleted when all of it was read.
const SEGMENT: u64 = 16 << 20;

/// Size of reads and writes, in bytes.
const PAGE: usize = 64 << 10;

/// A chunk is written as its stream (one byte), its length (four) and its bytes.
const HEADER: usize = 5;

/// A queue of chunks in unnamed files.
#[derive(Debug)]
pub(crate) struct Spool {
    /// Size at which a new file starts, in bytes.
    segment: u64,
    /// Oldest first; only the last is written.
    segments: VecDeque<Segment>,
    /// The end of the last segment, not on disk yet.
    unwritten: Vec<u8>,
    /// The beginning of the first segment, already in memory.
    page: Bytes,
    /// Bytes of output in the queue.
    len: u64,
    chunks: u64,
}

#[derive(Debug)]
struct Segment {
    file: File,
    written: u64,
    read: u64,
}

impl Default for Spool {
    fn default() -> Self {
        Self::new(SEGMENT)
    }
}

impl Spool {
    fn new(segment: u64) -> Self {
        Self {
            segment,
            segments: VecDeque::new(),
            unwritten: Vec::new(),
            page: Bytes::new(),
            len: 0,
            chunks: 0,
        }
    }

    /// Bytes of output in the queue.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Appends a chunk; on an error the queue is unchanged.
    pub(crate) fn push(&mut self, stream: OutputStream, bytes: &[u8]) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        if self.segments.back().is_none_or(|last| last.written >= self.segment) {
            self.flush()?;
            let file = tempfile::tempfile()?;
            self.segments.push_back(Segment { file, written: 0, read: 0 });
        }
        let before = self.unwritten.len();
        self.unwritten.push(code(stream));
        self.unwritten.extend_from_slice(&len.to_le_bytes());
        self.unwritten.extend_from_slice(bytes);
        if self.unwritten.len() >= PAGE
            && let Err(error) = self.flush()
        {
            // Earlier chunks stay in memory until they are written or read.
            self.unwritten.truncate(before);
            return Err(error);
        }
        self.len += u64::from(len);
        self.chunks += 1;
        Ok(())
    }

    /// Takes the first chunk; `None` if the queue is empty.
    pub(crate) fn pop(&mut self) -> io::Result<Option<(OutputStream, Bytes)>> {
        if self.chunks == 0 {
            return Ok(None);
        }
        self.fill(HEADER)?;
        let header = self.page.split_to(HEADER);
        let stream = stream(header[0])?;
        let len = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
        self.fill(len as usize)?;
        // A copy, so that the chunk does not keep the page in memory.
        let bytes = Bytes::copy_from_slice(&self.page.split_to(len as usize));
        self.len -= u64::from(len);
        self.chunks -= 1;
        if self.chunks == 0 {
            *self = Self::new(self.segment);
        }
        Ok(Some((stream, bytes)))
    }

    /// Writes the unwritten bytes to disk; on an error they stay in memory.
    fn flush(&mut self) -> io::Result<()> {
        if let Some(last) = self.segments.back_mut() {
            last.file.seek(SeekFrom::Start(last.written))?;
            last.file.write_all(&self.unwritten)?;
            last.written += self.unwritten.len() as u64;
            self.unwritten.clear();
        }
        Ok(())
    }

    /// Reads until the page has at least `least` bytes.
    fn fill(&mut self, least: usize) -> io::Result<()> {
        while self.page.len() < least {
            let wanted = (least - self.page.len()).max(PAGE) as u64;
            let Some(first) = self.segments.front_mut() else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            let ready = (first.written - first.read).min(wanted);
            if ready == 0 {
                if self.segments.len() > 1 {
                    self.segments.pop_front();
                    continue;
                }
                // Not on disk yet.
                if self.unwritten.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.page = [&self.page, &self.unwritten[..]].concat().into();
                self.unwritten.clear();
                continue;
            }
            let mut page = Vec::with_capacity(self.page.len() + ready as usize);
            page.extend_from_slice(&self.page);
            first.file.seek(SeekFrom::Start(first.read))?;
            (&mut first.file).take(ready).read_to_end(&mut page)?;
            let got = (page.len() - self.page.len()) as u64;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            first.read += got;
            self.page = page.into();
        }
        Ok(())
    }
}

fn code(stream: OutputStream) -> u8 {
    match stream {
        OutputStream::Stdout => 0,
        OutputStream::Stderr => 1,
        OutputStream::Pty => 2,
    }
}

fn stream(code: u8) -> io::Result<OutputStream> {
    match code {
        0 => Ok(OutputStream::Stdout),
        1 => Ok(OutputStream::Stderr),
        2 => Ok(OutputStream::Pty),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn chunks_are_popped_in_the_order_and_form_they_were_pushed(
            steps in proptest::collection::vec((any::<bool>(), 0usize..4, 0usize..9, any::<u8>()), 0..200),
        ) {
            let sizes = [0, 1, 4, 5, 100, 4096, PAGE - HEADER, PAGE, 3 * PAGE];
            let streams = [OutputStream::Stdout, OutputStream::Stderr, OutputStream::Pty];
            let mut spool = Spool::new(4 * PAGE as u64);
            let mut model: VecDeque<(OutputStream, Vec<u8>)> = VecDeque::new();
            for (push, stream, size, byte) in steps {
                if push {
                    let (stream, bytes) = (streams[stream % 3], vec![byte; sizes[size]]);
                    spool.push(stream, &bytes).unwrap();
                    model.push_back((stream, bytes));
                } else {
                    let popped = spool.pop().unwrap().map(|(stream, bytes)| (stream, bytes.to_vec()));
                    prop_assert!(popped == model.pop_front());
                }
                let len: usize = model.iter().map(|(_, bytes)| bytes.len()).sum();
                prop_assert_eq!(spool.len(), len as u64);
            }
            while let Some((stream, bytes)) = spool.pop().unwrap() {
                prop_assert!(model.pop_front() == Some((stream, bytes.to_vec())));
            }
            prop_assert!(model.is_empty());
            prop_assert!(spool.segments.is_empty());
        }
    }
}
