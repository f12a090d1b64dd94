//! The retained output of a process.
//!
//! Chunks are stored in order and dropped oldest first, within a limit of bytes and of chunks. A chunk
//! is *released* once it has reached the client's side or, with [`RetainUntil::Read`], once the client
//! has acknowledged it. Only released chunks are dropped, unless the client asked for [`OnFull::Drop`].
//! While released chunks do not free enough space, the store is full and the owner stops reading from
//! the process.
//!
//! Invariant: unreleased chunks fill the store to its last byte and never exceed it, except that a
//! store with only released chunks accepts one chunk of any size. Every dropped byte is counted.

use std::collections::VecDeque;
use std::io;

use bytes::Bytes;
use codex_exec_server_protocol::Base64Bytes;
use codex_exec_server_protocol::process::{OnFull, OutputStream, ProcessOutputChunk, RetainUntil};

use super::spool::Spool;

/// A chunk that no client has seen grows up to this length, in bytes.
const SMALL_CHUNK: usize = 1 << 10;

/// Limits of the store.
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
    chunks: VecDeque<Chunk>,
    /// Sum of the chunks' lengths.
    bytes: u64,
    /// Chunks up to this number may be dropped.
    released: u64,
    /// Total length of the chunks after `released`.
    pinned: u64,
    dropped: Dropped,
    spool: Option<Spool>,
}

#[derive(Debug)]
struct Chunk {
    seq: u64,
    stream: OutputStream,
    len: u32,
    /// Empty if the bytes are in the spool.
    bytes: Bytes,
}

/// Lengths of dropped chunks, newest last, so that a reader learns how much it missed.
#[derive(Debug, Default)]
struct Dropped {
    total: u64,
    /// Number of the last dropped chunk.
    last_seq: u64,
    /// (number, length) of recently dropped chunks.
    recent: VecDeque<(u64, u32)>,
}

impl Dropped {
    /// Bytes dropped after `seq`. Exact for recent chunks; for a reader further behind, all bytes ever
    /// dropped.
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

/// The result of a read.
#[derive(Debug)]
pub(super) struct ReadResult {
    pub chunks: Vec<ProcessOutputChunk>,
    /// There are more chunks.
    pub truncated: bool,
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

    /// Maximum length of the next chunk. Never 0 if all chunks are released.
    pub(super) fn room(&self) -> usize {
        let room = match (self.limits.on_full, self.limits.until) {
            (OnFull::Drop, _) => u64::MAX,
            (OnFull::Wait, RetainUntil::Sent) if self.pinned == 0 => u64::MAX,
            (OnFull::Wait, RetainUntil::Read) if self.pinned == 0 => self.limits.bytes.max(1),
            (OnFull::Wait, _) if self.pinned_chunks() >= self.limits.chunks => 0,
            (OnFull::Wait, _) => self.limits.bytes.saturating_sub(self.pinned),
        };
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    /// Whether so much waits for [`sent`](Self::sent) that the owner should check what has arrived.
    pub(super) fn needs_arrival_check(&self) -> bool {
        self.limits.on_full == OnFull::Wait
            && self.limits.until == RetainUntil::Sent
            && (self.pinned > self.limits.bytes / 2
                || self.pinned_chunks() > self.limits.chunks / 2)
    }

    fn pinned_chunks(&self) -> usize {
        self.chunks.len() - self.chunks.partition_point(|chunk| chunk.seq <= self.released)
    }

    /// Stores a chunk; drops the oldest ones as far as allowed and necessary.
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
        let in_memory = match &mut self.spool {
            None => bytes,
            Some(spool) => {
                spool.push(bytes).await?;
                Bytes::new()
            }
        };
        self.chunks.push_back(Chunk { seq, stream, len: len as u32, bytes: in_memory });
        self.bytes += len;
        self.pinned += len;
        Ok(())
    }

