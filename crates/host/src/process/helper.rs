//! A helper process in a sandbox: this executable, re-entered, that serves requests on its stdin
//! and stdout.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::fs::{Mode, OFlags};
use tokio::io::AsyncWrite;
use tokio::net::unix::pipe;

use super::child::Child;
use super::confinement::{Confinement, Entering, entered};
use super::host::{ProcessHost, StartError};
use super::launch::LaunchError;
use super::orphans::Group;

/// Helpers belong to no client.
pub(super) const GROUP: Group = Group(u64::MAX);

/// Both ends of a running helper. It is killed when its input is dropped.
#[derive(Debug)]
pub struct HelperProcess {
    /// What it answers.
    pub output: pipe::Receiver,
    /// What it is asked.
    pub input: HelperInput,
}

/// A helper's stdin, which holds the helper.
#[derive(Debug)]
pub struct HelperInput {
    pipe: pipe::Sender,
    child: Option<Child>,
}

impl ProcessHost {
    /// Starts a helper that a sandbox has been prepared for. Its stderr goes nowhere.
    pub async fn start_helper(
        &self,
        sandbox: codex_linux_sandbox::Launch,
    ) -> Result<HelperProcess, StartError> {
        let setup = |source| StartError::Setup { what: "a helper", source };
        let confinement = Confinement::new(sandbox).map_err(LaunchError::from)?;
        let (their_input, input) = io::pipe().map_err(setup)?;
        let (output, their_output) = io::pipe().map_err(setup)?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let nowhere = rustix::fs::open("/dev/null", flags, Mode::empty());
        let nowhere = nowhere.map_err(|errno| setup(errno.into()))?;
        let stdio = [their_input.into(), their_output.into(), nowhere];
        let Entering { child, status, cleanup: _ } =
            self.enter(confinement, stdio, false, GROUP).await?;
        entered(status).await?;
        Ok(HelperProcess {
            output: pipe::Receiver::from_owned_fd(output.into()).map_err(setup)?,
            input: HelperInput {
                pipe: pipe::Sender::from_owned_fd(input.into()).map_err(setup)?,
                child: Some(child),
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

/// Killing waits for the end, which a thread of the runtime must not do.
impl Drop for HelperInput {
    fn drop(&mut self) {
        let child = self.child.take();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(child))),
            Err(_) => drop(child),
        }
    }
}
