//! The store of a single service: a data directory with three files.
//!
//! ```text
//! secret       the signing key, mode 0600
//! tokens.log   written by the command line, read by the service
//! state.log    written by the service, which holds the lock of the directory
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

use crate::journal::{Journal, SharedJournal};
use crate::secret::{Secret, SigningKey};
use crate::store::{Registration, StoreError, TokenChange, Tokens};
use crate::token::{Right, Scope, TokenRecord};

/// The size of the state journal, in bytes, at which compaction is tried.
const COMPACT_BYTES: u64 = 4 << 20;
/// How long the time of a harness's last connection is kept, in seconds; longer than any reconnect window.
const HARNESS_RETENTION_SECONDS: u64 = 3600;

/// A data directory that a service has opened.
#[derive(Debug)]
pub struct FileStore {
    key: SigningKey,
    tokens: Mutex<(SharedJournal, Tokens)>,
    state: Arc<Mutex<State>>,
    /// Locked while the service runs.
    _lock: File,
}

#[derive(Debug)]
struct State {
    journal: Journal,
    compact_at: u64,
    contents: Contents,
}

/// What the records of a state journal add up to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    registrations: BTreeMap<String, Registration>,
    used: HashMap<String, u64>,
    /// When harnesses were last connected.
    harnesses: HashMap<String, u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Record {
    Registered(Registration),
    Removed(String),
    Seen { environment: String, registration: String, online: bool, at: u64 },
    Used { name: String, expires: u64 },
    Harness { name: String, at: u64 },
}

impl FileStore {
    /// Opens the directory for this process alone, creating it if needed.
    pub fn open(directory: &Path, now: u64) -> Result<Self, StoreError> {
        make_directory(directory)?;
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(directory.join("lock"))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(StoreError::Locked(directory.to_owned()));
        }
        let key = SigningKey::open(&directory.join("secret"))?;
        let (journal, records) = Journal::open(&directory.join("state.log"))?;
        let contents = Contents::of(records);
        let mut state = State { journal, compact_at: COMPACT_BYTES, contents };
        // Environments that were online when the last service died count as online until now, so they
        // may reconnect with the same URL.
        for registration in state.contents.registrations.values_mut() {
            if registration.online_since.take().is_some() {
                registration.last_seen = now;
            }
        }
        state.compact(now)?;
        let tokens = (SharedJournal::new(directory.join("tokens.log")), Tokens::default());
        let store = Self {
            key,
            tokens: Mutex::new(tokens),
            state: Arc::new(Mutex::new(state)),
            _lock: lock,
        };
        drop(store.tokens()?);
        Ok(store)
    }

    pub(crate) fn signing_key(&self) -> &SigningKey {
        &self.key
    }

    /// The tokens as they are in the file at this moment.
    pub(crate) fn tokens(&self) -> Result<impl std::ops::Deref<Target = Tokens>, StoreError> {
        let mut guard = self.tokens.lock();
        let (journal, tokens) = &mut *guard;
        apply_changes(journal, tokens)?;
        Ok(TokensGuard(guard))
    }

    pub(crate) fn registration(&self, environment: &str) -> Option<Registration> {
        self.state.lock().contents.registrations.get(environment).cloned()
    }

    pub(crate) fn registrations(&self) -> Vec<Registration> {
        self.state.lock().contents.registrations.values().cloned().collect()
    }

    pub(crate) async fn register(&self, registration: Registration) -> Result<(), StoreError> {
        self.record(Record::Registered(registration), true).await
    }

    pub(crate) async fn remove(&self, environment: &str) -> Result<bool, StoreError> {
        if self.registration(environment).is_none() {
            return Ok(false);
        }
        self.record(Record::Removed(environment.to_owned()), true).await?;
        Ok(true)
    }

    pub(crate) async fn set_online(
        &self,
        environment: &str,
        registration: &str,
        online: bool,
        at: u64,
    ) -> Result<bool, StoreError> {
        if self.registration(environment).is_none_or(|known| known.id != registration) {
            return Ok(false);
        }
        let (environment, registration) = (environment.to_owned(), registration.to_owned());
        self.record(Record::Seen { environment, registration, online, at }, false).await?;
        Ok(true)
    }

    pub(crate) async fn record_harness(&self, name: String, at: u64) -> Result<(), StoreError> {
        let state = self.state.clone();
        blocking(move || {
            let mut state = state.lock();
            state.write(Record::Harness { name, at }, false)?;
            state.compact_if_large(at);
            Ok(())
        })
        .await
    }

    pub(crate) fn harness_last_seen(&self, name: &str) -> Option<u64> {
        self.state.lock().contents.harnesses.get(name).copied()
    }

    pub(crate) async fn use_once(
        &self,
        name: &str,
        expires: u64,
        now: u64,
    ) -> Result<bool, StoreError> {
        let (state, name) = (self.state.clone(), name.to_owned());
        blocking(move || {
            let mut state = state.lock();
            if state.contents.used.contains_key(&name) {
                return Ok(false);
            }
            // Written first: if that fails, the name is not used up.
            state.write(Record::Used { name, expires }, true)?;
            state.compact_if_large(now);
            Ok(true)
        })
        .await
    }

    async fn record(&self, record: Record, durable: bool) -> Result<(), StoreError> {
        let state = self.state.clone();
        blocking(move || state.lock().write(record, durable)).await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(io::Error::other)??)
}

