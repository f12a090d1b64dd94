//! A table of processes in memory that another process can read after ours has died.
//!
//! Each place holds a pid, whether that process tidies up after itself, and, if it was not started by
//! us, when it was started. A place is ours from [`Roster::reserve`] until its [`Place`] is dropped, which empties it.
//!
//! The table is a file without a name, as long as there can be processes and almost all of it holes;
//! its pages come into being as places are used.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// More than the processes that a server can have.
const PLACES: usize = 1 << 18;
const LEN: usize = PLACES * size_of::<Row>();

/// What a place holds. All zeros: nobody.
#[repr(C)]
struct Row {
    pid: AtomicI32,
    tidies_up: AtomicBool,
    /// 0 for a process that leads a session of its own.
    start: AtomicU64,
}

/// Somebody in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entered {
    pub pid: i32,
    /// 0 for a process that leads a session of its own.
    pub start: u64,
    /// It ends by itself when we do, and has to tidy up before.
    pub tidies_up: bool,
}

/// The table.
#[derive(Debug, Clone)]
pub(super) struct Roster(Arc<Table>);

#[derive(Debug)]
struct Table {
    file: OwnedFd,
    rows: NonNull<Row>,
    free: Mutex<Free>,
}

/// Which places are nobody's.
#[derive(Debug, Default)]
struct Free {
    /// Places that were used before.
    returned: Vec<usize>,
    /// Places from this one on were never used.
    unused: usize,
}

// SAFETY: the mapping lives as long as the table; rows are atomics, shared by design.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Roster {
    pub(super) fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("exec-roster", flags)?;
        rustix::fs::ftruncate(&file, LEN as u64)?;
        // So that nobody who was given it can pull the memory away from under us.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing; the file is as
        // long as the mapping and cannot become shorter.
        let rows = unsafe { rustix::mm::mmap(ptr::null_mut(), LEN, protection, flags, &file, 0)? };
        let rows = NonNull::new(rows.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self(Arc::new(Table { file, rows, free: Mutex::default() })))
    }

    /// The table, to be given to whoever is to read it.
    pub(super) fn shared(&self) -> io::Result<OwnedFd> {
        self.0.file.try_clone()
    }

    /// Takes an empty place.
    pub(super) fn reserve(&self) -> io::Result<Place> {
        let mut free = self.0.free();
        let index = match free.returned.pop() {
            Some(index) => index,
            None if free.unused < PLACES => {
                free.unused += 1;
                free.unused - 1
            }
            None => return Err(io::Error::other("there are too many processes")),
        };
        let place = Place { table: self.0.clone(), index };
        place.set_tidies_up(false);
        Ok(place)
    }

    /// Everybody in a table that was [`shared`](Self::shared).
    pub(super) fn read(table: impl AsFd) -> io::Result<Vec<Entered>> {
        let mut everybody = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let mut offset = 0;
        while offset < LEN {
            let len = rustix::io::pread(&table, &mut buffer, offset as u64)?;
            if len == 0 {
                break;
            }
            // A table is read in whole rows: its length and the buffer's are multiples of one.
            for row in buffer[..len].chunks_exact(size_of::<Row>()) {
                let [a, b, c, d, tidies_up, _, _, _, start @ ..] = row else { continue };
                let Ok(start) = start.try_into() else { continue };
                let pid = i32::from_ne_bytes([*a, *b, *c, *d]);
                if pid > 0 {
                    let (start, tidies_up) = (u64::from_ne_bytes(start), *tidies_up != 0);
                    everybody.push(Entered { pid, start, tidies_up });
                }
            }
            offset += len;
        }
        Ok(everybody)
    }
}

impl Table {
    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and every place that pointed into it has gone.
        let _ = unsafe { rustix::mm::munmap(self.rows.as_ptr().cast(), LEN) };
    }
}

/// One place in the table.
#[derive(Debug)]
pub(super) struct Place {
    table: Arc<Table>,
    index: usize,
}

impl Place {
    /// Enters a process. Only stores: a child that shares our memory calls it.
    pub(super) fn enter(&self, pid: i32, start: u64) {
        let row = self.row();
        row.start.store(start, Ordering::Relaxed);
        // Whoever sees the pid sees the start that belongs to it.
        row.pid.store(pid, Ordering::Release);
    }

    /// Whether whoever is entered here tidies up after itself.
    pub(super) fn set_tidies_up(&self, tidies_up: bool) {
        self.row().tidies_up.store(tidies_up, Ordering::Release);
    }

    fn row(&self) -> &Row {
        // SAFETY: `index` is below `PLACES`, and the mapping lives as long as the table.
        unsafe { self.table.rows.add(self.index).as_ref() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.row().pid.store(0, Ordering::Release);
        self.table.free().returned.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_entered_is_read_by_others_until_the_place_is_given_up() {
        let roster = Roster::new().unwrap();
        let shared = roster.shared().unwrap();
        let places: Vec<_> = (0..5000).map(|_| roster.reserve().unwrap()).collect();
        for (n, place) in (1..).zip(&places) {
            place.enter(n, u64::MAX - u64::try_from(n).unwrap());
        }
        let mut seen = Roster::read(&shared).unwrap();
        seen.sort_unstable();
        assert_eq!(seen.len(), 5000);
        let last = Entered { pid: 5000, start: u64::MAX - 5000, tidies_up: false };
        assert_eq!(seen[4999], last);
        drop(places);
        assert_eq!(Roster::read(&shared).unwrap(), []);
        // Places are used again, and a reserved one is nobody's until it is entered.
        let place = roster.reserve().unwrap();
        assert!(place.index < 5000);
        assert_eq!(Roster::read(&shared).unwrap(), []);
        place.enter(7, 0);
        let mut entered = Entered { pid: 7, start: 0, tidies_up: false };
        assert_eq!(Roster::read(&shared).unwrap(), [entered]);
        place.set_tidies_up(true);
        entered.tidies_up = true;
        assert_eq!(Roster::read(&shared).unwrap(), [entered]);
        // Not so for the next in that place.
        drop(place);
        let place = roster.reserve().unwrap();
        place.enter(8, 0);
        entered = Entered { pid: 8, start: 0, tidies_up: false };
        assert_eq!(Roster::read(&shared).unwrap(), [entered]);
    }

    #[test]
    fn a_full_table_says_so() {
        let roster = Roster::new().unwrap();
        roster.0.free().unused = PLACES - 1;
        let last = roster.reserve().unwrap();
        last.enter(1, 2);
        let entered = Entered { pid: 1, start: 2, tidies_up: false };
        assert_eq!(Roster::read(roster.shared().unwrap()).unwrap(), [entered]);
        assert!(roster.reserve().is_err());
        drop(last);
        roster.reserve().unwrap();
    }
}
