//! What a program sends to its managed network. The second parsers are those of the URL standard and of rustls.

use codex_exec_network::fuzzing;

/// The head of a request to the HTTP proxy: where an absolute URI leads is what a URL parser says.
pub(super) fn http_request(bytes: &[u8]) -> u64 {
    let Some((host, uri)) = fuzzing::http_request(bytes) else { return 0 };
    // Hosts of other schemes are not read as names or addresses by that standard.
    let absolute = matches!(uri.scheme_str(), Some("http" | "ws"));
    let Some(other) = absolute.then(|| url::Url::parse(&uri.to_string()).ok()).flatten() else {
        return 1;
    };
    let Some(other) = other.host_str() else { return 2 };
    let other = other.trim_start_matches('[').trim_end_matches(']');
    let other = other.strip_suffix('.').unwrap_or(other);
    // Empty labels at the end: we take the name without them, that standard leaves them.
    if other.ends_with('.') || uri.host().is_some_and(|host| host.ends_with("..")) {
        return 4;
    }
    let same = host.eq_ignore_ascii_case(other);
    assert!(same, "judged as {host}, and {other} to a URL parser");
    3
}

pub(super) fn socks_address(bytes: &[u8]) -> u64 {
    fuzzing::socks_address(bytes)
}

/// The first bytes of a connection, cut in pieces that follow from the bytes themselves.
pub(super) fn first_bytes(bytes: &[u8]) -> u64 {
    let seed = bytes.iter().fold(0_u64, |seed, byte| seed.rotate_left(5) ^ u64::from(*byte));
    let mut rng = fastrand::Rng::with_seed(seed);
    fuzzing::first_bytes(bytes, &mut |left| {
        let most = 1 << rng.u32(..10);
        rng.usize(1..=left.min(most))
    })
}

pub(super) fn dns_query(bytes: &[u8]) -> u64 {
    fuzzing::dns_query(bytes)
}
