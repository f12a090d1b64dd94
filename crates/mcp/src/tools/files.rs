//! Files: read_file, write_file, edit.

use bytes::{Bytes, BytesMut};
use codex_exec_client::{Files, Patch, PathUri};
use codex_exec_server_protocol::call;
use codex_exec_server_protocol::files::{
    FsCloseParams, FsOpenMode, FsOpenParams, FsReadBlockParams,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Context, Outcome, object, result_bytes};
use crate::content::{ToolResult, image_type, text_of};
use crate::workspace::Workspace;

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ReadFileArgs {
    path: String,
    start_line: Option<u64>,
    lines: Option<u64>,
    offset: Option<u64>,
    length: Option<u64>,
    max_bytes: Option<u64>,
}

pub(super) fn read_file_schema() -> Value {
    object(
        &json!({
            "path": {"type": "string", "description": "The file, relative to the workspace or absolute."},
            "start_line": {"type": "integer", "description": "The first line to return, counted from 1."},
            "lines": {"type": "integer", "description": "How many lines to return."},
            "offset": {"type": "integer", "description": "The first byte to return, instead of a line."},
            "length": {"type": "integer", "description": "How many bytes to return, with offset."},
            "max_bytes": {"type": "integer", "description": "The most to return."},
        }),
        &["path"],
    )
}

pub(super) async fn read_file(context: &Context, args: ReadFileArgs) -> Outcome {
    let workspace = &context.workspace;
    let path = workspace.resolve(&args.path)?;
    let max = result_bytes(workspace, args.max_bytes);
    let files = workspace.files();
    let metadata = files.metadata(&path).await.map_err(|error| error.to_string())?;
    if metadata.is_directory {
        return Err(format!(
            "{} is a directory; list it with the tool ls",
            workspace.display(&path)
        ));
    }
    let by_bytes = args.offset.is_some() || args.length.is_some();
    if by_bytes && (args.start_line.is_some() || args.lines.is_some()) {
        return Err("give either lines (start_line, lines) or bytes (offset, length)".to_owned());
    }
    if by_bytes {
        let offset = args.offset.unwrap_or(0);
        let wanted = args.length.unwrap_or(u64::MAX).min(max as u64);
        let bytes = read_range(workspace, &path, offset, wanted).await?;
        return Ok(byte_range(&bytes, offset, metadata.size));
    }
    if args.start_line.is_none() && args.lines.is_none() {
        let head = read_range(workspace, &path, 0, 16).await?;
        if let Some(mime_type) = image_type(&head) {
            let limit = workspace.config.max_image_bytes;
            if metadata.size > limit {
                return Err(format!(
                    "the image has {} bytes, and at most {limit} are returned; make a smaller copy \
                     with a command",
                    metadata.size
                ));
            }
            let image = files.read_file(&path).await.map_err(|error| error.to_string())?;
            return Ok(ToolResult::image(&image, mime_type));
        }
    }
    let start = args.start_line.unwrap_or(1).max(1);
    lines(&files, &path, start, args.lines.unwrap_or(u64::MAX), max).await
}

/// A range of bytes: text if it is text, base64 otherwise.
fn byte_range(bytes: &Bytes, offset: u64, size: u64) -> ToolResult {
    let (result, used) = match text_of(bytes) {
        Some(text) if !text.is_empty() || bytes.is_empty() => {
            let used = text.len() as u64;
            (ToolResult::text(text), used)
        }
        _ => {
            let text = base64_simd::STANDARD.encode_to_string(bytes);
            (
                ToolResult::text(text).note("[not text: these bytes are in base64]"),
                bytes.len() as u64,
            )
        }
    };
    let next = offset.saturating_add(used);
    match next < size && used > 0 {
        true => result.note(format!("[{size} bytes in all; read on with offset {next}]")),
        false => result,
    }
}

/// Lines from `start` on, as many as fit.
async fn lines(files: &Files, path: &PathUri, start: u64, count: u64, max: usize) -> Outcome {
    let mut reader = files.open(path).await.map_err(|error| error.to_string())?;
    let (mut number, mut text, mut taken) = (1, BytesMut::new(), 0);
    let mut at = 0_u64;
    // The offset of the first byte that is returned.
    let mut first = None;
    let mut rest = Bytes::new();
    let end = loop {
        if rest.is_empty() {
            match reader.next_block().await.map_err(|error| error.to_string())? {
                Some(block) => rest = block,
                None => break End::OfFile,
            }
            continue;
        }
        if number >= start && taken >= count {
            break End::OfCount;
        }
        let line_end = rest.iter().position(|&byte| byte == b'\n');
        let piece = rest.split_to(line_end.map_or(rest.len(), |end| end + 1));
        at += piece.len() as u64;
        if number >= start {
            first.get_or_insert(at - piece.len() as u64);
            if text.len() + piece.len() > max {
                if taken == 0 {
                    let room = max - text.len();
                    text.extend_from_slice(&piece[..room]);
                    break End::InLine;
                }
                text.truncate(last_line_end(&text));
                break End::OfRoom;
            }
            text.extend_from_slice(&piece);
        }
        if line_end.is_some() {
            taken += u64::from(number >= start);
            number += 1;
        }
    };
    let first = first.unwrap_or(at);
    let bytes = text.freeze();
    let Some(shown) = text_of(&bytes) else {
        return Err(format!(
            "the file is not text; read it as bytes with offset {first} and length"
        ));
    };
    let next_line = start + taken;
    let result = ToolResult::text(shown.clone());
    Ok(match end {
        End::OfFile if start > 1 && bytes.is_empty() => {
            result.note(format!("[the file ends before line {start}]"))
        }
        End::OfFile => result,
        End::OfCount => {
            result.note(format!("[the file goes on; read on with start_line {next_line}]"))
        }
        End::OfRoom => result.note(format!(
            "[cut after line {}; read on with start_line {next_line}]",
            next_line - 1
        )),
        End::InLine => result.note(format!(
            "[line {start} is longer than that; read on with offset {}]",
            first + shown.len() as u64
        )),
    })
}

