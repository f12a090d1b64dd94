//! DNS without DNS: every name that no deny pattern matches has a synthetic address of each family, and
//! nothing else.
//!
//! Invariant: no query leaves this process, whatever it asks for, so no name carries data out. An answer
//! is no longer than 512 bytes.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::names::Names;
use crate::host::{Host, HostKind};
use crate::rules::Rules;

const HEADER: usize = 12;

const A: u16 = 1;
const AAAA: u16 = 28;
const OPT: u16 = 41;
const INTERNET: u16 = 1;

const NO_ERROR: u8 = 0;
const FORMAT_ERROR: u8 = 1;
const SERVER_FAILURE: u8 = 2;
const NO_SUCH_NAME: u8 = 3;
const NOT_IMPLEMENTED: u8 = 4;
const REFUSED: u8 = 5;

/// Seconds that a program may keep an answer. The table of names keeps it at least that long unless
/// thousands of other names are asked for meanwhile.
const TIME_TO_LIVE: u32 = 60;

/// Answers one message. `None`: nothing to answer.
pub(super) fn answer(query: &[u8], names: &Names, rules: &Rules) -> Option<Vec<u8>> {
    let header: &[u8; HEADER] = query.first_chunk()?;
    if header[2] & 0x80 != 0 {
        return None;
    }
    let question = Question::parse(query);
    let opcode = header[2] >> 3 & 0xf;
    let (code, records) = match &question {
        _ if opcode != 0 => (NOT_IMPLEMENTED, Records::default()),
        None => (FORMAT_ERROR, Records::default()),
        Some(question) => question.resolve(names, rules),
    };
    let mut message = Vec::with_capacity(512);
    message.extend(&header[..2]);
    // A response, with recursion available; opcode and the wish for recursion as in the query.
    message.push(0x80 | (header[2] & 0x79));
    message.push(0x80 | code);
    let question = question.filter(|_| opcode == 0);
    let count = u16::from(records.v4.is_some()) + u16::from(records.v6.is_some());
    let extended = question.as_ref().is_some_and(|question| question.extended);
    for section in [u16::from(question.is_some()), count, 0, u16::from(extended)] {
        message.extend(section.to_be_bytes());
    }
    if let Some(question) = question {
        message.extend(question.bytes);
    }
    if let Some(v4) = records.v4 {
        push_record(&mut message, A, &v4.octets());
    }
    if let Some(v6) = records.v6 {
        push_record(&mut message, AAAA, &v6.octets());
    }
    if extended {
        // The root, datagrams of up to 1,232 bytes, no flags, no options.
        message.extend([0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 0]);
    }
    Some(message)
}

fn push_record(message: &mut Vec<u8>, kind: u16, data: &[u8]) {
    // The name is that of the question.
    message.extend([0xc0, HEADER as u8]);
    message.extend(kind.to_be_bytes());
    message.extend(INTERNET.to_be_bytes());
    message.extend(TIME_TO_LIVE.to_be_bytes());
    message.extend((data.len() as u16).to_be_bytes());
    message.extend(data);
}

#[derive(Default)]
struct Records {
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
}

struct Question<'a> {
    /// As it was asked, which a client may compare.
    bytes: &'a [u8],
    /// `None`: a name that no host has.
    host: Option<Host>,
    kind: u16,
    class: u16,
    /// The client speaks EDNS.
    extended: bool,
}

impl<'a> Question<'a> {
    /// Reads a query with one question. `None`: it is none.
    fn parse(query: &'a [u8]) -> Option<Self> {
        let count = |at: usize| u16::from_be_bytes([query[at], query[at + 1]]);
        if (count(4), count(6), count(8)) != (1, 0, 0) {
            return None;
        }
        let mut at = HEADER;
        let mut name = String::new();
        let mut is_text = true;
        loop {
            let length = usize::from(*query.get(at)?);
            // A pointer would lead to the header.
            if length > 63 || at - HEADER > 254 {
                return None;
            }
            let label = query.get(at + 1..at + 1 + length)?;
            at += 1 + length;
            if length == 0 {
                break;
            }
            match std::str::from_utf8(label) {
                // A dot inside a label is not the one between labels.
                Ok(label) if !label.contains(['.', ':', '[', ' ', '\t']) => {
                    name.push_str(label);
                    name.push('.');
                }
                _ => is_text = false,
            }
        }
        let [a, b, c, d] = *query.get(at..)?.first_chunk()?;
        let (kind, class) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        let rest = &query[at + 4..];
        // An additional record of the root with the kind OPT.
        let extended =
            count(10) > 0 && rest.first() == Some(&0) && rest.get(1..3) == Some(&OPT.to_be_bytes());
        let host = Host::parse(&name).ok().filter(|_| is_text);
        Some(Self { bytes: &query[HEADER..at + 4], host, kind, class, extended })
    }

    fn resolve(&self, names: &Names, rules: &Rules) -> (u8, Records) {
        let none = Records::default();
        if self.class != INTERNET {
            return (REFUSED, none);
        }
        let Some(host) = &self.host else { return (NO_SUCH_NAME, none) };
        // A resolver takes the first name that exists, with a search domain or without.
        let is_expanded = names.may_be_expanded(host) && !rules.allows_in_particular(host);
        if rules.denies(host) || is_expanded {
            return (NO_SUCH_NAME, none);
        }
        let pair = match host.kind() {
            HostKind::Localhost => (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST),
            // Addresses are not names.
            HostKind::Address(_) | HostKind::Zoned(_) => return (NO_SUCH_NAME, none),
            // Without addresses a name has nothing else: no HTTPS record either, whose keys would
            // encrypt the name in a TLS handshake.
            HostKind::Name if !matches!(self.kind, A | AAAA) => return (NO_ERROR, none),
            HostKind::Name => match names.addresses(host) {
                Some(pair) => (pair.v4, pair.v6),
                None => return (SERVER_FAILURE, none),
            },
        };
        match self.kind {
            A => (NO_ERROR, Records { v4: Some(pair.0), v6: None }),
            AAAA => (NO_ERROR, Records { v4: None, v6: Some(pair.1) }),
            _ => (NO_ERROR, none),
        }
    }
}

#[cfg(test)]
mod tests;
