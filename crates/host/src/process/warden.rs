//! The warden: a small process between the server and all that it starts. It starts keepers on the
//! server's order, and outlives a killed server just long enough to take along what is left.
//!
//! `kill -9` leaves a server no last word, and a parent-death signal reaches only direct children:
//! the compiler below the make below the shell would go on. But the keepers (see `keeper`) are the
//! warden's children, and it is the reaper of all that falls from them. When the socket to the server
//! ends, each keeper kills what it keeps; the warden helps, until it has no children any more.
//!
//! A sandbox hears of the server's end itself, kills what is inside and removes what it has put into
//! the file system. It is given the time for that, and killed only if it takes too long.
//!
//! If the warden is killed, its keepers fall to the server, which starts another for what comes. If a
//! keeper is killed, what it kept falls to the warden, or to the server, and is killed; a sandbox after
//! it has tidied up, as above.
//!
//! Where the machine delegates a control group, the warden kills by it, at the end, what left the tree.
//!
//! The warden is this same executable, re-entered (see [`main_if_reentered`]), in a session of its
//! own and deaf to all signals that can be blocked, so that what is sent to the server's process
//! group, or to everything of a service, does not take both.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cgroup::Cgroup;
use super::descendants;
use super::keeper::{
    Cells, Long, MOST_DESCRIPTORS, Order, Place, Room, Running, SHORT, TIDYING, refuse,
};
use super::readiness::register;
use crate::sandbox::Executable;

/// The word that makes the executable a warden.
const WORD: &str = "__exec-warden";

/// How long after a kill it is looked for more to kill, if nobody tells of a death before.
const KILLING: Duration = Duration::from_millis(20);

/// How often the warden looks through all its children.
const LOOKING: Duration = Duration::from_millis(100);

/// How often what has fallen to the server is looked after.
const LOOKING_AFTER: Duration = Duration::from_millis(20);

/// How long after the death of a warden it may be unknown what something is that fell to the server.
const STRANGE: Duration = Duration::from_secs(1);

/// What a message begins with: where the order is.
const HERE: u8 = 1;
const IN_A_FILE: u8 = 2;

/// Becomes the warden and never returns, if that is what this process was started as.
///
/// To be called first thing in `main`, before any thread exists.
pub fn main_if_reentered() {
    if std::env::args_os().nth(1).is_some_and(|word| word == WORD) {
        // Executed by a descriptor, it would be called by that number. The name of the program is not in
        // it: who kills all that are called so has to leave the one that sees to the rest.
        let _ = rustix::thread::set_name(c"exec-warden");
        if let Err(error) = watch(io::stdin().as_fd()) {
            tracing::error!(%error, "the warden failed");
        }
        std::process::exit(0);
    }
}

/// Starts keepers until the end of the server, then sees to it that nothing is left.
fn watch(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut watch = Watch::new()?;
    loop {
        let mut fds =
            [PollFd::new(&link, PollFlags::IN), PollFd::new(&watch.deaths, PollFlags::IN)];
        let wait = watch.patience().and_then(|wait| Timespec::try_from(wait).ok());
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let (asked, died) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if died {
            watch.reap_told();
        }
        if watch.patience().is_some_and(|wait| wait.is_zero()) {
            watch.reap();
        }
        if asked && !watch.carry_out(link) {
            break;
        }
    }
    watch.end();
    if let Some(cgroup) = watch.cgroup.take() {
        cgroup.kill();
    }
    Ok(())
}

/// The warden's own side.
struct Watch {
    deaths: File,
    cells: Cells,
    /// A cell for the next order, which is received into it.
    room: Option<Room>,
    keepers: HashMap<Pid, Running>,
    /// What fell to us and tidies up before it ends, and until when it may.
    tidying: HashMap<Pid, Instant>,
    /// When all children are looked through for those that have exited.
    look_at: Option<Instant>,
    /// The control group of everything that is started here, if the machine delegates one.
    cgroup: Option<Cgroup>,
}

