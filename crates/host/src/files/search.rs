//! Finds lines that match a pattern: `fs/search`.
//!
//! Invariant: a search holds at most one batch of lines (or, without streaming, as many as the response
//! may have) and one line, or one file if matches span lines, within `max_search_memory`. It opens only
//! regular files and follows no links.

use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::time::Instant;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{
    FsPathError, FsSearchFile, FsSearchLine, FsSearchLineKind, FsSearchMatchesNotification,
    FsSearchParams, FsSearchRange, FsSearchResponse,
};
use grep_matcher::Matcher;
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{
    BinaryDetection, Searcher, SearcherBuilder, Sink, SinkContext, SinkError, SinkMatch,
};
use rustix::fs::{FileType, Mode, OFlags};

use super::resolve::{self, REGULAR, Resolver};
use super::scan::{self, Found, ResponseBudget, Rules, Scanned};
use super::{Cancel, Event, FileError, FileNotification, FilesConfig};

/// JSON overhead of a line, rounded up.
const LINE_OVERHEAD: usize = 64;
const RANGE_OVERHEAD: usize = 32;

pub(super) fn search(
    resolver: Resolver,
    params: &FsSearchParams,
    config: &FilesConfig,
    cancel: &Cancel,
    emit: &dyn Fn(Event) -> ControlFlow<()>,
) -> Result<FsSearchResponse, FileError> {
    let limits = Limits::of(params, config)?;
    let matcher = compile(params, config)?;
    let rules = Rules {
        root: &params.path,
        include: &params.include,
        exclude: &params.exclude,
        respect_gitignore: params.respect_gitignore,
        hidden: params.hidden,
        case_insensitive: false,
    };
    let mut searcher = SearcherBuilder::new()
        .binary_detection(BinaryDetection::quit(0))
        .line_number(true)
        .multi_line(params.multiline)
        .before_context(params.before_context as usize)
        .after_context(params.after_context as usize)
        .heap_limit(Some(config.max_search_memory))
        .build();
    let mut results = Results {
        config,
        search_id: params.search_id.as_deref(),
        emit,
        budget: ResponseBudget::new(config),
        batch: Vec::new(),
        batch_bytes: 0,
        batch_since: None,
        seq: 0,
        answer: FsSearchResponse::default(),
    };
    rules.scan(resolver, config, cancel, |scanned| {
        let entry = match scanned {
            Scanned::Entry(entry) => entry,
            Scanned::Failed(error) => {
                results.error(error);
                return ControlFlow::Continue(());
            }
        };
        if entry.kind != FileType::RegularFile {
            return ControlFlow::Continue(());
        }
        let Ok(path) = PathUri::try_from(entry.path) else { return ControlFlow::Continue(()) };
        match open(&entry, &path) {
            Ok(Some((file, size))) if size <= limits.file_bytes => {
                search_file(&mut searcher, &matcher, &file, path, &limits, cancel, &mut results)?;
            }
            Ok(_) => {}
            Err(error) => results.error(error),
        }
        let sent = results.send_if_due();
        results.answer.cancelled |= sent.is_break();
        sent
    })?;
    results.answer.cancelled |= cancel.is_cancelled();
    // If the client is gone the search is cancelled, and the last matches are not sent.
    results.answer.cancelled |= results.send().is_break();
    let mut answer = results.answer;
    answer.truncated |= answer.cancelled;
    Ok(answer)
}

struct Limits {
    matches: u64,
    matches_per_file: u64,
    file_bytes: u64,
}

impl Limits {
    fn of(params: &FsSearchParams, config: &FilesConfig) -> Result<Self, FileError> {
        let matches = params.max_matches.unwrap_or(config.default_search_matches);
        for (what, value, limit) in [
            ("maxMatches", matches, config.max_search_matches),
            ("beforeContext", params.before_context, config.max_search_context),
            ("afterContext", params.after_context, config.max_search_context),
        ] {
            if value > limit {
                let allowed = format!("at most {limit}");
                return Err(FileError::out_of_range(what, value.into(), allowed));
            }
        }
        Ok(Self {
            matches: matches.into(),
            matches_per_file: params.max_matches_per_file.map_or(u64::MAX, u64::from),
            file_bytes: params.max_file_bytes.unwrap_or(u64::MAX),
        })
    }
}

fn compile(params: &FsSearchParams, config: &FilesConfig) -> Result<RegexMatcher, FileError> {
    scan::check_patterns([params.pattern.as_str()], config)?;
    let mut builder = RegexMatcherBuilder::new();
    builder
        .case_insensitive(params.case_insensitive)
        .word(params.word)
        .fixed_strings(params.literal)
        .multi_line(true)
        .size_limit(config.max_pattern_memory)
        .dfa_size_limit(config.max_pattern_memory);
    if !params.multiline {
        // Allows a line-by-line search, whatever the pattern contains.
        builder.line_terminator(Some(b'\n'));
    }
    builder.build(&params.pattern).map_err(|error| FileError::Pattern {
        pattern: params.pattern.clone(),
        reason: error.to_string(),
    })
}

