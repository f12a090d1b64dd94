//! `codex login`, `codex login status`, `codex logout`: manage the credentials in `auth.json`.

use std::io::Read;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use codex_exec_server::SignInSources;
use codex_exec_server::credentials::{
    BrowserLogin, DeviceLogin, claims, login_issuer, login_with_api_key, login_with_tokens, logout,
};
use codex_exec_server::remote_mode::{HttpClient, Secret};

use crate::ca_args::CaArgs;
use crate::exit::print_notice;

/// How long to wait for the browser's redirect.
const BROWSER_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Sign in to a registry, for remote mode
///
/// Prints a URL to open in a browser on this machine, or with --device-auth a code to enter in a
/// browser on any machine. Stores the credentials in $CODEX_HOME/auth.json, readable by you only. Needs an
/// OAuth client registered with the issuer (--client-id or $CODEX_LOGIN_CLIENT_ID); an API key does
/// not.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  codex login --client-id ID                          with a browser on this machine
  codex login --client-id ID --device-auth            with a browser on another machine
  printenv OPENAI_API_KEY | codex login --api-key     with an API key from stdin
  codex login status                                  show how you are signed in"
)]
pub(crate) struct LoginArgs {
    #[command(subcommand)]
    command: Option<LoginCommand>,

    /// Read an API key from stdin and store it
    #[arg(long, alias = "with-api-key", conflicts_with_all = ["device_auth", "issuer", "port"])]
    api_key: bool,

    /// Sign in by entering a code in a browser on any machine
    #[arg(long)]
    device_auth: bool,

    /// The OAuth issuer [default: $CODEX_LOGIN_ISSUER]
    #[arg(long, value_name = "URL")]
    issuer: Option<String>,

    #[command(flatten)]
    ca: CaArgs,

    /// The OAuth client id [default: $CODEX_LOGIN_CLIENT_ID]
    #[arg(long, value_name = "ID")]
    client_id: Option<String>,

    /// Listen on this local port for the browser's redirect; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 0, conflicts_with = "device_auth")]
    port: u16,
}

#[derive(Debug, Subcommand)]
enum LoginCommand {
    /// Show how you are signed in; exits with 1 if you are not
    Status,
}

pub(crate) fn run(args: LoginArgs) -> anyhow::Result<ExitCode> {
    args.ca.apply()?;
    let sources = SignInSources::from_env();
    if let Some(LoginCommand::Status) = args.command {
        return status(&sources);
    }
    let file = if args.api_key {
        let mut key = String::new();
        std::io::stdin()
            .take(64 << 10)
            .read_to_string(&mut key)
            .context("cannot read the API key from stdin")?;
        login_with_api_key(&sources, &Secret::from(key))?
    } else {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let tokens = runtime.block_on(async {
            let http = HttpClient::default();
            let issuer = login_issuer(&sources, args.issuer, args.client_id, &http).await?;
            if args.device_auth {
                let login = DeviceLogin::start(issuer, &http).await?;
                print_notice(format_args!(
                    "Open {}\nand enter {}",
                    login.verification_url(),
                    login.user_code()
                ));
                login.finish(&http).await
            } else {
                let login = BrowserLogin::start(issuer, args.port).await?;
                print_notice(format_args!(
                    "Open this URL in a browser on this machine:\n{}",
                    login.url()
                ));
                login.finish(BROWSER_TIMEOUT, &http).await
            }
        })?;
        login_with_tokens(&sources, &tokens)?
    };
    print_notice(format_args!("Signed in; credentials stored in {}", file.path().display()));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_logout() -> anyhow::Result<ExitCode> {
    let sources = SignInSources::from_env();
    print_notice(format_args!(
        "{}",
        if logout(&sources)? { "Signed out" } else { "Not signed in" }
    ));
    Ok(ExitCode::SUCCESS)
}

fn status(sources: &SignInSources) -> anyhow::Result<ExitCode> {
    if sources.api_key.is_some() {
        print_notice(format_args!("Signed in with the API key in CODEX_API_KEY"));
        return Ok(ExitCode::SUCCESS);
    }
    let file = sources.auth_file().context("cannot find the home directory; set CODEX_HOME")?;
    let content = file.read()?.unwrap_or_default();
    if let Some(tokens) = content.tokens {
        let who = claims(&tokens.id_token.as_str().into()).and_then(|claims| claims.email);
        let who = who.map(|email| format!(" as {email}")).unwrap_or_default();
        print_notice(format_args!("Signed in with ChatGPT{who}"));
    } else if content.api_key.is_some_and(|key| !key.is_empty()) {
        print_notice(format_args!("Signed in with an API key"));
    } else {
        print_notice(format_args!("Not signed in; run codex login or set CODEX_API_KEY"));
        return Ok(ExitCode::from(crate::exit::FAILURE));
    }
    Ok(ExitCode::SUCCESS)
}
