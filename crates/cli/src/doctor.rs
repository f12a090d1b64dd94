//! `codex doctor`: shows which sandboxes this machine can enforce.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use codex_linux_sandbox::{Assurance, Capabilities, lacks};

use crate::exit;

/// Check which sandboxes this machine can enforce, and how to enable the rest
///
/// Exits with 0 if this machine offers full assurance, else with 1. The server uses a weaker sandbox
/// only if --sandbox-assurance or the request accepts it.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {}

pub(crate) fn run(_: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let capabilities = Capabilities::probe();
    let mut out = std::io::stdout().lock();
    for check in capabilities.checks() {
        let mark = if check.available { "ok" } else { "--" };
        writeln!(out, "{mark}  {:<28} {}", check.name, check.detail)?;
        if let Some(remedy) = check.remedy {
            writeln!(out, "      {remedy}")?;
        }
    }
    match capabilities.assurance() {
        Some(Assurance::Full) => {
            writeln!(out, "\nassurance: full\nthis machine can enforce every policy")?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(level) => writeln!(
            out,
            "\nassurance: {level}\nthe server refuses sandboxed requests unless --sandbox-assurance \
             {level} or the request accepts this level; then\n{}",
            lacks(level)
        )?,
        None => writeln!(
            out,
            "\nassurance: none\nthis machine can enforce no policy; the server refuses sandboxed requests"
        )?,
    }
    Ok(ExitCode::from(exit::FAILURE))
}