/// Opens a regular file and returns its size; `None` if it is not regular (any more).
fn open(entry: &Found<'_>, path: &PathUri) -> Result<Option<(File, u64)>, FsPathError> {
    // The client named the root: follow a link there.
    let follow = if entry.is_root { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = OFlags::RDONLY | follow | REGULAR;
    let failed = |error: &FileError| {
        let message = match error {
            FileError::Os { errno, .. } => super::error::errno_message(*errno),
            other => other.to_string(),
        };
        FsPathError { path: path.clone(), message }
    };
    let fd = rustix::fs::openat(entry.directory, entry.name, flags, Mode::empty())
        .map_err(|errno| failed(&FileError::os("open", path, errno)))?;
    match resolve::require_regular(fd, path) {
        Ok((fd, stat)) => Ok(Some((fd.into(), u64::try_from(stat.st_size).unwrap_or(0)))),
        Err(FileError::NotRegularFile { .. }) => Ok(None),
        Err(error) => Err(failed(&error)),
    }
}

fn search_file(
    searcher: &mut Searcher,
    matcher: &RegexMatcher,
    file: &File,
    path: PathUri,
    limits: &Limits,
    cancel: &Cancel,
    results: &mut Results<'_>,
) -> ControlFlow<()> {
    results.answer.files_searched += 1;
    let before = results.answer.matches;
    let mut lines =
        LineSink { matcher, path: path.clone(), limits, cancel, results, in_file: 0, stop: None };
    let done = searcher.search_reader(matcher, CancellableFile { file, cancel }, &mut lines);
    let stop = lines.stop.take();
    if results.answer.matches > before {
        results.answer.files_matched += 1;
    }
    if let Err(Failed(message)) = done
        && !cancel.is_cancelled()
    {
        results.error(FsPathError { path, message });
    }
    match stop {
        None if cancel.is_cancelled() => {
            results.answer.cancelled = true;
            ControlFlow::Break(())
        }
        None | Some(Stop::File) => ControlFlow::Continue(()),
        Some(Stop::Truncated) => {
            results.answer.truncated = true;
            ControlFlow::Break(())
        }
        Some(Stop::Cancelled) => {
            results.answer.cancelled = true;
            ControlFlow::Break(())
        }
    }
}

/// A file that ends when the search is cancelled, so that a large file without matches does not delay
/// cancellation.
struct CancellableFile<'a> {
    file: &'a File,
    cancel: &'a Cancel,
}

impl Read for CancellableFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() { Ok(0) } else { self.file.read(buffer) }
    }
}

/// Why a file was not searched to its end.
enum Stop {
    /// The file has reached its maximum of matches.
    File,
    /// The search has reached its maximum of matches, or the response is full.
    Truncated,
    Cancelled,
}

/// Receives the lines of one file from the searcher.
struct LineSink<'a, 'b> {
    matcher: &'a RegexMatcher,
    path: PathUri,
    limits: &'a Limits,
    cancel: &'a Cancel,
    results: &'a mut Results<'b>,
    in_file: u64,
    stop: Option<Stop>,
}

/// The message of a failed read.
struct Failed(String);

impl SinkError for Failed {
    fn error_message<T: std::fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

impl Sink for LineSink<'_, '_> {
    type Error = Failed;

    fn matched(&mut self, _: &Searcher, line: &SinkMatch<'_>) -> Result<bool, Failed> {
        if self.cancel.is_cancelled() {
            self.stop = Some(Stop::Cancelled);
        } else if self.results.answer.matches >= self.limits.matches {
            self.stop = Some(Stop::Truncated);
        } else if self.in_file >= self.limits.matches_per_file {
            self.stop = Some(Stop::File);
        }
        if self.stop.is_some() {
            return Ok(false);
        }
        let ranges = self.ranges(line.bytes());
        let added = self.add(line.line_number(), FsSearchLineKind::Match, line.bytes(), &ranges);
        if added {
            self.in_file += 1;
            self.results.answer.matches += 1;
        }
        Ok(added)
    }

    fn context(&mut self, _: &Searcher, line: &SinkContext<'_>) -> Result<bool, Failed> {
        Ok(self.add(line.line_number(), FsSearchLineKind::Context, line.bytes(), &[]))
    }
}

impl LineSink<'_, '_> {
    fn ranges(&self, line: &[u8]) -> Vec<(usize, usize)> {
        let mut ranges = Vec::new();
        let _ = self.matcher.find_iter(line, |range| {
            ranges.push((range.start(), range.end()));
            ranges.len() < 1000
        });
        ranges
    }

