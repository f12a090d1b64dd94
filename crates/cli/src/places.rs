//! `codex places`: the named places of `--on`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use codex_exec_server::client::WebsocketDial;
use futures_util::future::join_all;
use serde::Serialize;

use crate::env_args::EnvArgs;
use crate::exit::{self, print_stderr};
use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::place::{Chosen, NamedPlace, place};
use crate::places_file::{self, PlaceSettings, PlacesFile, is_name};
use crate::style::{Style, printable, table};

/// Name servers, for --on NAME
///
/// The places are in ~/.config/codex-exec/config.toml (or below $XDG_CONFIG_HOME), which you can edit too.
/// codex refuses the file if others can write it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex places add build --on ws://10.0.0.5:4500 --token-file ~/.build-token --cwd /srv/app
  codex run --on build -- make test
  codex places add laptop --on env:laptop --registry https://registry.example --sandbox read-only
  codex places test                    connect to each

The file:
  [places.build]
  on = \"ws://10.0.0.5:4500\"            as in --on
  token_file = \"~/.build-token\"        relative paths start from the directory of the file
  cwd = \"/srv/app\"                     commands start, and relative paths on the server begin, here
  sandbox = \"workspace-write\"          the default of --sandbox; --sandbox none leaves it out
  env = { RUST_LOG = \"debug\" }         variables of run and shell
and registry, client_cert, client_key, as the flags. A flag beats the file; the file's token beats
that of a variable.")]
pub(crate) struct PlacesArgs {
    #[command(subcommand)]
    command: PlacesCommand,
}

#[derive(Debug, Subcommand)]
enum PlacesCommand {
    /// List the places
    List {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    Add(Box<AddArgs>),
    /// Remove a place from the file
    Remove {
        /// The place
        name: String,
    },
    /// Connect to places, and say what is wrong with those that fail
    Test {
        /// The places [default: all]
        names: Vec<String>,
    },
}

/// Add a place to the file
#[derive(Debug, Args)]
struct AddArgs {
    /// The name: letters, digits, - and _
    #[arg(value_parser = parse_name)]
    name: String,

    /// The server: ws://HOST:PORT, wss://HOST, unix:PATH, vsock:CID:PORT, stdio:COMMAND or env:ID
    #[arg(long, value_name = "SERVER", value_parser = parse_address)]
    on: String,

    /// Read the bearer token from this file
    #[arg(long, value_name = "PATH")]
    token_file: Option<PathBuf>,

    /// Look up env:ID in this registry
    #[arg(long, value_name = "URL")]
    registry: Option<String>,

    /// Show the server of wss:// this certificate, in PEM
    #[arg(long, value_name = "PATH", requires = "client_key")]
    client_cert: Option<PathBuf>,

    /// Key of that certificate, in PEM
    #[arg(long, value_name = "PATH", requires = "client_cert")]
    client_key: Option<PathBuf>,

    /// Start commands, and relative paths, in this directory on the server
    #[arg(short = 'C', long, value_name = "DIR")]
    cwd: Option<String>,

    #[command(flatten)]
    env: EnvArgs,

    /// Confine commands to this sandbox unless they name another: read-only, workspace-write or a file
    #[arg(long, value_name = "SANDBOX")]
    sandbox: Option<String>,

    /// Replace a place with this name
    #[arg(long)]
    replace: bool,
}

/// An object of `list --json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed<'a> {
    name: &'a str,
    on: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    registry: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_file: Option<&'a PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
}

/// How long a place may take to respond.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn run(args: PlacesArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        PlacesCommand::List { json } => list(json),
        PlacesCommand::Add(args) => args.add(),
        PlacesCommand::Remove { name } => {
            places_file::remove(&name)?;
            print_stderr(format_args!("removed the place `{name}`"));
            Ok(ExitCode::SUCCESS)
        }
        PlacesCommand::Test { names } => test(&names),
    }
}

