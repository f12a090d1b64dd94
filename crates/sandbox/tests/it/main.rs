//! The sandbox, from outside: pure decisions against an oracle, and real programs held by a real
//! kernel, as root where the tests run as root and always as an unprivileged user.

// In a test a step that fails is the failure to be reported.
#![allow(clippy::unwrap_used)]

mod aliases;
mod assurance;
mod attacks;
mod bad_input;
mod calls;
mod connections;
mod decisions;
mod denial;
mod entries;
mod kernel_trees;
mod landlock_only;
mod lifecycle;
mod managed;
mod metadata;
mod missing_directories;
mod plan_cache;
mod plans;
mod promises;
mod proof;
mod shared_pids;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod spelling;
mod support;
mod tools;
mod unlistable;
