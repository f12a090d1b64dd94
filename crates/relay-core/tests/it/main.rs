//! One integration binary for the crate.

mod figures;
mod fresh;
mod sim;
mod util;
