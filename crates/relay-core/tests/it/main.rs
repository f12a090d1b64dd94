//! One integration binary for the crate.

// Helpers of tests are tests too.
#![allow(clippy::unwrap_used)]

mod codec;
mod faults;
mod figures;
mod generated;
mod interop;
mod keys;
mod sim;
mod streams;
mod util;