impl Watch {
    fn new() -> io::Result<Self> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let deaths = deaf_but_for_deaths()?;
        Ok(Self {
            deaths,
            cells: Cells::default(),
            room: None,
            keepers: HashMap::new(),
            tidying: HashMap::new(),
            look_at: None,
            cgroup: rustix::process::getppid().and_then(Cgroup::enter),
        })
    }

    /// Takes the next order. False once there will be none.
    fn carry_out(&mut self, link: BorrowedFd<'_>) -> bool {
        let mut room = match self.room.take().map_or_else(|| Room::new(&mut self.cells), Ok) {
            Ok(room) => room,
            // Nothing can be received; there may be memory a moment later.
            Err(_) => {
                thread::sleep(KILLING);
                return true;
            }
        };
        let mut kind = [0];
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS + 1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = {
            let mut parts = [IoSliceMut::new(&mut kind), IoSliceMut::new(room.order())];
            recvmsg(link, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
        };
        let len = match received {
            Ok(received) if received.bytes > 0 => received.bytes - 1,
            Err(Errno::INTR | Errno::AGAIN) => {
                self.room = Some(room);
                return true;
            }
            Ok(_) | Err(_) => {
                room.unused(&mut self.cells);
                return false;
            }
        };
        let mut descriptors: Vec<OwnedFd> = Vec::with_capacity(8);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        let place = match kind {
            [IN_A_FILE] => long_order(&mut descriptors),
            _ => Ok(Place::Cell(len)),
        };
        let started = place.and_then(|place| room.start(place, &descriptors));
        match started {
            Ok(running) => drop(self.keepers.insert(running.pid, running)),
            Err(errno) => {
                if let Some(socket) = descriptors.first() {
                    refuse(socket, errno);
                }
            }
        }
        true
    }

    /// How long until all children have to be looked through, if they have to be.
    fn patience(&self) -> Option<Duration> {
        self.look_at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Reaps the keeper whose end was told. To ask for all that have exited takes longer the more there
    /// are, so that is done now and then: of several ends at once the kernel tells one.
    fn reap_told(&mut self) {
        let mut told = [0; size_of::<libc::signalfd_siginfo>()];
        let heard = self.deaths.read(&mut told).is_ok_and(|len| len == told.len());
        let word = |at: usize| told.get(at..at + 4).and_then(|word| word.try_into().ok());
        let word = |at| i32::from_ne_bytes(word(at).unwrap_or_default());
        let code = word(offset_of!(libc::signalfd_siginfo, ssi_code));
        let status = word(offset_of!(libc::signalfd_siginfo, ssi_status));
        let pid = Pid::from_raw(word(offset_of!(libc::signalfd_siginfo, ssi_pid)));
        match pid.and_then(|pid| self.keepers.remove(&pid)) {
            Some(running) if heard && (code, status) == (libc::CLD_EXITED, 0) => {
                let _ = rustix::process::waitpid(Some(running.pid), WaitOptions::empty());
                running.ended(&mut self.cells);
                self.look_at.get_or_insert_with(|| Instant::now() + LOOKING);
            }
            killed => {
                self.keepers.extend(killed.map(|running| (running.pid, running)));
                self.reap();
            }
        }
    }

    /// Reaps all that have exited. What was kept by a keeper that was killed has fallen to us, and is
    /// killed.
    fn reap(&mut self) {
        self.look_at = None;
        let mut told = [0; 512];
        while self.deaths.read(&mut told).is_ok_and(|len| len == told.len()) {}
        let mut fallen = false;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            match self.keepers.remove(&pid) {
                Some(running) => {
                    let killed = status.exit_status() != Some(0);
                    let tidying = running.tidying().filter(|_| killed);
                    self.tidying.extend(tidying.map(|pid| (pid, Instant::now() + TIDYING)));
                    fallen |= killed;
                    running.ended(&mut self.cells);
                }
                // What had fallen to us may have left something in turn.
                None => {
                    self.tidying.remove(&pid);
                    fallen = true;
                }
            }
        }
        if fallen || !self.tidying.is_empty() {
            self.kill_fallen();
        }
        if !self.tidying.is_empty() {
            self.look_at = Some(Instant::now() + KILLING);
        }
    }

    /// Kills what is below us and below no keeper; of what tidies up, only what is below it. Whatever
    /// that leaves is told by its deaths. Tells whether there was anything to kill.
    fn kill_fallen(&self) -> bool {
        let (mut any, now) = (false, Instant::now());
        for pid in descendants::children(rustix::process::getpid()) {
            if self.keepers.contains_key(&pid) {
                continue;
            }
            if self.tidying.get(&pid).is_some_and(|&until| now < until) {
                descendants::kill_below(pid);
                any = true;
            } else {
                any |= kill_child(pid);
            }
        }
        any
    }

    /// Kills what is left of the server, until nothing is.
    fn end(&mut self) {
        let until = Instant::now() + TIDYING;
        // The server may have been killed while it had one stopped.
        descendants::wake_below(rustix::process::getpid());
        // What cannot be signalled, since it belongs to another user, must not keep us for ever.
        let mut killed = Instant::now();
        while killed.elapsed() < 2 * TIDYING {
            self.reap();
            if matches!(rustix::process::wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
                return;
            }
            let in_time = Instant::now() < until;
            let mut any = self.kill_fallen();
            for keeper in self.keepers.values() {
                // One that has only just begun has nothing below it yet, and its turn next time.
                if keeper.can_be_stopped() && !(in_time && keeper.tidies_up()) {
                    // Ours to reap, so the number is its own.
                    any |= descendants::sweep(keeper.pid, None, || true);
                }
            }
            if any {
                killed = Instant::now();
            }
            let wait = Timespec::try_from(KILLING).ok();
            let _ = poll(&mut [PollFd::new(&self.deaths, PollFlags::IN)], wait.as_ref());
        }
    }
}

