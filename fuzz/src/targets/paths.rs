//! Paths on the wire. The second parser is that of the URL standard, for texts on which both agree what they are.

use codex_exec_server_protocol::PathUri;

use super::kind_of;

/// A path is absolute, normal and without NUL, however it was written, and is written in one way.
pub(super) fn check(bytes: &[u8]) -> u64 {
    if let Ok(native) = PathUri::from_native(bytes) {
        check_path(&native);
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return 0 };
    let path = match text.parse::<PathUri>() {
        Ok(path) => path,
        Err(error) => return kind_of(error),
    };
    check_path(&path);
    let same_to_both = |byte: u8| byte.is_ascii_alphanumeric() || b"%._~-/".contains(&byte);
    if let Some(rest) = text.strip_prefix("file:///")
        && rest.bytes().all(same_to_both)
        && !rest.to_ascii_lowercase().contains("%2f")
        && !rest.contains("//")
        && !rest.starts_with('/')
        && let Ok(Ok(other)) = url::Url::parse(text).map(|url| url.to_file_path())
    {
        let other = PathUri::from_native(other.as_os_str().as_encoded_bytes());
        assert_eq!(Ok(&path), other.as_ref(), "the URL standard reads another path");
        return 2;
    }
    1
}

fn check_path(path: &PathUri) {
    let bytes = path.as_bytes();
    assert!(bytes.starts_with(b"/") && !bytes.contains(&0), "{path}");
    let parts = bytes[1..].split(|byte| *byte == b'/');
    let odd = parts.filter(|part| matches!(*part, b"" | b"." | b".."));
    assert!(bytes == b"/" || odd.count() == 0, "{path} is not normal");
    let text = path.to_string();
    assert_eq!(text.len(), path.encoded_len(), "{path}");
    // A path may be longer as text than a text may be.
    if let Ok(again) = text.parse::<PathUri>() {
        assert_eq!(again, *path);
    }
    assert_eq!(PathUri::from_native(bytes).as_ref(), Ok(path));
}
