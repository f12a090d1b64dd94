//! `codex rendezvous`: runs the self-hosted registry and rendezvous, and manages its tokens.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgGroup, Args, Subcommand};
use codex_exec_server::shutdown_signal;
use codex_rendezvous::{
    Clock, Config, NatsOptions, NatsServers, NatsTokens, PublicUrl, Right, Scope, ServeOptions,
    StoreOptions, TokenFile, TokenStore, serve,
};

use crate::exec_server::parse_duration;
use crate::exit::print_stderr;

/// Host your own registry and rendezvous, to reach machines behind NAT
///
/// Environments (exec-servers) register here and keep a websocket open; harnesses (clients) reach them
/// through it. Traffic is encrypted between the two ends; this service cannot read it.
#[derive(Debug, Args)]
#[command(after_help = "\
Example, all on one machine:
  codex rendezvous serve --listen 127.0.0.1:4600 --data ./data &
  codex rendezvous token create --data ./data --environment laptop --can register,connect > token
  export CODEX_API_KEY=$(cat token)
  codex exec-server --remote http://127.0.0.1:4600 --environment-id laptop")]
pub(crate) struct RendezvousArgs {
    #[command(subcommand)]
    command: RendezvousCommand,
}

impl RendezvousArgs {
    /// Whether it runs until a signal ends it.
    pub(crate) fn serves(&self) -> bool {
        matches!(self.command, RendezvousCommand::Serve(_))
    }
}

#[derive(Debug, Subcommand)]
enum RendezvousCommand {
    Serve(ServeArgs),
    #[command(subcommand)]
    Token(TokenCommand),
}

/// Run the registry and rendezvous until SIGTERM or SIGINT
///
/// Prints its URL as the only line on stdout once it accepts connections. Serves /healthz, /readyz and
/// /metrics (for Prometheus). A single node keeps its data in a directory; with --nats, any number of
/// nodes form one service.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rendezvous serve --data ./data                          listen on 127.0.0.1:4600
  codex rendezvous serve --listen 0.0.0.0:443 --tls-cert chain.pem --tls-key key.pem
  codex rendezvous serve --nats nats://10.0.0.1,nats://10.0.0.2 \\
      --public-url https://registry.example")]
struct ServeArgs {
    /// Listen on this address; port 0 picks a free one
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:4600")]
    listen: SocketAddr,

    #[command(flatten)]
    data: DataArgs,

    /// Keep the data on this many NATS servers; only the first node to start sets it
    #[arg(long, value_name = "N", default_value_t = 1, requires = "nats")]
    nats_replicas: usize,

    /// The URL that clients use, if it differs from the listening address: https://HOST
    #[arg(long, value_name = "URL")]
    public_url: Option<PublicUrl>,

    /// TLS certificate chain, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// TLS private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// After SIGTERM, let streams continue for this long
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    drain: Duration,

    /// Keep resumable streams this long after their socket is lost
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    grace: Duration,
}

const DATA_VARIABLE: &str = "CODEX_RENDEZVOUS_DATA";
const DEFAULT_DATA: &str = "codex-rendezvous-data";

/// The data directory, unless `--data` is given.
pub(crate) fn data_directory() -> PathBuf {
    std::env::var_os(DATA_VARIABLE).map_or_else(|| DEFAULT_DATA.into(), PathBuf::from)
}

#[derive(Debug, Args)]
struct DataArgs {
    /// Directory with the service's tokens and registrations; created if missing
    #[arg(
        long,
        value_name = "DIR",
        env = DATA_VARIABLE,
        default_value = DEFAULT_DATA
    )]
    data: PathBuf,

    /// NATS servers with the service's data, instead of a directory: nats://HOST:PORT, separated by
    /// commas; need JetStream
    ///
    /// If the URL contains a password, set the variable instead of the flag.
    #[arg(long, value_name = "URLS", env = "CODEX_RENDEZVOUS_NATS", hide_env_values = true)]
    nats: Option<NatsServers>,
}

/// Manage the tokens that permit registering and connecting; changes take effect at once
#[derive(Debug, Subcommand)]
enum TokenCommand {
    Create(CreateArgs),
    /// List all tokens: id, environments, rights and expiry
    List(DataArgs),
    Revoke(RevokeArgs),
}

/// Create a token and print it; only its digest is stored, so it cannot be shown again
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rendezvous token create --environment laptop --can register          for one exec-server
  codex rendezvous token create --prefix ci- --can connect --expires 30d     for clients of ci-*
  codex rendezvous token create --all --can manage                           for codex environments")]
#[command(group(ArgGroup::new("scope").required(true).args(["environment", "prefix", "all"])))]
struct CreateArgs {
    #[command(flatten)]
    data: DataArgs,

    /// Limit the token to this environment
    #[arg(long, value_name = "ID")]
    environment: Option<String>,

    /// Limit the token to environments whose id starts with this
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<String>,

