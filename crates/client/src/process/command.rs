//! What to run, and how.

use codex_exec_server_protocol::process::{
    Env, EnvPolicy, ExecParams, Opaque, ProcessId, Retain, TerminalSize,
};
use codex_exec_server_protocol::{PathUri, SandboxContext};
use serde::Serialize;

use super::shared_sequencer::OnSlowConsumer;
use crate::error::ExecServerError;

/// A command to start, as [`std::process::Command`] is.
///
/// By default it runs in the server's working directory, with the server's environment (less what
/// looks like a secret), without stdin, terminal or sandbox.
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
    pub(crate) metadata: Option<Opaque>,
    pub(crate) retain: Option<Retain>,
    pub(crate) process_id: Option<ProcessId>,
    pub(crate) on_slow_consumer: OnSlowConsumer,
    pub(crate) window: Option<usize>,
    pub(crate) terminate_on_drop: bool,
}

impl ExecCommand {
    /// This program with these arguments; the program is looked up in the process's `PATH`.
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
            metadata: None,
            retain: None,
            process_id: None,
            on_slow_consumer: OnSlowConsumer::default(),
            window: None,
            terminate_on_drop: false,
        }
    }

    /// This script, run by `/bin/sh -c`.
    pub fn shell(script: impl Into<String>) -> Self {
        Self::new(["/bin/sh".to_owned(), "-c".to_owned(), script.into()])
    }

    /// Program and arguments.
    pub fn argv(&self) -> &[String] {
        &self.argv
    }

    /// One more argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.argv.push(argument.into());
        self
    }

    /// More arguments.
    #[must_use]
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.argv.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// The working directory: an absolute path on the server, or a `file:` URI.
    pub fn cwd(mut self, path: impl AsRef<str>) -> Result<Self, ExecServerError> {
        let path = path.as_ref().parse::<PathUri>();
        self.cwd = Some(path.map_err(|error| ExecServerError::Invalid(error.to_string()))?);
        Ok(self)
    }

    /// The working directory.
    #[must_use]
    pub fn cwd_uri(mut self, path: PathUri) -> Self {
        self.cwd = Some(path);
        self
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.0.insert(name.into(), value.into());
        self
    }

    /// Sets variables.
    #[must_use]
    pub fn envs(
        mut self,
        pairs: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
    ) -> Self {
        self.env.0.extend(pairs.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// Starts from an empty environment instead of the server's. Set `PATH`, or name the program by
    /// its whole path.
    #[must_use]
    pub fn env_clear(mut self) -> Self {
        self.env_policy = None;
        self.env.0.clear();
        self
    }

    /// What to take of the server's environment; `None` for nothing.
    #[must_use]
    pub fn env_policy(mut self, policy: Option<EnvPolicy>) -> Self {
        self.env_policy = policy;
        self
    }

    /// Runs it in a terminal of 24×80, or of the size that [`size`](Self::size) gives.
    #[must_use]
    pub fn tty(mut self) -> Self {
        self.tty = true;
        self
    }

    /// Runs it in a terminal of this size. A server without the capability `processResize` starts
    /// with 24×80.
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

    /// What the program sees as its own name.
    #[must_use]
    pub fn arg0(mut self, name: impl Into<String>) -> Self {
        self.arg0 = Some(name.into());
        self
    }

    /// What to hold it to; `None` for nothing.
    #[must_use]
    pub fn sandbox(mut self, sandbox: impl Into<Option<SandboxContext>>) -> Self {
        self.sandbox = sandbox.into();
        self
    }

    /// Who asks, for the server's logs: a JSON object such as `{threadId, toolCallId}`.
    pub fn metadata(mut self, metadata: &impl Serialize) -> Result<Self, ExecServerError> {
        let raw = serde_json::value::to_raw_value(metadata)
            .map_err(|error| ExecServerError::Invalid(format!("metadata: {error}")))?;
        self.metadata = Some(Opaque(raw));
        Ok(self)
    }

    /// How much output the server keeps. A server without the capability `processRetain` keeps
    /// what it always does.
    #[must_use]
    pub fn retain(mut self, retain: Retain) -> Self {
        self.retain = Some(retain);
        self
    }

    /// Its name in the session, to [attach](crate::ExecServerClient::attach) to it later. A unique
    /// one is made otherwise.
    #[must_use]
    pub fn process_id(mut self, id: impl Into<ProcessId>) -> Self {
        self.process_id = Some(id.into());
        self
    }

    /// What happens when its output is not taken as fast as it comes.
    #[must_use]
    pub fn on_slow_consumer(mut self, on_slow_consumer: OnSlowConsumer) -> Self {
        self.on_slow_consumer = on_slow_consumer;
        self
    }

    /// Bytes of output that wait for the consumer, instead of
    /// [`ClientTuning::event_window`](crate::ClientTuning::event_window).
    #[must_use]
    pub fn window(mut self, bytes: usize) -> Self {
        self.window = Some(bytes);
        self
    }

    /// Terminates the process when its handle is dropped before its end.
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
            enforce_managed_network: false,
            metadata: self.metadata.clone(),
            managed_network: None,
            network_proxy: None,
            shell_snapshot: None,
            size: self.size,
            retain: self.retain,
        }
    }
}
