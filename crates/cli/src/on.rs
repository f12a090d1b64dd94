//! `--on WHERE`: which server a command works on.
//!
//! Without one, the server is part of this process: every command works with no server at all.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::{ReconnectPolicy, WebsocketDial};
use codex_exec_server::host::process::Lifeline;
use codex_exec_server::{
    ExecServerClient, ExecServerClientConnectOptions, ExecServerError, RemoteExecServerConnectArgs,
    Server, ServerConfig,
};

/// Where a bearer token is looked for if no file is named.
pub const TOKEN_VARIABLE: &str = "CODEX_EXEC_SERVER_TOKEN";

/// Where to work.
#[derive(Debug, Clone, Args)]
pub struct OnArgs {
    /// The server to work on: ws://HOST:PORT, wss://HOST, or stdio:COMMAND, a command that speaks
    /// the protocol over its stdin and stdout. Without one, this machine, in this very process
    #[arg(long, help_heading = "Where", value_name = "WHERE", env = "CODEX_EXEC_SERVER_URL", hide_env_values = true,
          value_parser = place)]
    pub on: Option<Place>,

    /// A file that holds the bearer token for ws:// and wss://; otherwise
    /// $CODEX_EXEC_SERVER_TOKEN, if set
    #[arg(long, help_heading = "Where", value_name = "PATH")]
    token_file: Option<PathBuf>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// By websocket.
    Websocket(String),
    /// Through a command.
    Stdio(Vec<String>),
}

impl Place {
    /// As it can be shown and dialled again; without secrets only if it had none.
    pub fn url(&self) -> Option<&str> {
        match self {
            Self::Websocket(url) => Some(url),
            Self::Stdio(_) => None,
        }
    }
}

pub fn place(text: &str) -> Result<Place, String> {
    if text.starts_with("ws://") || text.starts_with("wss://") {
        return Ok(Place::Websocket(text.to_owned()));
    }
    if let Some(command) = text.strip_prefix("stdio:") {
        let argv = shlex::split(command)
            .ok_or("the command after stdio: has a quote that does not end")?;
        if argv.is_empty() {
            return Err(
                "name a command, such as stdio:\"ssh host codex exec-server --listen stdio\""
                    .to_owned(),
            );
        }
        return Ok(Place::Stdio(argv));
    }
    Err("write ws://HOST:PORT, wss://HOST or stdio:COMMAND".to_owned())
}

/// How a command wants to be connected.
#[derive(Debug, Clone, Default)]
pub struct Wants {
    /// A session to go on with.
    pub session: Option<String>,
    /// How long the session should outlive its connection.
    pub keep: Option<Duration>,
    /// How long to try to get a lost connection back, instead of the client's own time.
    pub patience: Option<Duration>,
    /// Neither wait for a session that somebody else holds nor reconnect.
    pub at_once: bool,
}

/// A connection, and the server if it is in this process.
#[derive(Debug)]
pub struct Connected {
    pub client: ExecServerClient,
    server: Option<Server>,
}

impl OnArgs {
    /// The same token for another place.
    pub fn at(&self, place: Place) -> Self {
        Self { on: Some(place), token_file: self.token_file.clone() }
    }

    /// Connects.
    pub async fn connect(&self, wants: Wants) -> anyhow::Result<Connected> {
        let mut reconnect = ReconnectPolicy::default();
        if let Some(patience) = wants.patience {
            reconnect.give_up_after = patience;
        }
        reconnect.enabled = !wants.at_once;
        let options = ExecServerClientConnectOptions {
            client_name: "codex".to_owned(),
            resume_session_id: wants.session,
            detach_ttl: wants.keep,
            reconnect,
            ..ExecServerClientConnectOptions::default()
        };
        let client = match &self.on {
            None => {
                let server = embedded()?;
                let client =
                    ExecServerClient::connect_connection(server.connect(), options).await?;
                return Ok(Connected { client, server: Some(server) });
            }
            Some(Place::Websocket(url)) => {
                let args = RemoteExecServerConnectArgs {
                    bearer_token: self.token()?,
                    resume_session_id: options.resume_session_id,
                    detach_ttl: options.detach_ttl,
                    reconnect: options.reconnect,
                    ..RemoteExecServerConnectArgs::new(url, options.client_name)
                };
                ExecServerClient::connect_websocket(args).await
            }
            Some(Place::Stdio(argv)) => {
                ExecServerClient::connect_stdio_command(argv, options).await
            }
        };
        match client {
            Ok(client) => Ok(Connected { client, server: None }),
            Err(error) => Err(Self::explain(&error)),
        }
    }

    /// What is connected to, for people.
    pub fn shown(&self) -> String {
        match &self.on {
            None => "this machine, no server".to_owned(),
            Some(Place::Websocket(url)) => WebsocketDial::new(url).shown_url(),
            Some(Place::Stdio(argv)) => format!("stdio:{}", argv.join(" ")),
        }
    }

    /// The flag that says the same, to be pasted into a shell.
    pub fn flag(&self) -> String {
        match &self.on {
            None => String::new(),
            Some(_) => format!(" --on {}", crate::style::quoted(&self.shown())),
        }
    }

    fn token(&self) -> anyhow::Result<Option<String>> {
        let (token, from) = match &self.token_file {
            Some(file) => {
                let token = std::fs::read_to_string(file)
                    .with_context(|| format!("cannot read the token in {}", file.display()))?;
                (token, file.display().to_string())
            }
            None => match std::env::var(TOKEN_VARIABLE) {
                Ok(token) => (token, format!("${TOKEN_VARIABLE}")),
                Err(_) => return Ok(None),
            },
        };
        match token.trim() {
            "" if self.token_file.is_some() => {
                bail!("{from} holds no token; put the server's token into it")
            }
            "" => Ok(None),
            token => Ok(Some(token.to_owned())),
        }
    }

    /// What the command line can add to a client's words.
    fn explain(error: &ExecServerError) -> anyhow::Error {
        let words = error.to_string();
        let hint = if words.contains("HTTP 401") || words.contains("HTTP 403") {
            format!(" by --token-file PATH or ${TOKEN_VARIABLE}")
        } else if words.contains("unknown session id") {
            "; it has ended or its time was over: `codex ps` shows the sessions that are left"
                .to_owned()
        } else if words.contains("the command ended") {
            "; check that it starts an exec-server that listens on stdio".to_owned()
        } else {
            String::new()
        };
        anyhow::anyhow!("{words}{hint}")
    }
}

impl Connected {
    /// Whether the server is in this process.
    pub fn is_embedded(&self) -> bool {
        self.server.is_some()
    }

    /// Closes the connection; a server in this process ends with all it started.
    pub async fn close(self) {
        self.client.close().await;
        if let Some(server) = self.server {
            server.shut_down().await;
        }
    }
}

fn embedded() -> anyhow::Result<Server> {
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let mut config =
        ServerConfig { sandbox_executable: Some(executable.clone()), ..ServerConfig::default() };
    config.process.lifeline = Lifeline::Warden { executable };
    Server::new(config).context("cannot start a server in this process")
}

/// Runs a command's work to its end.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(work);
    // A thread that waits for a terminal or a pipe would keep the runtime from ending.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        assert_eq!(place("ws://h:1"), Ok(Place::Websocket("ws://h:1".into())));
        assert_eq!(
            place("stdio:ssh 'my host' x"),
            Ok(Place::Stdio(vec!["ssh".into(), "my host".into(), "x".into()]))
        );
        for bad in ["", "http://h", "stdio:", "stdio:'a", "h:1"] {
            place(bad).unwrap_err();
        }
    }
}
