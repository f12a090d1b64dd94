//! HTTP requests from the machine that the commands run on. Offered only if the policy leaves the network open.

use std::collections::BTreeMap;

use bytes::BytesMut;
use codex_exec_server_protocol::http::{HttpHeader, HttpRedirectPolicy, HttpRequestParams};
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Context, Outcome, object, result_bytes};
use crate::content::{ToolResult, image_type, text_of};

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct FetchArgs {
    url: String,
    method: Option<String>,
    headers: Option<BTreeMap<String, String>>,
    body: Option<String>,
    max_bytes: Option<u64>,
}

pub(super) fn fetch_schema() -> Value {
    object(
        &json!({
            "url": {"type": "string", "description": "The URL, http or https."},
            "method": {"type": "string", "description": "The HTTP method; GET by default."},
            "headers": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Headers to send.",
            },
            "body": {"type": "string", "description": "The body to send."},
            "max_bytes": {"type": "integer", "description": "The most of the body to return."},
        }),
        &["url"],
    )
}

pub(super) async fn fetch(context: &Context, args: FetchArgs) -> Outcome {
    let workspace = &context.workspace;
    let headers = args.headers.unwrap_or_default().into_iter();
    let headers =
        headers.map(|(name, value)| HttpHeader { name, value, value_env_var: None }).collect();
    let timeout = workspace.config.max_wait.as_millis();
    let params = HttpRequestParams {
        method: args.method.unwrap_or_else(|| "GET".to_owned()),
        url: args.url,
        headers,
        body: args.body.map(|body| body.into_bytes().into()),
        timeout_ms: Some(u64::try_from(timeout).unwrap_or(u64::MAX)),
        redirect_policy: HttpRedirectPolicy::Follow,
        request_id: String::new(),
        stream_response: true,
    };
    let (head, mut stream) =
        workspace.client.http_stream(params).await.map_err(|error| error.to_string())?;
    let content_type =
        head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-type"));
    let content_type = content_type.map_or("", |header| header.value.as_str()).to_owned();
    let is_image = content_type.starts_with("image/");
    let max = match is_image {
        true => usize::try_from(workspace.config.max_image_bytes).unwrap_or(usize::MAX),
        false => result_bytes(workspace, args.max_bytes),
    };
    let (mut body, mut cut) = (BytesMut::new(), false);
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|error| error.to_string())?;
        let room = max - body.len();
        body.extend_from_slice(&piece[..piece.len().min(room)]);
        if piece.len() > room {
            cut = true;
            break;
        }
    }
    let body = body.freeze();
    let status = format!("[status {}; {content_type}]", head.status);
    let result = match (image_type(&body).filter(|_| !cut), text_of(&body)) {
        (Some(mime_type), _) => ToolResult::image(&body, mime_type),
        (None, Some(text)) => ToolResult::text(text),
        (None, None) => ToolResult::text(format!("{} bytes that are not text", body.len())),
    };
    let result = result.note(status);
    Ok(match cut {
        true => result
            .note(format!("[cut after {max} bytes; raise max_bytes, or save it with a command]")),
        false => result,
    })
}
