//! Spawns a [`Spare`] and turns it into a sandbox.

use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::apply::spare;
use crate::executable::Executable;
use crate::launch::{Launch, PassedDescriptor};
use crate::reentry;

/// How to spawn a spare: execute `program` with exactly `args` and no environment, in `/`, as the
/// leader of its own session, with `/dev/null` as its streams and the descriptor at its number.
#[derive(Debug)]
pub struct SpareLaunch {
    /// The executable to re-enter.
    pub program: Executable,
    /// All arguments, including `argv[0]`.
    pub args: Vec<OsString>,
    /// The descriptor to pass.
    pub descriptor: PassedDescriptor,
    /// The handle to it, once it is spawned.
    pub spare: Spare,
}

/// A handle to a process that waits to become a sandbox. Dropping it ends the process.
#[derive(Debug)]
pub struct Spare {
    socket: OwnedFd,
}

impl Spare {
    /// Prepares a spare that can become any [`Launch`] of this program.
    pub fn launch(program: &Executable) -> io::Result<SpareLaunch> {
        let (socket, theirs) = spare::socket_pair()?;
        Ok(SpareLaunch {
            program: program.clone(),
            args: vec![
                program.path().into(),
                reentry::ARGUMENT.into(),
                reentry::SPARE_ARGUMENT.into(),
            ],
            descriptor: PassedDescriptor { fd: Arc::new(theirs), number: reentry::SPARE },
            spare: Self { socket },
        })
    }

    /// Turns the spare into this launch, with these standard streams; with `terminal`, the first one
    /// becomes its controlling terminal. From then on it behaves as if the launch had been spawned. If
    /// this fails, nothing has started, and the launch can be spawned.
    pub fn activate(
        self,
        launch: &Launch,
        streams: [BorrowedFd<'_>; 3],
        terminal: bool,
    ) -> io::Result<()> {
        spare::send(&self.socket, streams, terminal, &launch.descriptors)
    }
}