impl State {
    fn write(&mut self, record: Record, durable: bool) -> io::Result<()> {
        self.journal.append(&record, durable)?;
        self.contents.apply(record);
        Ok(())
    }

    fn compact_if_large(&mut self, now: u64) {
        if self.journal.len() >= self.compact_at
            && let Err(error) = self.compact(now)
        {
            // The journal keeps growing; try again after another step.
            tracing::warn!(%error, "cannot compact the state");
            self.compact_at = self.journal.len() + COMPACT_BYTES;
        }
    }

    fn compact(&mut self, now: u64) -> io::Result<()> {
        self.contents.forget_before(now);
        self.journal.rewrite(self.contents.records())?;
        self.compact_at = (self.journal.len() * 2).max(COMPACT_BYTES);
        Ok(())
    }
}

impl Contents {
    /// What these records add up to.
    pub(crate) fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut contents = Self::default();
        records.into_iter().for_each(|record| contents.apply(record));
        contents
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Registered(registration) => {
                self.registrations.insert(registration.environment.clone(), registration);
            }
            Record::Removed(environment) => {
                self.registrations.remove(&environment);
            }
            Record::Seen { environment, registration, online, at } => {
                if let Some(known) = self.registrations.get_mut(&environment)
                    && known.id == registration
                {
                    known.online_since = online.then_some(at);
                    known.last_seen = at;
                }
            }
            Record::Used { name, expires } => {
                self.used.insert(name, expires);
            }
            Record::Harness { name, at } => {
                self.harnesses.insert(name, at);
            }
        }
    }

    /// Drops what is over at this time. The times are of a file, so they may be any.
    pub(crate) fn forget_before(&mut self, now: u64) {
        self.used.retain(|_, expires| *expires > now);
        self.harnesses.retain(|_, at| at.saturating_add(HARNESS_RETENTION_SECONDS) > now);
    }

    /// The fewest records that add up to this.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        let registrations = self.registrations.values().cloned().map(Record::Registered);
        let used = self.used.iter();
        let used = used.map(|(name, &expires)| Record::Used { name: name.clone(), expires });
        let harnesses = self.harnesses.iter();
        let harnesses = harnesses.map(|(name, &at)| Record::Harness { name: name.clone(), at });
        registrations.chain(used).chain(harnesses)
    }
}

struct TokensGuard<'a>(MutexGuard<'a, (SharedJournal, Tokens)>);

impl std::ops::Deref for TokensGuard<'_> {
    type Target = Tokens;

    fn deref(&self) -> &Tokens {
        &self.0.1
    }
}

fn apply_changes(journal: &mut SharedJournal, tokens: &mut Tokens) -> io::Result<()> {
    if let Some((fresh, changes)) = journal.changes()? {
        if fresh {
            *tokens = Tokens::default();
        }
        changes.into_iter().for_each(|change| tokens.apply(change));
    }
    Ok(())
}

