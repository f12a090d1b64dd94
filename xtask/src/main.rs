//! Development tasks of this repository. `cargo xtask --help` lists them.

mod bench;
mod boundaries;
mod codex;
mod compatibility;
mod dependencies;
mod dist;
mod fuzz;
mod holes;
mod packages;
mod remap;
mod reproduce;
mod sbom;
mod schema;
mod soak;
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
    /// Make what to give to others: a static program, a tarball, a Debian package
    Dist(dist::DistArgs),
    /// Fuzz parsers in process, on stable Rust
    Fuzz(fuzz::FuzzArgs),
    /// Remove one protection at a time, and check that a random test finds the hole
    Holes(holes::HolesArgs),
    /// Build one commit twice, in two directories, and compare the programs
    Reproduce(reproduce::ReproduceArgs),
    /// Write the software bill of materials of the program, as CycloneDX JSON
    Sbom(sbom::SbomArgs),
    /// Write docs/protocol/schema.json and openrpc.json from the types of the protocol
    Schema,
    /// Load a server for an hour, and check that nothing grows
    Soak(soak::SoakArgs),
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
        Task::Dist(args) => dist::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Holes(args) => holes::run(&args),
        Task::Reproduce(args) => reproduce::run(&args),
        Task::Sbom(args) => sbom::run(&args),
        Task::Schema => schema::run(),
        Task::Soak(args) => soak::run(&args),
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
