//! The code of a keeper, and of the program's process until it executes.
//!
//! Both share the memory of their parent (`CLONE_VM`): a large server starts a program as fast as a
//! small one, and a keeper costs little more than its kernel structures. In return, this code may only
//! make system calls, through [`syscall`](super::syscall) or `rustix`: no allocation, no lock, no
//! `errno`, no panic. Everything it needs is prepared in [`KeeperState`].
//!
//! The keeper, in order:
//! 1. asks to be resumed when its parent dies, which may have stopped it; gets its own session and
//!    group; becomes the subreaper of everything below it; resets every signal to its default;
//! 2. if it was started ahead of its order: closes every descriptor but the socket to the server, and
//!    waits for the order there; ends if the server is gone;
//! 3. starts the process, and waits until it has executed its program or failed;
//! 4. reports which, and closes every descriptor but the socket to the server;
//! 5. reaps, reports the program's exit, handles messages of the server;
//! 6. ends when no descendant is left. If the server says so or is gone, kills what is left, and ends.
//!    It has descriptors even if the server has used up its own.
//!
//! The process, before `execve`, in order:
//! 1. gets its own session and process group;
//! 2. asks to be killed when the keeper dies; with limits, enters its control group;
//! 3. puts descriptors 0, 1, 2 and the passed ones in place, and closes all others;
//! 4. with a terminal: makes it the controlling terminal;
//! 5. enters the working directory; unblocks all signals; limits its open files; calls `execve`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

use super::MAX_DESCRIPTORS;
use super::memory::Span;
use super::message::{Control, LENGTH, Report, Used};
use super::order::{self, OpenedOrder};
use super::syscall::call;

/// How long a program may clean up after the server is gone: much longer than it takes on a busy
/// machine.
pub(in crate::process) const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long after a kill to look for more processes to kill, unless SIGCHLD comes first.
const KILL_RETRY: Duration = Duration::from_millis(20);

/// The same, for processes that have survived [`CLEANUP_TIMEOUT`] of that: they cannot be signalled.
const SLOW_KILL_RETRY: Duration = Duration::from_secs(1);

/// Maximum descriptors passed besides the standard streams.
pub(super) const MAX_PASSED: usize = 64;

/// Steps of the start that can fail; [`Report::Failed`] carries their index.
pub(super) const STEPS: [&str; 9] = [
    "clone",
    "setsid",
    "parent death signal",
    "descriptors",
    "terminal",
    CWD,
    EXEC,
    "control group",
    "limit of open files",
];
pub(super) const CWD: &str = "working directory";
pub(super) const EXEC: &str = "execve";

/// An order that was read, with the descriptors that came with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct AcceptedOrder {
    order: OpenedOrder,
    stdio: [RawFd; 3],
    pass: [RawFd; MAX_PASSED],
    passed: usize,
    /// Executed instead of the files, unless negative.
    executable: RawFd,
    /// `cgroup.procs` of the group that the process enters, unless negative.
    cgroup: RawFd,
}

impl AcceptedOrder {
    /// Gives the descriptors their meaning, in the order of [`Order`](super::Order).
    pub(super) fn new(
        order: OpenedOrder,
        mut descriptors: impl Iterator<Item = RawFd>,
    ) -> Result<Self, Errno> {
        let mut next = || descriptors.next().ok_or(Errno::BADF);
        let stdio = [next()?, next()?, next()?];
        let executable = if order.flags.executable { next()? } else { -1 };
        let cgroup = if order.flags.cgroup { next()? } else { -1 };
        let mut pass = [-1; MAX_PASSED];
        let mut passed = 0;
        for fd in descriptors {
            *pass.get_mut(passed).ok_or(Errno::TOOBIG)? = fd;
            passed += 1;
        }
        Ok(Self { order, stdio, pass, passed, executable, cgroup })
    }

    /// Whether the program must clean up before it exits.
    pub(super) fn cleans_up(&self) -> bool {
        self.order.flags.cleans_up
    }
}

