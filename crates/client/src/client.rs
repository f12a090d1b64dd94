//! [`ExecServerClient`]: connecting, and calls of every method.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::{Connection, WebsocketDial};
use codex_exec_server_protocol::environment::{
    Capabilities, EnvironmentInfo, EnvironmentInfoParams,
};
use codex_exec_server_protocol::process::{ExecParams, ReadParams};
use codex_exec_server_protocol::session::InitializeParams;
use codex_exec_server_protocol::{
    Call, Effect, ErrorKind, FileCall, Method, Notification, SandboxContext, call,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::dialer::{Dialer, OneConnection, StdioDialer, WebsocketDialer};
use crate::driver::Driver;
use crate::error::{DialFailure, ExecServerError};
use crate::handshake::{HandshakeError, handshake};
use crate::link::Link;
use crate::notices::Notices;
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
use crate::shared::{ConnectionStatus, LinkState, Shared};

/// A session with an exec-server. Cheap to clone; the connection closes when the last clone and
/// the last process handle are gone.
///
/// ```no_run
/// # async fn run() -> Result<(), codex_exec_client::ExecServerError> {
/// use codex_exec_client::{ExecCommand, ExecServerClient, RemoteExecServerConnectArgs};
///
/// let args = RemoteExecServerConnectArgs::new("ws://127.0.0.1:4321", "my-tool");
/// let client = ExecServerClient::connect_websocket(args).await?;
/// let output = client.run(ExecCommand::new(["git", "status"]).cwd("/srv/app")?).await?;
/// println!("{}: {}", output.status.code, String::from_utf8_lossy(&output.stdout));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ExecServerClient {
    pub(crate) shared: Arc<Shared>,
    alive: Arc<Alive>,
}

