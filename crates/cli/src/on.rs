//! `--on SERVER`: the server that a command works on.
//!
//! Without it, the server runs in this process, so every command works without a server.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::Lifeline;
use codex_exec_server::client::{Heartbeat, ReconnectPolicy, WebsocketDial};
use codex_exec_server::credentials::{fingerprint, finish_renewals};
use codex_exec_server::remote_mode::{CredentialKind, Origin, Verdict, may_send};
use codex_exec_server::{
    AttachParams, ErrorKind, ExecServerClient, ExecServerClientConnectOptions, ExecServerError,
    RemoteExecServerConnectArgs, Secret, Server, ServerConfig, SignIn, SignInKind, SignInSources,
};

use crate::ca_args::CaArgs;
use crate::exit::{CommandError, print_notice};
use crate::own_files::own_files;
use crate::place::{Chosen, Place, choose};
use crate::places_file::PlaceSettings;
use crate::saved_sessions::{SavedCredential, SavedSession};

/// The variable with the bearer token, unless `--token-file` is given.
pub(crate) const TOKEN_VARIABLE: &str = "CODEX_EXEC_SERVER_TOKEN";
/// The flag as the source of a token.
const TOKEN_FILE: &str = "--token-file";
/// The variable with the token for environments.
pub(crate) const HARNESS_TOKEN_VARIABLE: &str = "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN";
/// The variables with the registry's URL, unless `--registry` is given; other harnesses read the second.
const REGISTRY_VARIABLES: [&str; 2] =
    ["CODEX_REGISTRY_URL", "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL"];

/// The flags that choose a server.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct OnArgs {
    /// Work on this server: ws://HOST:PORT, wss://HOST, unix:PATH, vsock:CID:PORT, stdio:COMMAND (a
    /// command that speaks the protocol over stdin and stdout), env:ID (an environment behind a
    /// rendezvous) or the name of a place (codex places) [default: this machine, without a server]
    #[arg(long, help_heading = "Connection", value_name = "SERVER", env = "CODEX_EXEC_SERVER_URL",
          hide_env_values = true, value_parser = choose)]
    on: Option<Chosen>,

    /// Read the bearer token from this file [default: $CODEX_EXEC_SERVER_TOKEN for ws:// and wss://;
    /// $CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN, $CODEX_API_KEY or codex login for env:]
    #[arg(long, help_heading = "Connection", value_name = "PATH")]
    pub token_file: Option<PathBuf>,

    /// Show the server of wss:// this certificate, in PEM
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "PATH",
        requires = "client_key",
        env = "CODEX_CLIENT_CERTIFICATE",
        hide_env_values = true
    )]
    pub client_cert: Option<PathBuf>,

    /// Key of that certificate, in PEM
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "PATH",
        requires = "client_cert",
        env = "CODEX_CLIENT_KEY",
        hide_env_values = true
    )]
    pub client_key: Option<PathBuf>,

    #[command(flatten)]
    ca: CaArgs,

    /// Look up env:ID in this registry [default: $CODEX_REGISTRY_URL]
    #[arg(long, help_heading = "Connection", value_name = "URL")]
    pub registry: Option<String>,

    /// Allow sending credentials to a registry on this host, even if they are restricted to other
    /// hosts; can be repeated
    #[arg(long, help_heading = "Connection", value_name = "HOST")]
    allow_registry_host: Vec<String>,

    /// Try this long to reconnect after the connection is lost; 0 gives up at once [default: 120;
    /// shell: its --keep]
    #[arg(long, help_heading = "Connection", value_name = "SECONDS", value_parser = seconds)]
    patience: Option<Duration>,

    /// For a saved session: the credential that it was made with.
    #[arg(skip)]
    saved: Option<SavedWith>,
}

/// What a saved session was made with.
#[derive(Debug, Clone)]
struct SavedWith {
    credential: Option<SavedCredential>,
    /// Whether the user named this session, so that a `--token-file` is meant for it.
    named: bool,
}

