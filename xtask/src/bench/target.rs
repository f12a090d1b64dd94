//! The programs under measurement, each in a process of its own.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use super::placement;

/// A server process that printed its address. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Target {
    child: Child,
    pub url: String,
}

impl Target {
    /// `codex exec-server`.
    pub(crate) fn exec_server() -> anyhow::Result<Self> {
        Self::codex(|codex| {
            codex.args(["exec-server", "--detach-ttl", "0"]);
        })
    }

    /// The program that is measured.
    pub(crate) fn program() -> anyhow::Result<PathBuf> {
        Ok(own_directory()?.join("codex"))
    }

    /// `codex` as a server that prints its address.
    pub(crate) fn codex(arguments: impl FnOnce(&mut Command)) -> anyhow::Result<Self> {
        let mut command = Command::new(Self::program()?);
        arguments(&mut command);
        Self::start(&mut command)
    }

    /// `codex` as a server that prints none.
    pub(crate) fn silent(arguments: impl FnOnce(&mut Command)) -> anyhow::Result<Self> {
        let mut command = Command::new(Self::program()?);
        arguments(&mut command);
        placement::pin_server(&mut command);
        let streams = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: streams.spawn()?, url: String::new() })
    }

    /// A bare websocket peer.
    pub(crate) fn floor(kind: &str) -> anyhow::Result<Self> {
        Self::start(Command::new(std::env::current_exe()?).args(["floor-server", kind]))
    }

    fn start(command: &mut Command) -> anyhow::Result<Self> {
        placement::pin_server(command);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("stdout")?;
        let mut url = String::new();
        BufReader::new(stdout).read_line(&mut url)?;
        Ok(Self { child, url: url.trim().to_owned() })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory that belongs to this process alone, in bytes.
    pub(crate) fn resident(&self) -> anyhow::Result<u64> {
        self.status("RssAnon:")
    }

    /// The most memory that was ever resident, in bytes.
    pub(crate) fn most_resident(&self) -> anyhow::Result<u64> {
        self.status("VmHWM:")
    }

    /// The processor's time that it has used, in the kernel and outside.
    pub(crate) fn processor_time(&self) -> anyhow::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields: Vec<_> = stat.rsplit(')').next().context("stat")?.split_whitespace().collect();
        let ticks = |at: usize| anyhow::Ok(fields.get(at).context("stat")?.parse::<u64>()?);
        let ticks = ticks(11)? + ticks(12)?;
        Ok(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second())?)
    }

    fn status(&self, field: &'static str) -> anyhow::Result<u64> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path)?;
        let line = status.lines().find(|line| line.starts_with(field)).context(field)?;
        let kib: u64 = line.split_whitespace().nth(1).context(field)?.parse()?;
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
