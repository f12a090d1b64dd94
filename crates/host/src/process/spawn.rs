//! From a [`Command`] to a running process: `clone`, then `execve`.
//!
//! The child shares this process's memory until it executes (`CLONE_VM | CLONE_VFORK`, as in
//! `posix_spawn`): a large server starts a program as fast as a small one. The price is that the
//! code between the two may only make system calls: no allocation, no lock, no destructor.
//! Everything it needs is in [`ChildPlan`] beforehand.
//!
//! The child's life before `execve`, in order:
//! 1. enter itself for the warden (so that there is no moment at which a dead server leaves it behind);
//! 2. every signal to its default; a session and process group of its own;
//! 3. descriptors 0, 1, 2 and the passed ones in place, all others closed;
//! 4. with a terminal: take it as the controlling one;
//! 5. be the reaper of its own descendants, so that none leaves the tree while it lives;
//! 6. without a warden: die when the spawning thread dies;
//! 7. the original descriptor limit; the working directory; no signal blocked; `execve`.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use codex_linux_sandbox::Executable;

use super::command::Command;
use super::orphans::Group;
use super::roster::Place;

/// What a child is started with besides its [`Command`].
#[derive(Debug)]
pub struct SpawnRequest {
    /// With whom it is killed in the end.
    pub group: Group,
    /// What to execute.
    pub command: Command,
    /// Its descriptors 0, 1 and 2.
    pub stdio: [OwnedFd; 3],
    /// Descriptor 0 is a terminal, to be the controlling one.
    pub tty: bool,
    /// Further descriptors to pass: the first becomes 3, the second 4, and so on.
    pub pass: Vec<Arc<OwnedFd>>,
    /// It ends by itself when this process does, and has to tidy up before.
    pub tidies_up: bool,
}

/// What starting children needs of its surroundings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Surroundings<'a> {
    /// Where the child enters itself for the warden; without it, it gets a parent-death signal.
    pub place: Option<&'a Place>,
    /// The soft limit of descriptors to give back to the child.
    pub nofile: Option<libc::rlimit>,
}

/// A process that has begun to execute its program.
#[derive(Debug)]
pub struct Spawned {
    /// Its pid, which is its process group and session too.
    pub pid: i32,
    /// Readable when it has exited.
    pub pidfd: OwnedFd,
}

impl Spawned {
    /// Ends a process that nobody will own.
    pub(super) fn kill_and_reap(&self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
            super::descendants::kill_tree(pid);
        }
        reap(self.pid);
    }
}

