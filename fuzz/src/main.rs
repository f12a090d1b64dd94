//! `cargo xtask fuzz`: runs the targets in this process.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use codex_fuzz::{Engine, Failure, TARGETS, Target};

/// How many inputs are made between two looks at the clock.
const BATCH: usize = 64;

/// Run fuzz targets in this process, without nightly
#[derive(Debug, Parser)]
#[command(name = "fuzz")]
struct Args {
    /// The target; every one, one after the other, if not given
    target: Option<String>,
    /// How long to run each, in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Begin with this seed, as printed by a run that failed
    #[arg(long)]
    seed: Option<u64>,
    /// Only run this file
    #[arg(long, requires = "target")]
    replay: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let targets = match &args.target {
        None => TARGETS.to_vec(),
        Some(name) => vec![Target::find(name).ok_or_else(|| {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            anyhow::anyhow!("no fuzz target `{name}`; expected one of {}", names.join(", "))
        })?],
    };
    if let Some(file) = &args.replay {
        let input = std::fs::read(file)?;
        eprintln!("{}: outcome {}", targets[0].name, (targets[0].check)(&input));
        return Ok(());
    }
    // What a target says is in its failure.
    std::panic::set_hook(Box::new(|_| {}));
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..1 << 40));
    let mut failed = Vec::new();
    for target in targets {
        let (began, mut count) = (Instant::now(), 0);
        let mut engine = Engine::for_target(target, seed)?;
        let mut result = engine.check_corpus();
        while result.is_ok() && began.elapsed() < Duration::from_secs(args.seconds) {
            result = engine.run(BATCH);
            count += BATCH;
        }
        match result {
            Ok(()) => eprintln!("{:<16} {count:>10} inputs, {} kinds", target.name, engine.kinds()),
            Err(failure) => {
                report(target, seed, &failure)?;
                failed.push(target.name);
            }
        }
    }
    anyhow::ensure!(failed.is_empty(), "seed {seed}: {} failed", failed.join(", "));
    Ok(())
}

/// Prints the failure and saves its input.
fn report(target: Target, seed: u64, failure: &Failure) -> anyhow::Result<()> {
    let mut hasher = DefaultHasher::new();
    failure.input.hash(&mut hasher);
    let directory = std::env::current_dir()?.join("target/fuzz");
    std::fs::create_dir_all(&directory)?;
    let file = directory.join(format!("{}-{:016x}", target.name, hasher.finish()));
    std::fs::write(&file, &failure.input)?;
    let (name, shown) = (target.name, String::from_utf8_lossy(&failure.input));
    eprintln!("{name}: {}\n  seed {seed}, input {shown:?}", failure.message);
    eprintln!("  replay with: cargo xtask fuzz {name} --replay {}", file.display());
    Ok(())
}
