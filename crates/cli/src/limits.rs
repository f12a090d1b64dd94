//! Limits: the flags of `codex run` and of `codex exec-server`, and limits in words.

use std::time::Duration;

use clap::Args;
use codex_exec_server::{AppliedLimits, EndedBy, LimitConfig, Quota, Resource, ResourceLimits};

use crate::exec_server::{format_duration, parse_duration};

/// What a command may use.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits (of the command and everything that it starts)")]
pub(crate) struct RunLimits {
    /// Kill the command after this time and exit with 124: 500ms, 30s, 5m, 2h
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    timeout: Option<Duration>,

    /// Kill it after this time without output and without input, and exit with 124
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    idle_timeout: Option<Duration>,

    /// Kill it once it has used this much CPU time
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    cpu_time: Option<Duration>,

    /// Give it at most this many CPUs at once: 2, 0.5; the server needs a delegated cgroup
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpus: Option<u64>,

    /// Kill it if it has more memory than this: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,

    /// Allow at most this many processes at once
    #[arg(long, value_name = "N")]
    pids: Option<u64>,

    /// Allow each of its processes at most this many open files
    #[arg(long, value_name = "N")]
    open_files: Option<u64>,

    /// Kill it once it has printed more than this
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_output: Option<u64>,

    /// Kill it once it has written more than this to disks
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_disk: Option<u64>,
}

impl RunLimits {
    pub(crate) fn limits(&self) -> ResourceLimits {
        let milliseconds = |time: Option<Duration>| time.map(|time| time.as_millis() as u64);
        ResourceLimits {
            wall_ms: milliseconds(self.timeout),
            idle_ms: milliseconds(self.idle_timeout),
            cpu_ms: milliseconds(self.cpu_time),
            cpus_milli: self.cpus,
            memory_bytes: self.memory,
            pids: self.pids,
            open_files: self.open_files,
            output_bytes: self.max_output,
            disk_bytes: self.max_disk,
        }
    }
}

/// The limits among these that a client can keep without its server's help.
pub(crate) fn kept_by_client(limits: &ResourceLimits) -> ResourceLimits {
    let ResourceLimits { wall_ms, idle_ms, output_bytes, .. } = *limits;
    ResourceLimits { wall_ms, idle_ms, output_bytes, ..ResourceLimits::default() }
}

/// The flag of `codex run` that sets the limit.
pub(crate) fn flag(resource: Resource) -> &'static str {
    match resource {
        Resource::Wall => "--timeout",
        Resource::Idle => "--idle-timeout",
        Resource::Cpu => "--cpu-time",
        Resource::Cpus => "--cpus",
        Resource::Memory => "--memory",
        Resource::Pids => "--pids",
        Resource::OpenFiles => "--open-files",
        Resource::Output => "--max-output",
        Resource::Disk => "--max-disk",
    }
}

/// Says which limit ended a command; `None` if it was none.
pub(crate) fn explain(
    ended_by: EndedBy,
    asked: &ResourceLimits,
    applied: Option<&AppliedLimits>,
) -> Option<String> {
    let resource = ended_by.resource()?;
    let did = match resource {
        Resource::Wall => "it ran longer than",
        Resource::Idle => "it neither wrote nor read anything for",
        Resource::Cpu => "it used more CPU time than",
        Resource::Memory => "it used more memory than",
        Resource::Pids => "it started more processes than",
        Resource::Output => "it printed more than",
        Resource::Disk => "it wrote more to disks than",
        Resource::Cpus | Resource::OpenFiles => return None,
    };
    let value = asked.get(resource);
    Some(match (value, applied.and_then(|applied| applied.get(resource))) {
        (Some(value), _) => {
            let (flag, value) = (flag(resource), amount(resource, value));
            format!("killed the command: {did} its {flag} of {value}")
        }
        (None, Some(limit)) => {
            let value = amount(resource, limit.value);
            format!("killed the command: {did} the server's limit of {value}")
        }
        (None, None) => format!("killed the command: {did} its limit"),
    })
}

