//! Recordings of terminals: asciicast files of version 3, read line by line.
//!
//! Invariant: no line is held that is longer than [`MAX_LINE`], and no pause is longer than [`MAX_PAUSE`] at
//! the speed of the recording.

use std::io::{BufRead, Read};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;

/// Longest line of a recording, in bytes.
pub(crate) const MAX_LINE: u64 = 16 << 20;

/// Longest pause, in seconds, so that no clock overflows.
pub(crate) const MAX_PAUSE: f64 = 30.0 * 86_400.0;

#[derive(Deserialize)]
struct Header {
    version: u64,
}

/// Something that happened on the terminal, `interval` seconds after the event before it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "(f64, String, String)")]
pub(crate) struct Event {
    pub interval: f64,
    /// `o` is output; others are of no concern to a player.
    pub code: String,
    pub data: String,
}

impl From<(f64, String, String)> for Event {
    fn from((interval, code, data): (f64, String, String)) -> Self {
        Self { interval, code, data }
    }
}

impl Event {
    /// How long to wait before it.
    pub(crate) fn pause(&self, idle_limit: Option<Duration>, speed: f64) -> Duration {
        let limit = idle_limit.map_or(MAX_PAUSE, |limit| limit.as_secs_f64().min(MAX_PAUSE));
        // A word that is not a number counts as 0.
        Duration::try_from_secs_f64(self.interval.clamp(0.0, limit) / speed).unwrap_or_default()
    }
}

/// A recording whose header was read.
#[derive(Debug)]
pub(crate) struct Recording<R>(R);

impl<R: BufRead> Recording<R> {
    /// Reads the header.
    pub(crate) fn open(mut from: R) -> anyhow::Result<Self> {
        let header = next_line(&mut from)?.context("it is empty")?;
        let header: Header = serde_json::from_str(&header).context("not an asciicast")?;
        if header.version != 3 {
            bail!("it is an asciicast of version {}; expected version 3", header.version);
        }
        Ok(Self(from))
    }

    /// The next event; `None` at the end.
    pub(crate) fn next_event(&mut self) -> anyhow::Result<Option<Event>> {
        while let Some(line) = next_line(&mut self.0)? {
            if !line.trim().is_empty() && !line.starts_with('#') {
                return serde_json::from_str(&line).context("invalid event").map(Some);
            }
        }
        Ok(None)
    }
}

fn next_line(from: &mut impl BufRead) -> anyhow::Result<Option<String>> {
    let mut line = String::new();
    let len = from.take(MAX_LINE).read_line(&mut line).context("cannot read the recording")?;
    if len as u64 == MAX_LINE {
        bail!("a line has more than {MAX_LINE} bytes");
    }
    Ok((len > 0).then_some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_limited_and_scaled() {
        let pause = |interval: f64, limit, speed| {
            Event { interval, code: "o".into(), data: String::new() }.pause(limit, speed)
        };
        let second = Duration::from_secs(1);
        assert_eq!(pause(1.0, None, 1.0), second);
        assert_eq!(pause(9.0, Some(2 * second), 2.0), second);
        for odd in [-1.0, f64::NAN] {
            assert_eq!(pause(odd, None, 1.0), Duration::ZERO);
        }
        assert!(pause(f64::INFINITY, None, 0.01) < Duration::from_secs(1 << 32));
    }
}
