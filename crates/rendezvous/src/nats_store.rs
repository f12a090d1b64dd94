//! The store of a cluster: JetStream buckets that every node shares.
//!
//! ```text
//! secrets       signing             the signing key
//! tokens        digest.SHA256       the record of a token
//!               id.ID               its digest
//! environments  BASE64URL(id)       the registration, and which node has its socket
//! used          NONCE               an authorization that was used; removed after its expiry
//! harnesses     REGISTRATION.KEY    when a harness was last connected; removed after a while
//! ```
//!
//! Invariant: every decision that admits a client reads NATS. The cache (`token_cache`) only avoids reads
//! for sockets that are already open, and a change of a token removes it. No bucket allows direct reads, which a
//! replica that is behind would answer.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_nats::jetstream::kv;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::Config;
use crate::nats::{Nats, NatsOptions, nats_error, with_timeout};
use crate::secret::{Secret, SigningKey};
use crate::store::{Registration, StoreError};
use crate::token::{Right, Scope, TokenRecord};
use crate::token_cache::TokenCache;

/// How often an update is retried when other nodes change the same record.
const MAX_ATTEMPTS: usize = 16;
/// How many records are read concurrently.
const CONCURRENT_READS: usize = 64;

/// The state of a cluster.
#[derive(Debug)]
pub struct NatsStore {
    nats: Arc<Nats>,
    token_cache: Mutex<TokenCache>,
}

impl NatsStore {
    /// Connects to NATS.
    pub async fn connect(options: &NatsOptions, config: &Config) -> Result<Self, StoreError> {
        // Doubled, because clocks differ.
        let keep = 2 * config.authorization_lifetime.max(config.reconnect_window);
        let nats = Arc::new(Nats::connect(options, keep).await?);
        Ok(Self { nats, token_cache: Mutex::default() })
    }

    pub(crate) fn nats(&self) -> &Arc<Nats> {
        &self.nats
    }

    pub(crate) fn signing_key(&self) -> &SigningKey {
        &self.nats.key
    }

    // --- tokens ---

    pub(crate) async fn token_by_digest(
        &self,
        digest: &str,
    ) -> Result<Option<TokenRecord>, StoreError> {
        self.nats.up()?;
        read(&self.nats.tokens, &digest_key(digest)).await
    }

    pub(crate) async fn token_by_id(&self, id: &str) -> Result<Option<TokenRecord>, StoreError> {
        self.nats.up()?;
        by_id(&self.nats.tokens, id).await
    }

    pub(crate) async fn invalid_tokens(
        &self,
        ids: BTreeSet<String>,
        now: u64,
    ) -> Result<Vec<String>, StoreError> {
        let (mut dead, mut unknown) = (Vec::new(), Vec::new());
        let sweep = {
            let mut cache = self.token_cache();
            for id in ids {
                match cache.get(&id) {
                    Some(token) if token.is_expired(now) => dead.push(id),
                    Some(_) => {}
                    None => unknown.push(id),
                }
            }
            cache.begin()
        };
        let mut reads = stream::iter(unknown)
            .map(|id| async move {
                let token = self.token_by_id(&id).await;
                (id, token)
            })
            .buffer_unordered(CONCURRENT_READS);
        while let Some((id, token)) = reads.next().await {
            match token? {
                Some(token) if !token.is_expired(now) => self.token_cache().insert(sweep, token),
                _ => dead.push(id),
            }
        }
        Ok(dead)
    }

    /// Clears the cache after any token may have changed.
    pub(crate) fn tokens_changed(&self) {
        self.token_cache().clear();
    }

    /// Forgets the token whose record in the bucket has changed; returns its id if that is known.
    pub(crate) fn token_changed(&self, key: &str) -> Option<String> {
        let mut cache = self.token_cache();
        let Some((kind, id_or_digest)) = key.split_once('.') else {
            cache.clear();
            return None;
        };
        let cached = cache.forget(id_or_digest);
        cached.or_else(|| (kind == ID).then(|| id_or_digest.to_owned()))
    }