/// An amount of a resource, such as `5m` or `512M`.
pub(crate) fn amount(resource: Resource, value: u64) -> String {
    match resource {
        Resource::Wall | Resource::Idle | Resource::Cpu => {
            format_duration(Duration::from_millis(value))
        }
        Resource::Memory | Resource::Output | Resource::Disk => format_size(value),
        Resource::Cpus => format!("{}", value as f64 / 1000.0),
        Resource::Pids | Resource::OpenFiles => value.to_string(),
    }
}

/// The limits in force, for a table: `wall 5m, memory 2G`.
pub(crate) fn summary(limits: &AppliedLimits) -> String {
    let each = limits
        .iter()
        .map(|(resource, limit)| format!("{} {}", key(resource), amount(resource, limit.value)));
    each.collect::<Vec<_>>().join(", ")
}

/// The name of a resource in `--limit` and its like.
fn key(resource: Resource) -> &'static str {
    match resource {
        Resource::Wall => "wall",
        Resource::Idle => "idle",
        Resource::Cpu => "cpu-time",
        Resource::Cpus => "cpus",
        Resource::Memory => "memory",
        Resource::Pids => "pids",
        Resource::OpenFiles => "open-files",
        Resource::Output => "output",
        Resource::Disk => "disk",
    }
}

/// Parses an amount as [`amount`] formats it.
fn parse_amount(resource: Resource, text: &str) -> Result<u64, String> {
    match resource {
        Resource::Wall | Resource::Idle | Resource::Cpu => {
            parse_duration(text).map(|time| time.as_millis() as u64)
        }
        Resource::Memory | Resource::Output | Resource::Disk => parse_size(text),
        Resource::Cpus => parse_cpus(text),
        Resource::Pids | Resource::OpenFiles => {
            text.parse().map_err(|_| "expected a whole number".to_owned())
        }
    }
}

/// Limits of a server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits of processes")]
pub(crate) struct ServerLimits {
    /// Limit each process that asks for nothing else: wall=1h, idle=10m, cpu-time=30m, cpus=2,
    /// memory=2G, pids=500, open-files=1024, output=1G, disk=10G; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_limit)]
    limit: Vec<(Resource, u64)>,