/// Memory shared by a keeper, its process and their parent.
#[derive(Debug)]
pub(super) struct KeeperState {
    /// What to start; `None` until the keeper has received it.
    pub accepted: Option<AcceptedOrder>,
    /// Where the keeper receives its order, if it was started ahead of it.
    pub order_memory: *mut [u8],
    /// The socket to the server.
    pub socket: RawFd,
    pub process_stack: *mut c_void,
    /// Memory needed only for the start.
    pub start_only: [Span; 2],
    /// The program exits by itself when the server does, and must clean up before that.
    pub cleans_up: AtomicBool,
    /// The program's pid until it was reaped, else 0.
    pub root: AtomicI32,
    /// The kernel resumes the keeper when its parent dies. Do not stop it before this is set.
    pub can_be_stopped: AtomicBool,
    /// The step that failed; written by the process.
    pub failed: Option<(i32, Errno)>,
}

/// Starts a keeper, which starts the process; returns the keeper's pid. The keeper has copies of the
/// descriptors, so the caller may close its own.
///
/// # Safety
/// The state, what it points to and the stack must not be touched until that keeper has ended.
pub(super) unsafe fn start(state: *mut KeeperState, stack: *mut c_void) -> Result<Pid, Errno> {
    // Block signals: a handler must not run in the keeper while it shares our memory.
    let blocked = BlockedSignals::all();
    // SAFETY: `keeper` makes system calls only and never returns; the caller's promise for the rest.
    let pid = unsafe {
        libc::clone(keeper, stack, libc::CLONE_VM | libc::SIGCHLD, state.cast::<c_void>())
    };
    let started = Pid::from_raw(pid.max(0)).ok_or_else(errno);
    drop(blocked);
    started
}

/// The `errno` that libc's `clone` has set. Nothing else here touches it, so it belongs to a `clone` of
/// this keeper, or at worst of another one at the same time.
fn errno() -> Errno {
    // SAFETY: the location is always valid.
    match unsafe { *libc::__errno_location() } {
        error @ 1..4096 => Errno::from_raw_os_error(error),
        _ => Errno::AGAIN,
    }
}

/// Blocks all signals in this thread until dropped.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn all() -> Self {
        // SAFETY: both sets are plain memory of the right type; the calls cannot fail with them.
        unsafe {
            let mut all = std::mem::zeroed();
            let mut before = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled by the call in `all`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}

/// Body of the keeper.
extern "C" fn keeper(state: *mut c_void) -> c_int {
    let state = state.cast::<KeeperState>();
    // The process that stops a keeper (see `descendants`) may be killed before resuming it. That is its parent,
    // or a process that dies before its parent does; so the parent's death resumes it.
    let awake = [libc::PR_SET_PDEATHSIG as usize, libc::SIGCONT as usize];
    // SAFETY: takes a number; the state is ours, and the flag is shared by design.
    unsafe {
        if call(libc::SYS_prctl, awake).is_ok() {
            (*state).can_be_stopped.store(true, Ordering::Release);
        }
    }
    let _ = rustix::thread::set_name(c"exec-keeper");
    // Its own group: killing the group of one keeper must not kill others.
    // SAFETY: takes nothing.
    let _ = unsafe { call(libc::SYS_setsid, []) };
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    // The process inherits these. All signals are blocked here, so it does not matter to this process.
    // SAFETY: our own table of handlers.
    unsafe { (1..=SIGNALS).for_each(|signal| default_signal(signal)) };
    // SAFETY: `start` was promised that the state is ours until this process has ended.
    let accepted = match unsafe { &mut *state } {
        KeeperState { accepted: Some(_), .. } => Ok(true),
        waiting => wait_for_order(waiting),
    };
    // SAFETY: as above.
    let pid = unsafe {
        match accepted {
            Ok(true) => start_process(state),
            // The server is gone, or needs no more keepers.
            Ok(false) => exit(),
            Err(errno) => Err(errno),
        }
    };
    // SAFETY: the process has gone or executed; nothing else writes here.
    let state = unsafe { &mut *state };
    // SAFETY: our own copy of that descriptor, open until this process ends.
    let socket = unsafe { BorrowedFd::borrow_raw(state.socket) };
    let failed = match pid {
        Err(errno) => Some((0, errno)),
        Ok(_) => state.failed,
    };
    if let (Ok(root), None) = (pid, failed) {
        send_report(socket, Report::Started { root, keeper: rustix::process::getpid() });
        // SAFETY: nothing else of our own copies is used any more, and no memory of the start.
        unsafe {
            close_around(0, state.socket);
            state.start_only.iter().for_each(|span| span.release());
        }
        state.root.store(root.as_raw_nonzero().get(), Ordering::Release);
        supervise(root, socket, state);
    } else if let Some((step, errno)) = failed {
        let _ = rustix::process::wait(WaitOptions::empty());
        send_report(socket, Report::Failed { step, errno: errno.raw_os_error() });
    }
    exit()
}

