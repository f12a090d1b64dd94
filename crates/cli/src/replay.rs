//! `codex replay`: plays the recording of a terminal.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde::Deserialize;

use crate::exec_server::parse_duration;

/// Play a recording of codex exec-server --record
///
/// A recording consists of what a program sent to its terminal, escape sequences included, and replay sends it
/// to yours without a filter: play only recordings of programs that you would run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex replay session.cast                          as it was
  codex replay --speed 4 --idle-limit 1s session.cast   four times as fast, no pause over 1s")]
pub(crate) struct ReplayArgs {
    /// Play this many times as fast
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_speed)]
    speed: f64,

    /// Shorten pauses to this time: 500ms, 2s
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    idle_limit: Option<Duration>,

    /// The recording: an asciicast of version 3
    file: PathBuf,
}

/// Longest line of a recording, in bytes.
const MAX_LINE: u64 = 16 << 20;

/// Longest pause, so that no clock overflows.
const MAX_PAUSE: f64 = 30.0 * 86_400.0;

#[derive(Deserialize)]
struct Header {
    version: u64,
}

pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let name = args.file.display();
    let file = File::open(&args.file).with_context(|| format!("cannot open {name}"))?;
    let mut file = BufReader::new(file);
    let header = next_line(&mut file)?.with_context(|| format!("{name} is empty"))?;
    let header: Header =
        serde_json::from_str(&header).with_context(|| format!("{name} is not an asciicast"))?;
    if header.version != 3 {
        bail!("{name} is an asciicast of version {}; expected version 3", header.version);
    }
    let mut out = io::stdout().lock();
    while let Some(line) = next_line(&mut file)? {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let (interval, code, data): (f64, String, String) =
            serde_json::from_str(&line).with_context(|| format!("{name} has an invalid event"))?;
        std::thread::sleep(pause(interval, args.idle_limit, args.speed));
        if code == "o" {
            out.write_all(data.as_bytes())?;
            out.flush()?;
        }
    }
    if io::stdout().is_terminal() {
        // Default colors, visible cursor, normal screen.
        out.write_all(b"\x1b[0m\x1b[?25h\x1b[?1049l\r\n")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn next_line(file: &mut impl BufRead) -> anyhow::Result<Option<String>> {
    let mut line = String::new();
    let len = file.take(MAX_LINE).read_line(&mut line).context("cannot read the recording")?;
    if len as u64 == MAX_LINE {
        bail!("the recording has a line of more than {MAX_LINE} bytes");
    }
    Ok((len > 0).then_some(line))
}

fn pause(interval: f64, idle_limit: Option<Duration>, speed: f64) -> Duration {
    let limit = idle_limit.map_or(MAX_PAUSE, |limit| limit.as_secs_f64().min(MAX_PAUSE));
    // A word that is not a number counts as 0.
    Duration::try_from_secs_f64(interval.clamp(0.0, limit) / speed).unwrap_or_default()
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| "expected a number, such as 2".to_owned())?;
    match (0.01..=10_000.0).contains(&speed) {
        true => Ok(speed),
        false => Err("expected a number from 0.01 to 10000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_limited_and_scaled() {
        let second = Duration::from_secs(1);
        assert_eq!(pause(1.0, None, 1.0), second);
        assert_eq!(pause(9.0, Some(2 * second), 2.0), second);
        for odd in [-1.0, f64::NAN] {
            assert_eq!(pause(odd, None, 1.0), Duration::ZERO);
        }
        assert!(pause(f64::INFINITY, None, 0.01) < Duration::from_secs(1 << 32));
    }
}
