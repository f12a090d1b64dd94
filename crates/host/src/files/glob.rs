//! Names that match a pattern.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{FsEntryKind, FsGlobParams, FsGlobResponse, FsWalkEntry};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::scan::{self, Room, Rules};
use super::{Cancel, FileError, FilesConfig};

pub(super) fn glob(
    params: &FsGlobParams,
    config: &FilesConfig,
    cancel: &Cancel,
) -> Result<FsGlobResponse, FileError> {
    let limit = params.max_results.unwrap_or(config.default_glob_results);
    if limit > config.max_glob_results {
        let allowed = format!("at most {}", config.max_glob_results);
        return Err(FileError::out_of_range("maxResults", limit.into(), allowed));
    }
    let patterns = compile(params, config)?;
    let rules = Rules {
        root: &params.path,
        include: &[],
        exclude: &params.exclude,
        respect_gitignore: params.respect_gitignore,
        hidden: params.hidden,
        case_insensitive: params.case_insensitive,
    };
    let root = params.path.as_path();
    let mut answer = FsGlobResponse::default();
    let mut room = Room(config.max_scan_answer_bytes);
    for entry in rules.walk(config)? {
        cancel.check()?;
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let error = scan::walk_error(&params.path, &error);
                scan::note(&mut answer.errors, error, config);
                continue;
            }
        };
        let Ok(below) = entry.path().strip_prefix(root) else { continue };
        if entry.depth() == 0 || !patterns.is_match(below) {
            continue;
        }
        let Some(kind) = kind(&entry, params.directories) else { continue };
        let Ok(path) = PathUri::try_from(entry.path()) else { continue };
        if answer.entries.len() >= limit as usize || !room.take(path.encoded_len() + 40) {
            answer.truncated = true;
            break;
        }
        answer.entries.push(FsWalkEntry { path, kind });
    }
    Ok(answer)
}

fn compile(params: &FsGlobParams, config: &FilesConfig) -> Result<GlobSet, FileError> {
    scan::check_patterns(params.patterns.iter().map(String::as_str), config)?;
    let mut set = GlobSetBuilder::new();
    for pattern in &params.patterns {
        let glob = GlobBuilder::new(pattern.strip_prefix("./").unwrap_or(pattern))
            .literal_separator(true)
            .backslash_escape(true)
            .case_insensitive(params.case_insensitive)
            .build()
            .map_err(|error| bad(pattern, &error))?;
        set.add(glob);
    }
    set.build().map_err(|error| bad(&params.patterns.join(" "), &error))
}

fn bad(pattern: &str, error: &globset::Error) -> FileError {
    FileError::Pattern { pattern: pattern.into(), reason: error.kind().to_string() }
}

/// What is listed: regular files, links to them, and directories if they are asked for.
fn kind(entry: &ignore::DirEntry, directories: bool) -> Option<FsEntryKind> {
    let mut kind = entry.file_type()?;
    if kind.is_symlink() {
        kind = std::fs::metadata(entry.path()).ok()?.file_type();
    }
    if kind.is_file() {
        Some(FsEntryKind::File)
    } else if kind.is_dir() && directories {
        Some(FsEntryKind::Directory)
    } else {
        None
    }
}
