//! The managed network of processes: starts the proxies of one, points its environment at them, and lets
//! them ask and report to the client that controls it.
//!
//! Invariant: a process starts only once its proxies are up, and they end with it. If its network is
//! enforced, its sandbox has a network of its own, in which the ports of its proxies are served and nothing
//! else is; a request that leaves nothing to serve there is refused.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use codex_exec_host::environment::{EnvironmentPlaces, HomeError};
use codex_exec_host::pool;
use codex_exec_host::process::Environment;
use codex_exec_host::sandbox::{ManagedNetwork, NetworkDescriptors};
use codex_exec_network::{
    AuthorityError, Bindings, CaFiles, CertificateAuthority, Decider, Masker, Mitm,
    NAMESPACE_HTTP_PORT, NAMESPACE_SOCKS_PORT, Namespace, NoReply, Observer, Proxy, ProxyHandle,
    Question, Record, Reply, Roots, UpstreamProxies, ca_variables, loopback_proxy_ports,
    proxy_variables,
};
use codex_exec_server_protocol::network::{
    CredentialProvider, ManagedNetwork as ManagedNetworkLimits, NetworkInfo, NetworkProxyLaunch,
    NetworkRoutes, NetworkRules, PolicyRequest,
};
use codex_exec_server_protocol::process::{ExecParams, ProcessId};
use codex_exec_server_protocol::{
    AccessMode, ErrorKind, FileSystemEntry, FileSystemPath, FileSystemPolicy, PathUri,
    PermissionProfile, RpcError, SandboxContext, encode, notification,
};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::client_calls::ClientCalls;
use crate::config::ServerConfig;
use crate::network::{
    credential_provider, host_rules, policy_decision, policy_reply, policy_request, proxy_config,
};
use crate::session::Session;

/// Maximum records of a process that wait for room on the connection; more are dropped.
const MAX_BACKLOG: usize = 256;

/// Maximum connections through one bridged port; more wait in its backlog.
const MAX_BRIDGED: usize = 512;

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

    /// Makes the network of a process: starts its proxies and sets the variables that lead to them, or
    /// finds the proxies of the client that it may use.
    pub(crate) async fn start(
        &self,
        params: &ExecParams,
        environment: &mut Environment,
        controller: Controller,
    ) -> Result<ProcessNetwork, RpcError> {
        // Without a sandbox there is nothing to enforce.
        let enforced = params.enforce_managed_network && params.sandbox.is_some();
        match &params.network_proxy {
            // Boxed, as most processes have no proxy: every start has room for what it may await.
            Some(launch) => {
                let argv = &params.argv;
                Box::pin(self.start_proxy(launch, argv, environment, controller, enforced)).await
            }
            None if enforced => bridges(environment, params.managed_network.as_ref()),
            None => Ok(ProcessNetwork::default()),
        }
    }

    async fn start_proxy(
        &self,
        launch: &NetworkProxyLaunch,
        argv: &[String],
        environment: &mut Environment,
        controller: Controller,
        enforced: bool,
    ) -> Result<ProcessNetwork, RpcError> {
        let mut config = proxy_config(launch, &self.upstream)?;
        let socks5 = config.socks5;
        if enforced {
            config.listen = false;
            // The other end of an association would be outside of the sandbox.
            config.socks5_udp = false;
        }
        let (mut variables, mut bundle) = (Vec::new(), None);
        if launch.proxy.credential_masking {
            let opening = self.opening.get_or_try_init(|| Opening::new(self.places.clone()));
            let opening = opening.await.map_err(|error| cannot_start(&error))?;
            let bindings = match runs_script(argv) {
                true => opening.mask(environment, &launch.proxy.credential_providers),
                false => Bindings::default(),
            };
            config.mitm = Some(Mitm { bindings, ..opening.mitm.clone() });
            variables = ca_variables(&opening.files.bundle().to_string_lossy());
            bundle = Some(opening.files.bundle().to_owned());
        }
        tracing::debug!(
            process = %controller.process_id,
            environment = launch.environment_id,
            execution = launch.execution_id,
            conversation = launch.audit_metadata.conversation_id,
            "network proxy"
        );
        let (session, process_id) = (controller.session.clone(), controller.process_id.clone());
        let controller = Arc::new(controller);
        let proxy = Proxy::start(config, Some(controller.clone()), controller).await;
        let proxy = proxy.map_err(|error| cannot_start(&error))?;
        let local = launch.proxy.allow_local_binding;
        let (http_port, socks_port) = match enforced {
            true => (NAMESPACE_HTTP_PORT, socks5.then_some(NAMESPACE_SOCKS_PORT)),
            false => (proxy.http_port(), proxy.socks_port()),
        };
        variables.extend(proxy_variables(http_port, socks_port, local));
        let variables = variables.into_iter();
        environment.extend(variables.map(|(name, value)| (name.into(), value.into())));
        let ports = [http_port].into_iter().chain(socks_port).collect();
        let transparent = launch.transparent;
        let way = Way::Proxy { handle: proxy.handle(), transparent };
        let inside = enforced.then_some(Inside { ports, way });
        let rules = RulesHandle { proxy: proxy.handle(), allow_local_binding: local };
        let registration = Registration::new(&session, &process_id, rules);
        let held = Held { _registration: registration, _proxy: Some(proxy), ..Held::default() };
        let info = transparent.then_some(NetworkInfo { routes: NetworkRoutes::Proxies });
        Ok(ProcessNetwork { held, inside, bundle, info })
    }
}

