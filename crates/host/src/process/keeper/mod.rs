//! Keepers: one process per program, between the program and the server.
//!
//! A keeper is the subreaper of everything below it, so whatever the program starts stays below its
//! keeper, even if it leaves its group, its session and its parents. When a keeper ends, no descendant
//! of its program is left. No other bookkeeping is needed: the kernel knows which processes belong to a
//! program.
//!
//! The ancestors of a program are its keeper, the [warden](super::warden) and the server. If one of
//! them is killed, the next one adopts what is below it, and kills until nothing is left:
//!
//! ```text
//! server ── warden ─┬─ keeper ── program ── …
//!                   └─ keeper ── program ── …
//! ```
//!
//! A host inside another program has no warden; its keepers are its own children.

mod memory;
mod message;
mod order;
mod stub;
mod syscall;

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use rustix::process::{Pid, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;

use super::command::Command;
use super::limits::Guard;
use super::readiness::register;
use super::spawner::SpawnError;
use super::warden::{RegisteredKeeper, Warden};
use crate::sandbox::Executable;

pub(super) use memory::MemoryPool;
pub(super) use message::{Control, Report, Used};
pub(super) use stub::CLEANUP_TIMEOUT;

/// A longer order, in bytes, is sent in a memfd.
pub(super) const MAX_INLINE_ORDER: usize = memory::MAX_ORDER;

/// Maximum descriptors that come with an order: the standard streams, the executable, `cgroup.procs`,
/// and the passed ones.
pub(super) const MAX_DESCRIPTORS: usize = 3 + 2 + stub::MAX_PASSED;

/// How long to wait for a keeper's first report before resuming a possibly stopped warden.
const SLOW: Duration = Duration::from_secs(1);

/// Limits that a process sets itself before it executes.
#[derive(Debug, Default)]
pub(super) struct OrderLimits {
    /// `cgroup.procs` of the group that it enters.
    pub cgroup: Option<Arc<OwnedFd>>,
    /// The most files that it may have open; 0 if that is not limited.
    pub open_files: u32,
}

/// A program to start, in the form that a keeper reads.
#[derive(Debug)]
pub(super) struct Order {
    pub bytes: Vec<u8>,
    /// The standard streams, the executable, `cgroup.procs`, the passed descriptors.
    pub descriptors: Vec<Arc<OwnedFd>>,
}

/// A socket between the server and a keeper: the server's end, which does not block, and the keeper's.
pub(super) fn keeper_socket() -> io::Result<(OwnedFd, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

impl Order {
    pub(super) fn new(
        command: &Command,
        stdio: [OwnedFd; 3],
        pass: Vec<Arc<OwnedFd>>,
        tty: bool,
        cleans_up: bool,
        confines: OrderLimits,
    ) -> io::Result<Self> {
        if pass.len() > stub::MAX_PASSED {
            return Err(io::Error::other("too many descriptors to pass"));
        }
        let executable = command.executable.as_ref().and_then(Executable::descriptor);
        let OrderLimits { cgroup, open_files } = confines;
        let flags = order::OrderFlags {
            tty,
            cleans_up,
            executable: executable.is_some(),
            cgroup: cgroup.is_some(),
            open_files,
        };
        let mut descriptors = Vec::with_capacity(stdio.len() + 2 + pass.len());
        descriptors.extend(stdio.map(Arc::new));
        if let Some(executable) = executable {
            descriptors.push(Arc::new(executable.try_clone_to_owned()?));
        }
        descriptors.extend(cgroup);
        descriptors.extend(pass);
        Ok(Self { bytes: order::write(command, flags), descriptors })
    }
}

/// A keeper that runs on memory of this process.
#[derive(Debug)]
pub(super) struct RunningKeeper {
    pub pid: Pid,
    state: *const stub::KeeperState,
    memory: memory::KeeperMemory,
    /// An order that was too long for the keeper's memory.
    _long: Option<LongOrder>,
}

// SAFETY: the state lives in the keeper memory, which is this value's own, and what is read of it is atomic.
unsafe impl Send for RunningKeeper {}
// SAFETY: as above.
unsafe impl Sync for RunningKeeper {}

impl RunningKeeper {
    /// Whether its program exits by itself when the server does, and must clean up before that.
    pub(super) fn cleans_up(&self) -> bool {
        // SAFETY: the state lives as long as the memory; the flag is shared with the keeper by design.
        unsafe { (*self.state).cleans_up.load(Ordering::Relaxed) }
    }

    /// The pid of its program, if that must clean up before it exits.
    pub(super) fn cleaning_up(&self) -> Option<Pid> {
        // SAFETY: as above.
        let root = unsafe { (*self.state).root.load(Ordering::Acquire) };
        Pid::from_raw(root).filter(|_| self.cleans_up())
    }

    /// Whether the keeper may be stopped: the kernel resumes it if its parent dies.
    pub(super) fn can_be_stopped(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.state).can_be_stopped.load(Ordering::Acquire) }
    }

    /// Reuses the memory of a keeper that has been reaped.
    pub(super) fn recycle(self, memory_pool: &mut MemoryPool) {
        memory_pool.recycle(self.memory);
    }
}

