//! What an exec-server does on its own machine.

pub mod files;