/// A credential and its source.
struct Sourced<T> {
    credential: T,
    /// `--token-file`, the name of a variable, or `codex login`.
    source: &'static str,
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| "expected a number of seconds, such as 30".to_owned())
}

/// How a command connects.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectOptions {
    /// The session to resume.
    pub session: Option<String>,
    /// How this program takes part in the session.
    pub attach: Option<AttachParams>,
    /// The name of a new session.
    pub name: Option<String>,
    /// How long the server keeps the session without a connection.
    pub detach_ttl: Option<Duration>,
    /// How long to try to reconnect, instead of the client's default.
    pub patience: Option<Duration>,
    /// Files of this program that no sandbox of the server in this process may open.
    pub own_files: Vec<PathBuf>,
    /// Neither wait for a session that another connection holds, nor reconnect.
    pub fail_fast: bool,
    /// Whether the user named no session, and this is one of all that are saved.
    pub one_of_all: bool,
    /// Whether a server in this process needs sandboxes. If so, it probes what the machine offers, which
    /// starts some processes.
    pub sandbox: bool,
    /// Notice within seconds that the server is silent, to say so.
    pub heartbeat: bool,
}

/// A client, and its server if that runs in this process.
#[derive(Debug)]
pub(crate) struct Connected {
    pub client: ExecServerClient,
    /// The directory that relative paths start from, if it is not the server's working directory.
    pub cwd: Option<String>,
    server: Option<Server>,
}

impl OnArgs {
    /// The server; `None` for this machine without one.
    pub(crate) fn place(&self) -> Option<&Place> {
        self.on.as_ref().map(|chosen| &chosen.place)
    }

    /// The name of the place, if it was chosen by name.
    pub(crate) fn place_name(&self) -> Option<&str> {
        Some(self.on.as_ref()?.named.as_ref()?.name.as_str())
    }

    /// What the user's file says of the place.
    pub(crate) fn settings(&self) -> Option<&PlaceSettings> {
        Some(&self.on.as_ref()?.named.as_ref()?.settings)
    }

    /// The same flags with this place instead of `--on`.
    pub(crate) fn at(&self, chosen: Chosen) -> Self {
        Self { on: Some(chosen), ..self.clone() }
    }

    /// The flags for the place of a saved session. Credentials go there only if they are the ones that the
    /// session was made with, or if the user named the session and a token for it, by a flag or in the place
    /// that it was made at.
    pub(crate) fn for_saved(&self, place: Place, session: &SavedSession, named: bool) -> Self {
        let chosen = session.place.as_deref().and_then(|name| choose(name).ok());
        let chosen = chosen.filter(|chosen| chosen.place == place);
        Self {
            on: Some(chosen.unwrap_or_else(|| place.into())),
            registry: session.registry.clone().or_else(|| self.registry.clone()),
            saved: Some(SavedWith { credential: session.credential.clone(), named }),
            ..self.clone()
        }
    }

    /// Whether a saved session is on the server that these flags choose; any is, if they choose none.
    pub(crate) fn is_server_of(&self, session: &SavedSession) -> bool {
        let same_url = |place: &Place| {
            let url = place.url();
            url.is_some_and(|url| url.trim_end_matches('/') == session.url.trim_end_matches('/'))
        };
        let same_registry = || match (&session.registry, self.registry()) {
            (Some(saved), Ok(chosen)) => *saved == chosen,
            _ => true,
        };
        self.place().is_none_or(same_url) && (self.place().is_none() || same_registry())
    }

    /// What a session remembers of the credential that it is made with.
    pub(crate) fn saved_credential(&self) -> anyhow::Result<Option<SavedCredential>> {
        Ok(match self.place() {
            Some(Place::Websocket(url)) => {
                let origin = origin(url)?;
                self.token(&origin)?.map(|token| {
                    let digest = fingerprint(&origin, &token.credential);
                    SavedCredential { source: token.source.to_owned(), digest }
                })
            }
            Some(Place::Environment(_)) => {
                let (registry, sign_in) = (self.registry()?.parse()?, self.sign_in()?);
                let digest = sign_in.credential.fingerprint(&registry);
                Some(SavedCredential { source: sign_in.source.to_owned(), digest })
            }
            None | Some(Place::Stdio(_)) => None,
        })
    }

