//! The memory that a keeper and the program's process run on while they share the address space of
//! their parent.
//!
//! ```text
//! guard │ stack of the process, until it executes │ stack of the keeper │ order
//! ```
//!
//! One mapping per keeper. The parts needed only for the start are returned to the kernel afterwards.

use std::ffi::c_void;
use std::io;
use std::ptr;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

const GUARD: usize = 64 << 10;
const STACK: usize = 64 << 10;
/// The longest order that fits, in bytes.
pub(super) const MAX_ORDER: usize = 64 << 10;
const SIZE: usize = GUARD + 2 * STACK + MAX_ORDER;

/// The memory of one keeper.
#[derive(Debug)]
pub(super) struct KeeperMemory {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for KeeperMemory {}
// SAFETY: nothing is read or written through a shared reference.
unsafe impl Sync for KeeperMemory {}

impl KeeperMemory {
    pub(super) fn new() -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a private mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), SIZE, protection, flags)? };
        let memory = Self { base };
        // SAFETY: the first pages of the new mapping, which nothing uses.
        unsafe { rustix::mm::mprotect(base, GUARD, MprotectFlags::empty())? };
        Ok(memory)
    }

    /// Top of the process's stack, which grows downwards.
    pub(super) fn process_stack(&self) -> *mut c_void {
        self.base.wrapping_byte_add(GUARD + STACK)
    }

    /// Top of the keeper's stack.
    pub(super) fn keeper_stack(&self) -> *mut c_void {
        self.base.wrapping_byte_add(GUARD + 2 * STACK)
    }

    /// The part for the order.
    pub(super) fn order(&mut self) -> &mut [u8] {
        // SAFETY: the last part of the mapping, readable and writable, which is this value's alone as
        // long as no keeper runs on it.
        unsafe { std::slice::from_raw_parts_mut(self.keeper_stack().cast(), MAX_ORDER) }
    }

    /// The two parts needed only for the start.
    pub(super) fn start_only(&self) -> [Span; 2] {
        let from = |at: usize, len| Span { start: self.base.wrapping_byte_add(at), len };
        [from(GUARD, STACK), from(GUARD + 2 * STACK, MAX_ORDER)]
    }
}

impl Drop for KeeperMemory {
    fn drop(&mut self) {
        // SAFETY: made by `new`; its owner holds it until nothing runs on it.
        let _ = unsafe { rustix::mm::munmap(self.base, SIZE) };
    }
}

/// A range of the mapping.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    start: *mut c_void,
    len: usize,
}

impl Span {
    /// Returns its pages to the kernel; they read as zeros afterwards.
    ///
    /// # Safety
    /// Nothing may use this part of the mapping any more.
    pub(super) unsafe fn release(self) {
        // SAFETY: the caller's promise.
        let _ = unsafe { rustix::mm::madvise(self.start, self.len, Advice::LinuxDontNeed) };
    }
}

/// Free mappings, for reuse.
#[derive(Debug, Default)]
pub(in crate::process) struct MemoryPool(Vec<KeeperMemory>);

impl MemoryPool {
    /// Maximum of free mappings.
    const MAX_FREE: usize = 64;

    pub(super) fn take(&mut self) -> io::Result<KeeperMemory> {
        self.0.pop().map_or_else(KeeperMemory::new, Ok)
    }

    /// Takes back memory that no keeper runs on any more.
    pub(super) fn recycle(&mut self, memory: KeeperMemory) {
        if self.0.len() < Self::MAX_FREE {
            self.0.push(memory);
        }
    }
}
