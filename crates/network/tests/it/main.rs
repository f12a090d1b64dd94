//! The managed network, from the outside.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod decisions;
mod model;
