//! Limits and timeouts of processes, with their defaults.

use std::path::PathBuf;
use std::time::Duration;

/// How the host runs processes and how much it retains of them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProcessConfig {
    /// Output retained per process, in bytes, unless the request asks for another amount (default: 8
    /// MiB). When it is full the process waits, or the oldest output is dropped, as the request says.
    pub retain_bytes: u64,
    /// Maximum chunks of output retained per process (default: 50,000).
    pub retain_chunks: usize,
    /// The largest amount that a request may ask to retain, in bytes (default: 64 GiB); a larger one is
    /// refused.
    pub max_retain_bytes: u64,
    /// A store above this size, in bytes, is an unlinked file, not memory (default: 64 MiB).
    pub spool_above: u64,
    /// Directory of these files (default: the system's temporary directory).
    pub spool_directory: PathBuf,
    /// Input queued for a process that does not read its stdin, in bytes (default: 1 MiB); later writes
    /// wait.
    pub stdin_queue_bytes: usize,
    /// Output read from a process and not yet sent to its client, in bytes (default: 512 KiB); then the
    /// process waits.
    pub unsent_bytes: usize,
    /// Maximum bytes in one response of `process/read` (default: 32 MiB).
    pub max_read_bytes: u64,
    /// How long the output of a closed process can still be read (default: 30 s).
    pub closed_linger: Duration,
    /// After a client resumes its session: how long output from the detached time is retained if the
    /// client does not read it (default: 60 s). Then it can be dropped, so that the process need not wait.
    pub resume_grace: Duration,
    /// How long such output is retained after the client has read it to its end, in case the response
    /// is lost (default: 1 s).
    pub resume_read_grace: Duration,
    /// How long to wait for the last output of a sandboxed process after its exit, before deciding
    /// whether the sandbox caused the exit (default: 20 ms).
    pub denial_wait: Duration,
    /// How long the streams of a killed process stay open after its last descendant has exited, if
    /// another program holds them (default: 2 s). Output in them by then is read; later output is lost.
    pub stream_linger: Duration,
    /// How often the server looks what a process with limits uses, where the kernel does not enforce them
    /// (default: 50 ms). What it exceeds for a shorter time may pass.
    pub limit_interval: Duration,
    /// From the first sandbox on, keep a spare process ready to become the next (default: true).
    pub spare_sandbox: bool,
    /// How children are killed when this process ends.
    pub lifeline: Lifeline,
}

/// How children are killed when the process that started them ends, even by `SIGKILL`.
#[derive(Debug, Clone, Default)]
pub enum Lifeline {
    /// A [keeper](super) per program, as a child of this process. For a host inside another program;
    /// the keepers share that program's memory, so a crash or the OOM killer takes them too.
    #[default]
    Own,
    /// A warden above the keepers: the same program, re-entered. For a program that calls
    /// [`main_if_reentered`](crate::main_if_reentered) and has no other children.
    Warden {
        /// Executable of the program.
        executable: PathBuf,
    },
}

impl Default for ProcessConfig {
    fn default() -> Self {
        Self {
            retain_bytes: 8 << 20,
            retain_chunks: 50_000,
            max_retain_bytes: 64 << 30,
            spool_above: 64 << 20,
            spool_directory: std::env::temp_dir(),
            stdin_queue_bytes: 1 << 20,
            unsent_bytes: 512 << 10,
            max_read_bytes: 32 << 20,
            closed_linger: Duration::from_secs(30),
            resume_grace: Duration::from_secs(60),
            resume_read_grace: Duration::from_secs(1),
            denial_wait: Duration::from_millis(20),
            stream_linger: Duration::from_secs(2),
            limit_interval: Duration::from_millis(50),
            spare_sandbox: true,
            lifeline: Lifeline::default(),
        }
    }
}
