//! `codex`: parses the command line, runs a command, returns its exit code.

mod apply_patch;
mod asciicast;
mod attach;
mod ca_args;
mod cat;
mod closed_streams;
mod completion;
mod config_args;
#[cfg(test)]
mod configuration;
mod confirm;
mod control;
mod cp;
mod doctor;
mod env_args;
mod environments;
mod escapes;
mod exec_server;
mod exit;
mod foreground;
mod hosts;
mod info;
mod input;
mod json_text;
mod kill;
mod limits;
mod logging;
mod login;
mod logs;
mod ls;
#[cfg(test)]
mod manual;
mod mcp;
mod name_service;
mod observe;
mod on;
mod outage;
mod output;
mod own_files;
mod place;
mod places;
mod places_file;
mod policy;
mod protocol;
mod ps;
mod remote;
mod remote_path;
mod remote_status;
mod rendezvous;
mod replay;
mod rm;
mod run;
mod sandbox;
mod saved_sessions;
mod screen_modes;
mod search;
mod server_token;
mod session_file;
mod shell;
mod signals;
mod style;
mod target;
mod terminal;
mod trim;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Run commands and work with files on another machine
///
/// `codex exec-server` serves a machine. The other commands work on the server given by --on or
/// $CODEX_EXEC_SERVER_URL, or on this machine if neither is set; `codex places` gives servers names.
///
/// An independent implementation of the codex exec-server protocol; not affiliated with OpenAI.
#[derive(Debug, Parser)]
#[command(name = "codex", version, max_term_width = 100, after_help = exit::HELP)]
struct Cli {
    #[command(flatten)]
    logging: logging::LoggingArgs,
    #[command(flatten)]
    config: config_args::GlobalConfigArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Shell(shell::ShellArgs),
    Ps(ps::PsArgs),
    Replay(replay::ReplayArgs),
    Attach(attach::AttachArgs),
    Logs(logs::LogsArgs),
    Kill(kill::KillArgs),
    Cp(cp::CpArgs),
    Cat(cat::CatArgs),
    Ls(ls::LsArgs),
    Rm(rm::RmArgs),
    Search(search::SearchArgs),
    ApplyPatch(apply_patch::ApplyPatchArgs),
    Info(info::InfoArgs),
    Protocol(protocol::ProtocolArgs),
    Sandbox(sandbox::SandboxArgs),
    ExecServer(Box<exec_server::ExecServerArgs>),
    Mcp(Box<mcp::McpArgs>),
    Login(login::LoginArgs),
    /// Remove the credentials stored by codex login
    Logout,
    Doctor(doctor::DoctorArgs),
    Rendezvous(rendezvous::RendezvousArgs),
    Environments(environments::EnvironmentsArgs),
    Places(places::PlacesArgs),
    Completion(completion::CompletionArgs),
}

impl Command {
    /// Whether it is a server. A server may be started without streams, and its only output to stdout is
    /// its address.
    fn serves(&self) -> bool {
        match self {
            Self::ExecServer(args) => args.serves(),
            Self::Rendezvous(args) => args.serves(),
            _ => false,
        }
    }
}

fn main() -> ExitCode {
    // If a server has re-entered this program as a helper, this does not return.
    codex_exec_server::main_if_reentered();
    name_service::use_built_in_sources();
    terminal::main_if_guard();
    completion::main_if_candidates();
    let cli = match Cli::try_parse_from(arguments()) {
        Ok(cli) => cli,
        Err(error) => {
            closed_streams::fail_writes();
            // clap reports help and version as errors for stdout.
            let printed = error.print();
            return match (error.use_stderr(), printed) {
                (true, _) => exit::USAGE.into(),
                (false, Ok(())) => ExitCode::SUCCESS,
                (false, Err(error)) => exit::report(&error.into()),
            };
        }
    };
    if !cli.command.serves() {
        closed_streams::fail_writes();
    }
    cli.logging.start();
    cli.config.note_ignored();
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Shell(args) => shell::run(&args),
        Command::Ps(args) => ps::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Attach(args) => attach::run(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Kill(args) => kill::run(&args),
        Command::Cp(args) => cp::run(&args),
        Command::Cat(args) => cat::run(&args),
        Command::Ls(args) => ls::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Search(args) => search::run(&args),
        Command::ApplyPatch(args) => apply_patch::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Protocol(args) => protocol::run(&args),
        Command::Sandbox(args) => sandbox::run(&args),
        Command::ExecServer(args) => exec_server::run(*args),
        Command::Mcp(args) => mcp::run(&args),
        Command::Login(args) => login::run(args),
        Command::Logout => login::run_logout(),
        Command::Doctor(args) => doctor::run(&args),
        Command::Rendezvous(args) => rendezvous::run(args),
        Command::Environments(args) => environments::run(args),
        Command::Places(args) => places::run(args),
        Command::Completion(args) => completion::run(&args, &mut Cli::command()),
    };
    match result {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// The arguments; under the name `codex-exec-server`, the subcommand `exec-server` is optional.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    if name.is_some_and(|name| name == "codex-exec-server") {
        arguments[0] = "codex".into();
        let first = arguments.get(1).and_then(|word| word.to_str());
        if !matches!(first, Some("exec-server" | "--version" | "-V")) {
            arguments.insert(1, "exec-server".into());
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
