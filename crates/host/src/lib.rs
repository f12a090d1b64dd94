//! Processes and files on this machine.

pub mod buffer;
pub mod environment;
pub mod files;
pub mod machine;
pub mod peer;
pub mod pool;
pub mod process;
pub mod sandbox;
pub mod shell_snapshot;

/// Turns this process into a helper of the host and never returns, if it was started as one.
///
/// Call it first thing in `main`, before any thread exists. It also installs a `SIGXFSZ` handler, so
/// that a write beyond `ulimit -f` fails with an error and does not kill the process.
pub fn main_if_reentered() {
    process::handle_file_size_signal();
    process::warden::main_if_reentered();
    sandbox::become_sandbox(files::HELPER, files::run_helper);
}
