//! Chores of this repository. `cargo xtask --help` lists them.

mod bench;
mod tidy;
mod torture;
mod walls;

use std::process::ExitCode;

use clap::Parser;

/// Chores of this repository
#[derive(Debug, Parser)]
#[command(name = "xtask")]
enum Chore {
    /// Measure, against floors measured in the same run
    Bench(bench::BenchArgs),
    /// Check what no compiler checks
    Tidy,
    /// Run random programs for random clients, kill at random, and see what is left
    Torture(torture::TortureArgs),
    /// A bare websocket peer: the floor that benchmarks measure against
    #[command(hide = true)]
    FloorServer(bench::floor::FloorArgs),
}

fn main() -> ExitCode {
    let done = match Chore::parse() {
        Chore::Bench(args) => bench::run(&args),
        Chore::Tidy => tidy::run(),
        Chore::Torture(args) => torture::run(&args),
        Chore::FloorServer(args) => bench::floor::serve(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
