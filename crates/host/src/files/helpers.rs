//! Helpers kept warm: a sandboxed process for every policy that was asked for lately.
//!
//! Invariant: a request runs in a helper that was built for exactly the policy it asks for, on the
//! very files and mounts that the policy means now: the policy is resolved for every request, or known
//! to resolve as before, and a helper is found by what came of that, the identity of every root included;
//! and it is used again only while all its mounts stand.

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

/// The helper's whole life, inside its sandbox.
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

/// Requests that are read only while the mounts that were proved stand. The server looks before it sends
/// one, but not at what happened between the proof and its first look.
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

/// The helpers of a server. Clones are the same ones.
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
    /// Made by the first who asks; others of the same policy wait for it.
    helper: Arc<OnceCell<WarmHelper>>,
    used: Instant,
}

/// A helper that can be used again.
#[derive(Debug)]
struct WarmHelper {
    client: HelperClient,
    mounts: SandboxMounts,
}

impl Helpers {
    /// No helpers yet.
    pub fn new(sandbox: Arc<NativeSandbox>, host: ProcessHost, config: Arc<FilesConfig>) -> Self {
        Self(Arc::new(Inner { sandbox, host, config, entries: Mutex::default() }))
    }

    /// Where a request that is held to `context` has to run.
    pub async fn backend(&self, context: SandboxContext) -> Result<Backend, FileError> {
        let context = Arc::new(context);
        match self.helper(context.clone()).await {
            Err(Refused::Changed(_)) => {
                self.0.sandbox.forget_plans();
                Ok(self.helper(context).await?)
            }
            answer => Ok(answer?),
        }
    }

    async fn helper(&self, context: Arc<SandboxContext>) -> Result<Backend, Refused> {
        let sandbox = self.0.sandbox.clone();
        let planned = pool::blocking(move || sandbox.plan_helper(&context));
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
            // It has died since it was last used. What died with it has been answered.
            self.forget(&key, &cell);
            return Err(Refused::Changed("the helper has ended; try again".into()));
        }
        let client = helper.client.clone();
        if !helper.mounts.are_intact() {
            // The files that its policy means may be the same, and what was mounted on them gone.
            self.forget(&key, &cell);
            // One of which it cannot be told is used once.
            if !new || helper.mounts.are_known() {
                return Err(Refused::Changed("the mounts of the helper have changed".into()));
            }
        }
        Ok(Backend::Helper(client))
    }

    /// The place for the helper of a policy, used now.
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
            // Whoever still uses it holds it; it ends after them.
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

    /// Lets go of a helper that was not used for a while.
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

/// Nothing ran, because it could not have been held to its policy.
#[derive(Debug)]
enum Refused {
    /// Something was replaced, or has ended, meanwhile: once more may do.
    Changed(String),
    /// Once more would end the same.
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

/// An error and its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    message
}
