//! The two listeners of one process, and the end of everything that came through them.
//!
//! Invariant: when [`Proxy`] is dropped, its listeners and every connection end, those that were handed
//! over included.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::audit::Observer;
use crate::config::{Config, Limits};
use crate::connector::Connector;
use crate::decide::{Destination, Refusal, Subject};
use crate::decider::Decider;
use crate::dial::Dialer;
use crate::host::Host;
use crate::judge::Judge;
use crate::mitm::Mitm;
use crate::policy::{Pass, Policy};
use crate::rules::Rules;
use crate::{http, socks};

/// A running proxy. Dropping it ends the listeners and all connections.
#[derive(Debug)]
pub struct Proxy {
    handle: ProxyHandle,
    http_port: u16,
    socks_port: Option<u16>,
}

/// A way to hand connections to a [`Proxy`]. Does not keep it running.
#[derive(Clone)]
pub struct ProxyHandle {
    shared: Arc<Shared>,
}

/// What every connection of a proxy shares.
pub(crate) struct Shared {
    pub judge: Judge,
    pub policy: Arc<Policy>,
    pub dialer: Dialer,
    pub connector: Arc<dyn Connector>,
    pub limits: Limits,
    pub socks5_udp: bool,
    pub search_domains: Vec<String>,
    mitm: Option<Mitm>,
    places: Arc<Semaphore>,
    tasks: TaskTracker,
    ending: CancellationToken,
}

/// The client's end of a connection, and its place among the connections.
#[derive(Clone)]
pub(crate) struct Client {
    address: Option<(SocketAddr, Arc<str>)>,
    /// Ends the connection and everything that was made for it.
    cut: CancellationToken,
    /// What its last request passed for.
    pass: Arc<Mutex<Option<Pass>>>,
    _place: Arc<OwnedSemaphorePermit>,
}

impl Client {
    pub(crate) fn new(address: Option<SocketAddr>, place: OwnedSemaphorePermit) -> Self {
        let address = address.map(|address| (address, address.to_string().into()));
        Self {
            address,
            cut: CancellationToken::new(),
            pass: Arc::default(),
            _place: Arc::new(place),
        }
    }

    /// Cancelled when the connection is to end.
    pub(crate) fn cut(&self) -> &CancellationToken {
        &self.cut
    }

    pub(crate) fn address(&self) -> Option<&str> {
        self.address.as_ref().map(|(_, text)| &**text)
    }

    /// Whether the client can reach a UDP port of this proxy.
    pub(crate) fn is_on_loopback(&self) -> bool {
        self.address.as_ref().is_some_and(|(address, _)| address.ip().is_loopback())
    }
}

impl Proxy {
    /// Listens on free ports of 127.0.0.1 and serves until dropped. `decider` is asked about undecided
    /// hosts if [`Config::ask_timeout`] is set; without one they are refused.
    ///
    /// Must be called within a tokio runtime.
    pub async fn start(
        config: Config,
        decider: Option<Arc<dyn Decider>>,
        observer: Arc<dyn Observer>,
    ) -> io::Result<Self> {
        let listeners = async |wanted: bool| match wanted {
            true => TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map(Some),
            false => Ok(None),
        };
        let http = listeners(config.listen).await?;
        let socks = listeners(config.listen && config.socks5).await?;
        let port = |listener: &Option<TcpListener>| {
            let address = listener.as_ref().map(TcpListener::local_addr).transpose()?;
            io::Result::Ok(address.map(|address| address.port()))
        };
        let (http_port, socks_port) = (port(&http)?, port(&socks)?);
        let policy = Policy::new(config.rules.clone());
        let shared = Arc::new(Shared {
            judge: Judge::new(&config, policy.clone(), decider, observer),
            dialer: Dialer::new(&config, policy.clone()),
            policy,
            connector: config.connector,
            socks5_udp: config.socks5_udp,
            search_domains: config.search_domains,
            mitm: config.mitm,
            places: Arc::new(Semaphore::new(config.limits.connections)),
            limits: config.limits,
            tasks: TaskTracker::new(),
            ending: CancellationToken::new(),
        });
        let handle = ProxyHandle { shared };
        http.into_iter().for_each(|listener| handle.listen_http(listener));
        socks.into_iter().for_each(|listener| handle.listen_socks5(listener));
        Ok(Self { handle, http_port: http_port.unwrap_or_default(), socks_port })
    }

    /// The port of the HTTP proxy; 0 if it does not [listen](Config::listen).
    pub fn http_port(&self) -> u16 {
        self.http_port
    }

    /// The port of the SOCKS5 proxy.
    pub fn socks_port(&self) -> Option<u16> {
        self.socks_port
    }

    /// A handle for connections that arrive another way.
    pub fn handle(&self) -> ProxyHandle {
        self.handle.clone()
    }