    /// Refuse processes that ask for more than this, and limit those that ask for nothing; same keys
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_limit)]
    max_limit: Vec<(Resource, u64)>,

    /// Refuse to start more in one session: processes=50; or memory=8G, pids=1000, as the sums of the
    /// limits of its processes
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_quota)]
    session_limit: Vec<(QuotaKey, u64)>,

    /// Refuse to start more on the whole server; same keys as --session-limit
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_quota)]
    server_limit: Vec<(QuotaKey, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QuotaKey {
    Processes,
    Memory,
    Pids,
}

impl ServerLimits {
    pub(crate) fn config(&self) -> anyhow::Result<LimitConfig> {
        let limits = |pairs: &[(Resource, u64)]| {
            let mut limits = ResourceLimits::default();
            pairs.iter().for_each(|&(resource, value)| limits.set(resource, Some(value)));
            limits
        };
        let quota = |pairs: &[(QuotaKey, u64)]| {
            let mut quota = Quota::default();
            for &(key, value) in pairs {
                let member = match key {
                    QuotaKey::Processes => &mut quota.processes,
                    QuotaKey::Memory => &mut quota.memory_bytes,
                    QuotaKey::Pids => &mut quota.pids,
                };
                *member = Some(value);
            }
            quota
        };
        let mut config = LimitConfig::default();
        config.default = limits(&self.limit);
        config.max = limits(&self.max_limit);
        config.session = quota(&self.session_limit);
        config.server = quota(&self.server_limit);
        for (key, resource) in
            [(QuotaKey::Memory, Resource::Memory), (QuotaKey::Pids, Resource::Pids)]
        {
            let has_sum =
                self.session_limit.iter().chain(&self.server_limit).any(|(found, _)| *found == key);
            let each = config.default.get(resource).or(config.max.get(resource));
            if has_sum && each.is_none() {
                let key = self::key(resource);
                anyhow::bail!(
                    "a limit on the sum of {key} needs one for each process; add --limit \
                     {key}=VALUE"
                );
            }
        }
        Ok(config)
    }
}

fn parse_limit(text: &str) -> Result<(Resource, u64), String> {
    let (name, value) = text.split_once('=').ok_or("expected KEY=VALUE, such as wall=1h")?;
    let found = Resource::ALL.iter().copied().find(|&resource| key(resource) == name);
    let resource = found.ok_or_else(|| {
        let names: Vec<_> = Resource::ALL.iter().map(|&resource| key(resource)).collect();
        format!("unknown limit `{name}`: expected {}", names.join(", "))
    })?;
    match parse_amount(resource, value)? {
        0 => Err("a limit of 0 would let nothing run".to_owned()),
        value => Ok((resource, value)),
    }
}

fn parse_quota(text: &str) -> Result<(QuotaKey, u64), String> {
    let number = |value: &str| value.parse().map_err(|_| "expected a whole number".to_owned());
    match text.split_once('=') {
        Some(("processes", value)) => Ok((QuotaKey::Processes, number(value)?)),
        Some(("memory", value)) => Ok((QuotaKey::Memory, parse_size(value)?)),
        Some(("pids", value)) => Ok((QuotaKey::Pids, number(value)?)),
        _ => Err("expected processes=N, memory=SIZE or pids=N".to_owned()),
    }
}

const UNITS: [(char, u64); 4] = [('T', 1 << 40), ('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];

/// Parses a whole number of bytes with a unit `K`, `M`, `G` or `T` (powers of 1024); without a unit, bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let error = || "expected a whole number with K, M, G or T, such as 512M".to_owned();
    let unit = text.chars().last().map(|unit| unit.to_ascii_uppercase());
    let factor = UNITS.iter().find(|(name, _)| Some(*name) == unit).map(|(_, factor)| *factor);
    let number = match factor {
        Some(_) => text.get(..text.len() - 1).unwrap_or_default(),
        None => text,
    };
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(error());
    }
    let number: u64 = number.parse().map_err(|_| error())?;
    number.checked_mul(factor.unwrap_or(1)).ok_or_else(error)
}

/// Formats a size so that [`parse_size`] reads it.
fn format_size(bytes: u64) -> String {
    let unit = UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
}

/// Parses a number of CPUs, in thousandths.
fn parse_cpus(text: &str) -> Result<u64, String> {
    let cpus: f64 = text.parse().map_err(|_| "expected a number, such as 2 or 0.5".to_owned())?;
    match (0.01..=1_000_000.0).contains(&cpus) {
        true => Ok((cpus * 1000.0).round() as u64),
        false => Err("expected at least 0.01".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_parsed_and_formatted() {
        for (resource, text) in [
            (Resource::Wall, "90s"),
            (Resource::Memory, "512M"),
            (Resource::Memory, "1000"),
            (Resource::Disk, "3T"),
            (Resource::Cpus, "0.5"),
            (Resource::Pids, "7"),
        ] {
            let parsed = parse_amount(resource, text).map(|value| amount(resource, value));
            assert_eq!(parsed.as_deref(), Ok(text));
        }
        assert_eq!(parse_size("2k"), Ok(2048));
        for bad in ["", "M", "1.5G", "-1", "+1", "12X", "99999999999999T", "é"] {
            parse_size(bad).unwrap_err();
        }
        for bad in ["wall", "wall=0", "wal=1s", "memory=x", "pids=-1", "cpus=0"] {
            parse_limit(bad).unwrap_err();
        }
        assert_eq!(parse_limit("open-files=9"), Ok((Resource::OpenFiles, 9)));
    }
}
