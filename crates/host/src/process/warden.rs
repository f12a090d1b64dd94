//! The warden: a small process between the server and all keepers. It starts keepers on the server's
//! orders, and survives a killed server just long enough to kill what is left.
//!
//! After `kill -9` the server cannot clean up, and a parent-death signal reaches only direct children:
//! a compiler below make below a shell would continue. But the keepers (see `keeper`) are the warden's
//! children, and the warden is the subreaper of all orphans below them. When the socket to the server
//! closes, each keeper kills its descendants; the warden does so too, until it has no children left.
//!
//! A sandbox notices the end of the server itself: it kills the processes inside and removes what it
//! put into the file system. It gets time for that and is killed only if it takes too long.
//!
//! If the warden is killed, the server adopts its keepers and starts a new warden. If a keeper is
//! killed, the warden, or the server, adopts its descendants and kills them; a sandbox after it has
//! cleaned up.
//!
//! If the machine delegates a cgroup to the server, the warden at last kills by it what left the tree.
//!
//! The warden is this same executable, re-entered (see [`main_if_reentered`]), in its own session and
//! with all signals blocked, so that a signal to the server's process group, or to all processes of a
//! service, does not kill both.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::io::Interest;

use super::cgroup::Cgroup;
use super::descendants;
use super::keeper::{
    CLEANUP_TIMEOUT, LongOrder, MAX_DESCRIPTORS, MAX_INLINE_ORDER, MemoryPool, Order,
    OrderLocation, RunningKeeper, UnstartedKeeper, keeper_socket, refuse,
};
use super::readiness::register;
use crate::sandbox::Executable;

/// The argument that makes the executable a warden.
const ARGUMENT: &str = "__exec-warden";

/// How long after a kill to look for more processes to kill, unless SIGCHLD comes first.
const KILL_RETRY: Duration = Duration::from_millis(20);

/// How long after a reaped keeper the warden checks all its children.
const FULL_REAP_DELAY: Duration = Duration::from_millis(100);

/// How often the server checks the orphans it has adopted.
const ORPHAN_POLL: Duration = Duration::from_millis(20);

/// Looks at the orphans, one right after the other, while some of them fork and exit.
const MAX_ORPHAN_PASSES: usize = 64;

/// How long after the death of a warden an adopted orphan may be a keeper that has not reported yet.
const ORPHAN_GRACE: Duration = Duration::from_secs(1);

/// First byte of a message: where the order is.
const INLINE: u8 = 1;
const IN_MEMFD: u8 = 2;
/// It follows later, on the socket of the keeper.
const AHEAD: u8 = 3;

/// Keepers that wait for an order, so that a start costs neither a `clone` of the warden nor a socket.
const WAITING_KEEPERS: usize = 2;

/// Maximum descriptors of a message: the keeper's socket, those of its order, and the memfd.
const MAX_SENT: usize = 1 + MAX_DESCRIPTORS + 1;

/// Becomes the warden and never returns, if this process was started as one.
///
/// Call it first thing in `main`, before any thread exists.
pub(crate) fn main_if_reentered() {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT) {
        // Executed by descriptor, the process would be named after that number. The name does not
        // contain the program's name: `pkill` of the server must not kill its warden.
        let _ = rustix::thread::set_name(c"exec-warden");
        if let Err(error) = run(io::stdin().as_fd()) {
            tracing::error!(%error, "the warden failed");
        }
        std::process::exit(0);
    }
}

/// Starts keepers until the server is gone, then kills what is left.
fn run(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut warden = WardenProcess::new()?;
    loop {
        let mut fds =
            [PollFd::new(&socket, PollFlags::IN), PollFd::new(&warden.sigchld, PollFlags::IN)];
        let wait = warden.time_until_full_reap().and_then(|wait| Timespec::try_from(wait).ok());
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let (has_order, died) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if died {
            warden.reap_signalled();
        }
        if warden.time_until_full_reap().is_some_and(|wait| wait.is_zero()) {
            warden.reap_all();
        }
        if has_order && !warden.receive_order(socket) {
            break;
        }
    }
    warden.kill_all();
    if let Some(cgroup) = warden.cgroup.take() {
        cgroup.kill();
    }
    Ok(())
}

