//! Hellos and heads in random pieces, against an oracle that sees everything at once; lenient spellings, against
//! the servers that take them.

use std::io::Write;
use std::process::{Command, Stdio};

use super::*;

fn host(text: &str) -> Sniffed {
    Sniffed::Named(Some(Host::parse(text).unwrap()))
}

/// What comes out in one piece.
fn whole(bytes: &[u8]) -> Sniffed {
    in_pieces(bytes, |rest| rest)
}

/// What comes out of pieces that are as long as `length` says of the rest. What is cut later is invalid, too.
fn in_pieces(bytes: &[u8], mut length: impl FnMut(usize) -> usize) -> Sniffed {
    let mut sniffer = Sniffer::new(8192);
    let mut rest = bytes;
    let mut next = || {
        let (piece, after) = rest.split_at(length(rest.len()));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    };
    let mut read = 0;
    let sniffed = loop {
        let Some(piece) = next() else { break sniffer.finish() };
        read += piece.len();
        if let Some(sniffed) = sniffer.push(piece) {
            break sniffed;
        }
    };
    let (held, watch) = sniffer.into_parts();
    assert_eq!(held, &bytes[..read]);
    let Some(mut watch) = watch.filter(|_| sniffed == Sniffed::Opaque) else { return sniffed };
    while let Some(piece) = next() {
        match watch.push(piece) {
            Watched::Passes => {}
            Watched::Done => break,
            Watched::Request => return Sniffed::Invalid,
        }
    }
    sniffed
}

/// A hello with these extensions in records of at most `record` bytes.
fn hello(extensions: &[(u16, Vec<u8>)], record: usize) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([1, 9, 0, 4, 0x13, 1, 0x13, 2, 1, 0]);
    let mut list = Vec::new();
    for (kind, data) in extensions {
        list.extend(kind.to_be_bytes());
        list.extend((data.len() as u16).to_be_bytes());
        list.extend(data);
    }
    body.extend((list.len() as u16).to_be_bytes());
    body.extend(list);
    let mut message = vec![1, 0];
    message.extend((body.len() as u16).to_be_bytes());
    message.extend(body);
    let mut bytes = Vec::new();
    for part in message.chunks(record) {
        bytes.extend([0x16, 3, 1]);
        bytes.extend((part.len() as u16).to_be_bytes());
        bytes.extend(part);
    }
    bytes
}

fn server_name(name: &[u8]) -> (u16, Vec<u8>) {
    let mut data = ((name.len() + 3) as u16).to_be_bytes().to_vec();
    data.push(0);
    data.extend((name.len() as u16).to_be_bytes());
    data.extend(name);
    (0, data)
}

#[test]
fn hellos_name_their_host() {
    assert_eq!(
        whole(&hello(&[(10, vec![0, 0]), server_name(b"Good.com")], 9999)),
        host("good.com")
    );
    assert_eq!(whole(&hello(&[server_name(b"good.com")], 1)), host("good.com"));
    assert_eq!(whole(&hello(&[(10, vec![])], 9999)), Sniffed::Named(None));
    for bad in [
        hello(&[server_name(b"good.com"), server_name(b"bad.com")], 9999),
        hello(&[server_name(b"good.com\0.bad.com")], 9999),
        hello(&[server_name(b"")], 9999),
        hello(&[server_name(b"a:1")], 9999),
        hello(&[(0, vec![0, 9, 0, 0, 1, b'a'])], 9999),
        hello(&[(0, vec![])], 9999),
        b"\x16\x03\x01\x00\x00".to_vec(),
        b"\x16\x03\x01\xff\xff\x01".to_vec(),
        b"\x16\x03\x01\x00\x04\x02\0\0\0".to_vec(),
        b"\x16\x03\x01\x00\x04\x01\xff\0\0".to_vec(),
        b"\x16\x03\x01\x00\x06\x01\0\0\x02\x03\x03".to_vec(),
        // Cut off.
        hello(&[server_name(b"good.com")], 9999)[..40].to_vec(),
        // Something else between two records.
        [&hello(&[server_name(b"good.com")], 20)[..25], b"\x15\x03\x01\0\x02\x01\0"].concat(),
    ] {
        assert_eq!(whole(&bad), Sniffed::Invalid, "{bad:?}");
    }
}

