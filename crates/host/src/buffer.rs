//! Buffers for whole files and the messages that carry them.
//!
//! Getting fresh memory from the kernel (find, clear, map) costs more than copying the bytes into it,
//! on virtual machines several times as much. So this module caches large buffers for a moment, for the
//! next large file.

use std::collections::{TryReserveError, VecDeque};
use std::ffi::c_void;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustix::mm::Advice;

/// Buffers of at least this size, in bytes, use huge pages and are cached.
const LARGE: usize = 4 << 20;

/// Maximum bytes of cached buffers in total.
const MAX_CACHED_BYTES: usize = 128 << 20;

/// How long a buffer stays cached.
const CACHE_TIME: Duration = Duration::from_secs(1);

static CACHE: Mutex<BufferCache> =
    Mutex::new(BufferCache { buffers: VecDeque::new(), bytes: 0, has_sweeper: false });

/// An empty buffer that holds `capacity` bytes without growing.
///
/// A large buffer uses huge pages where the kernel supports them: page faults can cost more than
/// copying the bytes.
pub fn with_capacity(capacity: usize) -> Result<Vec<u8>, TryReserveError> {
    if capacity >= LARGE
        && let Some(buffer) = cache().take(capacity)
    {
        return Ok(buffer);
    }
    let mut buffer: Vec<u8> = Vec::new();
    buffer.try_reserve_exact(capacity)?;
    if capacity >= LARGE {
        let page = rustix::param::page_size();
        let start = buffer.as_mut_ptr();
        let skipped = start.align_offset(page);
        let len = (capacity - skipped) / page * page;
        // SAFETY: whole pages inside the buffer's own memory. The advice changes how they are backed
        // and nothing that is in them; a kernel that cannot follow it says so, and that is all.
        let _ = unsafe {
            rustix::mm::madvise(start.add(skipped).cast::<c_void>(), len, Advice::LinuxHugepage)
        };
    }
    Ok(buffer)
}

/// Converts a buffer to `Bytes`. A large buffer returns to the cache once all of its `Bytes` are
/// dropped.
pub fn into_bytes(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < LARGE {
        return Bytes::from(buffer);
    }
    Bytes::from_owner(CachedOnDrop(buffer))
}

/// A buffer that returns to the cache when dropped.
struct CachedOnDrop(Vec<u8>);

impl AsRef<[u8]> for CachedOnDrop {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for CachedOnDrop {
    fn drop(&mut self) {
        if cache().put(std::mem::take(&mut self.0), Instant::now()) == Sweeper::Wanted {
            // Without a sweeper thread the cache would never shrink, so cache nothing.
            let sweeper = std::thread::Builder::new().name("buffers".to_owned()).spawn(sweep);
            if sweeper.is_err() {
                *cache() = BufferCache::default();
            }
        }
    }
}

/// Drops expired buffers until the cache is empty.
fn sweep() {
    let mut next = Some(CACHE_TIME);
    while let Some(wait) = next {
        std::thread::sleep(wait);
        next = cache().expire(Instant::now());
    }
}

fn cache() -> MutexGuard<'static, BufferCache> {
    CACHE.lock()
}

/// Unused buffers, oldest first.
#[derive(Debug, Default)]
struct BufferCache {
    buffers: VecDeque<(Vec<u8>, Instant)>,
    /// Sum of their capacities.
    bytes: usize,
    /// A sweeper thread is running.
    has_sweeper: bool,
}

/// Whether the caller must start a sweeper thread.
#[derive(Debug, PartialEq, Eq)]
enum Sweeper {
    Wanted,
    NotNeeded,
}

impl BufferCache {
    /// Takes the smallest buffer that holds `capacity` bytes and is at most twice as large.
    fn take(&mut self, capacity: usize) -> Option<Vec<u8>> {
        let sizes = self.buffers.iter().map(|(buffer, _)| buffer.capacity()).enumerate();
        let fitting =
            sizes.filter(|(_, size)| (capacity..=capacity.saturating_mul(2)).contains(size));
        let (at, _) = fitting.min_by_key(|&(_, size)| size)?;
        let (mut buffer, _) = self.buffers.remove(at)?;
        self.bytes -= buffer.capacity();
        buffer.clear();
        Some(buffer)
    }