/// State of the warden process.
struct WardenProcess {
    sigchld: File,
    memory_pool: MemoryPool,
    /// Memory for the next order, which is received into it.
    unstarted: Option<UnstartedKeeper>,
    keepers: HashMap<Pid, RunningKeeper>,
    /// Adopted processes that clean up before they exit, and their deadlines.
    cleaning_up: HashMap<Pid, Instant>,
    /// When to check all children for exited ones.
    full_reap_at: Option<Instant>,
    /// The cgroup of everything that the warden starts, if the machine delegates one.
    cgroup: Option<Cgroup>,
}

impl WardenProcess {
    fn new() -> io::Result<Self> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let sigchld = block_signals()?;
        Ok(Self {
            sigchld,
            memory_pool: MemoryPool::default(),
            unstarted: None,
            keepers: HashMap::new(),
            cleaning_up: HashMap::new(),
            full_reap_at: None,
            cgroup: rustix::process::getppid().and_then(Cgroup::enter),
        })
    }

    /// Receives and starts the next order. False once the socket is closed.
    fn receive_order(&mut self, socket: BorrowedFd<'_>) -> bool {
        let mut unstarted = match self
            .unstarted
            .take()
            .map_or_else(|| UnstartedKeeper::new(&mut self.memory_pool), Ok)
        {
            Ok(unstarted) => unstarted,
            // Out of memory: try again a moment later.
            Err(_) => {
                thread::sleep(KILL_RETRY);
                return true;
            }
        };
        let mut kind = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SENT))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = {
            let mut parts = [IoSliceMut::new(&mut kind), IoSliceMut::new(unstarted.order())];
            recvmsg(
                socket,
                &mut parts,
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            )
        };
        let len = match received {
            Ok(received) if received.bytes > 0 => received.bytes - 1,
            Err(Errno::INTR | Errno::AGAIN) => {
                self.unstarted = Some(unstarted);
                return true;
            }
            Ok(_) | Err(_) => {
                unstarted.recycle(&mut self.memory_pool);
                return false;
            }
        };
        let mut descriptors: Vec<OwnedFd> = Vec::with_capacity(8);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        let location = match kind {
            [IN_MEMFD] => read_long_order(&mut descriptors).map(Some),
            [AHEAD] => Ok(None),
            _ => Ok(Some(OrderLocation::Inline(len))),
        };
        let Some((socket, descriptors)) = descriptors.split_first() else { return true };
        let started = location.and_then(|location| match location {
            Some(location) => unstarted.start(location, socket, descriptors),
            None => unstarted.start_waiting(socket),
        });
        match started {
            Ok(running) => drop(self.keepers.insert(running.pid, running)),
            Err(errno) => refuse(socket, errno),
        }
        true
    }

    /// Time until all children must be checked, if they must be.
    fn time_until_full_reap(&self) -> Option<Duration> {
        self.full_reap_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Reaps the keeper that SIGCHLD names. Waiting for any child takes longer the more children there
    /// are, so that is done only now and then; it is needed because the kernel merges signals of exits
    /// at the same time.
    fn reap_signalled(&mut self) {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let received = self.sigchld.read(&mut info).is_ok_and(|len| len == info.len());
        let number = |at: usize| info.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        let number = |at| i32::from_ne_bytes(number(at).unwrap_or_default());
        let code = number(offset_of!(libc::signalfd_siginfo, ssi_code));
        let status = number(offset_of!(libc::signalfd_siginfo, ssi_status));
        let pid = Pid::from_raw(number(offset_of!(libc::signalfd_siginfo, ssi_pid)));
        match pid.and_then(|pid| self.keepers.remove(&pid)) {
            Some(running) if received && (code, status) == (libc::CLD_EXITED, 0) => {
                let _ = rustix::process::waitpid(Some(running.pid), WaitOptions::empty());
                running.recycle(&mut self.memory_pool);
                self.full_reap_at.get_or_insert_with(|| Instant::now() + FULL_REAP_DELAY);
            }
            killed => {
                self.keepers.extend(killed.map(|running| (running.pid, running)));
                self.reap_all();
            }
        }
    }

    /// Reaps all exited children, and kills the processes adopted from killed keepers.
    fn reap_all(&mut self) {
        self.full_reap_at = None;
        let mut info = [0; 512];
        while self.sigchld.read(&mut info).is_ok_and(|len| len == info.len()) {}
        let mut orphaned = false;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            match self.keepers.remove(&pid) {
                Some(running) => {
                    let killed = status.exit_status() != Some(0);
                    let cleaning_up = running.cleaning_up().filter(|_| killed);
                    self.cleaning_up
                        .extend(cleaning_up.map(|pid| (pid, Instant::now() + CLEANUP_TIMEOUT)));
                    orphaned |= killed;
                    running.recycle(&mut self.memory_pool);
                }
                // An adopted process may have left orphans in turn.
                None => {
                    self.cleaning_up.remove(&pid);
                    orphaned = true;
                }
            }
        }
        if orphaned || !self.cleaning_up.is_empty() {
            self.kill_orphans();
        }
        if !self.cleaning_up.is_empty() {
            self.full_reap_at = Some(Instant::now() + KILL_RETRY);
        }
    }

    /// Kills adopted processes, which are below no keeper; of one that cleans up, only its descendants.
    /// Their deaths trigger the next round. Returns whether there was anything to kill.
    fn kill_orphans(&self) -> bool {
        let (mut any, now) = (false, Instant::now());
        for pid in descendants::children(rustix::process::getpid()) {
            if self.keepers.contains_key(&pid) {
                continue;
            }
            if self.cleaning_up.get(&pid).is_some_and(|&until| now < until) {
                descendants::kill_children_of(pid);
                any = true;
            } else {
                any |= kill_child(pid);
            }
        }
        any
    }

    /// Kills all that is left of the server.
    fn kill_all(&mut self) {
        let until = Instant::now() + CLEANUP_TIMEOUT;
        // The server may have been killed while it had a keeper stopped.
        descendants::resume_keepers_of(rustix::process::getpid());
        // Processes of another user cannot be signalled; do not wait for them for ever.
        let mut killed = Instant::now();
        while killed.elapsed() < 2 * CLEANUP_TIMEOUT {
            self.reap_all();
            if matches!(rustix::process::wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
                return;
            }
            let in_time = Instant::now() < until;
            let mut any = self.kill_orphans();
            for keeper in self.keepers.values() {
                // A keeper that has just started has no descendants yet; it is next.
                if keeper.can_be_stopped() && !(in_time && keeper.cleans_up()) {
                    // We have not reaped it, so the pid is still its own.
                    any |= descendants::kill_descendants(keeper.pid, None, || true);
                }
            }
            if any {
                killed = Instant::now();
            }
            let wait = Timespec::try_from(KILL_RETRY).ok();
            let _ = poll(&mut [PollFd::new(&self.sigchld, PollFlags::IN)], wait.as_ref());
        }
    }
}