/// Why reading lines ended.
enum End {
    OfFile,
    OfCount,
    OfRoom,
    InLine,
}

fn last_line_end(text: &[u8]) -> usize {
    text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1)
}

/// Bytes at an offset; fewer at the end of the file.
pub(crate) async fn read_range(
    workspace: &Workspace,
    path: &PathUri,
    offset: u64,
    len: u64,
) -> Result<Bytes, String> {
    let client = &workspace.client;
    let files = workspace.files();
    if workspace.sandbox().is_some() && !client.capabilities().sandboxed_file_streaming {
        let whole = files.read_file(path).await.map_err(|error| error.to_string())?;
        let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(whole.len());
        return Ok(whole.slice(at(offset)..at(offset.saturating_add(len))));
    }
    let id = client.fresh_id();
    let open = FsOpenParams::new(&id, path.clone(), FsOpenMode::Read);
    files.call::<call::FsOpen>(open).await.map_err(|error| error.to_string())?;
    let mut out = BytesMut::new();
    let result = loop {
        let left = len - out.len() as u64;
        if left == 0 {
            break Ok(());
        }
        let block = FsReadBlockParams::new(&id, offset + out.len() as u64, left.min(256 << 10));
        match files.call::<call::FsReadBlock>(block).await {
            Ok(block) => {
                out.extend_from_slice(&block.chunk);
                if block.eof {
                    break Ok(());
                }
            }
            Err(error) => break Err(error.to_string()),
        }
    };
    let _ = files.call::<call::FsClose>(FsCloseParams::new(&id)).await;
    result.map(|()| out.freeze())
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct WriteFileArgs {
    path: String,
    content: String,
    base64: Option<bool>,
}

pub(super) fn write_file_schema() -> Value {
    object(
        &json!({
            "path": {"type": "string", "description": "The file, relative to the workspace or absolute."},
            "content": {"type": "string", "description": "The whole content of the file."},
            "base64": {"type": "boolean", "description": "The content is base64 of the bytes to write."},
        }),
        &["path", "content"],
    )
}

pub(super) async fn write_file(context: &Context, args: WriteFileArgs) -> Outcome {
    let workspace = &context.workspace;
    let path = workspace.resolve(&args.path)?;
    let content = match args.base64 {
        Some(true) => base64_simd::STANDARD
            .decode_to_vec(args.content)
            .map_err(|_| "content is not base64 (standard alphabet, padded)".to_owned())?,
        _ => args.content.into_bytes(),
    };
    let files = workspace.files();
    let parent = path.join("..").map_err(|error| error.to_string())?;
    match files.exists(&parent).await {
        Ok(true) => {}
        _ => files.create_directory(&parent).await.map_err(|error| error.to_string())?,
    }
    let len = content.len();
    files.write_file(&path, content).await.map_err(|error| error.to_string())?;
    Ok(ToolResult::text(format!("wrote {len} bytes to {}", workspace.display(&path))))
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct EditArgs {
    patch: String,
    cwd: Option<String>,
}

pub(super) fn edit_schema() -> Value {
    object(
        &json!({
            "patch": {
                "type": "string",
                "description": "The patch, from *** Begin Patch to *** End Patch.",
            },
            "cwd": {
                "type": "string",
                "description": "The directory that paths in the patch start from; the workspace by default.",
            },
        }),
        &["patch"],
    )
}

pub(super) async fn edit(context: &Context, args: EditArgs) -> Outcome {
    let workspace = &context.workspace;
    let cwd = workspace.resolve(args.cwd.as_deref().unwrap_or("."))?;
    let patch = Patch::parse(&args.patch).map_err(|error| error.to_string())?;
    let report = workspace.files().apply_patch(&patch, &cwd).await;
    report.map(|report| ToolResult::text(report.to_string())).map_err(|error| error.to_string())
}