    fn token_cache(&self) -> MutexGuard<'_, TokenCache> {
        self.token_cache.lock()
    }

    // --- environments ---

    pub(crate) async fn register(&self, registration: Registration) -> Result<(), StoreError> {
        self.nats.up()?;
        let key = environment_key(&registration.environment);
        let put = with_timeout(self.nats.environments.put(key, encode(&registration)?)).await?;
        put.map(drop).map_err(|error| nats_error(error.kind()))
    }

    pub(crate) async fn registration(
        &self,
        environment: &str,
    ) -> Result<Option<Registration>, StoreError> {
        self.nats.up()?;
        read(&self.nats.environments, &environment_key(environment)).await
    }

    pub(crate) async fn registrations(&self) -> Result<Vec<Registration>, StoreError> {
        self.nats.up()?;
        let mut all: Vec<Registration> = read_all(&self.nats.environments, "").await?;
        all.sort_by(|a, b| a.environment.cmp(&b.environment));
        Ok(all)
    }

    pub(crate) async fn remove(&self, environment: &str) -> Result<bool, StoreError> {
        if self.registration(environment).await?.is_none() {
            return Ok(false);
        }
        let removed =
            with_timeout(self.nats.environments.purge(environment_key(environment))).await?;
        removed.map_err(|error| nats_error(error.kind()))?;
        Ok(true)
    }

    /// Records that the environment's socket connected to this node or left `node`; `false` if the
    /// registration is not the current one. A later connection to another node is not overwritten.
    pub(crate) async fn record_socket(
        &self,
        environment: &str,
        registration: &str,
        change: SocketChange<'_>,
        now: u64,
    ) -> Result<bool, StoreError> {
        self.nats.up()?;
        let key = environment_key(environment);
        for _ in 0..MAX_ATTEMPTS {
            let entry = with_timeout(self.nats.environments.entry(key.clone())).await?;
            let entry = entry.map_err(|error| nats_error(error.kind()))?.filter(is_present);
            let Some(entry) = entry else { return Ok(false) };
            let mut known: Registration = decode(&entry.value)?;
            if known.id != registration {
                return Ok(false);
            }
            match change {
                SocketChange::Here => {
                    known.online_since = Some(now);
                    known.node = Some((*self.nats.node).to_owned());
                }
                SocketChange::Gone { node } if known.node.as_deref() != Some(node) => {
                    return Ok(true);
                }
                SocketChange::Gone { .. } => {
                    known.online_since = None;
                    known.node = None;
                }
            }
            known.last_seen = now;
            let value = encode(&known)?;
            match with_timeout(self.nats.environments.update(&key, value, entry.revision)).await? {
                Ok(_) => return Ok(true),
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(nats_error(error.kind())),
            }
        }
        Err(nats_error("too many concurrent changes of one environment"))
    }

    // --- what is used up, and who was here ---

    pub(crate) async fn use_once(&self, name: &str) -> Result<bool, StoreError> {
        self.nats.up()?;
        match with_timeout(self.nats.used.create(name, Bytes::new())).await? {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == kv::CreateErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(nats_error(error.kind())),
        }
    }

    pub(crate) async fn record_harness(&self, name: String, now: u64) -> Result<(), StoreError> {
        self.nats.up()?;
        let put = with_timeout(self.nats.harnesses.put(name, now.to_string().into())).await?;
        put.map(drop).map_err(|error| nats_error(error.kind()))
    }

    pub(crate) async fn harness_last_seen(&self, name: &str) -> Result<Option<u64>, StoreError> {
        self.nats.up()?;
        read(&self.nats.harnesses, name).await
    }
}

/// A change of an environment's socket.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SocketChange<'a> {
    /// It connected to this node.
    Here,
    /// It left this node.
    Gone { node: &'a str },
}

/// The tokens of a cluster, for creating and revoking them.
#[derive(Debug)]
pub struct NatsTokens(Box<kv::Store>);

impl NatsTokens {
    /// Connects to NATS.
    pub async fn connect(options: &NatsOptions) -> Result<Self, StoreError> {
        Ok(Self(Box::new(Nats::tokens(options).await?)))
    }