/// Leads the process to the client's own proxies. If `limits` lists ports, all of them have to be listed: a
/// variable that the client did not set must not open another service of this machine.
fn bridges(
    environment: &Environment,
    limits: Option<&ManagedNetworkLimits>,
) -> Result<ProcessNetwork, RpcError> {
    let variable = |name: &str| environment.get(OsStr::new(name))?.to_str().map(str::to_owned);
    let ports = loopback_proxy_ports(variable);
    if ports.is_empty() {
        let message = "enforceManagedNetwork needs networkProxy, or proxy variables in the \
                       environment that name a proxy on 127.0.0.1";
        return Err(RpcError::invalid_params(ErrorKind::InvalidParams, message));
    }
    let listed = limits.map_or(&[][..], |limits| &limits.loopback_ports);
    let unlisted = ports.iter().find(|port| !listed.is_empty() && !listed.contains(port));
    if let Some(port) = unlisted {
        let message = format!(
            "the proxy variables in the environment name port {port} of 127.0.0.1, which \
             managedNetwork.loopbackPorts does not list"
        );
        return Err(RpcError::invalid_params(ErrorKind::InvalidParams, message));
    }
    let ending = CancellationToken::new();
    let inside = Inside { ports, way: Way::Bridges(ending.clone()) };
    let held = Held { _bridges: Some(ending.drop_guard()), ..Held::default() };
    Ok(ProcessNetwork { held, inside: Some(inside), ..ProcessNetwork::default() })
}

/// The network of a process that is about to start.
#[derive(Debug, Default)]
pub(crate) struct ProcessNetwork {
    /// What ends with the process.
    pub held: Held,
    /// What is served inside its sandbox, if its network is enforced.
    pub inside: Option<Inside>,
    /// The certificates that it has to trust.
    bundle: Option<PathBuf>,
    /// For the response, if the request asked for it.
    pub info: Option<NetworkInfo>,
}

/// What a process needs until it exits.
#[derive(Debug, Default)]
pub(crate) struct Held {
    _registration: Option<Registration>,
    _proxy: Option<Proxy>,
    _bridges: Option<DropGuard>,
}

/// The ports that are served in the network of a sandbox.
#[derive(Debug)]
pub(crate) struct Inside {
    ports: Vec<u16>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// The first port leads to the HTTP proxy, the second one to the SOCKS5 proxy.
    Proxy {
        handle: ProxyHandle,
        /// So does every other address.
        transparent: bool,
    },
    /// Each port leads to the same port outside, until this is cancelled.
    Bridges(CancellationToken),
}

impl ProcessNetwork {
    /// The network that the sandbox has to have; `None`: that of its policy.
    pub(crate) fn namespace(&self) -> Option<ManagedNetwork> {
        let Inside { ports, way } = self.inside.as_ref()?;
        let transparent = matches!(way, Way::Proxy { transparent: true, .. });
        Some(ManagedNetwork { loopback_ports: ports.clone(), transparent })
    }

