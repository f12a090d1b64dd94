//! Tokens: rights, scopes and expiry.
//!
//! Invariant: only the digest of a token is stored and looked up, never the token.

use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::secret::{Secret, digest, fill, random_name};

/// A right that a token grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Act as an environment: register, and validate the keys of harnesses.
    Register,
    /// Act as a harness: connect to environments.
    Connect,
    /// List and remove environments.
    Manage,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Register => "register",
            Self::Connect => "connect",
            Self::Manage => "manage",
        })
    }
}

/// The text names no right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected register, connect or manage")]
pub struct UnknownRight;

impl FromStr for Right {
    type Err = UnknownRight;

    fn from_str(text: &str) -> Result<Self, UnknownRight> {
        match text {
            "register" => Ok(Self::Register),
            "connect" => Ok(Self::Connect),
            "manage" => Ok(Self::Manage),
            _ => Err(UnknownRight),
        }
    }
}

/// The environments that a token is valid for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// All environments.
    Any,
    /// The environment with this id.
    Environment(String),
    /// Environments whose id has this prefix.
    Prefix(String),
}

impl Scope {
    /// Whether the scope includes an environment.
    pub fn covers(&self, environment: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Environment(id) => id == environment,
            Self::Prefix(prefix) => environment.starts_with(prefix.as_str()),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Environment(id) => f.write_str(id),
            Self::Prefix(prefix) => write!(f, "{prefix}*"),
        }
    }
}

/// The stored record of a token. Times are seconds since 1970.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The token's id, which is not secret.
    pub id: String,
    /// SHA-256 of the token, in hex.
    pub digest: String,
    /// The environments that it is valid for.
    pub scope: Scope,
    /// The rights that it grants.
    pub can: Vec<Right>,
    /// When it was created.
    pub created: u64,
    /// When it expires; `None` for never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<u64>,
}

impl fmt::Debug for TokenRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenRecord")
            .field("id", &self.id)
            .field("scope", &self.scope)
            .field("can", &self.can)
            .finish_non_exhaustive()
    }
}

impl TokenRecord {
    /// Generates a token and its record.
    pub fn generate(
        scope: Scope,
        can: Vec<Right>,
        now: u64,
        expires: Option<u64>,
    ) -> io::Result<(Secret, Self)> {
        let mut bytes = [0; 32];
        fill(&mut bytes)?;
        let token = format!("crt_{}", base64_simd::URL_SAFE_NO_PAD.encode_to_string(bytes));
        let id = random_name("tok_")?[..16].to_owned();
        let digest = digest(token.as_bytes());
        Ok((Secret::from(token), Self { id, digest, scope, can, created: now, expires }))
    }

    /// Whether it has expired.
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }

    /// Whether it grants this right for this environment.
    pub fn permits(&self, right: Right, environment: &str) -> bool {
        self.can.contains(&right) && self.scope.covers(environment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_permits_only_its_scope_and_rights() {
        let scope = Scope::Prefix("ci-".into());
        let (token, record) =
            TokenRecord::generate(scope, vec![Right::Connect], 100, Some(200)).unwrap();
        assert!(record.permits(Right::Connect, "ci-1"));
        assert!(!record.permits(Right::Connect, "prod"));
        assert!(!record.permits(Right::Register, "ci-1"));
        assert!(!record.is_expired(199) && record.is_expired(200));
        assert_eq!(record.digest, digest(token.expose().as_bytes()));
        let shown = format!("{record:?} {token:?}");
        assert!(!shown.contains(token.expose()) && !shown.contains(&record.digest), "{shown}");
    }
}
