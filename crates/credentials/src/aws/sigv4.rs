//! The signature itself: a pure function of request, keys and time.
//!
//! The signed headers are `content-type` (if there is a body), `host`, `x-amz-date` and
//! `x-amz-security-token` (if the credentials have one).

use std::fmt::Write;
use std::time::SystemTime;

use codex_exec_remote::{OutgoingRequest, Secret};
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use ring::{digest, hmac};

use crate::timestamp::rfc3339;

/// All characters except those that RFC 3986 calls unreserved.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");

/// AWS credentials. `Debug` shows the key id only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwsKeys {
    /// The id of the key; requests carry it in clear.
    pub access_key_id: String,
    /// The key that signs.
    pub secret_access_key: Secret,
    /// The token of temporary credentials.
    pub session_token: Option<Secret>,
}

/// Returns the headers that sign a request; `None` if its URL is invalid or a header cannot carry a value.
pub fn sign(
    request: &OutgoingRequest<'_>,
    keys: &AwsKeys,
    region: &str,
    service: &str,
    now: SystemTime,
) -> Option<HeaderMap> {
    let uri: Uri = request.url.parse().ok()?;
    let host = uri.authority()?.as_str().rsplit('@').next()?;
    // 2015-08-30T12:36:00Z without its separators.
    let time: String = rfc3339(now).chars().filter(|c| !matches!(c, '-' | ':')).collect();
    let day = time.get(..8)?;

    let mut headers = HeaderMap::new();
    headers.insert(DATE, HeaderValue::from_str(&time).ok()?);
    let mut signed = Vec::new();
    if let Some(content_type) = request.content_type {
        signed.push(("content-type", content_type.to_owned()));
    }
    signed.push(("host", host.to_owned()));
    signed.push(("x-amz-date", time.clone()));
    if let Some(token) = &keys.session_token {
        signed.push(("x-amz-security-token", token.expose().to_owned()));
        headers.insert(TOKEN, token.header("")?);
    }
    let names: Vec<&str> = signed.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");

    let mut canonical = format!("{}\n{}\n", request.method, canonical_path(uri.path()));
    canonical.push_str(&canonical_query(uri.query().unwrap_or_default()));
    canonical.push('\n');
    for (name, value) in &signed {
        let value = value.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        let _ = writeln!(canonical, "{name}:{value}");
    }
    let _ = write!(canonical, "\n{names}\n{}", hex(sha256(request.body).as_ref()));

    let scope = format!("{day}/{region}/{service}/aws4_request");
    let hashed = hex(sha256(canonical.as_bytes()).as_ref());
    let to_sign = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{hashed}");
    let secret = zeroize::Zeroizing::new(format!("AWS4{}", keys.secret_access_key.expose()));
    let mut key = mac(secret.as_bytes(), day);
    for part in [region, service, "aws4_request"] {
        key = mac(key.as_ref(), part);
    }
    let signature = hex(mac(key.as_ref(), &to_sign).as_ref());
    let id = &keys.access_key_id;
    let value = format!(
        "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
    );
    let mut value = HeaderValue::from_str(&value).ok()?;
    value.set_sensitive(true);
    headers.insert(header::AUTHORIZATION, value);
    Some(headers)
}

/// The path as sent, without empty and dot segments, escaped a second time.
fn canonical_path(path: &str) -> String {
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let mut canonical = String::new();
    for segment in &segments {
        canonical.push('/');
        canonical.extend(percent_encode(segment.as_bytes(), ESCAPED));
    }
    if segments.is_empty() || path.ends_with('/') {
        canonical.push('/');
    }
    canonical
}

/// The names and values of the query, escaped the same way and sorted.
fn canonical_query(query: &str) -> String {
    let escape = |text: &str| {
        let plain: Vec<u8> = percent_decode_str(text).collect();
        percent_encode(&plain, ESCAPED).to_string()
    };
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let mut pairs: Vec<_> = pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (escape(name), escape(value)))
        .collect();
    pairs.sort();
    let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name}={value}")).collect();
    pairs.join("&")
}

fn sha256(bytes: &[u8]) -> digest::Digest {
    digest::digest(&digest::SHA256, bytes)
}

