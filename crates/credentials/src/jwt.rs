//! The claims of a JSON Web Token.
//!
//! Claims are read without verification: the service that receives a token verifies it. Here they only
//! show when to renew a token and which account it is for.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64_simd::URL_SAFE_NO_PAD;
use codex_exec_remote::Secret;
use serde::Deserialize;
use serde_json::Value;

/// The claims that this crate uses. `Debug` shows only the expiry.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct Claims {
    /// When the token expires, in seconds since 1970.
    pub exp: Option<f64>,
    /// The issuer.
    pub iss: Option<String>,
    /// The user.
    pub sub: Option<String>,
    /// The audience: a text or a list.
    aud: Value,
    /// The account that the token acts for.
    account_id: Option<String>,
    /// Claims that the issuer groups, the account id among them.
    #[serde(rename = "https://api.openai.com/auth")]
    nested: Value,
    /// The id of an agent identity.
    pub agent_runtime_id: Option<String>,
    /// The key of an agent identity: base64 of a PKCS#8 Ed25519 key.
    pub agent_private_key: Option<Secret>,
    /// The user's address, for display.
    pub email: Option<String>,
}

/// Parses the claims of a token; `None` if it is not a JWT.
pub fn claims(token: &Secret) -> Option<Claims> {
    let mut parts = token.expose().split('.');
    let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let bytes = URL_SAFE_NO_PAD.decode_to_vec(payload.trim_end_matches('=')).ok()?;
    serde_json::from_slice(&bytes).ok()
}

impl Claims {
    /// Whether the token expires by `time` plus `margin`; false without an expiry.
    pub fn expires_by(&self, time: SystemTime, margin: Duration) -> bool {
        let by = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO) + margin;
        self.exp.is_some_and(|exp| exp <= by.as_secs_f64())
    }

    /// The audiences.
    pub fn audiences(&self) -> Vec<&str> {
        match &self.aud {
            Value::String(one) => vec![one],
            Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        }
    }

    /// The account that the token acts for.
    pub fn account(&self) -> Option<&str> {
        self.account_id.as_deref().or_else(|| self.nested.get("chatgpt_account_id")?.as_str())
    }

    /// The account in the grouped claims of a ChatGPT token, if it names one; `None` if the claim is not a text.
    pub(crate) fn chatgpt_account(&self) -> Option<Option<&str>> {
        match self.nested.get("chatgpt_account_id") {
            None | Some(Value::Null) => Some(None),
            Some(id) => id.as_str().map(Some),
        }
    }

    /// Whether the account of a ChatGPT token is subject to FedRAMP.
    pub(crate) fn is_fedramp(&self) -> bool {
        self.nested.get("chatgpt_account_is_fedramp") == Some(&Value::Bool(true))
    }
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claims").field("exp", &self.exp).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(claims: &str) -> Secret {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode_to_string(claims)).into()
    }

    #[test]
    fn jwt_claims_are_parsed() {
        let read = claims(&token(
            r#"{"exp":100,"aud":["a","b"],"https://api.openai.com/auth":{"chatgpt_account_id":"acc"}}"#,
        ))
        .unwrap();
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(!read.expires_by(at(39), Duration::from_secs(60)));
        assert!(read.expires_by(at(40), Duration::from_secs(60)));
        assert_eq!(read.audiences(), ["a", "b"]);
        assert_eq!(read.account(), Some("acc"));
        assert!(!claims(&token("{}")).unwrap().expires_by(at(1 << 40), Duration::ZERO));
    }

    #[test]
    fn malformed_jwts_are_rejected() {
        for bad in ["", "a.b", "a.b.c.d", "e30.!!.x", "e30.e3.x", "opaque"] {
            assert!(claims(&bad.into()).is_none(), "{bad}");
        }
    }
}
