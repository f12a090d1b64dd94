//! Remote mode of `codex exec-server`: its flags, and `forward`.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use codex_exec_server::client::trust_only;
use codex_exec_server::credentials::{
    AwsCredential, AwsSources, ChatGptAccessToken, CredentialPipe, CredentialPipeConfig,
    read_token_line,
};
use codex_exec_server::{
    DirectEnvironmentConfig, ExecServerRuntimePaths, RemoteEnvironmentConfig, RemoteExecutorConfig,
    ServerConfig, SignIn, SignInKind, SignInSources, run_direct_environment_until,
    run_remote_environment_until, run_remote_executor_until, shutdown_signal,
};

use codex_exec_server::remote_mode::Credential;

use crate::config_args::ConfigArgs;
use crate::remote_status::{self, Served};

/// If this variable is `1` or `true`, it acts like `--exit-on-stdin-close`.
const EXIT_ON_STDIN_CLOSE: &str = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE";

/// The flags of remote mode.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Remote mode")]
pub(crate) struct RemoteArgs {
    /// Register with this registry and serve through its rendezvous instead of listening
    #[arg(long, value_name = "URL")]
    pub remote: Option<String>,

    /// The id to register this machine under
    #[arg(long, value_name = "ID", requires = "remote", conflicts_with = "executor_id")]
    environment_id: Option<String>,

    /// Register by the older revision: messages are not encrypted end to end
    #[arg(long, value_name = "ID", requires = "remote", hide_short_help = true)]
    executor_id: Option<String>,

    /// The name of this machine in logs
    #[arg(long, value_name = "NAME", requires = "remote")]
    name: Option<String>,

    /// Sign in with the agent identity in CODEX_ACCESS_TOKEN
    #[arg(long, alias = "allow-agent-identity-auth", requires = "remote")]
    use_agent_identity_auth: bool,

    /// Serve through a relay with end-to-end encryption (noise), or on one websocket that the server dials
    /// (direct)
    #[arg(long, value_enum, value_name = "TRANSPORT", default_value_t, requires_all = ["remote", "environment_id"],
          requires_if("direct", "aws_sigv4"))]
    remote_transport: Transport,

    /// Sign the registration and the websocket of the direct transport with AWS Signature Version 4
    #[arg(long, requires_all = ["remote", "environment_id"],
          conflicts_with_all = ["executor_credential_stdin", "use_agent_identity_auth"])]
    aws_sigv4: bool,

    /// Use this profile of ~/.aws/config and ~/.aws/credentials
    #[arg(long, value_name = "PROFILE", requires_all = ["remote", "environment_id", "aws_sigv4"])]
    aws_profile: Option<String>,

    /// Sign for this region instead of the one of AWS_REGION or of the profile
    #[arg(long, value_name = "REGION", requires_all = ["remote", "environment_id", "aws_sigv4"])]
    aws_region: Option<String>,

    /// Sign for this service [default: execute-api]
    #[arg(long, value_name = "SERVICE", requires_all = ["remote", "environment_id", "aws_sigv4"])]
    aws_service: Option<String>,

    /// Sign in with executor credentials that the parent process writes to stdin, one JSON object per
    /// line, and stop at the end of stdin
    #[arg(long, requires_all = ["remote", "environment_id"],
          conflicts_with = "use_agent_identity_auth")]
    executor_credential_stdin: bool,

    /// Sign in with one bearer token for the registry, which the parent process writes to stdin as a line
    #[arg(long, requires_all = ["remote", "environment_id"],
          conflicts_with_all = ["executor_credential_stdin", "use_agent_identity_auth", "aws_sigv4"])]
    registration_bearer_stdin: bool,

    /// Sign in with one ChatGPT access token, which the parent process writes to stdin (a pipe or socket) as a
    /// line; the registry has to be https
    #[arg(long, requires_all = ["remote", "environment_id"],
          conflicts_with_all = ["registration_bearer_stdin", "executor_credential_stdin",
                                "use_agent_identity_auth", "aws_sigv4"])]
    chatgpt_token_stdin: bool,

    /// The account of --chatgpt-token-stdin; needed if the token does not name it
    #[arg(long, value_name = "ID", requires_all = ["remote", "environment_id", "chatgpt_token_stdin"])]
    chatgpt_account_id: Option<String>,

    /// Allow sending credentials to this host, even if they are restricted to other hosts; can be
    /// repeated
    #[arg(long, value_name = "HOST", requires = "remote", alias = "allow-host")]
    allow_registry_host: Vec<String>,

    /// Trust the certificate authorities in this PEM file instead of the system's, for the registry and the
    /// rendezvous [$CODEX_CA_CERTIFICATE names one to trust besides them]
    #[arg(long, value_name = "FILE", requires = "remote")]
    ca_file: Option<std::path::PathBuf>,

    /// Stop at the end of stdin, so that the server ends with the program that started it
    #[arg(long)]
    exit_on_stdin_close: bool,
}