#[test]
fn a_hello_of_rustls_names_its_host() {
    let roots = rustls::RootCertStore::empty();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = rustls::pki_types::ServerName::try_from("good.com").unwrap();
    let mut client = rustls::ClientConnection::new(std::sync::Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    assert_eq!(whole(&bytes), host("good.com"));
}

#[test]
fn requests_name_their_host() {
    for (text, expected) in [
        ("GET / HTTP/1.1\r\nHost: Good.com:80\r\n\r\n", host("good.com")),
        ("\r\n\r\nGET / HTTP/1.1\r\nhost:good.com\r\nX: y\r\n\r\nbody", host("good.com")),
        ("POST /http://bad.com HTTP/1.1\nHost: good.com\n\n", host("good.com")),
        ("GET http://good.com/x HTTP/1.1\r\nHost: good.com\r\n\r\n", host("good.com")),
        ("GET http://good.com HTTP/1.0\r\n\r\n", host("good.com")),
        ("CONNECT bad.com:443 HTTP/1.1\r\n\r\n", host("bad.com")),
        ("FOO / HTTP/1.1\r\nHost: bad.com\r\n\r\n", host("bad.com")),
        ("GET / HTTP/1.0\r\n\r\n", Sniffed::Named(None)),
        ("GET / HTTP/1.1\r\nHost:\r\n\r\n", Sniffed::Named(None)),
        ("GET http://bad.com/ HTTP/1.1\r\nHost: good.com\r\n\r\n", Sniffed::Invalid),
        ("GET / HTTP/1.1\r\nHost: good.com\r\nHost: bad.com\r\n\r\n", Sniffed::Invalid),
        ("GET / HTTP/1.1\r\nHost : bad.com\r\n\r\n", Sniffed::Invalid),
        ("GET / HTTP/1.1\r\n Host: bad.com\r\n\r\n", Sniffed::Invalid),
        ("GET / HTTP/1.1\r\nHost: u@bad.com\r\n\r\n", Sniffed::Invalid),
        ("GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", Sniffed::Invalid),
        ("GET\t/\tHTTP/1.1\r\nHost: bad.com\r\n\r\n", Sniffed::Invalid),
        ("GET / http/1.1\r\nHost: bad.com\r\n\r\n", Sniffed::Invalid),
        ("GET / HTTP/9.9\r\nHost: bad.com\r\n\r\n", Sniffed::Invalid),
        // Cut off by the end of the client's direction.
        ("GET / HTTP/1.1\r\nHost: bad.com\r\n", Sniffed::Invalid),
        ("GET / HTTP/1.1", Sniffed::Invalid),
    ] {
        assert_eq!(whole(text.as_bytes()), expected, "{text:?}");
    }
}

#[test]
fn other_protocols_pass_as_soon_as_they_show() {
    for bytes in [
        &b"SSH-2.0-OpenSSH_9.6\r\n"[..],
        b"\x00\x00\x00\x08\x04\xd2\x16\x2f",
        b"\x16\x21",
        b"\x13BitTorrent protocol",
        b"{\"a",
        b"PING\r\n",
        b"EHLO good.com\r\n",
        b"CONNECT {\"verbose\": false, \"lang\": \"go\", \"name\": \"a/1\"}\r\nPING\r\n",
        b"RFB 003.008\n",
        b"get key\r\n",
        b"PRI * HTTP/2.0\r\n",
        b"a b\x01",
        b"*1\r\n$4\r\n",
        b"0032git-upload-pack /x\0",
        b"\xff\xfd\x01",
    ] {
        assert_eq!(Sniffer::new(8192).push(bytes), Some(Sniffed::Opaque), "{bytes:?}");
    }
    for bytes in [&b""[..], b"\x16", b"hello world", b"GET"] {
        let mut sniffer = Sniffer::new(8192);
        assert_eq!(sniffer.push(bytes), None);
        assert_eq!(sniffer.finish(), Sniffed::Opaque, "{bytes:?}");
    }
}

#[test]
fn what_is_held_is_bounded() {
    let mut sniffer = Sniffer::new(8192);
    assert_eq!(sniffer.push(b"GET /"), None);
    let mut pushed = 0;
    while sniffer.push(b"aaaaaaaaaaaaaaaa") != Some(Sniffed::Invalid) {
        pushed += 16;
        assert!(pushed <= 8192);
    }
    // Neither a method nor a line is waited for without an end.
    assert_eq!(Sniffer::new(8192).push(&[b'a'; 65]), Some(Sniffed::Opaque));
    assert_eq!(Sniffer::new(8192).push(&[b'\n'; 8193]), Some(Sniffed::Opaque));
    let mut sniffer = Sniffer::new(8192);
    assert_eq!(sniffer.push(b"{"), Some(Sniffed::Opaque));
    let (_, mut watch) = sniffer.into_parts();
    assert_eq!(watch.as_mut().unwrap().push(&[b'a'; 8191]), Watched::Passes);
    assert_eq!(watch.as_mut().unwrap().push(b"a"), Watched::Done);
    let mut sniffer = Sniffer::new(8192);
    assert_eq!(sniffer.push(b"\x16\x03\x01\0\x04\x01\0\x7f\xff"), None);
    let mut pushed = 0;
    while sniffer.push(b"\x16\x03\x01\0\x01\0") != Some(Sniffed::Invalid) {
        pushed += 6;
        assert!(pushed <= 2 * MAX_HELLO);
    }
}

/// A head written as simply as possible: lines, words, the first colon.
fn oracle_head(text: &str) -> Sniffed {
    let lines: Vec<&str> = text.split("\r\n").skip_while(|line| line.is_empty()).collect();
    let hosts: Vec<_> =
        lines.iter().filter_map(|line| line.strip_prefix("Host: ")).map(str::to_owned).collect();
    let target = lines[0].split(' ').nth(1).unwrap();
    let in_line = target.strip_prefix("http://").map(|rest| rest.trim_end_matches("/x").to_owned());
    let mut all: Vec<String> = hosts.iter().cloned().chain(in_line).collect();
    all.dedup();
    match (hosts.len(), all.len()) {
        (2.., _) | (_, 2..) => Sniffed::Invalid,
        (_, 0) => Sniffed::Named(None),
        _ => host(&all[0]),
    }
}

/// The outcome is the oracle's, and the same for every way of cutting the bytes.
#[test]
fn pieces_do_not_change_the_outcome() {
    let seed = fastrand::u64(..);
    let mut dice = fastrand::Rng::with_seed(seed);
    let names = ["good.com", "bad.com", "x.good.com"];
    for round in 0..4000 {
        let name = |dice: &mut fastrand::Rng| names[dice.usize(..names.len())];
        let (bytes, expected) = match dice.u8(..4) {
            0 => {
                let named: Vec<_> = (0..dice.usize(..3)).map(|_| name(&mut dice)).collect();
                let mut extensions: Vec<_> =
                    named.iter().map(|name| server_name(name.as_bytes())).collect();
                for _ in 0..dice.usize(..4) {
                    let data = vec![dice.u8(..); dice.usize(..300)];
                    extensions.insert(dice.usize(..=extensions.len()), (dice.u16(1..), data));
                }
                let expected = match named[..] {
                    [] => Sniffed::Named(None),
                    [one] => host(one),
                    _ => Sniffed::Invalid,
                };
                (hello(&extensions, dice.usize(1..400)), expected)
            }
            1 | 2 => {
                let target = match dice.u8(..3) {
                    0 => format!("http://{}/x", name(&mut dice)),
                    _ => "/x".to_owned(),
                };
                let mut text = "\r\n".repeat(dice.usize(..3));
                text.push_str(&format!("GET {target} HTTP/1.1\r\n"));
                for _ in 0..dice.usize(..5) {
                    match dice.u8(..3) {
                        0 => text.push_str(&format!("Host: {}\r\n", name(&mut dice))),
                        _ => text.push_str(&format!("X-{}: Host: y\r\n", dice.u8(..))),
                    }
                }
                text.push_str("\r\n");
                let expected = oracle_head(&text);
                text.push_str("GET / HTTP/1.1\r\nHost: bad.com\r\n\r\n");
                (text.into_bytes(), expected)
            }
            _ => {
                // Anything, often like the beginning of something.
                let mut bytes: Vec<u8> =
                    [&b"GET "[..], b"\x16\x03\x01", b"A", b""][dice.usize(..4)].to_vec();
                bytes.extend((0..dice.usize(..60)).map(|_| match dice.u8(..3) {
                    0 => dice.u8(..),
                    _ => b"\r\n HTTP/1:ab"[dice.usize(..12)],
                }));
                let expected = whole(&bytes);
                (bytes, expected)
            }
        };
        let found = in_pieces(&bytes, |rest| match dice.bool() {
            true => rest.min(1),
            false => dice.usize(rest.min(1)..=rest.min(200)),
        });
        assert_eq!(found, expected, "seed {seed}, round {round}: {bytes:?}");
    }
}

#[test]
fn records_before_the_hello_are_refused() {
    let hello = hello(&[server_name(b"good.com")], 9999);
    for kind in 0x14..=0x18 {
        for major in 0..16 {
            let before = [&[kind, major, 1, 0, 2, 1, 0x70][..], &hello].concat();
            assert_eq!(whole(&before), Sniffed::Invalid, "{before:?}");
        }
    }
    for before in [&b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n"[..], b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0"] {
        assert_eq!(whole(&[before, &hello].concat()), Sniffed::Invalid, "{before:?}");
    }
}

/// A beginning that some server may take for a request to `bad.com`, or not: the strict spelling of each part, or
/// at random another one.
fn lenient(dice: &mut fastrand::Rng) -> Vec<u8> {
    let odd = [0.05, 0.2, 0.5][dice.usize(..3)];
    let mut part = |strict: &'static [u8], others: &[&'static [u8]]| match dice.f64() < odd {
        true => others[dice.usize(..others.len())],
        false => strict,
    };
    let before: &[&[u8]] = &[b"\r\n", b"\n", b" ", b"\x0b", b"\t", b"\xa0", b"\r", b"\0"];
    let mut bytes = [part(b"", before), part(b"", before)].concat();
    let methods: &[&[u8]] = &[
        b"POST",
        b"CONNECT",
        b"get",
        b"G\xc3T",
        b"\x01X",
        b"M-SEARCH",
        b"\x17GET",
        b"{",
        b"\"",
        b"ANY",
    ];
    let blanks: &[&[u8]] = &[
        b"\t",
        b"\x0b",
        b"\x0c",
        b"\r",
        b"\x1c",
        b"\x1f",
        b"\xa0",
        b"\x85",
        b"  ",
        b"\xc2\xa0",
        b" \r",
    ];
    let targets: &[&[u8]] =
        &[b"*", b"/\x01", b"/\0", b"http://bad.com/", b"x", b"/\xe9", b"/a\x7fb", b"bad.com:80"];
    let versions: &[&[u8]] = &[
        b"HTTP/1.0",
        b"RTSP/1.0",
        b"ICE/1.0",
        b"HTTP/0.9",
        b"HTTP/01.1",
        b"HTTP/1.10",
        b"HTTP/+1.1",
        b"http/1.1",
        b"HTTP/1.1\0",
        b"SIP/2.0",
        b"",
    ];
    let after: &[&[u8]] = &[b" ", b"\t", b"\x0b", b"\xa0", b" x"];
    bytes.extend([part(b"GET", methods), part(b" ", blanks), part(b"/", targets)].concat());
    // Some servers take lines without a version.
    if part(b"versioned", &[b""]) != b"" {
        bytes.extend([part(b" ", blanks), part(b"HTTP/1.1", versions)].concat());
    }
    bytes.extend(part(b"", after));
    let end = part(b"\r\n", &[b"\n", b"\r\r\n", b"\r"]);
    let other = part(b"", &[b"X: y", b" X: y", b"X : y", b"\x0bX: y", b"X: y\r"]);
    let names: &[&[u8]] = &[b"host:", b"Host : ", b" Host: ", b"Host:\t", b"HOST:\x0b"];
    bytes.extend([end, other, if other.is_empty() { b"" } else { end }].concat());
    bytes.extend([part(b"Host: ", names), b"bad.com", end, end].concat());
    bytes
}

