//! Spawns a launch as a server does: own session, streams and descriptors at their numbers.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use codex_linux_sandbox::{Cleanup, Failure, Launch};

/// Numbers no descriptor is passed at.
const OUT_OF_THE_WAY: RawFd = 100;

/// The command of a launch; add streams and spawn it with [`spawn`].
pub(crate) fn command(launch: &Launch) -> Command {
    let mut command = Command::new(launch.program.name_after_fork());
    command.arg0(&launch.args[0]).args(&launch.args[1..]);
    command.env_clear().envs(launch.env.iter().map(|(name, value)| (name, value)));
    command.current_dir("/").stdin(Stdio::null());
    let passed: Vec<(RawFd, RawFd)> =
        launch.descriptors.iter().map(|d| (d.fd.as_raw_fd(), d.number)).collect();
    // SAFETY: system calls only.
    unsafe {
        command.pre_exec(move || {
            libc::setsid();
            let mut moved = [(0, 0); 8];
            for (slot, (fd, number)) in moved.iter_mut().zip(&passed) {
                *slot = (libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, OUT_OF_THE_WAY), *number);
            }
            for (fd, number) in moved.iter().take(passed.len()) {
                if libc::dup2(*fd, *number) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command
}

/// Spawns and waits until the target runs or has failed to.
pub(crate) fn spawn(
    mut command: Command,
    launch: Launch,
) -> io::Result<(Child, Option<Failure>, Cleanup)> {
    let Launch { descriptors, status, cleanup, .. } = launch;
    let child = command.spawn()?;
    drop(descriptors);
    Ok((child, status.wait()?, cleanup))
}
