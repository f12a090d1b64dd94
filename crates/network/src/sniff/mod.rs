//! The first bytes of a client: which host they name, if they are TLS or HTTP/1.
//!
//! ```text
//!            a record of TLS              whole hello
//!  Start ─────────────────────▶ Tls ─────────────────────────────────────▶ Named, Invalid
//!    │  a method and a blank          a request line        whole head
//!    ├─────────────────────▶ Line ────────────────▶ Head ────────────────▶ Named, Invalid
//!    │                        │ another line
//!    └── anything else ──▶ Opaque ──▶ Watch: a request line ─────────────▶ cut
//! ```
//!
//! Opaque bytes pass at once, because their protocol may wait for an answer. But no server acts on a request
//! before its first line has ended, so that end is withheld until the line is known to be no request.
//!
//! Invariant: the outcome depends on the bytes alone, not on the pieces they come in; what some server may take
//! for TLS or HTTP/1 and is not well-formed is [`Sniffed::Invalid`], never opaque.

mod check;
mod hello;
mod opening;
mod request;

pub(crate) use check::Check;
pub(crate) use opening::check_first_bytes;

use self::hello::named_by_hello;
use self::request::{Ended, FirstLine, is_token, named_by_head};
use crate::host::Host;

/// The longest handshake message of a client that is read.
const MAX_HELLO: usize = 32 * 1024;
/// The longest record of TLS, with what encryption may add.
const MAX_RECORD: usize = (1 << 14) + 256;
/// The most bytes of records before the hello is whole: each may carry a byte.
const MAX_RECORDS: usize = 2 * MAX_HELLO;
/// The longest method for which its blank is waited for.
const MAX_METHOD: usize = 64;

/// What a header of the PROXY protocol, version 2, begins with. Anything may follow it.
const PROXY_HEADER: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// What the bytes say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Sniffed {
    /// Neither TLS nor HTTP/1.
    Opaque,
    /// TLS or HTTP/1 for this host, or for none in particular.
    Named(Option<Host>),
    /// TLS or HTTP/1 to some server, and not well-formed or too long.
    Invalid,
}

/// Collects the first bytes of a client until it is known what they are.
#[derive(Debug)]
pub(crate) struct Sniffer {
    held: Vec<u8>,
    limit: usize,
    phase: Phase,
    line: FirstLine,
}

#[derive(Debug)]
enum Phase {
    Start,
    /// A method and a blank; `scanned` bytes are in the line.
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
    /// Opaque; `unfinished`: the first line goes on.
    Opaque {
        unfinished: bool,
    },
}

impl Sniffer {
    /// Reads at most `limit` bytes of an HTTP/1 head.
    pub(crate) fn new(limit: usize) -> Self {
        Self { held: Vec::new(), limit, phase: Phase::Start, line: FirstLine::new(limit) }
    }

    /// Takes the next bytes. `None`: more are needed.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Option<Sniffed> {
        self.held.extend(bytes);
        loop {
            let step = match &mut self.phase {
                Phase::Start => start(&self.held, self.limit),
                Phase::Line { scanned } => line(&self.held, scanned, &mut self.line),
                Phase::Head { scanned } => head(&self.held, self.limit, scanned),
                Phase::Tls { next, handshake } => tls(&self.held, next, handshake),
                Phase::Opaque { .. } => Step::Done(Sniffed::Opaque),
            };
            match step {
                Step::Done(sniffed) => return Some(sniffed),
                Step::Watch { scanned } => {
                    let ended = self.line.push(&self.held[scanned..]);
                    self.phase = Phase::Opaque { unfinished: ended.is_none() };
                    if ended == Some(Ended::Request) {
                        return Some(Sniffed::Invalid);
                    }
                }
                Step::Next(phase) => self.phase = phase,
                Step::More => return None,
            }
        }
    }

    /// The client sends no more.
    pub(crate) fn finish(&self) -> Sniffed {
        match &self.phase {
            Phase::Line { .. } if self.line.is_request() => Sniffed::Invalid,
            Phase::Start | Phase::Line { .. } | Phase::Opaque { .. } => Sniffed::Opaque,
            Phase::Head { .. } | Phase::Tls { .. } => Sniffed::Invalid,
        }
    }

    /// The bytes so far, and what has to watch the following ones, if opaque bytes began a line that goes on.
    pub(crate) fn into_parts(self) -> (Vec<u8>, Option<Watch>) {
        let unfinished = matches!(self.phase, Phase::Opaque { unfinished: true });
        (self.held, unfinished.then_some(Watch { line: self.line }))
    }
}