/// The order in the file that came last.
fn long_order(descriptors: &mut Vec<OwnedFd>) -> Result<Place, Errno> {
    let file = descriptors.pop().ok_or(Errno::BADF)?;
    let len = rustix::fs::fstat(&file)?.st_size as usize;
    let mut long = Long::new(len);
    let memory = long.bytes().get_mut(..len).ok_or(Errno::TOOBIG)?;
    File::from(file).read_exact(memory).map_err(|_| Errno::IO)?;
    Ok(Place::Long(long))
}

/// Blocks every signal; tells of the deaths of children by a descriptor.
fn deaf_but_for_deaths() -> io::Result<File> {
    // SAFETY: the sets are plain memory of the right type; this process has one thread, and takes no
    // signal otherwise.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        // Whoever started us may have it ignored, and children would reap themselves. Of keepers that
        // are stopped for a moment nothing need be told.
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_flags = libc::SA_NOCLDSTOP;
        libc::sigaction(libc::SIGCHLD, &raw const default, std::ptr::null_mut());
        let mut deaths: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut deaths);
        libc::sigaddset(&raw mut deaths, libc::SIGCHLD);
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        match libc::signalfd(-1, &raw const deaths, flags) {
            ..0 => Err(io::Error::last_os_error()),
            fd => Ok(File::from_raw_fd(fd)),
        }
    }
}

/// The server's side. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub(super) struct Warden(Arc<Watched>);

#[derive(Debug)]
struct Watched {
    executable: Executable,
    /// The limit of descriptors that programs get, which may be another than ours.
    descriptors: Option<libc::rlimit>,
    current: Mutex<Current>,
    /// The keepers that we know.
    keepers: Mutex<HashSet<Pid>>,
}

/// A keeper that is known, until this is dropped.
#[derive(Debug)]
pub(super) struct Known {
    watched: Arc<Watched>,
    keeper: Pid,
}

impl Drop for Known {
    fn drop(&mut self) {
        self.watched.keepers.lock().remove(&self.keeper);
    }
}

#[derive(Debug)]
enum Current {
    /// The way to the warden that works now, and its process.
    Link { link: Arc<AsyncFd<OwnedFd>>, process: OwnedFd, pid: Pid },
    /// It cannot be had.
    Failed,
    /// It was let go.
    Dismissed,
}

impl Warden {
    /// Starts a warden, and another whenever it should die. To be called in a runtime.
    pub(super) fn start(executable: &Path, descriptors: Option<libc::rlimit>) -> io::Result<Self> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        // Whoever is started later is the same, whatever has taken its name.
        let executable = Executable::open(executable)?;
        let watched = Arc::new(Watched {
            executable,
            descriptors,
            current: Mutex::new(Current::Failed),
            keepers: Mutex::default(),
        });
        let child = watched.launch()?;
        let (keeping, runtime) = (watched.clone(), tokio::runtime::Handle::current());
        thread::Builder::new().name("exec-warden".into()).spawn(move || {
            let _inside = runtime.enter();
            keeping.keep(child);
        })?;
        Ok(Self(watched))
    }

    /// Has an order carried out. Whether that succeeds is told at the order's socket.
    pub(super) async fn carry_out(&self, order: &Order) -> io::Result<()> {
        let mut file = None;
        let (kind, bytes) = if order.bytes.len() <= SHORT {
            (HERE, order.bytes.as_slice())
        } else {
            let memory = rustix::fs::memfd_create("exec-order", MemfdFlags::CLOEXEC)?;
            let mut memory = File::from(memory);
            memory.write_all(&order.bytes)?;
            io::Seek::rewind(&mut memory)?;
            file = Some(memory);
            (IN_A_FILE, &[][..])
        };
        let mut fds: Vec<BorrowedFd<'_>> = order.descriptors.iter().map(|fd| fd.as_fd()).collect();
        fds.extend(file.as_ref().map(AsFd::as_fd));
        // One that has just died is replaced within a moment.
        for pause in [50, 200, 1000] {
            let link = match &*self.0.current() {
                Current::Link { link, .. } => link.clone(),
                Current::Failed => return Err(io::Error::other("the warden is not running")),
                Current::Dismissed => return Err(io::Error::other("the host is shutting down")),
            };
            let sent = link.async_io(Interest::WRITABLE, |link| deliver(link, kind, bytes, &fds));
            match sent.await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                sent => return sent,
            }
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        Err(io::Error::other("the warden was killed"))
    }

    /// An order takes long: somebody may have stopped who carries it out.
    pub(super) fn wake(&self) {
        if let Current::Link { process, pid, .. } = &*self.0.current()
            && rustix::process::pidfd_send_signal(process, Signal::CONT).is_ok()
        {
            // Or its keeper, before that could say a word.
            descendants::wake_below(*pid);
        }
    }

    /// A keeper is ours: if it should fall to us, it is left alone.
    pub(super) fn know(&self, keeper: Pid) -> Known {
        self.0.keepers.lock().insert(keeper);
        Known { watched: self.0.clone(), keeper }
    }

    /// Lets the warden end. What is still below it is being killed at this moment, by a thread that
    /// may not come to its end if we do; the warden sees to it.
    pub(super) fn dismiss(&self) {
        *self.0.current() = Current::Dismissed;
    }
}

