//! Commands to run on the server.

use codex_exec_server_protocol::network::NetworkProxyLaunch;
use codex_exec_server_protocol::process::{
    Env, EnvPolicy, ExecParams, Opaque, ProcessId, Retain, TerminalSize,
};
use codex_exec_server_protocol::resources::ResourceLimits;
use codex_exec_server_protocol::{PathUri, SandboxContext};
use serde::Serialize;

use super::shared_sequencer::OnSlowConsumer;
use crate::error::ExecServerError;

/// A command to start, like [`std::process::Command`].
///
/// By default it runs in the server's working directory, with the server's environment except variables
/// that look like secrets, without stdin, terminal or sandbox.
///
/// ```
/// use codex_exec_client::ExecCommand;
/// # fn main() -> Result<(), codex_exec_client::ExecServerError> {
/// let command = ExecCommand::new(["cargo", "build"])
///     .arg("--release")
///     .cwd("/srv/app")?
///     .env("CARGO_TERM_COLOR", "always");
/// assert!(!format!("{command:?}").contains("always"), "values of the environment are not shown");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ExecCommand {
    pub(crate) argv: Vec<String>,
    pub(crate) cwd: Option<PathUri>,
    pub(crate) env: Env,
    pub(crate) env_policy: Option<EnvPolicy>,
    pub(crate) tty: bool,
    pub(crate) size: Option<TerminalSize>,
    pub(crate) pipe_stdin: bool,
    pub(crate) arg0: Option<String>,
    pub(crate) sandbox: Option<SandboxContext>,
    pub(crate) network_proxy: Option<NetworkProxyLaunch>,
    pub(crate) enforce_managed_network: bool,
    pub(crate) metadata: Option<Opaque>,
    pub(crate) retain: Option<Retain>,
    pub(crate) limits: Option<ResourceLimits>,
    pub(crate) process_id: Option<ProcessId>,
    pub(crate) on_slow_consumer: OnSlowConsumer,
    pub(crate) window: Option<usize>,
    pub(crate) terminate_on_drop: bool,
}

