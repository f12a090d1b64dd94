//! Benchmarks that print ratios: the machine is noisy, so every figure is set against a floor that
//! was measured in the same run, interleaved with it.

pub(crate) mod client;
mod files;
pub(crate) mod floor;
mod forwarder;
mod memory;
mod network;
mod placement;
mod process;
mod remote;
mod report;
mod sandbox;
mod snapshot;
pub(crate) mod target;

use clap::Args;

/// What to measure.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Only the figures whose name contains this
    #[arg(default_value = "")]
    only: String,
    /// How many times the usual number of samples to take
    #[arg(long, default_value_t = 1)]
    effort: usize,
}

pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    crate::codex::build()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut report = report::Report::new(&args.only);
    runtime.block_on(async {
        process::start_to_closed(&mut report, args.effort).await?;
        process::keystroke_echo(&mut report, args.effort).await?;
        process::stream(&mut report, args.effort).await?;
        memory::idle(&mut report).await?;
        files::small(&mut report, args.effort).await?;
        files::large(&mut report, args.effort).await?;
        files::blocks(&mut report, args.effort).await?;
        files::walk(&mut report, args.effort).await?;
        sandbox::start_to_closed(&mut report, args.effort).await?;
        sandbox::files(&mut report, args.effort).await?;
        sandbox::prepare(&mut report, args.effort)?;
        network::start_to_closed(&mut report, args.effort).await?;
        network::connections(&mut report, args.effort).await?;
        network::stream(&mut report, args.effort).await?;
        snapshot::start_to_closed(&mut report, args.effort).await?;
        remote::echo(&mut report, args.effort).await?;
        remote::echo_beside_a_flood(&mut report, args.effort).await?;
        remote::stream(&mut report, args.effort).await?;
        remote::streams(&mut report).await
    })?;
    report.finish()
}
