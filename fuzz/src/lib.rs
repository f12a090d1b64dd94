//! Fuzz targets: whatever bytes another party sends, a parser does not panic, keeps its limits, and agrees with
//! itself (parse, encode, parse) and with a second parser where there is one.
//!
//! A [`Target`] is a function that panics if a promise is broken. [`Engine`] runs it in this process, on stable
//! Rust: it mutates the files of `corpus/TARGET`, and keeps an input as a parent if its outcome is of a new kind.
//! `coverage/` has the same targets for `cargo fuzz`, which needs nightly and follows coverage.

mod engine;
mod mutation;
mod targets;

use std::path::PathBuf;

pub use engine::{Engine, Failure};
pub use targets::TARGETS;

/// Something that is fuzzed.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name on the command line, and of the directory of its corpus.
    pub name: &'static str,
    /// Panics if a promise is broken; returns which kind of outcome it saw.
    pub check: fn(&[u8]) -> u64,
}

impl Target {
    /// The target with this name.
    pub fn find(name: &str) -> Option<Self> {
        TARGETS.iter().find(|target| target.name == name).copied()
    }

    /// The directory of its corpus in this repository.
    pub fn corpus(&self) -> PathBuf {
        [env!("CARGO_MANIFEST_DIR"), "corpus", self.name].iter().collect()
    }
}

/// Runs the target with this name on one input, for `cargo fuzz`.
///
/// # Panics
/// If a promise is broken, or without such a target.
pub fn check(name: &str, input: &[u8]) {
    match Target::find(name) {
        Some(target) => drop((target.check)(input)),
        None => panic!("no fuzz target {name}"),
    }
}
