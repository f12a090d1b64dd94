//! `codex doctor`: what this machine can enforce.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use codex_linux_sandbox::Capabilities;

use crate::exit;

/// Show what this machine can enforce on the commands it runs, and what to do about the rest
///
/// Exits with 0 if every policy can be enforced, with 1 if not.
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
    let (verdict, code) = match (capabilities.namespaces(), capabilities.any()) {
        (true, _) => ("every policy can be enforced", ExitCode::SUCCESS),
        (false, true) => (
            "some policies can be enforced (Landlock and seccomp alone); others are refused",
            ExitCode::from(exit::FAILURE),
        ),
        (false, false) => {
            ("no policy can be enforced; sandboxed requests are refused", exit::FAILURE.into())
        }
    };
    writeln!(out, "\n{verdict}")?;
    Ok(code)
}