/// Ends the keeper, without destructors or exit handlers, which belong to the parent.
fn exit() -> ! {
    loop {
        // SAFETY: takes a number, and does not return.
        let _ = unsafe { call(libc::SYS_exit_group, [0]) };
    }
}

/// Receives the order of a keeper that was started ahead of it. False if there will be none.
fn wait_for_order(state: &mut KeeperState) -> Result<bool, Errno> {
    // SAFETY: nothing of the parent's descriptors is used here. A copy of its end of a socket would keep
    // that open after the parent's death.
    unsafe { close_around(0, state.socket) };
    // SAFETY: our own copy of that descriptor, open until this process ends.
    let socket = unsafe { BorrowedFd::borrow_raw(state.socket) };
    // SAFETY: a part of the memory of this keeper, which nothing else uses until it has ended.
    let memory = unsafe { &mut *state.order_memory };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(memory)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let len = match rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut parts, &mut ancillary, flags)
    }) {
        Ok(received) if received.bytes > 0 => received.bytes,
        Ok(_) | Err(_) => return Ok(false),
    };
    let order = memory.get_mut(..len).and_then(order::open).ok_or(Errno::INVAL)?;
    let descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    // They stay open until the process has its copies; `keeper` closes them.
    let descriptors = descriptors.flatten().map(IntoRawFd::into_raw_fd);
    let accepted = AcceptedOrder::new(order, descriptors)?;
    state.cleans_up.store(accepted.cleans_up(), Ordering::Relaxed);
    state.accepted = Some(accepted);
    Ok(true)
}

/// Starts the process, and waits until it has executed its program or exited.
///
/// # Safety
/// The state must be the caller's own, with an accepted order.
unsafe fn start_process(state: *mut KeeperState) -> Result<Pid, Errno> {
    // SAFETY: the caller's promise; the process's stack is its own part of the memory; CLONE_VFORK
    // suspends this process until the other has executed or exited.
    let pid = unsafe {
        libc::clone(
            process,
            (*state).process_stack,
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            state.cast::<c_void>(),
        )
    };
    Pid::from_raw(pid.max(0)).ok_or_else(errno)
}

/// Reaps and reports until no descendant is left.
fn supervise(root: Pid, socket: BorrowedFd<'_>, state: &KeeperState) {
    // Without a signalfd, poll for exited children.
    let sigchld = signalfd().unwrap_or(-1);
    let mut root = Some(root);
    let mut server = true;
    let mut killing_since = None;
    loop {
        let (exited, left) = reap(root);
        if let Some(code) = exited {
            root = None;
            state.root.store(0, Ordering::Release);
            let (code, signalled) = code;
            let report = Report::Exited { code, signalled, nothing_left: !left, used: used() };
            send_report(socket, report);
        }
        if !left {
            return;
        }
        let mut wait = (sigchld < 0).then_some(KILL_RETRY);
        if !server {
            killing_since.get_or_insert_with(Instant::now);
        }
        if let Some(since) = killing_since {
            let left = CLEANUP_TIMEOUT.saturating_sub(since.elapsed());
            match root {
                Some(root) if state.cleans_up.load(Ordering::Relaxed) && !left.is_zero() => {
                    // Without the server it kills what is below it by itself.
                    if server {
                        kill_children_of(root);
                    }
                    // It may have been stopped. We have not reaped it, so the pid is still its own.
                    let _ = rustix::process::kill_process(root, Signal::CONT);
                    wait = Some(if server { KILL_RETRY } else { left });
                }
                _ => {
                    kill_children(root);
                    wait = Some(if left.is_zero() { SLOW_KILL_RETRY } else { KILL_RETRY });
                }
            }
        }
        server = wait_for(socket.as_fd(), sigchld, server, wait);
        while server && let Some(control) = receive_control(socket) {
            match control {
                Control::CleansUp => state.cleans_up.store(true, Ordering::Relaxed),
                Control::Kill => {
                    killing_since.get_or_insert_with(Instant::now);
                }
                Control::Signal { signal, also } => {
                    for group in
                        [root, also.filter(|&also| Some(also) != root)].into_iter().flatten()
                    {
                        let _ = rustix::process::kill_process_group(group, signal);
                    }
                }
            }
        }
    }
}

