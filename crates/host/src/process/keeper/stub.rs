//! The keeper's own code, and that of the program's process until it executes.
//!
//! Both share the memory of whoever started them (`CLONE_VM`): a large server starts a program as
//! fast as a small one, and a keeper costs little more than what the kernel knows of it. The price
//! is that the code here may only make system calls, by [`syscall`](super::syscall) or `rustix`: no
//! allocation, no lock, no `errno`, no panic. Everything it needs is in [`KeeperState`] beforehand.
//!
//! The keeper's life:
//! 1. be continued when its parent dies, which may have stopped it; a session and group of its own; be
//!    the reaper of everything below it;
//! 2. start the process, and wait until that executes its program or has failed to;
//! 3. say which, and hold no descriptor but the socket to the server from then on;
//! 4. reap, say when the program has exited, carry out what the server wishes;
//! 5. when nothing is left, end. When the server has gone, kill what is left, and end.
//!
//! The process's life before `execve`, in order:
//! 1. every signal to its default; a session and process group of its own;
//! 2. die when the keeper dies;
//! 3. descriptors 0, 1, 2 and the passed ones in place, all others closed;
//! 4. with a terminal: take it as the controlling one;
//! 5. the working directory; no signal blocked; `execve`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

use super::memory::Span;
use super::message::{Control, LENGTH, Report};
use super::order::OpenedOrder;
use super::syscall::call;

/// How long what tidies up may take after the server has gone: much longer than it does on a busy
/// machine.
pub(in crate::process) const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long after a kill it is looked for more to kill, if nobody tells of a death before.
const KILL_RETRY: Duration = Duration::from_millis(20);

/// The most descriptors that can be passed besides the standard ones.
pub(super) const MAX_PASSED: usize = 64;

/// Steps of the start that can fail; their number travels in [`Report::Failed`].
pub(super) const STEPS: [&str; 7] =
    ["clone", "setsid", "parent death signal", "descriptors", "terminal", CWD, EXEC];
pub(super) const CWD: &str = "working directory";
pub(super) const EXEC: &str = "execve";

/// Everything a keeper and its process read, and what they write.
#[derive(Debug)]
pub(super) struct KeeperState {
    pub order: OpenedOrder,
    pub stdio: [RawFd; 3],
    pub pass: [RawFd; MAX_PASSED],
    pub passed: usize,
    /// In place of all files, unless negative.
    pub executable: RawFd,
    /// The way to the server.
    pub socket: RawFd,
    pub process_stack: *mut c_void,
    /// What is needed for the start only.
    pub start_only: [Span; 2],
    /// The program ends by itself when the server does, and has to tidy up before.
    pub cleans_up: AtomicBool,
    /// The program's number until it was reaped, else 0.
    pub root: AtomicI32,
    /// The keeper is continued when its parent dies. Before that nobody may stop it.
    pub can_be_stopped: AtomicBool,
    /// Written by the process, if it fails.
    pub failed: Option<(i32, Errno)>,
}

/// Starts a keeper, which starts the process; tells the keeper's pid. It has the descriptors of the
/// plan for its own: ours can be closed.
///
/// # Safety
/// The plan, what it points to and the stack are left alone until that keeper has ended.
pub(super) unsafe fn start(state: *mut KeeperState, stack: *mut c_void) -> Result<Pid, Errno> {
    // No signal may be delivered to the keeper while it shares our memory: a handler would run there.
    let blocked = BlockedSignals::all();
    // SAFETY: `keeper` makes system calls only and never returns; the caller's promise for the rest.
    let pid = unsafe {
        libc::clone(keeper, stack, libc::CLONE_VM | libc::SIGCHLD, state.cast::<c_void>())
    };
    let started = Pid::from_raw(pid.max(0)).ok_or_else(errno);
    drop(blocked);
    started
}

/// What the library's `clone` left. The one place where it is read: all else here leaves it alone, so
/// that it is that of a `clone`, of this keeper or at worst of another at the same moment.
fn errno() -> Errno {
    // SAFETY: the location is always valid.
    match unsafe { *libc::__errno_location() } {
        error @ 1..4096 => Errno::from_raw_os_error(error),
        _ => Errno::AGAIN,
    }
}

/// All signals blocked in this thread, until dropped.
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

