//! `codex exec-server`: runs the server.

use std::ffi::OsString;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use codex_exec_server::{
    DEFAULT_LISTEN_URL, EntryConfig, ExecServerRuntimePaths, InheritedSocket, ListenUrl, Listening,
    OperatorPolicy, ServerConfig, ServiceNotifier, TlsFiles, WebSocketAuth, run as serve,
};

use codex_exec_server::credentials::{AwsSources, finish_renewals};
use codex_linux_sandbox::Assurance;

use crate::config_args::ConfigArgs;
use crate::control::{self, DrainArgs, StatusArgs};
use crate::limits::ServerLimits;
use crate::observe::{self, ObserveArgs};
use crate::on::RENEWAL_TIMEOUT;
use crate::own_files::own_files;
use crate::remote::{ForwardArgs, RemoteArgs, shutdown_signal_or_stdin_end};
use crate::server_token::TokenArgs;
use crate::trim;

/// Serve this machine: run commands and work with files for clients that connect
///
/// Prints its address as the only line on stdout (with several, one line each) and serves until SIGTERM or
/// SIGINT; then it kills every process it started and exits with 0.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex exec-server                                  listen on a free loopback port
  codex exec-server --listen ws://127.0.0.1:4500     listen on this port
  codex exec-server --listen stdio                   serve one connection on stdin and stdout
  ssh host codex exec-server --listen stdio          the same on another machine
  codex exec-server --listen unix:/run/codex.sock    listen on a Unix socket, for this user and root
  codex exec-server --remote https://registry.example --environment-id env_1
                                                     serve through a rendezvous, from behind NAT

Anyone who can connect can do what the server's user can do. An address that other machines can reach needs a
token or client certificates:
  codex exec-server --listen ws://0.0.0.0:4500 \\
      --ws-auth capability-token --ws-token-file /run/token    (codex exec-server token creates it)
  codex exec-server --listen wss://0.0.0.0:4500 \\
      --tls-cert server.pem --tls-key server.key --tls-client-ca clients.pem

Under systemd the server takes the sockets of a socket unit (Accept=no), and reports when it is ready
(Type=notify). See docs/operating.md.")]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ExecServerArgs {
    #[command(subcommand)]
    command: Option<ExecServerCommand>,

    /// Listen on ws://IP:PORT (port 0 picks a free one), wss://IP:PORT, unix:PATH, vsock:PORT or stdio; can be
    /// repeated [default: ws://127.0.0.1:0, or the sockets of systemd]
    #[arg(long, value_name = "URL", conflicts_with = "remote")]
    listen: Vec<ListenUrl>,

    /// Run up to this many requests of one connection at once; requests that only wait do not count
    #[arg(long, value_name = "N", default_value_t = ServerConfig::default().concurrent_requests,
          value_parser = at_least_one)]
    concurrent_requests: usize,

    /// Keep a session and its processes this long after its connection is lost: 30s, 5m, 2h, 0
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    detach_ttl: Duration,

    /// When the server stops, wait this long between SIGTERM and SIGKILL for its processes
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_duration)]
    stop_grace: Duration,

    /// Weakest sandbox level to use if a request names none: full, namespaces or landlock. If this
    /// machine offers less, the server refuses sandboxed requests; see codex doctor
    #[arg(long, value_name = "LEVEL", default_value_t)]
    sandbox_assurance: Assurance,

    /// Reuse the computed plan of a sandbox policy until a file that it depends on changes
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = on_or_off,
          action = clap::ArgAction::Set)]
    sandbox_plan_cache: bool,

    #[command(flatten)]
    limits: ServerLimits,

    #[command(flatten)]
    observe: ObserveArgs,

    #[command(flatten)]
    auth: AuthArgs,

    #[command(flatten)]
    entry: EntryArgs,

    /// Hold every request to this policy, a TOML file; clients cannot exceed it (see docs/operating.md)
    #[arg(long, value_name = "PATH", conflicts_with = "read_only")]
    policy: Option<PathBuf>,

    /// Hold every request to a policy that lets clients read everything and change nothing, without network
    #[arg(long)]
    read_only: bool,

    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    remote: RemoteArgs,
}