/// Reaps exited children. Returns the exit code, and whether it is that of a signal, if the root was among them, and whether any child is
/// left.
fn reap(root: Option<Pid>) -> (Option<(i32, bool)>, bool) {
    let mut exited = None;
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if Some(pid) == root => exited = Some(code(status)),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return (exited, true),
            Err(_) => return (exited, false),
        }
    }
}

fn code(status: WaitStatus) -> (i32, bool) {
    let signal = status.terminating_signal().map(|signal| 128 + signal);
    (status.exit_status().or(signal).unwrap_or(-1), signal.is_some())
}

/// What the children that were reaped so far used, with their own.
fn used() -> Used {
    let children = resource_usage(libc::RUSAGE_CHILDREN);
    // A process that shared our memory until it executed is as large as that was, whatever it executed.
    let ours = resource_usage(libc::RUSAGE_SELF).ru_maxrss;
    let microseconds = |time: libc::timeval| {
        (time.tv_sec as u64).wrapping_mul(1_000_000).wrapping_add(time.tv_usec as u64)
    };
    Used {
        cpu_us: microseconds(children.ru_utime).wrapping_add(microseconds(children.ru_stime)),
        memory_kib: if children.ru_maxrss > ours { children.ru_maxrss as u64 } else { 0 },
        blocks_in: children.ru_inblock as u64,
        blocks_out: children.ru_oublock as u64,
    }
}

fn resource_usage(of: c_int) -> libc::rusage {
    // SAFETY: plain numbers, for which zero is valid; the call writes at most this structure.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let _ = call(libc::SYS_getrusage, [of as isize as usize, (&raw mut usage).addr()]);
        usage
    }
}