/// The keeper.
extern "C" fn keeper(state: *mut c_void) -> c_int {
    let state = state.cast::<KeeperState>();
    // Whoever stops a keeper (see `descendants`) may be killed before it continues it. All who do are its
    // parent, or die before its parent does; so the last death on the way up continues it.
    let awake = [libc::PR_SET_PDEATHSIG as usize, libc::SIGCONT as usize];
    // SAFETY: takes a number; the plan is ours, and the flag is shared by design.
    unsafe {
        if call(libc::SYS_prctl, awake).is_ok() {
            (*state).can_be_stopped.store(true, Ordering::Release);
        }
    }
    let _ = rustix::thread::set_name(c"exec-keeper");
    // A group of its own: who kills that of one keeper must not kill all.
    // SAFETY: takes nothing.
    let _ = unsafe { call(libc::SYS_setsid, []) };
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    // SAFETY: system calls; whether a handler was set does not matter to what is blocked.
    unsafe { default_signal(libc::SIGCHLD) };
    // SAFETY: `start` was promised that the plan is ours; the process's stack is its own part of the
    // cell; CLONE_VFORK suspends this process until the other has executed or exited.
    let pid = unsafe {
        libc::clone(
            process,
            (*state).process_stack,
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            state.cast::<c_void>(),
        )
    };
    // SAFETY: the process has gone or executed; nobody else writes here.
    let state = unsafe { &mut *state };
    // SAFETY: our own copy of that descriptor, open until this process ends.
    let socket = unsafe { BorrowedFd::borrow_raw(state.socket) };
    let failed = match Pid::from_raw(pid.max(0)) {
        None => Some((0, errno())),
        Some(_) => state.failed,
    };
    if let (Some(root), None) = (Pid::from_raw(pid.max(0)), failed) {
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
    // SAFETY: leaves without destructors or exit handlers, which belong to whoever started us.
    let _ = unsafe { call(libc::SYS_exit_group, [0]) };
    0
}

/// Keeps what the program starts until nothing is left.
fn supervise(root: Pid, socket: BorrowedFd<'_>, state: &KeeperState) {
    // Without it, deaths are looked for now and then.
    let sigchld = signalfd().unwrap_or(-1);
    let mut root = Some(root);
    let mut server = true;
    let mut cleanup_deadline = None;
    loop {
        let (exited, left) = reap(root);
        if let Some(code) = exited {
            root = None;
            state.root.store(0, Ordering::Release);
            send_report(socket, Report::Exited { code, nothing_left: !left });
        }
        if !left {
            return;
        }
        let mut wait = (sigchld < 0).then_some(KILL_RETRY);
        if !server {
            let until = *cleanup_deadline.get_or_insert_with(|| Instant::now() + CLEANUP_TIMEOUT);
            let left = until.saturating_duration_since(Instant::now());
            let cleaning_up =
                root.is_some() && state.cleans_up.load(Ordering::Relaxed) && !left.is_zero();
            match root {
                // Somebody may have stopped it. Ours to reap, so the number is its own.
                Some(root) if cleaning_up => {
                    let _ = rustix::process::kill_process(root, Signal::CONT);
                }
                _ => kill_children(root),
            }
            wait = Some(if cleaning_up { left } else { KILL_RETRY });
        }
        server = wait_for(socket.as_fd(), sigchld, server, wait);
        while server && let Some(control) = receive_control(socket) {
            match control {
                Control::CleansUp => state.cleans_up.store(true, Ordering::Relaxed),
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

/// Reaps what has exited. Tells the code if the root was among it, and whether anything is left.
fn reap(root: Option<Pid>) -> (Option<i32>, bool) {
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

fn code(status: WaitStatus) -> i32 {
    let signal = status.terminating_signal().map(|signal| 128 + signal);
    status.exit_status().or(signal).unwrap_or(-1)
}

/// Waits for a wish, a death, or the end of the server, of which it tells whether it is there.
fn wait_for(socket: BorrowedFd<'_>, sigchld: RawFd, server: bool, wait: Option<Duration>) -> bool {
    let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
    // SAFETY: our own, open until this process ends.
    let signals = (sigchld >= 0).then(|| unsafe { BorrowedFd::borrow_raw(sigchld) });
    let mut fds = [
        PollFd::from_borrowed_fd(socket, PollFlags::IN),
        PollFd::from_borrowed_fd(signals.unwrap_or(socket), PollFlags::IN),
    ];
    // The socket of a server that has gone is always ready.
    let from = usize::from(!server);
    let to = 1 + usize::from(signals.is_some());
    let _ = poll(fds.get_mut(from..to).unwrap_or_default(), wait.as_ref());
    if let Some(signals) = signals {
        let mut info = [0; 512];
        while rustix::io::read(signals, &mut info).is_ok_and(|len| len == info.len()) {}
    }
    server && !fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// A descriptor that tells of the deaths of children.
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
    // A server that does not hear it any more has gone, which is found out anyway.
    let _ = rustix::io::retry_on_intr(|| {
        rustix::net::send(socket, &report.encode(), SendFlags::NOSIGNAL)
    });
}

fn receive_control(socket: BorrowedFd<'_>) -> Option<Control> {
    let mut message = [0; LENGTH];
    let (len, _) = rustix::net::recv(socket, &mut message, RecvFlags::DONTWAIT).ok()?;
    Control::decode(message.get(..len)?)
}

/// Kills the children there are. What they leave becomes ours: to be called until none is left.
fn kill_children(root: Option<Pid>) {
    let path: &CStr = c"/proc/thread-self/children";
    let Ok(list) = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        if let Some(root) = root {
            let _ = rustix::process::kill_process_group(root, Signal::KILL);
        }
        return;
    };
    let mut buffer = [0; 1024];
    let mut number = 0_i32;
    loop {
        let len = match rustix::io::read(&list, &mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(len) => len,
        };
        for &byte in buffer.iter().take(len) {
            if byte.is_ascii_digit() {
                number = number.wrapping_mul(10).wrapping_add(i32::from(byte - b'0'));
            } else if let Some(pid) = Pid::from_raw(std::mem::take(&mut number)) {
                // Ours to reap, so the number is still its own.
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// The process. Only system calls from here to `execve`.
extern "C" fn process(state: *mut c_void) -> c_int {
    let state = state.cast::<KeeperState>();
    // SAFETY: the keeper passes its plan, and is suspended while we use it.
    let failed = unsafe { run(&*state) };
    // SAFETY: as above.
    unsafe { (*state).failed = Some(failed) };
    // SAFETY: leaves without destructors or exit handlers.
    let _ = unsafe { call(libc::SYS_exit_group, [127]) };
    0
}

/// Returns the step that failed and why; does not return otherwise.
///
/// # Safety
/// To be called in the process only.
unsafe fn run(state: &KeeperState) -> (i32, Errno) {
    // SAFETY: every call below is a bare system call on values of the plan, which are valid for its
    // lifetime: open descriptors, NUL-terminated strings, NULL-terminated arrays of them.
    unsafe {
        let keeper = libc::getppid();
        for signal in 1..=SIGNALS {
            default_signal(signal);
        }
        if let Err(errno) = call(libc::SYS_setsid, []) {
            return (1, errno);
        }
        let death = [libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize];
        if let Err(errno) = call(libc::SYS_prctl, death) {
            return (2, errno);
        }
        // The keeper may have died before the call: then nothing would ever signal us.
        if libc::getppid() != keeper {
            return (2, Errno::SRCH);
        }
        let executable = match place_descriptors(state) {
            Ok(executable) => executable,
            Err(errno) => return (3, errno),
        };
        if state.order.flags.tty
            && let Err(errno) = call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0])
        {
            return (4, errno);
        }
        if let Err(errno) = call(libc::SYS_chdir, [state.order.cwd.addr()]) {
            return (5, errno);
        }
        let none = 0_u64;
        let (set, len) = ((&raw const none).addr(), size_of::<u64>());
        let _ = call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, set, 0, len]);
        (6, execute(state, executable))
    }
}

const SIGNALS: c_int = 64;

/// A signal to its default. The library refuses to touch the two that it uses itself; a parent of
/// ours may have left them ignored all the same, so this asks the kernel.
///
/// # Safety
/// To be called in a process that has its own table of handlers.
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

/// Puts the standard and the passed descriptors in place and closes every other one but what is to
/// be executed, which it tells.
///
/// # Safety
/// To be called in the process only.
unsafe fn place_descriptors(state: &KeeperState) -> Result<RawFd, Errno> {
    let end = state.stdio.len() + state.passed;
    let sources = || state.stdio.iter().chain(state.pass.iter().take(state.passed));
    let above = libc::F_DUPFD_CLOEXEC as usize;
    let mut moved = [0; 3 + MAX_PASSED];
    // SAFETY: system calls on descriptors of the process's own table. First all of them above the
    // numbers that they are passed as, so that none is overwritten before it is used.
    unsafe {
        for (moved, &fd) in moved.iter_mut().zip(sources()) {
            *moved = call(libc::SYS_fcntl, [fd as usize, above, end])?;
        }
        let executable = match state.executable {
            ..0 => None,
            fd => Some(call(libc::SYS_fcntl, [fd as usize, above, end])? as RawFd),
        };
        for (target, &fd) in moved.iter().take(end).enumerate() {
            call(libc::SYS_dup3, [fd, target, 0])?;
        }
        match executable {
            // Executing closes it.
            Some(executable) => close_around(end as c_int, executable),
            None => close(end as c_int, c_int::MAX),
        }
        Ok(executable.unwrap_or(-1))
    }
}

/// Closes every descriptor from `first` on but one.
///
/// # Safety
/// None of them may be used any more.
unsafe fn close_around(first: c_int, kept: RawFd) {
    // SAFETY: the caller's promise.
    unsafe {
        close(first, kept - 1);
        close(kept + 1, c_int::MAX);
    }
}

/// Closes every descriptor in a range.
///
/// # Safety
/// None of them may be used any more.
unsafe fn close(first: c_int, last: c_int) {
    if first > last {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if call(libc::SYS_close_range, [first as usize, last as usize, 0]).is_err() {
            // A kernel before 5.9: close what a table of ordinary size can hold.
            for fd in first..last.min(4096) {
                let _ = call(libc::SYS_close, [fd as usize]);
            }
        }
    }
}

/// Tries each file as `execvp` does: past those that are not there, remembering one that may not be
/// executed. Returns why none was.
///
/// # Safety
/// To be called in the process only.
unsafe fn execute(state: &KeeperState, executable: RawFd) -> Errno {
    let OpenedOrder { files, count, argv, env, .. } = state.order;
    // SAFETY: NUL-terminated strings, NULL-terminated arrays and an open descriptor, which the plan
    // keeps alive.
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
