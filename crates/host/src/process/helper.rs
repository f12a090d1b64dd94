//! A helper process in a sandbox: this executable, re-entered, which serves requests on its stdin and
//! stdout.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;
use tokio::io::AsyncWrite;
use tokio::net::unix::pipe;

use crate::pool;

use super::child::Child;
use super::confinement::Confinement;
use super::descendants;
use super::host::{ProcessHost, StartError};
use super::keeper::OrderLimits;
use super::launch::LaunchError;
use super::leftovers::Group;

/// The group of helpers, which belong to no client.
pub(super) const GROUP: Group = Group(u64::MAX);

/// A running helper. Dropping its input kills it.
#[derive(Debug)]
pub(crate) struct HelperProcess {
    /// Its replies.
    pub output: pipe::Receiver,
    /// Its requests.
    pub input: HelperInput,
    /// Its mounts.
    pub mounts: SandboxMounts,
}

/// The mounts of a helper's sandbox, which hide denied and protected files. When a file that is a mount
/// point is removed, the kernel removes the mount, in every sandbox.
#[derive(Debug)]
pub(crate) struct SandboxMounts(Option<OwnedFd>);

impl SandboxMounts {
    /// The mounts of the sandbox with this outer process.
    fn of_sandbox(outer: Pid) -> Self {
        let inner = descendants::children(outer).into_iter().next();
        let path = inner.map(|inner| format!("/proc/{}/mountinfo", inner.as_raw_nonzero()));
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Self(path.and_then(|path| rustix::fs::open(path, flags, Mode::empty()).ok()))
    }

    /// Whether the mount table could be opened.
    pub(crate) fn are_known(&self) -> bool {
        self.0.is_some()
    }

    /// Whether no mount has changed since the helper started; false if that is unknown.
    pub(crate) fn are_intact(&self) -> bool {
        let Some(table) = &self.0 else { return false };
        let now = Timespec::default();
        let mut fds = [PollFd::new(table, PollFlags::PRI)];
        let asked = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now)));
        asked.is_ok() && !fds[0].revents().intersects(PollFlags::PRI | PollFlags::ERR)
    }
}

/// A helper's stdin; dropping it kills the helper.
#[derive(Debug)]
pub(crate) struct HelperInput {
    pipe: pipe::Sender,
    _kill_on_drop: KillInBackground,
}

/// The helpers of a host. Clones share their state.
#[derive(Debug, Clone, Default)]
pub(super) struct HelperProcesses(Arc<Mutex<Vec<Helper>>>);

/// Locked while the helper is being killed, so that others wait for that.
type Helper = Arc<Mutex<Option<Child>>>;

impl HelperProcesses {
    fn add(&self, child: Child) -> KillInBackground {
        let helper = Arc::new(Mutex::new(Some(child)));
        self.0.lock().push(helper.clone());
        KillInBackground(Some(KillOnDrop { helpers: self.clone(), helper }))
    }

    /// Kills a helper and its descendants. Blocks.
    fn kill(&self, helper: &Helper) {
        let mut child = helper.lock();
        drop(child.take());
        self.0.lock().retain(|other| !Arc::ptr_eq(other, helper));
    }

    /// Kills all helpers. Blocks.
    pub(super) fn kill_all(&self) {
        let all = self.0.lock().clone();
        // First kill all: the last helper that used a placeholder removes it.
        for helper in &all {
            if let Some(child) = &*helper.lock() {
                child.kill_blocking();
            }
        }
        for helper in &all {
            self.kill(helper);
        }
    }
}

/// Kills a helper when dropped, on a pool thread.
#[derive(Debug)]
struct KillInBackground(Option<KillOnDrop>);

/// Kills a helper when dropped.
#[derive(Debug)]
struct KillOnDrop {
    helpers: HelperProcesses,
    helper: Helper,
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.helpers.kill(&self.helper);
    }
}

impl Drop for KillInBackground {
    fn drop(&mut self) {
        let kill = self.0.take();
        pool::spawn_detached(move || drop(kill));
    }
}

impl ProcessHost {
    /// Starts a helper in a prepared sandbox. Its stderr is discarded.
    pub(crate) async fn start_helper(
        &self,
        sandbox: crate::sandbox::Launch,
    ) -> Result<HelperProcess, StartError> {
        let setup = |source| StartError::Setup { what: "a helper", source };
        let confinement = Confinement::new(sandbox).map_err(LaunchError::from)?;
        let (their_input, input) = io::pipe().map_err(setup)?;
        let (output, their_output) = io::pipe().map_err(setup)?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let null = rustix::fs::open("/dev/null", flags, Mode::empty());
        let null = null.map_err(|errno| setup(errno.into()))?;
        let stdio = [their_input.into(), their_output.into(), null];
        let (child, _) = self
            .start_sandbox(confinement, stdio, false, GROUP, OrderLimits::default())
            .await?
            .wait_started()
            .await?;
        Ok(HelperProcess {
            mounts: SandboxMounts::of_sandbox(child.pid()),
            output: pipe::Receiver::from_owned_fd(output.into()).map_err(setup)?,
            input: HelperInput {
                pipe: pipe::Sender::from_owned_fd(input.into()).map_err(setup)?,
                _kill_on_drop: self.helpers().add(child),
            },
        })
    }
}

impl AsyncWrite for HelperInput {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.pipe).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.pipe).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.pipe.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(cx)
    }
}