    /// Appends to the newest chunk, if it has this number and stays small: many small writes that no
    /// client waits for would reach the chunk limit long before the byte limit.
    pub(super) fn extend(&mut self, seq: u64, stream: OutputStream, bytes: &Bytes) -> bool {
        let len = bytes.len() as u64;
        let fits = |newest: &Chunk| {
            newest.seq == seq
                && newest.stream == stream
                && newest.bytes.len() + bytes.len() <= SMALL_CHUNK
                && u64::from(newest.len) + len <= self.limits.bytes
        };
        if self.spool.is_some() || !self.chunks.back().is_some_and(fits) {
            return false;
        }
        while self.bytes + len > self.limits.bytes {
            if self.limits.on_full == OnFull::Wait {
                return false;
            }
            self.drop_oldest();
        }
        let Some(newest) = self.chunks.back_mut() else { return false };
        newest.bytes = [&newest.bytes[..], bytes].concat().into();
        newest.len += len as u32;
        self.bytes += len;
        if seq > self.released {
            self.pinned += len;
        }
        true
    }

    fn drop_oldest(&mut self) {
        let Some(chunk) = self.chunks.pop_front() else { return };
        self.bytes -= u64::from(chunk.len);
        if chunk.seq > self.released {
            self.pinned -= u64::from(chunk.len);
        }
        if let Some(spool) = &mut self.spool {
            spool.drop_oldest(u64::from(chunk.len));
        }
        self.dropped.total += u64::from(chunk.len);
        self.dropped.last_seq = chunk.seq;
        if self.dropped.recent.len() >= self.limits.chunks {
            self.dropped.recent.pop_front();
        }
        self.dropped.recent.push_back((chunk.seq, chunk.len));
    }

    /// Everything up to `seq` has reached the client's side.
    pub(super) fn sent(&mut self, seq: u64) {
        if self.limits.until == RetainUntil::Sent {
            self.release(seq);
        }
    }

    /// The client has received everything up to `seq`.
    pub(super) fn release(&mut self, seq: u64) {
        if seq <= self.released {
            return;
        }
        let from = self.chunks.partition_point(|chunk| chunk.seq <= self.released);
        let to = self.chunks.partition_point(|chunk| chunk.seq <= seq);
        let freed: u64 = self.chunks.range(from..to).map(|chunk| u64::from(chunk.len)).sum();
        self.pinned -= freed;
        self.released = seq;
    }

    /// Sent chunks may have been lost: no chunk counts as released any more.
    pub(super) fn pin_all(&mut self) {
        self.released = self.chunks.front().map_or(self.released, |oldest| oldest.seq - 1);
        self.pinned = self.bytes;
    }

    /// Whether there is a chunk with a higher number than `seq`.
    pub(super) fn has_after(&self, seq: u64) -> bool {
        self.chunks.back().is_some_and(|newest| newest.seq > seq)
    }