/// Waits for a message, an exited child, or the end of the server; returns whether the server is there.
fn wait_for(socket: BorrowedFd<'_>, sigchld: RawFd, server: bool, wait: Option<Duration>) -> bool {
    let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
    // SAFETY: our own, open until this process ends.
    let signals = (sigchld >= 0).then(|| unsafe { BorrowedFd::borrow_raw(sigchld) });
    let mut fds = [
        PollFd::from_borrowed_fd(socket, PollFlags::IN),
        PollFd::from_borrowed_fd(signals.unwrap_or(socket), PollFlags::IN),
    ];
    // The socket of a gone server is always readable.
    let from = usize::from(!server);
    let to = 1 + usize::from(signals.is_some());
    let _ = poll(fds.get_mut(from..to).unwrap_or_default(), wait.as_ref());
    if let Some(signals) = signals {
        let mut info = [0; 512];
        while rustix::io::read(signals, &mut info).is_ok_and(|len| len == info.len()) {}
    }
    server && !fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// A signalfd for SIGCHLD.
fn signalfd() -> Result<RawFd, Errno> {
    let set: u64 = 1 << (libc::SIGCHLD - 1);
    let flags = (libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) as usize;
    // SAFETY: a new descriptor; the set is as long as is said.
    let fd = unsafe {
        call(libc::SYS_signalfd4, [usize::MAX, (&raw const set).addr(), size_of::<u64>(), flags])
    };
    fd.map(|fd| fd as RawFd)
}

fn send_report(socket: BorrowedFd<'_>, report: Report) {
    // If the server is gone, `poll` will tell.
    let _ = rustix::io::retry_on_intr(|| {
        rustix::net::send(socket, &report.encode(), SendFlags::NOSIGNAL)
    });
}

fn receive_control(socket: BorrowedFd<'_>) -> Option<Control> {
    let mut message = [0; LENGTH];
    let (len, _) = rustix::net::recv(socket, &mut message, RecvFlags::DONTWAIT).ok()?;
    Control::decode(message.get(..len)?)
}

/// Kills all current children. This process adopts what they leave, so call it until none is left.
fn kill_children(root: Option<Pid>) {
    // We have not reaped them, so the pids are still their own.
    if kill_listed(c"/proc/thread-self/children").is_err()
        && let Some(root) = root
    {
        let _ = rustix::process::kill_process_group(root, Signal::KILL);
    }
}

/// Kills all current children of a child, which exits by itself when they have. It reaps them, so a pid
/// may be another's by now: the risk is that of the moment between two system calls.
fn kill_children_of(child: Pid) {
    let mut digits = [0; 10];
    let mut number = child.as_raw_nonzero().get();
    let mut first = digits.len();
    while number > 0 && first > 0 {
        first -= 1;
        if let Some(digit) = digits.get_mut(first) {
            *digit = b'0' + (number % 10) as u8;
        }
        number /= 10;
    }
    let digits = digits.get(first..).unwrap_or_default();
    let mut path = [0; 48];
    let parts = [b"/proc/".as_slice(), digits, b"/task/", digits, b"/children"];
    let bytes = parts.into_iter().flatten();
    path.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    if let Ok(path) = CStr::from_bytes_until_nul(&path) {
        let _ = kill_listed(path);
    }
}

/// Kills all processes whose pids are listed in a file.
fn kill_listed(path: &CStr) -> Result<(), Errno> {
    let list = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = [0; 1024];
    let mut number = 0_i32;
    loop {
        let len = match rustix::io::read(&list, &mut buffer) {
            Ok(0) | Err(_) => return Ok(()),
            Ok(len) => len,
        };
        for &byte in buffer.iter().take(len) {
            if byte.is_ascii_digit() {
                number = number.wrapping_mul(10).wrapping_add(i32::from(byte - b'0'));
            } else if let Some(pid) = Pid::from_raw(std::mem::take(&mut number)) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Body of the process. Makes only system calls until `execve`.
extern "C" fn process(state: *mut c_void) -> c_int {
    let state = state.cast::<KeeperState>();
    // SAFETY: the keeper passes its state, and is suspended while we use it.
    let failed = unsafe {
        match &(*state).accepted {
            Some(accepted) => run(accepted),
            None => (0, Errno::INVAL),
        }
    };
    // SAFETY: as above.
    unsafe { (*state).failed = Some(failed) };
    // SAFETY: leaves without destructors or exit handlers.
    let _ = unsafe { call(libc::SYS_exit_group, [127]) };
    0
}

/// Returns the step that failed and its error; does not return otherwise.
///
/// # Safety
/// Call it in the process only.
unsafe fn run(accepted: &AcceptedOrder) -> (i32, Errno) {
    // SAFETY: every call below is a bare system call on values of the order, which are valid for its
    // lifetime: open descriptors, NUL-terminated strings, NULL-terminated arrays of them.
    unsafe {
        let keeper = libc::getppid();
        if let Err(errno) = call(libc::SYS_setsid, []) {
            return (1, errno);
        }
        let death = [libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize];
        if let Err(errno) = call(libc::SYS_prctl, death) {
            return (2, errno);
        }
        // If the keeper died before the call, its death signal never comes.
        if libc::getppid() != keeper {
            return (2, Errno::SRCH);
        }
        if accepted.cgroup >= 0 {
            let zero = c"0".as_ptr().addr();
            if let Err(errno) = call(libc::SYS_write, [accepted.cgroup as usize, zero, 1]) {
                return (7, errno);
            }
        }
        let executable = match place_descriptors(accepted) {
            Ok(executable) => executable,
            Err(errno) => return (3, errno),
        };
        if accepted.order.flags.tty
            && let Err(errno) = call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0])
        {
            return (4, errno);
        }
        if let Err(errno) = call(libc::SYS_chdir, [accepted.order.cwd.addr()]) {
            return (5, errno);
        }
        let none = 0_u64;
        let (set, len) = ((&raw const none).addr(), size_of::<u64>());
        let _ = call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, set, 0, len]);
        if let Err(errno) = limit_open_files(accepted.order.flags.open_files) {
            return (8, errno);
        }
        (6, execute(accepted, executable))
    }
}

const SIGNALS: c_int = 64;

/// Lowers the limit of open files to `most`, unless that is 0; never raises it.
///
/// # Safety
/// Call it in the process only.
unsafe fn limit_open_files(most: u32) -> Result<(), Errno> {
    if most == 0 {
        return Ok(());
    }
    let (own, resource) = (0, libc::RLIMIT_NOFILE as usize);
    let mut limit = [0_u64; 2];
    // SAFETY: the structure is two numbers of 64 bits, which the calls write and read.
    unsafe {
        call(libc::SYS_prlimit64, [own, resource, 0, (&raw mut limit).addr()])?;
        let lowered = limit.map(|limit| limit.min(u64::from(most)));
        call(libc::SYS_prlimit64, [own, resource, (&raw const lowered).addr(), 0])?;
    }
    Ok(())
}

