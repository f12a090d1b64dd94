//! Tokens of open sockets that were read from NATS, so that a sweep does not read them all again.
//!
//! Invariant: what a read returns that began before a change of its token is not cached after the change. A
//! change removes one token, so that a sweep reads what has changed and no more, however many there are.

use std::collections::{HashMap, HashSet};

use crate::token::TokenRecord;

/// Tokens by id.
#[derive(Debug, Default)]
pub(crate) struct TokenCache {
    tokens: HashMap<String, TokenRecord>,
    /// The id of each digest in `tokens`.
    ids: HashMap<String, String>,
    /// The number of the current sweep; [`Self::clear`] begins another.
    sweep: u64,
    /// Ids and digests that have changed since the sweep began.
    changed: HashSet<String>,
}

/// A sweep that reads tokens. What it read is cached only if nothing has changed meanwhile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sweep(u64);

impl TokenCache {
    /// Begins a sweep. An earlier one caches nothing any more.
    pub(crate) fn begin(&mut self) -> Sweep {
        self.sweep += 1;
        self.changed.clear();
        Sweep(self.sweep)
    }

    pub(crate) fn get(&self, id: &str) -> Option<&TokenRecord> {
        self.tokens.get(id)
    }

    /// Caches what the sweep read.
    pub(crate) fn insert(&mut self, sweep: Sweep, token: TokenRecord) {
        let is_changed = self.changed.contains(&token.id) || self.changed.contains(&token.digest);
        if sweep.0 == self.sweep && !is_changed {
            self.ids.insert(token.digest.clone(), token.id.clone());
            self.tokens.insert(token.id.clone(), token);
        }
    }

    /// The token with this id or digest has changed. Returns its id if it was cached.
    pub(crate) fn forget(&mut self, id_or_digest: &str) -> Option<String> {
        self.changed.insert(id_or_digest.to_owned());
        let id = self.ids.get(id_or_digest).map_or(id_or_digest, String::as_str);
        let token = self.tokens.remove(id)?;
        self.ids.remove(&token.digest);
        Some(token.id)
    }

    /// Any token may have changed.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.ids.clear();
        self.begin();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::Scope;

    #[test]
    fn a_cached_token_is_never_older_than_its_last_change() {
        let mut random = fastrand::Rng::with_seed(9);
        let mut cache = TokenCache::default();
        // The truth: the version of each token, kept as its time of creation.
        let mut versions = [0u64; 6];
        let record = |at: usize, version: u64| TokenRecord {
            id: format!("t{at}"),
            digest: format!("d{at}"),
            scope: Scope::Any,
            can: Vec::new(),
            created: version,
            expires: None,
        };
        let mut reading: Vec<(Sweep, TokenRecord)> = Vec::new();
        let mut sweep = cache.begin();
        let mut cached = 0;
        for _ in 0..50_000 {
            let at = random.usize(..versions.len());
            match random.u32(..20) {
                0 => {
                    versions[at] += 1;
                    let name = if random.bool() { format!("t{at}") } else { format!("d{at}") };
                    cache.forget(&name);
                }
                1 if random.u32(..10) == 0 => {
                    versions.iter_mut().for_each(|version| *version += 1);
                    cache.clear();
                }
                2 => sweep = cache.begin(),
                3..10 => reading.push((sweep, record(at, versions[at]))),
                _ if !reading.is_empty() => {
                    let (sweep, token) = reading.swap_remove(random.usize(..reading.len()));
                    cache.insert(sweep, token);
                }
                _ => {}
            }
            for (at, version) in versions.iter().enumerate() {
                if let Some(token) = cache.get(&format!("t{at}")) {
                    cached += 1;
                    assert_eq!(token.created, *version, "stale");
                }
            }
        }
        assert!(cached > 10_000, "{cached}");
    }
}