fn make_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    check_directory(directory)
}

/// Fails if others can write the directory: they could replace the tokens and the signing key.
fn check_directory(directory: &Path) -> io::Result<()> {
    let metadata = directory.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    // Root may keep tokens for the account of a service, which owns the directory.
    let trusted = own == 0 || metadata.uid() == own || metadata.uid() == 0;
    if trusted && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    let message =
        format!("others can write {}; make it yours and run chmod go-w on it", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// The tokens of a data directory, whether or not a service runs on it.
#[derive(Debug, Clone)]
pub struct TokenFile(PathBuf);

impl TokenFile {
    /// The tokens of this directory, which the first token creates.
    pub fn new(directory: &Path) -> Self {
        Self(directory.join("tokens.log"))
    }

    /// Creates a token and returns it; only its digest is stored.
    pub fn create(
        &self,
        scope: Scope,
        can: Vec<Right>,
        now: u64,
        expires: Option<u64>,
    ) -> io::Result<(Secret, TokenRecord)> {
        let (token, record) = TokenRecord::generate(scope, can, now, expires)?;
        self.0.parent().map_or(Ok(()), make_directory)?;
        SharedJournal::append(&self.0, &TokenChange::Create(record.clone()))?;
        Ok((token, record))
    }

    /// The tokens that are not revoked, the oldest first.
    pub fn list(&self) -> io::Result<Vec<TokenRecord>> {
        Ok(self.read()?.list())
    }

    /// Revokes a token; `false` if there is none with that id.
    pub fn revoke(&self, id: &str) -> io::Result<bool> {
        if self.read()?.by_id(id).is_none() {
            return Ok(false);
        }
        SharedJournal::append(&self.0, &TokenChange::Revoke(id.to_owned()))?;
        Ok(true)
    }

    fn read(&self) -> io::Result<Tokens> {
        if let Some(directory) = self.0.parent() {
            // Otherwise a misspelt directory would look like one without tokens.
            directory.metadata()?;
        }
        let mut tokens = Tokens::default();
        apply_changes(&mut SharedJournal::new(self.0.clone()), &mut tokens)?;
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(environment: &str) -> Registration {
        Registration {
            environment: environment.into(),
            id: format!("reg_{environment}"),
            executor_key: None,
            token: "tok".into(),
            registered: 1,
            online_since: None,
            last_seen: 1,
            node: None,
        }
    }

    #[tokio::test]
    async fn full_disk_refuses_changes_and_recovers() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), 1).unwrap();
        store.register(registration("before")).await.unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let real = store.state.lock().journal.replace_file(full);
        store.register(registration("refused")).await.unwrap_err();
        store.use_once("refused", 100, 1).await.unwrap_err();
        assert!(!store.remove("nobody").await.unwrap());
        store.remove("before").await.unwrap_err();
        // A change that could not be stored did not happen.
        assert_eq!(store.registrations(), [registration("before")]);
        store.state.lock().journal.replace_file(real);
        store.register(registration("after")).await.unwrap();
        assert!(store.use_once("refused", 100, 1).await.unwrap());
        drop(store);
        let store = FileStore::open(dir.path(), 2).unwrap();
        assert_eq!(store.registrations(), [registration("after"), registration("before")]);
        assert!(!store.use_once("refused", 100, 2).await.unwrap());
    }

    #[tokio::test]
    async fn journal_size_is_bounded_by_compaction() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), 1).unwrap();
        store.register(registration("e")).await.unwrap();
        {
            let mut state = store.state.lock();
            for number in 0..50_000u64 {
                let record = Record::Used { name: format!("{number:032}"), expires: number };
                state.write(record, false).unwrap();
                state.compact_if_large(number);
            }
        }
        let len = dir.path().join("state.log").metadata().unwrap().len();
        assert!(len <= COMPACT_BYTES + 1024, "{len}");
        assert_eq!(store.registrations().len(), 1);
    }
}
