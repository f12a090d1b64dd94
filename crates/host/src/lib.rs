//! Processes and files on this machine.

pub mod machine;
pub mod process;
