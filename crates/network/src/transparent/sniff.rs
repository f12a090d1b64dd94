//! The first bytes of a client: which host they name, if they are TLS or HTTP/1.
//!
//! ```text
//!            0x16 0x03                                        whole hello
//!  Start ───────────────▶ Tls ─────────────────────────────────────────────▶ Named, Invalid
//!    │  a method and a blank            " HTTP/1.x"        whole head
//!    ├───────────────────▶ Line ───────────────────▶ Head ─────────────────▶ Named, Invalid
//!    └── anything else ─▶ Opaque ◀── another line ──┘
//! ```
//!
//! Invariant: the outcome depends on the bytes alone, not on the pieces they come in; what begins as TLS
//! or HTTP/1 and is not well-formed is [`Sniffed::Invalid`], never opaque.

use crate::host::Host;

/// The longest handshake message of a client that is read.
const MAX_HELLO: usize = 32 * 1024;
/// The longest record of TLS, with what encryption may add.
const MAX_RECORD: usize = (1 << 14) + 256;
const MAX_HEADERS: usize = 256;

/// What the bytes say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sniffed {
    /// Neither TLS nor HTTP/1.
    Opaque,
    /// TLS or HTTP/1 for this host, or for none in particular.
    Named(Option<Host>),
    /// TLS or HTTP/1, and not well-formed or too long.
    Invalid,
}

/// Collects the first bytes of a client until it is known what they are.
#[derive(Debug)]
pub(super) struct Sniffer {
    held: Vec<u8>,
    limit: usize,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Start,
    /// Text; `scanned` bytes of it are without an end of line.
    Line {
        scanned: usize,
    },
    /// `scanned` bytes are without an empty line.
    Head {
        scanned: usize,
    },
    /// The next record begins at `next`; `handshake` is what the former ones carried.
    Tls {
        next: usize,
        handshake: Vec<u8>,
    },
}

impl Sniffer {
    /// Reads at most `limit` bytes of an HTTP/1 head.
    pub(super) fn new(limit: usize) -> Self {
        Self { held: Vec::new(), limit, phase: Phase::Start }
    }

    /// The bytes so far.
    pub(super) fn held(&self) -> &[u8] {
        &self.held
    }

    /// Takes the next bytes. `None`: more are needed.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Option<Sniffed> {
        self.held.extend(bytes);
        loop {
            let step = match &mut self.phase {
                Phase::Start => start(&self.held),
                Phase::Line { scanned } => line(&self.held, scanned),
                Phase::Head { scanned } => head(&self.held, scanned),
                Phase::Tls { next, handshake } => tls(&self.held, next, handshake),
            };
            match step {
                Step::Done(sniffed) => return Some(sniffed),
                Step::Next(phase) => self.phase = phase,
                // Records are short, but may carry a byte each.
                Step::More if self.held.len() > self.limit.max(2 * MAX_HELLO) => {
                    return Some(Sniffed::Invalid);
                }
                Step::More if matches!(self.phase, Phase::Line { .. } | Phase::Head { .. }) => {
                    return (self.held.len() > self.limit).then_some(Sniffed::Invalid);
                }
                Step::More => return None,
            }
        }
    }

    /// The client sends no more.
    pub(super) fn finish(&self) -> Sniffed {
        match &self.phase {
            Phase::Start => Sniffed::Opaque,
            Phase::Line { .. } if !is_http(&self.held) => Sniffed::Opaque,
            Phase::Line { .. } | Phase::Head { .. } | Phase::Tls { .. } => Sniffed::Invalid,
        }
    }
}

enum Step {
    More,
    Next(Phase),
    Done(Sniffed),
}

fn start(held: &[u8]) -> Step {
    match held {
        [] | [0x16] => Step::More,
        [0x16, 3, ..] => Step::Next(Phase::Tls { next: 0, handshake: Vec::new() }),
        [0x16, ..] => Step::Done(Sniffed::Opaque),
        _ => Step::Next(Phase::Line { scanned: 0 }),
    }
}