impl ExecCommand {
    /// Runs this program with these arguments; the server looks it up in the process's `PATH`.
    pub fn new(argv: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            cwd: None,
            env: Env::default(),
            env_policy: Some(EnvPolicy::default()),
            tty: false,
            size: None,
            pipe_stdin: false,
            arg0: None,
            sandbox: None,
            network_proxy: None,
            enforce_managed_network: false,
            metadata: None,
            retain: None,
            limits: None,
            process_id: None,
            on_slow_consumer: OnSlowConsumer::default(),
            window: None,
            terminate_on_drop: false,
        }
    }

    /// Runs this script with `/bin/sh -c`.
    pub fn shell(script: impl Into<String>) -> Self {
        Self::new(["/bin/sh".to_owned(), "-c".to_owned(), script.into()])
    }

    /// The program and its arguments.
    pub fn argv(&self) -> &[String] {
        &self.argv
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.argv.push(argument.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.argv.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets the working directory: an absolute path on the server, or a `file:` URI.
    pub fn cwd(mut self, path: impl AsRef<str>) -> Result<Self, ExecServerError> {
        let path = path.as_ref().parse::<PathUri>();
        self.cwd = Some(path.map_err(|error| ExecServerError::Invalid(error.to_string()))?);
        Ok(self)
    }

    /// Sets the working directory.
    #[must_use]
    pub fn cwd_uri(mut self, path: PathUri) -> Self {
        self.cwd = Some(path);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.0.insert(name.into(), value.into());
        self
    }

    /// Sets environment variables.
    #[must_use]
    pub fn envs(
        mut self,
        pairs: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
    ) -> Self {
        self.env.0.extend(pairs.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// Starts with an empty environment instead of the server's. Set `PATH`, or give the program as a
    /// path.
    #[must_use]
    pub fn env_clear(mut self) -> Self {
        self.env_policy = None;
        self.env.0.clear();
        self
    }

    /// Sets which variables to inherit from the server; `None` inherits nothing.
    #[must_use]
    pub fn env_policy(mut self, policy: Option<EnvPolicy>) -> Self {
        self.env_policy = policy;
        self
    }

    /// Runs the command in a terminal of 24×80, or of the size set by [`size`](Self::size).
    #[must_use]
    pub fn tty(mut self) -> Self {
        self.tty = true;
        self
    }

    /// Runs the command in a terminal of this size. A server without the capability `processResize` uses
    /// 24×80.
    #[must_use]
    pub fn size(mut self, rows: u16, cols: u16) -> Self {
        self.tty = true;
        self.size = Some(TerminalSize { rows, cols });
        self
    }

    /// Keeps stdin open, for [`Process::take_stdin`](crate::Process::take_stdin).
    #[must_use]
    pub fn pipe_stdin(mut self) -> Self {
        self.pipe_stdin = true;
        self
    }

    /// Sets the program's `argv[0]`.
    #[must_use]
    pub fn arg0(mut self, name: impl Into<String>) -> Self {
        self.arg0 = Some(name.into());
        self
    }

    /// Confines the command to a sandbox; `None` does not.
    #[must_use]
    pub fn sandbox(mut self, sandbox: impl Into<Option<SandboxContext>>) -> Self {
        self.sandbox = sandbox.into();
        self
    }

    /// Gives the command a network proxy of its own, with these rules. A server without the capability
    /// `networkProxyLaunch` refuses the command. The proxy is advice unless
    /// [`enforce_network`](Self::enforce_network) is set.
    #[must_use]
    pub fn network_proxy(mut self, proxy: impl Into<Option<NetworkProxyLaunch>>) -> Self {
        self.network_proxy = proxy.into();
        self
    }

    /// Leaves the command no way out but its proxy. Needs a [sandbox](Self::sandbox), which may restrict
    /// the network alone.
    #[must_use]
    pub fn enforce_network(mut self) -> Self {
        self.enforce_managed_network = true;
        self
    }

    /// Sets metadata for the server's logs: a JSON object such as `{threadId, toolCallId}`.
    pub fn metadata(mut self, metadata: &impl Serialize) -> Result<Self, ExecServerError> {
        let raw = serde_json::value::to_raw_value(metadata)
            .map_err(|error| ExecServerError::Invalid(format!("metadata: {error}")))?;
        self.metadata = Some(Opaque(raw));
        Ok(self)
    }

    /// Limits what the command and everything that it starts may use. A server without the capability
    /// `processLimits` ignores it, so [`ExecServerClient::spawn`](crate::ExecServerClient::spawn) fails there.
    pub fn limits(mut self, limits: ResourceLimits) -> Self {
        self.limits = Some(limits);
        self
    }

    /// Sets how much output the server retains. A server without the capability `processRetain` ignores
    /// it.
    #[must_use]
    pub fn retain(mut self, retain: Retain) -> Self {
        self.retain = Some(retain);
        self
    }

    /// Sets the process's id in the session, to [attach](crate::ExecServerClient::attach) to it later.
    /// Default: a generated one.
    #[must_use]
    pub fn process_id(mut self, id: impl Into<ProcessId>) -> Self {
        self.process_id = Some(id.into());
        self
    }

    /// Sets what happens if the consumer reads slower than the command writes.
    #[must_use]
    pub fn on_slow_consumer(mut self, on_slow_consumer: OnSlowConsumer) -> Self {
        self.on_slow_consumer = on_slow_consumer;
        self
    }

    /// Sets how much output the client buffers in memory, in bytes, instead of
    /// [`ClientTuning::event_window`](crate::ClientTuning::event_window).
    #[must_use]
    pub fn window(mut self, bytes: usize) -> Self {
        self.window = Some(bytes);
        self
    }

    /// Terminates the process if its handle is dropped before it has exited.
    #[must_use]
    pub fn terminate_on_drop(mut self) -> Self {
        self.terminate_on_drop = true;
        self
    }

    pub(crate) fn params(&self, process_id: ProcessId, cwd: PathUri) -> ExecParams {
        ExecParams {
            process_id,
            argv: self.argv.clone(),
            cwd: self.cwd.clone().unwrap_or(cwd),
            env: self.env.clone(),
            env_policy: self.env_policy.clone(),
            tty: self.tty,
            pipe_stdin: self.pipe_stdin,
            arg0: self.arg0.clone(),
            sandbox: self.sandbox.clone(),
            enforce_managed_network: self.enforce_managed_network,
            metadata: self.metadata.clone(),
            managed_network: None,
            network_proxy: self.network_proxy.clone(),
            shell_snapshot: None,
            size: self.size,
            retain: self.retain,
            limits: self.limits.filter(|limits| !limits.is_empty()),
        }
    }
}