#[derive(Debug, Subcommand)]
enum ExecServerCommand {
    Forward(Box<ForwardArgs>),
    Token(TokenArgs),
    Status(StatusArgs),
    Drain(DrainArgs),
}

impl ExecServerArgs {
    /// Whether it is a server, and not a command for one.
    pub(crate) fn serves(&self) -> bool {
        matches!(self.command, None | Some(ExecServerCommand::Forward(_)))
    }
}

#[derive(Debug, Args)]
struct AuthArgs {
    /// Require clients to send this kind of token as `Authorization: Bearer …`
    #[arg(long, value_enum, value_name = "MODE")]
    ws_auth: Option<AuthMode>,

    /// Read the capability token from this file
    #[arg(long, value_name = "PATH", conflicts_with = "ws_token_sha256")]
    ws_token_file: Option<PathBuf>,

    /// SHA-256 of the capability token, in hexadecimal
    #[arg(long, value_name = "HEX")]
    ws_token_sha256: Option<String>,

    /// Read the secret that signs tokens (HS256, at least 32 bytes) from this file
    #[arg(long, value_name = "PATH")]
    ws_shared_secret_file: Option<PathBuf>,

    /// Require this issuer in signed tokens
    #[arg(long, value_name = "ISSUER", requires = "ws_shared_secret_file")]
    ws_issuer: Option<String>,

    /// Require this audience in signed tokens
    #[arg(long, value_name = "AUDIENCE", requires = "ws_shared_secret_file")]
    ws_audience: Option<String>,

    /// Accept signed tokens whose times are off by up to this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    ws_max_clock_skew_seconds: u64,
}

/// Who gets in, and how many.
#[derive(Debug, Args)]
struct EntryArgs {
    /// Certificate and chain of wss:// listeners, in PEM; read again on SIGHUP
    #[arg(long, value_name = "PATH", requires = "tls_key", conflicts_with = "remote")]
    tls_cert: Option<PathBuf>,

    /// Key of that certificate, in PEM
    #[arg(long, value_name = "PATH", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Require clients to have a certificate from an authority in this PEM file
    #[arg(long, value_name = "PATH", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,

    /// Listen beyond this machine without a token or client certificates: anyone who can reach the address
    /// can run commands
    #[arg(long)]
    insecure_open: bool,

    /// Close further connections beyond this many
    #[arg(long, value_name = "N", default_value_t = EntryConfig::default().connections,
          value_parser = at_least_one)]
    max_connections: usize,

    /// Close further connections from one address beyond this many; loopback does not count
    #[arg(long, value_name = "N", default_value_t = EntryConfig::default().connections_per_address,
          value_parser = at_least_one)]
    max_connections_per_address: usize,

    /// Let at most this many connections wait for initialize; older ones make room for new ones
    #[arg(long, value_name = "N", default_value_t = EntryConfig::default().waiting,
          value_parser = at_least_one)]
    max_waiting_connections: usize,

    /// Close a connection that does not send initialize within this time
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    initialize_timeout: Duration,
}

impl EntryArgs {
    fn configure(&self, config: &mut EntryConfig) {
        config.connections = self.max_connections;
        config.connections_per_address = self.max_connections_per_address;
        config.waiting = self.max_waiting_connections;
        config.waiting_per_address = config.waiting_per_address.min(self.max_waiting_connections);
        config.initialize_timeout = self.initialize_timeout;
    }

