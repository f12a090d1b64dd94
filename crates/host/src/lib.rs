//! Processes and files on this machine.

pub mod buffer;
pub mod files;
pub mod machine;
pub mod peer;
pub mod pool;
pub mod process;
