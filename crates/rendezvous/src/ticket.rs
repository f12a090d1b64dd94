//! Tickets: small signed statements that come back to us.
//!
//! Two kinds leave the service. A *pass* is part of a rendezvous URL and lets its bearer open one
//! side's websocket. An *authorization* goes to a harness, travels inside the encrypted handshake,
//! and is handed back by the environment, which asks whether it is good. Neither can be turned
//! into the other: the kind is signed too.

use serde::{Deserialize, Serialize};

use crate::secret::{Secret, SigningKey};

/// What a ticket says.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ticket {
    #[serde(rename = "k")]
    pub kind: Kind,
    #[serde(rename = "e")]
    pub environment: String,
    #[serde(rename = "r")]
    pub registration: String,
    /// The fingerprint of a harness's key, or a random name where there is no key.
    #[serde(rename = "h", default, skip_serializing_if = "Option::is_none")]
    pub harness: Option<String>,
    /// The token that it was asked for with.
    #[serde(rename = "t")]
    pub token: String,
    /// When it ends, in seconds since 1970.
    #[serde(rename = "x")]
    pub expires: u64,
    /// Different in every ticket.
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

/// The longest ticket that is looked at; an authorization may have 4,096 bytes.
const MAX_LEN: usize = 4096;

impl Ticket {
    /// Signs it: `payload.signature`, both base64url.
    pub(crate) fn seal(&self, key: &SigningKey) -> Secret {
        let base64 = base64_simd::URL_SAFE_NO_PAD;
        let payload = serde_json::to_vec(self).unwrap_or_default();
        let payload = base64.encode_to_string(payload);
        let signature = key.sign(payload.as_bytes());
        Secret::from(format!("{payload}.{}", base64.encode_to_string(signature)))
    }

    /// Reads it back if we signed it. Whether it is over is the caller's question.
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
            // The last character of the signature has bits that say nothing.
            assert!(opened.is_none() || opened == Some(ticket.clone()), "{at}");
            assert_eq!(Ticket::open(&sealed.expose()[..at], &key), None, "{at}");
        }
        assert!(!format!("{ticket:?}").contains("001122"));
    }
}