    /// Lets a policy read the certificates.
    pub(crate) fn make_readable(&self, context: &mut SandboxContext) {
        if let PermissionProfile::Managed {
            file_system: FileSystemPolicy::Restricted(policy), ..
        } = &mut context.permissions
            && let Some(path) = self.bundle.as_deref().and_then(|path| PathUri::try_from(path).ok())
        {
            let path = FileSystemPath::Path { path };
            policy.entries.push(FileSystemEntry::new(path, AccessMode::Read));
        }
    }
}

impl Inside {
    /// Serves the sockets that the sandbox has handed over. Returns what leads to the proxies.
    pub(crate) fn serve(self, mut network: NetworkDescriptors) -> NetworkRoutes {
        let Self { ports, way } = self;
        let mut routes = NetworkRoutes::Proxies;
        if let (Way::Proxy { handle, transparent: true }, Some(tun)) = (&way, network.tun.take()) {
            let namespace = Namespace { tun, dns_udp: network.dns_udp, dns_tcp: network.dns_tcp };
            match handle.serve_namespace(namespace) {
                Ok(()) => routes = NetworkRoutes::Transparent,
                Err(error) => tracing::warn!(%error, "cannot serve the network of a sandbox"),
            }
        } else if let Some(error) = network.tun_error {
            tracing::info!(%error, "no TUN device; proxies alone");
        }
        for (index, (port, listener)) in ports.into_iter().zip(network.listeners).enumerate() {
            let listener = match TcpListener::from_std(listener) {
                Ok(listener) => listener,
                // Dropping it refuses connections.
                Err(error) => {
                    tracing::error!(%error, port, "cannot serve a port of a sandbox");
                    continue;
                }
            };
            match &way {
                Way::Proxy { handle, .. } if index == 0 => handle.listen_http(listener),
                Way::Proxy { handle, .. } => handle.listen_socks5(listener),
                Way::Bridges(ending) => {
                    let ending = ending.clone();
                    tokio::spawn(async move {
                        ending.run_until_cancelled(bridge(listener, port, ending.clone())).await;
                    });
                }
            }
        }
        routes
    }
}

/// A way to replace the rules of a running proxy.
#[derive(Debug, Clone)]
pub(crate) struct RulesHandle {
    proxy: ProxyHandle,
    allow_local_binding: bool,
}

impl RulesHandle {
    /// Replaces the rules, and cuts the connections that the new ones do not allow.
    pub(crate) fn update(&self, rules: &NetworkRules) -> Result<(), RpcError> {
        self.proxy.update_rules(host_rules(rules, self.allow_local_binding)?);
        Ok(())
    }
}

/// Makes the rules of a process known to its session until it is dropped.
#[derive(Debug)]
struct Registration {
    session: Weak<Session>,
    process_id: ProcessId,
}

impl Registration {
    fn new(session: &Weak<Session>, process_id: &ProcessId, rules: RulesHandle) -> Option<Self> {
        session.upgrade()?.network_rules().insert(process_id.clone(), rules);
        Some(Self { session: session.clone(), process_id: process_id.clone() })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(session) = self.session.upgrade() {
            session.network_rules().remove(&self.process_id);
        }
    }
}

/// Joins every connection to the same port outside.
async fn bridge(listener: TcpListener, port: u16, ending: CancellationToken) {
    let places = Arc::new(Semaphore::new(MAX_BRIDGED));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let mut inner = match listener.accept().await {
            Ok((inner, _)) => inner,
            Err(error) => {
                // Out of descriptors: another connection has to end first.
                tracing::warn!(%error, "cannot accept a connection; retrying in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let ending = ending.clone();
        tokio::spawn(async move {
            let _place = place;
            let joined = async {
                let mut outer = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
                inner.set_nodelay(true)?;
                outer.set_nodelay(true)?;
                copy_bidirectional(&mut inner, &mut outer).await
            };
            ending.run_until_cancelled(joined).await;
        });
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
            let extra = ["SSL_CERT_FILE", "CODEX_CA_CERTIFICATE"].map(std::env::var_os);
            let extra: Vec<_> = extra.into_iter().flatten().map(PathBuf::from).collect();
            let roots = Roots::load(&extra);
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
