//! The first line of a client, read as leniently as any server may, and a whole head, read strictly.
//!
//! Servers differ in what they take for a request line: Python's splits it at every blank of Latin-1 and takes
//! any method, Node's takes `RTSP/1.0` and lines without a version. [`is_request`] is true for all of these, and
//! for some lines of other protocols; what it is true for has to be a strict head, or is refused.

use crate::host::Host;

const MAX_HEADERS: usize = 256;

/// What comes first over HTTP/2 with prior knowledge, which names its hosts in frames.
const HTTP2: &[u8] = b"PRI * HTTP/2.0";

/// A blank of Latin-1, as Python's `str.split` knows them.
fn is_blank(byte: u8) -> bool {
    matches!(byte, 9..=13 | 28..=32 | 0x85 | 0xa0)
}

/// What a method consists of.
pub(super) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Whether some server may take this line for the beginning of a request, or for a header of the PROXY
/// protocol, behind which anything may follow.
fn is_request(line: &[u8]) -> bool {
    if line.strip_suffix(b"\r").unwrap_or(line) == HTTP2 {
        return false;
    }
    let mut words = line.split(|byte| is_blank(*byte)).filter(|word| !word.is_empty());
    let Some(first) = words.next() else { return false };
    // Blanks of Unicode may be in a single word.
    let Some(second) = words.next() else { return names_http(first) };
    let last = words.next_back().unwrap_or(second);
    let is_method = first.iter().all(|byte| byte.is_ascii_uppercase() || *byte == b'-');
    // HTTP/0.9 has no version to go by, and no method but GET; some servers take others.
    matches!(first, b"GET" | b"PROXY")
        || first == b"CONNECT" && is_authority(second)
        || is_method && is_target(second)
        || names_http(last)
        || is_version(last)
}

/// Whether a word can be what a request is for.
fn is_target(word: &[u8]) -> bool {
    matches!(word, [b'/' | b'*', ..]) || word.windows(3).any(|part| part == b"://")
}

/// Whether a word can be a host and a port. Clients of NATS begin with `CONNECT {…}`.
fn is_authority(word: &[u8]) -> bool {
    !word.iter().any(|byte| b"{}\"<>\\".contains(byte))
}

fn names_http(word: &[u8]) -> bool {
    word.windows(5).any(|part| part.eq_ignore_ascii_case(b"http/"))
}

/// Whether a word is a name, a slash and a digit, such as `RTSP/1.0`.
fn is_version(word: &[u8]) -> bool {
    let letters = word.iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
    matches!(word[letters..], [b'/', b'0'..=b'9', ..]) && letters > 0
}

/// The first line of a client that is not blank, until it has ended.
#[derive(Debug)]
pub(super) struct FirstLine {
    text: Vec<u8>,
    limit: usize,
}

/// What the first line turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// A request to some server.
    Request,
    /// Nothing that an HTTP server takes.
    Other,
    /// Longer than a line may be.
    TooLong,
}

impl FirstLine {
    pub(super) fn new(limit: usize) -> Self {
        Self { text: Vec::new(), limit }
    }

    /// Takes the next bytes. `None`: the line goes on. A carriage return may end it, too.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Option<Ended> {
        for &byte in bytes {
            if self.text.is_empty() && is_blank(byte) {
                continue;
            }
            if matches!(byte, b'\r' | b'\n') && is_request(&self.text) {
                return Some(Ended::Request);
            }
            if byte == b'\n' {
                return Some(Ended::Other);
            }
            if self.text.len() == self.limit {
                return Some(Ended::TooLong);
            }
            self.text.push(byte);
        }
        None
    }

    /// Whether the line is a request if the client sends no more.
    pub(super) fn is_request(&self) -> bool {
        is_request(&self.text)
    }
}

/// The host of a request. `None`: it is not well-formed, or names several.
pub(super) fn named_by_head(held: &[u8]) -> Option<Option<Host>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let parsed = request.parse(held);
    if !matches!(parsed, Ok(httparse::Status::Complete(_))) {
        return None;
    }
    let mut hosts =
        request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    let header = hosts.next().map(|header| std::str::from_utf8(header.value)).transpose().ok()?;
    if hosts.next().is_some() {
        return None;
    }
    let header = header.map(str::trim).filter(|value| !value.is_empty());
    let header = header.map(authority_host).transpose().ok()?;
    let path = request.path?;
    let authority = match path.split_once("://") {
        Some((_, rest)) if !path.starts_with('/') => rest.split(['/', '?', '#']).next(),
        _ if request.method == Some("CONNECT") => Some(path),
        _ => None,
    };
    let line = authority
        .map(|text| authority_host(text.rsplit_once('@').map_or(text, |(_, place)| place)))
        .transpose()
        .ok()?;
    match (line, header) {
        (Some(line), Some(header)) if line != header => None,
        (line, header) => Some(line.or(header)),
    }
}

fn authority_host(text: &str) -> Result<Host, crate::host::InvalidHost> {
    if text.contains('@') { Err(crate::host::InvalidHost) } else { Host::parse(text) }
}
