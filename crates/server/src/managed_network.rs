//! The managed network of processes: starts the proxies of one, points its environment at them, and lets
//! them ask and report to the client that controls it.
//!
//! Invariant: a process starts only once its proxies are up. They end with it: whoever starts the
//! process holds the [`Proxy`] exactly as long as it runs.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};

use codex_exec_host::environment::{EnvironmentPlaces, HomeError};
use codex_exec_host::pool;
use codex_exec_host::process::Environment;
use codex_exec_network::{
    AuthorityError, Bindings, CaFiles, CertificateAuthority, Decider, Masker, Mitm, NoReply,
    Observer, Proxy, Question, Record, Reply, Roots, UpstreamProxies, ca_variables,
    proxy_variables,
};
use codex_exec_server_protocol::network::{CredentialProvider, NetworkProxyLaunch, PolicyRequest};
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::{ErrorKind, RpcError, encode, notification};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::client_calls::ClientCalls;
use crate::config::ServerConfig;
use crate::network::{
    credential_provider, policy_decision, policy_reply, policy_request, proxy_config,
};
use crate::session::Session;

/// Maximum records of a process that wait for room on the connection; more are dropped.
const MAX_BACKLOG: usize = 256;

/// Shells whose `-c` is masked. Another program may read its secrets where they are not replaced.
const SHELLS: &[&str] = &["sh", "bash", "dash", "ksh", "mksh", "zsh", "fish"];

/// Starts the proxies of processes.
#[derive(Debug)]
pub(crate) struct ManagedNetworks {
    upstream: UpstreamProxies,
    places: EnvironmentPlaces,
    /// Made for the first process that asks for masking.
    opening: OnceCell<Opening>,
}

/// What opens tunnels, the same for all processes of a server. Dropping it removes its files.
#[derive(Debug)]
struct Opening {
    masker: Masker,
    /// Without a secret.
    mitm: Mitm,
    files: CaFiles,
}

/// Why tunnels cannot be opened.
#[derive(Debug, thiserror::Error)]
enum OpeningError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error("the system gives no randomness")]
    Randomness,
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error("cannot write the certificates: {0}")]
    Files(io::Error),
    #[error("cannot make the certificates: {0}")]
    Work(#[from] pool::WorkError),
}

impl ManagedNetworks {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        let mut upstream = UpstreamProxies::from_env(|name| std::env::var(name).ok());
        upstream.private_addresses = config.proxy_private_ips_via_upstream;
        Self { upstream, places: config.environment.clone(), opening: OnceCell::new() }
    }

    /// Starts the proxies of a process and sets the variables that lead to them.
    pub(crate) async fn start(
        &self,
        launch: &NetworkProxyLaunch,
        argv: &[String],
        environment: &mut Environment,
        controller: Controller,
    ) -> Result<Proxy, RpcError> {
        let mut config = proxy_config(launch, &self.upstream)?;
        let mut variables = Vec::new();
        if launch.proxy.credential_masking {
            let opening = self.opening.get_or_try_init(|| Opening::new(self.places.clone()));
            let opening = opening.await.map_err(|error| cannot_start(&error))?;
            let bindings = match runs_script(argv) {
                true => opening.mask(environment, &launch.proxy.credential_providers),
                false => Bindings::default(),
            };
            config.mitm = Some(Mitm { bindings, ..opening.mitm.clone() });
            variables = ca_variables(&opening.files.bundle().to_string_lossy());
        }
        tracing::debug!(
            process = %controller.process_id,
            environment = launch.environment_id,
            execution = launch.execution_id,
            conversation = launch.audit_metadata.conversation_id,
            "network proxy"
        );
        let controller = Arc::new(controller);
        let proxy = Proxy::start(config, Some(controller.clone()), controller).await;
        let proxy = proxy.map_err(|error| cannot_start(&error))?;
        let local = launch.proxy.allow_local_binding;
        variables.extend(proxy_variables(proxy.http_port(), proxy.socks_port(), local));
        let variables = variables.into_iter();
        environment.extend(variables.map(|(name, value)| (name.into(), value.into())));
        Ok(proxy)
    }
}

fn cannot_start(error: &dyn std::error::Error) -> RpcError {
    RpcError::internal(ErrorKind::Internal, format!("cannot start the network proxy: {error}"))
}

/// Whether the command line is `SHELL -c …`. A login shell may replace any variable, so nothing is
/// masked for it.
fn runs_script(argv: &[String]) -> bool {
    let Some((program, [flag, ..])) = argv.split_first() else { return false };
    let name = Path::new(program).file_name();
    flag == "-c" && name.is_some_and(|name| SHELLS.iter().any(|shell| name == *shell))
}

