//! What a server uses at one moment, and whether it grows.

use std::time::{Duration, Instant};

use crate::bench::target::Target;
use crate::torture::machine;

/// Descriptors more than at the beginning that are no growth: connections and starts of this moment.
pub(crate) const DESCRIPTORS_SLACK: usize = 48;
/// Memory that an allocator keeps of a load that is over, in bytes, besides half of the peak.
pub(crate) const DRAINED_SLACK: u64 = 32 << 20;
/// Growth of memory that does not count: a twelfth, and in bytes.
const MEMORY_SHARE: u64 = 12;
const MEMORY_SLACK: u64 = 4 << 20;

/// A moment of a server.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sample {
    /// Resident memory of the server alone, in bytes.
    pub memory: u64,
    pub descriptors: usize,
    /// Keepers with a program below them that is no spare.
    pub keepers: usize,
}

impl Sample {
    pub(crate) fn take(server: &Target) -> anyhow::Result<Self> {
        let mut keepers = machine::keepers(server.pid());
        keepers.retain(|&keeper| machine::has_program(keeper));
        Ok(Self {
            memory: server.resident()?,
            descriptors: machine::descriptors(server.pid()),
            keepers: keepers.len(),
        })
    }
}

/// What is larger in the last quarter of the samples than in the second. The first is left out: caches fill.
pub(crate) fn growth(samples: &[Sample]) -> Vec<String> {
    let quarter = samples.len() / 4;
    let (early, late) = (&samples[quarter..2 * quarter], &samples[samples.len() - quarter..]);
    let middle = |part: &[Sample], of: fn(&Sample) -> u64| {
        let mut values: Vec<_> = part.iter().map(of).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or_default()
    };
    let compare = |name: &str, of: fn(&Sample) -> u64, slack: fn(u64) -> u64| {
        let (before, after) = (middle(early, of), middle(late, of));
        (after > before + slack(before)).then(|| format!("{name} grew from {before} to {after}"))
    };
    let memory = |before| before / MEMORY_SHARE + MEMORY_SLACK;
    let few = |_| DESCRIPTORS_SLACK as u64;
    let complaints = [
        compare("memory", |sample| sample.memory, memory),
        compare("descriptors", |sample| sample.descriptors as u64, few),
        compare("keepers", |sample| sample.keepers as u64, few),
    ];
    complaints.into_iter().flatten().collect()
}

/// Times of one kind of request, in the order they were taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct Series(pub Vec<(Instant, Duration)>);

impl Series {
    /// The time that this share of the requests took at most.
    pub(crate) fn percentile(&self, share: f64) -> Duration {
        percentile(self.0.iter().map(|(_, took)| *took).collect(), share)
    }

    /// The percentile in each of so many parts of the run.
    pub(crate) fn over_time(&self, parts: usize, share: f64) -> Vec<Duration> {
        let Some(first) = self.0.iter().map(|(at, _)| *at).min() else { return Vec::new() };
        let last = self.0.iter().map(|(at, _)| *at).max().unwrap_or(first);
        let each = (last - first).max(Duration::from_millis(1)) / parts as u32;
        let mut buckets = vec![Vec::new(); parts];
        for (at, took) in &self.0 {
            let part = ((*at - first).as_nanos() / each.as_nanos().max(1)) as usize;
            buckets[part.min(parts - 1)].push(*took);
        }
        buckets.into_iter().map(|bucket| percentile(bucket, share)).collect()
    }
}

fn percentile(mut times: Vec<Duration>, share: f64) -> Duration {
    times.sort_unstable();
    let at = (times.len() as f64 * share) as usize;
    times.get(at.min(times.len().saturating_sub(1))).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(memory: impl Fn(u64) -> u64, descriptors: impl Fn(usize) -> usize) -> Vec<Sample> {
        let sample = |n: usize| Sample {
            memory: memory(n as u64),
            descriptors: descriptors(n),
            ..Sample::default()
        };
        (0..100).map(sample).collect()
    }

    #[test]
    fn leaks_are_growth_and_noise_is_none() {
        let flat = samples(|n| (100 << 20) + ((n % 7) << 16), |n| 1000 + n % 30);
        assert_eq!(growth(&flat), Vec::<String>::new());
        let filling = samples(|n| (n.min(20)) << 20, |_| 10);
        assert_eq!(growth(&filling), Vec::<String>::new());
        assert_eq!(growth(&samples(|n| (100 << 20) + (n << 19), |_| 10)).len(), 1);
        assert_eq!(growth(&samples(|_| 1, |n| 2 * n)).len(), 1);
    }

    #[test]
    fn percentiles_are_of_the_times() {
        let now = Instant::now();
        let times = (1..=100).map(|n| (now + Duration::from_secs(n), Duration::from_millis(n)));
        let series = Series(times.collect());
        assert_eq!(series.percentile(0.5), Duration::from_millis(51));
        assert_eq!(series.percentile(0.99), Duration::from_millis(100));
        assert_eq!(series.over_time(2, 0.5).len(), 2);
        assert_eq!(Series::default().percentile(0.5), Duration::ZERO);
    }
}
