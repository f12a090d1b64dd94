//! The program as people run it.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod rendezvous;
