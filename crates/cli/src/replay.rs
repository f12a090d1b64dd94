//! `codex replay`: plays the recording of a terminal.

use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use crate::asciicast::Recording;
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

pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let name = args.file.display();
    let file = File::open(&args.file).with_context(|| format!("cannot open {name}"))?;
    let invalid = || format!("cannot play {name}");
    let mut recording = Recording::open(BufReader::new(file)).with_context(invalid)?;
    let mut out = io::stdout().lock();
    while let Some(event) = recording.next_event().with_context(invalid)? {
        std::thread::sleep(event.pause(args.idle_limit, args.speed));
        if event.code == "o" {
            out.write_all(event.data.as_bytes())?;
            out.flush()?;
        }
    }
    if io::stdout().is_terminal() {
        // Default colors, visible cursor, normal screen.
        out.write_all(b"\x1b[0m\x1b[?25h\x1b[?1049l\r\n")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| "expected a number, such as 2".to_owned())?;
    match (0.01..=10_000.0).contains(&speed) {
        true => Ok(speed),
        false => Err("expected a number from 0.01 to 10000".to_owned()),
    }
}
