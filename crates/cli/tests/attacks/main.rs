//! Attacks on the sandbox through the protocol, judged by the disk and by the bytes that came out, never by
//! the server's responses.
//!
//! - `generator`: random policies, trees and attackers against a model of the contract
//! - `catalogue`: known attacks, each with a control that the legitimate operation works
//! - `repositories`: random layouts of a repository and its workspace, judged by git
//!
//! The attacker is `attacker.c`, built once with `cc`: a static program that takes its steps as
//! arguments. Everything runs as the tests' own user, and as nobody if that is root.

#![expect(clippy::unwrap_used, reason = "tests")]

mod catalogue;
mod generator;
mod program;
mod repositories;
mod server;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
#[path = "../../../sandbox/tests/support/spawn.rs"]
mod spawn;
#[expect(dead_code, reason = "shared with the tests in `it`, which use all of it")]
#[path = "../it/support.rs"]
mod support;
