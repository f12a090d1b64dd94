//! The static program: no interpreter and no shared library, so it runs on any Linux of its processor.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::{codex, remap};

/// The profile in Cargo.toml.
const PROFILE: &str = "dist";

/// Builds the program from the sources in this directory and returns its path in `target`.
pub(crate) fn build(sources: &Path, target: &Path, epoch: u64) -> anyhow::Result<PathBuf> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = codex::cargo();
    cargo
        .args(["build", "--quiet", "--locked", "--package", "codex", "--profile", PROFILE])
        // A platform of its own, though it is this one: build scripts and macros are built without these flags.
        .args(["--target", &platform])
        .current_dir(sources)
        .env("CARGO_TARGET_DIR", target)
        .env("SOURCE_DATE_EPOCH", epoch.to_string());
    remap::replace_paths(&mut cargo, sources, &["-Ctarget-feature=+crt-static"])?;
    ensure!(cargo.status()?.success(), "the build in {} failed", sources.display());
    let program = target.join(platform).join(PROFILE).join("codex");
    let bytes =
        std::fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
    ensure!(is_static(&bytes)?, "{} needs shared libraries", program.display());
    Ok(program)
}

/// Whether an ELF program for 64 bits names no interpreter.
fn is_static(program: &[u8]) -> anyhow::Result<bool> {
    const INTERPRETER: u32 = 3;
    ensure!(program.starts_with(b"\x7fELF\x02\x01"), "not an ELF program for 64 bits");
    let headers = usize::try_from(u64::from_le_bytes(field(program, 32)?))?;
    let size = usize::from(u16::from_le_bytes(field(program, 54)?));
    let count = usize::from(u16::from_le_bytes(field(program, 56)?));
    for index in 0..count {
        if u32::from_le_bytes(field(program, headers + index * size)?) == INTERPRETER {
            return Ok(false);
        }
    }
    Ok(count > 0)
}

fn field<const N: usize>(program: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    program.get(at..).and_then(|rest| rest.first_chunk().copied()).context("a truncated program")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests are linked as usual: against shared libraries.
    #[test]
    fn a_program_with_an_interpreter_is_not_static() {
        let mut program = std::fs::read("/proc/self/exe").unwrap();
        assert!(!is_static(&program).unwrap());
        let headers = u64::from_le_bytes(field(&program, 32).unwrap()) as usize;
        for index in 0..usize::from(u16::from_le_bytes(field(&program, 56).unwrap())) {
            let kind = &mut program[headers + index * 56..][..4];
            if kind == [3, 0, 0, 0] {
                kind.copy_from_slice(&[0; 4]);
            }
        }
        assert!(is_static(&program).unwrap());
        is_static(&program[..40]).unwrap_err();
        is_static(b"#!/bin/sh").unwrap_err();
    }
}