/// Sends one message.
fn deliver(link: &OwnedFd, kind: u8, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS + 1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors to pass"));
    }
    let (kind, flags) = ([kind], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    let parts = [IoSlice::new(&kind), IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| sendmsg(link, &parts, &mut ancillary, flags))?;
    Ok(())
}

impl Watched {
    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock()
    }

    fn launch(&self) -> io::Result<Child> {
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let link = Arc::new(register(ours)?);
        let mut command = Command::new(self.executable.name_after_fork());
        command
            .arg0("exec-warden")
            .arg(WORD)
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
        // Nobody has waited for it yet, so the number is its own.
        let pid = Pid::from_raw(child.id().cast_signed()).ok_or(io::ErrorKind::InvalidData)?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let mut current = self.current();
        if !matches!(*current, Current::Dismissed) {
            *current = Current::Link { link, process, pid };
        }
        Ok(child)
    }

    /// Waits for the warden to end and starts another, until dismissed.
    fn keep(&self, mut child: Child) {
        // Until nothing is left that fell to us from a warden that was killed, that is looked after.
        let mut fallen = None;
        loop {
            if let Some(since) = fallen
                && let Ok(None) = child.try_wait()
            {
                thread::sleep(LOOKING_AFTER);
                if !self.look_after_fallen(&child, since) {
                    fallen = None;
                }
                continue;
            }
            let _ = child.wait();
            if matches!(*self.current(), Current::Dismissed) {
                return;
            }
            tracing::warn!("the warden has died; starting another");
            // Something that kills it at once must not make us spin.
            thread::sleep(LOOKING_AFTER);
            match self.launch() {
                Ok(next) => child = next,
                Err(error) => {
                    tracing::error!(%error, "cannot start a warden");
                    *self.current() = Current::Failed;
                    return;
                }
            }
            fallen = Some(Instant::now());
        }
    }

    /// Reaps what fell to us and has exited, and kills what no keeper of ours keeps. Tells whether
    /// anything is left.
    fn look_after_fallen(&self, warden: &Child, since: Instant) -> bool {
        let mut left = false;
        for pid in descendants::children(rustix::process::getpid()) {
            if pid.as_raw_nonzero().get().cast_unsigned() == warden.id() {
                continue;
            }
            let exited = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            if !matches!(rustix::process::waitid(WaitId::Pid(pid), exited), Ok(None)) {
                continue;
            }
            left = true;
            // At first it may be a keeper whose first word is yet to be heard.
            if since.elapsed() > STRANGE && !self.keepers.lock().contains(&pid) {
                kill_child(pid);
            }
        }
        left
    }
}

/// Kills a child of this process with everything below it. Tells whether any of it could be.
fn kill_child(pid: Pid) -> bool {
    // Ours to reap, so the number is its own, and that of its group: what runs away leaves it behind.
    let _ = rustix::process::kill_process(pid, Signal::STOP);
    descendants::kill_group_of(pid);
    let below = descendants::sweep(pid, None, || true);
    rustix::process::kill_process(pid, Signal::KILL).is_ok() || below
}