/// Reads an order from the memfd, which is the last descriptor.
fn read_long_order(descriptors: &mut Vec<OwnedFd>) -> Result<OrderLocation, Errno> {
    let file = descriptors.pop().ok_or(Errno::BADF)?;
    let len = rustix::fs::fstat(&file)?.st_size as usize;
    let mut long = LongOrder::new(len);
    let memory = long.bytes().get_mut(..len).ok_or(Errno::TOOBIG)?;
    File::from(file).read_exact(memory).map_err(|_| Errno::IO)?;
    Ok(OrderLocation::Separate(long))
}

/// Blocks every signal; returns a signalfd for SIGCHLD.
fn block_signals() -> io::Result<File> {
    // SAFETY: the sets are plain memory of the right type; this process has one thread, and takes no
    // signal otherwise.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        // If our parent had SIGCHLD ignored, children would be reaped automatically. Keepers that are
        // stopped for a moment need no signal.
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_flags = libc::SA_NOCLDSTOP;
        libc::sigaction(libc::SIGCHLD, &raw const default, std::ptr::null_mut());
        let mut sigchld: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut sigchld);
        libc::sigaddset(&raw mut sigchld, libc::SIGCHLD);
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        match libc::signalfd(-1, &raw const sigchld, flags) {
            ..0 => Err(io::Error::last_os_error()),
            fd => Ok(File::from_raw_fd(fd)),
        }
    }
}