    fn tls(&self) -> Option<TlsFiles> {
        let (certificate, key) = (self.tls_cert.clone()?, self.tls_key.clone()?);
        Some(TlsFiles { certificate, key, client_authorities: self.tls_client_ca.clone() })
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum AuthMode {
    /// The token given by --ws-token-file or --ws-token-sha256
    CapabilityToken,
    /// A JWT signed with the secret of --ws-shared-secret-file
    SignedBearerToken,
}

pub(crate) fn run(args: ExecServerArgs) -> anyhow::Result<ExitCode> {
    let forward = match args.command {
        Some(ExecServerCommand::Token(token)) => {
            token.create()?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(ExecServerCommand::Status(status)) => return control::status(&status),
        Some(ExecServerCommand::Drain(drain)) => return control::drain(&drain),
        Some(ExecServerCommand::Forward(forward)) => Some(forward),
        None => None,
    };
    keep_freed_memory();
    let service = ServiceManager::take();
    let aws = args.remote.aws_sources();
    let files = args.auth.files().chain(args.entry.tls_key.as_deref());
    let files = files.chain(args.observe.files()).chain(aws.iter().flat_map(AwsSources::files));
    let own_files = own_files(files);
    let auth = args.auth.build()?;
    if !matches!(auth, WebSocketAuth::Open) && args.remote.remote.is_some() {
        anyhow::bail!("--ws-auth cannot be used with --remote; it protects a listener");
    }
    let mut listening = Listening::default();
    listening.urls = args.listen;
    listening.inherited = service.sockets;
    listening.auth = auth;
    listening.tls = args.entry.tls();
    listening.insecure_open = args.entry.insecure_open;
    if listening.urls.is_empty() && listening.inherited.is_empty() {
        listening.urls.push(DEFAULT_LISTEN_URL.parse()?);
    }
    args.config.note_ignored();
    let mut config = ServerConfig::default();
    args.entry.configure(&mut config.entry);
    config.policy = match &args.policy {
        Some(file) => Some(OperatorPolicy::from_file(file)?),
        None => args.read_only.then(OperatorPolicy::read_only),
    };
    config.own_files = own_files;
    if aws.is_some() {
        config.own_variables = AwsSources::VARIABLES.map(str::to_owned).into();
    }
    // What decides about clients is not theirs to change.
    let decides = [&args.policy, &args.entry.tls_cert, &args.entry.tls_client_ca];
    let decides = decides.into_iter().flatten().filter_map(|path| std::path::absolute(path).ok());
    config.own_files.read_only.extend(decides);
    config.limits = args.limits.config()?;
    args.observe.configure(&mut config)?;
    config.sandbox_assurance = args.sandbox_assurance;
    config.sandbox_plan_cache = args.sandbox_plan_cache;
    config.sandbox_shares_pids = args.config.shares_pids();
    config.concurrent_requests = args.concurrent_requests;
    config.detach_ttl = args.detach_ttl;
    config.stop_grace = args.stop_grace;
    config.proxy_private_ips_via_upstream = args.config.proxy_private_ips_via_upstream;
    config.max_detach_ttl = ServerConfig::default().max_detach_ttl.max(args.detach_ttl);
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let paths =
        ExecServerRuntimePaths::new(executable, None).context("cannot find this executable")?;
    // A listener gives its connections to lanes; in remote mode, the relay socket and its streams share
    // this thread. A short event interval, so that a keystroke does not wait for a busy stream. The pool
    // threads, for stdin, stdout and name lookups, never exit, and the first starts at once, so that one
    // exists even if the system gives no more later.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .event_interval(8)
        .max_blocking_threads(64)
        .thread_keep_alive(Duration::from_secs(100 * 365 * 24 * 3600))
        .build()?;
    drop(runtime.spawn_blocking(|| ()));
    trim::start();
    runtime.block_on(async {
        observe::reopen_on_hangup(&config)?;
        let result = match forward {
            Some(forward) => forward.run(&paths).await,
            None if args.remote.remote.is_some() => {
                service.notifier.ready();
                args.remote.run(config, &paths, None).await
            }
            None => {
                listening.notifier = service.notifier;
                let stdin_ends_it = args.remote.exits_on_stdin_close()
                    && !listening.urls.contains(&ListenUrl::Stdio);
                let stop = shutdown_signal_or_stdin_end(stdin_ends_it);
                serve(listening, config, &paths, stop).await.map_err(anyhow::Error::from)
            }
        };
        finish_renewals(RENEWAL_TIMEOUT).await;
        result
    })?;
    // A thread that still reads stdin would block the runtime's shutdown.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// What systemd passed to this process.
struct ServiceManager {
    sockets: Vec<InheritedSocket>,
    notifier: ServiceNotifier,
}

/// The number of the first socket that systemd passes.
const FIRST_SOCKET: i32 = 3;

impl ServiceManager {
    /// Takes the sockets of `LISTEN_FDS`, and removes the variables, so that no child takes them for its own.
    fn take() -> Self {
        let take = |name| {
            let value = std::env::var_os(name);
            // SAFETY: there are no other threads yet.
            unsafe { std::env::remove_var(name) };
            value
        };
        let number = |value: Option<OsString>| value?.to_str()?.parse::<u32>().ok();
        let (pid, count) = (number(take("LISTEN_PID")), number(take("LISTEN_FDS")));
        let names = take("LISTEN_FDNAMES").and_then(|names| names.into_string().ok());
        let notifier = ServiceNotifier::new(take("NOTIFY_SOCKET"));
        take("LISTEN_PIDFDID");
        let count = count.filter(|_| pid == Some(std::process::id())).unwrap_or(0);
        let mut names = names.as_deref().unwrap_or_default().split(':');
        let sockets = (FIRST_SOCKET..).take(count as usize).filter_map(|number| {
            let name = names.next().unwrap_or_default().to_owned();
            // SAFETY: systemd passed this descriptor to this process, and nothing else has taken it.
            let socket = unsafe { OwnedFd::from_raw_fd(number) };
            match rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC) {
                Ok(()) => Some(InheritedSocket { socket, name }),
                Err(_) => {
                    // It is not open, so it must not be closed.
                    let _ = socket.into_raw_fd();
                    None
                }
            }
        });
        Self { sockets: sockets.collect(), notifier }
    }
}

/// Makes the allocator keep freed buffers of up to a few megabytes. If it returned them to the kernel,
/// each next buffer for output or file blocks would fault in page by page.
fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets two numbers of the allocator, before there are other threads.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, 8 << 20);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 20);
    }
}

