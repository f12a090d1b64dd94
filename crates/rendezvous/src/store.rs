//! Persistent state: tokens, registrations, used authorizations and recent harnesses.
//!
//! Invariant: a change for which a call returned `Ok` survives a restart. [`FileStore`] is the data
//! directory of one service; the command line also writes tokens to it, and every lookup sees the current
//! file. [`NatsStore`] holds the same in NATS, for all nodes of a cluster.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use codex_exec_remote::NoiseKeyJson;
use serde::{Deserialize, Serialize};

pub use crate::file_store::FileStore;
use crate::file_store::TokenFile;
use crate::nats_store::SocketChange;
pub use crate::nats_store::{NatsStore, NatsTokens};
use crate::secret::{Secret, SigningKey};
use crate::token::{Right, Scope, TokenRecord};

/// The registration of an environment. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The environment's id.
    pub environment: String,
    /// The id of this registration.
    pub id: String,
    /// The executor's key; `None` in the older revision, which has no encryption.
    pub executor_key: Option<NoiseKeyJson>,
    /// The id of the token that registered it.
    pub token: String,
    /// When it registered.
    pub registered: u64,
    /// When its socket connected; `None` while it is offline.
    pub online_since: Option<u64>,
    /// When its socket was last connected, or when it registered.
    pub last_seen: u64,
    /// The node of a cluster that has its socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// Why the store failed. As far as is known, nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The data directory cannot be read or written, or its disk is full.
    #[error("cannot use the data directory: {0}")]
    File(#[from] io::Error),
    /// Another service uses the data directory.
    #[error("another service is using the data directory {0}")]
    Locked(std::path::PathBuf),
    /// NATS is unreachable.
    #[error("cannot reach NATS; retrying")]
    NatsGone,
    /// NATS refused the operation.
    #[error("cannot use NATS: {0}")]
    Nats(String),
}

/// The store of a service.
#[derive(Debug, Clone)]
pub enum Store {
    /// In a directory.
    File(Arc<FileStore>),
    /// In NATS.
    Nats(Arc<NatsStore>),
}

/// A change of the tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenChange {
    Create(TokenRecord),
    Revoke(String),
}

/// The tokens that are not revoked.
#[derive(Default, Clone)]
pub(crate) struct Tokens {
    by_digest: HashMap<String, TokenRecord>,
    digests: HashMap<String, String>,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.digests.keys()).finish()
    }
}

impl Tokens {
    pub(crate) fn apply(&mut self, change: TokenChange) {
        match change {
            TokenChange::Create(record) => {
                // A damaged or forged file may repeat an id or a digest. What is replaced is gone from both
                // maps: a token that only one of them has could not be revoked.
                if let Some(old) = self.digests.insert(record.id.clone(), record.digest.clone()) {
                    self.by_digest.remove(&old);
                }
                let id = record.id.clone();
                let old = self.by_digest.insert(record.digest.clone(), record);
                if let Some(old) = old.filter(|old| old.id != id) {
                    self.digests.remove(&old.id);
                }
            }
            TokenChange::Revoke(id) => {
                if let Some(digest) = self.digests.remove(&id) {
                    self.by_digest.remove(&digest);
                }
            }
        }
    }

    pub(crate) fn by_digest(&self, digest: &str) -> Option<&TokenRecord> {
        self.by_digest.get(digest)
    }

    pub(crate) fn by_id(&self, id: &str) -> Option<&TokenRecord> {
        self.by_digest.get(self.digests.get(id)?)
    }

    /// All tokens, oldest first.
    pub(crate) fn list(&self) -> Vec<TokenRecord> {
        let mut records: Vec<_> = self.by_digest.values().cloned().collect();
        records.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        records
    }
}

impl Store {
    /// The signing key of tickets.
    pub fn signing_key(&self) -> SigningKey {
        match self {
            Self::File(store) => store.signing_key().clone(),
            Self::Nats(store) => store.signing_key().clone(),
        }
    }

    /// Finds a token by its digest, unless it is revoked.
    pub async fn token_by_digest(&self, digest: &str) -> Result<Option<TokenRecord>, StoreError> {
        match self {
            Self::File(store) => Ok(store.tokens()?.by_digest(digest).cloned()),
            Self::Nats(store) => store.token_by_digest(digest).await,
        }
    }

    /// Finds a token by its id, unless it is revoked.
    pub async fn token_by_id(&self, id: &str) -> Result<Option<TokenRecord>, StoreError> {
        match self {
            Self::File(store) => Ok(store.tokens()?.by_id(id).cloned()),
            Self::Nats(store) => store.token_by_id(id).await,
        }
    }

