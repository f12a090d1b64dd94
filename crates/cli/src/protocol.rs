//! `codex protocol schema`: prints the schema of the protocol.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use codex_exec_server::protocol::openrpc;

/// The schema of this version; a test of the protocol crate keeps it fresh.
const SCHEMA: &str = include_str!("../../../docs/protocol/schema.json");

/// Describe the protocol for programs
#[derive(Debug, Args)]
pub(crate) struct ProtocolArgs {
    #[command(subcommand)]
    command: ProtocolCommand,
}

#[derive(Debug, Subcommand)]
enum ProtocolCommand {
    Schema(SchemaArgs),
}

/// Print the schema of every method, notification, error kind and event of `run --json`
///
/// JSON Schema 2020-12: a message is valid if the document permits it; `$defs` has every type, and `methods`,
/// `notifications`, `errorKinds` and `capabilities` are tables for generators. Extensions are marked.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex protocol schema > schema.json
  codex protocol schema | jq -r '.methods[] | select(.extension) | .name'
  codex protocol schema --openrpc > openrpc.json")]
struct SchemaArgs {
    /// Print an OpenRPC document instead
    #[arg(long)]
    openrpc: bool,
}

pub(crate) fn run(args: &ProtocolArgs) -> anyhow::Result<ExitCode> {
    let ProtocolCommand::Schema(args) = &args.command;
    let mut out = std::io::stdout().lock();
    if args.openrpc {
        let schema = serde_json::from_str(SCHEMA).context("the built-in schema is damaged")?;
        serde_json::to_writer_pretty(&mut out, &openrpc::document(&schema))?;
        writeln!(out)?;
    } else {
        out.write_all(SCHEMA.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}
