//! What a process has written and may still be asked for.
//!
//! Chunks are kept in order, oldest dropped first, within a number of bytes and of chunks. A chunk
//! is *released* once the client was sent it, or, with [`RetainUntil::Read`], once the client has
//! said that it arrived; only released chunks are dropped, unless the client
//! asked for [`OnFull::Drop`]. While released chunks do not make enough room, the store is full and
//! its owner stops reading from the process.
//!
//! Invariant: the bytes kept never pass the limit by more than one chunk; every byte dropped is
//! counted.

use std::collections::VecDeque;
use std::io;

use bytes::Bytes;
use codex_exec_server_protocol::Base64Bytes;
use codex_exec_server_protocol::process::{OnFull, OutputStream, ProcessOutputChunk, RetainUntil};

use super::spool::Spool;

/// How much is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct RetentionLimits {
    pub bytes: u64,
    pub chunks: usize,
    pub on_full: OnFull,
    pub until: RetainUntil,
}

/// The store of one process.
#[derive(Debug)]
pub(super) struct Retention {
    limits: RetentionLimits,
    chunks: VecDeque<Kept>,
    /// Sum of the chunks' lengths.
    bytes: u64,
    /// Everything up to this number may be dropped.
    released: u64,
    /// Sum of the lengths of the chunks after `released`.
    pinned: u64,
    dropped: Dropped,
    spool: Option<Spool>,
}

#[derive(Debug)]
struct Kept {
    seq: u64,
    stream: OutputStream,
    len: u32,
    /// The bytes; empty if they are in the spool.
    bytes: Bytes,
}

/// Lengths of chunks that are gone, newest last, so that a reader learns what it missed.
#[derive(Debug, Default)]
struct Dropped {
    total: u64,
    /// The number of the last dropped chunk.
    last_seq: u64,
    /// (number, length) of recent ones.
    recent: VecDeque<(u64, u32)>,
}

impl Dropped {
    /// Bytes dropped after `seq`. Exact for the recent ones; for a reader further behind than that,
    /// everything ever dropped.
    fn after(&self, seq: u64) -> u64 {
        if seq >= self.last_seq {
            return 0;
        }
        match self.recent.front() {
            Some(&(oldest, _)) if seq + 1 >= oldest => {
                let from = self.recent.partition_point(|&(dropped, _)| dropped <= seq);
                self.recent.range(from..).map(|&(_, len)| u64::from(len)).sum()
            }
            _ => self.total,
        }
    }
}

/// What a read found.
#[derive(Debug)]
pub(super) struct Found {
    pub chunks: Vec<ProcessOutputChunk>,
    /// There are more.
    pub cut: bool,
    pub dropped_bytes: u64,
}

impl Retention {
    pub(super) fn new(limits: RetentionLimits, spool: Option<Spool>) -> Self {
        Self {
            limits,
            chunks: VecDeque::new(),
            bytes: 0,
            released: 0,
            pinned: 0,
            dropped: Dropped::default(),
            spool,
        }
    }