/// How messages are carried in remote mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Transport {
    /// Through a relay, end-to-end encrypted
    #[default]
    Noise,
    /// On one websocket that the server dials
    Direct,
}

/// Register an environment and forward its streams to a running exec-server
///
/// Registers like --remote. Each harness gets its own websocket to that server; if either end closes,
/// the other is closed too.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  codex exec-server forward --connect ws://127.0.0.1:4500 --remote https://registry.example \\
      --environment-id env_1")]
pub(crate) struct ForwardArgs {
    /// Forward streams to the exec-server at this ws:// URL
    #[arg(long, value_name = "URL")]
    connect: String,

    #[command(flatten)]
    remote: RemoteArgs,

    #[command(flatten)]
    config: ConfigArgs,
}

impl ForwardArgs {
    pub(crate) async fn run(self, paths: &ExecServerRuntimePaths) -> anyhow::Result<()> {
        if !self.connect.starts_with("ws://") && !self.connect.starts_with("wss://") {
            anyhow::bail!(
                "invalid --connect URL \"{}\": expected the ws:// URL that the exec-server printed",
                self.connect
            );
        }
        if self.remote.executor_id.is_some() {
            anyhow::bail!("forward does not support --executor-id; pass --environment-id");
        }
        self.config.note_ignored();
        self.remote.run(ServerConfig::default(), paths, Some(self.connect)).await
    }
}

impl RemoteArgs {
    pub(crate) async fn run(
        self,
        server: ServerConfig,
        paths: &ExecServerRuntimePaths,
        forward_to: Option<String>,
    ) -> anyhow::Result<()> {
        if let Some(file) = &self.ca_file {
            trust_only(file).map_err(anyhow::Error::msg)?;
        }
        if self.aws_sigv4 && self.remote_transport != Transport::Direct {
            anyhow::bail!("--aws-sigv4 requires --remote-transport direct");
        }
        if self.remote_transport == Transport::Direct {
            if forward_to.is_some() {
                anyhow::bail!("--remote-transport direct does not support forward");
            }
            return self.run_direct(server, paths).await;
        }
        if self.executor_credential_stdin {
            return self.run_with_pipe(server, paths, forward_to).await;
        }
        let stop_on_stdin = wants_exit_on_stdin_close(self.exit_on_stdin_close);
        let base_url = self.remote.context("forward needs --remote URL")?;
        let name = self.name.unwrap_or_else(|| "codex-exec-server".to_owned());
        let stdin_credential: Option<Arc<dyn Credential>> = if self.registration_bearer_stdin {
            let token = read_token_line(&mut std::io::stdin().lock(), MAX_BEARER_LINE)?;
            let hosts = self.allow_registry_host.clone();
            Some(Arc::new(SignIn::bearer(token).with_allowed_hosts(hosts)))
        } else if self.chatgpt_token_stdin {
            require_pipe()?;
            let account_id = self.chatgpt_account_id.as_deref();
            let token = ChatGptAccessToken::read(&mut std::io::stdin().lock(), account_id)?;
            Some(Arc::new(token))
        } else {
            None
        };
        if let Some(credential) = stdin_credential {
            let environment_id =
                self.environment_id.context("--remote needs --environment-id ID")?;
            let status = remote_status::report(&base_url, &Served::Environment(&environment_id));
            let mut config = RemoteEnvironmentConfig::new(base_url, environment_id, credential);
            config.relay.connected = Some(status);
            config.name = name;
            config.server = server;
            config.forward_to = forward_to;
            let stop = shutdown_signal_or_stdin_end(stop_on_stdin);
            return Ok(run_remote_environment_until(config, paths, stop).await?);
        }
        let mut sources = SignInSources::from_env();
        sources.allowed_hosts = self.allow_registry_host;
        let agent = self.use_agent_identity_auth.then_some(SignInKind::AgentIdentity);
        let stop = shutdown_signal_or_stdin_end(stop_on_stdin);
        match (self.environment_id, self.executor_id) {
            (Some(environment_id), _) => {
                let sign_in = sources.sign_in(agent.unwrap_or_default())?;
                let status =
                    remote_status::report(&base_url, &Served::Environment(&environment_id));
                let mut config = RemoteEnvironmentConfig::new(base_url, environment_id, sign_in);
                config.relay.connected = Some(status);
                config.name = name;
                config.server = server;
                config.forward_to = forward_to;
                Ok(run_remote_environment_until(config, paths, stop).await?)
            }
            (None, Some(executor_id)) => {
                let sign_in = sources.sign_in(agent.unwrap_or(SignInKind::RemoteBearer))?;
                let status = remote_status::report(&base_url, &Served::Executor(&executor_id));
                let mut config = RemoteExecutorConfig::new(base_url, executor_id, sign_in);
                config.relay.connected = Some(status);
                config.name = name;
                config.server = server;
                Ok(run_remote_executor_until(config, paths, stop).await?)
            }
            (None, None) => anyhow::bail!("--remote needs --environment-id ID"),
        }
    }

