//! Limits and times of processes, each with its default.

use std::path::PathBuf;
use std::time::Duration;

/// How processes are run and what is kept of them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProcessConfig {
    /// Output kept per process unless it asks for another amount. Default 8 MiB.
    pub retain_bytes: u64,
    /// Chunks of output kept per process. Default 50,000.
    pub retain_chunks: usize,
    /// The most a process may ask to be kept. Default 64 GiB.
    pub max_retain_bytes: u64,
    /// A store larger than this is a file without a name. Default 64 MiB.
    pub spool_above: u64,
    /// Where such files are. Default: the directory for temporary files.
    pub spool_directory: PathBuf,
    /// Bytes accepted for a stdin that is not read. Default 1 MiB.
    pub stdin_queue_bytes: usize,
    /// Output read from a process ahead of what its client could be sent. Default 512 KiB.
    pub unsent_bytes: usize,
    /// The most one `process/read` returns, whatever it asks for. Default 32 MiB.
    pub max_read_bytes: u64,
    /// How long a closed process can be read. Default 30 s.
    pub closed_linger: Duration,
    /// How long output that was kept while nobody was attached waits for a client that has resumed
    /// its session but does not read it. Default 10 s.
    pub resume_grace: Duration,
    /// How long such output is kept after it has been read to its end, in case the answer dies on
    /// its way. Default 1 s.
    pub resume_read_grace: Duration,
    /// How long after the exit of a sandboxed process its last output is waited for, before it is
    /// decided whether the sandbox caused the exit. Default 20 ms.
    pub denial_wait: Duration,
    /// How long the streams of a process that was killed stay open once nothing is left of it, if another
    /// program holds them. What they hold then is read; what is written to them later is not. Default
    /// 2 s.
    pub stream_linger: Duration,
    /// From the first sandbox on, keep a process ready to become the next. Default true.
    pub spare_sandbox: bool,
    /// How children are made to die with this process.
    pub lifeline: Lifeline,
}

/// How children are made to die with the process that started them, however that ends.
#[derive(Debug, Clone, Default)]
pub enum Lifeline {
    /// The [keeper](super) of each, a child of this process. For a host inside another program, whose
    /// memory the keepers share: what takes that away (a crash, the kernel out of memory) takes them.
    #[default]
    Own,
    /// And a warden above the keepers, the same program re-entered. For a program that calls
    /// [`main_if_reentered`](crate::main_if_reentered) and has no other children.
    Warden {
        /// That program's own executable.
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
            resume_grace: Duration::from_secs(10),
            resume_read_grace: Duration::from_secs(1),
            denial_wait: Duration::from_millis(20),
            stream_linger: Duration::from_secs(2),
            spare_sandbox: true,
            lifeline: Lifeline::default(),
        }
    }
}
