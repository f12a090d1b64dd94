//! Who may connect to the listener.
//!
//! Invariant: secrets are compared in constant time, and no `Debug` shows one.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codex_exec_host::peer;
use ring::{digest, hmac};
use serde::Deserialize;
use subtle::ConstantTimeEq;

/// The token that an upgrade request has to carry as `Authorization: Bearer …`.
#[derive(Clone, Default)]
pub enum WebSocketAuth {
    /// None: anyone who reaches the port may connect.
    #[default]
    Open,
    /// A token with this SHA-256 digest.
    CapabilityToken {
        /// The digest of the token.
        sha256: [u8; 32],
    },
    /// A JWT signed with HS256.
    SignedBearerToken(SignedBearer),
}

/// The checks of a signed token.
#[derive(Clone)]
pub struct SignedBearer {
    secret: Vec<u8>,
    issuer: Option<String>,
    audience: Option<String>,
    max_clock_skew: Duration,
}

impl fmt::Debug for WebSocketAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "Open",
            Self::CapabilityToken { .. } => "CapabilityToken",
            Self::SignedBearerToken(_) => "SignedBearerToken",
        })
    }
}

impl fmt::Debug for SignedBearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SignedBearer")
            .field("issuer", &self.issuer)
            .field("audience", &self.audience)
            .finish_non_exhaustive()
    }
}

/// The identity that a connection authenticated as. Only the principal that opened a session can resume it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Principal {
    /// The program that embeds the server, or a harness of a registry that does not tell harnesses apart.
    Embedder,
    /// A harness that the registry names.
    #[cfg_attr(
        not(feature = "remote"),
        expect(dead_code, reason = "harnesses come with remote mode")
    )]
    Harness {
        /// What the registry calls it.
        id: String,
    },
    /// A user of this machine, on a Unix socket.
    User {
        /// Its id.
        uid: u32,
    },
    /// A client with a certificate.
    Certified {
        /// The SHA-256 of its public key.
        key: [u8; 32],
        /// What its token says.
        token: Box<Principal>,
    },
    /// Any client of a listener without authentication.
    Anyone,
    /// A client with the capability token.
    TokenHolder,
    /// The client that a signed token names.
    Signed {
        /// Its `iss`.
        issuer: Option<String>,
        /// Its `sub`.
        subject: Option<String>,
    },
}

/// An invalid token or secret in the configuration.
#[derive(Debug, thiserror::Error)]
pub enum AuthConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file is too short.
    #[error("{path} must hold at least {minimum} bytes")]
    TooShort {
        /// The file.
        path: String,
        /// The shortest length allowed, in bytes.
        minimum: usize,
    },
    /// Others than the server's user and root can write the file.
    #[error(
        "{path} can be written by other users (mode {mode:03o}, owner {owner}); make it yours: chown, \
         chmod 600"
    )]
    Writable {
        /// The file.
        path: String,
        /// Its permissions.
        mode: u32,
        /// The user id of its owner.
        owner: u32,
    },
    /// Not a SHA-256 digest in hexadecimal.
    #[error("--ws-token-sha256 must be 64 hexadecimal digits")]
    BadDigest,
}

/// The shortest capability token, in bytes.
const MIN_TOKEN: usize = 16;

/// The shortest secret for signed tokens, in bytes.
const MIN_SECRET: usize = 32;

impl WebSocketAuth {
    /// Requires the token in this file, at least 16 bytes; white space around it does not count. Fails if others
    /// than this user and root can write the file.
    pub fn capability_token_file(path: &Path) -> Result<Self, AuthConfigError> {
        let token = read_secret(path, MIN_TOKEN)?;
        Ok(Self::CapabilityToken { sha256: sha256(&token) })
    }

    /// Requires the token with this SHA-256 digest, in hexadecimal.
    pub fn capability_token_sha256(hex: &str) -> Result<Self, AuthConfigError> {
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let bytes: Option<Vec<u8>> = hex
            .trim()
            .as_bytes()
            .chunks(2)
            .map(|pair| match pair {
                &[high, low] => Some(digit(high)? << 4 | digit(low)?),
                _ => None,
            })
            .collect();
        let sha256 = bytes.and_then(|bytes| bytes.try_into().ok());
        Ok(Self::CapabilityToken { sha256: sha256.ok_or(AuthConfigError::BadDigest)? })
    }

    /// Requires a token signed with the secret in this file; white space around it does not count.
    pub fn signed_bearer(
        secret_file: &Path,
        issuer: Option<String>,
        audience: Option<String>,
        max_clock_skew: Duration,
    ) -> Result<Self, AuthConfigError> {
        let secret = read_secret(secret_file, MIN_SECRET)?;
        Ok(Self::SignedBearerToken(SignedBearer { secret, issuer, audience, max_clock_skew }))
    }