fn mac(key: &[u8], text: &str) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    /// The keys of AWS's test suite; requests and signatures for `service` below are from it, too.
    fn keys(session_token: Option<&str>) -> AwsKeys {
        AwsKeys {
            access_key_id: "AKIDEXAMPLE".to_owned(),
            secret_access_key: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".into(),
            session_token: session_token.map(Secret::from),
        }
    }

    const TOKEN_EXAMPLE: &str = "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQ\
        WLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwthAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8p\
        hUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d+xo0rKwT38xVqr7ZD0u0iP\
        PkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA==";

    /// 2015-08-30T12:36:00Z.
    fn then() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_440_938_160)
    }

    #[test]
    fn requests_of_the_aws_test_suite_get_its_signatures() {
        let form = Some("application/x-www-form-urlencoded");
        let host = "https://example.amazonaws.com";
        let unreserved = "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        for (method, path, content_type, body, token, names, signature) in [
            (
                "GET",
                "/",
                None,
                "",
                None,
                "host;x-amz-date",
                "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                "POST",
                "/",
                None,
                "",
                None,
                "host;x-amz-date",
                "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            ),
            (
                "GET",
                "/?Param2=value2&Param1=value1",
                None,
                "",
                None,
                "host;x-amz-date",
                "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
            ),
            (
                "GET",
                unreserved,
                None,
                "",
                None,
                "host;x-amz-date",
                "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
            ),
            (
                "POST",
                "/",
                form,
                "Param1=value1",
                None,
                "content-type;host;x-amz-date",
                "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
            ),
            (
                "POST",
                "/",
                None,
                "",
                Some(TOKEN_EXAMPLE),
                "host;x-amz-date;x-amz-security-token",
                "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead",
            ),
        ] {
            let url = format!("{host}{path}");
            let request =
                OutgoingRequest { method, url: &url, content_type, body: body.as_bytes() };
            let headers = sign(&request, &keys(token), "us-east-1", "service", then()).unwrap();
            let scope = "AKIDEXAMPLE/20150830/us-east-1/service/aws4_request";
            assert_eq!(
                headers[header::AUTHORIZATION],
                format!(
                    "AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={names}, \
                     Signature={signature}"
                ),
                "{method} {path}"
            );
            assert_eq!(headers[DATE], "20150830T123600Z");
            assert_eq!(headers.get(TOKEN).map(HeaderValue::as_bytes), token.map(str::as_bytes));
        }
    }

    /// The expected signatures are those of botocore, another implementation.
    #[test]
    fn escapes_ports_and_queries_are_signed_like_botocore() {
        let register = OutgoingRequest {
            method: "POST",
            url: "http://127.0.0.1:4711/base/cloud/environment/env%201/direct/register",
            content_type: Some("application/json"),
            body: br#"{"transport":"direct_jsonrpc_v1"}"#,
        };
        let upgrade = OutgoingRequest {
            method: "GET",
            url: "ws://127.0.0.1:4711/rv?x=1&b=%2F%20y&a",
            content_type: None,
            body: b"",
        };
        for (request, region, signature) in [
            (
                register,
                "eu-central-1",
                "7f177e4022ff2ebafa880a9073a489295b4328425a89cd5a4a46b6a8e2009a29",
            ),
            (
                upgrade,
                "us-east-1",
                "dd3445053ac526cd8d51c7bb05e853b4df118aafe4b57031696c1ba01bbb9f70",
            ),
        ] {
            let headers = sign(&request, &keys(None), region, "execute-api", then()).unwrap();
            let value = headers[header::AUTHORIZATION].to_str().unwrap();
            assert!(value.ends_with(&format!("Signature={signature}")), "{value}");
        }
    }

    #[test]
    fn paths_are_normalized_and_escaped_twice() {
        for (path, canonical) in [
            ("", "/"),
            ("/", "/"),
            ("//", "/"),
            ("/a/./b/../c", "/a/c"),
            ("/a/", "/a/"),
            ("/a%20b/ü", "/a%2520b/%C3%BC"),
            ("/..", "/"),
        ] {
            assert_eq!(canonical_path(path), canonical, "{path}");
        }
        assert_eq!(canonical_query("b=2&a=%2f&a=1&&c"), "a=%2F&a=1&b=2&c=");
    }

    #[test]
    fn debug_hides_the_keys() {
        let shown = format!("{:?}", keys(Some("hunter2")));
        assert!(shown.contains("AKIDEXAMPLE"), "{shown}");
        assert!(!shown.contains("wJalr") && !shown.contains("hunter2"), "{shown}");
    }
}