fn list(json: bool) -> anyhow::Result<ExitCode> {
    let file = PlacesFile::read()?;
    let listed: Vec<Listed<'_>> = file
        .places
        .iter()
        .map(|(name, settings)| Listed {
            name,
            on: shown(&settings.on),
            registry: settings.registry.as_deref(),
            token_file: settings.token_file.as_ref(),
            cwd: settings.cwd.as_deref(),
            sandbox: settings.sandbox.as_deref(),
        })
        .collect();
    let text = match json {
        true => format!("{}\n", crate::json_text::pretty(&listed)?),
        false if listed.is_empty() => {
            print_stderr(format_args!("no places; add one with codex places add NAME --on SERVER"));
            String::new()
        }
        false => {
            let mut rows = vec![["NAME", "SERVER", "CWD", "SANDBOX"].map(str::to_owned).to_vec()];
            rows.extend(listed.iter().map(|place| {
                let optional = |text: Option<&str>| text.map_or_else(|| "-".to_owned(), printable);
                let (cwd, sandbox) = (optional(place.cwd), optional(place.sandbox));
                vec![place.name.to_owned(), printable(&place.on), cwd, sandbox]
            }));
            let style = Style::stdout();
            table(&rows, |heading| style.bold(heading))
        }
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

impl AddArgs {
    fn add(self) -> anyhow::Result<ExitCode> {
        // A path on the command line is relative to this directory, one in the file to that of the file.
        let absolute = |path: Option<PathBuf>| path.map(std::path::absolute).transpose();
        let sandbox = match self.sandbox {
            Some(given) if !matches!(given.as_str(), "read-only" | "workspace-write" | "none") => {
                let file = std::path::absolute(given)?;
                Some(file.into_os_string().into_string().ok().context("the path is not UTF-8")?)
            }
            given => given,
        };
        let settings = PlaceSettings {
            on: self.on,
            token_file: absolute(self.token_file)?,
            registry: self.registry,
            client_cert: absolute(self.client_cert)?,
            client_key: absolute(self.client_key)?,
            cwd: self.cwd,
            env: self.env.pairs()?.into_iter().collect(),
            sandbox,
        };
        if let Some(registry) = &settings.registry {
            crate::on::check_registry(registry)?;
        }
        places_file::add(&self.name, &settings, self.replace)?;
        let (name, file) = (&self.name, places_file::path()?);
        print_stderr(format_args!(
            "added `{name}` to {}; try it with codex places test {name}",
            file.display()
        ));
        Ok(ExitCode::SUCCESS)
    }
}

fn test(names: &[String]) -> anyhow::Result<ExitCode> {
    let file = PlacesFile::read()?;
    let mut chosen: Vec<(&str, &PlaceSettings)> = Vec::new();
    for name in names {
        chosen.push((name, file.find(name)?));
    }
    if names.is_empty() {
        chosen.extend(file.places.iter().map(|(name, settings)| (name.as_str(), settings)));
    }
    if chosen.is_empty() {
        bail!("no places; add one with codex places add NAME --on SERVER");
    }
    let results = block_on(async {
        Ok(join_all(chosen.iter().map(|(name, settings)| test_one(name, settings))).await)
    })?;
    let mut code = ExitCode::SUCCESS;
    for ((name, settings), result) in chosen.iter().zip(results) {
        match result {
            Ok(line) => writeln!(std::io::stdout(), "{name}: {}", printable(&line))?,
            Err(error) => {
                let place = shown(&settings.on);
                print_stderr(format_args!("{name} ({place}): {}", exit::message(&error)));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// Connects to a place and describes its server.
async fn test_one(name: &str, settings: &PlaceSettings) -> anyhow::Result<String> {
    let named = NamedPlace { name: name.to_owned(), settings: settings.clone() };
    let place = settings.place().map_err(anyhow::Error::msg)?;
    let on = OnArgs::default().at(Chosen { place, named: Some(Box::new(named)) });
    let began = Instant::now();
    let options = ConnectOptions { fail_fast: true, ..ConnectOptions::default() };
    let connecting = tokio::time::timeout(REPLY_TIMEOUT, on.connect(options)).await;
    let connected =
        connecting.with_context(|| format!("no reply within {} s", REPLY_TIMEOUT.as_secs()))??;
    let took = began.elapsed().as_millis();
    let checked = async {
        if settings.cwd.is_some() {
            let cwd = crate::remote_path::working_directory(&connected)?;
            let found = connected.client.files().metadata(&cwd).await;
            if !found.context("its cwd")?.is_directory {
                bail!("its cwd is not a directory on the server");
            }
        }
        anyhow::Ok(())
    };
    let checked = checked.await;
    let info = connected.client.info();
    let system = info.platform_os.clone();
    connected.close().await;
    checked?;
    Ok(format!("connected in {took} ms to {} ({system})", on.display()))
}

/// An address, without what may be a secret.
fn shown(on: &str) -> String {
    match on.starts_with("ws") {
        true => WebsocketDial::new(on).redacted_url(),
        false => on.to_owned(),
    }
}

fn parse_name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("expected up to 64 letters, digits, - and _, not starting with -".to_owned()),
    }
}

fn parse_address(text: &str) -> Result<String, String> {
    let parsed = place(text)?;
    // With its path made absolute, since the file is read from any directory.
    Ok(parsed.url().unwrap_or_else(|| text.to_owned()))
}