    fn add(
        &mut self,
        number: Option<u64>,
        kind: FsSearchLineKind,
        bytes: &[u8],
        ranges: &[(usize, usize)],
    ) -> bool {
        let line = to_line(number.unwrap_or(0), kind, bytes, ranges, self.results.config);
        let added = self.results.add(&self.path, line);
        if !added {
            self.stop = Some(Stop::Truncated);
        } else if self.results.send_if_due().is_break() {
            self.stop = Some(Stop::Cancelled);
            return false;
        }
        added
    }
}

/// Converts a line for the response: text, cut to the limit, and the ranges in that text.
fn to_line(
    line_number: u64,
    kind: FsSearchLineKind,
    bytes: &[u8],
    ranges: &[(usize, usize)],
    config: &FilesConfig,
) -> FsSearchLine {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    let shown = shorten(bytes, config.max_search_line_bytes);
    let text = String::from_utf8_lossy(shown);
    let is_exact = matches!(text, std::borrow::Cow::Borrowed(_));
    // A replacement character is longer than the byte it replaces.
    let position = |at: usize| {
        let at = at.min(shown.len());
        if is_exact { at } else { String::from_utf8_lossy(&shown[..at]).len().min(text.len()) }
    };
    let ranges = ranges
        .iter()
        .filter(|(start, _)| *start <= shown.len())
        .map(|&(start, end)| FsSearchRange {
            start: position(start) as u64,
            end: position(end) as u64,
        })
        .collect();
    let text_truncated = shown.len() < bytes.len();
    FsSearchLine { line_number, kind, text: text.into_owned(), ranges, text_truncated }
}

/// The first `limit` bytes, cut at a character boundary.
fn shorten(bytes: &[u8], limit: usize) -> &[u8] {
    if bytes.len() <= limit {
        return bytes;
    }
    let mut end = limit;
    while end > limit.saturating_sub(3) && bytes[end] & 0xC0 == 0x80 {
        end -= 1;
    }
    &bytes[..end]
}

/// Matches that have not been sent yet or, without a `searchId`, all matches.
struct Results<'a> {
    config: &'a FilesConfig,
    search_id: Option<&'a str>,
    emit: &'a dyn Fn(Event) -> ControlFlow<()>,
    budget: ResponseBudget,
    batch: Vec<FsSearchFile>,
    batch_bytes: usize,
    batch_since: Option<Instant>,
    seq: u64,
    answer: FsSearchResponse,
}

impl Results<'_> {
    /// False if the response has no space for the line.
    fn add(&mut self, path: &PathUri, line: FsSearchLine) -> bool {
        let streamed = self.search_id.is_some();
        let files = if streamed { &mut self.batch } else { &mut self.answer.files };
        let same_file = files.last().is_some_and(|file| file.path == *path);
        // Escapes make text longer in JSON, control characters up to six times.
        let escaped = line.text.bytes().filter(|&b| b < 0x20 || b == b'"' || b == b'\\').count();
        let mut bytes = line.text.len() + 5 * escaped;
        bytes += LINE_OVERHEAD + RANGE_OVERHEAD * line.ranges.len();
        // The line and its members; each range and its two.
        let mut values = 6 + 3 * line.ranges.len();
        if !same_file {
            bytes += path.encoded_len() + LINE_OVERHEAD;
            values += 3;
        }
        if !streamed && !self.budget.take(bytes, values) {
            return false;
        }
        match files.last_mut() {
            Some(file) if same_file => file.lines.push(line),
            _ => files.push(FsSearchFile { path: path.clone(), lines: vec![line] }),
        }
        if streamed {
            self.batch_bytes += bytes;
            self.batch_since.get_or_insert_with(Instant::now);
        }
        true
    }

    fn error(&mut self, error: FsPathError) {
        scan::record_error(&mut self.answer.errors, error, self.config, &mut self.budget);
    }

    fn send_if_due(&mut self) -> ControlFlow<()> {
        let old = |since: Instant| since.elapsed() >= self.config.search_batch_age;
        if self.batch_bytes >= self.config.search_batch_bytes || self.batch_since.is_some_and(old) {
            return self.send();
        }
        ControlFlow::Continue(())
    }

    fn send(&mut self) -> ControlFlow<()> {
        let Some(search_id) = self.search_id.filter(|_| !self.batch.is_empty()) else {
            return ControlFlow::Continue(());
        };
        self.seq += 1;
        self.batch_bytes = 0;
        self.batch_since = None;
        let matches = FsSearchMatchesNotification {
            search_id: search_id.into(),
            seq: self.seq,
            files: std::mem::take(&mut self.batch),
        };
        (self.emit)(Event::Notify(FileNotification::SearchMatches(matches)))
    }
}
