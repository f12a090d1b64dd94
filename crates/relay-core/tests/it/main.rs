//! One integration binary for the crate.

mod codec;
mod faults;
mod figures;
mod fresh;
mod interop;
mod keys;
mod sim;
mod streams;
mod util;
