//! Recordings of terminals: an asciicast (version 3) per process with a terminal.
//!
//! A thread writes all of them, so that no process waits for a disk. What its queue has no room for is missing
//! in the recording, which says so with a marker.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use codex_exec_host::process::TerminalTap;
use codex_exec_server_protocol::process::TerminalSize;
use serde::Serialize;

use crate::audit::timestamp;

/// Where and what to record.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RecordConfig {
    /// The directory of the recordings, which only its owner may write to.
    pub directory: PathBuf,
    /// Record what is typed, too (default: false): it contains passwords.
    pub input: bool,
    /// Bytes that wait to be written (default: 8 MiB); more are missing in the recording.
    pub queue_bytes: usize,
}

impl RecordConfig {
    /// Records output to this directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), input: false, queue_bytes: 8 << 20 }
    }
}

/// Records terminals. Clones share the thread that writes.
#[derive(Debug, Clone)]
pub struct Recorder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: RecordConfig,
    queue: SyncSender<(Arc<File>, Vec<u8>)>,
    queued: Arc<AtomicUsize>,
    last: AtomicU64,
}

/// Messages of the queue; their bytes are bounded by the configuration.
const QUEUE: usize = 65_536;

impl Recorder {
    /// Checks the directory and starts the thread.
    pub fn start(config: RecordConfig) -> io::Result<Self> {
        let found = config.directory.metadata()?;
        if !found.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if found.permissions().mode() & 0o022 != 0 {
            let why = "others can write to this directory; chmod it to 700";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let (queue, lines) = sync_channel::<(Arc<File>, Vec<u8>)>(QUEUE);
        let queued = Arc::new(AtomicUsize::new(0));
        let waiting = queued.clone();
        std::thread::Builder::new().name("exec-record".into()).spawn(move || {
            while let Ok((file, line)) = lines.recv() {
                waiting.fetch_sub(line.len(), Ordering::Relaxed);
                if let Err(error) = (&*file).write_all(&line) {
                    tracing::warn!(%error, "cannot write a recording");
                }
            }
        })?;
        Ok(Self(Arc::new(Shared { config, queue, queued, last: AtomicU64::new(0) })))
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.0.config.directory
    }

    /// Starts a recording. Blocks.
    pub(crate) fn record(&self, argv: &[String], size: TerminalSize) -> io::Result<Recording> {
        let now = SystemTime::now();
        let n = self.0.last.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{}-{n}.cast", timestamp(now).replace(':', ""), std::process::id());
        let path = self.0.config.directory.join(name);
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)?;
        let header = Header {
            version: 3,
            term: Term { cols: size.cols, rows: size.rows },
            timestamp: now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            command: argv.join(" "),
        };
        let mut recording = Recording {
            recorder: self.clone(),
            file: Arc::new(file),
            last: Instant::now(),
            output: Vec::new(),
            input: Vec::new(),
            missing: 0,
        };
        recording.line(&header);
        Ok(recording)
    }
}

#[derive(Serialize)]
struct Header {
    version: u8,
    term: Term,
    timestamp: u64,
    command: String,
}

#[derive(Serialize)]
struct Term {
    cols: u16,
    rows: u16,
}

/// The recording of one process.
#[derive(Debug)]
pub(crate) struct Recording {
    recorder: Recorder,
    file: Arc<File>,
    /// The time of the last event.
    last: Instant,
    /// Starts of characters whose ends have not come.
    output: Vec<u8>,
    input: Vec<u8>,
    /// Events that had no room.
    missing: u64,
}

impl Recording {
    fn event(&mut self, code: &str, data: &str) {
        if self.missing > 0 {
            let marker = format!("{} events are missing here", std::mem::take(&mut self.missing));
            self.line(&(0.0, "m", marker));
        }
        let now = Instant::now();
        let interval = now.duration_since(self.last).as_secs_f64();
        if self.line(&((interval * 1e6).round() / 1e6, code, data)) {
            self.last = now;
        }
    }

    fn line(&mut self, event: &impl Serialize) -> bool {
        let Ok(mut line) = serde_json::to_vec(event) else { return false };
        line.push(b'\n');
        let Shared { config, queue, queued, .. } = &*self.recorder.0;
        let len = line.len();
        let fits = queued.fetch_add(len, Ordering::Relaxed) + len <= config.queue_bytes;
        if fits && queue.try_send((self.file.clone(), line)).is_ok() {
            return true;
        }
        queued.fetch_sub(len, Ordering::Relaxed);
        self.missing += 1;
        false
    }
}

impl TerminalTap for Recording {
    fn output(&mut self, bytes: &[u8]) {
        let text = decode(&mut self.output, bytes);
        self.event("o", &text);
    }

    fn input(&mut self, bytes: &[u8]) {
        if self.recorder.0.config.input {
            let text = decode(&mut self.input, bytes);
            self.event("i", &text);
        }
    }

    fn resized(&mut self, size: TerminalSize) {
        self.event("r", &format!("{}x{}", size.cols, size.rows));
    }

    fn exited(&mut self, code: i32) {
        self.event("x", &code.to_string());
    }
}

/// The text of these bytes; what may be the start of a character waits in `rest`.
fn decode(rest: &mut Vec<u8>, bytes: &[u8]) -> String {
    rest.extend_from_slice(bytes);
    let mut text = String::with_capacity(rest.len());
    let mut chunks = rest.utf8_chunks().peekable();
    let mut kept = Vec::new();
    while let Some(chunk) = chunks.next() {
        text.push_str(chunk.valid());
        let invalid = chunk.invalid();
        let incomplete =
            std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
        if chunks.peek().is_none() && incomplete {
            kept = invalid.to_vec();
        } else if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
    *rest = kept;
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_the_same_however_it_is_cut() {
        let mut random = fastrand::Rng::with_seed(15);
        for _ in 0..500 {
            let bytes: Vec<u8> = (0..random.usize(..40))
                .flat_map(|_| match random.u8(..4) {
                    0 => vec![random.u8(..)],
                    1 => vec![0xf0, 0x9f],
                    _ => random.char(..).to_string().into_bytes(),
                })
                .collect();
            let mut rest = Vec::new();
            let mut text = String::new();
            let mut left = &bytes[..];
            while !left.is_empty() {
                let (piece, after) = left.split_at(random.usize(1..=left.len()));
                text.push_str(&decode(&mut rest, piece));
                left = after;
            }
            text.push_str(&String::from_utf8_lossy(&rest));
            assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
