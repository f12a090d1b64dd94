//! System call numbers that the `libc` crate lacks on some target.

use libc::c_long;

/// The first number that is newer than this table (Linux 6.18; the same on every architecture).
/// Programs fall back to an older call on `ENOSYS`; `EPERM` would make them fail.
pub(super) const FIRST_UNKNOWN: u32 = 470;

/// Unassigned numbers below [`FIRST_UNKNOWN`], as inclusive ranges.
#[cfg(target_arch = "x86_64")]
pub(super) const UNASSIGNED: &[(u32, u32)] = &[(337, 423)];
#[cfg(not(target_arch = "x86_64"))]
pub(super) const UNASSIGNED: &[(u32, u32)] = &[(244, 259), (295, 423)];

#[cfg(target_arch = "x86_64")]
mod of_architecture {
    use libc::c_long;

    pub(crate) const RENAMEAT: c_long = libc::SYS_renameat;
    pub(crate) const SYNC_FILE_RANGE: c_long = libc::SYS_sync_file_range;
    pub(crate) const GETRLIMIT: c_long = libc::SYS_getrlimit;
    pub(crate) const SETRLIMIT: c_long = libc::SYS_setrlimit;
    pub(crate) const IO_PGETEVENTS: c_long = 333;
    pub(crate) const URETPROBE: c_long = 335;
    pub(crate) const UPROBE: c_long = 336;
}

#[cfg(not(target_arch = "x86_64"))]
mod of_architecture {
    use libc::c_long;

    pub const RENAMEAT: c_long = 38;
    pub const SYNC_FILE_RANGE: c_long = 84;
    pub const GETRLIMIT: c_long = 163;
    pub const SETRLIMIT: c_long = 164;
    pub const IO_PGETEVENTS: c_long = 292;
}

pub(super) use of_architecture::{GETRLIMIT, IO_PGETEVENTS, RENAMEAT, SETRLIMIT, SYNC_FILE_RANGE};
#[cfg(target_arch = "x86_64")]
pub(super) use of_architecture::{UPROBE, URETPROBE};

pub(super) const CACHESTAT: c_long = 451;
pub(super) const FCHMODAT2: c_long = 452;
pub(super) const MAP_SHADOW_STACK: c_long = 453;
pub(super) const FUTEX_WAKE: c_long = 454;
pub(super) const FUTEX_WAIT: c_long = 455;
pub(super) const FUTEX_REQUEUE: c_long = 456;
pub(super) const STATMOUNT: c_long = 457;
pub(super) const LISTMOUNT: c_long = 458;
pub(super) const LSM_GET_SELF_ATTR: c_long = 459;
pub(super) const LSM_LIST_MODULES: c_long = 461;
pub(super) const MSEAL: c_long = 462;
pub(super) const SETXATTRAT: c_long = 463;
pub(super) const GETXATTRAT: c_long = 464;
pub(super) const LISTXATTRAT: c_long = 465;
pub(super) const REMOVEXATTRAT: c_long = 466;
pub(super) const FILE_GETATTR: c_long = 468;
pub(super) const FILE_SETATTR: c_long = 469;
