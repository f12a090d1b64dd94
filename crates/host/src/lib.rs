//! Processes and files on this machine.

pub mod buffer;
pub mod environment;
pub mod files;
pub mod machine;
pub mod peer;
pub mod pool;
pub mod process;
pub mod sandbox;

/// Becomes a helper of the host and never returns, if that is what this process was started as.
///
/// To be called first thing in `main`, before any thread exists. In every such process a write beyond
/// `ulimit -f` fails from now on, and kills nobody (it handles `SIGXFSZ`).
pub fn main_if_reentered() {
    process::outlive_file_size_limit();
    process::warden::main_if_reentered();
    sandbox::become_sandbox(files::HELPER, files::run_helper);
}