/// The server's side of the warden. Clones share their state.
#[derive(Debug, Clone)]
pub(super) struct Warden(Arc<WardenState>);

#[derive(Debug)]
struct WardenState {
    executable: Executable,
    /// Limit of open files for programs, which may differ from ours.
    descriptors: Option<libc::rlimit>,
    current: Mutex<Current>,
    /// The registered keepers.
    keepers: Mutex<HashSet<Pid>>,
    /// A warden was killed, and this process may have adopted what was below it.
    has_orphans: AtomicBool,
}

/// What a look at the children of this process has found, besides the warden.
#[derive(Debug, Default, Clone, Copy)]
struct Orphans {
    /// Any at all.
    any: bool,
    /// Some that are not registered keepers.
    unregistered: bool,
}

/// A registered keeper; dropping this removes it.
#[derive(Debug)]
pub(super) struct RegisteredKeeper {
    state: Arc<WardenState>,
    keeper: Pid,
}

impl Drop for RegisteredKeeper {
    fn drop(&mut self) {
        self.state.keepers.lock().remove(&self.keeper);
    }
}

#[derive(Debug)]
enum Current {
    /// The socket and the process of the current warden.
    Running {
        socket: Arc<OwnedFd>,
        process: OwnedFd,
        pid: Pid,
        /// Our ends of the sockets of keepers that wait for an order. Closing one ends its keeper.
        waiting: Vec<OwnedFd>,
        /// It has had an order. A program that starts only one process needs no keeper to wait.
        used: bool,
    },
    /// The warden could not be started.
    Failed,
    /// The host is shutting down.
    Dismissed,
}

