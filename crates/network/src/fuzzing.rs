//! Entry points for the fuzz targets of `codex-fuzz`: what a program may send to its managed network.
//!
//! Each function panics if a promise is broken, and returns what kind of outcome it saw.

use std::net::SocketAddr;

use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Uri};

use crate::host::Host;
use crate::rules::{List, Rules};
use crate::sniff::{Sniffed, Sniffer, Watched};
use crate::socks::{read_address, write_address};
use crate::target::Target;
use crate::transparent::fuzzing as transparent;

/// The longest head that the sniffer reads here.
const LIMIT: usize = 8 << 10;

/// The head of an HTTP request: what is judged is what the request is sent with, in normal form.
/// Returns the target.
pub fn http_request(head: &[u8]) -> Option<(String, Uri)> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    if !request.parse(head).ok()?.is_complete() {
        return None;
    }
    let uri: Uri = request.path?.parse().ok()?;
    let mut map = HeaderMap::new();
    for header in request.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes()).ok()?;
        map.append(name, HeaderValue::from_bytes(header.value).ok()?);
    }
    let target = match request.method? {
        "CONNECT" => Target::of_connect(&uri),
        _ => Target::of_request(&uri, &map),
    };
    let target = target.ok()?;
    check_host(&target.host);
    let mut again = HeaderMap::new();
    again.insert(http::header::HOST, target.host_header().parse().expect("a header"));
    let origin = Uri::from_static("/");
    assert_eq!(Target::of_request(&origin, &again).as_ref(), Ok(&target), "another target");
    Some((target.host.to_string(), uri))
}

/// A host in normal form stays as it is, whoever reads it.
fn check_host(host: &Host) {
    assert_eq!(Host::parse(host.as_str()).as_ref(), Ok(host), "not in normal form");
    let authority = host.authority(7);
    assert_eq!(Host::parse(&authority).as_ref(), Ok(host), "{authority}");
}

/// The address in a SOCKS5 request or datagram: addresses are written as they were read.
pub fn socks_address(bytes: &[u8]) -> u64 {
    let mut rest = bytes;
    let Some(Ok(read)) = read_address(&mut rest).now_or_never() else { return 0 };
    let Some(host) = read.host else { return 1 };
    check_host(&host);
    let crate::host::HostKind::Address(ip) = host.kind() else { return 2 };
    let mut written = Vec::new();
    write_address(&mut written, SocketAddr::new(ip, read.port));
    let again = read_address(&mut written.as_slice()).now_or_never();
    let again = again.and_then(Result::ok).expect("what was written can be read");
    assert_eq!((again.host, again.port), (Some(host), read.port));
    3
}

/// The first bytes of a connection: the outcome does not depend on the pieces, and a hello that rustls takes
/// has the name that rustls finds.
pub fn first_bytes(bytes: &[u8], cuts: &mut dyn FnMut(usize) -> usize) -> u64 {
    let whole = sniff(&[bytes]);
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(cuts(rest.len()).clamp(1, rest.len()));
        pieces.push(piece);
        rest = after;
    }
    assert_eq!(sniff(&pieces), whole, "the pieces matter");
    if let Some(name) = name_for_rustls(bytes) {
        let name = name.and_then(|name| Host::parse(&name).ok());
        match &whole {
            Sniffed::Named(found) => assert_eq!(*found, name),
            // Stricter than rustls is fine; opaque is not.
            outcome => assert_eq!(*outcome, Sniffed::Invalid),
        }
    }
    match whole {
        Sniffed::Opaque => 1,
        Sniffed::Named(None) => 2,
        Sniffed::Named(Some(host)) => {
            check_host(&host);
            3
        }
        Sniffed::Invalid => 4,
    }
}

/// What becomes of a connection with these pieces. Opaque bytes of which a later one ends a line that some
/// server may take for a request are invalid, too: the connection is cut before that byte.
fn sniff(pieces: &[&[u8]]) -> Sniffed {
    let mut sniffer = Sniffer::new(LIMIT);
    for (at, piece) in pieces.iter().enumerate() {
        let Some(sniffed) = sniffer.push(piece) else { continue };
        if sniffed == Sniffed::Opaque
            && let Some(mut watch) = sniffer.into_parts().1
        {
            for piece in &pieces[at + 1..] {
                match watch.push(piece) {
                    Watched::Passes => {}
                    Watched::Done => break,
                    Watched::Request => return Sniffed::Invalid,
                }
            }
        }
        return sniffed;
    }
    sniffer.finish()
}

/// The name in a hello that rustls takes. `None`: it takes none.
fn name_for_rustls(bytes: &[u8]) -> Option<Option<String>> {
    let mut acceptor = rustls::server::Acceptor::default();
    acceptor.read_tls(&mut &*bytes).ok()?;
    let accepted = acceptor.accept().ok()??;
    Some(accepted.client_hello().server_name().map(str::to_owned))
}

/// A DNS query: the answer is short, is for this query, and says nothing but synthetic addresses.
pub fn dns_query(query: &[u8]) -> u64 {
    let mut rules = Rules::default();
    rules.add(List::Deny, "**.bad.com").expect("a pattern");
    let Some(answer) = transparent::dns_answer(query, &rules) else { return 0 };
    assert!(answer.len() <= 512, "{} bytes", answer.len());
    assert_eq!(answer[..2], query[..2], "the answer to another query");
    assert_eq!(answer[2] & 0x80, 0x80, "not a response");
    assert_eq!(transparent::dns_answer(&answer, &rules), None, "a response was answered");
    let records = transparent::dns_records(&answer).expect("an answer that cannot be read");
    for address in &records {
        assert!(transparent::is_synthetic(*address) || address.is_loopback(), "{address}");
    }
    1 + u64::from(answer[3] & 15) * 4 + records.len() as u64
}
