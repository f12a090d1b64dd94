//! Soak: thousands of connections, processes, terminals and starts for an hour, and a server that does not grow.
//!
//! ```text
//!  ramp: connections, processes and terminals open ─▶ steady: starts, keystrokes, churn ─▶ drain: all of it ends
//!                                                       samples ─▶ page.rs, plot.rs (docs/reliability.md)
//! ```
//!
//! Times are figures of the machine and not judged. What is judged: that the load stays, memory, descriptors
//! and processes of the server at the end of the steady time against its beginning, and that nothing is left
//! after the drain.

mod load;
mod page;
mod plot;
mod sample;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;

use crate::bench::target::Target;
use crate::torture::machine;
use load::{Load, Sizes};
use sample::{Sample, Series};

/// How long and how much.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// How long the steady time is, in seconds
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
    /// The part of the full load: 5,000 connections, 1,000 processes, 200 terminals, 20,000 starts
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Write docs/reliability.md and its plots
    #[arg(long)]
    write: bool,
}

/// Samples of a run.
const SAMPLES: u32 = 120;

/// What one run found.
#[derive(Debug)]
pub(crate) struct Findings {
    pub sizes: Sizes,
    pub seconds: u64,
    pub samples: Vec<Sample>,
    pub starts: Series,
    pub keystrokes: Series,
    pub connects: Series,
    pub idle: Sample,
    pub drained: Sample,
}

pub(crate) fn run(args: &SoakArgs) -> anyhow::Result<()> {
    ensure!(args.scale > 0.0 && args.scale <= 10.0, "--scale is from 0 to 10");
    crate::codex::build()?;
    raise_descriptors()?;
    let sizes = Sizes::scaled(args.scale);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let findings = runtime.block_on(soak(sizes, args.seconds))?;
    eprint!("{}", page::summary(&findings));
    // Written before it is judged: a run that failed is worth looking at.
    if args.write {
        page::write(&findings)?;
    }
    findings.judge()
}

/// A connection takes a descriptor at each end, and a process several.
fn raise_descriptors() -> anyhow::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    Ok(())
}

async fn soak(sizes: Sizes, seconds: u64) -> anyhow::Result<Findings> {
    let most = (2 * sizes.connections + 1000).to_string();
    let server = Target::codex(|codex| {
        codex.args(["exec-server", "--detach-ttl", "0", "--max-connections", &most]);
        codex.args(["--max-connections-per-address", &most]);
        codex.args(["--max-waiting-connections", &most]).env("RUST_LOG", "off");
    })?;
    let load = Arc::new(Load::new(server.url.clone(), sizes));
    // What a server has at rest once it has done everything: a first start, a first terminal.
    load.warm_up().await?;
    let idle =
        settle(&server, |sample| (sample.keepers > 0).then(|| "still busy".to_owned())).await?;
    let held = load.clone().open_all().await.context("ramp")?;
    let steady = Duration::from_secs(seconds);
    let load_until = Instant::now() + steady;
    let running = load.clone().run_until(load_until, held);
    let sampled = async {
        let mut samples = Vec::new();
        for _ in 0..SAMPLES {
            tokio::time::sleep(steady / SAMPLES).await;
            samples.push(Sample::take(&server)?);
        }
        anyhow::Ok(samples)
    };
    let (ran, samples) = tokio::join!(running, sampled);
    // Every connection is closed with what this returns.
    drop(ran.context("steady")?);
    let descriptors = idle.descriptors;
    let drained = settle(&server, |sample| {
        let left = sample.descriptors.saturating_sub(descriptors);
        (left > sample::DESCRIPTORS_SLACK || sample.keepers > 0)
            .then(|| format!("{left} descriptors and {} keepers are left", sample.keepers))
    })
    .await?;
    let [starts, keystrokes, connects] = load.series();
    let samples = samples?;
    Ok(Findings { sizes, seconds, samples, starts, keystrokes, connects, idle, drained })
}

/// Waits until no check complains, and takes a sample.
async fn settle(
    server: &Target,
    complaint: impl Fn(&Sample) -> Option<String>,
) -> anyhow::Result<Sample> {
    machine::wait_until_none(|| match Sample::take(server) {
        Ok(sample) => complaint(&sample),
        Err(error) => Some(format!("{error:#}")),
    })
    .await?;
    Sample::take(server)
}

impl Findings {
    /// Fails if something grew.
    fn judge(&self) -> anyhow::Result<()> {
        // A load that went away would look like a server that does not grow.
        let fewest = self.samples.iter().map(|sample| sample.keepers).min().unwrap_or_default();
        let wanted = self.sizes.processes;
        ensure!(fewest >= wanted, "only {fewest} of {wanted} processes stayed");
        let complaints = sample::growth(&self.samples);
        ensure!(complaints.is_empty(), "{}", complaints.join("; "));
        let most = self.idle.memory + sample::DRAINED_SLACK + self.peak_memory() / 2;
        ensure!(self.drained.memory <= most, "memory of {} bytes is left", self.drained.memory);
        Ok(())
    }

    /// The most memory in any sample, in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        self.samples.iter().map(|sample| sample.memory).max().unwrap_or_default()
    }
}