/// Resets a signal to its default, by a system call: libc refuses to touch the two signals that it uses
/// itself, which a parent may have left ignored.
///
/// # Safety
/// Call it in a process with its own table of handlers.
unsafe fn default_signal(signal: c_int) {
    /// The kernel's `struct sigaction` (handler, flags, restorer, mask) with `SIG_DFL`, which is 0;
    /// longer than it is on any architecture.
    const DEFAULT: [usize; 8] = [0; 8];
    // SAFETY: reads the structure, writes nothing; the size is that of the kernel's signal set.
    unsafe {
        let size = SIGNALS as usize / 8;
        let _ = call(libc::SYS_rt_sigaction, [signal as usize, DEFAULT.as_ptr().addr(), 0, size]);
    }
}

/// Puts the standard and the passed descriptors in place and closes all others, except the executable,
/// whose descriptor it returns.
///
/// # Safety
/// Call it in the process only.
unsafe fn place_descriptors(accepted: &AcceptedOrder) -> Result<RawFd, Errno> {
    let end = accepted.stdio.len() + accepted.passed;
    let sources = || accepted.stdio.iter().chain(accepted.pass.iter().take(accepted.passed));
    let above = libc::F_DUPFD_CLOEXEC as usize;
    let mut moved = [0; 3 + MAX_PASSED];
    // SAFETY: system calls on descriptors of the process's own table. First all of them above the
    // numbers that they are passed as, so that none is overwritten before it is used.
    unsafe {
        for (moved, &fd) in moved.iter_mut().zip(sources()) {
            *moved = call(libc::SYS_fcntl, [fd as usize, above, end])?;
        }
        let executable = match accepted.executable {
            ..0 => None,
            fd => Some(call(libc::SYS_fcntl, [fd as usize, above, end])? as RawFd),
        };
        for (target, &fd) in moved.iter().take(end).enumerate() {
            call(libc::SYS_dup3, [fd, target, 0])?;
        }
        match executable {
            // `execve` closes it.
            Some(executable) => close_around(end as c_int, executable),
            None => close(end as c_int, c_int::MAX),
        }
        Ok(executable.unwrap_or(-1))
    }
}

/// Closes every descriptor from `first` on, except one.
///
/// # Safety
/// None of them may be in use.
unsafe fn close_around(first: c_int, except: RawFd) {
    // SAFETY: the caller's promise.
    unsafe {
        close(first, except - 1);
        close(except + 1, c_int::MAX);
    }
}

/// Closes every descriptor in a range.
///
/// # Safety
/// None of them may be in use.
unsafe fn close(first: c_int, last: c_int) {
    if first > last {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if call(libc::SYS_close_range, [first as usize, last as usize, 0]).is_err() {
            // Kernels before 5.9: close as many as a table of ordinary size holds.
            for fd in first..last.min(4096) {
                let _ = call(libc::SYS_close, [fd as usize]);
            }
        }
    }
}

/// Tries each file as `execvp` does: skips missing files, remembers one that may not be executed.
/// Returns why none was executed.
///
/// # Safety
/// Call it in the process only.
unsafe fn execute(accepted: &AcceptedOrder, executable: RawFd) -> Errno {
    let OpenedOrder { files, count, argv, env, .. } = accepted.order;
    // SAFETY: NUL-terminated strings, NULL-terminated arrays and an open descriptor, which the
    // order keeps alive.
    unsafe {
        if executable >= 0 {
            let (name, flags) = (c"".as_ptr().addr(), libc::AT_EMPTY_PATH as usize);
            let arguments = [executable as usize, name, argv.addr(), env.addr(), flags];
            return call(libc::SYS_execveat, arguments).err().unwrap_or(Errno::NOENT);
        }
        let mut why = Errno::NOENT;
        for n in 0..count {
            let file: *const c_char = *files.add(n);
            match call(libc::SYS_execve, [file.addr(), argv.addr(), env.addr()]) {
                Err(Errno::ACCESS) => why = Errno::ACCESS,
                Err(errno @ (Errno::NOENT | Errno::NOTDIR)) => {
                    if why != Errno::ACCESS {
                        why = errno;
                    }
                }
                Err(errno) => return errno,
                Ok(_) => {}
            }
        }
        why
    }
}