    /// Whether this credential may go to a session that was saved.
    fn belongs(&self, digest: &str, source: &str) -> bool {
        let Some(saved) = &self.saved else { return true };
        let same = saved.credential.as_ref().is_some_and(|saved| saved.digest == digest);
        same || (saved.named && source == TOKEN_FILE)
    }

    /// The URL of the registry.
    pub(crate) fn registry(&self) -> anyhow::Result<String> {
        let given =
            self.registry.clone().or_else(|| self.settings().and_then(|of| of.registry.clone()));
        let set = |name| std::env::var(name).ok();
        given
            .into_iter()
            .chain(REGISTRY_VARIABLES.into_iter().filter_map(set))
            .find(|url| !url.trim().is_empty())
            .context("env: needs a registry; pass --registry URL or set CODEX_REGISTRY_URL")
    }

    /// Connects to the server, or starts one in this process.
    pub(crate) async fn connect(&self, options: ConnectOptions) -> anyhow::Result<Connected> {
        self.ca.apply()?;
        let mut reconnect = ReconnectPolicy::default();
        if let Some(patience) = self.patience.or(options.patience) {
            reconnect.give_up_after = patience;
        }
        reconnect.enabled = !options.fail_fast && !reconnect.give_up_after.is_zero();
        let mut connect = ExecServerClientConnectOptions::default();
        connect.client_name = "codex".to_owned();
        connect.resume_session_id = options.session;
        connect.attach = options.attach;
        connect.session_name = options.name;
        connect.detach_ttl = options.detach_ttl;
        connect.reconnect = reconnect;
        connect.tuning.heartbeat = options.heartbeat.then(Heartbeat::default);
        let cwd = self.settings().and_then(|settings| settings.cwd.clone());
        let client = match self.place() {
            None => {
                let own = self.token_file.iter().chain(&options.own_files);
                let server = embedded(own.map(PathBuf::as_path), options.sandbox)?;
                let client =
                    ExecServerClient::connect_connection(server.connect(), connect).await?;
                return Ok(Connected { client, cwd, server: Some(server) });
            }
            Some(Place::Websocket(url)) => {
                let mut args = RemoteExecServerConnectArgs::new(url, connect.client_name);
                let origin = origin(url)?;
                if let Some(token) = self.token(&origin)? {
                    if may_send(CredentialKind::ServerToken, &origin, &[]) != Verdict::Send {
                        warn_in_clear(url);
                    }
                    args.bearer_token = Some(token.credential.expose().to_owned());
                }
                args.client_certificate = self.client_certificate();
                args.resume_session_id = connect.resume_session_id;
                args.attach = connect.attach;
                args.session_name = connect.session_name;
                args.detach_ttl = connect.detach_ttl;
                args.reconnect = connect.reconnect;
                args.tuning = connect.tuning;
                ExecServerClient::connect_websocket(args).await
            }
            Some(Place::Stdio(argv)) => {
                ExecServerClient::connect_stdio_command(argv, connect).await
            }
            Some(Place::Environment(id)) => {
                let (registry, sign_in) = (self.registry()?, self.sign_in()?);
                let digest = sign_in.credential.fingerprint(&registry.parse()?);
                if !self.belongs(&digest, sign_in.source) {
                    bail!(
                        "the session was made with another credential than the {} at hand, which is \
                         not sent to its registry; pass the right one with --token-file PATH",
                        sign_in.credential.describe()
                    );
                }
                let sign_in = sign_in.credential;
                ExecServerClient::connect_environment(&registry, id, sign_in, connect).await
            }
        };
        match client {
            Ok(client) => Ok(Connected { client, cwd, server: None }),
            Err(error) => Err(self.explain(error).into()),
        }
    }

