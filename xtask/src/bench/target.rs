//! The programs under measurement, each in a process of its own.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};

use super::placement;

/// Builds the release binary that is measured.
pub fn build() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--package", "codex"])
        .status()?;
    ensure!(built.success(), "the build failed");
    Ok(())
}

/// A server process that printed its address. Killed when dropped.
#[derive(Debug)]
pub struct Target {
    child: Child,
    pub url: String,
}

impl Target {
    /// `codex exec-server`.
    pub fn exec_server() -> anyhow::Result<Self> {
        let codex = own_directory()?.join("codex");
        Self::start(Command::new(codex).args(["exec-server", "--detach-ttl", "0"]))
    }

    /// A bare websocket peer.
    pub fn floor(what: &str) -> anyhow::Result<Self> {
        Self::start(Command::new(std::env::current_exe()?).args(["floor-server", what]))
    }

    fn start(command: &mut Command) -> anyhow::Result<Self> {
        placement::elsewhere(command);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("stdout")?;
        let mut url = String::new();
        BufReader::new(stdout).read_line(&mut url)?;
        Ok(Self { child, url: url.trim().to_owned() })
    }

    /// Resident memory that belongs to this process alone, in bytes.
    pub fn resident(&self) -> anyhow::Result<u64> {
        self.status("RssAnon:")
    }

    /// The most memory that was ever resident, in bytes.
    pub fn most_resident(&self) -> anyhow::Result<u64> {
        self.status("VmHWM:")
    }

    fn status(&self, what: &'static str) -> anyhow::Result<u64> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path)?;
        let line = status.lines().find(|line| line.starts_with(what)).context(what)?;
        let kib: u64 = line.split_whitespace().nth(1).context(what)?.parse()?;
        Ok(kib << 10)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn own_directory() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.parent().context("no directory")?.to_owned())
}
