//! [`ExecServerClient`]: connecting, and calling any method.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::{Connection, WebsocketDial, tls_with_identity};
use codex_exec_server_protocol::environment::{
    Capabilities, EnvironmentInfo, EnvironmentInfoParams,
};
use codex_exec_server_protocol::network::{NetworkPolicyAnswer, NetworkPolicyRequestParams};
use codex_exec_server_protocol::process::{ExecParams, ReadParams};
use codex_exec_server_protocol::session::{InitializeParams, Role};
use codex_exec_server_protocol::{
    Call, Effect, ErrorKind, FileCall, Method, Notification, SandboxContext, call,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::channel::Channel;
use crate::dialer::{Dialer, SingleConnection, StdioDialer, WebsocketDialer};
use crate::driver::Driver;
use crate::error::{DialFailure, ExecServerError};
use crate::handshake::{HandshakeError, handshake};
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
use crate::shared::{ChannelState, ConnectionStatus, Shared};
use crate::subscriptions::Notifications;

/// A session with an exec-server. Cheap to clone; the connection closes when the last clone and the last
/// process handle are dropped.
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
    close_signal: Arc<CloseOnDrop>,
    is_guest: bool,
}

/// Closes the connection when the last handle is dropped.
struct CloseOnDrop(watch::Sender<bool>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

impl ExecServerClient {
    /// Connects to a server by websocket.
    pub async fn connect_websocket(
        args: RemoteExecServerConnectArgs,
    ) -> Result<Self, ExecServerError> {
        let identity = args.client_certificate.as_ref();
        let tls = identity.map(|(certificate, key)| tls_with_identity(certificate, key));
        let tls = tls.transpose().map_err(|reason| ExecServerError::Connect {
            endpoint: WebsocketDial::new(&args.websocket_url).redacted_url(),
            cause: DialFailure::permanent(reason),
        })?;
        let dial = WebsocketDial {
            tls,
            bearer_token: args.bearer_token.clone(),
            timeout: args.connect_timeout,
            receive_buffer: args.receive_buffer,
            ..WebsocketDial::new(&args.websocket_url)
        };
        let config = args.tuning.connection;
        Self::connect(WebsocketDialer { dial, config }, args.into()).await
    }

    /// Starts a command and connects to the server on its stdin and stdout, for example
    /// `["ssh", "host", "codex", "exec-server", "--listen", "stdio"]`.
    pub async fn connect_stdio_command(
        argv: impl IntoIterator<Item = impl Into<String>>,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let dialer = StdioDialer::new(argv, options.tuning.connection);
        Self::connect(dialer, options).await
    }

    /// Uses an existing connection, such as one end of [`Connection::pair`] with an embedded server on
    /// the other. The client cannot dial it again, so it does not reconnect.
    pub async fn connect_connection(
        connection: Connection,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        Self::connect(SingleConnection(Mutex::new(Some(connection))), options).await
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
            attach: options.attach,
            session_name: options.session_name,
        };
        let started = Instant::now();
        let resume_timeout = options.initialize_timeout.min(options.reconnect.give_up_after);
        let mut attempt = 0;
        let (connection, opened) = loop {
            let mut connection = dialer.dial().await.map_err(failed)?;
            match handshake(&mut connection, &initialize, options.initialize_timeout).await {
                Ok(opened) => break (connection, opened),
                // The server may not have detected yet that the previous connection is gone.
                Err(HandshakeError::Server(error))
                    if error.kind == Some(ErrorKind::SessionAttached)
                        && options.reconnect.enabled
                        && dialer.can_resume()
                        && started.elapsed() < resume_timeout =>
                {
                    drop(connection);
                    tokio::time::sleep(options.reconnect.delay(attempt)).await;
                    attempt += 1;
                }
                Err(error) => {
                    drop(connection);
                    let failure_detail = dialer.failure_detail().await;
                    return Err(connect_error(&endpoint, error, failure_detail));
                }
            }
        };

        let channel = Channel::new(1, connection.outbound().clone());
        let shared = Arc::new(Shared::new(options.tuning, endpoint, channel.clone()));
        shared.session.lock().clone_from(&opened.session_id);
        let is_guest = opened.role.is_some_and(|role| role != Role::Holder);
        if initialize.resume_session_id.is_some() {
            shared.mark_resumed();
        }
        let close_signal = Arc::new(CloseOnDrop(watch::Sender::new(false)));
        let driver = Driver {
            shared: shared.clone(),
            dialer: Arc::new(dialer),
            policy: options.reconnect,
            initialize,
            initialize_timeout: options.initialize_timeout,
            closing: close_signal.0.subscribe(),
        };
        tokio::spawn(driver.run(connection, channel));
        let client = Self { shared, close_signal, is_guest };
        let info = match opened.environment_info {
            Some(info) => info,
            // An older server sends it on request, or not at all.
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

    /// The session's id, to resume it later; `None` if the server is older and sends none.
    pub fn session_id(&self) -> Option<String> {
        self.shared.session.lock().clone()
    }

    /// Whether this client is a guest of its session: the server has sharing, and the client asked for it.
    pub fn is_guest(&self) -> bool {
        self.is_guest
    }

    /// The server's description of itself, from the last handshake.
    pub fn info(&self) -> Arc<EnvironmentInfo> {
        self.shared.info()
    }

    /// The extensions that this server supports.
    pub fn capabilities(&self) -> Capabilities {
        self.shared.info().capabilities
    }

    /// The server's address for messages; contains no secret.
    pub fn endpoint(&self) -> &str {
        &self.shared.endpoint
    }

    /// The state of the connection, and every change of it.
    pub fn status(&self) -> watch::Receiver<ConnectionStatus> {
        self.shared.status.subscribe()
    }

    /// Closes the connection and waits until the server can see that. The server keeps the session and its
    /// processes for the session's detach TTL. Pending calls fail.
    pub async fn close(&self) {
        self.close_signal.0.send_replace(true);
        let mut states = self.shared.channel.subscribe();
        // The driver runs until it has set this state,
        let _ = states.wait_for(|state| matches!(state, ChannelState::Dead(_))).await;
        // and until its dialer has closed the connection.
        self.close_signal.0.closed().await;
    }

    /// Calls any method of the protocol. After a reconnect, the client repeats a request that only reads;
    /// any other pending request fails with [`Lost::Response`](crate::Lost::Response).
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

    /// Calls a filesystem method under a sandbox policy.
    pub async fn call_in<C: FileCall>(
        &self,
        params: C::Params,
        sandbox: Option<&SandboxContext>,
    ) -> Result<C::Response, ExecServerError> {
        self.call::<C>(C::with_sandbox(params, sandbox)).await
    }

    /// Calls a method with a given effect instead of the one that its params imply.
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

    /// Subscribes to a kind of notification that does not belong to a process: `http/request/bodyDelta`,
    /// `fs/changed`, `fs/missingChanged`, `fs/search/matches`, `network/policyDecision`. Subscribe before the request that causes
    /// them.
    pub fn subscribe<N: Notification>(&self) -> Notifications<N> {
        self.shared.subscriptions.subscribe(self.shared.tuning.notification_queue)
    }

    /// Answers the server's questions about hosts that a process's network proxy leaves undecided, until
    /// another handler is set. Without one, the answer is to deny. The server asks only if the process was
    /// started with `policyDecisionTimeoutMs`, and each answer is about one request of the process. For
    /// the records of all decisions, [subscribe](Self::subscribe) to
    /// [`NetworkPolicyDecision`](codex_exec_server_protocol::notification::NetworkPolicyDecision).
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) {
    /// use codex_exec_client::protocol::network::NetworkPolicyAnswer;
    /// client.on_policy_request(|question| async move {
    ///     match question.request.host.as_str() {
    ///         "example.com" => NetworkPolicyAnswer::Allow,
    ///         _ => NetworkPolicyAnswer::Deny { reason: "not_allowed".into() },
    ///     }
    /// });
    /// # }
    /// ```
    pub fn on_policy_request<F>(
        &self,
        handler: impl Fn(NetworkPolicyRequestParams) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = NetworkPolicyAnswer> + Send + 'static,
    {
        self.shared.answers.set_handler(Arc::new(move |question| Box::pin(handler(question))));
    }

    /// A new id, unique among clients, for requests that need one.
    pub fn fresh_id(&self) -> String {
        self.shared.fresh_id("")
    }

    /// The timeout of this method; `None` waits for ever.
    pub(crate) fn timeout(&self, method: Method) -> Option<Duration> {
        match method {
            // Limited by the process, or by the request's own timeout.
            Method::ProcessWrite | Method::HttpRequest => None,
            _ => self.shared.tuning.request_timeout,
        }
    }

    /// Requests the server's description of itself again.
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

fn connect_error(
    endpoint: &str,
    error: HandshakeError,
    failure_detail: Option<String>,
) -> ExecServerError {
    let connect = |kind: ErrorKind, why: String| ExecServerError::Connect {
        endpoint: endpoint.to_owned(),
        cause: DialFailure::transient(why).of_kind(kind),
    };
    match error {
        HandshakeError::Ended(why) => match failure_detail {
            Some(detail) => connect(ErrorKind::CommandEnded, detail),
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
