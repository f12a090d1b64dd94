//! Tickets: small signed statements that clients hand back to the service.
//!
//! The service issues two kinds. A *pass* is part of a rendezvous URL and lets its bearer open the
//! websocket of one side. An *authorization* goes to a harness, which sends it inside the encrypted
//! handshake; the environment then asks the service to validate it. The kind is signed too, so neither can
//! be used as the other.

use serde::{Deserialize, Serialize};

use crate::secret::{Secret, SigningKey};

/// The content of a ticket.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ticket {
    #[serde(rename = "k")]
    pub kind: Kind,
    #[serde(rename = "e")]
    pub environment: String,
    #[serde(rename = "r")]
    pub registration: String,
    /// The fingerprint of the harness's key, or a random name in the older revision.
    #[serde(rename = "h", default, skip_serializing_if = "Option::is_none")]
    pub harness: Option<String>,
    /// The id of the token that requested it.
    #[serde(rename = "t")]
    pub token: String,
    /// When it expires, in seconds since 1970.
    #[serde(rename = "x")]
    pub expires: u64,
    /// Random, different in every ticket.
    #[serde(rename = "n")]
    pub nonce: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// A pass for the environment's websocket.
    #[serde(rename = "pe")]
    EnvironmentPass,
    /// A pass for a harness's websocket.
    #[serde(rename = "ph")]
    HarnessPass,
    /// An authorization of a harness's key.
    #[serde(rename = "ha")]
    Authorization,
}

/// The longest ticket that is parsed, in bytes; the limit of an authorization.
const MAX_LEN: usize = 4096;

impl Ticket {
    /// Signs the ticket: `payload.signature`, both base64url.
    pub(crate) fn seal(&self, key: &SigningKey) -> Secret {
        let base64 = base64_simd::URL_SAFE_NO_PAD;
        let payload = serde_json::to_vec(self).unwrap_or_default();
        let payload = base64.encode_to_string(payload);
        let signature = key.sign(payload.as_bytes());
        Secret::from(format!("{payload}.{}", base64.encode_to_string(signature)))
    }

    /// Verifies the signature and parses the ticket. The caller checks the expiry.
    pub(crate) fn open(text: &str, key: &SigningKey) -> Option<Self> {
        if text.len() > MAX_LEN {
            return None;
        }
        let base64 = base64_simd::URL_SAFE_NO_PAD;
        let (payload, signature) = text.split_once('.')?;
        let signature = base64.decode_to_vec(signature).ok()?;
        if !key.verifies(payload.as_bytes(), &signature) {
            return None;
        }
        serde_json::from_slice(&base64.decode_to_vec(payload).ok()?).ok()
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket")
            .field("kind", &self.kind)
            .field("environment", &self.environment)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signed_tickets_open() {
        let key = SigningKey::generate().unwrap();
        let ticket = Ticket {
            kind: Kind::Authorization,
            environment: "e".repeat(128),
            registration: "reg_0123456789abcdef0123456789abcdef".into(),
            harness: Some("f".repeat(64)),
            token: "tok_0123456789ab".into(),
            expires: 1_800_000_000,
            nonce: "00112233445566778899aabbccddeeff".into(),
        };
        let sealed = ticket.seal(&key);
        assert!(sealed.expose().len() < 1024, "{}", sealed.expose().len());
        assert_eq!(Ticket::open(sealed.expose(), &key), Some(ticket.clone()));
        assert_eq!(Ticket::open(sealed.expose(), &SigningKey::generate().unwrap()), None);
        let bytes = sealed.expose().as_bytes();
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let opened = Ticket::open(&changed, &key);
            // The last character of the signature has unused bits.
            assert!(opened.is_none() || opened == Some(ticket.clone()), "{at}");
            assert_eq!(Ticket::open(&sealed.expose()[..at], &key), None, "{at}");
        }
        assert!(!format!("{ticket:?}").contains("001122"));
    }
}