impl AuthArgs {
    /// The files with tokens and secrets.
    fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.ws_token_file, &self.ws_shared_secret_file]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    fn build(self) -> anyhow::Result<WebSocketAuth> {
        let auth = match (self.ws_auth, &self.ws_shared_secret_file) {
            (None, None) if self.ws_token_file.is_none() && self.ws_token_sha256.is_none() => {
                return Ok(WebSocketAuth::Open);
            }
            (None, _) => anyhow::bail!(
                "a token or secret needs --ws-auth; add --ws-auth capability-token or --ws-auth \
                 signed-bearer-token"
            ),
            (Some(AuthMode::CapabilityToken), _) => {
                match (self.ws_token_file, self.ws_token_sha256) {
                    (Some(file), _) => WebSocketAuth::capability_token_file(&file),
                    (None, Some(digest)) => WebSocketAuth::capability_token_sha256(&digest),
                    (None, None) => anyhow::bail!(
                        "--ws-auth capability-token needs --ws-token-file or --ws-token-sha256"
                    ),
                }
            }
            (Some(AuthMode::SignedBearerToken), None) => {
                anyhow::bail!("--ws-auth signed-bearer-token needs --ws-shared-secret-file")
            }
            (Some(AuthMode::SignedBearerToken), Some(file)) => WebSocketAuth::signed_bearer(
                file,
                self.ws_issuer,
                self.ws_audience,
                Duration::from_secs(self.ws_max_clock_skew_seconds),
            ),
        };
        Ok(auth?)
    }
}

fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".to_owned()),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "expected a number of at least 1".to_owned())
}

/// Parses a whole number with a unit `ms`, `s`, `m`, `h` or `d`; without a unit, seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let milliseconds: u64 = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("expected a whole number with ms, s, m, h or d, such as 30s".to_owned()),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(milliseconds))
        .map(Duration::from_millis)
        .ok_or_else(|| "expected a whole number with ms, s, m, h or d, such as 30s".to_owned())
}

/// Formats a duration so that [`parse_duration`] reads it.
pub(crate) fn format_duration(duration: Duration) -> String {
    let milliseconds = duration.as_millis();
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
    let unit =
        units.into_iter().find(|(_, unit)| milliseconds > 0 && milliseconds.is_multiple_of(*unit));
    unit.map_or("0s".to_owned(), |(name, unit)| format!("{}{name}", milliseconds / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_and_formatted() {
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert_eq!(parse_duration("45"), Ok(Duration::from_secs(45)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        for text in ["0s", "250ms", "90s", "2h", "1d"] {
            assert_eq!(parse_duration(text).map(format_duration).as_deref(), Ok(text));
        }
        for bad in ["", "s", "1y", "-1s", "1.5s", "99999999999999999999d"] {
            parse_duration(bad).unwrap_err();
        }
    }
}
