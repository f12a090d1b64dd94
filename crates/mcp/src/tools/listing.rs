//! Finding files: search, glob, ls.

use codex_exec_server_protocol::call;
use codex_exec_server_protocol::files::{
    FsEntryKind, FsGlobParams, FsSearchLineKind, FsSearchParams,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Context, Outcome, object, result_bytes};
use crate::content::ToolResult;

/// Matches of a search, unless the call says otherwise.
const DEFAULT_MATCHES: u32 = 200;
/// Paths of a glob, unless the call says otherwise.
const DEFAULT_PATHS: u32 = 500;
/// The most of both.
const MAX_RESULTS: u32 = 10_000;

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct SearchArgs {
    pattern: String,
    path: Option<String>,
    literal: Option<bool>,
    ignore_case: Option<bool>,
    glob: Option<Vec<String>>,
    context: Option<u32>,
    hidden: Option<bool>,
    max_matches: Option<u32>,
}

pub(super) fn search_schema() -> Value {
    object(
        &json!({
            "pattern": {"type": "string", "description": "The regular expression."},
            "path": {"type": "string", "description": "A directory or file; the workspace by default."},
            "literal": {"type": "boolean", "description": "The pattern is plain text."},
            "ignore_case": {"type": "boolean", "description": "Ignore the case of letters."},
            "glob": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Search only files that match one of these patterns, such as *.py.",
            },
            "context": {"type": "integer", "description": "Lines around each match; at most 50."},
            "hidden": {"type": "boolean", "description": "Search hidden files too."},
            "max_matches": {"type": "integer", "description": "Stop after this many lines; 200 by default."},
        }),
        &["pattern"],
    )
}

pub(super) async fn search(context: &Context, args: SearchArgs) -> Outcome {
    let workspace = &context.workspace;
    if !workspace.client.capabilities().fs_search {
        return Err("this server cannot search files; run grep instead".to_owned());
    }
    let root = workspace.resolve(args.path.as_deref().unwrap_or("."))?;
    let mut params = FsSearchParams::new(root, args.pattern);
    params.literal = args.literal == Some(true);
    params.case_insensitive = args.ignore_case == Some(true);
    params.include = args.glob.unwrap_or_default();
    params.hidden = args.hidden == Some(true);
    params.before_context = args.context.unwrap_or(0).min(50);
    params.after_context = params.before_context;
    params.max_matches = Some(args.max_matches.unwrap_or(DEFAULT_MATCHES).clamp(1, MAX_RESULTS));
    let found = workspace.files().call::<call::FsSearch>(params).await;
    let found = found.map_err(|error| error.to_string())?;
    let room = result_bytes(workspace, None);
    let (mut text, mut cut) = (String::new(), false);
    'files: for file in &found.files {
        let path = workspace.display(&file.path);
        for line in &file.lines {
            let mark = if line.kind == FsSearchLineKind::Match { ':' } else { '-' };
            let more = if line.text_truncated { "…" } else { "" };
            let line = format!("{path}{mark}{}{mark}{}{more}\n", line.line_number, line.text);
            if text.len() + line.len() > room {
                cut = true;
                break 'files;
            }
            text += &line;
        }
    }
    let mut notes =
        vec![format!("{} matching lines in {} files", found.matches, found.files_matched)];
    if found.truncated {
        notes.push("there are more; narrow the search or raise max_matches".to_owned());
    }
    if cut {
        notes.push("the rest is left out here; narrow the search to a path or a glob".to_owned());
    }
    if let Some(error) = found.errors.first() {
        let count = found.errors.len();
        notes.push(format!(
            "{count} paths could not be read, such as {}",
            workspace.display(&error.path)
        ));
    }
    Ok(ToolResult::text(text).note(format!("[{}]", notes.join("; "))))
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct GlobArgs {
    patterns: Vec<String>,
    path: Option<String>,
    hidden: Option<bool>,
    max_results: Option<u32>,
}

pub(super) fn glob_schema() -> Value {
    object(
        &json!({
            "patterns": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Patterns relative to the path; * stops at a slash, ** does not.",
            },
            "path": {"type": "string", "description": "The directory; the workspace by default."},
            "hidden": {"type": "boolean", "description": "Find hidden files too."},
            "max_results": {"type": "integer", "description": "The most paths to return; 500 by default."},
        }),
        &["patterns"],
    )
}

pub(super) async fn glob(context: &Context, args: GlobArgs) -> Outcome {
    let workspace = &context.workspace;
    if !workspace.client.capabilities().fs_glob {
        return Err("this server cannot find files by pattern; run find instead".to_owned());
    }
    let root = workspace.resolve(args.path.as_deref().unwrap_or("."))?;
    let mut params = FsGlobParams::new(root, args.patterns);
    params.hidden = args.hidden == Some(true);
    params.max_results = Some(args.max_results.unwrap_or(DEFAULT_PATHS).clamp(1, MAX_RESULTS));
    let found = workspace.files().call::<call::FsGlob>(params).await;
    let found = found.map_err(|error| error.to_string())?;
    let room = result_bytes(workspace, None);
    let (mut text, mut shown) = (String::new(), 0);
    for entry in &found.entries {
        let slash = if entry.kind == FsEntryKind::Directory { "/" } else { "" };
        let line = format!("{}{slash}\n", workspace.display(&entry.path));
        if text.len() + line.len() > room {
            break;
        }
        text += &line;
        shown += 1;
    }
    let result = ToolResult::text(text);
    Ok(match found.truncated || shown < found.entries.len() {
        true => result.note(format!("[{shown} paths; there are more: narrow the patterns]")),
        false => result.note(format!("[{shown} paths]")),
    })
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct LsArgs {
    path: Option<String>,
    after: Option<String>,
}

pub(super) fn ls_schema() -> Value {
    object(
        &json!({
            "path": {"type": "string", "description": "The directory; the workspace by default."},
            "after": {"type": "string", "description": "Only names after this one, to read on."},
        }),
        &[],
    )
}

pub(super) async fn ls(context: &Context, args: LsArgs) -> Outcome {
    let workspace = &context.workspace;
    let path = workspace.resolve(args.path.as_deref().unwrap_or("."))?;
    let listed = workspace.files().read_directory(&path).await;
    let listed = listed.map_err(|error| error.to_string())?;
    let room = result_bytes(workspace, None);
    let after = args.after.unwrap_or_default();
    let rest = listed.entries.iter().filter(|entry| after.is_empty() || entry.file_name > after);
    let (mut text, mut last, mut cut) = (String::new(), None, false);
    for entry in rest {
        let slash = if entry.is_directory { "/" } else { "" };
        let line = format!("{}{slash}\n", entry.file_name);
        if text.len() + line.len() > room {
            cut = true;
            break;
        }
        text += &line;
        last = Some(&entry.file_name);
    }
    let result = ToolResult::text(text);
    Ok(match last.filter(|_| cut || listed.truncated) {
        Some(last) => result.note(format!("[there are more; read on with after {last}]")),
        None => result,
    })
}