    /// The principal of a request with this `Authorization` header; `None` refuses it.
    pub(crate) fn authenticate(&self, authorization: Option<&str>) -> Option<Principal> {
        let token = authorization
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, token)| token.trim());
        match (self, token) {
            (Self::Open, _) => Some(Principal::Anyone),
            (_, None) => None,
            (Self::CapabilityToken { sha256 }, Some(token)) => {
                let same: bool = self::sha256(token.as_bytes()).ct_eq(sha256).into();
                same.then_some(Principal::TokenHolder)
            }
            (Self::SignedBearerToken(signed), Some(token)) => {
                signed.authenticate(token, SystemTime::now())
            }
        }
    }
}

/// Opens a file that decides who may enter; fails if others than this user and root can write it.
pub(crate) fn open_private(path: &Path) -> Result<File, AuthConfigError> {
    let shown = || path.display().to_string();
    let unreadable = |source| AuthConfigError::Unreadable { path: shown(), source };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
    // What is not a file, such as a pipe of the caller's shell, has its own permissions.
    let is_others = ![0, peer::own_uid()].contains(&owner) || mode & 0o022 != 0;
    match metadata.is_file() && is_others {
        true => Err(AuthConfigError::Writable { path: shown(), mode, owner }),
        false => Ok(file),
    }
}

/// Like [`open_private`], for a file that is read by its name.
pub(crate) fn check_private(path: &Path) -> Result<(), AuthConfigError> {
    open_private(path).map(drop)
}

fn read_secret(path: &Path, minimum: usize) -> Result<Vec<u8>, AuthConfigError> {
    let shown = || path.display().to_string();
    let mut text = Vec::new();
    open_private(path)?
        .read_to_end(&mut text)
        .map_err(|source| AuthConfigError::Unreadable { path: shown(), source })?;
    let text = text.trim_ascii();
    if text.len() < minimum {
        return Err(AuthConfigError::TooShort { path: shown(), minimum });
    }
    Ok(text.to_vec())
}

#[derive(Deserialize)]
struct Header {
    alg: String,
}