    /// Caches a buffer; drops the oldest ones if the cache is too large.
    fn put(&mut self, buffer: Vec<u8>, now: Instant) -> Sweeper {
        if buffer.capacity() > MAX_CACHED_BYTES {
            return Sweeper::NotNeeded;
        }
        self.bytes += buffer.capacity();
        self.buffers.push_back((buffer, now));
        while self.bytes > MAX_CACHED_BYTES
            && let Some((oldest, _)) = self.buffers.pop_front()
        {
            self.bytes -= oldest.capacity();
        }
        match std::mem::replace(&mut self.has_sweeper, true) {
            false => Sweeper::Wanted,
            true => Sweeper::NotNeeded,
        }
    }

    /// Drops expired buffers. Returns the time until the next one expires, or `None` if the cache is
    /// empty and the sweeper is done.
    fn expire(&mut self, now: Instant) -> Option<Duration> {
        while let Some((buffer, since)) = self.buffers.front() {
            let left = CACHE_TIME.saturating_sub(now.duration_since(*since));
            if !left.is_zero() {
                return Some(left);
            }
            self.bytes -= buffer.capacity();
            self.buffers.pop_front();
        }
        self.has_sweeper = false;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_of_any_size_can_be_filled() {
        for capacity in [0, 1, LARGE - 1, LARGE, LARGE + 1, 9 << 20] {
            let mut buffer = with_capacity(capacity).unwrap();
            let start = buffer.as_ptr();
            buffer.resize(capacity, 7);
            assert_eq!(buffer.as_ptr(), start, "it did not grow");
            assert!(buffer.iter().all(|&byte| byte == 7));
        }
        assert!(with_capacity(usize::MAX).is_err());
    }

    #[test]
    fn into_bytes_preserves_content_of_any_size() {
        for len in [0, 1, LARGE] {
            let mut buffer = with_capacity(len).unwrap();
            buffer.resize(len, 7);
            let bytes = into_bytes(buffer);
            let part = bytes.slice(len / 2..);
            drop(bytes);
            assert!(part.len() == len - len / 2 && part.iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn cached_buffer_is_reused_empty_and_only_if_it_fits() {
        let mut cache = BufferCache::default();
        let buffer = vec![7; LARGE];
        let start = buffer.as_ptr();
        assert_eq!(cache.put(buffer, Instant::now()), Sweeper::Wanted);
        assert!(cache.take(LARGE + 1).is_none(), "too small");
        assert!(cache.take(LARGE / 2 - 1).is_none(), "far too large");
        let again = cache.take(LARGE - 1).unwrap();
        assert_eq!((again.as_ptr(), again.len()), (start, 0));
        assert_eq!((cache.bytes, cache.take(LARGE)), (0, None));
        assert_eq!(cache.put(again, Instant::now()), Sweeper::NotNeeded, "one is at it");
    }

    #[test]
    fn take_returns_the_smallest_fitting_buffer() {
        let mut cache = BufferCache::default();
        for size in [LARGE, LARGE * 4 / 3] {
            cache.put(Vec::with_capacity(size), Instant::now());
        }
        assert_eq!(cache.take(LARGE).unwrap().capacity(), LARGE);
        assert_eq!(cache.take(LARGE * 4 / 3).unwrap().capacity(), LARGE * 4 / 3);
    }

    #[test]
    fn cache_is_bounded_in_bytes_and_time() {
        let mut cache = BufferCache::default();
        let now = Instant::now();
        let buffer = || Vec::with_capacity(MAX_CACHED_BYTES / 2);
        assert_eq!(cache.put(buffer(), now), Sweeper::Wanted);
        cache.put(buffer(), now + CACHE_TIME / 2);
        cache.put(buffer(), now + CACHE_TIME / 2);
        assert_eq!(
            (cache.buffers.len(), cache.bytes),
            (2, MAX_CACHED_BYTES),
            "the oldest made room"
        );
        cache.put(Vec::with_capacity(MAX_CACHED_BYTES + 1), now);
        assert_eq!(cache.buffers.len(), 2, "too large to be kept");
        assert_eq!(cache.expire(now + CACHE_TIME), Some(CACHE_TIME / 2));
        assert_eq!(cache.expire(now + CACHE_TIME * 3 / 2), None);
        assert_eq!((cache.buffers.len(), cache.bytes), (0, 0));
        assert_eq!(cache.put(buffer(), now), Sweeper::Wanted, "the last one has ended");
    }
}
