//! A cache of helpers: per recently used policy one sandboxed process for reading and one for changes.
//!
//! Invariant: a request runs in a helper that was built for exactly its policy, on the files and mounts
//! that the policy refers to now. Each request's policy is resolved, or its cached plan verified; the
//! result, including the identity of every root, selects the helper. A helper is reused only while its
//! mounts are intact.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::Arc;

use codex_exec_server_protocol::SandboxContext;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::{Backend, FileError, FilesConfig, HelperClient};
use crate::pool;
use crate::process::{ProcessHost, SandboxMounts, StartError};
use crate::sandbox::{NativeSandbox, SandboxBackend, mounts_intact};

type Plan = <NativeSandbox as SandboxBackend>::Plan;
type PolicyKey = <NativeSandbox as SandboxBackend>::Key;

/// The name under which the executable registers [`run_helper`].
pub(crate) const HELPER: &str = "files";

/// Body of the helper, inside its sandbox.
pub(crate) fn run_helper() -> i32 {
    let own = |stream| rustix::io::dup(stream).map(std::fs::File::from);
    let (Ok(input), Ok(output)) = (own(rustix::stdio::stdin()), own(rustix::stdio::stdout()))
    else {
        return 1;
    };
    let input = std::io::BufReader::new(WhileMountsIntact(input));
    let served = super::serve_helper(input, output, Arc::default());
    i32::from(served.is_err())
}

/// Reads requests only while the verified mounts are intact. The server checks before it sends a
/// request, but cannot see what happened between the verification and its first check.
struct WhileMountsIntact<R>(R);

impl<R: Read> Read for WhileMountsIntact<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        match mounts_intact() {
            true => Ok(read),
            false => Err(io::Error::other("a mount of the sandbox was removed")),
        }
    }
}

/// The helpers of a server. Clones share their state.
#[derive(Debug, Clone)]
pub struct Helpers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    sandbox: Arc<NativeSandbox>,
    host: ProcessHost,
    config: Arc<FilesConfig>,
    entries: Mutex<HashMap<PolicyKey, Entry>>,
}

#[derive(Debug)]
struct Entry {
    /// Started by the first request; others of the same policy wait for it.
    helper: Arc<OnceCell<WarmHelper>>,
    used: Instant,
}

/// A helper that can be reused.
#[derive(Debug)]
struct WarmHelper {
    client: HelperClient,
    mounts: SandboxMounts,
}

impl Helpers {
    /// An empty cache.
    pub fn new(sandbox: Arc<NativeSandbox>, host: ProcessHost, config: Arc<FilesConfig>) -> Self {
        Self(Arc::new(Inner { sandbox, host, config, entries: Mutex::default() }))
    }

    /// The backend for a request under `context`. One that only reads runs in a helper of its own, which
    /// creates nothing in the file system, not even placeholders.
    pub async fn backend(
        &self,
        context: SandboxContext,
        only_reads: bool,
    ) -> Result<Backend, FileError> {
        let context = Arc::new(context);
        match self.helper(context.clone(), only_reads).await {
            Err(Refused::Changed(_)) => {
                self.0.sandbox.forget_plans();
                Ok(self.helper(context, only_reads).await?)
            }
            answer => Ok(answer?),
        }
    }

    async fn helper(
        &self,
        context: Arc<SandboxContext>,
        only_reads: bool,
    ) -> Result<Backend, Refused> {
        let sandbox = self.0.sandbox.clone();
        let planned = pool::blocking(move || sandbox.plan_helper(&context, only_reads));
        let planned = planned.await.map_err(|error| refused(&error))?;
        let Some(planned) = planned.map_err(|error| refused(&error))? else {
            return Ok(Backend::Here);
        };
        let key = NativeSandbox::key(&planned);
        let cell = self.entry(&key);
        let mut new = false;
        let started = cell
            .get_or_try_init(|| {
                new = true;
                self.start(planned)
            })
            .await;
        let helper = started.inspect_err(|_| self.forget(&key, &cell))?;
        if helper.client.ended().is_some() {
            // It has died since its last use; its requests have failed.
            self.forget(&key, &cell);
            return Err(Refused::Changed("the helper has ended; try again".into()));
        }
        let client = helper.client.clone();
        if !helper.mounts.are_intact() {
            // The files of the policy may be the same while a mount on them is gone.
            self.forget(&key, &cell);
            // If its mounts are unknown, it is used once.
            if !new || helper.mounts.are_known() {
                return Err(Refused::Changed("the mounts of the helper have changed".into()));
            }
        }
        Ok(Backend::Helper(client))
    }