    pub(crate) async fn create(
        &self,
        scope: Scope,
        can: Vec<Right>,
        now: u64,
        expires: Option<u64>,
    ) -> Result<(Secret, TokenRecord), StoreError> {
        let (token, record) = TokenRecord::generate(scope, can, now, expires)?;
        for (key, value) in [
            (digest_key(&record.digest), encode(&record)?),
            (id_key(&record.id), encode(&record.digest)?),
        ] {
            with_timeout(self.0.create(key, value))
                .await?
                .map_err(|error| nats_error(error.kind()))?;
        }
        Ok((token, record))
    }

    pub(crate) async fn list(&self) -> Result<Vec<TokenRecord>, StoreError> {
        let mut all: Vec<TokenRecord> = read_all(&self.0, "digest.").await?;
        all.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        Ok(all)
    }

    pub(crate) async fn revoke(&self, id: &str) -> Result<bool, StoreError> {
        let digest = match read(&self.0, &id_key(id)).await? {
            Some(digest) => Some(digest),
            // Listing also finds tokens whose second record was never written.
            None => {
                let token = self.list().await?.into_iter().find(|token| token.id == id);
                token.map(|token| token.digest)
            }
        };
        let Some(digest) = digest else { return Ok(false) };
        // The digest first: without it the token is invalid, whatever happens next.
        for key in [digest_key(&digest), id_key(id)] {
            with_timeout(self.0.purge(key)).await?.map_err(|error| nats_error(error.kind()))?;
        }
        Ok(true)
    }
}

async fn by_id(tokens: &kv::Store, id: &str) -> Result<Option<TokenRecord>, StoreError> {
    let digest: Option<String> = read(tokens, &id_key(id)).await?;
    match digest {
        Some(digest) => read(tokens, &digest_key(&digest)).await,
        None => Ok(None),
    }
}

/// How the keys of the records by id begin.
const ID: &str = "id";

fn digest_key(digest: &str) -> String {
    format!("digest.{digest}")
}

fn id_key(id: &str) -> String {
    format!("{ID}.{id}")
}

/// The bucket key of an environment id, which may contain characters that keys cannot.
fn environment_key(environment: &str) -> String {
    base64_simd::URL_SAFE_NO_PAD.encode_to_string(environment)
}

/// The environment id of a bucket key.
pub(crate) fn environment_of(key: &str) -> Option<String> {
    String::from_utf8(base64_simd::URL_SAFE_NO_PAD.decode_to_vec(key).ok()?).ok()
}

fn encode<T: Serialize>(value: &T) -> Result<Bytes, StoreError> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|_| nats_error("cannot encode a record"))
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, StoreError> {
    // Errors of serde may quote the record.
    serde_json::from_slice(bytes).map_err(|_| nats_error("cannot decode a record"))
}

fn is_present(entry: &kv::Entry) -> bool {
    entry.operation == kv::Operation::Put
}

async fn read<T: DeserializeOwned>(bucket: &kv::Store, key: &str) -> Result<Option<T>, StoreError> {
    let entry = with_timeout(bucket.entry(key)).await?.map_err(|error| nats_error(error.kind()))?;
    entry.filter(is_present).map(|entry| decode(&entry.value)).transpose()
}

/// Reads every entry of a bucket whose key has this prefix.
async fn read_all<T: DeserializeOwned>(
    bucket: &kv::Store,
    prefix: &str,
) -> Result<Vec<T>, StoreError> {
    let keys = with_timeout(bucket.keys()).await?;
    let mut keys = keys.map_err(|error| nats_error(error.kind()))?;
    let mut wanted = Vec::new();
    while let Some(key) = with_timeout(keys.next()).await? {
        let key = key.map_err(|error| nats_error(error.kind()))?;
        if key.starts_with(prefix) {
            wanted.push(key);
        }
    }
    let mut reading = stream::iter(wanted)
        .map(|key| async move { read(bucket, &key).await })
        .buffer_unordered(CONCURRENT_READS);
    let mut all = Vec::new();
    while let Some(value) = reading.next().await {
        // An entry removed meanwhile is skipped.
        all.extend(value?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_keys_round_trip() {
        for id in ["e1", "a.b", ".", "x~y:z@w+v-", "…"] {
            let key = environment_key(id);
            assert!(key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)));
            assert_eq!(environment_of(&key).as_deref(), Some(id));
        }
        assert_eq!(environment_of("!"), None);
    }
}