    /// Let the token be for all environments
    #[arg(long)]
    all: bool,

    /// Rights: register (be an environment), connect (use one), manage (list and remove them)
    #[arg(long, value_name = "RIGHTS", value_delimiter = ',', required = true)]
    can: Vec<Right>,

    /// Let the token expire after this time: 12h, 30d, never
    #[arg(long, value_name = "TIME", value_parser = parse_expiry, default_value = "90d")]
    expires: Expiry,
}

/// When a token expires.
#[derive(Debug, Clone, Copy)]
enum Expiry {
    After(Duration),
    Never,
}

fn parse_expiry(text: &str) -> Result<Expiry, String> {
    match text {
        "never" => Ok(Expiry::Never),
        text => Ok(Expiry::After(parse_duration(text)?)),
    }
}

/// Revoke a token and close the connections opened with it
#[derive(Debug, Args)]
struct RevokeArgs {
    #[command(flatten)]
    data: DataArgs,

    /// The token's id, from `codex rendezvous token list`
    id: String,
}

pub(crate) fn run(args: RendezvousArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        RendezvousCommand::Serve(args) => run_serve(args),
        RendezvousCommand::Token(TokenCommand::Create(args)) => create(args),
        RendezvousCommand::Token(TokenCommand::List(args)) => list(args),
        RendezvousCommand::Token(TokenCommand::Revoke(args)) => revoke(args),
    }
}

fn run_serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let mut config = Config::default();
    config.public_url = args.public_url;
    config.drain = args.drain;
    config.grace = args.grace;
    let store = match args.data.nats {
        Some(servers) => StoreOptions::Nats(NatsOptions { servers, replicas: args.nats_replicas }),
        None => StoreOptions::Directory(args.data.data),
    };
    let options = ServeOptions { listen: args.listen, store, tls: args.tls_cert.zip(args.tls_key) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async { serve(options, config, announce, shutdown_signal()).await })?;
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Prints the only line that ever goes to stdout.
fn announce(url: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{url}")?;
    stdout.flush()
}

/// Runs `work` with the tokens, in a directory or in NATS.
fn with_tokens<T>(
    args: DataArgs,
    work: impl AsyncFnOnce(TokenStore) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match args.nats {
            Some(servers) => {
                let options = NatsOptions { servers, replicas: 1 };
                work(TokenStore::Nats(NatsTokens::connect(&options).await?)).await
            }
            None => work(TokenStore::File(TokenFile::new(&args.data)))
                .await
                .with_context(|| format!("cannot use the data in {}", args.data.display())),
        }
    })
}

fn create(args: CreateArgs) -> anyhow::Result<ExitCode> {
    let scope = match (args.environment, args.prefix) {
        (Some(id), _) => Scope::Environment(id),
        (None, Some(prefix)) => Scope::Prefix(prefix),
        (None, None) => Scope::Any,
    };
    let now = Clock::default().now();
    let expires = match args.expires {
        Expiry::After(time) => Some(now.saturating_add(time.as_secs())),
        Expiry::Never => {
            print_stderr(format_args!(
                "warning: this token never expires; codex rendezvous token revoke ends it"
            ));
            None
        }
    };
    let made =
        with_tokens(args.data, async |book| Ok(book.create(scope, args.can, now, expires).await?));
    let (token, record) = made.context("cannot create a token")?;
    tracing::info!(id = record.id, "token created");
    writeln!(std::io::stdout(), "{}", token.expose())?;
    Ok(ExitCode::SUCCESS)
}

fn list(args: DataArgs) -> anyhow::Result<ExitCode> {
    let tokens = with_tokens(args, async |book| Ok(book.list().await?))?;
    let mut out = std::io::stdout().lock();
    let now = Clock::default().now();
    writeln!(out, "{:<16}  {:<24}  {:<24}  EXPIRES", "ID", "ENVIRONMENTS", "CAN")?;
    for token in tokens {
        let can: Vec<_> = token.can.iter().map(ToString::to_string).collect();
        let expires = match token.expires {
            None => "never".to_owned(),
            Some(at) if at <= now => "expired".to_owned(),
            Some(at) => format!("in {}", rough_duration(at - now)),
        };
        let (id, scope) = (&token.id, token.scope.to_string());
        writeln!(out, "{id:<16}  {scope:<24}  {:<24}  {expires}", can.join(","))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn revoke(args: RevokeArgs) -> anyhow::Result<ExitCode> {
    let RevokeArgs { data, id } = args;
    if !with_tokens(data, async |book| Ok(book.revoke(&id).await?))? {
        anyhow::bail!("no token with id {id}; `codex rendezvous token list` shows all ids");
    }
    Ok(ExitCode::SUCCESS)
}

/// A rounded duration, such as `5s`, `12m`, `3h` or `2d`.
pub(crate) fn rough_duration(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}