/// Where an order is stored.
#[derive(Debug)]
pub(super) enum OrderLocation {
    /// In the keeper's memory, with this length in bytes.
    Inline(usize),
    /// In separate memory.
    Separate(LongOrder),
}

/// Memory for an order, aligned for pointers.
#[derive(Debug)]
pub(super) struct LongOrder(Vec<u64>);

impl LongOrder {
    pub(super) fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(size_of::<u64>())])
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let len = self.0.len() * size_of::<u64>();
        // SAFETY: plain bytes of memory that is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

/// Memory for a keeper that has not been started.
#[derive(Debug)]
pub(super) struct UnstartedKeeper(memory::KeeperMemory);

impl UnstartedKeeper {
    pub(super) fn new(memory_pool: &mut MemoryPool) -> io::Result<Self> {
        memory_pool.take().map(Self)
    }

    /// The buffer for an order.
    pub(super) fn order(&mut self) -> &mut [u8] {
        self.0.order()
    }

    pub(super) fn recycle(self, memory_pool: &mut MemoryPool) {
        memory_pool.recycle(self.0);
    }

    /// Starts a keeper that executes the order. The descriptors are those of [`Order`]; the caller may
    /// close them, and the socket, afterwards.
    pub(super) fn start(
        mut self,
        location: OrderLocation,
        socket: &impl AsRawFd,
        descriptors: &[impl AsRawFd],
    ) -> Result<RunningKeeper, Errno> {
        let mut long = None;
        let order = match location {
            OrderLocation::Inline(len) => self.0.order().get_mut(..len).and_then(order::open),
            OrderLocation::Separate(memory) => order::open(long.insert(memory).bytes()),
        };
        let descriptors = descriptors.iter().map(AsRawFd::as_raw_fd);
        let accepted = stub::AcceptedOrder::new(order.ok_or(Errno::INVAL)?, descriptors)?;
        self.launch(Some(accepted), socket, long)
    }

    /// Starts a keeper that waits on the socket for its order.
    pub(super) fn start_waiting(self, socket: &impl AsRawFd) -> Result<RunningKeeper, Errno> {
        self.launch(None, socket, None)
    }

    fn launch(
        mut self,
        accepted: Option<stub::AcceptedOrder>,
        socket: &impl AsRawFd,
        long: Option<LongOrder>,
    ) -> Result<RunningKeeper, Errno> {
        let state = stub::KeeperState {
            accepted,
            order_memory: &raw mut *self.0.order(),
            socket: socket.as_raw_fd(),
            process_stack: self.0.process_stack(),
            start_only: self.0.start_only(),
            cleans_up: AtomicBool::new(accepted.is_some_and(|accepted| accepted.cleans_up())),
            root: AtomicI32::new(0),
            can_be_stopped: AtomicBool::new(false),
            failed: None,
        };
        // The state lies at the top of the keeper's stack, which grows down from there.
        let top = self.0.keeper_stack().wrapping_byte_sub(size_of::<stub::KeeperState>());
        let top = top.map_addr(|address| address & !63);
        let at = top.cast::<stub::KeeperState>();
        // SAFETY: within the keeper memory, aligned, and used by nothing else.
        unsafe { at.write(state) };
        // SAFETY: the keeper memory and the long order live in the value returned, which is held until the
        // keeper was reaped; the descriptors of the state are open.
        let pid = unsafe { stub::start(at, top) }?;
        Ok(RunningKeeper { pid, state: at, memory: self.0, _long: long })
    }
}

/// Reports on an order's socket that it could not be started.
pub(super) fn refuse(socket: &OwnedFd, errno: Errno) {
    let report = Report::Failed { step: 0, errno: errno.raw_os_error() };
    let _ = send(socket, &report.encode(), SendFlags::NOSIGNAL);
}

/// The server's connection to a keeper. Dropping it kills what is left of the program.
#[derive(Debug)]
pub(super) struct Keeper {
    socket: AsyncFd<Arc<OwnedFd>>,
    pid: Pid,
    root: Pid,
    /// The program must clean up before it exits.
    cleans_up: AtomicBool,
    /// What watches its descendants, until none is left.
    guard: Option<Box<Guard>>,
    /// Dropped after the socket, because the keeper ends when the socket closes.
    _parent: Parent,
}

/// The parent of a keeper.
#[derive(Debug)]
pub(super) enum Parent {
    /// This process.
    Own { _own: OwnKeeper },
    /// The warden.
    Warden { warden: Warden, known: Option<RegisteredKeeper> },
}

/// A handle to a keeper, for killing what is below it.
#[derive(Debug, Clone)]
pub(super) struct KeeperHandle {
    pub pid: Pid,
    /// The program's pid, if it must clean up before it exits.
    pub cleaning_up: Option<Pid>,
    socket: Arc<OwnedFd>,
}

impl KeeperHandle {
    /// Has the keeper kill everything below it, until nothing is left. Needs no descriptor and no further
    /// action of this process.
    pub(super) fn begin_kill(&self) {
        send_control(&self.socket, Control::Kill);
    }