impl Opening {
    async fn new(places: EnvironmentPlaces) -> Result<Self, OpeningError> {
        pool::blocking(move || {
            let directory = places.codex_home()?.join("proxy");
            let authority = CertificateAuthority::new()?;
            let extra = std::env::var_os("SSL_CERT_FILE");
            let roots = Roots::load(extra.as_deref().map(Path::new));
            let upstream_tls = roots.client_config().map_err(AuthorityError::from)?;
            let files = CaFiles::write(&directory, authority.pem(), &roots.pem());
            Ok(Self {
                masker: Masker::new().map_err(|_| OpeningError::Randomness)?,
                files: files.map_err(OpeningError::Files)?,
                mitm: Mitm {
                    authority: Arc::new(authority),
                    upstream_tls,
                    bindings: Bindings::default(),
                },
            })
        })
        .await?
    }

    /// Replaces the secrets in an environment. A variable that is not text is left alone.
    fn mask(
        &self,
        environment: &mut Environment,
        providers: &BTreeMap<String, CredentialProvider>,
    ) -> Bindings {
        let providers =
            providers.iter().map(|(name, given)| (name.clone(), credential_provider(given)));
        let providers = providers.collect();
        let text = |(name, value): (&OsString, &OsString)| {
            Some((name.to_str()?.to_owned(), value.to_str()?.to_owned()))
        };
        let mut variables = environment.iter().filter_map(text).collect();
        let masking = self.masker.mask(&mut variables, &providers);
        environment.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        for (provider, error) in &masking.ignored {
            tracing::warn!(provider, %error, "credential provider ignored");
        }
        masking.bindings
    }
}

/// The client that controls a process, whichever connection it has now.
#[derive(Debug)]
pub(crate) struct Controller {
    session: Weak<Session>,
    process_id: ProcessId,
    backlog: Arc<Mutex<Backlog>>,
}

/// Records that wait for room on their connection, in order.
#[derive(Debug, Default)]
struct Backlog {
    waiting: VecDeque<(Weak<ClientCalls>, Vec<u8>)>,
    /// A task is sending them.
    draining: bool,
}

impl Controller {
    pub(crate) fn new(session: &Arc<Session>, process_id: ProcessId) -> Self {
        Self { session: Arc::downgrade(session), process_id, backlog: Arc::default() }
    }

    fn client(&self) -> Weak<ClientCalls> {
        self.session.upgrade().map(|session| session.client()).unwrap_or_default()
    }
}

impl Decider for Controller {
    fn decide(&self, question: Question) -> BoxFuture<'_, Result<Reply, NoReply>> {
        Box::pin(async move {
            let params = policy_request(self.process_id.clone(), &question);
            let response = ClientCalls::call::<PolicyRequest>(&self.client(), &params).await;
            response.map(|response| policy_reply(response.decision)).map_err(|_| NoReply)
        })
    }
}

impl Observer for Controller {
    /// Sends the record at once, so that it is ahead of what the program does with the answer. If there
    /// is no room, a task sends it.
    fn observe(&self, record: Record) {
        let weak = self.client();
        // While detached, records are not kept.
        let Some(client) = weak.upgrade() else { return };
        let record = policy_decision(self.process_id.clone(), record);
        let message = encode::notification::<notification::NetworkPolicyDecision>(&record);
        let mut backlog = self.backlog.lock();
        if !backlog.draining
            && let Some(slot) = client.outbound().try_reserve(message.len())
        {
            return slot.send(message);
        }
        if backlog.waiting.len() == MAX_BACKLOG {
            return tracing::warn!(process = %self.process_id, "record of a network decision dropped");
        }
        backlog.waiting.push_back((weak, message));
        if !std::mem::replace(&mut backlog.draining, true) {
            tokio::spawn(drain(self.backlog.clone()));
        }
    }
}

async fn drain(backlog: Arc<Mutex<Backlog>>) {
    loop {
        let next = {
            let mut backlog = backlog.lock();
            let next = backlog.waiting.pop_front();
            backlog.draining = next.is_some();
            next
        };
        let Some((client, message)) = next else { return };
        let outbound = client.upgrade().map(|client| client.outbound().clone());
        if let Some(outbound) = outbound {
            // A connection that has ended takes nothing more.
            let _ = outbound.send(message).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scripts_of_shells_are_masked() {
        let argv = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for masked in [&["sh", "-c", "x"][..], &["/bin/bash", "-c", "x", "y"], &["zsh", "-c"]] {
            assert!(runs_script(&argv(masked)), "{masked:?}");
        }
        for other in
            [&[][..], &["sh"], &["bash", "-lc", "x"], &["env", "-c", "x"], &["sh", "x", "-c"]]
        {
            assert!(!runs_script(&argv(other)), "{other:?}");
        }
    }
}