/// Watches the rest of an opaque first line.
#[derive(Debug)]
pub(crate) struct Watch {
    line: FirstLine,
}

/// Whether bytes of a client may pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watched {
    /// They may, and the next ones have to be watched.
    Passes,
    /// They may, and all that follows.
    Done,
    /// They end a line that some server may take for a request.
    Request,
}

impl Watch {
    /// Takes the next bytes. A line that is longer than a head may be is no request.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Watched {
        match self.line.push(bytes) {
            Some(Ended::Request) => Watched::Request,
            Some(Ended::Other | Ended::TooLong) => Watched::Done,
            None => Watched::Passes,
        }
    }
}

enum Step {
    More,
    Next(Phase),
    Done(Sniffed),
    /// Opaque; `scanned` bytes are in the line.
    Watch {
        scanned: usize,
    },
}

fn start(held: &[u8], limit: usize) -> Step {
    match held {
        [] | [0x14..=0x18] => return Step::More,
        [0x16, 3, ..] => return Step::Next(Phase::Tls { next: 0, handshake: Vec::new() }),
        // Another record, or another version, before the hello: some servers skip it.
        [0x14..=0x18, 0..=15, ..] => return Step::Done(Sniffed::Invalid),
        _ if held.starts_with(PROXY_HEADER) => return Step::Done(Sniffed::Invalid),
        _ if PROXY_HEADER.starts_with(held) => return Step::More,
        _ => {}
    }
    // Empty lines before a request are skipped, as servers do; other blanks are not strict.
    let begin = held.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(held.len());
    let text = &held[begin..];
    let method = text.iter().position(|byte| !is_token(*byte)).unwrap_or(text.len());
    // Longer ones are not waited for, so they are no method when they come in one piece either.
    let is_awaited = method <= MAX_METHOD && begin <= limit;
    match text.get(method) {
        None if is_awaited => Step::More,
        Some(b' ' | b'\t') if method > 0 && is_awaited => Step::Next(Phase::Line { scanned: 0 }),
        Some(_) | None => Step::Watch { scanned: 0 },
    }
}

/// Reads to the end of the first line.
fn line(held: &[u8], scanned: &mut usize, line: &mut FirstLine) -> Step {
    for (at, byte) in held.iter().enumerate().skip(*scanned) {
        // No text: its protocol may wait for an answer without an end of line.
        if matches!(byte, 0..=8 | 14..=27 | 127) {
            return Step::Watch { scanned: at };
        }
        match line.push(&[*byte]) {
            Some(Ended::Request) => return Step::Next(Phase::Head { scanned: at }),
            Some(Ended::Other) => return Step::Next(Phase::Opaque { unfinished: false }),
            Some(Ended::TooLong) => return Step::Done(Sniffed::Invalid),
            None => {}
        }
    }
    *scanned = held.len();
    Step::More
}

fn head(held: &[u8], limit: usize, scanned: &mut usize) -> Step {
    let rest = &held[*scanned..];
    let ends = |at: &usize| rest[*at..].starts_with(b"\n\n") || rest[*at..].starts_with(b"\n\r\n");
    let end = (0..rest.len()).find(ends).map(|at| *scanned + at);
    *scanned = held.len().saturating_sub(2).max(*scanned);
    match end {
        _ if end.unwrap_or(held.len()) > limit => Step::Done(Sniffed::Invalid),
        Some(_) => Step::Done(named_by_head(held).map_or(Sniffed::Invalid, Sniffed::Named)),
        None => Step::More,
    }
}

/// Collects the client's hello out of its records.
fn tls(held: &[u8], next: &mut usize, handshake: &mut Vec<u8>) -> Step {
    loop {
        let invalid = Step::Done(Sniffed::Invalid);
        let Some(&[kind, major, _, high, low]) = held[*next..].first_chunk() else {
            return Step::More;
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        let is_long = length > MAX_RECORD || *next + length > MAX_RECORDS;
        if kind != 0x16 || major != 3 || length == 0 || is_long {
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
            return Step::Done(named_by_hello(hello).map_or(Sniffed::Invalid, Sniffed::Named));
        }
    }
}

#[cfg(test)]
mod tests;