/// Whatever Python's or Node's server takes for a request to a host is known to be for that host, or is cut.
#[test]
fn no_server_sees_a_host_that_is_not_seen_here() {
    let seed =
        std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    let mut dice = fastrand::Rng::with_seed(seed);
    let cases: Vec<Vec<u8>> = (0..1500).map(|_| lenient(&mut dice)).collect();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let input: String = cases.iter().map(|case| hex(case) + "\n").collect();
    for (program, flag, script) in
        [("python3", "-c", include_str!("servers.py")), ("node", "-e", include_str!("servers.js"))]
    {
        let child = Command::new(program)
            .args([flag, script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            assert!(std::env::var_os("CI").is_none(), "{program} is not installed");
            eprintln!("skipped: {program} is not installed");
            continue;
        };
        let mut stdin = child.stdin.take().unwrap();
        let input = input.clone();
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()).unwrap());
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let seen: Vec<&str> = output.lines().collect();
        assert_eq!(seen.len(), cases.len(), "{program}");
        let mut requests = 0;
        for (case, seen) in cases.iter().zip(seen) {
            if seen != "bad.com" {
                continue;
            }
            requests += 1;
            let found = whole(case);
            let is_known = found == host("bad.com") || found == Sniffed::Invalid;
            let shown = case.escape_ascii();
            assert!(is_known, "seed {seed}: {program} takes {shown}, which is {found:?}");
            let pieces = in_pieces(case, |rest| dice.usize(rest.min(1)..=rest.min(9)));
            assert_eq!(pieces, found, "seed {seed}: {shown}");
        }
        assert!(requests > 100, "seed {seed}: {program} took {requests} requests only");
    }
}
