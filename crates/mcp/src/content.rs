//! Results of tools: text, images, and whether the call failed.

use bytes::Bytes;
use serde_json::{Value, json};

/// The result of a tool call.
#[derive(Debug)]
pub(crate) struct ToolResult {
    content: Vec<Value>,
    structured: Option<Value>,
    failed: bool,
}

impl ToolResult {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self { content: vec![text_block(&text.into())], structured: None, failed: false }
    }

    pub(crate) fn image(bytes: &[u8], mime_type: &str) -> Self {
        let data = base64_simd::STANDARD.encode_to_string(bytes);
        let block = json!({"type": "image", "data": data, "mimeType": mime_type});
        Self { content: vec![block], structured: None, failed: false }
    }

    /// The failure of a tool: the model sees it, and can do something about it.
    pub(crate) fn failure(message: impl Into<String>) -> Self {
        Self { failed: true, ..Self::text(message) }
    }

    /// Adds a block of text, so that the text before it stays as it is.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.content.push(text_block(&note.into()));
        self
    }

    pub(crate) fn structured(mut self, value: Value) -> Self {
        self.structured = Some(value);
        self
    }

    pub(crate) fn into_json(self) -> Value {
        let mut result = json!({"content": self.content, "isError": self.failed});
        if let Some(structured) = self.structured {
            result["structuredContent"] = structured;
        }
        result
    }
}

fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// The MIME type of an image that clients can show, by its first bytes.
pub(crate) fn image_type(head: &[u8]) -> Option<&'static str> {
    match head {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        _ => None,
    }
}

/// The text in these bytes, without a character that the end cuts; `None` if they are not text.
pub(crate) fn text_of(bytes: &Bytes) -> Option<String> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text.to_owned()).filter(|text| !text.contains('\0')),
        Err(error) if error.error_len().is_none() => {
            let text = String::from_utf8_lossy(&bytes[..error.valid_up_to()]).into_owned();
            Some(text).filter(|text| !text.contains('\0'))
        }
        Err(_) => None,
    }
}