/// Why no process was started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The working directory cannot be entered.
    #[error("cannot enter the working directory: {0}")]
    Cwd(#[source] io::Error),
    /// The program cannot be executed.
    #[error("cannot execute the program: {0}")]
    Exec(#[source] io::Error),
    /// Something before that failed.
    #[error("cannot start a process ({step}): {source}")]
    System {
        /// What was attempted.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Steps of the child that can fail; their number travels back in shared memory.
const STEPS: [&str; 8] =
    ["clone", "setsid", "descriptors", "terminal", "parent death signal", "limits", CWD, EXEC];
const CWD: &str = "working directory";
const EXEC: &str = "execve";

/// Memory for the child to run on while it shares ours. One a spawning thread, used again.
#[derive(Debug)]
pub(super) struct Stack {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to this value alone, and is only used through `&mut self`.
unsafe impl Send for Stack {}

impl Stack {
    const SIZE: usize = 64 << 10;

    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: an anonymous private mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                Self::SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base })
    }

    fn top(&mut self) -> *mut c_void {
        // SAFETY: one past the end of the mapping, page aligned as stacks want it.
        unsafe { self.base.byte_add(Self::SIZE) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and no child runs on it: `spawn` waits for that.
        unsafe { libc::munmap(self.base, Self::SIZE) };
    }
}

/// Everything the child reads, and the two words it writes.
struct ChildPlan<'a> {
    /// In place of all files, unless negative.
    executable: RawFd,
    files: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    cwd: *const c_char,
    stdio: [RawFd; 3],
    pass: Vec<RawFd>,
    tty: bool,
    parent: libc::pid_t,
    surroundings: Surroundings<'a>,
    failed_step: usize,
    failed_errno: c_int,
}

/// Starts the process and waits until it executes its program, or has failed to.
///
/// Blocks the calling thread for that long. Without a warden the child dies with this thread.
pub(super) fn spawn(
    request: &SpawnRequest,
    surroundings: Surroundings<'_>,
    stack: &mut Stack,
) -> Result<Spawned, SpawnError> {
    let pointers = |strings: &[std::ffi::CString]| {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>()
    };
    let command = &request.command;
    let clear = clear_of_targets(request)
        .map_err(|source| SpawnError::System { step: STEPS[2], source })?;
    let executable = command.executable.as_ref().and_then(Executable::descriptor);
    let mut plan = ChildPlan {
        executable: executable.map_or(-1, |fd| fd.as_raw_fd()),
        files: command.candidates.iter().map(|s| s.as_ptr()).collect(),
        argv: pointers(&command.argv),
        env: pointers(&command.env),
        cwd: command.cwd.as_ptr(),
        stdio: [clear[0].as_raw_fd(), clear[1].as_raw_fd(), clear[2].as_raw_fd()],
        pass: clear[3..].iter().map(AsRawFd::as_raw_fd).collect(),
        tty: request.tty,
        parent: rustix::process::getpid().as_raw_nonzero().get(),
        surroundings,
        failed_step: usize::MAX,
        failed_errno: 0,
    };
    let mut pidfd: RawFd = -1;

    // No signal may be delivered to the child while it shares our memory: a handler would run there.
    let blocked = BlockedSignals::all();
    // SAFETY: `child` is a function that makes system calls only and never returns; its stack is
    // ours alone; `plan` outlives it, because CLONE_VFORK suspends this thread until the child has
    // executed or exited; `pidfd` is where CLONE_PIDFD puts the descriptor.
    let pid = unsafe {
        libc::clone(
            child,
            stack.top(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD,
            (&raw mut plan).cast(),
            &raw mut pidfd,
        )
    };
    let clone_error = io::Error::last_os_error();
    drop(blocked);
    if pid < 0 {
        return Err(SpawnError::System { step: STEPS[0], source: clone_error });
    }
    // SAFETY: a successful clone with CLONE_PIDFD has stored a new descriptor there.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: a plain read; the child that wrote it has gone or executed.
    let failed_step = unsafe { ptr::read_volatile(&raw const plan.failed_step) };
    if failed_step == usize::MAX {
        return Ok(Spawned { pid, pidfd });
    }
    if let Some(place) = surroundings.place {
        // Taken out before it is reaped: after that the number may be another process's.
        place.enter(0, 0);
    }
    reap(pid);
    let source = io::Error::from_raw_os_error(plan.failed_errno);
    Err(match STEPS[failed_step] {
        CWD => SpawnError::Cwd(source),
        EXEC => SpawnError::Exec(source),
        step => SpawnError::System { step, source },
    })
}

/// Every descriptor to pass, duplicated above the numbers that they are passed as, so that the child
/// can put them in place one after the other.
fn clear_of_targets(request: &SpawnRequest) -> io::Result<Vec<OwnedFd>> {
    let end = (request.stdio.len() + request.pass.len()) as RawFd;
    let all = request.stdio.iter().chain(request.pass.iter().map(|fd| &**fd));
    Ok(all.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, end)).collect::<Result<_, _>>()?)
}

