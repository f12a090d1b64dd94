//! Encoding of the filesystem messages: file contents go directly into the message.

use super::*;
use crate::SandboxContext;
use crate::encode::{Encode, base64_member, json, member};

impl Encode for FsReadFileResponse {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        base64_member("dataBase64", &self.data, out);
        out.push(b'}');
    }

    fn size_hint(&self) -> usize {
        32 + self.data.encoded_len()
    }
}

impl Encode for FsReadBlockResponse {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        base64_member("chunk", &self.chunk, out);
        out.extend_from_slice(if self.eof { b",\"eof\":true}" } else { b",\"eof\":false}" });
    }

    fn size_hint(&self) -> usize {
        32 + self.chunk.encoded_len()
    }
}

impl Encode for FsWriteFileParams {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        member("path", out);
        json(&self.path, out);
        out.push(b',');
        base64_member("dataBase64", &self.data, out);
        if !self.follow_symlinks {
            out.extend_from_slice(b",\"followSymlinks\":false");
        }
        if self.atomic {
            out.extend_from_slice(b",\"atomic\":true");
        }
        if let Some(mode) = self.mode {
            out.extend_from_slice(b",\"mode\":");
            json(&mode, out);
        }
        sandbox_member(self.sandbox.as_ref(), out);
        out.push(b'}');
    }

    fn size_hint(&self) -> usize {
        128 + self.path.encoded_len() + self.data.encoded_len()
    }
}

impl Encode for FsWriteBlockParams {
    fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        member("handleId", out);
        json(&self.handle_id, out);
        out.push(b',');
        member("offset", out);
        json(&self.offset, out);
        out.push(b',');
        base64_member("chunk", &self.chunk, out);
        sandbox_member(self.sandbox.as_ref(), out);
        out.push(b'}');
    }

    fn size_hint(&self) -> usize {
        96 + self.handle_id.len() + self.chunk.encoded_len()
    }
}

fn sandbox_member(sandbox: Option<&SandboxContext>, out: &mut Vec<u8>) {
    if let Some(sandbox) = sandbox {
        out.push(b',');
        member("sandbox", out);
        json(sandbox, out);
    }
}

impl Encode for FsReadDirectoryResponse {
    fn size_hint(&self) -> usize {
        let uri = |entry: &FsReadDirectoryEntry| {
            entry.file_name_uri.as_ref().map_or(0, |path| 24 + path.encoded_len())
        };
        let entries = self.entries.iter().map(|entry| 64 + entry.file_name.len() + uri(entry));
        let dead_links = self.dead_links.iter().map(|name| 8 + name.len());
        64 + entries.chain(dead_links).sum::<usize>()
    }
}

impl Encode for FsWalkResponse {
    fn size_hint(&self) -> usize {
        64 + 128 * (self.entries.len() + self.errors.len())
    }
}

impl Encode for FsGlobResponse {
    fn size_hint(&self) -> usize {
        64 + 128 * (self.entries.len() + self.errors.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathUri;
    use proptest::prelude::*;

    fn same<T: Encode>(value: &T) {
        let mut direct = Vec::new();
        value.encode_into(&mut direct);
        let serde = serde_json::to_string(value).unwrap();
        assert_eq!(String::from_utf8(direct).unwrap(), serde);
        assert!(serde.len() <= value.size_hint() + 2048, "{} > {}", serde.len(), value.size_hint());
    }

    proptest! {
        #[test]
        fn manual_encoding_matches_serde(
            id in "\\PC{0,8}",
            bytes: Vec<u8>,
            offset: u64,
            follow_symlinks: bool,
            atomic: bool,
            mode in proptest::option::of(0u32..0o10000),
        ) {
            let data = crate::Base64Bytes::from(bytes);
            let path = PathUri::from_native(format!("/{id}\0").replace('\0', "")).unwrap();
            same(&FsReadFileResponse { data: data.clone() });
            same(&FsReadBlockResponse { chunk: data.clone(), eof: atomic });
            let sandbox = atomic.then(|| {
                let text = r#"{"type":"workspace-write"}"#;
                serde_json::from_str::<SandboxContext>(text).unwrap()
            });
            let write = FsWriteBlockParams::new(id, offset, data.clone());
            same(&FsWriteBlockParams { sandbox: sandbox.clone(), ..write });
            same(&FsWriteFileParams { path, data, follow_symlinks, atomic, mode, sandbox });
        }
    }
}
