//! The server's half of the opening handshake of a websocket (RFC 6455).

use http::header::{
    CONNECTION, HeaderMap, HeaderValue, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use ring::digest;

/// The `Sec-WebSocket-Accept` header for the response to a request with these headers; `None` if the
/// request does not ask for a websocket.
pub fn websocket_accept(headers: &HeaderMap) -> Option<HeaderValue> {
    let has = |name, token: &str| {
        headers.get_all(name).iter().any(|value| {
            value.to_str().is_ok_and(|value| {
                value.split(',').any(|part| part.trim().eq_ignore_ascii_case(token))
            })
        })
    };
    if !has(CONNECTION, "upgrade")
        || !has(UPGRADE, "websocket")
        || !has(SEC_WEBSOCKET_VERSION, "13")
    {
        return None;
    }
    let key = headers.get(SEC_WEBSOCKET_KEY)?;
    let mut sha1 = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    sha1.update(key.as_bytes());
    sha1.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    HeaderValue::from_str(&base64_simd::STANDARD.encode_to_string(sha1.finish())).ok()
}