impl Warden {
    /// Starts a warden, and a new one whenever it dies.
    pub(super) fn start(executable: &Path, descriptors: Option<libc::rlimit>) -> io::Result<Self> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        // Later wardens run the same file, even if another file takes its name.
        let executable = Executable::open(executable)?;
        let state = Arc::new(WardenState {
            executable,
            descriptors,
            current: Mutex::new(Current::Failed),
            keepers: Mutex::default(),
            has_orphans: AtomicBool::new(false),
        });
        let child = state.launch()?;
        let restarter = state.clone();
        let restart = move || restarter.restart_until_dismissed(child);
        thread::Builder::new().name("exec-warden".into()).spawn(restart)?;
        Ok(Self(state))
    }

    /// Sends an order to a keeper that waits for one, or to the warden. Returns our end of the keeper's
    /// socket, on which the outcome is reported.
    pub(super) async fn send_order(&self, order: &Order) -> io::Result<OwnedFd> {
        let mut fds: Vec<BorrowedFd<'_>> = order.descriptors.iter().map(|fd| fd.as_fd()).collect();
        let fits = order.bytes.len() <= MAX_INLINE_ORDER;
        // One that was killed cannot be sent to.
        while fits && let Some(socket) = self.0.take_waiting() {
            if send_message(&socket, &[IoSlice::new(&order.bytes)], &fds).is_ok() {
                return Ok(socket);
            }
        }
        let mut file = None;
        let (kind, bytes) = if fits {
            (INLINE, order.bytes.as_slice())
        } else {
            let memory = rustix::fs::memfd_create("exec-order", MemfdFlags::CLOEXEC)?;
            let mut memory = File::from(memory);
            memory.write_all(&order.bytes)?;
            io::Seek::rewind(&mut memory)?;
            file = Some(memory);
            (IN_MEMFD, &[][..])
        };
        let (ours, theirs) = keeper_socket()?;
        fds.insert(0, theirs.as_fd());
        fds.extend(file.as_ref().map(AsFd::as_fd));
        // A warden that has just died is replaced at once.
        for pause in [50, 200, 1000] {
            let socket = match &*self.0.current() {
                Current::Running { socket, .. } => socket.clone(),
                Current::Failed => return Err(io::Error::other("the warden is not running")),
                Current::Dismissed => return Err(io::Error::other("the host is shutting down")),
            };
            match send_when_ready(&socket, &[IoSlice::new(&[kind]), IoSlice::new(bytes)], &fds)
                .await
            {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                sent => return sent.map(|()| ours),
            }
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        Err(io::Error::other("the warden was killed"))
    }

    /// Lets the warden start a keeper that waits for an order, if too few wait; called after an order.
    /// Without it the next start takes longer, so failures do not matter.
    pub(super) fn add_waiting(&self) {
        if let Current::Running { socket, waiting, used, .. } = &mut *self.0.current()
            && std::mem::replace(used, true)
            && waiting.len() < WAITING_KEEPERS
            && let Ok((ours, theirs)) = keeper_socket()
            && send_message(socket, &[IoSlice::new(&[AHEAD])], &[theirs.as_fd()]).is_ok()
        {
            waiting.push(ours);
        }
    }

    /// Resumes the warden and its keepers if they were stopped; called when an order takes long.
    pub(super) fn resume(&self) {
        if let Current::Running { process, pid, .. } = &*self.0.current()
            && rustix::process::pidfd_send_signal(process, Signal::CONT).is_ok()
        {
            // The keeper may have been stopped before it could report.
            descendants::resume_keepers_of(*pid);
        }
    }

    /// Registers a keeper: if the server adopts it, it is not killed.
    pub(super) fn register(&self, keeper: Pid) -> RegisteredKeeper {
        self.0.keepers.lock().insert(keeper);
        RegisteredKeeper { state: self.0.clone(), keeper }
    }

    /// Kills what this process has adopted from a killed warden. Blocks.
    pub(super) fn kill_orphans(&self) {
        self.0.kill_orphans();
    }

    /// Lets the warden end. A thread of this process may still be killing what is below it; if this
    /// process exits first, the warden finishes that.
    pub(super) fn dismiss(&self) {
        *self.0.current() = Current::Dismissed;
    }
}

/// Sends one message if there is room for it.
fn send_message(socket: &OwnedFd, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SENT))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors to pass"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| sendmsg(socket, parts, &mut ancillary, flags))?;
    Ok(())
}

/// Sends one message, once there is room for it. Only then is the socket registered with the runtime,
/// which would otherwise wake a thread for each message that the warden reads.
async fn send_when_ready(
    socket: &OwnedFd,
    parts: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    match send_message(socket, parts, fds) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        sent => return sent,
    }
    let socket = register(socket.try_clone()?)?;
    socket.async_io(Interest::WRITABLE, |socket| send_message(socket, parts, fds)).await
}