    /// The tokens among these that are revoked or expired.
    pub(crate) async fn invalid_tokens(
        &self,
        ids: BTreeSet<String>,
        now: u64,
    ) -> Result<Vec<String>, StoreError> {
        match self {
            Self::File(store) => {
                let tokens = store.tokens()?;
                let dead = |id: &String| tokens.by_id(id).is_none_or(|token| token.is_expired(now));
                Ok(ids.into_iter().filter(dead).collect())
            }
            Self::Nats(store) => store.invalid_tokens(ids, now).await,
        }
    }

    /// Stores a registration, replacing an earlier one of the same environment.
    pub async fn register(&self, registration: Registration) -> Result<(), StoreError> {
        match self {
            Self::File(store) => store.register(registration).await,
            Self::Nats(store) => store.register(registration).await,
        }
    }

    /// The registration of an environment.
    pub async fn registration(&self, id: &str) -> Result<Option<Registration>, StoreError> {
        match self {
            Self::File(store) => Ok(store.registration(id)),
            Self::Nats(store) => store.registration(id).await,
        }
    }

    /// All registrations, sorted by environment.
    pub async fn registrations(&self) -> Result<Vec<Registration>, StoreError> {
        match self {
            Self::File(store) => Ok(store.registrations()),
            Self::Nats(store) => store.registrations().await,
        }
    }

    /// Removes an environment; `false` if there is none.
    pub async fn remove(&self, environment: &str) -> Result<bool, StoreError> {
        match self {
            Self::File(store) => store.remove(environment).await,
            Self::Nats(store) => store.remove(environment).await,
        }
    }

    /// Records that an environment's socket connected to this process (`online`) or left it; `false` if
    /// the registration is not the current one.
    pub async fn set_online(
        &self,
        environment: &str,
        registration: &str,
        online: bool,
        now: u64,
    ) -> Result<bool, StoreError> {
        match self {
            Self::File(store) => store.set_online(environment, registration, online, now).await,
            Self::Nats(store) => {
                let node = store.nats().node.clone();
                let change =
                    if online { SocketChange::Here } else { SocketChange::Gone { node: &node } };
                store.record_socket(environment, registration, change, now).await
            }
        }
    }

    /// Marks a name as used; `false` if it was used before. Remembered until `expires`.
    pub async fn use_once(&self, name: &str, expires: u64, now: u64) -> Result<bool, StoreError> {
        match self {
            Self::File(store) => store.use_once(name, expires, now).await,
            Self::Nats(store) => store.use_once(name).await,
        }
    }

    /// Records that a harness of this registration is connected.
    pub(crate) async fn record_harness(
        &self,
        registration: &str,
        harness: &str,
        now: u64,
    ) -> Result<(), StoreError> {
        let name = format!("{registration}.{harness}");
        match self {
            Self::File(store) => store.record_harness(name, now).await,
            Self::Nats(store) => store.record_harness(name, now).await,
        }
    }

    /// When a harness of this registration was last recorded; old records are dropped.
    pub(crate) async fn harness_last_seen(
        &self,
        registration: &str,
        harness: &str,
    ) -> Result<Option<u64>, StoreError> {
        let name = format!("{registration}.{harness}");
        match self {
            Self::File(store) => Ok(store.harness_last_seen(&name)),
            Self::Nats(store) => store.harness_last_seen(&name).await,
        }
    }

    /// Fails while the store is unreachable.
    pub(crate) fn ready(&self) -> Result<(), StoreError> {
        match self {
            Self::File(_) => Ok(()),
            Self::Nats(store) => store.nats().up(),
        }
    }
}

/// The tokens of a service or a cluster, for creating and revoking them.
#[derive(Debug)]
pub enum TokenStore {
    /// In a directory.
    File(TokenFile),
    /// In NATS.
    Nats(NatsTokens),
}

impl TokenStore {
    /// Creates a token and returns it; only its digest is stored.
    pub async fn create(
        &self,
        scope: Scope,
        can: Vec<Right>,
        now: u64,
        expires: Option<u64>,
    ) -> Result<(Secret, TokenRecord), StoreError> {
        match self {
            Self::File(tokens) => Ok(tokens.create(scope, can, now, expires)?),
            Self::Nats(tokens) => tokens.create(scope, can, now, expires).await,
        }
    }

    /// The tokens that are not revoked, oldest first.
    pub async fn list(&self) -> Result<Vec<TokenRecord>, StoreError> {
        match self {
            Self::File(tokens) => Ok(tokens.list()?),
            Self::Nats(tokens) => tokens.list().await,
        }
    }

    /// Revokes a token; `false` if no token has this id.
    pub async fn revoke(&self, id: &str) -> Result<bool, StoreError> {
        match self {
            Self::File(tokens) => Ok(tokens.revoke(id)?),
            Self::Nats(tokens) => tokens.revoke(id).await,
        }
    }
}
