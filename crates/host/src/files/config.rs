//! Every limit of the filesystem half, each with its reason.

use std::time::Duration;

/// Limits and timings. The defaults are the published ones; raising a limit that the protocol
/// names surprises clients.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FilesConfig {
    /// The largest file `fs/readFile` returns. 512 MiB.
    pub max_read_file_bytes: u64,
    /// Handles a connection may hold open. 128.
    pub max_handles: usize,
    /// The longest handle id, in bytes. 32.
    pub max_handle_id_bytes: usize,
    /// The most one `fs/readBlock` or `fs/writeBlock` moves. 1 MiB.
    pub max_block_bytes: usize,
    /// Entries in one answer of `fs/readDirectory`. 50,000.
    pub max_directory_entries: usize,
    /// The largest `maxDepth` of `fs/walk`. 64.
    pub max_walk_depth: u32,
    /// The largest `maxDirectories` of `fs/walk`. 10,000.
    pub max_walk_directories: u32,
    /// The largest `maxEntries` of `fs/walk`. 50,000.
    pub max_walk_entries: u32,
    /// The longest answer, as JSON, of `fs/walk`, of `fs/glob`, and of an `fs/search` that is not
    /// streamed. 4 MiB.
    pub max_scan_answer_bytes: usize,
    /// Errors told in an answer of `fs/search` or `fs/glob`. 100.
    pub max_scan_errors: usize,
    /// Names in one directory that `fs/search` and `fs/glob` sort; a larger one is an error. 1,000,000.
    pub max_scan_names: usize,
    /// `maxMatches` of an `fs/search` that names none. 1,000.
    pub default_search_matches: u32,
    /// The largest `maxMatches` of `fs/search`. 100,000.
    pub max_search_matches: u32,
    /// The largest `beforeContext` and `afterContext` of `fs/search`. 50.
    pub max_search_context: u32,
    /// The most of a found line that is told. 4 KiB.
    pub max_search_line_bytes: usize,
    /// The longest pattern or glob, and the most bytes of all globs of a request. 64 KiB.
    pub max_pattern_bytes: usize,
    /// Memory a compiled pattern may take. 32 MiB.
    pub max_pattern_memory: usize,
    /// Memory a search may take for one line, or one file if matches span lines. 64 MiB.
    pub max_search_memory: usize,
    /// A streamed search sends what it has when it is this long … 64 KiB.
    pub search_batch_bytes: usize,
    /// … or this old, whichever comes first. 100 ms.
    pub search_batch_age: Duration,
    /// Searches that may run at once on a connection. 16.
    pub max_searches: usize,
    /// `maxResults` of an `fs/glob` that names none. 10,000.
    pub default_glob_results: u32,
    /// The largest `maxResults` of `fs/glob`. 50,000.
    pub max_glob_results: u32,
    /// Watches (of either kind) a connection may hold. 32, because each takes one of the 128
    /// inotify instances a user has by default.
    pub max_watches: usize,
    /// `debounceMs` of an `fs/watch` that names none. 100 ms.
    pub default_watch_debounce: Duration,
    /// The largest `debounceMs`. 60 s.
    pub max_watch_debounce: Duration,
    /// Changes told in one notification; more are an overflow. 1,000.
    pub max_watch_changes: usize,
    /// Paths in one `fs/watchMissing`. 256.
    pub max_missing_paths: usize,
    /// How often `fs/watchMissing` looks by itself, for filesystems that tell nothing. 2 s.
    pub missing_recheck: Duration,
    /// Sandboxed helper processes kept for their policies. 32.
    pub max_helpers: usize,
    /// How long one is kept that nobody uses. 60 s.
    pub helper_idle: Duration,
    /// Operations a helper process runs at once; more wait in its pipe. 64.
    pub max_helper_operations: usize,
    /// Use `openat2` where the kernel has it. False walks component by component, as on kernels
    /// before 5.6; both refuse links without a race.
    pub use_openat2: bool,
}

impl Default for FilesConfig {
    fn default() -> Self {
        Self {
            max_read_file_bytes: 512 << 20,
            max_handles: 128,
            max_handle_id_bytes: 32,
            max_block_bytes: 1 << 20,
            max_directory_entries: 50_000,
            max_walk_depth: 64,
            max_walk_directories: 10_000,
            max_walk_entries: 50_000,
            max_scan_answer_bytes: 4 << 20,
            max_scan_errors: 100,
            max_scan_names: 1_000_000,
            default_search_matches: 1_000,
            max_search_matches: 100_000,
            max_search_context: 50,
            max_search_line_bytes: 4 << 10,
            max_pattern_bytes: 64 << 10,
            max_pattern_memory: 32 << 20,
            max_search_memory: 64 << 20,
            search_batch_bytes: 64 << 10,
            search_batch_age: Duration::from_millis(100),
            max_searches: 16,
            default_glob_results: 10_000,
            max_glob_results: 50_000,
            max_watches: 32,
            default_watch_debounce: Duration::from_millis(100),
            max_watch_debounce: Duration::from_secs(60),
            max_watch_changes: 1_000,
            max_missing_paths: 256,
            missing_recheck: Duration::from_secs(2),
            max_helpers: 32,
            helper_idle: Duration::from_secs(60),
            max_helper_operations: 64,
            use_openat2: true,
        }
    }
}