    /// Waits up to `milliseconds` for the keeper to end. Until then its pid is its own.
    pub(super) fn has_ended(&self, milliseconds: i64) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let wait =
            Timespec { tv_sec: milliseconds / 1000, tv_nsec: (milliseconds % 1000) * 1_000_000 };
        // No events are requested: the kernel always reports HUP and ERR.
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let _ = poll(&mut fds, Some(&wait));
        fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

impl Keeper {
    /// Waits for the first report on our end of an order's socket.
    pub(super) async fn wait_started(
        socket: OwnedFd,
        mut parent: Parent,
        cleans_up: bool,
    ) -> Result<Self, SpawnError> {
        let system = |step, source| SpawnError::System { step, source };
        let socket =
            register(Arc::new(socket)).map_err(|source| system("the keeper's socket", source))?;
        let first = loop {
            match (tokio::time::timeout(SLOW, next(&socket)).await, &parent) {
                (Ok(first), _) => break first,
                (Err(_), Parent::Warden { warden, .. }) => warden.resume(),
                (Err(_), Parent::Own { .. }) => {}
            }
        };
        match first {
            Some(Report::Started { root, keeper }) => {
                if let Parent::Warden { warden, known } = &mut parent {
                    *known = Some(warden.register(keeper));
                }
                let cleans_up = AtomicBool::new(cleans_up);
                Ok(Self { socket, pid: keeper, root, cleans_up, guard: None, _parent: parent })
            }
            Some(Report::Failed { step, errno }) => {
                let source = io::Error::from_raw_os_error(errno);
                let step = stub::STEPS.get(step as usize).copied().unwrap_or("keeper");
                Err(match step {
                    stub::CWD => SpawnError::Cwd(source),
                    stub::EXEC => SpawnError::Exec(source),
                    step => system(step, source),
                })
            }
            Some(Report::Exited { .. }) | None => {
                Err(system("keeper", io::Error::other("it was killed")))
            }
        }
    }

    /// The program's pid.
    pub(super) fn root(&self) -> Pid {
        self.root
    }

    pub(super) fn handle(&self) -> KeeperHandle {
        let cleaning_up = self.cleans_up.load(Ordering::Relaxed).then_some(self.root);
        KeeperHandle { pid: self.pid, cleaning_up, socket: self.socket.get_ref().clone() }
    }

    /// Keeps the guard until no descendant is left, or this is dropped.
    pub(super) fn set_guard(&mut self, guard: Guard) {
        self.guard = Some(Box::new(guard));
    }

    /// Marks that the program must clean up before it exits.
    pub(super) fn set_cleans_up(&self) {
        self.cleans_up.store(true, Ordering::Relaxed);
        self.send(Control::CleansUp);
    }

    /// The next report; `None` once the keeper has ended. Cancel safe.
    pub(super) async fn next(&self) -> Option<Report> {
        next(&self.socket).await
    }

    /// Waits until the keeper has ended: then no descendant is left.
    pub(super) async fn wait_ended(&self) {
        while self.next().await.is_some() {}
    }

    pub(super) fn send(&self, control: Control) {
        send_control(self.socket.get_ref(), control);
    }
}

fn send_control(socket: &OwnedFd, control: Control) {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    if let Err(error) = send(socket, &control.encode(), flags) {
        tracing::debug!(%error, "cannot send to a keeper");
    }
}

async fn next(socket: &AsyncFd<Arc<OwnedFd>>) -> Option<Report> {
    loop {
        let mut ready = socket.readable().await.ok()?;
        let mut message = [0; message::REPORT_LENGTH];
        match recv(socket.get_ref(), &mut message, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return None,
            Ok((len, _)) => return message.get(..len).and_then(Report::decode),
            Err(Errno::AGAIN) => ready.clear_ready(),
            // The keeper ended before it read a message; its own reports come next.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(_) => return None,
        }
    }
}

/// The keeper of a host without a warden: a child of this process, and its memory.
#[derive(Debug)]
pub(super) struct OwnKeeper(Option<RunningKeeper>);

impl OwnKeeper {
    pub(super) fn new(running: RunningKeeper) -> Self {
        Self(Some(running))
    }
}

impl Drop for OwnKeeper {
    fn drop(&mut self) {
        let Some(running) = self.0.take() else { return };
        let reap = |pid, options| {
            rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(pid), options))
        };
        let pid = running.pid;
        if !matches!(reap(pid, WaitIdOptions::EXITED | WaitIdOptions::NOHANG), Ok(None)) {
            return;
        }
        // It is about to end. Its memory must stay until then, even if the thread fails to start.
        let running = ManuallyDrop::new(running);
        let wait = move || {
            let _ = reap(pid, WaitIdOptions::EXITED);
            drop(ManuallyDrop::into_inner(running));
        };
        if std::thread::Builder::new().name("exec-reap".into()).spawn(wait).is_err() {
            tracing::warn!("cannot start a thread to reap a keeper; it remains a zombie");
        }
    }
}