#[derive(Deserialize)]
struct Claims {
    exp: f64,
    nbf: Option<f64>,
    iss: Option<String>,
    sub: Option<String>,
    aud: Option<Audience>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Audience {
    fn includes(&self, name: &str) -> bool {
        match self {
            Self::One(one) => one == name,
            Self::Many(many) => many.iter().any(|one| one == name),
        }
    }
}

impl SignedBearer {
    /// The principal that the token names, if signature, time, issuer and audience are valid.
    fn authenticate(&self, token: &str, now: SystemTime) -> Option<Principal> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let header: Header = decode_part(header)?;
        if header.alg != "HS256" {
            return None;
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.secret);
        hmac::verify(&key, signed.as_bytes(), &base64(signature)?).ok()?;
        let claims: Claims = decode_part(claims)?;
        let now = now.duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
        let skew = self.max_clock_skew.as_secs_f64();
        let is_valid_now =
            now < claims.exp + skew && claims.nbf.is_none_or(|nbf| now >= nbf - skew);
        let issuer_matches = self.issuer.is_none() || self.issuer == claims.iss;
        let audience_matches = self.audience.as_ref().is_none_or(|audience| {
            claims.aud.as_ref().is_some_and(|named| named.includes(audience))
        });
        (is_valid_now && issuer_matches && audience_matches)
            .then_some(Principal::Signed { issuer: claims.iss, subject: claims.sub })
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    out
}

fn base64(text: &str) -> Option<Vec<u8>> {
    base64_simd::URL_SAFE_NO_PAD.decode_to_vec(text).ok()
}

fn decode_part<T: for<'de> Deserialize<'de>>(text: &str) -> Option<T> {
    serde_json::from_slice(&base64(text)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

    fn token(header: &str, claims: &str, secret: &[u8]) -> String {
        let encode = |text: &[u8]| base64_simd::URL_SAFE_NO_PAD.encode_to_string(text);
        let signed = format!("{}.{}", encode(header.as_bytes()), encode(claims.as_bytes()));
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let signature = encode(hmac::sign(&key, signed.as_bytes()).as_ref());
        format!("{signed}.{signature}")
    }

    fn signed(issuer: Option<&str>, audience: Option<&str>) -> SignedBearer {
        SignedBearer {
            secret: SECRET.to_vec(),
            issuer: issuer.map(Into::into),
            audience: audience.map(Into::into),
            max_clock_skew: Duration::from_secs(30),
        }
    }

    const HS256: &str = r#"{"alg":"HS256","typ":"JWT"}"#;

    #[test]
    fn a_token_is_checked_for_signature_time_issuer_and_audience() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        let check = |bearer: SignedBearer, header: &str, claims: &str, secret: &[u8]| {
            bearer.authenticate(&token(header, claims, secret), now).is_some()
        };
        let open = || signed(None, None);
        assert!(check(open(), HS256, r#"{"exp":1001}"#, SECRET));
        assert!(check(open(), HS256, r#"{"exp":971}"#, SECRET), "within the skew");
        assert!(!check(open(), HS256, r#"{"exp":970}"#, SECRET), "expired");
        assert!(!check(open(), HS256, r#"{"exp":2000,"nbf":1031}"#, SECRET), "not yet");
        assert!(!check(open(), HS256, "{}", SECRET), "never expires");
        assert!(!check(open(), HS256, r#"{"exp":1001}"#, &[b'x'; 32]), "another secret");
        assert!(!check(open(), r#"{"alg":"none"}"#, r#"{"exp":1001}"#, SECRET));
        let claims = r#"{"exp":2000,"iss":"us","aud":["a","b"]}"#;
        assert!(check(signed(Some("us"), Some("b")), HS256, claims, SECRET));
        assert!(!check(signed(Some("them"), None), HS256, claims, SECRET));
        assert!(!check(signed(None, Some("c")), HS256, claims, SECRET));
        let named = r#"{"exp":2000,"iss":"us","sub":"ann"}"#;
        let (issuer, subject) = (Some("us".to_owned()), Some("ann".to_owned()));
        assert_eq!(
            open().authenticate(&token(HS256, named, SECRET), now),
            Some(Principal::Signed { issuer, subject })
        );
        for garbage in ["", ".", "..", "a.b.c", "é.é.é"] {
            assert!(open().authenticate(garbage, now).is_none());
        }
    }

    #[test]
    fn only_the_configured_capability_token_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        std::fs::write(&file, " open sesame, please\n").unwrap();
        let by_file = WebSocketAuth::capability_token_file(&file).unwrap();
        let digest: String =
            sha256(b"open sesame, please").iter().map(|b| format!("{b:02x}")).collect();
        let by_digest = WebSocketAuth::capability_token_sha256(&digest).unwrap();
        for auth in [by_file, by_digest] {
            assert_eq!(
                auth.authenticate(Some("Bearer open sesame, please")),
                Some(Principal::TokenHolder)
            );
            assert_eq!(
                auth.authenticate(Some("bearer  open sesame, please ")),
                Some(Principal::TokenHolder)
            );
            assert_eq!(auth.authenticate(Some("Bearer open")), None);
            assert_eq!(auth.authenticate(Some("Basic open sesame, please")), None);
            assert_eq!(auth.authenticate(Some("open sesame, please")), None);
            assert_eq!(auth.authenticate(None), None);
        }
        assert_eq!(WebSocketAuth::Open.authenticate(None), Some(Principal::Anyone));
    }

    #[test]
    fn token_files_that_others_can_write_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        std::fs::write(&file, "0123456789abcdef").unwrap();
        for mode in 0..0o1000 {
            let permissions = std::fs::Permissions::from_mode(mode | 0o400);
            std::fs::set_permissions(&file, permissions).unwrap();
            let private = mode & 0o022 == 0;
            let by_token = WebSocketAuth::capability_token_file(&file);
            assert_eq!(by_token.is_ok(), private, "mode {mode:o}");
            let refused = matches!(by_token, Err(AuthConfigError::Writable { .. }));
            assert_eq!(refused, !private, "mode {mode:o}");
            let by_secret = WebSocketAuth::signed_bearer(&file, None, None, Duration::ZERO);
            let refused = matches!(by_secret, Err(AuthConfigError::Writable { .. }));
            assert_eq!(refused, !private, "mode {mode:o}");
        }
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&file, " 0123456789abcde \n").unwrap();
        let short = WebSocketAuth::capability_token_file(&file);
        assert!(matches!(short, Err(AuthConfigError::TooShort { minimum: 16, .. })));
    }

    #[test]
    fn short_secrets_and_invalid_digests_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("secret");
        let skew = Duration::ZERO;
        WebSocketAuth::signed_bearer(&file, None, None, skew).unwrap_err();
        std::fs::write(&file, "short").unwrap();
        let error = WebSocketAuth::signed_bearer(&file, None, None, skew).unwrap_err();
        assert!(error.to_string().contains("at least 32 bytes"));
        for bad in ["", "abc", &"g".repeat(64), &"a".repeat(63)] {
            WebSocketAuth::capability_token_sha256(bad).unwrap_err();
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let text = format!(
            "{:?} {:?}",
            signed(None, None),
            WebSocketAuth::SignedBearerToken(signed(None, None))
        );
        assert!(!text.contains("0123"), "{text}");
    }
}
