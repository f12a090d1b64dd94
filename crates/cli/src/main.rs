//! `codex`: parse, run, exit code.

mod completion;
mod doctor;
mod environments;
mod exec_server;
mod exit;
mod logging;
mod login;
mod remote;
mod rendezvous;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Run commands and touch files on this machine for somebody on another one
///
/// An independent implementation of the codex exec-server protocol; not affiliated with OpenAI.
#[derive(Debug, Parser)]
#[command(name = "codex", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    logging: logging::LoggingArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    ExecServer(Box<exec_server::ExecServerArgs>),
    Login(login::LoginArgs),
    /// Forget the credentials that codex login has kept
    Logout,
    Doctor(doctor::DoctorArgs),
    Rendezvous(rendezvous::RendezvousArgs),
    Environments(environments::EnvironmentsArgs),
    Completion(completion::CompletionArgs),
}

fn main() -> ExitCode {
    // A helper of a running server: nothing else of this program applies to it.
    codex_exec_server::main_if_reentered();
    let cli = match Cli::try_parse_from(arguments()) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors; both are told by where they are printed.
            let _ = error.print();
            return if error.use_stderr() { exit::USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    cli.logging.start();
    let result = match cli.command {
        Command::ExecServer(args) => exec_server::run(*args),
        Command::Login(args) => login::run(args),
        Command::Logout => login::run_logout(),
        Command::Doctor(args) => doctor::run(&args),
        Command::Rendezvous(args) => rendezvous::run(args),
        Command::Environments(args) => environments::run(args),
        Command::Completion(args) => completion::run(&args, &mut Cli::command()),
    };
    match result {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// Called by the name `codex-exec-server`, the word `exec-server` is understood.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let name = arguments.first().map(Path::new).and_then(Path::file_name);
    if name.is_some_and(|name| name == "codex-exec-server") {
        arguments.insert(1, "exec-server".into());
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