impl WardenState {
    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock()
    }

    /// Takes the socket of a keeper that waits for an order.
    fn take_waiting(&self) -> Option<OwnedFd> {
        match &mut *self.current() {
            Current::Running { waiting, .. } => waiting.pop(),
            Current::Failed | Current::Dismissed => None,
        }
    }

    fn launch(&self) -> io::Result<Child> {
        let (ours, theirs) = keeper_socket()?;
        let mut command = Command::new(self.executable.name_after_fork());
        command
            .arg0("exec-warden")
            .arg(ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let limit = self.descriptors;
        let prepare = move || {
            rustix::process::setsid()?;
            if let Some(limit) = limit {
                // SAFETY: reads the limit, and says by its answer whether it took it.
                let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
                if set < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: two bare system calls, allowed between fork and exec.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn()?;
        // We have not reaped it, so the pid is still its own.
        let pid = Pid::from_raw(child.id().cast_signed()).ok_or(io::ErrorKind::InvalidData)?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let mut current = self.current();
        if !matches!(*current, Current::Dismissed) {
            let socket = Arc::new(ours);
            *current = Current::Running { socket, process, pid, waiting: Vec::new(), used: false };
        }
        Ok(child)
    }

    /// Waits for the warden to end and starts a new one, until dismissed.
    fn restart_until_dismissed(&self, mut child: Child) {
        // Set while orphans adopted from a killed warden may be left: since when, and when the last
        // one was seen.
        let mut orphaned: Option<(Instant, Instant)> = None;
        loop {
            if let Some((since, seen)) = &mut orphaned
                && let Ok(None) = child.try_wait()
            {
                thread::sleep(ORPHAN_POLL);
                if self.reap_orphans(since.elapsed() > ORPHAN_GRACE).any {
                    *seen = Instant::now();
                } else if seen.elapsed() > ORPHAN_GRACE {
                    orphaned = None;
                    self.has_orphans.store(false, Ordering::Relaxed);
                }
                continue;
            }
            let _ = child.wait();
            if matches!(*self.current(), Current::Dismissed) {
                return;
            }
            tracing::warn!("the warden has died; starting another");
            self.has_orphans.store(true, Ordering::Relaxed);
            // Keepers that wait have no program, and end.
            if let Current::Running { waiting, .. } = &mut *self.current() {
                waiting.clear();
            }
            // Do not spin if something kills it at once.
            thread::sleep(ORPHAN_POLL);
            match self.launch() {
                Ok(next) => child = next,
                Err(error) => {
                    tracing::error!(%error, "cannot start a warden");
                    *self.current() = Current::Failed;
                    return;
                }
            }
            orphaned = Some((Instant::now(), Instant::now()));
        }
    }

    /// Reaps adopted processes that have exited, and if `kill` is set kills those that are no registered
    /// keepers. At first one may be a keeper that has not reported yet.
    fn reap_orphans(&self, kill: bool) -> Orphans {
        let warden = match &*self.current() {
            Current::Running { pid, .. } => Some(*pid),
            Current::Failed | Current::Dismissed => None,
        };
        let mut found = Orphans::default();
        for _ in 0..MAX_ORPHAN_PASSES {
            let mut exited_any = false;
            for pid in descendants::children(rustix::process::getpid()) {
                if Some(pid) == warden {
                    continue;
                }
                found.any = true;
                let is_keeper = self.keepers.lock().contains(&pid);
                found.unregistered |= !is_keeper;
                let exited = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
                if !matches!(rustix::process::waitid(WaitId::Pid(pid), exited), Ok(None)) {
                    exited_any = true;
                } else if kill && !is_keeper {
                    kill_child(pid);
                }
            }
            // A process that forks and exits in a loop has left another one: look again at once.
            if !(kill && exited_any) {
                break;
            }
        }
        found
    }

    /// Kills what this process has adopted from a killed warden, if it has. Blocks.
    fn kill_orphans(&self) {
        let until = Instant::now() + 2 * CLEANUP_TIMEOUT;
        while self.has_orphans.load(Ordering::Relaxed)
            && self.reap_orphans(true).unregistered
            && Instant::now() < until
        {
            thread::sleep(KILL_RETRY);
        }
    }
}

/// Kills a child of this process and its descendants. Returns whether any could be killed.
fn kill_child(pid: Pid) -> bool {
    // We have not reaped it, so its pid and group id are still its own; processes that fork and exit
    // leave the group behind.
    let _ = rustix::process::kill_process(pid, Signal::STOP);
    descendants::kill_group_of(pid);
    let below = descendants::kill_descendants(pid, None, || true);
    rustix::process::kill_process(pid, Signal::KILL).is_ok() || below
}