/// What a method consists of.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Reads to the end of the first line. Empty lines before it are skipped, as servers do.
fn line(held: &[u8], scanned: &mut usize) -> Step {
    let begin = held.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(held.len());
    let text = &held[begin..];
    let method = text.iter().position(|byte| !is_token(*byte)).unwrap_or(text.len());
    match text.get(method) {
        None => return Step::More,
        Some(b' ' | b'\t') if method > 0 => {}
        Some(_) => return Step::Done(Sniffed::Opaque),
    }
    let from = begin.max(*scanned);
    for (at, byte) in held.iter().enumerate().skip(from) {
        match byte {
            b'\n' if is_http(&held[begin..at]) => return Step::Next(Phase::Head { scanned: at }),
            b'\n' => return Step::Done(Sniffed::Opaque),
            b'\t' | b'\r' => {}
            // No text, and no request that a server takes.
            0..=31 | 127 => return Step::Done(Sniffed::Opaque),
            _ => {}
        }
    }
    *scanned = held.len();
    Step::More
}

/// Whether a line ends like a request line of HTTP/1 or older.
fn is_http(line: &[u8]) -> bool {
    let last = line.split(u8::is_ascii_whitespace).rfind(|word| !word.is_empty());
    let version = last.unwrap_or_default();
    let is_http = version.len() > 5 && version[..5].eq_ignore_ascii_case(b"http/");
    // HTTP/2 with prior knowledge names its hosts in frames.
    is_http && line != b"PRI * HTTP/2.0\r" && line != b"PRI * HTTP/2.0"
}

fn head(held: &[u8], scanned: &mut usize) -> Step {
    let rest = &held[*scanned..];
    let ends = |window: &[u8]| window.starts_with(b"\n\n") || window == b"\n\r\n";
    let is_whole = rest.windows(3).any(ends) || rest.ends_with(b"\n\n");
    if !is_whole {
        *scanned = held.len().saturating_sub(2).max(*scanned);
        return Step::More;
    }
    Step::Done(named_by_head(held).map_or(Sniffed::Invalid, Sniffed::Named))
}

/// The host of a request. `None`: it is not well-formed, or names several.
fn named_by_head(held: &[u8]) -> Option<Option<Host>> {
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

/// Collects the client's hello out of its records.
fn tls(held: &[u8], next: &mut usize, handshake: &mut Vec<u8>) -> Step {
    loop {
        let invalid = Step::Done(Sniffed::Invalid);
        let Some(&[kind, major, _, high, low]) = held[*next..].first_chunk() else {
            return Step::More;
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if kind != 0x16 || major != 3 || length == 0 || length > MAX_RECORD {
            return invalid;
        }
        let Some(content) = held.get(*next + 5..*next + 5 + length) else { return Step::More };
        handshake.extend(content);
        *next += 5 + length;
        let Some(&[kind, a, b, c]) = handshake.first_chunk() else { continue };
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        if kind != 1 || length > MAX_HELLO {
            return invalid;
        }
        if let Some(hello) = handshake.get(4..4 + length) {
            let named = named_by_hello(&mut Reader(hello));
            return Step::Done(named.map_or(Sniffed::Invalid, Sniffed::Named));
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<usize> {
        self.take(1).map(|byte| byte[0].into())
    }

    fn u16(&mut self) -> Option<usize> {
        self.take(2).map(|bytes| usize::from(bytes[0]) << 8 | usize::from(bytes[1]))
    }

    /// What follows its own length of two bytes.
    fn vector(&mut self) -> Option<Reader<'a>> {
        let length = self.u16()?;
        self.take(length).map(Reader)
    }
}

/// The name in a hello. `None`: it is not well-formed, or has several.
fn named_by_hello(hello: &mut Reader<'_>) -> Option<Option<Host>> {
    hello.take(2 + 32)?; // Version, random.
    let session = hello.u8()?;
    hello.take(session)?;
    hello.vector()?; // Cipher suites.
    let compressions = hello.u8()?;
    hello.take(compressions)?;
    if hello.0.is_empty() {
        return Some(None);
    }
    let mut extensions = hello.vector()?;
    if !hello.0.is_empty() {
        return None;
    }
    let mut named = None;
    while !extensions.0.is_empty() {
        let kind = extensions.u16()?;
        let mut data = extensions.vector()?;
        if kind != 0 {
            continue;
        }
        let mut list = data.vector()?;
        let kind = list.u8()?;
        let name = list.vector()?;
        if kind != 0 || !list.0.is_empty() || !data.0.is_empty() || named.is_some() {
            return None;
        }
        let name =
            std::str::from_utf8(name.0).ok().filter(|name| !name.contains([':', '[', ' ']))?;
        named = Some(Host::parse(name).ok()?);
    }
    Some(named)
}

#[cfg(test)]
mod tests;