    /// Where the AWS credentials come from that requests are signed with, if they are.
    pub(crate) fn aws_sources(&self) -> Option<AwsSources> {
        let mut sources = self.aws_sigv4.then(AwsSources::from_env)?;
        sources.profile = self.aws_profile.clone().or(sources.profile);
        sources.region = self.aws_region.clone().or(sources.region);
        Some(sources)
    }

    async fn run_direct(
        self,
        server: ServerConfig,
        paths: &ExecServerRuntimePaths,
    ) -> anyhow::Result<()> {
        let sources = self.aws_sources().context("direct needs --aws-sigv4")?;
        let service = self.aws_service.unwrap_or_else(|| "execute-api".to_owned());
        let credential = AwsCredential::new(sources, service)?;
        let base_url = self.remote.context("direct needs --remote URL")?;
        let environment_id = self.environment_id.context("direct needs --environment-id ID")?;
        let status = remote_status::report(&base_url, &Served::Direct(&environment_id));
        let mut config = DirectEnvironmentConfig::new(base_url, environment_id, credential);
        config.dial.connected = Some(status);
        config.server = server;
        let stop =
            shutdown_signal_or_stdin_end(wants_exit_on_stdin_close(self.exit_on_stdin_close));
        Ok(run_direct_environment_until(config, paths, stop).await?)
    }

    async fn run_with_pipe(
        self,
        server: ServerConfig,
        paths: &ExecServerRuntimePaths,
        forward_to: Option<String>,
    ) -> anyhow::Result<()> {
        let signal = shutdown_signal();
        let base_url = self.remote.context("--executor-credential-stdin needs --remote URL")?;
        let environment_id = self.environment_id.context("--remote needs --environment-id ID")?;
        let pipe_config = CredentialPipeConfig::new(&environment_id);
        let stdin = tokio::io::BufReader::new(tokio::io::stdin());
        let (pipe, credential) = CredentialPipe::open(stdin, pipe_config).await?;
        let status = remote_status::report(&base_url, &Served::Environment(&environment_id));
        let mut config = RemoteEnvironmentConfig::new(base_url, environment_id, credential);
        config.relay.connected = Some(status);
        config.name = self.name.unwrap_or_else(|| "codex-exec-server".to_owned());
        config.server = server;
        config.forward_to = forward_to;
        let mut ended = Ok(());
        let stop = async {
            tokio::select! {
                () = signal => {}
                result = pipe.watch() => ended = result,
            }
        };
        run_remote_environment_until(config, paths, stop).await?;
        Ok(ended?)
    }

    /// Whether the server stops at the end of stdin.
    pub(crate) fn exits_on_stdin_close(&self) -> bool {
        wants_exit_on_stdin_close(self.exit_on_stdin_close)
    }
}

/// The longest line of `--registration-bearer-stdin`, with its newline, in bytes.
const MAX_BEARER_LINE: usize = 16 << 10;

/// Fails unless a program writes stdin: a file would keep the token, a terminal would show it.
fn require_pipe() -> anyhow::Result<()> {
    use rustix::fs::FileType;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(std::io::stdin())?.st_mode);
    if !matches!(kind, FileType::Fifo | FileType::Socket) {
        anyhow::bail!("--chatgpt-token-stdin needs a pipe or a socket as stdin");
    }
    Ok(())
}

fn wants_exit_on_stdin_close(flag: bool) -> bool {
    let set = |value: String| matches!(value.trim(), "1" | "true" | "yes");
    flag || std::env::var(EXIT_ON_STDIN_CLOSE).is_ok_and(set)
}

/// Resolves on SIGTERM or SIGINT or, if `stdin` is true, at the end of stdin. The signal handlers are
/// installed by the time this returns. Must be called inside a tokio runtime.
pub(crate) fn shutdown_signal_or_stdin_end(stdin: bool) -> impl Future<Output = ()> {
    let signal = shutdown_signal();
    async move {
        tokio::select! {
            () = signal => {}
            () = stdin_ended(), if stdin => tracing::info!("stdin has ended; stopping"),
        }
    }
}

async fn stdin_ended() {
    let (sender, ended) = tokio::sync::oneshot::channel();
    // In a thread: a read of a terminal cannot be cancelled.
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        loop {
            match std::io::stdin().lock().read(&mut buffer) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(_) => break,
            }
        }
        let _ = sender.send(());
    });
    let _ = ended.await;
}
