//! The limits of file operations.

use std::time::Duration;

/// Limits and timings of file operations. The protocol documents the defaults; clients do not expect
/// higher ones.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FilesConfig {
    /// The largest file that `fs/readFile` returns, in bytes (default: 512 MiB).
    pub max_read_file_bytes: u64,
    /// Open handles per connection (default: 128).
    pub max_handles: usize,
    /// The longest handle id, in bytes (default: 32).
    pub max_handle_id_bytes: usize,
    /// Maximum bytes of one `fs/readBlock` or `fs/writeBlock` (default: 1 MiB).
    pub max_block_bytes: usize,
    /// Maximum entries in one `fs/readDirectory` response (default: 50,000); a longer listing is
    /// truncated.
    pub max_directory_entries: usize,
    /// Maximum memory of one `fs/readDirectory` response, estimated, in bytes (default: 24 MiB, enough for
    /// 50,000 of the longest names in UTF-8 without control characters); a longer listing is truncated.
    pub max_directory_answer_bytes: usize,
    /// The largest `maxDepth` of `fs/walk` (default: 64).
    pub max_walk_depth: u32,
    /// The largest `maxDirectories` of `fs/walk` (default: 10,000).
    pub max_walk_directories: u32,
    /// The largest `maxEntries` of `fs/walk` (default: 50,000).
    pub max_walk_entries: u32,
    /// Maximum bytes, as JSON, of a response of `fs/walk`, of `fs/glob`, and of an `fs/search` that is
    /// not streamed (default: 4 MiB); a longer one is truncated.
    pub max_scan_answer_bytes: usize,
    /// Maximum errors in a response of `fs/search` or `fs/glob` (default: 100).
    pub max_scan_errors: usize,
    /// Maximum names in one directory that `fs/search` and `fs/glob` sort (default: 1,000,000); a
    /// larger directory is an error.
    pub max_scan_names: usize,
    /// `maxMatches` of an `fs/search` that sets none (default: 1,000).
    pub default_search_matches: u32,
    /// The largest `maxMatches` of `fs/search` (default: 100,000).
    pub max_search_matches: u32,
    /// The largest `beforeContext` and `afterContext` of `fs/search` (default: 50).
    pub max_search_context: u32,
    /// Maximum bytes of a matching line in the response (default: 4 KiB); a longer line is cut.
    pub max_search_line_bytes: usize,
    /// Maximum bytes of a pattern, and of all globs of a request together (default: 64 KiB).
    pub max_pattern_bytes: usize,
    /// Maximum memory of a compiled pattern, in bytes (default: 32 MiB).
    pub max_pattern_memory: usize,
    /// Maximum memory of the ignore rules that apply at one place of a scan, estimated, in bytes (default:
    /// 32 MiB); a rule file beyond it is an error of the scan, and does not apply.
    pub max_ignore_memory: usize,
    /// Maximum memory of a search for one line, or one file if matches span lines, in bytes (default:
    /// 64 MiB).
    pub max_search_memory: usize,
    /// A streamed search sends a batch once it has this many bytes (default: 64 KiB) …
    pub search_batch_bytes: usize,
    /// … or is this old, whichever comes first (default: 100 ms).
    pub search_batch_age: Duration,
    /// Concurrent searches per connection (default: 16).
    pub max_searches: usize,
    /// `maxResults` of an `fs/glob` that sets none (default: 10,000).
    pub default_glob_results: u32,
    /// The largest `maxResults` of `fs/glob` (default: 50,000).
    pub max_glob_results: u32,
    /// Watches of either kind per connection (default: 32). Each takes one of the 128 inotify instances
    /// that a user has by default.
    pub max_watches: usize,
    /// `debounceMs` of an `fs/watch` that sets none (default: 100 ms).
    pub default_watch_debounce: Duration,
    /// The largest `debounceMs` (default: 60 s).
    pub max_watch_debounce: Duration,
    /// Maximum changes in one notification (default: 1,000); more are reported as an overflow.
    pub max_watch_changes: usize,
    /// Maximum bytes of the changes in one notification, as JSON (default: 256 KiB); more are reported as an
    /// overflow.
    pub max_watch_change_bytes: usize,
    /// Maximum memory of the changes that the watches of a connection (and, in a sandbox, of a helper) have
    /// seen and not yet reported, in bytes (default: 16 MiB); more are reported as an overflow.
    pub max_watch_memory: usize,
    /// Maximum paths in one `fs/watchMissing` (default: 256).
    pub max_missing_paths: usize,
    /// How often `fs/watchMissing` checks by itself, for filesystems without notifications (default: 2
    /// s).
    pub missing_recheck: Duration,
    /// Cached helper processes, up to two per policy: one for reading, one for changes (default: 32); the
    /// least recently used one is dropped.
    pub max_helpers: usize,
    /// How long an unused helper is kept (default: 60 s).
    pub helper_idle: Duration,
    /// Concurrent operations per helper (default: 64); more wait.
    pub max_helper_operations: usize,
    /// Use `openat2` where the kernel has it (default: true). Otherwise paths are opened component by
    /// component, as on kernels before 5.6; both refuse links without a race.
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
            max_directory_answer_bytes: 24 << 20,
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
            max_ignore_memory: 32 << 20,
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
            max_watch_change_bytes: 256 << 10,
            max_watch_memory: 16 << 20,
            max_missing_paths: 256,
            missing_recheck: Duration::from_secs(2),
            max_helpers: 32,
            helper_idle: Duration::from_secs(60),
            max_helper_operations: 64,
            use_openat2: true,
        }
    }
}
