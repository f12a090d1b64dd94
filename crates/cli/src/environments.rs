//! `codex environments`: lists, shows and removes registered environments.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use codex_exec_server::remote_mode::{
    EnvironmentStatus, HttpClient, HttpConfig, Registry, tls_from_file,
};
use codex_exec_server::{SignIn, SignInSources};
use codex_rendezvous::Clock;

use crate::json_text;
use crate::on::HARNESS_TOKEN_VARIABLE;
use crate::rendezvous::rough_duration;
use crate::style::printable;

/// The longest list of environments to read, in bytes.
const LONGEST_LIST: usize = 64 << 20;

/// List, show and remove the environments of a registry
///
/// Needs a token with the right `manage` (codex rendezvous token create --all --can manage), in --token-file,
/// $CODEX_API_KEY or $CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex environments list --registry https://registry.example --token-file manager
  codex environments show laptop --json
  codex environments remove laptop")]
pub(crate) struct EnvironmentsArgs {
    /// The URL of the registry, as printed by `codex rendezvous serve`
    #[arg(
        long,
        value_name = "URL",
        global = true,
        env = "CODEX_REGISTRY_URL",
        default_value = "http://127.0.0.1:4600"
    )]
    registry: String,

    /// Read the token from this file [default: $CODEX_API_KEY or
    /// $CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN]
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,

    /// Allow sending credentials to a registry on this host, even if they are restricted to other
    /// hosts; can be repeated
    #[arg(long, value_name = "HOST", global = true)]
    allow_registry_host: Vec<String>,

    /// Trust the certificate authorities in this PEM file instead of the system's
    #[arg(long, value_name = "FILE", global = true)]
    ca_file: Option<PathBuf>,

    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: EnvironmentsCommand,
}

#[derive(Debug, Subcommand)]
enum EnvironmentsCommand {
    /// List the environments that the token may manage
    List,
    /// Show one environment
    Show {
        /// The environment's id
        id: String,
    },
    /// Remove an environment's registration and close its connections
    Remove {
        /// The environment's id
        id: String,
    },
}

pub(crate) fn run(args: EnvironmentsArgs) -> anyhow::Result<ExitCode> {
    let sources = SignInSources::from_env();
    let sign_in = match (&args.token_file, sources.api_key, sources.harness_token) {
        (Some(file), ..) => {
            let token = std::fs::read_to_string(file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            SignIn::bearer(token.trim().into())
        }
        (None, Some(key), _) => SignIn::api_key(key),
        (None, None, Some(token)) => SignIn::bearer(token),
        (None, None, None) => anyhow::bail!(
            "no token given; pass --token-file, or set CODEX_API_KEY or {HARNESS_TOKEN_VARIABLE}"
        ),
    };
    let sign_in = sign_in.with_allowed_hosts(args.allow_registry_host);
    let mut config = HttpConfig::default();
    config.max_body = LONGEST_LIST;
    config.tls = args.ca_file.as_deref().map(tls_from_file).transpose()?;
    let client = Registry::new(args.registry.parse()?, sign_in, HttpClient::new(config))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = std::io::stdout().lock();
    runtime.block_on(async {
        match args.command {
            EnvironmentsCommand::List => {
                let all = client.list().await?;
                if args.json {
                    writeln!(out, "{}", json_text::line(&all)?)?;
                } else {
                    table(&mut out, &all)?;
                }
            }
            EnvironmentsCommand::Show { id } => {
                let one = client.show(&id).await?;
                if args.json {
                    writeln!(out, "{}", json_text::line(&one)?)?;
                } else {
                    details(&mut out, &one)?;
                }
            }
            EnvironmentsCommand::Remove { id } => client.remove(&id).await?,
        }
        anyhow::Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn state(one: &EnvironmentStatus, now: u64) -> String {
    match one.online_since {
        Some(since) => format!("online for {}", rough_duration(now.saturating_sub(since))),
        None => {
            format!("offline, last seen {} ago", rough_duration(now.saturating_sub(one.last_seen)))
        }
    }
}

fn table(out: &mut impl Write, all: &[EnvironmentStatus]) -> std::io::Result<()> {
    let now = Clock::default().now();
    let ids: Vec<String> = all.iter().map(|one| printable(&one.environment_id)).collect();
    let width = ids.iter().map(|id| id.chars().count()).max().unwrap_or(0).max(11);
    writeln!(out, "{:<width$}  {:<24}  HARNESSES  STREAMS", "ENVIRONMENT", "STATE")?;
    for (one, id) in all.iter().zip(&ids) {
        let (harnesses, streams) = (one.harnesses, one.streams);
        writeln!(out, "{id:<width$}  {:<24}  {harnesses:>9}  {streams:>7}", state(one, now))?;
    }
    Ok(())
}

fn details(out: &mut impl Write, one: &EnvironmentStatus) -> std::io::Result<()> {
    let now = Clock::default().now();
    let profile = one.security_profile.as_deref().unwrap_or("none (older revision, not encrypted)");
    writeln!(out, "environment   {}", printable(&one.environment_id))?;
    writeln!(out, "state         {}", state(one, now))?;
    writeln!(out, "registered    {} ago", rough_duration(now.saturating_sub(one.registered)))?;
    writeln!(out, "registration  {}", printable(&one.executor_registration_id))?;
    writeln!(out, "security      {}", printable(profile))?;
    writeln!(out, "token         {}", printable(&one.token))?;
    writeln!(out, "harnesses     {}", one.harnesses)?;
    writeln!(out, "streams       {}", one.streams)
}
