//! Remote mode of `codex exec-server`: its flags, and `forward`.

use std::io::Read;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use codex_exec_server::{
    ExecServerRuntimePaths, RemoteEnvironmentConfig, RemoteExecutorConfig, ServerConfig,
    SignInKind, SignInSources, run_remote_environment_until, run_remote_executor_until,
    shutdown_signal,
};

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

    /// Allow sending credentials to this host, even if they are restricted to other hosts; can be
    /// repeated
    #[arg(long, value_name = "HOST", requires = "remote")]
    allow_host: Vec<String>,

    /// Stop at the end of stdin, so that the server ends with the program that started it
    #[arg(long)]
    exit_on_stdin_close: bool,
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
        let base_url = self.remote.context("forward needs --remote URL")?;
        let mut sources = SignInSources::from_env();
        sources.allowed_hosts = self.allow_host;
        let agent = self.use_agent_identity_auth.then_some(SignInKind::AgentIdentity);
        let stop =
            shutdown_signal_or_stdin_end(wants_exit_on_stdin_close(self.exit_on_stdin_close));
        let name = self.name.unwrap_or_else(|| "codex-exec-server".to_owned());
        match (self.environment_id, self.executor_id) {
            (Some(environment_id), _) => {
                let sign_in = sources.sign_in(agent.unwrap_or_default())?;
                let mut config = RemoteEnvironmentConfig::new(base_url, environment_id, sign_in);
                config.name = name;
                config.server = server;
                config.forward_to = forward_to;
                Ok(run_remote_environment_until(config, paths, stop).await?)
            }
            (None, Some(executor_id)) => {
                let sign_in = sources.sign_in(agent.unwrap_or(SignInKind::RemoteBearer))?;
                let mut config = RemoteExecutorConfig::new(base_url, executor_id, sign_in);
                config.name = name;
                config.server = server;
                Ok(run_remote_executor_until(config, paths, stop).await?)
            }
            (None, None) => anyhow::bail!("--remote needs --environment-id ID"),
        }
    }

    /// Whether the server stops at the end of stdin.
    pub(crate) fn exits_on_stdin_close(&self) -> bool {
        wants_exit_on_stdin_close(self.exit_on_stdin_close)
    }
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
