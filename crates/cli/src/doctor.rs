//! `codex doctor`: what this machine can enforce.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use codex_linux_sandbox::{Assurance, Capabilities, lacks};

use crate::exit;

/// Show what this machine can enforce on the commands it runs, and what to do about the rest
///
/// Exits with 0 if sandboxes have full assurance, with 1 if not: a weaker one is used only if
/// --sandbox-assurance or the request permits it.
#[derive(Debug, Args)]
pub struct DoctorArgs {}

pub fn run(_: &DoctorArgs) -> anyhow::Result<ExitCode> {
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
            writeln!(out, "\nassurance: full\nevery policy can be enforced")?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(level) => writeln!(
            out,
            "\nassurance: {level}\nsandboxed requests are refused unless --sandbox-assurance {level} \
             or the request permits it; then\n{}",
            lacks(level)
        )?,
        None => writeln!(
            out,
            "\nassurance: none\nno policy can be enforced; sandboxed requests are refused"
        )?,
    }
    Ok(ExitCode::from(exit::FAILURE))
}