    /// Whether a chunk of `len` bytes would find room. An empty store always has some.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.limits.on_full == OnFull::Drop
            || self.pinned == 0
            || (self.pinned + len as u64 <= self.limits.bytes
                && self.pinned_chunks() < self.limits.chunks)
    }

    fn pinned_chunks(&self) -> usize {
        self.chunks.len() - self.chunks.partition_point(|kept| kept.seq <= self.released)
    }

    /// Keeps a chunk, dropping the oldest as far as that is allowed and necessary.
    pub(super) async fn push(
        &mut self,
        seq: u64,
        stream: OutputStream,
        bytes: Bytes,
    ) -> io::Result<()> {
        let len = bytes.len() as u64;
        while self.bytes + len > self.limits.bytes || self.chunks.len() >= self.limits.chunks {
            let Some(oldest) = self.chunks.front() else { break };
            if oldest.seq > self.released && self.limits.on_full == OnFull::Wait {
                break;
            }
            self.drop_oldest();
        }
        let kept = match &mut self.spool {
            None => bytes,
            Some(spool) => {
                spool.push(bytes).await?;
                Bytes::new()
            }
        };
        self.chunks.push_back(Kept { seq, stream, len: len as u32, bytes: kept });
        self.bytes += len;
        self.pinned += len;
        Ok(())
    }

    fn drop_oldest(&mut self) {
        let Some(kept) = self.chunks.pop_front() else { return };
        self.bytes -= u64::from(kept.len);
        if kept.seq > self.released {
            self.pinned -= u64::from(kept.len);
        }
        if let Some(spool) = &mut self.spool {
            spool.drop_oldest(u64::from(kept.len));
        }
        self.dropped.total += u64::from(kept.len);
        self.dropped.last_seq = kept.seq;
        if self.dropped.recent.len() >= self.limits.chunks {
            self.dropped.recent.pop_front();
        }
        self.dropped.recent.push_back((kept.seq, kept.len));
    }

    /// The client was sent everything up to `seq`.
    pub(super) fn sent(&mut self, seq: u64) {
        if self.limits.until == RetainUntil::Sent {
            self.release(seq);
        }
    }

    /// The client has everything up to `seq`.
    pub(super) fn release(&mut self, seq: u64) {
        if seq <= self.released {
            return;
        }
        let from = self.chunks.partition_point(|kept| kept.seq <= self.released);
        let to = self.chunks.partition_point(|kept| kept.seq <= seq);
        let freed: u64 = self.chunks.range(from..to).map(|kept| u64::from(kept.len)).sum();
        self.pinned -= freed;
        self.released = seq;
    }

    /// What was sent may have died on its way: everything kept has to stay.
    pub(super) fn pin_all(&mut self) {
        self.released = self.chunks.front().map_or(self.released, |oldest| oldest.seq - 1);
        self.pinned = self.bytes;
    }

    /// Whether there is a chunk with a higher number.
    pub(super) fn has_after(&self, seq: u64) -> bool {
        self.chunks.back().is_some_and(|newest| newest.seq > seq)
    }

    /// Chunks with a higher number than `seq`: whole ones, at least one if there is any, stopping
    /// before `max_bytes` would be passed.
    pub(super) async fn after(&self, seq: u64, max_bytes: u64) -> io::Result<Found> {
        let from = self.chunks.partition_point(|kept| kept.seq <= seq);
        let mut to = from;
        let mut bytes = 0;
        for kept in self.chunks.range(from..) {
            bytes += u64::from(kept.len);
            if to > from && bytes > max_bytes {
                break;
            }
            to += 1;
        }
        let mut chunks = Vec::with_capacity(to - from);
        match &self.spool {
            None => chunks.extend(self.chunks.range(from..to).map(|kept| {
                let chunk = Base64Bytes(kept.bytes.clone());
                ProcessOutputChunk { seq: kept.seq, stream: kept.stream, chunk }
            })),
            Some(spool) => {
                let sum = |range| -> u64 {
                    self.chunks
                        .range::<std::ops::Range<usize>>(range)
                        .map(|k| u64::from(k.len))
                        .sum()
                };
                let mut all = spool.read(sum(0..from), sum(from..to)).await?;
                for kept in self.chunks.range(from..to) {
                    let chunk = Base64Bytes(all.split_to(kept.len as usize));
                    chunks.push(ProcessOutputChunk { seq: kept.seq, stream: kept.stream, chunk });
                }
            }
        }
        Ok(Found { chunks, cut: to < self.chunks.len(), dropped_bytes: self.dropped.after(seq) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(bytes: u64, on_full: OnFull) -> RetentionLimits {
        RetentionLimits { bytes, chunks: 5, on_full, until: RetainUntil::Sent }
    }

    async fn push(retention: &mut Retention, seq: u64, text: &str) {
        let bytes = Bytes::copy_from_slice(text.as_bytes());
        retention.push(seq, OutputStream::Stdout, bytes).await.unwrap();
    }

    async fn texts(retention: &Retention, after: u64, max: u64) -> (Vec<(u64, String)>, bool, u64) {
        let found = retention.after(after, max).await.unwrap();
        let text = |c: &ProcessOutputChunk| String::from_utf8(c.chunk.to_vec()).unwrap();
        (found.chunks.iter().map(|c| (c.seq, text(c))).collect(), found.cut, found.dropped_bytes)
    }

    fn stores(limits: RetentionLimits) -> [Retention; 2] {
        let spool = Spool::create(&std::env::temp_dir(), limits.bytes).unwrap();
        [Retention::new(limits, None), Retention::new(limits, Some(spool))]
    }

    #[tokio::test]
    async fn reads_are_whole_chunks_and_at_least_one() {
        for mut store in stores(limits(100, OnFull::Wait)) {
            for (seq, text) in [(1, "aaa"), (2, "bb"), (4, "c")] {
                push(&mut store, seq, text).await;
            }
            let all = vec![(1, "aaa".into()), (2, "bb".into()), (4, "c".into())];
            assert_eq!(texts(&store, 0, 100).await, (all.clone(), false, 0));
            assert_eq!(texts(&store, 0, 5).await, (all[..2].to_vec(), true, 0));
            assert_eq!(texts(&store, 0, 0).await, (all[..1].to_vec(), true, 0));
            assert_eq!(texts(&store, 2, 100).await, (all[2..].to_vec(), false, 0));
            assert_eq!(texts(&store, 9, 100).await, (vec![], false, 0));
        }
    }

    #[tokio::test]
    async fn what_is_kept_until_it_was_read_is_not_released_by_sending() {
        let until = RetainUntil::Read;
        for mut store in stores(RetentionLimits { until, ..limits(10, OnFull::Wait) }) {
            push(&mut store, 1, "aaaa").await;
            push(&mut store, 2, "bbbb").await;
            store.sent(2);
            assert!(!store.has_room(3));
            store.release(1);
            assert!(store.has_room(6));
        }
    }

    #[tokio::test]
    async fn only_what_was_sent_is_dropped_and_a_full_store_says_so() {
        for mut store in stores(limits(10, OnFull::Wait)) {
            push(&mut store, 1, "aaaa").await;
            push(&mut store, 2, "bbbb").await;
            assert!(store.has_room(2));
            assert!(!store.has_room(3));
            store.release(1);
            assert!(store.has_room(6));
            push(&mut store, 3, "cccc").await;
            let kept = vec![(2, "bbbb".into()), (3, "cccc".into())];
            assert_eq!(texts(&store, 1, 100).await, (kept.clone(), false, 0));
            assert_eq!(texts(&store, 0, 100).await, (kept, false, 4));
            store.release(3);
            assert!(store.has_room(10));
            store.pin_all();
            assert!(!store.has_room(3));
        }
    }

    #[tokio::test]
    async fn dropping_is_counted_to_the_byte() {
        for mut store in stores(limits(3, OnFull::Drop)) {
            for seq in 1..=9 {
                assert!(store.has_room(100));
                push(&mut store, seq, &"x".repeat(seq as usize % 3 + 1)).await;
            }
            // Lengths 2 3 1 2 3 1 2 3 1: only the last chunk is left besides none that fits.
            assert_eq!(texts(&store, 7, 100).await, (vec![(9, "x".into())], false, 3));
            assert_eq!(texts(&store, 8, 100).await.2, 0);
            assert_eq!(texts(&store, 6, 100).await.2, 5);
            assert_eq!(texts(&store, 0, 100).await.2, 17);
        }
    }

    #[tokio::test]
    async fn chunks_are_bounded_in_number_too() {
        for mut store in stores(limits(1000, OnFull::Wait)) {
            for seq in 1..=5 {
                assert!(store.has_room(1));
                push(&mut store, seq, "x").await;
            }
            assert!(!store.has_room(1));
            store.release(2);
            assert!(store.has_room(1));
            push(&mut store, 6, "y").await;
            assert_eq!(texts(&store, 0, 100).await.0.len(), 5);
        }
    }
}