/// Takes away a child that failed before it executed.
fn reap(pid: libc::pid_t) {
    let mut status = 0;
    // SAFETY: `pid` is our own child that was not waited for; `status` is writable.
    while unsafe { libc::waitpid(pid, &raw mut status, 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
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
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// The child. Only system calls from here to `execve`.
extern "C" fn child(plan: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes its `ChildPlan`, and is suspended while we use it.
    let plan = unsafe { &mut *plan.cast::<ChildPlan<'_>>() };
    let failed_step = run_child(plan);
    plan.failed_errno = errno();
    plan.failed_step = failed_step;
    // SAFETY: leaves without destructors or exit handlers, which belong to the parent.
    unsafe { libc::_exit(127) }
}

fn errno() -> c_int {
    // SAFETY: the location is this thread's own (the suspended parent's), always valid.
    unsafe { *libc::__errno_location() }
}

/// Returns the number of the step that failed; does not return otherwise.
fn run_child(plan: &ChildPlan<'_>) -> usize {
    // SAFETY: every call below is a bare system call on values of the plan, which are valid for its
    // lifetime: open descriptors, NUL-terminated strings, NULL-terminated arrays of them.
    unsafe {
        if let Some(place) = plan.surroundings.place {
            place.enter(libc::getpid(), 0);
        }
        default_signals();
        if libc::setsid() < 0 {
            return 1;
        }
        if !place_descriptors(plan) {
            return 2;
        }
        if plan.tty && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return 3;
        }
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        if plan.surroundings.place.is_none() {
            // The parent may have died before the call: then nothing would ever signal us.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) < 0
                || libc::getppid() != plan.parent
            {
                return 4;
            }
        }
        if let Some(limit) = &plan.surroundings.nofile
            && libc::setrlimit(libc::RLIMIT_NOFILE, limit) < 0
        {
            return 5;
        }
        if libc::chdir(plan.cwd) < 0 {
            return 6;
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        execute(plan);
        7
    }
}

/// Every signal to its default. The library refuses to touch the two that it uses itself; a parent
/// of ours may have left them ignored all the same, so this asks the kernel.
///
/// # Safety
/// To be called in the child only.
unsafe fn default_signals() {
    /// The kernel's `struct sigaction` (handler, flags, restorer, mask) with `SIG_DFL`, which is 0;
    /// longer than it is on any architecture.
    const DEFAULT: [usize; 8] = [0; 8];
    const SIGNALS: c_int = 64;
    for signal in 1..=SIGNALS {
        // SAFETY: reads the structure, writes nothing; the size is that of the kernel's signal set.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                DEFAULT.as_ptr(),
                ptr::null_mut::<c_void>(),
                SIGNALS as usize / 8,
            );
        }
    }
}

/// Puts the standard and the passed descriptors in place and closes every other one.
///
/// # Safety
/// To be called in the child only.
unsafe fn place_descriptors(plan: &ChildPlan<'_>) -> bool {
    let end = plan.stdio.len() + plan.pass.len();
    for (target, &fd) in plan.stdio.iter().chain(&plan.pass).enumerate() {
        // SAFETY: system calls on descriptors of the child's own table. No source is below `end`
        // (see `clear_of_targets`), so none is overwritten before it is used.
        if unsafe { libc::dup2(fd, target as c_int) } < 0 {
            return false;
        }
    }
    // Of the rest, only what will be executed is needed still; executing closes it.
    let kept = plan.executable;
    // SAFETY: as above; nothing else from `end` on is needed any more.
    unsafe {
        match kept {
            ..0 => close_from_to(end as c_int, c_int::MAX),
            kept => {
                close_from_to(end as c_int, kept - 1);
                close_from_to(kept + 1, c_int::MAX);
            }
        }
    }
    true
}

/// Closes every descriptor in a range.
///
/// # Safety
/// To be called in the child only.
unsafe fn close_from_to(first: c_int, last: c_int) {
    // SAFETY: system calls on descriptors of the child's own table.
    unsafe {
        if first <= last && libc::syscall(libc::SYS_close_range, first, last, 0) < 0 {
            // A kernel before 5.9: close what a table of ordinary size can hold.
            for fd in first..last.saturating_add(1).min(4096) {
                libc::close(fd);
            }
        }
    }
}

/// Tries each candidate as `execvp` does: past those that are not there, remembering one that may
/// not be executed. Returns with `errno` set.
///
/// # Safety
/// To be called in the child only.
unsafe fn execute(plan: &ChildPlan<'_>) {
    if plan.executable >= 0 {
        let (argv, env) = (plan.argv.as_ptr(), plan.env.as_ptr());
        // SAFETY: an open descriptor, an empty name and two NULL-terminated arrays that the plan keeps
        // alive.
        unsafe {
            libc::syscall(
                libc::SYS_execveat,
                plan.executable,
                c"".as_ptr(),
                argv,
                env,
                libc::AT_EMPTY_PATH,
            );
        }
        return;
    }
    let mut denied = false;
    for &file in &plan.files {
        // SAFETY: a NUL-terminated string and two NULL-terminated arrays that the plan keeps alive.
        unsafe { libc::execve(file, plan.argv.as_ptr(), plan.env.as_ptr()) };
        match errno() {
            libc::EACCES => denied = true,
            libc::ENOENT | libc::ENOTDIR => {}
            _ => return,
        }
    }
    if denied {
        // SAFETY: the location is always valid.
        unsafe { *libc::__errno_location() = libc::EACCES };
    }
}
