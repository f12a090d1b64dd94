//! Tests on real files, on a real kernel.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod files;
