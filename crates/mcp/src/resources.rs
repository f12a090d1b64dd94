//! Files of the workspace as resources, under the same policy as the tools.

use codex_exec_client::PathUri;
use codex_exec_server_protocol::call;
use codex_exec_server_protocol::files::FsGlobParams;
use serde_json::{Map, Value, json};

use crate::content::{image_type, text_of};
use crate::message::{INTERNAL_ERROR, INVALID_PARAMS, RESOURCE_NOT_FOUND};
use crate::session::Failure;
use crate::workspace::Workspace;

/// Files on one page of `resources/list`.
const PAGE: usize = 100;
/// Files that are listed in all.
const MAX_LISTED: u32 = 5_000;

/// `resources/list`: the files of the workspace, by pages.
pub(crate) async fn list(
    workspace: &Workspace,
    params: &Map<String, Value>,
) -> Result<Value, Failure> {
    let start = match params.get("cursor") {
        None | Some(Value::Null) => 0,
        Some(cursor) => cursor
            .as_str()
            .and_then(|cursor| cursor.parse::<usize>().ok())
            .ok_or_else(|| Failure::new(INVALID_PARAMS, "invalid cursor"))?,
    };
    if !workspace.client.capabilities().fs_glob {
        return Ok(json!({"resources": []}));
    }
    let mut glob = FsGlobParams::new(workspace.cwd.clone(), ["**/*"]);
    glob.max_results = Some(MAX_LISTED);
    let found = workspace.files().call::<call::FsGlob>(glob).await;
    let found = found.map_err(|error| Failure::new(INTERNAL_ERROR, error.to_string()))?;
    let page: Vec<Value> = found
        .entries
        .iter()
        .skip(start)
        .take(PAGE)
        .map(|entry| json!({"uri": entry.path, "name": workspace.display(&entry.path)}))
        .collect();
    let next = start.saturating_add(PAGE);
    let mut result = json!({"resources": page});
    if next < found.entries.len() {
        result["nextCursor"] = json!(next.to_string());
    }
    Ok(result)
}

/// `resources/templates/list`: any file, by its path.
pub(crate) fn templates(workspace: &Workspace) -> Value {
    json!({"resourceTemplates": [{
        "uriTemplate": "file://{+path}",
        "name": "file",
        "title": "A file",
        "description": format!("A file by its absolute path; the workspace is {}.", workspace.cwd),
    }]})
}

/// `resources/read`: a file as text or, if it is not text, as base64.
pub(crate) async fn read(
    workspace: &Workspace,
    params: &Map<String, Value>,
) -> Result<Value, Failure> {
    let Some(uri) = params.get("uri").and_then(Value::as_str) else {
        return Err(Failure::new(INVALID_PARAMS, "`uri` has to be a string"));
    };
    let path: PathUri = match uri.starts_with("file:").then(|| uri.parse()) {
        Some(Ok(path)) => path,
        Some(Err(error)) => return Err(Failure::new(INVALID_PARAMS, error.to_string())),
        None => return Err(Failure::new(INVALID_PARAMS, "resources are files: file:///PATH")),
    };
    let files = workspace.files();
    let failed = |error: codex_exec_client::ExecServerError| {
        let code = if error.is_not_found() { RESOURCE_NOT_FOUND } else { INTERNAL_ERROR };
        Failure::new(code, error.to_string())
    };
    let metadata = files.metadata(&path).await.map_err(failed)?;
    let limit = workspace.config.max_image_bytes;
    if metadata.size > limit {
        let message = format!(
            "the file has {} bytes, and at most {limit} are returned; read a range with the tool read_file",
            metadata.size
        );
        return Err(Failure::new(INVALID_PARAMS, message));
    }
    let bytes = files.read_file(&path).await.map_err(failed)?;
    let content =
        match (image_type(&bytes), text_of(&bytes).filter(|text| text.len() == bytes.len())) {
            (None, Some(text)) => json!({"uri": uri, "mimeType": "text/plain", "text": text}),
            (image, _) => {
                let mime_type = image.unwrap_or("application/octet-stream");
                let blob = base64_simd::STANDARD.encode_to_string(&bytes);
                json!({"uri": uri, "mimeType": mime_type, "blob": blob})
            }
        };
    Ok(json!({"contents": [content]}))
}
