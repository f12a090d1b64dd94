//! What a server uses to keep a [`Spare`].

use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::apply::spare;
use crate::executable::Executable;
use crate::launch::{Launch, PassedDescriptor};
use crate::reentry;

/// What to spawn to have a spare: `program` with exactly `args` and no environment, in `/`, as the
/// leader of a session of its own, with streams that lead nowhere and with the descriptor at its number.
#[derive(Debug)]
pub struct SpareLaunch {
    /// The executable to re-enter.
    pub program: Executable,
    /// Its whole argument list, its own name first.
    pub args: Vec<OsString>,
    /// The descriptor to pass.
    pub descriptor: PassedDescriptor,
    /// The way to it, once it is spawned.
    pub spare: Spare,
}

/// The way to a process that waits to become a sandbox. It ends when this is dropped.
#[derive(Debug)]
pub struct Spare {
    socket: OwnedFd,
}

impl Spare {
    /// A spare that can become any [`Launch`] of this program.
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

    /// Has it become this launch, with these standard streams; the first is to be its controlling
    /// terminal if it is said to be one. From then on it is as if the launch had been spawned. If this
    /// fails, the launch has not begun, and can be spawned.
    pub fn activate(
        self,
        launch: &Launch,
        streams: [BorrowedFd<'_>; 3],
        terminal: bool,
    ) -> io::Result<()> {
        spare::send(&self.socket, streams, terminal, &launch.descriptors)
    }
}