/// Closes the connection when the last handle is dropped.
struct Alive(watch::Sender<bool>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

impl ExecServerClient {
    /// Connects by websocket.
    pub async fn connect_websocket(
        args: RemoteExecServerConnectArgs,
    ) -> Result<Self, ExecServerError> {
        let dial = WebsocketDial {
            bearer_token: args.bearer_token.clone(),
            timeout: args.connect_timeout,
            receive_buffer: args.receive_buffer,
            ..WebsocketDial::new(&args.websocket_url)
        };
        let config = args.tuning.connection;
        Self::connect(WebsocketDialer { dial, config }, args.into()).await
    }

    /// Starts a command and speaks with it over its stdin and stdout, for example
    /// `["ssh", "host", "codex", "exec-server", "--listen", "stdio"]`.
    pub async fn connect_stdio_command(
        argv: impl IntoIterator<Item = impl Into<String>>,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let dialer = StdioDialer::new(argv, options.tuning.connection);
        Self::connect(dialer, options).await
    }

    /// Uses a connection that is there already: one end of
    /// [`Connection::pair`] with an embedded server on the other. It cannot be made again, so
    /// there is no reconnect.
    pub async fn connect_connection(
        connection: Connection,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        Self::connect(OneConnection(Mutex::new(Some(connection))), options).await
    }

    /// Connects through any [`Dialer`], and reconnects through it.
    pub async fn connect(
        dialer: impl Dialer,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let endpoint = dialer.endpoint();
        let failed =
            |cause: DialFailure| ExecServerError::Connect { endpoint: endpoint.clone(), cause };
        let initialize = InitializeParams {
            client_name: options.client_name,
            resume_session_id: options.resume_session_id,
            detach_ttl_ms: options
                .detach_ttl
                .map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
        };
        let began = Instant::now();
        let patience = options.initialize_timeout.min(options.reconnect.give_up_after);
        let mut attempt = 0;
        let (connection, opened) = loop {
            let mut connection = dialer.dial().await.map_err(failed)?;
            match handshake(&mut connection, &initialize, options.initialize_timeout).await {
                Ok(opened) => break (connection, opened),
                // The server may not have noticed yet that whoever held the session is gone.
                Err(HandshakeError::Server(error))
                    if error.kind == Some(ErrorKind::SessionAttached)
                        && options.reconnect.enabled
                        && dialer.can_resume()
                        && began.elapsed() < patience =>
                {
                    drop(connection);
                    tokio::time::sleep(options.reconnect.delay(attempt)).await;
                    attempt += 1;
                }
                Err(error) => {
                    drop(connection);
                    let obituary = dialer.obituary().await;
                    return Err(opening_error(&endpoint, error, obituary));
                }
            }
        };

        let link = Link::new(1, connection.outbound().clone());
        let shared = Arc::new(Shared::new(options.tuning, endpoint, link.clone()));
        shared.session.lock().clone_from(&opened.session_id);
        if initialize.resume_session_id.is_some() {
            shared.session_is_old();
        }
        let alive = Arc::new(Alive(watch::Sender::new(false)));
        let driver = Driver {
            shared: shared.clone(),
            dialer: Arc::new(dialer),
            policy: options.reconnect,
            initialize,
            initialize_timeout: options.initialize_timeout,
            closing: alive.0.subscribe(),
        };
        tokio::spawn(driver.run(connection, link));
        let client = Self { shared, alive };
        let info = match opened.environment_info {
            Some(info) => info,
            // An older server tells on request, or not at all.
            None => match client.environment_info().await {
                Ok(info) => info,
                Err(ExecServerError::Server { .. } | ExecServerError::Protocol { .. }) => {
                    EnvironmentInfo::default()
                }
                Err(error) => return Err(error),
            },
        };
        *client.shared.info.lock() = Arc::new(info);
        Ok(client)
    }

    /// The session's id, to resume it later; `None` with an older server that names none.
    pub fn session_id(&self) -> Option<String> {
        self.shared.session.lock().clone()
    }

    /// What the server said of itself when the connection was made.
    pub fn info(&self) -> Arc<EnvironmentInfo> {
        self.shared.info()
    }

    /// What can be asked of this server.
    pub fn capabilities(&self) -> Capabilities {
        self.shared.info().capabilities
    }

    /// What is connected to, for people; without secrets.
    pub fn endpoint(&self) -> &str {
        &self.shared.endpoint
    }

    /// How the connection is, now and when it changes.
    pub fn status(&self) -> watch::Receiver<ConnectionStatus> {
        self.shared.status.subscribe()
    }

    /// Closes the connection, and sees to it that the other side learns of that. The server keeps the
    /// session, and its processes go on, for its detach period. Calls under way fail.
    pub async fn close(&self) {
        self.alive.0.send_replace(true);
        let mut states = self.shared.link.subscribe();
        // The driver lives until it has said so.
        let _ = states.wait_for(|state| matches!(state, LinkState::Dead(_))).await;
        // And until its dialer has said farewell.
        self.alive.0.closed().await;
    }

    /// Calls any method of the table. A request that only reads is made again after a reconnect;
    /// another that was under way fails with [`Lost::Answer`](crate::Lost::Answer).
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), codex_exec_client::ExecServerError> {
    /// use codex_exec_client::protocol::{call, environment::EnvironmentStatusParams};
    /// let status = client.call::<call::EnvironmentStatus>(EnvironmentStatusParams {}).await?;
    /// assert_eq!(status.status, "ready");
    /// # Ok(()) }
    /// ```
    pub async fn call<C: Call>(&self, params: C::Params) -> Result<C::Response, ExecServerError> {
        let effect = C::effect(&params);
        self.call_as::<C>(&params, effect).await
    }

    /// Calls a filesystem method held to a sandbox.
    pub async fn call_in<C: FileCall>(
        &self,
        params: C::Params,
        sandbox: Option<&SandboxContext>,
    ) -> Result<C::Response, ExecServerError> {
        self.call::<C>(C::with_sandbox(params, sandbox)).await
    }

    /// Calls a method whose effect is known better than its params tell.
    pub(crate) async fn call_as<C: Call>(
        &self,
        params: &C::Params,
        effect: Effect,
    ) -> Result<C::Response, ExecServerError> {
        let any: &dyn Any = params;
        if let Some(start) = any.downcast_ref::<ExecParams>() {
            self.shared.claim(&start.process_id);
        }
        let wait = any.downcast_ref::<ReadParams>().and_then(|read| read.wait_ms).unwrap_or(0);
        let timeout =
            self.timeout(C::METHOD).map(|limit| limit.saturating_add(Duration::from_millis(wait)));
        self.shared.call::<C>(params, effect, timeout).await
    }

    /// Subscribes to a notification that is not a process's own: `http/request/bodyDelta`,
    /// `fs/changed`, `fs/missingChanged`, `fs/search/matches`. Subscribe before the request that
    /// causes them.
    pub fn subscribe<N: Notification>(&self) -> Notices<N> {
        self.shared.subscriptions.subscribe(self.shared.tuning.notice_queue)
    }

    /// An id that no other client uses, for requests that want one.
    pub fn fresh_id(&self) -> String {
        self.shared.fresh_id("")
    }

    /// How long this method may take.
    pub(crate) fn timeout(&self, method: Method) -> Option<Duration> {
        match method {
            // The process, or the request itself, says how long.
            Method::ProcessWrite | Method::HttpRequest => None,
            _ => self.shared.tuning.request_timeout,
        }
    }

    /// What the server is and can do, asked anew.
    pub async fn environment_info(&self) -> Result<EnvironmentInfo, ExecServerError> {
        self.call::<call::EnvironmentInfo>(EnvironmentInfoParams {}).await
    }
}

impl fmt::Debug for ExecServerClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecServerClient")
            .field("endpoint", &self.shared.endpoint)
            .finish_non_exhaustive()
    }
}

fn opening_error(
    endpoint: &str,
    error: HandshakeError,
    obituary: Option<String>,
) -> ExecServerError {
    let connect = |kind: ErrorKind, why: String| ExecServerError::Connect {
        endpoint: endpoint.to_owned(),
        cause: DialFailure::transient(why).of_kind(kind),
    };
    match error {
        HandshakeError::Ended(why) => match obituary {
            Some(words) => connect(ErrorKind::CommandEnded, words),
            None => connect(
                ErrorKind::ConnectionLost,
                format!(
                    "the connection ended before the session started ({why}); check that an \
                     exec-server listens at this address"
                ),
            ),
        },
        HandshakeError::Timeout(after) => connect(
            ErrorKind::TimedOut,
            format!(
                "no response to initialize within {} s; check that an exec-server listens at this \
                 address",
                after.as_secs_f32()
            ),
        ),
        HandshakeError::Server(error) => ExecServerError::server(Method::Initialize.name(), error),
        HandshakeError::Protocol(detail) => ExecServerError::protocol(
            format!("invalid response to initialize from {endpoint}"),
            detail,
        ),
    }
}