    /// The entry for a policy, marked as used now.
    fn entry(&self, key: &PolicyKey) -> Arc<OnceCell<WarmHelper>> {
        let now = Instant::now();
        let mut entries = self.lock();
        entries.retain(|_, entry| {
            entry.helper.get().is_none_or(|helper| helper.client.ended().is_none())
        });
        if let Some(entry) = entries.get_mut(key) {
            entry.used = now;
            return entry.helper.clone();
        }
        if entries.len() >= self.0.config.max_helpers
            && let Some(oldest) = entries.iter().min_by_key(|(_, entry)| entry.used)
        {
            // It ends once its running requests are done.
            let oldest = oldest.0.clone();
            entries.remove(&oldest);
        }
        let helper = Arc::new(OnceCell::new());
        entries.insert(key.clone(), Entry { helper: helper.clone(), used: now });
        self.end_when_idle(key.clone(), &helper);
        helper
    }

    fn forget(&self, key: &PolicyKey, cell: &Arc<OnceCell<WarmHelper>>) {
        let mut entries = self.lock();
        if entries.get(key).is_some_and(|entry| Arc::ptr_eq(&entry.helper, cell)) {
            entries.remove(key);
        }
    }

    /// Drops a helper after it was idle for a while.
    fn end_when_idle(&self, key: PolicyKey, helper: &Arc<OnceCell<WarmHelper>>) {
        let (pool, helper) = (Arc::downgrade(&self.0), Arc::downgrade(helper));
        let idle = self.0.config.helper_idle;
        tokio::spawn(async move {
            loop {
                let Some(used) = pool.upgrade().and_then(|inner| {
                    let entries = inner.entries.lock();
                    let entry = entries.get(&key)?;
                    std::ptr::eq(Arc::as_ptr(&entry.helper), helper.as_ptr()).then_some(entry.used)
                }) else {
                    return;
                };
                if used.elapsed() >= idle {
                    if let (Some(inner), Some(helper)) = (pool.upgrade(), helper.upgrade()) {
                        Self(inner).forget(&key, &helper);
                    }
                    return;
                }
                tokio::time::sleep_until(used + idle).await;
            }
        });
    }

    async fn start(&self, planned: Plan) -> Result<WarmHelper, Refused> {
        let sandbox = self.0.sandbox.clone();
        let launch = pool::blocking(move || sandbox.launch_helper(&planned, HELPER));
        let launch = launch.await.map_err(|error| refused(&error))?;
        let launch = launch.map_err(|error| refused(&error))?;
        let process = self.0.host.start_helper(launch).await.map_err(|error| match &error {
            StartError::Sandbox(failure) if failure.is_race() => {
                Refused::Changed(error_chain(&error))
            }
            _ => refused(&error),
        })?;
        let client = HelperClient::new(process.output, process.input, &self.0.config);
        Ok(WarmHelper { client, mounts: process.mounts })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PolicyKey, Entry>> {
        self.0.entries.lock()
    }
}

/// Nothing ran, because the policy could not be enforced.
#[derive(Debug)]
enum Refused {
    /// A file was replaced or the helper has ended meanwhile: a retry may succeed.
    Changed(String),
    /// A retry would fail too.
    Permanent(String),
}

impl From<Refused> for FileError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Changed(reason) | Refused::Permanent(reason) => Self::Sandbox { reason },
        }
    }
}

fn refused(error: &dyn std::error::Error) -> Refused {
    Refused::Permanent(error_chain(error))
}

/// The messages of an error and its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    message
}
