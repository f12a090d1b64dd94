//! Buffers for whole files and the messages that carry them.

use std::collections::TryReserveError;
use std::ffi::c_void;

use rustix::mm::Advice;

/// From here on it pays to ask for large pages.
const LARGE: usize = 4 << 20;

/// An empty buffer that holds `capacity` bytes without growing.
///
/// A large one is put in large pages, where the kernel has them: to fill it page by page can cost
/// more than to move the bytes.
pub fn with_capacity(capacity: usize) -> Result<Vec<u8>, TryReserveError> {
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

#[cfg(test)]
mod tests {
    #[test]
    fn a_buffer_of_any_size_can_be_filled() {
        for capacity in [0, 1, super::LARGE - 1, super::LARGE, super::LARGE + 1, 9 << 20] {
            let mut buffer = super::with_capacity(capacity).unwrap();
            let start = buffer.as_ptr();
            buffer.resize(capacity, 7);
            assert_eq!(buffer.as_ptr(), start, "it did not grow");
            assert!(buffer.iter().all(|&byte| byte == 7));
        }
        assert!(super::with_capacity(usize::MAX).is_err());
    }
}
