//! Paths on the wire: `file:` URIs that keep every byte of a Unix path.
//!
//! Invariant: a [`PathUri`] is absolute, contains no NUL, and is lexically normal (no empty, `.` or
//! `..` component, no trailing slash), whatever text it was parsed from. Different spellings of a path
//! compare equal, and later code never sees a peer's `..`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// An absolute, normalized path of the server's host, written as a `file:` URI.
///
/// A native absolute path (`/srv/app`) is accepted wherever a URI is. Bytes that are not UTF-8
/// travel percent-encoded and survive the round trip.
///
/// ```
/// use codex_exec_server_protocol::PathUri;
/// let path: PathUri = "file:///srv/a%20b/../c%FF".parse().unwrap();
/// assert_eq!(path.as_bytes(), b"/srv/c\xff");
/// assert_eq!(path.to_string(), "file:///srv/c%FF");
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathUri(Arc<[u8]>);

/// Maximum bytes of a path as text: far more than a kernel takes at once (4 KiB), each byte of it escaped.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// Why a string or a native path is not a usable path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathUriError {
    /// Neither an absolute path nor a URI.
    #[error("path `{0}` is relative; send a file: URI or an absolute path")]
    Relative(String),
    /// A URI of another scheme.
    #[error("path `{0}` is not a file: URI")]
    Scheme(String),
    /// `file://host/…` names a file of another machine.
    #[error("path `{0}` names a host; only files of this host can be reached")]
    Host(String),
    /// `?` and `#` have to be percent-encoded in a path.
    #[error("path `{0}` has a query or fragment; encode `?` as %3F and `#` as %23")]
    QueryOrFragment(String),
    /// Longer than any path that a kernel takes.
    #[error("a path has {0} bytes; at most {MAX_TEXT_BYTES} are allowed")]
    TooLong(usize),
    /// A NUL byte, which no Unix path can hold.
    #[error("path `{0}` contains a NUL byte")]
    Nul(String),
}

impl PathUri {
    /// Takes a native absolute path and normalizes it.
    pub fn from_native(path: impl AsRef<[u8]>) -> Result<Self, PathUriError> {
        let path = path.as_ref();
        let shown = || String::from_utf8_lossy(path).into_owned();
        if path.first() != Some(&b'/') {
            return Err(PathUriError::Relative(shown()));
        }
        if path.contains(&0) {
            return Err(PathUriError::Nul(shown()));
        }
        Ok(Self(normalize(path).into()))
    }

    /// The native path as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The native path.
    #[cfg(unix)]
    pub fn as_path(&self) -> &std::path::Path {
        use std::os::unix::ffi::OsStrExt;
        std::path::Path::new(std::ffi::OsStr::from_bytes(&self.0))
    }

    /// The last component, empty for the root.
    pub fn file_name(&self) -> &[u8] {
        match self.0.iter().rposition(|&b| b == b'/') {
            Some(slash) => &self.0[slash + 1..],
            None => &[],
        }
    }

    /// The length of the URI in bytes.
    pub fn encoded_len(&self) -> usize {
        7 + percent_encode(&self.0, ENCODED).map(str::len).sum::<usize>()
    }

    /// Appends a native relative path.
    pub fn join(&self, tail: impl AsRef<[u8]>) -> Result<Self, PathUriError> {
        let tail = tail.as_ref();
        let mut whole = Vec::with_capacity(self.0.len() + 1 + tail.len());
        whole.extend_from_slice(&self.0);
        whole.push(b'/');
        whole.extend_from_slice(tail);
        Self::from_native(whole)
    }
}

#[cfg(unix)]
impl TryFrom<&std::path::Path> for PathUri {
    type Error = PathUriError;

    fn try_from(path: &std::path::Path) -> Result<Self, Self::Error> {
        use std::os::unix::ffi::OsStrExt;
        Self::from_native(path.as_os_str().as_bytes())
    }
}

impl FromStr for PathUri {
    type Err = PathUriError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(PathUriError::TooLong(text.len()));
        }
        if text.starts_with('/') {
            return Self::from_native(text);
        }
        let own = || text.to_owned();
        let Some((scheme, rest)) = text.split_once(':').filter(|(scheme, _)| is_scheme(scheme))
        else {
            return Err(PathUriError::Relative(own()));
        };
        if !scheme.eq_ignore_ascii_case("file") {
            return Err(PathUriError::Scheme(own()));
        }
        let path = match rest.strip_prefix("//") {
            Some(rest) => {
                let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
                    return Err(PathUriError::Host(own()));
                }
                path
            }
            None => rest,
        };
        if path.contains(['?', '#']) {
            return Err(PathUriError::QueryOrFragment(own()));
        }
        // A `%` that starts no escape stands for itself, as in every URL parser.
        Self::from_native(percent_decode_str(path).collect::<Vec<u8>>()).map_err(
            |error| match error {
                PathUriError::Nul(_) => PathUriError::Nul(own()),
                _ => PathUriError::Relative(own()),
            },
        )
    }
}

