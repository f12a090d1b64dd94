//! Finds names that match a pattern: `fs/glob`.

use std::ops::ControlFlow;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{FsEntryKind, FsGlobParams, FsGlobResponse, FsWalkEntry};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::{AtFlags, FileType};

use super::resolve::{Resolver, file_type};
use super::scan::{self, Found, ResponseBudget, Rules, Scanned};
use super::{Cancel, FileError, FilesConfig};

pub(super) fn glob(
    resolver: Resolver,
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
    let mut budget = ResponseBudget::new(config);
    rules.scan(resolver, config, cancel, |scanned| {
        let found = match scanned {
            Scanned::Entry(found) => found,
            Scanned::Failed(error) => {
                scan::record_error(&mut answer.errors, error, config, &mut budget);
                return ControlFlow::Continue(());
            }
        };
        let listed = found
            .path
            .strip_prefix(root)
            .is_ok_and(|below| !found.is_root && patterns.is_match(below))
            .then(|| kind(&found, params.directories))
            .flatten()
            .zip(PathUri::try_from(found.path).ok());
        if let Some((kind, path)) = listed {
            if answer.entries.len() >= limit as usize || !budget.take(path.encoded_len() + 40, 3) {
                answer.truncated = true;
                return ControlFlow::Break(());
            }
            answer.entries.push(FsWalkEntry { path, kind });
        }
        ControlFlow::Continue(())
    })?;
    cancel.check()?;
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

/// The kind to list: regular files, links to them, and directories if requested.
fn kind(found: &Found<'_>, directories: bool) -> Option<FsEntryKind> {
    let kind = match found.kind {
        FileType::Symlink => {
            file_type(&rustix::fs::statat(found.directory, found.name, AtFlags::empty()).ok()?)
        }
        kind => kind,
    };
    match kind {
        FileType::RegularFile => Some(FsEntryKind::File),
        FileType::Directory if directories => Some(FsEntryKind::Directory),
        _ => None,
    }
}