    /// Ends everything, and waits until it has ended.
    pub async fn close(self) {
        let shared = self.handle.shared.clone();
        drop(self);
        shared.tasks.wait().await;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.handle.shared.ending.cancel();
        self.handle.shared.tasks.close();
    }
}

impl ProxyHandle {
    /// Serves HTTP on a connection that was accepted elsewhere, until it or the proxy ends.
    /// `client`: its address, for the audit.
    pub async fn serve_http<S>(&self, stream: S, client: Option<SocketAddr>)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.serve(stream, client, http::serve).await;
    }

    /// Serves SOCKS5 on a connection that was accepted elsewhere, until it or the proxy ends. UDP
    /// ASSOCIATE is offered to clients with a loopback address only.
    pub async fn serve_socks5<S>(&self, stream: S, client: Option<SocketAddr>)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.serve(stream, client, socks::serve).await;
    }

    /// Serves HTTP on every connection of a listener, until the proxy ends. For listeners that were made
    /// elsewhere, such as in another network namespace. Must be called within a tokio runtime.
    pub fn listen_http(&self, listener: TcpListener) {
        self.shared.spawn(accept(self.shared.clone(), listener, http::serve));
    }

    /// The same for SOCKS5.
    pub fn listen_socks5(&self, listener: TcpListener) {
        self.shared.spawn(accept(self.shared.clone(), listener, socks::serve));
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Replaces the rules. Connections that the new rules do not allow are cut, however they came;
    /// what the controller allowed lasts unless a deny pattern matches it or it is local.
    pub fn update_rules(&self, rules: Rules) {
        self.shared.policy.replace(rules);
    }

    async fn serve<S, F>(
        &self,
        stream: S,
        client: Option<SocketAddr>,
        serve: impl FnOnce(Arc<Shared>, S, Client) -> F,
    ) where
        F: Future<Output = ()>,
    {
        let shared = &self.shared;
        let served = async {
            if let Ok(place) = shared.places.clone().acquire_owned().await {
                let client = Client::new(client, place);
                let cut = client.cut.clone();
                cut.run_until_cancelled(serve(shared.clone(), stream, client)).await;
            }
        };
        shared.tasks.track_future(shared.ending.run_until_cancelled(served)).await;
    }
}

impl std::fmt::Debug for ProxyHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProxyHandle").finish_non_exhaustive()
    }
}

impl Shared {
    /// What a tunnel to this target is opened with; `None` if it is left closed.
    pub(crate) fn mitm_for(&self, host: &Host, port: u16) -> Option<Mitm> {
        self.mitm.as_ref().filter(|mitm| mitm.opens(self.judge.mode(), host, port)).cloned()
    }

    /// Judges a request of a client. If it passes, the client's connection lasts only as long as the
    /// rules allow that request, or until the next one of the connection is judged.
    pub(crate) async fn judge(
        &self,
        subject: Subject<'_>,
        client: &Client,
    ) -> Result<Destination, Refusal> {
        let (destination, pass) = self.judge.judge(subject, client.address(), &client.cut).await?;
        let former = client.pass.lock().replace(pass);
        drop(former);
        Ok(destination)
    }

    /// Runs a task that ends with the proxy, and when the client's connection is cut.
    pub(crate) fn spawn_for(
        &self,
        client: &Client,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let cut = client.cut.clone();
        self.spawn(async move {
            cut.run_until_cancelled(task).await;
        });
    }

    /// Room for one more connection, if there is any.
    pub(crate) fn try_place(&self) -> Option<OwnedSemaphorePermit> {
        self.places.clone().try_acquire_owned().ok()
    }

    /// Runs a task that ends with the proxy.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let ending = self.ending.clone();
        self.tasks.spawn(async move {
            ending.run_until_cancelled(task).await;
        });
    }
}

/// Selects a congestion control without pacing, which accepted sockets inherit. BBR, where it is the
/// default, paces by timers and an estimate of the network, which only adds delay on loopback.
fn disable_pacing_on_loopback(listener: &TcpListener) {
    if !listener.local_addr().is_ok_and(|address| address.ip().is_loopback()) {
        return;
    }
    // Reno is in every kernel and needs no privilege.
    if let Err(error) = rustix::net::sockopt::set_tcp_congestion(listener, "reno") {
        debug!(%error, "cannot disable pacing");
    }
}

/// Accepts connections. The one for which there is no place yet waits here, further ones in the backlog.
async fn accept<F>(
    shared: Arc<Shared>,
    listener: TcpListener,
    serve: impl Fn(Arc<Shared>, TcpStream, Client) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    disable_pacing_on_loopback(&listener);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors: another connection has to end first.
                warn!(%error, "cannot accept a connection; retrying in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            warn!(%error, "cannot set TCP_NODELAY");
        }
        let Ok(place) = shared.places.clone().acquire_owned().await else { return };
        let client = Client::new(Some(address), place);
        shared.spawn_for(&client.clone(), serve(shared.clone(), stream, client));
    }
}