    /// Chunks with higher numbers than `seq`: whole chunks, at least one if there is any, within
    /// `max_bytes` otherwise.
    pub(super) async fn after(&self, seq: u64, max_bytes: u64) -> io::Result<ReadResult> {
        let from = self.chunks.partition_point(|chunk| chunk.seq <= seq);
        let mut to = from;
        let mut bytes = 0;
        for chunk in self.chunks.range(from..) {
            bytes += u64::from(chunk.len);
            if to > from && bytes > max_bytes {
                break;
            }
            to += 1;
        }
        let mut chunks = Vec::with_capacity(to - from);
        match &self.spool {
            None => chunks.extend(self.chunks.range(from..to).map(|chunk| {
                let bytes = Base64Bytes(chunk.bytes.clone());
                ProcessOutputChunk { seq: chunk.seq, stream: chunk.stream, chunk: bytes }
            })),
            Some(spool) => {
                let sum = |range| -> u64 {
                    self.chunks
                        .range::<std::ops::Range<usize>>(range)
                        .map(|k| u64::from(k.len))
                        .sum()
                };
                let mut all = spool.read(sum(0..from), sum(from..to)).await?;
                for chunk in self.chunks.range(from..to) {
                    let bytes = Base64Bytes(all.split_to(chunk.len as usize));
                    chunks.push(ProcessOutputChunk {
                        seq: chunk.seq,
                        stream: chunk.stream,
                        chunk: bytes,
                    });
                }
            }
        }
        Ok(ReadResult {
            chunks,
            truncated: to < self.chunks.len(),
            dropped_bytes: self.dropped.after(seq),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        (
            found.chunks.iter().map(|c| (c.seq, text(c))).collect(),
            found.truncated,
            found.dropped_bytes,
        )
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
    async fn output_retained_until_read_is_not_released_by_sending() {
        let until = RetainUntil::Read;
        for mut store in stores(RetentionLimits { until, ..limits(10, OnFull::Wait) }) {
            push(&mut store, 1, "aaaa").await;
            push(&mut store, 2, "bbbb").await;
            store.sent(2);
            assert!(store.room() < 3);
            store.release(1);
            assert!(store.room() >= 6);
        }
    }

    #[tokio::test]
    async fn only_released_chunks_are_dropped_and_a_full_store_has_no_room() {
        for mut store in stores(limits(10, OnFull::Wait)) {
            push(&mut store, 1, "aaaa").await;
            push(&mut store, 2, "bbbb").await;
            assert!(store.room() >= 2);
            assert!(store.room() < 3);
            store.release(1);
            assert!(store.room() >= 6);
            push(&mut store, 3, "cccc").await;
            let retained = vec![(2, "bbbb".into()), (3, "cccc".into())];
            assert_eq!(texts(&store, 1, 100).await, (retained.clone(), false, 0));
            assert_eq!(texts(&store, 0, 100).await, (retained, false, 4));
            store.release(3);
            assert!(store.room() >= 10);
            store.pin_all();
            assert!(store.room() < 3);
        }
    }

    #[tokio::test]
    async fn dropped_bytes_are_counted_exactly() {
        for mut store in stores(limits(3, OnFull::Drop)) {
            for seq in 1..=9 {
                assert!(store.room() >= 100);
                push(&mut store, seq, &"x".repeat(seq as usize % 3 + 1)).await;
            }
            // Lengths 2 3 1 2 3 1 2 3 1: only the last chunk fits.
            assert_eq!(texts(&store, 7, 100).await, (vec![(9, "x".into())], false, 3));
            assert_eq!(texts(&store, 8, 100).await.2, 0);
            assert_eq!(texts(&store, 6, 100).await.2, 5);
            assert_eq!(texts(&store, 0, 100).await.2, 17);
        }
    }

    #[tokio::test]
    async fn number_of_chunks_is_bounded() {
        for mut store in stores(limits(1000, OnFull::Wait)) {
            for seq in 1..=5 {
                assert!(store.room() >= 1);
                push(&mut store, seq, "x").await;
            }
            assert!(store.room() < 1);
            store.release(2);
            assert!(store.room() >= 1);
            push(&mut store, 6, "y").await;
            assert_eq!(texts(&store, 0, 100).await.0.len(), 5);
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// The process writes this much; what does not fit waits.
        Write(usize),
        /// The process writes this much more before a client has seen the last chunk.
        More(usize),
        /// Everything up to this fraction of the published output has arrived.
        Sent(f64),
        Read(f64),
        PinAll,
        After(f64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let part = || 0.0..1.1;
        prop_oneof![
            6 => (1..40usize).prop_map(Step::Write),
            3 => (1..20usize).prop_map(Step::More),
            2 => part().prop_map(Step::Sent),
            2 => part().prop_map(Step::Read),
            1 => Just(Step::PinAll),
            3 => (part(), 0..60u64).prop_map(|(part, max)| Step::After(part, max)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        /// Checks the store against a list that drops nothing.
        #[test]
        fn random_operations_match_the_model(
            bytes in 0..100u64,
            chunks in 1..12usize,
            on_full in prop_oneof![3 => Just(OnFull::Wait), 1 => Just(OnFull::Drop)],
            until in prop_oneof![Just(RetainUntil::Sent), Just(RetainUntil::Read)],
            steps in proptest::collection::vec(step(), 1..80),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let limits = RetentionLimits { bytes, chunks, on_full, until };
            for mut store in stores(limits) {
                // The published chunks, from number 1 on; the last released number; the oldest retained
                // number.
                let (mut written, mut released, mut oldest) = (Vec::<Vec<u8>>::new(), 0, 1);
                for step in &steps {
                    let seq_at = |part: f64| (part * written.len() as f64) as u64;
                    match *step {
                        Step::Write(len) => {
                            let len = len.min(store.room());
                            let pinned: usize = written[released as usize..].iter().map(Vec::len).sum();
                            let few = written.len() as u64 - released < chunks as u64;
                            if on_full == OnFull::Wait && released < written.len() as u64 {
                                let room = if few { bytes.saturating_sub(pinned as u64) } else { 0 };
                                prop_assert_eq!(store.room() as u64, room, "to the last byte");
                            } else {
                                prop_assert!(store.room() > 0, "nothing has to be kept");
                            }
                            if len > 0 {
                                let chunk = vec![written.len() as u8; len];
                                written.push(chunk.clone());
                                let seq = written.len() as u64;
                                let pushed = store.push(seq, OutputStream::Stdout, chunk.into());
                                runtime.block_on(pushed).unwrap();
                            }
                        }
                        Step::More(len) => {
                            let len = len.min(store.room());
                            let newest = written.len() as u64;
                            let more = vec![newest as u8; len];
                            if newest > released
                                && store.extend(newest, OutputStream::Stdout, &more.clone().into())
                            {
                                written[newest as usize - 1].extend(more);
                            }
                        }
                        Step::Sent(part) => {
                            store.sent(seq_at(part).min(written.len() as u64));
                            if until == RetainUntil::Sent {
                                released = released.max(seq_at(part).min(written.len() as u64));
                            }
                        }
                        Step::Read(part) => {
                            let seq = seq_at(part).min(written.len() as u64);
                            store.release(seq);
                            released = released.max(seq);
                        }
                        Step::PinAll => {
                            store.pin_all();
                            released = oldest - 1;
                        }
                        Step::After(part, max) => {
                            let seq = seq_at(part);
                            let found = runtime.block_on(store.after(seq, max)).unwrap();
                            let first = (seq + 1).max(oldest);
                            let mut wanted: Vec<u64> = (first..=written.len() as u64).collect();
                            let all = wanted.len();
                            let mut sum = 0;
                            wanted.retain(|&seq| {
                                sum += written[seq as usize - 1].len() as u64;
                                seq == first || sum <= max
                            });
                            let got: Vec<u64> = found.chunks.iter().map(|chunk| chunk.seq).collect();
                            prop_assert_eq!(&got, &wanted);
                            prop_assert_eq!(found.truncated, wanted.len() < all);
                            for chunk in &found.chunks {
                                prop_assert_eq!(&chunk.chunk[..], &written[chunk.seq as usize - 1][..]);
                            }
                        }
                    }
                    // The store holds the tail of what was written, and misses only what it may drop.
                    let first = store.chunks.front().map_or(written.len() as u64 + 1, |chunk| chunk.seq);
                    prop_assert!(first >= oldest);
                    prop_assert!(on_full == OnFull::Drop || first <= released + 1, "dropped too early");
                    oldest = first;
                    released = released.max(oldest - 1);
                    let sum: usize = written[oldest as usize - 1..].iter().map(Vec::len).sum();
                    prop_assert_eq!(store.bytes, sum as u64);
                    let over = written.last().map_or(0, Vec::len) as u64;
                    let bound = match (on_full, until) {
                        (OnFull::Wait, RetainUntil::Read) => bytes.max(1),
                        _ => bytes.max(over),
                    };
                    prop_assert!(store.bytes <= bound, "{} of {bound}", store.bytes);
                    let gone: usize = written[..oldest as usize - 1].iter().map(Vec::len).sum();
                    prop_assert_eq!(store.dropped.total, gone as u64);
                    let found = runtime.block_on(store.after(0, 0)).unwrap();
                    prop_assert_eq!(found.dropped_bytes, gone as u64, "the gap is told");
                }
            }
        }
    }
}
