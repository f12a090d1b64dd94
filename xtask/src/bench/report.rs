//! The table of results.

use std::time::Duration;

use anyhow::bail;

/// Whether a ratio may be at most or has to be at least something.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    AtMost(f64),
    AtLeast(f64),
    /// No goal, for information.
    None,
}

#[derive(Debug)]
pub(crate) struct Report<'a> {
    only: &'a str,
    missed: Vec<String>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(only: &'a str) -> Self {
        eprintln!("{:<44} {:>14} {:>14} {:>9}   goal", "figure", "measured", "floor", "ratio");
        Self { only, missed: Vec::new() }
    }

    /// Whether this figure is selected.
    pub(crate) fn wants(&self, figure: &str) -> bool {
        figure.contains(self.only)
    }

    pub(crate) fn figure(
        &mut self,
        name: &str,
        measured: &str,
        floor: &str,
        ratio: f64,
        goal: Goal,
    ) {
        let (met, goal) = match goal {
            Goal::AtMost(limit) => (ratio <= limit, format!("at most {limit}")),
            Goal::AtLeast(limit) => (ratio >= limit, format!("at least {limit}")),
            Goal::None => (true, String::new()),
        };
        let verdict = if met { "" } else { "  MISSED" };
        eprintln!("{name:<44} {measured:>14} {floor:>14} {ratio:>9.2}   {goal}{verdict}");
        if !met {
            self.missed.push(name.to_owned());
        }
    }

    /// Fails if a goal was missed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        if !self.missed.is_empty() {
            bail!("missed: {}", self.missed.join(", "));
        }
        Ok(())
    }
}

pub(crate) fn microseconds(time: Duration) -> String {
    format!("{:.0} µs", time.as_secs_f64() * 1e6)
}

/// The median of the samples.
pub(crate) fn p50(samples: &mut [Duration]) -> Duration {
    samples.sort_unstable();
    samples[samples.len() / 2]
}