    /// The server, for messages.
    pub(crate) fn display(&self) -> String {
        match self.place() {
            None => "this machine, no server".to_owned(),
            Some(Place::Websocket(url)) => WebsocketDial::new(url).redacted_url(),
            Some(Place::Stdio(argv)) => format!("stdio:{}", argv.join(" ")),
            Some(Place::Environment(id)) => format!("env:{id}"),
        }
    }

    /// The same flags, quoted for a shell.
    pub(crate) fn flag(&self) -> String {
        match (self.place_name(), self.place()) {
            (Some(name), _) => format!(" --on {name}"),
            (None, None) => String::new(),
            (None, Some(_)) => {
                let on = format!(" --on {}", crate::style::quoted(&self.display()));
                match &self.registry {
                    Some(url) => format!("{on} --registry {}", crate::style::quoted(url)),
                    None => on,
                }
            }
        }
    }

    /// The token for the websocket at this origin, if there is one that belongs there.
    fn token(&self, origin: &Origin) -> anyhow::Result<Option<Sourced<Secret>>> {
        let token = match self.token_in_file()? {
            Some(token) => Sourced { credential: token.into(), source: TOKEN_FILE },
            None => {
                let token = std::env::var(TOKEN_VARIABLE).unwrap_or_default();
                Sourced { credential: token.trim().into(), source: TOKEN_VARIABLE }
            }
        };
        let belongs = self.belongs(&fingerprint(origin, &token.credential), token.source);
        Ok(Some(token).filter(|token| belongs && !token.credential.is_blank()))
    }

    /// The credential for a registry.
    fn sign_in(&self) -> anyhow::Result<Sourced<SignIn>> {
        let mut sources = SignInSources::from_env();
        sources.allowed_hosts.clone_from(&self.allow_registry_host);
        let mut source = match (&sources.harness_token, &sources.api_key) {
            (Some(_), _) => HARNESS_TOKEN_VARIABLE,
            (None, Some(_)) => "CODEX_API_KEY",
            (None, None) => "codex login",
        };
        if let Some(token) = self.token_in_file()? {
            sources.harness_token = Some(token.into());
            source = TOKEN_FILE;
        }
        Ok(Sourced { credential: sources.sign_in(SignInKind::Harness)?, source })
    }

    fn token_in_file(&self) -> anyhow::Result<Option<String>> {
        let settings = self.settings().and_then(|settings| settings.token_file.as_ref());
        let Some(file) = self.token_file.as_ref().or(settings) else { return Ok(None) };
        let token = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the token file {}", file.display()))?;
        match token.trim() {
            "" => {
                bail!("the token file {} is empty; write the server's token to it", file.display())
            }
            token => Ok(Some(token.to_owned())),
        }
    }

    /// The client's certificate and its key.
    fn client_certificate(&self) -> Option<(PathBuf, PathBuf)> {
        let given = self.client_cert.clone().zip(self.client_key.clone());
        given.or_else(|| {
            let settings = self.settings()?;
            settings.client_cert.clone().zip(settings.client_key.clone())
        })
    }

    /// Adds a hint to a client's error.
    fn explain(&self, error: ExecServerError) -> CommandError {
        let kind = error.kind();
        let environment = match self.place() {
            Some(Place::Environment(id)) => Some(id),
            _ => None,
        };
        let hint = match (kind, environment) {
            (ErrorKind::TokenRefused, Some(_)) => {
                format!("pass a valid token with --token-file PATH or ${HARNESS_TOKEN_VARIABLE}")
            }
            (ErrorKind::TokenRefused, None) => {
                format!("pass a valid token with --token-file PATH or ${TOKEN_VARIABLE}")
            }
            (ErrorKind::EnvironmentOffline, Some(id)) => {
                let url = self.registry().unwrap_or_else(|_| "URL".to_owned());
                format!("start its server: codex exec-server --remote {url} --environment-id {id}")
            }
            (ErrorKind::EnvironmentNotFound, _) => {
                "check the id, and that its server has registered at least once".to_owned()
            }
            (ErrorKind::UnknownSession, _) => {
                "the session has ended or expired; `codex ps` lists those that remain".to_owned()
            }
            (ErrorKind::SessionAttached, _) => {
                "or wait until the server detects that it is gone".to_owned()
            }
            (ErrorKind::CommandEnded, _) => {
                "check that the command runs codex exec-server --listen stdio".to_owned()
            }
            _ => return CommandError::new(kind, error),
        };
        CommandError::new(kind, error).hint(hint)
    }
}

