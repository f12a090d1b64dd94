//! Development tasks of this repository. `cargo xtask --help` lists them.

mod bench;
mod boundaries;
mod codex;
mod compatibility;
mod holes;
mod tidy;
mod torture;

use std::process::ExitCode;

use clap::Parser;

/// Development tasks of this repository
#[derive(Debug, Parser)]
#[command(name = "xtask")]
enum Task {
    /// Run benchmarks against floors measured in the same run
    Bench(bench::BenchArgs),
    /// Write docs/compatibility.md from interop/compatibility.toml
    Compatibility,
    /// Remove one protection at a time, and check that a random test finds the hole
    Holes(holes::HolesArgs),
    /// Check conventions that no compiler checks
    Tidy,
    /// Run random programs for random clients, kill processes at random, and check what remains
    Torture(torture::TortureArgs),
    /// A bare websocket peer: the floor that benchmarks measure against
    #[command(hide = true)]
    FloorServer(bench::floor::FloorArgs),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Bench(args) => bench::run(&args),
        Task::Compatibility => compatibility::run(),
        Task::Holes(args) => holes::run(&args),
        Task::Tidy => tidy::run(),
        Task::Torture(args) => torture::run(&args),
        Task::FloorServer(args) => bench::floor::serve(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
