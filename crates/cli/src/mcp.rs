//! `codex mcp`: serves the tools of a coding agent over MCP.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::Args;
use codex_exec_mcp::{HttpGuard, HttpServer, McpConfig, Policy, Session, Workspace, serve_stdio};
use codex_exec_server::PathUri;
use codex_exec_server::client::SandboxContext;
use tokio::net::TcpListener;

use crate::exit::print_notice;
use crate::hosts::HostRules;
use crate::on::{ConnectOptions, Connected, OnArgs, block_on};
use crate::policy::SandboxArgs;
use crate::remote_path;
use crate::run::env_policy;
use crate::signals::Signals;

/// The sandbox unless the person who starts the server chooses another.
const DEFAULT_SANDBOX: &str = "workspace-write";

/// Serve tools for a coding agent over MCP
///
/// An MCP client gets the tools run, output, write, kill, list, read_file, write_file, edit, search, glob, ls and
/// fetch, which work in one directory of the server. Every call is held to the sandbox that is chosen here; no
/// argument of a call changes it. fetch is offered only if the sandbox leaves the network open.
///
/// Speaks MCP over stdin and stdout, or over streamable HTTP with --http.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex mcp                                             this machine, this directory, workspace-write
  codex mcp --on env:laptop --cwd /srv/app              a machine behind a rendezvous
  codex mcp --sandbox read-only                         look, change nothing
  codex mcp --http 127.0.0.1:8700                       clients connect to http://127.0.0.1:8700/mcp
  codex mcp --http 0.0.0.0:8700 --http-token-file tok   other machines, with a bearer token

docs/mcp.md has the configuration of common clients.")]
pub(crate) struct McpArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Work in this directory, relative to the server's working directory
    #[arg(short = 'C', long, value_name = "DIR")]
    cwd: Option<String>,

    #[command(flatten)]
    sandbox: SandboxArgs,

    /// Run without a sandbox: the model may do whatever the user of the server may do
    #[arg(long, conflicts_with = "sandbox")]
    no_sandbox: bool,

    /// Set a variable for every command
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    env: Vec<String>,

    /// Serve streamable HTTP at this address instead of stdin and stdout
    #[arg(long, value_name = "IP:PORT")]
    http: Option<SocketAddr>,

    /// Require the bearer token in this file of HTTP clients; needed unless IP is a loopback address
    #[arg(long, value_name = "PATH", requires = "http")]
    http_token_file: Option<PathBuf>,
}

pub(crate) fn run(args: &McpArgs) -> anyhow::Result<ExitCode> {
    let token = args.http_token_file.as_deref().map(read_token).transpose()?;
    let guard = args.http.map(|address| {
        HttpGuard::new(address, token).with_context(|| {
            format!(
                "{address} can be reached from other machines; pass --http-token-file PATH, or listen on \
                 127.0.0.1"
            )
        })
    });
    let guard = guard.transpose()?;
    block_on(async {
        let signals = Signals::listen()?;
        let options = ConnectOptions {
            sandbox: !args.no_sandbox,
            own_files: args.http_token_file.iter().cloned().collect(),
            ..ConnectOptions::default()
        };
        let connected = args.on.connect(options).await?;
        let workspace = args.workspace(&connected)?;
        let result = tokio::select! {
            result = async {
                match (args.http, guard) {
                    (Some(address), Some(guard)) => {
                        serve_http(workspace, address, guarded(guard, &connected)).await
                    }
                    _ => {
                        let input = tokio::io::BufReader::new(tokio::io::stdin());
                        let session = Session::new(workspace);
                        serve_stdio(session, input, tokio::io::stdout()).await?;
                        Ok(ExitCode::SUCCESS)
                    }
                }
            } => result,
            code = signals.exit_code() => Ok(crate::exit::status(code)),
        };
        // The server of this process ends its processes; those of another end with their session.
        connected.close().await;
        result
    })
}

/// Keeps out the sandboxed commands of the server in this process.
fn guarded(guard: HttpGuard, connected: &Connected) -> HttpGuard {
    let Some(server) = connected.server().cloned() else { return guard };
    guard.admitting(move |peer| {
        let server = server.clone();
        Box::pin(async move { server.admits(peer).await })
    })
}

async fn serve_http(
    workspace: std::sync::Arc<Workspace>,
    address: SocketAddr,
    guard: HttpGuard,
) -> anyhow::Result<ExitCode> {
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let bound = listener.local_addr()?;
    print_notice(format_args!("listening on http://{bound}/mcp"));
    match HttpServer::new(workspace, guard).serve(listener).await {
        Ok(never) => match never {},
        Err(error) => Err(error.into()),
    }
}

impl McpArgs {
    fn workspace(&self, connected: &Connected) -> anyhow::Result<std::sync::Arc<Workspace>> {
        let client = connected.client.clone();
        let cwd = match &self.cwd {
            Some(cwd) => remote_path::resolve(connected, cwd)?,
            None => remote_path::working_directory(connected)
                .context("cannot choose a directory; pass --cwd DIR")?,
        };
        let rules = self.sandbox.hosts()?;
        let sandbox = self.context(&cwd)?;
        let mut env = Vec::new();
        for pair in &self.env {
            let Some((name, value)) = pair.split_once('=').filter(|(name, _)| !name.is_empty())
            else {
                bail!("invalid variable `{pair}`: expected -e NAME=VALUE");
            };
            env.push((name.to_owned(), value.to_owned()));
        }
        let launch = rules.as_ref().map(|rules| self.launch(connected, rules)).transpose()?;
        let policy = Policy::new(sandbox, move |command| {
            // Variables that look like secrets stay out, on this machine too: a model reads the output.
            let mut policy = env_policy(false);
            policy.set = env.iter().cloned().collect();
            let command = command.env_policy(Some(policy));
            match &launch {
                Some(launch) => command.network_proxy(launch.clone()).enforce_network(),
                None => command,
            }
        });
        let policy = if rules.is_some() { policy.without_fetch() } else { policy };
        Ok(Workspace::new(client, cwd, policy, McpConfig::default()))
    }

    fn context(&self, cwd: &PathUri) -> anyhow::Result<Option<SandboxContext>> {
        if self.no_sandbox {
            return Ok(None);
        }
        let mut sandbox = self.sandbox.clone();
        sandbox.sandbox.get_or_insert_with(|| DEFAULT_SANDBOX.to_owned());
        sandbox.context(cwd)
    }

    /// The proxy of the host rules in the policy file.
    fn launch(
        &self,
        connected: &Connected,
        rules: &HostRules,
    ) -> anyhow::Result<codex_exec_server::protocol::network::NetworkProxyLaunch> {
        ensure!(
            !rules.ask,
            "a policy that asks about hosts needs a person at the terminal; list the hosts instead"
        );
        rules.launch_on(&connected.client)
    }
}

fn read_token(file: &Path) -> anyhow::Result<String> {
    let token = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the token file {}", file.display()))?;
    let token = token.trim();
    ensure!(!token.is_empty(), "the token file {} is empty; write a token to it", file.display());
    Ok(token.to_owned())
}