impl Connected {
    /// The server in this process.
    pub(crate) fn server(&self) -> Option<&Server> {
        self.server.as_ref()
    }

    /// Whether the server runs in this process.
    pub(crate) fn is_embedded(&self) -> bool {
        self.server.is_some()
    }

    /// Closes a connection to a server that does not answer, and so does not wait for it.
    pub(crate) async fn abandon(self) {
        let _ = tokio::time::timeout(ABANDON_TIMEOUT, self.close()).await;
    }

    /// Closes the connection and shuts down a server in this process.
    pub(crate) async fn close(self) {
        self.client.close().await;
        if let Some(server) = self.server {
            server.shut_down().await;
        }
    }
}

/// The origin of a websocket URL. One with a user or a password is refused: it would be saved and shown.
fn origin(url: &str) -> anyhow::Result<Origin> {
    let shown = WebsocketDial::new(url).redacted_url();
    url.parse().with_context(|| format!("invalid --on URL {shown}"))
}

/// Fails if this is not the URL of a registry.
pub(crate) fn check_registry(url: &str) -> anyhow::Result<()> {
    url.parse::<Origin>().map(drop).with_context(|| format!("invalid registry URL {url}"))
}

/// Warns, once, before a token goes unencrypted to another machine.
fn warn_in_clear(url: &str) {
    static WARNED: Once = Once::new();
    let shown = WebsocketDial::new(url).redacted_url();
    WARNED.call_once(|| {
        print_notice(format_args!(
            "warning: the token goes to {shown} unencrypted, where others can read it; use wss://, or \
             stdio: over ssh"
        ));
    });
}

fn embedded<'a>(own: impl IntoIterator<Item = &'a Path>, sandbox: bool) -> anyhow::Result<Server> {
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let mut config = ServerConfig::default();
    config.sandbox_executable = sandbox.then(|| executable.clone());
    config.own_files = own_files(own);
    config.process.lifeline = Lifeline::Warden { executable };
    Server::new(config).context("cannot start the built-in server")
}

/// How long a server that does not answer may delay the end of this program.
const ABANDON_TIMEOUT: Duration = Duration::from_millis(200);

/// How long the program waits at its end for a pending renewal of the sign-in: the issuer's timeout, and a
/// little time to store the tokens.
pub(crate) const RENEWAL_TIMEOUT: Duration = Duration::from_secs(35);

/// Runs a command on a new runtime.
pub(crate) fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let result = work.await;
        finish_renewals(RENEWAL_TIMEOUT).await;
        result
    });
    // A thread that waits for a terminal or a pipe would block the runtime's shutdown.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_websockets_to_other_machines_are_in_clear() {
        for (url, in_clear) in [
            ("ws://example.com:1", true),
            ("ws://10.0.0.1", true),
            ("ws://[2001:db8::1]:4500/x", true),
            // Refused, with or without a token.
            ("ws://localhost@example.com/", false),
            ("ws://localhost.example.com", true),
            ("ws://127.0.0.1:1", false),
            ("ws://user:word@127.8.8.8:1/", false),
            ("ws://[::1]:1", false),
            ("ws://[::ffff:127.0.0.1]:1", false),
            ("ws://LocalHost:1", false),
            ("wss://example.com", false),
            ("unix:/run/x", false),
            ("vsock:2:1", false),
        ] {
            let origin = origin(url);
            let verdict = origin.map(|origin| may_send(CredentialKind::ServerToken, &origin, &[]));
            let found = matches!(verdict, Ok(Verdict::SendInClear));
            assert_eq!(found, in_clear, "{url}");
        }
    }
}
