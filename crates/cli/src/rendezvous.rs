//! `codex rendezvous`: the self-hosted registry and rendezvous, and its tokens.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use codex_exec_server::told_to_stop;
use codex_rendezvous::{
    Clock, Config, NatsOptions, NatsServers, NatsTokens, PublicUrl, Right, Scope, ServeOptions,
    StoreOptions, TokenBook, TokenFile, serve,
};

use crate::exec_server::duration;

/// Your own registry and rendezvous: let machines behind NAT be reached, without anybody's cloud
///
/// Environments (exec-servers) register here and keep a websocket; harnesses connect to them
/// through it. What passes is encrypted between the two; this service cannot read it.
#[derive(Debug, Args)]
#[command(after_help = "\
Example, all on one machine:
  codex rendezvous serve --listen 127.0.0.1:4600 --data ./data &
  codex rendezvous token create --data ./data --environment laptop > token
  CODEX_API_KEY=$(cat token) codex exec-server --remote http://127.0.0.1:4600 --environment-id laptop")]
pub struct RendezvousArgs {
    #[command(subcommand)]
    command: RendezvousCommand,
}

#[derive(Debug, Subcommand)]
enum RendezvousCommand {
    Serve(ServeArgs),
    #[command(subcommand)]
    Token(TokenCommand),
}

/// Serve until SIGTERM or SIGINT
///
/// Prints the base URL alone on one line of stdout once it accepts. Has /healthz, /readyz and, for
/// Prometheus, /metrics. On its own it keeps everything in a directory; with --nats any number of
/// nodes are one service.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rendezvous serve --data ./data                          on 127.0.0.1:4600
  codex rendezvous serve --listen 0.0.0.0:443 --tls-cert chain.pem --tls-key key.pem
  codex rendezvous serve --nats nats://10.0.0.1,nats://10.0.0.2 --public-url https://registry.example")]
struct ServeArgs {
    /// Where to listen: IP:PORT; port 0 takes a free one
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:4600")]
    listen: SocketAddr,

    #[command(flatten)]
    data: DataArgs,

    /// On how many servers of NATS everything is kept; counts for the node that comes first
    #[arg(long, value_name = "N", default_value_t = 1, requires = "nats")]
    nats_replicas: usize,

    /// What clients reach it by, where that is not the listening address: https://HOST
    #[arg(long, value_name = "URL")]
    public_url: Option<PublicUrl>,

    /// Certificate chain for TLS, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// Private key for TLS, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// How long streams may go on once the service was told to stop
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    drain: Duration,

    /// How long streams that acknowledge wait for a socket that dropped
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    grace: Duration,
}

const DATA_VARIABLE: &str = "CODEX_RENDEZVOUS_DATA";
const DEFAULT_DATA: &str = "codex-rendezvous-data";

/// Where the data is if no flag says so.
pub fn data_directory() -> PathBuf {
    std::env::var_os(DATA_VARIABLE).map_or_else(|| DEFAULT_DATA.into(), PathBuf::from)
}

#[derive(Debug, Args)]
struct DataArgs {
    /// Where tokens and registrations are kept; made if it is missing
    #[arg(
        long,
        value_name = "DIR",
        env = DATA_VARIABLE,
        default_value = DEFAULT_DATA
    )]
    data: PathBuf,

    /// NATS, in place of a directory: nats://HOST:PORT, several with commas; with JetStream
    ///
    /// Better set in the environment where it holds a password.
    #[arg(long, value_name = "URLS", env = "CODEX_RENDEZVOUS_NATS", hide_env_values = true)]
    nats: Option<NatsServers>,
}

/// Tokens: who may register and connect. Changes take effect at once
#[derive(Debug, Subcommand)]
enum TokenCommand {
    Create(CreateArgs),
    List(DataArgs),
    Revoke(RevokeArgs),
}

/// Make a token and print it, alone; it is kept as a digest only
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rendezvous token create --environment laptop --can register          for one exec-server
  codex rendezvous token create --prefix ci- --can connect --expires 30d     for those who use some
  codex rendezvous token create --can manage                                 for codex environments")]
struct CreateArgs {
    #[command(flatten)]
    data: DataArgs,

    /// The one environment it is for (default: all)
    #[arg(long, value_name = "ID", conflicts_with = "prefix")]
    environment: Option<String>,

    /// The environments it is for: those whose id begins so
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<String>,

    /// What it permits: register (be an environment), connect (reach one), manage (list, remove)
    #[arg(long, value_name = "RIGHTS", value_delimiter = ',', default_value = "register,connect")]
    can: Vec<Right>,

    /// When it ends: 12h, 30d (default: never)
    #[arg(long, value_name = "TIME", value_parser = duration)]
    expires: Option<Duration>,
}

/// Revoke a token: it is refused from now on, and the sockets opened with it are closed
#[derive(Debug, Args)]
struct RevokeArgs {
    #[command(flatten)]
    data: DataArgs,

    /// The token's id, as `token list` shows it
    id: String,
}

pub fn run(args: RendezvousArgs) -> anyhow::Result<ExitCode> {
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
    runtime.block_on(async { serve(options, config, announce, told_to_stop()).await })?;
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// The one line that ever goes to stdout.
fn announce(url: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{url}")?;
    stdout.flush()
}

/// Does something with the tokens, wherever they are.
fn with_tokens<T>(
    args: DataArgs,
    work: impl AsyncFnOnce(TokenBook) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match args.nats {
            Some(servers) => {
                let options = NatsOptions { servers, replicas: 1 };
                work(TokenBook::Nats(NatsTokens::connect(&options).await?)).await
            }
            None => work(TokenBook::File(TokenFile::new(&args.data)))
                .await
                .with_context(|| format!("cannot use {}", args.data.display())),
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
    let expires = args.expires.map(|time| now + time.as_secs());
    let made =
        with_tokens(args.data, async |book| Ok(book.create(scope, args.can, now, expires).await?));
    let (token, record) = made.context("no token was made")?;
    tracing::info!(id = record.id, "created");
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
            Some(at) => format!("in {}", span(at - now)),
        };
        let (id, scope) = (&token.id, token.scope.to_string());
        writeln!(out, "{id:<16}  {scope:<24}  {:<24}  {expires}", can.join(","))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn revoke(args: RevokeArgs) -> anyhow::Result<ExitCode> {
    let RevokeArgs { data, id } = args;
    if !with_tokens(data, async |book| Ok(book.revoke(&id).await?))? {
        anyhow::bail!("no token has the id {id}; `token list` shows those there are");
    }
    Ok(ExitCode::SUCCESS)
}

/// So many seconds, roughly, for people.
pub fn span(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}
