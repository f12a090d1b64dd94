//! System calls that `rustix` lacks.
//!
//! Invariant: thin wrappers, without policy or state.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

use crate::decide::facts::Node;
use crate::host;

pub(crate) const ATTR_RDONLY: u64 = 0x1;
pub(crate) const ATTR_NOSUID: u64 = 0x2;
pub(crate) const ATTR_NODEV: u64 = 0x4;

/// `struct mount_attr`.
#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Sets attributes on a mount and, if `recursive`, on every mount below; stops propagation.
pub(crate) fn mount_attributes(
    mount: impl AsFd,
    set: u64,
    recursive: bool,
) -> rustix::io::Result<()> {
    let attributes =
        MountAttributes { set, clear: 0, propagation: libc::MS_PRIVATE, user_namespace: 0 };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a C string, the attributes live across the call and their size is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    check(result).map(drop)
}

/// Opens an absolute path with `O_PATH`, without following links.
pub(crate) fn open_absolute(path: &Path) -> rustix::io::Result<OwnedFd> {
    open_without_links(rustix::fs::CWD, path)
}

/// Opens a path below another root with `O_PATH`, without following links.
pub(crate) fn open_below(root: impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let inside = path.strip_prefix("/").unwrap_or(path);
    let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
    open_without_links(root, inside)
}

fn open_without_links(start: impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(
        start,
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

/// The type and identity of an open file.
pub(crate) fn node_of(fd: impl AsFd) -> rustix::io::Result<Node> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
    Ok(host::node(&rustix::fs::statx(fd, c"", flags, host::WANTED)?))
}

/// A detached copy of a mount at this path, with its submounts.
pub(crate) fn clone_tree(target: impl AsFd) -> rustix::io::Result<OwnedFd> {
    clone_named(target, Path::new(""))
}

/// Like `clone_tree`, by a name that no other process can change.
pub(crate) fn clone_named(root: impl AsFd, name: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::mount::open_tree(
        root,
        name,
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW
            | OpenTreeFlags::AT_RECURSIVE,
    )
}

/// Attaches a detached mount.
pub(crate) fn attach(tree: impl AsFd, target: impl AsFd) -> rustix::io::Result<()> {
    rustix::mount::move_mount(
        tree,
        c"",
        target,
        c"",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
}

/// Like `attach`, by a name that no other process can change.
pub(crate) fn attach_named(
    tree: impl AsFd,
    root: impl AsFd,
    name: &Path,
) -> rustix::io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree, c"", root, name, flags)
}

/// A new mount of a file system, not attached.
pub(crate) fn new_mount(
    kind: &CStr,
    options: &[(&str, &str)],
    attributes: u64,
) -> rustix::io::Result<OwnedFd> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(&context, *key, *value)?;
    }
    rustix::mount::fsconfig_create(&context)?;
    rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::from_bits_retain(attributes as u32),
    )
}

/// The arguments of `clone3`.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
}

/// Forks into new namespaces. `Ok(None)` in the child.
///
/// # Safety
///
/// As for `fork`: if the process has other threads, the child may only do what a signal handler may.
pub(crate) unsafe fn fork_into(
    namespaces: u64,
    exit_signal: i32,
) -> rustix::io::Result<Option<(i32, OwnedFd)>> {
    let mut pidfd: libc::c_int = -1;
    let arguments = CloneArguments {
        flags: namespaces | libc::CLONE_PIDFD as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: exit_signal as u64,
        ..CloneArguments::default()
    };
    // SAFETY: no memory is shared, so the child has its own copy of this stack; the arguments live
    // across the call and their size is given. The caller keeps the rule of forking.
    let pid = check(unsafe {
        libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArguments>())
    })?;
    if pid == 0 {
        return Ok(None);
    }
    // SAFETY: the kernel has just stored a new descriptor there, which nothing else owns.
    Ok(Some((pid as i32, unsafe { OwnedFd::from_raw_fd(pidfd) })))
}

/// Duplicates a descriptor of another process.
pub(crate) fn take_descriptor(process: i32, number: i32) -> rustix::io::Result<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let pidfd = pidfd_open(Pid::from_raw(process).ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
    // SAFETY: no pointers; the answer is a new descriptor that nothing else owns.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0);
        Ok(OwnedFd::from_raw_fd(check(fd)? as i32))
    }
}

/// Exits at once, without exit handlers.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: always defined.
    unsafe { libc::_exit(code) }
}

/// `prctl` with an integer argument.
pub(crate) fn prctl(option: i32, argument: u64) -> rustix::io::Result<()> {
    // SAFETY: none of the options used here take a pointer.
    check(i64::from(unsafe { libc::prctl(option, argument, 0u64, 0u64, 0u64) })).map(drop)
}

/// Marks every descriptor from `first` on close-on-exec, or closes it.
pub(crate) fn close_from(first: u32, on_exec: bool) -> rustix::io::Result<()> {
    close_range(first, u32::MAX, if on_exec { libc::CLOSE_RANGE_CLOEXEC } else { 0 })
}

/// Closes every descriptor except these, which must be sorted.
pub(crate) fn close_all_but(open: &[i32]) -> rustix::io::Result<()> {
    let mut from = 0;
    for &number in open {
        let number = number as u32;
        if number > from {
            close_range(from, number - 1, 0)?;
        }
        from = number + 1;
    }
    close_range(from, u32::MAX, 0)
}

fn close_range(first: u32, last: u32, flags: u32) -> rustix::io::Result<()> {
    // SAFETY: closing is the purpose; the callers leave by `_exit` or run on with descriptors of
    // their own, and no owner of a closed number is used or dropped.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) }).map(drop)
}

/// Blocks every signal, so that signals stay pending.
pub(crate) fn block_signals() {
    // SAFETY: the set is filled before it is used.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Converts the result of a system call.
pub(crate) fn check(result: i64) -> rustix::io::Result<i64> {
    if result < 0 {
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(Errno::from_raw_os_error(errno));
    }
    Ok(result)
}