impl fmt::Display for PathUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file://{}", percent_encode(&self.0, ENCODED))
    }
}

impl fmt::Debug for PathUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl Serialize for PathUri {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PathUri {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = PathUri;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a file: URI or an absolute path")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<PathUri, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// RFC 3986: a letter, then letters, digits, `+`, `-`, `.`.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// The ASCII bytes that are percent-encoded in a URI path.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'\\')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'}');

/// Removes empty and `.` components, and resolves `..` lexically.
fn normalize(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for component in path.split(|&b| b == b'/') {
        match component {
            b"" | b"." => {}
            b".." => {
                let parent = out.iter().rposition(|&b| b == b'/').unwrap_or(0);
                out.truncate(parent);
            }
            name => {
                out.push(b'/');
                out.extend_from_slice(name);
            }
        }
    }
    if out.is_empty() {
        out.push(b'/');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(text: &str) -> Vec<u8> {
        text.parse::<PathUri>().unwrap().as_bytes().to_vec()
    }

    #[test]
    fn spellings_of_one_path_are_equal() {
        for text in [
            "/a/b",
            "file:///a/b",
            "file:/a/b",
            "FILE:///a/b",
            "file://localhost/a/b",
            "file:///a//./x/../b/",
            "file:///a/%62",
            "file:///a/x/%2e%2e/b",
        ] {
            assert_eq!(bytes(text), b"/a/b", "{text}");
        }
        assert_eq!(bytes("file:///"), b"/");
        assert_eq!(bytes("/../.."), b"/");
        assert_eq!(bytes("file:///100%/%zz"), b"/100%/%zz");
    }

    #[test]
    fn nonlocal_paths_are_rejected() {
        for text in ["", "rel", "a/b", "./a", "~/a", "file:rel", "file:", "file://", "1x:/a"] {
            let error = text.parse::<PathUri>().unwrap_err();
            assert!(matches!(error, PathUriError::Relative(_)), "{text}: {error}");
        }
        for text in ["http://x/y", "c:/x", "vscode-remote:/x"] {
            let error = text.parse::<PathUri>().unwrap_err();
            assert!(matches!(error, PathUriError::Scheme(_)), "{text}: {error}");
        }
        assert!(matches!("file://host/x".parse::<PathUri>(), Err(PathUriError::Host(_))));
        assert!(matches!("file:///a%00b".parse::<PathUri>(), Err(PathUriError::Nul(_))));
        assert!(matches!("/a\0b".parse::<PathUri>(), Err(PathUriError::Nul(_))));
        assert!(matches!("file:///a?b".parse::<PathUri>(), Err(PathUriError::QueryOrFragment(_))));
    }

    #[test]
    fn long_texts_are_refused_before_they_are_decoded() {
        let of = |len: usize| format!("/{}", "a/".repeat(len))[..len].parse::<PathUri>();
        assert!(of(MAX_TEXT_BYTES).is_ok());
        assert_eq!(of(MAX_TEXT_BYTES + 1), Err(PathUriError::TooLong(MAX_TEXT_BYTES + 1)));
    }

    #[test]
    fn json_round_trip_keeps_bytes_that_are_not_text() {
        let path = PathUri::from_native(b"/t\xff/a b#?%").unwrap();
        let json = serde_json::to_string(&path).unwrap();
        assert_eq!(json, r#""file:///t%FF/a%20b%23%3F%25""#);
        assert_eq!(serde_json::from_str::<PathUri>(&json).unwrap(), path);
    }

    #[test]
    fn join_and_file_name() {
        let path = PathUri::from_native("/").unwrap().join("a/b").unwrap();
        assert_eq!(path.as_bytes(), b"/a/b");
        assert_eq!(path.file_name(), b"b");
        assert_eq!(PathUri::from_native("/").unwrap().file_name(), b"");
    }

    proptest! {
        #[test]
        fn native_paths_round_trip(tail in proptest::collection::vec(1u8..=255, 0..60)) {
            let mut native = vec![b'/'];
            native.extend(tail);
            let path = PathUri::from_native(&native).unwrap();
            let back: PathUri = path.to_string().parse().unwrap();
            prop_assert_eq!(&back, &path);
            prop_assert_eq!(path.encoded_len(), path.to_string().len());
            prop_assert_eq!(PathUri::from_native(path.as_bytes()).unwrap(), path);
        }

        #[test]
        fn any_text_parses_or_fails_without_panic(text in "\\PC{0,40}") {
            let _ = text.parse::<PathUri>();
        }
    }
}
